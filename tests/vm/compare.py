"""What others that start Fabric Manager survive, and what fmsupervisor survives: in the same virtual machine, measured.

    make compare         as root; writes docs/reliability.md

- start-fm.sh with its unit, as operators of sealed hosts run it: load the module, make the nodes, run Fabric Manager in the
  foreground, ``Type=simple``, ``Restart=on-failure``, ``RestartSec=10``.
- A unit around Fabric Manager itself as in an image that is made for this hardware: ``Restart=always``, ``RestartSec=5``,
  ``RemainAfterExit=yes``, ``SuccessExitStatus=255``; module and nodes are made before it.
- The same script under supervisord, with its defaults.

All are given what the simulated Fabric Manager does not do for itself and the real one does: /dev/nvidia-nvlink and its run
directory. Each row: a fresh machine, one of them is started, at "then" something happens, and SECONDS later it is looked at.
The driver is asked past all of them (kernel/selftest.c), the kernel about GPUs and nodes, systemd about the unit.
"""

import importlib.metadata
import io
import json
import sys
import tarfile
import time
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bed import Bed, Machine, obstacle
from scenario import (
    BEHAVIOUR,
    BOARD,
    GPUS,
    MODULES,
    SELFTEST,
    SERVICE,
    SETTINGS,
    STATUS,
    SWITCHES,
    TREE_MODULES,
    driver_of,
)

REPOSITORY = Path(__file__).resolve().parents[2]
TABLE = REPOSITORY / "docs/reliability.md"
SECONDS = 30  # the driver's 10 s, a hang of 10 s, and three starts of the unit
MACHINES = 3  # at a time


@dataclass(frozen=True)
class Contender:
    """Something that starts Fabric Manager."""

    name: str
    service: str
    unit: str = ""  # "": it is installed


_PREPARED = """#!/bin/bash
set -e
if ! grep -q '^nvidia ' /proc/modules; then insmod /usr/local/nvidia/nvidia.ko; fi
major=$(awk '$2 == "nvidia-nvswitch" { print $1 }' /proc/devices)
test -e /dev/nvidia-nvswitchctl || mknod -m 666 /dev/nvidia-nvswitchctl c $major 255
for minor in 0 1 2 3; do
  test -e /dev/nvidia-nvswitch$minor || mknod -m 666 /dev/nvidia-nvswitch$minor c $major $minor
done
# What the real Fabric Manager does for itself.
nvlink=$(awk '$2 == "nvidia-nvlink" { print $1 }' /proc/devices)
test -e /dev/nvidia-nvlink || mknod -m 666 /dev/nvidia-nvlink c $nvlink 0
mkdir -p /run/nvidia-fabricmanager
"""
_START_SCRIPT = f"""{_PREPARED}
cd /usr/local/nvidia
exec ./usr/bin/nv-fabricmanager -c /usr/local/nvidia/fm.cfg
"""
_SCRIPT_UNIT = """[Unit]
Description=Fabric Manager by a script
After=network.target
[Service]
Type=simple
ExecStart=/usr/local/nvidia/start-fm.sh
Restart=on-failure
RestartSec=10
"""
_BARE_UNIT = """[Unit]
Description=Fabric Manager by itself
[Service]
Type=simple
ExecStartPre=/usr/local/nvidia/prepare.sh
ExecStart=/usr/local/nvidia/usr/bin/nv-fabricmanager -c /usr/local/nvidia/fm.cfg
Restart=always
RestartSec=5
TimeoutSec=0
RemainAfterExit=yes
SuccessExitStatus=255
LimitCORE=infinity
"""
_SUPERVISORD_UNIT = """[Unit]
Description=supervisord
[Service]
Type=simple
ExecStart=/usr/local/bin/supervisord -n -c /etc/supervisord.conf
Restart=on-failure
"""
_SUPERVISORD_CONF = """[supervisord]
logfile=/run/supervisord.log
pidfile=/run/supervisord.pid
[program:fabricmanager]
command=/usr/local/nvidia/start-fm.sh
"""
_SUPERVISORD_RUN = """import sys
sys.path.insert(0, "/usr/local/lib/supervisord")
sys.argv[0] = sys.executable = sys.orig_argv[0]
from supervisor.supervisord import main
main()
"""
SUPERVISORD = Contender("supervisord", "supervisord.service", _SUPERVISORD_UNIT)
OURS = Contender("fmsupervisor", SERVICE)
CONTENDERS = (
    Contender("start-fm.sh, on-failure", "fabricmanager-script.service", _SCRIPT_UNIT),
    Contender("Fabric Manager, always", "fabricmanager-bare.service", _BARE_UNIT),
    SUPERVISORD,
    OURS,
)
_SETTINGS = """[switches]
expected = 4
deadline_seconds = 20
[fabric_manager]
hang_seconds = 10
"""
# A line for each change: seconds since the boot, and how many switches the driver calls configured.
_WATCH = f"""
last=; while :; do
  now=$({SELFTEST} list 2>/dev/null | grep -c driver=2); [ "$now" = "$last" ] || echo "$(cut -d' ' -f1 /proc/uptime) $now"
  last=$now; sleep 0.3
done >/run/configured
"""
_UNITS = "\n".join(
    f"cat >/etc/systemd/system/{each.service} <<'END'\n{each.unit}END" for each in CONTENDERS if each.unit
)
_PREPARE = f"""
cat >{SETTINGS} <<'END'
{_SETTINGS}END
cat >/run/watch <<'END'
{_WATCH}END
{_UNITS}
cat >/etc/supervisord.conf <<'END'
{_SUPERVISORD_CONF}END
cd /usr/local/nvidia
cat >start-fm.sh <<'END'
{_START_SCRIPT}END
cat >prepare.sh <<'END'
{_PREPARED}END
chmod 755 start-fm.sh prepare.sh && zstd -dqf {TREE_MODULES}/nvidia.ko.zst -o nvidia.ko
sed -e 's|^TOPOLOGY_FILE_PATH=.*|TOPOLOGY_FILE_PATH=/usr/local/nvidia/usr/share/nvidia/nvswitch|' \\
    -e 's|^LOG_FILE_NAME=.*|LOG_FILE_NAME=/usr/local/nvidia/fabricmanager.log|' \\
    -e 's|^STATE_FILE_NAME=.*|STATE_FILE_NAME=/usr/local/nvidia/fabricmanager.state|' \\
    -e 's|^DAEMONIZE=.*|DAEMONIZE=0|' usr/share/nvidia/nvswitch/fabricmanager.cfg >fm.cfg
systemctl daemon-reload
"""
_IS_WHOLE = f"[ $({SELFTEST} list 2>/dev/null | grep -c driver=2) = {len(SWITCHES)} ]"
_VFIO = "modprobe vfio-pci ids=10de:2335 && udevadm settle"
_MANAGER = "pgrep -f '^[^ ]*/?nv-fabricmanager( |$)'"
_SWITCH = f"/sys/bus/pci/devices/{SWITCHES[3]}"


@dataclass(frozen=True)
class Row:
    """One thing that happens. ``before``: a script before the start; ``then``: one when the fabric is configured."""

    name: str
    before: str = BOARD[0]
    then: str = ""
    behaviour: str = ""  # of the simulated Fabric Manager, as JSON
    after: float = 0.0  # seconds after the start at which ``then`` comes, where it is not the board's usual start


ROWS = (
    Row("Nothing goes wrong"),
    Row("A GPU has no driver yet", f"{BOARD[0]} && echo {GPUS[3]} >/sys/bus/pci/drivers/vfio-pci/unbind"),
    Row("One switch never appears", f"insmod {MODULES}/fake_hgx.ko absent=8 && {_VFIO}"),
    Row(
        "Two switches appear 15 s late",
        f"insmod {MODULES}/fake_hgx.ko absent=12 && {_VFIO}",
        "echo 0 >/sys/module/fake_hgx/parameters/absent; echo 1 >/sys/bus/pci/rescan",
        after=15,
    ),
    Row("The module is for another kernel", f"{BOARD[0]} && cat {MODULES}/nvidia-vermagic.ko | tee /usr/local/nvidia/nvidia.ko "
        f">{TREE_MODULES}/nvidia.ko && rm {TREE_MODULES}/nvidia.ko.zst"),
    Row("Fabric Manager of another version", behaviour='{"version": "580.159.03"}'),
    Row("Fabric Manager rejects its configuration", behaviour='{"kind": "bad-config"}'),
    Row("Nodes with the numbers of an earlier load", f"{BOARD[0]}; for m in 0 1 2 3; do mknod /dev/nvidia-nvswitch$m c 499 $m; "
        "done; mknod /dev/nvidia-nvswitchctl c 499 255"),
    Row("Fabric Manager forks away", behaviour='{"kind": "forks-away"}'),
    Row("Fabric Manager is killed", then=f"kill -KILL $({_MANAGER})"),
    Row("Fabric Manager ends with status 0", then="echo 'exit 0' >/.simulator/commands"),
    Row("Fabric Manager hangs", then="echo hang >/.simulator/commands"),
    Row("A switch is removed", then=f"echo 1 >{_SWITCH}/remove"),
    Row("A switch falls off the bus without an event", then="echo 8 >/sys/module/fake_hgx/parameters/absent"),
    Row("A fatal switch error, in the kernel log only", then="echo '3 20034 fatal 33 LTSSM Fault Up' "
        ">/sys/kernel/debug/nvidia_stub/sxid"),
    Row("The main process of the unit is killed", then="kill -KILL $(systemctl show -P MainPID $UNIT)"),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What was found at the end."""

    fabric: str
    told: str
    left: str

    def cell(self) -> str:
        return f"{self.fabric}. Told: {self.told}." + (f" **Left: {self.left}.**" if self.left else "")


def main() -> None:
    reason = obstacle()
    if reason is not None:
        sys.exit(reason)
    prepare = f"{_PREPARE}\n{_supervisord()}"
    bed = Bed(REPOSITORY / "build/vm")
    bed.build()
    try:
        lines = list(_measure_all(bed, prepare))
    finally:
        bed.close()
    TABLE.write_text(_document(lines))


def _supervisord() -> str:
    """A script that installs it; the launcher that is there runs it with our interpreter."""
    content = io.BytesIO()
    distribution = importlib.metadata.distribution("supervisor")
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for file in distribution.files or ():
            if file.parts[0] != ".." and "tests" not in file.parts and "__pycache__" not in file.parts:
                archive.add(str(distribution.locate_file(file)), str(file))
    return f"""
mkdir -p /usr/local/lib/supervisord
base64 -d <<'END' | tar -xz -C /usr/local/lib/supervisord
{b64encode(content.getvalue()).decode()}
END
cat >/usr/local/lib/fmsupervisor/run-supervisord.py <<'END'
{_SUPERVISORD_RUN}END
cp /usr/local/test/programs/supervisord /usr/local/bin/
"""


def _measure_all(bed: Bed, prepare: str) -> Iterator[str]:
    for each in CONTENDERS:  # saved before many want them at once
        bed.restore(after=(prepare, _running(each))).close()
    with ThreadPoolExecutor(MACHINES) as pool:
        begun = [(row, [pool.submit(_measure, bed, prepare, row, each) for each in CONTENDERS]) for row in ROWS]
        for row, outcomes in begun:
            line = f"| {row.name} | {' | '.join(each.result().cell() for each in outcomes)} |"
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
            yield line


def _running(each: Contender) -> str:
    """It is started and the fabric is configured."""
    return f"{BOARD[0]}\n{_started(each)}\nuntil {_IS_WHOLE}; do sleep 0.2; done\nsleep 10"


def _started(each: Contender) -> str:
    return f"""systemd-run --quiet --unit=watch bash /run/watch
cut -d' ' -f1 /proc/uptime >/run/begun
systemctl start --no-block {each.service}
"""


def _measure(bed: Bed, prepare: str, row: Row, each: Contender) -> Outcome:
    is_started = bool(row.then) and row.before == BOARD[0] and not row.behaviour
    with bed.restore(after=(prepare, _running(each)) if is_started else (prepare,)) as machine:
        if not is_started:
            if row.behaviour:
                changed = {**json.loads(machine.get(BEHAVIOUR)), **json.loads(row.behaviour)}
                machine.put(BEHAVIOUR, json.dumps(changed).encode())
            machine.check(f"{row.before}\n{_started(each)}")
        happened = None
        if row.then:
            time.sleep(row.after)
            happened = _uptime(machine)
            machine.check(f"UNIT={each.service}\n{row.then}")
        machine.check(f"sleep {SECONDS}", SECONDS + 60)
        begun = float(machine.check("cat /run/begun"))
        return Outcome(_fabric(machine, begun, happened), _told(machine, each), "; ".join(_left(machine, each)))


def _uptime(machine: Machine) -> float:
    return float(machine.check("cut -d' ' -f1 /proc/uptime"))


def _fabric(machine: Machine, begun: float, happened: float | None) -> str:
    """When the driver called all switches configured for the first time, and what became of it."""
    changes = [line.split() for line in machine.check("cat /run/configured").splitlines()]
    moments = [(float(when), int(count)) for when, count in changes]
    up = [when for when, count in moments if count == len(SWITCHES)]
    if not up:
        return f"Never up ({moments[-1][1]} of {len(SWITCHES)} switches)"
    if happened is None or up[0] > happened:
        return f"Up after {up[0] - begun:.0f} s"
    if moments[-1][1] < len(SWITCHES):
        return f"Down to {moments[-1][1]} of {len(SWITCHES)} switches"
    gaps = [when for when, _ in moments if when > happened]
    return "Stayed up" if not gaps else f"Back {up[-1] - happened:.0f} s after it"


def _told(machine: Machine, each: Contender) -> str:
    """The state of the unit, and what stands beside it."""
    shown = machine.check(f"systemctl show -P ActiveState -P SubState {each.service}").split()
    state = f"unit {'/'.join(shown)}"
    if each is OURS:
        document = json.loads(machine.get(STATUS))
        codes = sorted({row["code"] for row in document["conditions"]})
        return f"{state}; {document['state']}{''.join(f', {code}' for code in codes)}"
    loud = machine.journal("-p", "warning", f"UNIT={each.service}", "+", f"_SYSTEMD_UNIT={each.service}")
    return f"{state}; {len(loud) or 'no'} warnings in the journal"


def _left(machine: Machine, each: Contender) -> Iterator[str]:
    taken = [gpu for gpu in GPUS if driver_of(machine, gpu) == "nvidia"]
    if taken:
        yield f"GPU {', '.join(taken)} taken by nvidia"
    group = f"/sys/fs/cgroup/system.slice/{each.service}/cgroup.procs"
    if machine.run(f"for pid in $({_MANAGER}); do grep -qx $pid {group} 2>/dev/null || exit 1; done").code:
        yield "a Fabric Manager that no unit knows"
    restarts = int(machine.check(f"systemctl show -P NRestarts {each.service}"))
    if restarts:
        yield f"{restarts} restarts of the unit"
    major = machine.check("awk '$2 == \"nvidia-nvswitch\" { print $1 }' /proc/devices").strip()
    nodes = "$(ls /dev/nvidia-nvswitch* 2>/dev/null)"
    wrong = machine.run(f"for n in {nodes}; do [ $(stat -c %Hr $n) = {major or 0} ] || echo $n; done")
    if major and wrong.output.strip():
        yield f"{len(wrong.output.split())} nodes with wrong numbers"


def _document(lines: list[str]) -> str:
    date = time.strftime("%Y-%m-%d")
    table = "\n".join(lines)
    names = " | ".join(each.name for each in CONTENDERS)
    return f"""# Reliability, as measured

Measured on {date} with `make compare` (tests/vm/compare.py): what others that start Fabric Manager survive, and what
fmsupervisor survives, on a simulated HGX H200 board under a real kernel with a real systemd. Each cell is a fresh machine,
looked at {SECONDS} s after the event, or after the start where there is no event.

- **start-fm.sh**: a script that loads the module, makes the nodes and runs Fabric Manager, in a unit with `Type=simple`,
  `Restart=on-failure`, `RestartSec=10`.
- **Fabric Manager**: the program itself in a unit with `Restart=always`, `RestartSec=5`, `RemainAfterExit=yes`,
  `SuccessExitStatus=255`; the first half of the script comes before it as `ExecStartPre=`.
- **supervisord**: the script as a program with the defaults of supervisord {importlib.metadata.version("supervisor")}.

First the driver's own word on the {len(SWITCHES)} switches, and how long it took. Then who was told: the unit's state in systemd, and
beside it how many entries of the journal are warnings or worse; for fmsupervisor its state and conditions (runbook.md). In bold
what was left behind: GPUs taken from guests, processes that no unit knows, nodes with wrong numbers, restarts of the unit.

{MACHINES} machines ran at a time, without KVM, each at least ten times slower than a real one: compare the seconds with each other only.
A program of Python needs longer to start than a shell script. The scripts are given what the real Fabric Manager does for itself
and the simulated one does not: /dev/nvidia-nvlink and the run directory. No row was tried on real hardware.

| what happens | {names} |
|---|{"---|" * len(CONTENDERS)}
{table}
"""


if __name__ == "__main__":
    main()

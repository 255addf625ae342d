"""What start-fm.sh with its unit survives, and what fmsupervisor survives: both in the same virtual machine, measured.

    python tests/vm/compare.py         as root; about a quarter of an hour; writes docs/reliability.md

The script and the unit are those that operators of sealed hosts run: load the module, make the nodes, run Fabric Manager
in the foreground, ``Type=simple``, ``Restart=on-failure``, ``RestartSec=10``. They are given what the simulated Fabric
Manager does not do for itself and the real one does: /dev/nvidia-nvlink and its run directory.

Each row: a fresh machine, one of the two is started, at "then" something happens, and SECONDS later it is looked at.
The driver is asked past both of them (kernel/selftest.c), the kernel about GPUs and nodes, systemd about the unit.
"""

import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bed import Bed, Machine, obstacle
from scenario import BEHAVIOUR, BOARD, GPUS, MODULES, SELFTEST, SERVICE, SETTINGS, SWITCHES, TREE_MODULES, driver_of

REPOSITORY = Path(__file__).resolve().parents[2]
TABLE = REPOSITORY / "docs/reliability.md"
SCRIPT_SERVICE = "nvidia-fabricmanager-local.service"
UNITS = (SCRIPT_SERVICE, SERVICE)
SECONDS = 30  # the driver's 10 s, a hang of 10 s, and three starts of the unit
MACHINES = 4  # at a time

_START_SCRIPT = """#!/bin/bash
set -e
cd /usr/local/nvidia
if ! grep -q '^nvidia ' /proc/modules; then insmod ./nvidia.ko; fi
major=$(awk '$2 == "nvidia-nvswitch" { print $1 }' /proc/devices)
test -e /dev/nvidia-nvswitchctl || mknod -m 666 /dev/nvidia-nvswitchctl c $major 255
for minor in 0 1 2 3; do
  test -e /dev/nvidia-nvswitch$minor || mknod -m 666 /dev/nvidia-nvswitch$minor c $major $minor
done
# What the real Fabric Manager does for itself.
nvlink=$(awk '$2 == "nvidia-nvlink" { print $1 }' /proc/devices)
test -e /dev/nvidia-nvlink || mknod -m 666 /dev/nvidia-nvlink c $nvlink 0
mkdir -p /run/nvidia-fabricmanager
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
_PREPARE = f"""
cat >{SETTINGS} <<'END'
{_SETTINGS}END
cat >/run/watch <<'END'
{_WATCH}END
cat >/etc/systemd/system/{SCRIPT_SERVICE} <<'END'
{_SCRIPT_UNIT}END
cd /usr/local/nvidia
cat >start-fm.sh <<'END'
{_START_SCRIPT}END
chmod 755 start-fm.sh && zstd -dqf {TREE_MODULES}/nvidia.ko.zst -o nvidia.ko
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
    before: str = BOARD
    then: str = ""
    behaviour: str = ""  # of the simulated Fabric Manager, as JSON
    after: float = 0.0  # seconds after the start at which ``then`` comes, where it is not the board's usual start


ROWS = (
    Row("Nothing goes wrong"),
    Row("A GPU has no driver yet", f"{BOARD} && echo {GPUS[3]} >/sys/bus/pci/drivers/vfio-pci/unbind"),
    Row("One switch never appears", f"insmod {MODULES}/fake_hgx.ko absent=8 && {_VFIO}"),
    Row(
        "Two switches appear 15 s late",
        f"insmod {MODULES}/fake_hgx.ko absent=12 && {_VFIO}",
        "echo 0 >/sys/module/fake_hgx/parameters/absent; echo 1 >/sys/bus/pci/rescan",
        after=15,
    ),
    Row("The module is for another kernel", f"{BOARD} && cat {MODULES}/nvidia-vermagic.ko | tee /usr/local/nvidia/nvidia.ko "
        f">{TREE_MODULES}/nvidia.ko && rm {TREE_MODULES}/nvidia.ko.zst"),
    Row("Fabric Manager of another version", behaviour='{"version": "580.159.03"}'),
    Row("Fabric Manager rejects its configuration", behaviour='{"kind": "bad-config"}'),
    Row("Nodes with the numbers of an earlier load", f"{BOARD}; for m in 0 1 2 3; do mknod /dev/nvidia-nvswitch$m c 499 $m; "
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
    harm: str

    def cells(self) -> str:
        return f"{self.fabric} | {self.told} | {self.harm or 'none'}"


def main() -> None:
    reason = obstacle()
    if reason is not None:
        sys.exit(reason)
    bed = Bed(REPOSITORY / "build/vm")
    bed.build()
    try:
        for after in ("", *map(_running, UNITS)):  # saved before many want them at once
            bed.restore(after=after).close()
        with ThreadPoolExecutor(MACHINES) as pool:
            pairs = [(row, [pool.submit(_measure, bed, row, unit) for unit in UNITS]) for row in ROWS]
            lines = [_line(row, *(each.result() for each in outcomes)) for row, outcomes in pairs]
    finally:
        bed.close()
    TABLE.write_text(_document(lines))


def _running(unit: str) -> str:
    """A machine with all that is needed for both, the unit started and the fabric configured."""
    return f"{_PREPARE}\n{BOARD}\n{_started(unit)}\nuntil {_IS_WHOLE}; do sleep 0.2; done\nsleep 10"


def _started(unit: str) -> str:
    return f"""systemd-run --quiet --unit=watch bash /run/watch
cut -d' ' -f1 /proc/uptime >/run/begun
systemctl start --no-block {unit}
"""


def _line(row: Row, script: Outcome, daemon: Outcome) -> str:
    line = f"| {row.name} | {script.cells()} | {daemon.cells()} |"
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
    return line


def _measure(bed: Bed, row: Row, unit: str) -> Outcome:
    is_started = bool(row.then) and row.before == BOARD and not row.behaviour
    with bed.restore(after=_running(unit) if is_started else "") as machine:
        if not is_started:
            machine.check(_PREPARE)
            if row.behaviour:
                changed = {**json.loads(machine.get(BEHAVIOUR)), **json.loads(row.behaviour)}
                machine.put(BEHAVIOUR, json.dumps(changed).encode())
            machine.check(f"{row.before}\n{_started(unit)}")
        happened = None
        if row.then:
            time.sleep(row.after)
            happened = _uptime(machine)
            machine.check(f"UNIT={unit}\n{row.then}")
        machine.check(f"sleep {SECONDS}", SECONDS + 60)
        begun = float(machine.check("cat /run/begun"))
        return Outcome(_fabric(machine, begun, happened), _told(machine, unit), "; ".join(_harm(machine, unit)))


def _uptime(machine: Machine) -> float:
    return float(machine.check("cut -d' ' -f1 /proc/uptime"))


def _fabric(machine: Machine, begun: float, happened: float | None) -> str:
    """When the driver called all switches configured for the first time, and what became of it."""
    changes = [line.split() for line in machine.check("cat /run/configured").splitlines()]
    moments = [(float(when), int(count)) for when, count in changes]
    up = [when for when, count in moments if count == len(SWITCHES)]
    if not up:
        return f"never up ({moments[-1][1]} of {len(SWITCHES)} switches)"
    first = f"up after {up[0] - begun:.0f} s"
    if happened is None or up[0] > happened:
        return first
    if moments[-1][1] < len(SWITCHES):
        return f"{first}; then {moments[-1][1]} of {len(SWITCHES)}"
    gaps = [when for when, _ in moments if when > happened]
    return f"{first}; then stayed up" if not gaps else f"{first}; then back {up[-1] - happened:.0f} s after it"


def _told(machine: Machine, unit: str) -> str:
    """The unit's state, what stands in its status line, and warnings in its journal."""
    shown = machine.check(f"systemctl show -P ActiveState -P SubState {unit}").split()
    state = f"unit {'/'.join(shown)}"
    if unit == SERVICE:
        document = json.loads(machine.check("cat /run/fmsupervisor/status.json"))
        codes = sorted({row["code"] for row in document["conditions"]})
        return f"{state}; {document['state']}{''.join(f', {code}' for code in codes)}"
    loud = machine.journal(f"UNIT={unit}", "-p", "warning")
    return f"{state}; {len(loud)} warnings of systemd"


def _harm(machine: Machine, unit: str) -> Iterator[str]:
    taken = [gpu for gpu in GPUS if driver_of(machine, gpu) == "nvidia"]
    if taken:
        yield f"GPU {', '.join(taken)} taken by nvidia"
    group = f"/sys/fs/cgroup/system.slice/{unit}/cgroup.procs"
    if machine.run(f"for pid in $({_MANAGER}); do grep -qx $pid {group} 2>/dev/null || exit 1; done").code:
        yield "a Fabric Manager runs that no unit knows"
    restarts = int(machine.check(f"systemctl show -P NRestarts {unit}"))
    if restarts:
        yield f"{restarts} restarts of the unit"
    major = machine.check("awk '$2 == \"nvidia-nvswitch\" { print $1 }' /proc/devices").strip()
    wrong = machine.run(f"for n in /dev/nvidia-nvswitch*; do [ $(stat -c %Hr $n) = {major or 0} ] || echo $n; done")
    if major and wrong.output.strip():
        yield f"{len(wrong.output.split())} nodes with wrong numbers"


def _document(lines: list[str]) -> str:
    date = time.strftime("%Y-%m-%d")
    table = "\n".join(lines)
    return f"""# Reliability, as measured

Measured on {date} with `python tests/vm/compare.py`: what a start script with `Restart=on-failure` survives, and what
fmsupervisor survives, on a simulated HGX H200 board under a real kernel with a real systemd. Each row is a fresh machine,
looked at {SECONDS} s after the event, or after the start where there is no event.

- **fabric**: the driver's own word on the {len(SWITCHES)} switches. {MACHINES} machines without KVM ran at a time, each some ten times slower than
  a real one: compare the seconds with each other only. A program of Python needs longer to start than a shell script.
- **told**: the unit's state in systemd, and what stands beside it: for the script how many messages of systemd about it are
  warnings or worse, for fmsupervisor its state and conditions (docs/runbook.md).
- **harm**: GPUs taken from guests, processes that no unit knows, nodes with wrong numbers, restarts of the unit.

The script is given what the real Fabric Manager does for itself and the simulated one does not: /dev/nvidia-nvlink and the
run directory. No row was tried on real hardware.

| what happens | start-fm.sh: fabric | told | harm | fmsupervisor: fabric | told | harm |
|---|---|---|---|---|---|---|
{table}
"""


if __name__ == "__main__":
    main()

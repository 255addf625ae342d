"""Boots a container with a real systemd, whose root is an overlay of this machine's own.

It has a mount namespace of its own, so that nothing is left mounted, however the tests end, and its own network, pids,
journal and control groups (two that share a group would take each other's processes for their own). The shipped units
are installed as they are, and so is /usr/local/bin/fmsupervisor, which runs the working tree. Interpreter, libraries
and sources are mounted below /opt, because the units hide /home, /root and /tmp, where these may be.
"""

import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.systemd.machine import DEADLINE_SECONDS, PROGRAM, SEARCH_PATH, Machine, python_program

REPOSITORY = Path(__file__).parents[2]
UNITS = REPOSITORY / "systemd"

_NO_MOUNTS = 77  # exit status of the script below

# $1: an empty directory, $2: a script that fills the root, $3: control groups to move to, separated by spaces; the
# rest: arguments of systemd-nspawn. It ends with the thread that booted it.
_BOOT = """
set -e
bed=$1; fill=$2; groups=$3; shift 3
for group in $groups; do echo $$ >"$group/cgroup.procs"; done
mount -t tmpfs none "$bed" || exit 77
mkdir "$bed/up" "$bed/work" "$bed/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$bed/up,workdir=$bed/work" "$bed/root" || exit 77
cd "$bed/root"
. "$fill"
exec setpriv --pdeathsig TERM systemd-nspawn --quiet --boot --register=no --keep-unit --console=pipe \
  --private-network --capability=CAP_SYS_MODULE -D "$bed/root" "$@"
"""

_FILL = f"""
rm -rf etc/systemd/system/fmsupervisor.service.d etc/systemd/system/nvidia-*
mkdir -p etc/systemd/system etc/systemd/journald.conf.d usr/local/bin
printf '[Unit]\\nRequires=basic.target\\nAfter=basic.target\\nAllowIsolate=yes\\n' >etc/systemd/system/bed.target
printf '[Journal]\\nStorage=volatile\\nForwardToSyslog=no\\nForwardToConsole=no\\n' >etc/systemd/journald.conf.d/bed.conf
cp "$UNITS"/*.service "$UNITS"/*.target etc/systemd/system/
rm -f etc/fmsupervisor.toml usr/local/bin/fmsupervisor
printf '%s' "$LAUNCHER" >.{PROGRAM}
chmod 755 .{PROGRAM}
echo /opt/python/lib >etc/ld.so.conf.d/fmsupervisor-test.conf
"""


def boot(directory: Path, groups: Sequence[Path]) -> "subprocess.Popen[bytes]":
    """Start the container; its console is ``console.log`` in ``directory``."""
    (directory / "bed").mkdir()
    (directory / "fill.sh").write_text(_FILL)
    mounts = {
        os.path.realpath(sys.base_prefix): "/opt/python",
        str(REPOSITORY): "/opt/fmsupervisor",
        sysconfig.get_path("purelib"): "/opt/site-packages",
    }
    with open(directory / "console.log", "wb") as console:
        return subprocess.Popen(
            [
                *("unshare", "--mount", "--propagation", "private", "sh", "-c", _BOOT, "boot"),
                *(str(directory / "bed"), str(directory / "fill.sh"), " ".join(map(str, groups))),
                *(f"--bind-ro={source}:{target}" for source, target in mounts.items()),
                "systemd.unit=bed.target",
            ],
            env={
                "PATH": SEARCH_PATH,
                "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1",
                "UNITS": str(UNITS),
                "LAUNCHER": python_program("from fmsupervisor.cli import main\nsys.exit(main())\n"),
            },
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
        )


def _leader(nspawn: int) -> int | None:
    """The pid of the systemd that is a child of this systemd-nspawn."""
    try:
        for child in Path(f"/proc/{nspawn}/task/{nspawn}/children").read_text().split():
            if Path(f"/proc/{child}/comm").read_text().strip() == "systemd":
                return int(child)
    except (FileNotFoundError, ProcessLookupError):
        pass  # it has just ended
    return None


def wait_until_booted(container: "subprocess.Popen[bytes]", console: Path) -> Machine:
    """The machine, once its systemd has nothing left to start. Skips the test where nothing may be mounted."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline and container.poll() is None:
        leader = _leader(container.pid)
        if leader is not None:
            machine = Machine(leader)
            if machine.systemctl("is-active", "bed.target").stdout.strip() == "active":
                machine.run("ldconfig")  # an interpreter that is built with a shared library
                # systemd-nspawn's own boot id is mounted over the kernel's, and ProtectKernelTunables= uncovers that.
                machine.run("umount", "/proc/sys/kernel/random/boot_id")
                return machine
        time.sleep(0.02)
    if container.poll() == _NO_MOUNTS:
        pytest.skip("needs the right to mount tmpfs and overlay")
    raise RuntimeError(f"no systemd could be booted: {console.read_text(errors='replace')}")


@contextmanager
def control_groups(name: str) -> Iterator[list[Path]]:
    """New control groups below our own, in every hierarchy that systemd uses."""
    made = [parent / name for parent in _own_groups()]
    for group in made:
        group.mkdir()
    try:
        yield made
    finally:
        for group in made:
            for directory, _, _ in os.walk(group, topdown=False):
                os.rmdir(directory)


def _own_groups() -> Iterator[Path]:
    own = dict(re.findall(r"^\d+:(.*?):(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE))
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ")
        hierarchy = "" if kind == "cgroup2" else "name=systemd" if "name=systemd" in options else None
        if hierarchy in own and kind.startswith("cgroup"):
            yield Path(mount.split(" ")[4] + own[hierarchy])

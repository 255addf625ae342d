"""Long runs of the real daemon, measured from outside: many crashes of Fabric Manager, many successors, many kills."""

import os
import random
import re
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.continuity.daemon import Host, host

_QUICK_RESTARTS: Mapping[str, Any] = {
    "restart": {"initial_delay_seconds": 0.0, "maximum_delay_seconds": 0.0, "jitter_seconds": 0.0},
    "logging": {"relay_level": "none", "level": "error"},
}
# A Fabric Manager that tells its version, and else writes a line and dies in turn in one of these ways.
_DYING = """#!/bin/sh
case "$1" in -v|--version) echo "Fabric Manager version is : 580.126.09"; exit 0;; esac
echo "[Nov 30 2026 10:00:00] [ERROR] [tid 1] a last word" >&2
case $(($$ % 3)) in 0) exit 1;; 1) kill -KILL $$;; 2) (sleep 30 &) ; kill -SEGV $$;; esac
"""


@dataclass
class Measured:
    """What a run came to. ``faults``: promises that were broken."""

    what: str
    count: int
    seconds: float
    rss_growth_kb: int
    descriptors_before: int
    descriptors_after: int
    faults: list[str] = field(default_factory=list)

    def expect(self, promise: str, *, is_kept: bool) -> None:
        """Note a promise that was broken."""
        if not is_kept:
            self.faults.append(promise)


def rss_kb(pid: int) -> int:
    """Resident memory."""
    found = re.search(r"^VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def descriptors(pid: int) -> int:
    """How many are open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def children(pid: int) -> dict[int, str]:
    """Children of a process, with their states; a zombie is Z."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError):
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == pid:
                    found[int(name)] = fields[0]
    return found


def crashes(directory: Path, count: int, warm_up: int) -> Measured:
    """Fabric Manager dies ``count`` times, as soon as it is started; RSS is compared with that after ``warm_up``."""
    with host(directory, settings=_QUICK_RESTARTS) as one:
        binary = one.directory / "usr/local/nvidia/usr/bin/nv-fabricmanager"
        sound = binary.read_bytes()
        pid = one.start()
        one.until_configured()
        open_before = descriptors(pid)
        binary.write_text(_DYING)
        os.kill(one.manager, signal.SIGKILL)
        began = time.monotonic()

        def starts() -> int:
            return int((one.document.get("fabric_manager") or {}).get("starts") or 0)

        one.until(lambda: starts() >= warm_up)
        rss = rss_kb(pid)
        last = starts()
        while (now := starts()) < count:
            one.until(lambda: starts() > last)  # noqa: B023 - called at once
            last = now
        seconds = time.monotonic() - began
        binary.write_bytes(sound)
        one.until_configured()
        one.until(lambda: list(children(pid)) == [one.manager])
        measured = Measured(
            "crashes of Fabric Manager", count, seconds, rss_kb(pid) - rss, open_before, descriptors(pid)
        )
        document = one.document["fabric_manager"]
        died = sum(document["exits"].values())
        measured.expect(f"{document['starts']} starts, {died} exits counted", is_kept=document["starts"] == died + 1)
        measured.expect("RSS grew by 1 MB or more", is_kept=measured.rss_growth_kb < 1024)
        measured.expect("descriptors leaked", is_kept=measured.descriptors_after <= open_before)
        one.stop()
        measured.expect(f"processes left: {one.processes()}", is_kept=not one.processes())
        return measured


def successors(directory: Path, count: int) -> Measured:
    """So many new versions go on in one process, under one Fabric Manager, which writes before and after each."""
    with host(directory) as one:
        package = one.install_own_program()
        log = one.directory / "usr/local/nvidia/fabricmanager.log"
        pid = one.start()
        one.until_configured()
        one.until(lambda: one.document["fabric_manager"]["gpus_registered"] == 8)
        manager, lines = one.manager, one.metric("fabricmanager_log_lines_total")
        _succeed(one, package, 0)
        rss, open_before = rss_kb(pid), descriptors(pid)
        began = time.monotonic()
        for number in range(1, count + 1):
            with log.open("a") as file:
                file.write(f"[Nov 30 2026 10:00:00] [INFO] [tid 1] multicast group {number} is allocated.\n")
            _succeed(one, package, number)
        seconds = time.monotonic() - began
        one.until(lambda: one.metric("fabricmanager_log_lines_total") >= lines + count)
        one.until(lambda: list(children(pid)) == [manager])
        measured = Measured("successors in place", count, seconds, rss_kb(pid) - rss, open_before, descriptors(pid))
        counted = one.metric("fabricmanager_log_lines_total") - lines
        measured.expect(f"{counted:g} lines counted of {count}", is_kept=counted == count)
        measured.expect("another Fabric Manager", is_kept=one.manager == manager)
        measured.expect("RSS grew by 1 MB or more", is_kept=measured.rss_growth_kb < 1024)
        measured.expect("descriptors leaked", is_kept=measured.descriptors_after <= open_before + 2)
        one.stop()
        measured.expect(f"processes left: {one.processes()}", is_kept=not one.processes())
        return measured


def _succeed(one: Host, package: Path, number: int) -> None:
    name = package / "__init__.py"
    name.write_text(re.sub(r'__version__ = ".*"', f'__version__ = "9.{number}"', name.read_text()))
    assert one.daemon is not None
    one.daemon.send_signal(signal.SIGHUP)
    one.until(lambda: one.document.get("version") == f"9.{number}")


def kills(directory: Path, count: int, seed: int = 1) -> Measured:
    """The supervisor is killed ``count`` times at random moments of its start and afterwards."""
    chance = random.Random(seed)
    with host(directory) as one:
        began = time.monotonic()
        managers: set[int] = set()
        for _ in range(count):
            one.start()
            deadline = time.monotonic() + chance.uniform(0.0, 1.5)
            while time.monotonic() < deadline:
                managers |= {one.manager} - {0}
                time.sleep(0.01)
            one.crash()
        pid = one.start()
        one.until_configured()
        managers.add(one.manager)
        measured = Measured("kills of the supervisor", count, time.monotonic() - began, 0, 0, descriptors(pid))
        measured.expect(f"several Fabric Managers: {managers}", is_kept=len(managers) == 1)
        measured.expect(f"processes: {one.processes()}", is_kept=list(one.processes()) == [one.manager])
        one.stop()
        measured.expect(f"processes left: {one.processes()}", is_kept=not one.processes())
        left = [name for _, _, names in os.walk(one.directory) for name in names if name.endswith(".new")]
        measured.expect(f"temporary files left: {left}", is_kept=not left)
        return measured

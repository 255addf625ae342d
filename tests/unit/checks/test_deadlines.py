"""Nothing that stands on a host's disk or hangs on it makes ``check`` wait longer than it says."""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from _checked_host import build, make_context, put

from fmsupervisor.checks.finding import Verdict
from fmsupervisor.checks.programs import run_program
from fmsupervisor.checks.registry import GUEST_CHECKS, HOST_CHECKS
from fmsupervisor.checks.runner import LIMIT_SECONDS, Result, run_checks
from fmsupervisor.host.root import HostRoot
from fmsupervisor.simulator import pci_bus
from fmsupervisor.simulator.hardware import GPUS
from fmsupervisor.simulator.tree import PREFIX

MANY = 50_000  # of each kind
SLACK = 1.5  # times a deadline: a thread that has nothing to do is woken late on a busy machine
HANGING = "#!/bin/sh\nexec /bin/sleep 600\n"


class CrowdedRoot(HostRoot):
    """One directory has a hundred thousand names that look like what is searched for, and nothing behind them."""

    crowded = ""

    def list_directory(self, logical: str) -> list[str] | None:
        if logical != self.crowded:
            return super().list_directory(logical)
        names = [*(super().list_directory(logical) or ()), *(str(number) for number in range(MANY))]
        return sorted([*names, *(f"{number}.conf" for number in range(MANY))])


def in_time(results: tuple[Result, ...]) -> bool:
    return all(result.seconds <= result.check.timeout_seconds * SLACK for result in results)


@pytest.mark.parametrize(
    "path",
    [
        "/proc",
        "/sys/bus/pci/devices",
        "/etc/modprobe.d",
        "/etc/apt/apt.conf.d",
        "/etc/systemd/system",
        f"{PREFIX}/usr/lib64",
    ],
)
def test_a_directory_of_a_hundred_thousand_names(tmp_path, path: str) -> None:
    root = build(tmp_path)
    root.make_directory(path)
    context = make_context(tmp_path)
    context.root = crowded = CrowdedRoot(root.directory)
    crowded.crowded = path
    began = time.monotonic()
    report = run_checks(context, HOST_CHECKS)
    assert time.monotonic() - began < LIMIT_SECONDS * SLACK
    assert in_time(report.results)
    assert len(report.results) == len(HOST_CHECKS)


def test_pipes_and_sparse_files_in_all_the_large_places(tmp_path) -> None:
    root = build(tmp_path)
    module = Path(root.path(f"{PREFIX}/usr/lib/modules/6.12.0-160000.9-default/updates/nvidia.ko.zst"))
    module.unlink()
    os.mkfifo(module)
    for path in ("/lib/modules/6.12.0-160000.28-default/modules.dep", f"{PREFIX}/usr/lib64/libnvidia-nscq.so.2"):
        os.unlink(root.path(path))
        put(root, path, b"")
        os.truncate(root.path(path), 1 << 30)
    os.unlink(root.path("/proc/net/tcp"))
    os.mkfifo(root.path("/proc/net/tcp"))
    report = run_checks(make_context(tmp_path), HOST_CHECKS)
    assert in_time(report.results)
    assert not [result for result in report.results if "took longer" in result.finding.found]


def test_programs_that_hang_cost_their_own_deadline_and_leave_nothing_behind(tmp_path) -> None:
    root = build(tmp_path)
    for function in GPUS:
        pci_bus.unbind(root, function)
        pci_bus.bind(root, function, "nvidia")
    for path in (f"{PREFIX}/usr/bin/nv-fabricmanager", "/bin/nvidia-smi"):
        put(root, path, HANGING)
        os.chmod(root.path(path), 0o755)
    timeouts = []

    def run_shortly(arguments: list[str], environment: dict[str, str], timeout: float):
        timeouts.append((os.path.basename(arguments[0]), timeout))
        return run_program(arguments, environment, timeout / 10)

    context = make_context(tmp_path, run_program=run_shortly, environment={"PATH": root.path("/bin")})
    report = run_checks(context, (*HOST_CHECKS, *GUEST_CHECKS))
    found = {result.check.name: result for result in report.results}
    assert "took longer than" in found["guest-fabric"].finding.found
    assert found["guest-fabric"].finding.verdict is Verdict.CANNOT_TELL
    assert "took longer than" in found["versions"].finding.found
    deadlines = {"nv-fabricmanager": "module-builds", "nvidia-smi": "guest-fabric"}
    assert [name for name, _ in timeouts] == list(deadlines)
    for name, timeout in timeouts:
        assert timeout < found[deadlines[name]].check.timeout_seconds
    assert sum(timeout for _, timeout in timeouts) < LIMIT_SECONDS
    assert str(tmp_path) not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


def test_a_healthy_host_needs_a_fraction_of_five_seconds(tmp_path) -> None:
    """Of the processor: what a busy machine adds is not the command's."""
    root = build(tmp_path)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "fmsupervisor", "check", "--json", "--root", root.directory]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert json.loads(done.stdout)["exit_status"] == 0, done.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5.0 / 2

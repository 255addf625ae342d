"""Any file may be unreadable, empty, binary, cut, absent, a directory, a pipe, or huge: every check still answers.

What cannot be looked at makes a check say that it cannot tell, and never that something is well or wrong.
"""

import os
import shutil

import pytest
from _checked_host import build, make_context, put

from fmsupervisor.checks.finding import Finding, Verdict
from fmsupervisor.checks.registry import GUEST_CHECKS, HOST_CHECKS
from fmsupervisor.checks.runner import ITSELF_FAILED, answer
from fmsupervisor.conditions import Code
from fmsupervisor.errors import CannotObserve
from fmsupervisor.host.root import HostRoot
from fmsupervisor.simulator.hardware import SWITCHES
from fmsupervisor.simulator.kernel import SimulatedKernel
from fmsupervisor.simulator.tree import VERSION


class RecordingRoot(HostRoot):
    """Remembers which files were read."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self.read: dict[str, None] = {}

    def path(self, logical: str) -> str:
        self.read[logical] = None
        return super().path(logical)


class FailingRoot(HostRoot):
    """One path, with everything below it, cannot be read: an input/output error, as of a dying disk."""

    def __init__(self, directory: str, failing: str) -> None:
        super().__init__(directory)
        self.failing = failing

    def path(self, logical: str) -> str:
        if f"{logical}/".startswith(f"{self.failing}/"):
            raise CannotObserve(logical, "Input/output error")
        return super().path(logical)


EXTRA_FILES = {
    "/etc/needrestart/needrestart.conf": "1;\n",
    "/etc/apt/apt.conf.d/20auto-upgrades": 'APT::Periodic::Unattended-Upgrade "1";\n',
    "/usr/lib/systemd/system/nvidia-fabricmanager.service": "[Service]\nType=forking\n",
    "/usr/share/nvidia/nvswitch/fabricmanager.cfg": "DAEMONIZE=1\n",
    "/sys/kernel/security/lockdown": "[none] integrity confidentiality\n",
    "/sys/module/module/parameters/sig_enforce": "N\n",
    "/sys/module/firmware_class/parameters/path": "/opt/firmware\n",
    "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c": "\6\0\0\0\0",
    "/usr/lib/modules/6.12.0-160000.28-default/symvers.gz": "not gzip",
    "/proc/cpuinfo": "flags\t: hypervisor\n",
}


def make_host(directory, *, is_loaded: bool = True) -> HostRoot:
    root = build(directory)
    if is_loaded:
        SimulatedKernel(root).load(VERSION)
    for path, text in EXTRA_FILES.items():
        put(root, path, text)
    return root


def all_findings(root: HostRoot, kernel: SimulatedKernel) -> dict[str, Finding]:
    context = make_context(root.directory, node_status=kernel.node_status)
    context.root = root
    findings = {check.name: answer(check, context) for check in (*HOST_CHECKS, *GUEST_CHECKS)}
    assert all(finding.found for finding in findings.values())
    return findings


def all_failures(root: HostRoot, kernel: SimulatedKernel) -> list[str]:
    findings = all_findings(root, kernel)
    return [f"{name}: {finding.found}" for name, finding in findings.items() if ITSELF_FAILED in finding.found]


def damage(path: str, kind: str, kept: bytes = b"") -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)
    match kind:
        case "empty":
            open(path, "wb").close()
        case "binary":
            with open(path, "wb") as file:
                file.write(bytes(range(256)) * 4)
        case "words":
            with open(path, "w") as file:
                file.write("= [none :: 18446744073709551616 0x \u0663 {\n" * 20)
        case "cut":
            with open(path, "wb") as file:
                file.write(kept[: len(kept) // 2])
        case "directory":
            os.mkdir(path)
        case "pipe":
            os.mkfifo(path)
        case "loop":
            os.symlink(path, path)
        case "huge":
            with open(path, "wb") as file:
                file.truncate(1 << 40)


def interesting(root: RecordingRoot) -> list[str]:
    """Files and directories that exist and were looked at; of the many PCI functions one of each kind."""
    return [
        path
        for path in root.read
        if os.path.lexists(HostRoot.path(root, path))
        and path.count("/") > 1
        and not path.startswith(("/dev", "/lib64"))
        and not ("/0000:" in path and not any(bus in path for bus in ("0000:83:", "0000:91:")))
    ]


@pytest.mark.parametrize("kind", ["absent", "empty", "binary", "words", "cut", "directory", "pipe", "loop", "huge"])
def test_one_damaged_file_at_a_time_never_stops_a_check(tmp_path, kind: str) -> None:
    master = tmp_path / "master"
    master.mkdir()
    make_host(master)
    recording = RecordingRoot(str(master))
    kernel = SimulatedKernel(HostRoot(str(master)))
    assert all_failures(recording, kernel) == []
    paths = interesting(recording)
    assert len(paths) > 60
    for path in paths:
        real = HostRoot.path(recording, path)
        if not os.path.lexists(real):
            continue
        kept = tmp_path / "kept"
        os.rename(real, kept)
        open(real, "wb").close()
        damage(real, kind, kept.read_bytes() if kept.is_file() else b"")
        wrong = all_failures(HostRoot(str(master)), kernel)
        assert wrong == [], path
        if os.path.lexists(real):
            damage(real, "absent")
        os.rename(kept, real)


# With another answer, and a right one, although something on which it depends cannot be read.
RIGHT_ALL_THE_SAME = {
    "directories",  # of an unknown version of Fabric Manager, those are left out that only some versions have
    "module-symbols",  # without modules.dep the modules are found by looking
}


@pytest.mark.parametrize("is_loaded", [False, True], ids=["fresh", "driver-loaded"])
def test_what_cannot_be_looked_at_is_neither_good_nor_bad(tmp_path, is_loaded: bool) -> None:
    make_host(tmp_path, is_loaded=is_loaded)
    kernel = SimulatedKernel(HostRoot(str(tmp_path)))
    recording = RecordingRoot(str(tmp_path))
    healthy = all_findings(recording, kernel)
    silent = []
    for path in interesting(recording):
        changed = {
            name: finding
            for name, finding in all_findings(FailingRoot(str(tmp_path), path), kernel).items()
            if finding != healthy[name] and not (finding.verdict is Verdict.OK and name in RIGHT_ALL_THE_SAME)
        }
        assert {finding.verdict for finding in changed.values()} <= {Verdict.CANNOT_TELL}, (path, changed)
        assert all("Input/output error" in finding.found for finding in changed.values()), changed
        if not changed:
            silent.append(path)
    decisive = ("/proc/sys", "/proc/cmdline", f"/sys/bus/pci/devices/{SWITCHES[0]}", "/etc")
    assert not [path for path in silent if path.startswith(decisive)]


def test_a_tree_of_nothing_gives_answers(tmp_path) -> None:
    context = make_context(tmp_path)
    found = {check.name: answer(check, context) for check in HOST_CHECKS}
    assert found["pci"].verdict is Verdict.CANNOT_TELL
    assert not [name for name, finding in found.items() if ITSELF_FAILED in finding.found]


def test_an_unreadable_file_is_named_with_the_reason(tmp_path) -> None:
    root = build(tmp_path)

    class Failing(HostRoot):
        def read_bytes(self, logical: str, limit_bytes: int = 1 << 20) -> bytes | None:
            if logical == "/proc/cmdline":
                raise CannotObserve(logical, "Input/output error")
            return super().read_bytes(logical, limit_bytes)

    context = make_context(tmp_path)
    context.root = Failing(root.directory)
    finding = answer(next(check for check in HOST_CHECKS if Code.MODULE_BLACKLISTED in check.codes), context)
    assert (finding.verdict, finding.found) == (
        Verdict.CANNOT_TELL,
        "cannot observe /proc/cmdline: Input/output error",
    )

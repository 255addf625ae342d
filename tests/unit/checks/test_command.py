"""The command: its outputs, exit statuses, and that it works beside a running daemon and without anything."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from _checked_host import add_machine, ask, build, make_context, put

from fmsupervisor.checks import rendering
from fmsupervisor.checks.finding import Verdict
from fmsupervisor.checks.registry import HOST_CHECKS
from fmsupervisor.checks.runner import run_checks
from fmsupervisor.cli import main
from fmsupervisor.conditions import Code
from fmsupervisor.daemon_lock import InstanceLock
from fmsupervisor.host.root import HostRoot
from fmsupervisor.simulator.hardware import SWITCHES
from fmsupervisor.simulator.kernel import SimulatedKernel
from fmsupervisor.simulator.tree import VERSION

GOLDEN = Path(__file__).parents[2] / "golden"


def compare(name: str, actual: str) -> None:
    path = GOLDEN / name
    if os.environ.get("RENEW_GOLDEN"):
        path.write_text(actual)
    assert path.read_text() == actual, "read the difference; renew with RENEW_GOLDEN=1"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    def run(*arguments: str) -> tuple[int, str]:
        status = main(["check", *arguments])
        return status, capsys.readouterr().out

    return run


def say(root: HostRoot, *conditions: dict[str, str], manager: int | None = None) -> InstanceLock:
    """A daemon seems to run and to report these conditions."""
    root.make_directory("/run/fmsupervisor")
    lock = InstanceLock(root, "/run/fmsupervisor")
    lock.acquire()
    document = {
        "schema": 1,
        "pid": os.getpid(),
        "state": "degraded",
        "reason": "because",
        "fabric_manager": {"pid": manager},
        "conditions": list(conditions),
    }
    put(root, "/run/fmsupervisor/status.json", json.dumps(document))
    return lock


LOST = {
    "code": "FMS-608",
    "severity": "critical",
    "title": "GPUs lost their registration",
    "detail": "registered before the restart: 0000:91:00.0",
    "remedy": "Power-cycle the guests that hold the named GPUs.",
}


class TestOutput:
    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("check_healthy.txt", {}),
            ("check_no_switch.txt", {"switches": ()}),
            (
                "check_faults.txt",
                {
                    "switches": SWITCHES[:3],
                    "fabric_manager_version": "580.159.03",
                    "nscq_needs": ("libc.so.6", "libnvsdm.so.1"),
                    "foreign_fabric_manager_pid": 4711,
                    "node_conflict": "/dev/nvidiactl",
                },
            ),
        ],
    )
    def test_the_whole_text(self, tmp_path, name: str, options: dict[str, object]) -> None:
        build(tmp_path, **options)
        compare(name, rendering.render_text(run_checks(make_context(tmp_path), HOST_CHECKS)))

    def test_json_tells_the_same(self, tmp_path) -> None:
        build(tmp_path, switches=SWITCHES[:3])
        report = run_checks(make_context(tmp_path), HOST_CHECKS)
        document = json.loads(json.dumps(rendering.document(report)))
        assert document["schema"] == 1
        assert (document["applicable"], document["exit_status"]) == (True, 1)
        (row,) = [row for row in document["checks"] if row["verdict"] == "failed"]
        assert (row["name"], row["codes"]) == ("switch-count", ["FMS-301"])
        assert row["remedy"]

    def test_no_control_character_reaches_the_terminal(self, tmp_path) -> None:
        root = build(tmp_path)
        put(root, "/sys/kernel/security/lockdown", "\x1b[2J\x07")
        put(root, "/proc/sys/kernel/modules_disabled", "\x1b]0;x\x07")
        text = rendering.render_text(run_checks(make_context(tmp_path), HOST_CHECKS))
        assert "\x1b" not in text
        assert "\\x1b" in text


class TestCommandLine:
    def test_a_machine_without_switches_is_not_applicable_and_well(self, run, tmp_path) -> None:
        build(tmp_path, switches=())
        status, out = run("--root", str(tmp_path))
        assert status == 0
        assert out.splitlines()[-1].startswith("not applicable: this machine has no NVSwitch")

    def test_this_very_machine_gets_an_answer_in_time(self) -> None:
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "fmsupervisor", "check", "--json"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert time.monotonic() - began < 30
        document = json.loads(done.stdout)
        assert done.returncode == document["exit_status"]
        has_switch = any(
            Path(path, "class").read_text().strip() == "0x068000"
            and Path(path, "vendor").read_text().strip() == "0x10de"
            for path in Path("/sys/bus/pci/devices").glob("*")
        )
        if not has_switch:
            assert (done.returncode, document["applicable"]) == (0, False)

    def test_wrong_settings_are_a_finding_and_the_rest_is_looked_at(self, run, tmp_path) -> None:
        root = build(tmp_path)
        put(root, "/etc/fmsupervisor.toml", "prefux = 1\n")
        status, out = run("--root", str(tmp_path), "--json")
        rows = {row["name"]: row for row in json.loads(out)["checks"]}
        assert status == 1
        assert rows["settings"]["codes"] == ["FMS-702"]
        assert "prefux" in rows["settings"]["found"]
        assert rows["switch-count"]["verdict"] == "ok"

    def test_guest_looks_at_a_guest(self, run, tmp_path) -> None:
        root = build(tmp_path, switches=(), gpus=())
        put(root, "/proc/cpuinfo", "flags\t: hypervisor\n")
        status, out = run("--root", str(tmp_path), "--guest")
        assert status == 0
        assert "not applicable: this machine has no GPU of NVIDIA" in out


class TestOneCondition:
    """node-problem-detector: one line; 0 does not hold, 1 holds, 2 unknown."""

    @pytest.mark.parametrize(
        ("options", "code", "status", "word"),
        [
            ({}, "FMS-301", 0, "ok"),
            ({"switches": SWITCHES[:3]}, "fms-301", 1, "problem"),
            ({"switches": SWITCHES[:3]}, "FMS-303", 0, "ok"),
            ({}, "FMS-511", 2, "unknown"),
            ({"switches": ()}, "FMS-511", 0, "ok"),
            ({"switches": ()}, "FMS-301", 0, "ok"),
            ({}, "FMS-000", 2, "no such condition"),
            ({}, "nonsense", 2, "no such condition"),
        ],
    )
    def test_one_line_and_the_status(self, run, tmp_path, options, code: str, status: int, word: str) -> None:
        build(tmp_path, **options)
        found, out = run("--root", str(tmp_path), "--condition", code)
        assert found == status
        assert word in out
        assert out.count("\n") == 1

    def test_what_cannot_be_looked_at_is_unknown(self, run, tmp_path) -> None:
        root = build(tmp_path)
        os.unlink(root.path("/proc/cmdline"))
        status, out = run("--root", str(tmp_path), "--condition", "FMS-210")
        assert (status, out.split(":")[0]) == (2, "FMS-210 unknown")

    @pytest.mark.parametrize(("code", "status"), [("FMS-608", 1), ("FMS-511", 0)])
    def test_a_running_daemon_is_believed(self, run, tmp_path, code: str, status: int) -> None:
        root = build(tmp_path)
        lock = say(root, LOST)
        assert run("--root", str(tmp_path), "--condition", code)[0] == status
        lock.release()


class TestBesideTheDaemon:
    def test_its_conditions_are_shown(self, tmp_path) -> None:
        lock = say(build(tmp_path), LOST)
        finding = ask(make_context(tmp_path), "daemon")
        assert (finding.verdict, finding.codes) == (Verdict.FAILED, (Code.REGISTRATIONS_LOST,))
        assert finding.found == "degraded: because"
        lock.release()

    def test_without_conditions_it_is_well(self, tmp_path) -> None:
        lock = say(build(tmp_path))
        assert ask(make_context(tmp_path), "daemon").verdict is Verdict.OK
        lock.release()

    def test_a_node_that_it_has_not_made_right_is_told(self, tmp_path) -> None:
        root = build(tmp_path)
        SimulatedKernel(root).load(VERSION)
        lock = say(root)
        assert ask(make_context(tmp_path), "device-nodes").codes == (Code.NODE_FAILED,)
        lock.release()

    @pytest.mark.parametrize(("started", "codes"), [(100, (Code.GUEST_RESTART_REQUIRED,)), (300, ())])
    def test_guests_older_than_fabric_manager_must_be_power_cycled(self, tmp_path, started: int, codes) -> None:
        root = build(tmp_path)
        put(root, "/proc/900/stat", "900 (nv-fabricmanage) S " + "0 " * 18 + "200 0 0\n")
        add_machine(root, 5001, started, {9: 0x91, 10: 0x92})
        lock = say(root, manager=900)
        finding = ask(make_context(tmp_path), "guests")
        assert finding.codes == codes
        assert "0000:91:00.0, 0000:92:00.0" in finding.found + "".join(finding.details)
        lock.release()

    def test_a_daemon_of_another_version_cannot_be_read(self, tmp_path) -> None:
        root = build(tmp_path)
        lock = say(root)
        put(root, "/run/fmsupervisor/status.json", json.dumps({"schema": 999, "pid": os.getpid()}))
        assert ask(make_context(tmp_path), "daemon").verdict is Verdict.CANNOT_TELL
        lock.release()


def test_a_real_disk_and_clock_can_be_asked(tmp_path) -> None:
    from fmsupervisor.checks.context import disk_of, kernel_clock_is_synchronised

    assert disk_of(HostRoot(str(tmp_path)), "/no/such/file").free_bytes > 0
    assert kernel_clock_is_synchronised() in (True, False, None)

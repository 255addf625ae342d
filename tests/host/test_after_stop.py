"""What is left of a supervisor, ended or left running: real processes, a real control group, an invented systemctl."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fmsupervisor import handover
from fmsupervisor.after_stop import after_stop
from fmsupervisor.core.state import State
from fmsupervisor.daemon_lock import InstanceLock
from fmsupervisor.fabric_manager import ownership
from fmsupervisor.fabric_manager.ownership import ManagerRecord
from fmsupervisor.facts import Moment
from fmsupervisor.host.root import HostRoot
from fmsupervisor.settings import FabricManagerSettings, ServiceSettings, Settings

DIRECTORY = "/run/fmsupervisor"
GROUP = "/no/such/fmsupervisor.service"
SETTINGS = Settings(
    service=ServiceSettings(state_directory=DIRECTORY), fabric_manager=FabricManagerSettings(stop_timeout_seconds=0.2)
)
CRASHED = {"SERVICE_RESULT": "signal"}

Execute = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def root(tmp_path: Path) -> HostRoot:
    found = HostRoot(str(tmp_path))
    found.make_directory(DIRECTORY)
    return found


@pytest.fixture
def execute() -> Iterator[Execute]:
    """Executes a process that stands for Fabric Manager, once it can be found by its token."""
    made: list[subprocess.Popen[bytes]] = []

    def begin(token: str, *, is_stubborn: bool = False) -> "subprocess.Popen[bytes]":
        how = "SIG_IGN" if is_stubborn else "SIG_DFL"
        code = f"import signal\nsignal.signal(15, signal.{how})\nprint(flush=True)\nsignal.pause()\n"
        command = [sys.executable, "-ISc", code]
        made.append(subprocess.Popen(command, env={ownership.TOKEN_VARIABLE: token}, stdout=subprocess.PIPE))
        assert made[-1].stdout is not None
        assert made[-1].stdout.readline()
        return made[-1]

    yield begin
    for process in made:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let ``systemctl list-jobs UNIT`` print this line, in which $UNIT is the unit."""

    def install(line: str) -> None:
        directory = tmp_path / "bin"
        directory.mkdir()
        program = directory / "systemctl"
        program.write_text(f'#!/bin/sh\nset -e\nUNIT="$5"\n[ "$4" = list-jobs ]\necho "{line}"\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")

    return install


def leave(root: HostRoot, token: str, *, is_stopping: bool = False) -> None:
    """What a supervisor keeps of its Fabric Manager."""
    record = ManagerRecord(token, ownership.boot_id(), Moment(0.0, 0.0))
    now = Moment(0.0, 0.0)
    state = State(settings=SETTINGS, begun=now, now=now, first_settings=SETTINGS, is_stopping=is_stopping)
    handover.save(root, DIRECTORY, record, state, (0.0, 0.0))


def is_alive(process: "subprocess.Popen[bytes]") -> bool:
    return process.poll() is None


def is_kept(root: HostRoot) -> bool:
    return root.is_file(f"{DIRECTORY}/{handover.FILE}")


@pytest.mark.parametrize(
    ("jobs", "is_ended"),
    [
        pytest.param("7 $UNIT stop running", True, id="a stop"),
        pytest.param("7 $UNIT restart running", True, id="a restart"),
        pytest.param("7 $UNIT start waiting", False, id="a start that has failed"),
        pytest.param("7 other.service stop running", False, id="a stop of another unit"),
        pytest.param("", False, id="no job"),
        pytest.param("$(exit 1)No jobs running.", False, id="no job, in words"),
    ],
)
def test_after_a_crash_it_is_systemds_jobs_that_tell_whether_it_was_a_stop(
    root: HostRoot, execute: Execute, systemctl: Callable[[str], None], jobs: str, *, is_ended: bool
) -> None:
    systemctl(jobs)
    process = execute("crashed")
    leave(root, "crashed")
    assert after_stop(root, SETTINGS, CRASHED, GROUP) == 0
    assert (is_alive(process), is_kept(root)) == (not is_ended, not is_ended)


def test_when_systemd_cannot_be_asked_fabric_manager_is_left(
    root: HostRoot,
    execute: Execute,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    process = execute("crashed")
    leave(root, "crashed")
    assert after_stop(root, SETTINGS, CRASHED, GROUP) == 0
    assert is_alive(process)
    assert is_kept(root)
    assert "cannot ask systemd" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "is_stopping"),
    [
        pytest.param({"SERVICE_RESULT": "success"}, False, id="ended in order"),
        pytest.param(CRASHED, True, id="died while it was stopping"),
        pytest.param({}, False, id="called by hand"),
    ],
)
def test_a_stop_ends_what_has_the_token_and_nothing_else(
    root: HostRoot, execute: Execute, environment: dict[str, str], *, is_stopping: bool
) -> None:
    ours, child, foreign = execute("stopped"), execute("stopped", is_stubborn=True), execute("of another")
    leave(root, "stopped", is_stopping=is_stopping)
    assert after_stop(root, SETTINGS, environment, GROUP) == 0
    assert (ours.wait(30), child.wait(30)) == (-signal.SIGTERM, -signal.SIGKILL)
    assert is_alive(foreign)
    assert not is_kept(root)


def test_a_stop_ends_everything_in_the_units_control_group(root: HostRoot, execute: Execute, tmp_path: Path) -> None:
    process, below, outside = execute("in the group"), execute("below it"), execute("outside")
    group = tmp_path / "fmsupervisor.service"
    (group / "below").mkdir(parents=True)
    (group / "cgroup.procs").write_text(f"{os.getpid()}\n{os.getppid()}\n{process.pid}\n")
    (group / "below/cgroup.procs").write_text(f"{below.pid}\n")
    assert after_stop(root, SETTINGS, {"SERVICE_RESULT": "success"}, str(group)) == 0
    assert (process.wait(30), below.wait(30)) == (-signal.SIGTERM, -signal.SIGTERM)
    assert is_alive(outside)


def test_while_a_supervisor_runs_nothing_is_ended(
    root: HostRoot, execute: Execute, capsys: pytest.CaptureFixture[str]
) -> None:
    process = execute("running")
    leave(root, "running")
    lock = InstanceLock(root, DIRECTORY)
    lock.acquire()
    try:
        assert after_stop(root, SETTINGS, {"SERVICE_RESULT": "success"}, GROUP) == 1
    finally:
        lock.release()
    assert is_alive(process)
    assert is_kept(root)
    assert f"pid {os.getpid()}" in capsys.readouterr().err


def test_without_anything_left_there_is_nothing_to_do(root: HostRoot, capsys: pytest.CaptureFixture[str]) -> None:
    assert after_stop(root, SETTINGS, {"SERVICE_RESULT": "success"}, GROUP) == 0
    assert capsys.readouterr().err == ""

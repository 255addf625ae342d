"""Faults of the daemon itself: a second one, an early end in each state, its own log and its own memory."""

import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from fmsupervisor.exit_codes import ExitCode
from fmsupervisor.simulator.hardware import SWITCHES
from tests.faults.stage import LETTERS, LOCK_FILE, PATIENCE_SECONDS, STATE_DIRECTORY, Setting, Stage

_PLAIN = Setting()
_QUIET = Setting(scenario="no-switch")
_WATCHDOG_SECONDS = 3.0


@pytest.fixture
def stages(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    with ExitStack() as opened:

        def stage(setting: Setting = _PLAIN) -> Stage:
            return opened.enter_context(Stage(tmp_path / "host", setting))

        yield stage


def second(first: Stage) -> Stage:
    """Another supervisor for the same host; not started yet."""
    other = Stage(first.directory, first.setting)
    other.errors = first.errors.with_name("second-errors")
    other.log = first.log.with_name("second-log")
    return other


def must_be_refused(other: Stage, first: Stage) -> None:
    try:
        assert other.wait() == ExitCode.ALREADY_RUNNING, other.words()
        assert f"another fmsupervisor is running (pid {first.pid})" in other.errors.read_text()
        assert "Traceback" not in other.errors.read_text()
        assert other.managers == []
    finally:
        other.close()


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.01)


class TestTwoSupervisors:
    def test_the_second_ends_with_75_and_names_the_first(self, stages: Callable[..., Stage]) -> None:
        first = stages()
        first.until_running()
        other = second(first)
        other.start(is_new=False)
        must_be_refused(other, first)
        assert first.letters.endswith("C")
        assert len(first.managers) == 1

    def test_of_many_that_are_started_at_once_one_runs(self, stages: Callable[..., Stage]) -> None:
        first = stages(_QUIET)
        first.until(lambda: first.letters == "N", "not applicable")
        assert first.end() == 0
        all_of_them = [second(first) for _ in range(4)]
        for other in all_of_them:
            other.start(is_new=False)
        processes = [other.process for other in all_of_them]
        wait_for(lambda: sum(one.poll() is not None for one in processes) == len(processes) - 1, "all but one end")
        assert [one.returncode for one in processes if one.returncode is not None] == [ExitCode.ALREADY_RUNNING] * 3
        for other in all_of_them:
            other.close()

    @pytest.mark.parametrize("what", ["lock", "directory"])
    def test_a_deleted_lock_lets_in_no_second_one(self, stages: Callable[..., Stage], what: str) -> None:
        first = stages()
        first.until_running()
        lock = first.path(LOCK_FILE)
        before = lock.stat().st_ino
        if what == "directory":
            first.path(STATE_DIRECTORY).rename(first.path("/run/deleted"))
        else:
            lock.unlink()
        first.until(lambda: lock.exists() and lock.stat().st_ino != before, "the lock is made again")
        other = second(first)
        other.start(is_new=False)
        must_be_refused(other, first)
        first.until(lambda: first.status.get("pid") == first.pid, "the status is there again")
        assert first.letters.endswith("C")


@dataclass(frozen=True, slots=True)
class End:
    """How the daemon comes to a state in which it is asked to end."""

    setting: Setting = _PLAIN
    bring: Callable[[Stage], None] = lambda _stage: None


def _crash(stage: Stage) -> None:
    stage.until_running()
    stage.crash()


def _lose_a_switch(stage: Stage) -> None:
    stage.until_running()
    stage.do("kernel", "remove_switch", SWITCHES[3])


def _be_silent(stage: Stage) -> None:
    """A Fabric Manager that starts and says nothing."""
    stage.until_running()
    program = stage.path("/usr/local/nvidia/usr/bin/nv-fabricmanager")
    real = program.with_name("real")
    real.write_text(program.read_text())
    real.chmod(0o755)
    program.write_text(f'#!/bin/sh\ncase $1 in -*v*) exec "{real}" "$@";; esac\nexec sleep 1000 "$0"\n')
    stage.crash()


def _ask_once(stage: Stage) -> None:
    stage.until(lambda: stage.letters.endswith("C"), "configured")
    os.kill(stage.pid, signal.SIGTERM)


ENDS = {
    "waiting-for-module": End(),
    "waiting-for-switches": End(Setting(scenario="switch-missing")),
    "starting": End(bring=_be_silent),
    "configuring": End(Setting(scenario="start-timeout")),
    "configured": End(bring=Stage.until_running),
    "degraded": End(bring=_lose_a_switch),
    "backoff": End(
        Setting(settings={"restart": {"initial_delay_seconds": 1000.0, "maximum_delay_seconds": 1000.0}}), _crash
    ),
    "failed": End(Setting(scenario="version-mismatch")),
    "not-applicable": End(_QUIET),
    "stopping": End(Setting(scenario="ignores-sigterm"), _ask_once),
}


class TestSigterm:
    def test_there_is_a_way_to_each_state(self) -> None:
        assert ENDS.keys() == LETTERS.keys()

    @pytest.mark.parametrize("state", ENDS)
    def test_ends_it_in_order(self, stages: Callable[..., Stage], state: str) -> None:
        stage = stages(ENDS[state].setting)
        ENDS[state].bring(stage)
        stage.until(lambda: stage.letters.endswith(LETTERS[state]), state)
        assert stage.end() == 0, stage.words()
        assert stage.letters.endswith("X")
        assert "Traceback" not in stage.errors.read_text()
        assert stage.processes() == []
        started = [line for line in stage.lines if line["event"] == "fm-started"]
        ended = [line for line in stage.lines if line["event"] == "fm-exited"]
        assert len(started) == len(ended)


class TestItsOwnLog:
    def test_that_is_full_is_counted_and_does_not_disturb(self, stages: Callable[..., Stage]) -> None:
        stage = stages(Setting(log="/dev/full"))
        stage.until(lambda: stage.status.get("state") == "configured", "configured")
        assert (stage.metric("fmsupervisor_journal_dropped_total") or 0) > 0
        assert stage.end() == 0


class TestItsOwnMemory:
    def test_that_is_short_costs_the_daemon_and_not_the_fabric(self, stages: Callable[..., Stage]) -> None:
        """It ends with a status, or hangs (a thread whose start fails makes its starter wait) until systemd kills it."""
        stage = stages()
        stage.until_running()
        manager = stage.managers[-1]
        stage.set_limit(resource.RLIMIT_AS, 1 << 20)
        for _ in range(3):
            stage.tell("traffic 2000")
        try:
            stage.wait(_WATCHDOG_SECONDS)
        except subprocess.TimeoutExpired:
            stage.end(signal.SIGKILL)
        assert stage.process.returncode != 0
        assert os.path.exists(f"/proc/{manager}"), "Fabric Manager is gone"
        before = len(stage.letters)
        stage.start(is_new=False)
        stage.until(lambda: stage.letters[before:].endswith("C"), "configured")
        stage.until(lambda: stage.status["pid"] == stage.pid, "the status of the new one")
        assert stage.status["fabric_manager"]["pid"] == manager
        assert len(stage.managers) == 1
        assert stage.end() == 0
        assert stage.processes() == []


class TestReadyWhenConfigured:
    def test_systemd_is_asked_for_time_as_long_as_the_fabric_is_not(self, stages: Callable[..., Stage]) -> None:
        """Else its start time-out would end the daemon, again and again, and a degraded Fabric Manager with it."""
        settings = {"service": {"ready_when": "configured"}}
        stage = stages(Setting(scenario="version-mismatch", settings=settings, hears_systemd=True))
        assert stage.notified is not None
        stage.notified.settimeout(PATIENCE_SECONDS)
        heard: list[str] = []
        while len([line for line in heard if line.startswith("EXTEND_TIMEOUT_USEC=")]) < 3:
            lines = stage.notified.recv(1 << 16).decode().split("\n")
            if heard or lines[0].startswith("STATUS=FAILED"):
                heard += lines
        assert "READY=1" not in heard
        assert stage.end() == 0

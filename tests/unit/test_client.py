"""``status`` and ``wait``: what they make of the daemon's status file."""

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fmsupervisor.client import StatusReader
from fmsupervisor.daemon_lock import InstanceLock
from fmsupervisor.errors import CannotObserve
from fmsupervisor.exit_codes import ExitCode
from fmsupervisor.host.root import HostRoot
from fmsupervisor.settings import Settings


class FakeDaemon:
    """Holds the lock and writes the status file, as the daemon does."""

    def __init__(self, directory: Path) -> None:
        self.root = HostRoot(str(directory))
        self.root.make_directory("/run/fmsupervisor")
        self._lock = InstanceLock(self.root, "/run/fmsupervisor")
        self._writes = 0

    def begin(self) -> None:
        self._lock.acquire()

    def end(self) -> None:
        self._lock.release()

    def say(self, state: str, **changes: Any) -> None:
        self._writes += 1
        document = {
            "schema": 1, "version": "1.2.3", "pid": os.getpid(), "started_at": 1.0, "updated_at": 2.0 + self._writes,
            "state": state, "reason": f"because of {state}", "since": 2.0, "ready": state == "configured",
            "decided": True, "session": None, "steps": [], "switches": [], "gpus": [], "device_nodes": [],
            "conditions": [], "counters": {}, "fabric_manager": {"pid": None, "last_exit": None},
        }  # fmt: skip
        self.write(json.dumps(document | changes).encode())

    def write(self, content: bytes) -> None:
        self.root.write_atomically("/run/fmsupervisor/status.json", content, durable=False)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(tmp_path)
    yield fake
    fake.end()


def reader(daemon: FakeDaemon) -> StatusReader:
    return StatusReader(Settings(), daemon.root)


class TestTheExitStatusOfStatus:
    @pytest.mark.parametrize(
        ("state", "expected"),
        [
            ("configured", ExitCode.OK),
            ("degraded", ExitCode.NOT_CONFIGURED),
            ("starting", ExitCode.NOT_CONFIGURED),
            ("failed", ExitCode.NOT_CONFIGURED),
            ("not-applicable", ExitCode.NOT_CONFIGURED),
        ],
    )
    def test_is_0_when_configured_and_1_when_not(self, daemon: FakeDaemon, state: str, expected: ExitCode) -> None:
        daemon.begin()
        daemon.say(state)
        assert reader(daemon).show(as_json=False, watch=False) == expected

    def test_is_3_without_a_daemon_even_if_it_left_its_file(
        self, daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
    ) -> None:
        daemon.say("configured")
        assert reader(daemon).show(as_json=True, watch=False) == ExitCode.NO_DAEMON
        assert capsys.readouterr().out == ""

    def test_is_3_when_nothing_was_ever_there(self, tmp_path: Path) -> None:
        assert StatusReader(Settings(), HostRoot(str(tmp_path))).show(as_json=False, watch=False) == ExitCode.NO_DAEMON

    def test_is_3_while_a_new_daemon_has_not_spoken_and_the_file_is_its_predecessors(self, daemon: FakeDaemon) -> None:
        daemon.begin()
        daemon.say("configured", pid=os.getpid() + 1)
        assert reader(daemon).show(as_json=False, watch=False) == ExitCode.NO_DAEMON

    @pytest.mark.parametrize(
        "content",
        [b"", b"{", b"null", b"[]", b"7", b"\xff\xfe\x00", b'{"pid": 1}', b"[" * 100_000],
        ids=["empty", "cut-off", "null", "list", "number", "binary", "another-pid", "deep"],
    )
    def test_is_3_when_the_file_is_no_status(self, daemon: FakeDaemon, content: bytes) -> None:
        daemon.begin()
        daemon.write(content)
        assert reader(daemon).show(as_json=False, watch=False) == ExitCode.NO_DAEMON


class TestTheOutputOfStatus:
    def test_is_the_document_as_json(self, daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
        daemon.begin()
        daemon.say("degraded")
        reader(daemon).show(as_json=True, watch=False)
        assert json.loads(capsys.readouterr().out) == reader(daemon).read()

    def test_is_text_for_people(self, daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
        daemon.begin()
        daemon.say("degraded")
        reader(daemon).show(as_json=False, watch=False)
        assert capsys.readouterr().out.startswith("fabric     degraded for ")

    def test_cannot_be_made_of_a_document_of_another_version(self, daemon: FakeDaemon) -> None:
        daemon.begin()
        daemon.say("configured", schema=2)
        with pytest.raises(CannotObserve, match="schema 2"):
            reader(daemon).show(as_json=True, watch=False)

    def test_cannot_be_made_when_the_file_cannot_be_read(self, daemon: FakeDaemon) -> None:
        daemon.begin()
        os.symlink("status.json", daemon.root.path("/run/fmsupervisor/status.json"))
        with pytest.raises(CannotObserve, match=r"status\.json"):
            reader(daemon).show(as_json=True, watch=False)


class TestWait:
    @pytest.mark.parametrize("state", ["configured", "not-applicable"])
    def test_returns_0_at_once_when_there_is_nothing_to_wait_for(
        self, daemon: FakeDaemon, state: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        daemon.begin()
        daemon.say(state)
        assert reader(daemon).wait(None) == ExitCode.OK
        assert capsys.readouterr().out == f"{state}: because of {state}\n"

    @pytest.mark.parametrize("state", ["starting", "failed", "degraded", "stopping"])
    def test_returns_1_when_the_time_is_up_and_says_what_was_in_the_way(
        self, daemon: FakeDaemon, state: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        daemon.begin()
        daemon.say(state)
        assert reader(daemon).wait(0.0) == ExitCode.NOT_CONFIGURED
        assert capsys.readouterr().err == f"not configured after 0 s; {state}: because of {state}\n"

    def test_returns_3_when_no_daemon_has_come(self, daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
        assert reader(daemon).wait(0.0) == ExitCode.NO_DAEMON
        assert "no fmsupervisor is running" in capsys.readouterr().err

    def test_outlasts_a_daemon_that_comes_late_and_takes_its_time(self, daemon: FakeDaemon) -> None:
        results: list[int] = []
        waiting = threading.Thread(target=lambda: results.append(reader(daemon).wait(20.0)))
        waiting.start()
        daemon.begin()
        daemon.say("configured", pid=os.getpid() + 1)
        waiting.join(0.3)
        assert waiting.is_alive()
        daemon.say("starting")
        waiting.join(0.3)
        assert waiting.is_alive()
        daemon.say("configured")
        waiting.join(20.0)
        assert results == [ExitCode.OK]

"""One supervisor per state directory."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fmsupervisor.daemon_lock import InstanceLock
from fmsupervisor.errors import ActionFailed, ActionRefused, CannotObserve
from fmsupervisor.host.root import HostRoot

HOLD = """
import sys
from fmsupervisor.daemon_lock import InstanceLock
from fmsupervisor.host.root import HostRoot
InstanceLock(HostRoot(sys.argv[1]), "/run").acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path


def lock_in(directory: Path) -> InstanceLock:
    return InstanceLock(HostRoot(str(directory)), "/run")


@pytest.fixture
def holder(directory: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Another process that holds the lock."""
    command = [sys.executable, "-c", HOLD, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


@pytest.fixture
def strict_umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


class TestASecondSupervisor:
    def test_is_refused_and_told_the_pid_of_the_first(self, directory: Path, holder: "subprocess.Popen[bytes]") -> None:
        with pytest.raises(ActionRefused, match=rf"another fmsupervisor is running \(pid {holder.pid}\)"):
            lock_in(directory).acquire()

    def test_is_refused_in_the_same_process_too(self, directory: Path) -> None:
        first = lock_in(directory)
        first.acquire()
        with pytest.raises(ActionRefused, match=f"pid {os.getpid()}"):
            lock_in(directory).acquire()
        first.release()

    def test_may_run_when_the_first_was_killed(self, directory: Path, holder: "subprocess.Popen[bytes]") -> None:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        lock = lock_in(directory)
        lock.acquire()
        assert (directory / "run" / "lock").read_text() == f"{os.getpid()}\n"
        lock.release()

    def test_may_run_when_the_first_has_released(self, directory: Path) -> None:
        for _ in range(3):
            lock = lock_in(directory)
            lock.acquire()
            lock.release()
            lock.release()

    def test_may_run_in_another_directory(self, directory: Path, holder: "subprocess.Popen[bytes]") -> None:
        (directory / "other").mkdir()
        lock = InstanceLock(HostRoot(str(directory)), "/other")
        lock.acquire()
        lock.release()

    def test_leaves_no_descriptor_when_it_is_refused(self, directory: Path, holder: "subprocess.Popen[bytes]") -> None:
        before = os.listdir("/proc/self/fd")
        with pytest.raises(ActionRefused):
            lock_in(directory).acquire()
        assert os.listdir("/proc/self/fd") == before

    def test_is_not_refused_because_somebody_asks_whether_one_runs(self, directory: Path) -> None:
        for _ in range(50):
            lock = lock_in(directory)
            assert not lock_in(directory).is_held()
            lock.acquire()
            assert lock_in(directory).is_held()
            lock.release()


class TestTheLockFile:
    def test_is_not_followed_when_it_is_a_symbolic_link(self, directory: Path) -> None:
        (directory / "victim").write_text("precious")
        (directory / "run" / "lock").symlink_to(directory / "victim")
        with pytest.raises(ActionFailed, match="/run/lock"):
            lock_in(directory).acquire()
        assert (directory / "victim").read_text() == "precious"

    def test_that_cannot_be_made_is_an_action_that_failed(self, tmp_path: Path) -> None:
        with pytest.raises(ActionFailed, match="cannot make /run/lock: No such file or directory"):
            lock_in(tmp_path).acquire()

    def test_is_readable_by_all(self, directory: Path, strict_umask: None) -> None:
        lock = lock_in(directory)
        lock.acquire()
        lock.release()
        assert (directory / "run" / "lock").stat().st_mode & 0o777 == 0o644


class TestTheHolder:
    def test_is_the_process_that_holds_the_lock(self, directory: Path, holder: "subprocess.Popen[bytes]") -> None:
        assert lock_in(directory).holder() == holder.pid

    @pytest.mark.parametrize("content", [None, "4711\n"], ids=["no-file", "file-of-a-dead-one"])
    def test_is_nobody_when_the_lock_is_free(self, directory: Path, content: str | None) -> None:
        if content is not None:
            (directory / "run" / "lock").write_text(content)
        assert lock_in(directory).holder() is None

    def test_is_nobody_when_there_is_no_directory(self, tmp_path: Path) -> None:
        assert lock_in(tmp_path).holder() is None

    @pytest.mark.parametrize(
        "content", [b"", b"\xff\xfe", b"a pid\n", b"-1\n"], ids=["empty", "binary", "words", "minus"]
    )
    def test_is_unknown_while_the_file_does_not_say(
        self, directory: Path, holder: "subprocess.Popen[bytes]", content: bytes
    ) -> None:
        (directory / "run" / "lock").write_bytes(content)
        assert lock_in(directory).holder() == 0
        assert lock_in(directory).is_held()

    def test_cannot_be_observed_through_a_symbolic_link(self, directory: Path) -> None:
        (directory / "run" / "lock").symlink_to("lock")
        with pytest.raises(CannotObserve):
            lock_in(directory).holder()


class TestADeletedLockFile:
    def test_is_made_again_and_keeps_others_out(self, directory: Path) -> None:
        lock = lock_in(directory)
        lock.acquire()
        assert not lock.restore()
        (directory / "run" / "lock").unlink()
        before = len(os.listdir("/proc/self/fd"))
        assert lock.restore()
        assert len(os.listdir("/proc/self/fd")) == before
        with pytest.raises(ActionRefused, match=f"pid {os.getpid()}"):
            lock_in(directory).acquire()
        lock.release()
        assert lock_in(directory).holder() is None

    def test_that_another_has_made_meanwhile_is_told_and_the_old_lock_kept(self, directory: Path) -> None:
        lock, other = lock_in(directory), lock_in(directory)
        lock.acquire()
        (directory / "run" / "lock").rename(directory / "run" / "old")
        other.acquire()
        with pytest.raises(ActionRefused):
            lock.restore()
        assert lock.descriptor >= 0
        other.release()
        assert lock.restore()
        lock.release()

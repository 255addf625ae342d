"""The processes of this service: executing them, hearing from them, ending them, burying them.

One owner of every wait. A child is executed with posix_spawn, so that it gets exactly what is listed here and nothing
that Python or systemd happened to leave open: its own session (no signal of the terminal reaches it), an empty signal
mask, default signal actions, /dev/null and two pipes. A pidfd tells of its end at once.

What a child leaves behind is ours as well. This process is a child subreaper (prctl(2), PR_SET_CHILD_SUBREAPER), so
whatever a dead child had started, however detached, becomes our direct child in the same instant. It is found in
/proc/self/task/*/children, asked to end, killed if it does not listen, and waited for.

PR_SET_PDEATHSIG is not used: it fires when the spawning *thread* ends, and Fabric Manager must outlive its supervisor.
Nor may its output stand in the way: written to a pipe whose reader has died it would end it (SIGPIPE), and a reader
that does not come back would make it wait for ever. So the child that outlives us gets its end of the pipe opened for
reading too, and non-blocking: it is its own reader, and when the pipe is full, what it writes is lost. Whoever takes it
over opens /proc/<pid>/fd/1 and 2 and goes on reading. (pipe(7); opening these links makes a new description of the
same pipe, proc_pid_fd(5).)

A process that is taken over is not a child: a pidfd tells when it ends, and nothing tells how. What it leaves behind
falls to init, not to us, and is found by the variable that it was executed with (``ownership``).
"""

import asyncio
import ctypes
import errno
import fcntl
import os
import resource
import signal
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fmsupervisor.fabric_manager import ownership
from fmsupervisor.facts import ExitStatus

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_READ_BYTES = 1 << 16
_PIPE_BYTES = 1 << 20  # what may be written while nobody reads; the most that /proc/sys/fs/pipe-max-size allows
_STRAY_POLL_SECONDS = 0.1
_TAIL_LINES = 20
_TAIL_LINE_BYTES = 2000

Output = Callable[[str, bytes], None]  # source ("stdout" or "stderr") and what was read


@dataclass(frozen=True, slots=True)
class Command:
    """What to execute: real paths, the whole environment."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    outlives_us: bool = False  # its output never makes it wait, and never ends it


def become_subreaper() -> bool:
    """Let orphaned descendants become children of this process; False where the kernel refuses."""
    return bool(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def seal_descriptors() -> None:
    """Mark every descriptor above stderr close-on-exec, whoever opened it before us, and let 0 to 2 be open."""
    while (descriptor := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= 2:  # noqa: PLR2004 - stdin, stdout, stderr
        pass  # it was closed; a pipe with such a number would be in the way of the child's own
    os.close(descriptor)
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        if descriptor > 2:  # noqa: PLR2004 - stdin, stdout, stderr
            try:
                fcntl.fcntl(descriptor, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
            except OSError:
                pass  # the descriptor of the directory listing itself


class Child:
    """One running process. ``on_exit`` is called once, after its last output was delivered.

    ``pidfd`` and ``pipes`` (reading descriptor -> "stdout" or "stderr") belong to it from now on.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pid: int,
        pidfd: int,
        pipes: Mapping[int, str],
        on_output: Output,
        on_exit: Callable[[ExitStatus], None],
    ) -> None:
        self.pid = pid
        self._loop = loop
        self._pidfd = pidfd
        self._pipes = dict(pipes)
        self._on_output = on_output
        self._on_exit = on_exit
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._partial: dict[str, bytes] = {}
        loop.add_reader(self._pidfd, self._exited)
        for descriptor in self._pipes:
            loop.add_reader(descriptor, self._readable, descriptor)

    @property
    def pipes(self) -> Mapping[int, str]:
        """The open reading ends of its output."""
        return self._pipes

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines of its stderr and stdout, without empty ones."""
        partial = (_text(line) for line in self._partial.values())
        return (*self._tail, *(text for text in partial if text))

    def raise_limits(self) -> None:
        """Give it the descriptors and the core file that the hard limits allow, as NVIDIA's unit does."""
        for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE):
            try:
                _, hard = resource.prlimit(self.pid, limit)
                resource.prlimit(self.pid, limit, (hard, hard))
            except (OSError, ValueError):
                pass  # it has ended already, or may keep what it has

    def send(self, signal_number: int) -> None:
        """Send a signal; a process that has ended is no error."""
        if self._pidfd < 0:
            return
        try:
            signal.pidfd_send_signal(self._pidfd, signal_number)
        except ProcessLookupError:
            pass

    def kill_group(self) -> None:
        """SIGKILL to it and to what it has started, except for what has left its process group."""
        if self._pidfd >= 0:  # not waited for, so the group's number is not another's
            os.killpg(self.pid, signal.SIGKILL)

    def _readable(self, descriptor: int) -> None:
        if not self._read(descriptor):
            self._close_pipe(descriptor)

    def _read(self, descriptor: int) -> bool:
        """Deliver what one read gives; False at the end of the pipe."""
        try:
            content = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return True
        if content:
            self._deliver(descriptor, content)
        return bool(content)

    def _deliver(self, descriptor: int, content: bytes) -> None:
        source = self._pipes[descriptor]
        self._remember(source, content)
        self._on_output(source, content)

    def _remember(self, source: str, content: bytes) -> None:
        *lines, partial = (self._partial.get(source, b"") + content).split(b"\n")
        self._partial[source] = partial[:_TAIL_LINE_BYTES]
        self._tail.extend(text for line in lines if (text := _text(line)))

    def _close_pipe(self, descriptor: int) -> None:
        self._loop.remove_reader(descriptor)
        os.close(descriptor)
        del self._pipes[descriptor]

    def _exited(self) -> None:
        self._loop.remove_reader(self._pidfd)
        status = _wait(self.pid)
        os.close(self._pidfd)
        self._pidfd = -1  # the number may be another file's from now on
        for descriptor in tuple(self._pipes):
            self._drain(descriptor)
            self._close_pipe(descriptor)
        self._on_exit(status)

    def _drain(self, descriptor: int) -> None:
        """Deliver what is left in the pipe, at most its capacity: an orphan may go on writing."""
        for _ in range(64):
            try:
                content = os.read(descriptor, _READ_BYTES)
            except BlockingIOError:
                return
            if not content:
                return
            self._deliver(descriptor, content)


class Children:
    """All child processes of this process: the ones executed here, and the orphans that fell to us."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._known: set[int] = set()
        self._strays: str | None = None  # the token of what a process that was no child of ours has left behind
        self._hunt: _OrphanHunt | None = None

    def execute(self, command: Command, on_output: Output, on_exit: Callable[[ExitStatus, int], None]) -> Child:
        """Execute a program. ``on_exit`` gets its status and the number of processes that it left behind.

        Raises ``OSError`` when it cannot be executed.
        """

        def ended(status: ExitStatus) -> None:
            self._known.discard(child.pid)
            self._bury()
            on_exit(status, len(self.orphans()))

        pid, pipes = _spawn(command)
        pidfd = _open_pidfd(pid, pipes)
        self._known.add(pid)
        child = Child(self._loop, pid, pidfd, pipes, on_output, ended)
        return child

    def take_over(
        self,
        pid: int,
        pidfd: int,
        pipes: Mapping[int, str],
        token: str,
        on_output: Output,
        on_exit: Callable[[ExitStatus, int], None],
    ) -> Child:
        """Watch a process that was executed before this program began: by a predecessor, or by itself before execve.

        Then it is still a child, and its status will be known. ``token``: see ``ownership``.
        """
        is_child = pid in _own_children()

        def ended(status: ExitStatus) -> None:
            self._known.discard(pid)
            if not is_child:
                self._strays = token
            self._bury()
            on_exit(status, len(self.orphans()))

        if is_child:
            self._known.add(pid)
        return Child(self._loop, pid, pidfd, pipes, on_output, ended)

    def find_strays(self, token: str) -> int:
        """Look for what is left of a process that ended unseen; they are ``orphans`` from now on. Their number."""
        self._strays = token
        return len(self.orphans())

    async def run(self, command: Command, timeout_seconds: float) -> tuple[ExitStatus | None, bytes, bytes]:
        """Execute a program to its end: status (None = killed after the time-out), stdout and stderr (64 KiB each).

        What it leaves behind is killed, unless another child runs whose it might be.
        """
        collected = {"stdout": bytearray(), "stderr": bytearray()}
        done: asyncio.Future[ExitStatus] = self._loop.create_future()

        def collect(source: str, content: bytes) -> None:
            collected[source] += content[: max(0, _READ_BYTES - len(collected[source]))]

        before = set(self.orphans())
        child = self.execute(command, collect, lambda status, _orphans: done.set_result(status))
        status: ExitStatus | None = None
        try:
            status = await asyncio.wait_for(asyncio.shield(done), timeout_seconds)
        except TimeoutError:
            child.kill_group()
            await done
        except asyncio.CancelledError:  # the service ends
            child.kill_group()
            raise
        if not self._known:  # what has appeared now can be nobody else's
            self._kill(set(self.orphans()) - before)
        return status, bytes(collected["stdout"]), bytes(collected["stderr"])

    def orphans(self) -> tuple[int, ...]:
        """Processes that became ours because their parent ended, and those that a process taken over left behind."""
        own = tuple(pid for pid in _own_children() if pid not in self._known)
        if self._strays is None:
            return own
        strays = tuple(pid for pid in ownership.marked(self._strays) if pid not in own)
        if not strays:
            self._strays = None
        return own + strays

    @property
    def has_strays(self) -> bool:
        """Whether some of them are not our children, so that nothing tells of their end."""
        return self._strays is not None

    def reap(self) -> None:
        """Bury orphans that have ended; called on SIGCHLD."""
        self._bury()
        if self._hunt is not None:
            self._hunt.look()

    def _bury(self) -> None:
        for pid in self.orphans():
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                pass

    def end_orphans(self, patience_seconds: float, on_done: Callable[[], None]) -> None:
        """SIGTERM to all orphans, SIGKILL after ``patience_seconds``; ``on_done`` when none is left."""

        def done() -> None:
            self._hunt = None
            on_done()

        self._hunt = _OrphanHunt(self, self._loop, patience_seconds, done)
        self._hunt.look()

    def kill_orphans(self) -> None:
        """SIGKILL to all orphans, now."""
        self._kill(self.orphans())

    def _kill(self, pids: Iterable[int]) -> None:
        for pid in pids:
            self.send(pid, signal.SIGKILL)

    def send(self, pid: int, signal_number: int) -> None:
        """Send a signal to an orphan; one that has ended is no error."""
        if self._strays is not None and pid not in _own_children():
            ownership.signal_marked(pid, self._strays, signal_number)
            return
        try:
            os.kill(pid, signal_number)  # not recycled: a child keeps its pid until we wait for it
        except ProcessLookupError:
            pass


class _OrphanHunt:
    """Ends orphans and, since the children of a dead orphan become ours too, looks again until there is none."""

    def __init__(
        self, children: Children, loop: asyncio.AbstractEventLoop, patience_seconds: float, on_done: Callable[[], None]
    ) -> None:
        self._children = children
        self._loop = loop
        self._on_done = on_done
        self._again: asyncio.TimerHandle | None = None
        self._asked: set[int] = set()
        self._is_patient = True
        self._timer = loop.call_later(patience_seconds, self._lose_patience)

    def look(self) -> None:
        if self._again is not None:
            self._again.cancel()
        left = self._children.orphans()
        if not left:
            self._timer.cancel()
            self._on_done()
            return
        for pid in left:
            if not self._is_patient:
                self._children.send(pid, signal.SIGKILL)
            elif pid not in self._asked:
                self._asked.add(pid)
                self._children.send(pid, signal.SIGTERM)
        if self._children.has_strays:
            self._again = self._loop.call_later(_STRAY_POLL_SECONDS, self.look)

    def _lose_patience(self) -> None:
        self._is_patient = False
        self.look()


def _spawn(command: Command) -> tuple[int, dict[int, str]]:
    """Execute: its pid and the reading ends of its output. Raises ``OSError``."""
    pipes: dict[int, str] = {}
    writers: dict[str, int] = {}
    try:
        for source in ("stdout", "stderr"):
            reader, writers[source] = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(reader, False)
            pipes[reader] = source
            if command.outlives_us:
                writers[source] = _own_reader(writers[source])
        pid = os.posix_spawn(
            command.arguments[0],
            command.arguments,
            command.environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, writers["stdout"], 1),
                (os.POSIX_SPAWN_DUP2, writers["stderr"], 2),
            ],
            setsid=True,
            setsigmask=(),
            setsigdef=signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP},
        )
    except OSError:
        for descriptor in pipes:
            os.close(descriptor)
        raise
    finally:
        for descriptor in writers.values():
            os.close(descriptor)
    return pid, pipes


def _own_reader(writer: int) -> int:
    """The same pipe, open for both and non-blocking, in place of its writing end."""
    try:
        both = os.open(f"/proc/self/fd/{writer}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return writer  # without /proc: as good as any pipe
    os.close(writer)
    try:
        fcntl.fcntl(both, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    except OSError:
        pass  # above /proc/sys/fs/pipe-user-pages-soft: it stays as it is
    return both


def _open_pidfd(pid: int, pipes: Iterable[int]) -> int:
    """Of a new child. Raises ``OSError``; then the child is gone again."""
    try:
        return os.pidfd_open(pid)
    except OSError:  # no descriptor left, or a kernel before 5.3: it could be neither watched nor ended
        os.kill(pid, signal.SIGKILL)
        _wait(pid)
        for descriptor in pipes:
            os.close(descriptor)
        raise


def _text(line: bytes) -> str:
    return line[:_TAIL_LINE_BYTES].decode(errors="replace").strip()


def _wait(pid: int) -> ExitStatus:
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:
        return ExitStatus()
    if os.WIFSIGNALED(status):
        return ExitStatus(signal=os.WTERMSIG(status))
    return ExitStatus(code=os.WEXITSTATUS(status))


def _own_children() -> Sequence[int]:
    """All of them; none when they cannot be listed now (out of descriptors or memory): the next look finds them."""
    try:
        return [pid for thread in os.listdir("/proc/self/task") for pid in _children_of_thread(thread)]
    except FileNotFoundError:
        return _children_by_scan()  # a kernel without CONFIG_PROC_CHILDREN
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            return ()
        raise


def _children_of_thread(thread: str) -> list[int]:
    try:
        with open(f"/proc/self/task/{thread}/children", "rb") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError as error:
        if error.errno == errno.ESRCH:
            return []  # the thread has just ended
        if error.errno == errno.ENOENT and not os.path.exists(f"/proc/self/task/{thread}"):
            return []
        raise


def _children_by_scan() -> list[int]:
    own = os.getpid()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                after_name = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(after_name[1]) == own:
            found.append(int(name))
    return found

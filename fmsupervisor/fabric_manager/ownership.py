"""Which running process is the Fabric Manager that an earlier supervisor executed, and what has it started?

A process id says nothing: it is used again. So Fabric Manager is executed with a random token in its environment, and
a record of it is kept: before it is executed with the token alone, and then with what makes it this process and no
other: process id, start time (in clock ticks since boot, so unique together with the id), executable, control group.
It is taken over only when all of it agrees. What cannot be read, or differs, is not taken over, and said.

The token finds what the record cannot name: the Fabric Manager that was executed an instant before its supervisor was
killed, and whatever Fabric Manager has started, which inherits it. Only root can read or give it.

Sources: proc_pid_stat(5), proc_pid_environ(5), proc_pid_cgroup(5), pidfd_open(2). These are the real processes, below
/proc of this machine, also when the host is simulated.
"""

import os
import signal
from dataclasses import dataclass

from fmsupervisor.errors import CannotObserve
from fmsupervisor.facts import Moment, RenderedConfig
from fmsupervisor.settings import FabricManagerSettings

TOKEN_VARIABLE = "FMSUPERVISOR_TOKEN"  # noqa: S105 - no password

_DELETED = " (deleted)"  # what the kernel appends to the name of an executable that was replaced
_ENVIRONMENT_LIMIT_BYTES = 1 << 17
_SESSION, _START_TICKS = 3, 19  # fields 6 and 22 of stat, counted behind the parenthesised name
_DEAD = ("Z", "X", "x")


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes a process this one and no other."""

    pid: int
    start_ticks: int
    executable: str
    control_group: str


@dataclass(frozen=True, slots=True)
class ManagerRecord:
    """A Fabric Manager of ours. ``identity`` is None when it was about to be executed."""

    token: str
    boot_id: str
    started: Moment
    config: RenderedConfig | None = None
    settings: FabricManagerSettings | None = None
    identity: Identity | None = None
    session: str = ""
    has_ended: bool = False  # only what it has left behind is still being ended


class NotOurs(Exception):
    """A process that is not the recorded one, though much agrees; the text says what differs."""


def boot_id() -> str:
    """Differs from boot to boot; empty when it cannot be read."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def identify(pid: int) -> Identity:
    """The identity of a living process. Raises ``ProcessLookupError`` when there is none, ``CannotObserve``."""
    state, _, start_ticks = _stat(pid)
    if state in _DEAD:
        raise ProcessLookupError
    try:
        executable = os.readlink(f"/proc/{pid}/exe").removesuffix(_DELETED)
        with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            groups = file.read()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ProcessLookupError from error
    except OSError as error:
        raise CannotObserve(f"/proc/{pid}", error.strerror or str(error)) from error
    return Identity(pid, start_ticks, executable, groups)


def find(record: ManagerRecord) -> tuple[int, Identity] | None:
    """A pidfd of the recorded Fabric Manager and its identity; None when it runs no more.

    Raises ``NotOurs`` when a process is there that should not be taken over, ``CannotObserve`` when it cannot be told.
    """
    if record.boot_id != boot_id():
        return None
    pid = record.identity.pid if record.identity else find_unrecorded(record.token)
    if pid is None:
        return None
    try:
        pidfd = os.pidfd_open(pid)  # first: what is read of this pid below is of the process that the descriptor means
    except ProcessLookupError:
        return None
    except OSError as error:
        raise CannotObserve(f"process {pid}", error.strerror or str(error)) from error
    try:
        identity = _check(pid, record)
        signal.pidfd_send_signal(pidfd, 0)
    except ProcessLookupError:
        os.close(pidfd)
        return None
    except BaseException:
        os.close(pidfd)
        raise
    if identity is None:
        os.close(pidfd)
        return None
    return pidfd, identity


def _check(pid: int, record: ManagerRecord) -> Identity | None:
    found = identify(pid)
    recorded = record.identity
    if recorded is None:
        return found
    if found.start_ticks != recorded.start_ticks:
        return None  # another process has got its number
    if found.executable != recorded.executable:
        raise NotOurs(f"process {pid} runs {found.executable} now, and was {recorded.executable}")
    if found.control_group != recorded.control_group:
        now, was = found.control_group.strip(), recorded.control_group.strip()
        raise NotOurs(f"process {pid} is in the control group {now} now, and was in {was}")
    return found


def find_unrecorded(token: str) -> int | None:
    """The process that was executed with the token and leads its session, the oldest if there are several."""
    leaders = []
    for pid in marked(token):
        try:
            _, session, start_ticks = _stat(pid)
        except (ProcessLookupError, CannotObserve):
            continue
        if session == pid:
            leaders.append((start_ticks, pid))
    return min(leaders)[1] if leaders else None


def marked(token: str) -> tuple[int, ...]:
    """All living processes that have the token, except those whose environment cannot be read."""
    return tuple(pid for name in os.listdir("/proc") if name.isdecimal() and _is_marked(pid := int(name), token))


def signal_marked(pid: int, token: str, signal_number: int) -> None:
    """Send a signal to a process if it has the token; one that has ended, or is another by now, is no error."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if _is_marked(pid, token):
            signal.pidfd_send_signal(pidfd, signal_number)
    except (ProcessLookupError, PermissionError):
        pass
    finally:
        os.close(pidfd)


def output_of(pid: int) -> dict[int, str]:
    """New reading ends of the pipes that the process writes to, as for ``Child``; those that can be opened."""
    pipes = {}
    for number, source in ((1, "stdout"), (2, "stderr")):
        try:
            if not os.readlink(f"/proc/{pid}/fd/{number}").startswith("pipe:"):
                continue
            pipes[os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)] = source
        except OSError:
            continue
    return pipes


def _is_marked(pid: int, token: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            content = file.read(_ENVIRONMENT_LIMIT_BYTES)
    except OSError:
        return False
    return f"{TOKEN_VARIABLE}={token}".encode() in content.split(b"\0")


def _stat(pid: int) -> tuple[str, int, int]:
    """State, session and start time. Raises ``ProcessLookupError`` and ``CannotObserve``."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[_SESSION]), int(fields[_START_TICKS])
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ProcessLookupError from error
    except (OSError, IndexError, ValueError) as error:
        raise CannotObserve(f"/proc/{pid}/stat", str(error)) from error

"""Executing nv-fabricmanager, reading what it writes, ending it, and taking over one that runs.

There are two ways to come to a running Fabric Manager. ``resume``: this program has executed a new version of itself in
its place (execve keeps the children and the descriptors), and goes on at the very byte. ``adopt``: an earlier
supervisor has died. Then the log is read again from the header of its session, for the facts in it; they have been
counted and told before. ``record`` is what an adoption needs to know, and ``keep`` stores it.
"""

import asyncio
import os
import secrets
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from fmsupervisor.core.events import (
    Event,
    FabricManagerExited,
    FabricManagerStarted,
    LogRead,
    OrphansEnded,
    SpawnFailed,
)
from fmsupervisor.errors import CannotObserve
from fmsupervisor.fabric_manager import ownership, state_file
from fmsupervisor.fabric_manager.log_follow import FollowerMemory, LogFollower
from fmsupervisor.fabric_manager.log_grammar import LogParser, ParserMemory
from fmsupervisor.fabric_manager.ownership import ManagerRecord
from fmsupervisor.fabric_manager.process import Child, Children, Command
from fmsupervisor.facts import ExitStatus, LogBatch, Moment, RenderedConfig
from fmsupervisor.host.root import HostRoot
from fmsupervisor.settings import FabricManagerSettings, Settings

_LOG_TAIL_LINES = 5  # of the log, before those of its stderr, in what is told of its end
_FINAL_READS = 256  # of the log after the process has ended
_SEARCH_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


def environment(root: HostRoot, settings: FabricManagerSettings) -> dict[str, str]:
    """The whole environment of Fabric Manager: nothing of systemd's, nothing of ours."""
    variables = {"PATH": _SEARCH_PATH, "LANG": "C.UTF-8"}
    if settings.library_paths:
        variables["LD_LIBRARY_PATH"] = ":".join(root.path(path) for path in settings.library_paths)
    return variables


@dataclass(frozen=True, slots=True)
class ManagerMemory:
    """What ``resume`` needs besides the record. The descriptors are inherited."""

    pipes: tuple[tuple[int, str], ...]
    parsers: tuple[tuple[str, ParserMemory], ...]
    follower: FollowerMemory | None
    log_file: str
    log_tail: tuple[str, ...]
    stop_timeout_seconds: float

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Those that execve must not close."""
        log = (self.follower.descriptor,) if self.follower and self.follower.descriptor >= 0 else ()
        return (*(descriptor for descriptor, _ in self.pipes), *log)


class FabricManagerControl:
    """The one Fabric Manager of this service. What happens to it is told through ``feed``; ``speed``: see ``Clock``."""

    def __init__(
        self,
        root: HostRoot,
        loop: asyncio.AbstractEventLoop,
        children: Children,
        feed: Callable[[Event], None],
        *,
        keep: Callable[[], None] = lambda: None,
        speed: float = 1.0,
    ) -> None:
        self.record: ManagerRecord | None = None
        self._root = root
        self._loop = loop
        self._children = children
        self._feed = feed
        self._keep = keep
        self._speed = speed
        self._child: Child | None = None
        self._follower: LogFollower | None = None
        self._log_file = ""
        self._parsers: dict[str, LogParser] = {}
        self._log_tail: deque[str] = deque(maxlen=_LOG_TAIL_LINES)
        self._is_reading_on = False
        self._stop_timeout_seconds = 10.0

    @property
    def pids(self) -> frozenset[int]:
        """Process ids that are ours."""
        return frozenset({self._child.pid}) if self._child else frozenset()

    def start(self, settings: Settings, config: RenderedConfig | None, started: Moment, *, resiliency: bool) -> None:
        """Execute Fabric Manager with the prepared configuration."""
        manager = settings.fabric_manager
        self._stop_timeout_seconds = manager.stop_timeout_seconds
        self._log_tail.clear()
        self._follow(config.log_file if config else "")
        if self._follower is not None:
            self._follower.begin_session()
        self._parsers = {source: LogParser(source) for source in ("stdout", "stderr")}
        arguments = [self._root.path(manager.binary), "-c", self._root.path(manager.config)]
        state_problem = state_file.why_unusable(self._root, manager.state_file) if resiliency else ""
        is_resilient = resiliency and not state_problem
        if is_resilient:
            arguments.append("--restart")
        token = secrets.token_hex(16)
        variables = environment(self._root, manager) | {ownership.TOKEN_VARIABLE: token}
        record = ManagerRecord(token, ownership.boot_id(), started, config, manager)
        self._remember(record)  # before it exists: whatever happens now, it will be found
        try:
            child = self._children.execute(
                Command(tuple(arguments), variables, outlives_us=True), self._output, self._exited
            )
        except OSError as error:
            self._remember(None)
            self._feed(SpawnFailed(f"cannot execute {manager.binary}: {error.strerror}"))
            return
        self._child = child
        child.raise_limits()
        session = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{child.pid}"
        try:
            identity = ownership.identify(child.pid)
        except (ProcessLookupError, CannotObserve):
            identity = None  # it has ended already, and its exit comes next
        self._remember(replace(record, identity=identity, session=session))
        self._feed(FabricManagerStarted(child.pid, session, is_resilient, state_problem))

    def adopt(self, record: ManagerRecord, pidfd: int, identity: ownership.Identity) -> list[LogBatch]:
        """Watch the running Fabric Manager of a supervisor that has died; what its log holds since it was started."""
        self._settle(record)
        pid = identity.pid
        session = record.session or f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(record.started.wall))}-{pid}"
        self._remember(replace(record, identity=identity, session=session))
        self._child = self._children.take_over(
            pid, pidfd, ownership.output_of(pid), record.token, self._output, self._exited
        )
        return self._read_again()

    def bury(self, record: ManagerRecord) -> tuple[list[LogBatch], tuple[str, ...], int]:
        """One that ended while no supervisor ran: its log, its last lines, and how many processes it has left."""
        self._settle(record)
        batches = self._read_again()
        orphans = self._children.find_strays(record.token)
        self._ended(record, orphans)
        return batches, tuple(self._log_tail), orphans

    def hunt(self, record: ManagerRecord) -> int:
        """Go on ending what one has left behind whose end is known; how many there are."""
        orphans = self._children.find_strays(record.token)
        self._ended(record, orphans)
        return orphans

    def memory(self) -> ManagerMemory:
        """For ``resume``."""
        return ManagerMemory(
            tuple(self._child.pipes.items()) if self._child else (),
            tuple((source, parser.memory()) for source, parser in self._parsers.items()),
            self._follower.memory() if self._follower else None,
            self._log_file,
            tuple(self._log_tail),
            self._stop_timeout_seconds,
        )

    def resume(self, record: ManagerRecord, memory: ManagerMemory) -> None:
        """Go on as the program that executed this one. Raises ``OSError``."""
        if record.identity is None:
            raise ProcessLookupError
        pidfd = os.pidfd_open(record.identity.pid)  # a child keeps its pid until we wait for it
        self.record = record
        self._stop_timeout_seconds = memory.stop_timeout_seconds
        self._log_tail.extend(memory.log_tail)
        self._parsers = {source: LogParser(source) for source in ("stdout", "stderr")}
        for source, parser in memory.parsers:
            if source in self._parsers:
                self._parsers[source].recall(parser)
        self._follow(memory.log_file)
        if self._follower is not None and memory.follower is not None:
            self._follower.recall(memory.follower)
        self._child = self._children.take_over(
            record.identity.pid, pidfd, dict(memory.pipes), record.token, self._output, self._exited
        )

    def _settle(self, record: ManagerRecord) -> None:
        """As ``start`` leaves things, but at the header of a session that began earlier."""
        if record.settings is not None:
            self._stop_timeout_seconds = record.settings.stop_timeout_seconds
        self._parsers = {source: LogParser(source) for source in ("stdout", "stderr")}
        self._follow(record.config.log_file if record.config else "")
        if self._follower is not None:
            self._follower.resume_last_session()

    def _read_again(self) -> list[LogBatch]:
        batches: list[LogBatch] = []
        while self._follower is not None:
            batch = self._follower.read()
            if batch is not None:
                self._log_tail.extend(record.text for record in batch.relay)
                batches.append(batch)
            if not self._follower.has_more:
                break
        return batches

    def _remember(self, record: ManagerRecord | None) -> None:
        self.record = record
        self._keep()

    def terminate(self) -> None:
        """SIGTERM."""
        if self._child is not None:
            self._child.send(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, also to what has already been orphaned."""
        if self._child is not None:
            self._child.send(signal.SIGKILL)
        self._children.kill_orphans()

    def read_log(self) -> None:
        """Read what is new in the log file; a long backlog is read in steps, so that the loop turns in between."""
        if self._follower is None or self._is_reading_on:
            return
        batch = self._follower.read()
        if batch is not None:
            self._tell_log(batch)
        if self._follower.has_more:
            self._is_reading_on = True
            self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        self._is_reading_on = False
        self.read_log()

    def _follow(self, log_file: str) -> None:
        if self._follower is not None:
            self._follower.close()
        self._log_file = log_file
        self._follower = LogFollower(self._root, log_file) if log_file else None

    def _output(self, source: str, content: bytes) -> None:
        parser = self._parsers[source]
        parser.feed(content)
        self._tell(parser.take_batch())

    def _tell(self, batch: LogBatch) -> None:
        if batch.lines_by_level or batch.records or batch.relay or batch.unrecognised:
            self._feed(LogRead(batch))

    def _exited(self, status: ExitStatus, orphans: int) -> None:
        child, self._child = self._child, None
        for parser in self._parsers.values():
            parser.finish()
            self._tell(parser.take_batch())
        self._read_rest()
        lines = child.last_lines if child else ()
        self._ended(self.record, orphans)
        self._feed(FabricManagerExited(status, (*self._log_tail, *lines), orphans))

    def _ended(self, record: ManagerRecord | None, orphans: int) -> None:
        """See that nothing of it is left; until then the record stays, for the next supervisor."""
        self.record = replace(record, has_ended=True) if record and orphans else None
        if orphans:
            patience = self._stop_timeout_seconds / self._speed
            self._loop.call_soon(self._children.end_orphans, patience, self._orphans_ended)

    def _orphans_ended(self) -> None:
        self.record = None
        self._feed(OrphansEnded())

    def _read_rest(self) -> None:
        """What it wrote before it died decides how its death is classified, so it is read first."""
        if self._follower is None:
            return
        for _ in range(_FINAL_READS):
            batch = self._follower.read()
            if batch is not None:
                self._tell_log(batch)
            if not self._follower.has_more:
                break
        self._tell_log(self._follower.finish())

    def _tell_log(self, batch: LogBatch) -> None:
        self._log_tail.extend(record.text for record in batch.relay)
        self._feed(LogRead(batch))

    def close(self) -> None:
        """Close the log."""
        if self._follower is not None:
            self._follower.close()


async def read_version(
    children: Children, arguments: list[str], variables: dict[str, str], timeout_seconds: float
) -> tuple[ExitStatus | None, bytes, bytes]:
    """Run ``nv-fabricmanager --version``; a binary that cannot be executed looks like the loader's exit 127."""
    try:
        return await children.run(Command(tuple(arguments), variables), timeout_seconds)
    except OSError as error:
        return ExitStatus(code=126), b"", os.fsencode(f"{error.strerror}")

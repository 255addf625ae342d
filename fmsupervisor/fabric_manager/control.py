"""Executing nv-fabricmanager, reading what it writes, and ending it."""

import asyncio
import os
import signal
import stat
import time
from collections import deque
from collections.abc import Callable

from fmsupervisor.core.events import (
    Event,
    FabricManagerExited,
    FabricManagerStarted,
    LogRead,
    OrphansEnded,
    SpawnFailed,
)
from fmsupervisor.errors import CannotObserve
from fmsupervisor.fabric_manager.log_follow import LogFollower
from fmsupervisor.fabric_manager.log_grammar import LogParser
from fmsupervisor.fabric_manager.process import Child, Children, Command
from fmsupervisor.facts import ExitStatus, LogBatch
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


class FabricManagerControl:
    """The one Fabric Manager of this service. What happens to it is told through ``feed``; ``speed``: see ``Clock``."""

    def __init__(
        self,
        root: HostRoot,
        loop: asyncio.AbstractEventLoop,
        children: Children,
        feed: Callable[[Event], None],
        *,
        speed: float = 1.0,
    ) -> None:
        self._root = root
        self._loop = loop
        self._children = children
        self._feed = feed
        self._speed = speed
        self._child: Child | None = None
        self._follower: LogFollower | None = None
        self._parsers: dict[str, LogParser] = {}
        self._log_tail: deque[str] = deque(maxlen=_LOG_TAIL_LINES)
        self._is_reading_on = False
        self._stop_timeout_seconds = 10.0

    @property
    def pids(self) -> frozenset[int]:
        """Process ids that are ours."""
        return frozenset({self._child.pid}) if self._child else frozenset()

    def start(self, settings: Settings, log_file: str, *, resiliency: bool) -> None:
        """Execute Fabric Manager with the prepared configuration."""
        manager = settings.fabric_manager
        self._stop_timeout_seconds = manager.stop_timeout_seconds
        self._log_tail.clear()
        self._follow(log_file)
        self._parsers = {source: LogParser(source) for source in ("stdout", "stderr")}
        arguments = [self._root.path(manager.binary), "-c", self._root.path(manager.config)]
        if resiliency and self._has_state(manager.state_file):
            arguments.append("--restart")
        command = Command(tuple(arguments), environment(self._root, manager))
        try:
            child = self._children.execute(command, self._output, self._exited)
        except OSError as error:
            self._feed(SpawnFailed(f"cannot execute {manager.binary}: {error.strerror}"))
            return
        self._child = child
        child.raise_limits()
        session = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{child.pid}"
        self._feed(FabricManagerStarted(child.pid, session))

    def _has_state(self, state_file: str) -> bool:
        """Whether there is a state file to resume from; without one --restart would wait for partitions in vain."""
        try:
            status = self._root.status(state_file)
        except CannotObserve:
            return False
        return status is not None and stat.S_ISREG(status.st_mode) and status.st_size > 0

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
        self._follower = LogFollower(self._root, log_file) if log_file else None
        if self._follower is not None:
            self._follower.begin_session()

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
        self._feed(FabricManagerExited(status, (*self._log_tail, *lines), orphans))
        if orphans:
            self._children.end_orphans(self._stop_timeout_seconds / self._speed, lambda: self._feed(OrphansEnded()))

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

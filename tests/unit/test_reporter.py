"""How often the status file is written, and what is said of the time that a condition lasted."""

import asyncio
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fmsupervisor.clock import Clock
from fmsupervisor.conditions import Code
from fmsupervisor.core.events import ServiceProblem
from fmsupervisor.core.reduce import reduce
from fmsupervisor.core.state import State
from fmsupervisor.facts import Moment, Problem
from fmsupervisor.host.root import HostRoot
from fmsupervisor.report import journal
from fmsupervisor.report.reporter import Reporter
from fmsupervisor.report.systemd import SystemdNotifier
from fmsupervisor.settings import LoggingSettings, Settings

PROBLEM = Problem(Code.METRICS_UNAVAILABLE, "taken")


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is what the test says."""

    now = 0.0

    def time(self) -> float:
        return self.now


class SlowRoot(HostRoot):
    """Files take their time to be written, by the loop's clock."""

    def __init__(self, directory: str, loop: JumpingLoop, seconds: float) -> None:
        super().__init__(directory)
        self.writes = 0
        self._loop = loop
        self._seconds = seconds

    def write_atomically(self, logical: str, content: bytes, mode: int = 0o644, *, durable: bool = True) -> None:
        self.writes += 1
        self._loop.now += self._seconds


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    written = io.StringIO()
    journal.configure_logging(LoggingSettings(format="json"), {}, written)
    yield written
    journal.configure_logging(LoggingSettings(), {}, io.StringIO())


def state_at(monotonic: float, wall: float) -> State:
    moment = Moment(monotonic, wall)
    settings = Settings()
    return State(settings=settings, begun=moment, now=moment, first_settings=settings)


@pytest.mark.parametrize(
    ("seconds", "writes"), [(0.0001, 60), (0.1, 13), (10.0, 5)], ids=["small", "large", "on-a-slow-disk"]
)
def test_counters_alone_rewrite_a_costly_status_file_more_rarely(
    log: io.StringIO, tmp_path: Path, seconds: float, writes: int
) -> None:
    loop = JumpingLoop()
    root = SlowRoot(str(tmp_path), loop, seconds)
    reporter = Reporter(root, Clock(), SystemdNotifier({}))

    async def report_for_a_minute() -> None:
        while loop.now < 60:
            reporter.report(state_at(loop.now, loop.now))
            loop.now += 0.05

    try:
        loop.run_until_complete(report_for_a_minute())
    finally:
        loop.close()
    assert abs(root.writes - writes) <= 1 + writes // 10


@pytest.mark.parametrize("step", [-18000.0, 18000.0], ids=["back", "forward"])
def test_a_step_of_the_clock_does_not_change_how_long_a_condition_lasted(
    log: io.StringIO, tmp_path: Path, step: float
) -> None:
    reporter = Reporter(HostRoot(str(tmp_path)), Clock(), SystemdNotifier({}))

    async def raise_and_clear() -> None:
        reporter.begin(lambda _event: None)
        state = reduce(state_at(10, 1000), ServiceProblem(PROBLEM, is_active=True), Moment(10, 1000))
        reporter.report(state)
        after = Moment(15, 1005 + step)
        reporter.report(reduce(state, ServiceProblem(PROBLEM, is_active=False), after))

    asyncio.run(raise_and_clear())
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert [line["active_seconds"] for line in lines if line["event"] == "condition-cleared"] == [5.0]

"""kernel_watch: the kernel log in the loop, on the simulated kernel's log."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import pytest

from fmsupervisor.core import events
from fmsupervisor.errors import CannotObserve
from fmsupervisor.facts import KernelBatch, KernelRecord
from fmsupervisor.host.kernel import KernelLogSource
from fmsupervisor.host.kernel_log import KernelLine
from fmsupervisor.host.root import HostRoot
from fmsupervisor.kernel_watch import KernelWatch
from fmsupervisor.simulator.kernel import SimulatedKernel
from fmsupervisor.simulator.tree import TreeOptions, build_tree

BUS = "0000:06:00.0"
EVENT = ("fatal", 20034, BUS, 33)


class Listener:
    """Takes what is fed, and waits for it."""

    def __init__(self) -> None:
        self.batches: list[KernelBatch] = []

    def feed(self, event: events.Event) -> None:
        assert isinstance(event, events.KernelLogRead)
        self.batches.append(event.batch)

    @property
    def records(self) -> list[KernelRecord]:
        return [record for batch in self.batches for record in batch.records if "sxid" in record.fields]

    async def until(self, is_enough: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not is_enough():  # noqa: ASYNC110 - of several things
                await asyncio.sleep(0.01)


class Breaking:
    """A kernel whose log cannot be opened, or breaks after having been read, a number of times."""

    def __init__(self, kernel: SimulatedKernel, *, refusals: int = 0, breaks: int = 0) -> None:
        self._kernel = kernel
        self.refusals = refusals
        self.breaks = breaks
        self.opened = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._kernel, name)

    def monitor_kernel_log(self) -> KernelLogSource:
        if self.refusals:
            self.refusals -= 1
            raise CannotObserve("/dev/kmsg", "Operation not permitted")
        self.opened += 1
        source = self._kernel.monitor_kernel_log()
        return source if self.opened > self.breaks else BreakingLog(source)


class BreakingLog:
    """Can be read once."""

    def __init__(self, source: KernelLogSource) -> None:
        self._source = source
        self._reads = 0

    def fileno(self) -> int:
        return self._source.fileno()

    def read_new(self) -> Sequence[KernelLine]:
        self._reads += 1
        if self._reads > 1:
            raise CannotObserve("/dev/kmsg", "Input/output error")
        return self._source.read_new()

    def close(self) -> None:
        self._source.close()


@pytest.fixture
def kernel(tmp_path: Path) -> SimulatedKernel:
    build_tree(str(tmp_path), TreeOptions())
    return SimulatedKernel(HostRoot(str(tmp_path)))


Scene = Callable[[KernelWatch, Listener], Coroutine[None, None, None]]


def play(kernel: object, scene: Scene, *, retry_seconds: float = 0.02) -> Listener:
    """Run the scene with a watch that has begun."""

    async def run() -> Listener:
        listener = Listener()
        watch = KernelWatch(kernel, asyncio.get_running_loop(), listener.feed, retry_seconds=retry_seconds)  # type: ignore[arg-type]
        watch.begin()
        try:
            await listener.until(lambda: bool(listener.batches))
            await scene(watch, listener)
        finally:
            watch.close()
        return listener

    return asyncio.run(run())


def test_the_first_word_is_that_the_log_can_be_read(kernel: SimulatedKernel) -> None:
    async def scene(_watch: KernelWatch, _listener: Listener) -> None: ...

    assert play(kernel, scene).batches == [KernelBatch()]


def test_old_lines_and_new_ones_are_told_apart(kernel: SimulatedKernel) -> None:
    kernel.print_switch_error(*EVENT)

    async def scene(_watch: KernelWatch, listener: Listener) -> None:
        kernel.print_switch_error(*EVENT)
        await listener.until(lambda: len(listener.records) == 2)

    assert [(record.is_old, len(record.details)) for record in play(kernel, scene).records] == [(True, 2), (False, 2)]


def test_what_is_about_something_else_is_not_fed(kernel: SimulatedKernel) -> None:
    async def scene(_watch: KernelWatch, listener: Listener) -> None:
        kernel.print_kernel_line("eth0: link up", 100)
        await asyncio.sleep(0.3)
        kernel.print_switch_error(*EVENT)
        await listener.until(lambda: bool(listener.records))

    assert len(play(kernel, scene).batches) == 2


def test_a_burst_is_read_at_once(kernel: SimulatedKernel) -> None:
    async def scene(_watch: KernelWatch, listener: Listener) -> None:
        for _ in range(20):
            kernel.print_switch_error(*EVENT)
            await asyncio.sleep(0)
        await listener.until(lambda: len(listener.records) == 20)

    listener = play(kernel, scene)
    assert len(listener.batches) <= 3
    assert all(len(record.details) == 2 for record in listener.records)


def test_what_was_overwritten_is_counted(kernel: SimulatedKernel) -> None:
    async def scene(_watch: KernelWatch, listener: Listener) -> None:
        kernel.print_kernel_line("before", 1)
        await asyncio.sleep(0.3)
        kernel.print_kernel_line("eth0: a packet was dropped", 5000)
        kernel.print_switch_error(*EVENT)
        await listener.until(lambda: bool(listener.records))

    assert sum(batch.lost for batch in play(kernel, scene).batches) == 4003


def test_a_log_that_cannot_be_opened_is_tried_again(kernel: SimulatedKernel) -> None:
    async def scene(_watch: KernelWatch, listener: Listener) -> None:
        await listener.until(lambda: not listener.batches[-1].problem)
        kernel.print_switch_error(*EVENT)
        await listener.until(lambda: bool(listener.records))

    batches = play(Breaking(kernel, refusals=2), scene).batches
    assert [bool(batch.problem) for batch in batches] == [True, True, False, False]
    assert "Operation not permitted" in batches[0].problem


def test_after_it_broke_nothing_is_told_twice_and_nothing_new_is_old(kernel: SimulatedKernel) -> None:
    kernel.print_switch_error(*EVENT)
    breaking = Breaking(kernel, breaks=1)

    async def scene(_watch: KernelWatch, listener: Listener) -> None:
        kernel.print_switch_error(*EVENT)
        await listener.until(lambda: len(listener.records) == 2)

    listener = play(breaking, scene)
    assert breaking.opened == 2
    assert [bool(batch.problem) for batch in listener.batches] == [False, True, False]
    assert [record.is_old for record in listener.records] == [True, False]


@pytest.mark.parametrize("kernel_lines", [0, 3000])
def test_nothing_is_left_after_the_end(kernel: SimulatedKernel, kernel_lines: int) -> None:
    kernel.print_kernel_line("x", kernel_lines)

    async def scene(watch: KernelWatch, listener: Listener) -> None:
        watch.close()
        watch.close()
        count = len(listener.batches)
        kernel.print_switch_error(*EVENT)
        await asyncio.sleep(0.2)
        assert len(listener.batches) == count

    play(kernel, scene)

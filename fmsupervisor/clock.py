"""Time, as the rest of the program sees it.

Logic lives on the monotonic clock, reports on the wall clock. The simulator runs both faster; nothing else may.
"""

import time

from fmsupervisor.facts import Moment


class Clock:
    """Both clocks, ``speed`` times as fast as the world's."""

    def __init__(self, speed: float = 1.0) -> None:
        self.speed = speed
        self.base = (time.monotonic(), time.time())

    def go_on(self, base: tuple[float, float] | None) -> None:
        """Show the time of the clock with this base, which has shown it in another process."""
        self.base = base or self.base

    def now(self) -> Moment:
        """The present. At speed 1 the wall clock follows every step of the host's clock."""
        if self.speed == 1.0:
            return Moment(time.monotonic(), time.time())
        monotonic, wall = self.base
        elapsed = (time.monotonic() - monotonic) * self.speed
        return Moment(monotonic + elapsed, wall + elapsed)

    def real_seconds_until(self, monotonic: float) -> float:
        """How long to sleep, in seconds of the world, until this clock's monotonic time; never negative."""
        return max(0.0, (monotonic - self.now().monotonic) / self.speed)

    def at_boot_seconds(self, seconds: float) -> float:
        """This clock's monotonic time when the host had been up for ``seconds`` (CLOCK_BOOTTIME; see host.guests)."""
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - seconds
        return self.now().monotonic - age * self.speed

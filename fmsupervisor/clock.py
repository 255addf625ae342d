"""Time, as the rest of the program sees it.

Logic lives on the monotonic clock, reports on the wall clock. The simulator runs both faster; nothing else may.
"""

import time

from fmsupervisor.facts import Moment


class Clock:
    """Both clocks, ``speed`` times as fast as the world's."""

    def __init__(self, speed: float = 1.0) -> None:
        self.speed = speed
        self._monotonic = time.monotonic()
        self._wall = time.time()

    def now(self) -> Moment:
        """The present. At speed 1 the wall clock follows every step of the host's clock."""
        if self.speed == 1.0:
            return Moment(time.monotonic(), time.time())
        elapsed = (time.monotonic() - self._monotonic) * self.speed
        return Moment(self._monotonic + elapsed, self._wall + elapsed)

    def real_seconds_until(self, monotonic: float) -> float:
        """How long to sleep, in seconds of the world, until this clock's monotonic time; never negative."""
        return max(0.0, (monotonic - self.now().monotonic) / self.speed)

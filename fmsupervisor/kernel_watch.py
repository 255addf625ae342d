"""Reads the kernel log in the loop and feeds what matters of it.

The driver prints the lines of one SXid within milliseconds and several switches at once, so the log is read a moment
after it became readable: what belongs together is read together, and a chatty kernel does not wake the daemon for every
line. Lines that are about something else are not fed at all.

A log that cannot be read is tried again every minute. After that, records that were read before are skipped by their
sequence numbers, and none is taken for an old one.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from fmsupervisor.core import events
from fmsupervisor.errors import CannotObserve
from fmsupervisor.facts import KernelBatch
from fmsupervisor.host.kernel import Kernel, KernelLogSource
from fmsupervisor.host.kernel_grammar import batch_of
from fmsupervisor.host.kernel_log import KernelLine

_PAUSE_SECONDS = 0.1
_RETRY_SECONDS = 60.0
_MANY_LINES = 500  # read at once: there are more, and they must be read before they are overwritten


class KernelWatch:
    """One open kernel log, or the next attempt to open it."""

    def __init__(
        self,
        kernel: Kernel,
        loop: asyncio.AbstractEventLoop,
        feed: Callable[[events.Event], None],
        retry_seconds: float = _RETRY_SECONDS,
        *,
        read_until: int | None = None,
    ) -> None:
        """``read_until``: the record up to which an earlier program has read the log."""
        self._kernel = kernel
        self._loop = loop
        self._feed = feed
        self._retry_seconds = retry_seconds
        self._log: KernelLogSource | None = None
        self._timer: asyncio.Handle | None = None
        self.last_sequence = read_until
        self._is_first_read = True
        self._is_reopened = read_until is not None

    def begin(self) -> None:
        """Open the log. What it holds is fed in later turns of the loop."""
        self._timer = None
        self._is_first_read = True
        try:
            self._log = self._kernel.monitor_kernel_log()
        except CannotObserve as error:
            self._fail(error)
            return
        self._timer = self._loop.call_soon(self._read)

    def close(self) -> None:
        """Stop reading."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._log is not None:
            self._loop.remove_reader(self._log.fileno())
            self._log.close()
            self._log = None

    def _readable(self) -> None:
        if self._log is None:
            return
        self._loop.remove_reader(self._log.fileno())
        self._timer = self._loop.call_later(_PAUSE_SECONDS, self._read)

    def _read(self) -> None:
        self._timer = None
        if self._log is None:
            return
        try:
            lines = self._log.read_new()
        except CannotObserve as error:
            self.close()
            self._is_reopened = True
            self._fail(error)
            return
        if len(lines) >= _MANY_LINES:
            self._timer = self._loop.call_soon(self._read)
        else:
            self._loop.add_reader(self._log.fileno(), self._readable)
        batch = batch_of(self._unread(lines))
        if batch.records or batch.lost or self._is_first_read:
            self._is_first_read = False
            self._feed(events.KernelLogRead(batch))

    def _unread(self, lines: list[KernelLine]) -> list[KernelLine]:
        """Without what was read before the log was opened again."""
        last = self.last_sequence
        if lines:
            self.last_sequence = lines[-1].sequence
        if not self._is_reopened or last is None:
            return lines
        return [replace(line, is_old=False) for line in lines if line.sequence > last]

    def _fail(self, error: CannotObserve) -> None:
        self._timer = self._loop.call_later(self._retry_seconds, self.begin)
        self._loop.call_soon(self._feed, events.KernelLogRead(KernelBatch(problem=str(error))))

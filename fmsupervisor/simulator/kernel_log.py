"""The simulated kernel's log: a ring of records, and readers of it that wait as on /dev/kmsg.

A reader is behind by as many records as it likes until the ring has overwritten what it has not read; then it goes on
with the oldest record that is left and is told how many it missed.
"""

import contextlib
import os
import threading
import time
from collections import deque

from fmsupervisor.host.kernel_log import KernelLine

_RING_RECORDS = 1000
_RECORDS_PER_READ = 400
_KERNEL_LEVEL = 3  # of driver messages


class SimulatedKernelLog:
    """The ring. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ring: deque[tuple[int, float, str]] = deque(maxlen=_RING_RECORDS)
        self._next_sequence = 1000
        self._readers: list[KernelLogReader] = []

    def write(self, *texts: str) -> None:
        """printk(), once for each text."""
        with self._lock:
            for text in texts:
                self._ring.append((self._next_sequence, time.monotonic(), text))
                self._next_sequence += 1
            self._readers = [reader for reader in self._readers if reader.wake()]

    def open(self) -> "KernelLogReader":
        """Begin to read with the oldest record."""
        with self._lock:
            reader = KernelLogReader(self, self._next_sequence)
            self._readers.append(reader)
            return reader

    def records_from(self, sequence: int) -> list[tuple[int, float, str]]:
        """Records of this and later numbers, as many as are read at once."""
        with self._lock:
            return [record for record in self._ring if record[0] >= sequence][:_RECORDS_PER_READ]


class KernelLogReader:
    """``fmsupervisor.host.kernel.KernelLogSource``: a pipe that is readable while there may be something new."""

    def __init__(self, log: SimulatedKernelLog, first_new: int) -> None:
        self._log = log
        self._first_new = first_new
        self._next: int | None = None  # sequence number; None: the oldest
        self._receiver, self._sender = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._lock = threading.Lock()
        self._is_closed = False

    def fileno(self) -> int:
        """Readable when ``read_new`` has something to return."""
        return self._receiver

    def wake(self) -> bool:
        """There is a new record; False when nobody reads any more."""
        with self._lock:
            if self._is_closed:
                return False
            with contextlib.suppress(BlockingIOError):
                os.write(self._sender, b"\0")
            return True

    def read_new(self) -> list[KernelLine]:
        """The next records."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._receiver, 4096):
                pass
        records = self._log.records_from(0 if self._next is None else self._next)
        lines = []
        for sequence, seconds, text in records:
            lost = 0 if self._next is None else sequence - self._next
            is_old = sequence < self._first_new
            lines.append(KernelLine(_KERNEL_LEVEL, 0, sequence, seconds, text, lost > 0, lost, is_old))
            self._next = sequence + 1
        if self._next is not None and self._log.records_from(self._next):
            self.wake()
        return lines

    def close(self) -> None:
        """Stop reading."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._receiver)
                os.close(self._sender)

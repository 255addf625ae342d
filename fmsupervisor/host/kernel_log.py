r"""The kernel log: /dev/kmsg.

Source: Linux Documentation/ABI/testing/dev-kmsg, kernel/printk/printk.c. One read(2) gives one record:
``priority,sequence,microseconds,flags[,more];text`` and a newline, then lines that begin with a blank (a dictionary
such as `` SUBSYSTEM=pci``), which are left out. Bytes that are not printable, and the backslash, are written
``\x5c``. A reader that was overtaken gets EPIPE once and goes on with the oldest record that is left; the sequence
numbers tell how many it missed.

Old and new: everything that is there when the log is opened is old. Records carry no wall time, and printk's clock is
not quite CLOCK_MONOTONIC, so the first moment at which nothing is left to read draws the line.
"""

import os
import re
from dataclasses import dataclass, replace

from fmsupervisor.errors import CannotObserve
from fmsupervisor.host.root import HostRoot

KMSG = "/dev/kmsg"

_RECORD_LIMIT_BYTES = 16 << 10  # printk's PRINTK_MESSAGE_MAX is 2 KiB, CONSOLE_EXT_LOG_MAX of older kernels 8 KiB
_RECORDS_PER_READ = 1024  # a few milliseconds
_HEADER = re.compile(rb"(\d{1,10}),(\d{1,20}),(\d{1,20}),[^;]*;", re.ASCII)
_ESCAPE = re.compile(rb"\\x([0-9a-f]{2})")


@dataclass(frozen=True, slots=True)
class KernelLine:
    """One record of the kernel log."""

    level: int  # 0 emergency to 7 debug
    facility: int  # 0: the kernel itself; others were written by user space
    sequence: int
    seconds: float  # since boot, the clock of printk
    text: str
    follows_loss: bool = False  # records before this one were overwritten before they could be read
    lost: int = 0  # how many
    is_old: bool = False  # it was there when the log was opened


class KernelLog:
    """An open /dev/kmsg, at first positioned at the oldest record. Raises ``CannotObserve``."""

    def __init__(self, root: HostRoot) -> None:
        try:
            self._descriptor = os.open(root.path(KMSG), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        except OSError as error:
            raise CannotObserve(KMSG, error.strerror or str(error)) from error
        self._has_caught_up = False
        self._last_sequence: int | None = None

    def fileno(self) -> int:
        """Readable when there is a new record."""
        return self._descriptor

    def seek_to_end(self) -> None:
        """Skip everything that was logged before. Raises ``CannotObserve``."""
        try:
            os.lseek(self._descriptor, 0, os.SEEK_END)
        except OSError as error:
            raise CannotObserve(KMSG, error.strerror or str(error)) from error
        self._has_caught_up = True
        self._last_sequence = None

    def read_new(self) -> list[KernelLine]:
        """The records since the last call, about a thousand at most. Raises ``CannotObserve``."""
        lines: list[KernelLine] = []
        follows_loss = False
        for _ in range(_RECORDS_PER_READ):
            try:
                record = self._read()
            except BlockingIOError:
                self._has_caught_up = True
                break
            except BrokenPipeError:
                follows_loss = True
                continue
            except OSError as error:
                raise CannotObserve(KMSG, error.strerror or str(error)) from error
            if not record:
                self._has_caught_up = True
                break
            if line := parse_record(record):
                lines.append(self._placed(line, follows_loss=follows_loss))
                follows_loss = False
        return lines

    def _read(self) -> bytes:
        return os.read(self._descriptor, _RECORD_LIMIT_BYTES)

    def _placed(self, line: KernelLine, *, follows_loss: bool) -> KernelLine:
        """The line with what its place in the log tells."""
        last, self._last_sequence = self._last_sequence, line.sequence
        lost = 0
        if follows_loss:
            lost = max(1, line.sequence - last - 1) if last is not None else 1
        return replace(line, follows_loss=follows_loss, lost=lost, is_old=not self._has_caught_up)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)


def parse_record(record: bytes) -> KernelLine | None:
    """What one read of /dev/kmsg returned; None when it is not a record."""
    header = _HEADER.match(record)
    if header is None:
        return None
    priority, sequence, microseconds = (int(number) for number in header.groups())
    text = _ESCAPE.sub(lambda escape: bytes([int(escape[1], 16)]), record[header.end() :].partition(b"\n")[0])
    return KernelLine(
        level=priority & 7,
        facility=priority >> 3,
        sequence=sequence,
        seconds=microseconds / 1e6,
        text=text.decode("utf-8", "backslashreplace"),
    )

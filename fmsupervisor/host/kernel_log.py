r"""The kernel log: /dev/kmsg.

Source: Linux Documentation/ABI/testing/dev-kmsg, kernel/printk/printk.c. One read(2) gives one record:
``priority,sequence,microseconds,flags[,more];text`` and a newline, then lines that begin with a blank (a dictionary
such as `` SUBSYSTEM=pci``), which are left out. Bytes that are not printable, and the backslash, are written
``\x5c``. A reader that was overtaken gets EPIPE once and goes on with the oldest record that is left.
"""

import os
import re
from dataclasses import dataclass, replace

from fmsupervisor.errors import CannotObserve
from fmsupervisor.host.root import HostRoot

KMSG = "/dev/kmsg"

_RECORD_LIMIT_BYTES = 16 << 10  # printk's PRINTK_MESSAGE_MAX is 2 KiB, CONSOLE_EXT_LOG_MAX of older kernels 8 KiB
_RECORDS_PER_READ = 4096
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


class KernelLog:
    """An open /dev/kmsg, at first positioned at the oldest record. Raises ``CannotObserve``."""

    def __init__(self, root: HostRoot) -> None:
        try:
            self._descriptor = os.open(root.path(KMSG), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        except OSError as error:
            raise CannotObserve(KMSG, error.strerror or str(error)) from error

    def fileno(self) -> int:
        """Readable when there is a new record."""
        return self._descriptor

    def seek_to_end(self) -> None:
        """Skip everything that was logged before. Raises ``CannotObserve``."""
        try:
            os.lseek(self._descriptor, 0, os.SEEK_END)
        except OSError as error:
            raise CannotObserve(KMSG, error.strerror or str(error)) from error

    def read_new(self) -> list[KernelLine]:
        """The records since the last call, a few thousand at most. Raises ``CannotObserve``."""
        lines: list[KernelLine] = []
        follows_loss = False
        for _ in range(_RECORDS_PER_READ):
            try:
                record = os.read(self._descriptor, _RECORD_LIMIT_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:
                follows_loss = True
                continue
            except OSError as error:
                raise CannotObserve(KMSG, error.strerror or str(error)) from error
            if not record:
                break
            if line := parse_record(record):
                lines.append(replace(line, follows_loss=True) if follows_loss else line)
                follows_loss = False
        return lines

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

"""Follows Fabric Manager's log file, from one start of Fabric Manager to the next.

What makes it hard is that several parties handle the file:

* Fabric Manager rotates it itself: renames it and begins a new one (LOG_MAX_ROTATE_COUNT). The old file is read to its
  end before the new one is begun. When it rotates twice between two reads, the file in between is lost.
* It empties it at its start (LOG_APPEND_TO_LOG = 0), or logrotate's copytruncate does. A smaller size shows that; so
  does another beginning of the file, when as much as before was written again between two reads. After copytruncate
  the file may begin with a hole as large as what was cut off; the hole is skipped.
* It writes through buffers: the last line may be incomplete.
* The file is not there yet, or is something else: directories, FIFOs, sockets, devices and symbolic links are reported,
  not opened. (A link in place of the file could lead anywhere; links among its directories are followed.)

A session is what one start of Fabric Manager wrote. ``begin_session`` remembers where the file ends. What comes then is
held back until the header of the session, or its version line: the predecessor may still have been writing. After 64
lines without either they are taken as they are, since not every version need have a header.

Nothing here depends on how large the file is, except that ``resume_last_session`` looks back at most 64 MiB.
"""

import os
import re
import stat
from dataclasses import dataclass, replace

from fmsupervisor.fabric_manager.log_grammar import LogParser, ParserMemory
from fmsupervisor.facts import LogBatch
from fmsupervisor.host.root import HostRoot

READ_LIMIT_BYTES = 1 << 18
LOOK_BACK_BYTES = 1 << 26

_BLOCK_BYTES = 1 << 18
_HEAD_BYTES = 128  # of the file's beginning: the header with its milliseconds
_HELD_LINES = 64
_HELD_BYTES = 1 << 18
_HEADER = b"Fabric Manager Log initializing"
_SESSION_START = re.compile(
    rb"^(?!.*= *Fabric).*(?:Fabric Manager Log initializing|Fabric Manager version [\d.]+ is running)",
    re.IGNORECASE | re.MULTILINE,
)
_FILE_TYPES = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a symbolic link, which is not followed",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@dataclass(frozen=True, slots=True)
class FollowerMemory:
    """Where a follower has come to; ``descriptor`` is its open file, -1 when there is none. Bytes are Latin-1."""

    descriptor: int
    offset: int
    head: str
    held: str | None
    parser: ParserMemory


class LogFollower:
    """Reads what is new in the log file at ``path`` (logical, below ``root``). Use it from one thread."""

    def __init__(self, root: HostRoot, path: str) -> None:
        self._path = path
        self._real = root.path(path)
        self._parser = LogParser("file")
        self._descriptor: int | None = None
        self._offset = 0
        self._head = b""  # the beginning of the open file, as far as it was there when last looked at
        self._held: bytes | None = None  # what came since begin_session without a sign of the session
        self._size: int | None = None
        self._problem = ""
        self._reported_problem = ""
        self._has_more = False
        self._old_until = 0  # what the open file holds up to there was written before this program read it

    @property
    def has_more(self) -> bool:
        """Whether the last ``read`` stopped at its limit: call it again when other work has had its turn."""
        return self._has_more

    def begin_session(self) -> None:
        """Call just before Fabric Manager is started: what is in the file by now, read or not, does not count."""
        self._restart()
        if self._open():
            self._offset = self._size or 0
        self._held = b""

    def resume_last_session(self) -> bool:
        """Continue a session that began before: ``read`` starts at its header.

        False: there is no header within the last 64 MiB. Then reading starts at the beginning of a smaller file, and at
        the end of a larger one.
        """
        self._restart()
        if not self._open() or self._descriptor is None:
            return False
        size = self._size or 0
        try:
            header = _find_last_header(self._descriptor, size)
        except OSError as error:
            self._problem = _cause(error)
            self._offset = size
            return False
        self._offset = header if header is not None else 0 if size <= LOOK_BACK_BYTES else size
        self._old_until = size
        return header is not None

    def memory(self) -> FollowerMemory:
        """For ``recall``, in a program that inherits the descriptor."""
        held = None if self._held is None else self._held.decode("latin-1")
        descriptor = -1 if self._descriptor is None else self._descriptor
        return FollowerMemory(descriptor, self._offset, self._head.decode("latin-1"), held, self._parser.memory())

    def recall(self, memory: FollowerMemory) -> None:
        """Go on where the other follower has stopped; nothing is read twice, and nothing left out."""
        self._restart()
        self._parser.recall(memory.parser)
        self._held = None if memory.held is None else memory.held.encode("latin-1")
        if memory.descriptor >= 0:
            self._descriptor = memory.descriptor
            self._size = os.fstat(memory.descriptor).st_size
            self._offset = memory.offset
            self._head = memory.head.encode("latin-1")

    def read(self, limit_bytes: int = READ_LIMIT_BYTES) -> LogBatch | None:
        """What is new, at most about ``limit_bytes`` of it; None when nothing is, also not the problem or the size."""
        size_before = self._size
        is_old = self._offset < self._old_until
        left = min(limit_bytes, self._old_until - self._offset) if is_old else limit_bytes
        limit_bytes = left
        try:
            while left > 0 and (data := self._read_some(left)):
                left -= len(data)
                self._take(data)
        except OSError as error:
            self._problem = _cause(error)
        self._has_more = left <= 0
        if left == limit_bytes and self._problem == self._reported_problem and self._size == size_before:
            return None
        return replace(self._batch(), is_old=is_old)

    def finish(self) -> LogBatch:
        """Call when Fabric Manager has ended and all is read: an incomplete last line and lines held back count too."""
        if self._held is not None:
            held, self._held = self._held, None
            self._parser.feed(held)
        self._parser.finish()
        return self._batch()

    def close(self) -> None:
        """Close the file. ``begin_session`` opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _restart(self) -> None:
        self.close()
        self._parser = LogParser("file")
        self._held = None
        self._offset = self._old_until = 0
        self._has_more = False

    def _batch(self) -> LogBatch:
        self._reported_problem = self._problem
        return self._parser.take_batch(file_size_bytes=self._size, problem=self._problem)

    def _read_some(self, limit_bytes: int) -> bytes:
        """The next bytes of the open file, or of its successor when it is at its end; b"" when there are none."""
        if self._descriptor is None and not self._open():
            return b""
        while self._descriptor is not None:
            is_current = self._is_current(
                self._descriptor
            )  # asked before reading: what was written before a rename is still read
            self._notice_truncation(self._descriptor)
            data = os.pread(self._descriptor, limit_bytes, self._offset)
            self._offset += len(data)
            if data or is_current:
                return data
            self.close()
            self._end_line()
            if self._open():
                self._offset = self._old_until = 0
        return b""

    def _take(self, data: bytes) -> None:
        if self._held is None:
            self._parser.feed(data)
            return
        self._held += data.replace(b"\0", b"")
        if start := _SESSION_START.search(self._held):
            held = self._held[start.start() :]
        elif self._held.count(b"\n") >= _HELD_LINES or len(self._held) >= _HELD_BYTES:
            held = self._held
        else:
            return
        self._held = None
        self._parser.feed(held)

    def _end_line(self) -> None:
        """What the file ended with was a line, complete or not."""
        if self._held:
            self._held += b"\n"
        self._parser.finish()

    def _open(self) -> bool:
        """Open the file at the path, if it is a regular file; else set the problem ("" when nothing is there)."""
        self._size = None
        self._problem = ""
        try:
            kind = stat.S_IFMT(os.lstat(self._real).st_mode)
            if kind != stat.S_IFREG:  # looked at before opening, which has effects on devices and FIFOs
                self._problem = f"it is {_FILE_TYPES.get(kind, 'no regular file')}"
                return False
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW
            descriptor = os.open(self._real, flags)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            self._problem = _cause(error)
            return False
        try:
            self._size = os.fstat(descriptor).st_size
            self._head = os.pread(descriptor, _HEAD_BYTES, 0)
        except OSError as error:
            os.close(descriptor)
            self._problem = _cause(error)
            return False
        self._descriptor = descriptor
        return True

    def _is_current(self, descriptor: int) -> bool:
        """Whether no other file has taken the path of the open one. While nothing is there, more may be written."""
        try:
            there = os.lstat(self._real)
        except OSError:
            return True
        ours = os.fstat(descriptor)
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)

    def _notice_truncation(self, descriptor: int) -> None:
        self._size = os.fstat(descriptor).st_size
        head = os.pread(descriptor, _HEAD_BYTES, 0)
        if self._size < self._offset or not head.startswith(self._head):
            self._end_line()
            self._offset = _first_data(descriptor)
            self._old_until = 0
        self._head = head
        self._problem = ""


def _first_data(descriptor: int) -> int:
    """The offset of the file's first data behind a hole."""
    try:
        return os.lseek(descriptor, 0, os.SEEK_DATA)
    except OSError:  # ENXIO: there is no data; EINVAL: the file system cannot tell
        return 0


def _find_last_header(descriptor: int, size: int) -> int | None:
    """Where the last session's header is within the last ``LOOK_BACK_BYTES``; read backwards in overlapping blocks."""
    end, limit = size, max(0, size - LOOK_BACK_BYTES)
    while end > limit:
        start = max(limit, end - _BLOCK_BYTES)
        block = os.pread(descriptor, end - start, start)
        found = len(block)
        while (found := block.rfind(_HEADER, 0, found)) >= 0:
            is_quoted = block[:found].rstrip(b" ").endswith(b"=")  # the value of a setting
            if not is_quoted:
                return start + found
        if start == limit:
            break
        end = start + len(_HEADER) + 8
    return None


def _cause(error: OSError) -> str:
    return error.strerror or str(error)

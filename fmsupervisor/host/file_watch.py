"""Notices that files change, through inotify(7), without polling.

inotify watches inodes, while everybody asks about paths, which come, go and are replaced together with the directories
they are in. So each path gets several watches:

* the file itself, when it is there: written, touched, deleted; when it is a directory, the names in it, and that a
  file in it was written and closed (cp(1) over an existing file; the end of one that is being extracted);
* its nearest existing ancestor directory: names that appear and vanish, of which the next component of the path counts;
* all directories above that: that they are moved or deleted themselves (somebody replaces /etc).

After each event that could change this, the watches of the paths concerned are laid out anew, inside ``drain`` and
before it returns, so that whoever looks at the files after ``drain`` misses nothing. Reading a file causes no event.

Not noticed: a file system mounted over a directory, changes on other machines of a network file system, and that a
symbolic link among the directories of a path is pointed elsewhere.

Source: Linux include/uapi/linux/inotify.h and inotify(7), 2.6.36 and later.
"""

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Collection, Iterable, Iterator
from enum import IntFlag

from fmsupervisor.errors import CannotObserve
from fmsupervisor.host.root import HostRoot


class _Event(IntFlag):
    MODIFY = 0x2
    ATTRIB = 0x4
    CLOSE_WRITE = 0x8
    MOVED_FROM = 0x40
    MOVED_TO = 0x80
    CREATE = 0x100
    DELETE = 0x200
    DELETE_SELF = 0x400
    MOVE_SELF = 0x800
    UNMOUNT = 0x2000
    Q_OVERFLOW = 0x4000
    IGNORED = 0x8000
    MASK_ADD = 0x20000000


_SELF = _Event.DELETE_SELF | _Event.MOVE_SELF
_NAMES = _Event.CREATE | _Event.DELETE | _Event.MOVED_FROM | _Event.MOVED_TO
_GONE = _SELF | _Event.UNMOUNT | _Event.IGNORED
_HEADER = struct.Struct("iIII")  # wd, mask, cookie, length of the name that follows
_BUFFER_BYTES = 1 << 16
_NO_NAME = "/"  # nothing in a directory is called that: of its events only those about itself count
_READS = 16  # in one drain: a file that is written all the time must not hold it up
_ATTEMPTS = 10  # to lay out watches while directories come and go


class FileWatch:
    """Watches logical paths below ``root``. Raises ``CannotObserve`` where the kernel refuses; see ``set_paths``."""

    def __init__(self, root: HostRoot) -> None:
        self._root = root
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            raise CannotObserve("file changes", f"inotify: {os.strerror(ctypes.get_errno())}")
        self._paths: frozenset[str] = frozenset()
        # Watch descriptor -> {path: the name below it that concerns the path; None: the watched inode itself does}.
        self._concerns: dict[int, dict[str, str | None]] = {}

    def fileno(self) -> int:
        """Readable when ``drain`` has something to do."""
        return int(self._descriptor)

    def set_paths(self, paths: Iterable[str]) -> None:
        """Watch these paths and no others. They need not exist, nor need their directories.

        Raises ``CannotObserve`` when a watch is refused (too many, or no permission): changes may then be missed, and
        the caller has to look by itself from time to time. The other paths are watched all the same.
        """
        self._paths = frozenset(paths)
        self._lay_out(self._paths | {path for concerns in self._concerns.values() for path in concerns})

    def drain(self) -> frozenset[str]:
        """The watched paths that may have changed. Raises ``CannotObserve`` as ``set_paths`` does: look at all then."""
        changed: set[str] = set()
        moved: set[str] = set()
        for descriptor, mask, name in self._events():
            if mask & _Event.Q_OVERFLOW:
                changed |= self._paths
                moved |= self._paths
                continue
            concerned = {
                path
                for path, wanted in self._concerns.get(descriptor, {}).items()
                if wanted is None or wanted == name or mask & _GONE
            }
            changed |= concerned
            if mask & (_GONE | _NAMES):
                moved |= concerned
            if mask & _Event.IGNORED:
                self._concerns.pop(descriptor, None)
        if moved:
            self._lay_out(moved)
        return frozenset(changed)

    def close(self) -> None:
        """Stop watching."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._concerns.clear()

    def _events(self) -> Iterator[tuple[int, int, str]]:
        for _ in range(_READS):
            try:
                data = os.read(self._descriptor, _BUFFER_BYTES)
            except BlockingIOError:
                return
            position = 0
            while position < len(data):
                descriptor, mask, _, length = _HEADER.unpack_from(data, position)
                position += _HEADER.size
                yield descriptor, mask, os.fsdecode(data[position : position + length].rstrip(b"\0"))
                position += length

    def _lay_out(self, paths: Collection[str]) -> None:
        """Renew the watches of ``paths``. Events lost meanwhile do not matter: these are about to be looked at."""
        for descriptor, concerns in list(self._concerns.items()):
            for path in paths:
                concerns.pop(path, None)
            if not concerns:
                del self._concerns[descriptor]
                self._libc.inotify_rm_watch(self._descriptor, descriptor)
        refusal: CannotObserve | None = None
        for path in self._paths.intersection(paths):
            try:
                self._watch(path)
            except CannotObserve as error:
                refusal = error
        if refusal:
            raise refusal

    def _watch(self, path: str) -> None:
        # A directory may appear between the look for it and the watch above it, without an event: look again.
        for _ in range(_ATTEMPTS):
            depth = self._watch_once(path)
            if depth is not None and depth == self._existing_depth(path):
                return

    def _watch_once(self, path: str) -> int | None:
        """Lay out the watches of one path; how much of it exists, or None when a directory vanished meanwhile."""
        parts = _parts(path)
        depth = self._existing_depth(path)
        ancestors = min(depth, len(parts) - 1)
        for level in range(ancestors + 1):
            directory = "/" + "/".join(parts[:level])
            is_nearest = level == ancestors
            concern = parts[level] if is_nearest else _NO_NAME
            if not self._add(directory, _SELF | _NAMES if is_nearest else _SELF, path, concern):
                return None
        if depth == len(parts):
            is_directory = self._root.is_directory(path)
            mask = _SELF | _Event.ATTRIB | (_NAMES | _Event.CLOSE_WRITE if is_directory else _Event.MODIFY)
            if not self._add(path, mask, path, None):
                return None
        return depth

    def _existing_depth(self, path: str) -> int:
        """How many components of the path exist, the last one as whatever it is, the others as directories."""
        parts = _parts(path)
        for level in range(1, len(parts) + 1):
            try:
                mode = os.stat(self._root.path("/" + "/".join(parts[:level]))).st_mode
            except OSError:
                return level - 1
            if level < len(parts) and not stat.S_ISDIR(mode):
                return level - 1
        return len(parts)

    def _add(self, directory: str, mask: int, path: str, concern: str | None) -> bool:
        """Watch one inode for the sake of ``path``; False when it is not there any more."""
        real = os.fsencode(self._root.path(directory))
        descriptor = self._libc.inotify_add_watch(self._descriptor, real, ctypes.c_uint32(mask | _Event.MASK_ADD))
        if descriptor >= 0:
            self._concerns.setdefault(descriptor, {})[path] = concern
            return True
        error = ctypes.get_errno()
        if error in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
            return False
        if error == errno.EACCES and concern == _NO_NAME:
            return True  # a directory further up that may be entered, not read: that it is moved is not noticed
        if error == errno.ENOSPC:
            raise CannotObserve(path, "the limit of inotify watches (fs.inotify.max_user_watches) is reached")
        raise CannotObserve(path, f"inotify on {directory}: {os.strerror(error)}")


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]

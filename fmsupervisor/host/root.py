"""The host's files, seen below one directory.

Production uses ``HostRoot("/")``. Tests and the simulator use a directory, so that /proc, /sys, /dev, /run and the
driver tree can be captured or invented. Everything else in the package names files by their path on the host
("logical" path); only this class knows where they really are.
"""

import errno
import os
import stat

from fmsupervisor.errors import ActionFailed, CannotObserve

_TEXT_LIMIT_BYTES = 1 << 20

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENXIO, errno.ENAMETOOLONG)  # nothing has a name too long


class HostRoot:
    """Reads and writes the host's files. Absent is ``None``; unreadable raises ``CannotObserve``."""

    def __init__(self, directory: str = "/") -> None:
        self.directory = os.path.abspath(directory)
        self._prefix = "" if self.directory == "/" else self.directory

    def path(self, logical: str) -> str:
        """Where the host's ``logical`` path (absolute) is on this machine."""
        if not logical.startswith("/"):
            raise ValueError(f"not an absolute path: {logical!r}")
        if "\0" in logical:  # made from the content of a damaged file
            raise CannotObserve(repr(logical), "no path can hold a NUL")
        return self._prefix + logical

    def logical(self, real: str) -> str:
        """The inverse of ``path``; a path outside the root is returned unchanged."""
        if self._prefix and real.startswith(self._prefix + "/"):
            return real[len(self._prefix) :]
        return real

    def read_bytes(self, logical: str, limit_bytes: int = _TEXT_LIMIT_BYTES) -> bytes | None:
        """At most ``limit_bytes`` of the file; None when it does not exist."""
        try:
            descriptor = os.open(self.path(logical), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise CannotObserve(logical, _cause(error)) from error
        try:
            chunks = []
            left = limit_bytes
            while left > 0 and (chunk := os.read(descriptor, min(left, 1 << 16))):
                chunks.append(chunk)
                left -= len(chunk)
            return b"".join(chunks)
        except OSError as error:
            if error.errno in (errno.ENODEV, errno.ENXIO):
                return None
            raise CannotObserve(logical, _cause(error)) from error
        finally:
            os.close(descriptor)

    def read_text(self, logical: str, limit_bytes: int = _TEXT_LIMIT_BYTES) -> str | None:
        """As ``read_bytes``; bytes that are not UTF-8 come out as escapes."""
        content = self.read_bytes(logical, limit_bytes)
        return None if content is None else content.decode("utf-8", "backslashreplace")

    def list_directory(self, logical: str) -> list[str] | None:
        """Sorted names in the directory; None when it does not exist."""
        try:
            return sorted(os.listdir(self.path(logical)))
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise CannotObserve(logical, _cause(error)) from error

    def read_link(self, logical: str) -> str | None:
        """What the symbolic link says; None when there is no link."""
        try:
            return os.readlink(self.path(logical))
        except OSError as error:
            if error.errno in (*_ABSENT, errno.EINVAL):
                return None
            raise CannotObserve(logical, _cause(error)) from error

    def status(self, logical: str, *, follow_symlinks: bool = True) -> os.stat_result | None:
        """stat(2) or lstat(2); None when the file does not exist."""
        try:
            return os.stat(self.path(logical), follow_symlinks=follow_symlinks)
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise CannotObserve(logical, _cause(error)) from error

    def is_file(self, logical: str) -> bool:
        """Whether a regular file is there (through symbolic links)."""
        found = self.status(logical)
        return found is not None and stat.S_ISREG(found.st_mode)

    def is_directory(self, logical: str) -> bool:
        """Whether a directory is there (through symbolic links)."""
        found = self.status(logical)
        return found is not None and stat.S_ISDIR(found.st_mode)

    def make_directory(self, logical: str, mode: int = 0o755) -> bool:
        """Make the directory and its parents; True when it was not there before."""
        try:
            os.makedirs(self.path(logical), mode)
        except FileExistsError as error:
            if not self.is_directory(logical):
                raise ActionFailed(f"cannot make directory {logical}: something else is at that path") from error
            return False
        except OSError as error:
            raise ActionFailed(f"cannot make directory {logical}: {_cause(error)}") from error
        return True

    def write_atomically(self, logical: str, content: bytes, mode: int = 0o644, *, durable: bool = True) -> None:
        """Replace the file in one step: readers see the old content or the new.

        The temporary file always has the same name, so what a kill leaves behind is gone after the next attempt; one
        file must not be written by two at once.
        """
        real = self.path(logical)
        temporary = f"{os.path.dirname(real)}/.{os.path.basename(real)}.new"
        try:
            descriptor = _create(temporary)
        except OSError as error:
            raise ActionFailed(f"cannot write {logical}: {_cause(error)}") from error
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fchmod(file.fileno(), mode)
                if durable:
                    os.fsync(file.fileno())
            os.replace(temporary, real)
        except OSError as error:
            _unlink_quietly(temporary)
            raise ActionFailed(f"cannot write {logical}: {_cause(error)}") from error
        except BaseException:
            _unlink_quietly(temporary)
            raise


def _create(path: str) -> int:
    """A new file that nobody else can read yet. Whatever is there is unlinked, not followed; a directory stays."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o600)
    except FileExistsError:
        os.unlink(path)
        return os.open(path, flags, 0o600)


def _cause(error: OSError) -> str:
    return error.strerror or str(error)


def _unlink_quietly(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass

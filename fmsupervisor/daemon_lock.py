"""One supervisor at a time."""

import errno
import fcntl
import os
import struct

from fmsupervisor.errors import ActionFailed, ActionRefused, CannotObserve
from fmsupervisor.host.root import HostRoot

LOCK_FILE = "lock"

_FLOCK = struct.Struct("hhqqi4x")  # struct flock, fcntl(2): type, whence, start, length, pid (0 for this sort of lock)
_PID_BYTES = 32


class InstanceLock:
    """One supervisor per state directory: a lock that the kernel frees with its holder, however that ends.

    It is an open file description lock (F_OFD_SETLK, fcntl(2)), because that can be asked about without taking it: a
    ``status`` that takes the lock for a moment could turn away a supervisor that starts at that moment.
    """

    def __init__(self, root: HostRoot, state_directory: str, descriptor: int = -1) -> None:
        """``descriptor``: of the lock that this very process holds already, since before execve."""
        self._logical = f"{state_directory}/{LOCK_FILE}"
        self._path = root.path(self._logical)
        self.descriptor = descriptor

    @property
    def path(self) -> str:
        """The lock file (logical)."""
        return self._logical

    def acquire(self) -> None:
        """Raises ``ActionRefused`` naming the holder, ``ActionFailed`` when the lock cannot be made."""
        while self.descriptor < 0:
            self.descriptor = self._lock()
            if not self._is_in_place():  # it was deleted between the two steps
                self.release()

    def restore(self) -> bool:
        """Make the lock file again if it was deleted or replaced, which lets in others; True when it was.

        Raises as ``acquire``; then the lock is held as before.
        """
        if self._is_in_place():
            return False
        held, self.descriptor = self.descriptor, -1
        try:
            self.acquire()
        except (ActionFailed, ActionRefused):
            self.descriptor = held
            raise
        os.close(held)
        return True

    def _lock(self) -> int:
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise ActionFailed(f"cannot make {self._logical}: {error.strerror}") from error
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        except OSError as error:
            holder = os.pread(descriptor, _PID_BYTES, 0).decode(errors="replace").strip()
            os.close(descriptor)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise ActionRefused(f"another fmsupervisor is running (pid {holder or 'unknown'})") from error
            raise ActionFailed(f"cannot lock {self._logical}: {error.strerror}") from error
        try:
            os.fchmod(descriptor, 0o644)  # whatever the umask: everybody may ask
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
        except OSError:
            pass  # no space left: it holds, and only the number is not known
        return descriptor

    def _is_in_place(self) -> bool:
        """Whether the locked file is the one at the path."""
        try:
            return os.path.samestat(os.lstat(self._path), os.fstat(self.descriptor))
        except OSError:
            return False

    def holder(self) -> int | None:
        """The process id of the running supervisor; 0 when it is not known yet, None when none is running.

        Asked from outside; takes nothing. Raises ``CannotObserve``.
        """
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise CannotObserve(self._logical, error.strerror or str(error)) from error
        try:
            answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
            if _FLOCK.unpack(answer)[0] == fcntl.F_UNLCK:
                return None
            content = os.pread(descriptor, _PID_BYTES, 0).strip()
        except OSError as error:
            raise CannotObserve(self._logical, error.strerror or str(error)) from error
        finally:
            os.close(descriptor)
        return int(content) if content.isdigit() else 0

    def is_held(self) -> bool:
        """Whether a supervisor is running; asked from outside. Raises ``CannotObserve``."""
        return self.holder() is not None

    def release(self) -> None:
        """Let another one run."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

"""One supervisor at a time."""

import fcntl
import os

from fmsupervisor.errors import ActionRefused
from fmsupervisor.host.root import HostRoot

LOCK_FILE = "lock"


class InstanceLock:
    """One supervisor per state directory: a lock that the kernel frees with its holder, however that ends."""

    def __init__(self, root: HostRoot, state_directory: str) -> None:
        self._path = root.path(f"{state_directory}/{LOCK_FILE}")
        self._descriptor = -1

    def acquire(self) -> None:
        """Raises ``ActionRefused`` naming the holder."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(descriptor, 32).decode(errors="replace").strip()
            os.close(descriptor)
            raise ActionRefused(f"another fmsupervisor is running (pid {holder or 'unknown'})") from error
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        self._descriptor = descriptor

    def is_held(self) -> bool:
        """Whether a supervisor is running; asked from outside."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def release(self) -> None:
        """Let another one run."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

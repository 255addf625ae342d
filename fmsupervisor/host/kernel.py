"""What a directory tree cannot do: the few operations that need a real kernel, behind one interface.

``LinuxKernel`` is the real thing. The simulator has another implementation on a directory. Everything that can be done
with files alone (reading /proc and /sys) goes through ``HostRoot`` instead and needs no second implementation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fmsupervisor.facts import DriverView, ModuleChoice
from fmsupervisor.host.kernel_log import KernelLine


class ModuleLoadFailed(Exception):
    """The kernel refused a module: ``errno`` and the kernel log lines that came with it."""

    def __init__(self, errno: int, kernel_lines: tuple[str, ...], path: str) -> None:
        super().__init__(f"cannot load {path}: errno {errno}")
        self.errno = errno
        self.kernel_lines = kernel_lines
        self.path = path  # of the module that was refused (the choice itself or one of its dependencies)


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """What lstat(2) says of a path in /dev."""

    kind: str  # "char", "symlink", "directory", "file" or "other"
    major: int  # of a device, else 0
    minor: int
    mode: int  # permission bits
    uid: int
    gid: int


class UeventSource(Protocol):
    """A stream of kernel uevents behind a file descriptor."""

    def fileno(self) -> int:
        """Readable when ``drain`` has something to do."""

    def drain(self) -> bool:
        """Take all waiting events; True when at least one concerns PCI, modules or drivers, or when some were lost."""

    def close(self) -> None:
        """Stop listening."""


class KernelLogSource(Protocol):
    """The kernel log behind a file descriptor."""

    def fileno(self) -> int:
        """Readable when ``read_new`` has something to return."""

    def read_new(self) -> list[KernelLine]:
        """The records since the last call, bounded; the first ones are old. Raises ``CannotObserve``."""

    def close(self) -> None:
        """Stop reading."""


class Kernel(Protocol):
    """Operations on the running kernel. All block; ``load_module`` for minutes."""

    def load_module(self, choice: ModuleChoice, parameters: Sequence[str]) -> None:
        """Load ``choice.depends`` and then ``choice.path``.

        A module that is live already counts as loaded. Raises ``ModuleLoadFailed``.
        """

    def driver_view(self) -> DriverView:
        """GET_DEVICES_V2 on /dev/nvidia-nvswitchctl. Raises ``CannotObserve``."""

    def monitor_uevents(self) -> UeventSource:
        """Begin to listen for uevents. Raises ``CannotObserve`` when that is impossible here."""

    def monitor_kernel_log(self) -> KernelLogSource:
        """Begin to read the kernel log, from its oldest record. Raises ``CannotObserve``."""

    def node_status(self, path: str) -> NodeStatus | None:
        """lstat(2) of a path below /dev; None when nothing is there. Raises ``CannotObserve``."""

    def make_node(self, path: str, major: int, minor: int, mode: int, uid: int, gid: int) -> None:
        """Put a character device at ``path`` in one step, replacing the one that may be there. Raises ``OSError``."""

    def adjust_node(self, path: str, mode: int, uid: int, gid: int) -> None:
        """Set permissions and owner of the device at ``path`` without following a symbolic link. Raises ``OSError``."""

    def make_node_directory(self, path: str) -> None:
        """Make a directory below /dev, 0755 root:root; nothing happens when it is there. Raises ``OSError``."""

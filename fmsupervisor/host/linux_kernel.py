"""The real kernel behind ``host.kernel.Kernel``.

Nodes must never lead out of /dev, by symbolic link or mount, however the path looks. So a path is walked from a
descriptor of /dev, one component at a time, each opened without following links and on the file system of /dev; the
last step works on that directory's descriptor and on the node's own descriptor. A node is made under a temporary
name, given its owner and mode there (mknod(2) with mode 0: the umask plays no part and nobody can open it early), and
renamed over the old one. Paths passed in are logical; with another root than "/" the same code works on a directory,
which is how it is tested.
"""

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fmsupervisor.errors import CannotObserve
from fmsupervisor.facts import DriverView, ModuleChoice
from fmsupervisor.host import nvswitch_ctl, procfs
from fmsupervisor.host.kernel import KernelLogSource, NodeStatus, UeventSource
from fmsupervisor.host.kernel_log import KernelLog
from fmsupervisor.host.root import HostRoot

_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NODE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class LinuxKernel:
    """Module loading, device nodes, the control ioctl and uevents of the running kernel."""

    def __init__(self, root: HostRoot) -> None:
        self._root = root

    def load_module(self, choice: ModuleChoice, parameters: Sequence[str]) -> None:
        """See ``Kernel.load_module``."""
        from fmsupervisor.host.module_load import load_module  # noqa: PLC0415 (needed once in a daemon's life)

        load_module(self._root, choice, parameters)

    def driver_view(self) -> DriverView:
        """See ``Kernel.driver_view``."""
        major = procfs.read_majors(self._root).get("nvidia-nvswitch")
        if major is None:
            raise CannotObserve(nvswitch_ctl.CONTROL_NODE, "/proc/devices has no nvidia-nvswitch")
        return nvswitch_ctl.get_devices(self._root.path(nvswitch_ctl.CONTROL_NODE), major)

    def monitor_uevents(self) -> UeventSource:
        """See ``Kernel.monitor_uevents``."""
        from fmsupervisor.host.uevents import UeventMonitor  # noqa: PLC0415 (loads libudev)

        return UeventMonitor()

    def monitor_kernel_log(self) -> KernelLogSource:
        """See ``Kernel.monitor_kernel_log``."""
        return KernelLog(self._root)

    def node_status(self, path: str) -> NodeStatus | None:
        """See ``Kernel.node_status``."""
        try:
            with self._parent(path) as (directory, name):
                return _status(os.stat(name, dir_fd=directory, follow_symlinks=False))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CannotObserve(path, error.strerror or str(error)) from error

    def make_node(self, path: str, major: int, minor: int, mode: int, uid: int, gid: int) -> None:
        """See ``Kernel.make_node``. Raises ``FileExistsError`` when something that is no device is at the path."""
        wanted = NodeStatus("char", major, minor, mode, uid, gid)
        with self._parent(path) as (directory, name):
            if _kind_at(directory, name) not in (None, "char"):
                raise FileExistsError(errno.EEXIST, "something that is no character device is there", path)
            temporary = f".{name}.new"  # always the same, so that what a kill leaves is found by the next one
            if _kind_at(directory, temporary) == "char":
                os.unlink(temporary, dir_fd=directory)
            os.mknod(temporary, stat.S_IFCHR, os.makedev(major, minor), dir_fd=directory)
            try:
                _set_permissions(directory, temporary, mode, uid, gid)
                os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
            except BaseException:
                os.unlink(temporary, dir_fd=directory)
                raise
            made = _status(os.stat(name, dir_fd=directory, follow_symlinks=False))
        if made != wanted:
            raise OSError(errno.EIO, f"the node came out as {made}", path)

    def adjust_node(self, path: str, mode: int, uid: int, gid: int) -> None:
        """See ``Kernel.adjust_node``."""
        with self._parent(path) as (directory, name):
            _set_permissions(directory, name, mode, uid, gid)

    def make_node_directory(self, path: str) -> None:
        """See ``Kernel.make_node_directory``."""
        with self._parent(path) as (directory, name):
            try:
                os.mkdir(name, 0o700, dir_fd=directory)
            except FileExistsError:
                if _kind_at(directory, name) != "directory":
                    raise
                return
            made = os.open(name, _DIRECTORY, dir_fd=directory)
            try:
                _change(made, 0o755, 0, 0)
            finally:
                os.close(made)

    @contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        """A descriptor of the directory that holds ``path``, inside /dev for certain, and the last component."""
        components = path.split("/")
        if components[:2] != ["", "dev"] or len(components) < 3 or {"", ".", ".."} & set(components[2:]):  # noqa: PLR2004
            raise OSError(errno.EINVAL, "not a path below /dev", path)
        directory = os.open(self._root.path("/dev"), _DIRECTORY)
        try:
            device = os.fstat(directory).st_dev
            for component in components[2:-1]:
                inner = os.open(component, _DIRECTORY, dir_fd=directory)
                os.close(directory)
                directory = inner
                if os.fstat(directory).st_dev != device:
                    raise OSError(errno.EXDEV, f"{component} is a mount point inside /dev", path)
            yield directory, components[-1]
        finally:
            os.close(directory)


def _set_permissions(directory: int, name: str, mode: int, uid: int, gid: int) -> None:
    """Owner, then mode, of a character device on the directory's own file system."""
    node = os.open(name, _NODE, dir_fd=directory)
    try:
        found = os.fstat(node)
        if not stat.S_ISCHR(found.st_mode):
            raise OSError(errno.EINVAL, "not a character device", name)
        if found.st_dev != os.fstat(directory).st_dev:
            raise OSError(errno.EXDEV, "another file is mounted over the node", name)
        _change(node, mode, uid, gid)
    finally:
        os.close(node)


def _change(handle: int, mode: int, uid: int, gid: int) -> None:
    """Set both through an O_PATH descriptor, which fchmod(2) refuses; the file cannot be exchanged meanwhile."""
    same_file = f"/proc/self/fd/{handle}"
    os.chown(same_file, uid, gid)
    os.chmod(same_file, mode)


def _kind_at(directory: int, name: str) -> str | None:
    try:
        return _status(os.stat(name, dir_fd=directory, follow_symlinks=False)).kind
    except FileNotFoundError:
        return None


def _status(found: os.stat_result) -> NodeStatus:
    return NodeStatus(
        kind=_KINDS.get(stat.S_IFMT(found.st_mode), "other"),
        major=os.major(found.st_rdev),
        minor=os.minor(found.st_rdev),
        mode=stat.S_IMODE(found.st_mode),
        uid=found.st_uid,
        gid=found.st_gid,
    )


_KINDS = {stat.S_IFCHR: "char", stat.S_IFLNK: "symlink", stat.S_IFDIR: "directory", stat.S_IFREG: "file"}

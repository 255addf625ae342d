"""Which running processes hold GPUs through vfio: the guests.

What a guest has open tells it. With a vfio group that is /dev/vfio/<group>, and the PCI functions are named below
/sys/kernel/iommu_groups/<group>/devices; with iommufd (Linux 6.6) it is /dev/vfio/devices/vfioN, and the function has
vfio-dev/vfioN below its directory of /sys/bus/pci/devices. Both are plain device nodes, so the link in /proc/<pid>/fd
shows them, by the path that the guest's own mount namespace has (libvirt and KubeVirt give it a /dev of its own): only
the end of the path counts. A virtual GPU (mdev) is in a group of its own; its function is in the path that the group's
link leads to.

Nothing else is a sign of a guest: a program may have any name. So all processes are looked at, but only when there is a
vfio group or device at all; kernel threads have nothing open. 1,100 processes with 3,600 descriptors took 0.05 s of
processor time.

When a process was started is field 22 of /proc/<pid>/stat, in clock ticks since boot (CLOCK_BOOTTIME, which goes on
while the host is suspended). With the pid it makes a process this one and no other. The supervisor's logic is on
CLOCK_MONOTONIC, which stands still in suspend, so a start that is first seen after a suspend comes out too early by
that time: the guest then seems older than it is. Who sees a guest at least every minute keeps the first answer.

What cannot be looked at is said, and is not "no guest": a process whose descriptors are hidden (CAP_SYS_PTRACE) is
listed as hidden, and a /proc that does not show all processes (a PID namespace, hidepid=) cannot be observed.

Sources: Documentation/driver-api/vfio.rst and ABI/testing/sysfs-kernel-iommu_groups, sysfs-devices-vfio-dev of Linux;
proc_pid_stat(5), proc_pid_fd(5), proc(5) (hidepid); include/linux/proc_ns.h (PROC_PID_INIT_INO); qemu(1) (-name); the
control groups of systemd-machined (machine-qemu-1-NAME.scope) and of Kubernetes (kubepods...pod<uid>).
"""

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping

from fmsupervisor.errors import CannotObserve
from fmsupervisor.facts import Guest, GuestReading
from fmsupervisor.host.root import HostRoot

_GROUPS = "/sys/kernel/iommu_groups"
_CLASSES = ("/sys/class/vfio", "/sys/class/vfio-dev")
_DEVICES = "/sys/bus/pci/devices"

_NODE = re.compile(r"/vfio/(?:(?:noiommu-)?(?P<group>\d+)|devices/(?P<device>vfio\d+))(?: \(deleted\))?", re.ASCII)
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
_FLAGS, _START_TICKS = 6, 19  # fields 9 and 22 of stat, counted behind the parenthesised name
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD, include/linux/sched.h
_MOST_GUESTS = 64
_TEXT_LIMIT_BYTES = 1 << 16
_MOST_NAME_CHARACTERS = 96

_MACHINE_SCOPE = re.compile(r"/machine-[a-z]+\\x2d\d+\\x2d([^/]+)\.scope")
_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})")
_GENERIC_SOCKETS = frozenset({"api", "clh-api", "ch", "cloud-hypervisor", "firecracker"})


def find_guests(root: HostRoot, gpus: Collection[str], started: Callable[[float], float]) -> GuestReading:
    """The processes that hold any of ``gpus`` (PCI bus ids), by pid.

    ``started`` makes a time on the caller's clock from seconds since boot. Raises ``CannotObserve`` when /proc does not
    show all processes.
    """
    if not gpus or not any(root.list_directory(path) for path in _CLASSES):
        return GuestReading()
    names = root.list_directory("/proc")
    if names is None or ("self" not in names and root.directory == "/"):
        raise CannotObserve("/proc", "it is not mounted")
    if "self" in names and "1" not in names:
        raise CannotObserve("/proc", "it hides the processes of others (hidepid=)")
    if _is_nested(root):
        raise CannotObserve("/proc", "it shows only the processes of a PID namespace (a container)")
    nodes = _Nodes(root, frozenset(gpus))
    guests: list[Guest] = []
    hidden: set[tuple[int, int]] = set()
    for pid in sorted(int(name) for name in names if name.isascii() and name.isdecimal()):
        try:
            held = nodes.held(_links(root, pid))
        except CannotObserve:
            hidden |= _hidden(root, pid)
            continue
        if not held or len(guests) == _MOST_GUESTS:
            continue
        ticks = start_ticks(root, pid)
        if ticks is None:
            hidden |= _hidden(root, pid)
        else:
            guests.append(Guest(pid, ticks, started(ticks / os.sysconf("SC_CLK_TCK")), _name(root, pid), held))
    return GuestReading(tuple(guests), frozenset(hidden))


class _Nodes:
    """Which GPUs each vfio node stands for, looked up when a process has it open."""

    def __init__(self, root: HostRoot, gpus: frozenset[str]) -> None:
        self._root = root
        self._gpus = gpus
        self._known: dict[str, frozenset[str]] = {}

    def held(self, links: Iterator[str]) -> tuple[str, ...]:
        found: set[str] = set()
        for link in links:
            if "/vfio/" in link and (node := _NODE.search(link)) and node.end() == len(link):
                found |= self._functions(node["group"], node["device"])
        return tuple(sorted(found))

    def _functions(self, group: str | None, device: str | None) -> frozenset[str]:
        key = group or device or ""
        if key not in self._known:
            found = self._of_group(key) if group else self._of_device(key)
            self._known[key] = frozenset(found)
        return self._known[key]

    def _of_group(self, group: str) -> Iterator[str]:
        directory = f"{_GROUPS}/{group}/devices"
        for name in self._root.list_directory(directory) or ():
            if name in self._gpus:
                yield name
                continue
            path = (self._root.read_link(f"{directory}/{name}") or "").split("/")
            yield from self._gpus.intersection(path)  # a virtual GPU below its function

    def _of_device(self, device: str) -> Iterator[str]:
        return (gpu for gpu in self._gpus if device in (self._root.list_directory(f"{_DEVICES}/{gpu}/vfio-dev") or ()))


# --- processes


def _is_nested(root: HostRoot) -> bool:
    try:
        namespace = root.read_link("/proc/1/ns/pid")
    except CannotObserve:
        return False  # then the descriptors of its processes are hidden too
    return namespace not in (None, _INITIAL_PID_NAMESPACE)


def _links(root: HostRoot, pid: int) -> Iterator[str]:
    directory = f"/proc/{pid}/fd"
    for name in root.list_directory(directory) or ():
        yield root.read_link(f"{directory}/{name}") or ""


def _hidden(root: HostRoot, pid: int) -> set[tuple[int, int]]:
    """The process, unless it is a kernel thread or has gone."""
    if root.status(f"/proc/{pid}") is None:
        return set()
    is_kernel_thread, ticks = _stat(root, pid)
    return set() if is_kernel_thread else {(pid, ticks or 0)}


def _stat(root: HostRoot, pid: int) -> tuple[bool, int | None]:
    """Whether it is a kernel thread, and its start; the name may hold anything, also parentheses."""
    fields = _read(root, f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(fields) <= _START_TICKS or not (fields[_FLAGS].isdecimal() and fields[_START_TICKS].isdecimal()):
        return False, None
    return bool(int(fields[_FLAGS]) & _KERNEL_THREAD), int(fields[_START_TICKS])


def start_ticks(root: HostRoot, pid: int) -> int | None:
    """When the process was started, in clock ticks since boot; None when it has gone or hides that."""
    return _stat(root, pid)[1]


def _read(root: HostRoot, path: str) -> str:
    """Empty when the process has gone or hides it."""
    try:
        return root.read_text(path, _TEXT_LIMIT_BYTES) or ""
    except CannotObserve:
        return ""


# --- names


def _name(root: HostRoot, pid: int) -> str:
    """What people call the guest; the name of the program when nothing tells it."""
    arguments = _read(root, f"/proc/{pid}/cmdline").rstrip("\0").split("\0")
    groups = _read(root, f"/proc/{pid}/cgroup")
    name = _name_in_arguments(arguments) or _name_in_groups(groups) or _read(root, f"/proc/{pid}/comm").strip()
    pod = _POD.search(groups)
    return _printable(name or "unnamed") + (f" (pod {pod[1].replace('_', '-')})" if pod else "")


def _name_in_arguments(arguments: list[str]) -> str:
    values = _options(arguments)
    if "name" in values:
        return _qemu_name(values["name"])
    if "id" in values and "firecracker" in arguments[0]:
        return values["id"]
    path = values.get("api-socket", "").removeprefix("path=")
    directory, _, file = path.rpartition("/")
    stem = file.removesuffix(".sock")
    return directory.rpartition("/")[2] if stem in _GENERIC_SOCKETS else stem


def _options(arguments: list[str]) -> Mapping[str, str]:
    """``-name VALUE``, ``--name VALUE`` and ``--name=VALUE``; the first of each name."""
    values: dict[str, str] = {}
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = argument.lstrip("-").partition("=")
        if argument.startswith("-"):
            values.setdefault(name, value if equals else following)
    return values


def _qemu_name(value: str) -> str:
    """``guest=NAME,debug-threads=on`` or ``NAME,...``; a comma in a name is doubled. KubeVirt: namespace_name."""
    parts = [part.replace("\0", ",") for part in value.replace(",,", "\0").split(",")]
    named = next((part for part in parts if part.startswith("guest=")), None)
    return named.removeprefix("guest=") if named else parts[0] if "=" not in parts[0] else ""


def _name_in_groups(groups: str) -> str:
    """libvirt's; what cannot be in the name of a unit is escaped there: a backslash, x, two hexadecimal digits."""
    found = _MACHINE_SCOPE.search(groups)
    return re.sub(r"\\x([0-9a-f]{2})", lambda one: chr(int(one[1], 16)), found[1]) if found else ""


def _printable(text: str) -> str:
    cut = text[:_MOST_NAME_CHARACTERS]
    return "".join(character if character.isprintable() else "?" for character in cut)

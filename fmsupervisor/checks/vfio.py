"""Which virtual machines hold GPUs: processes with a vfio device open.

Sources: driver-api/vfio.rst (/dev/vfio/<group>, and /dev/vfio/devices/vfioN from Linux 6.6 on) and
ABI/testing/sysfs-devices-vfio-dev of the kernel's documentation, proc_pid_stat(5) (field 22, starttime). Only processes
that look like a virtual machine are opened: the descriptors of thousands of others would be read for nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fmsupervisor.errors import CannotObserve
from fmsupervisor.facts import PciFunction
from fmsupervisor.host.root import HostRoot

_DEVICES = "/sys/bus/pci/devices"
_MACHINE_NAMES = ("qemu", "kvm", "cloud-hyperviso", "crosvm", "firecracker")
_START_TIME_FIELD = 22  # of /proc/PID/stat, counted from 1
_FIRST_FIELD_AFTER_NAME = 3


@dataclass(frozen=True, slots=True)
class VirtualMachine:
    """One process that holds GPUs. ``started_ticks``: since boot, in clock ticks."""

    pid: int
    name: str
    gpus: tuple[str, ...]
    started_ticks: int | None


@dataclass(frozen=True, slots=True)
class MachineReading:
    """The machines that were found, and how many suspects could not be looked into (we are not root)."""

    machines: tuple[VirtualMachine, ...]
    hidden: int


def find_machines(root: HostRoot, gpus: Sequence[PciFunction]) -> MachineReading:
    """Raises ``CannotObserve`` when /proc or a GPU's group cannot be read."""
    nodes = {path: gpu.pci_bus_id for gpu in gpus for path in _nodes(root, gpu.pci_bus_id)}
    machines, hidden = [], 0
    for pid in _pids(root):
        name = (_read(root, f"/proc/{pid}/comm")).strip()
        if not name.startswith(_MACHINE_NAMES):
            continue
        try:
            held = _held(root, pid, nodes)
        except CannotObserve:
            hidden += 1
            continue
        if held:
            machines.append(VirtualMachine(pid, name, held, started_ticks(root, pid)))
    return MachineReading(tuple(machines), hidden)


def started_ticks(root: HostRoot, pid: int) -> int | None:
    """When the process was started; the fields are counted from behind the name, which may hold anything."""
    fields = _read(root, f"/proc/{pid}/stat").rpartition(")")[2].split()
    place = _START_TIME_FIELD - _FIRST_FIELD_AFTER_NAME
    return int(fields[place]) if len(fields) > place and fields[place].isdecimal() else None


def _nodes(root: HostRoot, bus_id: str) -> list[str]:
    group = (root.read_link(f"{_DEVICES}/{bus_id}/iommu_group") or "").rstrip("/").rpartition("/")[2]
    devices = root.list_directory(f"{_DEVICES}/{bus_id}/vfio-dev") or []
    return [*([f"/dev/vfio/{group}"] if group else []), *(f"/dev/vfio/devices/{name}" for name in devices)]


def _held(root: HostRoot, pid: int, nodes: Mapping[str, str]) -> tuple[str, ...]:
    links = (root.read_link(f"/proc/{pid}/fd/{name}") for name in root.list_directory(f"/proc/{pid}/fd") or ())
    return tuple(sorted({nodes[link] for link in links if link is not None and link in nodes}))


def _pids(root: HostRoot) -> list[int]:
    names = root.list_directory("/proc")
    if names is None:
        raise CannotObserve("/proc", "it does not exist")
    return sorted(int(name) for name in names if name.isascii() and name.isdecimal())


def _read(root: HostRoot, path: str) -> str:
    """Empty when the process has gone."""
    try:
        return root.read_text(path, 4096) or ""
    except CannotObserve:
        return ""

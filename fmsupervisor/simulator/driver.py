"""What nvidia.ko does to /proc and /sys when it comes and goes, on a directory tree.

Order and contents as in the open kernel modules (nv_module_init, nvlink_drivers_init, nvswitch_init: the switches are
bound and /proc/driver/nvidia-nvswitch filled before any GPU is probed; the majors 195 come last). ``emit`` gets each
uevent's subsystem and action at the moment at which the kernel would send it.
"""

import shutil
from collections.abc import Callable

from fmsupervisor.host.root import HostRoot
from fmsupervisor.simulator import hardware, pci_bus
from fmsupervisor.simulator.pci_bus import write

MODULE = "/sys/module/nvidia"
NVSWITCH_PROC = "/proc/driver/nvidia-nvswitch"

_FABRIC_MANAGEMENT = "/proc/driver/nvidia-nvlink/capabilities/fabric-mgmt"
_DYNAMIC_MAJORS = {"nvidia-caps-imex-channels": 511, "nvidia-caps": 510, "nvidia-nvlink": 509, "nvidia-nvswitch": 507}
_FIXED_MAJOR = 195
_FIRST_VERSION_WITH_UUID = 580  # of devices/<bdf>/information

Emit = Callable[[str, str], None]


def is_live(root: HostRoot) -> bool:
    """Whether nvidia.ko is loaded and initialised."""
    return (root.read_text(f"{MODULE}/initstate") or "").strip() == "live"


def version(root: HostRoot) -> str:
    """Version of the loaded module; empty when there is none."""
    return (root.read_text(f"{MODULE}/version") or "").strip()


def begin(root: HostRoot, module_version: str) -> None:
    """First part of the module's initialisation: until the switch driver can be registered."""
    for directory in (MODULE, "/proc/driver/nvidia", f"{NVSWITCH_PROC}/devices", _FABRIC_MANAGEMENT.rpartition("/")[0]):
        root.make_directory(directory)
    identity = f"NVIDIA UNIX Open Kernel Module for x86_64  {module_version}  Release Build  ()  "
    write(root, "/proc/driver/nvidia/version", f"NVRM version: {identity}\nGCC version:  \n".encode())
    write(root, f"{MODULE}/version", f"{module_version}\n".encode())
    write(root, f"{MODULE}/initstate", b"coming\n")
    add_majors(root, _DYNAMIC_MAJORS)
    write(root, _FABRIC_MANAGEMENT, b"DeviceFileMinor: 0\nDeviceFileMode: 256\nDeviceFileModify: 1\n")
    write(root, "/proc/driver/nvidia-nvlink/permissions", b"DeviceFileMode: 438\n")
    write(root, f"{NVSWITCH_PROC}/permissions", b"DeviceFileMode: 438\n")


def finish(root: HostRoot, emit: Emit) -> None:
    """Last part: the fixed majors, and only then the module's own uevent."""
    add_majors(root, {"nvidia": _FIXED_MAJOR, "nvidiactl": _FIXED_MAJOR})
    write(root, f"{MODULE}/initstate", b"live\n")
    emit("module", "add")


def remove(root: HostRoot, emit: Emit) -> None:
    """Everything but the switches, which must be unbound already, goes away."""
    for gpu in pci_bus.gpus(root):
        if pci_bus.driver(root, gpu) == "nvidia":
            pci_bus.unbind(root, gpu)
            emit("pci", "unbind")
    for name in ("nvidia", "nvidia-nvswitch"):
        pci_bus.unregister_driver(root, name)
        emit("drivers", "remove")
    remove_majors(root)
    for directory in ("/proc/driver/nvidia", "/proc/driver/nvidia-nvlink", NVSWITCH_PROC, MODULE):
        shutil.rmtree(root.path(directory), ignore_errors=True)
    emit("module", "remove")


def probe_switch(root: HostRoot, switch: str, emit: Emit) -> None:
    """A switch passes its probe: first /proc, then the driver link, then the uevent."""
    directory = f"{NVSWITCH_PROC}/devices/{switch}"
    root.make_directory(directory)
    text = "BIOS Version: 96.10.5b.00.01\n"
    if int(version(root).partition(".")[0]) >= _FIRST_VERSION_WITH_UUID:
        text += f"UUID: {hardware.switch_uuid(switch)}\nPhysical location ID: {hardware.physical_id(switch):04x}\n"
    write(root, f"{directory}/information", text.encode())
    pci_bus.bind(root, switch, "nvidia-nvswitch")
    emit("pci", "bind")


def release_switch(root: HostRoot, switch: str, emit: Emit) -> None:
    """The driver lets go of a switch."""
    shutil.rmtree(root.path(f"{NVSWITCH_PROC}/devices/{switch}"), ignore_errors=True)
    pci_bus.unbind(root, switch)
    emit("pci", "unbind")


def probe_gpus(root: HostRoot, emit: Emit) -> None:
    """Every GPU without a driver is taken."""
    for gpu in pci_bus.gpus(root):
        if pci_bus.driver(root, gpu) is None:
            pci_bus.bind(root, gpu, "nvidia")
            emit("pci", "bind")


def add_majors(root: HostRoot, majors: dict[str, int]) -> None:
    """Character devices appear in /proc/devices."""
    head, separator, rest = (root.read_text("/proc/devices") or "").partition("\nBlock devices:")
    lines = "".join(f"{major:3d} {name}\n" for name, major in majors.items())
    write(root, "/proc/devices", f"{head}{lines}{separator}{rest}".encode())


def remove_majors(root: HostRoot) -> None:
    """All character devices of the driver leave /proc/devices."""
    lines = (root.read_text("/proc/devices") or "").splitlines(keepends=True)
    kept = [line for line in lines if not line.split()[1:] or not line.split()[1].startswith("nvidia")]
    write(root, "/proc/devices", "".join(kept).encode())

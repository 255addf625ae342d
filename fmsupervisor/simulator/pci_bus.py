"""PCI in a directory tree: functions, drivers and the links between them, as sysfs shows them.

Sources: Documentation/ABI/testing/sysfs-bus-pci; pci_uevent() in drivers/pci/pci-driver.c (names and spelling of the
keys: PCI_CLASS without leading zeros, PCI_ID in upper case). Links are relative, so that they stay inside the tree.
"""

import os
import shutil
import struct
from dataclasses import dataclass

from fmsupervisor.host.root import HostRoot

_DEVICES = "/sys/bus/pci/devices"
_DRIVERS = "/sys/bus/pci/drivers"
_IOMMU_GROUPS = "/sys/kernel/iommu_groups"
_VFIO_CLASS = "/sys/class/vfio"  # one entry for each group that vfio-pci has

_NVIDIA = 0x10DE
_SWITCH_CLASS = 0x068000


@dataclass(frozen=True, slots=True)
class PciDevice:
    """What a function says of itself in its configuration space."""

    pci_bus_id: str
    vendor: int
    device: int
    pci_class: int
    subsystem: tuple[int, int] = (0x10DE, 0x1796)

    @property
    def directory(self) -> str:
        """Its directory in sysfs."""
        return f"/sys/devices/pci{self.pci_bus_id[:7]}/{self.pci_bus_id}"


def nvswitch(pci_bus_id: str) -> PciDevice:
    """A third generation NVSwitch (H100, H200)."""
    return PciDevice(pci_bus_id, _NVIDIA, 0x22A3, _SWITCH_CLASS)


def h200(pci_bus_id: str) -> PciDevice:
    """An H200 SXM GPU."""
    return PciDevice(pci_bus_id, _NVIDIA, 0x2335, 0x030200, (0x10DE, 0x18BE))


def add(root: HostRoot, device: PciDevice) -> None:
    """The function appears on the bus, without a driver. Nothing happens when it is there."""
    if os.path.lexists(root.path(f"{_DEVICES}/{device.pci_bus_id}")):
        return
    directory = device.directory
    root.make_directory(directory)
    texts = {
        "vendor": f"0x{device.vendor:04x}\n",
        "device": f"0x{device.device:04x}\n",
        "class": f"0x{device.pci_class:06x}\n",
        "subsystem_vendor": f"0x{device.subsystem[0]:04x}\n",
        "subsystem_device": f"0x{device.subsystem[1]:04x}\n",
        "driver_override": "(null)\n",
        "enable": "1\n",
        "uevent": _uevent(device, None),
    }
    for name, text in texts.items():
        write(root, f"{directory}/{name}", text.encode())
    write(root, f"{directory}/config", _configuration(device))
    link(root, f"{directory}/subsystem", "/sys/bus/pci")
    link(root, f"{_DEVICES}/{device.pci_bus_id}", directory)
    group = f"{_IOMMU_GROUPS}/{_group(device.pci_bus_id)}"
    link(root, f"{group}/devices/{device.pci_bus_id}", directory)
    link(root, f"{directory}/iommu_group", group)


def remove(root: HostRoot, pci_bus_id: str) -> None:
    """The function leaves the bus. Its driver must be unbound before."""
    entry = root.path(f"{_DEVICES}/{pci_bus_id}")
    if os.path.lexists(entry):
        real = os.path.realpath(entry)
        group = os.path.realpath(f"{real}/iommu_group")
        os.unlink(entry)
        shutil.rmtree(real)
        shutil.rmtree(group)


def driver(root: HostRoot, pci_bus_id: str) -> str | None:
    """Name of the bound driver."""
    target = root.read_link(f"{_DEVICES}/{pci_bus_id}/driver")
    return None if target is None else os.path.basename(target)


def bind(root: HostRoot, pci_bus_id: str, name: str) -> None:
    """Bind the function, which must have no driver, to the driver ``name``, which is registered if need be."""
    register_driver(root, name)
    directory = f"{_DEVICES}/{pci_bus_id}"
    link(root, f"{directory}/driver", f"{_DRIVERS}/{name}")
    link(root, f"{_DRIVERS}/{name}/{pci_bus_id}", _resolved(root, directory))
    if name == "vfio-pci":
        root.make_directory(_vfio_group(pci_bus_id))
    _rewrite_uevent(root, pci_bus_id, name)


def unbind(root: HostRoot, pci_bus_id: str) -> None:
    """Take the driver away from the function, if it has one."""
    name = driver(root, pci_bus_id)
    if name is not None:
        os.unlink(root.path(f"{_DEVICES}/{pci_bus_id}/driver"))
        os.unlink(root.path(f"{_DRIVERS}/{name}/{pci_bus_id}"))
        if name == "vfio-pci":
            os.rmdir(root.path(_vfio_group(pci_bus_id)))
        _rewrite_uevent(root, pci_bus_id, None)


def register_driver(root: HostRoot, name: str) -> None:
    """Make the driver's directory."""
    root.make_directory(f"{_DRIVERS}/{name}")


def unregister_driver(root: HostRoot, name: str) -> None:
    """Remove the driver's directory, which must have no bound function left."""
    shutil.rmtree(root.path(f"{_DRIVERS}/{name}"), ignore_errors=True)


def functions(root: HostRoot, pci_class: int | None = None) -> list[str]:
    """Bus ids of NVIDIA's functions, of one class or of all."""
    found = []
    for pci_bus_id in root.list_directory(_DEVICES) or []:
        vendor = root.read_text(f"{_DEVICES}/{pci_bus_id}/vendor")
        if vendor is not None and int(vendor, 16) == _NVIDIA:
            text = root.read_text(f"{_DEVICES}/{pci_bus_id}/class")
            if text is not None and (pci_class is None or int(text, 16) == pci_class):
                found.append(pci_bus_id)
    return found


def switches(root: HostRoot) -> list[str]:
    """NVSwitches that PCI shows."""
    return functions(root, _SWITCH_CLASS)


def gpus(root: HostRoot) -> list[str]:
    """H200 GPUs that PCI shows."""
    return functions(root, 0x030200)


def fall_off_the_bus(root: HostRoot, pci_bus_id: str) -> None:
    """Reads of the configuration space give ones from now on; everything else stays as it was."""
    write(root, f"{_DEVICES}/{pci_bus_id}/config", b"\xff" * 256)


def write(root: HostRoot, logical: str, content: bytes, mode: int = 0o644) -> None:
    """Replace a file in one step; the file system need not be asked to keep it."""
    root.write_atomically(logical, content, mode, durable=False)


def _group(pci_bus_id: str) -> int:
    """Each device is alone in its group."""
    return int(pci_bus_id.split(":")[1], 16)


def _vfio_group(pci_bus_id: str) -> str:
    return f"{_VFIO_CLASS}/{_group(pci_bus_id)}"


def _rewrite_uevent(root: HostRoot, pci_bus_id: str, name: str | None) -> None:
    path = f"{_DEVICES}/{pci_bus_id}/uevent"
    lines = [line for line in (root.read_text(path) or "").splitlines() if not line.startswith("DRIVER=")]
    write(root, path, "".join(f"{line}\n" for line in ([f"DRIVER={name}"] if name else []) + lines).encode())


def _uevent(device: PciDevice, name: str | None) -> str:
    subsystem = f"{device.subsystem[0]:04X}:{device.subsystem[1]:04X}"
    alias = (
        f"pci:v{device.vendor:08X}d{device.device:08X}sv{device.subsystem[0]:08X}sd{device.subsystem[1]:08X}"
        f"bc{device.pci_class >> 16:02X}sc{device.pci_class >> 8 & 0xFF:02X}i{device.pci_class & 0xFF:02X}"
    )
    return (
        (f"DRIVER={name}\n" if name else "")
        + f"PCI_CLASS={device.pci_class:X}\nPCI_ID={device.vendor:04X}:{device.device:04X}\n"
        + f"PCI_SUBSYS_ID={subsystem}\nPCI_SLOT_NAME={device.pci_bus_id}\nMODALIAS={alias}\n"
    )


def _configuration(device: PciDevice) -> bytes:
    """The first 256 bytes of configuration space (PCI Local Bus Specification 6.1)."""
    head = struct.pack("<HHHHI", device.vendor, device.device, 0x0006, 0x0010, device.pci_class << 8 | 0xA1)
    return (head + bytes(32) + struct.pack("<HH", *device.subsystem)).ljust(256, b"\0")


def link(root: HostRoot, logical: str, target: str) -> None:
    """A relative symbolic link at ``logical`` to the logical path ``target``."""
    real = root.path(logical)
    os.makedirs(os.path.dirname(real), exist_ok=True)
    parent = os.path.realpath(os.path.dirname(real))
    os.symlink(os.path.relpath(os.path.realpath(root.path("/")) + target, parent), real)


def _resolved(root: HostRoot, logical: str) -> str:
    """Where the links of ``logical`` lead, as a logical path, even when the tree itself stands behind a link."""
    return "/" + os.path.relpath(os.path.realpath(root.path(logical)), os.path.realpath(root.path("/")))

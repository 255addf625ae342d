"""NVSwitches and GPUs on the PCI bus: /sys/bus/pci/devices.

Source: Linux drivers/pci/pci-sysfs.c and Documentation/ABI/testing/sysfs-bus-pci; the class of an NVSwitch from
``nvswitch_pci_table`` of NVIDIA's linux_nvswitch.c (vendor 10de, class exactly 0x068000, any device id). No driver
needs to be loaded for any of this. The bus is read again at every uevent, so functions of other vendors cost one read
each.
"""

import re
from dataclasses import dataclass

from fmsupervisor.conditions import Code
from fmsupervisor.errors import CannotObserve
from fmsupervisor.facts import PciFunction, Problem
from fmsupervisor.host.root import HostRoot

DEVICES = "/sys/bus/pci/devices"

_VENDOR_NVIDIA = 0x10DE
_CLASS_NVSWITCH = 0x068000
_CLASSES_GPU = (0x0300, 0x0302)  # VGA controller, 3D controller; without the programming interface
_NUMBER = re.compile(rb"\s*(?:0x)?[0-9a-fA-F]{1,8}\s*")  # "0x%04x\n", "0x%06x\n"
_BUS_ID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.ASCII)


@dataclass(frozen=True, slots=True)
class PciReading:
    """The NVIDIA functions on the bus, by bus id, and what could not be read."""

    switches: tuple[PciFunction, ...]
    gpus: tuple[PciFunction, ...]
    problems: tuple[Problem, ...] = ()


def is_bus_id(text: str) -> bool:
    """Whether the text is a PCI bus id as the kernel writes it: ``dddd:bb:dd.f`` in lower case."""
    return _BUS_ID.fullmatch(text) is not None


def read_pci(root: HostRoot) -> PciReading:
    """Read the bus; a function that cannot be read becomes a problem.

    Raises ``CannotObserve`` when the bus cannot be listed. A kernel without a PCI bus has no devices, but
    without /sys/bus nothing is known: /sys is not mounted.
    """
    names = root.list_directory(DEVICES)
    if names is None and not root.is_directory("/sys/bus"):
        raise CannotObserve(DEVICES, "/sys is not mounted")
    switches: list[PciFunction] = []
    gpus: list[PciFunction] = []
    problems: list[Problem] = []
    for bus_id in names or ():
        try:
            if _read_number(root, f"{DEVICES}/{bus_id}/vendor") != _VENDOR_NVIDIA:
                continue
            pci_class = _read_number(root, f"{DEVICES}/{bus_id}/class")
            if pci_class == _CLASS_NVSWITCH:
                switches.append(_read_function(root, bus_id))
            elif pci_class is not None and pci_class >> 8 in _CLASSES_GPU:
                gpus.append(_read_function(root, bus_id))
        except CannotObserve as error:
            problems.append(Problem(Code.HARDWARE_UNOBSERVABLE, str(error), bus_id))
    return PciReading(tuple(switches), tuple(gpus), tuple(problems))


def _read_function(root: HostRoot, bus_id: str) -> PciFunction:
    directory = f"{DEVICES}/{bus_id}"
    device = _read_number(root, f"{directory}/device")
    if device is None:
        raise CannotObserve(f"{directory}/device", "it does not exist")
    driver = root.read_link(f"{directory}/driver")
    return PciFunction(
        pci_bus_id=bus_id,
        device_id=f"{_VENDOR_NVIDIA:04x}:{device:04x}",
        driver=driver.rstrip("/").rpartition("/")[2] if driver else None,
        responds=_read_responds(root, f"{directory}/config"),
    )


def _read_responds(root: HostRoot, path: str) -> bool | None:
    """A device that fell off the bus reads as all ones, while every cached file of /sys still looks healthy."""
    try:
        identity = root.read_bytes(path, 4)
    except CannotObserve:
        return None
    return None if identity is None or len(identity) < 4 else identity != b"\xff\xff\xff\xff"  # noqa: PLR2004 (vendor, device)


def _read_number(root: HostRoot, path: str) -> int | None:
    """A file such as "0x10de"; None when the device has just gone."""
    content = root.read_bytes(path, 64)
    if content is None:
        return None
    if not _NUMBER.fullmatch(content):  # int() also takes signs and underscores
        raise CannotObserve(path, f"{content[:32]!r} is not a hexadecimal number")
    return int(content, 16)

"""What nvidia.ko and the kernel show in /proc and /sys/module about the driver.

Sources: Linux fs/char_dev.c ``chrdev_show`` (/proc/devices) and kernel/module/main.c ``show_initstate``; NVIDIA's
open-gpu-kernel-modules 515 to 595: procfs_nvswitch.c, nv-procfs.c, nv-caps.c, nvlink_caps.c. Each function returns
None when its file does not exist and raises ``CannotObserve`` when it cannot be read or makes no sense.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fmsupervisor.errors import CannotObserve
from fmsupervisor.facts import LoadedModule
from fmsupervisor.host.pci import is_bus_id
from fmsupervisor.host.root import HostRoot

PROC_DEVICES = "/proc/devices"
MODULE = "/sys/module/nvidia"
DRIVER_VERSION = "/proc/driver/nvidia/version"
NVSWITCH_DEVICES = "/proc/driver/nvidia-nvswitch/devices"
NVSWITCH_PERMISSIONS = "/proc/driver/nvidia-nvswitch/permissions"
FABRIC_MANAGEMENT = "/proc/driver/nvidia-nvlink/capabilities/fabric-mgmt"
KERNEL_RELEASE = "/proc/sys/kernel/osrelease"

# "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.211.01  Release Build  (user@host)  <date>"
_VERSION = re.compile(r"Kernel Module\b.*?\s(\d{3,}\.\d+(?:\.\d+)?)\b", re.ASCII)
_CHARACTER_DEVICES = "Character devices:"
_MAJOR = re.compile(r"\s*(\d{1,4}) (\S+)", re.ASCII)  # "%3d name"; a major has 12 bits


@dataclass(frozen=True, slots=True)
class Capability:
    """A capability file of nvidia-caps: the device that stands for it, and the mode it should have."""

    minor: int  # DeviceFileMinor
    mode: int | None  # DeviceFileMode, written in decimal


def read_majors(root: HostRoot) -> Mapping[str, int]:
    """Majors of the character devices whose name begins with ``nvidia``; block devices do not count."""
    text = _read_required(root, PROC_DEVICES)
    if _CHARACTER_DEVICES not in text:
        raise CannotObserve(PROC_DEVICES, "it lists no character devices")
    majors: dict[str, int] = {}
    is_character_section = False
    for line in text.splitlines():
        if line.endswith(":"):
            is_character_section = line == _CHARACTER_DEVICES
        elif is_character_section and (found := _MAJOR.fullmatch(line)) and found[2].startswith("nvidia"):
            majors.setdefault(found[2], int(found[1]))
    return majors


def read_module(root: HostRoot) -> LoadedModule | None:
    """nvidia.ko as loaded; the version is None when neither /sys nor /proc tells it."""
    initstate = root.read_text(f"{MODULE}/initstate", 64)
    if initstate is None:
        return None
    version = (root.read_text(f"{MODULE}/version", 256) or "").strip()
    return LoadedModule(initstate.strip(), version or _read_driver_version(root))


def read_probed_switches(root: HostRoot) -> tuple[str, ...] | None:
    """Bus ids of the switches whose probe succeeded, blacklisted ones included. The directory comes with nvidia.ko."""
    names = root.list_directory(NVSWITCH_DEVICES)
    return None if names is None else tuple(name for name in names if is_bus_id(name))


def read_nvswitch_mode(root: HostRoot) -> int | None:
    """The mode that nvidia-modprobe gives the nvswitch nodes: 0666 in every driver so far."""
    fields = _read_fields(root, NVSWITCH_PERMISSIONS)
    return None if fields is None else fields.get("DeviceFileMode")


def read_fabric_management(root: HostRoot) -> Capability | None:
    """The capability that lets Fabric Manager configure switches without CAP_SYS_ADMIN."""
    fields = _read_fields(root, FABRIC_MANAGEMENT)
    if fields is None:
        return None
    if "DeviceFileMinor" not in fields:
        raise CannotObserve(FABRIC_MANAGEMENT, "it has no DeviceFileMinor")
    return Capability(fields["DeviceFileMinor"], fields.get("DeviceFileMode"))


def read_kernel_release(root: HostRoot) -> str:
    """The running kernel's release, as ``uname -r``."""
    return _read_required(root, KERNEL_RELEASE).strip()


def _read_required(root: HostRoot, path: str) -> str:
    """A file that every kernel has: its absence means that /proc is not mounted."""
    text = root.read_text(path)
    if text is None:
        raise CannotObserve(path, "it does not exist")
    return text


def _read_driver_version(root: HostRoot) -> str | None:
    found = _VERSION.search(root.read_text(DRIVER_VERSION, 4096) or "")
    return found[1] if found else None


def _read_fields(root: HostRoot, path: str) -> dict[str, int] | None:
    """Lines of the form "DeviceFileMode: 438"; others are skipped."""
    text = root.read_text(path, 4096)
    if text is None:
        return None
    found = re.findall(r"^(\w+):[ \t]*(\d{1,9})[ \t]*$", text, re.MULTILINE | re.ASCII)
    return {name: int(value) for name, value in found}

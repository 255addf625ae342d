"""NVLink-5 boards: InfiniBand devices whose PCI vital product data says ``SW_MNG``.

On HGX B200/B300 the switches are no PCI devices; the host reaches them through ConnectX-7 functions that carry the
VPD field ``SMDL=SW_MNG`` (Fabric Manager User Guide). Ordinary ConnectX adapters lack it. Source:
/sys/class/infiniband of Linux drivers/infiniband/core/sysfs.c, ``vpd`` of drivers/pci/vpd.c (at most 32 KiB; the
kernel stops at the end tag). Reading VPD is slow, up to milliseconds a device, so it is for hosts that show no
NVSwitch on PCI.
"""

from fmsupervisor.conditions import Code
from fmsupervisor.errors import CannotObserve
from fmsupervisor.facts import Problem
from fmsupervisor.host.pci import is_bus_id
from fmsupervisor.host.root import HostRoot

DEVICES = "/sys/class/infiniband"

_VPD_LIMIT_BYTES = 1 << 15  # PCI_VPD_ADDR_MASK + 1
_SWITCH_MANAGEMENT = b"SW_MNG"


def find_nvlink5_bridges(root: HostRoot) -> tuple[tuple[str, ...], tuple[Problem, ...]]:
    """PCI bus ids of the functions that manage NVLink-5 switches, and what could not be read.

    No InfiniBand, or a device without VPD, is normal.
    """
    bridges: list[str] = []
    problems: list[Problem] = []
    try:
        names = root.list_directory(DEVICES) or []
    except CannotObserve as error:
        return (), (Problem(Code.HARDWARE_UNOBSERVABLE, str(error), DEVICES),)
    for name in names:
        try:
            vpd = root.read_bytes(f"{DEVICES}/{name}/device/vpd", _VPD_LIMIT_BYTES)
            if vpd is not None and _SWITCH_MANAGEMENT in vpd:
                bridges.append(_bus_id(root, name))
        except CannotObserve as error:
            problems.append(Problem(Code.HARDWARE_UNOBSERVABLE, str(error), name))
    return tuple(sorted(bridges)), tuple(problems)


def _bus_id(root: HostRoot, name: str) -> str:
    target = (root.read_link(f"{DEVICES}/{name}/device") or "").rpartition("/")[2]
    return target if is_bus_id(target) else name

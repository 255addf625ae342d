"""What a reading of the host could not read is taken to be as it was.

A reader that fails on one file reports the rest and a problem whose subject is the path or the PCI bus id (FMS-310).
Without this, a switch whose directory could not be read would be a lost switch, and a module that could not be seen an
unloaded one.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from fmsupervisor.conditions import Code
from fmsupervisor.facts import Host, PciFunction, Unknown

# Where each part of a reading comes from (host.procfs).
_SOURCES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "/proc/sys/kernel/osrelease": ("kernel_release",),
        "/proc/driver/nvidia-nvswitch/devices": ("probed_switches",),
        "/proc/devices": ("majors",),
        "/proc/driver/nvidia-nvlink/capabilities/fabric-mgmt": ("fabric_management_minor", "fabric_management_mode"),
    }
)


def with_unread_parts(before: Host | None, host: Host) -> Host:
    """``host`` with the parts that it could not read taken from ``before``."""
    if before is None:
        return host
    unread = {problem.subject for problem in host.problems if problem.code == Code.HARDWARE_UNOBSERVABLE}
    names = [name for path, fields in _SOURCES.items() if path in unread for name in fields]
    parts: dict[str, Any] = {name: getattr(before, name) for name in names}
    if isinstance(host.module, Unknown):
        parts["module"] = before.module
    return replace(
        host,
        switches=_with_unread_functions(before.switches, host.switches, unread),
        gpus=_with_unread_functions(before.gpus, host.gpus, unread),
        **parts,
    )


def _with_unread_functions(
    before: tuple[PciFunction, ...], now: tuple[PciFunction, ...], unread: set[str]
) -> tuple[PciFunction, ...]:
    known = {function.pci_bus_id: function for function in before}
    found = {
        function.pci_bus_id: _with_known_answer(known.get(function.pci_bus_id), function)
        for function in (*(one for one in before if one.pci_bus_id in unread), *now)
    }
    return tuple(found[bus_id] for bus_id in sorted(found))


def _with_known_answer(before: PciFunction | None, function: PciFunction) -> PciFunction:
    """A configuration space that cannot be read does not make a dead device answer again."""
    if function.responds is not None or before is None:
        return function
    return replace(function, responds=before.responds)

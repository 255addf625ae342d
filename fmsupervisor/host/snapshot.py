"""One reading of everything that the kernel shows about switches, GPUs and the driver.

What cannot be read becomes ``Unknown`` or a problem, so that one bad file hides nothing else. The one exception is
the list of PCI devices itself: without it nothing can be said about the machine, least of all that it has no
switches.
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import TypeVar

from fmsupervisor.conditions import Code
from fmsupervisor.errors import CannotObserve
from fmsupervisor.facts import EMPTY, Host, LoadedModule, Problem, Unknown
from fmsupervisor.host import procfs
from fmsupervisor.host.infiniband import find_nvlink5_bridges
from fmsupervisor.host.pci import read_pci
from fmsupervisor.host.root import HostRoot

_Value = TypeVar("_Value")


def observe_host(root: HostRoot) -> Host:
    """Read everything. Raises ``CannotObserve`` only when the PCI devices cannot be listed: keep the last verdict."""
    pci = read_pci(root)
    problems = list(pci.problems)

    def attempt(read: Callable[[HostRoot], _Value | None]) -> _Value | None:
        """The reader's answer, or None and a problem."""
        try:
            return read(root)
        except CannotObserve as error:
            problems.append(Problem(Code.HARDWARE_UNOBSERVABLE, str(error), error.path))
            return None

    bridges: tuple[str, ...] = ()
    if not pci.switches:  # no board has both kinds, and VPD is slow to read
        bridges, unread = find_nvlink5_bridges(root)
        problems += unread
    majors = attempt(procfs.read_majors)
    fabric_management = attempt(procfs.read_fabric_management)
    return Host(
        kernel_release=attempt(procfs.read_kernel_release) or "",
        switches=pci.switches,
        gpus=pci.gpus,
        nvlink5_bridges=bridges,
        module=_module(root),
        probed_switches=attempt(procfs.read_probed_switches),
        majors=EMPTY if majors is None else MappingProxyType(dict(majors)),
        fabric_management_minor=fabric_management.minor if fabric_management else None,
        fabric_management_mode=fabric_management.mode if fabric_management else None,
        problems=tuple(problems),
    )


def _module(root: HostRoot) -> LoadedModule | Unknown | None:
    try:
        return procfs.read_module(root)
    except CannotObserve as error:
        return Unknown(str(error))

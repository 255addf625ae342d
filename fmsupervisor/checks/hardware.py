"""Switches and GPUs on the PCI bus: how many, what they are, who drives them."""

from collections import Counter
from collections.abc import Iterator, Sequence

from fmsupervisor.checks import boards
from fmsupervisor.checks.context import Context
from fmsupervisor.checks.finding import Check, Finding, Verdict, cannot_tell, failed, judged, ok, warning
from fmsupervisor.conditions import Code
from fmsupervisor.core.switches import GPU_DRIVER, SWITCH_DRIVER
from fmsupervisor.errors import CannotObserve
from fmsupervisor.facts import LoadedModule, PciFunction, Problem
from fmsupervisor.host.procfs import NVSWITCH_DEVICES

VFIO = "vfio-pci"
_DEVICES = "/sys/bus/pci/devices"


def check_pci(context: Context) -> Finding:
    """What is on the bus, with the driver of each."""
    host = context.host
    if host.problems:
        listing = "; ".join(problem.detail for problem in host.problems)
        return Finding(Verdict.CANNOT_TELL, listing, codes=(Code.HARDWARE_UNOBSERVABLE,))
    details = [f"{kind} {_describe(function)}" for kind, function in _functions(context)]
    found = f"{_count(host.switches, 'NVSwitch', 'NVSwitches')}, {_count(host.gpus, 'GPU', 'GPUs')}"
    if host.gpus and not host.switches and boards.gpu_name(host.gpus):
        details.append(
            f"GPUs as of an {boards.gpu_name(host.gpus)} board without switches: if this is a guest, see check --guest;"
            " if it is a host that must have switches, set switches.expected"
        )
    return ok(found, *details)


def check_board(context: Context) -> Finding:
    """Which board this is by its device ids, and whether its GPUs are all there."""
    host = context.host
    context.require_every_function()
    if host.nvlink5_bridges and not host.switches:
        return failed(Code.NVLINK5_UNSUPPORTED, f"NVLink 5 board: bridge at {', '.join(host.nvlink5_bridges)}")
    board = boards.find_board(host.switches)
    if board is None:
        ids = ", ".join(sorted({switch.device_id for switch in host.switches})) or "none"
        return warning(Code.BOARD_UNKNOWN, f"the NVSwitches (device ids: {ids}) are of no board that is known here")
    gpus = boards.board_gpus(host.gpus)
    name = boards.gpu_name(gpus) or board.name
    if len(gpus) % board.gpus:
        return warning(Code.BOARD_UNKNOWN, f"{name}: {len(gpus)} GPUs on the bus, a board has {board.gpus}")
    return ok(f"{name} 8-GPU: {len(host.switches)} NVSwitches, {len(gpus)} GPUs")


def check_switch_count(context: Context) -> Finding:
    """Whether all switches are on the bus: as many as the settings say, else as the board has."""
    switches = context.host.switches
    if context.host.nvlink5_bridges and not switches:
        return ok("the switches of an NVLink 5 board are no PCI functions")
    board = boards.find_board(switches)
    expected = context.settings.switches.expected
    if isinstance(expected, int):
        wanted, why = expected, "switches.expected"
    elif board is not None:
        wanted, why = boards.wanted_switches(board, len(switches)), f"an {board.name} class board"
    else:
        return ok(f"{len(switches)} on the bus; how many there must be is not known (switches.expected)")
    listing = ", ".join(switch.pci_bus_id for switch in switches) or "none"
    if len(switches) < wanted:
        context.require_every_function()
        return failed(Code.SWITCH_MISSING, f"{len(switches)} of {wanted} are on the bus ({why}): {listing}")
    return ok(f"{len(switches)} of {wanted} ({why})")


def check_switch_drivers(context: Context) -> Finding:
    """Whether every switch answers and belongs to the host's driver, or will once nvidia.ko is loaded."""
    host = context.host
    context.require_read(NVSWITCH_DEVICES)
    if host.probed_switches is None and any(switch.driver == SWITCH_DRIVER for switch in host.switches):
        raise CannotObserve(NVSWITCH_DEVICES, "it does not show the switches that the driver has")
    problems = list(_switch_problems(host.switches, context.loaded, frozenset(host.probed_switches or ())))
    drivers = Counter(switch.driver or "no driver" for switch in host.switches)
    if len(drivers) > 1 and any(problem.code is Code.SWITCH_PASSED_THROUGH for problem in problems):
        listing = ", ".join(f"{count} {driver}" for driver, count in drivers.items())
        problems.append(Problem(Code.SWITCH_PASSED_THROUGH, f"the switches have several owners: {listing}"))
    listing = ", ".join(f"{count} {driver}" for driver, count in drivers.items()) or "no switch"
    if not problems:
        context.require_every_function()
        _require_answers(context)
    return judged(problems, listing + ("" if context.loaded else "; nvidia.ko is not loaded yet"))


def _require_answers(context: Context) -> None:
    """It is known of every switch whether it answers. Raises ``CannotObserve``."""
    for switch in context.host.switches:
        path = f"{_DEVICES}/{switch.pci_bus_id}/config"
        if switch.responds is None and len(context.root.read_bytes(path, 4) or b"") < 4:  # noqa: PLR2004 - vendor, device
            raise CannotObserve(path, "it is missing or too short, so it is not known whether the switch answers")


def _switch_problems(
    switches: Sequence[PciFunction], loaded: LoadedModule | None, probed: frozenset[str]
) -> Iterator[Problem]:
    for switch in switches:
        bus_id = switch.pci_bus_id
        if switch.responds is False:
            yield Problem(Code.SWITCH_NOT_RESPONDING, f"{bus_id} reads ff", bus_id)
        elif switch.driver not in (None, SWITCH_DRIVER):
            yield Problem(Code.SWITCH_PASSED_THROUGH, f"{bus_id} is bound to {switch.driver}", bus_id)
        elif loaded and loaded.initstate == "live" and (switch.driver is None or bus_id not in probed):
            yield Problem(Code.SWITCH_NOT_PROBED, f"{bus_id} has no working driver although nvidia.ko is live", bus_id)


def check_gpu_drivers(context: Context) -> Finding:
    """Whether loading nvidia.ko takes a GPU that is meant for a guest, or has taken one."""
    host, module = context.host, context.settings.module
    drivers = Counter(gpu.driver or "no driver" for gpu in host.gpus)
    listing = ", ".join(f"{count} {driver}" for driver, count in drivers.items()) or "no GPU"
    problems = [
        Problem(Code.GPU_TAKEN, f"{gpu.pci_bus_id} is bound to {GPU_DRIVER}", gpu.pci_bus_id)
        for gpu in host.gpus
        if gpu.driver == GPU_DRIVER and context.settings.switches.gpus_belong_to_guests
    ]
    free = [gpu.pci_bus_id for gpu in host.gpus if gpu.driver is None]
    if free and context.loaded is None and module.load:
        found = f"no driver is bound to {', '.join(free)}"
        if module.gpu_guard == "refuse":
            problems.append(Problem(Code.GPU_WOULD_BE_TAKEN, found))
        elif module.gpu_guard == "off" and not context.settings.switches.gpus_belong_to_guests:
            listing += "; nvidia.ko will take them, as they belong to the host"
        elif module.gpu_guard == "off":
            return warning(Code.GPU_WOULD_BE_TAKEN, f"{found}, and module.gpu_guard is off: nvidia.ko will take it")
        else:
            listing += "; module.gpu_guard is no-register, so nvidia.ko takes none"
    if not problems:
        context.require_every_function()
    return judged(problems, listing)


def check_iommu_groups(context: Context) -> Finding:
    """Whether each GPU for guests is alone in its IOMMU group, so that it can be given away by itself."""
    for_guests = [gpu for gpu in context.host.gpus if gpu.driver == VFIO]
    if not for_guests:
        context.require_every_function()
        return ok("no GPU is bound to vfio-pci")
    shared, without = [], []
    for gpu in for_guests:
        link = context.root.read_link(f"{_DEVICES}/{gpu.pci_bus_id}/iommu_group")
        if link is None:
            without.append(gpu.pci_bus_id)
            continue
        group = link.rstrip("/").rpartition("/")[2]
        members = context.root.list_directory(f"/sys/kernel/iommu_groups/{group}/devices")
        if members is None:
            return cannot_tell(f"/sys/kernel/iommu_groups/{group}/devices does not exist")
        others = [member for member in members if member != gpu.pci_bus_id and not _is_bridge(context, member)]
        if others:
            shared.append(f"{gpu.pci_bus_id} shares group {group} with {', '.join(others)}")
    if without:
        return warning(Code.IOMMU_GROUP, f"without an IOMMU group: {', '.join(without)}")
    if shared:
        return warning(Code.IOMMU_GROUP, "; ".join(shared))
    context.require_every_function()
    return ok(f"{len(for_guests)} GPUs, each alone in its group")


def _is_bridge(context: Context, bus_id: str) -> bool:
    """A PCI bridge stays with the host; vfio does not mind it (drivers/vfio/vfio_iommu_type1.c, pcieport)."""
    pci_class = context.root.read_text(f"{_DEVICES}/{bus_id}/class", 64) or ""
    return pci_class.startswith("0x0604")


def _functions(context: Context) -> Iterator[tuple[str, PciFunction]]:
    yield from (("NVSwitch", switch) for switch in context.host.switches)
    yield from (("GPU", gpu) for gpu in context.host.gpus)


def _describe(function: PciFunction) -> str:
    silent = "; does not answer" if function.responds is False else ""
    return f"{function.pci_bus_id} {function.device_id}, {function.driver or 'no driver'}{silent}"


def _count(functions: Sequence[PciFunction], one: str, many: str) -> str:
    return f"{len(functions)} {one if len(functions) == 1 else many}"


CHECKS = (
    Check("pci", "NVIDIA functions on the PCI bus", (Code.HARDWARE_UNOBSERVABLE,), check_pci, is_for_any_machine=True),
    Check("board", "The board is known", (Code.NVLINK5_UNSUPPORTED, Code.BOARD_UNKNOWN), check_board),
    Check("switch-count", "All NVSwitches are on the bus", (Code.SWITCH_MISSING,), check_switch_count),
    Check(
        "switch-drivers",
        "Every NVSwitch belongs to the host's driver",
        (Code.SWITCH_NOT_RESPONDING, Code.SWITCH_PASSED_THROUGH, Code.SWITCH_NOT_PROBED),
        check_switch_drivers,
    ),
    Check(
        "gpu-drivers",
        "No GPU of a guest is taken by the host",
        (Code.GPU_TAKEN, Code.GPU_WOULD_BE_TAKEN),
        check_gpu_drivers,
    ),
    Check("iommu-groups", "GPUs can be given to guests one by one", (Code.IOMMU_GROUP,), check_iommu_groups),
)

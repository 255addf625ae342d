"""Device nodes, the pinning of GPUs to vfio-pci, and guests that hold GPUs.

Sources: modprobe.d(5) (options, softdep), kernel-parameters.txt (``vfio-pci.ids=``) and ABI/testing/sysfs-bus-pci
(driver_override) of the kernel's documentation.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fmsupervisor.checks.context import Context
from fmsupervisor.checks.finding import Check, Finding, cannot_tell, failed, judged, ok, warning
from fmsupervisor.checks.hardware import VFIO
from fmsupervisor.conditions import Code
from fmsupervisor.core.guests import described
from fmsupervisor.facts import GuestReading, PciFunction, Problem, WantedNode
from fmsupervisor.host.device_nodes import CAPABILITY_DIRECTORY, resolve_owner, wanted_nodes
from fmsupervisor.host.guests import find_guests, start_ticks
from fmsupervisor.host.procfs import FABRIC_MANAGEMENT, NVSWITCH_DEVICES, PROC_DEVICES
from fmsupervisor.host.root import HostRoot

_NODES = {
    "nvidia-nvswitchctl": "/dev/nvidia-nvswitchctl",
    "nvidia-nvlink": "/dev/nvidia-nvlink",
    "nvidiactl": "/dev/nvidiactl",
}
_MODPROBE_DIRECTORIES = ("/etc/modprobe.d", "/run/modprobe.d", "/usr/lib/modprobe.d", "/lib/modprobe.d")


# --- nodes


def check_nodes(context: Context) -> Finding:
    """Type, numbers, mode and owner of every node; nothing else in its place."""
    settings = context.settings.device_nodes
    if not settings.manage:
        return ok("device_nodes.manage is empty: /dev is left alone")
    problems = list(_conflicts(context))
    if not problems:
        context.require_read(PROC_DEVICES, FABRIC_MANAGEMENT, NVSWITCH_DEVICES)
    notes = []
    uid, gid = resolve_owner(settings.owner, settings.group)
    for node in wanted_nodes(context.host, None, settings, uid, gid):
        difference = _difference(context, node)
        if difference and context.daemon is not None:
            problems.append(Problem(Code.NODE_FAILED, difference, node.path))
        elif difference:
            notes.append(difference)
    right = "all nodes are right" if context.loaded else "nvidia.ko is not loaded, so there are no nodes yet"
    return judged(problems, "; ".join(notes) + ": fmsupervisor makes them right" if notes else right)


def _conflicts(context: Context) -> Iterator[Problem]:
    """Something that is no device at a path that will be needed, whether the driver is loaded or not."""
    manage = context.settings.device_nodes.manage
    paths = [path for family, path in _NODES.items() if family in manage]
    if "nvidia-nvswitch" in manage:
        paths += [f"/dev/nvidia-nvswitch{minor}" for minor in range(len(context.host.switches))]
    for path in paths:
        status = context.node_status(path)
        if status is not None and status.kind != "char":
            yield Problem(Code.NODE_CONFLICT, f"{path} is a {status.kind}, not a character device", path)
    directory = context.node_status(CAPABILITY_DIRECTORY) if "fabric-mgmt" in manage else None
    if directory is not None and directory.kind != "directory":
        yield Problem(Code.NODE_CONFLICT, f"{CAPABILITY_DIRECTORY} is no directory", CAPABILITY_DIRECTORY)


def _difference(context: Context, node: WantedNode) -> str:
    """What is not as it should be with the node; "" also for a conflict, which is told elsewhere."""
    status = context.node_status(node.path)
    if status is None:
        return f"{node.path} is missing"
    if status.kind != "char":
        return ""
    if (status.major, status.minor) != (node.major, node.minor):
        return f"{node.path} is {status.major}:{status.minor}, the driver has {node.major}:{node.minor}"
    if (status.mode, status.uid, status.gid) != (node.mode, node.uid, node.gid):
        is_, wanted = (f"{each.mode:04o} {each.uid}:{each.gid}" for each in (status, node))
        return f"{node.path} has {is_}, not {wanted}"
    return ""


# --- pinning


@dataclass(frozen=True, slots=True)
class _Pins:
    """What modprobe.d and the kernel's command line say about vfio-pci and nvidia."""

    ids: frozenset[tuple[int, int]]
    has_softdep: bool  # nvidia is loaded after vfio-pci
    is_nvidia_blacklisted: bool  # for udev


def check_pinning(context: Context) -> Finding:
    """Whether something keeps nvidia.ko from taking a guest's GPU at boot, before vfio-pci has it."""
    if not context.settings.switches.gpus_belong_to_guests:
        return ok("the GPUs belong to the host (switches.gpus_belong_to_guests = false)")
    pins = _read_pins(context.root)
    loose = [gpu for gpu in context.host.gpus if not _is_pinned(context.root, gpu, pins)]
    if not loose:
        context.require_every_function()
        return ok(f"all {len(context.host.gpus)} GPUs are pinned to {VFIO}")
    ids = ",".join(sorted({gpu.device_id for gpu in loose}))
    remedy = (
        f"In /etc/modprobe.d/: options vfio-pci ids={ids} and softdep nvidia pre: vfio-pci (never the NVSwitch id); "
        "then renew the initrd."
    )
    listing = ", ".join(gpu.pci_bus_id for gpu in loose)
    if {_numbers(gpu) for gpu in loose} <= pins.ids:
        found = f"vfio-pci has the ids of {listing}, but no softdep makes nvidia wait for vfio-pci"
        return warning(Code.GPU_NOT_PINNED, found, remedy)
    return warning(Code.GPU_NOT_PINNED, f"neither vfio-pci ids nor driver_override pin {listing}", remedy)


def check_switch_pinning(context: Context) -> Finding:
    """The NVSwitch id must never be among those of vfio-pci."""
    pins = _read_pins(context.root)
    pinned = [
        switch
        for switch in context.host.switches
        if _numbers(switch) in pins.ids or _override(context.root, switch) == VFIO
    ]
    if not pinned:
        context.require_every_function()
        return ok("no NVSwitch is pinned to vfio-pci")
    listing = ", ".join(f"{switch.pci_bus_id} ({switch.device_id})" for switch in pinned)
    return failed(Code.SWITCH_PASSED_THROUGH, f"pinned to vfio-pci: {listing}")


def _is_pinned(root: HostRoot, gpu: PciFunction, pins: _Pins) -> bool:
    if _override(root, gpu) == VFIO:
        return True
    return _numbers(gpu) in pins.ids and (pins.has_softdep or pins.is_nvidia_blacklisted)


def _override(root: HostRoot, function: PciFunction) -> str:
    return (root.read_text(f"/sys/bus/pci/devices/{function.pci_bus_id}/driver_override", 256) or "").strip()


def _numbers(function: PciFunction) -> tuple[int, int]:
    vendor, _, device = function.device_id.partition(":")
    return int(vendor, 16), int(device, 16)


def _read_pins(root: HostRoot) -> _Pins:
    lines = [line for directory in _MODPROBE_DIRECTORIES for line in _modprobe_lines(root, directory)]
    command_line = root.read_text("/proc/cmdline") or ""
    ids = re.findall(r"vfio[-_]pci\.ids=(\S+)", command_line)
    has_softdep = is_blacklisted = False
    for line in lines:
        words = line.replace("vfio_pci", VFIO).split()
        match words[:2]:
            case ["options", "vfio-pci"]:
                ids += [word.removeprefix("ids=") for word in words[2:] if word.startswith("ids=")]
            case ["softdep", "nvidia"]:
                has_softdep |= VFIO in _pre(words[2:])
            case ["blacklist", "nvidia"] | ["install", "nvidia"]:
                is_blacklisted = True
    is_blacklisted |= "nvidia" in ",".join(re.findall(r"modprobe\.blacklist=(\S+)", command_line)).split(",")
    return _Pins(frozenset(_parse_ids(ids)), has_softdep, is_blacklisted)


def _pre(words: Sequence[str]) -> list[str]:
    """``pre: a b post: c`` loads a and b first."""
    text = " ".join(words)
    return text.partition("pre:")[2].partition("post:")[0].split()


def _parse_ids(values: Sequence[str]) -> Iterator[tuple[int, int]]:
    """``vendor:device[:subvendor[:subdevice[:class[:mask]]]]``, several with commas between (vfio_pci.c)."""
    for value in values:
        for item in value.strip('"').split(","):
            parts = item.split(":")
            try:
                yield int(parts[0], 16), int(parts[1], 16)
            except (IndexError, ValueError):
                continue


def _modprobe_lines(root: HostRoot, directory: str) -> Iterator[str]:
    for name in root.list_directory(directory) or ():
        if name.endswith(".conf"):
            text = (root.read_text(f"{directory}/{name}") or "").replace("\\\n", " ")
            yield from (line for line in text.splitlines() if not line.lstrip().startswith("#"))


# --- guests


def check_guests(context: Context) -> Finding:
    """Guests that were started before the present Fabric Manager: their GPUs asked for the fabric once, in vain."""
    document = context.daemon or {}
    manager = (document.get("fabric_manager") or {}).get("pid")
    reading = find_guests(context.root, [gpu.pci_bus_id for gpu in context.host.gpus], float)
    early = _early(context, document, reading, manager) if isinstance(manager, int) else []
    if early:
        found = f"started before the fabric was configured: {'; '.join(early)}"
        return warning(Code.GUEST_RESTART_REQUIRED, found)
    context.require_every_function()
    rows = [described(guest) for guest in reading.guests]
    if reading.hidden:
        found = f"{len(rows)} guests hold GPUs, {len(reading.hidden)} processes could not be looked into"
        return cannot_tell("; ".join([found, *rows]), "Run the check as root (CAP_SYS_PTRACE).")
    if not isinstance(manager, int):
        return ok(f"{len(rows)} guests hold GPUs; no Fabric Manager of ours runs", *rows)
    return ok(f"{len(rows)} guests hold GPUs, none must be power-cycled", *rows)


def _early(context: Context, document: Mapping[str, Any], reading: GuestReading, manager: int) -> list[str]:
    """By the daemon's word; of an older daemon, which has none, by the start of its Fabric Manager."""
    if "guests" in document:
        return [
            f"{row['name']} (pid {row['pid']}) with {', '.join(row['gpus'])}"
            for row in document["guests"]
            if row["restart_required"]
        ]
    began = start_ticks(context.root, manager)
    return [described(guest) for guest in reading.guests if began is not None and guest.start_ticks < began]


CHECKS = (
    Check("device-nodes", "Device nodes", (Code.NODE_CONFLICT, Code.NODE_FAILED), check_nodes),
    Check("gpu-pinning", "GPUs are pinned to vfio-pci", (Code.GPU_NOT_PINNED,), check_pinning),
    Check("switch-pinning", "No NVSwitch is pinned to vfio-pci", (Code.SWITCH_PASSED_THROUGH,), check_switch_pinning),
    Check("guests", "Guests that must be power-cycled", (Code.GUEST_RESTART_REQUIRED,), check_guests),
)

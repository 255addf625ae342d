"""``check --guest``: inside a virtual machine whose GPUs belong to a fabric that the host manages.

There the switches are not visible and Fabric Manager must not run: it would find nothing to do. What counts is whether
each GPU has registered with the host's Fabric Manager, which ``nvidia-smi -q -x`` tells (Fabric State and Status).
Until then CUDA fails with error 802, cudaErrorSystemNotReady. Sources: Fabric Manager User Guide;
NV2080_CTRL_GPU_FABRIC_PROBE_STATE of NVIDIA's ctrl2080gpu.h; CPUID leaf 1 (flag ``hypervisor``); /sys/class/dmi/id.
"""

import os
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fmsupervisor.checks.context import Context
from fmsupervisor.checks.finding import Check, Finding, Verdict, cannot_tell, failed, ok, warning
from fmsupervisor.checks.neighbours import VENDOR_UNIT, check_vendor_unit
from fmsupervisor.conditions import Code
from fmsupervisor.core.switches import GPU_DRIVER
from fmsupervisor.fabric_manager.foreign import find_foreign

_SMI_SECONDS = 15.0  # without a persistence daemon every call initialises the GPUs
_AMPERE_OR_OLDER = ("A100", "A800", "V100")
_DMI = "/sys/class/dmi/id"
_DMI_FILES = ("sys_vendor", "product_name", "bios_vendor")
_MACHINE_WORDS = (
    *("qemu", "kvm", "vmware", "virtualbox", "xen", "bochs", "bhyve", "parallels", "cloud hypervisor"),
    *("amazon ec2", "google compute", "virtual machine", "openstack", "kubevirt", "harvester"),
)


@dataclass(frozen=True, slots=True)
class GpuFabric:
    """One GPU of nvidia-smi's answer; a field that it lacks is ""."""

    bus_id: str
    product: str
    state: str
    status: str


def virtualisation(context: Context) -> str:
    """What shows that this is a virtual machine; "" when nothing does."""
    root = context.root
    for line in (root.read_text("/proc/cpuinfo", 1 << 16) or "").splitlines():
        if line.startswith("flags") and "hypervisor" in line.split():
            return "the CPU has the flag hypervisor"
    if kind := (root.read_text("/sys/hypervisor/type", 64) or "").strip():
        return f"/sys/hypervisor/type is {kind}"
    for name in _DMI_FILES:
        text = (root.read_text(f"{_DMI}/{name}", 256) or "").strip()
        if any(word in text.lower() for word in _MACHINE_WORDS):
            return f"{_DMI}/{name} is {text}"
    return ""


def _is_guest_of_host_fabric(context: Context) -> bool:
    """GPUs of ours, no switch to be seen."""
    host = context.host
    return not host.switches and any(gpu.driver == GPU_DRIVER for gpu in host.gpus)


def why_not_applicable(context: Context) -> str:
    """Why there is nothing to look at; "" when there is."""
    return "" if context.host.gpus or context.host.problems else "this machine has no GPU of NVIDIA"


def check_place(context: Context) -> Finding:
    """Where this is."""
    host, sign = context.host, virtualisation(context)
    drivers = Counter(gpu.driver or "no driver" for gpu in host.gpus)
    gpus = ", ".join(f"{count} GPUs with {driver}" for driver, count in drivers.items()) or "no GPU"
    if not host.gpus:
        return ok(f"no GPU here; {sign or 'no sign of a virtual machine'}")
    if not sign:
        found = f"no sign of a virtual machine; {gpus}, {len(host.switches)} NVSwitches"
        return warning(Code.GUEST_UNCERTAIN, found)
    context.require_every_function()
    if host.switches:
        found = f"virtual machine ({sign}) with {len(host.switches)} NVSwitches and {gpus}"
        return ok(
            f"{found}: the whole board is passed through",
            "then Fabric Manager must run in this guest: use check without --guest",
        )
    if not _is_guest_of_host_fabric(context):
        return warning(Code.GUEST_UNCERTAIN, f"virtual machine ({sign}); {gpus}: the driver has none of them")
    return ok(f"virtual machine ({sign}); {gpus}, no NVSwitch: the host owns the fabric")


def check_no_manager(context: Context) -> Finding:
    """Fabric Manager must not run in a guest of a fabric that the host owns."""
    if context.host.switches:
        return ok("the switches are in this machine, so Fabric Manager belongs here")
    running = find_foreign(context.root, frozenset(), None, "")
    if running:
        return failed(Code.MANAGER_IN_GUEST, "; ".join(each.description for each in running))
    if context.daemon is not None and context.host.gpus:
        return warning(Code.MANAGER_IN_GUEST, "fmsupervisor runs in this guest; it has nothing to do here")
    if check_vendor_unit(context).verdict is Verdict.WARNING:
        return warning(Code.MANAGER_IN_GUEST, f"{VENDOR_UNIT} is enabled; it fails with NV_WARN_NOTHING_TO_DO")
    return ok("no Fabric Manager in this guest, which is right")


def check_fabric(context: Context) -> Finding:
    """Whether each GPU has registered with the host's Fabric Manager."""
    if not any(gpu.driver == GPU_DRIVER for gpu in context.host.gpus):
        return ok("no GPU is bound to the nvidia driver")
    program = shutil.which("nvidia-smi", path=context.environment.get("PATH", os.defpath))
    if program is None:
        return cannot_tell("nvidia-smi is not in PATH", "Install the driver's utilities, or set PATH.")
    environment = {**context.environment, "LC_ALL": "C"}
    output = context.run_program([program, "-q", "-x"], environment, _SMI_SECONDS)
    gpus = parse_fabric(output.stdout)
    if gpus is None:
        last = next(
            (line.strip() for line in reversed((output.stderr + output.stdout).splitlines()) if line.strip()), ""
        )
        outcome = output.failure or f"exit status {output.status}"
        remedy = "Look at dmesg for NVRM lines; when it hangs, the driver waits for a GPU." if output.failure else ""
        return cannot_tell(f"nvidia-smi -q -x: {outcome}" + (f": {last[:200]}" if last else ""), remedy)
    if not gpus:
        return cannot_tell("nvidia-smi lists no GPU")
    return judge_fabric(gpus)


def parse_fabric(text: str) -> tuple[GpuFabric, ...] | None:
    """The GPUs of ``nvidia-smi -q -x``; None when the text is no such document. Text before it is skipped."""
    from xml.etree import ElementTree as ET  # noqa: PLC0415  for this command only

    start = text.find("<nvidia_smi_log")
    if start < 0:
        return None
    try:
        log = ET.fromstring(text[start:])  # noqa: S314  of a program that root installed; expat bounds expansion
    except ET.ParseError:
        return None

    def content(element: "ET.Element", path: str) -> str:
        return (element.findtext(path) or "").strip()

    return tuple(
        GpuFabric(
            _bus_id(gpu.get("id", "")) or f"GPU {place}",
            content(gpu, "product_name"),
            content(gpu, "fabric/state"),
            content(gpu, "fabric/status"),
        )
        for place, gpu in enumerate(log.findall("gpu"))
    )


def _bus_id(text: str) -> str:
    """``00000000:9B:00.0`` as nvidia-smi prints it, as the kernel writes it: ``0000:9b:00.0``."""
    found = re.fullmatch(r"0000([0-9a-f]{4}:.*)", text.lower(), re.ASCII)
    return found[1] if found else text.lower()


def judge_fabric(gpus: Sequence[GpuFabric]) -> Finding:
    """The worst of what the GPUs say, with what it means."""
    details = [f"{gpu.bus_id} {gpu.product}: state {_shown(gpu.state)}, status {_shown(gpu.status)}" for gpu in gpus]
    waiting = [gpu for gpu in gpus if _is(gpu.state, "in progress", "not started")]
    wrong = [gpu for gpu in gpus if _is(gpu.state, "completed") and not _is(gpu.status, "success")]
    silent = [gpu for gpu in gpus if _is(gpu.state, "", "n/a", "not supported", "unknown error")]
    if waiting:
        found = (
            f"{len(waiting)} of {len(gpus)} GPUs have not registered with the host's Fabric Manager "
            f"({waiting[0].state}): CUDA fails with error 802 (system not yet initialized)"
        )
        return failed(Code.GUEST_NOT_REGISTERED, found, details=details)
    if wrong:
        found = (
            f"{len(wrong)} of {len(gpus)} GPUs were refused by Fabric Manager (status {wrong[0].status or 'absent'}): "
            "they compute alone, without NVLink to the others"
        )
        return failed(Code.GUEST_REGISTRATION_FAILED, found, details=details)
    if silent and all(any(word in gpu.product for word in _AMPERE_OR_OLDER) for gpu in silent):
        return ok(
            "GPUs of this generation tell no fabric state (N/A): test with CUDA; error 802 means that Fabric Manager "
            "on the host has not configured the fabric",
            *details,
        )
    if silent:
        why = "the driver is too old for it, or they have no NVLink fabric"
        found = f"{len(silent)} of {len(gpus)} GPUs tell no fabric state: {why}"
        return Finding(Verdict.CANNOT_TELL, found, details=tuple(details))
    known = [gpu for gpu in gpus if _is(gpu.state, "completed")]
    if len(known) < len(gpus):
        return cannot_tell(f"a state that is not known here: {'; '.join(details)}")
    return ok(
        f"all {len(gpus)} GPUs have registered (Completed, Success)",
        *details,
        "after a restart of Fabric Manager on the host this stays so although NVLS fails: ask the host (FMS-608)",
    )


def _is(text: str, *words: str) -> bool:
    return text.strip().lower() in words


def _shown(text: str) -> str:
    return text or "(absent)"


CHECKS = (
    Check("guest-place", "Where this is", (Code.GUEST_UNCERTAIN,), check_place, is_for_any_machine=True),
    Check(
        "guest-no-fm",
        "No Fabric Manager in the guest",
        (Code.MANAGER_IN_GUEST,),
        check_no_manager,
        is_for_any_machine=True,
    ),
    Check(
        "guest-fabric",
        "Every GPU has registered with the host's Fabric Manager",
        (Code.GUEST_NOT_REGISTERED, Code.GUEST_REGISTRATION_FAILED),
        check_fabric,
        timeout_seconds=18.0,
        is_for_any_machine=True,
    ),
)

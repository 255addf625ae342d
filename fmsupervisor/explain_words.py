"""What people paste that is neither a name nor a line that the daemon reads.

These are CUDA's and nvidia-smi's words, systemd's lines, and lines of the kernel that the daemon has no use for, some
of which look alarming. Sources: CUDA runtime API (cudaErrorSystemNotReady), nvidia-smi (section Fabric), systemd's
manager messages, Linux 6.12 (kernel/module/main.c, drivers/base/firmware_loader/main.c), NVIDIA's open kernel modules
515 to 595.
"""

import re
from dataclasses import dataclass

from fmsupervisor.conditions import REGISTRY, Code
from fmsupervisor.explanation import Explanation
from fmsupervisor.host.kernel_grammar import without_prefix

_IN_GUEST = "In the guest: fmsupervisor check --guest. On the host: fmsupervisor status."
_OWN_UNIT = "fmsupervisor status tells what is wrong; journalctl -u fmsupervisor -b tells what happened before."
_VENDOR_UNIT = (
    "Look at what Fabric Manager itself wrote before this line and explain that. Beside fmsupervisor this unit must be "
    "disabled: systemctl disable --now nvidia-fabricmanager."
)


@dataclass(frozen=True, slots=True)
class Words:
    """Text in which the pattern is found."""

    name: str
    pattern: re.Pattern[str]
    title: str
    meaning: str
    code: Code | None = None
    action: str = "Nothing."


def _words(name: str, pattern: str, title: str, meaning: str, code: Code | None = None, action: str = "") -> Words:
    remedy = REGISTRY[code].remedy if code is not None else "Nothing."
    return Words(name, re.compile(pattern, re.IGNORECASE | re.ASCII), title, meaning, code, action or remedy)


WORDS: tuple[Words, ...] = (
    # CUDA and nvidia-smi, as seen in a guest.
    _words(
        "cuda-802",
        r"\b(?:cuda ?error|error code|error|code)\W{1,3}802\b|cudaErrorSystemNotReady|CUDA_ERROR_SYSTEM_NOT_READY"
        r"|system not yet initialized",
        "CUDA error 802: the fabric is not ready for this GPU",
        "The GPU has not registered with Fabric Manager, or on A100 the links are not configured. Either Fabric "
        "Manager on the host is down or not ready, or this guest was started before it was.",
        Code.GUEST_NOT_REGISTERED,
        f"In the guest: fmsupervisor check --guest. {REGISTRY[Code.GUEST_NOT_REGISTERED].remedy}",
    ),
    _words(
        "fabric-state",
        r"\b(?:fabric\W+)?state\W+(?:in progress|not started)\b",
        "a GPU is not registered with the fabric (nvidia-smi)",
        "The GPU's driver has asked Fabric Manager on the host, or is about to ask, and has no answer.",
        Code.GUEST_NOT_REGISTERED,
        f"A few seconds after the guest's start that is normal. Later: {_IN_GUEST}",
    ),
    _words(
        "fabric-state",
        r"\b(?:fabric\W+)?state\W+completed\b",
        "a GPU is registered with the fabric (nvidia-smi)",
        "With Status Success it can use NVLink. It stays so in the guest although Fabric Manager on the host was "
        "restarted since and NVLS fails.",
        None,
        "Nothing by itself. When NVLS fails all the same, look on the host for FMS-608.",
    ),
    _words(
        "nothing-to-do",
        r"NV_WARN_NOTHING_TO_DO",
        "no NVSwitch for Fabric Manager",
        "The driver has no switch to hand out.",
        Code.NOTHING_TO_DO,
    ),
    # systemd
    _words(
        "own-unit",
        r"\bfmsupervisor\.service: .*(?:status=75\b|TEMPFAIL)",
        "fmsupervisor ended: another one runs already",
        "Two daemons never supervise one Fabric Manager.",
        None,
        "Find the other: fmsupervisor status names its process.",
    ),
    _words(
        "own-unit",
        r"\bfmsupervisor\.service: .*(?:status=78\b|CONFIG\b)",
        "fmsupervisor ended: its settings file is not valid",
        "The line before names file, key and what is allowed.",
        Code.SETTINGS_INVALID,
    ),
    _words(
        "own-unit",
        r"\bfmsupervisor\.service: .*watchdog",
        "systemd ended fmsupervisor: it did not answer in time",
        "The machine stood still for longer than WatchdogSec, or the daemon hung.",
        None,
        f"{_OWN_UNIT} When it comes again: fmsupervisor report.",
    ),
    _words(
        "own-unit",
        r"\b(?:fmsupervisor\.service|nvidia-fabric\.target)\b.*\b(?:fail|timed? ?out|exited|killed)"
        r"|\b(?:dependency failed for|failed to start) (?:fmsupervisor\.service|nvidia-fabric\.target)",
        "systemd could not start fmsupervisor or reach the target",
        "nvidia-fabric.target is reached only when the fabric is configured.",
        None,
        _OWN_UNIT,
    ),
    _words(
        "vendor-unit",
        r"\bnvidia-fabricmanager\.service\b|\bnvidia-fabricmanager-start\.sh\b.*failed|"
        r"\bnv-fabricmanager .*failed! exit code|NVIDIA fabric manager service",
        "the vendor's unit for Fabric Manager",
        "systemd or the vendor's start script says what became of Fabric Manager, not why.",
        None,
        _VENDOR_UNIT,
    ),
    # The kernel: trouble.
    _words(
        "gpu-lost",
        r"^NVRM: GPU \S+: GPU has fallen off the bus|^NVRM: .*\bGPU has fallen off the bus",
        "a GPU has fallen off the bus",
        "The GPU does not answer any more; the same is reported as Xid 79, and all switches report SXid 20034.",
        Code.GPU_LOST,
    ),
    _words(
        "firmware-missing",
        r"direct firmware load for nvidia/\S+ failed",
        "the firmware of a GPU is missing",
        "The kernel looks for it in the running kernel's mount namespace when a GPU of the host is initialised.",
        Code.FIRMWARE_MISSING,
    ),
    _words(
        "stale-handle",
        r"^NVRM: .*mem_multicast_fabric",
        "a multicast (NVLS) request was refused",
        "NV_ERR_OBJECT_NOT_FOUND: the GPU's registration is not known to the present Fabric Manager.",
        Code.STALE_HANDLES,
    ),
    # The kernel: harmless.
    _words(
        "taint",
        r"^nvidia[\w-]*: (?:loading out-of-tree module|module license .*) taints kernel",
        "the kernel marks itself as tainted",
        "It does so for every module that is not its own. Loading goes on.",
    ),
    _words(
        "parameter",
        r"^nvidia[\w-]*: unknown parameter \S+ ignored",
        "a module parameter is unknown",
        "This driver version does not have it. Loading goes on without it.",
        None,
        "Correct module.parameters in the settings, or the options line in /etc/modprobe.d.",
    ),
    _words(
        "gpu-owned",
        r"^NVRM: (?:This can occur when|nouveau, rivafb|was loaded and obtained|obtained ownership|Try unloading the "
        r"conflicting|reconfigure your kernel|driver\(s\)\), then try|again\.)",
        "advice of the driver about GPUs that another driver has",
        "It follows the line that names the GPU. GPUs for guests belong to vfio-pci, so the advice is wrong here.",
    ),
    _words(
        "driver-notice",
        r"^NVRM: (?:GPU at PCI:|GPU Board Serial Number|knvlinkSetUniqueFabricBaseAddress)"
        r"|^nvidia-nvlink: (?:Nvlink Core is being|Unregistered Nvlink)",
        "a notice of the driver",
        "It only names something.",
    ),
)


def explain_words(line: str) -> tuple[Explanation, ...]:
    """The first words that are found; empty when there are none."""
    text = without_prefix(line).strip()
    found = next((words for words in WORDS if words.pattern.search(text)), None)
    if found is None:
        return ()
    facts = [("line", text), ("meaning", found.meaning)]
    if found.code is not None:
        facts.append(("condition", f"{found.code} {REGISTRY[found.code].title}"))
    return (Explanation("words", found.name, found.title, (*facts, ("what_to_do", found.action))),)

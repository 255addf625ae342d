"""What a line of Fabric Manager's log or of the kernel log means.

The lines are recognised by the same tables that the daemon reads them with (``fabric_manager.log_kinds``,
``host.kernel_grammar``); here stands only what a person needs to know about each kind.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fmsupervisor.conditions import REGISTRY, Code
from fmsupervisor.explain_sxid import explain_sxid
from fmsupervisor.explanation import Explanation
from fmsupervisor.fabric_manager.log_grammar import split_line
from fmsupervisor.fabric_manager.log_kinds import Where, classify
from fmsupervisor.facts import KernelKind, LogKind
from fmsupervisor.host import kernel_grammar
from fmsupervisor.xid import FABRIC_XIDS, GPU_LOST

_NOTHING = "Nothing."


@dataclass(frozen=True, slots=True)
class Meaning:
    """One kind of line. ``code``: the condition that it leads to; its remedy is what to do."""

    title: str
    meaning: str
    code: Code | None = None
    action: str = _NOTHING


FABRIC_MANAGER_LINES: Mapping[LogKind, Meaning] = {
    LogKind.SESSION_HEADER: Meaning("a start of Fabric Manager", "Everything below belongs to this start."),
    LogKind.VERSION: Meaning("Fabric Manager's version", "It must be exactly the version of the driver and of NSCQ."),
    LogKind.SETTING: Meaning("a setting", "Fabric Manager repeats at its start what it read from its configuration."),
    LogKind.CONNECTED: Meaning(
        "start-up, step by step", "Fabric Manager talks to itself: one node is the normal case."
    ),
    LogKind.TOPOLOGY: Meaning("start-up, step by step", "The topology file of this board was found and read."),
    LogKind.SWITCH_ROW: Meaning(
        "a row about an NVSwitch", "One of the switches that Fabric Manager found, with the links that work."
    ),
    LogKind.ROUTING_STARTED: Meaning("start-up, step by step", "The routes of one switch are being programmed."),
    LogKind.ROUTING_COMPLETED: Meaning("start-up, step by step", "The routes of one switch are programmed."),
    LogKind.CONFIGURED: Meaning(
        "the success line",
        "All switches are programmed. It is not enough by itself: the driver must say the same of every switch, and a "
        "GPU can use NVLink only once it has registered.",
    ),
    LogKind.INBAND_STARTED: Meaning("start-up, step by step", "From now on GPUs can register over NVLink."),
    LogKind.GPU_PROBE: Meaning(
        "a GPU asks to join the fabric", "A GPU's driver, in a guest as a rule, has started and asks for registration."
    ),
    LogKind.GPU_ADDED: Meaning("a GPU has joined the fabric", "The GPU with this UUID is registered."),
    LogKind.GPU_ROW: Meaning(
        "a row about a GPU", "A registered GPU with its links and its module id (counted from 0)."
    ),
    LogKind.INBAND_MESSAGE: Meaning(
        "ordinary traffic", "GPUs and Fabric Manager talk over NVLink, at the start of every job. Status 0 is success."
    ),
    LogKind.INBAND_FAILURE: Meaning(
        "a request of a GPU was refused",
        "The status is not 0. 57 means that an object was not found: the guest's GPU holds a registration that this "
        "Fabric Manager does not know.",
        Code.STALE_HANDLES,
    ),
    LogKind.PAYLOAD: Meaning("ordinary traffic", "The content of the in-band message in the line before."),
    LogKind.MULTICAST: Meaning("ordinary traffic", "A job sets up, or gives back, a multicast group (NVLS)."),
    LogKind.PARTITION: Meaning(
        "a partition changed", "In fabric modes 1 and 2: a partition was activated or deactivated."
    ),
    LogKind.SWITCH_ERROR: Meaning("an NVSwitch reported an error", "", Code.SXID_FATAL),
    LogKind.STALE_HANDLE: Meaning(
        "a GPU uses a registration that does not exist",
        "Fabric Manager was restarted while the GPU kept its registration, so NVLS fails in its guest.",
        Code.STALE_HANDLES,
    ),
    LogKind.GPU_RESET_NEEDED: Meaning("a GPU must be reset", "Fabric Manager says so.", Code.GPU_RESET_NEEDED),
    LogKind.NOTHING_TO_DO: Meaning(
        "no NVSwitch for Fabric Manager", "The driver has no switch to hand out.", Code.NOTHING_TO_DO
    ),
    LogKind.VERSION_MISMATCH: Meaning(
        "Fabric Manager and the loaded driver are of different versions", "It ends.", Code.VERSION_REJECTED
    ),
    LogKind.TOPOLOGY_MISMATCH: Meaning(
        "the number of switches fits no board", "A switch is missing, or was passed to a guest.", Code.TOPOLOGY_MISMATCH
    ),
    LogKind.CONFIG_INVALID: Meaning("the configuration is not valid", "It ends.", Code.CONFIG_REJECTED),
    LogKind.DIRECTORY_DENIED: Meaning("a directory cannot be used", "It ends.", Code.RUN_DIRECTORY_DENIED),
    LogKind.ADDRESS_IN_USE: Meaning(
        "a port or socket is taken", "Most often by another Fabric Manager.", Code.ADDRESS_IN_USE
    ),
    LogKind.LOADER_ERROR: Meaning("the program cannot be executed", "A shared library is missing.", Code.LOADER_ERROR),
    LogKind.OTHER_NOTICE: Meaning("a notice", "Known, and of no consequence."),
}

KERNEL_LINES: Mapping[KernelKind, Meaning] = {
    KernelKind.SWITCH_ERROR: Meaning("an NVSwitch reported an error", "", Code.SXID_FATAL),
    KernelKind.SWITCH_ERROR_DETAIL: Meaning(
        "a further line of an SXid", "It belongs to the line with the same number before it and is not another event."
    ),
    KernelKind.GPU_ERROR: Meaning(
        "a GPU reported an error (Xid)", "", action="See NVIDIA's catalogue of Xid errors for this number."
    ),
    KernelKind.SWITCH_PROBING: Meaning("the driver meets an NVSwitch", "Its initialisation begins."),
    KernelKind.SWITCH_READY: Meaning("the driver has an NVSwitch", "Its initialisation is about to succeed."),
    KernelKind.SWITCH_PROBE_FAILED: Meaning(
        "the driver could not initialise an NVSwitch",
        "nvidia.ko stays loaded with the other switches, which get the lower numbers.",
        Code.SWITCH_NOT_PROBED,
    ),
    KernelKind.SWITCH_REMOVING: Meaning(
        "the driver gave up an NVSwitch", "The module is unloaded, or the switch went away.", Code.SWITCH_LOST
    ),
    KernelKind.SWITCH_BLACKLISTED: Meaning(
        "the driver has taken an NVSwitch out of service", "Nobody can open it.", Code.SWITCH_BLACKLISTED
    ),
    KernelKind.SWITCH_OPENED: Meaning("a program opened an NVSwitch", "A trace of Fabric Manager's start."),
    KernelKind.SWITCH_RELEASED: Meaning("a program closed an NVSwitch", "A trace of Fabric Manager's end."),
    KernelKind.INTERRUPT_STORM: Meaning(
        "the driver no longer hears an NVSwitch",
        "It sent so many interrupts that they were switched off.",
        Code.INTERRUPT_STORM,
    ),
    KernelKind.STALE_DESCRIPTOR: Meaning(
        "a program holds a switch that is gone", "The switch was removed while it was open.", Code.SWITCH_LOST
    ),
    KernelKind.SWITCH_UNREADABLE: Meaning(
        "the driver cannot read a switch's state", "The switch did not answer.", Code.SWITCH_NOT_RESPONDING
    ),
    KernelKind.VERSION_MISMATCH: Meaning(
        "a program and the loaded driver are of different versions",
        "The driver refused it.",
        Code.VERSION_CONFLICT,
    ),
    KernelKind.MODULE_LOADED: Meaning("nvidia.ko is being loaded", "The driver says which version it is."),
    KernelKind.GPU_OWNED: Meaning(
        "the driver did not get a GPU",
        "Another driver has it: vfio-pci when it is meant for a guest, which is right.",
    ),
    KernelKind.LOAD_FAILED: Meaning("the driver could not start", "", Code.MODULE_INIT_FAILED),
    KernelKind.LOCKDOWN: Meaning("lockdown forbids the module", "", Code.MODULE_LOCKDOWN),
    KernelKind.SIGNATURE: Meaning(
        "the kernel does not accept the module's signature",
        '"module verification failed" by itself only taints the kernel; "rejected" means that it was not loaded.',
        Code.MODULE_SIGNATURE_REJECTED,
    ),
    KernelKind.MODULE_REFUSED: Meaning(
        "the kernel refused the module", "It was built for another kernel, or is blacklisted.", Code.MODULE_VERMAGIC
    ),
    KernelKind.OTHER_SWITCH_LINE: Meaning("a line of the switch driver", "Known, and of no consequence."),
}

# Where one kind of line leads to several conditions: the first words that are found decide.
_BY_WORDS: tuple[tuple[KernelKind, str, Code], ...] = (
    (KernelKind.LOAD_FAILED, "no nvidia", Code.MODULE_NO_DEVICE),
    (KernelKind.LOAD_FAILED, "none of the nvidia", Code.MODULE_NO_DEVICE),
    (KernelKind.LOAD_FAILED, "fallen off the bus", Code.GPU_LOST),
    (KernelKind.LOAD_FAILED, "api mismatch", Code.VERSION_CONFLICT),
    (KernelKind.MODULE_REFUSED, "blacklisted", Code.MODULE_BLACKLISTED),
    (KernelKind.MODULE_REFUSED, "disagrees about version", Code.MODULE_SYMBOL_VERSIONS),
    (KernelKind.MODULE_REFUSED, "unknown symbol", Code.MODULE_UNKNOWN_SYMBOL),
    (KernelKind.SWITCH_ERROR, ": 10004,", Code.SWITCH_OVERHEATED),
    (KernelKind.SWITCH_ERROR, ": 10006,", Code.SWITCH_OVERHEATED),
)

_UNKNOWN_KINDS = frozenset({LogKind.UNRECOGNISED, LogKind.BLANK})


def explain_kernel_line(line: str) -> tuple[Explanation, ...]:
    """A line of the kernel log, with or without what dmesg or journalctl put before it; empty when it is none."""
    record = kernel_grammar.classify(kernel_grammar.without_prefix(line))
    if record is None:
        return ()
    meaning = KERNEL_LINES[record.kind]
    words = record.text.lower()
    code = next((code for kind, part, code in _BY_WORDS if kind is record.kind and part in words), meaning.code)
    meaning = replace(meaning, code=code)
    if record.kind in (KernelKind.SWITCH_ERROR, KernelKind.SWITCH_ERROR_DETAIL):
        return _switch_error("kernel-line", record.text, record.fields, meaning)
    if record.kind is KernelKind.GPU_ERROR:
        return _gpu_error(record.text, record.fields, meaning)
    return (_explained("kernel-line", f"{record.kind}", record.text, record.fields, meaning),)


def explain_fabric_manager_line(line: str) -> tuple[Explanation, ...]:
    """A line of Fabric Manager's log or standard error; empty when it is none."""
    level, message = split_line(line.encode("utf-8", "backslashreplace"))
    kind, rule, fields = classify(message, level)
    is_any_text = kind is LogKind.OTHER_NOTICE and rule is not None and rule.where is Where.BARE
    if kind in _UNKNOWN_KINDS or is_any_text:
        return ()
    text = message.decode("utf-8", "backslashreplace").strip()
    meaning = FABRIC_MANAGER_LINES[kind]
    if kind is LogKind.SWITCH_ERROR:
        return _switch_error("fabric-manager-line", text, fields, meaning)
    return (_explained("fabric-manager-line", f"{kind}", text, fields, meaning),)


def explain_xid(number: int) -> Explanation | None:
    """An Xid that is about NVLink or the fabric."""
    title = FABRIC_XIDS.get(number)
    if title is None:
        return None
    condition = REGISTRY[Code.GPU_LOST if number == GPU_LOST else Code.GPU_NVLINK_ERROR]
    facts = (
        ("meaning", "A GPU reports it, not a switch; it concerns NVLink or the fabric."),
        ("condition", f"{condition.code} {condition.title}"),
        ("what_to_do", condition.remedy),
    )
    return Explanation("xid", f"Xid {number}", title, facts)


def _explained(kind: str, name: str, text: str, fields: Mapping[str, str], meaning: Meaning) -> Explanation:
    facts = [("line", text)]
    if meaning.meaning:
        facts.append(("meaning", meaning.meaning))
    if fields:
        facts.append(("it_names", _named(fields)))
    if meaning.code is not None:
        condition = REGISTRY[meaning.code]
        facts += [("condition", f"{condition.code} {condition.title}"), ("what_to_do", condition.remedy)]
    else:
        facts.append(("what_to_do", meaning.action))
    return Explanation(kind, name, meaning.title, tuple(facts))


def _switch_error(kind: str, text: str, fields: Mapping[str, str], meaning: Meaning) -> tuple[Explanation, ...]:
    """The line, and the SXid in it. Only a fatal one becomes a condition; what to do stands with the number."""
    word = fields.get("severity", "")
    said = f"{word}. " if word and word != "untagged" else ""
    facts = [("line", text), ("meaning", f"{said}{meaning.meaning}".strip()), ("it_names", _named(fields))]
    if meaning.code is not None and (word == "fatal" or meaning.code is not Code.SXID_FATAL):
        facts.append(("condition", f"{meaning.code} {REGISTRY[meaning.code].title}"))
    line = Explanation(kind, "switch-error", meaning.title, tuple((name, fact) for name, fact in facts if fact))
    about = explain_sxid(int(fields["sxid"]), "" if word == "untagged" else word)
    return (line, about) if about else (line,)


def _gpu_error(text: str, fields: Mapping[str, str], meaning: Meaning) -> tuple[Explanation, ...]:
    about = explain_xid(int(fields["xid"]))
    line = _explained("kernel-line", "gpu-error", text, fields, meaning)
    if about is None:
        return (line,)
    kept = tuple((name, fact) for name, fact in line.facts if name != "what_to_do")
    return Explanation(line.kind, line.name, line.title, kept), about


def _named(fields: Mapping[str, str]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in fields.items())

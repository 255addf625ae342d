r"""What lines of the kernel log say about switches, GPUs and the loading of nvidia.ko, as a table. Pure.

A pattern is anchored at both sides where the driver's format string allows it, so that text quoted by somebody else
does not count; the first one that matches wins. Named groups are the fields. ``pci_bus_id`` is written dddd:bb:dd.f
(the driver leaves the function away in Xid lines: it is 0). A blank stands for any white space, since one printk of
several lines is one record.

One SXid is two to four lines: ``N, Fatal, Link 48 ...`` and then, from ``_nvswitch_dump_error_entry``, ``N, Severity
...`` and ``N, Data {...}``. Only the first is the event; a counter of ``SXid.*: (\d+),`` counts it up to four times.
The lines of several switches interleave. How bad the event is stands as a word in the first line and nowhere else: the
number after ``Severity`` has been seen as 5, and tables of the driver, of Fabric Manager and of NVIDIA's guide disagree
about the same number. Some events (temperature, SOE, cables) have no such word: "untagged".

Sources: NVIDIA open kernel modules 515 to 595 (common_nvswitch.h, error_nvswitch.c, linux_nvswitch.c, nvswitch.c,
nv.c, kernel_rc.c), Linux 6.12 (kernel/module/{main,version,signing}.c, security/lockdown); public kernel logs.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from fmsupervisor.facts import KernelBatch, KernelKind, KernelRecord
from fmsupervisor.host.kernel_log import KernelLine

_TEXT_CHARACTERS = 1024
_DETAILS_PER_EVENT = 4
_SWITCH = r"nvidia-nvswitch(?P<minor>\d{1,3}): "
_BUS_ID = r"(?P<pci_bus_id>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])"
_SXID = _SWITCH + r"SXid \(PCI:" + _BUS_ID + r"\): (?P<sxid>\d{1,6}), "
# dmesg's time; before it what journald and syslog write
_PREFIX = re.compile(r"\s*(?:[^\[\]]{0,120}?\bkernel: ?)?(?:<\d{1,3}>)?(?:\[ *\d+\.\d+\] ?(?:\[ *[TC]\d+\] )?)?")


@dataclass(frozen=True, slots=True)
class Rule:
    """Lines of ``kind``: those which the pattern matches."""

    kind: KernelKind
    pattern: re.Pattern[str]


def _rule(kind: KernelKind, *patterns: str) -> Rule:
    text = "|".join(pattern.replace(" ", r"\s++") for pattern in patterns)
    return Rule(kind, re.compile(text, re.IGNORECASE | re.DOTALL))


RULES: tuple[Rule, ...] = (
    _rule(
        KernelKind.SWITCH_ERROR_DETAIL,
        _SXID + r"(?:Severity (?P<level>\d+) Engine instance (?P<engine>\d+)(?: Sub-engine instance (?P<unit>\d+))?"
        r"|Data \{(?P<data>[^}]*)\}?)",
    ),
    _rule(
        KernelKind.SWITCH_ERROR,
        _SXID + r"(?:(?P<severity>Fatal|Non-fatal|Correctable), )?"
        r"(?:Link (?P<port>\d{1,3}) )?(?P<what>.*?)(?P<first> \(First\))?\s*$",
    ),
    _rule(
        KernelKind.GPU_ERROR,
        r"NVRM: Xid \(PCI:(?P<pci_bus_id>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2})(?: GPU-I:[^)]*)?\): (?P<xid>\d{1,6})"
        r"(?:, pid='?(?P<pid>[^,']*)'?, name=(?P<name>[^,]*))?(?:, (?P<what>.*?))?\s*$",
    ),
    _rule(KernelKind.SWITCH_PROBING, r"nvidia-nvswitch: Probing device " + _BUS_ID + r"\b.*"),
    _rule(KernelKind.SWITCH_READY, _SWITCH + r"using MSI\b.*"),
    _rule(KernelKind.SWITCH_REMOVING, _SWITCH + r"removing device " + _BUS_ID + r".*"),
    _rule(
        KernelKind.SWITCH_BLACKLISTED,
        _SWITCH + r"(?:Blacklisted nvswitch device|ioctl attempted on blacklisted device).*",
    ),
    _rule(KernelKind.SWITCH_OPENED, _SWITCH + r"open \(major=\d+\).*"),
    _rule(KernelKind.SWITCH_RELEASED, _SWITCH + r"release \(major=\d+\).*"),
    _rule(KernelKind.INTERRUPT_STORM, _SWITCH + r"Interrupts disabled to avoid a storm.*"),
    _rule(KernelKind.STALE_DESCRIPTOR, _SWITCH + r"a stale fd detected.*"),
    _rule(KernelKind.SWITCH_UNREADABLE, _SWITCH + r"Failed to read fabric state.*"),
    _rule(
        KernelKind.VERSION_MISMATCH,
        r"nvidia-nvswitch: Version mismatch, "
        r"kernel version (?P<kernel_version>\S+) user version (?P<user_version>\S+).*",
    ),
    _rule(
        KernelKind.SWITCH_PROBE_FAILED,
        r"nvidia-nvswitch(?P<minor>\d{1,3}):\s*Failed (?:to|during) (?P<what>.*?)\s*:\s*(?P<error>-?\d+).*",
        r"nvidia-nvswitch " + _BUS_ID + r": probe with driver \S+ failed with error (?P<errno>-?\d+).*",
        r"nvidia-nvswitch: probe of "
        + _BUS_ID.replace("pci_bus_id", "function")
        + r" failed with error (?P<code>-?\d+).*",
    ),
    _rule(KernelKind.OTHER_SWITCH_LINE, r"nvidia-nvswitch(?P<minor>\d{0,3}): .*"),
    _rule(KernelKind.MODULE_LOADED, r"NVRM: loading (?P<what>.*\S)\s*$"),
    _rule(
        KernelKind.GPU_OWNED,
        r"NVRM: GPU " + _BUS_ID + r" is already bound to (?P<driver>[\w-]+).*",
        r"NVRM: The NVIDIA probe routine was not called for (?P<count>\d+) device.*",
    ),
    _rule(
        KernelKind.LOAD_FAILED,
        r"NVRM: No NVIDIA (?:GPU found|devices probed|PCI devices found).*",
        r"NVRM: None of the NVIDIA (?:graphics adapters|devices) were initialized.*",
        r"NVRM: The NVIDIA probe routine failed for .*",
        r"NVRM: (?:rm_init_rm\(\) failed|failed to (?:initialize module|register)).*",
        r"NVRM: The NVIDIA GPU .*(?:fallen off the bus|not supported by).*",
        r"NVRM: API mismatch.*",
        r"NVRM: .*(?:RmInitAdapter failed|rm_init_adapter failed).*",
    ),
    _rule(KernelKind.LOCKDOWN, r"Lockdown: (?P<name>[^:]*): (?P<what>.*module.*)"),
    _rule(
        KernelKind.SIGNATURE,
        r"Loading of (?:unsigned )?module.* is rejected.*",
        r"Loading of module with .*",
        r"(?P<module>nvidia[\w-]*): module verification failed.*",
        r"PKCS#7 signature not signed with a trusted key.*",
    ),
    _rule(
        KernelKind.MODULE_REFUSED,
        r"(?P<module>nvidia[\w-]*): (?:version magic .* should be .*"
        r"|disagrees about version of symbol (?P<symbol>\S+).*"
        r"|Unknown symbol (?P<unknown_symbol>\S+).*)",
        r"Module nvidia[\w-]* is blacklisted.*",
    ),
)


def classify(text: str) -> KernelRecord | None:
    """What a message of the kernel log says; None when it is not about our hardware or module loading."""
    text = text[:_TEXT_CHARACTERS]
    for rule in RULES:
        if found := rule.pattern.match(text):
            return KernelRecord(rule.kind, text.rstrip(), _fields(rule.kind, found))
    return None


def without_prefix(line: str) -> str:
    """A line as people paste it (dmesg, journalctl, syslog) without the time and the name before the message."""
    found = _PREFIX.match(line)
    return line[found.end() :] if found else line


def batch_of(lines: Iterable[KernelLine]) -> KernelBatch:
    """The records of what was read at once; further lines of an event are put with their event.

    Only the kernel's own lines count: whoever may write to /dev/kmsg could forge others.
    """
    records: list[KernelRecord] = []
    last_of: dict[tuple[str, str], int] = {}  # index of the last event by switch and number
    lost = 0
    for line in lines:
        lost += line.lost
        found = classify(line.text) if line.facility == 0 else None
        if found is None:
            continue
        stream = (found.fields.get("pci_bus_id", ""), found.fields.get("sxid", ""))
        if found.kind is KernelKind.SWITCH_ERROR_DETAIL:
            if stream in last_of:
                records[last_of[stream]] = _with_detail(records[last_of[stream]], found.text)
            continue
        if found.kind is KernelKind.SWITCH_ERROR:
            last_of[stream] = len(records)
        records.append(replace(found, sequence=line.sequence, seconds=line.seconds, is_old=line.is_old))
    return KernelBatch(records=tuple(records), lost=lost)


def _with_detail(record: KernelRecord, text: str) -> KernelRecord:
    if len(record.details) >= _DETAILS_PER_EVENT:
        return record
    return replace(record, details=(*record.details, text))


def _fields(kind: KernelKind, found: re.Match[str]) -> Mapping[str, str]:
    fields = {name: text for name, text in found.groupdict().items() if text}
    if "function" in fields:  # older kernels write the function behind "probe of"
        fields["pci_bus_id"] = fields.pop("function")
    for name in ("errno", "code"):
        if name in fields:
            fields["error"] = fields.pop(name)
    if "pci_bus_id" in fields:
        fields["pci_bus_id"] = _bus_id(fields["pci_bus_id"])
    for name in ("minor", "sxid", "xid", "port"):
        if name in fields:
            fields[name] = str(int(fields[name]))
    if kind is KernelKind.SWITCH_ERROR:
        fields["severity"] = fields.get("severity", "untagged").lower()
        if fields.pop("first", None):
            fields["first"] = "yes"
    return fields


def _bus_id(text: str) -> str:
    """dddd:bb:dd.f; the function is 0 where the driver leaves it away."""
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest if '.' in rest else rest + '.0'}"

r"""The kinds of Fabric Manager's log lines, as a table.

NVIDIA documents neither the format nor the texts, and the wording drifts: between 535 and 610 "fid" became "NodeId",
"the GPU handle" became "the member GPU handle", and each board generation has its own success line. So a rule names the
stable core of a message, not the message. What keeps that from matching too much:

* a pattern is anchored at the start of the message, so that text quoted inside another message does not count; where it
  begins with ``.*`` the rule is limited to lines that are not informational, or its end is anchored too;
* the first rule that matches wins, and the echo of the configuration (``name = value``) comes before the rules whose
  words a value could contain.

A line must not cost the square of its length. So a group that may begin anywhere begins at the edge of a word
(``(?<![^\s:])``), blanks are possessive, and of two words with anything before and between them the first one is taken
where it stands first (``(?>.*?first).*second``).

Notation: patterns ignore case, and a blank stands for any number of blanks (535 prints two where 590 prints one).
Named groups are the fields of the record. Two are rewritten: ``pci_bus_id`` to dddd:bb:dd.f, and ``pci_info``
(bus << 8 | device << 3 | function) to ``pci_bus_id``. Module ids and physical ids are as printed, counted from 0.
Hexadecimal numbers are printed without 0x.

Sources: public logs of Fabric Manager 520 to 610.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from fmsupervisor.facts import LogKind

# Nothing that decides the kind stands later in a message; it bounds the work on a long one.
CLASSIFIED_BYTES = 1024

_PCI_BUS_ID = r"(?P<pci_bus_id>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])"
_INBAND_HEADER = r"(?:received|sending)(?: an?)? inband(?: \w+)? message:"
NO_FIELDS: Mapping[str, str] = MappingProxyType({})


class Where(Enum):
    """Which lines a rule is for, by their level."""

    ANYWHERE = "all lines"
    BARE = "lines without the bracket prefix"
    CALM = "informational and bare lines"
    TROUBLE = "all but informational lines"

    def admits(self, level: str) -> bool:
        """Whether a line of ``level`` ("" for a bare line) is meant."""
        match self:
            case Where.ANYWHERE:
                return True
            case Where.BARE:
                return not level
            case Where.CALM:
                return level in {"", "INFO"}
            case Where.TROUBLE:
                return level not in {"INFO", "DEBUG"}


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """Messages of ``kind``: those which one of the ``patterns`` matches."""

    kind: LogKind
    where: Where
    patterns: tuple[re.Pattern[bytes], ...]

    def match(self, message: bytes, level: str) -> Mapping[str, str] | None:
        """The fields of the message; None when it is not of this kind."""
        if not self.where.admits(level):
            return None
        head = message[:CLASSIFIED_BYTES]
        for pattern in self.patterns:
            if found := pattern.match(head):
                return _fields(found)
        return None


def _rule(kind: LogKind, where: Where, *patterns: str) -> Rule:
    compiled = (
        re.compile(text.replace(" ", r"[ \t]++").encode("ascii"), re.IGNORECASE | re.DOTALL) for text in patterns
    )
    return Rule(kind, where, tuple(compiled))


RULES: tuple[Rule, ...] = (
    # The session.
    _rule(LogKind.SESSION_HEADER, Where.BARE, r"fabric manager log initializing(?: at)?:?\s*(?P<time>.*?)\s*$"),
    _rule(
        LogKind.SETTING,
        Where.CALM,
        r"(?!fail|cannot|could|unable|error|invalid|detected|warning)"
        r"(?P<name>(?-i:[A-Z])[\w\s/()'-]{1,79}?)\s*=\s*(?P<value>.*?)\s*$",
    ),
    # ... glued to the last line of a Fabric Manager that was killed while it wrote.
    _rule(
        LogKind.SESSION_HEADER,
        Where.ANYWHERE,
        r".*fabric manager log initializing at: (?P<time>\d+/\d+/\d{4} \d+:\d+:\d+[.\d]*)\s*$",
    ),
    _rule(LogKind.VERSION, Where.ANYWHERE, r"fabric manager version(?: is)?\s*:?\s*(?P<version>\d+\.\d+(?:\.\d+)*)"),
    _rule(LogKind.CONNECTED, Where.ANYWHERE, r"connected to (?P<nodes>\d+) nodes?\b"),
    # Topology and switches.
    _rule(
        LogKind.TOPOLOGY,
        Where.ANYWHERE,
        r"parsed fabric topology file (?P<file>\S+) successfully\b(?:.*?topology name: (?P<name>[^,\s]+))?",
    ),
    _rule(
        LogKind.SWITCH_ROW,
        Where.ANYWHERE,
        r"\s*index:\s*\d+ physical id:\s*(?P<physical_id>\d+) pci bus id:\s*" + _PCI_BUS_ID + r"(?!.*\bGPU-)"
        r"(?:.*?link mask:\s*(?P<link_mask>[0-9a-f]+))?(?:.*?uuid\s*:\s*(?P<uuid>\S+))?",
    ),
    _rule(
        LogKind.ROUTING_STARTED,
        Where.ANYWHERE,
        r"start(?:ed|ing)? NVSwitch (?:\d+/)?(?P<physical_id>\d+) routing configuration",
    ),
    _rule(
        LogKind.ROUTING_COMPLETED,
        Where.ANYWHERE,
        r"completed? NVSwitch (?:\d+/)?(?P<physical_id>\d+) routing configuration",
    ),
    _rule(LogKind.CONFIGURED, Where.ANYWHERE, r"successfully configured all\b.*?\b(?:NVSwitch|GPU)"),
    # In-band registration of the GPUs (Hopper and later) and multicast traffic.
    _rule(LogKind.INBAND_STARTED, Where.ANYWHERE, r"(?:(?:FM|fabric manager) )?start(?:ing|ed) NVLink inband\b"),
    _rule(
        LogKind.GPU_PROBE,
        Where.ANYWHERE,
        r"message payload details:\s*probe request:\s*pci info:\s*(?P<pci_info>[0-9a-f]{1,8})"
        r" module id:\s*(?P<module_id>[0-9a-f]+)(?:.*?uuid:\s*(?P<uuid>GPU-[0-9a-f-]+))?",
        r"GPU probe request received\b(?:.*?module id:\s*(?P<module_id>\d+))?(?:.*?(?P<uuid>GPU-[0-9a-f-]{36}))?",
    ),
    _rule(LogKind.GPU_ADDED, Where.ANYWHERE, r"added(?: an?)? GPU(?: with)? UUID:?\s*(?P<uuid>GPU-[0-9a-z-]+)"),
    _rule(
        LogKind.GPU_ROW,
        Where.ANYWHERE,
        r"\s*(?:fid|node\s*id|index):\s*\d+ physical id:\s*(?P<physical_id>\d+)\b.*?pci bus id:\s*"
        + _PCI_BUS_ID
        + r".*?uuid\s*:\s*(?P<uuid>GPU-[0-9a-z-]+)",
    ),
    _rule(
        LogKind.INBAND_FAILURE,
        Where.ANYWHERE,
        _INBAND_HEADER + r".*?\bstatus:\s*(?P<status>0*[1-9a-f][0-9a-f]*)\b(?: type:\s*(?P<type>[0-9a-f]+))?",
    ),
    _rule(LogKind.INBAND_MESSAGE, Where.ANYWHERE, _INBAND_HEADER),
    _rule(LogKind.PAYLOAD, Where.BARE, r"message payload details:"),
    _rule(
        LogKind.MULTICAST,
        Where.CALM,
        r"multicast group \d+ (?:is|was) (?:allocated|freed)",
        r"successfully (?:set\s*up|released?|freed) (?:the )?multicast team",
    ),
    _rule(
        LogKind.PARTITION,
        Where.ANYWHERE,
        r"(?:(?:node\s*id|fid) \d+ )?partition(?: id)? (?P<partition>\d+) is (?P<state>(?:de)?activated)\b",
    ),
    # Trouble.
    _rule(
        LogKind.SWITCH_ERROR,
        Where.ANYWHERE,
        r"detected(?: an?)? NVSwitch (?P<severity>fatal|non-?fatal)(?: SXid)? error (?P<sxid>\d{1,6})\b"
        r".*?pci bus id:?\s*"
        + _PCI_BUS_ID
        + r"(?:.*?physical id:?\s*(?P<physical_id>\d+))?(?:.*?\bport:?\s*(?P<port>\d{1,4})\b)?",
    ),
    _rule(
        LogKind.GPU_RESET_NEEDED,
        Where.TROUBLE,
        r"(?>.*?\bGPUs?\b).*\bneeds?(?: to be| a)? reset\b",
        r"(?>.*?\bGPUs?\b).*\b(?:requires?(?: a)? reset|must be reset)\b",
    ),
    _rule(
        LogKind.STALE_HANDLE,
        Where.TROUBLE,
        r"(?:failed to|cannot|can't|could not|unable to) find (?:the )?(?:member |exporter )?GPU\b"
        r"(?:.*?handle\s*(?P<handle>(?:0x)?[0-9a-f]+))?",
        r"requesting GPU handle (?P<handle>\w+) is different from\b",
        r"failed to add (?:the )?multicast team\b",
    ),
    _rule(
        LogKind.NOTHING_TO_DO,
        Where.TROUBLE,
        r"(?:request to|failed to|unable to).*\bnothing to do\b",
        r"(?:request to|failed to|unable to).*\bNV_WARN_NOTHING_TO_DO\b",
    ),
    _rule(
        LogKind.VERSION_MISMATCH,
        Where.TROUBLE,
        r"(?:the )?fabric manager\b.*?\bdriver interface version (?P<fabric_manager>\d+(?:\.\d+)+)"
        r"(?>.*?\bmatch\b).*?\bdriver version (?P<driver>\d+(?:\.\d+)+)",
    ),
    _rule(
        LogKind.TOPOLOGY_MISMATCH,
        Where.TROUBLE,
        r"(?:the )?detected number of (?:NVSwitch|GPU|device)(?>.*?\bmatch\b).*?\btopolog",
    ),
    _rule(
        LogKind.CONFIG_INVALID,
        Where.TROUBLE,
        r"(?:the )?(?:fabric manager )?config(?:uration)?(?: file)? (?:item|option|key):?\s*['\"]?(?P<item>\w+)\b.*?"
        r"\b(?:invalid|unknown|unsupported|not (?:valid|supported|recogni[sz]ed))\b",
        r"(?:invalid|unknown|unsupported|unrecogni[sz]ed) (?:fabric manager )?(?:config(?:uration)? )?(?:file )?"
        r"(?:item|option|key):?\s*['\"]?(?P<item>\w+)",
    ),
    _rule(
        LogKind.DIRECTORY_DENIED,
        Where.TROUBLE,
        r"(?:the )?fabric manager\b.*?\bpermissions? (?:to|for|on) (?:the )?directory:?\s*(?P<path>/.*?)\.?\s*$",
    ),
    _rule(
        LogKind.ADDRESS_IN_USE,
        Where.TROUBLE,
        r"(?=.*\b(?:(?:address|port|socket)\b.{0,80}?\bin use|EADDRINUSE)\b)"
        r"(?:.*?\bport\b\D{0,12}(?P<port>\d{1,5})\b)?",
    ),
    _rule(
        LogKind.LOADER_ERROR,
        Where.TROUBLE,
        r".*?\berror while loading shared libraries:\s*(?P<library>[^\s:]+)",
        r".*?(?<![^\s:'\"(])(?P<library>[^\s:'\"(]+\.so\b[\w.]*)['\"]?:\s*cannot open shared object file\b",
        r".*?\bundefined symbol:?\s*(?P<symbol>[\w@.]+)",
        r".*?(?:(?<![^\s:])(?P<library>[^\s:]+):\s*)?version [`'\"](?P<symbol>\w[\w.]*)['\"] not found\b",
        r".*?\b(?:cannot open shared object file|symbol lookup error)\b",
    ),
    # Known and of no consequence.
    _rule(
        LogKind.OTHER_NOTICE,
        Where.CALM,
        r"getting (?:fabric node|NVSwitch|NVLink|GPU)\b",
        r"detected system topology is\b",
        r"fabric topology file \S+ is parsed",
        r"number of (?:devices specified|GPU base\s*board)",
        r"dumping all the detected\b",
        r"NVLink (?:inband|autonomous link initialization)\b.* is (?:en|dis)abled",
        r"LMDB_LOG:\s*success",
        r"disabling RPC mode\b",
        r"build info\b",
        r"detected (?:pre-)?NVL\d",
        r"started \"nvidia fabric manager\"",
    ),
    _rule(
        LogKind.OTHER_NOTICE,
        Where.BARE,
        r"\.\s*$",  # the end of a topology file's build time
        r"\".*\" failed! exit code:\s*\d+",  # of the vendor's start script, after Fabric Manager's own line
        r"\s*\w[\w\s/()-]{0,47} :(?:\s|$)",  # a row of an "... error on :" record
    ),
    _rule(LogKind.OTHER_NOTICE, Where.ANYWHERE, r".{0,200}\berror on\s*:\s*$"),
    _rule(LogKind.BLANK, Where.ANYWHERE, r"\s*$"),
)

# Counted, never recorded nor relayed: a few lines per communicator of every job.
QUIET_KINDS = frozenset({LogKind.INBAND_MESSAGE, LogKind.PAYLOAD, LogKind.MULTICAST, LogKind.BLANK})
# Relayed, never recorded.
PLAIN_KINDS = frozenset({LogKind.OTHER_NOTICE, LogKind.UNRECOGNISED})
# Relayed before informational lines, whatever their level.
TROUBLE_KINDS = frozenset(
    {
        LogKind.INBAND_FAILURE,
        LogKind.SWITCH_ERROR,
        LogKind.STALE_HANDLE,
        LogKind.GPU_RESET_NEEDED,
        LogKind.NOTHING_TO_DO,
        LogKind.VERSION_MISMATCH,
        LogKind.TOPOLOGY_MISMATCH,
        LogKind.CONFIG_INVALID,
        LogKind.DIRECTORY_DENIED,
        LogKind.ADDRESS_IN_USE,
        LogKind.LOADER_ERROR,
    }
)


def classify(message: bytes, level: str) -> tuple[LogKind, Rule | None, Mapping[str, str]]:
    """The kind of the message, the first rule that matches it, and its fields."""
    for rule in RULES:
        fields = rule.match(message, level)
        if fields is not None:
            return rule.kind, rule, fields
    return LogKind.UNRECOGNISED, None, NO_FIELDS


def _fields(found: re.Match[bytes]) -> Mapping[str, str]:
    fields = {
        name: value.decode("utf-8", "backslashreplace")
        for name, value in found.groupdict().items()
        if value is not None
    }
    if not fields:
        return NO_FIELDS
    if "pci_bus_id" in fields:
        fields["pci_bus_id"] = normalise_pci_bus_id(fields["pci_bus_id"])
    if "pci_info" in fields:
        number = int(fields.pop("pci_info"), 16)
        fields["pci_bus_id"] = (
            f"{number >> 16 & 0xFFFF:04x}:{number >> 8 & 0xFF:02x}:{number >> 3 & 0x1F:02x}.{number & 7}"
        )
    if "severity" in fields:
        fields["severity"] = "fatal" if fields["severity"].lower() == "fatal" else "non-fatal"
    return fields


def normalise_pci_bus_id(printed: str) -> str:
    """``00000000:9B:00.0`` as Fabric Manager prints it -> ``0000:9b:00.0`` as the kernel does."""
    domain, _, rest = printed.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"

"""What an SXid means: its hardware, how bad it is on which chip, and what NVIDIA's guide says to do.

Sources: data/sxid.tsv (numbers, texts and severities of NVIDIA's open kernel modules); its [guide:...] classes and the
actions below: the chapter on SXid errors of NVIDIA's Fabric Manager User Guide. The driver can write the same number
as fatal or as non-fatal, so the word in the line wins over every table.
"""

import re
from dataclasses import dataclass

from fmsupervisor.explanation import Explanation
from fmsupervisor.sxid import SwitchErrorClass, catalogue, is_ambiguous, lookup

# By the thousands of the number.
_HARDWARE = {
    10: "the switch as a whole: its host interface and its driver",
    11: "NPORT ingress: where packets from a link enter the switch",
    12: "NPORT egress: where packets leave the switch towards a link",
    13: "NPORT fstate: a table of a port, in chips before LR10",
    14: "NPORT tstate: a port's table of the transactions under way",
    15: "NPORT route: a port's routing tables",
    16: "NPORT: a port, in chips before LR10",
    17: "NVLCTRL: the control of a link, in chips before LR10",
    18: "NVLIPT: what a group of links has in common",
    19: "NVLink TLC: the transaction layer of a link",
    20: "NVLink DL/PL: the data link and physical layers, so the link itself and what is at its other end",
    21: "AFS: a part of chips before LR10",
    22: "MINION: the microcontroller that trains the links",
    23: "crossbar: what connects the ports inside the switch",
    24: "NPORT sourcetrack: a port's record of requests that wait for their response",
    25: "NVLIPT link: one link's part of NVLIPT",
    26: "SOE: the switch's own microcontroller",
    27: "CCI: the controller of the cable modules",
    28: "OSFP: the temperature of the optical modules",
    29: "NPORT multicast tstate: a port's table of multicast transactions (NVLS)",
    30: "NPORT reduction tstate: a port's table of reductions (NVLS)",
}

_SEVERITIES = {
    "fatal": 'always written as "Fatal"; the link needs a reset',
    "fatal-device": 'always written as "Fatal"; the whole switch needs a reset',
    "fatal-if-contained": (
        'written as "Fatal" when the hardware contained the error (the link needs a reset), else as "Non-fatal"'
    ),
    "fatal-device-if-contained": (
        'written as "Fatal" when the hardware contained the error (the whole switch needs a reset), else as "Non-fatal"'
    ),
    "nonfatal": 'written as "Non-fatal"',
    "untagged": 'written without the word "Fatal" or "Non-fatal"',
    "-": "not written by the drivers of LR10 and LS10",
}
_CHIPS = {"LR10": "LR10 (A100)", "LS10": "LS10 (H100, H200)", "both": "both chips, at other places"}

_RESET_LINK = (
    "Access link (GPU side): reset the GPU at the other end of the link; when a guest has it, power-cycle that guest. "
    "Trunk link (switch to switch): reset all GPUs and switches, or reboot the host."
)
_RESET_ALL = (
    "It concerns the whole fabric: reset all GPUs and switches together, or reboot the host; end all guests before."
)
_NOTHING = "Nothing while it is rare. One link that repeats it is a link or GPU that gets worse."

_CLASSES = {
    "nonfatal": "non-fatal",
    "fatal": "fatal",
    "always-fatal": "always fatal: the whole switch is concerned",
    "notable": "another notable event",
    "": "not named in the guide",
}
_ACTION_OF_CLASS = {
    "nonfatal": _NOTHING,
    "fatal": _RESET_LINK,
    "always-fatal": _RESET_ALL,
    "notable": _NOTHING,
}
_CORRECTED_ECC = frozenset(
    (11012, 11021, 11022, 11023, 12021, 12023, 15008, 15011, 19049, 19055, 19057, 19059, 19062, 19065, 19068, 19071)
) | frozenset((24001, 24002, 24003))
_ACTION_OF_NUMBER = dict.fromkeys(_CORRECTED_ECC, "Nothing: a single-bit error that was corrected.") | {
    10001: "Nothing by itself, but it may come before a fatal one.",
    10002: "Nothing by itself, but it may come before a fatal one.",
    10003: "It is never expected. Reset all GPUs and switches, or reboot the host, and report it to NVIDIA.",
    10004: "The switch slows down because it is hot. Look at fans, air flow and inlet temperature; 10005 ends it.",
    10005: "Nothing: the slowdown that 10004 reported is over.",
    11004: "Software of a guest made an access that is not allowed. Look at that guest's job.",
    12028: "Traffic of one guest or GPU stalls, and its GPU reports Xid 45. Restart that guest or job.",
    19084: "It usually comes with a fatal one. Reset the GPUs and switches.",
    20001: "Nothing unless it is frequent; then suspect the link.",
    20012: "A bad connection, or a GPU was shut down without notice. Nothing when a guest was just stopped or reset.",
    20034: "Reset the GPU at the other end of the link; when a guest has it, power-cycle that guest. All "
    "switches report it when a GPU falls off the bus (Xid 79 before it) or is shut down.",
    22013: "Ignore it; bursts at boot are normal.",
}
_WORD_WINS = "The same number can be fatal or not: the word in the line wins over any table."
_BRANCHES = (("550 and later", None), ("525 to 545", "535"), ("515", "515"))

_TAG = re.compile(r"\s*\[(class base|defined, not raised[^\]]*|LR10 only|LS10 only|guide:[a-z-]+)\]\s*")


@dataclass(frozen=True, slots=True)
class _Description:
    """The fourth column taken apart."""

    text: str  # what the driver writes
    tags: tuple[str, ...]

    @classmethod
    def of(cls, entry: SwitchErrorClass) -> "_Description":
        tags = tuple(_TAG.findall(entry.description))
        text = _TAG.sub(" ", entry.description).strip()
        _, separator, written = text.partition(": ")
        return cls(written if separator else text, tags)

    @property
    def guide_class(self) -> str:
        """The guide's class, "" when it does not name the number."""
        return next((tag.removeprefix("guide:") for tag in self.tags if tag.startswith("guide:")), "")


def explain_sxid(number: int, word: str = "") -> Explanation | None:
    """The number explained; None when no driver knows it.

    ``word``: how bad the line at hand says that it is: "fatal", "non-fatal", "correctable" or "" (nothing known).
    """
    entry = lookup(number) or next((found for _, version in _BRANCHES if (found := lookup(number, version))), None)
    if entry is None:
        return None
    description = _Description.of(entry)
    facts = [
        ("symbol", entry.symbol),
        ("hardware", _HARDWARE.get(_home(number) // 1000, "a part that this program does not know")),
        ("severity", _severity(entry.severity)),
        ("chips", _chips(description)),
        ("guide", _CLASSES.get(description.guide_class, description.guide_class)),
        ("what_to_do", _action(number, entry, description, word)),
        ("note", _WORD_WINS),
    ]
    if is_ambiguous(number):
        facts.insert(0, ("by_branch", _by_branch(number)))
    return Explanation("sxid", f"SXid {number:05d}", description.text, tuple(facts))


def numbers() -> tuple[int, ...]:
    """All numbers that can be explained."""
    return tuple(catalogue())


def number_of_symbol(symbol: str) -> int | None:
    """The number with this name in enum nvswitch_err_type."""
    return next((entry.number for entry in catalogue().values() if entry.symbol == symbol.upper()), None)


def _home(number: int) -> int:
    """The number itself, or in the numbering of 550 when only older drivers know it."""
    return number if lookup(number) else number + 1000


def _severity(written: str) -> str:
    """The third column as a sentence; "a+b" differs by place, "LR10=a;LS10=b" by chip."""
    if "=" not in written:
        return ", or ".join(_SEVERITIES.get(each, each) for each in written.split("+"))
    parts = (part.partition("=") for part in written.split(";"))
    return "; ".join(f"on {_CHIPS.get(chip, chip)}: {_severity(each)}" for chip, _, each in parts)


def _chips(description: _Description) -> str:
    if "class base" in description.tags:
        return "none: the base of its group, never written itself"
    if any(tag.startswith("defined") for tag in description.tags):
        return "none of LR10 and LS10: defined, but not raised by driver 595"
    for chip in ("LR10", "LS10"):
        if f"{chip} only" in description.tags:
            return f"only {_CHIPS[chip]}"
    return f"{_CHIPS['LR10']} and {_CHIPS['LS10']}"


def _action(number: int, entry: SwitchErrorClass, description: _Description, word: str) -> str:
    known = _ACTION_OF_NUMBER.get(number) or _ACTION_OF_CLASS.get(description.guide_class)
    if word == "fatal" and (description.guide_class in {"", "nonfatal"} or known is None):
        return f"The line says fatal. {_RESET_LINK}"
    if known is not None:
        return known
    if entry.severity == "-" and not word:
        return "None is known: these drivers do not write it."
    if word or "fatal" not in entry.severity.replace("nonfatal", ""):
        return _NOTHING
    return f'When the line says "Fatal": {_RESET_LINK} Otherwise: {_NOTHING}'


def _by_branch(number: int) -> str:
    """What the number means to which driver: it moved."""
    meanings = []
    for branch, version in _BRANCHES:
        entry = lookup(number, version)
        meaning = f"{entry.symbol} ({_Description.of(entry).text})" if entry else "not known"
        meanings.append(f"driver {branch}: {meaning}")
    return "; ".join(meanings)

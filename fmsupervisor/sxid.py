"""The catalogue of SXids: the numbers under which an NVSwitch reports errors.

Source: data/sxid.tsv, whose head names where each column comes from (ctrl_dev_nvswitch.h and the reporting macros of
NVIDIA's open kernel modules). Read on first use.

The table has the numbering of 550 and later. In driver 525 to 545 the two newest groups have numbers that are 1000
lower (multicast tstate 28000 to 28006, reduction tstate 29000 to 29006), and cables (27xxx) and OSFP temperatures
(28001 to 28005) do not exist; in 515 three egress numbers are names of log records. So what a number means depends on
the driver that is loaded: ``lookup`` takes its version.
"""

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class SwitchErrorClass:
    """One SXid number."""

    number: int
    symbol: str  # of enum nvswitch_err_type, "NVSWITCH_ERR_HW_..."
    severity: str  # as in the head of data/sxid.tsv; the log says of each event whether it was fatal
    description: str


@cache
def catalogue() -> Mapping[int, SwitchErrorClass]:
    """All known SXids by number."""
    content = pkgutil.get_data("fmsupervisor", "data/sxid.tsv") or b""
    entries = (_entry(line) for line in content.decode("utf-8").splitlines() if line and not line.startswith("#"))
    return MappingProxyType({entry.number: entry for entry in entries})


def _entry(line: str) -> SwitchErrorClass:
    number, symbol, severity, description = line.split("\t")
    return SwitchErrorClass(int(number), symbol, severity, description)


def lookup(number: int, driver_version: str | None = None) -> SwitchErrorClass | None:
    """What ``number`` means to a driver of this version (None: of 550 or later); None when it has no meaning there."""
    branch = _branch(driver_version)
    if branch is None or branch >= _FIRST_NEW_BRANCH:
        return catalogue().get(number)
    if branch < _FIRST_MULTICAST_BRANCH:
        return _LOG_RECORDS_515.get(number) or (catalogue().get(number) if number < _FIRST_CABLE_NUMBER else None)
    if number in _MOVED_NUMBERS:
        moved = catalogue().get(number + _MOVED_BY)
        return replace(moved, number=number) if moved else None
    return catalogue().get(number) if number < _FIRST_CABLE_NUMBER else None


def is_ambiguous(number: int) -> bool:
    """Whether drivers of different branches mean different errors by ``number``, or only some know it."""
    return number in _MOVED_NUMBERS or number in _LOG_RECORDS_515 or number - _MOVED_BY in _MOVED_NUMBERS


def _branch(version: str | None) -> int | None:
    head = (version or "").partition(".")[0]
    return int(head) if head.isascii() and head.isdecimal() and len(head) <= 4 else None  # noqa: PLR2004


_FIRST_MULTICAST_BRANCH = 525
_FIRST_NEW_BRANCH = 550
_FIRST_CABLE_NUMBER = 27000
_MOVED_BY = 1000
_MOVED_NUMBERS = frozenset((*range(28000, 28007), *range(29000, 29007)))
_LOG_RECORDS_515: Mapping[int, SwitchErrorClass] = MappingProxyType(
    {
        number: SwitchErrorClass(
            number, f"NVSWITCH_ERR_HW_NPORT_EGRESS_{name}", "-", "NPORT egress: id of a log record"
        )
        for number, name in ((12034, "TIMESTAMP_LOG"), (12035, "MISC_LOG"), (12036, "HEADER_LOG"))
    }
)

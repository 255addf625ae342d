"""The catalogue of SXids: the numbers under which an NVSwitch reports errors.

Source: data/sxid.tsv, whose head names where each column comes from (ctrl_dev_nvswitch.h and the reporting macros of
NVIDIA's open kernel modules). Read on first use.
"""

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
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

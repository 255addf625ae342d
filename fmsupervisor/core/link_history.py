"""How often each link of a switch had an error lately. Pure.

One bad cable or connector shows as the same few errors on one port, again and again; the sum over a switch, or since
the start, hides it. Kept are counts in slots of ten minutes for a day, only of links that had errors. Fatal ones are
conditions as well; they are counted apart, because a link that comes and goes shows as the same fatal error (20034 as
a rule) after each reset. A guest that is shut down without notice shows so too, but on all links of its GPUs.
SXid 22013 (Minion DLREQ) is left out: it comes in bursts at each boot, and NVIDIA's guide says to ignore it.
"""

from collections.abc import Mapping
from types import MappingProxyType

from fmsupervisor.core.state import Link, State
from fmsupervisor.facts import SwitchErrorKey

HOUR_SECONDS = 3600.0
DAY_SECONDS = 24 * HOUR_SECONDS

_SLOT_SECONDS = 600.0
_MAX_LINKS = 512  # 4 switches x 64 ports, and more
_IGNORED_SXID = 22013

Slots = Mapping[int, int]  # slot number -> errors in it


def of_links(errors: Mapping[SwitchErrorKey, int]) -> tuple[dict[Link, int], dict[Link, int]]:
    """The errors that are of a link, summed: those that are not fatal, and those that are."""
    counts: tuple[dict[Link, int], dict[Link, int]] = ({}, {})
    for key, count in errors.items():
        if key.sxid != _IGNORED_SXID and key.port is not None:
            one = counts[key.severity == "fatal"]
            link = (key.pci_bus_id, key.port)
            one[link] = one.get(link, 0) + count
    return counts


def add_errors(
    history: Mapping[Link, Slots], now: float, errors: Mapping[Link, int], switches: frozenset[str]
) -> Mapping[Link, Slots]:
    """The history with these new errors, and without what is older than a day. Only links of ``switches`` are kept."""
    slot = int(now // _SLOT_SECONDS)
    oldest = slot - int(DAY_SECONDS // _SLOT_SECONDS)
    kept = {
        link: {number: count for number, count in slots.items() if number > oldest} for link, slots in history.items()
    }
    kept = {link: slots for link, slots in kept.items() if slots}
    for link, count in errors.items():
        if link[0] in switches and (link in kept or len(kept) < _MAX_LINKS):
            slots = kept.setdefault(link, {})
            slots[slot] = slots.get(slot, 0) + count
    return MappingProxyType(kept)


def errors_within(state: State, seconds: float) -> dict[Link, int]:
    """Non-fatal errors of each link in the last ``seconds``, to the nearest slot; links without any are left out."""
    return _within(state, state.link_errors, seconds)


def faults_within(state: State, seconds: float) -> dict[Link, int]:
    """The same of fatal errors."""
    return _within(state, state.link_faults, seconds)


def _within(state: State, history: Mapping[Link, Slots], seconds: float) -> dict[Link, int]:
    oldest = int(state.now.monotonic // _SLOT_SECONDS) - int(seconds // _SLOT_SECONDS)
    counts = {link: sum(count for number, count in slots.items() if number > oldest) for link, slots in history.items()}
    return {link: count for link, count in counts.items() if count}

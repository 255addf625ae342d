"""Count every SXid once, although two witnesses report it.

The driver writes an SXid to the kernel log and puts it on a list that Fabric Manager reads; Fabric Manager then logs it
too (535 even twice, which its parser undoes). So one event normally arrives twice, in either order, and neither witness
alone will do: the kernel log also speaks while Fabric Manager is down, and Fabric Manager's log also when /dev/kmsg may
not be read or was overrun.

Tried and dropped: counting the kernel's events only (nothing is counted where it cannot be read), and taking reports
within some seconds of each other for one (the driver keeps what happened while Fabric Manager was down, and Fabric
Manager reports it minutes later, when it is back).

The rule is a balance per stream (switch, number, port): the kernel's events less Fabric Manager's reports. An event of
the kernel pays a debt (a report that came first) or else counts; a report uses up a credit (an event of the kernel that
it has not reported yet) or else counts. Within its time limits that makes the count the larger one of the two, in any
order and however the reading cuts them, since the two counts only ever grow by the part that exceeds the other.

* A debt is forgotten after 15 s: the kernel log is read within a second, so no event of the kernel belongs to it.
* A credit is kept: while the kernel log is read without a gap, every new event has a line of its own there, so a report
  without a new line can only be about an old event. Once there was a gap, credits older than 15 s are forgotten.
* Events from before the supervisor began are not counted as new, but give credit: Fabric Manager may report them.
* Lines without a port (``Link NN``) and reports with one are matched by switch and number.

How bad an event is stands in no key: whoever reports first says it, and the driver's word and Fabric Manager's agree.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from fmsupervisor.conditions import Code
from fmsupervisor.core import link_history
from fmsupervisor.core.state import Balance, Counters, ErrorStream, Latched, State
from fmsupervisor.facts import Problem, SwitchErrorKey

_WINDOW_SECONDS = 15.0
_MAX_STREAMS = 4096
_MAX_SERIES = 4096  # distinct (switch, number, severity, port); more are counted together


@dataclass(frozen=True, slots=True)
class KernelError:
    """One SXid of the kernel log."""

    key: SwitchErrorKey
    is_old: bool  # from before the supervisor began


def count_reports(state: State, reports: Mapping[SwitchErrorKey, int], *, is_old: bool = False) -> State:
    """What Fabric Manager reported. Old reports were counted by an earlier supervisor: they only settle credits."""
    if not reports:
        return state
    ledger = _Ledger(state.error_balances, state.now.monotonic)
    new = {key: ledger.take_reports(key, count) for key, count in reports.items()}
    if not is_old:
        return _counted(replace(state, error_balances=ledger.result()), new)
    state = replace(state, error_balances=ledger.settled())
    for key, count in reports.items():
        if key.severity == "fatal":
            state = latch(state, fatal_problem(state, key, count))
    return state


def count_kernel_errors(state: State, errors: Iterable[KernelError]) -> State:
    """What the kernel log says."""
    ledger = _Ledger(state.error_balances, state.now.monotonic)
    new: dict[SwitchErrorKey, int] = {}
    old: dict[SwitchErrorKey, int] = {}
    for error in errors:
        is_new = ledger.take_event(error.key)
        if error.is_old:
            old[error.key] = old.get(error.key, 0) + 1
        elif is_new:
            new[error.key] = new.get(error.key, 0) + 1
    if old:
        summed = _summed(state, state.counters.switch_errors_before_start, old)
        state = replace(state, counters=replace(state.counters, switch_errors_before_start=summed))
    return _counted(replace(state, error_balances=ledger.result()), new)


def forget_credits(state: State) -> State:
    """The kernel log has a gap, or cannot be read: reports may be about events that nobody has read there."""
    since = state.now.monotonic - _WINDOW_SECONDS
    kept = {stream: one for stream, one in state.error_balances.items() if one.at >= since}
    return replace(state, error_balances=MappingProxyType(kept))


def latch(state: State, problem: Problem) -> State:
    """The problem holds until a later session has configured the fabric; only its first case in a session is told."""
    session = state.run.session if state.run else ""
    key = (problem.code, problem.subject)
    known = state.latched.get(key)
    if known is not None and known.session == session:
        return state
    return replace(state, latched=MappingProxyType({**state.latched, key: Latched(problem, session)}))


def _counted(state: State, new: Mapping[SwitchErrorKey, int]) -> State:
    """The state with these new events."""
    new = {key: count for key, count in new.items() if count}
    if not new:
        return state
    counters: Counters = replace(state.counters, switch_errors=_summed(state, state.counters.switch_errors, new))
    now, known = state.now.monotonic, state.seen_switches
    errors, faults = link_history.of_links(new)
    state = replace(
        state,
        counters=counters,
        link_errors=link_history.add_errors(state.link_errors, now, errors, known),
        link_faults=link_history.add_errors(state.link_faults, now, faults, known),
    )
    for key, count in new.items():
        if key.severity == "fatal":
            state = latch(state, fatal_problem(state, key, count))
    return state


def fatal_problem(state: State, key: SwitchErrorKey, count: int, code: Code = Code.SXID_FATAL) -> Problem:
    """The condition of a fatal SXid."""
    port = f" port {key.port}" if key.port is not None else ""
    times = f" ({count} times)" if count > 1 else ""
    subject = key.pci_bus_id if key.pci_bus_id in state.seen_switches else "other"
    return Problem(code, f"SXid {key.sxid} on {key.pci_bus_id}{port}{times}", subject)


def _summed(
    state: State, before: Mapping[SwitchErrorKey, int], new: Mapping[SwitchErrorKey, int]
) -> Mapping[SwitchErrorKey, int]:
    summed = dict(before)
    for key, count in new.items():
        bounded = _bounded(key, state, summed)
        summed[bounded] = summed.get(bounded, 0) + count
    return MappingProxyType(summed)


def _bounded(key: SwitchErrorKey, state: State, known: Mapping[SwitchErrorKey, int]) -> SwitchErrorKey:
    """The key itself, or a catch-all: a hostile log must not make the state grow."""
    if key.pci_bus_id not in state.seen_switches:
        key = replace(key, pci_bus_id="other")
    if key in known or len(known) < _MAX_SERIES:
        return key
    return replace(key, sxid=0, port=None)


class _Ledger:
    """The balances while one batch is taken in."""

    def __init__(self, balances: Mapping[ErrorStream, Balance], now: float) -> None:
        self._now = now
        self._balances = {stream: one for stream, one in balances.items() if not self._is_forgotten(one)}
        self._indebted: dict[tuple[str, int], set[int | None]] = {}  # ports with a debt, by switch and number
        for (bus_id, sxid, port), one in self._balances.items():
            if one.ahead < 0:
                self._indebted.setdefault((bus_id, sxid), set()).add(port)

    def take_event(self, key: SwitchErrorKey) -> bool:
        """An event of the kernel; whether it is a new one."""
        ports = self._indebted.get((key.pci_bus_id, key.sxid), set())
        if key.port in ports:
            port = key.port
        elif ports and (key.port is None or None in ports):
            port = min(ports, key=lambda one: -1 if one is None else one) if key.port is None else None
        else:
            self._add((key.pci_bus_id, key.sxid, key.port), 1)
            return True
        if self._add((key.pci_bus_id, key.sxid, port), 1) == 0:
            ports.discard(port)
        return False

    def take_reports(self, key: SwitchErrorKey, count: int) -> int:
        """``count`` reports of Fabric Manager; how many are about new events."""
        left = count
        for port in dict.fromkeys((key.port, None)):
            stream = (key.pci_bus_id, key.sxid, port)
            credit = self._balances[stream].ahead if stream in self._balances else 0
            used = max(0, min(left, credit))
            if used:
                self._add(stream, -used)
                left -= used
        if left:
            self._add((key.pci_bus_id, key.sxid, key.port), -left)
            self._indebted.setdefault((key.pci_bus_id, key.sxid), set()).add(key.port)
        return left

    def result(self) -> Mapping[ErrorStream, Balance]:
        """What is left to settle, bounded: beyond that, the oldest is forgotten."""
        left = {stream: one for stream, one in self._balances.items() if one.ahead}
        if len(left) > _MAX_STREAMS:
            left = dict(sorted(left.items(), key=lambda item: item[1].at)[-_MAX_STREAMS:])
        return MappingProxyType(left)

    def settled(self) -> Mapping[ErrorStream, Balance]:
        """The credits alone: nothing will come for these reports."""
        return MappingProxyType({stream: one for stream, one in self.result().items() if one.ahead > 0})

    def _add(self, stream: ErrorStream, count: int) -> int:
        before = self._balances[stream].ahead if stream in self._balances else 0
        self._balances[stream] = Balance(before + count, self._now)
        return before + count

    def _is_forgotten(self, one: Balance) -> bool:
        return one.ahead < 0 and self._now - one.at > _WINDOW_SECONDS

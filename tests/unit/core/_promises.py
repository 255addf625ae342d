"""What must hold in every state, whatever led to it."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

from _any import EVENTS
from _builders import codes, moment
from _world import hide

from fmsupervisor.conditions import REGISTRY, Code
from fmsupervisor.core import actions, events, switches
from fmsupervisor.core.diagnosis import blocking
from fmsupervisor.core.plan import next_action, next_deadline
from fmsupervisor.core.state import State
from fmsupervisor.core.verdict import DEGRADING, FabricState, Verdict, verdict
from fmsupervisor.facts import Host, KernelBatch, LogBatch, Unknown

# Conditions that say that something could not be looked at.
ABOUT_OBSERVING = frozenset(
    {
        Code.HARDWARE_UNOBSERVABLE,
        Code.LOG_UNREADABLE,
        Code.DRIVER_UNOBSERVABLE,
        Code.KERNEL_LOG_UNREADABLE,
        Code.KERNEL_LOG_OVERRUN,
    }
)
MOST_LEAVES = 60_000  # of a state: numbers, and texts of 64 characters; some megabytes
FILES = ("/proc/driver/nvidia-nvswitch/devices", "/proc/devices", "/sys/module/nvidia")


def check_promises(state: State) -> Verdict:
    """The verdict, when all is as it must be; raises AssertionError."""
    shown = verdict(state)
    _require(bool(shown.reason.strip()), f"{shown.state} without a reason")
    _require(next_deadline(state) > state.now.monotonic, "the next deadline is in the past")
    _require(all(REGISTRY[one.code].remedy for one in shown.problems), "a condition without a remedy")
    match shown.state:
        case FabricState.CONFIGURED:
            _check_configured(state, shown)
        case FabricState.FAILED:
            _require(names_its_cure(shown), f"failed, and nobody knows until when: {shown.reason}")
            _require(shown.is_decided, "failed and not decided")
        case _:
            pass
    _check_action(state, next_action(state))
    return shown


def _check_configured(state: State, shown: Verdict) -> None:
    run = state.run
    _require(run is not None and run.stop is None and run.configured is not None, "configured by nobody")
    _require(not switches.unconfigured(state), f"configured, but the driver denies it: {switches.unconfigured(state)}")
    _require(not codes(shown.problems) & DEGRADING, f"configured with {codes(shown.problems) & DEGRADING}")


def names_its_cure(shown: Verdict) -> bool:
    """Whether people are told what the supervisor waits for."""
    return "; waits for a change of " in shown.reason


def _check_action(state: State, action: actions.Action | None) -> None:
    match action:
        case None | actions.ObserveHost() | actions.ObserveDriver() | actions.EnsureNodes():
            return
        case actions.StartFabricManager():
            _require(state.run is None and not state.has_orphans, "a second Fabric Manager")
            _require(bool(switches.working(state)), "a Fabric Manager without a switch")
            _require(blocking(state) is None, f"started although {blocking(state)}")
        case actions.LoadModule():
            _require(not state.is_loading, "loaded twice")
            _require(blocking(state) is None, f"loaded although {blocking(state)}")
        case actions.TerminateFabricManager():
            _require(state.run is not None and state.run.stop is None, "asked to end twice")
        case actions.KillFabricManager():
            _require(state.run is not None and state.run.stop is not None, "killed without being asked")
        case actions.EndService():
            _require(state.is_stopping and state.run is None and not state.has_ended, "ended with a process left")
        case _:
            pass
    if state.is_stopping:
        harmless = (actions.TerminateFabricManager, actions.KillFabricManager, actions.EndService)
        _require(isinstance(action, harmless), f"{action} while stopping")


def failed_looks(state: State, hidden: tuple[str, ...] = ()) -> Iterator[tuple[events.Event, events.Event]]:
    """Every look that can fail, failing (found by the types of the events' fields), and what would be as good as it.

    That is that time passes; for a look at the host that is blind in parts, one that sees what was seen before.
    """
    nothing = events.TimePassed()
    for kind in EVENTS:
        for name, hint in get_type_hints(kind).items():
            if Unknown in get_args(hint):
                yield kind(**{name: Unknown("cannot be looked at")}), nothing
            elif hint is LogBatch:
                yield kind(**{name: LogBatch("file", problem="permission denied")}), nothing
            elif hint is KernelBatch:
                yield kind(**{name: KernelBatch(problem="permission denied")}), nothing
    if isinstance(state.host, Host):
        yield events.HostObserved(hide(state.host, hidden)), events.HostObserved(state.host)


def faults(state: State) -> set[tuple[Code, str]]:
    """What is wrong, apart from what could not be looked at."""
    apart = ABOUT_OBSERVING
    if state.settings.restart.policy == "when-no-guests":  # not knowing whether there are guests withholds a restart
        apart |= {Code.RESTART_WITHHELD}
    return {(one.code, one.subject) for one in verdict(state).problems if one.code not in apart}


def leaves(value: Any) -> int:
    """How large a value is."""
    if isinstance(value, str):
        return 1 + len(value) // 64
    if is_dataclass(value):
        return sum(leaves(getattr(value, one.name)) for one in fields(value))
    if isinstance(value, Mapping):
        return sum(leaves(key) + leaves(item) for key, item in value.items())
    if isinstance(value, tuple | frozenset):
        return sum(map(leaves, value))
    return 1


def later(state: State, seconds: float) -> Any:
    """A moment after the state's."""
    return moment(state.now.monotonic + seconds)


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(what)

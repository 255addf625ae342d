"""All states that the core can come to rest in, up to equivalence, found by trying everything from every one of them.

A state has a finite description (``key``): what people are told, which conditions hold, what is known of each part, and
which of the named deadlines lie ahead. Two states of one key are taken for one: only the first is explored further.
What can happen is a finite list: every event that may come by itself, and the passing of time up to each deadline that
lies ahead, each of them in every surrounding (``Surrounding``) that the looks may then find. So the result is exact but
for two things: the description may hide a difference that matters later, and an event has some representatives only (a
load fails for good or for now; one switch of four is missing). ``SCENES`` begin it with different settings.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from _builders import (
    BLIND,
    COMING,
    SWITCHES,
    guest,
    looked_for,
    make_config,
    make_host,
    make_installation,
    make_state,
    make_view,
    moment,
    node,
    said,
    settings,
    sxid,
)
from _builders import kernel_said as kernel

from fmsupervisor.conditions import REGISTRY, Code
from fmsupervisor.core import actions, events, plan_times
from fmsupervisor.core.diagnosis import blocking
from fmsupervisor.core.plan import next_action, next_deadline
from fmsupervisor.core.reduce import reduce
from fmsupervisor.core.state import Run, State
from fmsupervisor.core.verdict import DEGRADING, verdict
from fmsupervisor.facts import (
    DriverState,
    DriverView,
    ExitStatus,
    ForeignFabricManager,
    GuestReading,
    Host,
    LogBatch,
    LogKind,
    Problem,
    SwitchErrorKey,
    Unknown,
)
from fmsupervisor.settings import Settings

_DRIVER_NOTICES_SECONDS = 12.0


@dataclass(frozen=True)
class Surrounding:
    """What the looks find, and what becomes of what is tried."""

    host: str = "whole"
    view: str = "standby"
    nodes: str = "kept"
    config_problem: bool = False
    foreign: bool = False
    spawn_error: str = ""

    @property
    def news(self) -> str:
        """What is out of the ordinary, in a few words."""
        told = [] if self.host == "whole" else [self.host]
        told += ["device nodes refused"] if self.nodes != "kept" else []
        told += ["configuration unwritable"] if self.config_problem else []
        told += ["another FM runs"] if self.foreign else []
        told += ["FM cannot be executed"] if self.spawn_error else []
        if not told:
            told = [f"the driver says {self.view}"]
        return f"a look: {', '.join(told)}"


@dataclass(frozen=True)
class Move:
    """Something that happens, in words that a person reads in the drawing."""

    what: str
    event: events.Event
    at: float | None = None  # on the monotonic clock; None: now
    is_look: bool = False  # nothing happens but a look at the surrounding


@dataclass(frozen=True)
class Edge:
    """One move from one state to another."""

    before: State
    move: Move
    surrounding: Surrounding
    after: State


@dataclass(frozen=True)
class Scene:
    """Settings to begin with, and everything that may happen."""

    name: str
    settings: Settings
    surroundings: tuple[Surrounding, ...]
    lines: tuple[str, ...] = ("session header", "success line")
    ends: tuple[str, ...] = ("FM died",)
    loads: tuple[str, ...] = ("module loaded",)
    others: tuple[str, ...] = ()
    slow: frozenset[str] = frozenset()  # what takes a while, so that other things happen meanwhile: "files", "guests"


def around(
    hosts: tuple[str, ...] = ("whole",), views: tuple[str, ...] = ("standby", "configured")
) -> tuple[Surrounding, ...]:
    """Each host with each word of the driver; without a live module the driver says nothing."""
    spoken = [
        (host, view) for host in hosts for view in (views if "module" not in host and host not in _MUTE else views[:1])
    ]
    return tuple(Surrounding(host, view) for host, view in spoken)


_MUTE = ("no switch", "a GPU without driver", "NVLink 5")
_QUICK = {
    "module": {"load_timeout_seconds": 40.0},
    "switches": {"deadline_seconds": 7.0},
    "fabric_manager": {"start_timeout_seconds": 20.0, "hang_seconds": 0.5, "stop_timeout_seconds": 3.0},
    "restart": {"crash_loop_count": 100, "reset_after_seconds": 50.0},
}


def _with(**tables: Mapping[str, Any]) -> Settings:
    return settings(**{name: {**_QUICK.get(name, {}), **tables.get(name, {})} for name in {**_QUICK, **tables}})


HOSTS: Mapping[str, Host | Unknown] = {
    "whole": make_host(),
    "module absent": make_host(module=None),
    "module coming": make_host(module=COMING),
    "a switch not probed": make_host(unbound=SWITCHES[-1:]),
    "a switch gone": make_host(SWITCHES[:-1]),
    "no switch": make_host((), module=None),
    "a GPU without driver": make_host(module=None, gpu_driver=None),
    "NVLink 5": make_host((), module=None, nvlink5_bridges=("0000:0c:00.0",)),
    "unreadable": Unknown("/sys is not mounted"),
}
VIEWS: Mapping[str, DriverView | Unknown] = {
    "standby": make_view(DriverState.STANDBY),
    "configured": make_view(),
    "timeout": make_view(DriverState.MANAGER_TIMEOUT),
    "error": make_view(DriverState.MANAGER_ERROR),
    "unreadable": BLIND,
}
LINES: Mapping[str, events.Event] = {
    "session header": said(LogKind.SESSION_HEADER),
    "success line": said(LogKind.CONFIGURED),
    "configuration rejected": said(LogKind.CONFIG_INVALID, source="stderr"),
    "nothing to do": said(LogKind.NOTHING_TO_DO),
    "address in use": said(LogKind.ADDRESS_IN_USE),
    "log unreadable": events.LogRead(LogBatch("file", problem="permission denied")),
    "stale handle": said(LogKind.STALE_HANDLE),
}
ENDS: Mapping[str, events.Event] = {
    "FM died": events.FabricManagerExited(ExitStatus(signal=11), ()),
    "FM ended by itself": events.FabricManagerExited(ExitStatus(code=0), ()),
    "FM left a child behind": events.FabricManagerExited(ExitStatus(code=0), (), 1),
    "FM's loader failed": events.FabricManagerExited(ExitStatus(code=127), ()),
}
LOADS: Mapping[str, events.Event] = {
    "module loaded": events.ModuleLoadEnded(None),
    "module refused": events.ModuleLoadEnded(Problem(Code.MODULE_SYMBOL_VERSIONS, "disagrees")),
    "load busy": events.ModuleLoadEnded(Problem(Code.MODULE_LOAD_BUSY, "busy")),
}
_FATAL = sxid(SwitchErrorKey(SWITCHES[0], 12028, "fatal", 3))
OTHERS: Mapping[str, Callable[[State], events.Event | None]] = {
    "hardware event": lambda _: events.HostMayHaveChanged(),
    "files changed": lambda state: events.PathsChanged(frozenset(make_installation().watched_paths)),
    "fatal SXid": lambda _: kernel(_FATAL),
    "kernel log unreadable": lambda _: events.KernelLogRead(replace(kernel().batch, problem="denied")),
    "a policy of never": lambda state: events.SettingsReloaded(_with(restart={"policy": "never"})),
    "a policy of always": lambda state: events.SettingsReloaded(_with(restart={"policy": "always"})),
    "stop requested": lambda state: None if state.is_stopping else events.StopRequested(),
}

_OBSTACLES = (
    Surrounding(view="configured"),
    Surrounding(view="configured", nodes="refused"),
    Surrounding(view="configured", config_problem=True),
    Surrounding(view="configured", foreign=True),
    Surrounding(view="configured", spawn_error="no memory"),
)
_ALL_SAID = ("configured",)
_MISSING = around(("whole", "a switch gone"), _ALL_SAID)
SCENES = (
    Scene(
        "the module",
        _with(),
        around(("whole", "module absent", "module coming"), ("configured",)),
        loads=tuple(LOADS),
        others=("hardware event", "files changed"),
    ),
    Scene(
        "the hardware",
        _with(),
        around(("whole", "no switch", "NVLink 5", "a GPU without driver"), ("configured",)),
        others=("hardware event",),
    ),
    Scene("missing switches are waited for", _with(), around(("whole", "a switch not probed", "a switch gone"))),
    Scene("missing switches are a failure", _with(switches={"when_missing": "fail"}), _MISSING),
    Scene("missing switches are done without", _with(switches={"when_missing": "start-anyway"}), _MISSING),
    Scene(
        "obstacles",
        _with(),
        _OBSTACLES,
        lines=("success line",),
        others=("files changed", "obstacles"),
        slow=frozenset({"files"}),
    ),
    Scene(
        "the witnesses",
        _with(),
        (*around(views=("standby", "configured", "timeout", "error")), Surrounding("a switch gone", "configured")),
        lines=("success line",),
        others=("fatal SXid",),
    ),
    Scene(
        "blindness",
        _with(),
        (*around(("whole",), ("standby", "configured", "unreadable")), Surrounding("unreadable", "unreadable")),
        lines=("success line", "log unreadable"),
        others=("kernel log unreadable",),
    ),
    Scene(
        "a hang restarts",
        _with(fabric_manager={"hang_policy": "restart"}),
        around(views=("standby", "configured", "timeout")),
        others=("stop requested",),
    ),
    Scene(
        "deaths",
        _with(),
        around(views=_ALL_SAID),
        lines=("success line", "configuration rejected", "nothing to do", "address in use"),
        ends=tuple(ENDS),
        others=("files changed",),
    ),
    Scene(
        "restarts are forbidden",
        _with(restart={"policy": "never"}),
        around(),
        others=("a policy of always", "stop requested"),
    ),
    Scene(
        "guests decide",
        _with(restart={"policy": "when-no-guests"}),
        around(),
        others=("guests", "a policy of always"),
        slow=frozenset({"guests"}),
    ),
    Scene(
        "the module is not ours to load",
        _with(module={"load": False}),
        around(("whole", "module absent", "module coming")),
    ),
)


def moves(state: State, scene: Scene) -> Iterator[Move]:
    """Everything that can happen to a state at rest."""
    if state.has_ended:
        return
    yield from (Move(what, event, is_look=what in _LOOKS) for what, event in _unasked(state, scene))
    at = {what: deadlines(state)[what] for what in _ahead(state)}
    regular = _LOOKS | {"guests looked for again"}
    first = min((at[what] for what in at if what not in regular), default=plan_times.NEVER_COMES)
    for what, when in at.items():
        if what not in regular or when < first:  # else the look would get the credit for what the deadline does
            yield Move(what, events.TimePassed(), when, is_look=what in _LOOKS)


_LOOKS = frozenset({"hardware event", "host looked at again", "driver looked at again", "other FMs looked for again"})


def _answer(  # noqa: C901 - one case per action
    action: actions.Action, around_us: Surrounding, state: State, slow: frozenset[str]
) -> tuple[events.Event, ...]:
    """What comes of an action that the plan wants; nothing at once when it takes a while."""
    match action:
        case actions.InspectInstallation() if "files" not in slow:
            return (events.InstallationInspected(make_installation()),)
        case actions.LookForGuests() if "guests" not in slow:
            return (events.GuestsLookedFor(GuestReading()),)
        case actions.ObserveHost():
            return (events.HostObserved(HOSTS[around_us.host]),)
        case actions.ObserveDriver():
            return (events.DriverObserved(VIEWS[around_us.view]),)
        case actions.EnsureNodes():
            return (events.NodesEnsured((node(around_us.nodes),)),)
        case actions.PrepareConfig():
            problems = (Problem(Code.CONFIG_UNWRITABLE, "read-only", "/etc"),) if around_us.config_problem else ()
            return (events.ConfigPrepared(make_config(*problems)),)
        case actions.LookForForeign():
            return (events.ForeignLookedFor((ForeignFabricManager(9, "pid 9"),) if around_us.foreign else ()),)
        case actions.StartFabricManager():
            if around_us.spawn_error:
                return (events.SpawnFailed(around_us.spawn_error),)
            return (events.FabricManagerStarted(4711, f"session-{state.counters.starts}"),)
        case actions.DrawBackoff():
            return (events.BackoffDrawn(2.0),)
        case (
            actions.InspectInstallation()
            | actions.LoadModule()
            | actions.LookForGuests()
            | actions.TerminateFabricManager()
            | actions.KillFabricManager()
            | actions.EndService()
        ):
            return ()
    raise AssertionError(f"nobody has said what {action} comes to")


def settle(
    state: State, around_us: Surrounding, check: Callable[[State], None], slow: frozenset[str] = frozenset()
) -> State:
    """Do what the plan wants until it wants nothing more."""
    for _ in range(_MOST_ACTIONS):
        check(state)
        action = next_action(state)
        if action is None:
            return state
        for event in (events.ActionTaken(action), *_answer(action, around_us, state, slow)):
            state = reduce(state, event, state.now)
    raise AssertionError(f"the plan does not come to rest: {next_action(state)}")


_MOST_ACTIONS = 50


def _unasked(state: State, scene: Scene) -> Iterator[tuple[str, events.Event]]:
    has_obstacles = "obstacles" in scene.others
    if state.is_inspecting:
        yield "files read", events.InstallationInspected(make_installation())
        if has_obstacles:
            problem = Problem(Code.FABRIC_MANAGER_MISSING, "no such file")
            yield (
                "files read: FM is missing",
                events.InstallationInspected(make_installation(problem, fingerprint="bad")),
            )
    if state.is_loading:
        yield from ((name, LOADS[name]) for name in scene.loads)
    if state.is_looking_for_guests:
        yield "no guests", events.GuestsLookedFor(GuestReading())
        if "guests" in scene.others:
            yield "a guest", looked_for(guest())[-1]
            yield "guests cannot be looked for", events.GuestsLookedFor(Unknown("hidepid"))
    if state.has_orphans:
        yield "FM's children ended", events.OrphansEnded()
    if state.run is not None:
        yield from ((f"FM logs: {name}", LINES[name]) for name in scene.lines)
        yield from ((name, ENDS[name]) for name in scene.ends)
    for name in scene.others:
        event = OTHERS[name](state) if name in OTHERS else None
        if event is not None:
            yield name, event


def deadlines(state: State) -> Mapping[str, float]:
    """Every point in time that the plan wakes up for, by the name that it has in the drawing."""
    run = state.run
    never = plan_times.NEVER_COMES
    manager = state.settings.fabric_manager
    stop_at = run.stop.asked.monotonic + manager.stop_timeout_seconds if run and run.stop else never
    stable_at = (
        run.configured.monotonic + state.settings.restart.reset_after_seconds if run and run.configured else never
    )
    return {
        "host looked at again": plan_times.host_due_at(state),
        "driver looked at again": plan_times.driver_due_at(state),
        "guests looked for again": plan_times.guests_due_at(state),
        "the search for guests is slow": plan_times.guest_search_slow_at(state),
        "switch deadline": plan_times.switch_deadline(state),
        "the bus has come to rest": plan_times.bus_quiet_at(state),
        "the load is slow": plan_times.load_slow_at(state) if state.is_loading else never,
        "pause over": never if state.next_start_at is None else state.next_start_at,
        "load tried again": never if state.load_retry_at is None else state.load_retry_at,
        "other FMs looked for again": state.foreign_looked_at + plan_times.FOREIGN_INTERVAL_SECONDS,
        "start deadline": plan_times.start_deadline(state),
        "the driver has had time to notice": run.started.monotonic + _DRIVER_NOTICES_SECONDS if run else never,
        "success line overdue": plan_times.success_line_due_at(run) if run else never,
        "partitions overdue": plan_times.partitions_deadline(run) if run else never,
        "FM ignores SIGTERM": stop_at if run and run.stop and not run.stop.is_killed else never,
        "long enough configured": stable_at if state.failures else never,
    }


def _ahead(state: State) -> Iterator[str]:
    """The deadlines that lie ahead and may decide something; others only change what is told."""
    run, host = state.run, state.host
    is_live = host is not None and host.is_module_live
    is_starting = run is not None and run.configured is None and run.stop is None
    matters = {
        "guests looked for again": state.settings.restart.policy == "when-no-guests",
        "the search for guests is slow": state.settings.restart.policy == "when-no-guests" and run is None,
        "switch deadline": run is None,
        "the bus has come to rest": run is None and not is_live,
        "the load is slow": True,
        "pause over": run is None,
        "load tried again": run is None and not is_live,
        "other FMs looked for again": run is None and bool(state.foreign),
        "start deadline": is_starting,
        "the driver has had time to notice": is_starting and run is not None and run.success is None,
        "success line overdue": False,
        "long enough configured": False,
    }
    now = state.now.monotonic
    yield from (
        name for name, at in deadlines(state).items() if matters.get(name, True) and now < at < plan_times.NEVER_COMES
    )


def key(state: State) -> object:
    """What two states must have in common to be taken for one: all that a decision may depend on."""
    shown = verdict(state)
    run, host = state.run, state.host
    decisive = frozenset(
        (one.code, one.subject) for one in shown.problems if one.code in DEGRADING or REGISTRY[one.code].blocks_start
    )
    return (
        (shown.state, shown.is_decided, decisive, blocking(state) is not None),
        frozenset(_ahead(state)) - {"host looked at again", "driver looked at again"},
        (_hardware(host), bool(state.host_unknown), state.seen_switches, state.working_switches),
        (state.installation and state.installation.fingerprint, state.is_installation_stale, state.is_inspecting),
        (state.is_loading, state.load_problem and state.load_problem.code),
        (_view(state.driver) if run else state.driver is None, bool(state.driver_unknown)),
        tuple(sorted({one.outcome for one in state.nodes})),
        (state.config is not None and bool(state.config.problems), bool(state.foreign)),
        run and _phase(run),
        (state.has_orphans, state.failures > 0, state.failures > 0 and state.last_exit and state.last_exit.exit_class),
        frozenset((block.problem.code, block.aspects) for block in state.blocks),
        (bool(state.log_problem), bool(state.kernel_log_problem)),
        _guests(state) if state.settings.restart.policy == "when-no-guests" else None,
        (state.settings, state.is_stopping, state.has_ended),
    )


def _phase(run: Run) -> object:
    """How far it has come."""
    if run.stop is not None:
        return run.stop.cause, run.stop.is_killed, frozenset(one.kind for one in run.failures)
    if run.configured is not None:
        return "configured", run.unmanaged_since is not None
    failures = frozenset(one.kind for one in run.failures)
    return run.is_log_seen, run.success is not None, run.is_driver_seen_unconfigured, failures


def _guests(state: State) -> object:
    return len(state.guests), bool(state.guests_unknown), state.is_looking_for_guests, len(state.guests_to_restart)


def _hardware(host: Host | None) -> object:
    return host and (host.module, host.switches, host.gpus, host.probed_switches, host.nvlink5_bridges)


def _view(driver: object) -> object:
    if isinstance(driver, DriverView):
        return frozenset(one.driver_state for one in driver.devices)
    return type(driver)


def take(
    state: State, move: Move, around_us: Surrounding, check: Callable[[State], None], slow: frozenset[str]
) -> State:
    """The state at rest that the move leads to."""
    now = moment(max(state.now.monotonic, move.at or 0.0))
    return settle(reduce(state, move.event, now), around_us, check, slow)


@dataclass(frozen=True)
class Exploration:
    """What was found: every state once, and every move between two of them."""

    scene: Scene
    states: Mapping[object, State]
    edges: tuple[Edge, ...]


def explore(scene: Scene, check: Callable[[State], None], limit: int) -> Exploration:
    """Try everything from everywhere; ``check`` sees every state on the way, also those between two actions.

    Raises AssertionError when there are more than ``limit`` states.
    """
    begin = make_state(scene.settings)
    found: dict[object, State] = {}
    edges: list[Edge] = []
    waiting: deque[State] = deque()

    def reach(state: State) -> None:
        known = key(state)
        if known not in found:
            found[known] = state
            waiting.append(state)
            if len(found) > limit:
                raise AssertionError(f"{scene.name}: more than {limit} states")

    for around_us in scene.surroundings:
        reach(settle(begin, around_us, check, scene.slow))
    while waiting:
        state = waiting.popleft()
        _check_deadlines(state)
        for move in moves(state, scene):
            for around_us in scene.surroundings:
                after = take(state, move, around_us, check, scene.slow)
                edges.append(Edge(state, move, around_us, after))
                reach(after)
                if (
                    not (move.is_look or move.at)
                    and after.host_observed_at < after.now.monotonic
                    and not _has_looked(state, after)
                ):
                    break  # nothing was looked at: all surroundings come to the same
    return Exploration(scene, MappingProxyType(found), tuple(edges))


def _has_looked(before: State, after: State) -> bool:
    looks = ("host_observed_at", "driver_observed_at", "foreign_looked_at", "nodes_for", "config_for", "run")
    return any(getattr(before, name) != getattr(after, name) for name in looks)


def _check_deadlines(state: State) -> None:
    """A deadline that the plan wakes up for and nobody here has a name for would not be explored."""
    wanted = next_deadline(state)
    if wanted not in [*deadlines(state).values(), state.now.monotonic + 1.0]:
        raise AssertionError(f"a deadline without a name: in {wanted - state.now.monotonic} s; {verdict(state).reason}")

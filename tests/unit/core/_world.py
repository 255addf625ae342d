"""A fake host and a fake shell around the real core, on a clock that jumps to whatever comes next.

The world holds the truth (module, switches, files, Fabric Manager) and answers every action with it; what takes time is
put on a schedule. After every event the shell checks what must always hold.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from _builders import (
    BEGUN,
    GPUS,
    LIVE,
    SWITCHES,
    codes,
    make_config,
    make_installation,
    make_state,
    moment,
    node,
    said,
)

from fmsupervisor.conditions import REGISTRY, Code
from fmsupervisor.core import actions, events, switches
from fmsupervisor.core.plan import next_action, next_deadline
from fmsupervisor.core.reduce import reduce
from fmsupervisor.core.state import State
from fmsupervisor.core.verdict import FabricState, verdict
from fmsupervisor.facts import (
    DeviceState,
    DriverState,
    DriverView,
    ExitStatus,
    ForeignFabricManager,
    Guest,
    GuestReading,
    Host,
    LoadedModule,
    LogKind,
    NodeResult,
    PciFunction,
    Problem,
    SwitchDevice,
    Unknown,
)
from fmsupervisor.settings import Settings

MOST_ACTIONS = 50
LOOKS = (
    actions.ObserveHost,
    actions.ObserveDriver,
    actions.EnsureNodes,
    actions.PrepareConfig,
    actions.LookForForeign,
    actions.LookForGuests,
)


_FAILURE = ExitStatus(code=1)


@dataclass
class Chip:
    """An NVSwitch as it really is."""

    minor: int
    is_on_bus: bool = True
    is_probed: bool = False
    says: DriverState = DriverState.STANDBY


@dataclass
class Behaviour:
    """What the next Fabric Managers do. None: never."""

    logs_at: float | None = 0.2
    driver_at: float | None = 0.8
    success_at: float | None = 1.0
    dies_at: float | None = None
    dies_saying: LogKind | None = None
    status: ExitStatus = _FAILURE
    orphans: int = 0
    obeys_sigterm: bool = True


class World:
    """The host and the shell."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.state: State = make_state(settings)
        self.now = BEGUN
        self.module: LoadedModule | Unknown | None = None
        self.chips = {bus_id: Chip(minor) for minor, bus_id in enumerate(SWITCHES)}
        self.gpus: tuple[str, ...] = tuple(GPUS)
        self.gpu_driver: str | None = "vfio-pci"
        self.bridges: tuple[str, ...] = ()
        self.is_host_observable = True
        self.hidden: set[str] = set()  # bus ids and files that cannot be read
        self.is_driver_observable = True
        self.installation = make_installation()
        self.load_problem: Problem | None = None
        self.node_outcome = "kept"
        self.config_problem: Problem | None = None
        self.foreign: tuple[ForeignFabricManager, ...] = ()
        self.guests: tuple[Guest, ...] = ()
        self.are_guests_observable = True
        self.hidden_pids: set[int] = set()  # of guests that cannot be looked into
        self.spawn_error = ""
        self.behaviour = Behaviour()
        self.probes: set[str] = set(SWITCHES)  # whose probe succeeds
        self.taken: list[actions.Action] = []
        self.transitions: list[tuple[FabricState | None, FabricState, str]] = []
        self._shown: FabricState | None = None
        self._schedule: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._pids = itertools.count(4711)

    # --- the shell

    @property
    def fabric(self) -> FabricState:
        """The state that people are told."""
        return verdict(self.state).state

    def begin(self) -> None:
        """The daemon begins."""
        self.feed(events.TimePassed())

    def feed(self, event: events.Event) -> None:
        """Fold the event, then do what follows."""
        self.fold(event)
        for _ in range(MOST_ACTIONS):
            action = next_action(self.state)
            if action is None:
                break
            self._check_action(action)
            self.taken.append(action)
            self.fold(events.ActionTaken(action))
            self._perform(action)
        else:
            raise AssertionError(f"the plan does not come to rest: {self.taken[-3:]}")
        check_state(self.state)
        if self.fabric is not self._shown:
            self.transitions.append((self._shown, self.fabric, type(event).__name__))
            self._shown = self.fabric

    def fold(self, event: events.Event) -> None:
        """Fold the event and check that nothing that only grows became less."""
        before = self.state
        self.state = reduce(before, event, moment(self.now))
        check_step(before, self.state)

    def wait(self, seconds: float) -> None:
        """Let time pass, and happen what is due."""
        self._wait_until(self.now + seconds, lambda: False)

    def wait_for(self, *wanted: FabricState, most_seconds: float = 5000.0) -> None:
        """Let time pass until people are told one of these states."""
        self._wait_until(self.now + most_seconds, lambda: self.fabric in wanted)
        if self.fabric not in wanted:
            raise AssertionError(f"still {self.fabric}: {verdict(self.state).reason}")

    def after(self, seconds: float, happens: Callable[[], None]) -> None:
        """Put something on the schedule."""
        heapq.heappush(self._schedule, (self.now + seconds, next(self._order), happens))

    def _wait_until(self, end: float, is_enough: Callable[[], bool]) -> None:
        while not is_enough() and not self.state.has_ended:
            due = min(next_deadline(self.state), end)
            if self._schedule and self._schedule[0][0] <= due:
                due, _, happens = heapq.heappop(self._schedule)
                self.now = max(self.now, due)
                happens()
            elif due >= end:
                self.now = end
                return
            else:
                self.now = due
                self.feed(events.TimePassed())

    # --- what people and hardware do

    def uevent(self) -> None:
        """The hardware has changed."""
        self.feed(events.HostMayHaveChanged())

    def install(self, *problems: Problem, **changes: str) -> None:
        """Other files are in the tree."""
        self.installation = make_installation(*problems, **{"fingerprint": "another", **changes})
        self.feed(events.PathsChanged(frozenset(self.installation.watched_paths)))

    def reload(self, settings: Settings) -> None:
        """SIGHUP."""
        self.feed(events.SettingsReloaded(settings))

    def plug(self, bus_id: str, minor: int | None = None) -> None:
        """A switch appears, and is probed when the driver is live."""
        old = self.chips.get(bus_id)
        number = minor if minor is not None else old.minor if old else len(self.chips)
        self.chips[bus_id] = Chip(number, is_probed=self.module == LIVE and bus_id in self.probes)
        self.uevent()

    def unplug(self, bus_id: str) -> None:
        """A switch disappears."""
        self.chips[bus_id] = replace(self.chips[bus_id], is_on_bus=False, is_probed=False)
        self.uevent()

    def set_module(self, module: LoadedModule | Unknown | None) -> None:
        """Somebody loads or unloads the driver by hand."""
        self.become(module)
        self.uevent()

    def driver_says(self, says: DriverState, *bus_ids: str) -> None:
        """The driver changes its mind (nobody is told)."""
        for bus_id in bus_ids or tuple(self.chips):
            self.chips[bus_id].says = says

    def die(self, status: ExitStatus, orphans: int = 0) -> None:
        """Fabric Manager ends by itself."""
        if self.state.run is None:
            return
        self.feed(events.FabricManagerExited(status, ("its last line",), orphans))
        starts = self.state.counters.starts
        self.after(10.0, lambda: self._driver_misses(starts))
        if orphans:
            self.after(0.5, lambda: self.feed(events.OrphansEnded()))

    def disturb(self) -> None:
        """Everything is looked at again, for no reason."""
        watched = self.installation.watched_paths
        nodes = (result.node.path for result in self.state.nodes)
        self.feed(events.HostMayHaveChanged())
        self.feed(events.PathsChanged(frozenset({*watched, *nodes})))
        if self.state.host is not None and self.state.host.is_module_live:
            self.feed(events.DriverObserved(self._driver_view()))
        self.feed(events.TimePassed())

    def _driver_misses(self, starts: int) -> None:
        has_successor = self.state.counters.starts > starts and self.behaviour.driver_at is not None
        if not has_successor:
            self.driver_says(DriverState.MANAGER_TIMEOUT)

    # --- the answers

    def _perform(self, action: actions.Action) -> None:  # noqa: C901, PLR0912 - one line per action
        match action:
            case actions.ObserveHost():
                self.fold(events.HostObserved(self._host()))
            case actions.InspectInstallation():
                self.after(1.0, lambda: self.feed(events.InstallationInspected(self.installation)))
            case actions.LoadModule():
                self.after(1.0, lambda: self._set_visible_module(LoadedModule("coming", None)))
                self.after(10.0, self._end_load)
            case actions.EnsureNodes():
                self.fold(events.NodesEnsured(self._nodes()))
            case actions.ObserveDriver():
                self.fold(events.DriverObserved(self._driver_view()))
            case actions.PrepareConfig():
                problems = (self.config_problem,) if self.config_problem else ()
                self.fold(events.ConfigPrepared(make_config(*problems)))
            case actions.LookForForeign():
                self.fold(events.ForeignLookedFor(self.foreign))
            case actions.LookForGuests():
                self.after(0.1, lambda: self.feed(events.GuestsLookedFor(self._guests())))
            case actions.DrawBackoff(attempt=attempt):
                self.fold(events.BackoffDrawn(min(60.0, 2.0 ** (attempt - 1))))
            case actions.StartFabricManager():
                self._start()
            case actions.TerminateFabricManager():
                if self.behaviour.obeys_sigterm:
                    self._in_run(0.5, lambda: self.die(ExitStatus(code=0)))
            case actions.KillFabricManager():
                self._in_run(0.1, lambda: self.die(ExitStatus(signal=9)))
            case actions.EndService():
                pass

    def _host(self) -> Host | Unknown:
        if not self.is_host_observable:
            return Unknown("/sys is not mounted")
        on_bus = {bus_id: chip for bus_id, chip in sorted(self.chips.items()) if chip.is_on_bus}
        is_loaded = self.module == LIVE
        whole = Host(
            kernel_release="6.12.0",
            switches=tuple(
                PciFunction(bus_id, "10de:22a3", "nvidia-nvswitch" if chip.is_probed else None)
                for bus_id, chip in on_bus.items()
            ),
            gpus=tuple(PciFunction(bus_id, "10de:2335", self.gpu_driver) for bus_id in self.gpus),
            nvlink5_bridges=self.bridges,
            module=self.module,
            probed_switches=tuple(one for one, chip in on_bus.items() if chip.is_probed) if is_loaded else None,
            majors={"nvidia": 195} if is_loaded else {},
            fabric_management_minor=1 if is_loaded else None,
            fabric_management_mode=0o600 if is_loaded else None,
        )
        return hide(whole, self.hidden)

    def _driver_view(self) -> DriverView | Unknown:
        if not self.is_driver_observable:
            return Unknown("the control node cannot be opened")
        probed = [(bus_id, chip) for bus_id, chip in sorted(self.chips.items()) if chip.is_probed]
        return DriverView(
            tuple(
                SwitchDevice(chip.minor, f"SWX-{bus_id}", bus_id, chip.says, DeviceState.STANDBY, 0, chip.minor + 1)
                for bus_id, chip in probed
            )
        )

    def _guests(self) -> GuestReading | Unknown:
        if not self.are_guests_observable:
            return Unknown("/proc is not mounted")
        hidden = frozenset(guest.identity for guest in self.guests if guest.pid in self.hidden_pids)
        return GuestReading(tuple(guest for guest in self.guests if guest.identity not in hidden), hidden)

    def _nodes(self) -> tuple[NodeResult, ...]:
        minors = [device.minor for device in switches.devices(self.state)]
        paths = ["/dev/nvidia-nvswitchctl", *(f"/dev/nvidia-nvswitch{minor}" for minor in minors)]
        return tuple(node(self.node_outcome, path) for path in paths)

    def become(self, module: LoadedModule | Unknown | None) -> None:
        """The module's new phase, and what the switches make of it."""
        if not isinstance(module, Unknown):
            is_live = module is not None and module.initstate == "live"
            for bus_id, chip in self.chips.items():
                chip.is_probed = is_live and chip.is_on_bus and bus_id in self.probes
                chip.says = DriverState.STANDBY
        self.module = module

    def _set_visible_module(self, module: LoadedModule) -> None:
        if self.module is None:
            self.become(module)
            self.uevent()

    def _end_load(self) -> None:
        if self.module != LIVE:
            self.become(None if self.load_problem else LIVE)
        self.feed(events.ModuleLoadEnded(self.load_problem))

    def _start(self) -> None:
        if self.spawn_error:
            self.fold(events.SpawnFailed(self.spawn_error))
            return
        pid = next(self._pids)
        self.fold(events.FabricManagerStarted(pid, f"session-{pid}"))
        does = self.behaviour
        if does.logs_at is not None:
            self._in_run(does.logs_at, lambda: self.feed(said(LogKind.SESSION_HEADER)))
        if does.driver_at is not None:
            self._in_run(does.driver_at / 2, lambda: self.driver_says(DriverState.STANDBY))
            self._in_run(does.driver_at, lambda: self.driver_says(DriverState.CONFIGURED))
        if does.success_at is not None:
            self._in_run(does.success_at, lambda: self.feed(said(LogKind.CONFIGURED)))
        if does.dies_at is not None:
            self._in_run(does.dies_at, lambda: self._die_as(does))

    def _die_as(self, does: Behaviour) -> None:
        if does.dies_saying is not None:
            self.feed(said(does.dies_saying, source="stderr"))
        self.die(does.status, does.orphans)

    def _in_run(self, seconds: float, happens: Callable[[], None]) -> None:
        """Only if this Fabric Manager still runs by then."""
        session = self.state.run.session if self.state.run else ""

        def happen() -> None:
            if self.state.run is not None and self.state.run.session == session:
                happens()

        self.after(seconds, happen)

    def _check_action(self, action: actions.Action) -> None:
        if self.state.has_ended:
            raise AssertionError(f"{action} after the end")
        if isinstance(action, actions.StartFabricManager) and (self.state.run or self.state.has_orphans):
            raise AssertionError("a second Fabric Manager")
        if isinstance(action, actions.StartFabricManager) and not switches.working(self.state):
            raise AssertionError("a Fabric Manager without a switch")


def hide(host: Host, hidden: Iterable[str]) -> Host:
    """A reading of the same host in which these bus ids and files could not be read."""
    problems = [Problem(Code.HARDWARE_UNOBSERVABLE, "permission denied", one) for one in sorted(hidden)]
    return replace(
        host,
        switches=tuple(one for one in host.switches if one.pci_bus_id not in hidden),
        gpus=tuple(one for one in host.gpus if one.pci_bus_id not in hidden),
        probed_switches=None if "/proc/driver/nvidia-nvswitch/devices" in hidden else host.probed_switches,
        majors={} if "/proc/devices" in hidden else host.majors,
        module=Unknown("permission denied") if "/sys/module/nvidia" in hidden else host.module,
        problems=(*host.problems, *problems),
    )


def check_step(before: State, now: State) -> None:
    """What no event may do."""
    less = [
        name
        for name, one, other in (
            ("starts", before.counters.starts, now.counters.starts),
            ("exits", sum(before.counters.exits.values()), sum(now.counters.exits.values())),
            ("lines", sum(before.counters.log_lines.values()), sum(now.counters.log_lines.values())),
            ("unrecognised", before.counters.log_unrecognised, now.counters.log_unrecognised),
            ("errors", sum(before.counters.switch_errors.values()), sum(now.counters.switch_errors.values())),
            ("stale handles", before.counters.stale_handles, now.counters.stale_handles),
            ("lost records", before.counters.kernel_lost, now.counters.kernel_lost),
            (
                "old errors",
                sum(before.counters.switch_errors_before_start.values()),
                sum(now.counters.switch_errors_before_start.values()),
            ),
        )
        if other < one
    ]
    if less:
        raise AssertionError(f"counters fell: {less}")


def check_state(state: State) -> None:
    """What holds in every state in which the plan has come to rest."""
    shown = verdict(state)
    if next_deadline(state) <= state.now.monotonic:
        raise AssertionError("the next deadline is in the past")
    if shown.state is FabricState.FAILED:
        remedies = [REGISTRY[problem.code].remedy for problem in shown.problems]
        if not any(remedies):
            raise AssertionError(f"failed without a remedy: {shown}")
    if any(not block.aspects or len(block.aspects) != len(block.values) for block in state.blocks):
        raise AssertionError(f"nothing can cure {state.blocks}")
    if shown.state is FabricState.CONFIGURED:
        if state.run is None or state.run.stop is not None or state.run.configured is None:
            raise AssertionError("configured without a Fabric Manager that has configured it")
        if switches.unconfigured(state):
            raise AssertionError(f"configured, but the driver denies it: {switches.unconfigured(state)}")
    if shown.state is FabricState.NOT_APPLICABLE and (switches.present(state) or state.working_switches):
        raise AssertionError(f"not applicable with switches: {codes(shown.problems)}")

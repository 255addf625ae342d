"""What the supervisor does, told as stories: what happens, what people are told then, what was done about it.

Looks at the world (``_world.LOOKS``) are not listed: they have no effect on the host.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from _builders import COMING, GPUS, LIVE, SWITCHES, guest, settings
from _world import LOOKS, Behaviour, World

from fmsupervisor.conditions import Code
from fmsupervisor.core.actions import (
    Action,
    DrawBackoff,
    EndService,
    InspectInstallation,
    KillFabricManager,
    LoadModule,
    StartFabricManager,
    TerminateFabricManager,
)
from fmsupervisor.core.events import LogRead, StopRequested
from fmsupervisor.core.verdict import FabricState, verdict
from fmsupervisor.facts import DriverState, ExitStatus, ForeignFabricManager, LoadedModule, LogBatch, LogKind, Problem
from fmsupervisor.settings import Settings

S = FabricState
Do = Callable[[World], object]
LAST = SWITCHES[-1]
FIFTH = "0000:09:00.0"


@dataclass(frozen=True)
class Row:
    """After ``do``, people are told ``state`` with at least ``active``, and exactly ``did`` was done."""

    what: str
    do: Do
    state: FabricState
    did: tuple[type[Action], ...] = ()
    active: frozenset[Code] = frozenset()


@dataclass(frozen=True)
class Story:
    """Rows in the order in which they happen; ``before`` sets the scene."""

    name: str
    rows: tuple[Row, ...]
    before: Do = lambda _world: None
    settings: Settings = Settings()  # noqa: RUF009 - frozen


def row(what: str, do: Do, state: FabricState, *did: type[Action], active: tuple[Code, ...] = ()) -> Row:
    """Short for ``Row``."""
    return Row(what, do, state, did, frozenset(active))


def play(story: Story, *, disturb_after: int | None = None) -> World:
    """The world at the end; when undisturbed, every row is checked."""
    world = World(story.settings)
    story.before(world)
    for number, step in enumerate(story.rows):
        world.taken.clear()
        step.do(world)
        if disturb_after is None:
            check(story, step, world)
        if number == disturb_after and not world.state.has_ended:
            world.disturb()
    return world


def check(story: Story, step: Row, world: World) -> None:
    """The row came out as written."""
    shown = verdict(world.state)
    did = tuple(type(action) for action in world.taken if not isinstance(action, LOOKS))
    active = {problem.code for problem in shown.problems}
    told = f"{story.name}: {step.what}: {shown.reason}"
    if shown.state is not step.state:
        raise AssertionError(f"{told}: {shown.state}, not {step.state}; did {[kind.__name__ for kind in did]}")
    if did != step.did:
        raise AssertionError(f"{told}: did {[kind.__name__ for kind in did]}, not {[one.__name__ for one in step.did]}")
    if not step.active <= active:
        raise AssertionError(f"{told}: {sorted(step.active - active)} is not active, but {sorted(active)}")


def wait(seconds: float) -> Do:
    """Time passes."""
    return lambda world: world.wait(seconds)


def until(*states: FabricState) -> Do:
    """Time passes until people are told so."""
    return lambda world: world.wait_for(*states)


def behave(**changes: object) -> Do:
    """The next Fabric Managers are like this."""

    def do(world: World) -> None:
        world.behaviour = replace(Behaviour(), **changes)  # type: ignore[arg-type]

    return do


def both(*steps: Do) -> Do:
    """One after the other."""

    def do(world: World) -> None:
        for step in steps:
            step(world)

    return do


def put(**attributes: object) -> Do:
    """Set these parts of the world."""

    def do(world: World) -> None:
        for name, value in attributes.items():
            setattr(world, name, value)

    return do


def problem(code: Code) -> Problem:
    """A problem of this kind."""
    return Problem(code, "for the story")


def dies(status: ExitStatus, orphans: int = 0) -> Do:
    """Fabric Manager ends by itself."""
    return lambda world: world.die(status, orphans)


def driver_says(says: DriverState, *bus_ids: str) -> Do:
    """The driver changes its mind."""
    return lambda world: world.driver_says(says, *bus_ids)


def reload(**tables: dict[str, object]) -> Do:
    """SIGHUP with these settings."""
    return lambda world: world.reload(settings(**tables))


def log_unreadable(world: World) -> None:
    """The log file cannot be followed."""
    world.feed(LogRead(LogBatch("file", problem="permission denied")))


BEGIN = row("the daemon begins", lambda world: world.begin(), S.WAITING_FOR_MODULE, InspectInstallation)
LOAD = row("the files are read", wait(1.5), S.WAITING_FOR_MODULE, LoadModule)
START = row("the driver is loaded", until(S.STARTING), S.STARTING, StartFabricManager)
CONFIGURED = row("Fabric Manager configures", until(S.CONFIGURED), S.CONFIGURED)
UP = (BEGIN, LOAD, START, CONFIGURED)
STOP = row("it is stopped", lambda world: world.feed(StopRequested()), S.STOPPING, TerminateFabricManager)
END = row("Fabric Manager ends", wait(1), S.STOPPING, EndService)
CRASH = row("it dies", dies(ExitStatus(signal=11)), S.BACKOFF, DrawBackoff, active=(Code.FABRIC_MANAGER_DIED,))
RESTART = row("the pause is over", until(S.STARTING), S.STARTING, StartFabricManager)
RECOVERED = (row("the next one is healthy", behave(), S.BACKOFF), RESTART, CONFIGURED)


def _hide(*bus_ids: str) -> Do:
    """These switches are not on the bus when the daemon begins."""

    def do(world: World) -> None:
        for bus_id in bus_ids:
            world.chips[bus_id].is_on_bus = False

    return do


def _module(module: LoadedModule) -> Do:
    """Somebody else has loaded the driver already."""
    return lambda world: world.become(module)


def _probe_only(world: World) -> None:
    """The driver's probe of the last switch fails."""
    world.probes.discard(LAST)


def _late_switch(world: World) -> None:
    """The driver's probe succeeds after all."""
    world.probes.add(LAST)
    world.plug(LAST)


def _fifth_switch(world: World) -> None:
    """One more switch is plugged in."""
    world.probes.add(FIFTH)
    world.plug(FIFTH)


def _patience(policy: str) -> Settings:
    return settings(switches={"deadline_seconds": 60.0, "when_missing": policy})


OLD = LoadedModule("live", "570.1")
EARLY = guest(77, started=100.0, gpus=GPUS[:4])
VENDOR = ForeignFabricManager(99, "pid 99 (/usr/bin/nv-fabricmanager)")
EXIT_0 = ExitStatus(code=0)
EXIT_1 = ExitStatus(code=1)
SEGV = ExitStatus(signal=11)
WAIT_SWITCHES = row("the driver is loaded", until(S.WAITING_FOR_SWITCHES), S.WAITING_FOR_SWITCHES)


def _terminal(name: str, kind: LogKind, code: Code, status: ExitStatus, cure: Row) -> Story:
    """A start that fails until something named changes."""
    return Story(
        name,
        (
            *UP[:3],
            row("it says why and ends", wait(1), S.FAILED, active=(code,)),
            row("for a long time nothing is tried", wait(600), S.FAILED, active=(code,)),
            row("the next one will do", behave(), S.FAILED),
            cure,
            row("and so it configures", until(S.CONFIGURED), S.CONFIGURED),
        ),
        before=behave(dies_at=0.5, dies_saying=kind, status=status),
    )


def _reinstalled(*did: type[Action]) -> Row:
    return row("other files are installed", both(lambda world: world.install(), wait(1.1)), S.STARTING, *did)


FIXED = _reinstalled(InspectInstallation, StartFabricManager)

STORIES = (
    Story("a healthy start and stop", (*UP, STOP, END)),
    Story(
        "the driver is live already",
        (
            BEGIN,
            row("the files are read", until(S.STARTING), S.STARTING, StartFabricManager),
            CONFIGURED,
        ),
        before=_module(LIVE),
    ),
    Story(
        "the driver is being loaded by somebody else",
        (
            BEGIN,
            row("nothing is loaded meanwhile", wait(60), S.WAITING_FOR_MODULE),
            row("it becomes live", lambda world: world.set_module(LIVE), S.STARTING, StartFabricManager),
            CONFIGURED,
        ),
        before=_module(COMING),
    ),
    Story(
        "somebody else must load the driver",
        (
            BEGIN,
            row("it waits", wait(60), S.WAITING_FOR_MODULE, active=(Code.MODULE_NOT_LOADED,)),
            row("it is loaded by hand", lambda world: world.set_module(LIVE), S.STARTING, StartFabricManager),
            CONFIGURED,
        ),
        settings=settings(module={"load": False}),
    ),
    Story(
        "a late switch",
        (
            BEGIN,
            LOAD,
            WAIT_SWITCHES,
            row("the probe succeeds at last", _late_switch, S.STARTING, StartFabricManager),
            CONFIGURED,
        ),
        before=_probe_only,
    ),
    Story(
        "the switch deadline, policy wait",
        (
            BEGIN,
            LOAD,
            WAIT_SWITCHES,
            row("the deadline passes", wait(70), S.WAITING_FOR_SWITCHES, active=(Code.SWITCH_NOT_PROBED,)),
            row("the switch comes", _late_switch, S.STARTING, StartFabricManager),
            CONFIGURED,
        ),
        before=_probe_only,
        settings=_patience("wait"),
    ),
    Story(
        "the switch deadline, policy start-anyway",
        (
            BEGIN,
            LOAD,
            WAIT_SWITCHES,
            row("the deadline passes", until(S.STARTING), S.STARTING, StartFabricManager),
            row("it is not a whole fabric", until(S.DEGRADED), S.DEGRADED, active=(Code.STARTED_WITH_FEWER_SWITCHES,)),
        ),
        before=_probe_only,
        settings=_patience("start-anyway"),
    ),
    Story(
        "the switch deadline, policy fail",
        (
            BEGIN,
            LOAD,
            WAIT_SWITCHES,
            row("the deadline passes", until(S.FAILED), S.FAILED, active=(Code.SWITCH_NOT_PROBED,)),
            row("the switch comes", _late_switch, S.STARTING, StartFabricManager),
            CONFIGURED,
        ),
        before=_probe_only,
        settings=_patience("fail"),
    ),
    Story(
        "a switch that is configured but not on the bus",
        (
            BEGIN,
            LOAD,
            WAIT_SWITCHES,
            row("the deadline passes", wait(70), S.WAITING_FOR_SWITCHES, active=(Code.SWITCH_MISSING,)),
            row("it is plugged in", lambda world: world.plug(LAST), S.STARTING, StartFabricManager),
            CONFIGURED,
        ),
        before=_hide(LAST),
        settings=settings(switches={"deadline_seconds": 60.0, "expected": 4}),
    ),
    Story(
        "the kernel refuses the module",
        (
            BEGIN,
            LOAD,
            row("it is refused", wait(10), S.FAILED, active=(Code.MODULE_SIGNATURE_REJECTED,)),
            row("it is not tried again", wait(600), S.FAILED),
            row("another one will be accepted", put(load_problem=None), S.FAILED),
            row("it is installed", lambda world: world.install(), S.FAILED, InspectInstallation),
            row("it is tried", wait(1.1), S.WAITING_FOR_MODULE, LoadModule),
            START,
            CONFIGURED,
        ),
        before=put(load_problem=problem(Code.MODULE_SIGNATURE_REJECTED)),
    ),
    Story(
        "the module cannot be loaded at the moment",
        (
            BEGIN,
            LOAD,
            row("it is busy", wait(10), S.WAITING_FOR_MODULE, active=(Code.MODULE_LOAD_BUSY,)),
            row("it is tried again", both(put(load_problem=None), wait(5)), S.WAITING_FOR_MODULE, LoadModule),
            START,
            CONFIGURED,
        ),
        before=put(load_problem=problem(Code.MODULE_LOAD_BUSY)),
    ),
    Story(
        "a load that takes very long",
        (
            BEGIN,
            row("the files are read", wait(1.5), S.WAITING_FOR_MODULE, LoadModule),
            row("it is slow, and left alone", wait(9), S.WAITING_FOR_MODULE, active=(Code.MODULE_LOAD_SLOW,)),
            row("it ends", until(S.STARTING), S.STARTING, StartFabricManager),
        ),
        settings=settings(module={"load_timeout_seconds": 5.0}),
    ),
    Story(
        "a guest's GPU would be taken",
        (
            BEGIN,
            row("the module is not loaded", wait(60), S.FAILED, active=(Code.GPU_WOULD_BE_TAKEN,)),
            row(
                "the GPU gets its driver",
                both(put(gpu_driver="vfio-pci"), lambda world: world.uevent()),
                S.WAITING_FOR_MODULE,
                LoadModule,
            ),
            START,
            CONFIGURED,
        ),
        before=put(gpu_driver=None),
    ),
    Story(
        "a board appears function by function, its GPUs last",
        (
            row("the daemon begins", lambda world: world.begin(), S.NOT_APPLICABLE),
            row("a switch appears", lambda world: world.plug(LAST), S.WAITING_FOR_MODULE, InspectInstallation),
            row("nothing is loaded yet", wait(2.5), S.WAITING_FOR_MODULE),
            row(
                "a GPU appears, without a driver",
                both(put(gpus=GPUS[:1], gpu_driver=None), lambda world: world.uevent()),
                S.FAILED,
                active=(Code.GPU_WOULD_BE_TAKEN,),
            ),
            row("the module is not loaded", wait(60), S.FAILED, active=(Code.GPU_WOULD_BE_TAKEN,)),
        ),
        before=both(lambda world: world.chips.clear(), put(gpus=())),
    ),
    Story(
        "a GPU appears unnoticed before the load",
        (
            BEGIN,
            row(
                "it is looked for",
                both(put(gpus=GPUS, gpu_driver=None), wait(60)),
                S.FAILED,
                active=(Code.GPU_WOULD_BE_TAKEN,),
            ),
        ),
        before=put(gpus=()),
    ),
    Story(
        "another Fabric Manager runs already",
        (
            BEGIN,
            row("it is found", wait(1.5), S.FAILED, active=(Code.FOREIGN_FABRIC_MANAGER,)),
            row("it is not touched", wait(600), S.FAILED),
            row("it goes away", both(put(foreign=()), until(S.WAITING_FOR_MODULE)), S.WAITING_FOR_MODULE, LoadModule),
            START,
            CONFIGURED,
        ),
        before=put(foreign=(VENDOR,)),
    ),
    Story(
        "something else is where a device node must be",
        (
            BEGIN,
            LOAD,
            row("it is not replaced", wait(10), S.FAILED, active=(Code.NODE_CONFLICT,)),
            row("nor later", wait(100), S.FAILED, active=(Code.NODE_CONFLICT,)),
            row("it is removed", both(put(node_outcome="created"), until(S.STARTING)), S.STARTING, StartFabricManager),
            CONFIGURED,
        ),
        before=put(node_outcome="refused"),
    ),
    Story(
        "this version does not know a configured key",
        (
            BEGIN,
            row("it is not started", wait(60), S.FAILED, active=(Code.CONFIG_KEY_UNKNOWN,)),
            row(
                "the settings are corrected",
                both(put(config_problem=None), reload(switches={"expected": 4})),
                S.WAITING_FOR_MODULE,
                InspectInstallation,
            ),
            LOAD,
            START,
            CONFIGURED,
        ),
        before=put(config_problem=problem(Code.CONFIG_KEY_UNKNOWN)),
    ),
    Story(
        "the configuration cannot be written for a while",
        (
            BEGIN,
            row("it is not started", wait(60), S.FAILED, active=(Code.CONFIG_UNWRITABLE,)),
            row(
                "there is room again",
                both(put(config_problem=None), until(S.WAITING_FOR_MODULE)),
                S.WAITING_FOR_MODULE,
                LoadModule,
            ),
            START,
            CONFIGURED,
        ),
        before=put(config_problem=problem(Code.CONFIG_UNWRITABLE)),
    ),
    Story(
        "versions that differ",
        (
            BEGIN,
            row("it is not started", wait(60), S.FAILED, active=(Code.VERSION_MISMATCH,)),
            row(
                "the right one is installed",
                lambda world: world.install(),
                S.FAILED,
                InspectInstallation,
            ),
            LOAD,
            START,
            CONFIGURED,
        ),
        before=lambda world: setattr(
            world, "installation", replace(world.installation, fabric_manager_version="570.1")
        ),
    ),
    Story(
        "the loaded driver is older than the installed one",
        (
            BEGIN,
            row("it is not started", wait(60), S.FAILED, active=(Code.RELOAD_NEEDED,)),
            row("the driver is unloaded", lambda world: world.set_module(None), S.WAITING_FOR_MODULE, LoadModule),
            START,
            CONFIGURED,
        ),
        before=_module(OLD),
    ),
    _terminal("Fabric Manager rejects its configuration", LogKind.CONFIG_INVALID, Code.CONFIG_REJECTED, EXIT_0, FIXED),
    _terminal("the dynamic loader gives up", LogKind.LOADER_ERROR, Code.LOADER_ERROR, ExitStatus(code=127), FIXED),
    _terminal("Fabric Manager rejects the version", LogKind.VERSION_MISMATCH, Code.VERSION_REJECTED, EXIT_1, FIXED),
    _terminal(
        "Fabric Manager knows no such board",
        LogKind.TOPOLOGY_MISMATCH,
        Code.TOPOLOGY_MISMATCH,
        EXIT_1,
        row(
            "a fifth switch is plugged in",
            _fifth_switch,
            S.STARTING,
            StartFabricManager,
        ),
    ),
    _terminal(
        "Fabric Manager sees no switch",
        LogKind.NOTHING_TO_DO,
        Code.NOTHING_TO_DO,
        EXIT_0,
        row(
            "the driver is unloaded, and so loaded again",
            both(lambda world: world.set_module(None), until(S.STARTING)),
            S.STARTING,
            LoadModule,
            StartFabricManager,
        ),
    ),
    Story(
        "the address of Fabric Manager is in use",
        (
            *UP[:3],
            row("it says so and ends", wait(0.6), S.BACKOFF, DrawBackoff, active=(Code.ADDRESS_IN_USE,)),
            row("the address is free", behave(), S.BACKOFF),
            RESTART,
            CONFIGURED,
        ),
        before=behave(dies_at=0.5, dies_saying=LogKind.ADDRESS_IN_USE),
    ),
    Story(
        "a crash, a pause, and a fresh start of the count",
        (
            *UP,
            CRASH,
            RESTART,
            CONFIGURED,
            row("it is stable", wait(400), S.CONFIGURED),
            CRASH,
            row("the pause is the first one again", wait(1.1), S.STARTING, StartFabricManager),
            CONFIGURED,
        ),
    ),
    Story(
        "a crash loop",
        (
            *UP[:3],
            row("it dies five times", wait(16.5), S.BACKOFF, *(DrawBackoff, StartFabricManager) * 4, DrawBackoff),
            row("that is said", wait(1), S.BACKOFF, active=(Code.CRASH_LOOP,)),
            row("it is better now", behave(), S.BACKOFF, active=(Code.CRASH_LOOP,)),
            RESTART,
            CONFIGURED,
        ),
        before=behave(dies_at=0.1, status=SEGV),
    ),
    Story(
        "it ends with status 0 before success",
        (
            *UP[:3],
            row("that is a failure", wait(0.6), S.BACKOFF, DrawBackoff, active=(Code.FABRIC_MANAGER_DIED,)),
            *RECOVERED,
        ),
        before=behave(dies_at=0.5, status=EXIT_0),
    ),
    Story(
        "a restart is not wanted",
        (
            *UP,
            row("it dies", dies(SEGV), S.FAILED, active=(Code.RESTART_WITHHELD,)),
            row("it stays dead", wait(600), S.FAILED),
            row("the policy is changed", both(reload(), wait(1.1)), S.BACKOFF, InspectInstallation, DrawBackoff),
            RESTART,
            CONFIGURED,
        ),
        settings=settings(restart={"policy": "never"}),
    ),
    Story(
        "a restart waits until no guest holds a GPU",
        (
            *UP,
            row("it dies", both(dies(SEGV), wait(0.2)), S.FAILED, active=(Code.RESTART_WITHHELD,)),
            row("the guests stay", wait(600), S.FAILED, active=(Code.RESTART_WITHHELD,)),
            row(
                "they cannot be looked for",
                both(put(are_guests_observable=False), wait(60)),
                S.FAILED,
                active=(Code.RESTART_WITHHELD, Code.HARDWARE_UNOBSERVABLE),
            ),
            row(
                "one has gone, one cannot be looked into",
                both(put(are_guests_observable=True, guests=(EARLY,), hidden_pids={EARLY.pid}), wait(60)),
                S.FAILED,
                active=(Code.RESTART_WITHHELD, Code.HARDWARE_UNOBSERVABLE),
            ),
            row(
                "both have gone",
                both(put(guests=()), until(S.STARTING)),
                S.STARTING,
                DrawBackoff,
                StartFabricManager,
            ),
            CONFIGURED,
        ),
        before=put(guests=(EARLY, guest(78, started=900.0, gpus=GPUS[4:]))),
        settings=settings(restart={"policy": "when-no-guests"}),
    ),
    Story(
        "a restart when no guest holds a GPU",
        (
            *UP,
            row("it dies", dies(SEGV), S.BACKOFF, active=(Code.FABRIC_MANAGER_DIED,)),
            row("guests are looked for", until(S.STARTING), S.STARTING, DrawBackoff, StartFabricManager),
            CONFIGURED,
        ),
        settings=settings(restart={"policy": "when-no-guests"}),
    ),
    Story(
        "nothing has registered that a restart could lose",
        (
            *UP[:3],
            row("it dies before it has configured", wait(0.6), S.BACKOFF, DrawBackoff),
            *RECOVERED[:2],
            row(
                "the guest has waited in vain",
                both(until(S.CONFIGURED), wait(1)),
                S.CONFIGURED,
                active=(Code.GUEST_RESTART_REQUIRED,),
            ),
            row("it is power-cycled", both(put(guests=(guest(79, started=3000.0),)), wait(16)), S.CONFIGURED),
        ),
        before=both(behave(dies_at=0.5, status=SEGV), put(guests=(EARLY,))),
        settings=settings(restart={"policy": "when-no-guests"}),
    ),
    Story(
        "it cannot be executed",
        (
            BEGIN,
            LOAD,
            row(
                "the system refuses", wait(10), S.BACKOFF, StartFabricManager, DrawBackoff, active=(Code.SPAWN_FAILED,)
            ),
            row("there is memory again", put(spawn_error=""), S.BACKOFF),
            RESTART,
            CONFIGURED,
        ),
        before=put(spawn_error="out of memory"),
    ),
    Story(
        "a hang is reported",
        (
            *UP,
            row("the heartbeat stops", both(driver_says(DriverState.MANAGER_TIMEOUT), wait(16)), S.DEGRADED),
            row("for long", wait(40), S.DEGRADED, active=(Code.FABRIC_MANAGER_HUNG,)),
            row("it is back", both(driver_says(DriverState.CONFIGURED), wait(2)), S.CONFIGURED),
        ),
    ),
    Story(
        "a hang is ended",
        (
            *UP,
            row("the heartbeat stops", both(driver_says(DriverState.MANAGER_TIMEOUT), wait(16)), S.DEGRADED),
            row("for long", until(S.STOPPING), S.STOPPING, TerminateFabricManager),
            row("it ends", until(S.BACKOFF), S.BACKOFF, DrawBackoff, active=(Code.FABRIC_MANAGER_HUNG,)),
            RESTART,
            CONFIGURED,
        ),
        settings=settings(fabric_manager={"hang_policy": "restart"}),
    ),
    Story(
        "a hang of which the driver stops telling is not ended",
        (
            *UP,
            row("the heartbeat stops", both(driver_says(DriverState.MANAGER_TIMEOUT), wait(16)), S.DEGRADED),
            row(
                "the driver cannot be asked",
                both(put(is_driver_observable=False), wait(600)),
                S.DEGRADED,
                active=(Code.DRIVER_UNOBSERVABLE,),
            ),
        ),
        settings=settings(fabric_manager={"hang_policy": "restart"}),
    ),
    Story(
        "it never configures",
        (
            *UP[:3],
            row("it writes its log", wait(1), S.CONFIGURING),
            row("the deadline passes", until(S.STOPPING), S.STOPPING, TerminateFabricManager),
            row("it ends", wait(1), S.BACKOFF, DrawBackoff, active=(Code.START_TIMEOUT,)),
            *RECOVERED,
        ),
        before=behave(success_at=None, driver_at=None),
    ),
    Story(
        "it ignores SIGTERM",
        (
            *UP,
            STOP,
            row("it is killed", wait(11), S.STOPPING, KillFabricManager, EndService, active=(Code.STOP_ESCALATED,)),
        ),
        before=behave(obeys_sigterm=False),
    ),
    Story(
        "it forks away",
        (
            *UP[:3],
            row("it leaves a process behind", wait(0.6), S.FAILED, active=(Code.FORKED_AWAY,)),
            row("it is not started again", both(behave(), wait(600)), S.FAILED),
            FIXED,
            CONFIGURED,
        ),
        before=behave(dies_at=0.5, status=EXIT_0, orphans=1),
    ),
    Story(
        "the driver is reloaded by hand while Fabric Manager is down",
        (
            *UP,
            row("it dies", dies(SEGV), S.FAILED, active=(Code.RESTART_WITHHELD,)),
            row("the driver is unloaded", lambda world: world.set_module(None), S.FAILED),
            row("and loaded", lambda world: world.set_module(LIVE), S.FAILED),
            row("no switch is called lost", wait(1), S.FAILED, active=(Code.RESTART_WITHHELD,)),
        ),
        settings=settings(restart={"policy": "never"}),
    ),
    Story(
        "a switch is lost and returns with another minor",
        (
            *UP,
            row("it is lost", lambda world: world.unplug(LAST), S.DEGRADED, active=(Code.SWITCH_LOST,)),
            row(
                "it returns without routes",
                lambda world: world.plug(LAST, minor=9),
                S.DEGRADED,
                active=(Code.SWITCH_UNCONFIGURED,),
            ),
            row("Fabric Manager dies", dies(SEGV), S.BACKOFF, DrawBackoff),
            RESTART,
            CONFIGURED,
        ),
    ),
    Story(
        "the driver cannot be asked",
        (
            *UP[:3],
            row("the log is enough", until(S.CONFIGURED), S.CONFIGURED, active=(Code.DRIVER_UNOBSERVABLE,)),
        ),
        before=put(is_driver_observable=False),
    ),
    Story(
        "the log is silent",
        (
            *UP[:3],
            row("the driver is enough", until(S.CONFIGURED), S.CONFIGURED),
            row("that is said", wait(6), S.CONFIGURED, active=(Code.SUCCESS_LINE_UNSEEN,)),
        ),
        before=behave(logs_at=None, success_at=None),
    ),
    Story(
        "a word about the Fabric Manager before does not count",
        (
            *UP,
            row("the next one will do nothing", behave(logs_at=None, driver_at=None, success_at=None), S.CONFIGURED),
            CRASH,
            RESTART,
            row("the driver has not noticed yet", wait(8), S.STARTING),
            row("nor later is it configured", wait(100), S.STARTING),
        ),
    ),
    Story(
        "neither the log nor the driver can be heard",
        (
            *UP[:3],
            row("the log cannot be read", log_unreadable, S.STARTING, active=(Code.LOG_UNREADABLE,)),
            row("that is no reason to end it", wait(600), S.STARTING, active=(Code.DRIVER_UNOBSERVABLE,)),
        ),
        before=both(behave(logs_at=None, driver_at=None, success_at=None), put(is_driver_observable=False)),
    ),
    Story(
        "the witnesses disagree",
        (
            *UP[:3],
            row("the log says configured", wait(2), S.CONFIGURING),
            row("the driver never does", until(S.DEGRADED), S.DEGRADED, active=(Code.WITNESSES_DISAGREE,)),
            row("until it does", both(driver_says(DriverState.CONFIGURED), wait(16)), S.CONFIGURED),
        ),
        before=behave(driver_at=None),
    ),
    Story(
        "a machine without switches gets one",
        (
            row("the daemon begins", lambda world: world.begin(), S.NOT_APPLICABLE),
            row("it is quiet", wait(600), S.NOT_APPLICABLE),
            row("a switch is found late", lambda world: world.plug(LAST), S.WAITING_FOR_MODULE, InspectInstallation),
            row("nothing more appears", wait(3.1), S.WAITING_FOR_MODULE, LoadModule),
            START,
            CONFIGURED,
        ),
        before=lambda world: world.chips.clear(),
    ),
    Story(
        "an NVLink 5 board",
        (row("the daemon begins", lambda world: world.begin(), S.FAILED, active=(Code.NVLINK5_UNSUPPORTED,)),),
        before=both(lambda world: world.chips.clear(), put(bridges=("0000:0c:00.0",))),
    ),
    Story(
        "settings that need a restart are not forced",
        (
            *UP,
            row(
                "they are reloaded",
                both(reload(fabric_manager={"fabric_mode": 1}), wait(2)),
                S.CONFIGURED,
                InspectInstallation,
                active=(Code.RESTART_NEEDED,),
            ),
            CRASH,
            RESTART,
            CONFIGURED,
        ),
    ),
    Story(
        "the host cannot be looked at for a while",
        (
            *UP,
            row(
                "/sys is gone",
                both(put(is_host_observable=False), wait(60)),
                S.CONFIGURED,
                active=(Code.HARDWARE_UNOBSERVABLE,),
            ),
            row("/sys is back", both(put(is_host_observable=True), wait(60)), S.CONFIGURED),
        ),
    ),
)

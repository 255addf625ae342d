"""What holds whatever happens: random worlds through the real plan, and random events against every rule of the plan."""

from dataclasses import replace

from _builders import (
    BLIND,
    COMING,
    GPUS,
    LIVE,
    SWITCHES,
    codes,
    make_config,
    make_installation,
    make_view,
    moment,
    node,
)
from _promises import FILES, check_promises, faults
from _world import Behaviour, World, check_state, check_step, hide
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fmsupervisor.conditions import Code
from fmsupervisor.core import events
from fmsupervisor.core.plan import next_action, next_deadline
from fmsupervisor.core.reduce import reduce
from fmsupervisor.core.state import State
from fmsupervisor.core.verdict import FabricState, verdict
from fmsupervisor.facts import (
    DriverState,
    ExitStatus,
    ForeignFabricManager,
    Guest,
    Host,
    KernelBatch,
    KernelKind,
    KernelRecord,
    LoadedModule,
    LogBatch,
    LogKind,
    LogRecord,
    ModuleMap,
    Problem,
    SwitchErrorKey,
    Unknown,
)
from fmsupervisor.settings import (
    FabricManagerSettings,
    ModuleSettings,
    RestartSettings,
    Settings,
    SwitchSettings,
)

property_test = hypothesis_settings(
    max_examples=100, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
BUSES = (*SWITCHES, "0000:09:00.0")

modules = st.sampled_from([None, LIVE, COMING, LoadedModule("live", "570.1"), Unknown("permission denied")])
statuses = st.sampled_from([ExitStatus(code=0), ExitStatus(code=1), ExitStatus(code=127), ExitStatus(signal=11)])
problems = st.builds(Problem, st.sampled_from(Code), st.just("drawn"), st.sampled_from(["", *SWITCHES]))
some_settings = st.builds(
    Settings,
    module=st.builds(ModuleSettings, load=st.booleans(), gpu_guard=st.sampled_from(["refuse", "no-register", "off"])),
    switches=st.builds(
        SwitchSettings,
        expected=st.sampled_from(["auto", 2, 5]),
        deadline_seconds=st.sampled_from([0.0, 30.0]),
        when_missing=st.sampled_from(["wait", "start-anyway", "fail"]),
    ),
    fabric_manager=st.builds(
        FabricManagerSettings,
        fabric_mode=st.integers(0, 2),
        start_timeout_seconds=st.sampled_from([5.0, 180.0]),
        hang_seconds=st.sampled_from([0.0, 30.0]),
        hang_policy=st.sampled_from(["report", "restart"]),
    ),
    restart=st.builds(RestartSettings, policy=st.sampled_from(["always", "when-no-guests", "never"])),
)
records = st.builds(
    LogRecord,
    st.sampled_from(LogKind),
    st.sampled_from(["INFO", "ERROR"]),
    st.just("a line"),
    st.fixed_dictionaries(
        {"uuid": st.text("ab", max_size=4), "pci_bus_id": st.sampled_from(["", "nonsense", *GPUS])},
        optional={"module_id": st.text("0x9", max_size=3), "version": st.just("1.2")},
    ),
)
switch_errors = st.builds(
    SwitchErrorKey,
    st.sampled_from(["", "0000:ff:00.0", *BUSES]),
    st.integers(0, 30000),
    st.sampled_from(["fatal", "non-fatal"]),
    st.one_of(st.none(), st.integers(0, 63)),
)
counts = st.integers(1, 3)
batches = st.builds(
    LogBatch,
    source=st.sampled_from(["file", "stdout", "stderr"]),
    lines_by_level=st.dictionaries(st.text("AB", max_size=5), counts, max_size=4),
    unrecognised=st.integers(0, 9),
    records=st.lists(records, max_size=4).map(tuple),
    switch_errors=st.dictionaries(switch_errors, counts, max_size=4),
    file_size_bytes=st.one_of(st.none(), st.integers(0, 1 << 21)),
    problem=st.sampled_from(["", "permission denied"]),
)
kernel_records = st.builds(
    KernelRecord,
    st.sampled_from(KernelKind),
    st.just("a line"),
    st.fixed_dictionaries(
        {
            "pci_bus_id": st.sampled_from(["0000:ff:00.0", *BUSES, *GPUS]),
            "minor": st.integers(0, 9).map(str),
            "sxid": st.sampled_from(["10004", "10005", "12028", "20034"]),
            "severity": st.sampled_from(["fatal", "non-fatal", "untagged"]),
            "xid": st.sampled_from(["45", "74", "79"]),
            "kernel_version": st.just("1.2"),
            "user_version": st.text("12", max_size=2),
        },
        optional={"port": st.integers(0, 63).map(str)},
    ),
    is_old=st.booleans(),
)
kernel_batches = st.builds(
    KernelBatch,
    records=st.lists(kernel_records, max_size=4).map(tuple),
    lost=st.integers(0, 2),
    problem=st.sampled_from(["", "permission denied"]),
)
hosts = st.builds(
    Host,
    kernel_release=st.sampled_from(["", "6.12.0"]),
    switches=st.just(()),
    gpus=st.just(()),
    nvlink5_bridges=st.sampled_from([(), ("0000:0c:00.0",)]),
    module=modules,
    probed_switches=st.one_of(st.none(), st.lists(st.sampled_from(BUSES), max_size=4).map(tuple)),
    majors=st.just({}),
    fabric_management_minor=st.none(),
    fabric_management_mode=st.none(),
    problems=st.lists(problems, max_size=2).map(tuple),
)
views = st.builds(
    make_view,
    st.one_of(st.sampled_from(DriverState), st.just(99)),
    st.lists(st.sampled_from(BUSES), unique=True, max_size=5),
    first_minor=st.integers(0, 3),
)
behaviours = st.builds(
    Behaviour,
    logs_at=st.sampled_from([None, 0.2]),
    driver_at=st.sampled_from([None, 0.8]),
    success_at=st.sampled_from([None, 1.0]),
    dies_at=st.sampled_from([None, 0.1, 30.0]),
    dies_saying=st.one_of(st.none(), st.sampled_from(LogKind)),
    status=statuses,
    orphans=st.integers(0, 1),
    obeys_sigterm=st.booleans(),
)
installations = st.builds(
    make_installation,
    fabric_manager_version=st.sampled_from([None, "580.126.09", "570.1"]),
    problems=st.lists(problems, max_size=1).map(tuple),
    fingerprint=st.text("ab", max_size=1),
)
known_guests = st.builds(
    Guest,
    pid=st.integers(1, 3),
    start_ticks=st.integers(1, 2),
    started=st.sampled_from([0.0, 990.0, 1005.0, 1500.0]),
    name=st.just("default_vm1"),
    gpus=st.sets(st.sampled_from(GPUS), min_size=1, max_size=2).map(tuple),
)
unsolicited = st.one_of(
    st.builds(events.LogRead, batches),
    st.builds(events.KernelLogRead, kernel_batches),
    st.builds(events.ServiceProblem, problems, st.booleans()),
    st.builds(events.SettingsReloaded, some_settings, st.one_of(st.none(), problems)),
    st.builds(events.HostMayHaveChanged),
    st.builds(
        events.ModulesRecalled,
        st.builds(
            ModuleMap,
            st.dictionaries(st.sampled_from(GPUS), st.integers(-1, 99), max_size=4),
            st.frozensets(st.sampled_from(GPUS), max_size=2),
        ),
    ),
    st.builds(events.PathsChanged, st.just(frozenset({"/nv/usr/bin/nv-fabricmanager", "/dev/nvidia-nvswitchctl"}))),
    st.builds(events.TimePassed),
)
any_event = st.one_of(
    unsolicited,
    st.builds(events.HostObserved, st.one_of(hosts, st.just(Unknown("gone")))),
    st.builds(events.InstallationInspected, installations),
    st.builds(events.ModuleLoadEnded, st.one_of(st.none(), problems)),
    st.builds(events.DriverObserved, st.one_of(views, st.just(BLIND))),
    st.builds(events.NodesEnsured, st.just((node("refused"),))),
    st.builds(events.ConfigPrepared, st.lists(problems, max_size=1).map(lambda found: make_config(*found))),
    st.builds(events.ForeignLookedFor, st.sampled_from([(), (ForeignFabricManager(None, "something"),)])),
    st.builds(events.BackoffDrawn, st.floats(0, 60)),
    st.builds(events.FabricManagerStarted, st.integers(1, 9), st.text("ab", max_size=2)),
    st.builds(events.SpawnFailed, st.just("no memory")),
    st.builds(events.FabricManagerExited, statuses, st.just(("bye",)), st.integers(0, 2)),
    st.builds(events.OrphansEnded),
    st.builds(events.StopRequested),
)


def change(world: World, data: st.DataObject) -> None:  # noqa: C901, PLR0912 - one case per thing
    """One random thing happens in the world."""
    draw = data.draw
    bus_id = draw(st.sampled_from(BUSES))
    match draw(st.integers(0, 17)):
        case 17:
            world.guests = draw(st.lists(known_guests, max_size=3, unique_by=lambda one: one.pid).map(tuple))
            world.are_guests_observable = draw(st.booleans())
            world.hidden_pids = draw(st.sets(st.integers(1, 3)))
        case 0 | 1 | 2:
            world.wait(draw(st.sampled_from([0.1, 1.0, 12.0, 40.0])))
        case 3:
            world.set_module(draw(modules))
        case 4:
            world.plug(bus_id, draw(st.integers(0, 9)))
        case 5 if bus_id in world.chips:
            world.unplug(bus_id)
        case 6:
            world.driver_says(draw(st.sampled_from(DriverState)), *draw(st.sets(st.sampled_from(sorted(world.chips)))))
        case 7:
            world.is_driver_observable = draw(st.booleans())
        case 8:
            world.is_host_observable = draw(st.booleans())
        case 9:
            world.hidden = draw(st.sets(st.sampled_from([*FILES, *BUSES])))
        case 10:
            world.load_problem = draw(st.one_of(st.none(), problems))
            world.config_problem = draw(st.one_of(st.none(), problems))
            world.node_outcome = draw(st.sampled_from(["kept", "created", "refused", "failed"]))
        case 11:
            world.foreign = draw(st.sampled_from([(), (ForeignFabricManager(1, "pid 1"),)]))
            world.spawn_error = draw(st.sampled_from(["", "no memory"]))
            world.gpu_driver = draw(st.sampled_from([None, "nvidia", "vfio-pci"]))
        case 12:
            world.behaviour = draw(behaviours)
        case 13:
            world.die(draw(statuses), draw(st.integers(0, 1)))
        case 14:
            world.installation = draw(installations)
            world.feed(events.PathsChanged(frozenset(world.installation.watched_paths)))
        case _:
            world.feed(draw(unsolicited))


def is_bounded(state: State) -> bool:
    """Whether nothing that Fabric Manager writes can make the state large."""
    run, counters = state.run, state.counters
    sizes = (
        len(state.latched),
        len(state.lost_registrations),
        len(state.gpu_buses),
        len(state.module_ids),
        len(run.registered) if run else 0,
        len(run.failures) if run else 0,
        len(counters.log_lines),
    )
    return max(sizes) <= 300 and len(counters.switch_errors) <= 4096 + 100


@property_test
@given(st.data())
def test_in_any_world_the_plan_comes_to_rest_and_keeps_every_promise(data: st.DataObject) -> None:
    """The world checks them after each event: see ``_world.check_state``, ``check_step`` and ``_check_action``."""
    world = World(data.draw(some_settings))
    world.become(data.draw(st.sampled_from([None, LIVE])))
    world.begin()
    for _ in range(data.draw(st.integers(1, 25))):
        change(world, data)
        assert is_bounded(world.state)
    world.behaviour = replace(world.behaviour, obeys_sigterm=data.draw(st.booleans()))
    world.feed(events.StopRequested())
    world.wait(100)
    assert world.state.has_ended


@property_test
@given(st.data())
def test_not_being_able_to_look_neither_sets_nor_clears_a_fault(data: st.DataObject) -> None:
    world = World(data.draw(some_settings))
    world.become(LIVE)
    world.begin()
    world.wait(5)
    for _ in range(data.draw(st.integers(0, 12))):
        change(world, data)
    blind = dark = world.state
    for second in range(1, data.draw(st.integers(2, 60))):
        now = moment(world.now + second)
        failed: list[events.Event] = [events.HostObserved(Unknown("gone")), events.DriverObserved(BLIND)]
        failed.append(events.LogRead(LogBatch("file", problem="permission denied")))
        failed.append(events.GuestsLookedFor(Unknown("gone")))
        if dark.host is not None:
            hidden = data.draw(st.sets(st.sampled_from([*FILES, *BUSES, *GPUS])))
            failed.append(events.HostObserved(hide(replace(dark.host, problems=()), hidden)))
        blind = reduce(blind, events.TimePassed(), now)
        dark = reduce(dark, data.draw(st.sampled_from(failed)), now)
        assert faults(dark) == faults(blind)
        shown = {verdict(blind).state, verdict(dark).state}
        assert len(shown) == 1 or not shown & {FabricState.CONFIGURED, FabricState.DEGRADED}


@property_test
@given(some_settings, st.lists(any_event, max_size=30), st.lists(st.floats(0, 1000), min_size=30, max_size=30))
def test_every_event_is_accepted_in_every_state(
    wanted: Settings, happened: list[events.Event], pauses: list[float]
) -> None:
    world = World(wanted)
    state, now = world.state, world.now
    for event, pause in zip(happened, pauses, strict=False):
        now += pause
        before, state = state, reduce(state, event, moment(now))
        check_step(before, state)
        check_promises(state)
        action = next_action(state)
        if action is not None:
            state = reduce(state, events.ActionTaken(action), moment(now))
        assert is_bounded(state)


def test_the_same_state_gives_the_same_answer() -> None:
    world = World()
    world.begin()
    world.wait(20)
    again = replace(world.state)
    assert (verdict(again), next_action(again), next_deadline(again)) == (
        verdict(world.state),
        next_action(world.state),
        next_deadline(world.state),
    )


def test_a_hostile_log_does_not_make_the_state_grow() -> None:
    world = World()
    world.begin()
    world.wait(20)
    for session in range(3):
        for number in range(100):
            gpus = [
                LogRecord(
                    LogKind.GPU_ADDED, "INFO", "", {"uuid": f"GPU-{session}-{number}-{one}", "pci_bus_id": GPUS[0]}
                )
                for one in range(10)
            ]
            errors = {
                SwitchErrorKey(f"0000:{number:02x}:{session}.{one}", number * 100 + one, "fatal", one): 1
                for one in range(60)
            }
            failures = [LogRecord(LogKind.CONFIG_INVALID, "ERROR", "x")] * 5
            levels = {f"LEVEL-{session}-{number}": 1}
            world.feed(events.LogRead(LogBatch("file", levels, 5, (*gpus, *failures), errors)))
        assert is_bounded(world.state)
        world.die(ExitStatus(signal=9))
        world.wait_for(FabricState.CONFIGURED)
    assert is_bounded(world.state)
    assert sum(world.state.counters.switch_errors.values()) == 3 * 100 * 60
    check_state(world.state)
    assert Code.CRASH_LOOP not in codes(verdict(world.state).problems)

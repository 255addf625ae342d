"""core.diagnosis: which conditions hold, one row each; and that every registered condition can come about."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from _builders import (
    BLIND,
    COMING,
    GPUS,
    LIVE,
    SWITCHES,
    after,
    codes,
    configured,
    executed,
    looked_at,
    make_config,
    make_host,
    make_installation,
    make_state,
    make_view,
    node,
    ready,
    said,
    settings,
    switch,
)

import fmsupervisor
from fmsupervisor.conditions import REGISTRY, Code
from fmsupervisor.core import events
from fmsupervisor.core.diagnosis import blocking, problems
from fmsupervisor.core.state import State
from fmsupervisor.facts import (
    DeviceState,
    DriverState,
    DriverView,
    ExitStatus,
    ForeignFabricManager,
    Host,
    LoadedModule,
    LogKind,
    Problem,
    Unknown,
)

STANDBY = events.DriverObserved(make_view(DriverState.STANDBY))
CRASH = events.FabricManagerExited(ExitStatus(signal=11), ("bye",))
DAMAGED = Problem(Code.MODULE_DAMAGED, "no ELF header")


def seen(host: Host, state: State | None = None) -> State:
    """The state after this look at the host."""
    return after(state or ready(), events.HostObserved(host))


def with_driver(*says: DriverState, device: DeviceState = DeviceState.STANDBY, reason: int = 0) -> State:
    """Configured, and then the driver says this of the first switches."""
    devices = list(make_view().devices)
    for number, one in enumerate(says):
        devices[number] = replace(devices[number], driver_state=one, device_state=device, device_reason=reason)
    return after(configured(), events.DriverObserved(DriverView(tuple(devices))))


UNLOADED = make_host(module=None)
PASSED_THROUGH = replace(make_host(), switches=(switch(SWITCHES[0], "vfio-pci"), *make_host().switches[1:]))
FELL_OFF = replace(make_host(), switches=(switch(SWITCHES[0], responds=False), *make_host().switches[1:]))
OVERDUE = settings(switches={"expected": 5, "deadline_seconds": 0.0})

ROWS: tuple[tuple[str, State, set[Code]], ...] = (
    ("all is well", configured(), set()),
    ("all is ready", ready(), set()),
    ("nothing is known", make_state(), set()),
    ("the host cannot be seen", after(ready(), events.HostObserved(Unknown("no"))), {Code.HARDWARE_UNOBSERVABLE}),
    ("a part of it cannot", seen(replace(make_host(), problems=(Problem(Code.HARDWARE_UNOBSERVABLE, "no", "x"),))), {Code.HARDWARE_UNOBSERVABLE}),
    ("a live driver needs no module file", ready(installation=make_installation(DAMAGED)), set()),
    ("a missing driver needs one", seen(UNLOADED, ready(installation=make_installation(DAMAGED))), {Code.MODULE_DAMAGED}),
    ("upgraded on disk", ready(host=make_host(module=LIVE, probed_switches=SWITCHES), installation=make_installation(module=replace(make_installation().module, version="590.1"), fabric_manager_version="590.1", nscq_version="590.1")), {Code.RELOAD_NEEDED}),  # type: ignore[type-var]
    ("a live driver of another version", seen(replace(make_host(), module=LoadedModule("live", "590.1"))), {Code.VERSION_MISMATCH}),
    ("a slow load", seen(make_host(module=COMING), make_state(is_loading=True, load_began_at=0.0)), {Code.MODULE_LOAD_SLOW}),
    ("a load that was refused for now", seen(UNLOADED, ready(load_problem=Problem(Code.MODULE_LOAD_BUSY, ""))), {Code.MODULE_LOAD_BUSY}),
    ("nobody loads the module", seen(UNLOADED, ready(settings(module={"load": False}))), {Code.MODULE_NOT_LOADED}),
    ("a GPU without a driver", seen(make_host(module=None, gpu_driver=None)), {Code.GPU_WOULD_BE_TAKEN}),
    ("a GPU without a driver, guard off", seen(make_host(module=None, gpu_driver=None), ready(settings(module={"gpu_guard": "off"}))), set()),
    ("GPUs at the host", seen(make_host(gpu_driver="nvidia")), {Code.GPU_TAKEN}),
    ("GPUs at the host, wanted", seen(make_host(gpu_driver="nvidia"), ready(settings(switches={"gpus_belong_to_guests": False}))), set()),
    ("NVLink 5", seen(make_host(on_bus=(), nvlink5_bridges=("0000:0c:00.0",)), make_state()), {Code.NVLINK5_UNSUPPORTED}),
    ("one is passed through", seen(PASSED_THROUGH), {Code.SWITCH_PASSED_THROUGH, Code.SWITCH_LOST}),
    ("one fell off the bus", seen(FELL_OFF), {Code.SWITCH_NOT_RESPONDING}),
    ("one went away", seen(make_host(SWITCHES[1:]), configured()), {Code.SWITCH_LOST}),
    ("one never came", ready(OVERDUE), {Code.SWITCH_MISSING}),
    ("a smaller fabric was started", executed(OVERDUE), {Code.SWITCH_MISSING, Code.STARTED_WITH_FEWER_SWITCHES}),
    ("one is not probed", seen(make_host(unbound=SWITCHES[:1]), make_state(settings(switches={"deadline_seconds": 0.0}))), {Code.SWITCH_NOT_PROBED}),
    ("one is bound but not probed", seen(replace(make_host(), probed_switches=SWITCHES[1:]), make_state(settings(switches={"deadline_seconds": 0.0}))), {Code.SWITCH_NOT_PROBED}),
    ("a node is in the way", ready(nodes=(node("refused"),)), {Code.NODE_CONFLICT}),
    ("a node cannot be made", ready(nodes=(node("failed"),)), {Code.NODE_FAILED}),
    ("a key is unknown", ready(config=make_config(Problem(Code.CONFIG_KEY_UNKNOWN, "X"))), {Code.CONFIG_KEY_UNKNOWN}),
    ("a stranger", ready(foreign=(ForeignFabricManager(9, "pid 9"),)), {Code.FOREIGN_FABRIC_MANAGER}),
    ("it died", after(configured(), CRASH), {Code.FABRIC_MANAGER_DIED}),
    ("it died and stays dead", after(configured(settings(restart={"policy": "never"})), CRASH), {Code.FABRIC_MANAGER_DIED, Code.RESTART_WITHHELD}),
    ("it dies again and again", after(configured(failures=4), CRASH), {Code.FABRIC_MANAGER_DIED, Code.CRASH_LOOP}),
    ("it could not be executed", after(ready(), events.SpawnFailed("no")), {Code.SPAWN_FAILED}),
    ("the driver cannot be asked", after(configured(), events.DriverObserved(BLIND)), {Code.DRIVER_UNOBSERVABLE}),
    ("a blacklisted switch", with_driver(DriverState.STANDBY, device=DeviceState.BLACKLISTED, reason=4), {Code.SWITCH_BLACKLISTED}),
    ("an error of the manager", with_driver(DriverState.MANAGER_ERROR), {Code.MANAGER_ERROR}),
    ("a switch without routes", with_driver(DriverState.STANDBY), {Code.SWITCH_UNCONFIGURED}),
    ("a missed heartbeat", with_driver(DriverState.MANAGER_TIMEOUT), set()),
    ("a hang", after(with_driver(DriverState.MANAGER_TIMEOUT), events.DriverObserved(make_view(DriverState.MANAGER_TIMEOUT)), seconds=30), {Code.FABRIC_MANAGER_HUNG}),
    ("a driver not heard since", after(with_driver(DriverState.MANAGER_TIMEOUT), events.DriverObserved(BLIND), seconds=90), {Code.DRIVER_UNOBSERVABLE}),
    ("no success line", after(after(executed(), STANDBY, events.DriverObserved(make_view())), seconds=5), {Code.SUCCESS_LINE_UNSEEN}),
    ("the driver never agrees", after(after(executed(), STANDBY, said(LogKind.CONFIGURED)), seconds=180), {Code.WITNESSES_DISAGREE}),
    ("the log cannot be read", after(configured(), said(problem="no")), {Code.LOG_UNREADABLE}),
    ("the log is full", configured(config=make_config(can_log_stop=True, log_limit_bytes=10), log_size_bytes=10), {Code.LOG_FULL}),
    ("the log rotates", configured(config=make_config(can_log_stop=False, log_limit_bytes=10), log_size_bytes=10), set()),
    ("changed settings", after(configured(), events.SettingsReloaded(settings(fabric_manager={"fabric_mode": 1}))), {Code.RESTART_NEEDED}),
    ("settings changed and back", after(configured(), events.SettingsReloaded(settings(fabric_manager={"fabric_mode": 1})), events.SettingsReloaded(settings())), set()),
    ("changed deadlines", after(configured(), events.SettingsReloaded(settings(fabric_manager={"hang_seconds": 1.0}))), set()),
    ("wrong settings", after(configured(), events.SettingsReloaded(settings(), Problem(Code.SETTINGS_INVALID, "x"))), {Code.SETTINGS_INVALID}),
    ("a part of us", after(ready(), events.ServiceProblem(Problem(Code.METRICS_UNAVAILABLE, "x"), is_active=True)), {Code.METRICS_UNAVAILABLE}),
)  # fmt: skip


@pytest.mark.parametrize(("state", "expected"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_the_conditions_that_hold(state: State, expected: set[Code]) -> None:
    assert codes(problems(state)) == expected


def test_a_machine_without_switches_reports_only_what_concerns_every_machine() -> None:
    state = after(make_state(), events.HostObserved(make_host(on_bus=(), gpu_driver="nvidia")))
    state = after(state, events.ServiceProblem(Problem(Code.METRICS_UNAVAILABLE, "x"), is_active=True))
    state = replace(state, installation=make_installation(Problem(Code.FABRIC_MANAGER_MISSING, "x")))
    assert codes(problems(state)) == {Code.METRICS_UNAVAILABLE}


def test_the_most_serious_conditions_come_first_and_each_only_once() -> None:
    twice = (Problem(Code.NSCQ_MISSING, "one"), Problem(Code.NSCQ_MISSING, "two"))
    state = ready(installation=make_installation(*twice, Problem(Code.VERSION_UNREADABLE, "x")))
    state = seen(make_host(gpu_driver="nvidia"), state)
    found = problems(looked_at(state))
    assert [problem.code for problem in found] == [
        Code.NSCQ_MISSING,
        *[Code.GPU_TAKEN] * len(GPUS),
        Code.VERSION_UNREADABLE,
    ]
    assert blocking(state) == found[0]


@pytest.mark.parametrize("reason", range(12))
def test_every_reason_for_a_blacklisted_switch_has_words(reason: int) -> None:
    state = with_driver(DriverState.STANDBY, device=DeviceState.BLACKLISTED, reason=reason)
    (problem,) = problems(state)
    assert problem.detail.split(": ")[1]


@pytest.mark.parametrize("code", [code for code in Code if not REGISTRY[code].blocks_start])
def test_a_warning_does_not_block_a_start(code: Code) -> None:
    state = after(ready(), events.ServiceProblem(Problem(code, "x"), is_active=True))
    assert blocking(state) is None


def test_every_condition_of_the_registry_can_come_about() -> None:
    package = Path(fmsupervisor.__file__).parent
    sources = [path.read_text() for path in package.rglob("*.py") if "simulator" not in path.parts]
    sources = [text for text in sources if "class Code(StrEnum)" not in text]
    used = set(re.findall(r"\bCode\.([A-Z0-9_]+)\b", "".join(sources)))
    assert used == {code.name for code in Code}
    assert set(REGISTRY) == set(Code)

"""core.verdict: the fabric state, its sentence, whether it is decided, and what stands in the way of a start."""

from dataclasses import replace

import pytest
from _builders import (
    BLIND,
    CHOICE,
    COMING,
    LIVE,
    SWITCHES,
    after,
    configured,
    executed,
    make_config,
    make_host,
    make_installation,
    make_state,
    make_view,
    moment,
    node,
    ready,
    record,
    run_of,
    said,
    settings,
)

from fmsupervisor.conditions import Code
from fmsupervisor.core import events
from fmsupervisor.core.actions import (
    Action,
    DrawBackoff,
    EnsureNodes,
    InspectInstallation,
    LoadModule,
    LookForForeign,
    ObserveDriver,
    PrepareConfig,
    StartFabricManager,
    StopCause,
)
from fmsupervisor.core.state import State, Stop
from fmsupervisor.core.verdict import DEGRADING, FabricState, gate, nodes_key, verdict
from fmsupervisor.facts import DriverState, DriverView, ForeignFabricManager, LogKind, Problem, Unknown
from fmsupervisor.settings import Settings

S = FabricState
SIGNED_BY_NOBODY = Problem(Code.MODULE_SIGNATURE_REJECTED, "key")
OLD_INSTALLATION = make_installation(fabric_manager_version="570.1")
STRANGER = (ForeignFabricManager(99, "pid 99"),)
FULL = settings(fabric_manager={"fabric_mode": 1, "resiliency_restart": True})

GATES: tuple[tuple[str, State, FabricState, type[Action] | None], ...] = (
    ("nothing is known", make_state(), S.WAITING_FOR_MODULE, None),
    ("the host cannot be seen", after(make_state(), events.HostObserved(Unknown("no"))), S.WAITING_FOR_MODULE, None),
    ("no switch", after(make_state(), events.HostObserved(make_host(on_bus=()))), S.NOT_APPLICABLE, None),
    (
        "NVLink 5",
        after(make_state(), events.HostObserved(make_host(on_bus=(), nvlink5_bridges=("0000:0c:00.0",)))),
        S.FAILED,
        None,
    ),
    (
        "no switch, but some are expected",
        after(make_state(settings(switches={"expected": 4})), events.HostObserved(make_host(on_bus=()))),
        S.WAITING_FOR_MODULE,
        InspectInstallation,
    ),
    ("files not read", after(make_state(), events.HostObserved(make_host())), S.WAITING_FOR_MODULE, InspectInstallation),
    ("files being read", ready(is_inspecting=True), S.WAITING_FOR_MODULE, None),
    ("files changed", ready(is_installation_stale=True), S.WAITING_FOR_MODULE, InspectInstallation),
    ("versions differ", ready(installation=OLD_INSTALLATION), S.FAILED, None),
    (
        "versions differed, files changed",
        ready(installation=OLD_INSTALLATION, is_installation_stale=True),
        S.FAILED,
        InspectInstallation,
    ),
    ("configuration outdated", ready(config_for=None), S.WAITING_FOR_MODULE, PrepareConfig),
    ("configuration refused", ready(config=make_config(Problem(Code.CONFIG_KEY_UNKNOWN, "X"))), S.FAILED, None),
    ("a stranger", ready(foreign=STRANGER), S.FAILED, None),
    ("a stranger some time ago", ready(foreign=STRANGER, foreign_looked_at=0.0), S.WAITING_FOR_MODULE, LookForForeign),
    ("not loaded", ready(host=make_host(module=None)), S.WAITING_FOR_MODULE, LoadModule),
    ("not loaded, looked at while it was", ready(host=make_host(module=None), installation=make_installation(is_module_checked=False)), S.WAITING_FOR_MODULE, InspectInstallation),
    ("loading", ready(host=make_host(module=None), is_loading=True), S.WAITING_FOR_MODULE, None),
    ("coming", ready(host=make_host(module=COMING)), S.WAITING_FOR_MODULE, None),
    ("not visible", ready(host=make_host(module=Unknown("no"))), S.WAITING_FOR_MODULE, None),
    ("retry later", ready(host=make_host(module=None), load_retry_at=2000.0), S.WAITING_FOR_MODULE, None),
    ("no module file", ready(host=make_host(module=None), installation=make_installation(module=None)), S.WAITING_FOR_MODULE, None),
    ("unbound GPU", ready(host=make_host(module=None, gpu_driver=None)), S.FAILED, None),
    ("unbound switch", ready(host=make_host(unbound=SWITCHES[:1])), S.WAITING_FOR_SWITCHES, None),
    ("driver not asked", ready(driver=None, nodes_for=None), S.STARTING, EnsureNodes),
    ("nodes outdated", ready(nodes_for=None), S.STARTING, EnsureNodes),
    ("node refused", ready(nodes=(node("refused"),)), S.FAILED, None),
    ("orphans", ready(has_orphans=True), S.BACKOFF, None),
    ("pause not chosen", ready(failures=1), S.BACKOFF, DrawBackoff),
    ("pause", ready(failures=1, next_start_at=2000.0), S.BACKOFF, None),
    ("pause over", ready(failures=1, next_start_at=1000.5), S.STARTING, StartFabricManager),
    ("nothing in the way", ready(), S.STARTING, StartFabricManager),
)  # fmt: skip


@pytest.mark.parametrize(("state", "shown", "action"), [row[1:] for row in GATES], ids=[row[0] for row in GATES])
def test_without_a_process_the_first_gate_that_is_shut_gives_state_and_action(
    state: State, shown: FabricState, action: type[Action] | None
) -> None:
    found = gate(state)
    assert (found.state, verdict(state).state) == (shown, shown)
    assert (type(found.action) if found.action else None) == action
    assert found.reason


def test_the_control_node_is_made_before_the_driver_is_asked() -> None:
    state = ready()
    state = after(state, events.HostObserved(make_host(module=COMING)), events.HostObserved(make_host()))
    assert gate(state).action == EnsureNodes()
    assert gate(after(state, events.NodesEnsured((node(),)))).action == ObserveDriver()


def test_a_block_names_what_it_waits_for() -> None:
    absent = events.HostObserved(make_host(module=None))
    loading = events.ActionTaken(LoadModule(CHOICE, (), "because"))
    state = after(ready(), absent, loading, events.ModuleLoadEnded(SIGNED_BY_NOBODY), absent)
    shown = verdict(state)
    assert (shown.state, shown.is_decided) == (S.FAILED, True)
    assert shown.reason.startswith("FMS-207 ")
    assert "waits for a change of the installed files or" in shown.reason


def test_no_register_loads_without_taking_a_gpu() -> None:
    state = ready(settings(module={"gpu_guard": "no-register", "parameters": ("A=1",)}))
    state = replace(state, host=make_host(module=None, gpu_driver=None))
    action = gate(state).action
    assert isinstance(action, LoadModule)
    assert action.parameters == ("A=1", "NVreg_RegisterPCIDriver=0")


@pytest.mark.parametrize(
    ("wanted", "says", "is_resilient"),
    [
        (FULL, make_view(), True),
        (FULL, make_view(DriverState.MANAGER_TIMEOUT), True),
        (FULL, make_view(DriverState.STANDBY), False),
        (FULL, BLIND, False),
        (settings(fabric_manager={"resiliency_restart": True}), make_view(), False),
        (settings(fabric_manager={"fabric_mode": 1}), make_view(), False),
    ],
    ids=["the last one has just died", "long dead", "none has run since the boot", "cannot be asked", "mode 0", "no"],
)
def test_only_after_another_in_a_shared_mode_it_resumes(
    wanted: Settings, says: DriverView | Unknown, is_resilient: bool
) -> None:
    state = after(ready(wanted), events.DriverObserved(says))
    action = gate(replace(state, nodes_for=nodes_key(state))).action
    assert isinstance(action, StartFabricManager)
    assert action.resiliency is is_resilient


INVISIBLE = replace(make_host(), module=Unknown("no"))
STANDBY = events.DriverObserved(make_view(DriverState.STANDBY))
SAYS_CONFIGURED = events.DriverObserved(make_view())
TIMEOUT = events.DriverObserved(make_view(DriverState.MANAGER_TIMEOUT))
RELOADED = (events.HostObserved(make_host(module=None)), events.HostObserved(make_host()))
BEGUN = said(LogKind.SESSION_HEADER)
SUCCESS = said(LogKind.CONFIGURED)

RUNNING: tuple[tuple[str, State, FabricState], ...] = (
    ("just executed", executed(), S.STARTING),
    ("its log has begun", after(executed(), BEGUN), S.CONFIGURING),
    ("the log alone", after(executed(), STANDBY, SUCCESS), S.CONFIGURING),
    ("the driver alone, after it has said otherwise", after(executed(), STANDBY, SAYS_CONFIGURED), S.CONFIGURED),
    ("the driver alone, which may not have noticed yet", after(executed(), SAYS_CONFIGURED), S.STARTING),
    ("the driver alone, after it must have noticed", after(executed(), SAYS_CONFIGURED, seconds=13.0), S.CONFIGURED),
    ("the log, and a driver that cannot be asked", after(executed(), events.DriverObserved(BLIND), SUCCESS), S.CONFIGURED),
    ("both", configured(), S.CONFIGURED),
    ("the driver denies it later", after(configured(), STANDBY), S.DEGRADED),
    ("the driver misses a heartbeat", after(configured(), TIMEOUT), S.DEGRADED),
    ("the driver says something new", after(configured(), events.DriverObserved(make_view(99))), S.DEGRADED),
    ("the driver cannot be asked later", after(configured(), events.DriverObserved(BLIND)), S.CONFIGURED),
    ("it has denied and cannot be asked", after(configured(), STANDBY, events.DriverObserved(BLIND)), S.DEGRADED),
    ("a switch is gone", after(configured(), events.HostObserved(make_host(SWITCHES[:3]))), S.DEGRADED),
    ("the driver is gone", after(configured(), events.HostObserved(make_host(module=None))), S.DEGRADED),
    ("the driver is back and cannot be asked", after(configured(), *RELOADED, events.DriverObserved(BLIND)), S.DEGRADED),
    ("the driver is back and has its routes", after(configured(), *RELOADED, SAYS_CONFIGURED), S.CONFIGURED),
    ("the driver is not visible", after(configured(), events.HostObserved(INVISIBLE)), S.CONFIGURED),
    ("overdue, the driver denies it", after(after(executed(), STANDBY, SUCCESS), seconds=181.0), S.DEGRADED),
)  # fmt: skip


@pytest.mark.parametrize(("state", "shown"), [row[1:] for row in RUNNING], ids=[row[0] for row in RUNNING])
def test_with_a_process_the_witnesses_decide(state: State, shown: FabricState) -> None:
    assert verdict(state).state is shown


@pytest.mark.parametrize("before", [executed(), configured()], ids=["before", "after"])
def test_a_process_that_was_asked_to_end_is_stopping(before: State) -> None:
    state = replace(before, run=replace(run_of(before), stop=Stop(before.now, StopCause.HANG)))
    assert verdict(state).state is S.STOPPING


def test_the_sentence_of_a_degraded_fabric_begins_with_its_code() -> None:
    state = after(configured(), events.HostObserved(make_host(SWITCHES[:2])))
    assert verdict(state).reason.startswith("FMS-305 ")
    assert verdict(state).reason.endswith("(and 1 more)")


def test_only_conditions_that_concern_a_running_fabric_degrade_it() -> None:
    assert not DEGRADING & {Code.RELOAD_NEEDED, Code.VERSION_MISMATCH, Code.REGISTRATIONS_LOST, Code.LOG_FULL}


DECIDED: tuple[tuple[str, State, bool], ...] = (
    ("configured", configured(), True),
    ("degraded", after(configured(), STANDBY), True),
    ("not applicable", after(make_state(), events.HostObserved(make_host(on_bus=()))), True),
    ("failed", ready(foreign=STRANGER), True),
    ("looking at the hardware", make_state(), False),
    ("loading", ready(host=make_host(module=None), is_loading=True, load_began_at=1000.0), False),
    ("loading for long", ready(host=make_host(module=COMING), is_loading=True, load_began_at=0.0), True),
    ("nobody loads the module", ready(settings(module={"load": False}), host=make_host(module=None)), True),
    ("waiting for switches", after(ready(), events.HostObserved(make_host(unbound=SWITCHES))), False),
    (
        "waiting in vain",
        after(after(ready(), events.HostObserved(make_host(unbound=SWITCHES))), events.ForeignLookedFor(()), seconds=301),
        True,
    ),
    ("starting", executed(), False),
    ("starting in vain", after(executed(), seconds=181.0), True),
    ("pausing", ready(failures=1, next_start_at=2000.0), False),
    ("pausing again and again", ready(failures=5, next_start_at=2000.0), True),
    ("stopping", ready(is_stopping=True), False),
)  # fmt: skip


@pytest.mark.parametrize(("state", "is_decided"), [row[1:] for row in DECIDED], ids=[row[0] for row in DECIDED])
def test_decided_means_that_the_outcome_is_known_good_or_bad(state: State, is_decided: bool) -> None:
    assert verdict(state).is_decided is is_decided


def test_the_number_of_registered_gpus_is_of_this_session() -> None:
    added = record(LogKind.GPU_ADDED, uuid="GPU-1", pci_bus_id="0000:1b:00.0")
    assert "1 GPU registered" in verdict(after(configured(), said(added))).reason
    state = after(configured(), said(added), events.FabricManagerStarted(2, "second"))
    state = after(state, STANDBY, SUCCESS, SAYS_CONFIGURED)
    assert "0 GPUs registered" in verdict(state).reason


def test_the_driver_may_be_live_before_the_daemon() -> None:
    assert gate(ready(host=make_host(module=LIVE), now=moment(1001.0))).action is not None

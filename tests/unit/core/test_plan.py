"""core.plan: the one next action, and when to think again."""

from dataclasses import replace

import pytest
from _builders import (
    BEGUN,
    BLIND,
    SWITCHES,
    after,
    configured,
    executed,
    looked_for,
    make_host,
    make_state,
    make_view,
    moment,
    node,
    ready,
    run_of,
    said,
    settings,
)

from fmsupervisor.core import events
from fmsupervisor.core.actions import (
    Action,
    EndService,
    EnsureNodes,
    InspectInstallation,
    KillFabricManager,
    LookForGuests,
    ObserveDriver,
    ObserveHost,
    StartFabricManager,
    StopCause,
    TerminateFabricManager,
)
from fmsupervisor.core.plan import next_action, next_deadline
from fmsupervisor.core.plan_times import HOST_INTERVAL_SECONDS
from fmsupervisor.core.state import NEVER, State, Stop
from fmsupervisor.facts import DriverState, ForeignFabricManager, LogBatch, LogKind

STANDBY = events.DriverObserved(make_view(DriverState.STANDBY))
TIMEOUT = events.DriverObserved(make_view(DriverState.MANAGER_TIMEOUT))
UNREADABLE = events.LogRead(LogBatch("file", problem="permission denied"))
ENDING_HANGS = settings(fabric_manager={"hang_policy": "restart"})


def quiet(state: State) -> State:
    """Host, driver, nodes and guests have just been looked at."""
    state = after(state, events.HostObserved(state.host or make_host()), events.NodesEnsured((node(),)), *looked_for())
    return replace(state, driver_observed_at=state.now.monotonic)


def stopping(state: State, cause: StopCause = StopCause.REQUESTED, **changes: bool) -> State:
    """Fabric Manager was asked to end."""
    return replace(state, run=replace(run_of(state), stop=Stop(state.now, cause, **changes)))


def asked(state: State) -> State:
    """The service was asked to stop."""
    return replace(state, is_stopping=True)


LATER = quiet(after(configured(), seconds=100))
ROWS: tuple[tuple[str, State, type[Action] | None], ...] = (
    ("nothing is known", make_state(), ObserveHost),
    ("the hardware may have changed", after(configured(), events.HostMayHaveChanged()), ObserveHost),
    ("the last look is old", after(quiet(configured()), seconds=HOST_INTERVAL_SECONDS), ObserveHost),
    ("just executed", executed(), ObserveDriver),
    ("nothing to do", quiet(configured()), None),
    ("guests were looked for 59 s ago", replace(LATER, guests_looked_at=BEGUN + 101 - 59), None),
    ("guests were looked for 60 s ago", replace(LATER, guests_looked_at=BEGUN + 101 - 60), LookForGuests),
    ("guests are being looked for", after(replace(LATER, guests_looked_at=NEVER), events.ActionTaken(LookForGuests())), None),
    ("guests, and something more urgent", replace(quiet(configured()), guests_looked_at=NEVER, nodes_for=None), EnsureNodes),
    ("no GPU, no guest", replace(quiet(configured()), guests_looked_at=NEVER, host=make_host(gpus=())), None),
    ("the nodes are outdated", replace(quiet(configured()), nodes_for=None), EnsureNodes),
    ("the files changed", replace(quiet(configured()), is_installation_stale=True), InspectInstallation),
    ("the files are being read", replace(quiet(configured()), is_installation_stale=True, is_inspecting=True), None),
    ("ready to start", ready(), StartFabricManager),
    ("late", quiet(after(executed(), seconds=180)), TerminateFabricManager),
    ("late, the log says configured", quiet(after(executed(), STANDBY, said(LogKind.CONFIGURED), seconds=180)), None),
    ("late, nothing can be heard", quiet(after(executed(), UNREADABLE, events.DriverObserved(BLIND), seconds=180)), None),
    ("late, the driver can be heard", quiet(after(executed(), UNREADABLE, STANDBY, seconds=180)), TerminateFabricManager),
    ("a hang of 29 s", quiet(after(after(configured(ENDING_HANGS), TIMEOUT), TIMEOUT, seconds=29)), None),
    ("a hang of 30 s", quiet(after(after(configured(ENDING_HANGS), TIMEOUT), TIMEOUT, seconds=30)), TerminateFabricManager),
    ("a hang to be reported", quiet(after(after(configured(), TIMEOUT), TIMEOUT, seconds=30)), None),
    ("a hang not heard of since", quiet(after(after(configured(ENDING_HANGS), TIMEOUT), events.DriverObserved(BLIND), seconds=60)), None),
    ("asked to end", quiet(stopping(configured(), StopCause.HANG)), None),
    ("does not end", quiet(after(stopping(configured(), StopCause.HANG), seconds=10)), KillFabricManager),
    ("is killed", quiet(after(stopping(configured(), StopCause.HANG, is_killed=True), seconds=99)), None),
    ("stop", asked(configured()), TerminateFabricManager),
    ("stop, asked already", asked(stopping(configured())), None),
    ("stop, does not end", after(asked(stopping(configured())), seconds=10), KillFabricManager),
    ("stop, nothing runs", asked(ready()), EndService),
    ("stop, nothing is known", asked(make_state()), EndService),
    ("stop, orphans", asked(ready(has_orphans=True)), None),
    ("stop, done", asked(ready(has_ended=True)), None),
    ("stop, during a load", asked(ready(is_loading=True)), EndService),
)  # fmt: skip


@pytest.mark.parametrize(("state", "action"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_the_next_action(state: State, action: type[Action] | None) -> None:
    found = next_action(state)
    assert (type(found) if found else None) == action


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        (asked(configured()), StopCause.REQUESTED),
        (quiet(after(executed(), seconds=180)), StopCause.START_TIMEOUT),
        (quiet(after(after(configured(ENDING_HANGS), TIMEOUT), TIMEOUT, seconds=30)), StopCause.HANG),
    ],
    ids=["requested", "timeout", "hang"],
)
def test_every_termination_has_its_cause_and_a_sentence(state: State, cause: StopCause) -> None:
    action = next_action(state)
    assert isinstance(action, TerminateFabricManager)
    assert action.cause is cause
    assert action.reason


DEADLINES: tuple[tuple[str, State, float], ...] = (
    ("the hardware, when nothing else is due", quiet(configured()), 15.0),
    ("the driver, while it configures", quiet(executed()), 0.25),
    ("the driver, while it misses heartbeats", quiet(after(configured(), TIMEOUT)), 1.0),
    ("the end of a pause", ready(failures=1, next_start_at=1003.0), 2.0),
    ("another load", replace(quiet(ready()), host=make_host(module=None), load_retry_at=1005.0), 4.0),
    ("another look for strangers", replace(quiet(ready()), foreign=(ForeignFabricManager(1, "pid 1"),)), 5.0),
    ("SIGKILL", replace(quiet(stopping(configured()))), 10.0),
    ("the success line", after(quiet(after(executed(), STANDBY, events.DriverObserved(make_view()))), seconds=3.0), 2.0),
    ("the switches", replace(quiet(after(ready(settings(switches={"deadline_seconds": 7.0})), events.HostObserved(make_host(unbound=SWITCHES)))), foreign=()), 7.0),
    ("a slow load", replace(quiet(ready(settings(module={"load_timeout_seconds": 9.0}))), is_loading=True, load_began_at=1001.0, host=make_host(module=None)), 9.0),
)  # fmt: skip


@pytest.mark.parametrize(("state", "seconds"), [row[1:] for row in DEADLINES], ids=[row[0] for row in DEADLINES])
def test_the_next_deadline_is_of(state: State, seconds: float) -> None:
    due = next_deadline(state) - state.now.monotonic
    assert due == pytest.approx(seconds)


def test_a_fresh_start_of_the_count_is_noticed() -> None:
    state = after(configured(settings(restart={"reset_after_seconds": 295.0})), seconds=290.0)
    state = replace(quiet(state), failures=2)
    assert next_deadline(state) - state.now.monotonic == pytest.approx(5.0)
    assert after(state, seconds=5.0).failures == 0


def test_an_overdue_look_at_the_driver_does_not_stop_the_clock() -> None:
    state = replace(quiet(ready()), driver_observed_at=0.0, nodes_for=None)
    assert next_deadline(state) > state.now.monotonic
    assert next_deadline(replace(state, now=moment(1e9))) > 1e9

"""What to do next, and when to think again. Pure: the same state always gives the same actions."""

from fmsupervisor.core.actions import (
    Action,
    EndService,
    EnsureNodes,
    InspectInstallation,
    KillFabricManager,
    LoadModule,
    LookForGuests,
    ObserveDriver,
    ObserveHost,
    StopCause,
    TerminateFabricManager,
)
from fmsupervisor.core.plan_times import (
    FOREIGN_INTERVAL_SECONDS,
    HOST_INTERVAL_SECONDS,
    bus_quiet_at,
    driver_due_at,
    driver_interval,
    guest_search_slow_at,
    guests_due_at,
    host_due_at,
    is_blind,
    is_hung,
    load_slow_at,
    partitions_deadline,
    start_deadline,
    success_line_due_at,
    switch_deadline,
)
from fmsupervisor.core.state import Run, State
from fmsupervisor.core.verdict import gate, nodes_key

_EARLY = 0.1  # of its interval: a look that is nearly due is taken along with the one that woke us


def next_action(state: State) -> Action | None:
    """The one thing to do now; None = wait for an event or for ``next_deadline``."""
    if state.is_stopping:
        return _stopping(state)
    now = state.now.monotonic
    if state.is_host_stale or now >= host_due_at(state) - HOST_INTERVAL_SECONDS * _EARLY:
        return ObserveHost()
    if now >= driver_due_at(state) - driver_interval(state) * _EARLY and state.nodes_for is not None:
        return ObserveDriver()
    action = gate(state).action if state.run is None else _running(state, state.run)
    if isinstance(action, LoadModule) and state.host_observed_at < now:
        return ObserveHost()  # a GPU that has come since the last look would be taken
    return LookForGuests() if action is None and now >= guests_due_at(state) else action


def _stopping(state: State) -> Action | None:
    run = state.run
    if run is None:
        return None if state.has_orphans or state.has_ended else EndService()
    if run.stop is None:
        return TerminateFabricManager(StopCause.REQUESTED, "the service is being stopped")
    return _escalation(state, run)


def _escalation(state: State, run: Run) -> Action | None:
    if run.stop is None or run.stop.is_killed:
        return None
    patience = state.settings.fabric_manager.stop_timeout_seconds
    if state.now.monotonic < run.stop.asked.monotonic + patience:
        return None
    return KillFabricManager(f"it did not end within {patience:g} s after SIGTERM")


def _running(state: State, run: Run) -> Action | None:
    if run.stop is not None:
        return _escalation(state, run)
    now = state.now.monotonic
    if run.configured is None and run.success is None and now >= start_deadline(state) and not is_blind(state):
        seconds = state.settings.fabric_manager.start_timeout_seconds
        return TerminateFabricManager(StopCause.START_TIMEOUT, f"the fabric was not configured within {seconds:g} s")
    if state.settings.fabric_manager.hang_policy == "restart" and is_hung(state, run):
        return TerminateFabricManager(StopCause.HANG, "the driver misses its heartbeat (MANAGER_TIMEOUT)")
    if state.nodes_for != nodes_key(state):
        return EnsureNodes()
    if state.is_installation_stale and not state.is_inspecting:
        return InspectInstallation()
    return None


def next_deadline(state: State) -> float:
    """The monotonic time at which ``TimePassed`` must be fed even if nothing happens."""
    run = state.run
    now = state.now.monotonic
    times = [host_due_at(state), driver_due_at(state), switch_deadline(state), bus_quiet_at(state)]
    times += [guests_due_at(state), guest_search_slow_at(state)]
    if state.is_loading:
        times.append(load_slow_at(state))
    if run is None:
        times += [time for time in (state.next_start_at, state.load_retry_at) if time is not None]
        if state.foreign:
            times.append(state.foreign_looked_at + FOREIGN_INTERVAL_SECONDS)
    else:
        times += [start_deadline(state), success_line_due_at(run), partitions_deadline(run)]
        if run.stop is not None and not run.stop.is_killed:
            times.append(run.stop.asked.monotonic + state.settings.fabric_manager.stop_timeout_seconds)
        if run.configured is not None and state.failures:
            times.append(run.configured.monotonic + state.settings.restart.reset_after_seconds)
    return min((time for time in times if time > now), default=now + 1.0)

"""The points in time that decisions depend on, in seconds of the monotonic clock."""

from fmsupervisor.core.state import Run, State

HOST_INTERVAL_SECONDS = 15.0  # safety net below the uevents; also finds a switch that fell off the bus silently
DRIVER_INTERVAL_SECONDS = 15.0  # when nothing is in motion
DRIVER_INTERVAL_BUSY_SECONDS = 0.25  # while Fabric Manager configures
DRIVER_INTERVAL_ALERT_SECONDS = 1.0  # while the driver misses heartbeats
FOREIGN_INTERVAL_SECONDS = 5.0
NEVER_COMES = float("inf")
GUEST_INTERVAL_SECONDS = 60.0
GUEST_INTERVAL_WAITED_FOR_SECONDS = 15.0  # while a guest must go, or a restart waits for that
GUEST_SEARCH_SLOW_SECONDS = 30.0
PARTITIONS_TOLD_SECONDS = 60.0  # after that, one that was started with --restart and not told them ends (user guide)
BUS_QUIET_SECONDS = 3.0  # a board that is plugged in appears function by function, its GPUs after its switches

_LOG_LAG_SECONDS = 5.0


def switch_deadline(state: State) -> float:
    """Until when missing switches are only waited for."""
    since = state.switch_wait_since
    if since is None:
        return NEVER_COMES  # none is missing, or the driver is not there yet
    return since + state.settings.switches.deadline_seconds


def bus_quiet_at(state: State) -> float:
    """Until when more functions of a board may be about to appear, which a loaded nvidia.ko would take."""
    return state.bus_changed_at + BUS_QUIET_SECONDS


def load_slow_at(state: State) -> float:
    """When a load of the module is called slow."""
    return state.load_began_at + state.settings.module.load_timeout_seconds


def start_deadline(state: State) -> float:
    """Until when Fabric Manager must have configured the fabric."""
    if state.run is None:
        return NEVER_COMES
    begun = state.run.adopted or state.run.started  # of one that was taken over nothing is known before
    return begun.monotonic + state.settings.fabric_manager.start_timeout_seconds


def success_line_due_at(run: Run) -> float:
    """Until when the log may be behind the driver with the success line."""
    if run.configured is None or run.success is not None:
        return NEVER_COMES
    return run.configured.monotonic + _LOG_LAG_SECONDS


def unmanaged_seconds(state: State, run: Run) -> float:
    """For how long the driver has been heard to say MANAGER_TIMEOUT; a look that failed says nothing."""
    return 0.0 if run.unmanaged_since is None else state.driver_heard_at - run.unmanaged_since


def is_hung(state: State, run: Run) -> bool:
    """Whether it has said so for longer than is tolerated."""
    tolerated = state.settings.fabric_manager.hang_seconds
    return run.unmanaged_since is not None and unmanaged_seconds(state, run) >= tolerated


def is_blind(state: State) -> bool:
    """Whether no witness of this run can be heard: neither the log nor the driver."""
    return bool(state.log_problem) and state.driver_view is None


def driver_interval(state: State) -> float:
    """How long the driver's last word is good for."""
    run = state.run
    if run is None:
        return DRIVER_INTERVAL_SECONDS
    if run.unmanaged_since is not None:
        return DRIVER_INTERVAL_ALERT_SECONDS
    if run.configured is None and state.now.monotonic < start_deadline(state):
        return DRIVER_INTERVAL_BUSY_SECONDS
    return DRIVER_INTERVAL_SECONDS


def driver_due_at(state: State) -> float:
    """When the driver must be asked again."""
    if state.host is None or not state.host.is_module_live:
        return NEVER_COMES
    return state.driver_observed_at + driver_interval(state)


def host_due_at(state: State) -> float:
    """When /sys and /proc must be read again."""
    return state.host_observed_at + HOST_INTERVAL_SECONDS


def guests_due_at(state: State) -> float:
    """When guests must be looked for again: at once when Fabric Manager has ended or has configured the fabric."""
    if state.is_looking_for_guests or state.host is None or not state.host.gpus or not state.seen_switches:
        return NEVER_COMES
    moments = (state.last_exit.at if state.last_exit else None, state.run.configured if state.run else None)
    if any(one is not None and state.guests_looked_at < one.monotonic for one in moments):
        return state.guests_looked_at
    is_waited_for = bool(state.guests_to_restart) or (state.run is None and bool(state.guests))
    interval = GUEST_INTERVAL_WAITED_FOR_SECONDS if is_waited_for else GUEST_INTERVAL_SECONDS
    return state.guests_looked_at + interval


def guest_search_slow_at(state: State) -> float:
    """When the search for guests that is under way is given up, for what is decided."""
    return state.guest_search_began_at + GUEST_SEARCH_SLOW_SECONDS if state.is_looking_for_guests else NEVER_COMES


def partitions_deadline(run: Run) -> float:
    """Until when the active partitions must be told."""
    if not run.is_resilient or run.partitions_told is not None:
        return NEVER_COMES
    return run.started.monotonic + PARTITIONS_TOLD_SECONDS

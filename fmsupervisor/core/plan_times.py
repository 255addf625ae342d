"""The points in time that decisions depend on, in seconds of the monotonic clock."""

from fmsupervisor.core.state import State

HOST_INTERVAL_SECONDS = 15.0  # safety net below the uevents; also finds a switch that fell off the bus silently
DRIVER_INTERVAL_SECONDS = 15.0  # when nothing is in motion
DRIVER_INTERVAL_BUSY_SECONDS = 0.25  # while Fabric Manager configures
DRIVER_INTERVAL_ALERT_SECONDS = 1.0  # while the driver misses heartbeats
FOREIGN_INTERVAL_SECONDS = 5.0
NEVER_COMES = float("inf")


def switch_deadline(state: State) -> float:
    """Until when missing switches are only waited for."""
    since = state.switch_wait_since
    if since is None:
        return state.begun.monotonic + state.settings.switches.deadline_seconds
    return since + state.settings.switches.deadline_seconds


def load_slow_at(state: State) -> float:
    """When a load of the module is called slow."""
    return state.load_began_at + state.settings.module.load_timeout_seconds


def start_deadline(state: State) -> float:
    """Until when Fabric Manager must have configured the fabric."""
    if state.run is None:
        return NEVER_COMES
    return state.run.started.monotonic + state.settings.fabric_manager.start_timeout_seconds


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

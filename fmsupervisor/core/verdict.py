"""The fabric state, from all witnesses (DESIGN decision 3).

Without a process, the state is the first thing that stands in the way of a start (``gate``), so that the state shown
and the action taken come from the same place. With a process:

    starting      executed, its log has not begun
    configuring   its log has begun, not all witnesses say configured
    configured    the log's success line and the driver's CONFIGURED on every usable switch
    degraded      was configured, or should be by now, and a witness denies it or a fault is known

Either of the two words may be missing for good: the log when it is full, silent or worded as never seen before; the
driver when its control node cannot be opened. Then the other decides, and a condition says so. The driver's word may be
left over from the Fabric Manager before (it believes in a dead one for 10 s), so without a success line it counts only
when the driver was seen to say otherwise during this run, or has had time to notice.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from fmsupervisor.conditions import REGISTRY, Code
from fmsupervisor.core import guests, switches
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
)
from fmsupervisor.core.diagnosis import blocking, problems
from fmsupervisor.core.plan_times import (
    FOREIGN_INTERVAL_SECONDS,
    GUEST_INTERVAL_WAITED_FOR_SECONDS,
    bus_quiet_at,
    start_deadline,
    switch_deadline,
)
from fmsupervisor.core.state import Run, State
from fmsupervisor.facts import DriverState, LoadedModule, Problem, Unknown

_DRIVER_NOTICES_SECONDS = 12.0  # heartbeat time-out 10 s, checked every second (nvswitch.c), and a margin


class FabricState(StrEnum):
    """What people, metrics and systemd are told."""

    WAITING_FOR_MODULE = "waiting-for-module"
    WAITING_FOR_SWITCHES = "waiting-for-switches"
    STARTING = "starting"
    CONFIGURING = "configuring"
    CONFIGURED = "configured"
    DEGRADED = "degraded"
    BACKOFF = "backoff"
    FAILED = "failed"
    NOT_APPLICABLE = "not-applicable"
    STOPPING = "stopping"


# Conditions that make a configured fabric a degraded one.
DEGRADING = frozenset(
    {
        Code.SWITCH_MISSING,
        Code.SWITCH_NOT_PROBED,
        Code.SWITCH_PASSED_THROUGH,
        Code.SWITCH_BLACKLISTED,
        Code.SWITCH_LOST,
        Code.SWITCH_NOT_RESPONDING,
        Code.SWITCH_UNCONFIGURED,
        Code.FABRIC_MANAGER_HUNG,
        Code.MANAGER_ERROR,
        Code.WITNESSES_DISAGREE,
        Code.SXID_FATAL,
        Code.INTERRUPT_STORM,
        Code.SWITCH_OVERHEATED,
        Code.GPU_LOST,
        Code.STALE_HANDLES,
        Code.GPU_RESET_NEEDED,
    }
)


# What wakes up a supervisor that is blocked by a condition that it derives anew each time.
_CURES_BY_GROUP = {
    "FMS-1": "the installed files",
    "FMS-2": "the installed files",
    "FMS-3": "the hardware",
    "FMS-4": "what is at that path",
    "FMS-5": "the settings or the installed files",
}
_CURES = {
    Code.RELOAD_NEEDED: "the loaded driver",
    Code.VERSION_MISMATCH: "the installed files or the loaded driver",
    Code.GPU_WOULD_BE_TAKEN: "the drivers of the GPUs or the settings",
    Code.CONFIG_UNWRITABLE: "the directory (tried again every 15 s)",
    Code.FOREIGN_FABRIC_MANAGER: "the process table (looked at every 5 s)",
    Code.RESTART_WITHHELD: "restart.policy, or a restart of the service",
}


@dataclass(frozen=True, slots=True)
class Gate:
    """What stands between the present and a running Fabric Manager, and the action that brings it nearer, if any."""

    state: FabricState
    reason: str
    action: Action | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The fabric state with its sentence. ``is_decided``: the outcome is known, good or bad."""

    state: FabricState
    reason: str
    is_decided: bool
    problems: tuple[Problem, ...]


def verdict(state: State) -> Verdict:
    """What is the case."""
    active = problems(state)
    fabric_state, reason = _with_process(state, state.run, active) if state.run else _without_process(state)
    return Verdict(fabric_state, reason, _is_decided(state, fabric_state, active), active)


def _is_decided(state: State, fabric_state: FabricState, active: tuple[Problem, ...]) -> bool:
    match fabric_state:
        case FabricState.CONFIGURED | FabricState.DEGRADED | FabricState.NOT_APPLICABLE | FabricState.FAILED:
            return True
        case FabricState.WAITING_FOR_SWITCHES:
            return state.now.monotonic >= switch_deadline(state)
        case FabricState.WAITING_FOR_MODULE:
            undecidable = (Code.MODULE_NOT_LOADED, Code.MODULE_LOAD_SLOW)
            return any(problem.code in undecidable for problem in active)
        case FabricState.BACKOFF | FabricState.STARTING | FabricState.CONFIGURING:
            is_overdue = state.now.monotonic >= start_deadline(state)
            return is_overdue or state.failures >= state.settings.restart.crash_loop_count
        case FabricState.STOPPING:
            return False


def is_confirmed(state: State, run: Run) -> bool:
    """Whether the witnesses agree that this run has configured the fabric."""
    driver = switches.is_configured_by_driver(state)
    if run.success is not None:
        return driver is not False
    if driver is not True:
        return False
    return run.is_driver_seen_unconfigured or (state.driver_heard_at - run.started.monotonic >= _DRIVER_NOTICES_SECONDS)


def _with_process(state: State, run: Run, active: tuple[Problem, ...]) -> tuple[FabricState, str]:
    if run.stop is not None:
        waiting = "killed" if run.stop.is_killed else "asked to end"
        return FabricState.STOPPING, f"Fabric Manager (pid {run.pid}) was {waiting} ({run.stop.cause})"
    degrading = [problem for problem in active if problem.code in DEGRADING]
    if run.configured is not None:
        if degrading:
            return FabricState.DEGRADED, _sentence(degrading[0], len(degrading) - 1)
        denying = switches.unconfigured(state)
        if denying:
            named = ", ".join(device.pci_bus_id for device in denying)
            return FabricState.DEGRADED, f"the driver no longer says configured of {named}"
        if run.is_driver_gone:
            return FabricState.DEGRADED, "the driver was unloaded, and has not been heard since"
        return FabricState.CONFIGURED, _configured_sentence(state, run)
    if state.now.monotonic >= start_deadline(state) and run.success is not None:
        return FabricState.DEGRADED, _sentence(degrading[0], 0) if degrading else "the witnesses disagree"
    if run.success is not None:
        named = ", ".join(device.pci_bus_id for device in switches.unconfigured(state))
        return FabricState.CONFIGURING, f"the log says configured, waiting for the driver to say so of {named}"
    if run.is_log_seen:
        patience = f"must be done within {state.settings.fabric_manager.start_timeout_seconds:g} s"
        return FabricState.CONFIGURING, f"Fabric Manager (pid {run.pid}) configures the NVSwitches; {patience}"
    return FabricState.STARTING, f"Fabric Manager (pid {run.pid}) was executed, its log has not begun"


def _configured_sentence(state: State, run: Run) -> str:
    count = sum(1 for device in switches.devices(state) if device.is_usable) or len(switches.working(state))
    registered = len(run.registered)
    gpus = "1 GPU" if registered == 1 else f"{registered} GPUs"
    return f"{count} NVSwitches configured, {gpus} registered"


def _sentence(problem: Problem, others: int) -> str:
    more = f" (and {others} more)" if others > 0 else ""
    return f"{problem.code} {REGISTRY[problem.code].title}: {problem.detail}{more}"


def _without_process(state: State) -> tuple[FabricState, str]:
    if state.is_stopping:
        return FabricState.STOPPING, "stopping"
    now = gate(state)
    return now.state, now.reason


def gate(state: State) -> Gate:
    """The first thing that stands in the way of starting Fabric Manager."""
    host = state.host
    if host is None:
        return Gate(FabricState.WAITING_FOR_MODULE, state.host_unknown or "looking at the hardware")
    if not switches.is_applicable(state):
        return Gate(FabricState.NOT_APPLICABLE, "this machine has no NVSwitch")
    if host.nvlink5_bridges and not host.switches:
        return _blocked(state)
    for step in (_installation_gate, _config_gate, _foreign_gate, _module_gate, _switch_gate, _node_gate, _start_gate):
        found = step(state)
        if found is not None:
            return found
    raise AssertionError("the last gate always answers")


def _blocked(state: State) -> Gate:
    problem = blocking(state)
    if problem is None:
        return Gate(FabricState.FAILED, "blocked")
    block = next((block for block in state.blocks if block.problem == problem), None)
    cure = " or ".join(block.aspects) if block else _CURES.get(problem.code, _CURES_BY_GROUP[problem.code[:5]])
    if problem.code == Code.RESTART_WITHHELD and state.settings.restart.policy == "when-no-guests":
        cure = f"the guests (looked for every {GUEST_INTERVAL_WAITED_FOR_SECONDS:g} s) or {cure}"
    return Gate(FabricState.FAILED, f"{_sentence(problem, 0)}; waits for a change of {cure}")


def _installation_gate(state: State) -> Gate | None:
    is_blocked = state.installation is not None and blocking(state) is not None and not _can_unblock(state)
    is_known = state.installation is not None and not state.is_installation_stale and not state.is_inspecting
    if is_known:
        return _blocked(state) if is_blocked else None
    action = None if state.is_inspecting else InspectInstallation()
    if is_blocked:
        return replace(_blocked(state), action=action)
    return Gate(FabricState.WAITING_FOR_MODULE, "reading the installed driver and Fabric Manager", action)


def _can_unblock(state: State) -> bool:
    """Whether a later gate has a look to take that may clear the blocking problem by itself."""
    problem = blocking(state)
    if problem is None:
        return True
    if problem.code == Code.FOREIGN_FABRIC_MANAGER:
        return state.now.monotonic >= state.foreign_looked_at + FOREIGN_INTERVAL_SECONDS
    if problem.code in (Code.NODE_CONFLICT, Code.NODE_FAILED):
        return state.nodes_for != nodes_key(state)
    if problem.code in (Code.CONFIG_KEY_UNKNOWN, Code.CONFIG_UNWRITABLE):
        return state.config_for != config_key(state)
    return False


def config_key(state: State) -> object:
    """What the rendered configuration depends on."""
    installation = state.installation
    return (state.settings, installation.fingerprint if installation else None)


def _config_gate(state: State) -> Gate | None:
    if state.config is not None and state.config_for == config_key(state):
        return None
    version = state.installation.fabric_manager_version if state.installation else None
    return Gate(FabricState.WAITING_FOR_MODULE, "preparing Fabric Manager's configuration", PrepareConfig(version))


def _foreign_gate(state: State) -> Gate | None:
    if state.now.monotonic < state.foreign_looked_at + FOREIGN_INTERVAL_SECONDS:
        return _blocked(state) if blocking(state) and not _can_unblock(state) else None
    return Gate(FabricState.WAITING_FOR_MODULE, "looking for another Fabric Manager", LookForForeign())


def _module_gate(state: State) -> Gate | None:
    module = state.host.module if state.host else None
    waiting = FabricState.WAITING_FOR_MODULE
    if state.is_loading:
        return Gate(waiting, "loading nvidia.ko")
    match module:
        case LoadedModule(initstate="live"):
            return None
        case LoadedModule(initstate=phase):
            return Gate(waiting, f"nvidia.ko is {phase}")
        case Unknown(reason=reason):
            return Gate(waiting, f"cannot see whether nvidia.ko is loaded: {reason}")
        case None:
            pass
    if not state.settings.module.load:
        return Gate(waiting, "nvidia.ko is not loaded and module.load is false")
    if state.load_retry_at is not None and state.now.monotonic < state.load_retry_at:
        detail = state.load_problem.detail if state.load_problem else "it was loaded a moment ago and is gone"
        return Gate(waiting, f"will load nvidia.ko again: {detail}")
    return _load_gate(state)


def _load_gate(state: State) -> Gate:
    waiting = FabricState.WAITING_FOR_MODULE
    if state.installation is not None and not state.installation.is_module_checked:  # one was live then
        return Gate(waiting, "reading nvidia.ko anew, to load it", InspectInstallation())
    choice = state.installation.module if state.installation else None
    if choice is None:
        return Gate(waiting, "no nvidia.ko was chosen")
    if state.now.monotonic < bus_quiet_at(state):
        return Gate(waiting, "loads nvidia.ko when no more PCI functions appear")
    parameters = state.settings.module.parameters
    if state.settings.module.gpu_guard == "no-register":
        parameters = (*parameters, "NVreg_RegisterPCIDriver=0")
    return Gate(waiting, f"loading {choice.path}", LoadModule(choice, parameters, choice.reason))


def _switch_gate(state: State) -> Gate | None:
    expected = switches.expected(state)
    working = switches.working(state)
    if len(working) >= max(expected, 1):
        return None
    listing = f"{len(working)} of {expected} NVSwitches are ready"
    unready = [one.pci_bus_id for one in switches.present(state) if one.pci_bus_id not in working]
    if unready:
        listing += f"; not ready: {', '.join(unready)}"
    if state.now.monotonic < switch_deadline(state):
        policy = state.settings.switches
        what = f"waits for {policy.deadline_seconds:g} s, then switches.when_missing ({policy.when_missing}) applies"
        return Gate(FabricState.WAITING_FOR_SWITCHES, f"{listing}; {what}")
    match state.settings.switches.when_missing:
        case "start-anyway" if working:
            return None
        case "fail":
            cure = "waits for a change of the NVSwitches on the bus or the settings"
            reason = f"{Code.SWITCH_MISSING} {listing} and switches.when_missing is fail; {cure}"
            return Gate(FabricState.FAILED, reason)
        case _:
            return Gate(FabricState.WAITING_FOR_SWITCHES, f"{Code.SWITCH_MISSING} {listing}, after the deadline")


def nodes_key(state: State) -> object:
    """What the device nodes depend on."""
    host = state.host
    if host is None:
        return None
    minors = tuple((device.pci_bus_id, device.minor) for device in switches.devices(state))
    return (tuple(sorted(host.majors.items())), host.probed_switches, host.fabric_management_minor, minors)


def _node_gate(state: State) -> Gate | None:
    if state.driver is None:
        return Gate(FabricState.STARTING, "making the device nodes", _first_look_at_driver(state))
    if state.nodes_for != nodes_key(state):
        return Gate(FabricState.STARTING, "making the device nodes", EnsureNodes())
    return _blocked(state) if blocking(state) else None


def _first_look_at_driver(state: State) -> Action:
    """The control node comes first: the driver is asked through it which minor each switch has."""
    return EnsureNodes() if state.nodes_for != nodes_key(state) else ObserveDriver()


def _start_gate(state: State) -> Gate:
    if state.has_orphans:
        return Gate(FabricState.BACKOFF, "ending what the last Fabric Manager left behind")
    if guests.is_death_undecided(state):
        return Gate(FabricState.BACKOFF, "looking for guests that hold GPUs, before Fabric Manager is restarted")
    if state.failures and state.next_start_at is None:
        return Gate(FabricState.BACKOFF, "choosing a pause", DrawBackoff(state.failures))
    if state.next_start_at is not None and state.now.monotonic < state.next_start_at:
        reason = state.last_exit.reason if state.last_exit else "the last start failed"
        times = f"{state.failures} times in a row" if state.failures > 1 else "once"
        return Gate(
            FabricState.BACKOFF,
            f"Fabric Manager died {times}; the next start follows a pause of {state.backoff_seconds:.1f} s; {reason}",
        )
    reason = f"all {len(switches.working(state))} NVSwitches are ready"
    if state.failures:
        reason = f"restart number {state.failures} in a row; {reason}"
    return Gate(FabricState.STARTING, "executing Fabric Manager", StartFabricManager(_is_resilient(state), reason))


def _is_resilient(state: State) -> bool:
    """Whether Fabric Manager is to resume from its state file, if that can be used.

    Only after one that ran since the driver was loaded: the driver's states tell it, and not STANDBY or OFFLINE, which
    they are in after a boot. A file from before would bring back partitions of a fabric that is no more.
    """
    settings = state.settings.fabric_manager
    if not settings.resiliency_restart or settings.fabric_mode not in (1, 2) or state.driver_view is None:
        return False
    idle = (DriverState.STANDBY, DriverState.OFFLINE)
    return any(device.is_usable and device.driver_state not in idle for device in switches.devices(state))

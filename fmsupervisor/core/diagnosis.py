"""Which conditions hold now. Derived from the state each time, so that a cured one disappears by itself."""

from collections.abc import Iterator
from typing import Any

from fmsupervisor.conditions import REGISTRY, Code
from fmsupervisor.core import guests, switches
from fmsupervisor.core.plan_times import (
    is_hung,
    load_slow_at,
    partitions_deadline,
    start_deadline,
    success_line_due_at,
    switch_deadline,
    unmanaged_seconds,
)
from fmsupervisor.core.state import ExitClass, Run, State
from fmsupervisor.core.versions import version_problems
from fmsupervisor.facts import DriverState, LoadedModule, Problem

# Why the driver has blacklisted a switch (NVSWITCH_DEVICE_BLACKLIST_REASON, ioctl_nvswitch.h).
_BLACKLIST_REASONS = (
    "no reason given",
    "manually, out of band",
    "manually, in band",
    "manually, its peer",
    "trunk link failure",
    "trunk link failure of its peer",
    "access link failure",
    "access link failure of its peer",
    "unspecified device failure",
    "unspecified device failure of its peer",
)

_NOTICED_AT_ONCE = frozenset({"hang_policy", "ready_when"})


def problems(state: State) -> tuple[Problem, ...]:
    """All active conditions, the most serious first; one per code and subject."""
    if switches.is_applicable(state) is False:
        found = [*_hardware_reading(state), *state.service_problems.values()]
    else:
        found = [
            *_hardware_reading(state),
            *(block.problem for block in state.blocks),
            *_installation(state),
            *_module(state),
            *_switches(state),
            *_nodes(state),
            *_fabric_manager(state),
            *_driver(state),
            *(latched.problem for latched in state.latched.values()),
            *guests.guest_problems(state),
            *_log(state),
            *_kernel_log(state),
            *_settings(state),
            *state.service_problems.values(),
        ]
    unique = {(problem.code, problem.subject): problem for problem in reversed(found)}
    order = {"critical": 0, "warning": 1, "info": 2}
    return tuple(sorted(unique.values(), key=lambda problem: (order[REGISTRY[problem.code].severity], problem.code)))


def blocking(state: State) -> Problem | None:
    """The problem that forbids starting Fabric Manager now, or None."""
    held = {(block.problem.code, block.problem.subject) for block in state.blocks}
    for problem in problems(state):
        if REGISTRY[problem.code].blocks_start or (problem.code, problem.subject) in held:
            return problem
    return None


def _hardware_reading(state: State) -> Iterator[Problem]:
    if state.host_unknown:
        yield Problem(Code.HARDWARE_UNOBSERVABLE, state.host_unknown)
    if state.host is not None:
        yield from state.host.problems


def _installation(state: State) -> Iterator[Problem]:
    installation = state.installation
    if installation is None:
        return
    module = state.host.module if state.host else None
    is_live = isinstance(module, LoadedModule) and module.initstate == "live"
    for problem in installation.problems:
        # A driver that is live needs no module file.
        if not (is_live and problem.code.startswith("FMS-2")):
            yield problem
    loaded = module.version if isinstance(module, LoadedModule) else None
    yield from version_problems(installation, loaded)


def _module(state: State) -> Iterator[Problem]:
    host = state.host
    settings = state.settings.module
    if state.load_problem is not None:  # holds until a load succeeds, also during the next try
        yield state.load_problem
    if state.is_loading:  # /sys/module/nvidia may exist by then
        if state.now.monotonic >= load_slow_at(state):
            elapsed = state.now.monotonic - state.load_began_at
            yield Problem(Code.MODULE_LOAD_SLOW, f"loading for {elapsed:.0f} s")
        return
    if host is None or host.module is not None:
        return
    if not settings.load:
        yield Problem(Code.MODULE_NOT_LOADED, "module.load = false and /sys/module/nvidia does not exist")
        return
    free = [gpu.pci_bus_id for gpu in host.gpus if gpu.driver is None]
    if free and settings.gpu_guard == "refuse":
        yield Problem(Code.GPU_WOULD_BE_TAKEN, f"no driver is bound to {', '.join(free)}")


def _switches(state: State) -> Iterator[Problem]:
    host = state.host
    if host is None:
        return
    if host.nvlink5_bridges and not host.switches:
        yield Problem(Code.NVLINK5_UNSUPPORTED, f"NVLink 5 bridge at {', '.join(host.nvlink5_bridges)}")
    for switch in host.switches:
        bus_id = switch.pci_bus_id
        if switch.responds is False:
            yield Problem(Code.SWITCH_NOT_RESPONDING, f"{bus_id} reads ff", bus_id)
        elif switch.driver not in (None, switches.SWITCH_DRIVER):
            yield Problem(Code.SWITCH_PASSED_THROUGH, f"{bus_id} is bound to {switch.driver}", bus_id)
    yield from _missing_switches(state)
    if state.settings.switches.gpus_belong_to_guests:
        for gpu in host.gpus:
            if gpu.driver == switches.GPU_DRIVER:
                yield Problem(Code.GPU_TAKEN, f"{gpu.pci_bus_id} is bound to {gpu.driver}", gpu.pci_bus_id)


def _missing_switches(state: State) -> Iterator[Problem]:
    expected = switches.expected(state)
    on_bus = [switch.pci_bus_id for switch in switches.present(state)]
    working = switches.working(state)
    silent = {switch.pci_bus_id for switch in switches.present(state) if switch.responds is False}
    lost = sorted(state.working_switches - set(working) - silent)
    for bus_id in lost:
        what = "lost its driver" if bus_id in on_bus else "is no longer on the bus"
        yield Problem(Code.SWITCH_LOST, f"{bus_id} {what}", bus_id)
    if state.now.monotonic < switch_deadline(state):
        return
    missing = expected - len(on_bus) - sum(1 for bus_id in lost if bus_id not in on_bus)
    if missing > 0:
        listing = ", ".join(on_bus) or "none"
        yield Problem(Code.SWITCH_MISSING, f"{len(on_bus)} of {expected} NVSwitches are on the bus: {listing}")
    for bus_id in on_bus:
        if state.host and state.host.is_module_live and bus_id not in {*working, *lost, *silent}:
            yield Problem(Code.SWITCH_NOT_PROBED, f"{bus_id} is not bound to {switches.SWITCH_DRIVER}", bus_id)
    if state.run is not None and state.run.stop is None and len(working) < expected and not (lost or silent):
        yield Problem(Code.STARTED_WITH_FEWER_SWITCHES, f"{len(working)} of {expected} NVSwitches work")


def _nodes(state: State) -> Iterator[Problem]:
    for result in state.nodes:
        if result.outcome == "refused":
            yield Problem(Code.NODE_CONFLICT, f"{result.node.path}: {result.detail}", result.node.path)
        elif result.outcome == "failed":
            yield Problem(Code.NODE_FAILED, f"{result.node.path}: {result.detail}", result.node.path)


def _fabric_manager(state: State) -> Iterator[Problem]:
    if state.config is not None:
        yield from state.config.problems
    if state.run is None and state.foreign:
        listing = "; ".join(found.description for found in state.foreign)
        yield Problem(Code.FOREIGN_FABRIC_MANAGER, listing)
    if state.failures >= state.settings.restart.crash_loop_count and state.last_exit:
        yield Problem(Code.CRASH_LOOP, f"{state.failures} deaths in a row; the last: {state.last_exit.reason}")
    last = state.last_exit
    if last and last.exit_class is ExitClass.UNEXPECTED and state.failures and not _has_configured_since(state):
        yield Problem(Code.FABRIC_MANAGER_DIED, last.reason)
        if withholding := guests.withholding(state):
            yield Problem(Code.RESTART_WITHHELD, f"{withholding}; {last.reason}")


def _has_configured_since(state: State) -> bool:
    return state.run is not None and state.run.configured is not None


def _driver(state: State) -> Iterator[Problem]:
    run = state.run
    if state.driver_unknown and state.host and state.host.is_module_live:
        yield Problem(Code.DRIVER_UNOBSERVABLE, state.driver_unknown)
    for device in switches.devices(state):
        if not device.is_usable:
            reason = dict(enumerate(_BLACKLIST_REASONS)).get(device.device_reason, f"reason {device.device_reason}")
            yield Problem(Code.SWITCH_BLACKLISTED, f"{device.pci_bus_id}: {reason}", device.pci_bus_id)
        if run is not None and device.driver_state is DriverState.MANAGER_ERROR:
            yield Problem(Code.MANAGER_ERROR, f"{device.pci_bus_id} is in MANAGER_ERROR", device.pci_bus_id)
    if run is not None and run.stop is None:
        yield from _management(state, run)


def _management(state: State, run: Run) -> Iterator[Problem]:
    """What the driver and the log say about the running Fabric Manager."""
    if run.is_resilient and run.partitions_told is None and state.now.monotonic < partitions_deadline(run):
        yield Problem(Code.PARTITIONS_AWAITED, f"pid {run.pid} waits for them for 60 s after its start")
    if is_hung(state, run):
        seconds = unmanaged_seconds(state, run)
        yield Problem(
            Code.FABRIC_MANAGER_HUNG, f"the driver has missed its heartbeat for {seconds:.0f} s (pid {run.pid})"
        )
    if run.configured is not None:
        if state.now.monotonic >= success_line_due_at(run):
            yield Problem(Code.SUCCESS_LINE_UNSEEN, "no success line in the log since its start")
        for device in switches.unconfigured(state):
            if device.driver_state in (DriverState.STANDBY, DriverState.OFFLINE):
                name = DriverState(device.driver_state).name
                yield Problem(Code.SWITCH_UNCONFIGURED, f"{device.pci_bus_id} is in {name}", device.pci_bus_id)
    elif state.now.monotonic >= start_deadline(state) and run.success is not None:
        listing = ", ".join(device.pci_bus_id for device in switches.unconfigured(state))
        yield Problem(Code.WITNESSES_DISAGREE, f"the driver does not say configured of {listing}")


def _log(state: State) -> Iterator[Problem]:
    if state.log_problem and state.run is not None:
        yield Problem(Code.LOG_UNREADABLE, state.log_problem)
    config = state.config
    if config is None or not config.can_log_stop or state.log_size_bytes is None:
        return
    if state.log_size_bytes >= config.log_limit_bytes:
        yield Problem(Code.LOG_FULL, f"{config.log_file} has {state.log_size_bytes} bytes")


def _kernel_log(state: State) -> Iterator[Problem]:
    if state.kernel_log_problem:
        yield Problem(Code.KERNEL_LOG_UNREADABLE, state.kernel_log_problem)
    for told in state.kernel_problems.values():
        # The driver's own word on a blacklisting, when it can be had, is the better one.
        if told.problem.code != Code.SWITCH_BLACKLISTED or state.driver_view is None:
            yield told.problem


def _settings(state: State) -> Iterator[Problem]:
    manager = state.run.settings if state.run else None
    changed = _changed_keys("fabric_manager", manager, state.settings.fabric_manager)
    if changed:
        yield Problem(Code.RESTART_NEEDED, f"for Fabric Manager: {', '.join(changed)}", "Fabric Manager")
    first = state.first_settings or state.settings
    changed = [
        *_changed_keys("service", first.service, state.settings.service),
        *_changed_keys("metrics", first.metrics, state.settings.metrics),
    ]
    if changed:
        yield Problem(Code.RESTART_NEEDED, f"for fmsupervisor: {', '.join(changed)}", "fmsupervisor")


def _changed_keys(table: str, before: object | None, after: Any) -> list[str]:
    """The keys that whoever was started with ``before`` does not notice."""
    if before is None:
        return []
    noticed = {name for name in after.__slots__ if name.endswith("_seconds") or name in _NOTICED_AT_ONCE}
    names = [name for name in after.__slots__ if name not in noticed]
    return [f"{table}.{name}" for name in names if getattr(before, name) != getattr(after, name)]

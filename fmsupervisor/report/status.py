"""The status document: one value for ``status --json``, the terminal, and other programs.

It is written to a file that is replaced atomically, so that it can be read without asking the daemon.
"""

import os
from collections.abc import Iterator, Mapping

from fmsupervisor import __version__
from fmsupervisor.conditions import REGISTRY, Code
from fmsupervisor.core import guests, link_history, switches
from fmsupervisor.core.state import NEVER, State
from fmsupervisor.core.verdict import FabricState, Verdict
from fmsupervisor.facts import DeviceState, DriverState, LoadedModule, SwitchErrorKey, Unknown
from fmsupervisor.report.status_text import SCHEMA, Document


def status_document(
    state: State, verdict: Verdict, since_wall: float, conditions_since: Mapping[tuple[str, str], float]
) -> Document:
    """Everything that is known, as JSON values. Times are Unix seconds. ``since_wall``: of the present state."""
    return {
        "schema": SCHEMA,
        "version": __version__,
        "pid": os.getpid(),
        "started_at": state.begun.wall,
        "updated_at": state.now.wall,
        "state": str(verdict.state),
        "reason": verdict.reason,
        "since": since_wall,
        "ready": verdict.state is FabricState.CONFIGURED,
        "decided": verdict.is_decided,
        "session": state.run.session if state.run else None,
        "steps": list(_steps(state, verdict)),
        "switches": list(_switch_rows(state)),
        "links": list(_link_rows(state)),
        "gpus": list(_gpu_rows(state)),
        "guests": list(_guest_rows(state)),
        "guests_unknown": _guests_unknown(state),
        "device_nodes": [
            {"path": result.node.path, "outcome": result.outcome, "detail": result.detail} for result in state.nodes
        ],
        "fabric_manager": _fabric_manager(state),
        "conditions": [
            {
                "code": str(problem.code),
                "severity": str(REGISTRY[problem.code].severity),
                "title": REGISTRY[problem.code].title,
                "detail": problem.detail,
                "subject": problem.subject,
                "remedy": REGISTRY[problem.code].remedy,
                "since": conditions_since.get((problem.code, problem.subject), state.now.wall),
            }
            for problem in verdict.problems
        ],
        "kernel_log": {
            "readable": state.is_kernel_log_read and not state.kernel_log_problem,
            "problem": state.kernel_log_problem,
            "lost": state.counters.kernel_lost,
        },
        "counters": _counters(state),
    }


_SWITCH_FAULTS = frozenset(
    {
        Code.SWITCH_MISSING,
        Code.SWITCH_NOT_PROBED,
        Code.SWITCH_PASSED_THROUGH,
        Code.SWITCH_BLACKLISTED,
        Code.SWITCH_LOST,
        Code.SWITCH_NOT_RESPONDING,
        Code.SWITCH_UNCONFIGURED,
    }
)


def _steps(state: State, verdict: Verdict) -> Iterator[Document]:
    """The chain, one row per step: ok, waiting, failed, unknown or skipped."""
    if verdict.state is FabricState.NOT_APPLICABLE:
        yield {"name": "hardware", "status": "ok", "detail": verdict.reason}
        return
    yield _installation_step(state, verdict)
    yield _module_step(state, verdict)
    yield _switch_step(state, verdict)
    yield _node_step(state)
    yield _config_step(state, verdict)
    yield _process_step(state, verdict)
    yield _fabric_step(verdict)


def _step(name: str, status: str, detail: str) -> Document:
    return {"name": name, "status": status, "detail": detail}


def _first(verdict: Verdict, *prefixes: str) -> str | None:
    """The detail of the first active condition whose code begins so and that forbids a start."""
    for problem in verdict.problems:
        if problem.code.startswith(prefixes) and REGISTRY[problem.code].blocks_start:
            return f"{problem.code} {problem.detail}"
    return None


def _installation_step(state: State, verdict: Verdict) -> Document:
    problem = _first(verdict, "FMS-1")
    if problem:
        return _step("installation", "failed", problem)
    found = state.installation
    if found is None:
        return _step("installation", "waiting", "reading")
    module = found.module.version if found.module else "?"
    return _step(
        "installation",
        "ok",
        f"module file {module}, Fabric Manager {found.fabric_manager_version or '?'}, NSCQ {found.nscq_version or '?'}",
    )


def _module_step(state: State, verdict: Verdict) -> Document:
    problem = _first(verdict, "FMS-2")
    if problem:
        return _step("module", "failed", problem)
    match state.host.module if state.host else None:
        case LoadedModule(initstate="live", version=version):
            return _step("module", "ok", f"nvidia {version or 'of unknown version'} is live")
        case LoadedModule(initstate=phase):
            return _step("module", "waiting", f"nvidia is {phase}")
        case Unknown(reason=reason):
            return _step("module", "unknown", reason)
        case _:
            return _step("module", "waiting", "loading" if state.is_loading else "not loaded")


def _switch_step(state: State, verdict: Verdict) -> Document:
    working, expected = len(switches.working(state)), switches.expected(state)
    faulty = next((problem for problem in verdict.problems if problem.code in _SWITCH_FAULTS), None)
    detail = f"{working} of {expected} bound and probed"
    if faulty is not None:
        return _step("switches", "failed", f"{detail}; {faulty.code} {faulty.detail}")
    return _step("switches", "ok" if working >= max(expected, 1) else "waiting", detail)


def _node_step(state: State) -> Document:
    bad = [result for result in state.nodes if result.outcome in ("refused", "failed")]
    if bad:
        return _step("device-nodes", "failed", f"{bad[0].node.path}: {bad[0].detail}")
    is_done = bool(state.nodes or state.nodes_for)
    return _step("device-nodes", "ok" if is_done else "waiting", f"{len(state.nodes)} nodes right")


def _config_step(state: State, verdict: Verdict) -> Document:
    problem = _first(verdict, "FMS-501", "FMS-502", "FMS-504")
    if problem:
        return _step("fm-configuration", "failed", problem)
    if state.config is None:
        return _step("fm-configuration", "waiting", "not rendered yet")
    return _step("fm-configuration", "ok", f"{state.config.path}, {len(state.config.differences)} keys changed")


def _process_step(state: State, verdict: Verdict) -> Document:
    if state.run is not None:
        return _step("fabric-manager", "ok", f"pid {state.run.pid}, session {state.run.session}")
    if verdict.state in (FabricState.FAILED, FabricState.BACKOFF):
        return _step("fabric-manager", "failed", "not running")
    return _step("fabric-manager", "waiting", "not running")


def _fabric_step(verdict: Verdict) -> Document:
    match verdict.state:
        case FabricState.CONFIGURED:
            status = "ok"
        case FabricState.DEGRADED | FabricState.FAILED | FabricState.BACKOFF:
            status = "failed"
        case _:
            status = "waiting"
    return _step("fabric", status, str(verdict.state))


def _switch_rows(state: State) -> Iterator[Document]:
    if state.host is None:
        return
    on_bus = {switch.pci_bus_id: switch for switch in state.host.switches}
    devices = {device.pci_bus_id: device for device in switches.devices(state)}
    for bus_id in sorted(state.seen_switches):
        switch, device = on_bus.get(bus_id), devices.get(bus_id)
        yield {
            "pci_bus_id": bus_id,
            "present": switch is not None,
            "driver": switch.driver if switch else None,
            "usable": device.is_usable if device else None,
            "minor": device.minor if device else None,
            "physical_id": device.physical_id if device else None,
            "uuid": device.uuid if device else None,
            "driver_state": _name(device.driver_state) if device else None,
            "device_state": _name(device.device_state) if device else None,
        }


def _link_rows(state: State) -> Iterator[Document]:
    """Links with errors within a day, the worst first."""
    last_hour = link_history.errors_within(state, link_history.HOUR_SECONDS)
    last_day = link_history.errors_within(state, link_history.DAY_SECONDS)
    faults = link_history.faults_within(state, link_history.DAY_SECONDS)

    def worst_first(link: tuple[str, int]) -> tuple[int, int, int, tuple[str, int]]:
        return -last_hour.get(link, 0), -faults.get(link, 0), -last_day.get(link, 0), link

    for link in sorted({*last_day, *faults}, key=worst_first):
        bus_id, port = link
        yield {
            "pci_bus_id": bus_id,
            "port": port,
            "last_hour": last_hour.get(link, 0),
            "last_day": last_day.get(link, 0),
            "fatal_last_day": faults.get(link, 0),
        }


def _name(state: DriverState | DeviceState | int) -> str:
    return str(state) if isinstance(state, int) else state.name


def _gpu_rows(state: State) -> Iterator[Document]:
    registered = {state.gpu_buses.get(uuid, bus) for uuid, bus in state.run.registered.items()} if state.run else set()
    lost = {state.gpu_buses.get(uuid, "") for uuid in state.lost_registrations}
    holders = {gpu: guest for guest in state.guests for gpu in guest.gpus}
    to_restart = {gpu for guest in guests.to_restart(state) for gpu in guest.gpus}
    to_reset = guests.gpus_to_reset(state)
    for gpu in state.host.gpus if state.host else ():
        yield {
            "pci_bus_id": gpu.pci_bus_id,
            "driver": gpu.driver,
            "module_id": state.module_ids.get(gpu.pci_bus_id),
            "module_id_source": _module_id_source(state, gpu.pci_bus_id),
            "registered": gpu.pci_bus_id in registered,
            "registration_lost": gpu.pci_bus_id in lost,
            "guest": holders[gpu.pci_bus_id].name if gpu.pci_bus_id in holders else None,
            "guest_restart_required": gpu.pci_bus_id in to_restart,
            "gpu_reset_required": gpu.pci_bus_id in to_reset,
        }


def _guest_rows(state: State) -> Iterator[Document]:
    to_restart = guests.to_restart(state)
    for guest in state.guests:
        yield {
            "pid": guest.pid,
            "name": guest.name,
            "gpus": list(guest.gpus),
            "started_at": state.now.wall - (state.now.monotonic - guest.started),
            "restart_required": guest in to_restart,
        }


def _guests_unknown(state: State) -> str:
    """Why there may be other guests than those listed; "" when there are none."""
    return guests.why_unknown(state) or ("not looked for yet" if state.guests_looked_at == NEVER else "")


def _module_id_source(state: State, bus_id: str) -> str:
    """Learned from Fabric Manager's log, now or by an earlier run; or why there is none."""
    if bus_id in state.module_ids:
        return "learned"
    return "contradictory" if bus_id in state.contradicted_modules else "unknown"


def _fabric_manager(state: State) -> Document:
    run, last = state.run, state.last_exit
    installed = state.installation.fabric_manager_version if state.installation else None
    pause = None if state.next_start_at is None else max(0.0, state.next_start_at - state.now.monotonic)
    return {
        "pid": run.pid if run else None,
        "version": (run.version if run else None) or installed,
        "fabric_mode": state.settings.fabric_manager.fabric_mode,
        "session": run.session if run else None,
        "started_at": run.started.wall if run else None,
        "configured_at": run.configured.wall if run and run.configured else None,
        "gpus_registered": len(run.registered) if run else 0,
        "resilient": run.is_resilient if run else None,
        "partitions_told_at": run.partitions_told.wall if run and run.partitions_told else None,
        "log_file": state.config.log_file if state.config else None,
        "starts": state.counters.starts,
        "failures_in_a_row": state.failures,
        "exits": {str(name): count for name, count in state.counters.exits.items()},
        "last_exit": {
            "session": last.session,
            "class": str(last.exit_class),
            "status": last.status.code,
            "signal": last.status.signal,
            "at": last.at.wall,
            "reason": last.reason,
            "last_lines": list(last.last_lines),
            "configured_at": last.configured.wall if last.configured else None,
        }
        if last
        else None,
        "backoff_seconds": pause,
        "next_start_at": None if pause is None else state.now.wall + pause,
        "config_differences": list(state.config.differences) if state.config else [],
    }


def _counters(state: State) -> Document:
    counters = state.counters
    return {
        "log_lines": dict(counters.log_lines),
        "unrecognised": counters.log_unrecognised,
        "stale_handles": counters.stale_handles,
        "switch_errors": _switch_errors(counters.switch_errors),
        "switch_errors_before_start": _switch_errors(counters.switch_errors_before_start),
    }


def _switch_errors(errors: Mapping[SwitchErrorKey, int]) -> list[Document]:
    return [
        {
            "pci_bus_id": key.pci_bus_id,
            "sxid": key.sxid,
            "severity": key.severity,
            "port": key.port,
            "count": count,
        }
        for key, count in errors.items()
    ]

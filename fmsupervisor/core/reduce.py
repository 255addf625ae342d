"""Fold one event into the state. Total: every event is accepted in every state.

An observation that failed changes nothing but the note that it failed: lost observability neither sets nor clears a
fault.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import assert_never

from fmsupervisor.conditions import Code
from fmsupervisor.core import actions, events, restart, switches
from fmsupervisor.core.guests import guests_found, note_guests
from fmsupervisor.core.host_facts import with_unread_parts
from fmsupervisor.core.kernel_facts import read_kernel, release_kernel_problems
from fmsupervisor.core.log_facts import bounded_gpus, read_log
from fmsupervisor.core.module_map import recall
from fmsupervisor.core.state import (
    LOAD_CURES,
    NEVER,
    Block,
    Exit,
    ExitClass,
    Latched,
    Run,
    State,
    Stop,
    aspect_values,
    is_cured,
    make_block,
)
from fmsupervisor.core.verdict import config_key, is_confirmed, nodes_key
from fmsupervisor.facts import DriverState, Host, Moment, Problem, Unknown

_RETRIED_LOAD_FAILURES = frozenset({Code.MODULE_LOAD_BUSY})
_LOAD_RETRY_SECONDS = 5.0
_LONGEST_LOAD_RETRY_SECONDS = 60.0
_LATCHED_FOR_GOOD = frozenset(
    {Code.SXID_FATAL, Code.STALE_HANDLES, Code.GPU_RESET_NEEDED, Code.GPU_LOST, Code.GPU_NVLINK_ERROR}
)


def reduce(state: State, event: events.Event, now: Moment) -> State:
    """The state after ``event`` at ``now``."""
    state = _apply(replace(state, now=now), event)
    state = _release_blocks(state)
    state = release_kernel_problems(state)
    state = _note_switch_wait(state)
    return note_guests(_note_configured(state))


def _apply(state: State, event: events.Event) -> State:  # noqa: C901, PLR0912 - one line per event
    match event:
        case events.TimePassed():
            return state
        case events.HostObserved(host=host):
            return _host_observed(state, host)
        case events.HostMayHaveChanged():
            return _host_may_have_changed(state)
        case events.PathsChanged(paths=paths):
            return _paths_changed(state, paths)
        case events.InstallationInspected(installation=installation):
            return replace(state, installation=installation, is_inspecting=False)
        case events.ModuleLoadEnded(problem=problem):
            return _module_load_ended(state, problem)
        case events.DriverObserved():
            return _driver_observed(state, event)
        case events.NodesEnsured(results=results):
            has_changed = any(result.outcome != "kept" for result in results)
            asked_at = NEVER if has_changed else state.driver_observed_at
            return replace(state, nodes=results, nodes_for=nodes_key(state), driver_observed_at=asked_at)
        case events.ConfigPrepared(config=config):
            return replace(state, config=config, config_for=config_key(state))
        case events.ForeignLookedFor(foreign=foreign):
            return replace(state, foreign=foreign, foreign_looked_at=state.now.monotonic)
        case events.GuestsLookedFor(reading=reading):
            return guests_found(state, reading)
        case events.BackoffDrawn(seconds=seconds):
            return replace(state, next_start_at=state.now.monotonic + seconds, backoff_seconds=seconds)
        case events.FabricManagerStarted():
            return _started(state, event)
        case events.FabricManagerAdopted():
            return _adopted(state, event)
        case events.SpawnFailed(reason=reason):
            problem = Problem(Code.SPAWN_FAILED, reason)
            state = replace(state, failures=state.failures + 1, next_start_at=None)
            return _latch(state, problem, "")
        case events.FabricManagerExited():
            return _exited(state, event)
        case events.OrphansEnded():
            return replace(state, has_orphans=False)
        case events.LogRead(batch=batch):
            return read_log(state, batch)
        case events.KernelLogRead(batch=batch):
            return read_kernel(state, batch)
        case events.ModulesRecalled(modules=modules):
            return recall(state, modules)
        case events.SettingsReloaded():
            return _settings_reloaded(state, event)
        case events.ServiceProblem(problem=problem, is_active=is_active):
            return _service_problem(state, problem, is_active=is_active)
        case events.StopRequested():
            return replace(state, is_stopping=True)
        case events.ActionTaken(action=action):
            return _action_taken(state, action)
        case _:
            assert_never(event)


def _host_may_have_changed(state: State) -> State:
    found = state.installation
    waits_for_module = found is not None and any(one.code == Code.MODULE_DEPENDENCY_MISSING for one in found.problems)
    return replace(state, is_host_stale=True, is_installation_stale=state.is_installation_stale or waits_for_module)


def _host_observed(state: State, host: Host | Unknown) -> State:
    state = replace(state, is_host_stale=False, host_observed_at=state.now.monotonic)
    if isinstance(host, Unknown):
        return replace(state, host_unknown=host.reason)
    before = state.host
    host = with_unread_parts(before, host)
    state = replace(
        state,
        host=host,
        host_unknown="",
        nodes_for=None,  # a node may have been changed by hand since
        config_for=None if _is_config_unwritten(state) else state.config_for,  # there may be room again
        seen_switches=state.seen_switches | {switch.pci_bus_id for switch in host.switches},
    )
    if before is not None and _bus_ids(before) != _bus_ids(host):
        state = replace(state, bus_changed_at=state.now.monotonic)
    if before is None or _switch_facts(before) != _switch_facts(host):
        state = replace(state, driver_observed_at=NEVER)
    if not host.is_module_live:
        # A driver that is unloaded or reloaded knows nothing of the switches of before.
        is_forgotten = host.module is None and state.run is None
        working = frozenset[str]() if is_forgotten else state.working_switches
        run = state.run
        if run is not None and not isinstance(host.module, Unknown):
            run = replace(run, is_driver_gone=True)
        return replace(state, run=run, driver=None, driver_unknown="", working_switches=working)
    return replace(state, working_switches=state.working_switches | set(switches.working(state)))


def _is_config_unwritten(state: State) -> bool:
    return state.config is not None and any(one.code == Code.CONFIG_UNWRITABLE for one in state.config.problems)


def _bus_ids(host: Host) -> frozenset[str]:
    return frozenset(function.pci_bus_id for function in (*host.switches, *host.gpus))


def _switch_facts(host: Host) -> object:
    return (host.module, host.switches, host.probed_switches, tuple(sorted(host.majors.items())))


def _paths_changed(state: State, paths: frozenset[str]) -> State:
    installation = state.installation
    if installation is not None and paths & set(installation.watched_paths):
        state = replace(state, is_installation_stale=True)
    if any(result.node.path in paths for result in state.nodes):
        state = replace(state, nodes_for=None)
    return state


def _module_load_ended(state: State, problem: Problem | None) -> State:
    state = replace(state, is_loading=False, is_host_stale=True)
    if problem is None:
        # A module that is gone again at once is not loaded again at once.
        retry_at = state.now.monotonic + _LOAD_RETRY_SECONDS
        return replace(state, load_failures=0, load_problem=None, load_retry_at=retry_at)
    failures = state.load_failures + 1
    if problem.code in _RETRIED_LOAD_FAILURES:
        retry_at = state.now.monotonic + min(_LOAD_RETRY_SECONDS * failures, _LONGEST_LOAD_RETRY_SECONDS)
        return replace(state, load_failures=failures, load_problem=problem, load_retry_at=retry_at)
    # The kernel shows a module and bound switches while it tries: what counts is how things were before.
    block = Block(problem, LOAD_CURES, state.load_basis)
    return replace(state, load_failures=failures, blocks=(*state.blocks, block))


def _driver_observed(state: State, event: events.DriverObserved) -> State:
    now = state.now.monotonic
    if isinstance(event.driver, Unknown):
        last = event.driver if state.driver is None else state.driver
        return replace(state, driver=last, driver_unknown=event.driver.reason, driver_observed_at=now)
    state = replace(state, driver=event.driver, driver_unknown="", driver_observed_at=now, driver_heard_at=now)
    run = state.run
    if run is None:
        return state
    run = replace(run, is_driver_gone=False)
    if switches.unconfigured(state):
        run = replace(run, is_driver_seen_unconfigured=True)
    is_unmanaged = any(device.driver_state is DriverState.MANAGER_TIMEOUT for device in switches.devices(state))
    if run.configured is None or not is_unmanaged:
        return replace(state, run=replace(run, unmanaged_since=None))
    return replace(state, run=replace(run, unmanaged_since=now if run.unmanaged_since is None else run.unmanaged_since))


def _started(state: State, event: events.FabricManagerStarted) -> State:
    settings = state.settings.fabric_manager
    run = Run(event.session, event.pid, state.now, settings=settings, is_resilient=event.is_resilient)
    counters = replace(state.counters, starts=state.counters.starts + 1)
    return replace(
        state,
        run=run,
        counters=counters,
        next_start_at=None,
        foreign=(),
        log_problem="",
        driver=None,  # what it said before was about another Fabric Manager
        driver_unknown="",
        driver_observed_at=NEVER,
    )


def _adopted(state: State, event: events.FabricManagerAdopted) -> State:
    """What it told an earlier supervisor holds; that it is configured must be confirmed by what is seen now."""
    run = event.run
    is_being_stopped = run.stop is not None and run.stop.cause is not actions.StopCause.REQUESTED
    run = replace(
        run,
        adopted=state.now,
        configured=None,
        was_configured=run.configured or run.was_configured,
        stop=run.stop if is_being_stopped else None,
        unmanaged_since=None,
    )
    return replace(
        state,
        run=run,
        config=event.config,
        next_start_at=None,
        foreign=(),
        log_problem="",
        driver=None,
        driver_unknown="",
        driver_observed_at=NEVER,
    )


def _exited(state: State, event: events.FabricManagerExited) -> State:
    run = state.run
    if run is None:
        return state
    if event.was_unseen:
        run = replace(run, configured=run.was_configured)
    found = restart.classify(state, run, event.status, event.last_lines, event.orphans)
    if event.was_unseen and found.exit_class is ExitClass.UNEXPECTED:
        found = replace(found, reason=f"it ended while no supervisor ran; {found.reason}")
    exits = dict(state.counters.exits)
    exits[found.exit_class] = exits.get(found.exit_class, 0) + 1
    state = replace(
        state,
        run=None,
        is_host_stale=True,  # it may have died of what happened there
        has_orphans=event.orphans > 0,
        config_for=None,  # it may have been edited by hand since
        last_exit=Exit(
            run.session,
            run.pid,
            state.now,
            event.status,
            found.exit_class,
            found.reason,
            event.last_lines,
            run.configured or run.success,
        ),
        counters=replace(state.counters, exits=MappingProxyType(exits)),
        next_start_at=None,
        foreign_looked_at=NEVER,
        driver_observed_at=NEVER,
        registered_before=bounded_gpus(state.registered_before | run.registered.keys()),
    )
    if run.stop is not None and run.stop.is_killed:
        seconds = state.settings.fabric_manager.stop_timeout_seconds
        state = _latch(
            state, Problem(Code.STOP_ESCALATED, f"pid {run.pid} ignored SIGTERM for {seconds:g} s"), run.session
        )
    match found.exit_class:
        case ExitClass.UNEXPECTED | ExitClass.EXTERNAL:
            state = replace(state, failures=restart.failures_after(state, run))
            return _latch(state, found.problem, run.session) if found.problem else state
        case ExitClass.TERMINAL if found.problem is not None:
            return replace(state, blocks=(*state.blocks, make_block(state, found.problem, *found.aspects)))
        case _:
            return state


def _settings_reloaded(state: State, event: events.SettingsReloaded) -> State:
    if event.problem is not None:
        return _service_problem(state, event.problem, is_active=True)
    problems = {
        key: problem for key, problem in state.service_problems.items() if problem.code != Code.SETTINGS_INVALID
    }
    return replace(
        state,
        settings=event.settings,
        service_problems=MappingProxyType(problems),
        is_installation_stale=True,
    )


def _service_problem(state: State, problem: Problem, *, is_active: bool) -> State:
    problems: dict[str, Problem] = dict(state.service_problems)
    key = f"{problem.code} {problem.subject}"
    if is_active:
        problems[key] = problem
    else:
        problems.pop(key, None)
    return replace(state, service_problems=MappingProxyType(problems))


def _action_taken(state: State, action: actions.Action) -> State:
    match action:
        case actions.InspectInstallation():
            return replace(state, is_inspecting=True, is_installation_stale=False)
        case actions.LoadModule():
            basis = aspect_values(state, LOAD_CURES)
            return replace(state, is_loading=True, load_began_at=state.now.monotonic, load_basis=basis)
        case actions.LookForGuests():
            return replace(state, is_looking_for_guests=True, guest_search_began_at=state.now.monotonic)
        case actions.EndService():
            return replace(state, has_ended=True)
        case actions.TerminateFabricManager(cause=cause):
            run = replace(state.run, stop=Stop(state.now, cause)) if state.run else None
            return replace(state, run=run)
        case actions.KillFabricManager() if state.run and state.run.stop:
            return replace(state, run=replace(state.run, stop=replace(state.run.stop, is_killed=True)))
        case _:
            return state


def _latch(state: State, problem: Problem, session: str) -> State:
    latched: Mapping[tuple[str, str], Latched] = MappingProxyType(
        {**state.latched, (problem.code, problem.subject): Latched(problem, session)}
    )
    return replace(state, latched=latched)


def _release_blocks(state: State) -> State:
    if not state.blocks or state.is_host_stale or state.host_unknown:
        return state
    kept: tuple[Block, ...] = tuple(block for block in state.blocks if not is_cured(state, block))
    if len(kept) == len(state.blocks):
        return state
    return replace(state, blocks=kept, next_start_at=None)


def _note_switch_wait(state: State) -> State:
    """Remember since when the driver has been live with switches missing."""
    if state.host is None or not state.host.is_module_live:
        return state if state.switch_wait_since is None else replace(state, switch_wait_since=None)
    is_complete = len(switches.working(state)) >= max(switches.expected(state), 1)
    if is_complete:
        return state if state.switch_wait_since is None else replace(state, switch_wait_since=None)
    return state if state.switch_wait_since is not None else replace(state, switch_wait_since=state.now.monotonic)


def _note_configured(state: State) -> State:
    """Remember when all witnesses agreed first, and what that makes undone of the past."""
    run = state.run
    if run is None or run.stop is not None:
        return state
    if run.configured is None:
        if not is_confirmed(state, run):
            return state
        latched = {
            key: one
            for key, one in state.latched.items()
            if one.session == run.session and one.problem.code in _LATCHED_FOR_GOOD
        }
        since = run.was_configured or state.now
        lost = state.lost_registrations | (state.registered_before - run.registered.keys())
        return replace(
            state,
            run=replace(run, configured=since),
            latched=MappingProxyType(latched),
            registered_before=frozenset(),
            lost_registrations=bounded_gpus(lost),
        )
    stable_seconds = state.now.monotonic - run.configured.monotonic
    if state.failures and stable_seconds >= state.settings.restart.reset_after_seconds:
        return replace(state, failures=0)
    return state

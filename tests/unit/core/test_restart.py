"""core.restart: why Fabric Manager ended, what follows, and how long the pause is."""

from dataclasses import replace

import pytest
from _builders import after, configured, executed, make_host, record, run_of, settings

from fmsupervisor.conditions import REGISTRY, Code
from fmsupervisor.core import events, restart
from fmsupervisor.core.actions import StopCause
from fmsupervisor.core.state import Aspect, ExitClass, State, Stop
from fmsupervisor.facts import ExitStatus, LogKind
from fmsupervisor.settings import RestartSettings


def classified(state: State, status: ExitStatus, *lines: str, orphans: int = 0) -> restart.Verdict:
    """The class of the end of the running Fabric Manager."""
    return restart.classify(state, run_of(state), status, lines, orphans)


def with_failures(state: State, *kinds: LogKind) -> State:
    """It has said these."""
    failures = tuple(record(kind, f"{kind} it is") for kind in kinds)
    return replace(state, run=replace(run_of(state), failures=failures))


@pytest.mark.parametrize("status", [ExitStatus(code=0), ExitStatus(code=1), ExitStatus(signal=6)], ids=str)
@pytest.mark.parametrize(
    ("kind", "code", "cure"),
    [
        (LogKind.LOADER_ERROR, Code.LOADER_ERROR, Aspect.INSTALLATION),
        (LogKind.VERSION_MISMATCH, Code.VERSION_REJECTED, Aspect.LOADED_MODULE),
        (LogKind.CONFIG_INVALID, Code.CONFIG_REJECTED, Aspect.SETTINGS),
        (LogKind.TOPOLOGY_MISMATCH, Code.TOPOLOGY_MISMATCH, Aspect.SWITCHES),
        (LogKind.NOTHING_TO_DO, Code.NOTHING_TO_DO, Aspect.SWITCHES),
    ],
)
def test_what_it_said_outranks_its_exit_status(kind: LogKind, code: Code, cure: Aspect, status: ExitStatus) -> None:
    found = classified(with_failures(executed(), kind), status)
    assert (found.exit_class, found.reason) == (ExitClass.TERMINAL, f"{kind} it is")
    assert found.problem is not None
    assert found.problem.code == code
    assert cure in found.aspects


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (LogKind.DIRECTORY_DENIED, Code.RUN_DIRECTORY_DENIED),
        (LogKind.ADDRESS_IN_USE, Code.ADDRESS_IN_USE),
    ],
)
def test_what_is_in_the_way_from_outside_is_tried_again(kind: LogKind, code: Code) -> None:
    found = classified(with_failures(executed(), kind), ExitStatus(code=1))
    assert found.exit_class is ExitClass.EXTERNAL
    assert found.problem is not None
    assert found.problem.code == code
    assert not REGISTRY[code].blocks_start


def test_a_terminal_failure_outranks_an_external_one() -> None:
    state = with_failures(executed(), LogKind.ADDRESS_IN_USE, LogKind.CONFIG_INVALID)
    assert classified(state, ExitStatus(code=1)).exit_class is ExitClass.TERMINAL


def test_complaints_of_a_fabric_manager_that_has_configured_are_not_why_it_died() -> None:
    state = with_failures(configured(), LogKind.CONFIG_INVALID)
    assert classified(state, ExitStatus(signal=11)).exit_class is ExitClass.UNEXPECTED


def test_nothing_to_do_is_believed_when_pci_shows_no_switch_either() -> None:
    state = with_failures(executed(), LogKind.NOTHING_TO_DO)
    state = after(state, events.HostObserved(make_host(on_bus=())))
    assert classified(state, ExitStatus(code=0)).exit_class is ExitClass.NOT_APPLICABLE


@pytest.mark.parametrize(
    ("cause", "exit_class", "code"),
    [
        (StopCause.REQUESTED, ExitClass.REQUESTED, None),
        (StopCause.HANG, ExitClass.UNEXPECTED, Code.FABRIC_MANAGER_HUNG),
        (StopCause.START_TIMEOUT, ExitClass.UNEXPECTED, Code.START_TIMEOUT),
    ],
)
def test_an_end_that_we_asked_for_has_our_reason(cause: StopCause, exit_class: ExitClass, code: Code | None) -> None:
    state = executed()
    state = replace(state, run=replace(run_of(state), stop=Stop(state.now, cause)))
    found = classified(state, ExitStatus(signal=9), orphans=1)
    assert found.exit_class is exit_class
    assert (found.problem.code if found.problem else None) == code


def test_status_127_is_the_dynamic_loader() -> None:
    found = classified(executed(), ExitStatus(code=127), "libfoo.so.1: cannot open shared object file")
    assert found.exit_class is ExitClass.TERMINAL
    assert "libfoo.so.1" in found.reason


def test_a_process_that_leaves_others_behind_has_forked_away() -> None:
    found = classified(executed(), ExitStatus(code=0), orphans=2)
    assert found.exit_class is ExitClass.TERMINAL
    assert found.problem is not None
    assert found.problem.code == Code.FORKED_AWAY


@pytest.mark.parametrize("status", [ExitStatus(signal=11), ExitStatus(code=1)], ids=str)
def test_a_process_that_crashes_beside_its_children_has_not_forked_away(status: ExitStatus) -> None:
    assert classified(executed(), status, orphans=2).exit_class is ExitClass.UNEXPECTED


@pytest.mark.parametrize("status", [ExitStatus(code=0), ExitStatus(signal=9), ExitStatus()], ids=str)
def test_any_other_end_is_unexpected_and_tells_its_last_line(status: ExitStatus) -> None:
    found = classified(executed(), status, "first", "last")
    assert (found.exit_class, found.problem) == (ExitClass.UNEXPECTED, None)
    assert found.reason == f"{status} before the fabric was configured; its last line: last"
    assert "after the fabric was configured" in classified(configured(), status).reason


@pytest.mark.parametrize(("stable_seconds", "failures"), [(0.0, 4), (299.0, 4), (300.0, 1), (9000.0, 1)])
def test_a_long_time_in_configured_starts_the_count_afresh(stable_seconds: float, failures: int) -> None:
    state = replace(configured(), failures=3)
    state = replace(state, now=replace(state.now, monotonic=state.now.monotonic + stable_seconds))
    assert restart.failures_after(state, run_of(state)) == failures


def test_a_start_that_never_configured_counts_however_long_it_took() -> None:
    state = replace(executed(), failures=3)
    state = replace(state, now=replace(state.now, monotonic=state.now.monotonic + 9000))
    assert restart.failures_after(state, run_of(state)) == 4


@pytest.mark.parametrize(("attempt", "seconds"), [(1, 1.0), (2, 2.0), (3, 4.0), (7, 60.0), (100_000, 60.0)])
def test_the_pause_doubles_up_to_its_maximum(attempt: int, seconds: float) -> None:
    assert restart.backoff_seconds(RestartSettings(jitter_seconds=0.0), attempt) == seconds


def test_the_jitter_only_adds() -> None:
    drawn = {restart.backoff_seconds(settings().restart, 1) for _ in range(50)}
    assert len(drawn) > 1
    assert all(1.0 <= pause <= 2.0 for pause in drawn)

"""Why did Fabric Manager end, and what follows from that.

A blind restart is harmful twice over. A configuration error or a version mismatch restarted every ten seconds is noise
that hides its own cause. And on Hopper and later every restart orphans the registrations of the GPUs, which breaks NVLS
in all running guests. So an exit is first classified. What it said on the way out (its log and stderr) outranks the
exit status: the same kind of configuration error has been seen with status 1 (siderolabs/extensions issue 511) and with
status 0 (tinfoilsh/cvmimage pull request 241).

    requested       we asked for it                              nothing follows
    not-applicable  no switch for it here                        nothing follows
    terminal        will fail again until an aspect changes      blocked until then
    external        something outside is in the way              retried with back-off
    unexpected      it died, hung, or never got ready            retried with back-off, if the policy allows
"""

from dataclasses import dataclass

from fmsupervisor.conditions import Code
from fmsupervisor.core import switches
from fmsupervisor.core.actions import StopCause
from fmsupervisor.core.plan_times import partitions_deadline
from fmsupervisor.core.state import Aspect, ExitClass, Run, State
from fmsupervisor.facts import ExitStatus, LogKind, Problem
from fmsupervisor.settings import RestartSettings

_LOADER_EXIT_CODE = 127  # of ld.so when a library is missing


@dataclass(frozen=True, slots=True)
class Verdict:
    """The class of an exit. ``aspects``: what a terminal one waits for."""

    exit_class: ExitClass
    reason: str
    problem: Problem | None = None
    aspects: tuple[Aspect, ...] = ()


# What Fabric Manager said -> its class, condition and cure. Order = precedence.
_TERMINAL = (
    (LogKind.LOADER_ERROR, Code.LOADER_ERROR, (Aspect.INSTALLATION, Aspect.SETTINGS)),
    (LogKind.VERSION_MISMATCH, Code.VERSION_REJECTED, (Aspect.INSTALLATION, Aspect.LOADED_MODULE)),
    (LogKind.CONFIG_INVALID, Code.CONFIG_REJECTED, (Aspect.SETTINGS, Aspect.INSTALLATION)),
    (LogKind.TOPOLOGY_MISMATCH, Code.TOPOLOGY_MISMATCH, (Aspect.SWITCHES, Aspect.INSTALLATION)),
    (LogKind.NOTHING_TO_DO, Code.NOTHING_TO_DO, (Aspect.SWITCHES, Aspect.LOADED_MODULE)),
)
_EXTERNAL = (
    (LogKind.DIRECTORY_DENIED, Code.RUN_DIRECTORY_DENIED),
    (LogKind.ADDRESS_IN_USE, Code.ADDRESS_IN_USE),
)
FAILURE_KINDS = frozenset(kind for kind, *_ in _TERMINAL + _EXTERNAL)


def classify(state: State, run: Run, status: ExitStatus, last_lines: tuple[str, ...], orphans: int) -> Verdict:
    """The class of the end of ``run``."""
    if run.stop is not None:
        return _classify_stopped(run, status)
    said = {record.kind: record.text for record in run.failures}
    if run.success is None and run.configured is None:
        for kind, code, aspects in _TERMINAL:
            if kind not in said:
                continue
            if kind is LogKind.NOTHING_TO_DO and not switches.present(state):
                return Verdict(ExitClass.NOT_APPLICABLE, said[kind])
            return Verdict(ExitClass.TERMINAL, said[kind], Problem(code, said[kind]), aspects)
        for kind, code in _EXTERNAL:
            if kind in said:
                return Verdict(ExitClass.EXTERNAL, said[kind], Problem(code, said[kind]))
        if status.code == _LOADER_EXIT_CODE:
            reason = _with_last_line(f"{status}", last_lines)
            problem = Problem(Code.LOADER_ERROR, reason)
            return Verdict(ExitClass.TERMINAL, reason, problem, (Aspect.INSTALLATION, Aspect.SETTINGS))
    if orphans and status.code == 0:  # one that crashed did not mean to leave its children behind
        reason = f"it left {orphans} {'process' if orphans == 1 else 'processes'} behind and ended with {status}"
        problem = Problem(Code.FORKED_AWAY, reason)
        return Verdict(ExitClass.TERMINAL, reason, problem, (Aspect.INSTALLATION, Aspect.SETTINGS))
    return Verdict(ExitClass.UNEXPECTED, _with_last_line(f"{status} {_when(state, run)}", last_lines))


def _when(state: State, run: Run) -> str:
    is_untold = state.now.monotonic >= partitions_deadline(run)
    untold = ", started with --restart and not told the active partitions within 60 s" if is_untold else ""
    return f"{'after' if run.configured else 'before'} the fabric was configured{untold}"


def _classify_stopped(run: Run, status: ExitStatus) -> Verdict:
    cause = run.stop.cause if run.stop else StopCause.REQUESTED
    match cause:
        case StopCause.REQUESTED:
            return Verdict(ExitClass.REQUESTED, f"stopped as requested, {status}")
        case StopCause.HANG:
            reason = f"it was ended because it hung, {status}"
            return Verdict(ExitClass.UNEXPECTED, reason, Problem(Code.FABRIC_MANAGER_HUNG, reason))
        case StopCause.START_TIMEOUT:
            reason = f"it did not configure the fabric in time and was ended, {status}"
            return Verdict(ExitClass.UNEXPECTED, reason, Problem(Code.START_TIMEOUT, reason))


def _with_last_line(reason: str, last_lines: tuple[str, ...]) -> str:
    return f"{reason}; its last line: {last_lines[-1]}" if last_lines else reason


def failures_after(state: State, run: Run) -> int:
    """How many deaths in a row this one makes: a long time in configured starts the count afresh."""
    if run.configured is not None:
        stable = state.now.monotonic - run.configured.monotonic
        if stable >= state.settings.restart.reset_after_seconds:
            return 1
    return state.failures + 1


def backoff_seconds(settings: RestartSettings, attempt: int) -> float:
    """The pause before the next start: exponential with a cap, plus jitter (tenacity's wait strategies)."""
    from tenacity import RetryCallState, wait_exponential, wait_random  # noqa: PLC0415 - needed only after a death

    strategy = wait_exponential(
        multiplier=settings.initial_delay_seconds, max=settings.maximum_delay_seconds
    ) + wait_random(0, settings.jitter_seconds)
    call = RetryCallState(retry_object=None, fn=None, args=(), kwargs={})  # type: ignore[arg-type]
    call.attempt_number = attempt
    return float(strategy(call))

"""What a check says, and what a check is."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from fmsupervisor.conditions import REGISTRY, Code, Severity
from fmsupervisor.facts import Problem

_Context = TypeVar("_Context")
_UNOBSERVED = "cannot observe "  # with which every CannotObserve begins


class Verdict(StrEnum):
    """``cannot tell`` is neither good nor bad: something could not be looked at."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer of one check."""

    verdict: Verdict
    found: str
    remedy: str = ""  # empty when nothing is to be done
    codes: tuple[Code, ...] = ()  # the conditions that this amounts to
    details: tuple[str, ...] = ()  # one line each


@dataclass(frozen=True, slots=True)
class Check(Generic[_Context]):
    """One entry of the table of checks."""

    name: str
    title: str
    codes: tuple[Code, ...]  # the conditions that it can tell
    function: Callable[[_Context], Finding]
    timeout_seconds: float = 5.0
    is_for_any_machine: bool = False  # also where there is no NVSwitch


def ok(found: str, *details: str) -> Finding:
    """Nothing is wrong."""
    return Finding(Verdict.OK, found, details=details)


def cannot_tell(reason: str, remedy: str = "") -> Finding:
    """It could not be looked at."""
    return Finding(Verdict.CANNOT_TELL, reason, remedy)


def failed(code: Code, found: str, remedy: str = "", details: Iterable[str] = ()) -> Finding:
    """The condition holds and keeps the fabric from working. The remedy is the registry's unless another is given."""
    return Finding(Verdict.FAILED, found, remedy or REGISTRY[code].remedy, (code,), tuple(details))


def warning(code: Code, found: str, remedy: str = "", details: Iterable[str] = ()) -> Finding:
    """The condition holds and will bite some day."""
    return Finding(Verdict.WARNING, found, remedy or REGISTRY[code].remedy, (code,), tuple(details))


def judged(problems: Iterable[Problem], when_none: str, *details: str) -> Finding:
    """All problems as one finding, as bad as the worst of them; ``when_none`` is found when there are none.

    A problem that says only that something could not be looked at is neither good nor bad, though the daemon cannot
    go on with it.
    """
    problems = [problem for problem in problems if REGISTRY[problem.code].severity is not Severity.INFO]
    if not problems:
        return ok(when_none, *details)
    found = "; ".join(dict.fromkeys(problem.detail for problem in problems))
    codes = tuple(dict.fromkeys(problem.code for problem in problems if not is_unobserved(problem)))
    if not codes:
        return Finding(Verdict.CANNOT_TELL, found, details=details)
    is_critical = any(REGISTRY[code].severity is Severity.CRITICAL for code in codes)
    return Finding(
        Verdict.FAILED if is_critical else Verdict.WARNING,
        found,
        " ".join(REGISTRY[code].remedy for code in codes),
        codes,
        details,
    )


def is_unobserved(problem: Problem) -> bool:
    """Whether the problem says only that something could not be looked at."""
    return _UNOBSERVED in problem.detail

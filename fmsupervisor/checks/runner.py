"""Runs the checks one after the other, each with its deadline, all together with one.

They run in one thread; one that does not come back is left behind and the next thread goes on, so that a file system
that hangs costs one deadline and not the answer. Such a thread cannot be ended and does not keep the process alive.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from fmsupervisor.checks.context import Context
from fmsupervisor.checks.finding import Check, Finding, Verdict, cannot_tell
from fmsupervisor.conditions import Code
from fmsupervisor.errors import FmsupervisorError

_FIRST_LOOK_SECONDS = 5.0
ITSELF_FAILED = "the check itself failed"
LIMIT_SECONDS = 25.0  # of all checks together; with starting and printing the command stays below 30 s


@dataclass(frozen=True, slots=True)
class Result:
    """One check and what it found."""

    check: Check[Context]
    finding: Finding
    seconds: float


@dataclass(frozen=True, slots=True)
class Report:
    """All results. ``not_applicable``: why there is nothing to look at on this machine, "" when there is."""

    results: tuple[Result, ...]
    not_applicable: str = ""

    def count(self, verdict: Verdict) -> int:
        """How many checks said so."""
        return sum(result.finding.verdict is verdict for result in self.results)

    @property
    def exit_status(self) -> int:
        """0 all is well, 1 something failed, 2 there are warnings or something could not be looked at."""
        if self.count(Verdict.FAILED):
            return 1
        return 2 if self.count(Verdict.WARNING) or self.count(Verdict.CANNOT_TELL) else 0


def run_checks(
    context: Context,
    checks: Iterable[Check[Context]],
    why_not_applicable: Callable[[Context], str] = Context.why_not_applicable,
    limit_seconds: float = LIMIT_SECONDS,
) -> Report:
    """All checks that are for this machine. When it cannot be told what it is, these are all."""
    worker = _Worker()
    began = time.monotonic()
    reason = worker.ask(lambda: _ask(why_not_applicable, context), _FIRST_LOOK_SECONDS) or ""
    chosen = [check for check in checks if check.is_for_any_machine or not reason]
    return Report(tuple(_run(worker, context, chosen, began + limit_seconds)), str(reason))


def _ask(why_not_applicable: Callable[[Context], str], context: Context) -> str:
    try:
        return why_not_applicable(context)
    except FmsupervisorError:
        return ""


def _run(worker: "_Worker", context: Context, checks: Sequence[Check[Context]], deadline: float) -> Iterator[Result]:
    for check in checks:
        began = time.monotonic()
        left = deadline - began
        if left <= 0:
            yield Result(check, cannot_tell("no time was left for it: checks before it took too long"), 0.0)
            continue
        timeout = min(check.timeout_seconds, left)
        finding = worker.ask(partial(answer, check, context), timeout)
        if not isinstance(finding, Finding):
            finding = cannot_tell(f"it took longer than {timeout:.1f} s")
        yield Result(check, finding, time.monotonic() - began)


def answer(check: Check[Context], context: Context) -> Finding:
    """What the check finds, without a deadline. Never raises."""
    try:
        return check.function(context)
    except FmsupervisorError as error:
        return cannot_tell(str(error))
    except Exception as error:  # noqa: BLE001  one check's mistake must not take the others' answers away
        return cannot_tell(f"{ITSELF_FAILED}: {type(error).__name__}: {error}")


class _Worker:
    """A thread that can be given up."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[object] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._calls, self._answers), daemon=True).start()

    def ask(self, call: Callable[[], object], timeout_seconds: float) -> object | None:
        """What the call returns; None when it does not return in time."""
        self._calls.put(call)
        try:
            return self._answers.get(timeout=timeout_seconds)
        except queue.Empty:
            self._start()
            return None


def _serve(calls: "queue.SimpleQueue[Callable[[], object]]", answers: "queue.SimpleQueue[object]") -> None:
    while True:
        answers.put(calls.get()())


def with_code(checks: Iterable[Check[Context]], code: Code) -> tuple[Check[Context], ...]:
    """The checks that can tell this condition."""
    return tuple(check for check in checks if code in check.codes)

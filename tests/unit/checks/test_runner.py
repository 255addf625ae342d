"""Deadlines, mistakes, and what the whole amounts to."""

import threading
import time

import pytest
from _checked_host import build, make_context

from fmsupervisor.checks.finding import Check, Finding, Verdict, cannot_tell, failed, ok, warning
from fmsupervisor.checks.runner import run_checks
from fmsupervisor.conditions import Code
from fmsupervisor.errors import CannotObserve

OK, BAD, HMM = ok("fine"), failed(Code.SWITCH_MISSING, "three"), warning(Code.LOG_FULL, "full")


@pytest.fixture
def context(tmp_path):
    build(tmp_path)
    return make_context(tmp_path)


def check(function, name="x", timeout=5.0, **more):
    return Check(name, name, (), function, timeout, **more)


def returning(finding: Finding, **more):
    return check(lambda context: finding, **more)


@pytest.mark.parametrize(
    ("findings", "status"),
    [([], 0), ([OK], 0), ([OK, HMM], 2), ([OK, cannot_tell("?")], 2), ([HMM, BAD], 1), ([BAD, cannot_tell("?")], 1)],
)
def test_the_exit_status_is_that_of_the_worst(context, findings, status) -> None:
    assert run_checks(context, [returning(finding) for finding in findings]).exit_status == status


def test_a_check_that_hangs_costs_its_deadline_and_nothing_else(context) -> None:
    release = threading.Event()
    hanging = check(lambda context: release.wait(30) and OK, timeout=0.1)
    began = time.monotonic()
    report = run_checks(context, [returning(OK), hanging, returning(BAD)])
    assert time.monotonic() - began < 10
    release.set()
    assert [result.finding.verdict for result in report.results] == [Verdict.OK, Verdict.CANNOT_TELL, Verdict.FAILED]
    assert "longer than 0.1 s" in report.results[1].finding.found


def test_all_together_have_a_deadline_too(context) -> None:
    release = threading.Event()
    hanging = [check(lambda context: release.wait(30) and OK) for _ in range(5)]
    report = run_checks(context, hanging, limit_seconds=0.3)
    release.set()
    assert report.count(Verdict.CANNOT_TELL) == 5
    assert "no time was left" in report.results[-1].finding.found


def test_what_cannot_be_observed_cannot_be_told(context) -> None:
    def unreadable(context):
        raise CannotObserve("/proc/x", "Input/output error")

    (result,) = run_checks(context, [check(unreadable)]).results
    assert result.finding == cannot_tell("cannot observe /proc/x: Input/output error")


def test_a_mistake_in_one_check_leaves_the_others_their_answer(context) -> None:
    first, second = run_checks(context, [check(lambda context: 1 // 0), returning(BAD)]).results
    assert first.finding.verdict is Verdict.CANNOT_TELL
    assert "ZeroDivisionError" in first.finding.found
    assert second.finding is BAD


def test_where_there_is_nothing_to_do_only_the_checks_for_any_machine_run(context) -> None:
    checks = [returning(BAD, name="a"), returning(OK, name="b", is_for_any_machine=True)]
    report = run_checks(context, checks, lambda context: "no switch")
    assert [result.check.name for result in report.results] == ["b"]
    assert (report.not_applicable, report.exit_status) == ("no switch", 0)


def test_when_it_cannot_be_told_what_the_machine_is_every_check_runs(context) -> None:
    def unreadable(context):
        raise CannotObserve("/sys", "it is not mounted")

    assert len(run_checks(context, [returning(OK)], unreadable).results) == 1

"""Problems become one finding; those that only say that nothing was seen are neither good nor bad."""

from fmsupervisor.checks.finding import Verdict, is_unobserved, judged, ok
from fmsupervisor.conditions import REGISTRY, Code
from fmsupervisor.errors import CannotObserve
from fmsupervisor.facts import Problem

MISSING = Problem(Code.FABRIC_MANAGER_MISSING, "there is no file /x")
LOG = Problem(Code.LOG_FULL, "the log is full")
UNSEEN = Problem(Code.NSCQ_MISSING, f"/y: {CannotObserve('/y', 'Input/output error')}")


def test_none_is_what_is_told_when_there_is_none() -> None:
    assert judged([], "fine", "a detail") == ok("fine", "a detail")


def test_several_are_as_bad_as_the_worst_and_have_all_remedies() -> None:
    finding = judged([LOG, MISSING], "fine")
    assert (finding.verdict, finding.codes) == (Verdict.FAILED, (LOG.code, MISSING.code))
    assert REGISTRY[LOG.code].remedy in finding.remedy
    assert REGISTRY[MISSING.code].remedy in finding.remedy


def test_what_could_not_be_looked_at_leaves_it_open() -> None:
    assert is_unobserved(UNSEEN)
    finding = judged([UNSEEN], "fine")
    assert (finding.verdict, finding.codes, finding.remedy) == (Verdict.CANNOT_TELL, (), "")
    assert "Input/output error" in finding.found


def test_beside_a_fault_it_is_told_and_does_not_count() -> None:
    finding = judged([UNSEEN, LOG], "fine")
    assert (finding.verdict, finding.codes) == (Verdict.WARNING, (LOG.code,))
    assert "Input/output error" in finding.found
    assert finding.remedy == REGISTRY[LOG.code].remedy

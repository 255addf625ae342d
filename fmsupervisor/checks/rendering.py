"""The report for people, for programs, and as node-problem-detector's custom plugins want it."""

import textwrap
from collections.abc import Iterator
from typing import Any

from fmsupervisor.checks.finding import Verdict
from fmsupervisor.checks.runner import Report, Result
from fmsupervisor.conditions import REGISTRY, Code

_WIDTH = 118
_INDENT = " " * 32


def render_text(report: Report) -> str:
    """One block per check, the summary last."""
    last = textwrap.wrap(summary(report), _WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join((*(line for result in report.results for line in _block(result)), "", *last)) + "\n"


def summary(report: Report) -> str:
    """The whole in one sentence."""
    counts = ", ".join(_counted(report, verdict) for verdict in Verdict if report.count(verdict))
    if report.not_applicable:
        return f"not applicable: {report.not_applicable}" + (f" ({counts})" if report.exit_status else "")
    return f"{len(report.results)} checks: {counts}"


def _counted(report: Report, verdict: Verdict) -> str:
    """As in ``1 failed (ports)``: who reads the end of a long list sees where to look."""
    names = [result.check.name for result in report.results if result.finding.verdict is verdict]
    named = "" if verdict is Verdict.OK else f" ({', '.join(names)})"
    return f"{len(names)} {verdict}{named}"


def document(report: Report) -> dict[str, Any]:
    """The report as JSON values."""
    return {
        "schema": 1,
        "applicable": not report.not_applicable,
        "exit_status": report.exit_status,
        "summary": summary(report),
        "checks": [
            {
                "name": result.check.name,
                "title": result.check.title,
                "verdict": str(result.finding.verdict),
                "found": _printable(result.finding.found),
                "details": [_printable(line) for line in result.finding.details],
                "remedy": _printable(result.finding.remedy),
                "codes": [str(code) for code in result.finding.codes],
                "seconds": round(result.seconds, 3),
            }
            for result in report.results
        ],
    }


def condition_line(report: Report, code: Code) -> tuple[str, int]:
    """One line and 0 (does not hold), 1 (holds) or 2 (unknown): node-problem-detector's custom plugin protocol."""
    findings = [result.finding for result in report.results]
    holds = [finding for finding in findings if code in finding.codes]
    if holds:
        return _line(code, "problem", f"{REGISTRY[code].title}: {holds[0].found}"), 1
    unknown = [finding for finding in findings if finding.verdict is Verdict.CANNOT_TELL]
    if unknown:
        return _line(code, "unknown", unknown[0].found), 2
    return _line(code, "ok", findings[0].found if findings else f"not applicable: {report.not_applicable}"), 0


def _line(code: Code, word: str, text: str) -> str:
    return _printable(f"{code} {word}: {' '.join(text.split())}".rstrip(": "))


def _block(result: Result) -> Iterator[str]:
    finding = result.finding
    codes = f" [{', '.join(finding.codes)}]" if finding.codes else ""
    head = f"{finding.verdict:<11}  {result.check.name:<18} "
    yield from _wrapped(head, _printable(finding.found) + codes)
    for detail in finding.details:
        yield from _wrapped(f"{_INDENT}- ", _printable(detail))
    if finding.remedy:
        yield from _wrapped(f"{_INDENT}> ", _printable(finding.remedy))


def _wrapped(head: str, text: str) -> Iterator[str]:
    body = _INDENT if len(head) <= len(_INDENT) else " " * len(head)
    yield from textwrap.wrap(
        text, _WIDTH, initial_indent=head, subsequent_indent=body, break_long_words=False, break_on_hyphens=False
    ) or [head.rstrip()]


def _printable(text: str) -> str:
    """Whatever a broken file holds, a terminal is not told to do anything."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)

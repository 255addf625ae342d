"""``fmsupervisor explain``: what a code, an SXid, an Xid or a pasted log line means. Offline."""

import difflib
import json
import re
import sys
from collections.abc import Iterable, Iterator

from fmsupervisor.conditions import REGISTRY, Code, Condition
from fmsupervisor.exit_codes import ExitCode
from fmsupervisor.explain_lines import explain_fabric_manager_line, explain_kernel_line, explain_xid
from fmsupervisor.explain_sxid import explain_sxid, number_of_symbol, numbers
from fmsupervisor.explain_words import explain_words
from fmsupervisor.explanation import Explanation, as_document, render_text
from fmsupervisor.runbook import meanwhile

_LINE_LIMIT_CHARACTERS = 4096
_LINES_LIMIT = 64
_SUGGESTION_LIMIT = 3
_SIMILAR = 0.5

_CODE = re.compile(r"FMS[-_ ]?(\d{1,4})", re.IGNORECASE | re.ASCII)
_CODE_IN_LINE = re.compile(r"\bFMS-\d{3}\b")
_NUMBER_IN_LINE = re.compile(r"\b(S?Xid) (\d{1,6})\b", re.IGNORECASE | re.ASCII)
_SXID = re.compile(r"(?:SXid\s*[:#]?\s*)?(\d{5})", re.IGNORECASE | re.ASCII)
_SXID_NAMED = re.compile(r"SXid\s*[:#]?\s*(\d{1,6})", re.IGNORECASE | re.ASCII)
_XID = re.compile(r"Xid\s*[:#]?\s*(\d{1,6})", re.IGNORECASE | re.ASCII)
_SYMBOL = re.compile(r"NVSWITCH_ERR_HW_\w+", re.IGNORECASE | re.ASCII)
_WORD = re.compile(r"[a-z][a-z0-9.]{2,}", re.ASCII)
_COMMON_WORDS = frozenset(
    (
        "the",
        "was",
        "not",
        "and",
        "for",
        "from",
        "with",
        "has",
        "have",
        "cannot",
        "could",
        "fabric",
        "manager",
        "nvswitch",
        "nvidia",
        "this",
    )
)


def run(question: str, *, as_json: bool) -> int:
    """The command: print the answer; 0 when there is one, 1 when not."""
    explanations = explain(question)
    suggestions = () if explanations else suggest(question)
    if as_json:
        sys.stdout.write(json.dumps(as_document(question, explanations, suggestions), indent=2) + "\n")
    elif explanations:
        sys.stdout.write(render_text(explanations))
    else:
        nearest = f"; nearest: {', '.join(suggestions)}" if suggestions else ""
        sys.stderr.write(f"fmsupervisor: cannot explain {question[:200]!r}: it is not known{nearest}\n")
    return ExitCode.OK if explanations else ExitCode.NOT_CONFIGURED


def explain(question: str) -> tuple[Explanation, ...]:
    """Everything that is known about the question; of a text of several lines, about each. Empty: nothing is known."""
    lines = [line.strip()[:_LINE_LIMIT_CHARACTERS] for line in question.split("\n")]
    found = [explanation for line in lines[:_LINES_LIMIT] if line for explanation in _explain_line(line)]
    return tuple(dict.fromkeys(found))


def suggest(question: str) -> tuple[str, ...]:
    """Codes and numbers that look like the question, or whose titles share words with it; the nearest first."""
    text = question.strip()[:_LINE_LIMIT_CHARACTERS]
    if _CODE.fullmatch(text):
        return _nearest(text.upper(), list(map(str, REGISTRY)))
    if found := _SXID_NAMED.fullmatch(text) or re.fullmatch(r"(\d{4,6})", text, re.ASCII):
        return tuple(f"SXid {number}" for number in _nearest(found[1], [str(number) for number in numbers()]))
    words = _words(text)
    shared = {condition: len(words & _words(condition.title)) for condition in REGISTRY.values()}
    best = sorted((condition for condition, count in shared.items() if count), key=lambda each: -shared[each])
    return tuple(f"{condition.code} ({condition.title})" for condition in best[:_SUGGESTION_LIMIT])


def explain_condition(condition: Condition) -> Explanation:
    """An entry of the registry."""
    return Explanation(
        "condition",
        condition.code,
        condition.title,
        (
            ("severity", str(condition.severity)),
            ("cause", condition.cause),
            ("what_to_do", condition.remedy),
            ("meanwhile", meanwhile(condition)),
            ("history", f"journalctl FMSUPERVISOR_CONDITION={condition.code}"),
            ("runbook", f"docs/runbook.md#{condition.anchor}"),
            ("message_id", condition.message_id),
        ),
    )


def _explain_line(line: str) -> tuple[Explanation, ...]:
    if explanation := _explain_name(line):
        return (explanation,)
    if codes := dict.fromkeys(_CODE_IN_LINE.findall(line)):  # a line of this program's own
        conditions = (explain_condition(REGISTRY[Code(code)]) for code in codes if code in REGISTRY)
        return (*conditions, *_errors_in(line, codes))
    return explain_kernel_line(line) or explain_fabric_manager_line(line) or explain_words(line)


def _errors_in(line: str, codes: Iterable[str]) -> Iterator[Explanation]:
    """The numbers that a line of this program names."""
    word = "fatal" if not {Code.SXID_FATAL, Code.SXID_FATAL_EARLIER}.isdisjoint(codes) else ""
    for found in _NUMBER_IN_LINE.finditer(line):
        number = int(found[2])
        explanation = explain_sxid(number, word) if found[1].lower() == "sxid" else explain_xid(number)
        if explanation is not None:
            yield explanation


def _explain_name(text: str) -> Explanation | None:
    """A code, a number or a symbol that stands by itself."""
    if found := _CODE.fullmatch(text):
        code = f"FMS-{found[1]}"
        return explain_condition(REGISTRY[Code(code)]) if code in REGISTRY else None
    if found := _SXID.fullmatch(text):
        return explain_sxid(int(found[1]))
    if found := _XID.fullmatch(text):
        return explain_xid(int(found[1]))
    if _SYMBOL.fullmatch(text) and (number := number_of_symbol(text)) is not None:
        return explain_sxid(number)
    return None


def _nearest(text: str, candidates: list[str]) -> tuple[str, ...]:
    """The candidates that look most like the text; of those that look alike, the nearest numbers."""
    number = _digits(text)

    def distance(candidate: str) -> tuple[float, int]:
        return -difflib.SequenceMatcher(None, text, candidate).ratio(), abs(_digits(candidate) - number)

    alike = (candidate for candidate in candidates if -distance(candidate)[0] >= _SIMILAR)
    return tuple(sorted(alike, key=distance)[:_SUGGESTION_LIMIT])


def _digits(text: str) -> int:
    return int("".join(filter(str.isdigit, text)) or "0")


def _words(text: str) -> frozenset[str]:
    return frozenset(_WORD.findall(text.lower())) - _COMMON_WORDS

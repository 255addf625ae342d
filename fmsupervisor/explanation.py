"""What ``fmsupervisor explain`` answers: a value, and its two forms, for people and for programs."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_LABEL_COLUMNS = 14
_TEXT_COLUMNS = 86


@dataclass(frozen=True, slots=True)
class Explanation:
    """One thing explained. ``facts``: name ("what_to_do") and sentence, in reading order."""

    kind: str  # "condition", "sxid", "xid", "fabric-manager-line", "kernel-line" or "words"
    name: str  # "FMS-601", "SXid 20034"
    title: str
    facts: tuple[tuple[str, str], ...]


def render_text(explanations: Sequence[Explanation]) -> str:
    """As a person reads it."""
    return "\n".join(map(_section, explanations))


def as_document(question: str, explanations: Sequence[Explanation], suggestions: Sequence[str]) -> dict[str, Any]:
    """As a program reads it."""
    return {
        "question": question,
        "explanations": [
            {"kind": each.kind, "name": each.name, "title": each.title, **dict(each.facts)} for each in explanations
        ],
        "suggestions": list(suggestions),
    }


def _section(explanation: Explanation) -> str:
    lines = [f"{explanation.name}: {explanation.title}"]
    for name, text in explanation.facts:
        wrapped = textwrap.wrap(text, _TEXT_COLUMNS, break_long_words=False, break_on_hyphens=False) or [""]
        lines.append(f"  {name.replace('_', ' '):<{_LABEL_COLUMNS}}{wrapped[0]}")
        lines += (f"{'':<{_LABEL_COLUMNS + 2}}{line}" for line in wrapped[1:])
    return "\n".join(lines) + "\n"

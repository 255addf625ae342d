"""The status document as its readers need it: where it is, which version it has, and how a person reads it.

Apart from ``status``, which makes the document, so that ``fmsupervisor status`` need not load the core.
"""

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

SCHEMA = 1
STATUS_FILE = "status.json"

Document = dict[str, Any]

_MARKS = {"ok": "ok", "waiting": "..", "failed": "!!", "unknown": "??", "skipped": "--"}
_MARK_COLOURS = {"ok": "32", "failed": "31", "unknown": "33"}
_STATE_COLOURS = {"configured": "32", "not-applicable": "32", "failed": "31", "degraded": "31", "backoff": "33"}
_SEVERITY_COLOURS = {"critical": "31", "warning": "33"}
_LAST_LINES = 5
_LINKS_SHOWN = 10


def render_text(document: Document, *, width: int | None = None, has_colour: bool = False) -> str:
    """The document as a person reads it; long lines are folded to ``width``, when there is one."""
    lines = _lines(document, has_colour=has_colour)
    return "\n".join(folded for line in lines for folded in _folded(line, width)) + "\n"


def _folded(line: str, width: int | None) -> list[str]:
    if width is None or len(line) <= width:
        return [line]
    import textwrap  # noqa: PLC0415 - only for people at narrow terminals

    indent = " " * min(len(line) - len(line.lstrip()) + 6, width // 3)
    return textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False, drop_whitespace=True) or [line]


def _painted(text: str, colour: str | None, *, has_colour: bool) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m" if has_colour and colour else text


def _lines(document: Document, *, has_colour: bool) -> Iterator[str]:
    state = _painted(document["state"], _STATE_COLOURS.get(document["state"]), has_colour=has_colour)
    age = _ago(document["updated_at"] - document["since"])
    yield f"fabric     {state} for {age} at {_clock(document['updated_at'])}{_open_conditions(document)}"
    yield f"           {document['reason']}"
    yield f"daemon     fmsupervisor {document['version']}, pid {document['pid']}"
    yield from _manager_lines(document)
    yield ""
    for step in document["steps"]:
        mark = _painted(_MARKS[step["status"]], _MARK_COLOURS.get(step["status"]), has_colour=has_colour)
        yield f"  {mark}  {step['name']:<17} {step['detail']}"
    yield from _switch_lines(document)
    yield from _link_lines(document)
    yield from _gpu_lines(document)
    yield from _guest_lines(document)
    yield from _condition_lines(document, has_colour=has_colour)


def _open_conditions(document: Document) -> str:
    """The number of open conditions by severity: what must not be missed stands in the first line."""
    counts = Counter(row["severity"] for row in document["conditions"])
    parts = [f"{counts[severity]} {severity}" for severity in ("critical", "warning") if counts[severity]]
    return f"; open conditions: {', '.join(parts)}" if parts else ""


def _manager_lines(document: Document) -> Iterator[str]:
    manager = document["fabric_manager"]
    if manager["pid"]:
        yield f"manager    {manager['version']}, pid {manager['pid']}, session {manager['session']}"
    if manager.get("log_file"):
        yield f"its log    {manager['log_file']}"
    last = manager["last_exit"]
    if last:
        yield f"last exit  {last['class']}, {_ago(document['updated_at'] - last['at'])} ago: {last['reason']}"
        if not manager["pid"]:
            yield from (f"             {line}" for line in last["last_lines"][-_LAST_LINES:])
    if manager.get("next_start_at"):
        pause = _ago(manager["next_start_at"] - document["updated_at"])
        yield f"next start in {pause}, at {_clock(manager['next_start_at'])}"


def _switch_lines(document: Document) -> Iterator[str]:
    if document["switches"]:
        yield ""
        yield "  NVSwitch       minor  physical id  driver           fabric state"
    for row in document["switches"]:
        state = row["driver_state"] or ("not observed" if row["present"] else "gone")
        yield (
            f"  {row['pci_bus_id']:<14} {_cell(row['minor']):<6} {_cell(row['physical_id']):<12} "
            f"{row['driver'] or 'none':<16} {state}"
        )


def _link_lines(document: Document) -> Iterator[str]:
    """The worst links; a document of an older daemon has none."""
    rows = document.get("links", [])
    if rows:
        yield ""
        yield "  link of        port   non-fatal errors in the last hour, in 24 hours; fatal in 24 hours"
    for row in rows[:_LINKS_SHOWN]:
        fatal = row.get("fatal_last_day", 0)
        yield f"  {row['pci_bus_id']:<14} {row['port']:<6} {row['last_hour']}, {row['last_day']}; {fatal}"
    if len(rows) > _LINKS_SHOWN:
        yield f"  and {len(rows) - _LINKS_SHOWN} links more: status --json"


def _gpu_lines(document: Document) -> Iterator[str]:
    if document["gpus"]:
        yield ""
        yield "  GPU            module id  driver           registered"
    for row in document["gpus"]:
        yield (
            f"  {row['pci_bus_id']:<14} {_cell(row['module_id']):<10} {row['driver'] or 'none':<16} "
            f"{_registration(row, document)}"
        )


def _guest_lines(document: Document) -> Iterator[str]:
    """Guests that hold GPUs; a document of an older daemon has none."""
    rows = document.get("guests", [])
    if rows:
        yield ""
        yield "  guest                            pid      GPUs  must be power-cycled"
    for row in rows:
        answer = "yes" if row["restart_required"] else "no"
        yield f"  {row['name']:<32} {row['pid']:<8} {len(row['gpus']):<5} {answer}"
    if document["gpus"] and document.get("guests_unknown"):
        yield f"  there may be other guests: {document['guests_unknown']}"


def _registration(row: Document, document: Document) -> str:
    if row.get("guest_restart_required"):
        return "no: power-cycle its guest"
    if row.get("registration_lost"):
        return "lost: reset the GPU" if row.get("gpu_reset_required") else "lost"
    if row["registered"]:
        return "yes"
    return "not yet" if document["session"] else "-"


def _condition_lines(document: Document, *, has_colour: bool) -> Iterator[str]:
    for row in document["conditions"]:
        severity = _painted(row["severity"], _SEVERITY_COLOURS.get(row["severity"]), has_colour=has_colour)
        yield ""
        yield f"  {row['code']} {severity}: {row['title']}"
        yield f"      found:  {row['detail']}"
        yield f"      remedy: {row['remedy']}"


def _cell(value: object) -> str:
    return "-" if value is None else str(value)


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def _ago(seconds: float) -> str:
    whole = max(0, int(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"

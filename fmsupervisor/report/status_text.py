"""The status document as its readers need it: where it is, which version it has, and how a person reads it.

Apart from ``status``, which makes the document, so that ``fmsupervisor status`` need not load the core.
"""

from collections.abc import Iterator
from typing import Any

SCHEMA = 1
STATUS_FILE = "status.json"

Document = dict[str, Any]

_MARKS = {"ok": "ok", "waiting": "..", "failed": "!!", "unknown": "??", "skipped": "--"}


def render_text(document: Document) -> str:
    """The document as a person reads it."""
    return "\n".join(_lines(document)) + "\n"


def _lines(document: Document) -> Iterator[str]:
    yield f"fabric     {document['state']} since {_ago(document['updated_at'] - document['since'])}"
    yield f"           {document['reason']}"
    yield f"daemon     fmsupervisor {document['version']}, pid {document['pid']}"
    manager = document["fabric_manager"]
    if manager["pid"]:
        yield f"manager    {manager['version']}, pid {manager['pid']}, session {manager['session']}"
    if manager["last_exit"]:
        last = manager["last_exit"]
        yield f"last exit  {last['class']}, {_ago(document['updated_at'] - last['at'])} ago: {last['reason']}"
    yield ""
    for step in document["steps"]:
        yield f"  {_MARKS[step['status']]}  {step['name']:<17} {step['detail']}"
    yield from _switch_lines(document)
    yield from _gpu_lines(document)
    yield from _condition_lines(document)


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


def _gpu_lines(document: Document) -> Iterator[str]:
    if document["gpus"]:
        yield ""
        yield "  GPU            module id  driver           registered"
    for row in document["gpus"]:
        registered = "yes" if row["registered"] else "not in this session"
        yield f"  {row['pci_bus_id']:<14} {_cell(row['module_id']):<10} {row['driver'] or 'none':<16} {registered}"


def _condition_lines(document: Document) -> Iterator[str]:
    for row in document["conditions"]:
        yield ""
        yield f"  {row['code']} {row['severity']}: {row['title']}"
        yield f"      found:  {row['detail']}"
        yield f"      remedy: {row['remedy']}"


def _cell(value: object) -> str:
    return "-" if value is None else str(value)


def _ago(seconds: float) -> str:
    whole = max(0, int(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"

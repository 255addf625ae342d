"""Whatever a decoder returns must be good for everybody behind it: the core, the status, the metrics.

A decoder that returns nonsense with a straight face is found out here, by whoever trips over it.
"""

import json

from _builders import configured, moment
from _input import check

from fmsupervisor.core import events
from fmsupervisor.core.plan import next_action, next_deadline
from fmsupervisor.core.reduce import reduce
from fmsupervisor.core.state import State
from fmsupervisor.core.verdict import verdict
from fmsupervisor.report.metrics import FabricCollector
from fmsupervisor.report.snapshot import Snapshot
from fmsupervisor.report.status import status_document
from fmsupervisor.report.status_text import render_text

_LONGEST_STATUS = 1 << 19  # characters; of one batch
_BEFORE = configured()
_DIGESTED: set[int] = set()


def digest(*happened: events.Event) -> None:
    """Feed the events to a configured fabric and tell everybody; the same ones only once."""
    told = hash(repr(happened))
    if told in _DIGESTED:
        return
    _DIGESTED.add(told)
    state = _BEFORE
    for event in happened:
        state = reduce(state, event, moment(state.now.monotonic + 1))
    tell_everybody(state)


def tell_everybody(state: State) -> None:
    """Ask the core what is the case, and show it."""
    now = verdict(state)
    next_action(state)
    check(next_deadline(state) > state.now.monotonic, "the next deadline is in the past")
    text = json.dumps(status_document(state, now, 0.0, {}), allow_nan=False)
    check(len(text) < _LONGEST_STATUS, f"a status of {len(text)} characters")
    text.encode("utf-8")
    render_text(json.loads(text)).encode("utf-8")
    snapshot = Snapshot(state, now)
    for family in FabricCollector(lambda: snapshot).collect():
        for sample in family.samples:
            check(all(label.encode() is not None and len(label) <= 128 for label in sample.labels.values()), sample)

"""Every state that can be reached keeps every promise, and none is a dead end (see ``_exploration`` for how it is done).

What each scene can lead to is kept in tests/golden/state-graph, and docs/state-graph.md is drawn from that. Renew both
with ``RENEW_GOLDEN=1``, twice.
"""

import os
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest
from _builders import make_installation
from _exploration import HOSTS, SCENES, Edge, Exploration, Scene, Surrounding, explore, key, settle
from _promises import check_promises, names_its_cure
from _world import check_step

from fmsupervisor.conditions import REGISTRY
from fmsupervisor.core import events
from fmsupervisor.core.plan import next_deadline
from fmsupervisor.core.reduce import reduce
from fmsupervisor.core.state import State
from fmsupervisor.core.verdict import DEGRADING, FabricState, verdict
from fmsupervisor.facts import ExitStatus, GuestReading, LogBatch, LogKind, LogRecord, Moment
from fmsupervisor.settings import Settings

DOCUMENT = Path(__file__).parents[3] / "docs" / "state-graph.md"
GOLDEN = Path(__file__).parents[2] / "golden" / "state-graph"
MOST_STATES = 1500
HEALTHY = Surrounding("whole", "configured")
PATIENCE = 60  # steps of a healthy host
_SUCCESS = events.LogRead(LogBatch("file", records=(LogRecord(LogKind.CONFIGURED, "INFO", "done"),)))


@cache
def explored(scene: Scene) -> Exploration:
    """What there is to find, every promise kept on the way."""
    return explore(scene, check_promises, MOST_STATES)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_every_state_keeps_every_promise_and_leads_on(scene: Scene) -> None:
    found = explored(scene)
    for edge in found.edges:
        check_step(edge.before, edge.after)
    good: set[object] = set()
    for state in found.states.values():
        _check_leads_on(state, good)
    check_golden(GOLDEN / f"{scene.name.replace(' ', '-')}.txt", _listing(transitions(found.edges)))


def check_golden(path: Path, actual: str) -> None:
    """The file has this content; with RENEW_GOLDEN it gets it."""
    if os.environ.get("RENEW_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(actual)
    assert actual == path.read_text(), f"renew {path.name} with RENEW_GOLDEN=1"


def _check_leads_on(state: State, good: set[object]) -> None:
    """On a healthy host it comes to configured or to its end, or waits for something that it names and that helps."""
    path = [state]
    for _ in range(PATIENCE):
        present = key(path[-1])
        if present in good or _is_at_its_end(path[-1]):
            break
        if len(path) > 4 and verdict(path[-1]).state is verdict(path[-4]).state is FabricState.FAILED:
            assert names_its_cure(verdict(path[-1]))
            path.append(_cured(path[-1]))
            continue
        path.append(_healthy_step(path[-1]))
    else:
        shown = verdict(path[-1])
        raise AssertionError(f"{verdict(state)} leads nowhere: {shown.state} ({shown.reason})")
    good.update(map(key, path))


def _is_at_its_end(state: State) -> bool:
    shown = verdict(state)
    if state.has_ended or shown.state is FabricState.CONFIGURED:
        return True
    lasting = [one.code for one in shown.problems if one.code in DEGRADING]
    is_lasting = state.run is not None and state.run.configured is not None and bool(lasting)
    return shown.state is FabricState.DEGRADED and is_lasting and all(REGISTRY[code].remedy for code in lasting)


def _healthy_step(state: State) -> State:
    """What is under way ends well, else Fabric Manager does its work, else time passes."""
    event: events.Event = events.TimePassed()
    run = state.run
    if state.is_inspecting:
        event = events.InstallationInspected(make_installation())
    elif state.is_loading:
        event = events.ModuleLoadEnded(None)
    elif state.is_looking_for_guests:
        event = events.GuestsLookedFor(GuestReading())
    elif state.has_orphans:
        event = events.OrphansEnded()
    elif run is not None and run.stop is not None:
        event = events.FabricManagerExited(ExitStatus(code=0), ())
    elif run is not None and run.success is None:
        event = _SUCCESS
    now = _later(state, 0.0 if not isinstance(event, events.TimePassed) else next_deadline(state) - state.now.monotonic)
    return settle(reduce(state, event, now), HEALTHY, lambda _: None)


def _cured(state: State) -> State:
    """Everything that a block may wait for has changed: settings, files, loaded driver."""
    now = _later(state, 1.0)
    for event in (
        events.SettingsReloaded(Settings()),
        events.InstallationInspected(make_installation(fingerprint="repaired")),
        events.HostObserved(HOSTS["module absent"]),
    ):
        state = reduce(state, event, now)
    return settle(reduce(state, events.HostMayHaveChanged(), _later(state, 15.0)), HEALTHY, lambda _: None)


def _later(state: State, seconds: float) -> Moment:
    return Moment(state.now.monotonic + seconds, state.now.wall + seconds)


def test_what_was_terminal_is_cured_only_by_what_it_names() -> None:
    """The other way round: a healthy host alone does not end a block; nothing is tried again blindly."""
    scene = next(scene for scene in SCENES if scene.name == "deaths")
    blocked = [state for state in explored(scene).states.values() if state.blocks and state.run is None]
    assert blocked
    for state in blocked[:20]:
        kept = state
        for _ in range(10):
            kept = _healthy_step(kept)
            assert kept.run is None
            assert [one.problem for one in kept.blocks] == [one.problem for one in state.blocks]


# --- the drawing

_PARTS = (
    ("On the way up", ("waiting-for-module", "waiting-for-switches", "not-applicable", "starting", "configuring")),
    ("While Fabric Manager works", ("configured", "degraded")),
    ("After its end", ("stopping", "backoff", "failed")),
)


def transitions(edges: Iterable[Edge]) -> Mapping[tuple[str, str], set[str]]:
    """Every change of what people are told, and by what it can come about."""
    seen: dict[tuple[str, str], set[str]] = {}
    for edge in edges:
        before, after = verdict(edge.before).state, verdict(edge.after).state
        if before is not after:
            what = edge.surrounding.news if edge.move.is_look else edge.move.what
            seen.setdefault((before, after), set()).add(what)
    return seen


def _listing(seen: Mapping[tuple[str, str], set[str]]) -> str:
    lines = (f"{before} -> {after}: {'; '.join(sorted(causes))}" for (before, after), causes in sorted(seen.items()))
    return "\n".join(lines) + "\n"


def kept() -> Mapping[tuple[str, str], set[str]]:
    """What all scenes together can lead to, as it is kept."""
    seen: dict[tuple[str, str], set[str]] = {}
    for scene in SCENES:
        for line in (GOLDEN / f"{scene.name.replace(' ', '-')}.txt").read_text().splitlines():
            pair, _, causes = line.partition(": ")
            before, _, after = pair.partition(" -> ")
            seen.setdefault((before, after), set()).update(causes.split("; "))
    return seen


def document() -> str:
    """The whole page."""
    seen = kept()
    lines = [
        "# The graph of states",
        "",
        "<!-- Made by the tests: RENEW_GOLDEN=1 pytest tests/unit/core/test_exploration.py, twice -->",
        "",
        "What [the ten states](states.md) mean stands there, with what happens in practice. Here is everything that *can*",
        "happen: found by trying, in every state that can be reached, every event and the passing of every deadline, with",
        "every outcome of what the daemon then looks at or does. States that differ in nothing that a decision depends on",
        "are taken for one (`tests/unit/core/_exploration.py` says what that is). In each of them it is checked that",
        "",
        "* `configured` is not claimed while a witness denies it or a degrading condition holds;",
        "* `failed` names what it waits for, and a change of that leads to `configured`;",
        "* there is no dead end: a healthy host leads from everywhere to `configured`, to conditions with a remedy, or to",
        "  the end of the service;",
        "* there are never two Fabric Managers, none while a condition forbids it, and none without a switch.",
        "",
        f"Explored with these settings and events: {', '.join(scene.name for scene in SCENES)}.",
        "",
        "A request to stop leads from every state to `stopping`, and is left out below.",
    ]
    for title, states in _PARTS:
        part = {pair: causes - {"stop requested"} for pair, causes in sorted(seen.items()) if pair[0] in states}
        part = {pair: causes for pair, causes in part.items() if causes}
        lines += ["", f"## {title}", "", "```mermaid", "stateDiagram-v2"]
        lines += [f"    {_node(before)} --> {_node(after)}" for before, after in part]
        lines += ["    stopping --> [*]"] if "stopping" in states else []
        lines += ["```", "", "| from | to | what can happen |", "|---|---|---|"]
        lines += [f"| {before} | {after} | {'; '.join(sorted(causes))} |" for (before, after), causes in part.items()]
    return "\n".join(lines) + "\n"


def _node(state: str) -> str:
    return state.replace("-", "_")


def test_every_state_that_people_are_told_is_reached() -> None:
    reached = {state for pair in kept() for state in pair}
    assert reached == set(FabricState) == {state for _, states in _PARTS for state in states}


def test_the_drawing_is_current() -> None:
    check_golden(DOCUMENT, document())

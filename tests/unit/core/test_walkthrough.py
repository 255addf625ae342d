"""The supervisor's behaviour as stories, each also replayed with every look at the world repeated at every point.

The diagram in docs/states.md is drawn from what happens in these stories, so that it cannot lie. Renew it with
``RENEW_GOLDEN=1``.
"""

import os
import re
from functools import cache
from pathlib import Path

import pytest
from _builders import codes, settings
from _stories import STORIES, Story, play
from _world import Behaviour, World

from fmsupervisor.core.actions import EndService, StartFabricManager
from fmsupervisor.core.events import StopRequested
from fmsupervisor.core.verdict import FabricState, verdict
from fmsupervisor.facts import ExitStatus

DOCUMENT = Path(__file__).parents[3] / "docs" / "states.md"
_GENERATED = re.compile(r"(?<=<!-- generated: begin -->\n).*?(?=<!-- generated: end -->)", re.DOTALL)
_CAUSES = {
    "TimePassed": "a timer",
    "HostMayHaveChanged": "a hardware event",
    "InstallationInspected": "files read",
    "PathsChanged": "files changed",
    "ModuleLoadEnded": "a load ended",
    "FabricManagerExited": "FM ended",
    "GuestsLookedFor": "guests looked for",
    "LogRead": "FM's log",
    "SettingsReloaded": "settings reloaded",
    "StopRequested": "stop requested",
}


def end_of(world: World) -> object:
    """What people see at the end of a story, without its times."""
    shown = verdict(world.state)
    counters = world.state.counters
    return shown.state, codes(shown.problems), counters.starts, dict(counters.exits), world.state.has_ended


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_every_event_leads_to_the_state_and_the_actions_of_the_story(story: Story) -> None:
    play(story)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_looking_again_at_any_point_changes_nothing_in_the_end(story: Story) -> None:
    undisturbed = end_of(play(story))
    for number, step in enumerate(story.rows):
        world = play(story, disturb_after=number)
        if not world.state.has_ended:  # files that are being read again may hold it up for a moment
            world.wait_for(story.rows[-1].state, most_seconds=3)
        assert end_of(world) == undisturbed, f"after: {step.what}"


def reach(wanted: FabricState) -> World:
    """A world in which people are told this state."""
    world = World(settings(restart={"policy": "never"}) if wanted is FabricState.FAILED else None)
    match wanted:
        case FabricState.NOT_APPLICABLE:
            world.chips = {}
        case FabricState.WAITING_FOR_SWITCHES:
            world.probes.clear()
        case FabricState.BACKOFF | FabricState.FAILED:
            world.behaviour = Behaviour(dies_at=0.5, status=ExitStatus(signal=11))
        case FabricState.DEGRADED:
            world.behaviour = Behaviour(driver_at=None)
        case _:
            pass
    world.begin()
    if wanted is FabricState.STOPPING:
        world.wait_for(FabricState.CONFIGURED)
        world.feed(StopRequested())
    world.wait_for(wanted)
    return world


@pytest.mark.parametrize("state", FabricState)
def test_a_stop_in_every_state_ends_the_service_exactly_once(state: FabricState) -> None:
    world = reach(state)
    starts = world.state.counters.starts
    world.taken.clear()
    world.feed(StopRequested())
    world.feed(StopRequested())
    world.wait(3600)
    assert not any(isinstance(action, StartFabricManager) for action in world.taken)
    assert (world.state.has_ended, world.state.run, world.state.counters.starts) == (True, None, starts)
    assert [type(action) for action in world.taken].count(EndService) == 1


@cache
def transitions() -> dict[tuple[str, str], set[str]]:
    """Every change of state in any story, and by what it came about."""
    seen: dict[tuple[str, str], set[str]] = {}
    for story in STORIES:
        for before, after, event in play(story).transitions:
            seen.setdefault((before or "[*]", after), set()).add(_CAUSES[event])
    return seen


def diagram() -> str:
    """The generated part of the document."""
    edges = sorted(transitions().items())
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += [f"    {_node(before)} --> {_node(after)}" for (before, after), _ in edges]
    lines += ["    stopping --> [*]", "```", "", "| from | to | what happened |", "|---|---|---|"]
    lines += [f"| {before} | {after} | {'; '.join(sorted(causes))} |" for (before, after), causes in edges]
    return "\n".join(lines) + "\n"


def _node(state: str) -> str:
    return state.replace("-", "_")


def test_the_diagram_shows_what_happens_in_the_stories() -> None:
    document = DOCUMENT.read_text()
    renewed = _GENERATED.sub(lambda _: diagram(), document)
    if os.environ.get("RENEW_GOLDEN"):
        DOCUMENT.write_text(renewed)
    assert renewed == DOCUMENT.read_text(), "renew docs/states.md with RENEW_GOLDEN=1"


def test_every_state_occurs_in_a_story_and_is_explained() -> None:
    reached = {after for _, after in transitions()}
    explained = set(re.findall(r"^\| `([a-z-]+)` \|", DOCUMENT.read_text(), re.MULTILINE))
    assert reached == explained == {str(state) for state in FabricState}

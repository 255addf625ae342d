"""Any event in any order: what the whole union ``Event`` can do to the core, plausible or not.

The events are made from their types (``_any``), so that an event which is added later is tried here without anybody
thinking of it. What hypothesis draws is the source of chance and how many events there are: a failure is shrunk to the
shortest history.
"""

import os
from random import Random

import pytest
from _any import BUSES, EVENTS, GPUS, SETTINGS, Anything
from _builders import make_state
from _promises import FILES, MOST_LEAVES, check_promises, failed_looks, faults, later, leaves
from _world import check_step
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fmsupervisor.core import events
from fmsupervisor.core.plan import next_action
from fmsupervisor.core.reduce import reduce
from fmsupervisor.core.state import State
from fmsupervisor.core.verdict import FabricState, verdict

SOAK_EVENTS = int(
    os.environ.get("SOAK_EVENTS", "20000")
)  # of each seed; each event is made once and happens about five times
_PAUSES = (0.0, 0.0, 0.1, 1.0, 12.0, 40.0, 1000.0)

seeds = st.integers(0, 1 << 32)
lengths = st.integers(1, 80)
property_test = hypothesis_settings(
    max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)


def step(state: State, event: events.Event, seconds: float) -> State:
    """The state after the event, when nothing that only grows became less."""
    after = reduce(state, event, later(state, seconds))
    check_step(state, after)
    return after


def history(chance: Random, length: int, *, stops: bool = False) -> State:
    """The state after that many random events; half of the time what the plan wants is done in between."""
    make = Anything(chance)
    kinds = tuple(kind for kind in EVENTS if stops or kind is not events.StopRequested)
    state = make_state(chance.choice(SETTINGS))
    for _ in range(length):
        make.now = state.now.monotonic
        state = step(state, make.event(chance.choice(kinds)), chance.choice(_PAUSES))
        action = next_action(state)
        if action is not None and chance.random() < 0.5:
            state = step(state, events.ActionTaken(action), 0.0)
    return state


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
@property_test
@given(seeds, lengths)
def test_an_event_of_any_kind_leads_from_any_state_to_one_that_keeps_every_promise(
    kind: type, seed: int, length: int
) -> None:
    chance = Random(seed)
    state = history(chance, length, stops=True)
    check_promises(state)
    make = Anything(chance)
    make.now = state.now.monotonic
    check_promises(step(state, make.event(kind), chance.choice(_PAUSES)))


@property_test
@given(seeds, lengths, st.integers(1, 40), st.sets(st.sampled_from([*FILES, *BUSES, *GPUS])))
def test_looks_that_fail_neither_set_nor_clear_a_fault(seed: int, length: int, looks: int, hidden: set[str]) -> None:
    chance = Random(seed)
    blind = dark = history(chance, length)
    for _ in range(looks):
        pause = chance.choice(_PAUSES)
        failed, as_good = chance.choice(list(failed_looks(dark, tuple(hidden))))
        dark, blind = step(dark, failed, pause), step(blind, as_good, pause)
        assert faults(dark) == faults(blind)
        shown = {verdict(blind).state, verdict(dark).state}
        assert len(shown) == 1 or not shown & {FabricState.CONFIGURED, FabricState.DEGRADED}


@pytest.mark.parametrize("seed", range(2))
def test_soak(seed: int) -> None:
    """The state stays bounded, although half of all texts are new ones, and never breaks a promise."""
    chance = Random(seed)
    make = Anything(chance, novelty=0.5)
    kinds = tuple(kind for kind in EVENTS if kind is not events.StopRequested)
    state = make_state(chance.choice(SETTINGS))
    largest = 0
    seen: set[FabricState] = set()
    pool: tuple[events.Event, ...] = ()
    for number in range(SOAK_EVENTS):
        if number % 500 == 0:
            make.now = state.now.monotonic
            pool = tuple(make.event(chance.choice(kinds)) for _ in range(100))
        state = reduce(state, chance.choice(pool), later(state, chance.choice(_PAUSES[:5])))
        if number % 50 == 0:
            seen.add(check_promises(state).state)
        if number % 1000 == 0:
            largest = max(largest, leaves(state))
    assert largest < MOST_LEAVES
    assert len(seen) >= 5

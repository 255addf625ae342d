"""core.switch_errors: an SXid that two witnesses report counts once."""

from collections import Counter
from dataclasses import replace

import pytest
from _builders import SWITCHES, after, codes, configured, kernel_said, ready, said, sxid
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fmsupervisor.conditions import Code
from fmsupervisor.core import events
from fmsupervisor.core.diagnosis import problems
from fmsupervisor.core.state import State
from fmsupervisor.facts import ExitStatus, KernelBatch, SwitchErrorKey

KEY = SwitchErrorKey(SWITCHES[0], 12028, "non-fatal", 35)
OTHER_PORT = replace(KEY, port=42)
NO_PORT = replace(KEY, port=None)
FATAL = SwitchErrorKey(SWITCHES[3], 20034, "fatal", 33)
CRASH = events.FabricManagerExited(ExitStatus(signal=9), ())
UNREADABLE = events.KernelLogRead(KernelBatch(problem="permission denied"))


def reported(*keys: SwitchErrorKey) -> events.LogRead:
    """Fabric Manager reports these."""
    return said(switch_errors=Counter(keys))


def printed(*keys: SwitchErrorKey, is_old: bool = False) -> events.KernelLogRead:
    """The kernel prints these."""
    return kernel_said(*(sxid(key, is_old=is_old) for key in keys))


def total(state: State) -> int:
    """All that was counted."""
    return sum(state.counters.switch_errors.values())


@pytest.mark.parametrize(
    ("happened", "count"),
    [
        pytest.param((printed(KEY),), 1, id="the kernel only"),
        pytest.param((reported(KEY),), 1, id="Fabric Manager only"),
        pytest.param((printed(KEY), reported(KEY)), 1, id="the kernel first"),
        pytest.param((reported(KEY), printed(KEY)), 1, id="Fabric Manager first"),
        pytest.param((printed(KEY, KEY), reported(KEY), reported(KEY)), 2, id="twice, both by both"),
        pytest.param((printed(KEY), printed(KEY), reported(KEY)), 2, id="twice, and reported once"),
        pytest.param((reported(KEY), printed(KEY), printed(KEY)), 2, id="twice, reported once and first"),
        pytest.param((printed(KEY), reported(OTHER_PORT)), 2, id="two ports"),
        pytest.param((printed(NO_PORT), reported(KEY)), 1, id="the kernel names no port"),
        pytest.param((reported(KEY), printed(NO_PORT)), 1, id="the kernel names no port and comes second"),
        pytest.param((printed(KEY), reported(replace(KEY, pci_bus_id=SWITCHES[1]))), 2, id="two switches"),
        pytest.param((printed(KEY), reported(replace(KEY, sxid=12029))), 2, id="two numbers"),
    ],
)
def test_an_event_counts_once(happened: tuple[events.Event, ...], count: int) -> None:
    assert total(after(configured(), *happened)) == count


def test_a_kernel_event_long_after_a_report_is_another_one() -> None:
    state = after(after(configured(), reported(KEY)), printed(KEY), seconds=16)
    assert total(state) == 2


def test_a_report_long_after_a_kernel_event_is_the_same_one() -> None:
    """The driver keeps what happened while Fabric Manager was down."""
    state = after(after(configured(), CRASH), printed(KEY, KEY), seconds=1)
    state = after(state, events.FabricManagerStarted(2, "second"), reported(KEY, KEY), seconds=600)
    assert total(state) == 2


@pytest.mark.parametrize("gap", [UNREADABLE, kernel_said(lost=3)], ids=["unreadable", "overrun"])
def test_after_a_gap_in_the_kernel_log_a_late_report_counts(gap: events.Event) -> None:
    state = after(after(configured(), printed(KEY)), gap, seconds=16)
    assert total(after(state, reported(KEY))) == 2


@pytest.mark.parametrize("gap", [UNREADABLE, kernel_said(lost=3)], ids=["unreadable", "overrun"])
def test_a_prompt_report_does_not_even_then(gap: events.Event) -> None:
    assert total(after(configured(), printed(KEY), gap, reported(KEY))) == 1


def test_events_from_before_are_counted_apart_and_reports_of_them_not_at_all() -> None:
    state = after(ready(), printed(KEY, KEY, FATAL, is_old=True))
    state = after(state, events.FabricManagerStarted(1, "first"), reported(KEY, KEY, FATAL), seconds=60)
    assert total(state) == 0
    assert state.counters.switch_errors_before_start == {KEY: 2, FATAL: 1}
    assert Code.SXID_FATAL not in codes(problems(state))


@pytest.mark.parametrize("happened", [(printed(FATAL),), (reported(FATAL),), (reported(FATAL), printed(FATAL))])
def test_a_fatal_one_is_a_condition_whoever_tells_it(happened: tuple[events.Event, ...]) -> None:
    found = [one for one in problems(after(configured(), *happened)) if one.code is Code.SXID_FATAL]
    assert [one.subject for one in found] == [SWITCHES[3]]


def test_a_fatal_one_is_a_condition_while_fabric_manager_is_down() -> None:
    assert Code.SXID_FATAL in codes(problems(after(configured(), CRASH, printed(FATAL))))


def test_memory_is_bounded() -> None:
    state = configured()
    for number in range(20):
        keys = [SwitchErrorKey(f"0000:{one % 200:02x}:00.0", number, "non-fatal", one) for one in range(1000)]
        state = after(state, printed(*keys))
    assert len(state.error_balances) <= 4096
    assert len(state.counters.switch_errors) <= 4096 + 10
    assert total(state) == 20_000


ports = st.sampled_from([0, 1, 35])
keys = st.builds(
    SwitchErrorKey,
    st.sampled_from(SWITCHES[:2]),
    st.sampled_from([12028, 20034]),
    st.just("non-fatal"),
    ports,
)


@hypothesis_settings(max_examples=200, deadline=None, database=None)
@given(st.lists(keys, max_size=12), st.data())
def test_any_order_and_any_cut_of_the_same_events_counts_the_same(
    happened: list[SwitchErrorKey], data: st.DataObject
) -> None:
    """Fabric Manager reports some of the events; both logs are cut into batches anywhere and read in any order."""
    choice = data.draw(st.lists(st.booleans(), min_size=len(happened), max_size=len(happened)))
    told = [key for key, is_told in zip(happened, choice, strict=True) if is_told]
    witnesses = data.draw(
        st.permutations([*(("kernel", key) for key in happened), *(("manager", key) for key in told)])
    )
    cuts = data.draw(st.lists(st.booleans(), min_size=len(witnesses), max_size=len(witnesses)))
    state = configured()
    waiting: dict[str, list[SwitchErrorKey]] = {"kernel": [], "manager": []}
    for (witness, key), is_cut in zip(witnesses, cuts, strict=True):
        waiting[witness].append(key)
        if is_cut:
            state = read(state, waiting)
    state = read(state, waiting)
    assert dict(state.counters.switch_errors) == dict(Counter(happened))


def read(state: State, waiting: dict[str, list[SwitchErrorKey]]) -> State:
    """Both logs are read."""
    state = after(state, printed(*waiting["kernel"]), reported(*waiting["manager"]), seconds=0.1)
    waiting["kernel"].clear()
    waiting["manager"].clear()
    return state

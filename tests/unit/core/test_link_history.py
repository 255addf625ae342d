"""core.link_history: the non-fatal errors of each link in the last hour and day."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from _builders import SWITCHES, after, configured, kernel_said, said, sxid

from fmsupervisor.core.link_history import DAY_SECONDS, HOUR_SECONDS, errors_within, faults_within
from fmsupervisor.core.state import State
from fmsupervisor.facts import SwitchErrorKey

KEY = SwitchErrorKey(SWITCHES[0], 12028, "non-fatal", 35)
LINK = (SWITCHES[0], 35)


def lately(state: State) -> tuple[Mapping[tuple[str, int], int], Mapping[tuple[str, int], int]]:
    """Within the hour and within the day."""
    return errors_within(state, HOUR_SECONDS), errors_within(state, DAY_SECONDS)


def test_errors_of_a_link_are_summed_over_numbers_and_witnesses() -> None:
    state = after(configured(), kernel_said(sxid(KEY), sxid(replace(KEY, sxid=20001))), said(switch_errors={KEY: 1}))
    assert lately(state) == ({LINK: 2}, {LINK: 2})


@pytest.mark.parametrize(
    ("seconds", "within_hour", "within_day"),
    [(0.0, 1, 1), (3000.0, 1, 1), (4300.0, 0, 1), (85_000.0, 0, 1), (87_100.0, 0, 0)],
)
def test_they_grow_old(seconds: float, within_hour: int, within_day: int) -> None:
    hour, day = lately(after(after(configured(), kernel_said(sxid(KEY))), seconds=seconds))
    assert (hour.get(LINK, 0), day.get(LINK, 0)) == (within_hour, within_day)


@pytest.mark.parametrize(
    "key",
    [
        replace(KEY, severity="fatal"),
        replace(KEY, sxid=22013),
        replace(KEY, port=None),
        replace(KEY, pci_bus_id="0000:ff:00.0"),
    ],
    ids=["fatal", "to be ignored", "of no link", "of no switch of this host"],
)
def test_some_are_left_out(key: SwitchErrorKey) -> None:
    assert lately(after(configured(), kernel_said(sxid(key)))) == ({}, {})


def test_fatal_ones_are_counted_apart_so_that_a_link_that_comes_and_goes_shows() -> None:
    fault = replace(KEY, sxid=20034, severity="fatal")
    state = configured()
    for _ in range(3):
        state = after(state, kernel_said(sxid(fault)), seconds=2 * HOUR_SECONDS)
    state = after(after(state, seconds=2 * HOUR_SECONDS), kernel_said(sxid(replace(fault, port=36))))
    assert faults_within(state, DAY_SECONDS) == {LINK: 3, (SWITCHES[0], 36): 1}
    assert faults_within(state, HOUR_SECONDS) == {(SWITCHES[0], 36): 1}
    assert errors_within(state, DAY_SECONDS) == {}


def test_those_from_before_the_start_are_left_out() -> None:
    assert lately(after(configured(), kernel_said(sxid(KEY, is_old=True)))) == ({}, {})


def test_memory_is_bounded() -> None:
    state = configured()
    for hour in range(60):
        keys = [replace(KEY, pci_bus_id=bus_id, port=port) for bus_id in SWITCHES for port in range(200)]
        state = after(state, kernel_said(*map(sxid, keys)), seconds=3600.0)
        assert len(state.link_errors) <= 512, hour
    assert max(len(slots) for slots in state.link_errors.values()) <= 25

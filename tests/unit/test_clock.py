"""Time as the rest of the program sees it."""

import time

import pytest

from fmsupervisor.clock import Clock


def test_a_clock_at_speed_1_shows_the_clocks_of_the_host() -> None:
    before = (time.monotonic(), time.time())
    now = Clock().now()
    after = (time.monotonic(), time.time())
    assert before[0] <= now.monotonic <= after[0]
    assert before[1] <= now.wall <= after[1]


def test_a_clock_at_speed_1_follows_a_step_of_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "time", lambda: 4_000_000_000.0)
    assert clock.now().wall == 4_000_000_000.0


@pytest.mark.parametrize("speed", [0.5, 20.0, 1000.0])
def test_both_clocks_run_at_the_given_speed(speed: float) -> None:
    begun = time.monotonic()
    clock = Clock(speed)
    first = clock.now()
    time.sleep(0.01)
    second = clock.now()
    least, most = 0.01 * speed, (time.monotonic() - begun) * speed
    assert least <= second.monotonic - first.monotonic <= most
    assert second.wall - first.wall == pytest.approx(second.monotonic - first.monotonic, abs=1e-3)


def test_a_fast_clock_begins_at_the_present() -> None:
    before = time.monotonic()
    clock = Clock(1000.0)
    now = clock.now().monotonic
    assert before <= now <= before + (time.monotonic() - before) * 1000


@pytest.mark.parametrize("speed", [1.0, 20.0])
def test_the_time_to_sleep_is_in_seconds_of_the_world(speed: float) -> None:
    clock = Clock(speed)
    target = clock.now().monotonic + 10 * speed
    assert 9 < clock.real_seconds_until(target) <= 10


@pytest.mark.parametrize("target", [0.0, float("-inf")], ids=["past", "never-looked"])
def test_there_is_nothing_to_sleep_until_what_is_past(target: float) -> None:
    assert Clock(20.0).real_seconds_until(target) == 0.0


def test_what_never_comes_is_waited_for_without_end() -> None:
    assert Clock(20.0).real_seconds_until(float("inf")) == float("inf")

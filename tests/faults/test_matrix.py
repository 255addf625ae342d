"""Every row of the fault matrix against the daemon as a process of its own."""

import os
import re
from pathlib import Path

import pytest

from tests.faults.matrix import ABOUT_GUESTS, FAULTS, Fault
from tests.faults.stage import Stage


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.root] if row.setting.small_disks else []) for name, row in FAULTS.items()],
)
def test_fault(name: str, tmp_path: Path) -> None:
    row = FAULTS[name]
    if row.setting.small_disks and os.geteuid() != 0:
        pytest.skip("needs root to mount file systems")
    with Stage(tmp_path / "host", row.setting) as stage:
        stage.until_running()
        if row.before:
            stage.until(lambda: stage.active >= {*row.before}, f"{row.before}")
        else:
            stage.get("/healthz")  # from now on its thread is there
        held, inventory, manager = stage.active - ABOUT_GUESTS, stage.settled_inventory(), stage.managers[-1]
        raised, states = len(stage.raised), len(stage.letters)
        with row.make(stage, *row.arguments):
            _check_fault(stage, row, held, states)
            after = len(stage.letters)
        _check_cure(stage, row, held, after)
        expected = {*row.conditions, *row.late}
        assert set(stage.raised[raised:]) - ABOUT_GUESTS - {*row.maybe} == expected, stage.words()
        if not row.before:  # else it has begun to serve meanwhile
            stage.until(lambda: not stage.inventory().exceeds(inventory), f"more than {inventory}")
        assert (stage.managers == [manager]) == row.is_manager_kept
        _check_end(stage)


def _check_fault(stage: Stage, row: Fault, held: set[str], since: int) -> None:
    """It is seen, and nothing else is made of it after another look."""
    wanted = held | {*row.conditions} - {*row.passing}

    def is_as_expected() -> bool:
        return stage.active - ABOUT_GUESTS == wanted and _matches(row.states, stage.letters[since:])

    what = f"{row.states or 'no change'} with {sorted(wanted)}"
    stage.until(is_as_expected, what)
    stage.until_looked_again()
    stage.until(is_as_expected, f"{what}, still")
    if row.is_answering:
        assert stage.get("/healthz") == (200, "ok\n")


def _check_cure(stage: Stage, row: Fault, held: set[str], since: int) -> None:
    wanted = held - {*row.before} | {*row.lasting}

    def is_as_expected() -> bool:
        return stage.active - ABOUT_GUESTS == wanted and _matches(row.recovered, stage.letters[since:])

    stage.until(is_as_expected, f"{row.recovered or 'no change'} with {sorted(wanted)}")
    assert stage.until(lambda: stage.get("/healthz") == (200, "ok\n"), "/healthz answers")


def _check_end(stage: Stage) -> None:
    assert stage.end() == 0, stage.words()
    assert stage.letters.endswith("X")
    assert "Traceback" not in stage.errors.read_text()
    assert not [line for line in stage.lines if "exception" in line]
    assert stage.processes() == []


def _matches(states: str, seen: str) -> bool:
    """At this speed "configuring" may pass unseen."""
    return re.fullmatch(states.replace("c", "c?"), seen) is not None

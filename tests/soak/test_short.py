"""The short forms of ``make soak``."""

from pathlib import Path

from tests.soak import runs


def test_crashes_of_fabric_manager_leave_nothing_behind(tmp_path: Path) -> None:
    assert runs.crashes(tmp_path, 150, 50).faults == []


def test_successors_leave_nothing_behind(tmp_path: Path) -> None:
    assert runs.successors(tmp_path, 5).faults == []


def test_kills_of_the_supervisor_at_random_moments_leave_one_fabric_manager(tmp_path: Path) -> None:
    assert runs.kills(tmp_path, 5).faults == []

"""core.versions: what the installation tests do not show: unreadable, odd and enormous version numbers."""

from dataclasses import replace

import pytest
from _builders import CHOICE, VERSION, codes, make_installation

from fmsupervisor.conditions import Code
from fmsupervisor.core.versions import version_problems
from fmsupervisor.facts import Installation


def installed(module: str | None, manager: str | None, nscq: str | None) -> Installation:
    """These versions; None: not there, or not readable."""
    choice = replace(CHOICE, version=module) if module is not None else None
    return make_installation(module=choice, fabric_manager_version=manager, nscq_version=nscq)


ROWS: tuple[tuple[str, Installation, str | None, set[Code]], ...] = (
    ("nothing is known", installed(None, None, None), None, set()),
    ("one is known", installed(None, VERSION, None), None, set()),
    ("a module without a version", installed("", VERSION, VERSION), None, set()),
    ("all agree", installed(VERSION, VERSION, VERSION), VERSION, set()),
    ("one unknown, the others agree", installed(VERSION, None, VERSION), VERSION, set()),
    ("one unknown, the others do not", installed(VERSION, None, "1.2"), None, {Code.VERSION_MISMATCH}),
    ("zeros count", installed("570.086.15", "570.86.15", None), None, {Code.VERSION_MISMATCH}),
    ("all newer than loaded", installed("590.1", "590.1", "590.1"), "580.1", {Code.RELOAD_NEEDED}),
    ("all older than loaded", installed("570.1", "570.1", "570.1"), "580.1", {Code.VERSION_MISMATCH}),
    ("only the module is newer", installed("590.1", "580.1", "580.1"), "580.1", {Code.VERSION_MISMATCH}),
    ("only a module is installed", installed("590.1", None, None), "580.1", {Code.VERSION_MISMATCH}),
    ("numbers, not texts", installed("580.100", "580.100", "580.100"), "580.99", {Code.RELOAD_NEEDED}),
    ("enormous", installed("9" * 5000, "9" * 5000, None), "580.1", {Code.RELOAD_NEEDED}),
    ("no numbers", installed("abc", "abc", None), "580.1", {Code.VERSION_MISMATCH}),
)


@pytest.mark.parametrize(("found", "loaded", "expected"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_versions_that_differ_are_named(found: Installation, loaded: str | None, expected: set[Code]) -> None:
    problems = version_problems(found, loaded)
    assert codes(problems) == expected
    for problem in problems:
        known = [found.fabric_manager_version, found.nscq_version, loaded]
        assert all(version in problem.detail for version in known if version)

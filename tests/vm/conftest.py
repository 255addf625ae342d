"""Tests in a virtual machine: one bed for all, a fresh machine for each, and everything worth reading after a failure."""

import os
import re
import shutil
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, os.path.dirname(__file__))

from bed import Bed, Machine, obstacle
from guests import WHOLE, check_guest, guest

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this directory need the same (tests/conftest.py sees to it that they run on one worker)."""
    for item in items:
        if HERE in item.path.parents:
            for mark in (pytest.mark.vm, pytest.mark.root, pytest.mark.slow):
                item.add_marker(mark)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Lets the fixture below know how the test ended."""
    report = yield
    if report.when == "call":
        item.stash[_FAILED] = report.failed
    return report


@pytest.fixture(scope="session")
def bed() -> Iterator[Bed]:
    """The bed, built. Minutes when it is built for the first time."""
    reason = obstacle()
    if reason is not None:
        pytest.skip(reason)
    made = Bed(REPOSITORY / "build" / "vm")
    made.build()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _artifacts(request: pytest.FixtureRequest) -> None:
    """Machines of a test that fails leave their console and journal where its name says."""
    if "bed" in request.fixturenames:
        directory = REPOSITORY / "test-artifacts" / "vm" / re.sub(r"[^\w.-]+", "_", request.node.name)
        shutil.rmtree(directory, ignore_errors=True)
        request.getfixturevalue("bed").artifacts = directory


@pytest.fixture
def whole(bed: Bed, _artifacts: None, request: pytest.FixtureRequest) -> Iterator[Machine]:
    """A fresh machine with a configured fabric, all GPUs registered, and a guest, which in the end has noticed nothing."""
    with bed.restore(after=WHOLE) as made:
        pid = guest(made)
        yield made
        if request.node.stash.get(_FAILED, False):
            made.keep()
        check_guest(made, pid)


_FAILED = pytest.StashKey[bool]()

"""What all tests share: in CI, a test that needs root or a tool must not be skipped."""

import os
import sys
from typing import Any

import pytest

_ALLOWED_SKIPS = ("root may", "no IPv6")
_ON_ONE_WORKER = (
    # Virtual machines, side by side: a worker builds up the saved states that its tests start from.
    ("tests/vm/test_same_story.py", "tests/vm/test_module.py", "tests/vm/test_nodes.py", "tests/vm/test_switches.py"),
    ("tests/vm/",),
    ("tests/prometheus/test_end_to_end.py",),
    ("tests/prometheus/test_alerts.py",),
)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Remember what was skipped, for the verdict at the end."""
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped.append((report.nodeid, _reason(report)))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI (which is root) only what can only be tested without root may be skipped."""
    if not os.environ.get("CI") or hasattr(session.config, "workerinput"):
        return
    wrong = [f"{nodeid}: {reason}" for nodeid, reason in _skipped if not any(word in reason for word in _ALLOWED_SKIPS)]
    if wrong and session.exitstatus == pytest.ExitCode.OK:
        sys.stdout.write("\nskipped in CI, which is a failure there:\n" + "\n".join(wrong) + "\n")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadgroup`` one worker gets all tests that share something costly; every other test goes where room is.

    xdist's own groups do not work with every pytest: they write into a private attribute of the items.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class _OneWorkerForSome(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((group[0] for group in _ON_ONE_WORKER if any(tests in nodeid for tests in group)), nodeid)

    return _OneWorkerForSome(config, log)


def _reason(report: pytest.TestReport) -> str:
    longrepr = report.longrepr
    return str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)


_skipped: list[tuple[str, str]] = []

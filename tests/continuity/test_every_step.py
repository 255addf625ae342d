"""Killed at every boundary between two steps of the start, the supervisor comes to the same end all the same."""

import os
import sys
from pathlib import Path

import pytest

from tests.continuity.daemon import Host, host

INTERRUPTED = (sys.executable, str(Path(__file__).with_name("interrupted.py")))

# In the order in which they first come. The first test fails when the daemon gets another one.
BOUNDARIES = """
before making fmsupervisor
before ObserveHost
after ObserveHost
before InspectInstallation
after InspectInstallation
before LookForGuests
after LookForGuests
before renaming to handover.json
after writing handover.json
before renaming to status.json
after writing status.json
before executing nv-fabricmanager --version
after executing nv-fabricmanager --version
before PrepareConfig
before making nvidia-fabricmanager
before making database
before renaming to fm.cfg
after writing fm.cfg
after PrepareConfig
before LookForForeign
after LookForForeign
before LoadModule
after LoadModule
before loading the module
after loading the module
before EnsureNodes
before renaming to nvidia-nvswitchctl
before renaming to nvidia-nvswitch0
before renaming to nvidia-nvswitch1
before renaming to nvidia-nvswitch2
before renaming to nvidia-nvswitch3
before renaming to nvidia-nvlink
before renaming to nvidiactl
before renaming to nvidia-cap0
after EnsureNodes
before ObserveDriver
after ObserveDriver
before StartFabricManager
before executing nv-fabricmanager -c
after executing nv-fabricmanager -c
after StartFabricManager
before renaming to fmsupervisor-modules.json
after writing fmsupervisor-modules.json
"""

_VOLATILE = ("status.json", "handover.json", "lock", "fabricmanager.log", "heartbeat", "toml", "log")


def _result(one: Host) -> dict[str, str]:
    """What is left on disk at the end: every file and, of what the daemon makes, its content."""
    found = {}
    for directory, _, names in os.walk(one.directory):
        for name in names:
            path = f"{directory}/{name}"
            logical = path[len(str(one.directory)) :]
            is_ours = logical.startswith("/dev/") or name == "fm.cfg"
            found[logical] = Path(path).read_text() if is_ours and os.path.isfile(path) else ""
    return {name: text for name, text in found.items() if not name.endswith(_VOLATILE)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, str]]:
    """The boundaries of a start that nobody disturbs, and what it comes to."""
    directory = tmp_path_factory.mktemp("undisturbed")
    listing = directory / "boundaries"
    with host(directory) as one, pytest.MonkeyPatch.context() as patch:
        patch.setenv("FMSUPERVISOR_TEST_LIST", str(listing))
        one.start(*INTERRUPTED)
        one.until_configured()
        one.until(lambda: one.document["fabric_manager"]["gpus_registered"] == 8)
        boundaries = list(dict.fromkeys(listing.read_text().splitlines()))
        one.stop()
        result = _result(one)
    return boundaries, result


def test_the_list_of_boundaries_is_complete(undisturbed: tuple[list[str], dict[str, str]]) -> None:
    boundaries, _ = undisturbed
    assert sorted(boundaries) == sorted(BOUNDARIES.split("\n")[1:-1])


@pytest.mark.parametrize("boundary", BOUNDARIES.split("\n")[1:-1])
def test_a_kill(
    boundary: str, undisturbed: tuple[list[str], dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = undisturbed
    with host(tmp_path) as one:
        monkeypatch.setenv("FMSUPERVISOR_TEST_KILL", boundary)
        one.start(*INTERRUPTED)
        assert one.daemon is not None
        assert one.daemon.wait(60) == -9, "the boundary was not reached"
        managers = set(one.processes())
        monkeypatch.delenv("FMSUPERVISOR_TEST_KILL")
        one.start(*INTERRUPTED)
        one.until_configured()
        one.until(lambda: one.document["fabric_manager"]["gpus_registered"] == 8)
        running = set(one.processes())
        assert running == {one.manager}
        assert not managers or managers == running, "Fabric Manager was started twice"
        assert one.stop() == 0
        assert one.processes() == {}
        assert _result(one) == expected

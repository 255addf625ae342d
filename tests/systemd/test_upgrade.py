"""``systemctl reload`` after an upgrade: the new version goes on in the same process, or the old one says why not.

The daemon is a copy of the package at a place of its own, where files can be replaced. The unit is the shipped one.
"""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.systemd.container import REPOSITORY
from tests.systemd.machine import PROGRAM, SERVICE, Machine, python_program

pytestmark = [pytest.mark.root, pytest.mark.xdist_group("systemd-upgrade")]

PLACE = "/usr/local/lib/fmsupervisor-test"
UPGRADED = f"{PLACE}/bin/fmsupervisor"
LISTEN = "127.0.0.1:9752"
WATCHDOG_SECONDS = 20
SCRAPER = "/usr/local/bin/fmsupervisor-scraper"

# Asks without a pause until its standard input ends; then says how often, and what went wrong.
SCRAPE = f"""
import json, select, urllib.request
asked, errors = 0, []
while not select.select([sys.stdin], [], [], 0)[0]:
    asked += 1
    try:
        with urllib.request.urlopen("http://{LISTEN}/metrics", timeout=60) as answer:
            assert answer.status == 200
            assert b"fmsupervisor_build_info" in answer.read()
    except Exception as error:
        errors.append(repr(error))
print(json.dumps([asked, errors]))
"""


@pytest.fixture
def package(machine: Machine) -> Path:
    """The directory of the daemon's modules."""
    place = machine.path(PLACE)
    shutil.rmtree(place, ignore_errors=True)
    (place / "bin").mkdir(parents=True)
    shutil.copytree(REPOSITORY / "fmsupervisor", place / "fmsupervisor")
    machine.path(UPGRADED).write_text(
        python_program("from fmsupervisor.cli import main\nsys.exit(main())\n").replace("/opt/fmsupervisor", PLACE)
    )
    machine.path(UPGRADED).chmod(0o755)
    return place / "fmsupervisor"


@pytest.fixture
def modules(machine: Machine, package: Path) -> Path:
    """The same, of a daemon whose fabric is configured."""
    machine.build_host(program=UPGRADED, metrics=LISTEN, more=f"WatchdogSec={WATCHDOG_SECONDS}")
    machine.do("start", SERVICE)
    assert machine.property(SERVICE, "StatusText").startswith("configured:")
    return package


def upgrade(modules: Path) -> None:
    """A file of the program is another one."""
    path = modules / "clock.py"
    path.write_text(path.read_text() + "# a newer version\n")


def reload(machine: Machine) -> None:
    """Reload, and wait until systemd has been told that it is over."""
    machine.do("reload", SERVICE)
    machine.wait_for_property(SERVICE, "ActiveState", "active")


def continued(machine: Machine) -> list[dict[str, Any]]:
    return machine.events("service-continued")


def execute_successor(machine: Machine, modules: Path) -> None:
    """Upgrade, reload, and wait until the new version goes on."""
    before = len(continued(machine))
    upgrade(modules)
    reload(machine)
    machine.wait_for(lambda: len(continued(machine)) > before, "the new version goes on")
    machine.wait_for_property(SERVICE, "ActiveState", "active")


def metrics(machine: Machine) -> dict[str, float]:
    """All series, but those that change by themselves."""
    program = f"import urllib.request\nprint(urllib.request.urlopen('http://{LISTEN}/metrics').read().decode())\n"
    machine.install_program(f"{SCRAPER}-once", python_program(program))
    answer = machine.run(f"{SCRAPER}-once")
    assert answer.returncode == 0, answer.stderr
    return {name: float(text) for name, text in re.findall(r"^([a-z]\S*) (\S+)$", answer.stdout, re.MULTILINE)}


def parent(machine: Machine, pid: int) -> int:
    return int(machine.path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@contextmanager
def scraping(machine: Machine) -> Iterator[list[Any]]:
    """A scraper that never pauses; afterwards the list holds how often it asked, and its errors."""
    machine.install_program(SCRAPER, python_program(SCRAPE))
    result: list[Any] = []
    command = ["nsenter", "-t", str(machine.leader), "-a", "--", SCRAPER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/") as scraper:
        yield result
        result += json.loads(scraper.communicate(b"enough\n", timeout=90)[0])


class TestReload:
    def test_without_an_upgrade_executes_nothing(self, machine: Machine, modules: Path) -> None:
        pids = (machine.main_pid(), machine.manager_pid())
        reload(machine)
        machine.wait_for(lambda: machine.events("settings-reloaded"), "the settings are read")
        assert continued(machine) == []
        assert (machine.main_pid(), machine.manager_pid()) == pids

    def test_after_an_upgrade_goes_on_in_the_same_process_with_fabric_manager_as_its_child(
        self, machine: Machine, modules: Path
    ) -> None:
        pids = (machine.main_pid(), machine.manager_pid())
        begun = machine.path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[19]
        execute_successor(machine, modules)
        assert (machine.main_pid(), machine.manager_pid()) == pids
        assert machine.path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[19] == begun
        assert parent(machine, pids[1]) == pids[0]
        assert machine.property(SERVICE, "NRestarts") == "0"
        assert machine.property(SERVICE, "StatusText").startswith("configured: 4 NVSwitches configured")
        assert machine.journal(SERVICE, "MESSAGE=Reloaded fmsupervisor.service - NVIDIA Fabric Manager supervisor.")
        assert machine.events("fm-adopted") == []

    def test_by_a_new_version_that_then_knows_how_fabric_manager_ended(self, machine: Machine, modules: Path) -> None:
        manager = machine.manager_pid()
        execute_successor(machine, modules)
        machine.kill(manager, "SEGV")
        (ended,) = machine.wait_for(lambda: machine.events("fm-exited"), "its end is told")
        assert (ended["FM_PID"], ended["FM_EXIT_SIGNAL"]) == (str(manager), "11")

    def test_after_an_upgrade_tells_and_counts_nothing_twice(self, machine: Machine, modules: Path) -> None:
        machine.wait_for(lambda: metrics(machine)["fabricmanager_gpus_registered"] == 8, "all GPUs are registered")
        before, told = metrics(machine), len(machine.events("fm-line"))
        execute_successor(machine, modules)
        execute_successor(machine, modules)
        after = metrics(machine)
        totals = {name: value for name, value in before.items() if re.match(r"(fabric|fmsupervisor)\w*_total", name)}
        lines = {name for name in totals if "log_lines" in name and totals[name]}
        assert lines
        assert {name: after[name] for name in lines} == {name: totals[name] for name in lines}
        assert {name for name in totals if after[name] < totals[name]} == set()
        assert len(machine.events("fm-line")) == told
        machine.tell_manager("line WARNING a line after the upgrade")
        machine.wait_for(lambda: len(machine.events("fm-line")) == told + 1, "what comes is told once")

    def test_twenty_times_refuses_no_scrape_and_misses_no_watchdog(self, machine: Machine, modules: Path) -> None:
        pids = (machine.main_pid(), machine.manager_pid())
        began, times = time.monotonic(), 0
        with scraping(machine) as scraped:
            while times < 20 or time.monotonic() - began < 2 * WATCHDOG_SECONDS:  # it would have barked
                execute_successor(machine, modules)
                times += 1
        asked, errors = scraped
        assert errors == []
        assert asked > times
        assert (machine.main_pid(), machine.manager_pid()) == pids
        assert machine.property(SERVICE, "NRestarts") == "0"
        assert len(continued(machine)) == times

    def test_and_then_stop_ends_both(self, machine: Machine, modules: Path) -> None:
        manager = machine.manager_pid()
        execute_successor(machine, modules)
        machine.do("stop", SERVICE)
        assert machine.show(SERVICE, "ActiveState", "Result") == {"ActiveState": "inactive", "Result": "success"}
        assert machine.processes() == []
        (ended,) = machine.events("fm-exited")
        assert (ended["FM_EXIT_CLASS"], ended["FM_PID"]) == ("requested", str(manager))

    def test_of_a_daemon_that_has_taken_over_fabric_manager_keeps_it(self, machine: Machine, modules: Path) -> None:
        manager = machine.manager_pid()
        machine.kill(machine.main_pid(), "KILL")
        machine.wait_for(lambda: machine.events("fm-adopted"), "it is taken over")
        machine.wait_for_property(SERVICE, "ActiveState", "active")
        execute_successor(machine, modules)
        assert machine.manager_pid() == manager
        machine.do("stop", SERVICE)
        assert not machine.is_alive(manager)
        assert machine.processes() == []


class TestABrokenVersion:
    @pytest.mark.parametrize(
        ("module", "content", "reason"),
        [
            pytest.param("supervisor.py", "def broken(:\n", "SyntaxError", id="that cannot be read"),
            pytest.param(
                "daemon.py", "import fmsupervisor.of_tomorrow\n", "ModuleNotFoundError", id="with a part missing"
            ),
        ],
    )
    def test_is_not_executed_and_the_old_one_goes_on_and_says_why(
        self, machine: Machine, modules: Path, module: str, content: str, reason: str
    ) -> None:
        pids = (machine.main_pid(), machine.manager_pid())
        good = (modules / module).read_text()
        (modules / module).write_text(content + good)
        reload(machine)
        (raised,) = machine.wait_for(lambda: machine.events("condition-raised"), "the refusal is told")
        assert raised["FMSUPERVISOR_CONDITION"] == "FMS-706"
        assert reason in raised["MESSAGE"]
        assert continued(machine) == []
        assert (machine.main_pid(), machine.manager_pid()) == pids
        assert [row["code"] for row in machine.document()["conditions"]] == ["FMS-706"]
        assert machine.document()["state"] == "configured"

        (modules / module).write_text(good)
        reload(machine)
        machine.wait_for(lambda: continued(machine), "the mended version is executed")
        machine.wait_for(lambda: machine.document()["conditions"] == [], "the refusal is over")
        (cleared,) = machine.events("condition-cleared")
        assert cleared["FMSUPERVISOR_CONDITION"] == "FMS-706"
        assert (machine.main_pid(), machine.manager_pid()) == pids


def test_the_program_that_the_units_call_is_another_one(machine: Machine, package: Path) -> None:
    """Or the tests above would change the working tree."""
    assert machine.run(UPGRADED, "--version").stdout == machine.run(PROGRAM, "--version").stdout
    (package / "__init__.py").write_text('__version__ = "of the copy"\n')
    assert "of the copy" in machine.run(UPGRADED, "--version").stdout
    assert "of the copy" not in machine.run(PROGRAM, "--version").stdout

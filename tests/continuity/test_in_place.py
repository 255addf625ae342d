"""``systemctl reload`` after an upgrade: the new version goes on in the same process, as if nothing had been."""

import os
import re
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.continuity.daemon import Host, host

NEWS = ("state-changed", "condition-raised", "condition-cleared", "fm-started", "fm-adopted", "fm-exited")


@contextmanager
def configured(directory: Path, settings: dict[str, Any] | None = None) -> Iterator[tuple[Host, Path]]:
    """A daemon with a program of its own, which has configured the fabric, and the directory of its package."""
    with host(directory, settings=settings) as one:
        package = one.install_own_program()
        one.start()
        one.until_configured()
        one.until(lambda: one.document["fabric_manager"]["gpus_registered"] == 8)
        yield one, package


def upgrade(one: Host, package: Path, number: int = 1) -> int:
    """Install another version and reload; where the log of the new version begins."""
    since = len(one.log_text)
    name = package / "__init__.py"
    name.write_text(re.sub(r'__version__ = ".*"', f'__version__ = "9.{number}"', name.read_text()))
    reload(one)
    one.until(lambda: one.document.get("version") == f"9.{number}")
    return since


def reload(one: Host) -> None:
    assert one.daemon is not None
    one.daemon.send_signal(signal.SIGHUP)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class TestTheNewVersion:
    def test_has_the_same_process_and_the_same_child(self, tmp_path: Path) -> None:
        with configured(tmp_path) as (one, package):
            manager, before = one.manager, one.document
            since = upgrade(one, package)
            now = one.document
            assert one.daemon is not None
            assert (now["pid"], one.manager, parent(manager)) == (one.daemon.pid, manager, one.daemon.pid)
            for name in ("state", "since", "started_at", "conditions", "switches", "counters", "device_nodes"):
                assert now[name] == before[name], name
            assert now["fabric_manager"] == before["fabric_manager"]
            assert "going on as version 9.1, in place of" in one.log_text[since:]
            assert [line["event"] for line in one.events(since) if line["event"] in NEWS] == []

    def test_sees_how_fabric_manager_ends(self, tmp_path: Path) -> None:
        with configured(tmp_path) as (one, package):
            manager = one.manager
            upgrade(one, package)
            os.kill(manager, signal.SIGUSR1)
            one.until(lambda: one.manager not in (0, manager))
            assert one.document["fabric_manager"]["last_exit"]["signal"] == signal.SIGUSR1
            one.until_configured()
            assert one.stop() == 0
            assert one.processes() == {}

    def test_loses_no_line_and_counts_none_twice(self, tmp_path: Path) -> None:
        """A writer goes on through all of it, and the last lines before each reload are cut in their middle."""
        with configured(tmp_path) as (one, package):
            path = one.directory / "usr/local/nvidia/fabricmanager.log"
            switch = one.document["switches"][0]["pci_bus_id"]
            lines_before = one.metric("fabricmanager_log_lines_total")
            since = len(one.log_text)
            written = 0
            with open(path, "ab", buffering=0) as log:
                for number in range(1, 6):
                    for port in range(18):
                        text = f"[Nov 30 2026 10:00:{number:02d}] [ERROR] [tid 7] detected NVSwitch non-fatal error {20030 + number} on "
                        text += f"fid 0 on NVSwitch pci bus id {switch} physical id 0 port {port}\n"
                        line = text.encode()
                        log.write(line[:40])
                        if port == number:
                            upgrade(one, package, number)
                        log.write(line[40:] + line)  # and it is doubled, as version 535 does
                        written += 2
                one.until(lambda: one.metric("fabricmanager_log_lines_total") == lines_before + written)
            one.until(lambda: sum(row["count"] for row in one.document["counters"]["switch_errors"]) >= written / 2)
            rows = one.document["counters"]["switch_errors"]
            expected = {(20030 + number, port, 1) for number in range(1, 6) for port in range(18)}
            assert {(row["sxid"], row["port"], row["count"]) for row in rows} == expected
            relayed = [line for line in one.events(since) if line["event"] == "fm-line"]
            assert len(relayed) == written / 2

    def test_refuses_no_scrape_and_lets_no_counter_run_backwards(self, tmp_path: Path) -> None:
        with configured(tmp_path) as (one, package):
            faults: list[str] = []
            answers = []
            is_over = threading.Event()

            def scrape() -> None:
                while not is_over.is_set():
                    try:
                        with urllib.request.urlopen(f"http://{one.address}/metrics", timeout=30) as answer:
                            answers.append(answer.read().decode())
                    except (OSError, urllib.error.URLError) as error:
                        faults.append(repr(error))

            scrapers = [threading.Thread(target=scrape) for _ in range(3)]
            for scraper in scrapers:
                scraper.start()
            for number in range(1, 5):
                upgrade(one, package, number)
            is_over.set()
            for scraper in scrapers:
                scraper.join()
            assert faults == []
            assert len(answers) > 20
            assert all("fabricmanager_state" in answer for answer in answers)
            lines = re.compile(r'^fabricmanager_log_lines_total\{level="INFO"\} (\S+)$', re.MULTILINE)
            counts = [float(found[1]) for answer in answers if (found := lines.search(answer))]
            assert len(counts) == len(answers)
            assert min(counts) > 0

    def test_takes_the_settings_of_the_same_reload(self, tmp_path: Path) -> None:
        with configured(tmp_path) as (one, package):
            manager = one.manager
            one.write_settings({"restart": {"policy": "never"}})
            upgrade(one, package)
            os.kill(manager, signal.SIGKILL)
            one.until(lambda: "FMS-518" in one.codes)

    def test_obeys_a_sigterm_that_comes_at_any_time(self, tmp_path: Path) -> None:
        with configured(tmp_path) as (one, package):
            (package / "new.py").write_text("")
            reload(one)
            assert one.stop() == 0
            assert one.processes() == {}

    def test_is_taken_over_from_when_it_crashes_at_once(self, tmp_path: Path) -> None:
        with configured(tmp_path) as (one, package):
            manager = one.manager
            upgrade(one, package)
            one.crash()
            one.start()
            one.until_configured()
            assert one.manager == manager


class TestAVersionThatCannotRun:
    def test_is_not_executed_and_the_reason_is_told_until_it_is_mended(self, tmp_path: Path) -> None:
        with configured(tmp_path) as (one, package):
            manager, version = one.manager, one.document["version"]
            sound = (package / "supervisor.py").read_text()
            (package / "supervisor.py").write_text(sound + "\nthis is no Python\n")
            reload(one)
            one.until(lambda: "FMS-706" in one.codes)
            (row,) = (row for row in one.document["conditions"] if row["code"] == "FMS-706")
            assert "its start-up check failed with exit status 1: SyntaxError" in row["detail"]
            assert (one.manager, one.state, one.document["version"]) == (manager, "configured", version)
            (package / "supervisor.py").write_text(sound)
            upgrade(one, package)
            assert "FMS-706" not in one.codes
            assert one.manager == manager

    def test_because_of_the_settings_is_not_executed(self, tmp_path: Path) -> None:
        with configured(tmp_path) as (one, package):
            one.config.write_text("[restart]\npolicy = 7\n")
            (package / "new.py").write_text("")
            reload(one)
            one.until(lambda: {"FMS-702", "FMS-706"} <= one.codes)
            one.write_settings({})
            upgrade(one, package)
            assert not {"FMS-702", "FMS-706"} & one.codes

    def test_that_knows_nothing_of_a_handover_is_not_executed(self, tmp_path: Path) -> None:
        """An older version, installed over this one."""
        with configured(tmp_path) as (one, package):
            cli = package / "cli.py"
            cli.write_text(cli.read_text().replace("--check-handover", "--unknown"))
            reload(one)
            one.until(lambda: "FMS-706" in one.codes)
            assert "exit status 2" in str(one.document["conditions"])

    def test_because_it_cannot_read_what_is_handed_over_is_not_executed(self, tmp_path: Path) -> None:
        with configured(tmp_path) as (one, package):
            name = package / "handover.py"
            name.write_text(name.read_text().replace("\nLAYOUT = 1", "\nLAYOUT = 2"))
            reload(one)
            one.until(lambda: "FMS-706" in one.codes)
            assert "its layout is 1, this version knows 2" in str(one.document["conditions"])


def test_a_reload_without_an_upgrade_reads_the_settings_and_executes_nothing(tmp_path: Path) -> None:
    with configured(tmp_path) as (one, _):
        since = len(one.log_text)
        one.write_settings({"restart": {"crash_loop_count": 9}})
        reload(one)
        one.until(lambda: "crash_loop_count" in one.log_text[since:])
        assert "going on as version" not in one.log_text[since:]

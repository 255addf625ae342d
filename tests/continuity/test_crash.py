"""What happens to the supervisor does not happen to Fabric Manager: the next one takes over what it finds."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.continuity.daemon import Host, host


def edit(found: Host, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what the dead daemon has left."""
    document = json.loads(found.handover.read_text())
    change(document)
    found.handover.write_text(json.dumps(document))


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


class TestARunningFabricManager:
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
    def test_is_taken_over_and_the_next_daemon_goes_straight_to_configured(self, tmp_path: Path, number: int) -> None:
        with host(tmp_path) as one:
            one.start()
            one.until_configured()
            one.until(lambda: one.document["fabric_manager"]["gpus_registered"] == 8)
            manager, before = one.manager, one.document["fabric_manager"]
            one.crash(number)
            assert is_alive(manager)
            since = len(one.log_text)
            one.start()
            one.until_configured()
            now = one.document["fabric_manager"]
            kept = ("pid", "session", "started_at", "gpus_registered", "version", "log_file", "config_differences")
            assert {name: now[name] for name in kept} == {name: before[name] for name in kept}
            assert one.states(since) == ["configured"]
            assert [line["fm_pid"] for line in one.events(since) if line["event"] == "fm-adopted"] == [manager]
            assert one.stop() == 0
            assert not is_alive(manager)
            assert one.processes() == {}
            assert not one.handover.exists()

    def test_is_taken_over_while_it_configures_and_gets_its_whole_time(self, tmp_path: Path) -> None:
        with host(tmp_path) as one:
            one.start()
            one.until(lambda: one.manager)
            manager = one.manager
            one.crash()
            since = len(one.log_text)
            one.start()
            one.until_configured()
            assert one.manager == manager
            assert "stopping" not in one.states(since)

    def test_has_its_log_read_again_without_counting_or_telling_it_again(self, tmp_path: Path) -> None:
        with host(tmp_path) as one:
            one.start()
            one.until_configured()
            one.until(lambda: one.document["fabric_manager"]["gpus_registered"] == 8)
            switch = one.document["switches"][0]["pci_bus_id"]
            one.tell(f"sxid fatal 12028 {switch} 3")
            one.until(lambda: "FMS-601" in one.codes)
            one.crash()
            since = len(one.log_text)
            one.start()
            one.until(lambda: one.state == "degraded")
            assert one.document["fabric_manager"]["gpus_registered"] == 8
            assert "FMS-601" in one.codes
            assert one.metric("fabricmanager_log_lines_total") == 0
            assert one.document["counters"]["switch_errors"] == []
            assert not [line for line in one.events(since) if line["event"] == "fm-line"]
            one.tell(f"sxid non-fatal 20034 {switch} 3")
            one.until(lambda: one.document["counters"]["switch_errors"])
            assert [line["event"] for line in one.events(since)].count("fm-line") == 1

    def test_that_dies_afterwards_has_an_unknown_status_and_is_started_again(self, tmp_path: Path) -> None:
        with host(tmp_path) as one:
            one.start()
            one.until_configured()
            manager = one.manager
            one.crash()
            one.start()
            one.until_configured()
            os.kill(manager, signal.SIGKILL)
            one.until(lambda: one.manager not in (0, manager))
            last = one.document["fabric_manager"]["last_exit"]
            assert (last["status"], last["signal"], last["class"]) == (None, None, "unexpected")
            assert "unknown exit status after the fabric was configured" in last["reason"]

    def test_survives_many_crashes_in_a_row(self, tmp_path: Path) -> None:
        with host(tmp_path) as one:
            one.start()
            one.until_configured()
            manager = one.manager
            for _ in range(5):
                one.crash()
                one.start()
                one.until_configured()
                assert one.manager == manager
            assert len(one.processes()) == 1


class TestAFabricManagerThatDiesMeanwhile:
    def test_is_reported_as_ended_unseen_and_started_again(self, tmp_path: Path) -> None:
        with host(tmp_path) as one:
            one.start()
            one.until_configured()
            manager = one.manager
            one.crash()
            os.kill(manager, signal.SIGKILL)
            one.start()
            one.until_configured()
            assert one.manager != manager
            last = one.document["fabric_manager"]["last_exit"]
            assert last["session"].endswith(f"-{manager}")
            assert "it ended while no supervisor ran" in last["reason"]
            assert one.document["fabric_manager"]["exits"] == {"unexpected": 1}

    def test_is_not_started_again_when_the_policy_says_never(self, tmp_path: Path) -> None:
        with host(tmp_path, settings={"restart": {"policy": "never"}}) as one:
            one.start()
            one.until_configured()
            one.crash()
            for pid in one.processes():
                os.kill(pid, signal.SIGKILL)
            one.start()
            one.until(lambda: "FMS-518" in one.codes)
            assert one.processes() == {}

    def test_leaves_nothing_behind(self, tmp_path: Path) -> None:
        with host(tmp_path) as one:
            one.start()
            one.until_configured()
            manager = one.manager
            token = json.loads(one.handover.read_text())["record"]["token"]
            one.crash()
            environment = {"FMSUPERVISOR_TOKEN": token, "PATH": os.environ["PATH"]}
            with subprocess.Popen(("sleep", "300"), env=environment, start_new_session=True) as stray:
                os.kill(manager, signal.SIGKILL)
                one.start()
                one.until_configured()
                assert stray.wait(20) == -signal.SIGTERM

    def test_during_a_pause_does_not_cut_the_pause_short(self, tmp_path: Path) -> None:
        long = {"restart": {"initial_delay_seconds": 3000.0, "maximum_delay_seconds": 3000.0}}
        with host(tmp_path, settings=long) as one:
            one.start()
            one.until_configured()
            os.kill(one.manager, signal.SIGKILL)
            one.until(lambda: one.state == "backoff")
            due = one.document["fabric_manager"]["next_start_at"]
            one.crash()
            one.start()
            one.until(lambda: one.state == "backoff")
            assert one.document["fabric_manager"]["next_start_at"] == pytest.approx(due, abs=100.0)
            assert one.document["fabric_manager"]["failures_in_a_row"] == 1


class TestAProcessThatIsNotOurs:
    def test_that_has_got_the_recorded_number_is_neither_taken_over_nor_touched(self, tmp_path: Path) -> None:
        with host(tmp_path) as one, subprocess.Popen(("sleep", "300")) as stranger:
            one.start()
            one.until_configured()
            manager = one.manager
            one.crash()
            os.kill(manager, signal.SIGKILL)
            edit(one, lambda document: document["record"]["identity"].update(pid=stranger.pid))
            one.start()
            one.until_configured()
            assert one.manager not in (manager, stranger.pid)
            assert "ended while no supervisor ran" in one.document["fabric_manager"]["last_exit"]["reason"]
            one.stop()
            assert stranger.poll() is None
            stranger.kill()

    @pytest.mark.parametrize("part", ["executable", "control_group"])
    def test_but_looks_much_like_it_is_left_alone_and_reported(self, tmp_path: Path, part: str) -> None:
        with host(tmp_path) as one:
            one.start()
            one.until_configured()
            manager = one.manager
            one.crash()
            edit(one, lambda document: document["record"]["identity"].update({part: "/another"}))
            since = len(one.log_text)
            one.start()
            one.until(lambda: "a Fabric Manager is not taken over" in one.log_text[since:] and one.document)
            assert one.manager != manager
            one.stop()
            assert is_alive(manager)

    def test_of_another_boot_is_forgotten(self, tmp_path: Path) -> None:
        with host(tmp_path) as one:
            one.start()
            one.until_configured()
            manager = one.manager
            one.crash()
            edit(one, lambda document: document.update(boot_id="another"))
            one.start()
            one.until(lambda: one.document)
            assert one.manager != manager
            one.stop()
            assert is_alive(manager)


class TestWhatWasLeft:
    @pytest.mark.parametrize(
        "content",
        [b"", b"\0" * 4096, b"{", b"[]", b"null", b'{"layout": 1}', b"[" * 100_000, os.urandom(512)],
        ids=["empty", "zeros", "cut", "list", "null", "nothing-in-it", "deep", "random"],
    )
    def test_that_is_damaged_takes_nothing_down(self, tmp_path: Path, content: bytes) -> None:
        with host(tmp_path) as one:
            one.handover.parent.mkdir(parents=True, exist_ok=True)
            one.handover.write_bytes(content)
            one.start()
            one.until_configured()

    def test_of_a_layout_from_the_future_still_names_fabric_manager(self, tmp_path: Path) -> None:
        with host(tmp_path) as one:
            one.start()
            one.until_configured()
            manager = one.manager
            one.crash()
            edit(one, lambda document: document.update(layout=99, state={"run": "elsewhere"}, new={"field": 1}))
            one.start()
            one.until_configured()
            assert one.manager == manager
            assert "its layout is 99, this version knows 1" in one.log_text

    def test_is_used_as_far_as_it_is_sound(self, tmp_path: Path) -> None:
        with host(tmp_path) as one:
            one.start()
            one.until_configured()
            manager = one.manager
            one.crash()

            def damage(document: dict[str, Any]) -> None:
                document["state"]["failures"] = "three"
                document["state"]["run"] = {"pid": manager}
                document["state"]["unheard_of"] = [1]

            edit(one, damage)
            one.start()
            one.until_configured()
            assert one.manager == manager
            assert "failures: str in place of int" in one.log_text

    def test_cannot_be_written_is_a_condition_and_not_the_end(self, tmp_path: Path) -> None:
        with host(tmp_path) as one:
            one.handover.mkdir(parents=True)
            one.start()
            one.until(lambda: one.state == "configured" and "FMS-705" in one.codes)
            one.handover.rmdir()
            one.tell("exit 1")
            one.until(lambda: one.state == "configured" and "FMS-705" not in one.codes)


def test_a_second_daemon_does_not_take_over_what_the_first_one_has(tmp_path: Path) -> None:
    with host(tmp_path) as one:
        first = one.start()
        one.until_configured()
        manager = one.manager
        running = one.daemon
        one.start()
        assert one.daemon is not None
        assert one.daemon.wait(60) == 75
        assert f"pid {first}" in one.log_text
        one.daemon = running
        assert one.manager == manager
        assert one.state == "configured"

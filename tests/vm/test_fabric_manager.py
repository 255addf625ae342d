"""Fabric Manager dies, hangs, forks away or refuses, by the driver's own timeouts; a guest holds its GPU all the while."""

import time
from collections.abc import Iterator

import pytest
from bed import Bed, Machine
from guests import HANG_SECONDS, HELD, SETTINGS_TEXT, check_guest, guest
from scenario import (
    GPUS,
    SERVICE,
    behave,
    codes,
    condition,
    document,
    settings,
    switch_list,
    tell,
    wait_for_code,
    wait_for_state,
    wait_until,
    words,
)

STANDBY, CONFIGURED, MANAGER_TIMEOUT = 1, 2, 3
DRIVER_TIMEOUT_SECONDS = 10
SLACK_SECONDS = 20  # everything is slow here


@pytest.fixture
def host(bed: Bed, _artifacts: None) -> Iterator[Machine]:
    """The board and the guest, before the daemon may load the module."""
    with bed.restore(after=HELD) as machine:
        pid = guest(machine)
        yield machine
        check_guest(machine, pid)


def hurry(machine: Machine) -> None:
    """Let the driver be content with less than its 10 s."""
    machine.check("echo 3000 >/sys/kernel/debug/nvidia_stub/fm_timeout_ms")


def go_on(machine: Machine, more: str = "") -> None:
    """Let the daemon load the module."""
    settings(machine, f"{SETTINGS_TEXT}{more}", is_running=True)


def driver_states(machine: Machine) -> set[int]:
    return {state for _, state in switch_list(machine).values()}


def manager(machine: Machine) -> int:
    return int(document(machine)["fabric_manager"]["pid"])


def managers(machine: Machine) -> str:
    return machine.run("pgrep -f /nv-fabricmanager").output


def in_the_control_group(machine: Machine) -> list[str]:
    """Names of the processes of the unit."""
    group = f"/sys/fs/cgroup$(systemctl show -P ControlGroup {SERVICE})/cgroup.procs"
    return machine.check(f"for pid in $(cat {group}); do cat /proc/$pid/comm; done").split()


class TestKilled:
    def test_it_is_started_again_before_the_driver_misses_it_and_what_guests_lost_is_named(
        self, whole: Machine
    ) -> None:
        old = manager(whole)
        whole.check(f"kill -KILL {old}")
        found = wait_until(
            whole, lambda found: found["fabric_manager"]["starts"] == 2 and found["state"] == "configured"
        )
        assert (found["fabric_manager"]["starts"], found["fabric_manager"]["exits"]) == (2, {"unexpected": 1})
        assert (found["fabric_manager"]["last_exit"]["class"], found["fabric_manager"]["last_exit"]["signal"]) == (
            "unexpected",
            9,
        )
        assert GPUS[7] in condition(found, "FMS-619")["detail"]
        assert "FMS-608" not in codes(found), "GPUs that nobody holds are reset when somebody takes them"
        assert driver_states(whole) == {CONFIGURED}
        assert "MANAGER_TIMEOUT" not in words(whole)

    def test_during_a_longer_pause_the_driver_says_so_itself(self, whole: Machine) -> None:
        settings(whole, f"{SETTINGS_TEXT}initial_delay_seconds = 8\n", is_running=True)
        whole.wait_for(f"journalctl -q -u {SERVICE} FMSUPERVISOR_EVENT=settings-reloaded | grep -q .")
        hurry(whole)
        whole.check(f"kill -KILL {manager(whole)}")
        whole.wait_for(f"/usr/local/test/modules/selftest list | grep -q driver={MANAGER_TIMEOUT}")
        found = document(whole)
        assert found["state"] == "backoff"
        assert {row["driver_state"] for row in found["switches"]} <= {"CONFIGURED", "MANAGER_TIMEOUT"}
        found = wait_until(whole, lambda found: found["fabric_manager"]["configured_at"])
        assert found["fabric_manager"]["starts"] == 2
        assert "FMS-513" not in codes(found)
        assert driver_states(whole) == {CONFIGURED}


class TestHung:
    def test_a_heartbeat_that_stops_is_told_and_so_is_its_return(self, whole: Machine) -> None:
        pid = manager(whole)
        begun = time.monotonic()
        tell(whole, "hang")
        wait_for_code(whole, "FMS-513")
        took = time.monotonic() - begun
        assert (
            DRIVER_TIMEOUT_SECONDS - 1 + HANG_SECONDS <= took <= DRIVER_TIMEOUT_SECONDS + HANG_SECONDS + SLACK_SECONDS
        )
        assert document(whole)["state"] == "degraded"
        assert manager(whole) == pid, "the policy is to report"
        assert driver_states(whole) == {MANAGER_TIMEOUT}
        assert whole.check(f"systemctl is-active {SERVICE}") == "active\n"

        tell(whole, "resume")
        found = wait_for_state(whole, "configured")
        assert codes(found) == set()
        assert manager(whole) == pid

    def test_a_frozen_one_is_told_and_a_stop_does_not_wait_for_it_for_ever(self, whole: Machine) -> None:
        hurry(whole)
        pid = manager(whole)
        whole.check(f"kill -STOP {pid}")
        wait_for_code(whole, "FMS-513")
        assert driver_states(whole) == {MANAGER_TIMEOUT}
        whole.check(f"kill -CONT {pid}")
        wait_for_state(whole, "configured")

        whole.check(f"kill -STOP {pid} && systemctl stop {SERVICE}")
        assert whole.check(f"systemctl show -P Result {SERVICE}") == "success\n"
        assert managers(whole) == ""
        (ended,) = whole.journal(f"_SYSTEMD_UNIT={SERVICE}", "FMSUPERVISOR_EVENT=fm-exited")
        assert ended["FM_EXIT_SIGNAL"] == "9"

    def test_with_the_policy_to_restart_it_is_replaced(self, whole: Machine) -> None:
        settings(whole, SETTINGS_TEXT.replace("[restart]", 'hang_policy = "restart"\n[restart]'), is_running=True)
        hurry(whole)
        pid = manager(whole)
        tell(whole, "hang")
        found = wait_until(
            whole, lambda found: found["fabric_manager"]["starts"] == 2 and found["state"] == "configured"
        )
        assert found["fabric_manager"]["pid"] != pid
        assert "FMS-619" in codes(found)
        assert driver_states(whole) == {CONFIGURED}


class TestEnds:
    def test_status_0_before_the_success_line_is_a_death_like_any_other(self, host: Machine) -> None:
        behave(host, kind="dies-at-start", exit_after_seconds=0.3, exit_code=0)
        go_on(host)
        found = wait_until(host, lambda found: found["fabric_manager"]["exits"].get("unexpected", 0) >= 2)
        assert "FMS-510" in codes(found)
        assert found["fabric_manager"]["last_exit"]["status"] == 0
        assert driver_states(host) == {STANDBY}
        behave(host, kind="normal")
        found = wait_for_state(host, "configured")
        assert codes(found) == set()

    def test_one_that_forks_away_is_ended_and_nothing_is_left(self, host: Machine) -> None:
        behave(host, kind="forks-away")
        go_on(host)
        found = wait_until(host, lambda found: found["state"] == "failed" and "FMS-515" in codes(found))
        assert found["fabric_manager"]["starts"] == 1
        host.wait_for("! pgrep -f /nv-fabricmanager")
        assert set(in_the_control_group(host)) == {"fmsupervisor"}
        host.check("rmmod nvidia")  # nobody holds a node


class TestConfiguration:
    def test_a_rejected_one_is_not_tried_again_until_it_is_changed(self, host: Machine) -> None:
        go_on(host, '[fabric_manager.options]\nLOG_LEVEL = "9"\n')
        found = wait_for_state(host, "failed")
        assert "LOG_LEVEL" in condition(found, "FMS-504")["detail"]
        assert found["fabric_manager"]["starts"] == 1
        assert managers(host) == ""
        assert driver_states(host) == {STANDBY}

        go_on(host, '[fabric_manager.options]\nLOG_LEVEL = "3"\n')
        found = wait_for_state(host, "configured")
        assert (codes(found), found["fabric_manager"]["starts"]) == (set(), 2)
        assert "LOG_LEVEL=3\n" in host.check("cat /usr/local/nvidia/fm.cfg")

"""nvidia-fabric.target: the gate for guests, and a guest that is ordered as systemd/README.md advises."""

import re
import textwrap

import pytest

from tests.systemd.container import UNITS
from tests.systemd.machine import HOST, PROGRAM, SERVICE, TARGET, WAIT, Machine

pytestmark = [pytest.mark.root, pytest.mark.xdist_group("systemd-target")]

GUEST = "guest.service"
STARTER = "virtqemud.service"  # what starts guests
REACHED = "ActiveEnterTimestampMonotonic"


def advised_guest(*, refuses: bool = True) -> str:
    """The unit that README.md advises, as it stands there. ``refuses``: with the part that checks before the start."""
    found = re.search(r"\n(    \[Unit\]\n    Wants=.*?\n)(?=\S)", (UNITS / "README.md").read_text(), re.DOTALL)
    assert found is not None
    advice = textwrap.dedent(found[1])
    check = f"{PROGRAM} wait"
    assert check in advice
    unit = (
        advice.replace(check, f"{check} --root {HOST}") if refuses else advice.partition("[Service]")[0] + "[Service]\n"
    )
    return f"{unit}\nExecStart=/bin/sleep infinity\n"


def install_starter(machine: Machine) -> None:
    """A stand-in for what starts guests, with the shipped drop-in."""
    machine.unit(STARTER, "[Service]\nExecStart=/bin/sleep infinity\n")
    machine.drop_in(STARTER, (UNITS / "50-nvidia-fabric.conf").read_text(), "50-nvidia-fabric")


def reached(machine: Machine, unit: str) -> int:
    """When the unit became active, in microseconds."""
    return int(machine.property(unit, REACHED))


def states(machine: Machine, *units: str) -> list[str]:
    return [machine.property(unit, "ActiveState") for unit in units]


class TestConfigured:
    def test_the_target_is_reached_after_the_service_and_the_wait(self, machine: Machine) -> None:
        machine.simulate("healthy")
        machine.await_simulated(30)
        machine.do("start", TARGET)
        assert states(machine, SERVICE, WAIT, TARGET) == ["active"] * 3
        assert reached(machine, SERVICE) < reached(machine, WAIT) <= reached(machine, TARGET)
        assert "configured: 4 NVSwitches configured" in machine.words(WAIT)

    def test_a_guest_is_started_after_it_and_pulls_everything_in(self, machine: Machine) -> None:
        machine.simulate("healthy")
        machine.await_simulated(30)
        machine.unit(GUEST, advised_guest())
        machine.do("start", GUEST)
        assert states(machine, SERVICE, TARGET, GUEST) == ["active"] * 3
        assert reached(machine, TARGET) < reached(machine, GUEST)

    def test_on_a_machine_without_nvswitches_the_target_is_reached_too(self, machine: Machine) -> None:
        """The real commands in all three units."""
        machine.do("start", TARGET)
        assert states(machine, SERVICE, WAIT, TARGET) == ["active"] * 3
        assert "not-applicable: this machine has no NVSwitch" in machine.words(WAIT)


class TestNotConfigured:
    @pytest.fixture(autouse=True)
    def _broken_fabric(self, machine: Machine) -> None:
        machine.simulate("version-mismatch")
        machine.await_simulated(1)

    def test_the_target_is_not_reached_and_the_wait_says_why(self, machine: Machine) -> None:
        result = machine.systemctl("start", TARGET)
        assert result.returncode != 0
        assert states(machine, SERVICE, WAIT, TARGET) == ["active", "failed", "inactive"]
        assert "not configured after 1 s; failed: FMS-103" in machine.words(WAIT)

    def test_a_guest_that_checks_is_refused_with_the_reason(self, machine: Machine) -> None:
        machine.unit(GUEST, advised_guest())
        assert machine.systemctl("start", GUEST).returncode != 0
        assert states(machine, TARGET, GUEST) == ["inactive", "failed"]
        assert "failed: FMS-103" in machine.words(GUEST)

    def test_a_guest_that_is_only_ordered_starts_late(self, machine: Machine) -> None:
        machine.unit(GUEST, advised_guest(refuses=False))
        machine.do("start", GUEST)
        assert states(machine, TARGET, GUEST) == ["inactive", "active"]
        gave_up = int(machine.property(WAIT, "InactiveEnterTimestampMonotonic"))
        assert gave_up < reached(machine, GUEST)
        assert "failed: FMS-103" in machine.words(WAIT)


class TestWhatStartsGuests:
    """With the shipped drop-in."""

    def test_starts_after_the_fabric_is_configured(self, machine: Machine) -> None:
        machine.simulate("healthy")
        machine.await_simulated(30)
        install_starter(machine)
        machine.do("start", STARTER)
        assert states(machine, SERVICE, TARGET, STARTER) == ["active"] * 3
        assert reached(machine, TARGET) < reached(machine, STARTER)

    def test_starts_late_when_the_fabric_has_failed_and_the_journal_says_why(self, machine: Machine) -> None:
        machine.simulate("version-mismatch")
        machine.await_simulated(1)
        install_starter(machine)
        machine.do("start", STARTER)
        assert states(machine, TARGET, STARTER) == ["inactive", "active"]
        assert int(machine.property(WAIT, "InactiveEnterTimestampMonotonic")) < reached(machine, STARTER)
        assert "not configured after 1 s; failed: FMS-103" in machine.words(WAIT)

    def test_starts_late_while_the_daemon_still_cannot_tell(self, machine: Machine) -> None:
        machine.simulate("start-timeout", speed=1.0)
        machine.await_simulated(30)
        machine.drop_in(TARGET, "[Unit]\nJobTimeoutSec=3\n")
        install_starter(machine)
        machine.do("start", STARTER)
        assert states(machine, SERVICE, TARGET, STARTER) == ["activating", "inactive", "active"]
        assert any("timed out" in str(entry["MESSAGE"]) for entry in machine.journalctl(f"UNIT={TARGET}"))

    def test_stays_when_the_daemon_is_stopped_or_crashes(self, machine: Machine) -> None:
        machine.simulate("healthy", more="RestartSec=100ms")
        machine.await_simulated(30)
        install_starter(machine)
        machine.do("start", STARTER)
        starter = machine.property(STARTER, "MainPID")
        machine.kill(machine.main_pid(), "KILL")
        machine.wait_for(lambda: machine.property(SERVICE, "NRestarts") == "1", "the daemon is started again")
        machine.do("stop", SERVICE)
        assert machine.show(STARTER, "ActiveState", "MainPID") == {"ActiveState": "active", "MainPID": starter}


class TestAfterwards:
    @pytest.fixture(autouse=True)
    def _running_guest(self, machine: Machine) -> None:
        machine.simulate("healthy", more="RestartSec=100ms")
        machine.await_simulated(30)
        machine.unit(GUEST, advised_guest())
        machine.do("start", GUEST)

    def test_a_stop_of_the_service_closes_the_gate_and_leaves_the_guest(self, machine: Machine) -> None:
        guest = machine.property(GUEST, "MainPID")
        machine.do("stop", SERVICE)
        assert states(machine, SERVICE, WAIT, TARGET) == ["inactive"] * 3
        assert machine.show(GUEST, "ActiveState", "MainPID") == {"ActiveState": "active", "MainPID": guest}

    def test_after_a_crash_of_the_daemon_the_gate_opens_again_and_the_guest_has_not_noticed(
        self, machine: Machine
    ) -> None:
        guest, opened = machine.property(GUEST, "MainPID"), reached(machine, TARGET)
        machine.run("kill", "-KILL", machine.property(SERVICE, "MainPID"))
        machine.wait_for(lambda: reached(machine, TARGET) > opened, "the target is reached again")
        assert states(machine, SERVICE, WAIT, TARGET) == ["active"] * 3
        assert machine.show(GUEST, "ActiveState", "MainPID") == {"ActiveState": "active", "MainPID": guest}

"""What the death of the daemon means for Fabric Manager: nothing, unless the service is being stopped.

The unit is the shipped one with its sandbox; the host stays as it is from one daemon to the next.
"""

import json
import re

import pytest

from tests.systemd.machine import PROGRAM, SERVICE, SETTINGS, STATE, Machine, python_program

pytestmark = [pytest.mark.root, pytest.mark.xdist_group("systemd-crash")]

# The daemon with two faults that can be called up: a loop that turns no more, and a bug.
FAULTY = "/usr/local/bin/fmsupervisor-faulty"
FAULTS = """
import asyncio, signal, time

def hang(*_):
    while True:
        time.sleep(60)

def break_down(*_):
    asyncio.get_running_loop().call_soon(lambda: 1 // 0)

signal.signal(signal.SIGUSR1, hang)
signal.signal(signal.SIGUSR2, break_down)
from fmsupervisor.cli import main
sys.exit(main())
"""

CRASHES = [
    pytest.param("KILL", "signal", "", id="SIGKILL, as the OOM killer sends it"),
    pytest.param("SEGV", "core-dump|signal", "", id="SIGSEGV"),
    pytest.param("USR2", "exit-code", "", id="a bug"),
    pytest.param("STOP", "watchdog", "WatchdogSec=2", id="the watchdog, frozen"),
    pytest.param("USR1", "watchdog", "WatchdogSec=2", id="the watchdog, a loop that does not turn"),
]


def start(machine: Machine, more: str = "RestartSec=100ms", scenario: str = "healthy", speed: float = 20.0) -> int:
    """Bring up the fabric; the pid of Fabric Manager."""
    machine.install_program(FAULTY, python_program(FAULTS))
    machine.build_host(scenario, speed, program=FAULTY, more=more)
    machine.do("start", SERVICE)
    return machine.manager_pid()


def start_without_restart(machine: Machine) -> int:
    """As ``start``; a crash is followed by nothing."""
    return start(machine, "Restart=no")


def crash(machine: Machine, signal_name: str = "KILL") -> None:
    """End the daemon, and wait until systemd has started it again."""
    before = int(machine.property(SERVICE, "NRestarts"))
    machine.kill(machine.main_pid(), signal_name)
    machine.wait_for(lambda: int(machine.property(SERVICE, "NRestarts")) > before, "systemd starts the service again")
    machine.wait_for_property(SERVICE, "ActiveState", "active")


def of_the_new_daemon(machine: Machine, kind: str) -> list[str]:
    """The states, or messages, that the present daemon has told."""
    entries = machine.events(kind, f"_PID={machine.main_pid()}")
    return [entry.get("FMSUPERVISOR_STATE", entry["MESSAGE"]) for entry in entries]


def files_of_the_state(machine: Machine) -> set[str]:
    return {path.name for path in machine.path(STATE).iterdir()}


def expect_only(machine: Machine, *pids: int) -> None:
    """No other process of the service; one that asks for Fabric Manager's version is soon over."""
    machine.wait_for(lambda: sorted(machine.processes()) == sorted(pids), f"only {pids} are left")


def expect_nothing_left(machine: Machine, *pids: int) -> None:
    """No process, and nothing that the next start could take for a Fabric Manager of ours; which then is a new one."""
    assert machine.processes() == []
    assert not any(machine.is_alive(pid) for pid in pids)
    assert files_of_the_state(machine) <= {"lock", "status.json"}
    taken_over = len(machine.events("fm-adopted"))
    machine.do("start", SERVICE)
    assert machine.property(SERVICE, "StatusText").startswith("configured:")
    assert machine.manager_pid() not in pids
    assert len(machine.events("fm-adopted")) == taken_over
    expect_only(machine, machine.main_pid(), machine.manager_pid())


class TestACrash:
    @pytest.mark.parametrize(("signal_name", "result", "more"), CRASHES)
    def test_leaves_fabric_manager_and_the_next_daemon_takes_it_over(
        self, machine: Machine, signal_name: str, result: str, more: str
    ) -> None:
        manager = start(machine, f"RestartSec=100ms\n{more}")
        old = machine.main_pid()
        crash(machine, signal_name)
        assert re.search(f"Failed with result '({result})'", machine.words(SERVICE))
        assert machine.main_pid() != old
        assert machine.manager_pid() == manager
        expect_only(machine, machine.main_pid(), manager)
        (taken_over,) = machine.events("fm-adopted")
        assert taken_over["FM_PID"] == str(manager)
        assert of_the_new_daemon(machine, "state-changed") == ["configured"]
        assert machine.property(SERVICE, "StatusText").startswith("configured: 4 NVSwitches configured")
        assert len(machine.events("fm-started")) == 1

    def test_of_one_daemon_after_the_other_leaves_the_same_fabric_manager(self, machine: Machine) -> None:
        manager = start(machine)
        for _ in range(3):
            crash(machine)
        assert machine.manager_pid() == manager
        assert [entry["FM_PID"] for entry in machine.events("fm-adopted")] == [str(manager)] * 3

    def test_does_not_lose_what_fabric_manager_says_while_nobody_listens(self, machine: Machine) -> None:
        manager = start_without_restart(machine)
        machine.kill(machine.main_pid(), "KILL")
        machine.wait_for_property(SERVICE, "ActiveState", "failed")
        for number in range(3):
            machine.tell_manager(f"say nobody listens {number}")
        output = machine.path(f"/proc/{manager}/fd/2")
        unread = "import fcntl, struct, sys, termios\nwith open(sys.argv[1], 'rb') as pipe:\n    print(struct.unpack("
        unread += "'i', fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0])\n"
        machine.install_program("/usr/local/bin/fmsupervisor-unread", python_program(unread))
        said = len("nobody listens 0\n") * 3
        machine.wait_for(
            lambda: int(machine.run("/usr/local/bin/fmsupervisor-unread", f"/proc/{manager}/fd/2").stdout) >= said,
            f"it is said into {output}",
        )
        assert machine.is_alive(manager), "it was ended by writing to a pipe without a reader"
        machine.do("start", SERVICE)
        assert machine.manager_pid() == manager
        lines = [entry["MESSAGE"] for entry in machine.events("fm-line", "FM_SOURCE=stderr")]
        assert [line.rpartition("nobody listens ")[2] for line in lines] == ["0", "1", "2"]

    def test_of_fabric_manager_later_is_told_without_inventing_its_exit_status(self, machine: Machine) -> None:
        manager = start(machine)
        crash(machine)
        machine.kill(manager, "SEGV")
        (ended,) = machine.wait_for(lambda: machine.events("fm-exited"), "its end is told")
        assert (ended["FM_EXIT_CLASS"], ended["FM_PID"]) == ("unexpected", str(manager))
        assert "unknown exit status" in ended["MESSAGE"]
        assert "FM_EXIT_SIGNAL" not in ended
        machine.wait_for(lambda: len(machine.events("fm-started")) == 2, "it is started again")

    def test_of_both_is_followed_by_a_new_fabric_manager(self, machine: Machine) -> None:
        manager = start(machine)
        machine.run("kill", "-KILL", str(machine.main_pid()), str(manager))
        machine.wait_for(lambda: len(machine.events("fm-started")) == 2, "a new one is started")
        machine.wait_for_property(SERVICE, "ActiveState", "active")
        assert machine.manager_pid() != manager
        assert len(machine.events("fm-exited")) == 1

    def test_and_settings_that_are_wrong_meanwhile_leave_fabric_manager_to_the_next_good_start(
        self, machine: Machine
    ) -> None:
        manager = start(machine)
        settings = machine.path(SETTINGS)
        good = settings.read_text()
        settings.write_text(f"{good}\n[nonsense]\nkey = 1\n")
        machine.kill(machine.main_pid(), "KILL")
        machine.wait_for_property(SERVICE, "ActiveState", "failed")
        assert machine.property(SERVICE, "ExecMainStatus") == "78"
        assert machine.processes() == [manager]
        settings.write_text(good)
        machine.do("start", SERVICE)
        assert machine.manager_pid() == manager
        assert of_the_new_daemon(machine, "state-changed") == ["configured"]


class TestAStop:
    def test_after_a_crash_ends_the_fabric_manager_that_was_taken_over_in_order(self, machine: Machine) -> None:
        manager = start(machine)
        crash(machine)
        machine.do("stop", SERVICE)
        assert machine.show(SERVICE, "ActiveState", "Result") == {"ActiveState": "inactive", "Result": "success"}
        (ended,) = machine.events("fm-exited")
        assert (ended["FM_EXIT_CLASS"], ended["FM_PID"]) == ("requested", str(manager))
        expect_nothing_left(machine, manager)

    def test_of_long_ago_does_not_make_a_later_crash_a_stop(self, machine: Machine) -> None:
        start(machine)
        machine.do("stop", SERVICE)
        machine.do("start", SERVICE)
        manager = machine.manager_pid()
        crash(machine)
        assert machine.manager_pid() == manager

    @pytest.mark.parametrize("command", ["stop", "restart"])
    def test_of_a_daemon_that_hangs_ends_fabric_manager_all_the_same(self, machine: Machine, command: str) -> None:
        manager = start(machine, "TimeoutStopSec=8\nWatchdogSec=0")
        daemon = machine.main_pid()
        machine.kill(daemon, "USR1")
        machine.systemctl(command, SERVICE)
        assert machine.journal(SERVICE, "MESSAGE=fmsupervisor.service: State 'stop-sigterm' timed out. Killing.")
        if command == "stop":
            expect_nothing_left(machine, daemon, manager)
        else:
            machine.wait_for_property(SERVICE, "ActiveState", "active")
            assert machine.manager_pid() != manager
            expect_only(machine, machine.main_pid(), machine.manager_pid())
            assert machine.events("fm-adopted") == []

    def test_of_a_start_in_which_the_daemon_hangs_ends_fabric_manager(self, machine: Machine) -> None:
        machine.install_program(FAULTY, python_program(FAULTS))
        machine.build_host("start-timeout", 1.0, program=FAULTY, more="TimeoutStopSec=8\nWatchdogSec=0")
        machine.do("start", "--no-block", SERVICE)
        machine.wait_for(lambda: machine.events("fm-started"), "Fabric Manager runs")
        pids = machine.processes()
        machine.kill(machine.main_pid(), "USR1")
        machine.systemctl("stop", SERVICE)
        assert machine.processes() == []
        assert not any(machine.is_alive(pid) for pid in pids)
        assert files_of_the_state(machine) <= {"lock", "status.json"}

    def test_in_which_the_daemon_is_killed_half_way_ends_everything(self, machine: Machine) -> None:
        """Fabric Manager does not listen to SIGTERM, nor does a process that it has started."""
        machine.path("/etc/fmsupervisor.toml").write_text("[fabric_manager]\nstop_timeout_seconds = 1.0\n")
        manager = start(machine, "RestartSec=100ms", "ignores-sigterm", speed=1.0)
        machine.tell_manager("child")
        machine.wait_for(lambda: len(machine.processes()) == 3, "Fabric Manager has a child")
        pids = machine.processes()
        machine.do("stop", "--no-block", SERVICE)
        machine.wait_for(lambda: machine.document()["state"] == "stopping", "the daemon is stopping")
        assert machine.is_alive(manager)
        machine.kill(machine.main_pid(), "KILL")
        machine.wait_for_property(SERVICE, "ActiveState", "inactive", "failed")
        assert machine.property(SERVICE, "NRestarts") == "0"
        expect_nothing_left(machine, *pids)


class TestAfterStopByHand:
    @pytest.mark.parametrize(
        ("more", "state"),
        [
            pytest.param("Restart=no", "failed", id="failed"),
            pytest.param("RestartSec=1h", "auto-restart", id="stopped before its next start"),
        ],
    )
    def test_ends_the_fabric_manager_of_a_service_that_has(self, machine: Machine, more: str, state: str) -> None:
        """In neither state is there anything that ``systemctl stop`` would run."""
        manager = start(machine, more)
        machine.kill(machine.main_pid(), "KILL")
        machine.wait_for_property(SERVICE, "SubState", state)
        machine.do("stop", SERVICE)
        assert machine.processes() == [manager]
        result = machine.run(PROGRAM, "after-stop")
        assert f"processes {manager}" in result.stderr, files_of_the_state(machine)
        assert result.returncode == 0
        expect_nothing_left(machine, manager)

    def test_leaves_the_fabric_manager_of_a_daemon_that_runs(self, machine: Machine) -> None:
        manager = start(machine)
        result = machine.run(PROGRAM, "after-stop")
        assert result.returncode == 1
        assert f"pid {machine.main_pid()}" in result.stderr
        assert machine.is_alive(manager)


def test_the_record_of_fabric_manager_is_for_root_alone(machine: Machine) -> None:
    manager = start(machine)
    record = machine.path(f"{STATE}/handover.json")
    assert oct(record.stat().st_mode & 0o777) == "0o600"
    assert json.loads(record.read_text())["record"]["identity"]["pid"] == manager

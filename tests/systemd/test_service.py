"""fmsupervisor.service as shipped, under a real systemd."""

import errno
import json
import signal
import sys
from pathlib import Path

import pytest

from fmsupervisor.fabric_manager.ownership import TOKEN_VARIABLE
from tests.systemd.machine import HOST, PROGRAM, SERVICE, Machine, python_program

pytestmark = [pytest.mark.root, pytest.mark.xdist_group("systemd-service")]

MANAGER_FILES = f"{HOST}/usr/local/nvidia"
PROBE = "/usr/local/bin/fmsupervisor-probe"


def position(machine: Machine, words: str) -> int:
    """Where in the unit's journal these words stand."""
    messages = [str(entry["MESSAGE"]) for entry in machine.journal(SERVICE)]
    return next(number for number, message in enumerate(messages) if words in message)


class TestStart:
    def test_returns_when_the_fabric_is_configured(self, machine: Machine) -> None:
        machine.simulate("healthy")
        machine.do("start", SERVICE)
        shown = machine.show(SERVICE, "ActiveState", "SubState", "StatusText", "MainPID", "NotifyAccess")
        assert (shown["ActiveState"], shown["SubState"]) == ("active", "running")
        assert shown["StatusText"].startswith("configured: 4 NVSwitches configured")
        assert int(shown["MainPID"]) == machine.document()["pid"]
        assert position(machine, "-> configured") < position(machine, "Started fmsupervisor.service")

    def test_passes_through_the_whole_chain_inside_the_shipped_sandbox(self, machine: Machine) -> None:
        machine.simulate("healthy")
        machine.do("start", SERVICE)
        outside = machine.run("nsenter", "-t", str(machine.main_pid()), "-m", "touch", "/etc/written")
        assert "Read-only file system" in outside.stderr, "the sandbox is not on"
        assert {path.name for path in machine.path(f"{HOST}/dev").iterdir()} >= {
            *(f"nvidia-nvswitch{minor}" for minor in range(4)),
            *("nvidia-nvswitchctl", "nvidia-nvlink", "nvidiactl"),
        }
        assert "Successfully configured" in machine.path(f"{MANAGER_FILES}/fabricmanager.log").read_text()
        assert "DAEMONIZE=0" in machine.path(f"{MANAGER_FILES}/fm.cfg").read_text()
        assert machine.journal(SERVICE, "PRIORITY=3", "PRIORITY=2", "PRIORITY=4") == []

    def test_in_the_shipped_sandbox_nodes_can_be_made_in_dev_modules_loaded_and_uevents_heard(
        self, machine: Machine
    ) -> None:
        program = python_program(
            "import ctypes, json, os\n"
            "from fmsupervisor.host.linux_kernel import LinuxKernel\n"
            "from fmsupervisor.host.module_load import LinuxModuleCalls\n"
            "from fmsupervisor.host.root import HostRoot\n"
            "kernel = LinuxKernel(HostRoot('/'))\n"
            "kernel.make_node_directory('/dev/nvidia-caps')\n"
            "for path in ('/dev/nvidia-nvswitchctl', '/dev/nvidia-caps/nvidia-cap1'):\n"
            "    kernel.make_node(path, 507, 255, 0o666, 7, 7)\n"
            "    kernel.adjust_node(path, 0o600, 0, 0)\n"
            "libc = ctypes.CDLL(None, use_errno=True)\n"
            "numbers = {'x86_64': (313, 175), 'aarch64': (273, 105)}[os.uname().machine]\n"
            "finit_module, init_module = numbers\n"
            "found = {'mode': oct(kernel.node_status('/dev/nvidia-nvswitchctl').mode)}\n"
            "with open(__file__, 'rb') as file:\n"
            "    libc.syscall(finit_module, file.fileno(), b'', 0)\n"
            "found['finit_module'] = ctypes.get_errno()\n"
            "libc.syscall(init_module, b'no module', 9, b'')\n"
            "found['init_module'] = ctypes.get_errno()\n"
            "kernel.monitor_uevents().close()\n"
            "print(json.dumps(found), flush=True)\n"
        )
        machine.install_program(PROBE, program)
        machine.drop_in(SERVICE, f"[Service]\nType=oneshot\nRestart=no\nExecStart=\nExecStart={PROBE}\n")
        machine.do("start", SERVICE)
        (line,) = (entry["MESSAGE"] for entry in machine.journal(SERVICE) if entry["MESSAGE"].startswith("{"))
        found = json.loads(line)
        assert found["mode"] == "0o600"
        # No module, so refused: by the kernel's reading of it (ENOSYS where there are no modules), not by the sandbox.
        assert {found["finit_module"], found["init_module"]} <= {errno.ENOEXEC, errno.ENOSYS, errno.EBADMSG}

    def test_succeeds_on_a_terminal_condition_and_says_failed_with_its_code(self, machine: Machine) -> None:
        machine.simulate("version-mismatch")
        machine.do("start", SERVICE)
        shown = machine.show(SERVICE, "ActiveState", "StatusText", "NRestarts")
        assert (shown["ActiveState"], shown["NRestarts"]) == ("active", "0")
        assert shown["StatusText"].startswith("FAILED FMS-103 ")
        assert "580.159.03" in shown["StatusText"]

    def test_is_not_cut_off_by_the_start_timeout_while_switches_are_waited_for(self, machine: Machine) -> None:
        machine.simulate("switch-missing", speed=0.4, more="TimeoutStartSec=12")
        machine.do("start", "--no-block", SERVICE)
        machine.wait_for(lambda: "3 of 4" in machine.property(SERVICE, "StatusText"), "the wait for switches is told")
        assert machine.property(SERVICE, "ActiveState") == "activating"
        machine.wait_for_property(SERVICE, "ActiveState", "active", "failed")
        shown = machine.show(
            SERVICE, "ActiveState", "StatusText", "InactiveExitTimestampMonotonic", "ActiveEnterTimestampMonotonic"
        )
        assert shown["ActiveState"] == "active"
        assert shown["StatusText"].startswith("FAILED FMS-301 ")
        took = int(shown["ActiveEnterTimestampMonotonic"]) - int(shown["InactiveExitTimestampMonotonic"])
        assert took > 12_000_000, "it was decided before the time-out; the test shows nothing"

    def test_on_a_machine_without_nvswitches_is_active_and_quiet(self, machine: Machine) -> None:
        """The real command on this machine as it is."""
        machine.do("start", SERVICE)
        shown = machine.show(SERVICE, "ActiveState", "StatusText")
        assert shown == {"ActiveState": "active", "StatusText": "not-applicable: this machine has no NVSwitch"}
        (entry,) = (entry for entry in machine.journal(SERVICE) if entry["_PID"] != "1")
        assert (entry["FMSUPERVISOR_STATE"], entry["PRIORITY"]) == ("not-applicable", "6")
        assert machine.processes() == [machine.main_pid()]

    def test_of_a_second_daemon_by_hand_is_refused_naming_the_first(self, machine: Machine) -> None:
        machine.do("start", SERVICE)
        second = machine.run(PROGRAM, "run")
        assert second.returncode == 75
        assert f"another fmsupervisor is running (pid {machine.main_pid()})" in second.stderr
        assert machine.property(SERVICE, "ActiveState") == "active"

    def test_with_wrong_settings_fails_once_and_names_file_and_key(self, machine: Machine) -> None:
        machine.path("/etc/fmsupervisor.toml").write_text("[switches]\nexpekted = 4\n")
        assert machine.systemctl("start", SERVICE).returncode != 0
        shown = machine.show(SERVICE, "ActiveState", "Result", "ExecMainStatus", "NRestarts")
        assert shown == {"ActiveState": "failed", "Result": "exit-code", "ExecMainStatus": "78", "NRestarts": "0"}
        words = machine.words(SERVICE)
        assert "/etc/fmsupervisor.toml" in words
        assert "expekted" in words


class TestFabricManager:
    def test_hears_nothing_of_systemd_and_lives_in_the_units_control_group(self, machine: Machine) -> None:
        machine.simulate("healthy")
        machine.do("start", SERVICE)
        process = machine.path(f"/proc/{machine.manager_pid()}")
        names = {entry.partition(b"=")[0] for entry in (process / "environ").read_bytes().split(b"\0") if entry}
        assert names == {b"PATH", b"LANG", b"LD_LIBRARY_PATH", TOKEN_VARIABLE.encode()}
        assert machine.property(SERVICE, "ControlGroup").endswith("/fmsupervisor.service")
        assert sorted(machine.processes()) == sorted([machine.main_pid(), machine.manager_pid()])

    def test_is_inside_the_sandbox_too(self, machine: Machine) -> None:
        machine.simulate("healthy")
        machine.do("start", SERVICE)
        status = machine.path(f"/proc/{machine.manager_pid()}/status").read_text()
        assert "NoNewPrivs:\t1" in status
        assert "Seccomp:\t2" in status


class TestStop:
    def test_ends_fabric_manager_first_and_leaves_nothing(self, machine: Machine) -> None:
        machine.simulate("healthy")
        machine.do("start", SERVICE)
        manager = machine.manager_pid()
        machine.do("stop", SERVICE)
        assert machine.show(SERVICE, "ActiveState", "Result") == {"ActiveState": "inactive", "Result": "success"}
        assert not machine.is_alive(manager)
        assert machine.processes() == []
        (ended,) = machine.events("fm-exited")
        assert (ended["FM_EXIT_CLASS"], ended["FM_PID"]) == ("requested", str(manager))
        assert position(machine, "Fabric Manager ended") < position(machine, "Stopped fmsupervisor.service")
        assert machine.journal(SERVICE, "MESSAGE=fmsupervisor.service: Deactivated successfully.")

    def test_kills_a_fabric_manager_that_ignores_sigterm_itself_before_systemd_must(self, machine: Machine) -> None:
        machine.simulate("ignores-sigterm", speed=10.0)
        machine.do("start", SERVICE)
        manager = machine.manager_pid()
        machine.do("stop", SERVICE)
        assert machine.show(SERVICE, "ActiveState", "Result") == {"ActiveState": "inactive", "Result": "success"}
        assert not machine.is_alive(manager)
        (ended,) = machine.events("fm-exited")
        assert ended["FM_EXIT_SIGNAL"] == str(int(signal.SIGKILL))
        assert machine.events("condition-raised", "FMSUPERVISOR_CONDITION=FMS-516")

    def test_during_the_start_is_obeyed_at_once(self, machine: Machine) -> None:
        machine.simulate("start-timeout", speed=1.0)
        machine.do("start", "--no-block", SERVICE)
        machine.wait_for(lambda: machine.events("fm-started"), "Fabric Manager runs")
        machine.do("stop", SERVICE)
        assert machine.show(SERVICE, "ActiveState", "Result") == {"ActiveState": "inactive", "Result": "success"}
        assert machine.processes() == []


class TestRestart:
    def test_by_hand_gives_a_new_daemon_and_a_new_fabric_manager(self, machine: Machine) -> None:
        machine.simulate("healthy")
        machine.do("start", SERVICE)
        old = {machine.main_pid(), machine.manager_pid()}
        machine.do("restart", SERVICE)
        assert machine.property(SERVICE, "StatusText").startswith("configured:")
        assert old.isdisjoint({machine.main_pid(), machine.manager_pid()})
        assert not any(machine.is_alive(pid) for pid in old)


class TestReload:
    def test_reads_the_settings_again_and_leaves_fabric_manager_alone(self, machine: Machine) -> None:
        machine.simulate("healthy")
        machine.do("start", SERVICE)
        manager = machine.manager_pid()
        settings = machine.path(f"{HOST}/etc/fmsupervisor.toml")
        settings.write_text(settings.read_text().replace("hang_seconds = 30.0", "hang_seconds = 40.0"))
        machine.do("reload", SERVICE)
        machine.wait_for(lambda: machine.events("settings-reloaded"), "the settings are read")
        machine.wait_for_property(SERVICE, "ActiveState", "active")
        assert machine.journal(SERVICE, "MESSAGE=Reloaded fmsupervisor.service - NVIDIA Fabric Manager supervisor.")
        assert machine.manager_pid() == manager
        assert machine.is_alive(manager)
        assert machine.property(SERVICE, "NRestarts") == "0"

    def test_of_wrong_settings_keeps_the_old_ones_and_says_what_is_wrong(self, machine: Machine) -> None:
        machine.simulate("healthy")
        machine.do("start", SERVICE)
        manager = machine.manager_pid()
        with machine.path(f"{HOST}/etc/fmsupervisor.toml").open("a") as settings:
            settings.write("\n[nonsense]\nkey = 1\n")
        machine.do("reload", SERVICE)
        (raised,) = machine.wait_for(lambda: machine.events("condition-raised"), "the mistake is told")
        assert "fmsupervisor.toml" in raised["MESSAGE"]
        assert "nonsense" in raised["MESSAGE"]
        machine.wait_for_property(SERVICE, "ActiveState", "active")
        assert machine.manager_pid() == manager


class TestJournald:
    def test_a_restart_of_journald_loses_nothing_that_comes_after_it(self, machine: Machine) -> None:
        machine.simulate("healthy")
        machine.do("start", SERVICE)
        machine.do("restart", "systemd-journald.service")
        machine.do("stop", SERVICE)
        assert len(machine.events("service-stopping")) == 1
        assert len(machine.events("fm-exited")) == 1
        assert "suppressed" not in machine.words(SERVICE).lower()

    def test_messages_during_the_absence_of_journald_do_not_stop_the_daemon(self, machine: Machine) -> None:
        machine.simulate("crash-after-configured", speed=40.0)
        machine.do("start", SERVICE)
        machine.run("systemctl", "kill", "--signal=STOP", "systemd-journald.service")
        try:
            machine.wait_for(lambda: machine.document()["fabric_manager"]["starts"] == 2, "Fabric Manager is restarted")
        finally:
            machine.run("systemctl", "kill", "--signal=CONT", "systemd-journald.service")
        machine.do("stop", SERVICE)
        assert machine.events("fm-exited")


def test_can_be_enabled(machine: Machine) -> None:
    machine.do("enable", SERVICE)
    link = Path("/etc/systemd/system/multi-user.target.wants") / SERVICE
    assert machine.path(str(link)).is_symlink()
    machine.do("disable", SERVICE)


def test_the_interpreter_inside_is_the_one_of_the_tests(machine: Machine) -> None:
    machine.install_program(PROBE, python_program("print(sys.version)\n"))
    assert machine.run(PROBE).stdout.strip() == sys.version

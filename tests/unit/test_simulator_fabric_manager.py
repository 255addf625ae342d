"""The simulated nv-fabricmanager behaves at its surface like the real one."""

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from fmsupervisor.facts import DriverState, ModuleChoice
from fmsupervisor.host.root import HostRoot
from fmsupervisor.simulator import hardware, messages
from fmsupervisor.simulator.hardware import GPUS, SWITCHES
from fmsupervisor.simulator.kernel import SimulatedKernel
from fmsupervisor.simulator.tree import PREFIX, VERSION, Behaviour, TreeOptions, build_tree
from fmsupervisor.simulator.world import tell_fabric_manager

DEADLINE_SECONDS = 20
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "LD_LIBRARY_PATH": f"{PREFIX}/usr/lib64"}
LOG = f"{PREFIX}/fabricmanager.log"
BRACKETED = re.compile(r"^\[[A-Z][a-z]{2} \d\d \d{4} \d\d:\d\d:\d\d\] \[(INFO|WARNING|ERROR)\] \[tid \d+\] .+$")


class Host:
    """A host with driver and nodes, ready for Fabric Manager."""

    def __init__(self, directory, **options):
        self.options = TreeOptions(**{"speed": 50.0, **options})
        build_tree(str(directory), self.options)
        self.root = HostRoot(str(directory))
        self.kernel = SimulatedKernel(self.root, speed=self.options.speed)
        self.kernel.load_module(ModuleChoice("nvidia.ko", "", self.options.module_version, (), ""), ())
        majors = hardware.parse_majors(self.root.read_text("/proc/devices") or "")
        self.kernel.make_node("/dev/nvidia-nvswitchctl", majors["nvidia-nvswitch"], 255, 0o666, 0, 0)
        self.kernel.make_node("/dev/nvidia-nvlink", majors["nvidia-nvlink"], 0, 0o666, 0, 0)
        for minor in range(len(self.options.switches)):
            self.kernel.make_node(f"/dev/nvidia-nvswitch{minor}", majors["nvidia-nvswitch"], minor, 0o666, 0, 0)
        self.root.make_directory("/run/nvidia-fabricmanager")
        self.processes = []

    def configure(self, **changes) -> str:
        stock = self.root.read_text(f"{PREFIX}/usr/share/nvidia/nvswitch/fabricmanager.cfg") or ""
        values = {
            "DAEMONIZE": "0",
            "LOG_FILE_NAME": LOG,
            "TOPOLOGY_FILE_PATH": f"{PREFIX}/usr/share/nvidia/nvswitch",
            **changes,
        }
        for key, value in values.items():
            stock, found = re.subn(rf"^{key}=.*$", f"{key}={value}", stock, flags=re.MULTILINE)
            stock += "" if found else f"{key}={value}\n"
        path = self.root.path(f"{PREFIX}/fm.cfg")
        with open(path, "w", encoding="utf-8") as file:
            file.write(stock)
        return path

    def start(self, **changes) -> subprocess.Popen:
        command = [self.root.path(f"{PREFIX}/usr/bin/nv-fabricmanager"), "-c", self.configure(**changes)]
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.processes.append(process)
        return process

    def wait_for(self, text: str, count: int = 1) -> str:
        deadline = time.monotonic() + DEADLINE_SECONDS
        log = ""
        while time.monotonic() < deadline:
            log = self.root.read_text(LOG, 1 << 24) or ""
            if log.count(text) >= count:
                return log
            time.sleep(0.01)
        raise AssertionError(f"{text!r} never came: {log[-2000:]}")

    def driver_states(self):
        return {device.driver_state for device in self.kernel.driver_view().devices}

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def make_host(tmp_path):
    hosts = []

    def make(**options) -> Host:
        hosts.append(Host(tmp_path, **options))
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()


def test_version_is_printed_as_by_the_real_one(make_host):
    host = make_host()
    done = subprocess.run(
        [host.root.path(f"{PREFIX}/usr/bin/nv-fabricmanager"), "--version"],
        env=ENVIRONMENT,
        capture_output=True,
        check=True,
    )
    assert done.stdout.startswith(f"Fabric Manager version is : {VERSION}\nBuild Info - ".encode())
    assert not done.stdout.endswith(b"\n")


class TestHealthyStart:
    def test_configures_registers_all_gpus_and_convinces_the_driver(self, make_host):
        host = make_host()
        process = host.start()
        log = host.wait_for("added GPU with UUID", len(GPUS))
        assert process.poll() is None
        assert log.startswith("Fabric Manager Log initializing at: ")
        assert messages.CONFIGURED in log
        assert log.index("completed NVSwitch 0/3 routing") < log.index("Successfully configured")
        assert log.index("Successfully configured") < log.index("FM starting NvLink Inband") < log.index("added GPU")
        assert {f"UUID {hardware.gpu_uuid(gpu)} based" in log for gpu in GPUS} == {True}
        assert host.driver_states() == {DriverState.CONFIGURED}

    def test_every_line_has_a_known_form(self, make_host):
        host = make_host()
        host.start()
        log = host.wait_for("Probe response", len(GPUS))
        bare = ("Fabric Manager Log init", ".", "  Index: ", "Message payload details:")
        strange = [
            line for line in log.splitlines() if line and not BRACKETED.match(line) and not line.startswith(bare)
        ]
        assert strange == []

    def test_its_name_in_proc_is_that_of_the_real_one(self, make_host):
        host = make_host()
        process = host.start()
        host.wait_for("Successfully configured")
        with open(f"/proc/{process.pid}/comm", encoding="ascii") as file:
            assert file.read() == "nv-fabricmanage\n"

    def test_without_a_log_file_it_logs_to_standard_error(self, make_host):
        process = make_host().start(LOG_FILE_NAME="")
        assert process.stderr is not None
        for line in process.stderr:
            if b"Successfully configured" in line:
                break
        else:
            pytest.fail("no success line on standard error")

    def test_a_second_session_is_appended(self, make_host):
        host = make_host(behaviour=Behaviour(registers_gpus=False))
        for session in (1, 2):
            process = host.start()
            host.wait_for("Successfully configured", session)
            process.terminate()
            assert process.wait(DEADLINE_SECONDS) == 0

    @pytest.mark.parametrize(
        ("version", "wanted", "unwanted"),
        [
            (
                "535.161.08",
                ["on fid 0 on", "message:  Message header", "the GPU handle 5410063385821516767"],
                ["NodeId"],
            ),
            ("595.71.05", ["on NodeId 0 on", "message: Message header", "Disabling RPC", "member GPU handle"], ["fid"]),
        ],
        ids=["535", "595"],
    )
    def test_wording_follows_the_version(self, make_host, version, wanted, unwanted):
        host = make_host(module_version=version, fabric_manager_version=version)
        host.start()
        host.wait_for("Successfully configured")
        assert tell_fabric_manager(host.root, "sxid fatal 20034 0000:86:00.0 33")
        assert tell_fabric_manager(host.root, "stale-handle")
        log = host.wait_for("status:57")
        assert [text for text in wanted if text not in log] == []
        assert [text for text in unwanted if text in log] == []


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "changes", "message", "status"),
        [
            ({"behaviour": Behaviour("bad-config")}, {}, "FABRIC_NODE_CONFIG_FILE has an invalid value", 1),
            ({"behaviour": Behaviour("bad-config-exit-zero")}, {}, "LOG_FILE_NAME has an invalid value", 0),
            ({"behaviour": Behaviour("nothing-to-do")}, {}, "NV_WARN_NOTHING_TO_DO", 1),
            ({"behaviour": Behaviour("loader-error")}, {}, "error while loading shared libraries", 127),
            ({"fabric_manager_version": "580.159.03"}, {}, "580.159.03 don't match with driver version 580.126.09", 1),
            ({"switches": SWITCHES[:3]}, {}, messages.TOPOLOGY_MISMATCH, 1),
            ({}, {"FABRIC_MODE": "7"}, "FABRIC_MODE has an invalid value", 1),
            ({}, {"PARTITION_RAIL_POLICY": "greedy"}, "PARTITION_RAIL_POLICY has an invalid value", 1),
            ({}, {"TOPOLOGY_FILE_PATH": "/nowhere"}, "TOPOLOGY_FILE_PATH has an invalid value", 1),
            ({}, {"LOG_FILE_NAME": "/nowhere/x.log"}, "LOG_FILE_NAME has an invalid value", 1),
            ({}, {"LOG_FILE_NAME": "/nowhere/x.log", "DAEMONIZE": "1"}, "LOG_FILE_NAME has an invalid value", 0),
            ({}, {"DATABASE_PATH": "/nowhere"}, "DATABASE_PATH has an invalid value", 1),
        ],
        ids=lambda value: "" if isinstance(value, (dict, int)) else str(value)[:40],
    )
    def test_are_said_on_standard_error(self, make_host, options, changes, message, status):
        process = make_host(**options).start(**changes)
        _, errors = process.communicate(timeout=DEADLINE_SECONDS)
        assert message.encode() in errors
        assert process.returncode == status

    def test_the_run_directory_must_be_there(self, make_host):
        host = make_host()
        os.rmdir(host.root.path("/run/nvidia-fabricmanager"))
        _, errors = host.start().communicate(timeout=DEADLINE_SECONDS)
        assert b"don't have access permissions to directory /var/run/nvidia-fabricmanager" in errors

    @pytest.mark.parametrize("node", ["nvidia-nvswitchctl", "nvidia-nvswitch2", "nvidia-nvlink"])
    def test_every_node_must_be_there(self, make_host, node):
        host = make_host()
        os.unlink(host.root.path(f"/dev/{node}"))
        process = host.start()
        assert process.wait(DEADLINE_SECONDS) == 1


class TestRunTime:
    def start(self, host: Host, **changes) -> subprocess.Popen:
        process = host.start(**changes)
        host.wait_for("FM starting NvLink Inband")
        return process

    def test_a_switch_error_is_logged_twice(self, make_host):
        host = make_host()
        self.start(host)
        assert tell_fabric_manager(host.root, "sxid non-fatal 12028 0000:84:00.0 35")
        log = host.wait_for("detected NVSwitch", 2)
        assert log.count("error 12028 on fid 0 on NVSwitch pci bus id 00000000:84:00.0 physical id 1 port 35") == 2

    def test_a_hang_is_seen_by_the_driver_and_ends_with_resume(self, make_host):
        host = make_host()
        self.start(host)
        for command, state in (("hang", DriverState.MANAGER_TIMEOUT), ("resume", DriverState.CONFIGURED)):
            assert tell_fabric_manager(host.root, command)
            deadline = time.monotonic() + DEADLINE_SECONDS
            while host.driver_states() != {state} and time.monotonic() < deadline:
                time.sleep(0.01)
            assert host.driver_states() == {state}

    @pytest.mark.parametrize(
        ("command", "status"), [("exit 3", 3), ("crash 9", -signal.SIGKILL), ("crash 11", -signal.SIGSEGV)]
    )
    def test_it_ends_as_told(self, make_host, command, status):
        host = make_host()
        process = self.start(host)
        assert tell_fabric_manager(host.root, command)
        assert process.wait(DEADLINE_SECONDS) == status
        assert not tell_fabric_manager(host.root, command)

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_signals_end_it(self, make_host, number):
        process = self.start(make_host())
        process.send_signal(number)
        assert process.wait(DEADLINE_SECONDS) == 0

    def test_ignoring_sigterm_it_lives_on(self, make_host):
        host = make_host(behaviour=Behaviour("ignores-sigterm"))
        process = self.start(host)
        process.terminate()
        assert tell_fabric_manager(host.root, "line INFO still here")
        host.wait_for("still here")
        assert process.poll() is None

    def test_forking_away_the_parent_ends_well_and_the_child_works_on(self, make_host):
        host = make_host(behaviour=Behaviour("forks-away"))
        process = host.start()
        assert process.wait(DEADLINE_SECONDS) == 0
        assert len(self.processes_of(host)) == 1, "systemd looks for the main process now"
        host.wait_for("Successfully configured")
        assert tell_fabric_manager(host.root, "exit 0")

    @staticmethod
    def processes_of(host):
        program = host.root.path(f"{PREFIX}/usr/bin/nv-fabricmanager").encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if program in path.read_bytes():
                    found.append(path)
        return found

    def test_dying_at_start_it_never_configures(self, make_host):
        host = make_host(behaviour=Behaviour("dies-at-start", exit_after_seconds=0.1, exit_code=-6))
        assert host.start().wait(DEADLINE_SECONDS) == -signal.SIGABRT
        assert "Successfully configured" not in (host.root.read_text(LOG) or "")

    def test_it_rotates_its_log(self, make_host):
        host = make_host()
        self.start(host, LOG_FILE_MAX_SIZE="1")
        assert tell_fabric_manager(host.root, "traffic 1500")
        assert tell_fabric_manager(host.root, "line INFO after the traffic")
        host.wait_for("after the traffic")
        rotated = host.root.status(f"{LOG}.1")
        assert rotated is not None
        assert 1 << 20 <= rotated.st_size < (1 << 20) + 8192

    def test_without_rotation_it_stops_logging_at_the_limit(self, make_host):
        host = make_host()
        process = self.start(host, LOG_FILE_MAX_SIZE="1", LOG_MAX_ROTATE_COUNT="0")
        assert tell_fabric_manager(host.root, "traffic 1500")
        assert tell_fabric_manager(host.root, "exit 5")
        assert process.wait(DEADLINE_SECONDS) == 5
        status = host.root.status(LOG)
        assert status is not None
        assert 1 << 20 <= status.st_size < (1 << 20) + 8192
        assert host.root.status(f"{LOG}.1") is None

    def test_it_ends_when_its_host_is_gone(self, make_host):
        host = make_host()
        process = self.start(host)
        os.rename(host.root.path("/.simulator"), host.root.path("/gone"))
        assert process.wait(DEADLINE_SECONDS) == 0

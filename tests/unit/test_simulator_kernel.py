"""The simulated kernel does to the tree what the real one does to /proc and /sys."""

import errno
import json
import os
import select
import threading
import time

import pytest

from fmsupervisor.errors import CannotObserve
from fmsupervisor.facts import DeviceState, DriverState, KernelKind, ModuleChoice
from fmsupervisor.host.kernel import Kernel, KernelLogSource, ModuleLoadFailed, UeventSource
from fmsupervisor.host.kernel_grammar import batch_of
from fmsupervisor.host.root import HostRoot
from fmsupervisor.simulator import hardware, pci_bus
from fmsupervisor.simulator.hardware import GPUS, SWITCHES
from fmsupervisor.simulator.kernel import LoadFault, SimulatedKernel
from fmsupervisor.simulator.tree import TreeOptions, build_tree

CHOICE = ModuleChoice("/x/nvidia.ko.zst", "6.12.0-160000.9-default", "580.126.09", (), "")
PROBED = "/proc/driver/nvidia-nvswitch/devices"
CONTROL = "/dev/nvidia-nvswitchctl"


def make(directory, *, speed=1.0, fault=None, failing=frozenset(), **options):
    build_tree(str(directory), TreeOptions(**options))
    root = HostRoot(str(directory))
    return root, SimulatedKernel(root, speed=speed, load_fault=fault, failing_probes=failing)


@pytest.fixture
def loaded(tmp_path):
    root, kernel = make(tmp_path)
    kernel.load_module(CHOICE, ())
    majors = hardware.parse_majors(root.read_text("/proc/devices") or "")
    kernel.make_node(CONTROL, majors["nvidia-nvswitch"], 255, 0o666, 0, 0)
    return root, kernel


@pytest.fixture
def listen():
    sources = []

    def start(kernel):
        sources.append(kernel.monitor_uevents())
        return sources[-1]

    yield start
    for source in sources:
        source.close()


def beat(root, *, state="configured", started=None, at=None, switches=SWITCHES):
    now = time.monotonic()
    record = {
        "pid": 1,
        "started": now if started is None else started,
        "at": now if at is None else at,
        "state": state,
        "switches": list(switches),
    }
    pci_bus.write(root, hardware.HEARTBEAT_FILE, json.dumps(record).encode())


def test_it_is_a_kernel_for_the_type_checker(tmp_path):
    _, simulated = make(tmp_path)
    kernel: Kernel = simulated
    events: UeventSource = kernel.monitor_uevents()
    events.close()


class TestLoading:
    def test_binds_the_switches_and_leaves_the_gpus_of_guests_alone(self, loaded):
        root, _ = loaded
        assert {pci_bus.driver(root, switch) for switch in SWITCHES} == {"nvidia-nvswitch"}
        assert {pci_bus.driver(root, gpu) for gpu in GPUS} == {"vfio-pci"}
        assert root.list_directory(PROBED) == list(SWITCHES)

    def test_shows_version_state_and_majors(self, loaded):
        root, _ = loaded
        assert root.read_text("/sys/module/nvidia/initstate") == "live\n"
        assert root.read_text("/sys/module/nvidia/version") == "580.126.09\n"
        assert "Kernel Module for x86_64  580.126.09  Release" in (root.read_text("/proc/driver/nvidia/version") or "")
        majors = hardware.parse_majors(root.read_text("/proc/devices") or "")
        assert majors["nvidia"] == majors["nvidiactl"] == 195
        assert {"nvidia-caps", "nvidia-nvlink", "nvidia-nvswitch"} <= majors.keys()
        assert "259 blkext" in (root.read_text("/proc/devices") or "")

    @pytest.mark.parametrize(
        ("parameters", "expected"), [((), "nvidia"), (("NVreg_RegisterPCIDriver=0",), None)], ids=["default", "no"]
    )
    def test_takes_a_gpu_without_driver_unless_told_not_to(self, tmp_path, parameters, expected):
        root, kernel = make(tmp_path, gpus_without_driver=(GPUS[2],))
        kernel.load_module(CHOICE, parameters)
        assert pci_bus.driver(root, GPUS[2]) == expected

    def test_fails_as_scripted_and_sends_no_event(self, tmp_path, listen):
        root, kernel = make(tmp_path, fault=LoadFault(errno.EKEYREJECTED, ("line",)))
        events = listen(kernel)
        with pytest.raises(ModuleLoadFailed) as caught:
            kernel.load_module(CHOICE, ())
        assert (caught.value.errno, caught.value.kernel_lines) == (errno.EKEYREJECTED, ("line",))
        assert root.status("/sys/module/nvidia") is None
        assert not events.drain()

    def test_works_once_the_fault_is_gone(self, tmp_path):
        root, kernel = make(tmp_path, fault=LoadFault(errno.EPERM))
        kernel.set_load_fault(None)
        kernel.load_module(CHOICE, ())
        assert root.list_directory(PROBED) == list(SWITCHES)

    def test_finds_no_device_when_there_is_none(self, tmp_path):
        _, kernel = make(tmp_path, switches=())
        with pytest.raises(ModuleLoadFailed) as caught:
            kernel.load_module(CHOICE, ())
        assert caught.value.errno == errno.ENODEV

    def test_loads_the_dependencies_first(self, tmp_path):
        root, kernel = make(tmp_path)
        choice = ModuleChoice("/x/nvidia.ko", "", "580.126.09", ("/lib/modules/x/drm-buddy.ko.zst",), "")
        kernel.load_module(choice, ())
        assert root.read_text("/sys/module/drm_buddy/initstate") == "live\n"

    def test_a_failed_probe_leaves_no_hole_in_the_minors(self, tmp_path):
        root, kernel = make(tmp_path, failing=frozenset({SWITCHES[1]}))
        kernel.load_module(CHOICE, ())
        kernel.make_node(CONTROL, 507, 255, 0o666, 0, 0)
        view = kernel.driver_view()
        assert [(device.pci_bus_id, device.minor) for device in view.devices] == [
            (SWITCHES[0], 0),
            (SWITCHES[2], 1),
            (SWITCHES[3], 2),
        ]
        assert root.list_directory(PROBED) == [SWITCHES[0], SWITCHES[2], SWITCHES[3]]

    def test_unloading_takes_everything_back(self, tmp_path):
        root, kernel = make(tmp_path)
        before = root.read_text("/proc/devices")
        kernel.load_module(CHOICE, ())
        kernel.unload_module()
        assert root.read_text("/proc/devices") == before
        assert root.status("/sys/module/nvidia") is None
        assert root.status("/proc/driver/nvidia-nvswitch") is None
        assert {pci_bus.driver(root, switch) for switch in SWITCHES} == {None}

    def test_a_new_kernel_object_takes_up_a_loaded_driver(self, loaded):
        root, _ = loaded
        assert [device.minor for device in SimulatedKernel(root).driver_view().devices] == [0, 1, 2, 3]


class TestDriverView:
    def test_needs_the_control_node(self, tmp_path):
        _, kernel = make(tmp_path)
        kernel.load_module(CHOICE, ())
        with pytest.raises(CannotObserve):
            kernel.driver_view()

    @pytest.mark.parametrize(("major", "minor"), [(506, 255), (507, 0)], ids=["major", "minor"])
    def test_needs_the_right_numbers(self, loaded, major, minor):
        _, kernel = loaded
        kernel.make_node(CONTROL, major, minor, 0o666, 0, 0)
        with pytest.raises(CannotObserve):
            kernel.driver_view()

    def test_is_standby_before_fabric_manager(self, loaded):
        _, kernel = loaded
        assert {device.driver_state for device in kernel.driver_view().devices} == {DriverState.STANDBY}

    @pytest.mark.parametrize(
        ("state", "age", "expected"),
        [
            ("standby", 0, DriverState.STANDBY),
            ("configured", 0, DriverState.CONFIGURED),
            ("configured", 9, DriverState.CONFIGURED),
            ("configured", 11, DriverState.MANAGER_TIMEOUT),
        ],
    )
    def test_follows_the_heartbeat(self, loaded, state, age, expected):
        root, kernel = loaded
        beat(root, state=state, at=time.monotonic() - age)
        assert {device.driver_state for device in kernel.driver_view().devices} == {expected}

    def test_a_returned_switch_has_no_routes(self, loaded):
        root, kernel = loaded
        beat(root)
        started = time.monotonic()
        kernel.remove_switch(SWITCHES[0])
        assert len(kernel.driver_view().devices) == 3
        kernel.return_switch(SWITCHES[0])
        beat(root, started=started)
        states = {device.pci_bus_id: device.driver_state for device in kernel.driver_view().devices}
        assert states[SWITCHES[0]] is DriverState.STANDBY
        assert states[SWITCHES[1]] is DriverState.CONFIGURED

    def test_shows_scripted_errors(self, loaded):
        root, kernel = loaded
        beat(root)
        kernel.manager_error(SWITCHES[0])
        kernel.blacklist(SWITCHES[1])
        first, second, *_ = kernel.driver_view().devices
        assert first.driver_state is DriverState.MANAGER_ERROR
        assert second.device_state is DeviceState.BLACKLISTED
        assert not second.is_usable


class TestNodes:
    def test_a_node_is_what_was_made(self, tmp_path):
        _, kernel = make(tmp_path)
        kernel.make_node("/dev/nvidia-nvlink", 509, 0, 0o640, 5, 6)
        status = kernel.node_status("/dev/nvidia-nvlink")
        assert status is not None
        assert (status.kind, status.major, status.minor, status.mode, status.uid, status.gid) == (
            "char",
            509,
            0,
            0o640,
            5,
            6,
        )

    def test_adjusting_keeps_the_numbers(self, tmp_path):
        _, kernel = make(tmp_path)
        kernel.make_node("/dev/nvidia-nvlink", 509, 0, 0o640, 5, 6)
        kernel.adjust_node("/dev/nvidia-nvlink", 0o666, 0, 0)
        status = kernel.node_status("/dev/nvidia-nvlink")
        assert status is not None
        assert (status.major, status.mode, status.uid) == (509, 0o666, 0)

    @pytest.mark.parametrize("kind", ["file", "directory", "symlink"])
    def test_strangers_are_told_apart_and_never_replaced(self, tmp_path, kind):
        root, kernel = make(tmp_path)
        real = root.path("/dev/nvidia-nvlink")
        match kind:
            case "file":
                with open(real, "wb") as file:
                    file.write(b"\xff\x00 not a node")
            case "directory":
                os.mkdir(real)
            case "symlink":
                os.symlink("/dev/null", real)
        status = kernel.node_status("/dev/nvidia-nvlink")
        assert status is not None
        assert status.kind == kind
        with pytest.raises(FileExistsError):
            kernel.make_node("/dev/nvidia-nvlink", 509, 0, 0o666, 0, 0)
        with pytest.raises(OSError, match="not a simulated device"):
            kernel.adjust_node("/dev/nvidia-nvlink", 0o666, 0, 0)

    def test_nothing_is_none_and_a_directory_can_be_made_twice(self, tmp_path):
        _, kernel = make(tmp_path)
        assert kernel.node_status("/dev/nvidia-caps") is None
        kernel.make_node_directory("/dev/nvidia-caps")
        kernel.make_node_directory("/dev/nvidia-caps")
        kernel.make_node("/dev/nvidia-caps/nvidia-cap0", 510, 0, 0o400, 0, 0)


class TestUevents:
    @pytest.mark.parametrize(
        ("method", "arguments"),
        [
            ("remove_switch", (SWITCHES[0],)),
            ("unbind_driver", (SWITCHES[0],)),
            ("bind_gpu", (GPUS[0], "nvidia")),
            ("unload_module", ()),
        ],
    )
    def test_a_change_wakes_the_listener(self, loaded, method, arguments, listen):
        _, kernel = loaded
        events = listen(kernel)
        getattr(kernel, method)(*arguments)
        assert select.select([events.fileno()], [], [], 5)[0]
        assert events.drain()
        assert not events.drain()

    def test_a_surprise_loss_is_silent(self, loaded, listen):
        root, kernel = loaded
        events = listen(kernel)
        kernel.surprise_loss(SWITCHES[0])
        assert not events.drain()
        assert (root.read_bytes(f"/sys/bus/pci/devices/{SWITCHES[0]}/config") or b"")[:4] == b"\xff\xff\xff\xff"
        assert pci_bus.driver(root, SWITCHES[0]) == "nvidia-nvswitch"

    def test_a_flood_of_other_events_counts_because_some_were_lost(self, loaded, listen):
        _, kernel = loaded
        events = listen(kernel)
        kernel.flood(1)
        assert not events.drain()
        kernel.flood(20_000)
        assert events.drain()

    def test_a_closed_listener_is_forgotten(self, loaded):
        _, kernel = loaded
        kernel.monitor_uevents().close()
        kernel.remove_switch(SWITCHES[0])


def test_loading_in_a_thread_is_seen_by_a_waiting_listener(tmp_path, listen):
    root, kernel = make(tmp_path)
    events = listen(kernel)
    thread = threading.Thread(target=kernel.load_module, args=(CHOICE, ()))
    thread.start()
    deadline = time.monotonic() + 10
    while (root.read_text("/sys/module/nvidia/initstate") or "") != "live\n" and time.monotonic() < deadline:
        select.select([events.fileno()], [], [], 0.5)
        events.drain()
    thread.join(10)
    assert root.read_text("/sys/module/nvidia/initstate") == "live\n"


class TestKernelLog:
    def test_it_is_a_kernel_log_for_the_type_checker(self, tmp_path):
        _, simulated = make(tmp_path)
        source: KernelLogSource = simulated.monitor_kernel_log()
        assert source.read_new() == []
        source.close()

    def test_what_was_there_before_is_old(self, loaded):
        _, kernel = loaded
        source = kernel.monitor_kernel_log()
        kernel.print_switch_error("fatal", 20034, SWITCHES[3], 33)
        lines = source.read_new()
        source.close()
        assert {line.is_old for line in lines if "Probing" in line.text} == {True}
        assert [line.is_old for line in lines if "SXid" in line.text] == [False] * 3

    def test_a_probe_that_fails_is_told_by_the_driver_and_by_the_bus(self, tmp_path):
        _, kernel = make(tmp_path, failing=frozenset({SWITCHES[1]}))
        kernel.load_module(CHOICE, ())
        source = kernel.monitor_kernel_log()
        records = batch_of(source.read_new()).records
        source.close()
        failed = [record.fields for record in records if record.kind is KernelKind.SWITCH_PROBE_FAILED]
        assert [fields.get("pci_bus_id", fields.get("minor")) for fields in failed] == ["1", SWITCHES[1]]
        assert [record.fields["minor"] for record in records if record.kind is KernelKind.SWITCH_READY] == [
            "0",
            "1",
            "2",
        ]

    def test_it_is_readable_when_there_is_something(self, loaded):
        _, kernel = loaded
        source = kernel.monitor_kernel_log()
        source.read_new()
        assert select.select([source], [], [], 0)[0] == []
        kernel.print_kernel_line("x")
        assert select.select([source], [], [], 0)[0] == [source]
        assert [line.text for line in source.read_new()] == ["x"]
        assert select.select([source], [], [], 0)[0] == []
        source.close()

    def test_a_reader_that_was_overtaken_is_told_how_far(self, loaded):
        _, kernel = loaded
        source = kernel.monitor_kernel_log()
        source.read_new()
        kernel.print_kernel_line("x", 3000)
        lines = []
        while select.select([source], [], [], 0)[0]:
            lines += source.read_new()
        source.close()
        assert len(lines) + lines[0].lost == 3000
        assert [line.lost for line in lines[1:]] == [0] * (len(lines) - 1)

    def test_nobody_writes_to_a_closed_reader(self, loaded):
        _, kernel = loaded
        source = kernel.monitor_kernel_log()
        source.close()
        source.close()
        kernel.print_kernel_line("x")

"""What nvidia.ko and the kernel show in /proc and /sys/module."""

import pytest

from fmsupervisor.errors import CannotObserve
from fmsupervisor.facts import LoadedModule
from fmsupervisor.host import procfs

DEVICES = """\
Character devices:
  1 mem
195 nvidia
195 nvidiactl
234 nvidia-nvswitch
235 nvidia-nvlink
236 nvidia-caps
508 nvidia-caps-imex-channels
509 not-nvidia-nvswitch

Block devices:
  8 sd
240 nvidia-block
"""

OPEN_DRIVER = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.211.01  Release Build  (root@host)  Tue Jan 1\n"
    "GCC version:  gcc version 13.3.0 (SUSE Linux)\n"
)
PROPRIETARY_DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n"


class TestMajors:
    def test_character_devices_count_by_their_whole_name(self, tree):
        tree.write("/proc/devices", DEVICES)
        assert procfs.read_majors(tree.root) == {
            "nvidia": 195,
            "nvidiactl": 195,
            "nvidia-nvswitch": 234,
            "nvidia-nvlink": 235,
            "nvidia-caps": 236,
            "nvidia-caps-imex-channels": 508,
        }

    @pytest.mark.parametrize(
        "content",
        [
            b"Character devices:\nnvidia 195\n x nvidia\n195\n",
            b"Character devices:\n" + b"9" * 5000 + b" nvidia\n",
        ],
    )
    def test_lines_that_make_no_sense_are_skipped(self, tree, content):
        tree.write("/proc/devices", content)
        assert procfs.read_majors(tree.root) == {}

    @pytest.mark.parametrize("content", [b"", b"\xff\xfe\0", b"Block devices:\n259 blkext\n"])
    def test_without_the_list_nothing_is_known(self, tree, content):
        tree.write("/proc/devices", content)
        with pytest.raises(CannotObserve):
            procfs.read_majors(tree.root)

    def test_the_file_is_there_on_every_kernel(self, tree):
        with pytest.raises(CannotObserve):
            procfs.read_majors(tree.root)


class TestModule:
    def test_no_directory_means_not_loaded(self, tree):
        assert procfs.read_module(tree.root) is None

    @pytest.mark.parametrize("state", ["coming", "live", "going"])
    def test_state_and_version_come_from_sys(self, tree, state):
        tree.write("/sys/module/nvidia/initstate", f"{state}\n")
        tree.write("/sys/module/nvidia/version", "570.211.01\n")
        assert procfs.read_module(tree.root) == LoadedModule(state, "570.211.01")

    @pytest.mark.parametrize(
        ("text", "version"),
        [
            pytest.param(OPEN_DRIVER, "570.211.01", id="open"),
            pytest.param(PROPRIETARY_DRIVER, "535.183.01", id="proprietary"),
            pytest.param(
                OPEN_DRIVER.replace("(root@host)  Tue Jan 1", ""), "570.211.01", id="without builder and date"
            ),
            pytest.param(
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  595.64  Release\n", "595.64", id="two numbers"
            ),
            pytest.param("", None, id="empty"),
            pytest.param("\0\0\0", None, id="binary"),
            pytest.param("GCC version:  gcc version 130.3.0\n", None, id="only the compiler"),
        ],
    )
    def test_without_a_version_in_sys_the_driver_tells_it(self, tree, text, version):
        tree.write("/sys/module/nvidia/initstate", "live\n")
        tree.write("/proc/driver/nvidia/version", text)
        assert procfs.read_module(tree.root) == LoadedModule("live", version)


class TestDriver:
    def test_probed_switches_are_the_directories_named_by_bus_id(self, tree):
        assert procfs.read_probed_switches(tree.root) is None
        tree.directory("/proc/driver/nvidia-nvswitch/devices")
        assert procfs.read_probed_switches(tree.root) == ()
        tree.directory("/proc/driver/nvidia-nvswitch/devices/0000:84:00.0")
        tree.directory("/proc/driver/nvidia-nvswitch/devices/0000:83:00.0")
        tree.directory("/proc/driver/nvidia-nvswitch/devices/README")
        assert procfs.read_probed_switches(tree.root) == ("0000:83:00.0", "0000:84:00.0")

    def test_modes_are_written_in_decimal(self, tree):
        assert procfs.read_nvswitch_mode(tree.root) is None
        tree.write("/proc/driver/nvidia-nvswitch/permissions", "DeviceFileMode: 438\n")
        assert procfs.read_nvswitch_mode(tree.root) == 0o666

    @pytest.mark.parametrize(
        ("content", "capability"),
        [
            pytest.param(None, None, id="absent"),
            pytest.param(
                "DeviceFileMinor: 0\nDeviceFileMode: 256\nDeviceFileModify: 1\n",
                procfs.Capability(0, 0o400),
                id="whole",
            ),
            pytest.param("DeviceFileMinor: 3\n", procfs.Capability(3, None), id="without mode"),
        ],
    )
    def test_the_fabric_management_capability_names_its_device(self, tree, content, capability):
        if content is not None:
            tree.write(procfs.FABRIC_MANAGEMENT, content)
        assert procfs.read_fabric_management(tree.root) == capability

    def test_a_capability_without_minor_cannot_be_used(self, tree):
        tree.write(procfs.FABRIC_MANAGEMENT, "DeviceFileMode: 256\n\xff")
        with pytest.raises(CannotObserve):
            procfs.read_fabric_management(tree.root)

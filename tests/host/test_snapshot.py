"""One reading of the whole host."""

import pytest

from fmsupervisor.conditions import Code
from fmsupervisor.facts import Host, LoadedModule, PciFunction, Unknown
from fmsupervisor.host import procfs
from fmsupervisor.host.snapshot import observe_host


@pytest.fixture
def hgx(tree):
    """Two switches probed, one GPU in a guest, the driver loaded."""
    tree.write("/proc/sys/kernel/osrelease", "6.12.0-160000.5-default\n")
    tree.write("/proc/devices", "Character devices:\n195 nvidiactl\n234 nvidia-nvswitch\n\nBlock devices:\n")
    tree.write("/sys/module/nvidia/initstate", "live\n")
    tree.write("/sys/module/nvidia/version", "570.211.01\n")
    tree.write(procfs.FABRIC_MANAGEMENT, "DeviceFileMinor: 0\nDeviceFileMode: 256\n")
    for bus_id in ("0000:83:00.0", "0000:84:00.0"):
        tree.switch(bus_id)
        tree.directory(f"{procfs.NVSWITCH_DEVICES}/{bus_id}")
    tree.gpu("0000:91:00.0")
    return tree


def test_a_healthy_host_is_read_completely(hgx):
    assert observe_host(hgx.root) == Host(
        kernel_release="6.12.0-160000.5-default",
        switches=tuple(
            PciFunction(bus_id, "10de:22a3", "nvidia-nvswitch") for bus_id in ("0000:83:00.0", "0000:84:00.0")
        ),
        gpus=(PciFunction("0000:91:00.0", "10de:2335", "vfio-pci"),),
        nvlink5_bridges=(),
        module=LoadedModule("live", "570.211.01"),
        probed_switches=("0000:83:00.0", "0000:84:00.0"),
        majors={"nvidiactl": 195, "nvidia-nvswitch": 234},
        fabric_management_minor=0,
        fabric_management_mode=0o400,
        problems=(),
    )


def test_before_the_driver_is_loaded_nothing_of_it_is_there(tree):
    tree.write("/proc/sys/kernel/osrelease", "6.12.0\n")
    tree.write("/proc/devices", "Character devices:\n  1 mem\n")
    host = observe_host(tree.root)
    assert (host.module, host.probed_switches, dict(host.majors)) == (None, None, {})
    assert (host.fabric_management_minor, host.fabric_management_mode) == (None, None)
    assert host.problems == ()


@pytest.mark.parametrize(
    "path",
    [
        "/proc/devices",
        "/proc/sys/kernel/osrelease",
        procfs.FABRIC_MANAGEMENT,
    ],
)
def test_a_file_that_cannot_be_read_is_a_problem_and_hides_nothing_else(hgx, path):
    hgx.unreadable(path)
    host = observe_host(hgx.root)
    assert [(problem.code, problem.subject) for problem in host.problems] == [(Code.HARDWARE_UNOBSERVABLE, path)]
    assert len(host.switches) == 2
    assert host.is_module_live


def test_a_module_that_cannot_be_looked_at_is_unknown(hgx):
    hgx.unreadable("/sys/module/nvidia/initstate")
    assert isinstance(observe_host(hgx.root).module, Unknown)


def test_an_nvlink5_board_is_recognised_where_no_switch_is_on_pci(tree):
    tree.infiniband("mlx5_4", "0000:40:00.2", b"SMDL=SW_MNG")
    assert observe_host(tree.root).nvlink5_bridges == ("0000:40:00.2",)


def test_slow_vpd_is_not_read_where_there_are_switches(hgx):
    hgx.infiniband("mlx5_4", "0000:40:00.2", None)
    hgx.unreadable("/sys/class/infiniband/mlx5_4/device/vpd")
    assert observe_host(hgx.root).problems == ()

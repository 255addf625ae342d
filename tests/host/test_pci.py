"""NVIDIA functions on the PCI bus, and NVLink-5 bridges among the InfiniBand devices."""

import pytest

from fmsupervisor.conditions import Code
from fmsupervisor.errors import CannotObserve
from fmsupervisor.facts import PciFunction
from fmsupervisor.host.infiniband import find_nvlink5_bridges
from fmsupervisor.host.pci import is_bus_id, read_pci
from fmsupervisor.host.root import HostRoot


class TestFunctions:
    def test_switches_and_gpus_come_by_bus_id_with_their_driver(self, tree):
        tree.switch("0000:86:00.0", driver=None)
        tree.switch("0000:83:00.0")
        tree.gpu("0000:91:00.0")
        reading = read_pci(tree.root)
        assert reading.switches == (
            PciFunction("0000:83:00.0", "10de:22a3", "nvidia-nvswitch", responds=True),
            PciFunction("0000:86:00.0", "10de:22a3", None, responds=True),
        )
        assert reading.gpus == (PciFunction("0000:91:00.0", "10de:2335", "vfio-pci", responds=True),)
        assert reading.problems == ()

    @pytest.mark.parametrize(
        ("vendor", "pci_class", "switches", "gpus"),
        [
            pytest.param("0x10de", "0x068000", 1, 0, id="an NVSwitch"),
            pytest.param("0x15b3", "0x068000", 0, 0, id="another vendor's bridge"),
            pytest.param("0x10de", "0x068001", 0, 0, id="another programming interface: the driver would not match it"),
            pytest.param("0x10de", "0x060400", 0, 0, id="an NVIDIA PCI bridge"),
            pytest.param("0x10de", "0x030000", 0, 1, id="a VGA controller"),
            pytest.param("0x10de", "0x030200", 0, 1, id="a 3D controller"),
            pytest.param("0x10de", "0x038000", 0, 0, id="another display controller"),
            pytest.param("0x10de", "0x040300", 0, 0, id="the audio function of a GPU"),
            pytest.param("0x1234", "0x030000", 0, 0, id="another vendor's VGA controller"),
        ],
    )
    def test_the_class_decides(self, tree, vendor, pci_class, switches, gpus):
        tree.pci("0000:05:00.0", vendor=vendor, pci_class=pci_class)
        reading = read_pci(tree.root)
        assert (len(reading.switches), len(reading.gpus)) == (switches, gpus)

    @pytest.mark.parametrize(
        ("config", "responds"),
        [
            pytest.param(b"\xde\x10\xa3\x22\x00", True, id="the device answers"),
            pytest.param(b"\xff\xff\xff\xff\xff", False, id="it fell off the bus"),
            pytest.param(b"\xff\xff", None, id="too short to tell"),
            pytest.param(None, None, id="no such file"),
        ],
    )
    def test_the_first_bytes_of_config_show_whether_a_device_responds(self, tree, config, responds):
        tree.pci("0000:83:00.0", config=config)
        assert read_pci(tree.root).switches[0].responds is responds

    def test_an_unreadable_config_is_not_a_verdict(self, tree):
        tree.pci("0000:83:00.0", config=None)
        tree.unreadable("/sys/bus/pci/devices/0000:83:00.0/config")
        reading = read_pci(tree.root)
        assert reading.switches[0].responds is None
        assert reading.problems == ()

    @pytest.mark.parametrize("content", [b"", b"garbage\n", b"\x00\xff\xfe", b"0x" + b"f" * 100_000])
    def test_a_file_that_makes_no_sense_is_a_problem_of_that_function_only(self, tree, content):
        tree.switch("0000:83:00.0")
        tree.switch("0000:84:00.0")
        tree.write("/sys/bus/pci/devices/0000:83:00.0/class", content)
        reading = read_pci(tree.root)
        assert [function.pci_bus_id for function in reading.switches] == ["0000:84:00.0"]
        if not content.startswith(b"0x"):  # a huge number is a number: some other class
            assert [(problem.code, problem.subject) for problem in reading.problems] == [
                (Code.HARDWARE_UNOBSERVABLE, "0000:83:00.0")
            ]

    def test_a_function_that_goes_while_it_is_read_is_not_there(self, tree):
        tree.link("/sys/bus/pci/devices/0000:83:00.0", "../../../devices/gone")
        reading = read_pci(tree.root)
        assert (reading.switches, reading.problems) == ((), ())


class TestBus:
    def test_an_empty_bus_has_no_devices(self, tree):
        assert read_pci(tree.root).switches == ()

    def test_a_kernel_without_pci_has_no_devices(self, tmp_path):
        (tmp_path / "sys/bus").mkdir(parents=True)
        assert read_pci(HostRoot(str(tmp_path))).switches == ()

    def test_without_sys_nothing_is_known(self, tmp_path):
        with pytest.raises(CannotObserve):
            read_pci(HostRoot(str(tmp_path)))

    def test_a_bus_that_cannot_be_listed_is_not_an_empty_bus(self, tmp_path, tree):
        (tmp_path / "host/sys/bus/pci/devices").rmdir()
        tree.unreadable("/sys/bus/pci/devices")
        with pytest.raises(CannotObserve):
            read_pci(tree.root)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0000:83:00.0", True),
        ("10000:e1:1f.7", True),
        ("0000:83:00", False),
        ("0000:83:00.8", False),
        ("0000:8G:00.0", False),
        ("0000:83:00.0\n", False),
    ],
)
def test_bus_ids_are_recognised_as_the_kernel_writes_them(text, expected):
    assert is_bus_id(text) is expected


class TestNvlink5Bridges:
    def test_vital_product_data_with_sw_mng_marks_a_bridge(self, tree):
        tree.infiniband("mlx5_0", "0000:40:00.0", b"\x82\x10\x00Ordinary adapter\x78")
        tree.infiniband("mlx5_1", "0000:40:00.2", b"\x82\x08\x00Bridge\x00\xffSMDL=SW_MNG\x78")
        assert find_nvlink5_bridges(tree.root) == (("0000:40:00.2",), ())

    def test_no_infiniband_and_no_vpd_are_normal(self, tree):
        assert find_nvlink5_bridges(tree.root) == ((), ())
        tree.infiniband("mlx5_0", "0000:40:00.0", None)
        assert find_nvlink5_bridges(tree.root) == ((), ())

    def test_vpd_that_cannot_be_read_is_a_problem_of_that_device(self, tree):
        tree.infiniband("mlx5_0", "0000:40:00.0", None)
        tree.unreadable("/sys/class/infiniband/mlx5_0/device/vpd")
        tree.infiniband("mlx5_1", "0000:40:00.2", b"SMDL=SW_MNG")
        bridges, problems = find_nvlink5_bridges(tree.root)
        assert bridges == ("0000:40:00.2",)
        assert [(problem.code, problem.subject) for problem in problems] == [(Code.HARDWARE_UNOBSERVABLE, "mlx5_0")]

    def test_a_file_without_end_is_read_to_a_bound(self, tree):
        tree.infiniband("mlx5_0", "0000:40:00.0", b"\0" * (1 << 15) + b"SW_MNG")
        assert find_nvlink5_bridges(tree.root) == ((), ())

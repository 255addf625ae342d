"""The simulated host looks like an HGX H200 before the driver is loaded."""

import os
import stat

import pytest

from fmsupervisor.host.root import HostRoot
from fmsupervisor.simulator import hardware, pci_bus
from fmsupervisor.simulator.tree import PREFIX, TreeOptions, build_tree


def build(directory, **options) -> HostRoot:
    build_tree(str(directory), TreeOptions(**options))
    return HostRoot(str(directory))


class TestPci:
    def test_shows_four_switches_without_driver_and_eight_gpus_on_vfio(self, tmp_path):
        root = build(tmp_path)
        assert pci_bus.switches(root) == list(hardware.SWITCHES)
        assert pci_bus.gpus(root) == list(hardware.GPUS)
        assert {pci_bus.driver(root, switch) for switch in hardware.SWITCHES} == {None}
        assert {pci_bus.driver(root, gpu) for gpu in hardware.GPUS} == {"vfio-pci"}

    @pytest.mark.parametrize(
        ("attribute", "text"),
        [("vendor", "0x10de\n"), ("device", "0x22a3\n"), ("class", "0x068000\n")],
    )
    def test_attributes_are_spelled_as_in_sysfs(self, tmp_path, attribute, text):
        assert build(tmp_path).read_text(f"/sys/bus/pci/devices/0000:83:00.0/{attribute}") == text

    def test_configuration_space_begins_with_vendor_and_device(self, tmp_path):
        content = build(tmp_path).read_bytes("/sys/bus/pci/devices/0000:91:00.0/config")
        assert content is not None
        assert content[:4] == b"\xde\x10\x35\x23"
        assert content[9:12] == b"\x00\x02\x03"
        assert len(content) == 256

    def test_uevent_has_the_kernels_keys(self, tmp_path):
        text = build(tmp_path).read_text("/sys/bus/pci/devices/0000:91:00.0/uevent")
        assert text is not None
        assert text.startswith("DRIVER=vfio-pci\nPCI_CLASS=30200\nPCI_ID=10DE:2335\n")
        assert text.count("DRIVER=") == 1

    def test_a_removed_function_leaves_nothing(self, tmp_path):
        root = build(tmp_path)
        pci_bus.remove(root, "0000:86:00.0")
        assert pci_bus.switches(root) == list(hardware.SWITCHES[:3])
        assert not root.is_directory("/sys/devices/pci0000:86/0000:86:00.0")

    def test_bind_and_unbind_keep_both_links_and_the_uevent_in_step(self, tmp_path):
        root = build(tmp_path)
        pci_bus.unbind(root, "0000:91:00.0")
        assert "0000:91:00.0" not in (root.list_directory("/sys/bus/pci/drivers/vfio-pci") or [])
        assert "DRIVER" not in (root.read_text("/sys/bus/pci/devices/0000:91:00.0/uevent") or "DRIVER")
        pci_bus.bind(root, "0000:91:00.0", "nvidia")
        assert root.list_directory("/sys/bus/pci/drivers/nvidia") == ["0000:91:00.0"]

    def test_an_nvlink5_bridge_says_so_in_its_vpd(self, tmp_path):
        root = build(tmp_path, switches=(), nvlink5_bridge="0000:05:00.0")
        assert b"SMDL=SW_MNG" in (root.read_bytes("/sys/class/infiniband/mlx5_0/device/vpd") or b"")
        real = os.path.realpath(root.path("/sys/class/infiniband/mlx5_0/device"))
        assert os.path.basename(real) == "0000:05:00.0"


def test_every_link_below_sys_leads_somewhere(tmp_path):
    build(tmp_path, nvlink5_bridge="0000:05:00.0")
    links = [
        os.path.join(directory, name)
        for directory, directories, files in os.walk(tmp_path / "sys")
        for name in (*directories, *files)
        if os.path.islink(os.path.join(directory, name))
    ]
    assert links
    assert [link for link in links if not os.path.exists(link)] == []


def test_permissions_do_not_depend_on_the_umask(tmp_path):
    previous = os.umask(0)
    try:
        build(tmp_path)
    finally:
        os.umask(previous)
    writable = [
        os.path.join(directory, name)
        for directory, directories, files in os.walk(tmp_path)
        for name in (*directories, *files)
        if os.lstat(os.path.join(directory, name)).st_mode & 0o022 and not os.path.islink(os.path.join(directory, name))
    ]
    assert writable == []


class TestDriverTree:
    def test_has_what_the_extracted_packages_have(self, tmp_path):
        root = build(tmp_path)
        for path in (
            "usr/lib/modules/6.12.0-160000.9-default/updates/nvidia.ko.zst",
            "usr/bin/nv-fabricmanager",
            "usr/share/nvidia/nvswitch/fabricmanager.cfg",
            "usr/share/nvidia/nvswitch/dgxh100_hgxh100_topology",
            "usr/lib64/libnvidia-nscq.so.2.0",
        ):
            assert root.is_file(f"{PREFIX}/{path}"), path

    def test_the_compressed_module_holds_its_version(self, tmp_path):
        import zstandard

        content = build(tmp_path).read_bytes(f"{PREFIX}/usr/lib/modules/6.12.0-160000.9-default/updates/nvidia.ko.zst")
        module = zstandard.ZstdDecompressor().decompressobj().decompress(content)
        assert b"\0version=580.126.09\0" in b"\0" + module[module.index(b"version=") :]

    @pytest.mark.parametrize(
        ("options", "path"),
        [
            ({"nscq_version": None}, "usr/lib64/libnvidia-nscq.so.2"),
            ({"fabric_manager_version": None}, "usr/bin/nv-fabricmanager"),
            ({"has_stock_config": False}, "usr/share/nvidia/nvswitch/fabricmanager.cfg"),
            ({"has_topology": False}, "usr/share/nvidia/nvswitch/dgxh100_hgxh100_topology"),
            ({"module_builds": ()}, "usr/lib/modules"),
        ],
        ids=["nscq", "fabric-manager", "stock-config", "topology", "module"],
    )
    def test_a_part_can_be_missing(self, tmp_path, options, path):
        assert build(tmp_path, **options).status(f"{PREFIX}/{path}") is None

    @pytest.mark.parametrize(
        ("version", "has_rotation", "has_vsock"),
        [("535.161.08", False, False), ("580.126.09", True, False), ("595.71.05", True, True)],
        ids=["535", "580", "595"],
    )
    def test_the_stock_configuration_has_the_keys_of_its_version(self, tmp_path, version, has_rotation, has_vsock):
        root = build(tmp_path, fabric_manager_version=version)
        text = root.read_text(f"{PREFIX}/usr/share/nvidia/nvswitch/fabricmanager.cfg") or ""
        assert ("LOG_MAX_ROTATE_COUNT=3" in text) is has_rotation
        assert ("FM_CMD_VSOCK_CID=" in text) is has_vsock
        assert "\nDAEMONIZE=1\n" in text

    def test_the_binary_is_writable_by_all_only_when_asked_for(self, tmp_path):
        root = build(tmp_path, is_binary_writable=True)
        status = root.status(f"{PREFIX}/usr/bin/nv-fabricmanager")
        assert status is not None
        assert stat.S_IMODE(status.st_mode) == 0o777


def test_a_foreign_fabric_manager_is_in_proc_and_listens(tmp_path):
    root = build(tmp_path, foreign_fabric_manager_pid=4711)
    assert root.read_text("/proc/4711/comm") == "nv-fabricmanage\n"
    assert "0100007F:1A0A" in (root.read_text("/proc/net/tcp") or "")

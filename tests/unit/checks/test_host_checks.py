"""For each check a host that passes and hosts that do not, with the verdict and the condition."""

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from _checked_host import CHECKS, add_machine, ask, build, make_context, put, put_link
from _elf import section_file

from fmsupervisor.checks.context import Disk
from fmsupervisor.checks.finding import Verdict
from fmsupervisor.checks.registry import HOST_CHECKS
from fmsupervisor.conditions import REGISTRY, Code
from fmsupervisor.host.root import HostRoot
from fmsupervisor.simulator import elf_files, pci_bus
from fmsupervisor.simulator.hardware import GPUS, SWITCHES
from fmsupervisor.simulator.kernel import SimulatedKernel
from fmsupervisor.simulator.stock_files import NET_TCP_HEADER, NET_TCP_PORT_6666, symvers
from fmsupervisor.simulator.tree import PREFIX, VERSION, TreeOptions, nvidia_module

RELEASE = "6.12.0-160000.28-default"
BUILD = f"{PREFIX}/usr/lib/modules/6.12.0-160000.9-default/updates"
STOCK = f"{PREFIX}/usr/share/nvidia/nvswitch/fabricmanager.cfg"
VENDOR_UNIT = "/usr/lib/systemd/system/nvidia-fabricmanager.service"
SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
NEEDRESTART = "/etc/needrestart/needrestart.conf"
APT = "/etc/apt/apt.conf.d/20auto-upgrades"

OK, WARNING, FAILED, CANNOT_TELL = Verdict.OK, Verdict.WARNING, Verdict.FAILED, Verdict.CANNOT_TELL


@dataclass(frozen=True)
class Row:
    """One host: how it differs from a healthy one, and what the check must say."""

    check: str
    name: str
    verdict: Verdict
    code: Code | None = None
    change: Callable[[HostRoot], object] = lambda root: None
    options: dict[str, Any] = field(default_factory=dict)
    settings: str = ""
    context: dict[str, Any] = field(default_factory=dict)
    says: str = ""


def load(root: HostRoot, version: str = VERSION) -> None:
    SimulatedKernel(root).load(version)


def loaded(failing: str) -> Callable[[HostRoot], None]:
    def change(root: HostRoot) -> None:
        SimulatedKernel(root, failing_probes=frozenset({failing})).load(VERSION)

    return change


def bound(function: str, driver: str) -> Callable[[HostRoot], None]:
    def change(root: HostRoot) -> None:
        pci_bus.unbind(root, function)
        pci_bus.bind(root, function, driver)

    return change


def with_file(path: str, content: str | bytes) -> Callable[[HostRoot], None]:
    return lambda root: put(root, path, content)


def without(path: str) -> Callable[[HostRoot], None]:
    return lambda root: os.unlink(root.path(path))


def several(*changes: Callable[[HostRoot], object]) -> Callable[[HostRoot], None]:
    def change(root: HostRoot) -> None:
        for each in changes:
            each(root)

    return change


def with_module(
    *, signature: bytes | None = b"0" * 64, layout: int = 0x5F2A71C3, **info: str | None
) -> Callable[[HostRoot], None]:
    """Another nvidia.ko instead of the healthy one."""

    def change(root: HostRoot) -> None:
        entries: dict[str, str | None] = {
            "version": VERSION,
            "name": "nvidia",
            "depends": "",
            "vermagic": "6.12.0-160000.9-default SMP preempt mod_unload modversions ",
            **info,
        }
        kept = [(key, value) for key, value in entries.items() if value is not None]
        symbols = {"module_layout": layout, "pci_enable_device": 0x1B8C0D95}
        os.unlink(root.path(f"{BUILD}/nvidia.ko.zst"))
        put(root, f"{BUILD}/nvidia.ko", elf_files.kernel_module(kept, symbols, signature=signature))

    return change


def with_symvers(**crcs: int) -> Callable[[HostRoot], None]:
    return with_file(f"/usr/lib/modules/{RELEASE}/symvers.gz", symvers(crcs))


def with_unit(text: str, config: str) -> Callable[[HostRoot], None]:
    return several(with_file(VENDOR_UNIT, text), with_file("/etc/fm-vendor.cfg", config))


def share_group(root: HostRoot) -> None:
    put_link(root, f"/sys/kernel/iommu_groups/{0x91}/devices/0000:01:00.0", "/sys/devices/x")


def tcp_listener(port: int) -> str:
    return NET_TCP_HEADER + NET_TCP_PORT_6666.replace(":1A0A", f":{port:04X}")


def log_of(megabytes: int) -> Callable[[HostRoot], None]:
    def change(root: HostRoot) -> None:
        put(root, f"{PREFIX}/fabricmanager.log", b"")
        os.truncate(root.path(f"{PREFIX}/fabricmanager.log"), megabytes << 20)

    return change


NO_ROTATION = '[fabric_manager.options]\nLOG_MAX_ROTATE_COUNT = "0"\nLOG_FILE_MAX_SIZE = "1"\n'

ROWS = (
    # hardware
    Row("pci", "a file of no sense", CANNOT_TELL, Code.HARDWARE_UNOBSERVABLE, with_file(f"/sys/bus/pci/devices/{GPUS[0]}/class", b"\xff")),
    Row("pci", "GPUs without switches", OK, options={"switches": ()}, says="GPUs as of an HGX H200"),
    Row("board", "an NVLink 5 board", FAILED, Code.NVLINK5_UNSUPPORTED, options={"switches": (), "nvlink5_bridge": "0000:05:00.0"}),
    Row("board", "a new switch", WARNING, Code.BOARD_UNKNOWN, with_file(f"/sys/bus/pci/devices/{SWITCHES[0]}/device", "0x3000\n")),
    Row("board", "seven GPUs", WARNING, Code.BOARD_UNKNOWN, lambda root: pci_bus.remove(root, GPUS[0]), says="7 GPUs"),
    Row("switch-count", "three of four", FAILED, Code.SWITCH_MISSING, options={"switches": SWITCHES[:3]}, says="3 of 4"),
    Row("switch-count", "more expected", FAILED, Code.SWITCH_MISSING, settings="[switches]\nexpected = 6\n", says="4 of 6"),
    Row("switch-count", "fewer expected", OK, options={"switches": SWITCHES[:3]}, settings="[switches]\nexpected = 3\n"),
    Row("switch-drivers", "passed through", FAILED, Code.SWITCH_PASSED_THROUGH, options={"switches_passed_through": SWITCHES}),
    Row("switch-drivers", "several owners", FAILED, Code.SWITCH_PASSED_THROUGH, options={"switches_passed_through": SWITCHES[:1]}, says="several owners: 1 vfio-pci, 3 no driver"),
    Row("switch-drivers", "fallen off the bus", FAILED, Code.SWITCH_NOT_RESPONDING, lambda root: pci_bus.fall_off_the_bus(root, SWITCHES[1])),
    Row("switch-drivers", "probe failed", FAILED, Code.SWITCH_NOT_PROBED, loaded(SWITCHES[2]), says=SWITCHES[2]),
    Row("switch-drivers", "probed", OK, change=load, says="4 nvidia-nvswitch"),
    Row("gpu-drivers", "would be taken", FAILED, Code.GPU_WOULD_BE_TAKEN, options={"gpus_without_driver": GPUS[:1]}),
    Row("gpu-drivers", "guard off", WARNING, Code.GPU_WOULD_BE_TAKEN, options={"gpus_without_driver": GPUS[:1]}, settings='[module]\ngpu_guard = "off"\n'),
    Row("gpu-drivers", "not registered", OK, options={"gpus_without_driver": GPUS[:1]}, settings='[module]\ngpu_guard = "no-register"\n'),
    Row("gpu-drivers", "taken", FAILED, Code.GPU_TAKEN, bound(GPUS[0], "nvidia")),
    Row("gpu-drivers", "of the host", OK, change=bound(GPUS[0], "nvidia"), settings="[switches]\ngpus_belong_to_guests = false\n"),
    Row("iommu-groups", "shared", WARNING, Code.IOMMU_GROUP, share_group, says="shares group 145 with 0000:01:00.0"),
    Row("iommu-groups", "no IOMMU", WARNING, Code.IOMMU_GROUP, without(f"/sys/bus/pci/devices/{GPUS[0]}/iommu_group")),
    # module
    Row("loaded-driver", "not ours to load", WARNING, Code.MODULE_NOT_LOADED, settings="[module]\nload = false\n"),
    Row("loaded-driver", "still coming", WARNING, Code.MODULE_LOAD_SLOW, several(load, with_file("/sys/module/nvidia/initstate", "coming\n"))),
    Row("loaded-driver", "live", OK, change=load, says=VERSION),
    Row("module-builds", "none", FAILED, Code.MODULE_NOT_FOUND, options={"module_builds": ()}),
    Row("module-builds", "another family", FAILED, Code.MODULE_NOT_FOUND, options={"module_builds": ("6.4.0-150600.23-default",)}, says="another family"),
    Row("module-builds", "only newer", FAILED, Code.MODULE_TOO_NEW, options={"module_builds": ("6.12.0-160000.30-default",)}, says="is newer"),
    Row("module-builds", "newer allowed", OK, options={"module_builds": ("6.12.0-160000.30-default",)}, settings="[module]\nallow_newer_build = true\n"),
    Row("module-builds", "the nearest of three", OK, options={"module_builds": ("6.12.0-160000.5-default", "6.12.0-160000.9-default", "6.12.0-160000.30-default")}, says="160000.9-default is the nearest older build"),
    Row("module-builds", "Fabric Manager differs", FAILED, Code.VERSION_MISMATCH, options={"fabric_manager_version": "580.159.03"}, says="Fabric Manager 580.159.03"),
    Row("module-builds", "none, but loaded", WARNING, Code.MODULE_NOT_FOUND, load, options={"module_builds": ()}, says="at the next boot"),
    Row("module-file", "other flags", FAILED, Code.MODULE_VERMAGIC, with_module(vermagic="6.12.0-160000.9-default SMP preempt_rt mod_unload modversions "), says="preempt_rt"),
    Row("module-file", "a dependency is missing", FAILED, Code.MODULE_DEPENDENCY_MISSING, options={"module_depends": ("backlight", "ipmi_msghandler")}, says="ipmi_msghandler"),
    Row("module-file", "dependencies are there", OK, options={"module_depends": ("backlight", "ecc")}, says="backlight.ko first"),
    Row("module-file", "truncated", FAILED, Code.MODULE_DAMAGED, lambda root: os.truncate(root.path(f"{BUILD}/nvidia.ko.zst"), 300)),
    Row("module-symbols", "symvers agree", OK, change=with_symvers(module_layout=0x5F2A71C3, pci_enable_device=0x1B8C0D95), says="2 of 2"),
    Row("module-symbols", "symvers differ", FAILED, Code.MODULE_SYMBOL_VERSIONS, with_symvers(module_layout=0x5F2A71C3, pci_enable_device=1), says="pci_enable_device"),
    Row("module-symbols", "a symbol is missing", WARNING, Code.MODULE_UNKNOWN_SYMBOL, with_symvers(module_layout=0x5F2A71C3), says="pci_enable_device"),
    Row("module-symbols", "a symbol is missing and there is no symvers", WARNING, Code.MODULE_UNKNOWN_SYMBOL, several(with_file("/proc/kallsyms", "0 D jiffies\n0 T pci_enable_device\t[pci]\n"), with_file(f"/lib/modules/{RELEASE}/modules.symbols", "# x\nalias symbol:drm_ioctl drm\n")), options={"module_symbols": {"drm_ioctl": 1, "gone": 2}}, says="gone: not in the kernel or its modules"),
    Row("module-symbols", "a kernel that lists no variables", OK, change=several(with_file("/proc/kallsyms", "0 T module_layout\n"), with_file(f"/lib/modules/{RELEASE}/modules.symbols", "")), options={"module_symbols": {"drm_ioctl": 1}}),
    Row("module-symbols", "an in-tree module differs", FAILED, Code.MODULE_SYMBOL_VERSIONS, with_module(layout=7), says="module_layout"),
    Row("module-symbols", "no symbol versions", OK, options={"has_modversions": False}),
    Row("module-supported", "no tag on SUSE", WARNING, Code.MODULE_UNSUPPORTED, several(with_file("/etc/os-release", 'ID="sl-micro"\nID_LIKE="suse"\n'), with_module())),
    Row("module-supported", "tag on SUSE", OK, change=with_file("/etc/os-release", 'ID="sles"\n'), says="external"),
    # kernel policy
    Row("module-loading", "modules_disabled", FAILED, Code.MODULE_LOADING_FORBIDDEN, with_file("/proc/sys/kernel/modules_disabled", "1\n")),
    Row("module-loading", "module_blacklist", FAILED, Code.MODULE_BLACKLISTED, with_file("/proc/cmdline", "quiet module_blacklist=nouveau,nvidia\n")),
    Row("module-loading", "modprobe.blacklist", OK, change=with_file("/proc/cmdline", "modprobe.blacklist=nvidia\n"), says="not loading by path"),
    Row("module-loading", "no command line", CANNOT_TELL, change=without("/proc/cmdline")),
    Row("module-signature", "unsigned and locked down", FAILED, Code.MODULE_LOCKDOWN, several(with_module(signature=None), with_file("/sys/kernel/security/lockdown", "none [integrity] confidentiality\n"))),
    Row("module-signature", "unsigned and enforced", FAILED, Code.MODULE_SIGNATURE_REJECTED, several(with_module(signature=None), with_file("/sys/module/module/parameters/sig_enforce", "Y\n"))),
    Row("module-signature", "unsigned with Secure Boot", WARNING, Code.MODULE_SIGNATURE_REJECTED, several(with_module(signature=None), with_file(SECURE_BOOT, b"\x06\0\0\0\x01"))),
    Row("module-signature", "unsigned, nobody asks", OK, change=several(with_module(signature=None), with_file("/sys/kernel/security/lockdown", "[none] integrity confidentiality\n"))),
    Row("module-signature", "signed and locked down", OK, change=with_file("/sys/kernel/security/lockdown", "none [integrity] confidentiality\n"), says="trusts the key"),
    Row("module-signature", "a damaged signature", FAILED, Code.MODULE_DAMAGED, with_module(signature=b"x" * 64), says="even where none is asked for"),
    Row("module-signature", "enforced before lockdown", FAILED, Code.MODULE_SIGNATURE_REJECTED, several(with_module(signature=None), with_file("/sys/kernel/security/lockdown", "none [integrity] confidentiality\n"), with_file("/sys/module/module/parameters/sig_enforce", "Y\n"))),
    Row("module-signature", "lockdown of no sense", CANNOT_TELL, change=with_file("/sys/kernel/security/lockdown", b"\0\xff")),
    # software
    Row("installed", "no Fabric Manager", FAILED, Code.FABRIC_MANAGER_MISSING, options={"fabric_manager_version": None}),
    Row("installed", "no NSCQ", FAILED, Code.NSCQ_MISSING, options={"nscq_version": None}),
    Row("installed", "writable by all", FAILED, Code.INSECURE_FILE, options={"is_binary_writable": True}),
    Row("versions", "NSCQ differs", FAILED, Code.VERSION_MISMATCH, options={"nscq_version": "580.159.03"}),
    Row("versions", "an older driver is loaded", FAILED, Code.RELOAD_NEEDED, lambda root: load(root, "580.105.08")),
    Row("libraries", "a library is missing", FAILED, Code.LIBRARY_MISSING, options={"nscq_needs": ("libc.so.6", "libnvsdm.so.1")}, says="libnvsdm.so.1"),
    Row("client-library", "its library is missing", WARNING, Code.LIBRARY_MISSING, with_file(f"{PREFIX}/usr/lib64/libnvfm.so.1", elf_files.shared_object("libnvfm.so.1", ("libgone.so.3",)))),
    Row("client-library", "there", OK, change=with_file(f"{PREFIX}/usr/lib64/libnvfm.so.1", elf_files.shared_object("libnvfm.so.1", ("libc.so.6",))), says="libnvfm.so.1"),
    Row("data-files", "no topology", FAILED, Code.TOPOLOGY_MISSING, settings='[fabric_manager]\ntopology_path = "/nowhere"\n'),
    Row("data-files", "no stock file", WARNING, Code.STOCK_CONFIG_MISSING, options={"has_stock_config": False}),
    Row("firmware", "missing for a GPU of the host", WARNING, Code.FIRMWARE_MISSING, several(load, bound(GPUS[0], "nvidia")), says="gsp_ga10x.bin"),
    Row("firmware", "there", OK, change=several(bound(GPUS[0], "nvidia"), with_file(f"/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin.xz", "x")), says="/lib/firmware/nvidia"),
    Row("firmware", "in the configured directory", OK, change=several(with_file("/sys/module/firmware_class/parameters/path", "/opt/fw\n"), with_file(f"/opt/fw/nvidia/{VERSION}/gsp_ga10x.bin", "x")), says="/opt/fw"),
    # configuration
    Row("settings", "a mistake", FAILED, Code.SETTINGS_INVALID, context={"settings_error": "fmsupervisor.toml:1: no key x"}),
    Row("config-keys", "of another version", FAILED, Code.CONFIG_KEY_UNKNOWN, options={"module_version": "535.161.08", "fabric_manager_version": "535.161.08"}, settings='[fabric_manager.options]\nPARTITION_RAIL_POLICY = "greedy"\n'),
    Row("config-keys", "left over in the stock file", FAILED, Code.CONFIG_KEY_UNKNOWN, with_file(STOCK, "DAEMONIZE=1\nUSE_RPC=1\n"), says="USE_RPC in the stock file"),
    Row("directories", "a file in the way", FAILED, Code.CONFIG_UNWRITABLE, with_file("/run/nvidia-fabricmanager", "x")),
    Row("directories", "read-only", FAILED, Code.CONFIG_UNWRITABLE, context={"disk": lambda root, path: Disk(1 << 40, is_read_only=True)}),
    Row("fabric-mode", "two guests in mode 0", WARNING, Code.ISOLATION_NOT_PROMISED, several(lambda root: add_machine(root, 5001, 10, {9: 0x91}), lambda root: add_machine(root, 5002, 20, {9: 0xC2})), says="2 guests"),
    Row("fabric-mode", "one guest in mode 0", OK, change=lambda root: add_machine(root, 5001, 10, {9: 0x91, 10: 0xC2}), says="isolation between guests is not promised"),
    Row("fabric-mode", "mode 2 with vfio-pci", WARNING, Code.ISOLATION_NOT_PROMISED, settings="[fabric_manager]\nfabric_mode = 2\n"),
    Row("fabric-mode", "mode 1", OK, settings="[fabric_manager]\nfabric_mode = 1\n"),
    Row("log", "will stop", WARNING, Code.LOG_FULL, settings=NO_ROTATION, says="will stop"),
    Row("log", "has stopped", WARNING, Code.LOG_FULL, log_of(2), settings=NO_ROTATION, says="nothing is logged any more"),
    Row("log", "to standard error", OK, settings='[fabric_manager]\nlog_file = ""\n'),
    Row("disk-space", "nearly full", FAILED, Code.DISK_SPACE, context={"disk": lambda root, path: Disk(1 << 20, is_read_only=False)}),
    Row("disk-space", "less than the log may grow", WARNING, Code.DISK_SPACE, context={"disk": lambda root, path: Disk(2 << 30, is_read_only=False)}, says="4096 MiB"),
    Row("clock", "behind", WARNING, Code.CLOCK_WRONG, context={"wall_clock": lambda: 86_400.0}),
    Row("clock", "not synchronised", WARNING, Code.CLOCK_WRONG, context={"is_clock_synchronised": lambda: False}),
    Row("clock", "synchronised", OK, context={"is_clock_synchronised": lambda: True}, says="synchronised"),
    # neighbours
    Row("vendor-unit", "enabled", WARNING, Code.VENDOR_UNIT_ENABLED, several(with_file(VENDOR_UNIT, "[Service]\n"), lambda root: put_link(root, "/etc/systemd/system/multi-user.target.wants/nvidia-fabricmanager.service", VENDOR_UNIT))),
    Row("vendor-unit", "masked", OK, change=several(with_file(VENDOR_UNIT, "[Service]\n"), lambda root: put_link(root, "/etc/systemd/system/nvidia-fabricmanager.service", "/dev/null")), says="masked"),
    Row("vendor-unit", "not enabled", OK, change=with_file(VENDOR_UNIT, "[Service]\n"), says="not enabled"),
    Row("unit-type", "forks away from Type=simple", WARNING, Code.DAEMONIZE_MISMATCH, with_unit("[Service]\nType=simple\nExecStart=/usr/bin/nv-fabricmanager -c /etc/fm-vendor.cfg\n", "DAEMONIZE=1\n")),
    Row("unit-type", "stays with Type=forking", WARNING, Code.DAEMONIZE_MISMATCH, with_unit("[Service]\nType=forking\nExecStart=/usr/bin/nv-fabricmanager -c /etc/fm-vendor.cfg\n", "DAEMONIZE=0\n")),
    Row("unit-type", "a drop-in makes it notify", WARNING, Code.DAEMONIZE_MISMATCH, several(with_unit("[Service]\nType=forking\nExecStart=/usr/bin/nv-fabricmanager -c /etc/fm-vendor.cfg\n", "DAEMONIZE=1\n"), with_file("/etc/systemd/system/nvidia-fabricmanager.service.d/type.conf", "[Service]\nType=notify\n"))),
    Row("unit-type", "as shipped", OK, change=with_unit("[Service]\nType=forking\nExecStart=/usr/bin/nv-fabricmanager -c /etc/fm-vendor.cfg\n", "DAEMONIZE=1\n"), says="Type=forking"),
    Row("package-hooks", "needrestart", WARNING, Code.PACKAGE_HOOK, with_file(NEEDRESTART, "$nrconf{restart} = 'a';\n# fmsupervisor\n")),
    Row("package-hooks", "needrestart with an exception", OK, change=several(with_file(NEEDRESTART, "1;\n"), with_file("/etc/needrestart/conf.d/fm.conf", "$nrconf{override_rc}{qr(^fmsupervisor)} = 0;\n")), says="exception"),
    Row("package-hooks", "unattended upgrades", WARNING, Code.PACKAGE_HOOK, with_file(APT, 'APT::Periodic::Unattended-Upgrade "1";\n')),
    Row("package-hooks", "unattended upgrades off", OK, change=with_file(APT, 'APT::Periodic::Unattended-Upgrade "0";\n')),
    Row("package-hooks", "unattended upgrades without nvidia", OK, change=several(with_file(APT, 'APT::Periodic::Unattended-Upgrade "1";\n'), with_file("/etc/apt/apt.conf.d/50unattended-upgrades", 'Unattended-Upgrade::Package-Blacklist {\n  "nvidia-";\n};\n'))),
    Row("foreign-fm", "runs", FAILED, Code.FOREIGN_FABRIC_MANAGER, options={"foreign_fabric_manager_pid": 4711}, says="4711"),
    Row("ports", "of the internal traffic", FAILED, Code.ADDRESS_IN_USE, with_file("/proc/net/tcp", tcp_listener(16000)), says="16000"),
    Row("ports", "of the metrics", WARNING, Code.METRICS_UNAVAILABLE, with_file("/proc/net/tcp", tcp_listener(9752)), says="9752"),
    Row("ports", "a socket instead", OK, change=with_file("/proc/net/tcp", tcp_listener(16000)), settings='[fabric_manager.options]\nUNIX_SOCKET_PATH = "/run/fm.sock"\n[metrics]\nenabled = false\n', says="no TCP port"),
    # devices
    Row("device-nodes", "a file in the way", FAILED, Code.NODE_CONFLICT, options={"node_conflict": "/dev/nvidiactl"}, says="/dev/nvidiactl"),
    Row("device-nodes", "a link in the way", FAILED, Code.NODE_CONFLICT, lambda root: put_link(root, "/dev/nvidia-nvswitch2", "/dev/null"), says="symlink"),
    Row("device-nodes", "still to be made", OK, change=load, says="/dev/nvidia-nvswitch3 is missing"),
    Row("device-nodes", "wrong numbers", OK, change=several(load, lambda root: SimulatedKernel(root).make_node("/dev/nvidiactl", 7, 7, 0o666, 0, 0)), says="/dev/nvidiactl is 7:7"),
    Row("device-nodes", "left alone", OK, change=load, settings="[device_nodes]\nmanage = []\n"),
    Row("gpu-pinning", "no pin", WARNING, Code.GPU_NOT_PINNED, without("/etc/modprobe.d/vfio-pci.conf"), says="neither"),
    Row("gpu-pinning", "ids without softdep", WARNING, Code.GPU_NOT_PINNED, with_file("/etc/modprobe.d/vfio-pci.conf", "options vfio_pci ids=10de:2335\n"), says="softdep"),
    Row("gpu-pinning", "ids of another GPU", WARNING, Code.GPU_NOT_PINNED, with_file("/etc/modprobe.d/vfio-pci.conf", "options vfio-pci ids=10de:2330\nsoftdep nvidia pre: vfio-pci\n")),
    Row("gpu-pinning", "on the command line", OK, change=several(with_file("/etc/modprobe.d/vfio-pci.conf", "softdep nvidia pre: vfio-pci post: x\n"), with_file("/proc/cmdline", "vfio-pci.ids=10de:2335\n"))),
    Row("gpu-pinning", "nvidia blacklisted", OK, change=with_file("/etc/modprobe.d/vfio-pci.conf", "options vfio-pci ids=10DE:2335,1000:1\nblacklist nvidia\n")),
    Row("gpu-pinning", "driver_override", OK, change=several(without("/etc/modprobe.d/vfio-pci.conf"), *(with_file(f"/sys/bus/pci/devices/{gpu}/driver_override", "vfio-pci\n") for gpu in GPUS))),
    Row("gpu-pinning", "of the host", OK, change=without("/etc/modprobe.d/vfio-pci.conf"), settings="[switches]\ngpus_belong_to_guests = false\n"),
    Row("switch-pinning", "ids", FAILED, Code.SWITCH_PASSED_THROUGH, with_file("/etc/modprobe.d/vfio-pci.conf", "options vfio-pci disable_vga=1 ids=10de:2335,10de:22a3\n")),
    Row("switch-pinning", "driver_override", FAILED, Code.SWITCH_PASSED_THROUGH, with_file(f"/sys/bus/pci/devices/{SWITCHES[0]}/driver_override", "vfio-pci\n")),
    Row("guests", "without Fabric Manager", OK, change=lambda root: add_machine(root, 5001, 10, {9: 0x91}), says="1 guests"),
)  # fmt: skip

ROWS_BY_ID = {f"{row.check}: {row.name}": row for row in ROWS}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory):
    directory = tmp_path_factory.mktemp("healthy")
    build(directory)
    return make_context(directory)


@pytest.mark.parametrize("name", [check.name for check in HOST_CHECKS])
def test_a_healthy_host_passes(healthy, name: str) -> None:
    finding = ask(healthy, name)
    assert finding.verdict is OK, finding
    assert finding.codes == ()


@pytest.mark.parametrize("row", ROWS_BY_ID.values(), ids=ROWS_BY_ID)
def test_a_host_with_a_fault_is_told(tmp_path, row: Row) -> None:
    root = build(tmp_path, **row.options)
    row.change(root)
    finding = ask(make_context(tmp_path, row.settings, **row.context), row.check)
    assert finding.verdict is row.verdict, finding
    assert finding.codes == (() if row.code is None else (row.code,))
    assert row.says in "\n".join((finding.found, *finding.details))
    assert bool(finding.remedy) == (row.code is not None and row.verdict is not CANNOT_TELL)
    assert row.code is None or row.code in CHECKS[row.check].codes


def test_the_table_has_a_fault_for_every_check_and_every_condition_it_can_tell() -> None:
    told = {(row.check, row.code) for row in ROWS if row.code}
    untold = {(check.name, code) for check in HOST_CHECKS if check.name != "daemon" for code in check.codes} - told
    elsewhere = {
        ("device-nodes", Code.NODE_FAILED),  # test_daemon_check
        ("guests", Code.GUEST_RESTART_REQUIRED),  # test_daemon_check
        ("libraries", Code.LOADER_ERROR),  # below
        ("versions", Code.VERSION_UNREADABLE),  # below
    }
    assert untold == elsewhere


@pytest.mark.parametrize(
    ("stderr", "check", "code"),
    [
        ("nv-fabricmanager: symbol lookup error: x: undefined symbol: y", "libraries", Code.LOADER_ERROR),
        ("killed", "versions", Code.VERSION_UNREADABLE),
    ],
)
def test_a_fabric_manager_that_does_not_tell_its_version_is_told(tmp_path, stderr, check, code) -> None:
    from fmsupervisor.fabric_manager.installation import VersionOutput

    build(tmp_path)
    context = make_context(tmp_path, run_program=lambda *_: VersionOutput("", stderr, 127))
    finding = ask(context, check)
    assert finding.codes == (code,)


def test_names_are_unique_and_every_code_is_in_the_registry() -> None:
    names = [check.name for check in HOST_CHECKS]
    assert len(set(names)) == len(names)
    assert all(code in REGISTRY for check in HOST_CHECKS for code in check.codes)


def test_symbol_versions_are_read_from_the_old_section_and_from_the_new_ones(tmp_path) -> None:
    from fmsupervisor.checks.symbol_versions import module_symbols

    root = HostRoot(str(tmp_path))
    put(root, "/old.ko", nvidia_module(TreeOptions(), RELEASE))
    assert module_symbols(root, "/old.ko") == {"module_layout": 0x5F2A71C3, "pci_enable_device": 0x1B8C0D95}
    sections = {
        ".modinfo": b"name=m\0",
        "__version_ext_crcs": struct.pack("<2I", 7, 0x80000001),
        "__version_ext_names": b"module_layout\0a_symbol_with_a_name_of_more_than_fifty_five_characters_\0",
    }
    put(root, "/new.ko", section_file(sections))
    assert module_symbols(root, "/new.ko") == {
        "module_layout": 7,
        "a_symbol_with_a_name_of_more_than_fifty_five_characters_": 0x80000001,
    }

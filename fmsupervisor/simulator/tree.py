"""A disposable HGX H200 host as a directory: /proc, /sys, /dev and the extracted driver tree.

Layout of the driver tree: what ``rpm2cpio | cpio -idm`` makes of the SUSE packages below /usr/local/nvidia. Bus ids and
kernel releases are those of the published installation. In a new tree nvidia.ko is not loaded; ``SimulatedKernel`` does
that. All files get fixed permissions, whatever the umask: nothing is writable by group or others unless asked for.
"""

import json
import os
import stat
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import fmsupervisor
from fmsupervisor.host.root import HostRoot
from fmsupervisor.simulator import elf_files, hardware, pci_bus, stock_files
from fmsupervisor.simulator.guests import SimulatedGuest, note_request, start_guest
from fmsupervisor.simulator.pci_bus import PciDevice, link, write

PREFIX = "/usr/local/nvidia"
VERSION = "580.126.09"

_SHEBANG_LIMIT = 120  # bytes; BINPRM_BUF_SIZE is 256, older kernels had 128


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How the simulated nv-fabricmanager acts from its next start on. Times are simulated seconds."""

    kind: str = "normal"  # see fabric_manager.py
    configure_seconds: float = 1.0  # from start to the success line
    registration_seconds: float = 9.0  # from the success line to the last GPU
    registers_gpus: bool = True  # False: no guest starts by itself
    required_switches: int = 4  # what the topology file asks for
    exit_after_seconds: float | None = None  # after the success line, or after start when it never configures
    exit_code: int = 1


@dataclass(frozen=True, slots=True)
class TreeOptions:
    """What the simulated host is like. The defaults are a healthy host before the driver is loaded."""

    kernel_release: str = "6.12.0-160000.28-default"
    switches: tuple[str, ...] = hardware.SWITCHES  # on the bus, without a driver
    switches_passed_through: tuple[str, ...] = ()  # of these, bound to vfio-pci
    gpus: tuple[str, ...] = hardware.GPUS
    gpus_without_driver: tuple[str, ...] = ()  # the others are bound to vfio-pci
    nvlink5_bridge: str = ""  # bus id of an InfiniBand device whose VPD says SW_MNG
    module_builds: tuple[str, ...] = ("6.12.0-160000.9-default",)  # kernel releases that nvidia.ko is there for
    module_version: str = VERSION
    module_depends: tuple[str, ...] = ()
    is_module_compressed: bool = True  # nvidia.ko.zst, else nvidia.ko
    has_modversions: bool = True
    module_flags: str = stock_files.VERMAGIC_FLAGS  # of nvidia.ko's vermagic
    module_symbols: Mapping[str, int] = field(default_factory=dict)  # further ones that it needs, or with another CRC
    module_signature: bytes | None = elf_files.SIGNATURE  # with the trailer; None: not signed
    has_kernel_modules: bool = True  # False: an image that was stripped of the kernel's own modules
    fabric_manager_version: str | None = VERSION  # None: not installed
    nscq_version: str | None = VERSION  # None: not installed
    nscq_needs: tuple[str, ...] = ("libc.so.6",)
    is_binary_writable: bool = False  # nv-fabricmanager writable by all
    has_stock_config: bool = True
    has_topology: bool = True
    node_conflict: str = ""  # path below /dev that a regular file occupies
    files: Mapping[str, bytes] = field(default_factory=dict)  # further files, or with another content
    foreign_fabric_manager_pid: int | None = None  # one that runs already and listens on port 6666
    guests: tuple[SimulatedGuest, ...] = ()  # that run already and have asked to join a fabric that was not there
    behaviour: Behaviour = field(default_factory=Behaviour)
    speed: float = 1.0  # simulated seconds per second


def build_tree(directory: str, options: TreeOptions) -> None:
    """Make the host in ``directory``, which must exist and be empty."""
    root = HostRoot(directory)
    for logical in ("/dev", "/run", "/etc", "/var/log", "/var/lib", "/tmp", "/sys/module", "/sys/class", "/proc/net"):  # noqa: S108
        root.make_directory(logical)
    link(root, "/var/run", "/run")
    _make_proc(root, options)
    _make_pci(root, options)
    if options.has_kernel_modules:
        _make_kernel_modules(root, options)
    _make_driver_tree(root, options)
    _make_libraries(root, options)
    if options.foreign_fabric_manager_pid is not None:
        add_foreign_fabric_manager(root, options.foreign_fabric_manager_pid)
    if options.node_conflict:
        write(root, options.node_conflict, b"left behind by a script\n")
    for path, content in options.files.items():
        root.make_directory(os.path.dirname(path))
        write(root, path, content)
    set_permissions(root)
    _make_control_channel(root, options)
    if options.is_binary_writable and options.fabric_manager_version is not None:
        os.chmod(root.path(f"{PREFIX}/usr/bin/nv-fabricmanager"), 0o777)  # noqa: S103 - the point of the option


def set_behaviour(root: HostRoot, options: TreeOptions, behaviour: Behaviour) -> None:
    """What nv-fabricmanager does from its next start on."""
    record = {
        **asdict(behaviour),
        "version": options.fabric_manager_version,
        "speed": options.speed,
        "gpus": [gpu for gpu in options.gpus if gpu not in options.gpus_without_driver],
    }
    write(root, hardware.BEHAVIOUR_FILE, json.dumps(record).encode())


def add_foreign_fabric_manager(root: HostRoot, pid: int) -> None:
    """A nv-fabricmanager of the vendor's unit appears in /proc and on TCP port 6666."""
    process = f"/proc/{pid}"
    root.make_directory(f"{process}/fd")
    write(root, f"{process}/comm", b"nv-fabricmanage\n")
    write(root, f"{process}/cmdline", b"/usr/bin/nv-fabricmanager\0-c\0/usr/share/nvidia/nvswitch/fabricmanager.cfg\0")
    write(root, f"{process}/cgroup", b"0::/system.slice/nvidia-fabricmanager.service\n")
    write(
        root, f"{process}/stat", f"{pid} (nv-fabricmanage) S 1 {pid} {pid} 0 -1 4194304 ".encode() + b"0 " * 44 + b"\n"
    )
    write(root, f"{process}/status", f"Name:\tnv-fabricmanage\nState:\tS (sleeping)\nPid:\t{pid}\nPPid:\t1\n".encode())
    os.symlink("/usr/bin/nv-fabricmanager", root.path(f"{process}/exe"))
    os.symlink("socket:[26211]", root.path(f"{process}/fd/9"))
    write(root, "/proc/net/tcp", (stock_files.NET_TCP_HEADER + stock_files.NET_TCP_PORT_6666).encode())


def set_permissions(root: HostRoot) -> None:
    """Directories below the root 0755, files 0644 or 0755, whatever the umask was."""
    for directory, _, names in os.walk(root.directory):
        if directory != root.directory:
            os.chmod(directory, 0o755)  # noqa: S103 - as on the host
        for name in names:
            path = os.path.join(directory, name)
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode):
                os.chmod(path, 0o755 if status.st_mode & stat.S_IXUSR else 0o644)


def _make_control_channel(root: HostRoot, options: TreeOptions) -> None:
    root.make_directory(hardware.SIMULATOR_DIRECTORY)
    root.make_directory(hardware.REGISTRATIONS)
    os.mkfifo(root.path(hardware.COMMAND_FIFO), 0o600)
    for guest in options.guests:
        start_guest(root, guest, options.speed)
        for gpu in guest.gpus:
            note_request(root, gpu)
    set_behaviour(root, options, options.behaviour)


def _make_proc(root: HostRoot, options: TreeOptions) -> None:
    root.make_directory("/proc/sys/kernel")
    root.make_directory("/etc/modprobe.d")
    texts = {
        "/proc/sys/kernel/osrelease": f"{options.kernel_release}\n",
        "/proc/sys/kernel/modules_disabled": "0\n",
        "/proc/cmdline": f"BOOT_IMAGE=/boot/vmlinuz-{options.kernel_release} root=/dev/sda2 intel_iommu=on iommu=pt\n",
        "/proc/devices": stock_files.PROC_DEVICES,
        "/proc/net/tcp": stock_files.NET_TCP_HEADER,
        "/proc/net/tcp6": stock_files.NET_TCP6_HEADER,
        "/proc/net/unix": stock_files.NET_UNIX_HEADER,
        "/etc/modprobe.d/vfio-pci.conf": "options vfio-pci ids=10de:2335\nsoftdep nvidia pre: vfio-pci\n",
        "/etc/os-release": 'NAME="Simulated HGX H200"\nID=simulated\n',
    }
    for logical, text in texts.items():
        write(root, logical, text.encode())


def _make_pci(root: HostRoot, options: TreeOptions) -> None:
    pci_bus.add(root, PciDevice("0000:01:00.0", 0x144D, 0xA80A, 0x010802, (0x144D, 0xA813)))  # NVMe disk
    pci_bus.add(root, PciDevice("0000:81:00.0", 0x1000, 0xC030, 0x060400, (0x1000, 0x0144)))  # PCIe switch, no NVSwitch
    pci_bus.bind(root, "0000:01:00.0", "nvme")
    pci_bus.bind(root, "0000:81:00.0", "pcieport")
    pci_bus.register_driver(root, "vfio-pci")
    root.make_directory("/sys/module/vfio_pci")
    write(root, "/sys/module/vfio_pci/initstate", b"live\n")
    for switch in options.switches:
        pci_bus.add(root, pci_bus.nvswitch(switch))
    for gpu in options.gpus:
        pci_bus.add(root, pci_bus.h200(gpu))
    for function in (*options.gpus, *options.switches_passed_through):
        if function not in options.gpus_without_driver:
            pci_bus.bind(root, function, "vfio-pci")
    if options.nvlink5_bridge:
        _add_nvlink5_bridge(root, options.nvlink5_bridge)


def _add_nvlink5_bridge(root: HostRoot, pci_bus_id: str) -> None:
    """A ConnectX bridge as on HGX B200, with the marker that NVIDIA's start script looks for."""
    device = PciDevice(pci_bus_id, 0x15B3, 0x1021, 0x020700, (0x15B3, 0x0023))
    pci_bus.add(root, device)
    pci_bus.bind(root, pci_bus_id, "mlx5_core")
    write(root, f"{device.directory}/vpd", stock_files.bridge_vpd())
    root.make_directory(f"{device.directory}/infiniband/mlx5_0")
    link(root, f"{device.directory}/infiniband/mlx5_0/device", device.directory)
    link(root, "/sys/class/infiniband/mlx5_0", f"{device.directory}/infiniband/mlx5_0")


def _make_kernel_modules(root: HostRoot, options: TreeOptions) -> None:
    """The running kernel's own modules: enough for vermagic and dependencies."""
    directory = f"/lib/modules/{options.kernel_release}"
    root.make_directory(f"{directory}/kernel/drivers/net")
    root.make_directory(f"{directory}/kernel/drivers/video/backlight")
    for path, name in (("drivers/net/dummy.ko", "dummy"), ("drivers/video/backlight/backlight.ko", "backlight")):
        info = [
            ("license", "GPL"),
            ("name", name),
            ("depends", ""),
            ("intree", "Y"),
            ("vermagic", f"{options.kernel_release} {stock_files.VERMAGIC_FLAGS} "),
        ]
        write(
            root,
            f"{directory}/kernel/{path}",
            elf_files.kernel_module(
                info, {"module_layout": stock_files.KERNEL_SYMBOLS["module_layout"]}, machine=_machine()
            ),
        )
    write(
        root,
        f"{directory}/modules.dep",
        b"kernel/drivers/net/dummy.ko:\nkernel/drivers/video/backlight/backlight.ko:\n",
    )
    write(root, f"{directory}/modules.builtin", b"kernel/drivers/gpu/drm/drm.ko\nkernel/crypto/ecc.ko\n")


def _make_driver_tree(root: HostRoot, options: TreeOptions) -> None:
    for release in options.module_builds:
        _add_module(root, options, release)
    nvswitch = f"{PREFIX}/usr/share/nvidia/nvswitch"
    root.make_directory(f"{PREFIX}/usr/bin")
    root.make_directory(os.path.dirname(nvswitch))
    if options.has_topology or options.has_stock_config:
        root.make_directory(nvswitch)
    if options.has_topology:
        write(root, f"{nvswitch}/dgxh100_hgxh100_topology", stock_files.TOPOLOGY)
    if options.has_stock_config:
        write(root, f"{nvswitch}/fabricmanager.cfg", stock_files.stock_config(options.fabric_manager_version).encode())
    if options.fabric_manager_version is not None:
        write(root, f"{PREFIX}/usr/bin/nv-fabricmanager", fabric_manager_script().encode(), 0o755)


def _add_module(root: HostRoot, options: TreeOptions, release: str) -> None:
    directory = f"{PREFIX}/usr/lib/modules/{release}/updates"
    root.make_directory(directory)
    content = nvidia_module(options, release)
    if options.is_module_compressed:
        import zstandard  # noqa: PLC0415 - only the simulator and old kernels need it

        write(root, f"{directory}/nvidia.ko.zst", zstandard.ZstdCompressor(level=3).compress(content))
    else:
        write(root, f"{directory}/nvidia.ko", content)


def nvidia_module(options: TreeOptions, release: str) -> bytes:
    """An nvidia.ko of the open flavour, signed, without code."""
    info = [
        ("version", options.module_version),
        ("supported", "external"),
        ("license", "Dual MIT/GPL"),
        ("firmware", f"nvidia/{options.module_version}/gsp_ga10x.bin"),
        ("firmware", f"nvidia/{options.module_version}/gsp_tu10x.bin"),
        ("softdep", "pre: ecdh_generic,ecdsa_generic"),
        ("alias", "pci:v000010DEd*sv*sd*bc06sc80i00*"),
        ("alias", "char-major-195-*"),
        ("depends", ",".join(options.module_depends)),
        ("retpoline", "Y"),
        ("name", "nvidia"),
        ("vermagic", f"{release} {options.module_flags} "),
        ("parmtype", "NVreg_RegisterPCIDriver:int"),
        ("parm", "NvSwitchBlacklist:NvSwitchBlacklist=uuid[,uuid...] (charp)"),
    ]
    needed = {**stock_files.KERNEL_SYMBOLS, **options.module_symbols}
    versions = needed if options.has_modversions else None
    module = elf_files.kernel_module(info, versions, machine=_machine(), padding=4096)
    return module + (options.module_signature or b"")


def _make_libraries(root: HostRoot, options: TreeOptions) -> None:
    """NSCQ in the tree, the C library on the host (away from LD_LIBRARY_PATH, since real programs run with it)."""
    root.make_directory("/lib64")
    write(root, "/lib64/libc.so.6", elf_files.shared_object("libc.so.6", (), machine=_machine()), 0o755)
    root.make_directory(f"{PREFIX}/usr/lib64")
    if options.nscq_version is None:
        return
    name = f"libnvidia-nscq.so.{options.nscq_version}"
    content = elf_files.shared_object("libnvidia-nscq.so.2", options.nscq_needs, machine=_machine())
    write(root, f"{PREFIX}/usr/lib64/{name}", content, 0o755)
    for alias in ("libnvidia-nscq.so.2.0", "libnvidia-nscq.so.2", "libnvidia-nscq.so"):
        os.symlink(name, root.path(f"{PREFIX}/usr/lib64/{alias}"))


def fabric_manager_script() -> str:
    """The installed nv-fabricmanager: this interpreter, isolated, with this package on its path.

    -I and -S keep start-up short and independent of the environment. A path that does not fit into ``#!`` goes through
    sh, which then replaces itself.
    """
    interpreter = sys.executable
    package_parent = os.path.dirname(os.path.dirname(os.path.abspath(fmsupervisor.__file__)))
    if len(interpreter) < _SHEBANG_LIMIT and not any(character.isspace() for character in interpreter):
        head = f"#!{interpreter} -IS\n"
    else:
        quoted = interpreter.replace("'", "'\\''")
        head = f"#!/bin/sh\n''':'\nexec '{quoted}' -IS \"$0\" \"$@\"\n'''\n"
    return (
        f"{head}import sys\nsys.path.insert(0, {package_parent!r})\n"
        "from fmsupervisor.simulator.fabric_manager import main\nmain(sys.argv)\n"
    )


def _machine() -> int:
    return elf_files.AARCH64 if os.uname().machine == "aarch64" else elf_files.X86_64

"""The files of a host: /proc, /sys, the loader's and depmod's lists, our own map of modules; fabricmanager.cfg."""

import re
import struct
from collections.abc import Callable, Mapping

from _builders import GPUS, SWITCHES, settings
from _digest import digest
from _input import Choices, MemoryRoot, check

from fmsupervisor.core import events
from fmsupervisor.errors import CannotObserve
from fmsupervisor.fabric_manager.config_file import command_endpoint, effective_options, render
from fmsupervisor.fabric_manager.foreign import find_foreign
from fmsupervisor.facts import Host, LoadedModule, Unknown
from fmsupervisor.host import kernel_release, loader_cache, module_store
from fmsupervisor.host.guests import find_guests
from fmsupervisor.host.module_index import read_index
from fmsupervisor.host.pci import is_bus_id
from fmsupervisor.host.snapshot import observe_host
from fmsupervisor.settings import Settings

_PCI = "/sys/bus/pci/devices"
_STORE = "/nv/fmsupervisor-modules.json"
_NEXT_FILE = b"\xff\xfe"  # so that one input can damage several files
_DEVICE_ID = re.compile(r"10de:[0-9a-f]{4,8}")


def _function(bus_id: str, device: bytes, pci_class: bytes) -> dict[str, bytes]:
    return {
        f"{_PCI}/{bus_id}/vendor": b"0x10de\n",
        f"{_PCI}/{bus_id}/device": device + b"\n",
        f"{_PCI}/{bus_id}/class": pci_class + b"\n",
        f"{_PCI}/{bus_id}/config": b"\xde\x10\xa3\x22",
    }


def _loader_cache() -> bytes:
    name, path = b"libnuma.so.1\0", b"/usr/lib/libnuma.so.1\0"
    at = 48 + 24
    entry = struct.pack("<iIIIQ", 3, at, at + len(name), 0, 0)
    return b"glibc-ld.so.cache1.1" + struct.pack("<II", 1, len(name + path)) + bytes(20) + entry + name + path


_HEALTHY: Mapping[str, bytes] = {
    **_function(SWITCHES[0], b"0x22a3", b"0x068000"),
    **_function(GPUS[0], b"0x2335", b"0x030200"),
    "/proc/devices": b"Character devices:\n  1 mem\n195 nvidia\n235 nvidia-nvswitch\n\nBlock devices:\n  8 sd\n",
    "/sys/module/nvidia/initstate": b"live\n",
    "/sys/module/nvidia/version": b"580.126.09\n",
    "/proc/driver/nvidia/version": b"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.126.09  Release Build\n",
    f"/proc/driver/nvidia-nvswitch/devices/{SWITCHES[0]}/information": b"",
    "/proc/driver/nvidia-nvswitch/permissions": b"DeviceFileMode: 438\n",
    "/proc/driver/nvidia-nvlink/capabilities/fabric-mgmt": b"DeviceFileMinor: 1\nDeviceFileMode: 384\nDeviceFileModify: 1\n",
    "/proc/sys/kernel/osrelease": b"6.12.0-160000.9-default\n",
    "/sys/class/infiniband/mlx5_0/device/vpd": b"\x82\x0f\0ConnectX-7 SMDL=SW_MNG\x78",
    "/etc/ld.so.cache": _loader_cache(),
    "/etc/ld.so.conf": b"include ld.so.conf.d/*.conf\n/usr/local/lib # comment\n",
    "/etc/ld.so.conf.d/a.conf": b"/opt/lib\ninclude /etc/ld.so.conf\n",
    "/lib/modules/6.12/modules.dep": b"kernel/drivers/i2c/i2c-core.ko.zst:\nkernel/a/drm-kms.ko: kernel/a/drm.ko\n",
    "/lib/modules/6.12/modules.builtin": b"kernel/lib/crc32.ko\n",
    "/proc/41/comm": b"nv-fabricmanage\n",
    "/proc/41/cmdline": b"/usr/bin/nv-fabricmanager\0-c\0/x\0",
    "/proc/41/stat": b"41 (nv-fabricmanage) S 1 41 41 0 -1 4194560",
    "/proc/41/cgroup": b"0::/system.slice/nvidia-fabricmanager.service\n",
    "/proc/net/tcp": b"  sl  local_address rem_address\n   0: 0100007F:1A0A 00000000:0000 0A 0:0 0:0 0 0 0 4242 1\n",
    "/proc/net/unix": b"Num RefCount Protocol Flags Type St Inode Path\n0: 2 0 00010000 1 01 4243 /run/fm.sock\n",
    "/proc/42/comm": b"qemu-system-x86\n",
    "/proc/42/cmdline": b"/usr/bin/qemu-system-x86_64\0-name\0guest=alice,debug-threads=on\0-S\0",
    "/proc/42/stat": b"42 (qemu) ) S 1 41 41 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 4711 1 1",
    "/proc/42/cgroup": b"0::/machine.slice/machine-qemu\\x2d1\\x2dbob\\x40x.scope/pod01234567-89ab-cdef-0123-456789abcdef\n",
    "/sys/class/vfio/17/dev": b"1:1\n",
    "/sys/class/dmi/id/product_uuid": b"abc\n",
    _STORE: b'{"schema": 1, "machine": "abc", "module_ids": {"0000:1b:00.0": 1}, "contradicted": ["0000:43:00.0"]}',
}
_LINKS = {
    f"{_PCI}/{SWITCHES[0]}/driver": "../../../bus/pci/drivers/nvidia-nvswitch",
    "/sys/class/infiniband/mlx5_0/device": "../../../0000:0c:00.0",
    "/proc/41/exe": "/usr/bin/nv-fabricmanager (deleted)",
    "/proc/41/fd/3": "socket:[4242]",
    "/proc/42/fd/9": "/dev/vfio/17",
    "/proc/1/ns/pid": "pid:[4026531836]",
    f"/sys/kernel/iommu_groups/17/devices/{GPUS[0]}": f"../../../../devices/pci0000:00/{GPUS[0]}",
}
_PATHS = tuple(_HEALTHY)


def host_files(data: bytes) -> None:
    """Raises CannotObserve only; what is not understood is told, not guessed; the same twice."""
    files = dict(_HEALTHY)
    unreadable = set()
    for piece in data.split(_NEXT_FILE)[:6]:
        choices = Choices(piece)
        path = choices.one_of(_PATHS)
        fate = choices.number()
        if fate == 0xFF:
            unreadable.add(path)
        elif fate == 0xFE:
            files.pop(path, None)
        else:
            files[path] = choices.rest()
    root = MemoryRoot(files, _LINKS, frozenset(unreadable))
    host = _observed(root, observe_host)
    check(_observed(root, observe_host) == host, "not the same twice")
    if isinstance(host, Host):
        _check_host(host)
    digest(events.HostObserved(host))
    _check_lists(root)


def _observed(root: MemoryRoot, read: Callable[[MemoryRoot], Host]) -> Host | Unknown:
    try:
        return read(root)
    except CannotObserve as error:
        return Unknown(error.reason)


def _check_host(host: Host) -> None:
    for function in (*host.switches, *host.gpus):
        check(_DEVICE_ID.fullmatch(function.device_id) is not None, function.device_id)
        check(function.driver is None or "/" not in function.driver, function.driver)
    check(all(name.startswith("nvidia") and 0 <= major < 10_000 for name, major in host.majors.items()), host.majors)
    check(all(map(is_bus_id, host.probed_switches or ())), host.probed_switches)
    for number in (host.fabric_management_minor, host.fabric_management_mode):
        check(number is None or 0 <= number < 1 << 30, number)
    if isinstance(host.module, LoadedModule):
        check(len(host.module.initstate) <= 4 * 64 and len(host.module.version or "") <= 4 * 256, "unbounded")
    for problem in host.problems:
        check(0 < len(problem.detail) < 400 and problem.subject != "", problem)
    release = kernel_release.parse(host.kernel_release)
    check(kernel_release.compare(release.text, release.text) is kernel_release.Verdict.EXACT, release)


def _check_lists(root: MemoryRoot) -> None:
    for name, paths in loader_cache.cached_libraries(root).items():
        check(bool(name) and all(path.startswith("/") for path in paths), name)
    directories = loader_cache.configured_directories(root)
    check(all(path.startswith("/") for path in directories), directories)
    index = read_index(root, "/lib/modules/6.12")
    check(all(path.startswith("/") for path in index.files.values()), index.files)
    for command_port, command_socket in ((6666, ""), (None, "/var/run/fm.sock")):
        for found in find_foreign(root, frozenset({1}), command_port, command_socket):
            check(0 < len(found.description) < 1 << 21, "a long description")
    guests = find_guests(root, GPUS, lambda seconds: seconds)
    check(guests.guests != () or guests.hidden != frozenset(), "the guest is not seen")
    check(all(one.name and one.name.isprintable() and len(one.name) < 200 for one in guests.guests), guests)
    digest(events.GuestsLookedFor(guests))
    known = module_store.load(root, _STORE)
    if known is not None:
        check(all(map(is_bus_id, (*known.module_ids, *known.contradicted))), known)
        digest(events.ModulesRecalled(known))


_VERSIONS = (None, "535.161.08", "570.124.06", "580.126.09", "595.71.05")
_OPTIONS = ({}, {"LOG_LEVEL": "4"}, {"USE_RPC": "1", "UNIX_SOCKET_PATH": "/x y"}, {"NOBODY_KNOWS": "1"})


def fabric_manager_config(data: bytes) -> None:
    """Never raises; our values win; all else stays byte for byte; rendering twice changes nothing more."""
    choices = Choices(data)
    version, options = choices.one_of(_VERSIONS), choices.one_of(_OPTIONS)
    wanted = settings(fabric_manager={"options": options, "fabric_mode": choices.number() % 3})
    stock = choices.rest().decode("utf-8", "surrogateescape")
    first = render(stock, wanted, version)
    written = first.text.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    check(written == first.text, "it does not survive the file")
    second = render(first.text, wanted, version)
    check((second.text, second.differences) == (first.text, ()), f"not at rest: {second.differences}")
    _check_values(first.text, wanted, {problem.subject for problem in first.problems})
    before, after = ({line.rstrip("\r") for line in text.split("\n")} for text in (stock, first.text))
    check(all("=" in line for line in before - after), f"lost: {before - after}")
    check(
        all("=" in line or line.startswith("# Added by") for line in after - before - {""}),
        f"made up: {after - before}",
    )
    check(all(one.isprintable() and len(one) < 2000 for one in first.differences), first.differences)
    for text in (stock, first.text):
        port, path = command_endpoint(text)
        check(port is None or 0 <= port <= 65535, port)
        check(port is None or path == "", (port, path))


def _check_values(text: str, wanted: Settings, refused: set[str]) -> None:
    found = effective_options(text)
    expected = {
        **wanted.fabric_manager.options,
        "DAEMONIZE": "0",
        "FABRIC_MODE": str(wanted.fabric_manager.fabric_mode),
        "FABRIC_MODE_RESTART": "0",
        "LOG_FILE_NAME": wanted.fabric_manager.log_file,
    }
    for key, value in expected.items():
        check(key in refused or found.get(key) == value, f"{key} is {found.get(key)!r}, not {value!r}")


def host_file_seeds() -> list[bytes]:
    """Every file as it is, and some with one that cannot be read or is not there."""
    whole = [bytes((number, 0)) + content for number, content in enumerate(_HEALTHY.values())]
    return [*whole, _NEXT_FILE.join(whole[:4]), b"\x00\xff", b"\x08\xfe" + _NEXT_FILE + whole[9], b"\x00\x001_0"]


def fabric_manager_config_seeds() -> list[bytes]:
    """A stock file, in several dialects."""
    stock = (
        b"# Description: x\nLOG_LEVEL=4\nLOG_FILE_NAME=/var/log/fabricmanager.log\nDAEMONIZE=1\n"
        b"FABRIC_MODE=0\n# FM_CMD_PORT_NUMBER=6666\nLOG_USE_SYSLOG=0\nDATABASE_PATH=/var/tmp\nSTATE_FILE_NAME=/tmp/a\n"
        b"TOPOLOGY_FILE_PATH=/usr/share/nvidia/nvswitch\nFABRIC_MODE_RESTART=0\nUNIX_SOCKET_PATH=\n"
    )
    return [
        b"\x03\x01\x00" + stock,
        b"\x04\x02\x01" + stock.replace(b"\n", b"\r\n"),
        b"\x00\x03\x02" + stock.replace(b"=", b" = ") + b"DAEMONIZE=2",
        b"\x01\x00\x00FM_CMD_UNIX_SOCKET_PATH=/a\nFM_CMD_PORT_NUMBER=99999\n\xff\xfe\x85\xe2\x80\xa8LOG_LEVEL=1\n",
    ]

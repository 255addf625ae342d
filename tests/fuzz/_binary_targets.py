"""What comes as bytes: ELF files, module files, GET_DEVICES_V2."""

import atexit
import errno
import gzip
import lzma
import os
import re
import shutil
import struct
import tempfile
from functools import cache

import zstandard
from _digest import digest
from _elf import module, section_file, shared_object
from _input import Choices, check

from fmsupervisor.checks.symbol_versions import module_symbols
from fmsupervisor.core import events
from fmsupervisor.errors import CannotObserve
from fmsupervisor.fabric_manager.versions import embedded_version
from fmsupervisor.facts import DeviceState, DriverState, DriverView
from fmsupervisor.host.elf import Elf, ElfError
from fmsupervisor.host.module_file import ModuleFileError, decompress, read_module
from fmsupervisor.host.nvswitch_ctl import ENTRY_SIZES, decode_devices, query_devices
from fmsupervisor.host.root import HostRoot

_PATH = "/nvidia.ko"
_MOST_DEVICES = 64
_BUS_ID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2,8}:[0-9a-f]{2,8}\.[0-9a-f]{1,8}")


def elf(data: bytes) -> None:
    """Raises ElfError only; never returns more than the file has; a file that shrinks meanwhile is told."""
    for size in (len(data), len(data) + 7):
        try:
            file = Elf(lambda offset, wanted: data[offset : offset + wanted], size)
        except ElfError as error:
            check(0 < len(error.reason) < 200, error.reason)
            continue
        _read_all(file, data)


def _read_all(file: Elf, data: bytes) -> None:
    for read in (file.section_sizes, file.dynamic, lambda: file.tail(28)):
        try:
            found = read()
        except ElfError as error:
            check(0 < len(error.reason) < 200, error.reason)
            continue
        if isinstance(found, dict):
            for name in list(found)[:50]:
                try:
                    content = file.section(name)
                except ElfError:
                    continue
                check(content is not None and len(content) <= len(data), name)
        elif found is not None and not isinstance(found, bytes):
            strings = (*found.needed, found.soname, found.rpath, found.runpath, found.interpreter)
            check(all(len(text or "") <= 4 * 4096 for text in strings), "a long string")


def module_file(data: bytes) -> None:
    """Raises ModuleFileError and CannotObserve only, whatever the compression; bounded; the same twice."""
    root = _file_root()
    with open(root.path(_PATH), "wb") as file:
        file.write(data)
    try:
        found = read_module(root, _PATH)
    except (ModuleFileError, CannotObserve) as error:
        check(0 < len(str(error)) < 500, str(error))
    else:
        check(read_module(root, _PATH) == found, "not the same twice")
        check(bool(found.name) and "\0" not in found.name, found.name)
        check(found.size_bytes == len(decompress(root, _PATH)), "another size")
        check(all(word and "," not in word for word in found.depends), found.depends)
        check(" " not in (found.kernel_release or ""), found.kernel_release)
    try:
        symbols = module_symbols(root, _PATH)
    except (ModuleFileError, ElfError, CannotObserve):
        return
    check(all(0 <= crc < 1 << 64 for crc in symbols.values()), "no CRC")
    version = embedded_version(data)
    check(version is None or len(version) < 64, version)


def nvswitch_ioctl(data: bytes) -> None:
    """Never raises on what the driver wrote; bounded; sorted; a newer value of an enumeration stays a number."""
    choices = Choices(data)
    refused = choices.number() % 3
    written = choices.rest()

    def issue(request: int, buffer: bytearray) -> None:
        check(len(buffer) in (4 + _MOST_DEVICES * size for size in ENTRY_SIZES), "a buffer of another size")
        if refused > (request == 0x8D046303):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        buffer[: min(len(written), len(buffer))] = written[: len(buffer)]

    try:
        view = query_devices(issue)
    except OSError as error:
        check(refused == 2 and error.errno == errno.EINVAL, error)
        return
    for entry_size in ENTRY_SIZES:
        short = decode_devices(written, entry_size)
        check(len(short) <= max(0, len(written) - 4) // entry_size, "entries out of nothing")
    _check_view(view)
    digest(events.DriverObserved(view))


def _check_view(view: DriverView) -> None:
    check(len(view.devices) <= _MOST_DEVICES, "too many")
    names = [device.pci_bus_id for device in view.devices]
    check(names == sorted(names), "not sorted")
    for device in view.devices:
        check(_BUS_ID.fullmatch(device.pci_bus_id) is not None, device.pci_bus_id)
        check(re.fullmatch(r"SWX-[0-9A-F]{8}(-[0-9A-F]{4}){3}-[0-9A-F]{12}", device.uuid) is not None, device.uuid)
        check(isinstance(device.driver_state, DriverState) or device.driver_state not in range(5), "an unnamed state")
        check(isinstance(device.device_state, DeviceState) or device.device_state not in range(4), "an unnamed state")


@cache
def _file_root() -> HostRoot:
    """A directory in memory where there is one: the module readers open files."""
    parent = "/dev/shm" if os.path.isdir("/dev/shm") else None
    directory = tempfile.mkdtemp(prefix="fmsupervisor-fuzz-", dir=parent)
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return HostRoot(directory)


def elf_seeds() -> list[bytes]:
    """Modules, libraries, and a file with a table of names in a section that says so indirectly."""
    return [
        module(),
        module(depends="drm,ecc", extra=("parm=x:y", "parmtype=NVreg_X:int", "softdep=pre: i2c"), signature=_SIGNATURE),
        shared_object(("libc.so.6", "libnuma.so.1"), soname="libnvidia-nscq.so.580.1", runpath="$ORIGIN"),
        shared_object(("libm.so.6",), rpath="/x:/y", interpreter="/lib64/ld-linux-x86-64.so.2"),
        section_file({".modinfo": b"a=b\0", ".text": b"", ".modinfo2": bytes(200)}),
        b"\x7fELF\x01\x01\x01" + bytes(60),
    ]


_SIGNATURE = bytes(12) + b"~Module signature appended~\n"


def module_file_seeds() -> list[bytes]:
    """Each compression, signed and not, with both kinds of symbol versions."""
    plain = module(extra=("license=Dual MIT/GPL", "parmtype=a:int"), signature=_SIGNATURE)
    versions = b"".join(struct.pack("<Q56s", crc, name) for crc, name in ((0xDEADBEEF, b"module_layout"), (1, b"x")))
    extended = section_file(
        {
            ".modinfo": b"name=nvidia\0vermagic=6.14.0 SMP \0",
            "__version_ext_names": b"module_layout\0printk\0",
            "__version_ext_crcs": struct.pack("<II", 1, 2),
        }
    )
    packed = module(versions=versions)
    return [
        plain,
        packed,
        extended,
        gzip.compress(plain, mtime=0),
        lzma.compress(packed),
        zstandard.ZstdCompressor().compress(plain),
        zstandard.ZstdCompressor().compress(b"x") * 2 + bytes(8),
        b"",
    ]


def nvswitch_ioctl_seeds() -> list[bytes]:
    """Four switches in both forms, and one of everything new."""
    entries = [
        struct.pack("=I16s8I", minor, bytes(range(minor, minor + 16)), 0, 5 + minor, 0, 0, 2, 2, 0, minor)
        for minor in range(4)
    ]
    strange = struct.pack("=I16s8I", 9, b"\xff" * 16, 0x10000, 0x1FF, 99, 9, 77, 3, 42, 0xFFFFFFFF)
    return [
        b"\x00" + struct.pack("=I", 4) + b"".join(entry.ljust(56, b"\0") for entry in entries),
        b"\x01" + struct.pack("=I", 4) + b"".join(entry.ljust(52, b"\0") for entry in entries),
        b"\x00" + struct.pack("=I", 1) + strange,
        b"\x02",
        b"\x00" + b"\xff" * 200,
    ]

"""CRCs of symbols: what a module was built against, and what the running kernel has.

Sources: struct modversion_info of include/linux/module.h (``__versions``: 64-byte entries of u64 and name), kernel/
module/version.c and scripts/mod/modpost.c of Linux 6.14 (``__version_ext_crcs``: u32 each; ``__version_ext_names``:
NUL-terminated, in the same order). The kernel's list is symvers.gz of the distribution's package (SUSE, RHEL),
Module.symvers of a build tree, or, when there is none, the modules that came with the kernel: they were built against
the same CRCs. Which symbols exist at all is then told by /proc/kallsyms (kernel/kallsyms.c) together with depmod's
modules.symbols.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from fmsupervisor.errors import CannotObserve
from fmsupervisor.host.elf import Elf, ElfError
from fmsupervisor.host.module_file import ModuleFileError, decompress
from fmsupervisor.host.module_index import MODULE_DIRECTORIES, ModuleIndex, in_tree_module, running_index
from fmsupervisor.host.root import HostRoot

_ENTRY = struct.Struct("<Q56s")
_SYMVERS_LIMIT_BYTES = 32 << 20
_ALL_SYMBOLS = "/proc/kallsyms"
_SOME_DATA = b"jiffies"  # listed only by a kernel that lists variables too (CONFIG_KALLSYMS_ALL)
_MOST_MODULES = 64
_SMALL_MODULE_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class KernelSymbols:
    """``is_complete``: the list has every exported symbol, so one that is missing does not exist."""

    source: str
    crcs: Mapping[str, int]
    is_complete: bool


def module_symbols(root: HostRoot, path: str) -> dict[str, int]:
    """Symbol and CRC of everything the module needs; empty without modversions.

    Raises ``ModuleFileError``, ``ElfError`` and ``CannotObserve``.
    """
    elf = Elf.from_bytes(decompress(root, path))
    names, crcs = elf.section("__version_ext_names"), elf.section("__version_ext_crcs")
    if names and crcs:
        words = [name.decode("utf-8", "backslashreplace") for name in names.split(b"\0") if name]
        return dict(zip(words, (crc for (crc,) in struct.iter_unpack("<I", crcs[: len(crcs) // 4 * 4])), strict=False))
    table = elf.section("__versions") or b""
    entries = _ENTRY.iter_unpack(table[: len(table) // _ENTRY.size * _ENTRY.size])
    return {name.split(b"\0", 1)[0].decode("utf-8", "backslashreplace"): crc for crc, name in entries}


def kernel_symbols(root: HostRoot, release: str) -> KernelSymbols | None:
    """The running kernel's symbols from the first source that there is; None when there is none."""
    for path in _symvers_paths(release):
        try:
            if root.is_file(path) and (crcs := _parse(_read(root, path))):
                return KernelSymbols(path, crcs, is_complete=True)
        except (ModuleFileError, CannotObserve):
            continue
    return _from_modules(root, running_index(root, release))


def existing_symbols(root: HostRoot, release: str) -> frozenset[str] | None:
    """Every symbol that the kernel or one of its modules has; None when that cannot be told.

    Raises ``CannotObserve``.
    """
    listing = root.read_bytes(_ALL_SYMBOLS, _SYMVERS_LIMIT_BYTES) or b""
    names = {words[2] for line in listing.splitlines() if len(words := line.split(None, 3)) > 2}  # noqa: PLR2004
    modules = root.read_bytes(f"{running_index(root, release).directory}/modules.symbols", _SYMVERS_LIMIT_BYTES)
    if _SOME_DATA not in names or modules is None:
        return None
    aliases = (line.split() for line in modules.splitlines() if line.startswith(b"alias symbol:"))
    names |= {words[1].removeprefix(b"symbol:") for words in aliases}
    return frozenset(name.decode("utf-8", "backslashreplace") for name in names)


def _from_modules(root: HostRoot, index: ModuleIndex) -> KernelSymbols | None:
    """What the kernel's own modules were built against; some dozen have the symbols that every driver needs."""
    below = f"{index.directory}/kernel/"
    paths = [path for path in index.files.values() if path.startswith(below) and _is_small(root, path)]
    crcs: dict[str, int] = {}
    for path in paths[:_MOST_MODULES]:
        try:
            crcs |= module_symbols(root, path)
        except (ModuleFileError, ElfError, CannotObserve):
            continue
    if crcs:
        return KernelSymbols(f"modules below {below}", crcs, is_complete=False)
    module = in_tree_module(root, index)
    if module is None:
        return None
    return KernelSymbols(module.path, module_symbols(root, module.path), is_complete=False)


def _is_small(root: HostRoot, path: str) -> bool:
    try:
        status = root.status(path)
    except CannotObserve:
        return False
    return status is not None and status.st_size < _SMALL_MODULE_BYTES


def _symvers_paths(release: str) -> list[str]:
    compressed = [f"{base}.{suffix}" for base in _bases(release) for suffix in ("gz", "xz", "zst")]
    return [*compressed, *(f"{directory}/{release}/build/Module.symvers" for directory in MODULE_DIRECTORIES)]


def _bases(release: str) -> list[str]:
    return [*(f"{directory}/{release}/symvers" for directory in MODULE_DIRECTORIES), f"/boot/symvers-{release}"]


def _read(root: HostRoot, path: str) -> bytes:
    if path.endswith(".symvers"):
        return root.read_bytes(path, _SYMVERS_LIMIT_BYTES) or b""
    return decompress(root, path)


def _parse(content: bytes) -> dict[str, int]:
    """Lines of CRC (hexadecimal), symbol, module, kind of export, namespace, with tabs between."""
    crcs: dict[str, int] = {}
    for line in content.splitlines():
        words = line.split(b"\t", 2)
        if len(words) < 3:  # noqa: PLR2004
            continue
        try:
            crcs[words[1].decode("utf-8", "backslashreplace")] = int(words[0], 16)
        except ValueError:
            continue
    return crcs

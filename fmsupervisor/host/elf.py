"""ELF files, as far as kernel modules and shared libraries need them: named sections and the dynamic section.

Source: System V gABI, chapters 4 and 5, and elf.h of glibc. Only ELF64 little-endian, which is what NVIDIA ships for
x86-64 and aarch64. The file is never mapped (a file that shrinks under a mapping kills the process) and never
believed: every offset, size and count is checked against the real size of the file, and anything wrong raises
``ElfError``.
"""

import os
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fmsupervisor.errors import CannotObserve, FmsupervisorError
from fmsupervisor.host.root import HostRoot

MAGIC = b"\x7fELF"
MACHINE_NAMES = {62: "x86_64", 183: "aarch64"}  # e_machine, as uname -m spells it

_FILE_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
_DYNAMIC_ENTRY = struct.Struct("<qQ")

_CLASS_32, _CLASS_64, _LITTLE_ENDIAN = 1, 2, 1
_PT_LOAD, _PT_DYNAMIC, _PT_INTERP = 1, 2, 3
_SHT_NOBITS = 8
_DT_NULL, _DT_NEEDED, _DT_STRTAB, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 0, 1, 5, 14, 15, 29

_LONGEST_STRING = 4096  # PATH_MAX; names in the tables read here are shorter
_MOST_SECTIONS = 1 << 17  # a module built with -ffunction-sections has some thousands
_MOST_DYNAMIC_ENTRIES = 4096
_LARGEST_SECTION = 64 << 20


class ElfError(FmsupervisorError):
    """The file is not an ELF file that this program can read; ``reason`` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Dynamic:
    """What the dynamic loader reads: the entries of PT_DYNAMIC, and PT_INTERP."""

    needed: tuple[str, ...]  # DT_NEEDED in file order
    soname: str | None
    rpath: str | None
    runpath: str | None
    interpreter: str | None


class Elf:
    """One ELF64 little-endian file behind ``read(offset, size)``, which may return fewer bytes than asked for."""

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        self._read = read
        self.size = size
        identification = self._take(0, min(size, 16))
        if identification[:4] != MAGIC:
            raise ElfError("not an ELF file")
        if len(identification) == 16:  # noqa: PLR2004 - EI_NIDENT
            if identification[4] == _CLASS_32:
                raise ElfError("a 32-bit ELF file")
            if identification[4] != _CLASS_64 or identification[5] != _LITTLE_ENDIAN:
                raise ElfError("not a 64-bit little-endian ELF file")
        header = _FILE_HEADER.unpack(self._take(0, _FILE_HEADER.size))
        self.file_type: int = header[1]
        self.machine: int = header[2]
        self._program_offset: int = header[5]
        self._section_offset: int = header[6]
        self._program_entry_size, self._program_count = header[9], header[10]
        self._section_entry_size, self._section_count, self._name_section = header[11], header[12], header[13]

    @classmethod
    def from_bytes(cls, content: bytes) -> "Elf":
        """An ELF file that is in memory."""
        return cls(lambda offset, size: content[offset : offset + size], len(content))

    @property
    def machine_name(self) -> str:
        """The machine as uname -m spells it."""
        return MACHINE_NAMES.get(self.machine, f"machine {self.machine}")

    def tail(self, size: int) -> bytes:
        """The last bytes of the file, at most ``size`` of them."""
        size = min(size, self.size)
        return self._take(self.size - size, size)

    def section_sizes(self) -> dict[str, int]:
        """Name and size of every section; of several with one name, the first."""
        sizes: dict[str, int] = {}
        for name, header in self._named_sections():
            sizes.setdefault(name, header[5])
        return sizes

    def section(self, name: str) -> bytes | None:
        """The content of the first section of that name; None when there is none."""
        for found, header in self._named_sections():
            if found == name:
                kind, offset, size = header[1], header[4], header[5]
                if size > _LARGEST_SECTION:
                    raise ElfError(f"section {name} is implausibly large ({size} bytes)")
                return b"" if kind == _SHT_NOBITS else self._take(offset, size)
        return None

    def dynamic(self) -> Dynamic | None:
        """What the dynamic loader would read; None for a file without PT_DYNAMIC (static or relocatable)."""
        segments = list(self._program_headers())
        interpreter = next((self._string(s[2]) for s in segments if s[0] == _PT_INTERP), None)
        found = next((s for s in segments if s[0] == _PT_DYNAMIC), None)
        if found is None:
            return None
        entries = self._dynamic_entries(found[2], found[5])
        if not any(tag in _STRING_TAGS for tag, _ in entries):
            return Dynamic((), None, None, None, interpreter)
        address = next((value for tag, value in entries if tag == _DT_STRTAB), None)
        if address is None:
            raise ElfError("the dynamic section has no string table")
        table = _file_offset(segments, address)

        def strings(wanted: int) -> tuple[str, ...]:
            return tuple(self._string(table + value) for tag, value in entries if tag == wanted)

        def string(wanted: int) -> str | None:
            return next(iter(strings(wanted)), None)

        return Dynamic(strings(_DT_NEEDED), string(_DT_SONAME), string(_DT_RPATH), string(_DT_RUNPATH), interpreter)

    def _take(self, offset: int, size: int) -> bytes:
        """Exactly ``size`` bytes."""
        if offset + size > self.size:
            raise ElfError("truncated")
        content = self._read(offset, size)
        if len(content) != size:
            raise ElfError("truncated")
        return content

    def _string(self, offset: int) -> str:
        """The NUL-terminated string at ``offset``."""
        if offset >= self.size:
            raise ElfError("truncated")
        window = self._take(offset, min(_LONGEST_STRING, self.size - offset))
        end = window.find(0)
        if end < 0:
            raise ElfError("a string without end")
        return window[:end].decode("utf-8", "backslashreplace")

    def _dynamic_entries(self, offset: int, size: int) -> list[tuple[int, int]]:
        count = size // _DYNAMIC_ENTRY.size
        if count > _MOST_DYNAMIC_ENTRIES:
            raise ElfError(f"implausibly many dynamic entries ({count})")
        entries = []
        for tag, value in _DYNAMIC_ENTRY.iter_unpack(self._take(offset, count * _DYNAMIC_ENTRY.size)):
            if tag == _DT_NULL:
                break
            entries.append((tag, value))
        return entries

    def _program_headers(self) -> Iterator[tuple[int, ...]]:
        if not self._program_count:
            return
        if self._program_entry_size != _PROGRAM_HEADER.size:
            raise ElfError("program headers of an unknown size")
        yield from _PROGRAM_HEADER.iter_unpack(
            self._take(self._program_offset, self._program_count * _PROGRAM_HEADER.size)
        )

    def _section_headers(self) -> list[tuple[int, ...]]:
        if not self._section_offset:
            return []
        if self._section_entry_size != _SECTION_HEADER.size:
            raise ElfError("section headers of an unknown size")
        # More than 65279 sections: the number stands in the first header (gABI, e_shnum and e_shstrndx).
        first = _SECTION_HEADER.unpack(self._take(self._section_offset, _SECTION_HEADER.size))
        count = self._section_count or first[5]
        if count > _MOST_SECTIONS:
            raise ElfError(f"implausibly many sections ({count})")
        return list(_SECTION_HEADER.iter_unpack(self._take(self._section_offset, count * _SECTION_HEADER.size)))

    def _named_sections(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        headers = self._section_headers()
        if not headers:
            return
        index = headers[0][6] if self._name_section == 0xFFFF else self._name_section  # noqa: PLR2004 - SHN_XINDEX
        if index >= len(headers):
            raise ElfError("the section names are missing")
        offset, size = headers[index][4], headers[index][5]
        if size > _LARGEST_SECTION:
            raise ElfError("the section names are implausibly large")
        names = self._take(offset, size)
        for header in headers:
            start = header[0]
            end = names.find(0, start, start + _LONGEST_STRING)
            if start >= len(names) or end < 0:
                raise ElfError("a section name lies outside the table of names")
            yield names[start:end].decode("utf-8", "backslashreplace"), header


_STRING_TAGS = frozenset({_DT_NEEDED, _DT_SONAME, _DT_RPATH, _DT_RUNPATH})


def _file_offset(segments: list[tuple[int, ...]], address: int) -> int:
    """Where in the file the loader would find what it maps at ``address``."""
    for kind, _, offset, virtual, _, file_size, _, _ in segments:
        if kind == _PT_LOAD and virtual <= address < virtual + file_size:
            return offset + address - virtual
    raise ElfError("the dynamic string table is not part of any segment")


@contextmanager
def open_elf(root: HostRoot, path: str) -> Iterator[Elf | None]:
    """The ELF file at a logical path; None when there is no file. Raises ``ElfError`` and ``CannotObserve``."""
    try:
        descriptor = os.open(root.path(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except (FileNotFoundError, NotADirectoryError):
        yield None
        return
    except OSError as error:
        raise CannotObserve(path, error.strerror or str(error)) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ElfError("not a regular file")
        yield Elf(lambda offset, size: _read_at(descriptor, offset, size), status.st_size)
    finally:
        os.close(descriptor)


def _read_at(descriptor: int, offset: int, size: int) -> bytes:
    try:
        return os.pread(descriptor, size, offset)
    except OSError as error:
        raise ElfError(f"read error: {error.strerror or error}") from error

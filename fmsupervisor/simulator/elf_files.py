"""Small but valid ELF64 files: a kernel module with .modinfo, and a shared object with a dynamic section.

Sources: elf(5); include/linux/module_signature.h and scripts/sign-file.c (the appended signature);
include/linux/moduleparam.h (.modinfo is ``key=value`` strings, each ended by NUL); struct modversion_info (__versions).
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

X86_64 = 62
AARCH64 = 183

SIGNATURE_MAGIC = b"~Module signature appended~\n"

_HEADER_SIZE = 64
_SECTION_HEADER_SIZE = 64
_PROGRAM_HEADER_SIZE = 56
_RELOCATABLE, _SHARED = 1, 3
_PROGBITS, _SYMTAB_STRINGS, _DYNAMIC, _DYNAMIC_SYMBOLS = 1, 3, 6, 11
_ALLOCATED = 2
_TAG_NULL, _TAG_NEEDED, _TAG_STRTAB, _TAG_SYMTAB, _TAG_STRSZ, _TAG_SYMENT, _TAG_SONAME = 0, 1, 5, 6, 10, 11, 14
_SYMBOL_SIZE = 24
_VERSION_NAME_SIZE = 56


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    kind: int
    content: bytes
    flags: int = 0
    link: int = 0
    entry_size: int = 0


def kernel_module(
    info: Iterable[tuple[str, str]],
    versions: Mapping[str, int] | None = None,
    *,
    signature: bytes | None = None,
    machine: int = X86_64,
    padding: int = 0,
) -> bytes:
    """A relocatable file as finit_module(2) takes it, without code.

    Args:
        info: key and value of each .modinfo entry, in order; keys may repeat.
        versions: symbol name to CRC for ``__versions``; None leaves the section out (no MODVERSIONS).
        signature: what stands for the PKCS#7 signature; None leaves the module unsigned.
        machine: e_machine.
        padding: bytes of .text, for a file of some size.
    """
    modinfo = b"".join(f"{key}={value}".encode() + b"\0" for key, value in info)
    sections = [_Section(".text", _PROGBITS, bytes(padding), _ALLOCATED), _Section(".modinfo", _PROGBITS, modinfo, 2)]
    if versions is not None:
        table = b"".join(
            struct.pack(f"<Q{_VERSION_NAME_SIZE}s", crc, name.encode()[: _VERSION_NAME_SIZE - 1])
            for name, crc in versions.items()
        )
        sections.append(_Section("__versions", _PROGBITS, table, _ALLOCATED))
    module = _assemble(_RELOCATABLE, machine, sections)
    return module if signature is None else module + signature_trailer(signature)


def signature_trailer(signature: bytes) -> bytes:
    """The signature, struct module_signature (id type 2 is PKCS#7) and the magic string."""
    return signature + struct.pack(">BBBBB3xI", 0, 0, 2, 0, 0, len(signature)) + SIGNATURE_MAGIC


SIGNATURE = signature_trailer(b"\x30\x81\xfd" + bytes(range(3, 256)))  # begins as PKCS#7 does


def shared_object(soname: str, needed: Sequence[str], *, machine: int = X86_64) -> bytes:
    """A shared object with DT_SONAME (unless empty) and one DT_NEEDED for each name."""
    strings = b"\0"
    entries: list[tuple[int, int]] = []
    for tag, name in [(_TAG_NEEDED, name) for name in needed] + ([(_TAG_SONAME, soname)] if soname else []):
        entries.append((tag, len(strings)))
        strings += name.encode() + b"\0"
    strings_at = _HEADER_SIZE + 2 * _PROGRAM_HEADER_SIZE
    symbols_at = _aligned(strings_at + len(strings))
    dynamic_at = symbols_at + _SYMBOL_SIZE
    entries += [
        (_TAG_STRTAB, strings_at),
        (_TAG_SYMTAB, symbols_at),
        (_TAG_STRSZ, len(strings)),
        (_TAG_SYMENT, _SYMBOL_SIZE),
        (_TAG_NULL, 0),
    ]
    dynamic = b"".join(struct.pack("<QQ", tag, value) for tag, value in entries)
    sections = [
        _Section(".dynstr", _SYMTAB_STRINGS, strings, _ALLOCATED),
        _Section(".dynsym", _DYNAMIC_SYMBOLS, bytes(_SYMBOL_SIZE), _ALLOCATED, 1, _SYMBOL_SIZE),
        _Section(".dynamic", _DYNAMIC, dynamic, _ALLOCATED, 1, 16),
    ]
    end = dynamic_at + len(dynamic)
    programs = [
        struct.pack("<IIQQQQQQ", 1, 4, 0, 0, 0, end, end, 0x1000),  # PT_LOAD
        struct.pack("<IIQQQQQQ", 2, 4, dynamic_at, dynamic_at, dynamic_at, len(dynamic), len(dynamic), 8),  # PT_DYNAMIC
    ]
    return _assemble(_SHARED, machine, sections, programs)


def _assemble(kind: int, machine: int, sections: Sequence[_Section], programs: Sequence[bytes] = ()) -> bytes:
    """Header, program headers, the sections' contents on 8-byte boundaries, section names, section headers.

    A section's address equals its offset in the file, which is what ``shared_object`` counts on.
    """
    body = bytearray(_HEADER_SIZE) + b"".join(programs)
    names = bytearray(b"\0")
    headers = [bytes(_SECTION_HEADER_SIZE)]
    for section in (*sections, _Section(".shstrtab", _SYMTAB_STRINGS, b"")):
        name_at = len(names)
        names += section.name.encode() + b"\0"
        content = bytes(names) if section.name == ".shstrtab" else section.content
        body += bytes(_aligned(len(body)) - len(body))
        offset = len(body)
        body += content
        address = offset if kind == _SHARED and section.flags & _ALLOCATED else 0
        headers.append(
            struct.pack(
                "<IIQQQQIIQQ",
                name_at,
                section.kind,
                section.flags,
                address,
                offset,
                len(content),
                section.link,
                1 if section.kind == _DYNAMIC_SYMBOLS else 0,
                1 if section.kind in (_PROGBITS, _SYMTAB_STRINGS) else 8,
                section.entry_size,
            )
        )
    body += bytes(_aligned(len(body)) - len(body))
    body[:_HEADER_SIZE] = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01",
        kind,
        machine,
        1,
        0,
        _HEADER_SIZE if programs else 0,
        len(body),
        0,
        _HEADER_SIZE,
        _PROGRAM_HEADER_SIZE if programs else 0,
        len(programs),
        _SECTION_HEADER_SIZE,
        len(headers),
        len(headers) - 1,
    )
    return bytes(body) + b"".join(headers)


def _aligned(offset: int) -> int:
    return (offset + 7) & ~7

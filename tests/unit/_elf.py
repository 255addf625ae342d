"""Minimal ELF64 files, written independently of the simulator's: a kernel module and a shared object."""

import struct
from collections.abc import Sequence

X86_64, AARCH64 = 62, 183


def section_file(sections: dict[str, bytes], *, machine: int = X86_64, file_type: int = 1) -> bytes:
    """A file with these sections and a table of their names."""
    names, body, headers = b"\0", b"", [bytes(64)]
    for name, content in [*sections.items(), (".shstrtab", b"")]:
        name_at = len(names)
        names += name.encode() + b"\0"
        data = names if name == ".shstrtab" else content
        headers.append(struct.pack("<IIQQQQIIQQ", name_at, 1, 0, 0, 64 + len(body), len(data), 0, 0, 1, 0))
        body += data
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01",
        *(file_type, machine, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64, len(headers), len(headers) - 1),
    )
    return header + body + b"".join(headers)


def module(
    *,
    name: str = "nvidia",
    version: str | None = "580.126.09",
    vermagic: str | None = "6.12.0-160000.9-default SMP preempt mod_unload modversions ",
    depends: str = "",
    extra: Sequence[str] = (),
    versions: bytes | None = bytes(64),
    signature: bytes = b"",
) -> bytes:
    """A kernel module; ``versions`` is the content of ``__versions``, None for no such section."""
    fields = {"name": name, "version": version, "vermagic": vermagic, "depends": depends}
    lines = [f"{key}={value}" for key, value in fields.items() if value is not None] + list(extra)
    sections = {".text": b"\x90" * 100, ".modinfo": b"".join(line.encode() + b"\0" for line in lines)}
    if versions is not None:
        sections["__versions"] = versions
    return section_file(sections) + signature


def shared_object(
    needed: Sequence[str] = (),
    *,
    soname: str = "",
    rpath: str = "",
    runpath: str = "",
    interpreter: str = "",
    machine: int = X86_64,
    content: bytes = b"",
) -> bytes:
    """What the dynamic loader reads of a library: program headers, PT_DYNAMIC and its strings, mapped at 0x10000."""
    base, strings, entries = 0x10000, b"\0", []
    for tag, text in [*((1, name) for name in needed), (14, soname), (15, rpath), (29, runpath)]:
        if text:
            entries.append((tag, len(strings)))
            strings += text.encode() + b"\0"
    interpreter_at = 64 + 3 * 56 + len(strings)
    strings += interpreter.encode() + b"\0" + content
    dynamic_at = 64 + 3 * 56 + len(strings)
    entries += [(5, base + 64 + 3 * 56), (10, len(strings)), (0, 0)]
    dynamic = b"".join(struct.pack("<qQ", *entry) for entry in entries)
    size = dynamic_at + len(dynamic)
    segments = [
        struct.pack("<IIQQQQQQ", 1, 4, 0, base, base, size, size, 4096),
        struct.pack("<IIQQQQQQ", 2, 4, dynamic_at, base + dynamic_at, 0, len(dynamic), len(dynamic), 8),
        struct.pack("<IIQQQQQQ", 3 if interpreter else 0, 4, interpreter_at, 0, 0, len(interpreter) + 1, 0, 1),
    ]
    header = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", *(3, machine, 1, 0, 64, 0, 0, 64, 56, 3, 64, 0, 0)
    )
    return header + b"".join(segments) + strings + dynamic

"""One kernel module file: what it says about itself, and its bytes.

Sources: include/linux/module.h and scripts/mod/modpost.c of Linux 6.12 (.modinfo: NUL-separated ``key=value``;
``__versions``; from 6.14 on ``__version_ext_names``), include/linux/module_signature.h and kernel/module_signature.c
(the trailer of a signed module, and what the kernel wants it to say). The kind of compression is told from the first
bytes, as the kernel does, not from the file's name.
"""

import os
import stat
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from io import BytesIO
from typing import Protocol

from fmsupervisor.errors import CannotObserve, FmsupervisorError
from fmsupervisor.host.elf import MAGIC, Elf, ElfError, open_elf
from fmsupervisor.host.root import HostRoot

LARGEST_MODULE_BYTES = 512 << 20  # nvidia.ko with debug information is about 100 MB
SUFFIXES = (".ko", ".ko.zst", ".ko.xz", ".ko.gz")

_SIGNATURE_MAGIC = b"~Module signature appended~\n"
_SIGNATURE = struct.Struct(">BBBBB3sI")  # algo, hash, id type, two lengths, padding, length of what stands before it
_PKCS7 = 2  # PKEY_ID_PKCS7
_SEQUENCE = 0x30  # ASN.1, with which a PKCS#7 message begins
_VERSION_SECTIONS = ("__versions", "__version_ext_names", "__version_ext_crcs")
_PIECE_BYTES = 2048  # a piece of zstd can become 64 K times as much, so this bounds what one step may allocate
_XZ_MEMORY_BYTES = 256 << 20

_COMPRESSIONS = ((b"\x28\xb5\x2f\xfd", "zstd"), (b"\xfd7zXZ\x00", "xz"), (b"\x1f\x8b", "gzip"))


class ModuleFileError(FmsupervisorError):
    """The file is no usable kernel module; ``reason`` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ModuleFileMissing(ModuleFileError):
    """There is no file at that path (any more)."""

    def __init__(self) -> None:
        super().__init__("no such file")


class Signature(StrEnum):
    """What stands behind the module. Whether the kernel has the key is not known."""

    NONE = "not signed"
    PKCS7 = "signed"
    UNKNOWN = "signed in a way that no kernel knows"  # counts as not signed
    DAMAGED = "with a damaged signature"  # refused even where no signature is asked for


@dataclass(frozen=True, slots=True)
class ModuleFile:
    """What modinfo(8) would tell, and a little more. A field that the file lacks is None or empty."""

    path: str
    compression: str  # "", "zstd", "xz" or "gzip", as /sys/module/compression spells it
    name: str  # name=, else from the file's name; with "_" as in /sys/module
    version: str | None  # version=
    vermagic: str | None  # vermagic=, without the trailing blank
    depends: tuple[str, ...]  # depends=
    softdeps: tuple[str, ...]  # softdep=, each as it is
    supported: str | None  # supported= (SUSE)
    parameters: tuple[str, ...]  # names of parmtype=
    has_modversions: bool  # symbol versions decide, not the kernel release (kernel/module/version.c same_magic)
    signature: Signature
    size_bytes: int  # uncompressed

    @property
    def kernel_release(self) -> str | None:
        """The release that the module was built for: the first word of vermagic."""
        words = (self.vermagic or "").split(maxsplit=1)
        return words[0] if words else None

    @property
    def vermagic_flags(self) -> str:
        """What follows the release in vermagic."""
        return " ".join((self.vermagic or "").split()[1:])


class Decoder(Protocol):
    """What zlib, lzma and zstandard have in common."""

    @property
    def eof(self) -> bool:
        """Whether the compressed stream has ended."""

    @property
    def unused_data(self) -> bytes:
        """What followed the end of the stream."""

    def decompress(self, data: bytes, /) -> bytes:
        """What comes of the next piece."""


def module_name(path: str) -> str:
    """The module's name by its file's name: ``/x/nvidia-uvm.ko.zst`` is ``nvidia_uvm``."""
    return os.path.basename(path).split(".ko", 1)[0].replace("-", "_")


def compression_of(root: HostRoot, path: str) -> str:
    """How the file is compressed: "", "zstd", "xz" or "gzip". Raises ``ModuleFileError`` and ``CannotObserve``."""
    start = root.read_bytes(path, 8)
    if start is None:
        raise ModuleFileMissing
    if not start:
        raise ModuleFileError("the file is empty")
    if start.startswith(MAGIC):
        return ""
    for magic, name in _COMPRESSIONS:
        if start.startswith(magic):
            return name
    raise ModuleFileError("neither an ELF file nor compressed with zstd, xz or gzip")


def decompress(root: HostRoot, path: str) -> bytes:
    """The module as the kernel wants it, signature included. Raises ``ModuleFileError`` and ``CannotObserve``."""
    compression = compression_of(root, path)
    pieces = _pieces(root, path)
    image = BytesIO()
    for piece in _decoded(pieces, compression) if compression else pieces:
        image.write(piece)
        if image.tell() > LARGEST_MODULE_BYTES:
            raise ModuleFileError(f"larger than {LARGEST_MODULE_BYTES >> 20} MiB")
    return image.getvalue()


def read_module(root: HostRoot, path: str) -> ModuleFile:
    """What the file says about itself. Raises ``ModuleFileError`` and ``CannotObserve``."""
    compression = compression_of(root, path)
    try:
        if compression:
            return _describe(Elf.from_bytes(decompress(root, path)), path, compression)
        with open_elf(root, path) as elf:
            if elf is None:
                raise ModuleFileMissing
            return _describe(elf, path, compression)
    except ElfError as error:
        raise ModuleFileError(error.reason) from error


def _describe(elf: Elf, path: str, compression: str) -> ModuleFile:
    information = elf.section(".modinfo")
    if information is None:
        raise ModuleFileError("not a kernel module: it has no .modinfo section")
    values: dict[str, list[str]] = {}
    for entry in information.split(b"\0"):
        key, separator, value = entry.decode("utf-8", "backslashreplace").partition("=")
        if separator:
            values.setdefault(key, []).append(value.strip())

    def first(key: str) -> str | None:
        return next(iter(values.get(key, ())), None)

    sections = elf.section_sizes()
    return ModuleFile(
        path=path,
        compression=compression,
        name=(first("name") or module_name(path)).replace("-", "_"),
        version=first("version"),
        vermagic=first("vermagic"),
        depends=tuple(name for name in (first("depends") or "").split(",") if name),
        softdeps=tuple(values.get("softdep", ())),
        supported=first("supported"),
        parameters=tuple(value.partition(":")[0] for value in values.get("parmtype", ())),
        has_modversions=any(sections.get(section) for section in _VERSION_SECTIONS),
        signature=_signature(elf),
        size_bytes=elf.size,
    )


def _signature(elf: Elf) -> Signature:
    """As ``mod_check_sig`` judges the trailer, and asn1_ber_decoder the first byte of what stands before it."""
    size = _SIGNATURE.size + len(_SIGNATURE_MAGIC)
    tail = elf.tail(size)
    if not tail.endswith(_SIGNATURE_MAGIC):
        return Signature.NONE
    algorithm, hash_, kind, signer, key, padding, length = _SIGNATURE.unpack_from(tail.rjust(size, b"\xff"))
    if length >= elf.size - size:
        return Signature.DAMAGED
    if kind != _PKCS7:
        return Signature.UNKNOWN
    is_sound = not any((algorithm, hash_, signer, key, *padding)) and elf.tail(size + length)[0] == _SEQUENCE
    return Signature.PKCS7 if is_sound else Signature.DAMAGED


def _pieces(root: HostRoot, path: str) -> Iterator[bytes]:
    """The file in small pieces, as long as it is of an acceptable size."""
    try:
        descriptor = os.open(root.path(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise CannotObserve(path, error.strerror or str(error)) from error
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ModuleFileError("not a regular file")
        left = LARGEST_MODULE_BYTES
        while True:
            try:
                piece = file.read(_PIECE_BYTES)
            except OSError as error:
                raise CannotObserve(path, error.strerror or str(error)) from error
            if not piece:
                return
            left -= len(piece)
            if left < 0:
                raise ModuleFileError(f"larger than {LARGEST_MODULE_BYTES >> 20} MiB")
            yield piece


def _decoded(pieces: Iterator[bytes], compression: str) -> Iterator[bytes]:
    """What the pieces decompress to; several streams one after the other are one file, zero padding is ignored."""
    new_decoder, failure = _decoder(compression)
    decoder = new_decoder()
    try:
        for piece in pieces:
            data = piece
            while data:
                if decoder.eof:
                    if not data.strip(b"\0"):
                        break
                    decoder = new_decoder()
                yield decoder.decompress(data)
                data = decoder.unused_data if decoder.eof else b""
    except failure as error:
        raise ModuleFileError(f"cannot be decompressed ({compression}): {error}") from error
    if not decoder.eof:
        raise ModuleFileError(f"truncated ({compression})")


def _decoder(compression: str) -> tuple[Callable[[], Decoder], type[Exception]]:
    """How to begin a stream, and what its failures are. Imports only the library that is needed (memory)."""
    match compression:
        case "zstd":
            import zstandard  # noqa: PLC0415

            return zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError
        case "xz":
            import lzma  # noqa: PLC0415

            return lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES), lzma.LZMAError
        case _:
            import zlib  # noqa: PLC0415

            return lambda: zlib.decompressobj(wbits=31), zlib.error

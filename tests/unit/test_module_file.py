"""host.module_file: what a module file says, and its bytes, compressed or not."""

import gzip
import lzma
import os
from collections.abc import Callable
from pathlib import Path

import _elf as build
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fmsupervisor.errors import CannotObserve
from fmsupervisor.host import module_file
from fmsupervisor.host.module_file import ModuleFileError, Signature, decompress, module_name, read_module
from fmsupervisor.host.root import HostRoot

MAGIC = b"~Module signature appended~\n"


def trailer(*fields: int, length: int) -> bytes:
    """Struct module_signature: algorithm, hash, kind, two lengths, three bytes of padding, length."""
    return bytes(fields) + length.to_bytes(4, "big") + MAGIC


SIGNATURE = b"\x30\x82signature" + trailer(0, 0, 2, 0, 0, 0, 0, 0, length=11)
SIGNED = build.module(
    depends="ecc,drm-core",
    extra=["softdep=pre: ecdh_generic,ecdsa_generic", "parmtype=NVreg_NvLinkDisable:int", "supported=external"],
    signature=SIGNATURE,
)
COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "nvidia.ko": bytes,
    "nvidia.ko.zst": zstandard.compress,
    "nvidia.ko.xz": lambda content: lzma.compress(content, check=lzma.CHECK_CRC32),
    "nvidia.ko.gz": gzip.compress,
}


def write(directory: Path, name: str, content: bytes) -> HostRoot:
    (directory / name).write_bytes(content)
    return HostRoot(str(directory))


@pytest.mark.parametrize("name", COMPRESSORS)
class TestEveryCompression:
    def test_reads_what_the_module_says(self, tmp_path: Path, name: str) -> None:
        root = write(tmp_path, name, COMPRESSORS[name](SIGNED))
        module = read_module(root, f"/{name}")
        assert (module.name, module.version) == ("nvidia", "580.126.09")
        assert module.vermagic == "6.12.0-160000.9-default SMP preempt mod_unload modversions"
        assert module.kernel_release == "6.12.0-160000.9-default"
        assert module.vermagic_flags == "SMP preempt mod_unload modversions"
        assert module.depends == ("ecc", "drm-core")
        assert module.softdeps == ("pre: ecdh_generic,ecdsa_generic",)
        assert module.parameters == ("NVreg_NvLinkDisable",)
        assert module.supported == "external"
        assert module.signature is Signature.PKCS7
        assert module.has_modversions
        assert module.size_bytes == len(SIGNED)
        assert module.compression == {".ko": "", ".zst": "zstd", ".xz": "xz", ".gz": "gzip"}[Path(name).suffix]

    def test_keeps_every_byte_up_to_the_signature(self, tmp_path: Path, name: str) -> None:
        assert decompress(write(tmp_path, name, COMPRESSORS[name](SIGNED)), f"/{name}") == SIGNED

    def test_says_that_a_truncated_file_is_truncated(self, tmp_path: Path, name: str) -> None:
        content = COMPRESSORS[name](SIGNED)
        root = write(tmp_path, name, content[: len(content) // 2])
        with pytest.raises(ModuleFileError, match="truncated"):
            read_module(root, f"/{name}")

    def test_survives_a_changed_byte_anywhere(self, tmp_path: Path, name: str) -> None:
        content = COMPRESSORS[name](SIGNED)
        for place in range(0, len(content), 7):
            root = write(tmp_path, name, content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
            try:
                read_module(root, f"/{name}")
            except ModuleFileError:
                pass

    def test_refuses_a_bomb_before_it_fills_memory(
        self, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module_file, "LARGEST_MODULE_BYTES", 1 << 20)
        root = write(tmp_path, name, COMPRESSORS[name](SIGNED + bytes(8 << 20)))
        with pytest.raises(ModuleFileError, match="larger than"):
            decompress(root, f"/{name}")


@pytest.mark.parametrize("name", [name for name in COMPRESSORS if name != "nvidia.ko"])
def test_several_streams_in_a_row_are_one_module(tmp_path: Path, name: str) -> None:
    compress = COMPRESSORS[name]
    root = write(tmp_path, name, compress(SIGNED[:300]) + compress(SIGNED[300:]) + bytes(8))
    assert decompress(root, f"/{name}") == SIGNED


def test_the_content_not_the_name_tells_the_compression(tmp_path: Path) -> None:
    assert read_module(write(tmp_path, "nvidia.ko", zstandard.compress(SIGNED)), "/nvidia.ko").compression == "zstd"


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        pytest.param(None, False, id="none"),
        pytest.param(b"", False, id="empty"),
        pytest.param(bytes(64), True, id="one"),
    ],
)
def test_modversions_are_a_section_that_is_not_empty(tmp_path: Path, versions: bytes | None, expected: bool) -> None:
    root = write(tmp_path, "m.ko", build.module(versions=versions))
    assert read_module(root, "/m.ko").has_modversions is expected


def test_extended_modversions_count_as_modversions(tmp_path: Path) -> None:
    content = build.section_file(
        {".modinfo": b"name=m\0", "__version_ext_crcs": bytes(4), "__version_ext_names": b"x\0"}
    )
    assert read_module(write(tmp_path, "m.ko", content), "/m.ko").has_modversions


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        pytest.param(b"0" * 20 + trailer(0, 0, 2, 0, 0, 0, 0, 0, length=20), Signature.PKCS7, id="PKCS#7"),
        pytest.param(b"0" * 20 + trailer(0, 0, 1, 0, 0, 0, 0, 0, length=20), Signature.UNKNOWN, id="X.509"),
        pytest.param(b"0" * 20 + trailer(1, 4, 2, 0, 0, 0, 0, 0, length=20), Signature.DAMAGED, id="with an algorithm"),
        pytest.param(b"0" * 20 + trailer(0, 0, 2, 0, 0, 0, 1, 0, length=20), Signature.DAMAGED, id="padding"),
        pytest.param(b"x" * 20 + trailer(0, 0, 2, 0, 0, 0, 0, 0, length=20), Signature.DAMAGED, id="no PKCS#7 inside"),
        pytest.param(trailer(0, 0, 2, 0, 0, 0, 0, 0, length=1 << 31), Signature.DAMAGED, id="longer than the file"),
        pytest.param(MAGIC[:-1], Signature.NONE, id="without the last byte"),
    ],
)
def test_a_signature_is_judged_as_the_kernel_does_before_it_looks_for_the_key(tmp_path: Path, end, expected) -> None:
    content = build.section_file({".modinfo": b"name=m\0"}) + end
    assert read_module(write(tmp_path, "m.ko", content), "/m.ko").signature is expected


def test_fields_that_are_absent_are_none_or_empty(tmp_path: Path) -> None:
    root = write(tmp_path, "nvidia-uvm.ko", build.section_file({".modinfo": b"license=GPL\0no separator\0"}))
    module = read_module(root, "/nvidia-uvm.ko")
    assert module.name == "nvidia_uvm"
    assert (module.version, module.vermagic, module.kernel_release, module.supported) == (None, None, None, None)
    assert (module.depends, module.softdeps, module.parameters) == ((), (), ())
    assert module.signature is Signature.NONE


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(b"", "empty", id="empty"),
        pytest.param(b"<html>not found</html>", "neither an ELF file nor compressed", id="web page"),
        pytest.param(b"\xfd7zXZ\x00garbage" * 9, "cannot be decompressed", id="damaged xz"),
        pytest.param(build.section_file({".text": b"x"}), "no .modinfo", id="no module"),
        pytest.param(b"\x7fELF\x01\x01\x01" + bytes(60), "32-bit", id="32-bit"),
    ],
)
def test_what_is_no_module_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    with pytest.raises(ModuleFileError, match=reason):
        read_module(write(tmp_path, "nvidia.ko", content), "/nvidia.ko")


def test_absent_and_unreadable_are_told_apart(tmp_path: Path) -> None:
    root = HostRoot(str(tmp_path))
    with pytest.raises(ModuleFileError, match="no such file"):
        read_module(root, "/nvidia.ko")
    (tmp_path / "nvidia.ko").symlink_to("nvidia.ko")
    with pytest.raises(CannotObserve):
        read_module(root, "/nvidia.ko")


def test_a_fifo_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "nvidia.ko")
    with pytest.raises((ModuleFileError, CannotObserve)):
        read_module(HostRoot(str(tmp_path)), "/nvidia.ko")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    start=st.sampled_from([b"", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\x00", b"\x1f\x8b\x08", b"\x7fELF"]),
    tail=st.binary(max_size=200),
)
def test_random_files_raise_nothing_but_module_file_errors(tmp_path: Path, start: bytes, tail: bytes) -> None:
    try:
        read_module(write(tmp_path, "m.ko", start + tail), "/m.ko")
    except ModuleFileError:
        pass


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/x/nvidia.ko.zst", "nvidia"),
        ("nvidia-uvm.ko", "nvidia_uvm"),
        ("kernel/drm_kms_helper.ko.gz", "drm_kms_helper"),
    ],
)
def test_a_module_is_named_by_its_file(path: str, name: str) -> None:
    assert module_name(path) == name

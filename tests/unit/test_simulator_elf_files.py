"""The simulator's ELF files are what the common tools take them for."""

import shutil
import struct
import subprocess

import pytest

from fmsupervisor.simulator.elf_files import AARCH64, SIGNATURE_MAGIC, kernel_module, shared_object

needs_readelf = pytest.mark.skipif(shutil.which("readelf") is None, reason="binutils is not installed")

INFO = [("version", "580.126.09"), ("depends", ""), ("alias", "a"), ("alias", "b"), ("name", "nvidia")]


def readelf(path, *options: str) -> str:
    done = subprocess.run(["readelf", "-W", *options, str(path)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


@needs_readelf
class TestReadelf:
    def test_shows_all_entries_of_modinfo_in_order(self, tmp_path):
        (tmp_path / "nvidia.ko").write_bytes(kernel_module(INFO, {"module_layout": 1}))
        shown = readelf(tmp_path / "nvidia.ko", "-p", ".modinfo")
        positions = [shown.index(f"{key}={value}") for key, value in INFO]
        assert positions == sorted(positions)

    def test_calls_a_module_relocatable_and_finds_versions(self, tmp_path):
        (tmp_path / "nvidia.ko").write_bytes(kernel_module(INFO, {"module_layout": 1, "printk": 2}))
        shown = readelf(tmp_path / "nvidia.ko", "-h", "-S")
        assert "REL (Relocatable file)" in shown
        assert "__versions" in shown
        assert "000080" in shown  # two entries of 64 bytes

    def test_finds_no_versions_when_there_are_none(self, tmp_path):
        (tmp_path / "nvidia.ko").write_bytes(kernel_module(INFO))
        assert "__versions" not in readelf(tmp_path / "nvidia.ko", "-S")

    def test_shows_needed_libraries_and_soname(self, tmp_path):
        (tmp_path / "a.so").write_bytes(shared_object("liba.so.2", ["libc.so.6", "libz.so.1"]))
        shown = readelf(tmp_path / "a.so", "-d", "-l")
        assert "Shared library: [libc.so.6]" in shown
        assert "Shared library: [libz.so.1]" in shown
        assert "Library soname: [liba.so.2]" in shown
        assert "DYNAMIC" in shown

    def test_shows_the_machine(self, tmp_path):
        (tmp_path / "a.so").write_bytes(shared_object("", [], machine=AARCH64))
        assert "AArch64" in readelf(tmp_path / "a.so", "-h")


def test_a_signature_is_appended_with_its_length_and_magic():
    plain = kernel_module(INFO)
    signed = kernel_module(INFO, signature=b"s" * 300)
    assert signed.startswith(plain)
    assert signed.endswith(SIGNATURE_MAGIC)
    trailer = signed[-len(SIGNATURE_MAGIC) - 12 : -len(SIGNATURE_MAGIC)]
    assert struct.unpack(">BBBBB3xI", trailer) == (0, 0, 2, 0, 0, 300)

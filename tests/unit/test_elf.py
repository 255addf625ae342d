"""host.elf: sections and dynamic entries of ELF files, whatever the bytes are."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import _elf as build
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fmsupervisor.errors import CannotObserve
from fmsupervisor.host.elf import Elf, ElfError, open_elf
from fmsupervisor.host.root import HostRoot

MODULE = build.module(signature=b"~Module signature appended~\n")
LIBRARY = build.shared_object(["libc.so.6"], soname="libx.so.1", runpath="$ORIGIN", interpreter="/lib64/ld.so")


def read_everything(content: bytes) -> None:
    """Everything that can be asked of a file; raises ``ElfError`` or nothing."""
    elf = Elf.from_bytes(content)
    elf.section_sizes()
    elf.section(".modinfo")
    elf.dynamic()
    elf.tail(28)


def test_a_section_is_found_by_its_name() -> None:
    elf = Elf.from_bytes(MODULE)
    assert b"version=580.126.09\0" in (elf.section(".modinfo") or b"")
    assert elf.section("__versions") == bytes(64)
    assert elf.section(".missing") is None
    assert elf.section_sizes()["__versions"] == 64
    assert elf.machine_name == "x86_64"
    assert elf.dynamic() is None


def test_the_dynamic_section_tells_what_the_loader_reads() -> None:
    dynamic = Elf.from_bytes(LIBRARY).dynamic()
    assert dynamic is not None
    assert dynamic.needed == ("libc.so.6",)
    assert (dynamic.soname, dynamic.rpath, dynamic.runpath) == ("libx.so.1", None, "$ORIGIN")
    assert dynamic.interpreter == "/lib64/ld.so"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(b"", "not an ELF file", id="empty"),
        pytest.param(b"#!/bin/sh\nexec true\n" * 10, "not an ELF file", id="script"),
        pytest.param(b"\x7fELF", "truncated", id="magic only"),
        pytest.param(b"\x7fELF\x01\x01\x01" + bytes(60), "32-bit", id="32-bit"),
        pytest.param(b"\x7fELF\x02\x02\x01" + bytes(60), "little-endian", id="big-endian"),
        pytest.param(MODULE[:40], "truncated", id="half a header"),
        pytest.param(MODULE[:200], "truncated", id="section headers cut off"),
        pytest.param(LIBRARY[:150], "truncated", id="program headers cut off"),
    ],
)
def test_what_is_no_usable_file_is_named(content: bytes, reason: str) -> None:
    with pytest.raises(ElfError, match=reason):
        read_everything(content)


@pytest.mark.parametrize("content", [MODULE, LIBRARY], ids=["module", "library"])
def test_every_truncation_and_every_changed_byte_is_survived(content: bytes) -> None:
    for length in range(len(content)):
        for damaged in (content[:length], content[:length] + b"\xff" + content[length + 1 :]):
            try:
                read_everything(damaged)
            except ElfError:
                pass


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
@example(b"\x7fELF\x02\x01\x01" + bytes(9) + b"\xff" * 48)
def test_random_bytes_raise_nothing_but_elf_errors(tail: bytes) -> None:
    for content in (tail, MODULE[:16] + tail):
        try:
            read_everything(content)
        except ElfError:
            pass


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([MODULE, LIBRARY]), st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), max_size=12))
def test_mutated_files_raise_nothing_but_elf_errors(content: bytes, changes: list[tuple[int, int]]) -> None:
    damaged = bytearray(content)
    for place, value in changes:
        damaged[place % len(damaged)] = value
    try:
        read_everything(bytes(damaged))
    except ElfError:
        pass


def test_this_interpreter_is_readable(tmp_path: Path) -> None:
    root = HostRoot("/")
    with open_elf(root, os.path.realpath(sys.executable)) as elf:
        assert elf is not None
        assert elf.machine_name == os.uname().machine
        assert ".text" in elf.section_sizes()
        elf.dynamic()
    with open_elf(root, str(tmp_path / "missing")) as missing:
        assert missing is None


@pytest.mark.skipif(not (shutil.which("gcc") and shutil.which("readelf")), reason="needs gcc and readelf")
def test_a_linked_library_reads_as_readelf_says(tmp_path: Path) -> None:
    library = tmp_path / "libx.so"
    subprocess.run(
        [
            "gcc",
            "-shared",
            "-o",
            str(library),
            "-xc",
            "/dev/null",
            "-Wl,-soname,libx.so.3,--no-as-needed,-rpath,$ORIGIN/../lib",
            "-lm",
        ],
        check=True,
    )
    with open_elf(HostRoot("/"), str(library)) as elf:
        assert elf is not None
        dynamic = elf.dynamic()
    said = subprocess.run(["readelf", "-d", str(library)], check=True, capture_output=True, text=True).stdout
    assert dynamic is not None
    assert dynamic.soname == "libx.so.3"
    assert "libm.so.6" in dynamic.needed
    assert all(f"[{name}]" in said for name in dynamic.needed)
    assert (dynamic.runpath or dynamic.rpath) == "$ORIGIN/../lib"


def test_what_is_no_regular_file_is_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in ("/fifo", "/"):
        with pytest.raises((ElfError, CannotObserve)), open_elf(HostRoot(str(tmp_path)), path):
            pass

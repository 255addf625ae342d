"""fabric_manager.libraries, host.loader_cache: whether the dynamic loader will find everything."""

import os
import platform
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import _elf as build
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fmsupervisor.conditions import Code
from fmsupervisor.fabric_manager.libraries import resolve_libraries
from fmsupervisor.host.loader_cache import cached_libraries, configured_directories
from fmsupervisor.host.root import HostRoot

BINARY = "/nv/usr/bin/nv-fabricmanager"
PATHS = ("/nv/usr/lib64", "/nv/usr/lib")


class Host:
    """A directory with programs and libraries."""

    def __init__(self, directory: Path) -> None:
        self.root = HostRoot(str(directory))

    def write(self, path: str, content: bytes) -> None:
        real = Path(self.root.path(path))
        real.parent.mkdir(parents=True, exist_ok=True)
        real.write_bytes(content)

    def link(self, path: str, target: str) -> None:
        real = Path(self.root.path(path))
        real.parent.mkdir(parents=True, exist_ok=True)
        real.symlink_to(target)

    def resolve(self, *programs: str) -> tuple[list[str], list[tuple[Code, str]]]:
        """Paths found, and what is missing."""
        libraries = resolve_libraries(self.root, programs or (BINARY,), PATHS)
        return list(libraries.paths), [(problem.code, problem.detail) for problem in libraries.problems]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def cache(entries: dict[str, str]) -> bytes:
    """An ld.so.cache of the new format."""
    strings, offsets = b"", []
    start = 48 + 24 * len(entries)
    for name, path in entries.items():
        offsets.append((start + len(strings), start + len(strings) + len(name) + 1))
        strings += name.encode() + b"\0" + path.encode() + b"\0"
    header = b"glibc-ld.so.cache1.1" + struct.pack("<IIB3xI12x", len(entries), len(strings), 2, 0)
    return header + b"".join(struct.pack("<iIIIQ", 0x303, *offset, 0, 0) for offset in offsets) + strings


def test_libraries_are_followed_to_the_last(host: Host) -> None:
    host.write(BINARY, build.shared_object(["liba.so.1", "libc.so.6"]))
    host.write("/nv/usr/lib64/liba.so.1", build.shared_object(["libb.so.2", "libc.so.6"], soname="liba.so.1"))
    host.write("/nv/usr/lib/libb.so.2", build.shared_object(["liba.so.1"]))
    host.write("/lib64/libc.so.6", build.shared_object())
    assert host.resolve() == (["/nv/usr/lib64/liba.so.1", "/lib64/libc.so.6", "/nv/usr/lib/libb.so.2"], [])


def test_a_missing_library_is_named_with_what_needs_it(host: Host) -> None:
    host.write(BINARY, build.shared_object(["libz.so.1"]))
    libraries = resolve_libraries(host.root, [BINARY], PATHS)
    assert [(p.code, p.subject, p.detail) for p in libraries.problems] == [
        (Code.LIBRARY_MISSING, "libz.so.1", f"libz.so.1, needed by {BINARY}")
    ]


def test_a_library_missing_twice_is_named_once(host: Host) -> None:
    host.write(BINARY, build.shared_object(["libz.so.1"]))
    host.write("/nv/usr/lib64/libnvidia-nscq.so.2", build.shared_object(["libz.so.1", "libq.so"]))
    _, missing = host.resolve(BINARY, "/nv/usr/lib64/libnvidia-nscq.so.2")
    assert [detail.split(",")[0] for _, detail in missing] == ["libz.so.1", "libq.so"]


@pytest.mark.parametrize(
    "content", [b"#!/bin/sh\n", b"", b"\x7fELF\x02\x01", None], ids=["script", "empty", "cut", "none"]
)
def test_a_program_that_is_no_elf_file_is_not_checked(host: Host, content: bytes | None) -> None:
    if content is not None:
        host.write(BINARY, content)
    assert host.resolve() == ([], [])


@pytest.mark.parametrize(
    ("usable", "unusable"),
    [
        pytest.param(True, build.shared_object(machine=build.AARCH64), id="another machine, passed over"),
        pytest.param(True, b"\x7fELF\x01\x01\x01" + bytes(60), id="32-bit, passed over"),
        pytest.param(False, build.shared_object(machine=build.AARCH64), id="another machine, the only one"),
        pytest.param(False, b"INPUT(-lz)", id="a linker script, the only one"),
        pytest.param(False, build.shared_object(["x"])[:90], id="truncated, the only one"),
    ],
)
def test_only_a_usable_file_counts(host: Host, usable: bool, unusable: bytes) -> None:
    host.write(BINARY, build.shared_object(["libz.so.1"]))
    host.write("/nv/usr/lib64/libz.so.1", unusable)
    if usable:
        host.write("/usr/lib64/libz.so.1", build.shared_object())
    paths, missing = host.resolve()
    assert paths == (["/usr/lib64/libz.so.1"] if usable else [])
    assert all("(/nv/usr/lib64/libz.so.1" in detail for _, detail in missing)
    assert bool(missing) is not usable


@pytest.mark.parametrize(
    ("program", "where"),
    [
        pytest.param({"runpath": "$ORIGIN/../lib/private"}, "/nv/usr/lib/private", id="RUNPATH with $ORIGIN"),
        pytest.param({"rpath": "${ORIGIN}/lib"}, "/nv/usr/bin/lib", id="RPATH with ${ORIGIN}"),
        pytest.param({"runpath": "/opt/$LIB:/opt/x"}, "/opt/lib64", id="RUNPATH with $LIB"),
        pytest.param({}, "/lib/x86_64-linux-gnu", id="default directory"),
        pytest.param({}, "/opt/configured", id="directory of ld.so.conf"),
    ],
)
def test_every_place_of_the_loader_is_looked_at(host: Host, program: dict[str, str], where: str) -> None:
    host.write("/etc/ld.so.conf", b"include ld.so.conf.d/*.conf # all\n")
    host.write("/etc/ld.so.conf.d/x.conf", b"# comment\n/opt/configured\n")
    host.write(BINARY, build.shared_object(["libz.so.1"], **program))
    host.write(f"{where}/libz.so.1", build.shared_object())
    paths, missing = host.resolve()
    assert missing == []
    assert [os.path.normpath(path) for path in paths] == [f"{where}/libz.so.1"]


def test_rpath_comes_before_and_runpath_after_the_library_paths(host: Host) -> None:
    host.write("/nv/usr/lib64/libz.so.1", build.shared_object())
    host.write("/own/libz.so.1", build.shared_object())
    for option, expected in (("rpath", "/own"), ("runpath", "/nv/usr/lib64")):
        host.write(BINARY, build.shared_object(["libz.so.1"], **{option: "/own"}))
        assert host.resolve()[0] == [f"{expected}/libz.so.1"]


def test_rpath_is_inherited_and_runpath_is_not(host: Host) -> None:
    host.write("/own/liba.so", build.shared_object(["libb.so"]))
    host.write("/own/libb.so", build.shared_object())
    host.write(BINARY, build.shared_object(["liba.so"], rpath="/own"))
    assert host.resolve()[1] == []
    host.write(BINARY, build.shared_object(["liba.so"], runpath="/own"))
    assert [detail for _, detail in host.resolve()[1]] == ["libb.so, needed by /own/liba.so"]


def test_links_are_followed_inside_the_tree(host: Host) -> None:
    host.write(BINARY, build.shared_object(["libz.so.1"]))
    host.write("/store/libz.so.1.3", build.shared_object())
    host.link("/nv/usr/lib64/libz.so.1", "/store/libz.so.1.3")
    assert host.resolve()[1] == []


def test_a_missing_dynamic_loader_is_named(host: Host) -> None:
    host.write(BINARY, build.shared_object(interpreter="/lib64/ld-linux-x86-64.so.2"))
    assert host.resolve()[1] == [(Code.LIBRARY_MISSING, f"/lib64/ld-linux-x86-64.so.2, the dynamic loader of {BINARY}")]


class TestLoaderCache:
    def test_leads_to_libraries_in_other_directories(self, host: Host) -> None:
        host.write(BINARY, build.shared_object(["libz.so.1"]))
        host.write("/opt/z/libz.so.1", build.shared_object())
        host.write("/etc/ld.so.cache", cache({"libz.so.1": "/opt/z/libz.so.1", "libq.so": "/opt/libq.so"}))
        assert host.resolve() == (["/opt/z/libz.so.1"], [])

    def test_follows_an_old_format_header(self, host: Host) -> None:
        host.write("/etc/ld.so.cache", b"ld.so-1.7.0\0" + bytes(20) + cache({"libz.so.1": "/opt/libz.so.1"}))
        assert cached_libraries(host.root) == {"libz.so.1": ("/opt/libz.so.1",)}

    @settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.binary(max_size=200))
    def test_of_any_content_is_harmless(self, host: Host, tail: bytes) -> None:
        for content in (tail, b"glibc-ld.so.cache1.1" + tail):
            host.write("/etc/ld.so.cache", content)
            cached_libraries(host.root)

    @pytest.mark.skipif(not os.path.exists("/etc/ld.so.cache"), reason="needs glibc's ldconfig")
    def test_of_this_machine_names_libc(self) -> None:
        assert "libc.so.6" in cached_libraries(HostRoot("/"))


def test_a_name_too_long_for_any_file_is_a_missing_library(host: Host) -> None:
    host.write(BINARY, build.shared_object(["a" * 300 + ".so"]))
    found, missing = host.resolve()
    assert (found, [code for code, _ in missing]) == ([], [Code.LIBRARY_MISSING])


def test_ld_so_conf_that_includes_itself_ends(host: Host) -> None:
    host.write("/etc/ld.so.conf", b"include /etc/ld.so.conf\n/opt/a\n/opt/a\nrelative\n")
    assert configured_directories(host.root) == ("/opt/a",)


@pytest.mark.skipif(not shutil.which("ldd"), reason="needs ldd")
def test_this_interpreter_needs_what_ldd_says() -> None:
    python = os.path.realpath(sys.executable)
    said = subprocess.run(["ldd", python], check=False, capture_output=True, text=True)
    if said.returncode or platform.libc_ver()[0] != "glibc":
        pytest.skip("a static interpreter or another libc")
    names = {os.path.basename(line.split()[0]) for line in said.stdout.splitlines() if line.strip()}
    libraries = resolve_libraries(HostRoot("/"), [python], ())
    assert libraries.problems == ()
    assert {os.path.basename(path).split(".so")[0] for path in libraries.paths} <= {
        name.split(".so")[0] for name in names
    }

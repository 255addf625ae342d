"""Hundreds of modules of a real kernel, plain and compressed: modinfo(8) and modprobe(8) judge what is read of them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, os.path.dirname(__file__))

from _kernel_package import COMPRESSORS, NotHere, kernel_modules

from fmsupervisor.checks.symbol_versions import module_symbols
from fmsupervisor.host.elf import Elf
from fmsupervisor.host.module_file import ModuleFile, Signature, decompress, read_module
from fmsupervisor.host.root import HostRoot

ROOT = HostRoot("/")
KINDS = {"": "", ".xz": "xz", ".zst": "zstd", ".gz": "gzip"}
FIELDS = ("name", "version", "vermagic", "depends", "softdep", "supported", "signed", "parmtype")


@pytest.fixture(scope="session")
def modules() -> list[Path]:
    try:
        return kernel_modules()
    except NotHere as reason:
        pytest.skip(str(reason))


def modinfo(paths: list[Path], *options: str) -> list[str]:
    """Everything that modinfo prints, entry by entry."""
    command = ["modinfo", "-0", *options, *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]


@pytest.fixture(scope="session")
def judgement(modules: list[Path]) -> dict[str, dict[str, list[str]]]:
    """What modinfo says of each module: file name to field to values."""
    said: dict[str, dict[str, list[str]]] = {}
    current: dict[str, list[str]] = {}
    for entry in modinfo(modules):
        if entry.startswith("filename:"):
            current = said[os.path.basename(entry)] = {field: [] for field in FIELDS}
        key, _, value = entry.partition("=")
        if key in current:
            current[key].append(value.strip())
        elif key in ("sig_id", "signer"):
            current["signed"] = ["yes"]
    for path in modules:  # of parameters modinfo shows the types apart from the rest only when asked for nothing else
        said[path.name]["parmtype"] = modinfo([path], "-F", "parmtype") if b"parmtype=" in path.read_bytes() else []
    return said


def in_modinfos_words(module: ModuleFile) -> dict[str, list[str]]:
    """The same fields of our reading."""

    def known(value: str | None) -> list[str]:
        return [] if value is None else [value]

    return {
        "name": [module.name],
        "version": known(module.version),
        "vermagic": known(module.vermagic),
        "depends": [",".join(module.depends)],
        "softdep": list(module.softdeps),
        "supported": known(module.supported),
        "signed": ["yes"] if module.signature is Signature.PKCS7 else [],
        "parmtype": list(module.parameters),
    }


@pytest.mark.parametrize("suffix", KINDS, ids=lambda suffix: KINDS[suffix] or "plain")
def test_every_field_is_what_modinfo_says(modules, judgement, suffix: str) -> None:
    assert len(modules) >= 500
    for path in modules:
        module = read_module(ROOT, f"{path}{suffix}")
        expected = dict(judgement[path.name])
        expected["parmtype"] = [value.partition(":")[0] for value in expected["parmtype"]]
        assert in_modinfos_words(module) == expected, path.name
        assert module.compression == KINDS[suffix]
        assert module.size_bytes == path.stat().st_size


def test_the_judgement_has_something_to_say_in_every_field(judgement) -> None:
    """A field that no module has would be judged by nobody; ``supported`` is SUSE's."""
    seen = {field for fields in judgement.values() for field, values in fields.items() if values}
    assert seen == set(FIELDS) - {"supported"}


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_decompressing_gives_every_byte_back(modules, suffix: str) -> None:
    """The signature covers the uncompressed file."""
    for path in modules[::10]:
        assert decompress(ROOT, f"{path}{suffix}") == path.read_bytes(), path.name


def symbol_versions(path: Path) -> Iterator[tuple[str, int]]:
    command = ["modprobe", "--dump-modversions", str(path)]
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        crc, name = line.split()
        yield name, int(crc, 16)


@pytest.mark.parametrize("suffix", ["", ".xz"], ids=["plain", "xz"])
def test_symbol_versions_are_what_modprobe_says(modules, suffix: str) -> None:
    for path in modules[::5]:
        expected = dict(symbol_versions(path))
        assert expected, path.name
        assert module_symbols(ROOT, f"{path}{suffix}") == expected, path.name
        assert read_module(ROOT, str(path)).has_modversions


def test_without_its_signature_a_module_is_not_signed(modules, tmp_path: Path) -> None:
    for path in modules[::50]:
        stripped = tmp_path / path.name
        stripped.write_bytes(path.read_bytes())
        subprocess.run(["strip", "--strip-debug", stripped], check=True)
        assert modinfo([stripped], "-F", "signer") == []
        assert read_module(ROOT, str(stripped)).signature is Signature.NONE
        assert Elf.from_bytes(stripped.read_bytes()).section(".modinfo") is not None

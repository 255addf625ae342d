"""/lib/modules/<release>: which modules the running kernel has, as depmod(8) wrote it down.

Sources: modules.dep and modules.builtin (kmod's depmod.c, modules.dep(5)). Paths in them are relative to the
directory, absolute in old ones. All of it may be missing on a host whose image was stripped; then it is just empty.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fmsupervisor.errors import CannotObserve
from fmsupervisor.host.module_file import ModuleFile, ModuleFileError, module_name, read_module
from fmsupervisor.host.root import HostRoot

MODULE_DIRECTORIES = ("/lib/modules", "/usr/lib/modules")

_INDEX_LIMIT_BYTES = 32 << 20  # Ubuntu's modules.dep is about 1 MB
_IN_TREE_CANDIDATES = 64


@dataclass(frozen=True, slots=True)
class ModuleIndex:
    """The modules of one kernel release, by name with "_"."""

    directory: str  # logical, /lib/modules/<release>
    files: Mapping[str, str]  # logical paths by name, from modules.dep
    builtin: frozenset[str]


def read_index(root: HostRoot, directory: str) -> ModuleIndex:
    """What depmod wrote into the directory; empty when it is not there or cannot be read."""
    files: dict[str, str] = {}
    for line in _lines(root, f"{directory}/modules.dep"):
        path, separator, _ = line.partition(":")
        if separator:
            files.setdefault(module_name(path), os.path.join(directory, path.strip()))
    builtin = frozenset(module_name(line.strip()) for line in _lines(root, f"{directory}/modules.builtin"))
    return ModuleIndex(directory, files, builtin)


def running_index(root: HostRoot, kernel_release: str) -> ModuleIndex:
    """The index of the running kernel, from the first directory that has one."""
    indexes = (read_index(root, f"{directory}/{kernel_release}") for directory in MODULE_DIRECTORIES)
    found = [index for index in indexes if index.files or index.builtin]
    return found[0] if found else ModuleIndex(f"{MODULE_DIRECTORIES[0]}/{kernel_release}", {}, frozenset())


def in_tree_module(root: HostRoot, index: ModuleIndex) -> ModuleFile | None:
    """A small module that came with the kernel itself: its vermagic is the kernel's own. None when there is none."""
    below = f"{index.directory}/kernel/"
    in_tree = [path for path in index.files.values() if path.startswith(below)][:_IN_TREE_CANDIDATES]
    for _, path in sorted(_with_sizes(root, in_tree or _few_modules(root, below.rstrip("/"), depth=5))):
        try:
            found = read_module(root, path)
        except (ModuleFileError, CannotObserve):
            continue
        if found.vermagic:
            return found
    return None


def _with_sizes(root: HostRoot, paths: list[str]) -> Iterator[tuple[int, str]]:
    for path in paths:
        try:
            status = root.status(path)
        except CannotObserve:
            continue
        if status is not None:
            yield status.st_size, path


def _few_modules(root: HostRoot, directory: str, depth: int) -> list[str]:
    """The modules of the first directory, depth first, that has some."""
    try:
        names = root.list_directory(directory) or []
        modules = [f"{directory}/{name}" for name in names if ".ko" in name][:_IN_TREE_CANDIDATES]
        if modules or depth == 0:
            return modules
        for name in names:
            if root.is_directory(f"{directory}/{name}") and (
                found := _few_modules(root, f"{directory}/{name}", depth - 1)
            ):
                return found
    except CannotObserve:
        pass
    return []


def _lines(root: HostRoot, path: str) -> list[str]:
    try:
        return (root.read_text(path, _INDEX_LIMIT_BYTES) or "").splitlines()
    except CannotObserve:
        return []

"""Whether the dynamic loader will find every library of Fabric Manager and NSCQ, without running anything.

The files' own DT_NEEDED entries are followed as ld.so(8) does: DT_RPATH (when there is no DT_RUNPATH),
LD_LIBRARY_PATH, DT_RUNPATH, /etc/ld.so.cache, the default directories; a library of another machine or class is
passed over. ldd(1) is not used: it executes the program. Subdirectories for processor variants (glibc-hwcaps) are not
looked at: a library that is only there does not exist in practice. A program that is no ELF file (a script) needs
nothing.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fmsupervisor.conditions import Code
from fmsupervisor.errors import CannotObserve
from fmsupervisor.facts import Problem
from fmsupervisor.host.elf import Dynamic, ElfError, open_elf
from fmsupervisor.host.loader_cache import DEFAULT_DIRECTORIES, cached_libraries, configured_directories
from fmsupervisor.host.root import HostRoot
from fmsupervisor.host.trusted_path import resolve

_MOST_LIBRARIES = 512  # Fabric Manager needs about ten


@dataclass(frozen=True, slots=True)
class Libraries:
    """Everything that would be loaded, and what is missing."""

    paths: tuple[str, ...]  # logical paths of the libraries found, as the loader opens them, in breadth-first order
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class _Object:
    """A program or library that is looked at."""

    path: str
    machine: int
    dynamic: Dynamic
    rpath: tuple[str, ...]  # its own DT_RPATH and those of what led to it


def resolve_libraries(root: HostRoot, programs: Sequence[str], library_paths: Sequence[str]) -> Libraries:
    """Resolve the libraries of programs that share one process (Fabric Manager, and NSCQ, which it opens itself)."""
    return _Loader(root, tuple(library_paths)).run(programs)


def host_directories(root: HostRoot) -> tuple[str, ...]:
    """The directories of the host that hold libraries, whatever the loader's cache says."""
    return tuple(dict.fromkeys((*configured_directories(root), *DEFAULT_DIRECTORIES)))


@dataclass(slots=True)
class _Loader:
    root: HostRoot
    library_paths: tuple[str, ...]
    found: dict[str, str | None] = field(default_factory=dict)  # path by the name asked for
    problems: list[Problem] = field(default_factory=list)
    cache: Mapping[str, tuple[str, ...]] | None = None

    def run(self, programs: Sequence[str]) -> Libraries:
        waiting = [loaded for path in programs if (loaded := self._program(path))]
        while waiting and len(self.found) < _MOST_LIBRARIES:
            needing = waiting.pop(0)
            for name in needing.dynamic.needed:
                if name in self.found:
                    continue
                library = self._find(name, needing)
                self.found[name] = None if library is None else library.path
                if library is not None:
                    waiting.append(library)
        return Libraries(tuple(path for path in self.found.values() if path), tuple(self.problems))

    def _program(self, path: str) -> _Object | None:
        """A starting point; None when there is nothing to follow."""
        try:
            real = resolve(self.root, path)
            program = None if real is None else self._open(real, ())
            interpreter = None if program is None else program.dynamic.interpreter
            is_loader_missing = interpreter is not None and resolve(self.root, interpreter) is None
        except (ElfError, CannotObserve):
            return None
        if interpreter is not None and is_loader_missing:
            self.problems.append(
                Problem(Code.LIBRARY_MISSING, f"{interpreter}, the dynamic loader of {path}", interpreter)
            )
        return program

    def _open(self, path: str, inherited_rpath: tuple[str, ...]) -> _Object | None:
        """None when there is no such file. Raises ``ElfError`` and ``CannotObserve``."""
        with open_elf(self.root, path) as elf:
            if elf is None:
                return None
            dynamic = elf.dynamic() or Dynamic((), None, None, None, None)
            own = () if dynamic.runpath is not None else _expand(dynamic.rpath, os.path.dirname(path))
            return _Object(path, elf.machine, dynamic, own + inherited_rpath)

    def _find(self, name: str, needing: _Object) -> _Object | None:
        unusable = ""
        for candidate in self._candidates(name, needing):
            try:
                real = resolve(self.root, candidate)
                if real is None:
                    continue
                library = self._open(real, needing.rpath)
            except (ElfError, CannotObserve) as error:
                unusable = unusable or f" ({candidate}: {error})"
                continue
            if library is not None and library.machine == needing.machine:
                return library
            unusable = unusable or f" ({candidate} is for another machine)"
        self.problems.append(Problem(Code.LIBRARY_MISSING, f"{name}, needed by {needing.path}{unusable}", name))
        return None

    def _candidates(self, name: str, needing: _Object) -> Iterator[str]:
        """Where the loader would look, in its order."""
        if "/" in name:
            yield os.path.join("/", name)
            return
        if needing.dynamic.runpath is None:
            yield from (f"{directory}/{name}" for directory in needing.rpath)
        yield from (f"{directory}/{name}" for directory in self.library_paths)
        yield from (
            f"{directory}/{name}" for directory in _expand(needing.dynamic.runpath, os.path.dirname(needing.path))
        )
        if self.cache is None:
            self.cache = cached_libraries(self.root)
        yield from self.cache.get(name, ())
        directories = DEFAULT_DIRECTORIES if self.cache else host_directories(self.root)
        yield from (f"{directory}/{name}" for directory in directories)


def _expand(search_path: str | None, origin: str) -> tuple[str, ...]:
    """The absolute directories of a DT_RPATH or DT_RUNPATH; ``$LIB`` is taken as lib64."""
    directories = []
    for entry in (search_path or "").split(":"):
        directory = entry.replace("${ORIGIN}", origin).replace("$ORIGIN", origin)
        directory = directory.replace("${LIB}", "lib64").replace("$LIB", "lib64")
        if directory.startswith("/"):
            directories.append(directory)
    return tuple(directories)

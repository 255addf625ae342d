"""Which nvidia.ko to load, and why this one.

The tree may hold builds for several kernels, none of them for the running one. Order of preference: the running
release itself, the nearest older build of its family, and a newer one only when the settings allow that (see
kernel_release). Within one release the file is taken that modprobe would take: the one in modules.dep, else by
depmod's default order ``updates extra weak-updates kernel``. A compressed file is preferred to a plain one of the
same name beside it: the package brought the compressed one, and somebody may have unpacked the other by hand from an
earlier version.

What the kernel would refuse is found before it is asked: the flags of vermagic are compared with those of an in-tree
module (the kernel does not export its own), the release only when the module has no symbol versions
(kernel/module/version.c, ``same_magic``). ``depends=`` is resolved from the files themselves, since loading by path
does not go through modprobe.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fmsupervisor.conditions import Code
from fmsupervisor.errors import CannotObserve
from fmsupervisor.facts import ModuleChoice, Problem
from fmsupervisor.host.kernel_release import Candidate, Verdict, consider
from fmsupervisor.host.module_file import SUFFIXES, ModuleFile, ModuleFileError, module_name, read_module
from fmsupervisor.host.module_index import ModuleIndex, in_tree_module, read_index, running_index
from fmsupervisor.host.root import HostRoot
from fmsupervisor.host.trusted_path import resolve
from fmsupervisor.settings import Settings

MODULE_NAME = "nvidia"

_PRECEDENCE = ("updates", "extra", "weak-updates", "kernel")  # depmod.d(5); "built-in" is "kernel"
_COMPRESSED_FIRST = (".ko.zst", ".ko.xz", ".ko.gz", ".ko")
_DEEPEST = 8  # kernel/drivers/gpu/drm/nvidia/... is 5
_MOST_DIRECTORIES = 4096
_MOST_NAMED = 8  # of the builds that a sentence names


@dataclass(frozen=True, slots=True)
class Selected:
    """A module file before it is judged."""

    path: str  # logical, where it was found
    release: str  # of the directory it was found in
    reason: str


def choose_module(root: HostRoot, settings: Settings, kernel_release: str) -> ModuleChoice | Problem:
    """The nvidia.ko to load on the running kernel with everything it needs, or why there is none."""
    selected = select_module(root, settings, kernel_release)
    if isinstance(selected, Problem):
        return selected
    try:
        file = read_module(root, selected.path)
        index = running_index(root, kernel_release)
        refusal = judge_vermagic(file, kernel_release, in_tree_module(root, index))
        if refusal:
            return Problem(Code.MODULE_VERMAGIC, f"{selected.path}: {refusal}")
        depends = _Dependencies(root, index, selected.path).resolve(file)
    except (ModuleFileError, CannotObserve) as error:
        return Problem(Code.MODULE_DAMAGED, f"{selected.path}: {error}")
    return depends if isinstance(depends, Problem) else replace(as_choice(selected, file), depends=depends)


def as_choice(selected: Selected, file: ModuleFile) -> ModuleChoice:
    """The choice without its dependencies."""
    return ModuleChoice(
        path=selected.path,
        kernel_release=file.kernel_release or selected.release,
        version=file.version or "",
        depends=(),
        reason=selected.reason,
    )


def select_module(root: HostRoot, settings: Settings, kernel_release: str) -> Selected | Problem:
    """The module file for the running kernel by the names of directories and files alone."""
    search_path = settings.module.search_path.rstrip("/")
    try:
        names = root.list_directory(search_path) or []
        if settings.layout == "packaged":
            names = [kernel_release] if kernel_release in names else []
        builds = {name: path for name in names if (path := find_module_file(root, f"{search_path}/{name}"))}
    except CannotObserve as error:
        return Problem(Code.MODULE_NOT_FOUND, str(error))
    candidates = consider(kernel_release, builds, allow_newer=settings.module.allow_newer_build)
    if not candidates:
        where = (
            f"{search_path}/{kernel_release}" if settings.layout == "packaged" else f"{search_path}/<kernel release>"
        )
        return Problem(Code.MODULE_NOT_FOUND, f"there is no nvidia.ko below {where} (running kernel: {kernel_release})")
    best = candidates[0]
    if best.verdict is Verdict.NEWER and not settings.module.allow_newer_build:
        return Problem(Code.MODULE_TOO_NEW, f"running kernel {kernel_release}; {_listing(candidates)}")
    if best.verdict is Verdict.OTHER_FAMILY:
        return Problem(Code.MODULE_NOT_FOUND, f"running kernel {kernel_release}; {_listing(candidates)}")
    return Selected(builds[best.release], best.release, explain(kernel_release, candidates))


def explain(kernel_release: str, candidates: Sequence[Candidate]) -> str:
    """Why the first candidate was chosen, and what became of the others."""
    best = candidates[0]
    if best.verdict is Verdict.EXACT:
        reason = f"built for the running {kernel_release}"
    else:
        reason = f"built for {best.release}: {best.reason.removeprefix('is ')}"
        reason = reason.replace("the same family", f"the same family as the running {kernel_release}", 1)
    return "; ".join((reason, *([_listing(candidates[1:])] if len(candidates) > 1 else [])))


def find_module_file(root: HostRoot, directory: str) -> str | None:
    """nvidia.ko below the directory of one release: the one that modprobe would load.

    Raises ``CannotObserve``.
    """
    listed = read_index(root, directory).files.get(MODULE_NAME)
    if listed is not None and (found := _existing_file(root, listed)):
        return found
    found_files = [path for path in _search(root, directory) if _existing_file(root, path)]
    best = min(found_files, key=lambda path: _precedence(path.removeprefix(directory)), default=None)
    return best and _existing_file(root, best)


def judge_vermagic(file: ModuleFile, kernel_release: str, in_tree: ModuleFile | None) -> str:
    """Why the kernel would refuse the module for its vermagic; "" when it would not, or when that cannot be told."""
    if not file.vermagic:
        return "it has no vermagic"
    if not file.has_modversions and file.kernel_release != kernel_release:
        return (
            f"built for {file.kernel_release} without symbol versions (modversions), "
            f"so only kernel {file.kernel_release} accepts it, and {kernel_release} is running"
        )
    if in_tree is not None and file.vermagic_flags != in_tree.vermagic_flags:
        return f"its vermagic flags are '{file.vermagic_flags}', those of the running kernel '{in_tree.vermagic_flags}'"
    return ""


class _Dependencies:
    """Resolves ``depends=`` into files, in the order in which they have to be loaded."""

    def __init__(self, root: HostRoot, index: ModuleIndex, module_path: str) -> None:
        self._root = root
        self._index = index
        self._beside = os.path.dirname(module_path)
        self._seen: set[str] = set()
        self._order: list[str] = []

    def resolve(self, file: ModuleFile) -> tuple[str, ...] | Problem:
        self._seen.add(file.name)
        for dependency in file.depends:
            problem = self._add(dependency.replace("-", "_"), file.name)
            if problem is not None:
                return problem
        return tuple(self._order)

    def _add(self, name: str, needed_by: str) -> Problem | None:
        if name in self._seen or name in self._index.builtin or self._is_live(name):
            return None
        self._seen.add(name)
        path = self._locate(name)
        if path is None:
            detail = f"{name}, needed by {needed_by}, is neither loaded nor below {self._index.directory}"
            return Problem(Code.MODULE_DEPENDENCY_MISSING, detail, subject=name)
        try:
            file = read_module(self._root, path)
        except (ModuleFileError, CannotObserve) as error:
            return Problem(Code.MODULE_DAMAGED, f"{path}, needed by {needed_by}: {error}", subject=name)
        for dependency in file.depends:
            problem = self._add(dependency.replace("-", "_"), name)
            if problem is not None:
                return problem
        self._order.append(path)
        return None

    def _is_live(self, name: str) -> bool:
        """Loaded and initialised, or built in (such a one has no initstate)."""
        state = self._root.read_text(f"/sys/module/{name}/initstate")
        return state.strip() == "live" if state is not None else self._root.is_directory(f"/sys/module/{name}")

    def _locate(self, name: str) -> str | None:
        listed = self._index.files.get(name)
        if listed is not None and (found := _existing_file(self._root, listed)):
            return found
        for beside in (self._beside, self._index.directory):
            for path in _search(self._root, beside, name):
                if found := _existing_file(self._root, path):
                    return found
        return None


def _search(root: HostRoot, directory: str, name: str = MODULE_NAME) -> list[str]:
    """All files of that module name below the directory; links to directories are not followed."""
    found = []
    waiting = [(directory, 0)]
    seen = 0
    while waiting and seen < _MOST_DIRECTORIES:
        current, depth = waiting.pop()
        seen += 1
        for entry in root.list_directory(current) or []:
            path = f"{current}/{entry}"
            if entry.endswith(SUFFIXES):
                if module_name(entry) == name:
                    found.append(path)
            elif depth < _DEEPEST and root.read_link(path) is None and root.is_directory(path):
                waiting.append((path, depth + 1))
    return sorted(found)


def _precedence(path: str) -> tuple[int, list[tuple[int, str]], int]:
    """Sort key of a path relative to the release's directory: the smallest is taken."""
    top = path.lstrip("/").split("/", 1)[0]
    place = _PRECEDENCE.index(top) if top in _PRECEDENCE else len(_PRECEDENCE)
    suffix = next(place for place, suffix in enumerate(_COMPRESSED_FIRST) if path.endswith(suffix))
    return place, _newest_first(os.path.dirname(path)), suffix


def _newest_first(text: str) -> list[tuple[int, str]]:
    """Sort key that puts the greater version number first: updates/nvidia-580.126 before updates/nvidia-570.211."""
    return [(-int(part[:18]), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", text)]


def _existing_file(root: HostRoot, path: str) -> str | None:
    """Where the file really is, links resolved in the tree; None when it is not there."""
    found = resolve(root, path)
    return found if found is not None and root.is_file(found) else None


def _listing(candidates: Sequence[Candidate]) -> str:
    named = [f"{candidate.release} {candidate.reason}" for candidate in candidates[:_MOST_NAMED]]
    if len(candidates) > _MOST_NAMED:
        named.append(f"and {len(candidates) - _MOST_NAMED} more")
    return "; ".join(named)

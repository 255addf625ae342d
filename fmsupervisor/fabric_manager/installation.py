"""What is installed: nvidia.ko, Fabric Manager, NSCQ, their libraries and versions, and what is wrong with them.

Nothing is loaded; the one program that runs is ``nv-fabricmanager --version``, and it is not run when somebody other
than root could have changed it.
"""

import os
import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fmsupervisor.conditions import Code
from fmsupervisor.errors import CannotObserve
from fmsupervisor.fabric_manager.installed_files import fingerprint_of, watched_paths
from fmsupervisor.fabric_manager.libraries import resolve_libraries
from fmsupervisor.fabric_manager.nscq import find_nscq
from fmsupervisor.fabric_manager.versions import printed_version
from fmsupervisor.facts import Installation, ModuleChoice, Problem
from fmsupervisor.host.module_file import ModuleFileError, read_module
from fmsupervisor.host.module_search import as_choice, choose_module, select_module
from fmsupervisor.host.root import HostRoot
from fmsupervisor.host.trusted_path import find_untrusted, resolve
from fmsupervisor.settings import Settings

__all__ = ["RunVersion", "VersionOutput", "fingerprint_of", "inspect"]

_EXECUTABLE = 0o111
_MISSING_LIBRARY = re.compile(r"error while loading shared libraries: (?P<library>[^:\s]+): cannot open shared object")
_LOADER_TROUBLE = re.compile(
    r"error while loading shared libraries|symbol lookup error|undefined symbol|version `[^']*' not found"
)


@dataclass(frozen=True, slots=True)
class VersionOutput:
    """What became of ``nv-fabricmanager --version``."""

    stdout: str
    stderr: str
    status: int | None  # exit status; None: it could not be executed, took too long, or a signal ended it
    failure: str = ""  # why there is no exit status: "took longer than 10 s"


RunVersion = Callable[[list[str], dict[str, str], float], VersionOutput]
"""Runs a command (real paths) with exactly this environment for at most so many seconds; never raises."""


def inspect(
    root: HostRoot, settings: Settings, kernel_release: str, run_version: RunVersion, *, user: int | None = None
) -> Installation:
    """Look at everything that is installed. ``user``: who, besides root, may own the files (default: this process)."""
    owner = os.geteuid() if user is None else user
    fingerprint = fingerprint_of(root, settings)
    will_be_loaded = settings.module.load and not _is_module_live(root)
    module, module_problems = _module(root, settings, kernel_release, owner, will_be_loaded=will_be_loaded)
    nscq_path, nscq_version, nscq_problems = _nscq(root, settings, owner)
    binary_problems = _binary(root, settings, owner)
    programs = [path for path in (settings.fabric_manager.binary, nscq_path) if path is not None]
    libraries = resolve_libraries(root, programs, settings.fabric_manager.library_paths)
    library_problems = [*libraries.problems, *_insecure(root, libraries.paths, owner)]
    version, version_troubles = None, list[Problem]()
    if not any(problem.code in _NOT_TO_BE_RUN for problem in (*binary_problems, *nscq_problems, *library_problems)):
        version, version_troubles = _fabric_manager_version(root, settings, run_version)
    problems = [
        *module_problems,
        *binary_problems,
        *nscq_problems,
        *library_problems,
        *version_troubles,
        *_files(root, settings),
    ]
    return Installation(
        module=module,
        fabric_manager_version=version,
        nscq_version=nscq_version,
        problems=_distinct(problems),
        fingerprint=fingerprint,
        watched_paths=watched_paths(root, settings),
        is_module_checked=will_be_loaded,
    )


_NOT_TO_BE_RUN = frozenset({Code.FABRIC_MANAGER_MISSING, Code.INSECURE_FILE})


def _module(
    root: HostRoot, settings: Settings, kernel_release: str, owner: int, *, will_be_loaded: bool
) -> tuple[ModuleChoice | None, list[Problem]]:
    """The module file; when nothing will be loaded, its version is all that counts and nothing is wrong with it."""
    if not will_be_loaded:
        selected = select_module(root, settings, kernel_release)
        if isinstance(selected, Problem):
            return None, []
        try:
            return as_choice(selected, read_module(root, selected.path)), []
        except (ModuleFileError, CannotObserve):
            return None, []
    choice = choose_module(root, settings, kernel_release)
    if isinstance(choice, Problem):
        return None, [choice]
    insecure = _insecure(root, (*choice.depends, choice.path), owner)
    if insecure:
        return None, insecure
    if not choice.version:
        return choice, [Problem(Code.VERSION_UNREADABLE, f"{choice.path} has no version=", choice.path)]
    return choice, []


def _distinct(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """The first of those that are one condition: the same file may be found wanting twice."""
    first: dict[tuple[Code, str], Problem] = {}
    for problem in problems:
        first.setdefault((problem.code, problem.subject), problem)
    return tuple(first.values())


def _is_module_live(root: HostRoot) -> bool:
    try:
        return (root.read_text("/sys/module/nvidia/initstate") or "").strip() == "live"
    except CannotObserve:
        return False


def _binary(root: HostRoot, settings: Settings, owner: int) -> list[Problem]:
    path = settings.fabric_manager.binary
    insecure = _insecure(root, (path, *settings.fabric_manager.library_paths), owner)
    try:
        real = resolve(root, path)
        status = None if real is None else root.status(real)
        if status is None or not stat.S_ISREG(status.st_mode):
            return [Problem(Code.FABRIC_MANAGER_MISSING, f"there is no file {path}"), *insecure]
        if not status.st_mode & _EXECUTABLE:
            return [Problem(Code.FABRIC_MANAGER_MISSING, f"{path} is not executable"), *insecure]
    except CannotObserve as error:
        return [Problem(Code.FABRIC_MANAGER_MISSING, str(error)), *insecure]
    return insecure


def _nscq(root: HostRoot, settings: Settings, owner: int) -> tuple[str | None, str | None, list[Problem]]:
    """Path, version and what is wrong with NSCQ."""
    try:
        found = find_nscq(root, settings.fabric_manager.library_paths)
    except CannotObserve as error:
        return None, None, [Problem(Code.NSCQ_MISSING, str(error))]
    if found is None:
        where = ", ".join(settings.fabric_manager.library_paths) or "the host's library directories"
        return None, None, [Problem(Code.NSCQ_MISSING, f"there is no libnvidia-nscq.so.* in {where}")]
    problems = _insecure(root, (found.path,), owner)
    if found.version is None:
        detail = f"{found.path}: neither its name nor its content tells the driver version"
        problems.append(Problem(Code.VERSION_UNREADABLE, detail, found.path))
    return found.path, found.version, problems


def _files(root: HostRoot, settings: Settings) -> list[Problem]:
    """The data files of Fabric Manager."""
    problems = []
    topology, stock = settings.fabric_manager.topology_path, settings.fabric_manager.stock_config
    try:
        if not root.list_directory(topology):
            problems.append(Problem(Code.TOPOLOGY_MISSING, f"{topology} is no directory with topology files"))
    except CannotObserve as error:
        problems.append(Problem(Code.TOPOLOGY_MISSING, str(error)))
    try:
        if not root.is_file(stock):
            problems.append(Problem(Code.STOCK_CONFIG_MISSING, f"there is no file {stock}"))
    except CannotObserve as error:
        problems.append(Problem(Code.STOCK_CONFIG_MISSING, str(error)))
    return problems


def _insecure(root: HostRoot, paths: Iterable[str], owner: int) -> list[Problem]:
    """One problem per path that others could change; a path that cannot be checked counts as such."""
    problems = []
    for path in paths:
        try:
            reason = find_untrusted(root, path, owner)
        except CannotObserve as error:
            reason = str(error)
        if reason is not None:
            detail = reason if reason.startswith(f"{path} ") else f"{path}: {reason}"
            problems.append(Problem(Code.INSECURE_FILE, detail, path))
    return problems


def _fabric_manager_version(
    root: HostRoot, settings: Settings, run_version: RunVersion
) -> tuple[str | None, list[Problem]]:
    """What nv-fabricmanager says of itself."""
    binary = settings.fabric_manager.binary
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
    if settings.fabric_manager.library_paths:
        environment["LD_LIBRARY_PATH"] = ":".join(root.path(path) for path in settings.fabric_manager.library_paths)
    command = [root.path(resolve(root, binary) or binary), "--version"]
    output = run_version(command, environment, settings.fabric_manager.version_timeout_seconds)
    version = printed_version(output.stdout) or printed_version(output.stderr)
    if version is not None and not _LOADER_TROUBLE.search(output.stderr):
        return version, []
    missing = _MISSING_LIBRARY.search(output.stderr)
    if missing is not None:
        detail = f"{missing['library']}, needed by {binary}"
        return None, [Problem(Code.LIBRARY_MISSING, detail, missing["library"])]
    last = next((line.strip() for line in reversed(output.stderr.splitlines()) if line.strip()), "")
    if _LOADER_TROUBLE.search(output.stderr):
        return None, [Problem(Code.LOADER_ERROR, f"{binary}: {last}")]
    outcome = output.failure or f"exit status {output.status}"
    detail = f"{binary} --version: {outcome}" + (f": {last}" if last else ", no version in its output")
    return None, [Problem(Code.VERSION_UNREADABLE, detail, binary)]

"""Which files decide what is installed: their fingerprint, and the directories to watch for a change.

The fingerprint is cheap (lstat only) and changes when a package is upgraded, a permission corrected, a missing
library added. Directories above a file count with owner and mode only: their times change whenever Fabric Manager
writes its log.
"""

import hashlib
import os
import stat
from collections.abc import Iterator
from itertools import islice

from fmsupervisor.errors import CannotObserve
from fmsupervisor.fabric_manager.libraries import host_directories
from fmsupervisor.fabric_manager.nscq import nscq_files
from fmsupervisor.host.loader_cache import CACHE
from fmsupervisor.host.module_index import MODULE_DIRECTORIES
from fmsupervisor.host.module_search import find_module_file
from fmsupervisor.host.root import HostRoot
from fmsupervisor.host.trusted_path import walk
from fmsupervisor.settings import Settings

_MOST_ENTRIES = 1024  # of one directory
_WATCHED_DEPTH = 2  # below a release: updates/nvidia
_MOST_WATCHED = 256  # directories of one release


def fingerprint_of(root: HostRoot, settings: Settings) -> str:
    """Changes when a file that ``inspect`` looks at changes, appears or goes."""
    digest = hashlib.blake2b(digest_size=16)
    for path in _deciding_paths(root, settings):
        digest.update(f"{path}\0{_trace(root, path)}\0".encode("utf-8", "backslashreplace"))
    for directory in host_directories(root):
        digest.update(f"{directory}\0{_change_time(root, directory)}\0".encode())
    return digest.hexdigest()


def watched_paths(root: HostRoot, settings: Settings) -> tuple[str, ...]:
    """Directories in which a cure would show up; of one that is missing, the nearest directory above it."""
    fabric_manager, search_path = settings.fabric_manager, settings.module.search_path.rstrip("/")
    wanted = [
        os.path.dirname(fabric_manager.binary),
        *fabric_manager.library_paths,
        os.path.dirname(fabric_manager.stock_config),
        fabric_manager.topology_path,
        search_path,
        *(os.path.dirname(path) for path in _module_files(root, settings)),
        *(f"{search_path}/{name}" for name in _names(root, search_path)),
        *(path for release in _releases(root, settings) for path in islice(_below(root, release), _MOST_WATCHED)),
        *(directory for directory in host_directories(root) if _names(root, directory)),
        "/etc",
    ]
    return tuple(dict.fromkeys(existing for path in wanted if (existing := _nearest(root, path))))


def _deciding_paths(root: HostRoot, settings: Settings) -> Iterator[str]:
    fabric_manager, search_path = settings.fabric_manager, settings.module.search_path.rstrip("/")
    yield from (fabric_manager.binary, fabric_manager.stock_config, CACHE)
    for directory in fabric_manager.library_paths:
        yield directory
        yield from (f"{directory}/{name}" for name in _names(root, directory) if ".so" in name)
    yield from nscq_files(root, host_directories(root))
    yield fabric_manager.topology_path
    yield from (f"{fabric_manager.topology_path}/{name}" for name in _names(root, fabric_manager.topology_path))
    for name in _names(root, search_path):
        yield f"{search_path}/{name}"
    yield from _module_files(root, settings)
    for directory in MODULE_DIRECTORIES:
        for name in _names(root, directory):
            yield f"{directory}/{name}/modules.dep"
            yield f"{directory}/{name}/modules.builtin"


def _releases(root: HostRoot, settings: Settings) -> list[str]:
    """The directory of every release that may be chosen."""
    search_path = settings.module.search_path.rstrip("/")
    running = _running_release(root) if settings.layout == "packaged" else None
    return [f"{search_path}/{name}" for name in _names(root, search_path) if running in (None, name)]


def _module_files(root: HostRoot, settings: Settings) -> Iterator[str]:
    """The nvidia.ko of every release that may be chosen."""
    for release in _releases(root, settings):
        try:
            found = find_module_file(root, release)
        except CannotObserve:
            continue
        if found is not None:
            yield found


def _running_release(root: HostRoot) -> str:
    try:
        return (root.read_text("/proc/sys/kernel/osrelease") or "").strip()
    except CannotObserve:
        return ""


def _trace(root: HostRoot, path: str) -> str:
    """Everything on the way to the file that decides what it is and who may change it."""
    try:
        steps, end = walk(root, path)
    except CannotObserve as error:
        return error.reason
    parts = []
    for step in steps:
        status = step.status
        parts.append(f"{step.path} {status.st_dev} {status.st_ino} {status.st_mode:o} {status.st_uid} {status.st_gid}")
        if not stat.S_ISDIR(status.st_mode):
            parts.append(f"{status.st_size} {status.st_mtime_ns}")
    return "\n".join((*parts, str(end)))


def _change_time(root: HostRoot, directory: str) -> str:
    try:
        status = root.status(directory)
    except CannotObserve as error:
        return error.reason
    return "absent" if status is None else f"{status.st_dev} {status.st_ino} {status.st_mtime_ns}"


def _below(root: HostRoot, directory: str, depth: int = _WATCHED_DEPTH) -> Iterator[str]:
    """What is below a directory, without links: nvidia.ko may yet come to any of them."""
    for name in _names(root, directory):
        path = f"{directory}/{name}"
        if _is_directory(root, path):
            yield path
            if depth > 1:
                yield from _below(root, path, depth - 1)


def _is_directory(root: HostRoot, path: str) -> bool:
    try:
        status = root.status(path, follow_symlinks=False)
    except CannotObserve:
        return False
    return status is not None and stat.S_ISDIR(status.st_mode)


def _names(root: HostRoot, directory: str) -> list[str]:
    try:
        return (root.list_directory(directory) or [])[:_MOST_ENTRIES]
    except CannotObserve:
        return []


def _nearest(root: HostRoot, path: str) -> str | None:
    """The directory itself or the nearest one above it that exists."""
    while True:
        try:
            if root.is_directory(path):
                return path
        except CannotObserve:
            pass
        parent = os.path.dirname(path.rstrip("/")) or "/"
        if path == "/":
            return None
        path = parent

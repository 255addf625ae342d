"""Where the dynamic loader looks for libraries of the host: /etc/ld.so.cache and the default directories.

Sources: sysdeps/generic/dl-cache.h of glibc (format ``glibc-ld.so.cache1.1``, since 2.2, the only one written since
2.32), ld.so(8), ldconfig(8). Without a readable cache the directories of /etc/ld.so.conf stand in for it.
"""

import fnmatch
import os
import struct
from collections.abc import Mapping

from fmsupervisor.errors import CannotObserve
from fmsupervisor.host.root import HostRoot

CACHE = "/etc/ld.so.cache"
DEFAULT_DIRECTORIES = (
    "/lib64",
    "/usr/lib64",
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib",
    "/usr/lib",
)

_CACHE_LIMIT_BYTES = 16 << 20
_MAGIC = b"glibc-ld.so.cache1.1"
_HEADER_BYTES = 48
_ENTRY = struct.Struct("<iIIIQ")  # flags, name, path, OS version, hwcap; offsets from the magic
_LONGEST_PATH = 4096
_MOST_FILES = 256


def cached_libraries(root: HostRoot) -> Mapping[str, tuple[str, ...]]:
    """Paths by soname from the cache, in its order; empty when there is none that can be read."""
    try:
        content = root.read_bytes(CACHE, _CACHE_LIMIT_BYTES) or b""
    except CannotObserve:
        return {}
    start = content.find(_MAGIC)
    if start < 0:
        return {}
    content = content[start:]
    if len(content) < _HEADER_BYTES:
        return {}
    (count,) = struct.unpack_from("<I", content, len(_MAGIC))
    found: dict[str, tuple[str, ...]] = {}
    for number in range(min(count, (len(content) - _HEADER_BYTES) // _ENTRY.size)):
        _, name_at, path_at, _, _ = _ENTRY.unpack_from(content, _HEADER_BYTES + number * _ENTRY.size)
        name, path = _string(content, name_at), _string(content, path_at)
        if name and path.startswith("/"):
            found[name] = (*found.get(name, ()), path)
    return found


def configured_directories(root: HostRoot) -> tuple[str, ...]:
    """The directories of /etc/ld.so.conf and the files that it includes, in order."""
    directories: list[str] = []
    waiting = ["/etc/ld.so.conf"]
    seen: set[str] = set()  # a file may include itself
    while waiting and len(seen) < _MOST_FILES:
        path = waiting.pop(0)
        if path in seen:
            continue
        seen.add(path)
        for line in _lines(root, path):
            words = line.partition("#")[0].split()
            if not words:
                continue
            if words[0] == "include":
                waiting += [file for word in words[1:] for file in _matching(root, os.path.dirname(path), word)]
            elif words[0].startswith("/"):
                directories.append(words[0])
    return tuple(dict.fromkeys(directories))


def _matching(root: HostRoot, directory: str, pattern: str) -> list[str]:
    """The files that an include line means; only the last component may be a pattern."""
    parent, name = os.path.split(os.path.join(directory, pattern))
    try:
        names = root.list_directory(parent) or []
    except CannotObserve:
        return []
    return [f"{parent}/{found}" for found in fnmatch.filter(names, name)]


def _lines(root: HostRoot, path: str) -> list[str]:
    try:
        return (root.read_text(path) or "").splitlines()
    except CannotObserve:
        return []


def _string(content: bytes, offset: int) -> str:
    end = content.find(0, offset, offset + _LONGEST_PATH)
    return content[offset:end].decode("utf-8", "backslashreplace") if end > 0 else ""

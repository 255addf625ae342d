"""Reads files of a host for the report: a part of each, regular files only, and never outside of where they belong.

Symbolic links are followed as the host itself would (an absolute one starts at the root that is looked at), but the
file they lead to must lie below the directory named by the caller: a log that somebody replaced by a link to
/etc/shadow is refused, whoever asks. The resolved path is then opened one directory at a time without following links,
so that a link put there in between is refused as well.
"""

import errno
import os
import stat
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from fmsupervisor.errors import CannotObserve
from fmsupervisor.host.root import HostRoot

_LINKS = 40  # as the kernel's MAXSYMLINKS
_BLOCK_BYTES = 1 << 16
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENXIO)
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW
_STEP = os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECTORY


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A part of a file. ``is_cut``: there is more of it."""

    content: bytes
    is_cut: bool


def read_start(root: HostRoot, logical: str, within: str, limit_bytes: int) -> Excerpt | None:
    """The first bytes; None when there is no such file. Raises ``CannotObserve``."""
    descriptor = _open(root, logical, within)
    if descriptor is None:
        return None
    try:
        content = _read(descriptor, logical, limit_bytes + 1)
    finally:
        os.close(descriptor)
    if len(content) <= limit_bytes:
        return Excerpt(content, is_cut=False)
    return Excerpt(whole_words(content[:limit_bytes], at_end=True), is_cut=True)


def read_end(root: HostRoot, logical: str, within: str, limit_bytes: int) -> Excerpt | None:
    """The last bytes, from the start of a line; None when there is no such file. Raises ``CannotObserve``."""
    return read_range(root, logical, within, None, limit_bytes)


def read_range(root: HostRoot, logical: str, within: str, start: int | None, limit_bytes: int) -> Excerpt | None:
    """As much as ``limit_bytes`` from ``start``, or from the end when it is None. Raises ``CannotObserve``."""
    descriptor = _open(root, logical, within)
    if descriptor is None:
        return None
    try:
        size = os.fstat(descriptor).st_size
        first = max(0, size - limit_bytes) if start is None else start
        os.lseek(descriptor, first, os.SEEK_SET)
        content = _read(descriptor, logical, min(limit_bytes, max(0, size - first)))
    except OSError as error:
        raise CannotObserve(logical, error.strerror or str(error)) from error
    finally:
        os.close(descriptor)
    if start is None and first > 0:
        content = whole_words(content, at_end=False)
    elif first + len(content) < size:
        content = whole_words(content, at_end=True)
    return Excerpt(content, is_cut=first > 0 or first + len(content) < size)


def find_last(root: HostRoot, logical: str, within: str, wanted: bytes, look_back_bytes: int) -> int | None:
    """The offset of the last ``wanted`` within the last bytes of the file. Raises ``CannotObserve``."""
    descriptor = _open(root, logical, within)
    if descriptor is None:
        return None
    try:
        end = os.fstat(descriptor).st_size
        limit = max(0, end - look_back_bytes)
        while end > limit:
            start = max(limit, end - (1 << 20))
            found = os.pread(descriptor, end - start + len(wanted) - 1, start).rfind(wanted)
            if found >= 0:
                return start + found
            end = start
    except OSError as error:
        raise CannotObserve(logical, error.strerror or str(error)) from error
    finally:
        os.close(descriptor)
    return None


def walk_files(root: HostRoot, directory: str, depth: int) -> Iterator[str]:
    """The regular files below the directory, sorted; links are left out. What cannot be listed is empty."""
    try:
        names = root.list_directory(directory) or []
    except CannotObserve:
        return
    for name in names:
        path = f"{directory}/{name}"
        try:
            found = root.status(path, follow_symlinks=False)
        except CannotObserve:
            continue
        if found is not None and stat.S_ISREG(found.st_mode):
            yield path
        elif found is not None and stat.S_ISDIR(found.st_mode) and depth > 0:
            yield from walk_files(root, path, depth - 1)


def whole_words(content: bytes, *, at_end: bool) -> bytes:
    """The content without the line (or, in one endless line, the word) that was cut at its end or at its start.

    Half an address would not be recognised as one.
    """
    if at_end:
        cut = content.rfind(b"\n")
        return content[: (cut if cut >= 0 else max(content.rfind(b" "), content.rfind(b"\t"))) + 1]
    for separator in (b"\n", b" ", b"\t"):
        if (found := content.find(separator)) >= 0:
            return content[found + 1 :]
    return b""


def _open(root: HostRoot, logical: str, within: str) -> int | None:
    """A descriptor of the regular file; None when there is none."""
    resolved = _resolve(root, logical)
    if not f"{resolved}/".startswith(f"{within.rstrip('/')}/"):
        raise CannotObserve(logical, f"it is a link to {resolved}, which is outside of {within}")
    descriptor = -1
    try:
        directory = os.open(root.directory, _STEP)
        try:
            *parents, name = resolved.strip("/").split("/")
            for parent in parents:
                below = os.open(parent, _STEP, dir_fd=directory)
                os.close(directory)
                directory = below
            descriptor = os.open(name, _OPEN, dir_fd=directory)
        finally:
            os.close(directory)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise CannotObserve(logical, "it is not a regular file")
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise CannotObserve(logical, error.strerror or str(error)) from error
    except ValueError as error:  # a NUL in the name
        raise CannotObserve(repr(logical), str(error)) from error
    return descriptor


def _resolve(root: HostRoot, logical: str) -> str:
    """The path without links, as the host would resolve it."""
    pending = deque(logical.split("/"))
    resolved: list[str] = []
    followed = 0
    while pending:
        name = pending.popleft()
        if name in ("", "."):
            continue
        if name == "..":
            resolved = resolved[:-1]
            continue
        target = root.read_link("/" + "/".join([*resolved, name]))
        if target is None:
            resolved.append(name)
            continue
        followed += 1
        if followed > _LINKS:
            raise CannotObserve(logical, "too many symbolic links")
        if target.startswith("/"):
            resolved = []
        pending.extendleft(reversed(target.split("/")))
    return "/" + "/".join(resolved)


def _read(descriptor: int, logical: str, limit_bytes: int) -> bytes:
    chunks: list[bytes] = []
    left = limit_bytes
    try:
        while left > 0 and (chunk := os.read(descriptor, min(left, _BLOCK_BYTES))):
            chunks.append(chunk)
            left -= len(chunk)
    except OSError as error:
        if error.errno not in _ABSENT:
            raise CannotObserve(logical, error.strerror or str(error)) from error
    return b"".join(chunks)

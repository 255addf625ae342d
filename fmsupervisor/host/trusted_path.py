"""Who can change what a path leads to.

A file is as safe as every directory and symbolic link on the way to it. Symbolic links are resolved below the root
directory, as chroot(2) would, so that an absolute link in a captured or extracted tree stays in the tree. In a sticky
directory (1777, /tmp) only the owner of an entry can replace it, so there the owner of the entry decides (inode(7)).
"""

import os
import stat
from dataclasses import dataclass

from fmsupervisor.host.root import HostRoot

_MOST_LINKS = 40  # MAXSYMLINKS of the kernel (include/linux/namei.h)


@dataclass(frozen=True, slots=True)
class Step:
    """One thing on the way: a directory, a symbolic link or the file at the end."""

    path: str  # logical
    status: os.stat_result  # lstat(2)


def walk(root: HostRoot, logical: str) -> tuple[list[Step], str | None]:
    """Every step to what ``logical`` leads to, the root directory first, and the path there without symbolic links.

    That path is None when something on the way is missing or the links lead in a circle. Raises ``CannotObserve``.
    """
    top = root.status("/")
    if top is None:
        return [], None
    steps = [Step("/", top)]
    current = "/"
    waiting = _parts(logical)
    links = 0
    while waiting:
        part = waiting.pop()
        if part == "..":
            current = os.path.dirname(current)
            continue
        path = os.path.join(current, part)
        status = root.status(path, follow_symlinks=False)
        if status is None:
            return steps, None
        steps.append(Step(path, status))
        if not stat.S_ISLNK(status.st_mode):
            current = path
            continue
        links += 1
        target = root.read_link(path)
        if target is None or links > _MOST_LINKS:
            return steps, None
        if target.startswith("/"):
            current = "/"
        waiting += _parts(target)
    return steps, current


def resolve(root: HostRoot, logical: str) -> str | None:
    """The logical path without symbolic links; None when it leads nowhere. Raises ``CannotObserve``."""
    return walk(root, logical)[1]


def find_untrusted(root: HostRoot, logical: str, user: int) -> str | None:
    """Why somebody other than root and ``user`` could change what ``logical`` leads to; None when nobody can.

    Raises ``CannotObserve``.
    """
    steps, _ = walk(root, logical)
    for step in steps:
        mode = step.status.st_mode
        if step.status.st_uid not in (0, user):
            return f"{step.path} belongs to user {step.status.st_uid}"
        if stat.S_ISLNK(mode):
            continue
        is_on_the_way = step is not steps[-1]
        if is_on_the_way and mode & stat.S_ISVTX:
            continue
        if mode & stat.S_IWOTH:
            return f"{step.path} can be written by everybody (mode {stat.S_IMODE(mode):04o})"
        if mode & stat.S_IWGRP:
            return f"{step.path} can be written by group {step.status.st_gid} (mode {stat.S_IMODE(mode):04o})"
    return None


def _parts(path: str) -> list[str]:
    """The components, last first."""
    return [part for part in reversed(path.split("/")) if part and part != "."]

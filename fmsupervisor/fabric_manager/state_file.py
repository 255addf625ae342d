"""Whether Fabric Manager can resume from its state file (STATE_FILE_NAME, fabric modes 1 and 2).

With --restart it reads from there which partitions were active, and ends when nobody confirms them within 60 s. A file
that it must not trust is worse than none: as root it would follow a link, or take over what somebody wrote into a
directory that all may write to (its default is in /tmp). So it must be a regular file, not a link, with one name, that
nobody but its owner may write, and its owner must be root or whom Fabric Manager runs as. An empty file is what a full
disk leaves.

Its age is not asked: the clock may have been set since, and what matters is whether a Fabric Manager has worked since
the driver was loaded, which the driver itself knows (``core.verdict``). Its format is not public, so its content is not
checked. Source: NVIDIA's Fabric Manager User Guide (resiliency).
"""

import os
import stat

from fmsupervisor.errors import CannotObserve
from fmsupervisor.host.root import HostRoot


def why_unusable(root: HostRoot, path: str) -> str:
    """Why there is nothing to resume from; "" when there is."""
    try:
        found = root.status(path, follow_symlinks=False)
    except CannotObserve as error:
        return str(error)
    if found is None:
        return f"{path} does not exist"
    if not stat.S_ISREG(found.st_mode):
        return f"{path} is not a regular file"
    if found.st_size == 0:
        return f"{path} is empty"
    if found.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to user {found.st_uid}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} can be written by others than its owner"
    if found.st_nlink != 1:
        return f"{path} has {found.st_nlink} names"
    return ""

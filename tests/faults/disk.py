"""Leaves no room on a small file system."""

import errno

BALLAST = "ballast"


def fill(path: str) -> None:
    """Write a file until nothing more fits."""
    with open(path, "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(b"\0" * size) == size:
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

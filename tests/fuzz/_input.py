"""What all fuzz targets share: choices drawn from the input's first bytes, and a host whose files are in memory."""

import errno
import os
import stat
from collections.abc import Mapping, Sequence
from typing import TypeVar

from fmsupervisor.errors import CannotObserve
from fmsupervisor.host.root import HostRoot

T = TypeVar("T")


class Choices:
    """Takes decisions from the front of the input; what is left is the document under test."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def number(self, size_bytes: int = 1) -> int:
        """A number of that many bytes; 0 when nothing is left."""
        taken, self._data = self._data[:size_bytes], self._data[size_bytes:]
        return int.from_bytes(taken, "big")

    def one_of(self, choices: Sequence[T]) -> T:
        """One of them."""
        return choices[self.number() % len(choices)]

    def rest(self) -> bytes:
        """Everything that was not taken."""
        return self._data


class MemoryRoot(HostRoot):
    """A host of a few files and links; ``unreadable`` ones exist and cannot be read."""

    def __init__(
        self,
        files: Mapping[str, bytes],
        links: Mapping[str, str] | None = None,
        unreadable: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__("/nonexistent")
        self._files = files
        self._links = links or {}
        self._unreadable = unreadable
        self._directories: dict[str, set[str]] = {}
        for path in (*files, *self._links):
            names = path.split("/")[1:]
            for depth, name in enumerate(names):
                self._directories.setdefault("/" + "/".join(names[:depth]), set()).add(name)

    def read_bytes(self, logical: str, limit_bytes: int = 1 << 20) -> bytes | None:
        """As the real one."""
        self.path(logical)
        if logical in self._unreadable:
            raise CannotObserve(logical, os.strerror(errno.EACCES))
        if logical in self._directories:
            raise CannotObserve(logical, os.strerror(errno.EISDIR))
        content = self._files.get(logical)
        return None if content is None else content[:limit_bytes]

    def list_directory(self, logical: str) -> list[str] | None:
        """As the real one."""
        self.path(logical)
        names = self._directories.get(logical)
        return None if names is None else sorted(names)

    def read_link(self, logical: str) -> str | None:
        """As the real one."""
        self.path(logical)
        return self._links.get(logical)

    def status(self, logical: str, *, follow_symlinks: bool = True) -> os.stat_result | None:
        """As the real one, as far as the kind of file goes."""
        self.path(logical)
        if logical in self._directories:
            return os.stat_result((stat.S_IFDIR | 0o755, 1, 1, 1, 0, 0, 0, 0, 0, 0))
        if logical not in self._files:
            return None
        return os.stat_result((stat.S_IFREG | 0o644, 1, 1, 1, 0, 0, len(self._files[logical]), 0, 0, 0))


def check(condition: bool, what: object) -> None:
    """An invariant; unlike ``assert`` it also holds under ``-O`` and is not rewritten by pytest."""
    if not condition:
        raise AssertionError(what)

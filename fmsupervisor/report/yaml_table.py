"""Strict reading of a small YAML file: every key is asked for by name, and one that nobody asked for is an error.

The YAML is composed to nodes and walked, never constructed to objects: scalars stay the texts that were written, a key
that appears twice is seen, lines are known, and aliases cannot make a small file large.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fmsupervisor.errors import CannotObserve, ConfigError
from fmsupervisor.host.root import HostRoot

if TYPE_CHECKING:
    import yaml

_NULL = "tag:yaml.org,2002:null"


class Table:
    """One YAML mapping. Each key is taken once; ``finish`` complains of what was not taken."""

    def __init__(self, path: str, name: str, node: "yaml.Node | None") -> None:
        self._path = path
        self._name = name
        self._values: dict[str, yaml.Node] = {}
        self.is_empty = node is None or node.tag == _NULL
        if node is None or self.is_empty:
            return
        if _kind(node) != "mapping":
            raise self.error("", f"expected a table, found a {_kind(node)}", node)
        for key, value in node.value:
            if _kind(key) != "scalar":
                raise self.error("", f"expected a name, found a {_kind(key)}", key)
            if key.value in self._values:
                raise self.error(key.value, "appears twice", key)
            self._values[key.value] = value
        self.is_empty = not self._values

    def error(self, key: str, cause: str, node: "yaml.Node | None" = None) -> ConfigError:
        """An error that names the file, the line where it is known, and the key."""
        line = f":{node.start_mark.line + 1}" if node is not None else ""
        return ConfigError(": ".join(filter(None, (f"{self._path}{line}", self._full(key), cause))))

    def table(self, key: str) -> "Table":
        """A table inside; an empty one when it is not there."""
        return Table(self._path, self._full(key), self._take(key))

    def text(self, key: str, allowed: tuple[str, ...] = ()) -> str:
        """One line of text; "" when it is not there. ``allowed`` is for what is there."""
        node = self._take(key)
        if node is None:
            return ""
        if _kind(node) != "scalar" or not node.value.isprintable():
            raise self.error(key, "expected one line of text", node)
        if allowed and node.value not in allowed:
            raise self.error(key, f"found {node.value!r}, allowed are {', '.join(filter(None, allowed))}", node)
        return str(node.value)

    def boolean(self, key: str) -> None:
        """A boolean that has no effect here."""
        node = self._take(key)
        if node is not None and (_kind(node) != "scalar" or node.tag != "tag:yaml.org,2002:bool"):
            raise self.error(key, "expected true or false", node)

    def file(self, key: str) -> str:
        """A file name, relative to the directory of the YAML file; "" when it is not there."""
        name = self.text(key)
        return os.path.join(os.path.dirname(self._path), name) if name else ""

    def texts(self, key: str) -> tuple[str, ...] | None:
        """A list of texts; None when it is not there."""
        node = self._take(key)
        if node is None:
            return None
        if _kind(node) != "sequence" or any(_kind(item) != "scalar" for item in node.value):
            raise self.error(key, "expected a list of texts", node)
        return tuple(item.value for item in node.value)

    def names(self) -> tuple[str, ...]:
        """The keys that were not taken yet."""
        return tuple(self._values)

    def finish(self, refused: Mapping[str, str]) -> None:
        """Complain of the first key that nobody asked for. ``refused``: what to do instead, by full name."""
        for key, node in self._values.items():
            advice = refused.get(self._full(key))
            raise self.error(key, f"is not supported: {advice}" if advice else "there is no such key", node)

    def _take(self, key: str) -> "yaml.Node | None":
        node = self._values.pop(key, None)
        return None if node is None or node.tag == _NULL else node

    def _full(self, key: str) -> str:
        return ".".join(filter(None, (self._name, key)))


def read_table(root: HostRoot, path: str, limit_bytes: int) -> Table:
    """The top of the YAML file at the logical ``path``. Raises ``ConfigError``."""
    import yaml  # noqa: PLC0415 - only where such a file is configured

    try:
        content = root.read_bytes(path, limit_bytes + 1)
    except CannotObserve as error:
        raise ConfigError(f"cannot read {path}: {error.reason}") from error
    if content is None:
        raise ConfigError(f"cannot read {path}: the file does not exist")
    if len(content) > limit_bytes:
        raise ConfigError(f"cannot use {path}: it is larger than {limit_bytes} bytes")
    try:
        node = yaml.compose(content, yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"cannot use {path}: {' '.join(str(error).split())}") from error
    return Table(path, "", node)


def _kind(node: Any) -> str:
    """One of "scalar", "sequence" and "mapping": an attribute that the type stubs leave out."""
    return str(node.id)

"""The settings file: TOML in, frozen ``Settings`` out.

Strict: whatever is wrong with the file is told in one go, one line per mistake, each with the file, the line, the key,
what was found and what is allowed. Nothing is guessed and nothing is ignored. Which keys there are and what they accept
is declared in ``settings.py``; only the rules between keys stand here (``_RULES``).
"""

import errno
import operator
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from fmsupervisor.config_schema import (
    Key,
    LoadedSettings,
    NotAllowedError,
    build,
    convert,
    convert_option,
    keys,
    literal,
    shown,
    tables,
)
from fmsupervisor.config_text import render_default, render_effective, render_reference
from fmsupervisor.errors import ConfigError

__all__ = [
    "DEFAULT_PATH",
    "LoadedSettings",
    "load",
    "load_text",
    "render_default",
    "render_effective",
    "render_reference",
]

DEFAULT_PATH = "/etc/fmsupervisor.toml"

_LIMIT_BYTES = 1 << 20
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_KEY_PART = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
_ASSIGNMENT = re.compile(rf"[ \t]*({_KEY_PART}(?:[ \t]*\.[ \t]*{_KEY_PART})*)[ \t]*=")
_VALUE = re.compile(r"\s*[\w.\"'-]+\s*=([^#]*)")
_HEADER = re.compile(rf"[ \t]*\[\[?[ \t]*({_KEY_PART}(?:[ \t]*\.[ \t]*{_KEY_PART})*)[ \t]*\]")
_SYNTAX_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


def load(path: str, *, required: bool) -> LoadedSettings:
    """The settings in the file at ``path``; all defaults when it does not exist and is not ``required``.

    Raises ConfigError, whose text has one line for each mistake.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if error.errno == errno.ENOENT and not required:
            return load_text("", path)
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # a NUL in the name
        raise ConfigError(f"cannot read {shown(path)}: {error}") from error
    try:
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError(f"cannot read {path}: it is not a regular file")
            content = file.read(_LIMIT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if len(content) > _LIMIT_BYTES:
        raise ConfigError(f"cannot use {path}: it is larger than 1 MiB")
    try:
        return load_text(content.decode("utf-8"), path)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8, which TOML is written in") from error


def load_text(text: str, name: str) -> LoadedSettings:
    """The settings in ``text``; ``name`` stands for the file in messages and sources. Raises ConfigError."""
    return _Reader(name, _parse(text, name), _key_lines(text)).read()


@dataclass(frozen=True, slots=True)
class _Rule:
    """Something that must hold between two keys."""

    first: str
    second: str
    is_broken: Callable[[Any, Any], bool]
    allowed: str  # for the first


def _has_no_partitions(resiliency_restart: Any, fabric_mode: Any) -> bool:
    return resiliency_restart is True and fabric_mode == 0


_RULES = (
    _Rule(
        "fabric_manager.resiliency_restart",
        "fabric_manager.fabric_mode",
        _has_no_partitions,
        "true only with fabric_manager.fabric_mode 1 or 2",
    ),
    _Rule(
        "fabric_manager.config",
        "fabric_manager.stock_config",
        operator.eq,
        "another file than fabric_manager.stock_config, which is never changed",
    ),
    _Rule(
        "restart.maximum_delay_seconds",
        "restart.initial_delay_seconds",
        operator.lt,
        "at least restart.initial_delay_seconds",
    ),
)


class _Reader:
    """Reads one document; collects values, their sources and the mistakes."""

    def __init__(self, name: str, document: Mapping[str, Any], lines: Mapping[str, int]) -> None:
        self._name = name
        self._document = document
        self._lines = lines
        self._mistakes: list[tuple[int, str]] = []
        self._values: dict[str, Any] = {}
        self._sources: dict[str, str] = {}

    def read(self) -> LoadedSettings:
        self._refuse_unknown_keys()
        for key in keys():
            self._read_key(key)
        for rule in _RULES:
            self._apply(rule)
        if self._mistakes:
            raise ConfigError("\n".join(text for _, text in sorted(self._mistakes)))
        return LoadedSettings(build(self._values), MappingProxyType(self._sources))

    def _read_key(self, key: Key) -> None:
        table = self._document.get(key.table, {}) if key.table else self._document
        is_given = isinstance(table, dict) and key.name in table
        layout = self._values.get("layout", "tree")
        found = table[key.name] if is_given else key.default(layout)
        self._sources[key.path] = self._place(key.path) if is_given else _default_source(key, layout)
        if key.type == Mapping[str, str] and isinstance(found, dict):
            self._values[key.path] = MappingProxyType(dict(self._read_options(key, found)))
            return
        try:
            self._values[key.path] = convert(key, found, self._prefix_for(key))
        except NotAllowedError as error:
            self._add(key.path, f"{key.path} is {shown(found)}; allowed: {error}")

    def _prefix_for(self, key: Key) -> str | None:
        """What ``{prefix}`` stands for in this key. A wrong prefix is one mistake; it does not spoil other paths."""
        return None if key.path == "prefix" else self._values.get("prefix", "/")

    def _read_options(self, key: Key, table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        for name, found in table.items():
            path = f"{key.path}.{name}"
            self._sources[path] = self._place(path)
            try:
                yield name, convert_option(name, found)
            except NotAllowedError as error:
                self._add(path, f"{key.path}.{_bare(name)} is {shown(found)}; allowed: {error}")

    def _refuse_unknown_keys(self) -> None:
        known = {key.path for key in keys()}
        for name, found in self._document.items():
            if name not in tables():
                if name not in known:
                    self._add(name, f"unknown key {_bare(name)}; {_suggestion('', name)}")
            elif not isinstance(found, dict):
                self._add(name, f"{name} is {shown(found)}; allowed: a table, [{name}]")
            else:
                for inner in found:
                    if f"{name}.{inner}" not in known:
                        self._add(f"{name}.{inner}", f"unknown key {name}.{_bare(inner)}; {_suggestion(name, inner)}")

    def _apply(self, rule: _Rule) -> None:
        if rule.first not in self._values or rule.second not in self._values:
            return
        first, second = self._values[rule.first], self._values[rule.second]
        if rule.is_broken(first, second):
            place = rule.first if rule.first in self._lines else rule.second
            self._add(
                place,
                f"{rule.first} is {shown(first)} and {rule.second} is {shown(second)}; allowed: {rule.allowed}",
            )

    def _add(self, path: str, text: str) -> None:
        self._mistakes.append((self._line(path), f"{self._place(path)}: {text}"))

    def _place(self, path: str) -> str:
        line = self._line(path)
        return f"{self._name}:{line}" if line else self._name

    def _line(self, path: str) -> int:
        """The line of the key, else of the table or inline table that it is in; 0 when that is not known either."""
        while path:
            if path in self._lines:
                return self._lines[path]
            path = path.rpartition(".")[0]
        return 0


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ConfigError(f"{name}: not valid TOML: nested too deeply") from error
    except ValueError as error:  # TOMLDecodeError, and what int() says of thousands of digits
        message = str(error)
        place = _SYNTAX_PLACE.search(message)
        if place is None:
            raise ConfigError(f"{name}: not valid TOML: {message}") from error
        line, column = place.groups()
        where = f"{line}:{column}" if line else str(text.count("\n") + 1)
        hint = _hint(text.split("\n")[int(line) - 1]) if line else ""
        raise ConfigError(f"{name}:{where}: not valid TOML: {message[: place.start()]}{hint}") from error


def _hint(line: str) -> str:
    """What is probably wrong with a line that is no TOML."""
    found = _VALUE.match(line)
    if found is None:
        return ""
    value = found[1].strip()
    if re.fullmatch(r"0[0-9]+", value, re.ASCII):
        return f'; permissions are text: "{value}"'
    if value.lower() in ("true", "false", "yes", "no", "on", "off"):
        return "; allowed: true or false, in lower case"
    if re.fullmatch(r"[^\s\"'\[\]{},=][^\"'\[\],=]*", value):
        return f"; text stands in double quotes: {shown(value)}"
    return ""


def _key_lines(text: str) -> Mapping[str, int]:
    """The first line of every table and key, by dotted name.

    tomllib does not tell lines, so this looks for them: right for one assignment per line, and blind inside inline
    tables and multi-line strings.
    """
    lines: dict[str, int] = {}
    table = ""
    closing = ""  # of the multi-line string that the line begins in
    for number, line in enumerate(text.split("\n"), 1):
        if closing:
            closing = "" if line.count(closing) % 2 else closing
            continue
        path = ""
        if header := _HEADER.match(line):
            path = table = _dotted(header[1])
        elif assignment := _ASSIGNMENT.match(line):
            path = f"{table}.{_dotted(assignment[1])}".removeprefix(".")
        while path:  # the tables around it, too: a dotted key may be the first mention of them
            lines.setdefault(path, number)
            path = path.rpartition(".")[0]
        closing = next((quotes for quotes in ('"""', "'''") if line.count(quotes) % 2), "")
    return lines


def _dotted(written: str) -> str:
    """A key as written, without quotes and blanks."""
    return ".".join(part.strip("\"'") for part in re.findall(_KEY_PART, written))


def _bare(name: str) -> str:
    """A key's name as TOML would write it, shortened."""
    return name if _BARE_KEY.fullmatch(name) and len(name) <= 80 else shown(name)  # noqa: PLR2004


def _default_source(key: Key, layout: str) -> str:
    return f"default for layout {literal(layout)}" if layout == "packaged" and key.differs_by_layout() else "default"


def _suggestion(table: str, name: str) -> str:
    """What was probably meant, else what there is."""
    from difflib import get_close_matches  # noqa: PLC0415  needed for mistakes only

    siblings = {key.name: key.path for key in keys() if key.table == table}
    if not table:
        siblings |= {other: f"[{other}]" for other in tables()}
    if close := get_close_matches(name, siblings, n=1):
        return f"did you mean {siblings[close[0]]}?"
    if elsewhere := [key.path for key in keys() if key.name == name]:
        return f"did you mean {' or '.join(elsewhere)}?"
    return f"allowed: {', '.join(siblings.values())}"

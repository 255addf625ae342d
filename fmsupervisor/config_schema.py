"""The declarations of ``settings.py`` as a flat list of keys, and the rules that their metadata stand for.

Everything that deals with settings goes through this list: the reader (``config.py``), the generated texts
(``config_text.py``) and the tests. ``convert`` is the one place where a value is judged; ``describe`` says in words
what ``convert`` accepts.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, NoReturn, get_type_hints

from fmsupervisor.fabric_manager.config_keys import FIXED_KEYS, OWNED_KEYS
from fmsupervisor.settings import Form, Settings

PREFIX = "{prefix}"

_LARGEST_NUMBER = 10**9  # 31 years in seconds; timers of the event loop overflow somewhere above
_SOCKET_PATH_BYTES = 107  # sun_path of unix(7), without the final NUL
_SHOWN_CHARACTERS = 80

_OPTION_KEY = re.compile(r"[A-Z][A-Z0-9_]*")
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):([0-9]{1,5})")
_MODE = re.compile(r"0?[0-7]{3}")
_PARAMETER = re.compile(r'[A-Za-z0-9_][A-Za-z0-9_-]*=(?:[^\s"]*|"[^"]*")')


class NotAllowedError(ValueError):
    """A value that a key cannot have; the text says what is allowed."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the settings file."""

    table: str  # "" at the top of the file
    name: str
    type: Any  # the annotation, resolved
    declared: Field[Any]

    @property
    def path(self) -> str:
        """The dotted name that messages use."""
        return f"{self.table}.{self.name}" if self.table else self.name

    def default(self, layout: str) -> Any:
        """The default as declared, paths not expanded."""
        packaged = self.declared.metadata["packaged"]
        if layout == "packaged" and packaged is not None:
            return packaged
        return {} if self.type == Mapping[str, str] else self.declared.default

    def differs_by_layout(self) -> bool:
        """Whether the packaged layout has a default of its own."""
        return self.declared.metadata["packaged"] is not None


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """The settings, and where each came from.

    ``sources`` has the dotted name of every key, and of every single option, as in "switches.expected". Its values are
    "/etc/fmsupervisor.toml:12", "default" or 'default for layout "packaged"'.
    """

    settings: Settings
    sources: Mapping[str, str]


@cache
def keys() -> tuple[Key, ...]:
    """All keys, in the order of declaration; those without a table first, as TOML wants it."""
    return tuple(
        key for table, declaration in (("", Settings), *tables().items()) for key in _keys_of(table, declaration)
    )


@cache
def tables() -> Mapping[str, type]:
    """The tables of the file and the dataclass of each."""
    hints = get_type_hints(Settings).items()
    return MappingProxyType({name: hint for name, hint in hints if isinstance(hint, type) and is_dataclass(hint)})


def build(values: Mapping[str, Any]) -> Settings:
    """Settings from one value for every key, by its dotted name."""
    parts = {
        table: declaration(**{key.name: values[key.path] for key in keys() if key.table == table})
        for table, declaration in tables().items()
    }
    return Settings(**{key.name: values[key.path] for key in keys() if not key.table}, **parts)


def value_of(settings: Settings, key: Key) -> Any:
    """What the settings have for the key."""
    return getattr(getattr(settings, key.table) if key.table else settings, key.name)


def convert(key: Key, found: Any, prefix: str | None) -> Any:
    """The value that a TOML value stands for. ``prefix`` replaces ``{prefix}`` in paths; None: it cannot be used there.

    Raises NotAllowedError.
    """
    if key.type is bool and isinstance(found, bool):
        return found
    if key.type is int and _is_integer(found):
        return _in_range(key, found)
    if key.type is float and (_is_integer(found) or isinstance(found, float)):
        return float(_in_range(key, found))
    if key.type is str and isinstance(found, str):
        return _text(key, found, prefix)
    if key.type == tuple[str, ...] and isinstance(found, list | tuple):
        return tuple(_text(key, item, prefix) if isinstance(item, str) else _refuse(key) for item in found)
    if key.type == int | str and (_is_integer(found) or isinstance(found, str)):
        return _text(key, found, prefix) if isinstance(found, str) else _in_range(key, found)
    return _refuse(key)


def convert_option(name: str, found: Any) -> str:
    """The text in fabricmanager.cfg for one entry of ``[fabric_manager.options]``. Raises NotAllowedError."""
    if not _OPTION_KEY.fullmatch(name):
        raise NotAllowedError("names of capital letters, digits and _, as in fabricmanager.cfg")
    if name in OWNED_KEYS:
        raise NotAllowedError(f"the setting {OWNED_KEYS[name]}, which owns this key")
    if isinstance(found, bool):
        text = str(int(found))
    elif _is_integer(found) and abs(found) < 1 << 64:
        text = str(found)
    elif isinstance(found, str) and _is_one_line(found):
        text = found
    else:
        raise NotAllowedError("one line of text without blanks at its ends, an integer, true or false")
    if name in FIXED_KEYS and text != FIXED_KEYS[name]:
        raise NotAllowedError(f"{FIXED_KEYS[name]} only; Fabric Manager could not be supervised otherwise")
    if name.endswith("UNIX_SOCKET_PATH") and len(text.encode()) > _SOCKET_PATH_BYTES:
        raise NotAllowedError(f"a path of at most {_SOCKET_PATH_BYTES} bytes, the longest that a Unix socket can have")
    return text


def describe(key: Key) -> str:
    """What the key accepts, in words."""
    choices = [literal(choice) for choice in key.declared.metadata["allowed"]]
    if key.type is bool:
        return "true or false"
    if key.type is int:
        return f"an integer {_describe_range(key)}"
    if key.type is float:
        return f"a number {_describe_range(key)}"
    if key.type == int | str:
        return f"{_alternatives(choices)} or an integer {_describe_range(key)}"
    if key.type == Mapping[str, str]:
        return "a table of KEY = text, integer, true or false"
    text = _alternatives(choices) if choices else _describe_form(key)
    return f"a list; each item {text}" if key.type == tuple[str, ...] else text


def literal(value: Any) -> str:
    """The value as TOML writes it, on one line."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            return '"' + "".join(map(_escaped, value)) + '"'
        case list() | tuple():
            return "[" + ", ".join(map(literal, value)) + "]"
        case dict():
            return "a table"
        case int() if abs(value) > 1 << 64:
            return "an integer of many digits"
    return str(value)


def shown(value: Any) -> str:
    """A found value in a message: as ``literal``, shortened."""
    text = literal(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def _keys_of(table: str, declaration: type) -> Iterator[Key]:
    hints = get_type_hints(declaration)
    for declared in fields(declaration):
        if not is_dataclass(hints[declared.name]):
            yield Key(table, declared.name, hints[declared.name], declared)


def _refuse(key: Key) -> NoReturn:
    raise NotAllowedError(describe(key))


def _is_integer(found: Any) -> bool:
    return isinstance(found, int) and not isinstance(found, bool)


def _in_range(key: Key, found: float) -> Any:
    minimum, maximum = key.declared.metadata["minimum"], key.declared.metadata["maximum"]
    if (
        not math.isfinite(found)
        or (minimum is not None and found < minimum)
        or (maximum is not None and found > maximum)
    ):
        _refuse(key)
    if abs(found) > _LARGEST_NUMBER:
        raise NotAllowedError(f"{describe(key)} and at most {_LARGEST_NUMBER}")
    return found


def _text(key: Key, found: str, prefix: str | None) -> str:
    allowed, form = key.declared.metadata["allowed"], key.declared.metadata["form"]
    if allowed:
        return found if found in allowed else _refuse(key)
    if not _is_one_line(found):
        raise NotAllowedError(f"{describe(key)}, one line without control characters and without blanks at its ends")
    if form in (Form.PATH, Form.PATH_OR_EMPTY):
        found = _path(found, prefix)
    limit = key.declared.metadata["maximum_bytes"]
    if not _CHECKS[form](found) or (limit is not None and len(found.encode()) > limit):
        _refuse(key)
    return found


def _path(found: str, prefix: str | None) -> str:
    """Expanded, and without doubled or final slashes."""
    expanded = found if prefix is None else found.replace(PREFIX, prefix)
    if re.search("[{}]", expanded):
        raise NotAllowedError(f"a path with no other placeholder than {PREFIX}, and that not in the prefix itself")
    return re.sub("/+", "/", expanded).rstrip("/") or expanded[:1]


def _is_path(text: str) -> bool:
    return text.startswith("/") and ".." not in text.split("/")


def _is_path_or_empty(text: str) -> bool:
    return not text or _is_path(text)


def _is_mode(text: str) -> bool:
    return _MODE.fullmatch(text) is not None


def _is_address(text: str) -> bool:
    found = _ADDRESS.fullmatch(text)
    return found is not None and int(found[1]) <= 65535  # noqa: PLR2004  ports have 16 bits


def _is_parameter(text: str) -> bool:
    return _PARAMETER.fullmatch(text) is not None


_CHECKS: Mapping[Form, Callable[[str], bool]] = MappingProxyType(
    {
        Form.TEXT: bool,
        Form.PATH: _is_path,
        Form.PATH_OR_EMPTY: _is_path_or_empty,
        Form.MODE: _is_mode,
        Form.ADDRESS: _is_address,
        Form.PARAMETER: _is_parameter,
    }
)


def _is_one_line(text: str) -> bool:
    return text.isprintable() and text == text.strip()


def _describe_range(key: Key) -> str:
    minimum, maximum = key.declared.metadata["minimum"], key.declared.metadata["maximum"]
    return f"from {minimum} to {maximum}" if maximum is not None else f"of at least {minimum}"


def _describe_form(key: Key) -> str:
    limit = key.declared.metadata["maximum_bytes"]
    return str(key.declared.metadata["form"]) + (f"; at most {limit} bytes" if limit is not None else "")


def _alternatives(choices: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    if character.isprintable():
        return character
    return f"\\u{ord(character):04x}" if ord(character) <= 0xFFFF else f"\\U{ord(character):08x}"  # noqa: PLR2004

"""Frozen values to JSON and back, by their type annotations.

For what one version of this program leaves to the next: a field that the reader does not know is ignored, one that is
missing gets its default, one of the wrong type is an error that names it. Understood are dataclasses, enums, bool, int,
float, str, ``X | None``, tuple, frozenset and mappings; a mapping whose keys are not texts becomes a list of pairs.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


class DecodeError(ValueError):
    """The document does not have the form that the type asks for; the text says where."""


def encode(value: Any) -> Any:
    """What ``json.dumps`` takes."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {str(encode(key)): encode(item) for key, item in value.items()}
        return [[encode(key), encode(item)] for key, item in value.items()]
    if isinstance(value, AbstractSet):
        return sorted((encode(item) for item in value), key=repr)
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    return value


def decode(kind: Any, document: Any, where: str = "value") -> Any:
    """The value of type ``kind``. Raises ``DecodeError``."""
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return _decode_optional(kind, document, where)
    if origin is tuple:
        return _decode_tuple(get_args(kind), document, where)
    if origin is frozenset:
        (item,) = get_args(kind)
        return frozenset(decode(item, one, where) for one in _list(document, where))
    if origin is not None and issubclass(origin, Mapping):
        return _decode_mapping(get_args(kind), document, where)
    if is_dataclass(kind):
        return _decode_dataclass(kind, document, where)
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(document)
        except ValueError as error:
            raise DecodeError(f"{where}: {document!r} is no {kind.__name__}") from error
    if kind is float and type(document) is int:
        return float(document)
    if kind in (bool, int, float, str) and type(document) is kind:
        return document
    raise DecodeError(f"{where}: {type(document).__name__} in place of {getattr(kind, '__name__', kind)}")


def _decode_optional(kind: Any, document: Any, where: str) -> Any:
    others = [one for one in get_args(kind) if one is not NoneType]
    if document is None and len(others) < len(get_args(kind)):
        return None
    for one in others[:-1]:
        try:
            return decode(one, document, where)
        except DecodeError:
            continue
    return decode(others[-1], document, where)


def _decode_tuple(items: tuple[Any, ...], document: Any, where: str) -> tuple[Any, ...]:
    found = _list(document, where)
    if len(items) == 2 and items[1] is ...:  # noqa: PLR2004 - tuple[X, ...]
        return tuple(decode(items[0], one, f"{where}[{number}]") for number, one in enumerate(found))
    if len(found) != len(items):
        raise DecodeError(f"{where}: {len(found)} items in place of {len(items)}")
    return tuple(decode(kind, one, where) for kind, one in zip(items, found, strict=True))


def _decode_mapping(kinds: tuple[Any, ...], document: Any, where: str) -> Mapping[Any, Any]:
    key_kind, item_kind = kinds
    pairs = document.items() if isinstance(document, dict) else _list(document, where)
    try:
        return MappingProxyType(
            {decode(key_kind, key, where): decode(item_kind, item, f"{where}[{key!r}]") for key, item in pairs}
        )
    except (TypeError, ValueError) as error:
        if isinstance(error, DecodeError):
            raise
        raise DecodeError(f"{where}: not a mapping") from error


def _decode_dataclass(kind: Any, document: Any, where: str) -> Any:
    if not isinstance(document, dict):
        raise DecodeError(f"{where}: {type(document).__name__} in place of {kind.__name__}")
    hints = _hints(kind)
    values = {}
    for field in fields(kind):
        if field.name in document:
            values[field.name] = decode(hints[field.name], document[field.name], f"{where}.{field.name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise DecodeError(f"{where}.{field.name}: missing")
    return kind(**values)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _list(document: Any, where: str) -> list[Any]:
    if not isinstance(document, list):
        raise DecodeError(f"{where}: {type(document).__name__} in place of a list")
    return document

"""What users change in the mixin: one TOML file, every key optional."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from fmsupervisor.errors import ConfigError

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_DURATION = re.compile(r"(\d+(ms|[smhdwy]))+|0")
_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Options:
    """The keys of the file, by their names. ``for_`` is written ``for``; addresses have ``{anchor}`` in them."""

    selector: str = 'job="fmsupervisor"'  # label matchers of every series
    cluster_label: str = "cluster"
    node_label: str = "instance"
    runbook_url: str = "docs/runbook.md#{anchor}"
    alerts_url: str = "docs/alerts.md#{anchor}"
    link_sxids_per_hour: int = 10  # from how many on a link is worth a look
    omit: tuple[str, ...] = ()  # names of alerts
    labels: Mapping[str, str] = field(default_factory=lambda: _NOTHING)  # added to every alert
    severities: Mapping[str, str] = field(default_factory=lambda: _NOTHING)  # other words for them
    for_: Mapping[str, str] = field(default_factory=lambda: _NOTHING)  # other durations, by alert


def load(text: str, name: str, alerts: frozenset[str]) -> Options:
    """The options in a TOML text. ``name`` is the file's, ``alerts`` are the names that there are.

    Raises ConfigError with one line for each mistake.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}: {error}") from error
    values: dict[str, Any] = {}
    mistakes = []
    for key, value in document.items():
        attribute = "for_" if key == "for" else key
        wanted = _DEFAULTS.get(attribute) if key != "for_" else None
        if wanted is None:
            mistakes.append(f"{name}: {key}: no such key; there are {', '.join(sorted(map(_written, _DEFAULTS)))}")
        elif problem := _problem(key, value, wanted, alerts):
            mistakes.append(f"{name}: {key}: {problem}")
        else:
            values[attribute] = tuple(value) if isinstance(value, list) else value
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return Options(**values)


def _written(attribute: str) -> str:
    return attribute.rstrip("_")


def _problem(key: str, value: object, wanted: object, alerts: frozenset[str]) -> str:
    """What is wrong with the value, or nothing."""
    match wanted:
        case str():
            return _text_problem(key, value)
        case int():
            is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
            return "" if is_count else "not a positive integer"
        case tuple():
            if not isinstance(value, list):
                return "not a list of names of alerts"
            return _unknown([str(name) for name in value], alerts)
        case _:
            return _table_problem(key, value, alerts)


def _text_problem(key: str, value: object) -> str:
    if not isinstance(value, str):
        return "not a string"
    if key.endswith("_label") and not _LABEL.fullmatch(value):
        return f"{value!r} is not the name of a label"
    if key.endswith("_url") and "{anchor}" not in value:
        return f"{value!r} has no {{anchor}} in it"
    if key == "selector" and not value.strip():
        return "empty, which would select the series of everything"
    return ""


def _table_problem(key: str, value: object, alerts: frozenset[str]) -> str:
    if not isinstance(value, dict) or not all(isinstance(word, str) for word in value.values()):
        return "not a table of strings"
    if key == "for":
        wrong = [word for word in value.values() if not _DURATION.fullmatch(word)]
        return f"{wrong[0]!r} is not a duration such as 5m" if wrong else _unknown(list(value), alerts)
    if key == "severities":
        return _unknown(list(value), frozenset({"critical", "warning"}))
    wrong = [label for label in value if not _LABEL.fullmatch(label)]
    return f"{wrong[0]!r} is not the name of a label" if wrong else ""


def _unknown(names: list[str], known: frozenset[str]) -> str:
    wrong = [name for name in names if name not in known]
    return f"{wrong[0]!r} is none of {', '.join(sorted(known))}" if wrong else ""


_DEFAULTS: Mapping[str, object] = MappingProxyType({one.name: getattr(Options(), one.name) for one in fields(Options)})

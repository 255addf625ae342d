"""The last processors of the log chain: an event becomes journal fields, a line for a person, or a line of JSON.

Keys with a meaning here: ``event`` the message, ``level``, ``kind`` one of our events (a ``Kind``), ``message_id`` when
it differs from the kind's, ``details`` and ``exception`` further lines that belong to the message; others are fields.

Text comes from other programs' logs. So control characters, line ends and characters that turn the direction of writing
never reach a terminal or a line-based log raw: a forged line or an escape sequence comes out as visible text. Further
lines of a message are part of its one journal entry, a list in JSON, and indented behind a bar on a terminal.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Protocol

from structlog.typing import EventDict, WrappedLogger

from fmsupervisor.report.journald_socket import encode_entry, field_name

SYSLOG_IDENTIFIER = "fmsupervisor"

# Event key -> journal field. A key that is not here becomes FMSUPERVISOR_<KEY>.
JOURNAL_FIELDS: Mapping[str, str] = {
    "condition": "FMSUPERVISOR_CONDITION",  # FMS-nnn
    "severity": "FMSUPERVISOR_SEVERITY",  # of the condition: info, warning, critical
    "subject": "FMSUPERVISOR_SUBJECT",  # which instance of the condition
    "remedy": "FMSUPERVISOR_REMEDY",  # what to do
    "state": "FMSUPERVISOR_STATE",
    "previous_state": "FMSUPERVISOR_PREVIOUS_STATE",
    "reason": "FMSUPERVISOR_REASON",
    "session": "FM_SESSION",  # one start of Fabric Manager
    "fm_pid": "FM_PID",
    "fm_version": "FM_VERSION",
    "fm_level": "FM_LEVEL",  # of a relayed line, as Fabric Manager wrote it
    "fm_source": "FM_SOURCE",  # file, stdout or stderr
    "fm_exit_class": "FM_EXIT_CLASS",
    "fm_exit_status": "FM_EXIT_STATUS",
    "fm_exit_signal": "FM_EXIT_SIGNAL",
    "pci_bus_id": "PCI_BUS_ID",
    "nvswitch": "NVSWITCH",  # minor number of /dev/nvidia-nvswitchN
    "sxid": "SXID",
    "sxid_severity": "SXID_SEVERITY",  # fatal or non-fatal
    "nvlink_port": "NVLINK_PORT",
    "xid": "XID",  # of a GPU
    "kernel_sequence": "KERNEL_SEQUENCE",  # of /dev/kmsg
    "kernel_seconds": "KERNEL_SECONDS",  # since boot, on printk's clock
    "kernel_kind": "KERNEL_KIND",
}

_PRIORITIES = {"debug": "7", "info": "6", "warning": "4", "error": "3", "critical": "2"}
_OWN_KEYS = frozenset({"event", "level", "kind", "message_id", "details", "exception", "timestamp"})
_IN_MESSAGE = frozenset({"reason", "remedy"})  # our sentences contain them: not said twice on a terminal

_LINE_BREAKING = "\x00-\x1f\x7f-\x9f\u2028\u2029"
_REORDERING = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_SURROGATES = "\ud800-\udfff"
_UNSAFE = re.compile(f"[{_LINE_BREAKING}{_REORDERING}{_SURROGATES}]")
_UNSAFE_IN_JOURNAL = re.compile(f"(?![\n\t])[{_LINE_BREAKING}{_REORDERING}{_SURROGATES}]")
_NAMED = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
_PLAIN_VALUE = re.compile(r"[^\s\"=]+")


class Kind(Protocol):
    """One of our kinds of event, with its journald MESSAGE_ID."""

    @property
    def label(self) -> str:
        """For people and filters, "fm-started"."""

    @property
    def value(self) -> str:
        """The MESSAGE_ID."""


def one_line(text: str) -> str:
    """``text`` with everything that could break a line or command a terminal made visible."""
    return _UNSAFE.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    character = match.group()
    code = ord(character)
    return _NAMED.get(character) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")  # noqa: PLR2004


def _text(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            return f"{value:.3f}".rstrip("0").rstrip(".")
        case bytes():
            return value.decode("utf-8", "backslashreplace")
        case _:
            return str(value)


def _fields(event_dict: EventDict) -> Iterator[tuple[str, object]]:
    return ((key, value) for key, value in event_dict.items() if key not in _OWN_KEYS and value is not None)


def _further_lines(event_dict: EventDict) -> list[str]:
    lines = [str(line) for line in event_dict.get("details", ())]
    return lines + str(event_dict.get("exception", "")).splitlines()


def _message_id(event_dict: EventDict) -> str | None:
    kind: Kind | None = event_dict.get("kind")
    given: str | None = event_dict.get("message_id")
    return given or (kind.value if kind is not None else None)


class JournalRenderer:
    """An entry for journald's native socket. Values that are lists become repeated fields."""

    def __call__(self, _logger: WrappedLogger, _method: str, event_dict: EventDict) -> bytes:
        """The datagram."""
        return encode_entry(self._entry(event_dict))

    def _entry(self, event_dict: EventDict) -> Iterator[tuple[str, str]]:
        lines = [str(event_dict["event"]), *_further_lines(event_dict)]
        yield "MESSAGE", _UNSAFE_IN_JOURNAL.sub(_escape, "\n".join(lines))
        yield "PRIORITY", _PRIORITIES.get(event_dict.get("level", "info"), "6")
        yield "SYSLOG_IDENTIFIER", SYSLOG_IDENTIFIER
        message_id = _message_id(event_dict)
        if message_id is not None:
            yield "MESSAGE_ID", message_id
        kind: Kind | None = event_dict.get("kind")
        if kind is not None:
            yield "FMSUPERVISOR_EVENT", kind.label
        for key, value in _fields(event_dict):
            name = JOURNAL_FIELDS.get(key) or field_name(f"FMSUPERVISOR_{key}")
            for item in value if isinstance(value, list | tuple) else (value,):
                yield name, _UNSAFE_IN_JOURNAL.sub(_escape, _text(item))


class JsonRenderer:
    """One object on one line, ASCII only."""

    def __call__(self, _logger: WrappedLogger, _method: str, event_dict: EventDict) -> str:
        """The line, without its end."""
        record: dict[str, object] = {
            "timestamp": event_dict.get("timestamp"),
            "level": event_dict.get("level"),
            "message": str(event_dict["event"]),
        }
        kind: Kind | None = event_dict.get("kind")
        if kind is not None:
            record["event"] = kind.label
        message_id = _message_id(event_dict)
        if message_id is not None:
            record["message_id"] = message_id
        record.update(_fields(event_dict))
        lines = _further_lines(event_dict)
        if lines:
            record["details"] = lines
        return json.dumps(record, default=_text).replace("\x7f", "\\u007f")


class ConsoleRenderer:
    """``time LEVEL message  key=value ...`` for a person; further lines follow, indented."""

    _COLOURS: Mapping[str, str] = {"debug": "2", "warning": "33", "error": "31", "critical": "1;31"}

    def __init__(self, *, is_coloured: bool) -> None:
        self._is_coloured = is_coloured

    def __call__(self, _logger: WrappedLogger, _method: str, event_dict: EventDict) -> str:
        """The line or lines, without the last line end."""
        level = str(event_dict.get("level", "info"))
        fields = " ".join(self._pair(key, value) for key, value in _fields(event_dict) if key not in _IN_MESSAGE)
        line = " ".join(
            (
                str(event_dict.get("timestamp", "")),
                self._paint(f"{level.upper():<8}", self._COLOURS.get(level, "")),
                one_line(str(event_dict["event"])),
            )
        )
        further = [f"    | {one_line(text)}" for text in _further_lines(event_dict)]
        return "\n".join([f"{line}  {self._paint(fields, '2')}" if fields else line, *further])

    def _pair(self, key: str, value: object) -> str:
        items = value if isinstance(value, list | tuple) else (value,)
        text = one_line(",".join(_text(item) for item in items))
        if not _PLAIN_VALUE.fullmatch(text):
            text = '"' + text.replace('"', r"\"") + '"'
        return f"{key}={text}"

    def _paint(self, text: str, colour: str) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self._is_coloured and colour else text

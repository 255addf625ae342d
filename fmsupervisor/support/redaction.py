"""Takes out of a text what tells whose machine it is, and leaves what tells what is wrong with it.

Replaced are UUIDs (of GPUs, switches and others), serial numbers and GUIDs, host names, IP and MAC addresses, e-mail
addresses and the names of users in paths. Equal things become equal words (``GPU-1``, ``ip-2``) in the whole report, so
that it can still be seen that two lines speak of one GPU. PCI bus ids stay: they are the same on every board.

Two passes. ``learn`` sees everything first, because a serial number is known as such only where it has a label, and
must go where it has none. ``redact`` then replaces. Every expression is bounded, so that a hostile text takes time in
proportion to its length.

Kept: addresses that are the same everywhere (127.0.0.1, ::1, 0.0.0.0), host names that name nobody, and this program's
own MESSAGE_IDs.
"""

import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fmsupervisor.conditions import REGISTRY
from fmsupervisor.report.journal import Event

_NAMES_PER_KIND = 10_000  # distinct ones; further ones are all called "more"
_SERIALS = 256
_SHORTEST_SERIAL = 6  # characters; a shorter one is replaced only where it has its label
_SHORTEST_HOST_NAME = 2
_NAMELESS = frozenset(
    ("localhost", "localdomain", "host", "node", "server", "linux", "kernel", "nvidia", "gpu", "none", "(none)", "vm")
)
_OWN_IDS = frozenset(
    {*(event.value for event in Event), *(condition.message_id for condition in REGISTRY.values())}
)  # fmt: skip
_UNITS = (".service", ".socket", ".target", ".timer", ".mount", ".slice", ".scope", ".path", ".device", ".conf")

_NOT_INSIDE = r"(?<![0-9A-Za-z])"
_NOT_FOLLOWED = r"(?![0-9A-Za-z])"
_LABEL = r"(?:serial(?:[ _-]{0,2}(?:number|num|no))?|\bs/n|\bsn|guid|asset[ _-]?tag)"
_LABELLED = re.compile(
    rf"({_LABEL}[\"']?\s{{0,40}}[:=>]\s{{0,40}}[\"']?)([0-9A-Za-z][0-9A-Za-z./-]{{2,63}})", re.IGNORECASE
)
_LABEL_ALONE = re.compile(_LABEL, re.IGNORECASE)
_DEVICE_UUID = re.compile(
    rf"{_NOT_INSIDE}((?:MIG-)?(?:GPU|SWX|MIG))-([0-9a-f]{{4,36}}(?:-[0-9a-f]{{1,12}}){{0,8}})", re.IGNORECASE
)
_UUID = re.compile(rf"{_NOT_INSIDE}[0-9a-f]{{8}}-(?:[0-9a-f]{{4}}-){{3}}[0-9a-f]{{12}}{_NOT_FOLLOWED}", re.IGNORECASE)
_ID = re.compile(rf"{_NOT_INSIDE}[0-9a-f]{{32}}{_NOT_FOLLOWED}", re.IGNORECASE)
_MAC = re.compile(rf"{_NOT_INSIDE}(?:[0-9a-f]{{2}}[:-]){{5,19}}[0-9a-f]{{2}}{_NOT_FOLLOWED}", re.IGNORECASE)
_IPV6 = re.compile(
    rf"{_NOT_INSIDE}(?:[0-9a-f]{{0,4}}:){{2,8}}(?:(?:\d{{1,3}}\.){{3}}\d{{1,3}}|[0-9a-f]{{0,4}}){_NOT_FOLLOWED}",
    re.IGNORECASE | re.ASCII,
)
_IPV4 = re.compile(r"(?<!\d)(?:\d{1,3}\.){3}\d{1,3}(?!\d)", re.ASCII)
_EMAIL = re.compile(r"[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){0,8}")
_USER = re.compile(r"((?:/home|/Users|/var/home|/export/home)/)([^/\s:\"',;]{1,64})")
_SYSLOG_HOST = re.compile(
    r"^([A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d )(\S{1,253})(?= \S{1,100}?:)", re.MULTILINE | re.ASCII
)
_REPLACED = re.compile(r"(?:GPU|SWX|MIG|MIG-GPU|uuid|serial|mac|ip|user|host|email)-\d+")


class Redactor:
    """One report's replacements."""

    def __init__(self, host_names: Iterable[str] = ()) -> None:
        self._labels: dict[str, dict[str, str]] = {}  # kind -> what it was, in one form -> "kind-n"
        self._devices: dict[str, str] = {}  # UUID without prefix -> "GPU-n": it may stand without its prefix as well
        self._serials: dict[str, None] = {}
        self._host_names = _names(host_names)
        self._hosts = _names_pattern(self._host_names)

    def learn(self, text: str) -> None:
        """Find what has a label."""
        for found in _DEVICE_UUID.finditer(text):
            self._device(found)
        for found in _LABELLED.finditer(text):
            value = found[2].rstrip("./-")
            if _is_serial(value) and len(value) >= _SHORTEST_SERIAL and len(self._serials) < _SERIALS:
                self._serials.setdefault(value)

    def redact(self, text: str) -> str:
        """The text without anything that is private."""
        for pattern, replace in self._steps():
            text = pattern.sub(replace, text)
        for serial in sorted(self._serials, key=len, reverse=True):
            if serial in text:
                text = text.replace(serial, self._label("serial", serial))
        if "@" in text:
            text = "".join(self._without_email(line) for line in text.splitlines(keepends=True))
        if self._hosts is not None:
            text = self._hosts.sub(lambda found: self._label("host", self._host_names[found[0].lower()]), text)
        return text

    def redact_document(self, value: Any) -> Any:
        """As ``redact``, for what was read from JSON: names, texts and what stands below a labelled name."""
        match value:
            case str():
                return self.redact(value)
            case list():
                return [self.redact_document(each) for each in value]
            case dict():
                return {self.redact(str(name)): self._member(str(name), each) for name, each in value.items()}
            case _:
                return value

    def counts(self) -> Mapping[str, int]:
        """How many different things of each kind were replaced."""
        return {kind: len(names) for kind, names in sorted(self._labels.items())}

    def _member(self, name: str, value: Any) -> Any:
        if isinstance(value, str | int) and not isinstance(value, bool) and _LABEL_ALONE.search(name):
            return self._label("serial", str(value)) if _is_serial(str(value)) else self.redact_document(value)
        return self.redact_document(value)

    def _steps(self) -> tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...]:
        """In this order: an address could be part of a longer thing that comes before it."""
        return (
            (_LABELLED, self._labelled),
            (_DEVICE_UUID, self._device),
            (_UUID, self._uuid),
            (_ID, self._id),
            (_MAC, lambda found: self._label("mac", found[0].lower().replace("-", ":"))),
            (_IPV6, self._ipv6),
            (_IPV4, self._ipv4),
            (_USER, lambda found: found[1] + self._label("user", found[2])),
            (_SYSLOG_HOST, self._syslog_host),
        )

    def _label(self, kind: str, thing: str) -> str:
        names = self._labels.setdefault(kind, {})
        if thing not in names and len(names) >= _NAMES_PER_KIND:
            return f"{kind}-more"
        return names.setdefault(thing, f"{kind}-{len(names) + 1}")

    def _labelled(self, found: re.Match[str]) -> str:
        value = found[2].rstrip("./-")
        if not _is_serial(value) or _DEVICE_UUID.match(found[2]) or _UUID.match(found[2]):
            return found[0]
        return found[1] + self._label("serial", value) + found[2][len(value) :]

    def _device(self, found: re.Match[str]) -> str:
        if not any(character.isdigit() for character in found[2]):
            return found[0]  # a word such as "GPU-added"
        bare = found[2].lower().replace("-", "")
        label = self._label(found[1].upper(), bare)
        if len(self._devices) < _NAMES_PER_KIND:
            self._devices.setdefault(bare, label)
        return label

    def _uuid(self, found: re.Match[str]) -> str:
        bare = found[0].lower().replace("-", "")
        return self._devices.get(bare) or self._label("uuid", bare)

    def _id(self, found: re.Match[str]) -> str:
        bare = found[0].lower()
        if bare in _OWN_IDS:
            return found[0]
        return self._devices.get(bare) or self._label("uuid", bare)

    def _ipv6(self, found: re.Match[str]) -> str:
        """The longest part that is an address: a colon before or behind may belong to the sentence."""
        text = found[0]
        for start, end in ((0, 0), (0, 1), (1, 0), (1, 1)):
            middle = text[start : len(text) - end]
            try:
                address = ipaddress.IPv6Address(middle)
            except ValueError:
                continue
            if address.is_loopback or address.is_unspecified:
                return text
            return text[:start] + self._label("ip", str(address)) + text[len(text) - end :]
        return text

    def _ipv4(self, found: re.Match[str]) -> str:
        octets = [int(octet) for octet in found[0].split(".")]
        if max(octets) > 255 or octets[0] == 127 or octets in ([0] * 4, [255] * 4):  # noqa: PLR2004 - of an address
            return found[0]
        return self._label("ip", ".".join(map(str, octets)))

    def _syslog_host(self, found: re.Match[str]) -> str:
        name = found[2].lower()
        if name in _NAMELESS or _REPLACED.fullmatch(found[2]):
            return found[0]
        return found[1] + self._label("host", self._host_names.get(name, name))

    def _without_email(self, line: str) -> str:
        return _EMAIL.sub(self._email, line) if "@" in line else line

    def _email(self, found: re.Match[str]) -> str:
        return found[0] if found[0].endswith(_UNITS) else self._label("email", found[0].lower())


def _is_serial(value: str) -> bool:
    """Whether it could be one: it has a digit, and is neither already replaced nor a plain small number."""
    return any(character.isdigit() for character in value) and not re.fullmatch(
        r"(?:serial|GPU|SWX)-\d+|\d{1,2}", value
    )


def _names(host_names: Iterable[str]) -> Mapping[str, str]:
    """Each form of each name -> the form that it is counted by: a host in full and in short is one host."""
    names: dict[str, str] = {}
    for name in host_names:
        whole = name.strip().strip(".").lower()
        short, _, domain = whole.partition(".")
        names |= {whole: short, short: short, domain: domain}
    return {name: one for name, one in names.items() if len(name) >= _SHORTEST_HOST_NAME and name not in _NAMELESS}


def _names_pattern(names: Iterable[str]) -> re.Pattern[str] | None:
    """Finds any of the names as a whole word; None when there is nothing to look for."""
    longest_first = sorted(names, key=len, reverse=True)
    if not longest_first:
        return None
    return re.compile(f"{_NOT_INSIDE}(?:{'|'.join(map(re.escape, longest_first))}){_NOT_FOLLOWED}", re.IGNORECASE)

r"""From the bytes of Fabric Manager's log to batches of facts.

A line is ``[Dec 19 2024 22:08:53] [INFO] [tid 1570] message``, or bare: the session header, rows of a table, payloads,
blank lines, everything on standard error before the log is open. In a journal or a container's log a prefix such as
``nv-fabricmanager[1570]: `` comes first. The time is local, without a zone, of one second. The messages are described
in ``log_kinds``.

The difficulty is volume: every communicator of every job writes about ten lines that only need counting, and a regular
expression for each of them would cost more than everything else the daemon does. Such lines differ in decimal and
hexadecimal numbers alone. So the engine takes a whole chunk, deletes ``[0-9a-f]`` from it (one pass in C), splits both
texts into lines, and looks up each remaining *shape* in a small table of verdicts, learned by classifying the first
line of each shape. Quiet kinds are then counted per shape without touching the line again; every other line is looked
at itself. In one case a digit decides the kind, the status of an in-band message: ``status:0`` is marked before.
A line that no rule knows says nothing about its shape: it may be a damaged one, and the next of that shape an error
that counts. Such lines are remembered as they are, but for the values of their digits.

The result does not depend on how the input is cut into chunks. Memory is bounded whatever comes: a partial line keeps
its first 64 KiB, tables and lists have a limit, NUL bytes (holes that a truncation leaves) are dropped on arrival.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from fmsupervisor.fabric_manager.log_kinds import NO_FIELDS, PLAIN_KINDS, QUIET_KINDS, TROUBLE_KINDS, Rule, classify
from fmsupervisor.facts import LogBatch, LogKind, LogRecord, SwitchErrorKey

LINE_LIMIT_BYTES = 1 << 16  # of a longer line the rest is dropped
TEXT_LIMIT_BYTES = 1024  # of LogRecord.text
RELAY_LIMIT = 200
RECORDS_PER_KIND = 80  # per batch; about 25 kinds are recorded

_CHUNK_BYTES = 1 << 17
_SHAPE_LIMIT = 1024
_SHAPE_LIMIT_BYTES = 512
_SWITCH_ERROR_LIMIT = 4096
_SECONDS_REMEMBERED = 4  # threads write a little out of order
_UNKNOWN_LEVEL_LIMIT = 8
_KNOWN_LEVELS = frozenset({"", "INFO", "WARNING", "ERROR", "CRITICAL"})
_CALM_LEVELS = frozenset({"", "INFO", "DEBUG"})

_DIGITS_ALIKE = bytes.maketrans(b"123456789", b"000000000")
_HEXADECIMAL = b"0123456789abcdef"
_STATUS_GOOD = b"status:0 "
_STATUS_MARKED = b"status:_ "

_LINE = re.compile(
    rb"(?:(?P<journal_time>[A-Z][a-z]{2} [ \d]?\d \d\d:\d\d:\d\d) \S+ )?"
    rb"(?:(?:nv-fabricmanager?|nvidia-fabricmanager-start\.sh|nvlsm|OpenSM|\d{1,3}(?:\.\d{1,3}){3})(?:\[\d+\])?: )?"
    rb"(?:\[(?P<time>[^][]{4,30}?\d\d:\d\d:\d\d)(?:[.,]\d+)?\] \[(?P<level>[A-Z]{1,16})\](?: \[tid \d+\])?(?: |$))?"
    rb"(?P<message>.*)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True, eq=False)
class _Verdict:
    """What all lines of one shape have in common."""

    level: str
    rule: Rule | None
    kind: LogKind
    is_quiet: bool
    is_urgent: bool


@dataclass(slots=True)
class _Relay:
    """Lines for the journal. When there are too many, calm lines give way to urgent ones."""

    limit: int
    urgent: list[tuple[int, LogRecord]] = field(default_factory=list)
    calm: list[tuple[int, LogRecord]] = field(default_factory=list)
    offered: int = 0

    def has_room(self, *, is_urgent: bool) -> bool:
        """Whether one more line would be kept."""
        return len(self.urgent) + (0 if is_urgent else len(self.calm)) < self.limit

    def offer(self, record: LogRecord, *, is_urgent: bool) -> None:
        """Keep the line if there is room."""
        if self.has_room(is_urgent=is_urgent):
            (self.urgent if is_urgent else self.calm).append((self.offered, record))
        self.offered += 1

    def result(self) -> tuple[LogRecord, ...]:
        """The lines kept, in the order they came."""
        kept = self.urgent + self.calm[: self.limit - len(self.urgent)]
        return tuple(record for _, record in sorted(kept, key=lambda pair: pair[0]))


@dataclass(slots=True)
class _Increments:
    """What ``take_batch`` hands out."""

    relay: _Relay
    levels: Counter[str] = field(default_factory=Counter)
    unrecognised: int = 0
    records: list[LogRecord] = field(default_factory=list)
    records_by_kind: Counter[LogKind] = field(default_factory=Counter)
    switch_errors: dict[SwitchErrorKey, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ParserMemory:
    """What a parser must know to go on where another one has stopped; bytes are written as Latin-1."""

    partial: str = ""
    counted_in: tuple[tuple[str, frozenset[SwitchErrorKey]], ...] = ()
    last_untimed: SwitchErrorKey | None = None


class LogParser:
    """Reads one source (``file``, ``stdout`` or ``stderr``) of one Fabric Manager session. Never raises on input."""

    def __init__(self, source: str, *, relay_limit: int = RELAY_LIMIT) -> None:
        self._source = source
        self._relay_limit = relay_limit
        self._partial: list[bytes] = []
        self._partial_bytes = 0
        self._verdicts: dict[bytes, _Verdict] = {}  # by shape
        self._unrecognised: dict[bytes, _Verdict] = {}  # by the line, all digits alike
        self._unknown_levels: set[str] = set()
        self._switch_error_texts: dict[bytes, tuple[SwitchErrorKey, Mapping[str, str]]] = {}
        self._counted_in: dict[bytes, set[SwitchErrorKey]] = {}  # time of one second -> what was counted in it
        self._last_untimed: SwitchErrorKey | None = None
        self._new = _Increments(_Relay(relay_limit))

    def memory(self) -> ParserMemory:
        """For ``recall``; what ``take_batch`` has not handed out yet is not in it."""
        counted = tuple((second.decode("latin-1"), frozenset(keys)) for second, keys in self._counted_in.items())
        return ParserMemory(b"".join(self._partial).decode("latin-1"), counted, self._last_untimed)

    def recall(self, memory: ParserMemory) -> None:
        """Go on as if this parser, which is new, had read what the other one has read."""
        self._keep_partial(memory.partial.encode("latin-1"))
        self._counted_in = {second.encode("latin-1"): set(keys) for second, keys in memory.counted_in}
        self._last_untimed = memory.last_untimed

    def feed(self, data: bytes) -> None:
        """Take the next bytes; lines may be cut anywhere."""
        for start in range(0, len(data), _CHUNK_BYTES):
            chunk = data[start : start + _CHUNK_BYTES]
            if b"\0" in chunk:
                chunk = chunk.replace(b"\0", b"")
            end = chunk.rfind(b"\n") + 1
            if end == 0:
                self._keep_partial(chunk)
                continue
            self._partial.append(chunk[:end])
            lines = b"".join(self._partial)
            self._partial.clear()
            self._partial_bytes = 0
            self._keep_partial(chunk[end:])
            self._take_lines(lines)

    def finish(self) -> None:
        """Treat what came after the last line end as a line: nothing more will come."""
        if self._partial:
            self.feed(b"\n")

    def take_batch(self, *, file_size_bytes: int | None = None, problem: str = "") -> LogBatch:
        """Everything new since the last call; the two arguments are passed on."""
        new, self._new = self._new, _Increments(_Relay(self._relay_limit))
        relay = new.relay.result()
        return LogBatch(
            source=self._source,
            lines_by_level=dict(new.levels),
            unrecognised=new.unrecognised,
            records=tuple(new.records),
            switch_errors=new.switch_errors,
            relay=relay,
            relay_suppressed=new.relay.offered - len(relay),
            file_size_bytes=file_size_bytes,
            problem=problem,
        )

    def _keep_partial(self, data: bytes) -> None:
        # One byte more than a line may have, so that _take_lines cuts it like any other long line.
        kept = data[: max(0, LINE_LIMIT_BYTES + 1 - self._partial_bytes)]
        if kept:
            self._partial.append(kept)
            self._partial_bytes += len(kept)

    def _take_lines(self, text: bytes) -> None:
        """Count the lines of ``text``, which ends with a line end, and look at those that are not quiet."""
        if b"\r\n" in text:
            text = text.replace(b"\r\n", b"\n")
        lines = text.split(b"\n")
        lines.pop()
        if len(text) > LINE_LIMIT_BYTES and max(map(len, lines)) > LINE_LIMIT_BYTES:
            lines = [line[:LINE_LIMIT_BYTES] for line in lines]
            text = b"\n".join((*lines, b""))
        shapes = text.replace(_STATUS_GOOD, _STATUS_MARKED).translate(None, _HEXADECIMAL).split(b"\n")
        shapes.pop()
        verdicts = [
            verdict or self._learn(line, shape)
            for verdict, line, shape in zip(map(self._verdicts.get, shapes), lines, shapes, strict=True)
        ]
        is_all_quiet = True
        for verdict, count in Counter(verdicts).items():
            self._new.levels[verdict.level] += count
            is_all_quiet = is_all_quiet and verdict.is_quiet
            if verdict.kind is LogKind.UNRECOGNISED:
                self._new.unrecognised += count
        if not is_all_quiet:
            for line, verdict in zip(lines, verdicts, strict=True):
                if not verdict.is_quiet:
                    self._look_at(line, verdict)

    def _learn(self, line: bytes, shape: bytes) -> _Verdict:
        """The verdict on a shape that the table does not have; also asked again for one that came twice in a chunk."""
        alike = line.translate(_DIGITS_ALIKE)
        if known := self._verdicts.get(shape) or self._unrecognised.get(alike):
            return known
        found = _split(line)
        kind, rule, _ = classify(found["message"], _level(found))
        level = self._bounded_level(_level(found))
        is_urgent = kind in TROUBLE_KINDS or level not in _CALM_LEVELS or (not level and self._source == "stderr")
        verdict = _Verdict(level, rule, kind, kind in QUIET_KINDS, is_urgent)
        depends_on_digits = kind is LogKind.INBAND_MESSAGE and _STATUS_GOOD not in line
        table, name = (self._unrecognised, alike) if kind is LogKind.UNRECOGNISED else (self._verdicts, shape)
        if len(name) <= _SHAPE_LIMIT_BYTES and not depends_on_digits:
            if len(table) >= _SHAPE_LIMIT:
                table.clear()
            table[name] = verdict
        return verdict

    def _bounded_level(self, level: str) -> str:
        if level in _KNOWN_LEVELS or level in self._unknown_levels:
            return level
        if len(self._unknown_levels) >= _UNKNOWN_LEVEL_LIMIT:
            return "OTHER"
        self._unknown_levels.add(level)
        return level

    def _look_at(self, line: bytes, verdict: _Verdict) -> None:
        relay = self._new.relay
        if verdict.kind in PLAIN_KINDS and not relay.has_room(is_urgent=verdict.is_urgent):
            relay.offered += 1
            return
        found = _split(line)
        message = found["message"]
        if verdict.kind is LogKind.SWITCH_ERROR and (parsed := self._switch_error(message, verdict)):
            self._count_switch_error(found["time"] or found["journal_time"], message, verdict, *parsed)
            return
        kind = verdict.kind
        fields = verdict.rule.match(message, _level(found)) if verdict.rule else NO_FIELDS
        if fields is None:  # the same shape, and yet another text
            kind, _, fields = classify(message, _level(found))
            self._new.unrecognised += kind is LogKind.UNRECOGNISED
        record = LogRecord(kind, verdict.level, _text(message), fields)
        self._record(record)
        if kind is not LogKind.GPU_PROBE:  # in-band traffic; "added GPU with UUID" tells people
            relay.offer(record, is_urgent=verdict.is_urgent)

    def _switch_error(self, message: bytes, verdict: _Verdict) -> tuple[SwitchErrorKey, Mapping[str, str]] | None:
        """The stream that an SXid message belongs to, and its fields; remembered, since bursts repeat few texts."""
        if parsed := self._switch_error_texts.get(message):
            return parsed
        fields = verdict.rule.match(message, verdict.level) if verdict.rule else None
        if fields is None:
            return None
        port = int(fields["port"]) if "port" in fields else None
        key = SwitchErrorKey(fields["pci_bus_id"], int(fields["sxid"]), fields["severity"], port)
        if len(self._switch_error_texts) >= _SHAPE_LIMIT:
            self._switch_error_texts.clear()
        self._switch_error_texts[message] = key, fields
        return key, fields

    def _count_switch_error(
        self, second: bytes | None, message: bytes, verdict: _Verdict, key: SwitchErrorKey, fields: Mapping[str, str]
    ) -> None:
        if self._is_double(second, key):
            return
        new = self._new
        is_first = key not in new.switch_errors
        if is_first and len(new.switch_errors) >= _SWITCH_ERROR_LIMIT:
            key = SwitchErrorKey("", 0, key.severity, None)  # everything beyond the limit together
        new.switch_errors[key] = new.switch_errors.get(key, 0) + 1
        if not is_first and not new.relay.has_room(is_urgent=True):
            new.relay.offered += 1
            return
        record = LogRecord(LogKind.SWITCH_ERROR, verdict.level, _text(message), fields)
        if is_first:
            self._record(record)
        new.relay.offer(record, is_urgent=True)

    def _is_double(self, second: bytes | None, key: SwitchErrorKey) -> bool:
        """Whether the event was counted already: 535 and others log each SXid twice within a second."""
        if second is None:
            is_double = key == self._last_untimed
            self._last_untimed = None if is_double else key
            return is_double
        counted = self._counted_in.get(second)
        if counted is None:
            if len(self._counted_in) >= _SECONDS_REMEMBERED:
                del self._counted_in[next(iter(self._counted_in))]
            counted = self._counted_in[second] = set()
        if key in counted:
            return True
        if len(counted) < _SWITCH_ERROR_LIMIT:
            counted.add(key)
        return False

    def _record(self, record: LogRecord) -> None:
        if record.kind in PLAIN_KINDS:
            return
        new = self._new
        new.records_by_kind[record.kind] += 1
        if new.records_by_kind[record.kind] <= RECORDS_PER_KIND:
            new.records.append(record)


def split_line(line: bytes) -> tuple[str, bytes]:
    """Level ("" for a bare line) and message of one line by itself."""
    found = _split(line)
    return _level(found), found["message"]


def _split(line: bytes) -> re.Match[bytes]:
    found = _LINE.match(line)
    if found is None:  # every part of the expression is optional
        raise AssertionError(line)
    return found


def _level(found: re.Match[bytes]) -> str:
    return (found["level"] or b"").decode("ascii")


def _text(message: bytes) -> str:
    return message[:TEXT_LIMIT_BYTES].decode("utf-8", "backslashreplace").rstrip()

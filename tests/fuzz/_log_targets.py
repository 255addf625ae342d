"""Fabric Manager's log and the kernel's."""

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

from _digest import digest
from _input import Choices, check

from fmsupervisor.core import events
from fmsupervisor.fabric_manager.log_grammar import (
    LINE_LIMIT_BYTES,
    RECORDS_PER_KIND,
    RELAY_LIMIT,
    TEXT_LIMIT_BYTES,
    LogParser,
)
from fmsupervisor.facts import KernelKind, LogBatch
from fmsupervisor.host import kernel_grammar, kernel_log

DATA = Path(__file__).parents[1] / "data" / "fabric_manager_logs"
_BUS_ID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_LONG = b"\x02"  # stands for nearly as many bytes as a line may have
_LONG_LINES = 2
_MOST_LEVELS = 5 + 8 + 1  # known ones, unknown ones, OTHER


def fabric_manager_log(data: bytes) -> None:
    """Never raises; bounded; nothing counted twice or not at all; the same however the bytes arrive."""
    choices = Choices(data)
    source = choices.one_of(("file", "stdout", "stderr"))
    cuts = [choices.number(2) for _ in range(choices.number() % 8)]
    log = choices.rest().replace(_LONG, b"x" * (LINE_LIMIT_BYTES - 16), _LONG_LINES)
    whole = _parsed(source, [log])
    places = sorted({0, len(log), *(cut % (len(log) + 1) for cut in cuts)})
    check(
        _parsed(source, [log[start:end] for start, end in pairwise(places)]) == whole,
        "the cuts make a difference",
    )
    if len(log) < 128:
        check(_parsed(source, [log[place : place + 1] for place in range(len(log))]) == whole, "byte by byte differs")
    _check_batch(whole, log)
    _check_handover(source, log, places[len(places) // 2], whole)
    if whole.records or whole.switch_errors:
        digest(events.LogRead(whole))


def _parsed(source: str, pieces: list[bytes]) -> LogBatch:
    parser = LogParser(source)
    for piece in pieces:
        parser.feed(piece)
    parser.finish()
    batch = parser.take_batch()
    rest = parser.take_batch()
    check(rest == LogBatch(source), f"something was left: {rest}")
    return batch


def _check_handover(source: str, log: bytes, place: int, whole: LogBatch) -> None:
    """A parser that goes on where another one has stopped counts what one alone would have counted."""
    first, second = LogParser(source), LogParser(source)
    first.feed(log[:place])
    second.recall(first.memory())
    second.feed(log[place:])
    second.finish()
    parts = (first.take_batch(), second.take_batch())
    errors = Counter(parts[0].switch_errors) + Counter(parts[1].switch_errors)
    check(errors == whole.switch_errors, f"{errors} in two parsers, {whole.switch_errors} in one")
    lines = [sum(part.lines_by_level.values()) for part in (*parts, whole)]
    check(lines[0] + lines[1] == lines[2], f"lines: {lines}")
    check(parts[0].unrecognised + parts[1].unrecognised == whole.unrecognised, "unrecognised lines")


def _check_batch(batch: LogBatch, log: bytes) -> None:
    visible = log.replace(b"\0", b"")
    lines = visible.count(b"\n") + (not visible.endswith(b"\n") and bool(visible))
    check(sum(batch.lines_by_level.values()) == lines, f"{batch.lines_by_level} of {lines} lines")
    check(0 <= batch.unrecognised <= lines, "more unrecognised lines than lines")
    check(len(batch.lines_by_level) <= _MOST_LEVELS, "too many levels")
    check(len(batch.relay) <= RELAY_LIMIT, "too many relayed lines")
    check(len(batch.relay) + batch.relay_suppressed <= lines, "more lines to relay than lines")
    kinds = Counter(record.kind for record in batch.records)
    check(max(kinds.values(), default=0) <= RECORDS_PER_KIND, "too many records of a kind")
    for record in (*batch.records, *batch.relay):
        check(len(record.text) <= TEXT_LIMIT_BYTES * 4 and record.text.encode() is not None, "a long text")
        if bus_id := record.fields.get("pci_bus_id"):
            check(_BUS_ID.fullmatch(bus_id) is not None, bus_id)
    for key, count in batch.switch_errors.items():
        check(count > 0 and key.sxid >= 0, (key, count))
        check(not key.pci_bus_id or _BUS_ID.fullmatch(key.pci_bus_id) is not None, key)


def kernel_log_records(data: bytes) -> None:
    """Never raises; what counts is of the kernel itself and has the fields that its kind promises."""
    records = [kernel_log.parse_record(piece) for piece in data.split(b"\xff")]
    lines = [line for line in records if line is not None]
    for line in lines:
        check(line.level in range(8) and line.facility >= 0 and line.seconds >= 0, line)
        check("\n" not in line.text or "\\x0a" in data.decode("latin-1"), "a second line was taken")
        stripped = kernel_grammar.without_prefix(line.text)
        check(line.text.endswith(stripped), "the prefix is no prefix")
    batch = kernel_grammar.batch_of(lines)
    check(len(batch.records) <= len(lines), "more events than lines")
    check(not (batch.records and all(line.facility for line in lines)), "user space was believed")
    for record in batch.records:
        check(record.kind is not KernelKind.SWITCH_ERROR_DETAIL, "a detail stands alone")
        check(len(record.text) <= 1024 and len(record.details) <= 4, "unbounded")
        if bus_id := record.fields.get("pci_bus_id"):
            check(_BUS_ID.fullmatch(bus_id) is not None, bus_id)
    if batch.records:
        digest(events.KernelLogRead(batch))


def fabric_manager_log_seeds() -> list[bytes]:
    """The public excerpts, and lines of the kinds that they lack."""
    excerpts = [path.read_bytes() for path in sorted(DATA.glob("*.log"))]
    lines = [
        b"[Dec 19 2024 22:08:53] [ERROR] [tid 1570] detected NVSwitch fatal error 12028 on fid 0 on NVSwitch pci bus id 00000000:05:00.0 physical id 1 port 36",
        b"[Dec 19 2024 22:08:53] [INFO] [tid 1570] Successfully configured all the available NVSwitches to route GPU NVLink traffic.",
        b"nv-fabricmanager: error while loading shared libraries: libnuma.so.1: cannot open shared object file",
        b"[Dec 19 2024 22:08:53] [ERROR] [tid 9] fabric manager NVIDIA GPU driver interface version 580.1 don't match with driver version 570.1",
        b"Dec 19 22:08:53 host nv-fabricmanager[1570]: [Dec 19 2024 22:08:53] [TRACE] [tid 1] \x02",
        b"Received an inband message:  Message header details: magic Id:adbc request Id:2 status:0 type:2 length:14",
    ]
    bodies = [*(excerpt[:2000] for excerpt in excerpts), *(excerpt[-1200:] for excerpt in excerpts), *lines]
    return [b"\x00\x02\x00\x40\x01\x00" + body + b"\n" for body in bodies]


def kernel_log_seeds() -> list[bytes]:
    """A line of each kind."""
    texts = (
        "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error (First)",
        "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 12028, Severity 0 Engine instance 32 Sub-engine instance 00",
        "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 12028, Data {0x00000000, 0x10}",
        "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 10004, Temperature 95C | TSENSE WARN Threshold 90C",
        "NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        "nvidia-nvswitch: Probing device 0000:05:00.0, Vendor Id = 0x10de, Device Id = 0x22a3, Class = 0x68000",
        "nvidia-nvswitch0: using MSI",
        "nvidia-nvswitch0: removing device 0000:05:00.0",
        "nvidia-nvswitch0: Blacklisted nvswitch device",
        "nvidia-nvswitch0: Interrupts disabled to avoid a storm",
        "nvidia-nvswitch: Version mismatch, kernel version 570.1 user version 580.1",
        "NVRM: GPU 0000:1b:00.0 is already bound to vfio-pci.",
        "Lockdown: insmod: unsigned module loading is restricted; see man kernel_lockdown.7",
        "nvidia: version magic '6.1 SMP' should be '6.2 SMP'",
        "nvidia: disagrees about version of symbol module_layout",
        "[  12.34] [T1] host kernel: <4>[ 1.2] NVRM: API mismatch",
    )
    records = [f"4,{number},{number}000,-;{text}\n SUBSYSTEM=pci\n".encode() for number, text in enumerate(texts, 1)]
    return [*records, b"\xff".join(records), b"12,5,6,-;forged\\x0aNVRM: Xid"]

"""report.kernel_journal: which lines of the kernel log become entries of our journal, and with which fields."""

import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fmsupervisor.facts import KernelBatch, KernelKind, KernelRecord
from fmsupervisor.host.kernel_grammar import batch_of
from fmsupervisor.host.kernel_log import KernelLine
from fmsupervisor.report import journal
from fmsupervisor.report.journal import Event
from fmsupervisor.report.kernel_journal import log_kernel_batch
from fmsupervisor.settings import LoggingSettings

EVENT = (
    "nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 48 LTSSM Fault Up",
    "nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Severity 1 Engine instance 48 Sub-engine instance 00",
    "nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Data {0x10000000, 0x10000000}",
)
Entries = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def entries() -> Iterator[Entries]:
    stream = io.StringIO()
    journal.configure_logging(LoggingSettings(format="json"), {}, stream)

    def written(*texts: str, is_old: bool = False) -> list[dict[str, Any]]:
        lines = [KernelLine(3, 0, 70 + number, 12.5, text, is_old=is_old) for number, text in enumerate(texts)]
        log_kernel_batch(batch_of(lines))
        return [json.loads(line) for line in stream.getvalue().splitlines()]

    yield written
    journal.configure_logging(LoggingSettings(), {})


def test_an_sxid_is_one_entry_with_its_fields(entries: Entries) -> None:
    (entry,) = entries(*EVENT)
    assert entry["details"] == list(EVENT[1:])
    assert entry["message"] == f"kernel: {EVENT[0]}"
    del entry["timestamp"], entry["details"], entry["message"]
    assert entry == {
        "level": "error",
        "event": "kernel-line",
        "message_id": Event.KERNEL_LINE.value,
        "kernel_sequence": 70,
        "kernel_seconds": 12.5,
        "kernel_kind": "switch-error",
        "pci_bus_id": "0000:06:00.0",
        "nvswitch": "1",
        "sxid": "20034",
        "sxid_severity": "fatal",
        "nvlink_port": "48",
    }


def test_an_xid_carries_its_number_and_the_gpu(entries: Entries) -> None:
    (entry,) = entries("NVRM: Xid (PCI:0000:91:00): 79, pid=1, name=x, GPU has fallen off the bus.")
    assert (entry["xid"], entry["pci_bus_id"], entry["level"]) == ("79", "0000:91:00.0", "error")


@pytest.mark.parametrize(
    "text",
    ["eth0: link up", "nvidia-nvswitch0: open (major=510)", "nvidia-nvswitch0: using MSI", "nvidia-nvswitch0: new"],
)
def test_what_does_not_matter_is_not_written(entries: Entries, text: str) -> None:
    assert entries(text) == []


def test_what_was_there_before_is_summed_up_in_one_line(entries: Entries) -> None:
    (entry,) = entries(*EVENT, *EVENT, "nvidia-nvswitch: Probing device 0000:06:00.0, Vendor", is_old=True)
    assert entry["event"] == "kernel-history"
    assert entry["message"].endswith("2 SXid 20034 (fatal) of 0000:06:00.0")


def test_many_kinds_of_before_are_cut(entries: Entries) -> None:
    texts = (f"nvidia-nvswitch1: SXid (PCI:0000:06:00.0): {number}, Fatal, x" for number in range(20000, 20015))
    (entry,) = entries(*texts, is_old=True)
    assert entry["message"].endswith("5 kinds more")


def test_nothing_from_before_is_no_line(entries: Entries) -> None:
    assert entries("nvidia-nvswitch0: using MSI", is_old=True) == []


def test_a_flood_is_cut_and_said_to_be(entries: Entries) -> None:
    texts = (f"nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 12028, Non-fatal, Link 01 {number}" for number in range(250))
    found = entries(*texts)
    assert len(found) == 101
    assert (found[-1]["event"], found[-1]["suppressed"]) == ("suppressed", 150)


def test_every_kind_can_be_written() -> None:
    fields = {"pci_bus_id": "x", "sxid": "1", "severity": "fatal", "xid": "79"}
    log_kernel_batch(KernelBatch(tuple(KernelRecord(kind, "text", fields) for kind in KernelKind)))

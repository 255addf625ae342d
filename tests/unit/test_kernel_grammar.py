"""host.kernel_grammar: real lines of the drivers and of the module loader, and what belongs to one event."""

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fmsupervisor.facts import KernelKind, KernelRecord
from fmsupervisor.host.kernel_grammar import batch_of, classify, without_prefix
from fmsupervisor.host.kernel_log import KernelLine

SXID = "nvidia-nvswitch1: SXid (PCI:0000:06:00.0): "
SWITCH_ERRORS = (
    ("fatal", f"{SXID}20034, Fatal, Link 48 LTSSM Fault Up", "20034", "48", "LTSSM Fault Up"),
    ("first", f"{SXID}28006, Non-fatal, Link 46 MC TS crumbstore MCTO (First)", "28006", "46", "MC TS crumbstore MCTO"),
    ("correctable", f"{SXID}22013, Correctable, Link 07 x", "22013", "7", "x"),
    ("of no link", f"{SXID}10003, Fatal, unhandled interrupt in f(12)", "10003", None, "unhandled interrupt in f(12)"),
    ("instance", f"{SXID}10001, Non-fatal, PRI error, instance=3, chiplet=1", "10001", None, "PRI error, instance=3, chiplet=1"),
    ("untagged", f"{SXID}25010, ALI Training failure. Info 0x1", "25010", None, "ALI Training failure. Info 0x1"),
    ("temperature", f"{SXID}10006, TSENSE OVERT Threshold reached. Shutting Down", "10006", None, "TSENSE OVERT Threshold reached. Shutting Down"),
    ("firmware", f"{SXID}10008, Fatal, Firmware initialization failure (0x1/0x2", "10008", None, "Firmware initialization failure (0x1/0x2"),
)  # fmt: skip
WORDS = {"Fatal": "fatal", "Non-fatal": "non-fatal", "Correctable": "correctable"}


@pytest.mark.parametrize(
    ("text", "sxid", "port", "what"),
    [pytest.param(*row[1:], id=row[0]) for row in SWITCH_ERRORS],
)
def test_the_line_of_an_sxid_that_counts(text: str, sxid: str, port: str | None, what: str) -> None:
    record = classify(text)
    assert record is not None
    assert record.kind is KernelKind.SWITCH_ERROR
    fields = record.fields
    assert (fields["minor"], fields["pci_bus_id"]) == ("1", "0000:06:00.0")
    assert (fields["sxid"], fields.get("port"), fields["what"]) == (sxid, port, what)
    word = text.removeprefix(f"{SXID}{sxid}, ").partition(",")[0]
    assert fields["severity"] == WORDS.get(word, "untagged")
    assert ("first" in fields) == text.endswith("(First)")


@pytest.mark.parametrize(
    "text",
    [
        f"{SXID}20034, Severity 1 Engine instance 48 Sub-engine instance 00",
        f"{SXID}10002, Severity 5 Engine instance 00 Sub-engine instance 00",
        f"{SXID}20034, Data {{0x10000000, 0x00000000, 0x00000000}}",
        f"{SXID}20034, Data {{0x10000000, 0x0000",
    ],
)
def test_its_further_lines_do_not(text: str) -> None:
    record = classify(text)
    assert record is not None
    assert record.kind is KernelKind.SWITCH_ERROR_DETAIL


@pytest.mark.parametrize(
    ("text", "bus_id", "xid", "what"),
    [
        pytest.param(
            "NVRM: Xid (PCI:0000:91:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            *("0000:91:00.0", "79", "GPU has fallen off the bus."),
            id="with unknown process",
        ),
        pytest.param(
            "NVRM: Xid (PCI:0000:01:00): 45, pid=712, name=python3, Ch 00000001 caused by previous Xid 149",
            *("0000:01:00.0", "45", "Ch 00000001 caused by previous Xid 149"),
            id="with process",
        ),
        pytest.param(
            "NVRM: Xid (PCI:0000:04:00): 145, RLW_CTRL Nonfatal XC0 i0 Link 00 (0x00000003 0x0)",
            *("0000:04:00.0", "145", "RLW_CTRL Nonfatal XC0 i0 Link 00 (0x00000003 0x0)"),
            id="570 without process",
        ),
        pytest.param(
            "NVRM: Xid (PCI:0000:01:00 GPU-I:05 GPU-CI:00): 45, Ch 00000010",
            *("0000:01:00.0", "45", "Ch 00000010"),
            id="MIG",
        ),
        pytest.param(
            "NVRM: Xid (PCI:0000:3b:00): 74, pid=1, name=a b, NVLink: failed to train link 3 to remote PCI:0000:05:00",
            *("0000:3b:00.0", "74", "NVLink: failed to train link 3 to remote PCI:0000:05:00"),
            id="commas and colons in the text",
        ),
    ],
)
def test_an_xid_names_the_gpu_and_the_number(text: str, bus_id: str, xid: str, what: str) -> None:
    record = classify(text)
    assert record is not None
    assert record.kind is KernelKind.GPU_ERROR
    assert (record.fields["pci_bus_id"], record.fields["xid"], record.fields["what"]) == (bus_id, xid, what)


@pytest.mark.parametrize(
    ("text", "kind", "fields"),
    [
        (
            "nvidia-nvswitch: Probing device 0000:83:00.0, Vendor Id = 0x10de, Device Id = 0x22a3, Class = 0x68000",
            KernelKind.SWITCH_PROBING,
            {"pci_bus_id": "0000:83:00.0"},
        ),
        ("nvidia-nvswitch0: using MSI", KernelKind.SWITCH_READY, {"minor": "0"}),
        ("nvidia-nvswitch0: open (major=510)", KernelKind.SWITCH_OPENED, {"minor": "0"}),
        ("nvidia-nvswitch0: release (major=510)", KernelKind.SWITCH_RELEASED, {"minor": "0"}),
        ("nvidia-nvswitch0: Blacklisted nvswitch device", KernelKind.SWITCH_BLACKLISTED, {"minor": "0"}),
        ("nvidia-nvswitch0: ioctl attempted on blacklisted device", KernelKind.SWITCH_BLACKLISTED, {"minor": "0"}),
        ("nvidia-nvswitch0: a stale fd detected", KernelKind.STALE_DESCRIPTOR, {"minor": "0"}),
        (
            "nvidia-nvswitch0: removing device 0000:83:00.0",
            KernelKind.SWITCH_REMOVING,
            {"minor": "0", "pci_bus_id": "0000:83:00.0"},
        ),
        ("nvidia-nvswitch0: Failed to read fabric state, 1f", KernelKind.SWITCH_UNREADABLE, {"minor": "0"}),
        ("nvidia-nvswitch2: Interrupts disabled to avoid a storm", KernelKind.INTERRUPT_STORM, {"minor": "2"}),
        (
            "nvidia-nvswitch: Version mismatch, kernel version 580.126.09 user version 570.211.01",
            KernelKind.VERSION_MISMATCH,
            {"kernel_version": "580.126.09", "user_version": "570.211.01"},
        ),
        (
            "nvidia-nvswitch2: Failed to initialize device : -5",
            KernelKind.SWITCH_PROBE_FAILED,
            {"minor": "2", "what": "initialize device", "error": "-5"},
        ),
        (
            "nvidia-nvswitch2:Failed during device post init : -5",
            KernelKind.SWITCH_PROBE_FAILED,
            {"minor": "2", "what": "device post init", "error": "-5"},
        ),
        (
            "nvidia-nvswitch 0000:83:00.0: probe with driver nvidia-nvswitch failed with error -22",
            KernelKind.SWITCH_PROBE_FAILED,
            {"pci_bus_id": "0000:83:00.0", "error": "-22"},
        ),
        (
            "nvidia-nvswitch: probe of 0000:83:00.0 failed with error -22",
            KernelKind.SWITCH_PROBE_FAILED,
            {"pci_bus_id": "0000:83:00.0", "error": "-22"},
        ),
        ("nvidia-nvswitch: probe of x failed with error -22", KernelKind.OTHER_SWITCH_LINE, {}),
        ("nvidia-nvswitch0: something new", KernelKind.OTHER_SWITCH_LINE, {"minor": "0"}),
        ("NVRM: No NVIDIA GPU found.", KernelKind.LOAD_FAILED, {}),
        ("NVRM: None of the NVIDIA devices were initialized.", KernelKind.LOAD_FAILED, {}),
        ("NVRM: rm_init_rm() failed!", KernelKind.LOAD_FAILED, {}),
        ("NVRM: GPU 0000:91:00.0: RmInitAdapter failed! (0x62:0x0:1)", KernelKind.LOAD_FAILED, {}),
        (
            "NVRM: The NVIDIA GPU 0000:91:00.0\nNVRM: (PCI ID) installed in this system has\nNVRM: fallen off the bus.",
            KernelKind.LOAD_FAILED,
            {},
        ),
        (
            "NVRM: GPU 0000:91:00.0 is already bound to vfio-pci.",
            KernelKind.GPU_OWNED,
            {"pci_bus_id": "0000:91:00.0", "driver": "vfio-pci"},
        ),
        ("NVRM: The NVIDIA probe routine was not called for 8 device(s).", KernelKind.GPU_OWNED, {"count": "8"}),
        ("Loading of unsigned module is rejected", KernelKind.SIGNATURE, {}),
        ("Loading of module with unavailable key is rejected", KernelKind.SIGNATURE, {}),
        (
            "nvidia: module verification failed: signature and/or required key missing - tainting kernel",
            KernelKind.SIGNATURE,
            {"module": "nvidia"},
        ),
        ("Module nvidia is blacklisted", KernelKind.MODULE_REFUSED, {}),
        (
            "nvidia: Unknown symbol drm_gem_object_free (err -2)",
            KernelKind.MODULE_REFUSED,
            {"module": "nvidia", "unknown_symbol": "drm_gem_object_free"},
        ),
    ],
)
def test_other_lines(text: str, kind: KernelKind, fields: dict[str, str]) -> None:
    record = classify(text)
    assert record is not None
    assert (record.kind, dict(record.fields)) == (kind, fields)


def test_lockdown_names_the_program() -> None:
    record = classify("Lockdown: insmod: unsigned module loading is restricted; see man kernel_lockdown.7")
    assert record is not None
    assert (record.kind, record.fields["name"]) == (KernelKind.LOCKDOWN, "insmod")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "eth0: link up",
        f"audit: somebody wrote {SXID}20034, Fatal, Link 48 LTSSM Fault Up",
        "NVRM: GPU at PCI:0000:91:00: GPU-1",
        "nvidia-nvlink: Nvlink Core is being initialized, major device number 511",
    ],
)
def test_what_is_about_something_else_has_no_kind(text: str) -> None:
    assert classify(text) is None


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "[6781753.400584] ",
        "[    5.400584] ",
        "[6781753.400584] [ T1234] ",
        "<3>[12.5] ",
        "Jul 23 07:53:55 host01 kernel: ",
        "2024-07-23T07:53:55.123456+00:00 host01 kernel: [6781753.400584] ",
    ],
)
def test_what_dmesg_and_journals_put_before_a_line_is_cut_off(prefix: str) -> None:
    text = f"{SXID}20034, Fatal, Link 48 LTSSM Fault Up"
    assert without_prefix(prefix + text) == text


def lines(*texts: str, **changes: int | bool) -> list[KernelLine]:
    """Consecutive records of the kernel."""
    return [
        KernelLine(3, int(changes.get("facility", 0)), number, float(number), text, is_old=bool(changes.get("is_old")))
        for number, text in enumerate(texts, 100)
    ]


# Public excerpt: Fatal, Severity and Data lines of several switches interleave.
INTERLEAVED = (
    "NVRM: Xid (PCI:0000:91:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    "NVRM: GPU 0000:91:00.0: GPU has fallen off the bus.",
    "nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 48 LTSSM Fault Up",
    "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 63 LTSSM Fault Up",
    "nvidia-nvswitch2: SXid (PCI:0000:07:00.0): 20034, Severity 1 Engine instance 60 Sub-engine instance 00",
    "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Data {0x10000000, 0x10000000, 0x00000000}",
    "nvidia-nvswitch2: SXid (PCI:0000:07:00.0): 20034, Fatal, Link 37 LTSSM Fault Up",
    "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 62 LTSSM Fault Up",
)


def test_each_event_is_one_record_with_its_further_lines() -> None:
    records = batch_of(lines(*INTERLEAVED)).records
    found = [(one.fields["pci_bus_id"], one.fields.get("port"), len(one.details), one.sequence) for one in records]
    assert found == [
        ("0000:91:00.0", None, 0, 100),
        ("0000:06:00.0", "48", 0, 102),
        ("0000:05:00.0", "63", 1, 103),
        ("0000:07:00.0", "37", 0, 106),
        ("0000:05:00.0", "62", 0, 107),
    ]


def test_what_user_space_writes_to_the_kernel_log_does_not_count() -> None:
    assert batch_of(lines(*INTERLEAVED, facility=1)).records == ()


def test_what_was_there_before_is_marked() -> None:
    assert all(record.is_old for record in batch_of(lines(*INTERLEAVED, is_old=True)).records)


def test_losses_are_summed() -> None:
    batch = batch_of([KernelLine(3, 0, 9, 0.0, "x", True, 7), KernelLine(3, 0, 12, 0.0, "x", True, 2)])
    assert (batch.lost, batch.records) == (9, ())


@hypothesis_settings(max_examples=300, deadline=None, database=None)
@given(st.text(max_size=200), st.sampled_from(INTERLEAVED), st.integers(0, 90))
def test_no_text_is_too_strange(text: str, line: str, cut: int) -> None:
    for strange in (text, line[:cut] + text, line + text, text + line):
        found = classify(strange)
        assert found is None or isinstance(found, KernelRecord)
        without_prefix(strange)

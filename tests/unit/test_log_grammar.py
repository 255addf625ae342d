"""The grammar of Fabric Manager's log."""

import pathlib
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmsupervisor.fabric_manager.log_grammar import LINE_LIMIT_BYTES, RECORDS_PER_KIND, TEXT_LIMIT_BYTES, LogParser
from fmsupervisor.fabric_manager.log_kinds import RULES, classify
from fmsupervisor.facts import LogBatch, LogKind, SwitchErrorKey

LOGS = pathlib.Path(__file__).parent.parent / "data" / "fabric_manager_logs"
SXID = (
    "detected NVSwitch non-fatal error 12028 on fid 0 on NVSwitch pci bus id 00000000:84:00.0 physical id 1 port {port}"
)
SXID_KEY = SwitchErrorKey("0000:84:00.0", 12028, "non-fatal", 35)


def line(message: str, level: str = "INFO", time: str = "Dec 19 2024 19:17:49") -> bytes:
    return f"[{time}] [{level}] [tid 1374] {message}\n".encode()


def parse(data: bytes, source: str = "file", **options) -> LogBatch:
    parser = LogParser(source, **options)
    parser.feed(data)
    parser.finish()
    return parser.take_batch()


def sample(name: str) -> bytes:
    return (LOGS / name).read_bytes()


# Level, message, kind, fields. Without a level the line is bare.
KINDS = [
    (
        "",
        "Fabric Manager Log initializing at: 12/20/2024 00:36:34.217",
        "session-header",
        {"time": "12/20/2024 00:36:34.217"},
    ),
    (
        "",
        "Fabric Manager Log initializing at: 3/27/2025 15:47:10.092",
        "session-header",
        {"time": "3/27/2025 15:47:10.092"},
    ),
    (
        "INFO",
        "Fabric Manager version 535.161.08 is running with the following configuration options",
        "version",
        {"version": "535.161.08"},
    ),
    ("", "Fabric Manager version is : 610.57.04", "version", {"version": "610.57.04"}),
    (
        "INFO",
        "Max Log file size = 1024 (MBs)",
        "setting",
        {"name": "Max Log file size", "value": "1024 (MBs)"},
    ),
    (
        "INFO",
        "FM Library communication unix domain socket =",
        "setting",
        {"name": "FM Library communication unix domain socket", "value": ""},
    ),
    ("INFO", "Connected to 1 node.", "connected", {"nodes": "1"}),
    (
        "INFO",
        "parsed fabric topology file /usr/share/nvidia/nvswitch/dgxh100_hgxh100_topology successfully. topology name: DGXH100_HGXH100, build time: Mon Feb 27 17:25:17 2023",
        "topology",
        {"file": "/usr/share/nvidia/nvswitch/dgxh100_hgxh100_topology", "name": "DGXH100_HGXH100"},
    ),
    (
        "",
        "  Index: 01  Physical Id: 1  PCI Bus ID: 00000000:8A:00.0  Enabled Link Mask: ffffffff000000ff  Arch Type: 3  UUID : SWX-0A1B",
        "switch-row",
        {"physical_id": "1", "pci_bus_id": "0000:8a:00.0", "link_mask": "ffffffff000000ff", "uuid": "SWX-0A1B"},
    ),
    (
        "",
        "  Index: 01  Physical Id: 1  PCI Bus ID: 00000000:07:00.0  Discovered Link Mask: fff  UUID : GPU-0a1b",
        "gpu-row",
        {"physical_id": "1", "pci_bus_id": "0000:07:00.0", "uuid": "GPU-0a1b"},
    ),
    (
        "INFO",
        "fid: 0  Physical ID: 6  Index: 39680  Handle: 190f91b6  PCI Bus ID: 00000000:9B:00.0  Discovered Link Mask: 3ffff  Enabled Link Mask: 3ffff  UUID: GPU-0a1b",
        "gpu-row",
        {"physical_id": "6", "pci_bus_id": "0000:9b:00.0", "uuid": "GPU-0a1b"},
    ),
    ("INFO", "start NVSwitch 0/12 routing configuration", "routing-started", {"physical_id": "12"}),
    ("INFO", "completed NVSwitch 0/12 routing configuration", "routing-completed", {"physical_id": "12"}),
    (
        "INFO",
        "Successfully configured all the available GPUs and NVSwitches to route NVLink traffic.",
        "configured",
        {},
    ),
    (
        "INFO",
        "Successfully configured all the available NVSwitches to route GPU NVLink traffic. NVLink Peer-to-Peer support will be enabled once",
        "configured",
        {},
    ),
    ("", "Successfully configured all the available NVSwitches to route GPU NVLi>", "configured", {}),
    ("INFO", "FM starting NvLink Inband started", "inband-started", {}),
    (
        "",
        "Message payload details: Probe request: Pci Info:9b00 Module Id:6 Uuid:GPU-0a1b Discovered LinkMask:3ffff",
        "gpu-probe",
        {"pci_bus_id": "0000:9b:00.0", "module_id": "6", "uuid": "GPU-0a1b"},
    ),
    (
        "",
        "Message payload details:Probe request: Pci Info:10119 Module Id:0 Uuid:GPU-0a1b",
        "gpu-probe",
        {"pci_bus_id": "0001:01:03.1", "module_id": "0", "uuid": "GPU-0a1b"},
    ),
    (
        "INFO",
        "added GPU with UUID GPU-0a1b based on NVLink Inband GPU probe request.",
        "gpu-added",
        {"uuid": "GPU-0a1b"},
    ),
    (
        "INFO",
        "Received an inband message:  Message header details: magic Id:adbc request Id:73a1 status:0 type:2 length:56",
        "inband-message",
        {},
    ),
    (
        "INFO",
        "Sending inband response message: Message header details: magic Id:adbc request Id:63fb2a4a0d1ed status:57 type:3 length:24",
        "inband-failure",
        {"status": "57", "type": "3"},
    ),
    ("", "Message payload details:Team release request: Team Handle:99c9f23d49236386 Flags:0", "payload", {}),
    ("INFO", "multicast group 0 is allocated.", "multicast", {}),
    ("INFO", "successfully released multicast team with handle 11081654703155798918.", "multicast", {}),
    ("", "NodeId 0 partition id 3 is activated.", "partition", {"partition": "3", "state": "activated"}),
    (
        "ERROR",
        "detected NVSwitch fatal error 20034 on fid 0 on NVSwitch pci bus id 00000000:86:00.0 physical id 3 port 33",
        "switch-error",
        {"severity": "fatal", "sxid": "20034", "pci_bus_id": "0000:86:00.0", "physical_id": "3", "port": "33"},
    ),
    (
        "ERROR",
        "detected NVSwitch non-fatal error 12028 on NodeId 0 on NVSwitch pci bus id 00000000:8F:00.0 physical id 3",
        "switch-error",
        {"severity": "non-fatal", "sxid": "12028", "pci_bus_id": "0000:8f:00.0", "physical_id": "3"},
    ),
    (
        "ERROR",
        "failed to find the GPU handle 5410063385821516767 in the multicast team request setup 6130285411925746235.",
        "stale-handle",
        {"handle": "5410063385821516767"},
    ),
    (
        "ERROR",
        "failed to find the member GPU handle 2977498750880931997 in partition -1 in the multicast team setup request id 1758886358995437.",
        "stale-handle",
        {"handle": "2977498750880931997"},
    ),
    (
        "ERROR",
        "cannot find exporter GPU in partition Id 57082 gpuHandle 0x0 to send Multicast Team Setup Response",
        "stale-handle",
        {"handle": "0x0"},
    ),
    (
        "ERROR",
        "requesting GPU handle 0x0 is different from exporter GPU handle 0x815b",
        "stale-handle",
        {"handle": "0x0"},
    ),
    ("ERROR", "failed to add multicast team with request ID 0x1 in partition 57082.", "stale-handle", {}),
    ("ERROR", "All GPUs in the partition need to be reset to recover", "gpu-reset-needed", {}),
    (
        "ERROR",
        "request to query NVSwitch device information from NVSwitch driver failed with error:WARNING Nothing to do [NV_WARN_NOTHING_TO_DO]",
        "nothing-to-do",
        {},
    ),
    (
        "",
        "fabric manager NVIDIA GPU driver interface version 550.127.05 don't match with driver version 550.120. Please update with matching NVIDIA driver package.",
        "version-mismatch",
        {"fabric_manager": "550.127.05", "driver": "550.120"},
    ),
    (
        "ERROR",
        "fabric manager NVIDIA GPU driver interface version 595.71.05 doesn't match with driver version 590.48.01.",
        "version-mismatch",
        {"fabric_manager": "595.71.05", "driver": "590.48.01"},
    ),
    (
        "ERROR",
        "detected number of NVSwitches don't match with any supported system topology, aborting fabric manager",
        "topology-mismatch",
        {},
    ),
    (
        "",
        "detected number of NVSwitches does not match any supported system topology, aborting fabric manager",
        "topology-mismatch",
        {},
    ),
    (
        "",
        "fabric manager config file item: DATABASE_PATH has an invalid value",
        "config-invalid",
        {"item": "DATABASE_PATH"},
    ),
    (
        "",
        "fabric manager don't have access permissions to directory /var/run/nvidia-fabricmanager",
        "directory-denied",
        {"path": "/var/run/nvidia-fabricmanager"},
    ),
    ("ERROR", "failed to bind to port 6666: Address already in use", "address-in-use", {"port": "6666"}),
    ("", "port in use", "address-in-use", {}),
    ("ERROR", "command socket /run/nvidia-fabricmanager/socket is already in use", "address-in-use", {}),
    (
        "",
        "/usr/bin/nv-fabricmanager: error while loading shared libraries: libz.so.1: cannot open shared object file: No such file or directory",
        "loader-error",
        {"library": "libz.so.1"},
    ),
    (
        "ERROR",
        "failed to load NSCQ: libnvidia-nscq.so.2: cannot open shared object file: No such file or directory",
        "loader-error",
        {"library": "libnvidia-nscq.so.2"},
    ),
    (
        "",
        "/opt/nv-fabricmanager: symbol lookup error: /lib/libnvidia-nscq.so.2: undefined symbol: nscq_x, version V_1",
        "loader-error",
        {"symbol": "nscq_x"},
    ),
    (
        "",
        "/opt/nv-fabricmanager: /lib64/libc.so.6: version `GLIBC_2.38' not found (required by /opt/nv-fabricmanager)",
        "loader-error",
        {"library": "/lib64/libc.so.6", "symbol": "GLIBC_2.38"},
    ),
    ("INFO", "LMDB_LOG: Successfully initialized LMDB", "other-notice", {}),
    ("INFO", "Disabling RPC mode for single node configuration.", "other-notice", {}),
    ("", ".", "other-notice", {}),
    ("ERROR", "detected NVLink error on :", "other-notice", {}),
    ("", "Node Id : 3", "other-notice", {}),
    ("", "  GPU UUID :", "other-notice", {}),
    ("", "", "blank", {}),
]


@pytest.mark.parametrize(
    ("level", "message", "kind", "fields"), KINDS, ids=[f"{row[2]}-{row[1][:40]}" for row in KINDS]
)
def test_a_message_has_its_kind_and_fields(level, message, kind, fields):
    found, _, found_fields = classify(message.encode(), level)
    assert (found.value, dict(found_fields)) == (kind, fields)


NOT_THAT = [
    ("INFO", "Logging file name/path = /var/log/detected NVSwitch fatal error 20034 on fid 0", "setting"),
    ("INFO", "Fabric Mode = port in use, Address already in use", "setting"),
    ("INFO", "Some Path = Fabric Manager Log initializing at", "setting"),
    ("INFO", "the previous run ended with: detected NVSwitch fatal error 20034 on fid 0", "unrecognised"),
    ("INFO", "no fatal error was found", "unrecognised"),
    ("INFO", "saw the text 'Successfully configured all the available NVSwitches'", "unrecognised"),
    ("ERROR", "failed to parse fabric topology file /usr/share/x", "unrecognised"),
    ("INFO", "partition id 3 is activated. All GPUs in the partition were reset", "partition"),
    ("ERROR", "LMDB_LOG: map is full", "unrecognised"),
    ("ERROR", "detected NVSwitch fatal error on an unknown switch", "unrecognised"),
]


@pytest.mark.parametrize(("level", "message", "kind"), NOT_THAT, ids=[row[1][:40] for row in NOT_THAT])
def test_a_message_that_only_quotes_another_kind_is_not_of_that_kind(level, message, kind):
    assert classify(message.encode(), level)[0].value == kind


def test_every_kind_has_a_sample():
    assert {rule.kind for rule in RULES} == {LogKind(row[2]) for row in KINDS}


def test_a_real_start_is_understood_line_by_line():
    data = sample("hgx-h100-535.161.08.log")
    batch = parse(data)
    kinds = Counter(record.kind for record in batch.records)
    assert batch.unrecognised == 0
    assert sum(batch.lines_by_level.values()) == data.count(b"\n")
    assert kinds == {
        LogKind.SESSION_HEADER: 1,
        LogKind.VERSION: 1,
        LogKind.SETTING: 16,
        LogKind.CONNECTED: 1,
        LogKind.TOPOLOGY: 1,
        LogKind.SWITCH_ROW: 4,
        LogKind.ROUTING_STARTED: 4,
        LogKind.ROUTING_COMPLETED: 4,
        LogKind.CONFIGURED: 1,
        LogKind.GPU_PROBE: 8,
        LogKind.GPU_ADDED: 8,
        LogKind.GPU_ROW: 8,
    }
    probes = [record.fields["module_id"] for record in batch.records if record.kind is LogKind.GPU_PROBE]
    assert probes == ["6", "3", "4", "5", "0", "2", "7", "1"]


def test_multicast_traffic_is_counted_and_neither_recorded_nor_relayed():
    data = sample("multicast.log")
    batch = parse(data)
    assert (batch.records, batch.relay, batch.relay_suppressed, batch.unrecognised) == ((), (), 0, 0)
    assert batch.lines_by_level == {"INFO": 7, "": data.count(b"\n") - 7}


def test_an_inband_failure_is_found_among_good_messages_of_the_same_shape():
    good = line(
        "Received an inband message:  Message header details: magic Id:adbc request Id:1 status:0 type:2 length:5"
    )
    bad = good.replace(b"status:0", b"status:57")
    for data in (good + bad + good, bad + good + bad, good * 3 + bad):
        records = parse(data).records
        assert [record.kind for record in records] == [LogKind.INBAND_FAILURE] * data.count(b"status:57")


@pytest.mark.parametrize(
    "prefix",
    [
        "nv-fabricmanager[29850]: ",
        "nv-fabricmanage: ",
        "10.0.0.7: ",
        "Dec 19 19:17:49 host-1 nv-fabricmanager[2116]: ",
        "May  1 13:53:48 host-1 nv-fabricmanager[2116]: [May 01 2025 13:53:48] [INFO] [tid 30042] ",
        "[Dec 19 2024 19:17:49] [INFO] ",
        "[Dec  9 2024 19:17:49] [INFO] [tid 7] ",
    ],
)
def test_the_prefixes_of_journals_and_containers_are_taken_off(prefix):
    (record,) = parse(f"{prefix}Connected to 1 node.\n".encode()).records
    assert (record.kind, record.text) == (LogKind.CONNECTED, "Connected to 1 node.")
    assert record.level == ("INFO" if "INFO" in prefix else "")


def test_levels_are_counted_as_they_are_and_unknown_ones_up_to_a_bound():
    batch = parse(b"".join(line("x", f"LEVEL{chr(65 + number)}") for number in range(20)) + line("x", "CRITICAL"))
    assert batch.lines_by_level["CRITICAL"] == 1
    assert batch.lines_by_level["LEVELA"] == 1
    assert batch.lines_by_level["OTHER"] == 12


def test_a_doubled_sxid_line_counts_once_and_a_repeat_in_a_later_second_counts_again():
    message = SXID.format(port=35)
    data = 2 * line(message, "ERROR") + 2 * line(message, "ERROR", "Dec 19 2024 19:17:50")
    batch = parse(data)
    assert batch.switch_errors == {SXID_KEY: 2}
    assert batch.lines_by_level == {"ERROR": 4}
    assert [record.kind for record in batch.records] == [LogKind.SWITCH_ERROR]
    assert len(batch.relay) == 2


def test_doubles_are_found_when_threads_interleave_and_over_batches():
    one, two = SXID.format(port=35), SXID.format(port=36)
    parser = LogParser("file")
    parser.feed(line(one, "ERROR") + line(two, "ERROR") + line("x", time="Dec 19 2024 19:17:50"))
    assert sum(parser.take_batch().switch_errors.values()) == 2
    parser.feed(line(two, "ERROR") + line(one, "ERROR"))
    assert parser.take_batch().switch_errors == {}


def test_sxid_lines_without_a_time_count_once_a_pair():
    assert parse(4 * (SXID.format(port=35) + "\n").encode()).switch_errors == {SXID_KEY: 2}


def test_a_real_burst_counts_every_port_once():
    batch = parse(sample("sxid-burst.log"))
    assert sorted((key.pci_bus_id, key.port, count) for key, count in batch.switch_errors.items()) == [
        ("0000:84:00.0", 35, 1),
        ("0000:84:00.0", 42, 1),
        ("0000:85:00.0", 0, 1),
        ("0000:86:00.0", 36, 1),
    ]


def test_errors_are_relayed_before_informational_lines():
    batch = parse(line("something new") * 10 + line("something bad", "ERROR") * 3, relay_limit=5)
    assert [record.level for record in batch.relay] == ["INFO", "INFO", "ERROR", "ERROR", "ERROR"]
    assert batch.relay_suppressed == 8
    assert batch.unrecognised == 13


def test_records_are_bounded_by_kind_so_that_no_kind_hides_another():
    stale = line("failed to find the GPU handle 1 in the multicast team request setup 2.", "ERROR")
    configured = line("Successfully configured all the available NVSwitches")
    kinds = Counter(record.kind for record in parse(stale * 500 + configured).records)
    assert kinds == {LogKind.STALE_HANDLE: RECORDS_PER_KIND, LogKind.CONFIGURED: 1}


@pytest.mark.parametrize(
    "data",
    [
        b"Connected to 1 node.\r\n",
        b"\0\0\0Connected\0 to 1 node.\n",
        b"\0" * 300_000 + b"Connected to 1 node.\n",
        b"Connected to 1 node. \xff\xfe\n",
        b"Connected to 1 node. " + b"x" * 1_000_000 + b"\n",
        b"Connected to 1 node.",
    ],
    ids=["crlf", "nul bytes", "a hole", "not utf-8", "a megabyte", "no line end"],
)
def test_a_damaged_line_is_still_one_line(data):
    batch = parse(data)
    assert sum(batch.lines_by_level.values()) == 1
    assert [record.kind for record in batch.records] == [LogKind.CONNECTED]
    assert len(batch.records[0].text) <= TEXT_LIMIT_BYTES


def test_a_long_line_takes_bounded_memory():
    parser = LogParser("file")
    for _ in range(100):
        parser.feed(b"x" * 100_000)
    assert sum(map(len, parser._partial)) <= LINE_LIMIT_BYTES + 1
    parser.feed(b"\n" + line("Connected to 1 node."))
    batch = parser.take_batch()
    assert batch.unrecognised == 1
    assert [record.kind for record in batch.records] == [LogKind.CONNECTED]


def test_a_header_glued_to_the_last_words_of_a_killed_predecessor_is_seen():
    (record,) = parse(b"[Dec 19 2024 22:08:5Fabric Manager Log initializing at: 12/20/2024 00:36:34.217\n").records
    assert (record.kind, record.fields["time"]) == (LogKind.SESSION_HEADER, "12/20/2024 00:36:34.217")


def test_a_batch_holds_increments_only():
    parser = LogParser("stderr")
    parser.feed(line("Connected to 1 node."))
    parser.take_batch()
    assert parser.take_batch(file_size_bytes=7, problem="p") == LogBatch("stderr", file_size_bytes=7, problem="p")


def test_many_different_lines_leave_the_tables_small():
    parser = LogParser("file")
    for start in range(0, 20_000, 1000):
        parser.feed(
            b"".join(
                b"UNKNOWN %s\n" % str(n).translate(str.maketrans("0123456789", "GHIJKLMNOP")).encode()
                for n in range(start, start + 1000)
            )
        )
        parser.feed(b"".join(line(SXID.format(port=port), "ERROR") for port in range(1000)))
    assert parser.take_batch().unrecognised == 20_000
    assert max(len(parser._verdicts), len(parser._switch_error_texts), len(parser._counted_in)) <= 1024


WORDS = [
    b"[Dec 19 2024 19:17:49] [INFO] [tid 1] ",
    b"[Dec 19 2024 19:17:50] [ERROR] ",
    SXID.format(port=35).encode(),
    SXID.format(port=36).encode(),
    b"Connected to 1 node.",
    b"Received an inband message:  Message header details: magic Id:adbc request Id:1 status:0 type:2",
    b"Received an inband message:  Message header details: magic Id:adbc request Id:1 status:57 type:2",
    b"Message payload details: Probe request: Pci Info:9b00 Module Id:6 Uuid:GPU-0a1b",
    b"Fabric Manager Log initializing at: 12/20/2024 00:36:34.217",
    b"Fabric Mode = 0",
    b"multicast group 1 is freed.",
    b"something else",
    b"\n", b"\r\n", b"\r", b"\0", b" ", b"\xc3", b"x" * (LINE_LIMIT_BYTES - 3),
]  # fmt: skip
TEXTS = st.lists(st.one_of(st.sampled_from(WORDS), st.just(b"\n"), st.binary(max_size=9)), max_size=40).map(b"".join)


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 3000), max_size=8))
def test_any_split_of_the_input_gives_the_same_batch(data, cuts):
    parser = LogParser("file")
    start = 0
    for cut in sorted(cuts):
        parser.feed(data[start:cut])
        start = max(start, cut)
    parser.feed(data[start:])
    parser.finish()
    assert parser.take_batch() == parse(data)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_never_raise_and_every_line_is_counted(data):
    visible = data.replace(b"\0", b"")
    expected = visible.count(b"\n") + bool(visible and not visible.endswith(b"\n"))
    assert sum(parse(data).lines_by_level.values()) == expected

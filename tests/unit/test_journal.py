"""The log: what journald, a terminal and a JSON reader get."""

import array
import fcntl
import io
import json
import logging
import os
import re
import socket
import struct
import warnings

import pytest
import structlog

from fmsupervisor.conditions import REGISTRY, Code
from fmsupervisor.facts import ExitStatus, LogKind, LogRecord, Problem
from fmsupervisor.report import journal
from fmsupervisor.report.journal import Event
from fmsupervisor.report.journald_socket import JournaldSocket, encode_entry, field_name
from fmsupervisor.report.log_renderers import JOURNAL_FIELDS, one_line
from fmsupervisor.report.log_repeats import RepeatFilter
from fmsupervisor.settings import LoggingSettings


def decode_entry(data):
    """The native protocol, read as journald reads it: a list of (name, value)."""
    fields = []
    while data:
        head, data = data.split(b"\n", 1)
        if b"=" in head:
            name, value = head.split(b"=", 1)
        else:
            name = head
            (size,) = struct.unpack_from("<Q", data)
            value, data = data[8 : 8 + size], data[8 + size + 1 :]
        fields.append((name.decode(), value))
    return fields


class Journal:
    """A stand-in for journald at the end of its socket."""

    def __init__(self, path, buffer_bytes=None):
        self.path = str(path)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        if buffer_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        self.socket.bind(self.path)

    def receive(self):
        """The next datagram, and the descriptor that came with it."""
        descriptors = array.array("i")
        data, ancillary, _, _ = self.socket.recvmsg(1 << 20, socket.CMSG_SPACE(descriptors.itemsize))
        for _, _, content in ancillary:
            descriptors.frombytes(content)
        return data, (descriptors[0] if descriptors else None)

    def entry(self):
        return {name: value.decode() for name, value in decode_entry(self.receive()[0])}

    def count(self):
        found = 0
        try:
            while True:
                self.receive()
                found += 1
        except BlockingIOError:
            return found

    def close(self):
        self.socket.close()
        os.unlink(self.path)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def _restore_logging():
    root = logging.getLogger()
    level = root.level
    yield
    journal._chain.output.close()
    journal._chain.__init__()
    structlog.reset_defaults()
    root.handlers = [handler for handler in root.handlers if not isinstance(handler, journal._StandardLibraryHandler)]
    root.setLevel(level)
    logging.captureWarnings(False)


@pytest.fixture
def journald(tmp_path):
    journald = Journal(tmp_path / "socket")
    yield journald
    if os.path.exists(journald.path):
        journald.close()


def configure(form="json", stream=None, environment=None, clock=None, **settings):
    """Configure, and return what is written to ``stream`` so far as a function."""
    stream = stream if stream is not None else io.StringIO()
    socket_path = settings.pop("socket_path", "/nonexistent/socket")
    journal.configure_logging(
        LoggingSettings(format=form, **settings),
        environment or {},
        stream,
        clock=clock or Clock(),
        journal_socket=socket_path,
    )
    return lambda: stream.getvalue().splitlines()


def objects(lines):
    return [json.loads(line) for line in lines()]


class TestNativeProtocol:
    @pytest.mark.parametrize(
        "value",
        [b"plain", b"", b"a=b", b"two\nlines", b"\n", b"nul\x00and\xff\n", "ü→😀".encode(), b"x" * 5000 + b"\n"],
    )
    def test_any_value_survives_the_framing(self, value):
        fields = [("MESSAGE", b"before"), ("VALUE", value), ("AFTER", b"after")]
        assert decode_entry(encode_entry(fields)) == fields

    def test_a_repeated_name_stays_a_list(self):
        fields = [("A", b"1"), ("A", b"2")]
        assert decode_entry(encode_entry(fields)) == fields

    def test_a_lone_surrogate_is_written_as_an_escape(self):
        assert decode_entry(encode_entry([("A", "\udcff")])) == [("A", b"\\udcff")]

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("sxid", "SXID"),
            ("_PID", "PID"),
            ("9lives", "LIVES"),
            ("a-b.c", "A_B_C"),
            ("x" * 80, "X" * 64),
            ("größe", "GR__E"),
        ],
    )
    def test_names_are_made_acceptable(self, name, expected):
        assert field_name(name) in {expected, "GR_SSE"}

    def test_an_entry_too_big_for_a_datagram_comes_as_a_sealed_memfd(self, journald):
        sender = JournaldSocket(journald.path)
        sender._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        entry = encode_entry([("MESSAGE", "line\n" * 1_000_000)])
        assert sender.send(entry)
        data, descriptor = journald.receive()
        assert data == b""
        with open(descriptor, "rb"):
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            assert os.pread(descriptor, len(entry) + 1, 0) == entry
        assert seals & fcntl.F_SEAL_WRITE
        assert seals & fcntl.F_SEAL_GROW
        assert seals & fcntl.F_SEAL_SHRINK
        sender.close()

    def test_a_restarted_journald_is_found_again(self, journald, tmp_path):
        sender = JournaldSocket(journald.path)
        assert sender.send(b"MESSAGE=1\n")
        journald.close()
        assert not sender.send(b"MESSAGE=2\n")
        second = Journal(tmp_path / "socket")
        assert sender.send(b"MESSAGE=3\n")
        assert second.receive()[0] == b"MESSAGE=3\n"
        sender.close()
        second.close()

    def test_a_socket_that_nobody_reads_any_more_is_a_loss(self, journald):
        sender = JournaldSocket(journald.path)
        journald.socket.close()  # ECONNREFUSED: the path is still there
        assert not sender.send(b"MESSAGE=1\n")
        sender.close()

    def test_a_full_socket_never_blocks_and_losses_are_counted(self, journald):
        configure("journal", socket_path=journald.path)
        before = journal.dropped_messages()
        for number in range(20_000):
            journal.log_event(Event.NODES_CHANGED, "info", f"message {number}")
            if journal.dropped_messages() > before:
                break
        assert journal.dropped_messages() == before + 1
        assert journald.count() == number


class TestJournalFields:
    def test_a_state_change_carries_its_fields(self, journald):
        configure("journal", socket_path=journald.path)
        journal.log_state_change("starting", "configured", "all four switches say so", "s-1")
        assert journald.entry() == {
            "MESSAGE": "State starting -> configured: all four switches say so",
            "PRIORITY": "6",
            "SYSLOG_IDENTIFIER": "fmsupervisor",
            "MESSAGE_ID": Event.STATE_CHANGED.value,
            "FMSUPERVISOR_EVENT": "state-changed",
            "FMSUPERVISOR_STATE": "configured",
            "FMSUPERVISOR_PREVIOUS_STATE": "starting",
            "FMSUPERVISOR_REASON": "all four switches say so",
            "FM_SESSION": "s-1",
        }

    @pytest.mark.parametrize("code", list(Code))
    def test_a_raised_condition_has_the_message_id_and_severity_of_the_registry(self, journald, code):
        configure("journal", socket_path=journald.path)
        journal.log_condition(Problem(code, "what was seen", "0000:07:00.0"), raised=True)
        entry = journald.entry()
        registered = REGISTRY[code]
        assert entry["MESSAGE_ID"] == registered.message_id
        assert entry["FMSUPERVISOR_CONDITION"] == code.value
        assert entry["FMSUPERVISOR_SEVERITY"] == registered.severity.value
        assert entry["FMSUPERVISOR_SUBJECT"] == "0000:07:00.0"
        assert entry["FMSUPERVISOR_REMEDY"] == registered.remedy
        assert entry["PRIORITY"] == {"info": "6", "warning": "4", "critical": "2"}[registered.severity]
        for part in (code.value, "what was seen.", registered.remedy):
            assert part in entry["MESSAGE"]

    def test_a_cleared_condition_does_not_count_as_a_raised_one(self, journald):
        configure("journal", socket_path=journald.path)
        journal.log_condition(Problem(Code.SWITCH_LOST, "", "0000:07:00.0"), raised=False, active_seconds=2.5, count=3)
        entry = journald.entry()
        assert entry["MESSAGE_ID"] == Event.CONDITION_CLEARED.value
        assert entry["FMSUPERVISOR_CONDITION"] == "FMS-305"
        assert entry["FMSUPERVISOR_ACTIVE_SECONDS"] == "2.5"
        assert entry["FMSUPERVISOR_COUNT"] == "3"
        assert entry["PRIORITY"] == "6"

    @pytest.mark.parametrize(
        ("level", "source", "priority"),
        [
            ("INFO", "file", "6"),
            ("WARNING", "file", "4"),
            ("ERROR", "file", "3"),
            ("CRITICAL", "file", "2"),
            ("", "stderr", "4"),
            ("", "stdout", "6"),
            ("NOTICE", "stderr", "6"),
        ],
    )
    def test_a_line_of_fabric_manager_keeps_its_level(self, journald, level, source, priority):
        configure("journal", socket_path=journald.path)
        fields = {"pci_bus_id": "0000:07:00.0", "sxid": "20034", "severity": "fatal", "port": "12"}
        journal.log_fabric_manager_line(LogRecord(LogKind.SWITCH_ERROR, level, "bad", fields), 4711, "s-1", source)
        entry = journald.entry()
        assert entry["PRIORITY"] == priority
        assert entry.get("FM_LEVEL", "") == level
        expected = {
            "MESSAGE": "nv-fabricmanager: bad",
            "FM_PID": "4711",
            "FM_SESSION": "s-1",
            "FM_SOURCE": source,
            "PCI_BUS_ID": "0000:07:00.0",
            "SXID": "20034",
            "SXID_SEVERITY": "fatal",
            "NVLINK_PORT": "12",
        }
        assert expected.items() <= entry.items()

    @pytest.mark.parametrize(
        ("relay_level", "relayed"),
        [("info", 4), ("warning", 3), ("error", 2), ("critical", 1), ("none", 0)],
    )
    def test_the_relay_level_is_a_threshold(self, journald, relay_level, relayed):
        configure("journal", socket_path=journald.path, relay_level=relay_level)
        for level in ("INFO", "WARNING", "ERROR", "CRITICAL"):
            journal.log_fabric_manager_line(LogRecord(LogKind.OTHER_NOTICE, level, level), 1, "s", "file")
        assert journald.count() == relayed

    @pytest.mark.parametrize(
        ("exit_class", "priority"),
        [("requested", "6"), ("not-applicable", "6"), ("external", "4"), ("terminal", "3"), ("unexpected", "3")],
    )
    def test_an_exit_is_one_entry_with_the_last_lines(self, journald, exit_class, priority):
        configure("journal", socket_path=journald.path)
        journal.log_fabric_manager_exited(7, "s-1", exit_class, ExitStatus(signal=11), "it died", ("one", "two"))
        entry = journald.entry()
        assert entry["PRIORITY"] == priority
        assert entry["MESSAGE"] == f"Fabric Manager ended ({exit_class}): it died\none\ntwo"
        assert (entry["FM_EXIT_CLASS"], entry["FM_EXIT_SIGNAL"]) == (exit_class, "11")
        assert "FM_EXIT_STATUS" not in entry
        assert journald.count() == 0

    def test_a_start_names_pid_version_session_and_reason(self, journald):
        configure("journal", socket_path=journald.path)
        journal.log_fabric_manager_started(7, "s-1", "570.1", "all switches are bound")
        entry = journald.entry()
        assert entry["MESSAGE"] == "Fabric Manager 570.1 started as pid 7: all switches are bound"
        assert (entry["FM_PID"], entry["FM_VERSION"], entry["FM_SESSION"]) == ("7", "570.1", "s-1")

    def test_unknown_keys_get_our_prefix_lists_are_repeated_and_none_is_left_out(self, journald):
        configure("journal", socket_path=journald.path)
        journal.log_event(Event.NODES_CHANGED, "info", "made", nodes=("a", "b"), is_new=True, absent=None, took=1.25)
        fields = decode_entry(journald.receive()[0])
        assert [value for name, value in fields if name == "FMSUPERVISOR_NODES"] == [b"a", b"b"]
        assert ("FMSUPERVISOR_IS_NEW", b"true") in fields
        assert ("FMSUPERVISOR_TOOK", b"1.25") in fields
        assert not [name for name, _ in fields if "ABSENT" in name]

    def test_a_message_of_several_lines_is_one_entry_without_control_characters(self, journald):
        configure("journal", socket_path=journald.path)
        journal.log_event(Event.FM_LINE, "info", "one\ntwo\x1b[31m\x00\ttab")
        assert journald.entry()["MESSAGE"] == "one\ntwo\\x1b[31m\\x00\ttab"
        assert journald.count() == 0

    def test_a_traceback_is_part_of_the_entry(self, journald):
        configure("journal", socket_path=journald.path)
        try:
            int("no number")
        except ValueError:
            journal.get_logger().exception("it went wrong")
        message = journald.entry()["MESSAGE"]
        assert message.startswith("it went wrong\nTraceback")
        assert message.endswith("ValueError: invalid literal for int() with base 10: 'no number'")

    def test_every_field_of_the_table_is_acceptable_to_journald(self):
        assert len(set(JOURNAL_FIELDS.values())) == len(JOURNAL_FIELDS)
        for name in JOURNAL_FIELDS.values():
            assert field_name(name) == name

    def test_message_ids_are_128_bits_and_none_is_used_twice(self):
        identifiers = [event.value for event in Event] + [condition.message_id for condition in REGISTRY.values()]
        assert len(set(identifiers)) == len(identifiers)
        assert all(re.fullmatch(r"[0-9a-f]{32}", identifier) for identifier in identifiers)


class TestChoiceOfFormat:
    def stream_and_variable(self, tmp_path):
        stream = open(tmp_path / "stderr", "w")  # noqa: SIM115
        status = os.fstat(stream.fileno())
        return stream, f"{status.st_dev}:{status.st_ino}"

    def test_a_stream_that_is_the_journal_chooses_journald(self, journald, tmp_path):
        stream, variable = self.stream_and_variable(tmp_path)
        with stream:
            configure("auto", stream, {"JOURNAL_STREAM": variable}, socket_path=journald.path)
            journal.log_event(Event.SERVICE_STARTED, "info", "hello")
        assert journald.entry()["MESSAGE"] == "hello"
        assert (tmp_path / "stderr").read_text() == ""

    @pytest.mark.parametrize("case", ["another stream", "no journald", "not under systemd"])
    def test_otherwise_a_file_gets_json(self, journald, tmp_path, case):
        stream, variable = self.stream_and_variable(tmp_path)
        environment = {"JOURNAL_STREAM": "1:2" if case == "another stream" else variable}
        path = "/nonexistent/socket" if case == "no journald" else journald.path
        with stream:
            configure("auto", stream, {} if case == "not under systemd" else environment, socket_path=path)
            journal.log_event(Event.SERVICE_STARTED, "info", "hello")
        assert json.loads((tmp_path / "stderr").read_text())["message"] == "hello"
        assert journald.count() == 0

    def test_a_terminal_gets_key_value_pairs(self):
        terminal, ours = os.openpty()
        with open(ours, "w") as stream:
            journal.configure_logging(LoggingSettings(), {"NO_COLOR": "1"}, stream)
            journal.log_event(Event.SERVICE_STARTED, "warning", "hello", pci_bus_id="0000:07:00.0")
            text = os.read(terminal, 4096).decode()
        os.close(terminal)
        assert re.fullmatch(r"\d\d:\d\d:\d\d WARNING  hello  pci_bus_id=0000:07:00.0\r\n", text)

    def test_a_stream_without_a_descriptor_gets_json(self):
        lines = configure("auto")
        journal.log_event(Event.SERVICE_STARTED, "info", "hello")
        assert objects(lines)[0]["message"] == "hello"

    def test_a_reload_changes_level_and_format_at_once(self):
        first = configure("json", level="error")
        journal.log_event(Event.SERVICE_STARTED, "info", "unheard")
        second = configure("json", level="debug")
        journal.log_event(Event.SERVICE_STARTED, "debug", "heard")
        assert first() == []
        assert [record["message"] for record in objects(second)] == ["heard"]


class TestConsole:
    def test_a_line_cannot_be_forged_nor_a_terminal_commanded(self):
        lines = configure("console")
        text = "a\nFAILED\r\x1b[2J\x9b2J\u202egnp\u2028b"
        journal.log_event(Event.FM_LINE, "info", text, session=text)
        (line,) = lines()
        assert not re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u202e]", line)
        assert r"a\nFAILED\r\x1b[2J\x9b2J\u202egnp\u2028b" in line

    def test_further_lines_are_indented_and_as_harmless(self):
        lines = configure("console")
        journal.log_fabric_manager_exited(7, "s", "unexpected", ExitStatus(code=1), "died", ("one\nx", "\x1b[0mtwo"))
        assert lines()[1:] == [r"    | one\nx", r"    | \x1b[0mtwo"]

    @pytest.mark.parametrize(
        ("value", "shown"),
        [
            ("plain", "plain"),
            ("two words", '"two words"'),
            ('say "x"', r'"say \"x\""'),
            ("", '""'),
            (("a", "b"), "a,b"),
            (1.5, "1.5"),
        ],
    )
    def test_values_are_quoted_when_they_need_it(self, value, shown):
        lines = configure("console")
        journal.log_event(Event.NODES_CHANGED, "info", "m", value=value)
        assert lines()[0].endswith(f"m  value={shown}")

    @pytest.mark.parametrize(
        ("stream", "environment", "is_coloured"),
        [
            pytest.param(Terminal, {}, True, id="terminal"),
            pytest.param(Terminal, {"NO_COLOR": "1"}, False, id="NO_COLOR"),
            pytest.param(Terminal, {"NO_COLOR": ""}, True, id="empty NO_COLOR"),
            pytest.param(Terminal, {"TERM": "dumb"}, False, id="dumb terminal"),
            pytest.param(io.StringIO, {}, False, id="no terminal"),
        ],
    )
    def test_colours_only_where_they_are_wanted(self, stream, environment, is_coloured):
        lines = configure("console", stream(), environment)
        journal.log_event(Event.NODES_CHANGED, "error", "m")
        assert ("\x1b[" in lines()[0]) is is_coloured

    def test_a_closed_stream_is_a_loss_and_no_error(self):
        stream = io.StringIO()
        configure("console", stream)
        before = journal.dropped_messages()
        stream.close()
        journal.log_event(Event.NODES_CHANGED, "info", "m")
        assert journal.dropped_messages() == before + 1

    def test_a_pipe_that_nobody_reads_costs_messages_and_no_time_until_it_is_read_again(self):
        reader, writer = os.pipe()
        with open(writer, "w") as stream:
            configure("console", stream)
            before = journal.dropped_messages()
            for number in range(2000):
                journal.log_event(Event.NODES_CHANGED, "info", f"{number} {'x' * 90}")
            assert journal.dropped_messages() > before
            os.read(reader, 1 << 20)
            journal.log_event(Event.NODES_CHANGED, "info", "again")
            assert os.read(reader, 1 << 20).endswith(b"INFO     again\n")
            configure("console")
        os.close(reader)


class TestJson:
    def test_a_message_is_one_object_on_one_ascii_line(self):
        lines = configure("json")
        journal.log_event(
            Event.FM_LINE, "error", "ü\n\x1b\x7f\udcff", sxid=20034, nodes=("a", "b"), code=Code.SWITCH_LOST
        )
        (line,) = lines()
        assert line.isascii()
        assert line.isprintable()
        record = json.loads(line)
        assert record.pop("timestamp").endswith("Z")
        assert record == {
            "level": "error",
            "message": "ü\n\x1b\x7f\udcff",
            "event": "fm-line",
            "message_id": Event.FM_LINE.value,
            "sxid": 20034,
            "nodes": ["a", "b"],
            "code": "FMS-305",
        }

    def test_last_lines_are_a_list(self):
        lines = configure("json")
        journal.log_fabric_manager_exited(7, "s", "unexpected", ExitStatus(code=1), "died", ("one", "two"))
        assert objects(lines)[0]["details"] == ["one", "two"]


class TestForeignMessages:
    def test_what_libraries_log_goes_through_the_chain(self):
        lines = configure("json")
        logging.getLogger("library").warning("%d things", 3)
        logging.getLogger("library").debug("too fine")
        (record,) = objects(lines)
        assert (record["message"], record["level"], record["logger"]) == ("3 things", "warning", "library")

    def test_a_level_between_the_standard_ones_and_a_wrong_format_do_no_harm(self):
        lines = configure("json")
        logging.getLogger("library").log(35, "odd level")
        wrong = {"name": "library", "levelno": 40, "msg": "%d", "args": ("no number",)}
        journal._StandardLibraryHandler().emit(logging.makeLogRecord(wrong))  # pytest's own handler would raise
        logging.getLogger("library").log(99, "very")
        assert [record["level"] for record in objects(lines)] == ["warning", "error", "critical"]

    def test_python_warnings_go_through_the_chain(self):
        lines = configure("json")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            logging.captureWarnings(False)
            logging.captureWarnings(True)
            warnings.warn("careful", UserWarning, stacklevel=1)
        logging.captureWarnings(False)
        (record,) = objects(lines)
        assert "careful" in record["message"]
        assert record["level"] == "warning"

    def test_configuring_twice_writes_once(self):
        configure("json")
        lines = configure("json")
        logging.getLogger("library").error("once")
        assert len(lines()) == 1

    def test_before_the_configuration_messages_go_to_standard_error(self, capsys):
        journal.log_event(Event.SERVICE_STARTED, "info", "early\x1b")
        captured = capsys.readouterr()
        assert captured.out == ""
        assert r"early\x1b" in captured.err


class TestRepeats:
    @pytest.fixture
    def clock(self):
        return Clock()

    @pytest.fixture
    def messages(self, clock):
        lines = configure("json", clock=clock, level="debug")
        return lambda: [record["message"] for record in objects(lines)]

    def line(self, text="same", session="s-1"):
        journal.log_fabric_manager_line(LogRecord(LogKind.OTHER_NOTICE, "ERROR", text), 1, session, "file")

    def test_a_repeated_line_is_written_once_and_counted_at_the_end_of_the_window(self, clock, messages):
        for _ in range(300):
            self.line()
            clock.now += 1
        journal.flush_repeats()
        assert messages() == ["nv-fabricmanager: same", "Repeated 299 more times in 300 s: nv-fabricmanager: same"]

    def test_any_later_message_also_ends_the_window(self, clock, messages):
        self.line()
        self.line()
        clock.now += 301
        self.line("other")
        assert messages() == [
            "nv-fabricmanager: same",
            "Repeated once more in 300 s: nv-fabricmanager: same",
            "nv-fabricmanager: other",
        ]

    def test_a_message_without_repeats_leaves_no_trace(self, clock, messages):
        self.line()
        clock.now += 301
        journal.flush_repeats()
        self.line()
        assert messages() == ["nv-fabricmanager: same"] * 2

    def test_lines_that_take_turns_are_suppressed_each_for_itself(self, messages):
        for _ in range(100):
            self.line("a")
            self.line("b")
        assert messages() == ["nv-fabricmanager: a", "nv-fabricmanager: b"]

    def test_a_new_run_of_fabric_manager_is_heard_again(self, messages):
        self.line(session="s-1")
        self.line(session="s-2")
        assert len(messages()) == 2

    def test_a_condition_repeated_with_a_rising_count_is_written_once(self, messages):
        problem = Problem(Code.SWITCH_LOST, "gone", "0000:07:00.0")
        for count in range(1, 100):
            journal.log_condition(problem, raised=True, count=count)
        assert len(messages()) == 1

    def test_another_text_of_the_same_condition_is_written_and_tells_about_the_one_before(self, messages):
        for detail in ("one is missing", "one is missing", "two are missing"):
            journal.log_condition(Problem(Code.SWITCH_MISSING, detail), raised=True)
        first, summary, second = messages()
        assert "one is missing" in first
        assert summary.startswith("Repeated once more in 0 s: FMS-301")
        assert "two are missing" in second

    def test_a_flapping_condition_is_never_left_on_a_false_last_word(self, messages):
        problem = Problem(Code.SWITCH_LOST, "gone", "0000:07:00.0")
        for raised in (True, False, True, False, True):
            journal.log_condition(problem, raised=raised)
        assert len(messages()) == 5

    def test_two_instances_of_a_condition_are_apart(self, messages):
        for subject in ("0000:07:00.0", "0000:08:00.0"):
            journal.log_condition(Problem(Code.SWITCH_LOST, "gone", subject), raised=True)
        assert len(messages()) == 2

    def test_history_is_never_suppressed(self, messages):
        for _ in range(3):
            journal.log_state_change("starting", "backoff", "it died", "s")
            journal.log_fabric_manager_started(1, "s", None, "retry")
            journal.log_fabric_manager_exited(1, "s", "unexpected", ExitStatus(code=1), "died")
            journal.log_suppressed(5, "lines of Fabric Manager")
        assert len(messages()) == 12

    def test_nothing_suppressed_is_nothing_said(self, messages):
        journal.log_suppressed(0, "lines of Fabric Manager")
        assert messages() == []

    def test_a_summary_keeps_level_and_fields(self, clock):
        lines = configure("json", clock=clock)
        self.line()
        self.line()
        journal.flush_repeats(everything=True)
        summary = objects(lines)[1]
        assert (summary["level"], summary["session"], summary["suppressed"]) == ("error", "s-1", 1)

    def test_a_reload_does_not_lose_a_count(self, clock):
        lines = configure("json", clock=clock)
        self.line()
        self.line()
        configure("json")
        assert len(lines()) == 2

    def test_memory_is_bounded_and_no_count_is_lost(self):
        reported = []
        repeats = RepeatFilter(Clock(), reported.append, capacity=8)
        dropped = 0
        for number in range(1000):
            for _ in range(3):
                try:
                    repeats(None, "info", {"event": f"text {number}"})
                except structlog.DropEvent:
                    dropped += 1
        assert len(repeats._streams) == 8
        repeats.flush(everything=True)
        assert dropped == 2000 == sum(repeated.count for repeated in reported)

    def test_a_huge_text_passes_and_is_not_kept(self):
        repeats = RepeatFilter(Clock(), lambda _: None)
        event = {"event": "x" * 1_000_000}
        assert repeats(None, "info", event) is repeats(None, "info", event) is event
        assert not repeats._streams


@pytest.mark.parametrize(
    "character", [chr(code) for code in (*range(32), 127, *range(128, 160), 0x2028, 0x2029, 0x202E, 0xD800)]
)
def test_no_dangerous_character_remains_in_a_line(character):
    assert character not in one_line(f"a{character}b")
    assert one_line(f"a{character}b").isprintable()

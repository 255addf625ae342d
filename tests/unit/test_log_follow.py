"""Following Fabric Manager's log file through everything that is done to it."""

import os
import socket

import pytest

from fmsupervisor.fabric_manager import log_follow
from fmsupervisor.fabric_manager.log_follow import LogFollower
from fmsupervisor.facts import LogKind
from fmsupervisor.host.root import HostRoot

PATH = "/var/log/fabricmanager.log"
HEADER = "Fabric Manager Log initializing at: 12/19/2024 22:08:5{}.808\n"


def line(message, number=0):
    return f"[Dec 19 2024 22:08:{number:02d}] [INFO] [tid 1570] {message}\n"


def added(number):
    return line(f"added GPU with UUID GPU-{number:08x} based on NVLink Inband GPU probe request.", number % 60)


class Log:
    """The log file and its follower."""

    def __init__(self, directory):
        self.file = directory / "var/log/fabricmanager.log"
        self.file.parent.mkdir(parents=True)
        self.follower = LogFollower(HostRoot(str(directory)), PATH)

    def write(self, text):
        with self.file.open("a", newline="") as file:
            file.write(text)

    def rotate(self):
        self.file.rename(self.file.with_suffix(".log.1"))

    def records(self, limit_bytes=log_follow.READ_LIMIT_BYTES):
        found = []
        while batch := self.follower.read(limit_bytes):
            found += batch.records
        return found

    def kinds(self):
        return [record.kind for record in self.records()]

    def gpus(self):
        return [int(record.fields["uuid"][4:], 16) for record in self.records() if record.kind is LogKind.GPU_ADDED]


@pytest.fixture
def log(tmp_path):
    log = Log(tmp_path)
    yield log
    log.follower.close()


@pytest.fixture
def session(log):
    """A log whose session has begun and whose header is read."""
    log.follower.begin_session()
    log.write(HEADER.format(0))
    assert log.kinds() == [LogKind.SESSION_HEADER]
    return log


def test_what_was_there_before_the_session_does_not_count(log):
    log.write(HEADER.format(0) + added(1))
    log.follower.begin_session()
    assert log.follower.read() is None
    log.write(added(2) + HEADER.format(1) + added(3))
    assert log.gpus() == [3]


def test_a_log_without_a_header_is_followed_after_64_lines(log):
    log.follower.begin_session()
    log.write("".join(added(number) for number in range(63)))
    assert log.gpus() == []
    log.write(added(63))
    assert log.gpus() == list(range(64))


def test_a_version_line_begins_a_session_too(log):
    log.follower.begin_session()
    log.write(added(1) + line("Fabric Manager version 700.1.2 is running with") + added(2))
    assert log.gpus() == [2]


def test_a_header_quoted_in_a_setting_does_not_begin_a_session(log):
    log.follower.begin_session()
    log.write(line("Logging file name/path = Fabric Manager Log initializing") + added(1))
    assert log.gpus() == []


def test_lines_held_back_count_when_fabric_manager_has_ended(log):
    log.follower.begin_session()
    log.write(added(1) + added(2).rstrip())
    assert log.records() == []
    assert len(log.follower.finish().records) == 2


def test_partial_lines_are_completed_by_later_reads(session):
    text = added(1) + added(2)
    session.write(text[:30])
    assert session.gpus() == []
    session.write(text[30:])
    assert session.gpus() == [1, 2]


def test_a_missing_file_is_waited_for(log):
    log.follower.begin_session()
    assert log.follower.read() is None
    log.write(HEADER.format(0) + added(1))
    assert log.gpus() == [1]


def test_rotation_reads_the_old_file_to_its_end_first(session):
    session.write(added(1))
    session.rotate()
    with session.file.with_suffix(".log.1").open("a") as old:
        old.write(added(2))
    session.write(added(3))
    assert session.gpus() == [1, 2, 3]
    session.write(added(4))
    assert session.gpus() == [4]


def test_a_renamed_file_is_read_on_until_there_is_a_new_one(session):
    session.rotate()
    with session.file.with_suffix(".log.1").open("a") as old:
        old.write(added(1))
    assert session.gpus() == [1]


def test_rotation_under_a_small_read_limit_loses_nothing(session):
    session.write("".join(added(number) for number in range(100)))
    session.rotate()
    session.write("".join(added(number) for number in range(100, 200)))
    records = session.records(limit_bytes=777)
    assert [int(record.fields["uuid"][4:], 16) for record in records] == list(range(200))


def test_truncation_starts_at_the_beginning(session):
    session.write(added(1))
    assert session.gpus() == [1]
    os.truncate(session.file, 0)
    session.write(added(2))
    assert session.gpus() == [2]


def test_a_file_rewritten_to_the_same_size_is_noticed(log):
    log.write(HEADER.format(0) + added(1))
    log.follower.begin_session()
    os.truncate(log.file, 0)
    log.write(HEADER.format(1) + added(2) + added(3))
    assert log.gpus() == [2, 3]


def test_a_hole_left_by_a_truncation_is_skipped(session):
    session.write(added(1))
    assert session.gpus() == [1]
    size = 1 << 40
    with session.file.open("r+") as file:
        file.truncate(0)
        file.seek(size)
        file.write(added(2))
    assert session.gpus() == [2]
    assert session.follower.read() is None


def test_the_size_and_what_more_there_is_are_told(session):
    session.write("".join(added(number) for number in range(50)))
    batch = session.follower.read(limit_bytes=1000)
    assert batch.file_size_bytes == session.file.stat().st_size
    assert session.follower.has_more
    session.records()
    assert not session.follower.has_more


def make_directory(path):
    path.mkdir()


def make_fifo(path):
    os.mkfifo(path)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(path.parent)  # the name of a socket must be short
        try:
            server.bind(path.name)
        finally:
            os.chdir(here)


def make_symbolic_link(path):
    target = path.with_name("elsewhere")
    target.write_text(HEADER.format(0))
    path.symlink_to(target)


@pytest.mark.parametrize("make", [make_directory, make_fifo, make_socket, make_symbolic_link])
def test_what_is_no_regular_file_is_reported_once_and_left_alone(log, make):
    make(log.file)
    log.follower.begin_session()
    assert log.follower.read().problem
    assert log.follower.read() is None
    log.file.rmdir() if log.file.is_dir() else log.file.unlink()
    log.write(HEADER.format(0) + added(1))
    batch = log.follower.read()
    assert (batch.problem, len(batch.records)) == ("", 2)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_reported(log):
    log.write(HEADER.format(0))
    log.file.chmod(0)
    log.follower.begin_session()
    assert log.follower.read().problem


def test_an_input_error_is_reported_and_reading_goes_on_when_it_is_over(session, monkeypatch):
    session.write(added(1))

    def fails(*arguments):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", fails)
        assert session.follower.read().problem == "Input/output error"
        assert session.follower.read() is None
    batch = session.follower.read()
    assert (batch.problem, len(batch.records)) == ("", 1)


class TestResume:
    def test_the_last_session_is_read_from_its_header(self, log):
        log.write(HEADER.format(0) + added(1) + HEADER.format(1) + added(2))
        assert log.follower.resume_last_session()
        assert log.kinds() == [LogKind.SESSION_HEADER, LogKind.GPU_ADDED]

    @pytest.mark.parametrize("shift", range(0, 48, 5))
    def test_a_header_across_the_border_of_two_blocks_is_found(self, log, monkeypatch, shift):
        monkeypatch.setattr(log_follow, "_BLOCK_BYTES", 100)
        log.write(HEADER.format(0) + added(1) + HEADER.format(1) + "x" * (60 + shift) + "\n" + added(2))
        assert log.follower.resume_last_session()
        assert log.gpus() == [2]

    def test_without_a_header_a_small_file_is_read_whole(self, log):
        log.write(added(1))
        assert not log.follower.resume_last_session()
        assert log.gpus() == [1]

    def test_without_a_header_near_the_end_a_large_file_is_read_from_its_end(self, log, monkeypatch):
        monkeypatch.setattr(log_follow, "LOOK_BACK_BYTES", 200)
        log.write(HEADER.format(0) + added(1) * 10)
        assert not log.follower.resume_last_session()
        log.write(added(2))
        assert log.gpus() == [2]

    def test_a_missing_file_is_no_error(self, log):
        assert not log.follower.resume_last_session()
        log.write(added(1))
        assert log.gpus() == [1]


def test_four_gigabytes_that_are_there_already_cost_nothing(log):
    log.write(HEADER.format(0))
    with log.file.open("r+") as file:
        file.truncate(1 << 32)
        file.seek(0, os.SEEK_END)
        file.write("\n")
    log.follower.begin_session()
    log.write(HEADER.format(1) + added(1))
    batch = log.follower.read()
    assert len(batch.records) == 2
    assert not log.follower.has_more

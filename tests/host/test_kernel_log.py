"""Records of /dev/kmsg."""

import os
import time

import pytest

from fmsupervisor.errors import CannotObserve
from fmsupervisor.host.kernel_log import KernelLine, KernelLog, parse_record
from fmsupervisor.host.root import HostRoot


@pytest.mark.parametrize(
    ("record", "line"),
    [
        pytest.param(
            b"3,1041,5123456,-;nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 48\n",
            KernelLine(3, 0, 1041, 5.123456, "nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 48"),
            id="plain",
        ),
        pytest.param(
            b"6,7,100,-,caller=T1;text\n SUBSYSTEM=pci\n DEVICE=+pci:0000:83:00.0\n",
            KernelLine(6, 0, 7, 0.0001, "text"),
            id="with a dictionary and more header fields",
        ),
        pytest.param(b"12,8,0,-;from user space\n", KernelLine(4, 1, 8, 0.0, "from user space"), id="facility 1"),
        pytest.param(b"6,9,0,c;tab\\x09 back\\x5cslash\n", KernelLine(6, 0, 9, 0.0, "tab\t back\\slash"), id="escapes"),
        pytest.param(b"6,9,0,-;\\xc3\\xa9 \\xff\n", KernelLine(6, 0, 9, 0.0, "é \\xff"), id="UTF-8 and not"),
        pytest.param(b"6,10,0,-;a;b,c\n", KernelLine(6, 0, 10, 0.0, "a;b,c"), id="semicolons in the text"),
        pytest.param(b"6,11,0,-;\n", KernelLine(6, 0, 11, 0.0, ""), id="an empty text"),
        pytest.param(b"", None, id="nothing"),
        pytest.param(b"garbage\n", None, id="no header"),
        pytest.param(b"\0\xff6,1,1,-;x", None, id="binary"),
    ],
)
def test_a_record_is_header_and_text(record, line):
    assert parse_record(record) == line


def test_an_absent_kernel_log_cannot_be_observed(tree):
    with pytest.raises(CannotObserve):
        KernelLog(tree.root)


@pytest.fixture
def records(tree):
    """A pipe in packet mode in the place of /dev/kmsg: one write is one read, as there."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_DIRECT)
    tree.link("/dev/kmsg", f"/proc/{os.getpid()}/fd/{reader}")
    yield lambda *sequences: [os.write(writer, f"3,{one},{one},-;line {one}\n".encode()) for one in sequences]
    os.close(writer)
    os.close(reader)


def test_what_was_there_when_it_was_opened_is_old(tree, records):
    log = KernelLog(tree.root)
    records(1, 2)
    assert [(line.sequence, line.is_old) for line in log.read_new()] == [(1, True), (2, True)]
    records(3)
    assert [(line.sequence, line.is_old) for line in log.read_new()] == [(3, False)]
    log.close()


class Overrun(KernelLog):
    """/dev/kmsg whose next reads find that records were overwritten."""

    def __init__(self, root):
        super().__init__(root)
        self.pending = []

    def _read(self):
        if self.pending and self.pending.pop(0):
            raise BrokenPipeError
        return super()._read()


@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [
        pytest.param([4], [10], 5, id="by the sequence numbers"),
        pytest.param([], [10], 1, id="one at least, when nothing was read before"),
    ],
)
def test_overwritten_records_are_counted(tree, records, before, after, lost):
    log = Overrun(tree.root)
    records(*before)
    log.read_new()
    log.pending = [True]
    records(*after)
    (line,) = log.read_new()
    log.close()
    assert (line.follows_loss, line.lost) == (True, lost)


@pytest.mark.root
def test_after_seeking_to_the_end_only_new_lines_come():
    try:
        log = KernelLog(HostRoot())
        writer = os.open("/dev/kmsg", os.O_WRONLY)
    except (CannotObserve, OSError):
        pytest.skip("the kernel log is not accessible here")
    mark = f"fmsupervisor test {os.getpid()}"
    try:
        assert len(log.read_new()) > 0
        log.seek_to_end()
        os.write(writer, f"<6>{mark} 1\\tab\t\n".encode())  # without the newline the kernel holds it back
        deadline = time.monotonic() + 10
        found = []
        while not found and time.monotonic() < deadline:
            found = [line for line in log.read_new() if mark in line.text]
    finally:
        os.close(writer)
        log.close()
    assert [(line.level, line.text) for line in found] == [(6, f"{mark} 1\\tab\t")]

"""How long a line takes grows with its length, not with the square of it: what is written by others must not stall us.

Coverage says nothing about this, so it is measured: eight times the length may take at most four times as long per
byte. Found so: one unfriendly line of a kilobyte in Fabric Manager's log took 17 ms.
"""

from collections.abc import Callable
from time import thread_time

import pytest

from fmsupervisor.fabric_manager.config_file import render
from fmsupervisor.fabric_manager.log_grammar import split_line
from fmsupervisor.fabric_manager.log_kinds import classify
from fmsupervisor.host import kernel_grammar, kernel_log
from fmsupervisor.settings import Settings

SHORT, LONG = 128, 1024
_LINES: dict[str, Callable[[str], object]] = {
    "fm-error": lambda text: classify(text.encode(), "ERROR"),
    "fm-info": lambda text: classify(text.encode(), "INFO"),
    "fm-bare": lambda text: classify(text.encode(), ""),
    "fm-prefix": lambda text: split_line(text.encode()),
    "kernel": kernel_grammar.classify,
    "kernel-nvrm": lambda text: kernel_grammar.classify(f"NVRM: {text}"),
    "kernel-sxid": lambda text: kernel_grammar.classify(f"nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 12028, {text}"),
    "kernel-prefix": kernel_grammar.without_prefix,
    "kernel-record": lambda text: kernel_log.parse_record(f"6,1,1,-;{text}\n".encode()),
    "fabricmanager.cfg": lambda text: render(text, Settings(), "580.126.09"),
}
_BEGINNINGS = (
    "",
    "the detected number of GPU ",
    "fabric manager ",
    "detected NVSwitch fatal error 1 ",
    "failed to find GPU ",
)
_UNFRIENDLY = (
    "match ",
    "needs ",
    "driver interface version 1.1 ",
    "pci bus id: ",
    "physical id 1 ",
    "config option x ",
    "received inband message: ",
    "x",
    "1",
    " ",
    "a ",
    "x:",
    "a=b ",
    "[1] ",
    "fail ",
    "error ",
    "GPU ",
    "port ",
    "version '",
    ".so: ",
    "\\x5c",
)


@pytest.mark.parametrize("reader", _LINES)
def test_a_long_line_costs_no_more_per_byte_than_a_short_one(reader: str) -> None:
    read = _LINES[reader]
    for piece in _UNFRIENDLY:
        for beginning in _BEGINNINGS:
            short, long = ((beginning + piece * size)[:size] for size in (SHORT, LONG))
            read(long)
            growth = _cost(read, long) / _cost(read, short)
            assert growth < 4 * LONG / SHORT, f"{reader}: {beginning!r}, {piece!r} repeated: {growth:.0f} times as long"


def _cost(read: Callable[[str], object], text: str) -> float:
    """Seconds of this thread, of the best of several tries."""
    tries = []
    for _ in range(5):
        begun = thread_time()
        for _ in range(3):
            read(text)
        tries.append(thread_time() - begun)
    return min(tries)

"""Kernel uevents: real ones, and those of umockdev where the kernel's own would disturb."""

import contextlib
import ctypes.util
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fmsupervisor.errors import CannotObserve
from fmsupervisor.host.kernel import UeventSource
from fmsupervisor.host.uevents import UeventMonitor

DEADLINE_SECONDS = 20
PRELOAD = "libumockdev-preload.so.0"

MOCKED = """
import ctypes, json, select, sys
from fmsupervisor.host.uevents import UeventMonitor

library = ctypes.CDLL("libumockdev.so.0")
library.umockdev_testbed_new.restype = ctypes.c_void_p
library.umockdev_testbed_add_devicev.restype = ctypes.c_void_p
testbed = ctypes.c_void_p(library.umockdev_testbed_new())
Strings = ctypes.POINTER(ctypes.c_char_p)

def strings(*items):
    return ctypes.cast((ctypes.c_char_p * (len(items) + 1))(*(item.encode() for item in items), None), Strings)

def add(subsystem, name):
    library.umockdev_testbed_add_devicev(
        testbed, subsystem.encode(), name.encode(), None, strings(), strings("SEQNUM", "1"))
    return f"/sys/devices/{name}"

def answer():
    if not select.select([monitor], [], [], 20)[0]:
        return "no event"
    concerns_us = monitor.drain()
    return [concerns_us, monitor.drain()]

switch = add("pci", "0000:83:00.0")
monitor = UeventMonitor()
assert monitor.drain() is False
answers = {"add other": (add("block", "sda"), answer())[1]}
for action in ("add", "bind", "unbind", "remove"):
    library.umockdev_testbed_uevent(testbed, switch.encode(), action.encode())
    answers[f"{action} pci"] = answer()
for subsystem in ("module", "bus/pci/drivers", "infiniband", "vfio", "usb", "net"):
    kind = subsystem.rpartition("/")[2]
    add(kind, f"{subsystem}/a-{kind}")
    answers[f"add {subsystem}"] = answer()
add("drivers", "not-where-drivers-are")
answers["malformed"] = answer()
for name in ("usb1", "usb2", "usb3"):
    add("usb", name)
library.umockdev_testbed_uevent(testbed, switch.encode(), b"unbind")
add("usb", "usb4")
answers["one of many"] = answer()
json.dump(answers, sys.stdout)
"""


def test_events_of_pci_modules_drivers_and_vfio_concern_us_and_others_do_not():
    if ctypes.util.find_library("umockdev") is None:
        pytest.skip("umockdev is not installed")
    child = subprocess.run(
        [sys.executable, "-c", MOCKED],
        env=os.environ | {"LD_PRELOAD": PRELOAD, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    concerning = [
        *(f"{action} pci" for action in ("add", "bind", "unbind", "remove")),
        *(f"add {subsystem}" for subsystem in ("module", "bus/pci/drivers", "infiniband", "vfio")),
        "malformed",
        "one of many",
    ]
    expected = {event: [True, False] for event in concerning}
    expected |= {event: [False, False] for event in ("add other", "add usb", "add net")}
    assert json.loads(child.stdout) == expected


def test_a_host_without_libudev_cannot_be_observed(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyudev", None)  # what an import error of pyudev looks like
    with pytest.raises(CannotObserve, match="uevents"):
        UeventMonitor()


def trigger(pattern, times=1):
    """Ask the kernel for an "add" event of a device that is there; skip where that is not allowed."""
    device = next(iter(sorted(Path("/").glob(pattern))), None)
    try:
        if device is None:
            pytest.skip(f"there is no {pattern}")
        for _ in range(times):
            device.write_text("add")
    except OSError:
        pytest.skip("uevents cannot be triggered here")


@pytest.fixture
def monitor():
    try:
        made = UeventMonitor()
    except CannotObserve as error:
        pytest.skip(str(error))
    yield made
    made.close()


def wait_until_it_concerns_us(monitor: UeventSource) -> bool:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while select.select([monitor], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if monitor.drain():
            return True
    return False


@pytest.mark.root
class TestRealKernel:
    def test_an_event_of_a_pci_device_concerns_us(self, monitor):
        trigger("sys/bus/pci/devices/*/uevent")
        assert wait_until_it_concerns_us(monitor)

    def test_lost_events_concern_us(self):
        with contextlib.closing(UeventMonitor(receive_buffer_bytes=2048)) as monitor:
            trigger("sys/class/mem/null/uevent", times=200)
            assert monitor.drain()
            trigger("sys/bus/pci/devices/*/uevent")
            assert wait_until_it_concerns_us(monitor)  # and it goes on afterwards

    def test_draining_an_idle_monitor_does_not_block(self, monitor):
        monitor.drain()

    def test_after_close_no_descriptor_is_left(self):
        monitor = UeventMonitor()
        descriptor = monitor.fileno()
        monitor.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)

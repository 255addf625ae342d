"""The simulated nv-fabricmanager's way to the driver's watchdog: a file, or an ioctl where there is a real kernel.

On a simulated host the driver reads a heartbeat file. In a virtual machine /dev/nvidia-nvswitchctl is a real device,
made by the test module of tests/vm/kernel; there the nodes are opened and held as by the real program (so they pin the
module), and one private ioctl (fake_fm_ioctl.h beside that module) stands for all that Fabric Manager asks of the
driver. Cheap imports only.
"""

import contextlib
import errno
import json
import os
import stat
import struct
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from fmsupervisor.simulator import hardware

CONTROL_NODE = "/dev/nvidia-nvswitchctl"

_HEARTBEAT = 0x40084601  # FAKE_FM_HEARTBEAT = _IOW('F', 1, {u32 minor, u32 configured})
_ALL_SWITCHES = 0xFFFFFFFF
_REQUEST = struct.Struct("=II")


class DriverLink(Protocol):
    """What one run of Fabric Manager tells the driver."""

    def beat(self, state: str, switches: Sequence[str]) -> None:
        """Say that Fabric Manager is alive, and "standby" or "configured". A driver that is gone is no error."""


class HeartbeatFile:
    """A record that the simulated kernel reads."""

    def __init__(self, host: str) -> None:
        self._path = host + hardware.HEARTBEAT_FILE
        self._started = time.monotonic()

    def beat(self, state: str, switches: Sequence[str]) -> None:
        """Replace the record in one step."""
        record = {
            "pid": os.getpid(),
            "started": self._started,
            "at": time.monotonic(),
            "state": state,
            "switches": switches,
        }
        with contextlib.suppress(OSError):
            with open(f"{self._path}.{os.getpid()}", "w", encoding="ascii") as file:
                json.dump(record, file)
            os.rename(f"{self._path}.{os.getpid()}", self._path)


class DeviceNodes:
    """The opened nodes of a real driver. Raises ``OSError``: EBUSY when another Fabric Manager has nvidia-nvlink."""

    def __init__(self, host: str, minors: Iterable[int]) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC
        self._held = [os.open(host + path, flags) for path in (CONTROL_NODE, "/dev/nvidia-nvlink")]
        self._switches = []
        for minor in minors:
            try:
                self._switches.append(os.open(f"{host}/dev/nvidia-nvswitch{minor}", flags))
            except OSError as error:
                if error.errno != errno.ENODEV:  # blacklisted, or removed a moment ago
                    raise

    def beat(self, state: str, switches: Sequence[str]) -> None:  # noqa: ARG002 - those that were opened at the start
        """One ioctl for each: a switch that went and came back has a stale descriptor here, and stays unconfigured."""
        import fcntl  # noqa: PLC0415 - start-up time on simulated hosts

        for descriptor in self._switches:
            with contextlib.suppress(OSError):
                fcntl.ioctl(descriptor, _HEARTBEAT, _REQUEST.pack(_ALL_SWITCHES, state == "configured"))


def device_number(path: str) -> int | None:
    """``st_rdev`` of a real character device; None when there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_rdev if stat.S_ISCHR(status.st_mode) else None


def device_minors(host: str) -> list[int] | None:
    """Minors of the switches of a real driver, by its own word; None on a simulated host."""
    number = device_number(host + CONTROL_NODE)
    if number is None:
        return None
    from fmsupervisor.errors import CannotObserve  # noqa: PLC0415 - start-up time on simulated hosts
    from fmsupervisor.host.nvswitch_ctl import get_devices  # noqa: PLC0415

    try:
        view = get_devices(host + CONTROL_NODE, os.major(number), os.minor(number))
    except CannotObserve:
        return []
    return [device.minor for device in view.devices]

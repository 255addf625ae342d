"""Kernel uevents: something about PCI devices, modules or drivers changed, look again.

The kernel's own netlink group is listened to, not udev's: it works while udevd is stopped, and its order is the order
in which things happened. An event only says that the host must be read again; its fields are not trusted for more: an
unbind carries no DRIVER, a partial probe sends nothing for the failed switches, and events get lost when the socket
overflows (ENOBUFS), which therefore counts as a change. Source: Linux lib/kobject_uevent.c, drivers/base/dd.c;
libudev through pyudev.
"""

import errno
import os
import socket
from typing import Any

from fmsupervisor.errors import CannotObserve

RECEIVE_BUFFER_BYTES = 8 << 20

_SUBSYSTEMS = frozenset({"pci", "module", "drivers", "infiniband", "vfio"})
_EVENTS_PER_DRAIN = 4096  # then the event loop gets its turn; the descriptor stays readable


class UeventMonitor:
    """The ``UeventSource`` of the running kernel. Raises ``CannotObserve`` when there is no libudev or no netlink."""

    def __init__(self, receive_buffer_bytes: int = RECEIVE_BUFFER_BYTES) -> None:
        try:
            from pyudev import Context, Monitor  # noqa: PLC0415 (imports fail without libudev.so)

            self._monitor: Any = Monitor.from_netlink(Context(), source="kernel")
            _enlarge(self._monitor, receive_buffer_bytes)
            self._monitor.start()
        except (ImportError, OSError) as error:
            raise CannotObserve("kernel uevents", str(error)) from error

    def fileno(self) -> int:
        """The netlink socket."""
        return int(self._monitor.fileno())

    def drain(self) -> bool:
        """See ``UeventSource.drain``. Raises ``CannotObserve`` when the socket is broken."""
        concerns_us = False
        for _ in range(_EVENTS_PER_DRAIN):
            try:
                device = self._monitor.poll(timeout=0)
            except ValueError:  # pyudev's form of EINVAL: libudev could not make sense of an event
                concerns_us = True
                continue
            except OSError as error:
                self._raise_unless_overflow(error)
                concerns_us = True  # events were lost, perhaps one of ours
                continue
            if device is None:
                return concerns_us
            concerns_us = concerns_us or device.subsystem in _SUBSYSTEMS
        return concerns_us

    def close(self) -> None:
        """Stop listening: pyudev closes the socket with its last reference."""
        self._monitor = None

    def _raise_unless_overflow(self, error: OSError) -> None:
        """Accept ENOBUFS. When poll(2) tells of it, pyudev raises without errno; asking the socket also clears it."""
        try:
            with socket.socket(fileno=os.dup(self.fileno())) as same_socket:
                pending = same_socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        except OSError as broken:
            raise CannotObserve("kernel uevents", str(broken)) from error
        if errno.ENOBUFS not in (error.errno, pending):
            raise CannotObserve("kernel uevents", str(error)) from error


def _enlarge(monitor: Any, size_bytes: int) -> None:
    try:
        monitor.set_receive_buffer_size(size_bytes)
    except OSError as error:
        if error.errno != errno.EPERM:  # without CAP_NET_ADMIN the kernel's default has to do
            raise

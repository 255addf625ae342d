"""Uevents of the simulated kernel: a socket pair, so that an event loop waits for them as for netlink.

Like netlink, the sender never blocks: what does not fit is lost, and the listener is told that something was.
"""

import contextlib
import socket
import threading

_WATCHED = frozenset({"pci", "module", "drivers"})


class SimulatedUevents:
    """``fmsupervisor.host.kernel.UeventSource``; one datagram is one event."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        self._lock = threading.Lock()  # an event may be lost only while others wait, which wake the listener
        self._has_lost_some = False
        self._is_closed = False

    def fileno(self) -> int:
        """Readable while events wait."""
        return self._receiver.fileno()

    def drain(self) -> bool:
        """Take all; True when one concerns PCI, modules or drivers, or when some were lost."""
        is_relevant = False
        with self._lock:
            with contextlib.suppress(BlockingIOError):
                while True:
                    is_relevant |= self._receiver.recv(64).decode() in _WATCHED
            is_relevant |= self._has_lost_some
            self._has_lost_some = False
        return is_relevant

    def close(self) -> None:
        """Stop listening."""
        with self._lock:
            self._is_closed = True
            self._receiver.close()
            self._sender.close()

    def emit(self, subsystem: str) -> bool:
        """Send an event; False when nobody listens any more."""
        with self._lock:
            if self._is_closed:
                return False
            try:
                self._sender.send(subsystem.encode())
            except BlockingIOError:
                self._has_lost_some = True
        return True

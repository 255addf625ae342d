r"""journald's native protocol: one datagram is one journal entry.

Source: systemd's docs/JOURNAL_NATIVE_PROTOCOL.md, checked against systemd 252.
``NAME=value\n`` for values without a newline; otherwise ``NAME\n``, the length as 64 bits little-endian, the value and
``\n``.
An entry that does not fit into a datagram travels as a sealed memfd in SCM_RIGHTS.

The socket is not connected: every datagram names the path, so a restarted journald is found again without bookkeeping.
"""

import array
import contextlib
import errno
import fcntl
import os
import re
import socket
import struct
from collections.abc import Iterable

JOURNAL_SOCKET = "/run/systemd/journal/socket"

_SEND_BUFFER_BYTES = 8 << 20  # what sd_journal_send asks for; the kernel caps it at net.core.wmem_max
_NAME_LIMIT = 64  # journald drops the whole field when its name is longer
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_NOT_IN_NAMES = re.compile(r"[^A-Z0-9_]")


def field_name(name: str) -> str:
    """``name`` as journald accepts it from a client: A-Z, 0-9 and _, not beginning with a digit or _."""
    return _NOT_IN_NAMES.sub("_", name.upper()).lstrip("_0123456789")[:_NAME_LIMIT]


def encode_entry(fields: Iterable[tuple[str, str | bytes]]) -> bytes:
    """The datagram of one entry. Names must be valid already; a repeated name makes a list."""
    parts = []
    for name, value in fields:
        content = value if isinstance(value, bytes) else value.encode("utf-8", "backslashreplace")
        if b"\n" in content:
            parts.append(b"%s\n%s%s\n" % (name.encode(), struct.pack("<Q", len(content)), content))
        else:
            parts.append(b"%s=%s\n" % (name.encode(), content))
    return b"".join(parts)


class JournaldSocket:
    """Sends entries and never blocks: what journald cannot take at once is lost, and counted by the caller."""

    def __init__(self, path: str = JOURNAL_SOCKET) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        with contextlib.suppress(OSError):  # no descriptor now; perhaps there is one for the first entry
            self._socket = _datagram_socket()

    def send(self, entry: bytes) -> bool:
        """Hand one entry over; False when it is lost (journald busy, restarting or absent; no descriptor left)."""
        try:
            if self._socket is None:
                self._socket = _datagram_socket()
        except OSError:
            return False
        try:
            self._socket.sendto(entry, self._path)
        except OSError as error:
            if error.errno in (errno.EMSGSIZE, errno.ENOBUFS):
                return self._send_as_file(self._socket, entry)
            return False
        return True

    def _send_as_file(self, endpoint: socket.socket, entry: bytes) -> bool:
        try:
            descriptor = os.memfd_create("journal-entry", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError:
            return False
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(entry)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
            endpoint.sendmsg([], [rights], 0, self._path)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True

    def close(self) -> None:
        """Free the descriptor."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _datagram_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    return made

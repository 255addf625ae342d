"""What systemd is told about the service, by sd_notify(3).

sdnotify 0.3.2 frames and sends; three of its habits are changed here. It reads the process's environment (ours is
passed in), its socket blocks (a service manager that does not read would stop the loop), and it encodes as Latin-1 and
drops what does not fit without a word (text is UTF-8 here).

A message that cannot be sent now is kept, the newest of each sort, and goes out with the next one, at the latest with
the next watchdog ping: READY=1 must not be lost because systemd was busy.
"""

import os
import re
import socket
from collections.abc import Mapping

import sdnotify

# None of these may reach Fabric Manager: a child must not speak for the service.
SERVICE_MANAGER_VARIABLES = (
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_PIDFDID",
    "LISTEN_FDNAMES",
    "FDSTORE",
)

_STATUS_LIMIT_BYTES = 400
_NOT_FOR_STATUS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\s]+")


class SystemdNotifier(sdnotify.SystemdNotifier):  # type: ignore[misc]  # sdnotify has no types
    """Tells systemd how the service is. Never raises, never blocks; without systemd it does nothing.

    ``environment`` is read once, so the variables may be removed afterwards. ``watchdog_interval_seconds`` is how often
    ``watchdog`` must be called (half of systemd's limit); None = no watchdog.
    """

    def __init__(self, environment: Mapping[str, str], pid: int | None = None) -> None:
        # Not super().__init__(): it would read os.environ and leave a socket behind when there is no systemd.
        self.debug = True  # notify() raises, and _send catches what can happen
        self.socket: socket.socket | None = None
        self._address = _socket_address(environment.get("NOTIFY_SOCKET", ""))
        self._waiting: dict[str, str] = {}  # sort -> assignments
        self._status = ""
        self.is_active = self._address is not None
        self.watchdog_interval_seconds = _watchdog_interval(environment, os.getpid() if pid is None else pid)

    def ready(self) -> None:
        """The outcome is known (also: a reload is finished)."""
        self._send("state", "READY=1")

    def reloading(self, monotonic_microseconds: int) -> None:
        """The settings are being re-read since then (CLOCK_MONOTONIC); ``ready`` ends it."""
        self._send("state", f"RELOADING=1\nMONOTONIC_USEC={monotonic_microseconds}")

    def stopping(self) -> None:
        """The service has begun to stop."""
        self._send("state", "STOPPING=1")

    def status(self, sentence: str) -> None:
        """One line for ``systemctl status``; sent only when it differs from the one before."""
        text = _status_text(sentence)
        if text != self._status:
            self._status = text
            self._send("status", f"STATUS={text}")

    def error_number(self, number: int) -> None:
        """The errno behind a failure."""
        self._send("errno", f"ERRNO={number}")

    def extend_timeout(self, seconds: float) -> None:
        """Progress is being made: the start, reload or stop may take this much longer, from now."""
        self._send("", f"EXTEND_TIMEOUT_USEC={round(seconds * 1_000_000)}")

    def watchdog(self) -> None:
        """The loop turns."""
        self._send("", "WATCHDOG=1")

    def close(self) -> None:
        """Free the descriptor."""
        if self.socket is not None:
            self.socket.close()
            self.socket = None

    def _send(self, sort: str, assignments: str) -> None:
        """Send, with everything that waits. What has a sort waits when it cannot go; the rest is worthless later."""
        if self._address is None:
            return
        if sort:
            self._waiting[sort] = assignments
        lines = [*self._waiting.values()] if sort else [*self._waiting.values(), assignments]
        try:
            if self.socket is None:
                self.socket = _connect(self._address)
            self.notify("\n".join(lines).encode().decode("latin-1"))  # notify() encodes as Latin-1: UTF-8 on the wire
        except BlockingIOError:
            return  # systemd does not keep up; the socket is good
        except OSError:
            self.close()  # gone; the next message looks for it again
            return
        self._waiting.clear()


def _connect(address: str) -> socket.socket:
    endpoint = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        endpoint.connect(address)
    except OSError:
        endpoint.close()
        raise
    return endpoint


def _socket_address(variable: str) -> str | None:
    """A path, or "@name" for the abstract namespace. Other families (vsock) are for machines, not for services."""
    if variable.startswith("/"):
        return variable
    if variable.startswith("@") and len(variable) > 1:
        return "\0" + variable[1:]
    return None


def _watchdog_interval(environment: Mapping[str, str], pid: int) -> float | None:
    """Half of WATCHDOG_USEC (sd_watchdog_enabled(3)); None when it is absent, wrong or for another process."""
    limit = environment.get("WATCHDOG_USEC", "")
    owner = environment.get("WATCHDOG_PID")
    if not _is_number(limit) or int(limit) == 0 or (owner is not None and owner != str(pid)):
        return None
    return int(limit) / 2_000_000


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20  # noqa: PLR2004  # 2^64 has 20 digits


def _status_text(sentence: str) -> str:
    text = _NOT_FOR_STATUS.sub(" ", sentence).strip()
    content = text.encode()
    if len(content) <= _STATUS_LIMIT_BYTES:
        return text
    return content[: _STATUS_LIMIT_BYTES - 3].decode("utf-8", "ignore") + "..."

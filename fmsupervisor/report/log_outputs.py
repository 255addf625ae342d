"""Where rendered messages go. What cannot be written is counted, never an error: the log must not stop the fabric."""

from threading import Lock
from typing import TextIO

from fmsupervisor.report.journald_socket import JournaldSocket


class _Losses:
    """Messages lost by all outputs of this process."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = Lock()

    def add(self) -> None:
        with self._lock:
            self.count += 1


_losses = _Losses()


def lost_messages() -> int:
    """Messages lost since the program began."""
    return _losses.count


class JournalOutput:
    """The wrapped logger of structlog for journald."""

    def __init__(self, path: str) -> None:
        self._socket = JournaldSocket(path)

    def msg(self, entry: bytes) -> None:
        """Send one entry."""
        if not self._socket.send(entry):
            _losses.add()

    debug = info = warning = error = critical = msg

    def close(self) -> None:
        """Free the descriptor."""
        self._socket.close()


class StreamOutput:
    """The wrapped logger of structlog for a text stream, a line or block per message."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = Lock()

    def msg(self, line: str) -> None:
        """Write and flush one message."""
        try:
            with self._lock:
                self._stream.write(line + "\n")
                self._stream.flush()
        except (OSError, ValueError):  # a full disk, a closed pipe; a closed stream
            _losses.add()

    debug = info = warning = error = critical = msg

    def close(self) -> None:
        """Leave the stream alone: it is not ours."""

"""Where rendered messages go. What cannot be written is counted, never an error: the log must not stop the fabric."""

import io
import os
import select
from threading import Lock
from typing import TextIO

from fmsupervisor.report.journald_socket import JournaldSocket

_PATIENCE_MILLISECONDS = 100


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
    """The wrapped logger of structlog for a text stream, a line or block per message.

    Behind a stream may be a pipe that nobody reads or a terminal that was stopped; they must not stop the loop. Making
    the descriptor non-blocking would do it to everybody who shares it. So it is asked for room before each piece that
    is sure to fit then (PIPE_BUF), with a little patience for a reader that is only slow.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = Lock()
        self._is_stuck = False
        self._is_cut = False  # the last line has no end

    def msg(self, line: str) -> None:
        """Write and flush one message."""
        try:
            with self._lock:
                self._write(line + "\n")
        except (OSError, ValueError):  # a full disk, a closed or full pipe; a closed stream
            _losses.add()

    debug = info = warning = error = critical = msg

    def close(self) -> None:
        """Leave the stream alone: it is not ours."""

    def _write(self, text: str) -> None:
        try:
            descriptor = self._stream.fileno()
        except io.UnsupportedOperation:  # in memory
            self._stream.write(text)
            return
        left = text.encode(self._stream.encoding, self._stream.errors or "strict")
        if self._is_cut:
            left = b"\n" + left
        while left:
            self._wait_for_room(descriptor)
            left = left[os.write(descriptor, left[: select.PIPE_BUF]) :]
            self._is_cut = bool(left)

    def _wait_for_room(self, descriptor: int) -> None:
        """Raises ``BlockingIOError``, at once when there was no room the last time either."""
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        self._is_stuck = not poll.poll(0 if self._is_stuck else _PATIENCE_MILLISECONDS)
        if self._is_stuck:
            raise BlockingIOError

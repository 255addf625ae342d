"""The simulated nv-fabricmanager's log: line format, levels, own rotation, silence at the size limit.

Format: ``[Mon DD YYYY HH:MM:SS] [LEVEL] [tid N] message``, local time, one file appended over all sessions. The names
of rotated files are not known from public material; ``.1`` to ``.N`` are used. Cheap imports only.
"""

import contextlib
import os
import time
from collections.abc import Iterable

from fmsupervisor.simulator.messages import Message

_SEVERITIES = {"CRITICAL": 1, "ERROR": 2, "WARNING": 3, "INFO": 4}  # LOG_LEVEL


class Log:
    """The log file with Fabric Manager's own rotation, or standard error when there is no file name."""

    def __init__(self, host: str, options: dict[str, str]) -> None:
        name = options.get("LOG_FILE_NAME", "/var/log/fabricmanager.log")
        self._path = host + name if name else ""
        self._limit = int(options.get("LOG_FILE_MAX_SIZE", "1024")) << 20
        self._kept = int(options.get("LOG_MAX_ROTATE_COUNT", "3"))
        self._level = int(options.get("LOG_LEVEL", "4"))
        self._is_quiet = options.get("LOG_USE_SYSLOG", "0") == "1"
        self._descriptor = 2
        if self._path:
            self._descriptor = self._open(0 if options.get("LOG_APPEND_TO_LOG", "1") == "1" else os.O_TRUNC)

    def write(self, lines: Iterable[Message]) -> None:
        """Append messages; lines of one call have one time stamp."""
        if self._is_quiet:
            return
        prefix = time.strftime("[%b %d %Y %H:%M:%S]")
        text = "".join(
            f"{prefix} [{level}] [tid {os.getpid()}] {message}\n" if level else f"{message}\n"
            for level, message in lines
            if _SEVERITIES.get(level, 1) <= self._level
        )
        with contextlib.suppress(OSError):  # a full disk or a closed pipe must not end the program
            self._write(text.encode())

    def header(self) -> None:
        """The first line of a session."""
        now = time.time()
        stamp = time.strftime("%m/%d/%Y %H:%M:%S", time.localtime(now))
        self.write([("", f"Fabric Manager Log initializing at: {stamp}.{int(now * 1000) % 1000:03d}")])

    def _write(self, data: bytes) -> None:
        if not self._path:
            os.write(2, data)
        elif os.fstat(self._descriptor).st_size < self._limit:
            os.write(self._descriptor, data)
        elif self._kept:
            self._rotate()
            os.write(self._descriptor, data)

    def _rotate(self) -> None:
        for number in range(self._kept, 0, -1):
            older = f"{self._path}.{number - 1}" if number > 1 else self._path
            with contextlib.suppress(FileNotFoundError):
                os.rename(older, f"{self._path}.{number}")
        os.close(self._descriptor)
        self._descriptor = self._open(0)

    def _open(self, flags: int) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | flags, 0o644)

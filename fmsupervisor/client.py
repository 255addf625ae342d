"""Reading the daemon's status from outside: ``status`` and ``wait``. The daemon is not asked and not disturbed."""

import json
import os
import shutil
import sys
import time
from typing import Any

from fmsupervisor.daemon_lock import InstanceLock
from fmsupervisor.errors import CannotObserve
from fmsupervisor.exit_codes import ExitCode
from fmsupervisor.host.root import HostRoot
from fmsupervisor.report.status_text import SCHEMA, STATUS_FILE, render_text
from fmsupervisor.settings import Settings

_POLL_SECONDS = 0.2
_STATUS_LIMIT_BYTES = 16 << 20
_CLEAR_SCREEN = "\x1b[H\x1b[2J"


def _terminal() -> dict[str, Any]:
    """How to lay out text for where it goes: a pipe gets whole lines and no colours."""
    if not sys.stdout.isatty():
        return {}
    return {"width": shutil.get_terminal_size().columns, "has_colour": not os.environ.get("NO_COLOR")}


class StatusReader:
    """The status file of the daemon with these settings."""

    def __init__(self, settings: Settings, root: HostRoot | None = None) -> None:
        self._root = root or HostRoot("/")
        self._directory = settings.service.state_directory

    def read(self) -> dict[str, Any] | None:
        """The present status document; None when no daemon runs or it has not written one yet.

        Raises ``CannotObserve``, also for a document of another version of this program.
        """
        holder = InstanceLock(self._root, self._directory).holder()
        if holder is None:
            return None
        path = f"{self._directory}/{STATUS_FILE}"
        content = self._root.read_bytes(path, _STATUS_LIMIT_BYTES)
        try:
            document = json.loads(content or b"null")
        except (ValueError, RecursionError):
            return None
        if not isinstance(document, dict) or document.get("pid") != holder:
            return None  # its predecessor's last word
        if document.get("schema") != SCHEMA:
            raise CannotObserve(path, f"it has schema {document.get('schema')}, this program knows {SCHEMA}")
        return document

    def show(self, *, as_json: bool, watch: bool) -> int:
        """Print the status; with ``watch``, again whenever it changes, until interrupted."""
        shown: object = object()
        while True:
            document = self.read()
            stamp = document["updated_at"] if document else None
            if stamp != shown:
                shown = stamp
                if watch and sys.stdout.isatty():
                    sys.stdout.write(_CLEAR_SCREEN)
                self._print(document, as_json=as_json)
            if not watch:
                return self._exit_code(document)
            time.sleep(_POLL_SECONDS)

    def _print(self, document: dict[str, Any] | None, *, as_json: bool) -> None:
        if document is None:
            sys.stderr.write(f"{self._nobody()}\n")
            return
        text = json.dumps(document, indent=2) + "\n" if as_json else render_text(document, **_terminal())
        sys.stdout.write(text)
        sys.stdout.flush()

    def _nobody(self) -> str:
        """No daemon: what the last one said, and where to look."""
        try:
            last = json.loads(self._root.read_bytes(f"{self._directory}/{STATUS_FILE}", _STATUS_LIMIT_BYTES) or b"null")
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last["updated_at"]))
            before = f"; the last one (pid {last['pid']}) said at {at}: {last['state']}: {last['reason']}"
        except (ValueError, TypeError, KeyError, RecursionError, CannotObserve):
            before = ""
        return (
            f"no fmsupervisor is running with {self._directory}{before}\n"
            "see: systemctl status fmsupervisor; journalctl -u fmsupervisor"
        )

    def _exit_code(self, document: dict[str, Any] | None) -> int:
        if document is None:
            return ExitCode.NO_DAEMON
        return ExitCode.OK if document["ready"] else ExitCode.NOT_CONFIGURED

    def wait(self, timeout_seconds: float | None) -> int:
        """Block until the fabric is configured, or until there is none to wait for on this machine."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        told = ""
        while True:
            document = self.read()
            now = f"{document['state']}: {document['reason']}" if document else "no fmsupervisor is running yet"
            if now != told and sys.stderr.isatty():
                sys.stderr.write(f"{now}\n")
            told = now
            if document is not None and document["state"] in ("configured", "not-applicable"):
                sys.stdout.write(f"{document['state']}: {document['reason']}\n")
                return ExitCode.OK
            if deadline is not None and time.monotonic() >= deadline:
                why = f"{document['state']}: {document['reason']}" if document else "no fmsupervisor is running"
                sys.stderr.write(f"not configured after {timeout_seconds:g} s; {why}\n")
                return ExitCode.NO_DAEMON if document is None else ExitCode.NOT_CONFIGURED
            time.sleep(_POLL_SECONDS)

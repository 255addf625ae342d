"""``fmsupervisor report``: collect, redact, pack, write. No part can make it fail or wait for ever."""

import os
import sys
import threading
import time
from collections.abc import Sequence

from fmsupervisor import config
from fmsupervisor.errors import ConfigError, FmsupervisorError
from fmsupervisor.exit_codes import ExitCode
from fmsupervisor.host.root import HostRoot
from fmsupervisor.report.log_renderers import one_line
from fmsupervisor.settings import Settings
from fmsupervisor.support import archive, host_parts, own_parts, program_parts
from fmsupervisor.support.piece import Outcome, Part, Piece, Source
from fmsupervisor.support.redaction import Redactor

PARTS: tuple[tuple[str, Part], ...] = (  # the most telling first: what does not fit is at the end
    ("versions", own_parts.versions),
    ("status", own_parts.status),
    ("settings", own_parts.settings),
    ("checks", program_parts.checks),
    ("configuration", own_parts.configuration),
    ("pci", host_parts.pci),
    ("units", program_parts.units),
    ("installed files", own_parts.installed_files),
    ("kernel log", host_parts.kernel_log),
    ("host files", host_parts.host_files),
    ("Fabric Manager's log", own_parts.fabric_manager_log),
    ("journals", program_parts.journals),
)
_PART_SECONDS = 100.0
_HOST_NAMES = ("/proc/sys/kernel/hostname", "/etc/hostname")


def report(
    root: HostRoot,
    config_path: str | None,
    output: str | None,
    *,
    redacts: bool,
    parts: Sequence[tuple[str, Part]] = PARTS,
) -> int:
    """Write the report and say where it is. Raises ``FmsupervisorError`` when it cannot be written."""
    path = output or time.strftime("fmsupervisor-report-%Y%m%d-%H%M%S.tar.gz")
    archive.refuse_existing(path)  # before the work, and again when it is written
    source = Source(root, _settings(root, config_path), config_path)
    pieces = collect(source, parts)
    redactor = Redactor(_host_names(root)) if redacts else None
    if redactor is not None:
        pieces = list(archive.redact_pieces(pieces, redactor))
    bounded = list(archive.bound_pieces(pieces))
    content = archive.pack(bounded, archive.manifest(bounded, redactor))
    archive.write_new(path, content)
    sys.stdout.write(_summary(path, len(content), bounded, redacts=redacts))
    return ExitCode.OK


def collect(source: Source, parts: Sequence[tuple[str, Part]], part_seconds: float = _PART_SECONDS) -> list[Piece]:
    """The pieces of all parts. A part that fails or hangs is an error in the manifest, with what it had until then."""
    return [piece for name, part in parts for piece in _collect(source, name, part, part_seconds)]


def _collect(source: Source, name: str, part: Part, seconds: float) -> list[Piece]:
    """In a thread of its own: a read from a driver that hangs cannot be interrupted, only left behind."""
    pieces: list[Piece] = []

    def work() -> None:
        try:
            pieces.extend(part(source))  # one by one, so that what came before a failure is kept
        except Exception as error:  # noqa: BLE001 - the report of a broken host must not break: it is said in the manifest
            pieces.append(Piece(name, outcome=Outcome.ERROR, note=f"{type(error).__name__}: {error}"))

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    found = list(pieces)
    if thread.is_alive():
        found.append(Piece(name, outcome=Outcome.ERROR, note=f"not done after {seconds:g} s"))
    return found


def _settings(root: HostRoot, config_path: str | None) -> Settings:
    """The settings that say where things are; the defaults when the file cannot be used."""
    try:
        return config.load(config_path or root.path(config.DEFAULT_PATH), required=config_path is not None).settings
    except ConfigError:
        return config.load_text("", "").settings


def _host_names(root: HostRoot) -> list[str]:
    names = [os.uname().nodename] if root.directory == "/" else []
    for path in _HOST_NAMES:
        try:
            names.append(root.read_text(path, 256) or "")
        except FmsupervisorError:
            continue
    return [name for name in names if name.strip()]


def _summary(path: str, size_bytes: int, pieces: Sequence[Piece], *, redacts: bool) -> str:
    lacking = [
        f"  {piece.outcome}: {piece.name} {one_line(piece.note)}" for piece in pieces if piece.outcome is Outcome.ERROR
    ]
    lines = [f"{one_line(path)} ({size_bytes} bytes, {sum(bool(piece.content) for piece in pieces)} files)"]
    if not redacts:
        lines.append("  it is not redacted")
    return "\n".join([*lines, *lacking]) + "\n"

"""The parts of the report about this program and Fabric Manager: status, settings, configuration, log, files."""

import difflib
import os
import stat
import sys
import time
from collections.abc import Iterator

from fmsupervisor import __version__, config
from fmsupervisor.daemon_lock import InstanceLock
from fmsupervisor.errors import CannotObserve, ConfigError
from fmsupervisor.report.status_text import STATUS_FILE
from fmsupervisor.support.confined import find_last, read_end, read_range
from fmsupervisor.support.piece import LOG_BYTES, Outcome, Piece, Source, file_piece, text_piece

_STATUS_BYTES = 1 << 20
_SESSION_HEADER = b"Fabric Manager Log initializing"
_LOOK_BACK_BYTES = 256 << 20
_SESSION_START_BYTES = 512 << 10
_LISTED = 2000


def status(source: Source) -> Iterator[Piece]:
    """The status document, which outlives the daemon until the next boot."""
    directory = source.settings.service.state_directory
    piece = file_piece(source, "status.json", f"{directory}/{STATUS_FILE}", directory, _STATUS_BYTES)
    try:
        holder = InstanceLock(source.root, directory).holder()
        note = "no daemon is running: its last word" if holder is None else f"of the daemon with pid {holder}"
    except CannotObserve as error:
        note = f"{error}"
    note = note if piece.content else f"{piece.note}; {note}"
    yield Piece(piece.name, piece.content, piece.outcome, note)


def versions(source: Source) -> Iterator[Piece]:
    """This program, the interpreter, and how the program was called."""
    lines = (
        f"fmsupervisor {__version__}",
        f"python {sys.version}",
        f"user id {os.geteuid()}",
        f"root {source.root.directory}",
        f"time {time.strftime('%Y-%m-%dT%H:%M:%S%z')}",
    )
    yield text_piece("versions.txt", "\n".join(lines) + "\n")


def settings(source: Source) -> Iterator[Piece]:
    """The settings in force, or what is wrong with them and the file itself."""
    path = source.config_path or source.root.path(config.DEFAULT_PATH)
    try:
        loaded = config.load(path, required=source.config_path is not None)
    except ConfigError as error:
        yield Piece("settings.txt", f"{error}\n".encode("utf-8", "backslashreplace"), Outcome.ERROR, "not valid")
        if source.config_path is None:
            yield file_piece(source, "fmsupervisor.toml", config.DEFAULT_PATH, "/etc")
        return
    yield text_piece("settings.txt", config.render_effective(loaded))


def configuration(source: Source) -> Iterator[Piece]:
    """fabricmanager.cfg as it came, as Fabric Manager gets it, and the difference."""
    wanted = source.settings.fabric_manager
    stock = file_piece(source, "fabric-manager/stock.cfg", wanted.stock_config, os.path.dirname(wanted.stock_config))
    ours = file_piece(source, "fabric-manager/rendered.cfg", wanted.config, os.path.dirname(wanted.config))
    yield stock
    yield ours
    if not stock.content or not ours.content:
        yield Piece("fabric-manager/cfg.diff", outcome=Outcome.MISSING, note="there is nothing to compare")
        return
    before, after = (piece.content.decode("utf-8", "replace").splitlines() for piece in (stock, ours))
    difference = difflib.unified_diff(before, after, wanted.stock_config, wanted.config, lineterm="", n=0)
    yield text_piece("fabric-manager/cfg.diff", "\n".join(difference) + "\n")


def fabric_manager_log(source: Source) -> Iterator[Piece]:
    """The end of Fabric Manager's log and, when its last session began before that, how it began."""
    path = source.settings.fabric_manager.log_file
    name = "fabric-manager/log.txt"
    if not path:
        yield Piece(name, outcome=Outcome.MISSING, note="it logs to its standard error: see the daemon's journal")
        return
    within = os.path.dirname(path)
    try:
        found = read_end(source.root, path, within, LOG_BYTES)
        if found is None:
            yield Piece(name, outcome=Outcome.MISSING, note=f"{path} does not exist")
            return
        outcome = Outcome.CUT if found.is_cut else Outcome.OK
        yield Piece(name, found.content, outcome, f"the end of {path}" if found.is_cut else path)
        if not found.is_cut or _SESSION_HEADER in found.content:
            return
        start = find_last(source.root, path, within, _SESSION_HEADER, _LOOK_BACK_BYTES)
        begin = read_range(source.root, path, within, start, _SESSION_START_BYTES) if start is not None else None
    except CannotObserve as error:
        yield Piece(name, outcome=Outcome.ERROR, note=str(error))
        return
    if begin is None:
        yield Piece("fabric-manager/log-begin.txt", outcome=Outcome.MISSING, note="too far back")
    else:
        yield Piece("fabric-manager/log-begin.txt", begin.content, Outcome.CUT, "how the last session began")


def installed_files(source: Source) -> Iterator[Piece]:
    """Names, sizes and permissions in the directories that Fabric Manager's files come from."""
    wanted = source.settings.fabric_manager
    directories = dict.fromkeys(
        (
            os.path.dirname(wanted.binary),
            os.path.dirname(wanted.config),
            wanted.topology_path,
            *wanted.library_paths,
            *_kernel_directories(source),
        )
    )
    lines = [line for directory in directories for line in _listing(source, directory)]
    if not lines:
        yield Piece("installed.txt", outcome=Outcome.MISSING, note=f"none of {', '.join(directories)} exists")
        return
    outcome = Outcome.CUT if len(lines) > _LISTED else Outcome.OK
    yield Piece("installed.txt", "\n".join([*lines[:_LISTED], ""]).encode("utf-8", "backslashreplace"), outcome)


def _kernel_directories(source: Source) -> Iterator[str]:
    top = source.settings.module.search_path
    try:
        names = source.root.list_directory(top) or []
    except CannotObserve:
        return
    for name in names:
        for below in ("updates", "extra", "updates/dkms", "weak-updates", "kernel/drivers/video"):
            yield f"{top}/{name}/{below}"


def _listing(source: Source, directory: str) -> Iterator[str]:
    try:
        names = source.root.list_directory(directory)
    except CannotObserve as error:
        yield f"{error}"
        return
    if names is None:
        return
    yield f"{directory}: {len(names)} entries"
    is_system = directory.startswith(("/usr/bin", "/usr/lib"))
    for name in names:
        if is_system and not any(word in name.lower() for word in ("nvidia", "nv-", "nvlsm", "fabric", "nscq")):
            continue
        yield f"  {_entry(source, f'{directory}/{name}', name)}"


def _entry(source: Source, path: str, name: str) -> str:
    try:
        found = source.root.status(path, follow_symlinks=False)
        target = source.root.read_link(path)
    except CannotObserve as error:
        return f"{name!r}: {error.reason}"
    if found is None:
        return f"{name!r}: gone"
    changed = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(found.st_mtime))
    what = f"{stat.filemode(found.st_mode)} {found.st_uid}:{found.st_gid} {found.st_size:>12} {changed}"
    return f"{what} {name!r}" + (f" -> {target!r}" if target is not None else "")

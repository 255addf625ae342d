"""fabricmanager.cfg: the stock file of this Fabric Manager with our settings in it.

The format (Fabric Manager User Guide, stock file of 595.71.05): one ``KEY=VALUE`` per line, ``#`` comments, no
quotes, no sections, read once at start. What Fabric Manager does with a key that stands there twice is not
documented, so every active line of a key gets our value. Comments, order, keys that are not ours, line endings and
blanks stay as they are: the stock file belongs to NVIDIA or to the administrator, and a diff against it should show
decisions only.

FABRIC_MODE_RESTART is always 0: the file cannot tell a first start from a restart. Where a resiliency restart is
wanted, that one start gets ``--restart`` on its command line.

The text is handled as UTF-8 with surrogate escapes, so bytes of other encodings in comments come out as they went in.
Pure functions above, ``prepare`` with its effects below.
"""

import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fmsupervisor.conditions import Code
from fmsupervisor.errors import ActionFailed, ActionRefused, CannotObserve
from fmsupervisor.fabric_manager.config_keys import FIXED_KEYS, is_known, unknown_keys
from fmsupervisor.facts import Problem, RenderedConfig
from fmsupervisor.host.root import HostRoot
from fmsupervisor.settings import Settings

APPENDED_COMMENT = "# Added by fmsupervisor from its settings:"
DEFAULT_COMMAND_PORT = 6666
DEFAULT_LOG_LIMIT_MEGABYTES = 1024

_STOCK_LIMIT_BYTES = 1 << 20
_SHOWN_CHARACTERS = 120
_KEY = re.compile(r"[A-Z][A-Z0-9_]*")
_COMMENTED_KEY = re.compile(r"[ \t]*#+[ \t]*([A-Z][A-Z0-9_]*)[ \t]*=")
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class Rendering:
    """The text of the configuration file, and how it came about."""

    text: str
    differences: tuple[str, ...]  # "KEY: stock value -> our value", in file order
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class _Assignment:
    """One active ``KEY = VALUE`` line."""

    left: str  # the key with the blanks around it
    blanks: str  # between "=" and the value
    value: str
    ending: str  # line ending, "" on a last line without one

    @property
    def key(self) -> str:
        return self.left.strip(" \t")

    def with_value(self, value: str) -> str:
        return f"{self.left}={self.blanks}{value}{self.ending}"


def render(stock_text: str | None, settings: Settings, version: str | None) -> Rendering:
    """The configuration for ``settings``, from the stock text (None: there is none) of this Fabric Manager's version.

    Options that the version does not know are left out and reported as CONFIG_KEY_UNKNOWN.
    """
    stock = stock_text or ""
    stock_keys = _mentioned_keys(stock)
    refused = unknown_keys(settings.fabric_manager.options, version, stock_keys)
    values = _values(settings, version, stock_keys)
    for unknown in refused:
        values.pop(unknown.key, None)
    text, differences = _override(stock, values)
    return Rendering(
        text,
        differences,
        tuple(
            Problem(Code.CONFIG_KEY_UNKNOWN, f"cannot set {unknown.key}: {unknown.reason}", unknown.key)
            for unknown in refused
        ),
    )


def effective_options(text: str) -> dict[str, str]:
    """Key and value of every active line of a fabricmanager.cfg; the last one counts. Anything else is ignored."""
    assignments = (_assignment(line) for line in _lines(text))
    return {assignment.key: assignment.value for assignment in assignments if assignment}


def command_endpoint(text: str) -> tuple[int | None, str]:
    """Where a Fabric Manager with this configuration listens for commands: its TCP port, or None and its Unix socket.

    Both are nothing (None and "") when the configured port is not a port number.
    """
    options = effective_options(text)
    if path := options.get("FM_CMD_UNIX_SOCKET_PATH", ""):
        return None, path
    port = _number(options.get("FM_CMD_PORT_NUMBER") or str(DEFAULT_COMMAND_PORT))
    return (port if port is not None and port <= 65535 else None), ""  # noqa: PLR2004  ports have 16 bits


def prepare(root: HostRoot, settings: Settings, version: str | None) -> RenderedConfig:
    """Write the configuration file, when it differs from what is there, and make the directories that it names.

    Never raises for the state of the host: what cannot be done comes back as a problem. A stock file that is missing is
    rendered as an empty one (its own condition, STOCK_CONFIG_MISSING, is reported by the version checks).
    """
    wanted = settings.fabric_manager
    problems: list[Problem] = []
    try:
        stock_text = _read_stock(root, wanted.stock_config)
    except (CannotObserve, ActionRefused) as error:
        problems.append(Problem(Code.CONFIG_UNWRITABLE, str(error), wanted.stock_config))
        return RenderedConfig(wanted.config, (), wanted.log_file, False, _log_limit_bytes({}), tuple(problems))
    rendering = render(stock_text, settings, version)
    problems += rendering.problems
    options = effective_options(rendering.text)
    for directory in _directories(options, wanted.config, wanted.run_directory):
        try:
            _make_directory(root, directory)
        except (ActionFailed, CannotObserve) as error:
            problems.append(Problem(Code.CONFIG_UNWRITABLE, str(error), directory))
    try:
        _write(root, wanted.config, wanted.stock_config, rendering.text.encode("utf-8", "surrogateescape"))
    except (ActionFailed, ActionRefused, CannotObserve) as error:
        problems.append(Problem(Code.CONFIG_UNWRITABLE, str(error), wanted.config))
    return RenderedConfig(
        path=wanted.config,
        differences=rendering.differences,
        log_file=wanted.log_file,
        can_log_stop=bool(wanted.log_file) and _number(options.get("LOG_MAX_ROTATE_COUNT", "")) == 0,
        log_limit_bytes=_log_limit_bytes(options),
        problems=tuple(problems),
    )


# --- the text


def _values(settings: Settings, version: str | None, stock_keys: frozenset[str]) -> dict[str, str]:
    """What each key must be, in the order in which missing ones are appended; decided keys win over options."""
    wanted = settings.fabric_manager
    values = {
        "DAEMONIZE": FIXED_KEYS["DAEMONIZE"],
        "LOG_FILE_NAME": wanted.log_file,
        "FABRIC_MODE": str(wanted.fabric_mode),
        "FABRIC_MODE_RESTART": "0",
        "STATE_FILE_NAME": wanted.state_file,
        "TOPOLOGY_FILE_PATH": wanted.topology_path,
    }
    if is_known("DATABASE_PATH", version, stock_keys):
        values["DATABASE_PATH"] = wanted.database_path
    if "LOG_USE_SYSLOG" in stock_keys:
        values["LOG_USE_SYSLOG"] = FIXED_KEYS["LOG_USE_SYSLOG"]
    return {**wanted.options, **values}


def _override(stock: str, values: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """The stock text with ``values`` in it, and the differences."""
    lines: list[str] = []
    differences: list[str] = []
    missing = dict(values)
    for line in _lines(stock):
        assignment = _assignment(line)
        ours = values.get(assignment.key) if assignment else None
        if assignment is None or ours is None:
            lines.append(line)
            continue
        missing.pop(assignment.key, None)
        if assignment.value == ours:
            lines.append(line)
            continue
        lines.append(assignment.with_value(ours))
        differences.append(f"{assignment.key}: {_shown(assignment.value)} -> {_shown(ours)}")
    if missing:
        newline = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
        if lines and not lines[-1].endswith("\n"):
            lines[-1] += newline
        lines.append(APPENDED_COMMENT + newline)
        lines += (f"{key}={value}{newline}" for key, value in missing.items())
        differences += (f"{key}: (not set) -> {_shown(value)}" for key, value in missing.items())
    return "".join(lines), tuple(dict.fromkeys(differences))


def _lines(text: str) -> Iterator[str]:
    """The lines with their endings; only a line feed ends a line (str.splitlines knows many more)."""
    return (found[0] for found in re.finditer(r"[^\n]*\n|[^\n]+", text))


def _assignment(line: str) -> _Assignment | None:
    """The line taken apart; None for comments, empty lines and everything that is not ``KEY = VALUE``."""
    body = line.rstrip("\r\n")
    left, equals, right = body.partition("=")
    if not equals or not _KEY.fullmatch(left.strip(" \t")):
        return None
    unindented = right.lstrip(" \t")
    blanks = right[: len(right) - len(unindented)]
    return _Assignment(left, blanks, unindented.rstrip(" \t"), line[len(body) :])


def _mentioned_keys(text: str) -> frozenset[str]:
    """All keys that the text sets or shows commented out (``# KEY=...``)."""
    commented = (_COMMENTED_KEY.match(line) for line in _lines(text))
    return frozenset(effective_options(text)) | {found[1] for found in commented if found}


def _shown(value: str) -> str:
    """A value as people see it: never empty, never endless, always printable."""
    readable = "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in value[:_SHOWN_CHARACTERS]
    )
    return (readable + ("..." if len(value) > _SHOWN_CHARACTERS else "")) or "(empty)"


def _number(text: str) -> int | None:
    """A whole number of at most 18 digits; None for anything else."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def _log_limit_bytes(options: Mapping[str, str]) -> int:
    """LOG_FILE_MAX_SIZE, which counts megabytes."""
    megabytes = _number(options.get("LOG_FILE_MAX_SIZE", ""))
    return (DEFAULT_LOG_LIMIT_MEGABYTES if megabytes is None else megabytes) << 20


# --- the host


def _read_stock(root: HostRoot, path: str) -> str | None:
    """The stock file; None when there is none. Raises CannotObserve, and ActionRefused when it cannot be one."""
    content = root.read_bytes(path, _STOCK_LIMIT_BYTES + 1)
    if content is None:
        return None
    if len(content) > _STOCK_LIMIT_BYTES:
        raise ActionRefused(f"cannot use {path} as the stock configuration: it is larger than 1 MiB")
    return content.decode("utf-8", "surrogateescape")


def _directories(options: Mapping[str, str], config: str, run_directory: str) -> tuple[str, ...]:
    """Every directory that must be there before the start, each once."""
    files = (config, *(options.get(key, "") for key in ("LOG_FILE_NAME", "STATE_FILE_NAME", "FM_CMD_UNIX_SOCKET_PATH")))
    wanted = [run_directory, *(os.path.dirname(file) for file in files), options.get("DATABASE_PATH", "")]
    return tuple(dict.fromkeys(directory for directory in wanted if directory.startswith("/")))


def _make_directory(root: HostRoot, logical: str) -> None:
    """Make the directory and its parents, each 0755 whatever the umask; what is there stays as it is."""
    if root.is_directory(logical):
        return
    parent = os.path.dirname(logical)
    if parent != logical:
        _make_directory(root, parent)
    if not root.make_directory(logical, 0o755):
        return
    try:
        os.chmod(root.path(logical), 0o755)  # noqa: S103  clients of the command socket must get through
    except OSError as error:
        raise ActionFailed(f"cannot set the mode of directory {logical}: {error.strerror}") from error


def _write(root: HostRoot, path: str, stock_path: str, content: bytes) -> None:
    """Put ``content`` at ``path`` unless it is there already.

    Only a regular file is replaced: a symbolic link or anything else at that path was put there by somebody for a
    reason that is not known here. The stock file itself is never replaced, by whatever name it is reached.
    """
    present = root.status(path, follow_symlinks=False)
    if present is not None:
        if not stat.S_ISREG(present.st_mode):
            raise ActionRefused(f"cannot write {path}: it is not a regular file; move it away")
        stock = root.status(stock_path)
        if stock is not None and os.path.samestat(present, stock):
            raise ActionRefused(f"cannot write {path}: it is the stock file {stock_path}, which stays as it is")
        if not present.st_mode & _WRITABLE_BY_OTHERS and _has_content(root, path, content):
            return
    root.write_atomically(path, content)


def _has_content(root: HostRoot, path: str, content: bytes) -> bool:
    try:
        return root.read_bytes(path, len(content) + 1) == content
    except CannotObserve:
        return False

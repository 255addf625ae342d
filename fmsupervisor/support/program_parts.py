"""The parts of the report that other programs tell: systemd, the journal, and this program's own checks."""

import json
import os
import re
import sys
from collections.abc import Iterator

from fmsupervisor.support.piece import LOG_BYTES, SMALL_BYTES, Outcome, Piece, Source
from fmsupervisor.support.programs import Output, run_program

_PROGRAM_SECONDS = 15.0
_CHECK_SECONDS = 45.0
_OWN_UNITS = ("fmsupervisor.service", "nvidia-fabric-wait.service", "nvidia-fabric.target")
_VENDOR_UNIT = "nvidia-fabricmanager.service"
_UNITS = (*_OWN_UNITS, _VENDOR_UNIT)
# Not all: Environment= may hold secrets.
_PROPERTIES = (
    "Id,LoadState,ActiveState,SubState,Result,UnitFileState,FragmentPath,DropInPaths,MainPID,NRestarts,StatusText,"
    "ExecMainCode,ExecMainStatus,ActiveEnterTimestamp,InactiveEnterTimestamp,WatchdogUSec,MemoryCurrent,TasksCurrent,"
    "Requires,Wants,After,Before,Conflicts,NeedDaemonReload"
)
_ENVIRONMENT = re.compile(rb"^(\s*(?:Environment|PassEnvironment|SetCredential\w*)\s*=)(?:\\\n|.)*", re.MULTILINE)


def checks(source: Source) -> Iterator[Piece]:
    """What ``fmsupervisor check`` finds, for programs and for people."""
    for name, arguments in (("check.json", ("--json",)), ("check.txt", ())):
        output = run_program(_own_command(source, *arguments), _CHECK_SECONDS, SMALL_BYTES, os.environ)
        is_answer = output.status in (0, 1, 2) and b"Traceback" not in output.content and not _is_usage(output)
        if is_answer and (name != "check.json" or _is_json(output.content)):
            yield Piece(name, output.content, Outcome.CUT if output.is_cut else Outcome.OK)
        else:
            why = output.problem or f"fmsupervisor check ended with status {output.status}"
            yield Piece(name, output.content, Outcome.ERROR, why)


def units(source: Source) -> Iterator[Piece]:
    """The units as systemd sees them, with drop-ins, and their state."""
    yield from _programs(
        source,
        ("units/cat.txt", ("systemctl", "cat", "--no-pager", *_UNITS), SMALL_BYTES),
        ("units/show.txt", ("systemctl", "show", "--no-pager", f"--property={_PROPERTIES}", *_UNITS), SMALL_BYTES),
    )


def journals(source: Source) -> Iterator[Piece]:
    """The end of the daemon's journal and of the vendor unit's."""
    yield from _programs(
        source,
        ("journal/fmsupervisor.txt", _journal_of(_OWN_UNITS, 20_000), LOG_BYTES),
        ("journal/nvidia-fabricmanager.txt", _journal_of((_VENDOR_UNIT,), 5_000), LOG_BYTES // 4),
    )


def _journal_of(names: tuple[str, ...], lines: int) -> tuple[str, ...]:
    selected = (argument for name in names for argument in ("-u", name))
    form = ("-o", "short-iso-precise", "--no-hostname", "--no-pager", "-q", "-n", str(lines))
    return ("journalctl", *selected, *form)


def _programs(source: Source, *wanted: tuple[str, tuple[str, ...], int]) -> Iterator[Piece]:
    for name, command, limit_bytes in wanted:
        if not source.is_this_machine:
            yield Piece(name, outcome=Outcome.MISSING, note=f"{command[0]} would tell of another machine")
            continue
        output = run_program(command, _PROGRAM_SECONDS, limit_bytes)
        content = _ENVIRONMENT.sub(rb"\1(left out)", output.content)
        if output.status is None:
            yield Piece(name, content, Outcome.ERROR, output.problem)
        elif output.status != 0:
            note = f"{' '.join(command[:2])} ended with status {output.status}"
            yield Piece(name, content, Outcome.ERROR if not content else Outcome.OK, note)
        else:
            yield Piece(name, content, Outcome.CUT if output.is_cut else Outcome.OK)


def _own_command(source: Source, *arguments: str) -> tuple[str, ...]:
    """This program again; when it is one self-contained file, ``sys.executable`` is that file."""
    is_frozen = getattr(sys, "frozen", False)
    program = (sys.executable,) if is_frozen else (sys.executable, "-m", "fmsupervisor")
    settings = ("--config", source.config_path) if source.config_path is not None else ()
    return (*program, "check", "--root", source.root.directory, *settings, *arguments)


def _is_usage(output: Output) -> bool:
    return output.content.startswith(b"usage: ")


def _is_json(content: bytes) -> bool:
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return False
    return True

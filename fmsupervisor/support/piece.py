"""What the report is made of: pieces, and what the parts that make them are given."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from fmsupervisor.errors import CannotObserve
from fmsupervisor.host.root import HostRoot
from fmsupervisor.settings import Settings
from fmsupervisor.support.confined import read_start

SMALL_BYTES = 256 << 10  # of a text that is small as a rule
LOG_BYTES = 4 << 20  # of a log


class Outcome(StrEnum):
    """What became of a piece; the word stands in the manifest."""

    OK = "ok"
    MISSING = "missing"  # there is no such thing on this host
    CUT = "cut"  # there is more of it
    ERROR = "error"  # it could not be had, or not all of it


@dataclass(frozen=True, slots=True)
class Piece:
    """One file of the archive, or the reason why there is none. ``note`` is for people."""

    name: str  # relative path; made safe when it is written
    content: bytes = b""
    outcome: Outcome = Outcome.OK
    note: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """The host that is reported on."""

    root: HostRoot
    settings: Settings
    config_path: str | None  # of the settings file, when it was given on the command line

    @property
    def is_this_machine(self) -> bool:
        """Whether programs and /dev/kmsg tell of the same host as the files."""
        return self.root.directory == "/"


Part = Callable[[Source], Iterator[Piece]]


def file_piece(source: Source, name: str, path: str, within: str, limit_bytes: int = SMALL_BYTES) -> Piece:
    """The start of a file."""
    try:
        found = read_start(source.root, path, within, limit_bytes)
    except CannotObserve as error:
        return Piece(name, outcome=Outcome.ERROR, note=str(error))
    if found is None:
        return Piece(name, outcome=Outcome.MISSING, note=f"{path} does not exist")
    if found.is_cut:
        return Piece(name, found.content, Outcome.CUT, f"the first {limit_bytes} bytes of {path}")
    return Piece(name, found.content, note=path)


def text_piece(name: str, text: str, note: str = "") -> Piece:
    """A text of our own."""
    return Piece(name, text.encode("utf-8", "backslashreplace"), note=note)

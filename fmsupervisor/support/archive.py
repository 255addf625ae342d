"""From pieces to one tar.gz: redacted, bounded, with a manifest, and complete or not there at all."""

import gzip
import io
import json
import os
import re
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fmsupervisor import __version__
from fmsupervisor.errors import ActionFailed, ActionRefused
from fmsupervisor.report.log_renderers import one_line
from fmsupervisor.support.confined import whole_words
from fmsupervisor.support.piece import Outcome, Piece
from fmsupervisor.support.redaction import Redactor

TOTAL_BYTES = 32 << 20  # of all pieces together, unpacked
TOP = "fmsupervisor-report"
MANIFEST = "MANIFEST"

_PIECES = 2000
_NAME_CHARACTERS = 100  # of one component
_DEPTH = 12
_UNSAFE = re.compile(r"[^A-Za-z0-9._:+@=,-]")


def redact_pieces(pieces: Sequence[Piece], redactor: Redactor) -> Iterator[Piece]:
    """The pieces without what is private, names and notes included."""
    texts = [piece.content.decode("utf-8", "replace") for piece in pieces]
    for piece, text in zip(pieces, texts, strict=True):
        redactor.learn(f"{piece.name}\n{piece.note}\n{text}")
    for piece, text in zip(pieces, texts, strict=True):
        content = _redacted(piece.name, text, redactor).encode("utf-8", "replace")
        yield replace(piece, name=redactor.redact(piece.name), content=content, note=redactor.redact(piece.note))


def bound_pieces(pieces: Sequence[Piece], total_bytes: int = TOTAL_BYTES) -> Iterator[Piece]:
    """The pieces as far as they fit, with names that are safe in an archive and each there once."""
    left = total_bytes
    taken: set[str] = {MANIFEST}
    for piece in pieces[:_PIECES]:
        bounded = replace(piece, name=_unique(safe_name(piece.name), taken))
        if len(piece.content) > left:
            content = whole_words(piece.content[:left], at_end=True) if left else b""
            bounded = replace(bounded, content=content, outcome=Outcome.CUT, note=f"{piece.note}; the report is full")
        left -= len(bounded.content)
        yield bounded
    if len(pieces) > _PIECES:
        yield Piece("more", outcome=Outcome.CUT, note=f"{len(pieces) - _PIECES} pieces more")


def manifest(pieces: Sequence[Piece], redactor: Redactor | None) -> str:
    """What is in the archive, what is not, and why."""
    if redactor is None:
        privacy = "NOT redacted: serial numbers, UUIDs, addresses and names are in it"
    else:
        counts = ", ".join(f"{count} {kind}" for kind, count in redactor.counts().items())
        privacy = f"redacted ({counts or 'nothing found'}); equal things have equal names"
    lines = [
        f"fmsupervisor {__version__}, made {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}",
        privacy,
        "",
        f"{'outcome':<8} {'bytes':>9}  piece",
    ]
    for piece in pieces:
        note = f"  ({one_line(' '.join(piece.note.split()))})" if piece.note else ""
        lines.append(f"{piece.outcome:<8} {len(piece.content):>9}  {piece.name}{note}")
    return "\n".join(lines) + "\n"


def pack(pieces: Sequence[Piece], listing: str) -> bytes:
    """The archive: the manifest first, then the pieces that have content."""
    buffer = io.BytesIO()
    now = int(time.time())
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=buffer, compresslevel=6, mtime=now) as compressed,
        tarfile.open(mode="w|", fileobj=compressed, format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, content in [(MANIFEST, listing.encode()), *((each.name, each.content) for each in pieces)]:
            if not content and name != MANIFEST:
                continue
            entry = tarfile.TarInfo(f"{TOP}/{name}")
            entry.size, entry.mtime, entry.mode = len(content), now, 0o600
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def refuse_existing(path: str) -> None:
    """Raises ``ActionRefused`` when something is at that path, be it a link to nothing."""
    if os.path.lexists(path):
        raise ActionRefused(f"cannot write {path}: it exists already")


def write_new(path: str, content: bytes) -> None:
    """Make the file, readable by its owner only, in one step; one that is there already is never replaced."""
    directory = os.path.dirname(os.path.abspath(path))
    temporary = ""
    try:
        refuse_existing(path)
        descriptor, temporary = tempfile.mkstemp(prefix=".fmsupervisor-report.", dir=directory)
        with open(descriptor, "wb") as file:  # 0600 by mkstemp
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        _name_it(temporary, path)
    except FileExistsError as error:
        raise ActionRefused(f"cannot write {path}: it exists already") from error
    except (OSError, ValueError) as error:
        raise ActionFailed(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        if temporary and os.path.lexists(temporary):
            os.unlink(temporary)


def _name_it(temporary: str, path: str) -> None:
    """Give the finished file its name. link(2) fails when the name is taken; not every file system has it."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        os.replace(temporary, path)


def safe_name(name: str) -> str:
    """A relative path without anything that a tar program or a shell could take for something else."""
    parts = [part for part in name.split("/") if part not in ("", ".", "..")]
    safe = [_UNSAFE.sub("_", part)[:_NAME_CHARACTERS].lstrip("-") or "_" for part in parts[:_DEPTH]]
    return "/".join(safe) or "_"


def _unique(name: str, taken: set[str]) -> str:
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}.{number}"
    taken.add(candidate)
    return candidate


def _redacted(name: str, text: str, redactor: Redactor) -> str:
    """JSON by its structure, since an escaped line end could hide where an address begins; else as text."""
    if name.endswith(".json"):
        try:
            document = json.loads(text)
            return json.dumps(redactor.redact_document(document), indent=1) + "\n"
        except (ValueError, RecursionError):
            pass
    return redactor.redact(text)

"""The program that runs here: what it is made of, and executing its successor in its place.

``fingerprint`` changes when the installed program does: a package manager replaced its files, ``pip`` did, or a link
such as ``current`` points to another version. What is executed is what was executed before, by the same path; so a
script or a link in ``ExecStart`` leads to the new version.
"""

import os
import signal
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fmsupervisor import signals

_PACKAGE = os.path.dirname(os.path.abspath(__file__))
# Left behind by the loader of a self-contained build, which must begin afresh.
_LOADER_VARIABLES = "_PYI_"


@dataclass(frozen=True, slots=True)
class Program:
    """What was executed, and what its files were like then. ``package``: the directory of its modules."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    fingerprint: str
    package: str

    def has_changed(self) -> bool:
        """Whether other files would be executed now. What cannot be read has not changed."""
        found = fingerprint(self.command[0], self.package)
        return bool(found) and found != self.fingerprint

    def execute(self, descriptors: Sequence[int], variables: Mapping[str, str]) -> None:
        """Become the successor, which inherits the descriptors. Raises ``OSError``; then nothing has changed."""
        signals.hold()  # until it listens; what arrives meanwhile waits
        for descriptor in descriptors:
            os.set_inheritable(descriptor, True)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        try:
            os.execve(self.command[0], self.command, {**self.environment, **variables})  # noqa: S606 - what ran before
        except OSError:
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.LISTENED_TO)
            raise


def this_program(arguments: Sequence[str], environment: Mapping[str, str]) -> Program:
    """This program with these arguments; to be called while its environment is as it was given."""
    kept = {name: value for name, value in environment.items() if not name.startswith(_LOADER_VARIABLES)}
    called = os.path.abspath(sys.argv[0])
    is_script = os.path.isfile(called) and os.access(called, os.X_OK) and not called.endswith(".py")
    executable = (called,) if is_script else (sys.executable, "-m", "fmsupervisor")
    return Program((*executable, *arguments), kept, fingerprint(executable[0], _PACKAGE), _PACKAGE)


def fingerprint(executable: str, package: str) -> str:
    """Of the executable, where its links lead to, and of the package's files; empty when they cannot be read."""
    seen = []
    try:
        paths = [os.path.realpath(executable)]
        if not getattr(sys, "frozen", False):
            for directory, _, names in os.walk(package):
                paths += [f"{directory}/{name}" for name in names if name.endswith((".py", ".tsv"))]
        for path in sorted(paths):
            found = os.stat(path)
            seen.append((path, found.st_ino, found.st_size, found.st_mtime_ns))
    except OSError:
        return ""
    return format(zlib.crc32(repr(seen).encode(errors="surrogateescape")), "08x")

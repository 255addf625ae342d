"""libnvidia-nscq: where it is, and of which driver version.

The package has libnvidia-nscq.so.<driver version> and links to it (.so.2, .so.2.0), which Fabric Manager opens.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fmsupervisor.errors import CannotObserve
from fmsupervisor.fabric_manager.libraries import host_directories
from fmsupervisor.fabric_manager.versions import embedded_version, version_of_file_name
from fmsupervisor.host.elf import ElfError, open_elf
from fmsupervisor.host.root import HostRoot
from fmsupervisor.host.trusted_path import resolve

PREFIX = "libnvidia-nscq.so"

_LIBRARY_LIMIT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Nscq:
    """The library that Fabric Manager would open."""

    path: str  # logical, links resolved
    version: str | None  # None: the file does not tell


def find_nscq(root: HostRoot, library_paths: Sequence[str]) -> Nscq | None:
    """The first one in the library paths, then in the host's directories; None when there is none.

    Raises ``CannotObserve`` when there is none to be seen and something could not be looked at.
    """
    unseen: list[CannotObserve] = []
    for path in nscq_files(root, (*library_paths, *host_directories(root)), unseen):
        try:
            real = resolve(root, path)
            if real is not None and root.is_file(real):
                return Nscq(real, version_of_file_name(real) or _version_by_content(root, real))
        except CannotObserve as error:
            unseen.append(error)
    if unseen:
        raise unseen[0]
    return None


def nscq_files(root: HostRoot, directories: Sequence[str], unseen: list[CannotObserve] | None = None) -> Iterator[str]:
    """Files and links of that name; in one directory those that Fabric Manager asks for come first.

    ``unseen`` gets what could not be looked at.
    """
    for directory in directories:
        try:
            names = root.list_directory(directory) or []
        except CannotObserve as error:
            if unseen is not None:
                unseen.append(error)
            continue
        found = [name for name in names if name == PREFIX or name.startswith(PREFIX + ".")]
        yield from (f"{directory}/{name}" for name in sorted(found, key=_preference))


def _preference(name: str) -> tuple[bool, list[int]]:
    """ABI names (.so.2 before .so.1 and .so) before driver versions, greater numbers first."""
    numbers = [-int(number[:18]) for number in re.findall(r"\d+", name.removeprefix(PREFIX))]
    return version_of_file_name(name) is not None, numbers or [0]


def _version_by_content(root: HostRoot, path: str) -> str | None:
    try:
        with open_elf(root, path) as elf:
            dynamic = elf.dynamic() if elf is not None else None
        named = version_of_file_name((dynamic and dynamic.soname) or "")
        return named or embedded_version(root.read_bytes(path, _LIBRARY_LIMIT_BYTES) or b"")
    except (ElfError, CannotObserve):
        return None

"""What the checks look at: read once, when the first check asks for it."""

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fmsupervisor.checks.finding import is_unobserved
from fmsupervisor.checks.programs import run_program
from fmsupervisor.errors import CannotObserve
from fmsupervisor.fabric_manager import config_file, installation
from fmsupervisor.facts import Host, Installation, LoadedModule, Problem
from fmsupervisor.host.kernel import NodeStatus
from fmsupervisor.host.module_file import ModuleFile, read_module
from fmsupervisor.host.module_search import Selected, select_module
from fmsupervisor.host.pci import is_bus_id
from fmsupervisor.host.procfs import KERNEL_RELEASE
from fmsupervisor.host.root import HostRoot
from fmsupervisor.host.snapshot import observe_host
from fmsupervisor.settings import Settings

_PROGRAM_SECONDS = 4.0  # less than a check may take
_STOCK_LIMIT_BYTES = 1 << 20

RunProgram = Callable[[list[str], dict[str, str], float], installation.VersionOutput]


@dataclass(frozen=True, slots=True)
class Disk:
    """The file system that holds a path: statvfs(2)."""

    free_bytes: int
    is_read_only: bool


@dataclass
class Context:
    """The host, the settings, and the few things that are no files. A value that cannot be read raises each time."""

    root: HostRoot
    settings: Settings
    node_status: Callable[[str], NodeStatus | None]
    settings_error: str = ""  # why the settings file cannot be used and the defaults are
    run_program: RunProgram = run_program
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    disk: Callable[[HostRoot, str], Disk] = field(default_factory=lambda: disk_of)
    is_clock_synchronised: Callable[[], bool | None] = lambda: None  # by the kernel's word; None: it cannot be asked
    wall_clock: Callable[[], float] = time.time
    _module_files: dict[str, ModuleFile] = field(default_factory=dict)

    @cached_property
    def host(self) -> Host:
        """PCI, /proc and /sys. Raises ``CannotObserve``."""
        return observe_host(self.root)

    @cached_property
    def release(self) -> str:
        """The running kernel's. Raises ``CannotObserve``."""
        self.require_read(KERNEL_RELEASE)
        release = self.host.kernel_release
        if release and release.isprintable() and "/" not in release:
            return release
        raise CannotObserve(KERNEL_RELEASE, "without the kernel's release no module can be judged")

    def require_every_function(self) -> None:
        """A PCI function that could not be read may be the one that seems to be missing. Raises ``CannotObserve``."""
        self._require(lambda path: is_bus_id(path) or path.startswith("/sys/bus/pci/"))

    def require_read(self, *paths: str) -> None:
        """The host was read with these files. Raises ``CannotObserve``."""
        self._require(lambda path: path in paths)

    def _require(self, is_needed: Callable[[str], bool]) -> None:
        for problem in self.host.problems:
            if is_needed(problem.subject):
                path, _, reason = problem.detail.removeprefix("cannot observe ").partition(": ")
                raise CannotObserve(path, reason)

    def require_installation(self) -> None:
        """No file of the installation was unreadable. Raises ``CannotObserve``."""
        for problem in self.installation.problems:
            if is_unobserved(problem):
                raise CannotObserve(problem.subject or "the installation", problem.detail)

    @cached_property
    def selected(self) -> Selected | Problem:
        """The module file for the running kernel, or why there is none. Raises ``CannotObserve``."""
        selected = select_module(self.root, self.settings, self.release)
        if isinstance(selected, Problem) and is_unobserved(selected):
            raise CannotObserve(self.settings.module.search_path, selected.detail)
        return selected

    @cached_property
    def installation(self) -> Installation:
        """The tree, with nv-fabricmanager asked for its version, unless others than root could have changed it."""

        def run_version(
            arguments: list[str], environment: dict[str, str], timeout: float
        ) -> installation.VersionOutput:
            return self.run_program(arguments, environment, min(timeout, _PROGRAM_SECONDS))

        owner = 0 if self.root.directory == "/" else os.geteuid()
        return installation.inspect(self.root, self.settings, self.host.kernel_release, run_version, user=owner)

    @cached_property
    def stock_config(self) -> str | None:
        """The stock fabricmanager.cfg; None when there is none. Raises ``CannotObserve``."""
        content = self.root.read_bytes(self.settings.fabric_manager.stock_config, _STOCK_LIMIT_BYTES)
        return None if content is None else content.decode("utf-8", "surrogateescape")

    @cached_property
    def rendering(self) -> config_file.Rendering:
        """The configuration that Fabric Manager would get now."""
        return config_file.render(self.stock_config, self.settings, self.installation.fabric_manager_version)

    @cached_property
    def options(self) -> Mapping[str, str]:
        """The keys of that configuration."""
        return config_file.effective_options(self.rendering.text)

    @cached_property
    def daemon(self) -> Mapping[str, Any] | None:
        """The running daemon's status document; None when none runs. Raises ``CannotObserve``."""
        from fmsupervisor.client import StatusReader  # noqa: PLC0415  needs json

        return StatusReader(self.settings, self.root).read()

    def module_file(self, path: str) -> ModuleFile:
        """The module file, read once. Raises ``ModuleFileError`` and ``CannotObserve``."""
        if path not in self._module_files:
            self._module_files[path] = read_module(self.root, path)
        return self._module_files[path]

    @property
    def loaded_version(self) -> str | None:
        """The loaded driver's; None when none is loaded or it does not tell. Raises ``CannotObserve``."""
        version = self.loaded.version if self.loaded else None
        if version and not re.fullmatch(r"\d+(\.\d+)+", version, re.ASCII):
            raise CannotObserve("/sys/module/nvidia/version", f"{version[:32]!r} is no version")
        return version

    @property
    def loaded(self) -> LoadedModule | None:
        """nvidia.ko, live or on its way; None when it is not loaded. Raises ``CannotObserve``."""
        module = self.host.module
        if module is None or isinstance(module, LoadedModule):
            return module
        raise CannotObserve("/sys/module/nvidia", module.reason)

    def why_not_applicable(self) -> str:
        """Why there is nothing for Fabric Manager to do; "" when there is. Raises ``CannotObserve``."""
        if isinstance(self.settings.switches.expected, int):
            return ""
        host = self.host
        has_fabric = host.switches or host.nvlink5_bridges or host.problems
        return "" if has_fabric else "this machine has no NVSwitch, so there is nothing for Fabric Manager to do"

    @property
    def own_pids(self) -> frozenset[int]:
        """The daemon and its Fabric Manager."""
        try:
            document = self.daemon
        except CannotObserve:
            return frozenset()
        pids = (document.get("pid"), (document.get("fabric_manager") or {}).get("pid")) if document else ()
        return frozenset(pid for pid in pids if isinstance(pid, int))


def disk_of(root: HostRoot, path: str) -> Disk:
    """The file system of the path or of the nearest directory above it. Raises ``CannotObserve``."""
    while root.status(path) is None and path != "/":
        path = os.path.dirname(path.rstrip("/")) or "/"
    try:
        found = os.statvfs(root.path(path))
    except OSError as error:
        raise CannotObserve(path, error.strerror or str(error)) from error
    return Disk(found.f_bavail * found.f_frsize, bool(found.f_flag & os.ST_RDONLY))


def kernel_clock_is_synchronised() -> bool | None:
    """Whether the kernel calls its clock synchronised: adjtimex(2) with no mode bits changes nothing."""
    import ctypes  # noqa: PLC0415  for this one call

    unsynchronised = 0x0040  # STA_UNSYNC, include/uapi/linux/timex.h
    buffer = (ctypes.c_long * 64)()  # struct timex has 208 bytes; modes is its first word, status its sixth
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(buffer))
    except (OSError, AttributeError):
        return None
    if state < 0:
        return None
    status = ctypes.cast(buffer, ctypes.POINTER(ctypes.c_int))[10]
    return not status & unsynchronised

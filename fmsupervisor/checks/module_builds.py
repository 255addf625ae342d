"""nvidia.ko: which build fits the running kernel, and whether the kernel will take it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from fmsupervisor.checks.context import Context
from fmsupervisor.checks.finding import Check, Finding, Verdict, cannot_tell, failed, judged, ok, warning
from fmsupervisor.checks.symbol_versions import existing_symbols, kernel_symbols, module_symbols
from fmsupervisor.conditions import Code
from fmsupervisor.errors import CannotObserve
from fmsupervisor.facts import Installation, Problem
from fmsupervisor.host.elf import ElfError
from fmsupervisor.host.kernel_release import Candidate, consider
from fmsupervisor.host.module_file import ModuleFile, ModuleFileError
from fmsupervisor.host.module_search import Selected, choose_module, find_module_file

_MOST_BUILDS = 8  # that are opened; a module is some 100 MB to decompress
_MOST_SYMBOLS = 6  # that are named
_SUSE = re.compile(r"^ID(_LIKE)?=.*\b(suse|opensuse|sles|sled|sle-\w+|sl-micro)\b", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class _Build:
    """One module build of the tree and how it fits in each of the three respects."""

    candidate: Candidate
    version: str | None  # of the driver; None: the file cannot be read
    is_of_one_version: bool | None  # with Fabric Manager and NSCQ; None: not known

    @property
    def row(self) -> str:
        """For a person."""
        versions = "cannot be compared with Fabric Manager and NSCQ"
        if self.is_of_one_version is not None:
            versions = (
                "equals Fabric Manager and NSCQ" if self.is_of_one_version else "is not Fabric Manager's or NSCQ's"
            )
        return f"{self.candidate.release} {self.candidate.reason}; driver {self.version or 'unreadable'} {versions}"


def check_builds(context: Context) -> Finding:
    """Driver, Fabric Manager with NSCQ, and kernel: the build that fits all three, and the rule that decided."""
    builds = list(_builds(context))
    details = tuple(build.row for build in builds)
    selected = context.selected
    if isinstance(selected, Problem):
        return _for_this_boot(context, failed(selected.code, selected.detail, details=details))
    chosen = next((build for build in builds if build.candidate.release == selected.release), None)
    if chosen is not None and chosen.is_of_one_version is False:
        others = [build.candidate.release for build in builds if build.is_of_one_version]
        hint = f"; the build for {', '.join(others)} is of their version" if others else ""
        found = f"{selected.path} is {chosen.version}, {_versions(context.installation)}{hint}"
        return failed(Code.VERSION_MISMATCH, found, details=details)
    context.require_installation()
    version = (chosen.version if chosen else None) or "of unknown version"
    return ok(f"{selected.path}, driver {version}: {selected.reason}", *details)


def _for_this_boot(context: Context, finding: Finding) -> Finding:
    """A driver that is loaded needs no file now; it will be missed at the next boot."""
    if context.loaded is None or finding.verdict is Verdict.CANNOT_TELL:
        return finding
    found = f"the driver is loaded, but at the next boot: {finding.found}"
    return Finding(Verdict.WARNING, found, finding.remedy, finding.codes, finding.details)


def _builds(context: Context) -> Iterator[_Build]:
    search_path = context.settings.module.search_path.rstrip("/")
    names = context.root.list_directory(search_path) or []
    if context.settings.layout == "packaged":
        names = [name for name in names if name == context.release]
    paths = {name: path for name in names if (path := find_module_file(context.root, f"{search_path}/{name}"))}
    candidates = consider(context.release, paths, allow_newer=context.settings.module.allow_newer_build)
    wanted = _wanted_versions(context.installation)
    for candidate in candidates[:_MOST_BUILDS]:
        try:
            version = context.module_file(paths[candidate.release]).version
        except (ModuleFileError, CannotObserve):
            version = None
        is_equal = None if version is None or not wanted else wanted == {version}
        yield _Build(candidate, version, is_equal)


def _wanted_versions(installation: Installation) -> set[str]:
    return {version for version in (installation.fabric_manager_version, installation.nscq_version) if version}


def _versions(installation: Installation) -> str:
    manager, nscq = installation.fabric_manager_version, installation.nscq_version
    return f"Fabric Manager {manager or 'unknown'}, NSCQ {nscq or 'unknown'}"


def _selected_file(context: Context) -> tuple[Selected, ModuleFile] | Finding:
    """The module file that would be loaded, read."""
    selected = context.selected
    if isinstance(selected, Problem):
        return ok("there is no module file to look at")  # check_builds tells it
    try:
        return selected, context.module_file(selected.path)
    except ModuleFileError as error:
        return _for_this_boot(context, failed(Code.MODULE_DAMAGED, f"{selected.path}: {error}"))


def check_file(context: Context) -> Finding:
    """Whether the file is whole, its vermagic that of the kernel, and everything it depends on there."""
    read = _selected_file(context)
    if isinstance(read, Finding):
        return read
    selected, file = read
    choice = choose_module(context.root, context.settings, context.release)
    if isinstance(choice, Problem):
        return _for_this_boot(context, judged([choice], ""))
    depends = ", ".join(file.depends) or "nothing"
    loads = f", loads {', '.join(choice.depends)} first" if choice.depends else ""
    softdeps = f", softdep {'; '.join(file.softdeps)}" if file.softdeps else ""
    kind = f"compressed with {file.compression}" if file.compression else "not compressed"
    return ok(f"vermagic {file.vermagic!r} fits", f"{selected.path}: {kind}; depends on {depends}{loads}{softdeps}")


def check_symbols(context: Context) -> Finding:
    """The CRCs of the symbols that the module needs against those of the running kernel."""
    read = _selected_file(context)
    if isinstance(read, Finding):
        return read
    selected, file = read
    if not file.has_modversions:
        return ok("the module has no symbol versions; the kernel compares the release instead")
    try:
        needed = module_symbols(context.root, selected.path)
        known = kernel_symbols(context.root, context.release)
        existing = None if known and known.is_complete else existing_symbols(context.root, context.release)
    except (ModuleFileError, ElfError) as error:
        return cannot_tell(f"{selected.path}: {error}")
    crcs = known.crcs if known else {}
    differing = [name for name, crc in needed.items() if crcs.get(name, crc) != crc]
    if known and differing:
        found = f"{_named(differing)}: another version than in {known.source}"
        return _for_this_boot(context, failed(Code.MODULE_SYMBOL_VERSIONS, found))
    if known and known.is_complete:
        existing, where = frozenset(crcs), known.source
    else:
        where = "the kernel or its modules"
    missing = [name for name in needed if name not in crcs and name not in existing] if existing else []
    if missing:
        return _for_this_boot(context, warning(Code.MODULE_UNKNOWN_SYMBOL, f"{_named(missing)}: not in {where}"))
    if known is None:
        return ok("neither symvers nor a module of the running kernel is there to compare with; the kernel will tell")
    common = sum(name in crcs for name in needed)
    return ok(f"{common} of {len(needed)} symbols compared with {known.source}: all equal")


def check_supported(context: Context) -> Finding:
    """SUSE's modprobe refuses modules without a ``supported`` tag; loading by path does not ask."""
    text = context.root.read_text("/etc/os-release") or context.root.read_text("/usr/lib/os-release") or ""
    if not _SUSE.search(text):
        return ok("this is no SUSE system, which alone looks at the supported tag")
    read = _selected_file(context)
    if isinstance(read, Finding):
        return read
    _, file = read
    if file.supported in (None, "no"):
        found = f"{file.path} has supported={file.supported or '(absent)'}"
        return warning(Code.MODULE_UNSUPPORTED, f"{found}: modprobe refuses it, fmsupervisor loads it by path")
    return ok(f"supported={file.supported}")


def check_loaded(context: Context) -> Finding:
    """The driver that is loaded now."""
    loaded = context.loaded
    if loaded is None:
        if not context.settings.module.load:
            return warning(Code.MODULE_NOT_LOADED, "nvidia.ko is not loaded, and module.load = false")
        return ok("nvidia.ko is not loaded; fmsupervisor loads it")
    if loaded.initstate not in ("coming", "live", "going"):
        return cannot_tell(f"/sys/module/nvidia/initstate makes no sense: {loaded.initstate[:32]!r}")
    if loaded.initstate != "live":
        return warning(Code.MODULE_LOAD_SLOW, f"nvidia.ko is {loaded.initstate}: its initialisation is not finished")
    return ok(f"nvidia.ko {loaded.version or 'of unknown version'} is live")


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_SYMBOLS} more" if len(names) > _MOST_SYMBOLS else ""
    return ", ".join(names[:_MOST_SYMBOLS]) + more


CHECKS = (
    Check("loaded-driver", "The loaded driver", (Code.MODULE_NOT_LOADED, Code.MODULE_LOAD_SLOW), check_loaded),
    Check(
        "module-builds",
        "A module build fits kernel, Fabric Manager and NSCQ",
        (Code.MODULE_NOT_FOUND, Code.MODULE_TOO_NEW, Code.VERSION_MISMATCH),
        check_builds,
        timeout_seconds=10.0,
    ),
    Check(
        "module-file",
        "The module file is whole, its vermagic fits, its dependencies are there",
        (Code.MODULE_VERMAGIC, Code.MODULE_DEPENDENCY_MISSING, Code.MODULE_DAMAGED),
        check_file,
    ),
    Check(
        "module-symbols",
        "The symbol versions are the kernel's",
        (Code.MODULE_SYMBOL_VERSIONS, Code.MODULE_UNKNOWN_SYMBOL),
        check_symbols,
    ),
    Check("module-supported", "SUSE's supported tag", (Code.MODULE_UNSUPPORTED,), check_supported),
)

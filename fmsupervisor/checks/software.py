"""The installed files: versions, libraries, permissions, topology, firmware."""

from collections.abc import Iterator, Sequence
from contextlib import suppress

from fmsupervisor.checks.context import Context
from fmsupervisor.checks.finding import Check, Finding, judged, ok, warning
from fmsupervisor.conditions import Code
from fmsupervisor.core.switches import GPU_DRIVER
from fmsupervisor.core.versions import version_problems
from fmsupervisor.fabric_manager.libraries import host_directories, resolve_libraries
from fmsupervisor.facts import Problem
from fmsupervisor.host.module_file import ModuleFileError
from fmsupervisor.host.module_search import Selected

_FIRMWARE_PATH = "/sys/module/firmware_class/parameters/path"
_FIRMWARE_SUFFIXES = ("", ".zst", ".xz")
_CLIENT_LIBRARY = "libnvfm.so.1"


def check_installed(context: Context) -> Finding:
    """nv-fabricmanager and NSCQ are there, and nobody but root can change them."""
    manager, nscq = context.installation.fabric_manager_version, context.installation.nscq_version
    found = f"Fabric Manager {manager or 'of unknown version'}, NSCQ {nscq or 'of unknown version'}"
    return judged(_installation_problems(context, _INSTALLED), found)


def check_versions(context: Context) -> Finding:
    """Module file, Fabric Manager, NSCQ and the loaded driver are of one version."""
    installation = context.installation
    known = {
        "module file": installation.module.version if installation.module else None,
        "Fabric Manager": installation.fabric_manager_version,
        "NSCQ": installation.nscq_version,
        "loaded driver": context.loaded_version,
    }
    listing = ", ".join(f"{name} {version}" for name, version in known.items() if version)
    problems = version_problems(installation, context.loaded_version)
    if not problems:
        _require_versions(context)
    return judged(
        (*problems, *_installation_problems(context, (Code.VERSION_UNREADABLE,))), listing or "no version known"
    )


def _require_versions(context: Context) -> None:
    """A version that is not known because a file cannot be read may be another one. Raises ``CannotObserve``."""
    context.require_installation()
    selected = context.selected
    if context.installation.module is None and isinstance(selected, Selected):
        with suppress(ModuleFileError):  # module-file tells it
            context.module_file(selected.path)


def check_libraries(context: Context) -> Finding:
    """Every library that Fabric Manager and NSCQ are linked with is found by the dynamic loader."""
    found = "the dynamic loader finds every library of Fabric Manager and NSCQ"
    return judged(_installation_problems(context, (Code.LIBRARY_MISSING, Code.LOADER_ERROR)), found)


def check_client_library(context: Context) -> Finding:
    """libnvfm, through which partition managers talk to Fabric Manager; Fabric Manager itself does not need it."""
    library_paths = context.settings.fabric_manager.library_paths
    directories = (*library_paths, *host_directories(context.root))
    path = next((path for each in directories if context.root.is_file(path := f"{each}/{_CLIENT_LIBRARY}")), None)
    if path is None:
        return ok(f"{_CLIENT_LIBRARY} is not installed; only programs that manage partitions need it")
    problems = resolve_libraries(context.root, [path], library_paths).problems
    if problems:
        return warning(Code.LIBRARY_MISSING, "; ".join(problem.detail for problem in problems))
    return ok(f"{path} and its libraries are there")


def check_data_files(context: Context) -> Finding:
    """Topology files and the stock configuration."""
    wanted = context.settings.fabric_manager
    found = f"{wanted.topology_path} and {wanted.stock_config} are there"
    return judged(_installation_problems(context, (Code.TOPOLOGY_MISSING, Code.STOCK_CONFIG_MISSING)), found)


def check_firmware(context: Context) -> Finding:
    """gsp_ga10x.bin (gsp_tu10x.bin for A100) of the driver's version where the kernel looks for it.

    It is asked for when a GPU is initialised, not when nvidia.ko is loaded, so GPUs in guests need none here
    (nv-firmware.h, nv.c; drivers/base/firmware_loader/main.c ``fw_path``).
    """
    module = context.installation.module
    version = context.loaded_version or (module.version if module else None)
    if not version:
        _require_versions(context)
        return ok("no driver version is known, so neither is the firmware's")
    is_ampere = any(gpu.device_id in ("10de:20b0", "10de:20b2", "10de:20b3") for gpu in context.host.gpus)
    name = f"nvidia/{version}/{'gsp_tu10x.bin' if is_ampere else 'gsp_ga10x.bin'}"
    directories = list(_firmware_directories(context))
    for directory in directories:
        for suffix in _FIRMWARE_SUFFIXES:
            if context.root.is_file(f"{directory}/{name}{suffix}"):
                return ok(f"{directory}/{name}{suffix}")
    found = f"{name} is in none of {', '.join(directories)}"
    if any(gpu.driver == GPU_DRIVER for gpu in context.host.gpus):
        return warning(Code.FIRMWARE_MISSING, found)
    return ok(f"{found}; it is not needed, since the host's driver has no GPU")


def _firmware_directories(context: Context) -> Iterator[str]:
    configured = (context.root.read_text(_FIRMWARE_PATH, 512) or "").strip()
    if configured.startswith("/"):
        yield configured
    release = context.release
    yield from (
        f"/lib/firmware/updates/{release}",
        "/lib/firmware/updates",
        f"/lib/firmware/{release}",
        "/lib/firmware",
    )


def _installation_problems(context: Context, codes: Sequence[Code]) -> list[Problem]:
    return [problem for problem in context.installation.problems if problem.code in codes]


_INSTALLED = (Code.FABRIC_MANAGER_MISSING, Code.NSCQ_MISSING, Code.INSECURE_FILE)

CHECKS = (
    Check(
        "installed", "Fabric Manager and NSCQ are installed and safe", _INSTALLED, check_installed, timeout_seconds=10.0
    ),
    Check(
        "versions",
        "All parts are of one version",
        (Code.VERSION_MISMATCH, Code.RELOAD_NEEDED, Code.VERSION_UNREADABLE),
        check_versions,
    ),
    Check("libraries", "No library is missing", (Code.LIBRARY_MISSING, Code.LOADER_ERROR), check_libraries),
    Check("client-library", "libnvfm", (Code.LIBRARY_MISSING,), check_client_library),
    Check(
        "data-files",
        "Topology files and stock configuration",
        (Code.TOPOLOGY_MISSING, Code.STOCK_CONFIG_MISSING),
        check_data_files,
    ),
    Check("firmware", "GSP firmware of this version", (Code.FIRMWARE_MISSING,), check_firmware),
)

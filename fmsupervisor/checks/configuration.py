"""Fabric Manager's configuration, its log, and the disk and clock under them."""

import os
from collections.abc import Iterator

from fmsupervisor.checks.context import Context
from fmsupervisor.checks.finding import Check, Finding, cannot_tell, failed, judged, ok, warning
from fmsupervisor.checks.hardware import VFIO
from fmsupervisor.conditions import Code
from fmsupervisor.core.guests import described
from fmsupervisor.core.switches import GPU_DRIVER
from fmsupervisor.fabric_manager.config_file import DEFAULT_LOG_LIMIT_MEGABYTES, effective_options
from fmsupervisor.fabric_manager.config_keys import FIRST_BRANCH, unknown_keys
from fmsupervisor.facts import Problem
from fmsupervisor.host.guests import find_guests

_VGPU_MODE = 2
_LEAST_FREE_BYTES = 64 << 20
_TOLERATED_SECONDS = 86_400.0  # files of a package may carry the local time of their builder


def check_settings(context: Context) -> Finding:
    """The settings file of this program."""
    if context.settings_error:
        remedy = "Correct the file (fmsupervisor config checks it). The other checks went on with the defaults."
        return failed(Code.SETTINGS_INVALID, context.settings_error, remedy)
    return ok(f"layout {context.settings.layout}, prefix {context.settings.prefix}")


def check_keys(context: Context) -> Finding:
    """Keys that this Fabric Manager would refuse to start with, in our options or left over in the stock file."""
    version = context.installation.fabric_manager_version
    problems = list(context.rendering.problems)
    present = effective_options(context.stock_config or "")
    left_over = unknown_keys((key for key in present if key in FIRST_BRANCH), version, frozenset()) if version else ()
    problems += [
        Problem(Code.CONFIG_KEY_UNKNOWN, f"{key.key} in the stock file: {key.reason}", key.key) for key in left_over
    ]
    if not problems and version is None:
        context.require_installation()
        return cannot_tell("the version of Fabric Manager is not known, so neither are the keys that it knows")
    count = len(context.rendering.differences)
    return judged(problems, f"{count} settings differ from the stock file", *context.rendering.differences)


def check_directories(context: Context) -> Finding:
    """Everything that the configuration names can be made and written."""
    problems, missing = [], []
    for directory in _directories(context):
        obstacle = _obstacle(context, directory)
        if obstacle:
            problems.append(Problem(Code.CONFIG_UNWRITABLE, obstacle, directory))
        elif not context.root.is_directory(directory):
            missing.append(directory)
    return judged(problems, f"{', '.join(missing)} will be made" if missing else "all directories are there")


def _directories(context: Context) -> list[str]:
    wanted = context.settings.fabric_manager
    files = (wanted.config, wanted.log_file, wanted.state_file, context.options.get("FM_CMD_UNIX_SOCKET_PATH", ""))
    directories = [wanted.run_directory, *(os.path.dirname(file) for file in files)]
    directories.append(context.options.get("DATABASE_PATH", ""))
    return [directory for directory in dict.fromkeys(directories) if directory.startswith("/")]


def _obstacle(context: Context, directory: str) -> str:
    """Why the directory cannot be made or written; "" when it can."""
    existing = directory
    while context.root.status(existing) is None and existing != "/":
        existing = os.path.dirname(existing.rstrip("/")) or "/"
    if not context.root.is_directory(existing):
        return f"{existing} is not a directory"
    return f"{existing} is on a read-only file system" if context.disk(context.root, existing).is_read_only else ""


def check_mode(context: Context) -> Finding:
    """FABRIC_MODE against how the GPUs are used."""
    mode, gpus = context.settings.fabric_manager.fabric_mode, context.host.gpus
    for_guests = [gpu for gpu in gpus if gpu.driver == VFIO]
    if mode == _VGPU_MODE and for_guests:
        found = (
            f"mode 2 (vGPU), but {len(for_guests)} GPUs are bound to vfio-pci; vGPU needs them bound to {GPU_DRIVER}"
        )
        return warning(Code.ISOLATION_NOT_PROMISED, found, "Set fabric_manager.fabric_mode to how the GPUs are used.")
    context.require_every_function()
    if mode != 0 or not for_guests:
        return ok(f"mode {mode}, {len(for_guests)} of {len(gpus)} GPUs bound to vfio-pci")
    reading = find_guests(context.root, [gpu.pci_bus_id for gpu in for_guests], float)
    machines = [described(guest) for guest in reading.guests]
    if len(machines) > 1:
        return warning(
            Code.ISOLATION_NOT_PROMISED, f"mode 0, and {len(machines)} guests hold GPUs of one fabric", details=machines
        )
    note = "in mode 0 isolation between guests is not promised: give all GPUs to guests of one owner, or use mode 1"
    hidden = f"; {len(reading.hidden)} processes could not be looked into (root may)" if reading.hidden else ""
    return ok(f"mode 0, {len(machines)} guests hold GPUs{hidden}", *machines, note)


def check_log(context: Context) -> Finding:
    """Fabric Manager stops logging at LOG_FILE_MAX_SIZE when LOG_MAX_ROTATE_COUNT is 0."""
    path = context.settings.fabric_manager.log_file
    if not path:
        return ok("Fabric Manager logs to its standard error")
    status = context.root.status(path)
    size, limit = status.st_size if status else 0, _limit_bytes(context)
    found = f"{path} has {size >> 20} of {limit >> 20} MiB"
    if context.options.get("LOG_MAX_ROTATE_COUNT") != "0":
        return ok(found)
    if size >= limit:
        return warning(Code.LOG_FULL, f"{found}, and LOG_MAX_ROTATE_COUNT is 0: nothing is logged any more")
    return warning(Code.LOG_FULL, f"{found}, and LOG_MAX_ROTATE_COUNT is 0: logging will stop there")


def check_disk(context: Context) -> Finding:
    """Space for the log to grow to its limit."""
    path = context.settings.fabric_manager.log_file
    if not path:
        return ok("Fabric Manager logs to its standard error")
    free = context.disk(context.root, path).free_bytes
    status = context.root.status(path)
    growth = max(0, _limit_bytes(context) * (1 + _rotations(context)) - (status.st_size if status else 0))
    found = f"{free >> 20} MiB free for {path}, which may grow by {growth >> 20} MiB"
    if free < _LEAST_FREE_BYTES:
        return failed(Code.DISK_SPACE, found)
    return warning(Code.DISK_SPACE, found) if free < growth else ok(found)


def _limit_bytes(context: Context) -> int:
    return _number(context.options.get("LOG_FILE_MAX_SIZE", ""), DEFAULT_LOG_LIMIT_MEGABYTES) << 20


def _rotations(context: Context) -> int:
    """Versions before 560 have no such key and begin anew."""
    return _number(context.options.get("LOG_MAX_ROTATE_COUNT", ""), 0)


def _number(text: str, otherwise: int) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else otherwise  # noqa: PLR2004


def check_clock(context: Context) -> Finding:
    """A clock that is wrong makes logs of the two sides incomparable and certificates invalid."""
    now = context.wall_clock()
    for path in _dated_files(context):
        status = context.root.status(path)
        if status is not None and status.st_mtime > now + _TOLERATED_SECONDS:
            return warning(
                Code.CLOCK_WRONG, f"the clock is behind: {path} is {(status.st_mtime - now) / 86400:.0f} d newer"
            )
    match context.is_clock_synchronised():
        case False:
            return warning(Code.CLOCK_WRONG, "the kernel does not call its clock synchronised")
        case None:
            return ok("no file is newer than the clock; whether it is synchronised cannot be asked here")
        case True:
            return ok("synchronised")


def _dated_files(context: Context) -> Iterator[str]:
    module = context.installation.module
    yield context.settings.fabric_manager.binary
    yield context.settings.fabric_manager.stock_config
    if module is not None:
        yield module.path
    yield "/etc/os-release"


CHECKS = (
    Check("settings", "The settings file", (Code.SETTINGS_INVALID,), check_settings, is_for_any_machine=True),
    Check("config-keys", "Every key is known to this Fabric Manager", (Code.CONFIG_KEY_UNKNOWN,), check_keys),
    Check("directories", "Directories can be written", (Code.CONFIG_UNWRITABLE,), check_directories),
    Check("fabric-mode", "FABRIC_MODE fits the use of the GPUs", (Code.ISOLATION_NOT_PROMISED,), check_mode),
    Check("log", "Fabric Manager goes on logging", (Code.LOG_FULL,), check_log),
    Check("disk-space", "Space for the log", (Code.DISK_SPACE,), check_disk),
    Check("clock", "The clock", (Code.CLOCK_WRONG,), check_clock),
)

"""Loading one kernel module by path, as insmod(8) would.

Sources: init_module(2), include/uapi/linux/module.h and kernel/module/{main,decompress}.c of Linux 6.12. The kernel
decompresses itself when it was built to (MODULE_DECOMPRESS), and only the one algorithm that /sys/module/compression
names; otherwise the file is decompressed here and handed over byte for byte, since an appended signature covers the
plain module. The flags that ignore vermagic or symbol versions are never used: they also make the kernel ignore the
signature.
"""

import errno
import os
import platform
import time
from collections.abc import Callable, Sequence
from typing import Protocol, Self

from fmsupervisor.errors import CannotObserve
from fmsupervisor.facts import ModuleChoice
from fmsupervisor.host.kernel import ModuleLoadFailed
from fmsupervisor.host.load_failure import explain_load_failure
from fmsupervisor.host.module_file import (
    ModuleFileError,
    ModuleFileMissing,
    compression_of,
    decompress,
    module_name,
    read_module,
)
from fmsupervisor.host.root import HostRoot

__all__ = ["LinuxModuleCalls", "ModuleCalls", "explain_load_failure", "load_module", "quote_parameters"]

MODULE_INIT_COMPRESSED_FILE = 4  # include/uapi/linux/module.h

_SYSTEM_CALLS = {"x86_64": (175, 313), "aarch64": (105, 273)}  # init_module, finit_module
_NOT_DECOMPRESSED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)  # what refusing the flag or the format looks like
_POLL_SECONDS = 0.1
_MOST_KERNEL_LINES = 100
_KERNEL_RECORD_BYTES = 8192  # at least CONSOLE_EXT_LOG_MAX of include/linux/printk.h
_TELLING_WORDS = ("nvidia", "nvrm", "lockdown", "module", "signature", "loadpin")


class ModuleCalls(Protocol):
    """The two system calls; each returns 0 or an errno."""

    def load_file(self, descriptor: int, parameters: str, flags: int) -> int:
        """finit_module(2)."""

    def load_image(self, image: bytes, parameters: str) -> int:
        """init_module(2)."""


class LinuxModuleCalls:
    """The real thing, through libc's syscall(3), since libc has no wrapper for finit_module."""

    def load_file(self, descriptor: int, parameters: str, flags: int) -> int:
        """finit_module(2)."""
        return _system_call(1, descriptor, parameters.encode(), flags)

    def load_image(self, image: bytes, parameters: str) -> int:
        """init_module(2)."""
        return _system_call(0, image, len(image), parameters.encode())


def load_module(
    root: HostRoot,
    choice: ModuleChoice,
    parameters: Sequence[str],
    *,
    calls: ModuleCalls | None = None,
    wait_seconds: float = 120.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Load ``choice.depends`` in order, then ``choice.path`` with the parameters; blocks, for minutes if need be.

    A module that is live already counts as loaded; one that somebody else is loading is waited for, ``wait_seconds`` at
    most. Raises ``ModuleLoadFailed``.
    """
    calls = calls or LinuxModuleCalls()
    try:
        quoted = quote_parameters(parameters)
    except ValueError as error:
        raise ModuleLoadFailed(errno.EINVAL, (str(error),), choice.path) from error
    with _KernelLines(root) as kernel_lines:
        for path in (*choice.depends, choice.path):
            try:
                failure = _load_file(root, path, quoted if path == choice.path else "", calls)
                if failure == errno.EEXIST:
                    failure = _await_live(root, path, wait_seconds, clock, sleep)
            except (CannotObserve, ModuleFileError) as error:
                raise ModuleLoadFailed(_errno_of(error), (f"cannot read {path}: {error}",), path) from error
            if failure:
                raise ModuleLoadFailed(failure, kernel_lines.read(path), path)


def _errno_of(error: Exception) -> int:
    """The errno that stands for a file that could not be read."""
    if isinstance(error, ModuleFileMissing):
        return errno.ENOENT
    cause = error.__cause__
    return cause.errno if isinstance(cause, OSError) and cause.errno is not None else errno.ENOEXEC


def quote_parameters(parameters: Sequence[str]) -> str:
    """One string as ``next_arg`` of lib/cmdline.c takes it apart: a value with blanks stands in double quotes.

    A value that needs quotes and has some inside cannot be expressed: raises ``ValueError``.
    """
    quoted = []
    for parameter in parameters:
        name, separator, value = parameter.partition("=")
        if any(character.isspace() for character in name) or "\0" in parameter:
            raise ValueError(f"no module parameter: {parameter!r}")
        inner = value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value
        if not any(character.isspace() for character in inner):
            quoted.append(parameter)
        elif '"' in inner:
            raise ValueError(f"a module parameter cannot have both blanks and quotes in its value: {parameter!r}")
        else:
            quoted.append(f'{name}{separator}"{inner}"')
    return " ".join(quoted)


def _load_file(root: HostRoot, path: str, parameters: str, calls: ModuleCalls) -> int:
    """Hand the file to the kernel in the best way there is; 0 or an errno."""
    compression = compression_of(root, path)
    if not compression or compression == _kernel_compression(root):
        failure = _load_descriptor(root, path, parameters, MODULE_INIT_COMPRESSED_FILE if compression else 0, calls)
        if not compression or failure not in _NOT_DECOMPRESSED:
            return failure
    return calls.load_image(decompress(root, path), parameters)


def _kernel_compression(root: HostRoot) -> str:
    """The algorithm that this kernel decompresses itself; "" when it does not."""
    try:
        return (root.read_text("/sys/module/compression") or "").strip()
    except CannotObserve:
        return ""


def _load_descriptor(root: HostRoot, path: str, parameters: str, flags: int, calls: ModuleCalls) -> int:
    try:
        descriptor = os.open(root.path(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise CannotObserve(path, error.strerror or str(error)) from error
    try:
        return calls.load_file(descriptor, parameters, flags)
    finally:
        os.close(descriptor)


def _await_live(
    root: HostRoot, path: str, wait_seconds: float, clock: Callable[[], float], sleep: Callable[[float], None]
) -> int:
    """After EEXIST: 0 once the module is live; EBUSY when it goes away again or stays half loaded."""
    try:
        name = read_module(root, path).name
    except (ModuleFileError, CannotObserve):
        name = module_name(path)
    deadline = clock() + wait_seconds
    while True:
        state = root.read_text(f"/sys/module/{name}/initstate")
        if state is None:
            return 0 if root.is_directory(f"/sys/module/{name}") else errno.EBUSY  # without initstate: built in
        if state.strip() == "live":
            return 0
        if clock() >= deadline:
            return errno.EBUSY
        sleep(_POLL_SECONDS)


class _KernelLines:
    """The kernel's log from the moment of opening; empty without /dev/kmsg or without the right to read it."""

    def __init__(self, root: HostRoot) -> None:
        self._descriptor: int | None = None
        self._path = root.path("/dev/kmsg")

    def __enter__(self) -> Self:
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
            os.lseek(self._descriptor, 0, os.SEEK_END)
        except OSError:
            self.__exit__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def read(self, path: str) -> tuple[str, ...]:
        """The lines since then that may tell why the module was refused; of very many, the last ones."""
        words = (*_TELLING_WORDS, module_name(path).lower())
        lines = [line for line in self._all_lines() if any(word in line.lower() for word in words)]
        return tuple(lines[-_MOST_KERNEL_LINES:])

    def _all_lines(self) -> list[str]:
        if self._descriptor is None:
            return []
        lines: list[str] = []
        while True:
            try:
                record = os.read(self._descriptor, _KERNEL_RECORD_BYTES)
            except BrokenPipeError:  # records were overwritten; the next read goes on with the oldest one left
                continue
            except OSError:
                return lines
            if not record:
                return lines
            lines += _record_text(record)
            del lines[: -100 * _MOST_KERNEL_LINES]


def _record_text(record: bytes) -> list[str]:
    """The message of a record ``priority,sequence,time,flags;message`` (Documentation/ABI/testing/dev-kmsg)."""
    head, _, rest = record.partition(b";")
    message = (rest or head).split(b"\n", 1)[0].replace(b"\\x0a", b"\n")
    return [line for line in message.decode("utf-8", "backslashreplace").split("\n") if line]


def _system_call(which: int, *arguments: int | bytes) -> int:
    """0 or the errno of system call ``which`` of the table."""
    import ctypes  # noqa: PLC0415 - only a load needs it

    numbers = _SYSTEM_CALLS.get(platform.machine())
    if numbers is None:
        return errno.ENOSYS
    libc = ctypes.CDLL(None, use_errno=True)
    converted = [ctypes.c_long(value) if isinstance(value, int) else ctypes.c_char_p(value) for value in arguments]
    libc.syscall.restype = ctypes.c_long
    return ctypes.get_errno() if libc.syscall(ctypes.c_long(numbers[which]), *converted) == -1 else 0

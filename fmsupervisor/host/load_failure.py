"""Why the kernel refused a module: from the errno and the kernel's log lines to a condition. Pure and total.

Sources: kernel/module/{main,version,signing}.c, security/lockdown of Linux 6.12; nvidia_init_module of NVIDIA's nv.c.
One errno has several causes (EPERM: lockdown, blacklist, modules_disabled), so the first rule that fits errno and a
line decides; a rule without a line is the errno's default.
"""

import errno as numbers
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fmsupervisor.conditions import Code
from fmsupervisor.facts import ModuleChoice, Problem


@dataclass(frozen=True, slots=True)
class Rule:
    """``line``: what a kernel line must contain for the rule to hold; None: no line is asked for."""

    errnos: frozenset[int]
    line: re.Pattern[str] | None
    code: Code
    note: str = ""  # said when no line is quoted


def _rule(errnos: Sequence[int], line: str | None, code: Code, note: str = "") -> Rule:
    return Rule(frozenset(errnos), None if line is None else re.compile(line, re.IGNORECASE), code, note)


_DISAGREES = r"disagrees about version of symbol (?P<symbol>\S+)"
_UNKNOWN_VERSION = r"unknown symbol (?P<symbol>\S+) \(err -22\)"
_SIGNATURE = (numbers.EKEYREJECTED, numbers.ENOKEY, numbers.EKEYEXPIRED, numbers.EKEYREVOKED, numbers.ENOPKG)
_PASSING = (
    numbers.EBUSY,
    numbers.ENOMEM,
    numbers.EAGAIN,
    numbers.EINTR,
    numbers.EEXIST,
    numbers.ETXTBSY,
    numbers.ETIMEDOUT,
    numbers.EMFILE,
    numbers.ENFILE,
)
_DAMAGED = (
    numbers.ENOEXEC,
    numbers.EBADMSG,
    numbers.ENODATA,
    numbers.EFBIG,
    numbers.ELIBBAD,
    numbers.EOPNOTSUPP,
    numbers.EISDIR,
)
_NO_SILENT_LINE = "the kernel log tells no reason"

RULES: tuple[Rule, ...] = (
    # The file could not even be opened or decompressed (module_load).
    _rule((numbers.ENOENT,), "^cannot read ", Code.MODULE_NOT_FOUND),
    _rule((numbers.EACCES, numbers.EPERM), "^cannot read ", Code.MODULE_LOADING_FORBIDDEN),
    _rule((numbers.EIO, numbers.EINVAL), "^cannot read ", Code.MODULE_DAMAGED),
    _rule((numbers.ENOEXEC,), "version magic", Code.MODULE_VERMAGIC),
    _rule((numbers.ENOEXEC, numbers.EINVAL, numbers.ENOENT), _DISAGREES, Code.MODULE_SYMBOL_VERSIONS),
    _rule((numbers.ENOEXEC,), "exports duplicate symbol", Code.MODULE_INIT_FAILED),
    _rule((numbers.ENOENT,), r"unknown symbol (?P<symbol>\S+) \(err -2\)", Code.MODULE_UNKNOWN_SYMBOL),
    _rule((numbers.EINVAL, numbers.ENOENT), _UNKNOWN_VERSION, Code.MODULE_SYMBOL_VERSIONS),
    _rule((numbers.ENOENT,), r"unknown symbol (?P<symbol>\S+)", Code.MODULE_UNKNOWN_SYMBOL),
    _rule((numbers.EINVAL,), "invalid for parameter|from namespace", Code.MODULE_INIT_FAILED),
    _rule((numbers.EPERM, numbers.EACCES), "lockdown.*module", Code.MODULE_LOCKDOWN),
    _rule((numbers.EPERM, numbers.EACCES), "module .* is blacklisted", Code.MODULE_BLACKLISTED),
    _rule((numbers.EPERM, numbers.EACCES), "loadpin", Code.MODULE_LOADING_FORBIDDEN),
    _rule(_SIGNATURE, "loading of .*module|signature|unsupported crypto", Code.MODULE_SIGNATURE_REJECTED),
    _rule((numbers.ENODEV,), "no nvidia|none of the nvidia|already bound|probe routine", Code.MODULE_NO_DEVICE),
    _rule((numbers.EIO,), "rm_init_rm|failed to initialize", Code.MODULE_INIT_FAILED),
    # No line decides.
    _rule((numbers.ENOENT,), None, Code.MODULE_UNKNOWN_SYMBOL, "the kernel log does not name the symbol; see dmesg"),
    _rule(
        (numbers.EPERM, numbers.EACCES),
        None,
        Code.MODULE_LOADING_FORBIDDEN,
        f"{_NO_SILENT_LINE}: kernel.modules_disabled=1, or no CAP_SYS_MODULE",
    ),
    _rule((numbers.ENOSYS,), None, Code.MODULE_LOADING_FORBIDDEN, "this kernel cannot load modules"),
    _rule(_SIGNATURE, None, Code.MODULE_SIGNATURE_REJECTED, _NO_SILENT_LINE),
    _rule((numbers.ENODEV,), None, Code.MODULE_NO_DEVICE, _NO_SILENT_LINE),
    _rule(_PASSING, None, Code.MODULE_LOAD_BUSY, "it is tried again"),
    _rule(_DAMAGED, None, Code.MODULE_DAMAGED, _NO_SILENT_LINE),
)
_ANY_OTHER = Rule(frozenset(), None, Code.MODULE_INIT_FAILED, _NO_SILENT_LINE)


def explain_load_failure(
    errno: int, kernel_lines: Sequence[str], choice: ModuleChoice, running_release: str, *, path: str = ""
) -> Problem:
    """The condition for a refused load. ``path``: the module that was refused, when it is not the choice itself."""
    refused = path or choice.path
    rule, line = _decide(errno, kernel_lines)
    symbol = _symbol(rule, line)
    parts = [f"{refused}: {_errno_name(errno)} ({os.strerror(errno)})"]
    if symbol:
        parts.append(f"symbol {symbol}")
    parts.append(line or rule.note)
    if refused == choice.path and choice.kernel_release != running_release:
        parts.append(f"the module was built for {choice.kernel_release}, {running_release} is running")
    return Problem(rule.code, "; ".join(parts))


def _decide(errno: int, kernel_lines: Sequence[str]) -> tuple[Rule, str]:
    """The rule that holds and the line to quote, "" when there is none."""
    for rule in RULES:
        if errno not in rule.errnos:
            continue
        if rule.line is None:
            return rule, _most_telling(kernel_lines)
        found = next((line for line in kernel_lines if rule.line.search(line)), None)
        if found is not None:
            return rule, found.strip()
    return _ANY_OTHER, _most_telling(kernel_lines)


def _most_telling(kernel_lines: Sequence[str]) -> str:
    """The last line that speaks of a failure, else the last that is not merely a note (tainting), else ""."""
    failures = [
        line for line in kernel_lines if re.search("fail|error|invalid|cannot|denied|no nvidia", line, re.IGNORECASE)
    ]
    lines = [line for line in failures or kernel_lines if "taint" not in line]
    return lines[-1].strip() if lines else ""


def _symbol(rule: Rule, line: str) -> str:
    found = rule.line.search(line) if rule.line is not None else None
    return found["symbol"] if found is not None and "symbol" in found.groupdict() else ""


def _errno_name(errno: int) -> str:
    return numbers.errorcode.get(errno, f"errno {errno}")

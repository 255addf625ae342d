"""What the kernel allows: module loading at all, blacklists, signatures.

Sources: kernel/module/{main,signing}.c (``module_sig_check`` asks for enforcement before lockdown), security/lockdown/
lockdown.c and Documentation/admin-guide of Linux 6.12; UEFI specification 3.3 (SecureBoot), efivarfs (four bytes of
attributes before the value).
"""

import re

from fmsupervisor.checks.context import Context
from fmsupervisor.checks.finding import Check, Finding, failed, ok, warning
from fmsupervisor.conditions import Code
from fmsupervisor.errors import CannotObserve
from fmsupervisor.facts import Problem
from fmsupervisor.host.module_file import ModuleFileError, Signature

_SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
_LOCKDOWN = "/sys/kernel/security/lockdown"
_SIG_ENFORCE = "/sys/module/module/parameters/sig_enforce"
_MODULES_DISABLED = "/proc/sys/kernel/modules_disabled"
_COMMAND_LINE = "/proc/cmdline"


def check_loading(context: Context) -> Finding:
    """kernel.modules_disabled, and module_blacklist= of the kernel's command line."""
    if _switch(context, _MODULES_DISABLED) and context.loaded is None:
        return failed(Code.MODULE_LOADING_FORBIDDEN, "kernel.modules_disabled is 1")
    command_line = context.root.read_text(_COMMAND_LINE)
    if command_line is None:
        raise CannotObserve(_COMMAND_LINE, "it does not exist")
    if "nvidia" in _listed(command_line, "module_blacklist"):
        return failed(Code.MODULE_BLACKLISTED, "the kernel's command line has nvidia in module_blacklist=")
    if "nvidia" in _listed(command_line, "modprobe.blacklist"):
        return ok("modules may be loaded; modprobe.blacklist=nvidia stops udev and modprobe, not loading by path")
    return ok("modules may be loaded, and nvidia is not blacklisted")


def _listed(command_line: str, parameter: str) -> set[str]:
    """All items of all ``parameter=a,b``; the kernel takes "-" and "_" in names for the same."""
    values = re.findall(rf"(?:^|\s){re.escape(parameter)}=(\S+)", command_line)
    return {item.strip('"').replace("-", "_") for value in values for item in value.split(",")}


def check_signature(context: Context) -> Finding:
    """Whether a module must be signed here, and whether this one is."""
    lockdown, enforced = _lockdown(context), _is_enforced(context)
    secure_boot = _secure_boot(context)
    policy = f"lockdown {lockdown}, sig_enforce {_yes(enforced)}, Secure Boot {secure_boot}"
    if context.loaded is not None:
        return ok(f"nvidia.ko is loaded already; {policy}")
    selected = context.selected
    if isinstance(selected, Problem):
        return ok(f"there is no module file to look at; {policy}")
    try:
        signature = context.module_file(selected.path).signature
    except (ModuleFileError, CannotObserve):
        return ok(f"the module file cannot be read (see module-file); {policy}")
    found = f"the module is {signature}; {policy}"
    is_asked = enforced or lockdown not in ("none", "not built in")
    if signature is Signature.PKCS7:
        return ok(found, *(("whether the kernel trusts the key shows only when it is loaded",) if is_asked else ()))
    if signature is Signature.DAMAGED:
        return failed(Code.MODULE_DAMAGED, f"{found}; the kernel refuses that even where none is asked for")
    if enforced:
        return failed(Code.MODULE_SIGNATURE_REJECTED, found)
    if is_asked:
        return failed(Code.MODULE_LOCKDOWN, found)
    if secure_boot == "on":
        return warning(Code.MODULE_SIGNATURE_REJECTED, f"{found}; this kernel may lock itself down at the next boot")
    return ok(found)


def _lockdown(context: Context) -> str:
    """The word in brackets of "none [integrity] confidentiality"."""
    text = context.root.read_text(_LOCKDOWN, 256)
    if text is None:
        return "not built in"
    found = re.search(r"\[(\w+)\]", text)
    if found is None:
        raise CannotObserve(_LOCKDOWN, "it makes no sense")
    return found[1]


def _is_enforced(context: Context) -> bool:
    """Absent when the kernel was built without CONFIG_MODULE_SIG."""
    return _switch(context, _SIG_ENFORCE) or False


def _switch(context: Context, path: str) -> bool | None:
    """A file that says 0 or N, 1 or Y; None when it does not exist. Raises ``CannotObserve``."""
    text = context.root.read_text(path, 64)
    if text is None:
        return None
    value = {"0": False, "N": False, "1": True, "Y": True}.get(text.strip())
    if value is None:
        raise CannotObserve(path, f"{text[:32]!r} makes no sense")
    return value


def _secure_boot(context: Context) -> str:
    if not context.root.is_directory("/sys/firmware/efi"):
        return "none (no EFI)"
    value = context.root.read_bytes(_SECURE_BOOT, 16)
    if value is None or len(value) < 5:  # noqa: PLR2004 - attributes and one byte
        return "unknown (no EFI variable)"
    return "on" if value[4] == 1 else "off"


def _yes(value: bool) -> str:  # noqa: FBT001
    return "on" if value else "off"


CHECKS = (
    Check(
        "module-loading",
        "The kernel lets modules be loaded",
        (Code.MODULE_LOADING_FORBIDDEN, Code.MODULE_BLACKLISTED),
        check_loading,
    ),
    Check(
        "module-signature",
        "The kernel accepts the module's signature",
        (Code.MODULE_LOCKDOWN, Code.MODULE_SIGNATURE_REJECTED, Code.MODULE_DAMAGED),
        check_signature,
    ),
)

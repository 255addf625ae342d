"""The rule of equal versions. Pure.

Driver, Fabric Manager and NSCQ must be of exactly one version: the driver compares strings (nvswitch.c,
``nvswitch_lib_check_api_version``), and Fabric Manager exits with status 1 when they differ.
"""

import re

from fmsupervisor.conditions import Code
from fmsupervisor.facts import Installation, Problem


def version_problems(installation: Installation, loaded: str | None) -> tuple[Problem, ...]:
    """What the known versions say together; ``loaded`` is the version of the live module, None when none is live."""
    module = installation.module.version if installation.module is not None else ""
    installed = {
        "nvidia.ko": module,
        "nv-fabricmanager": installation.fabric_manager_version or "",
        "libnvidia-nscq": installation.nscq_version or "",
    }
    installed = {name: version for name, version in installed.items() if version}
    known = {**installed, **({"the loaded module": loaded} if loaded else {})}
    if len(set(known.values())) <= 1:
        return ()
    versions = ", ".join(f"{name} {version}" for name, version in known.items())
    others = set(installed.values())
    if loaded and module and len(installed) > 1 and others == {module} and _is_newer(module, loaded):
        return (Problem(Code.RELOAD_NEEDED, f"{module} is installed, {loaded} is loaded ({versions})"),)
    return (Problem(Code.VERSION_MISMATCH, f"{versions}; {_what_to_change(installed, loaded)}"),)


def _what_to_change(installed: dict[str, str], loaded: str | None) -> str:
    """Which packages to replace, measured by what is loaded, else by what most agree on, the module first."""
    counts = list(installed.values())
    wanted = loaded or max(dict.fromkeys(counts), key=counts.count)
    wrong = [name for name, version in installed.items() if version != wanted]
    measure = "the loaded module" if loaded else "the others"
    return f"to agree with {measure}, install version {wanted} of {' and '.join(wrong)}"


def _is_newer(one: str, other: str) -> bool:
    return _numbers(one) > _numbers(other)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part[:18]) for part in re.findall(r"\d+", version))

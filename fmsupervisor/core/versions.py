"""The rule of equal versions.

NVIDIA's kernel driver, Fabric Manager and NSCQ must be of exactly one version: the driver compares the whole string
(nvswitch_lib_check_api_version), and Fabric Manager exits with status 1 when it differs.
"""

from fmsupervisor.conditions import Code
from fmsupervisor.facts import Installation, Problem


def version_problems(installation: Installation, loaded: str | None) -> tuple[Problem, ...]:
    """What is wrong with the versions. A version that is not known is not compared."""
    in_tree = {
        "module file": installation.module.version if installation.module else None,
        "Fabric Manager": installation.fabric_manager_version,
        "NSCQ": installation.nscq_version,
    }
    known = {what: version for what, version in in_tree.items() if version}
    everything = known | ({"loaded driver": loaded} if loaded else {})
    if len(set(everything.values())) <= 1:
        return ()
    listing = ", ".join(f"{what} {version}" for what, version in everything.items())
    if loaded is None or len(set(known.values())) > 1:
        needed = loaded or in_tree["module file"]
        cure = f"install the packages of version {needed}" if needed else "install packages of one version"
        return (Problem(Code.VERSION_MISMATCH, f"{listing}: {cure}"),)
    installed = next(iter(known.values()))
    if installation.module is not None and _as_numbers(installed) > _as_numbers(loaded):
        return (Problem(Code.RELOAD_NEEDED, f"{listing}: reboot, or reload nvidia.ko, to run {installed}"),)
    return (Problem(Code.VERSION_MISMATCH, f"{listing}: install the packages of version {loaded}"),)


def _as_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())

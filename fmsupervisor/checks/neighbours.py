"""Who else could start, restart or disturb Fabric Manager: units, package hooks, processes, ports.

Sources: systemd.unit(5) (where units, links and masks are), needrestart's needrestart.conf (``override_rc``),
unattended-upgrades' README and apt.conf(5).
"""

import re
from collections.abc import Iterator

from fmsupervisor.checks.context import Context
from fmsupervisor.checks.finding import Check, Finding, Verdict, failed, judged, ok, warning
from fmsupervisor.conditions import Code
from fmsupervisor.fabric_manager import config_file, foreign
from fmsupervisor.facts import ForeignFabricManager, Problem
from fmsupervisor.host.root import HostRoot

VENDOR_UNIT = "nvidia-fabricmanager.service"
_OUR_UNIT = "fmsupervisor.service"
_ADMINISTRATOR_DIRECTORIES = ("/etc/systemd/system", "/run/systemd/system")
_UNIT_DIRECTORIES = (
    *_ADMINISTRATOR_DIRECTORIES,
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)
_FOREGROUND_TYPES = frozenset({"simple", "exec", "notify", "notify-reload"})
_DEFAULT_TCP_PORT = 16000  # STARTING_TCP_PORT
_VENDOR_CONFIG = "/usr/share/nvidia/nvswitch/fabricmanager.cfg"


# --- units


def check_vendor_unit(context: Context) -> Finding:
    """The vendor's unit would start a second Fabric Manager at the next boot."""
    root = context.root
    unit = _unit_path(root, VENDOR_UNIT)
    if unit is None:
        return ok(f"{VENDOR_UNIT} is not installed")
    if root.read_link(unit) == "/dev/null":
        return ok(f"{VENDOR_UNIT} is masked")
    wanting = list(_enabling_links(root, VENDOR_UNIT))
    if not wanting:
        return ok(f"{VENDOR_UNIT} is installed, and not enabled")
    beside = ", beside ours" if list(_enabling_links(root, _OUR_UNIT)) else ""
    return warning(Code.VENDOR_UNIT_ENABLED, f"{VENDOR_UNIT} is enabled{beside}: {', '.join(wanting)}")


def check_unit_type(context: Context) -> Finding:
    """DAEMONIZE of the vendor unit's configuration against the Type= of that unit."""
    root = context.root
    unit = _unit_path(root, VENDOR_UNIT)
    if unit is None or root.read_link(unit) == "/dev/null":
        return ok(f"{VENDOR_UNIT} is not used; our Fabric Manager always gets DAEMONIZE=0")
    text = "\n".join(root.read_text(path) or "" for path in (unit, *_drop_ins(root)))
    kind = _last(text, "Type") or "simple"
    command = _last(text, "ExecStart")
    found = re.search(r"(?:-c|--config|--fm-config-file)[ =](\S+)", command)
    config = found[1] if found else _VENDOR_CONFIG
    content = root.read_text(config) if config.startswith("/") else None
    if content is None:
        return ok(f"{VENDOR_UNIT} has Type={kind}; its {config} does not exist")
    daemonizes = config_file.effective_options(content).get("DAEMONIZE", "1") != "0"
    described = f"{VENDOR_UNIT} has Type={kind}, {config} has DAEMONIZE={int(daemonizes)}"
    if daemonizes and kind in _FOREGROUND_TYPES:
        return warning(Code.DAEMONIZE_MISMATCH, f"{described}: systemd loses the process that forks away")
    if not daemonizes and kind == "forking":
        return warning(Code.DAEMONIZE_MISMATCH, f"{described}: systemd waits for a fork that never comes")
    return ok(described)


def _unit_path(root: HostRoot, name: str) -> str | None:
    paths = (f"{directory}/{name}" for directory in _UNIT_DIRECTORIES)
    return next((path for path in paths if root.status(path, follow_symlinks=False) is not None), None)


def _drop_ins(root: HostRoot) -> Iterator[str]:
    for directory in reversed(_UNIT_DIRECTORIES):
        folder = f"{directory}/{VENDOR_UNIT}.d"
        yield from (f"{folder}/{name}" for name in root.list_directory(folder) or () if name.endswith(".conf"))


def _enabling_links(root: HostRoot, name: str) -> Iterator[str]:
    for directory in _ADMINISTRATOR_DIRECTORIES:
        for entry in root.list_directory(directory) or ():
            link = f"{directory}/{entry}/{name}"
            if entry.endswith((".wants", ".requires", ".upholds")) and root.read_link(link) is not None:
                yield link


def _last(text: str, key: str) -> str:
    """The value that counts: of several the last that is not empty."""
    values = re.findall(rf"^[ \t]*{key}[ \t]*=[ \t]*(\S.*?)[ \t]*$", text, re.MULTILINE)
    return str(values[-1]) if values else ""


# --- package hooks


def check_package_hooks(context: Context) -> Finding:
    """Needrestart and unattended upgrades restart or replace Fabric Manager under running guests."""
    root = context.root
    problems: list[str] = []
    notes: list[str] = []
    for label, reads in (("needrestart", _needrestart(root)), ("unattended upgrades", _unattended(root))):
        if reads is None:
            continue
        (problems if reads else notes).append(reads or f"{label}: an exception is made")
    if problems:
        return warning(Code.PACKAGE_HOOK, "; ".join(problems), details=notes)
    return ok("; ".join(notes) or "neither needrestart nor unattended upgrades are there")


def _needrestart(root: HostRoot) -> str | None:
    """None: it is not there; "": it leaves our service alone; else what it would do."""
    main = root.read_text("/etc/needrestart/needrestart.conf")
    if main is None:
        return None
    folder = "/etc/needrestart/conf.d"
    texts = [main, *(root.read_text(f"{folder}/{name}") or "" for name in root.list_directory(folder) or ())]
    lines = [line for text in texts for line in text.splitlines() if not line.lstrip().startswith("#")]
    if any("fmsupervisor" in line for line in lines):
        return ""
    return "needrestart restarts services after library upgrades and has no exception for fmsupervisor"


def _unattended(root: HostRoot) -> str | None:
    """The same for unattended-upgrades: whether packages of NVIDIA are held back."""
    folder = "/etc/apt/apt.conf.d"
    names = root.list_directory(folder)
    if not names:
        return None
    lines = [line.split("//")[0] for name in names for line in (root.read_text(f"{folder}/{name}") or "").splitlines()]
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    if not re.search(r'APT::Periodic::Unattended-Upgrade\s+"(?!0")', text):
        return None
    blacklist = "".join(re.findall(r"Unattended-Upgrade::Package-Blacklist\s*\{(.*?)\}", text, re.DOTALL))
    if "nvidia" in blacklist:
        return ""
    return (
        "unattended upgrades may replace driver or Fabric Manager: no nvidia in Unattended-Upgrade::Package-Blacklist"
    )


# --- processes and ports


def check_foreign(context: Context) -> Finding:
    """A Fabric Manager that is not ours."""
    port, path = config_file.command_endpoint(context.rendering.text)
    found = _strangers(context, port, path)
    if found:
        return failed(Code.FOREIGN_FABRIC_MANAGER, "; ".join(each.description for each in found))
    return ok("none, and nobody listens where it would")


def check_ports(context: Context) -> Finding:
    """The ports that Fabric Manager and the metrics need."""
    ports = {"STARTING_TCP_PORT": _port(context.options.get("STARTING_TCP_PORT", ""), _DEFAULT_TCP_PORT)}
    if context.options.get("UNIX_SOCKET_PATH"):
        ports.clear()
    problems = [
        Problem(Code.ADDRESS_IN_USE, f"{name} {port}: {listener.description}")
        for name, port in ports.items()
        for listener in _listeners(context, port)
    ]
    metrics = context.settings.metrics
    if metrics.enabled:
        ports["metrics.listen"] = _port(metrics.listen.rpartition(":")[2], 0)
        problems += [
            Problem(Code.METRICS_UNAVAILABLE, f"metrics.listen {metrics.listen}: {listener.description}")
            for listener in _listeners(context, ports["metrics.listen"])
        ]
    listing = ", ".join(f"{name} {port}" for name, port in ports.items())
    return judged(problems, f"free or ours: {listing}" if listing else "no TCP port is needed")


def _listeners(context: Context, port: int) -> list[ForeignFabricManager]:
    return [each for each in _strangers(context, port, "") if "listens on" in each.description]


def _strangers(context: Context, port: int | None, path: str) -> list[ForeignFabricManager]:
    """Without those that are ours; a socket whose owner we may not see counts as ours while the daemon runs."""
    found = foreign.find_foreign(context.root, context.own_pids, port, path)
    return [each for each in found if each.pid is not None or not context.own_pids]


def _port(text: str, otherwise: int) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 5 else otherwise  # noqa: PLR2004


# --- the daemon


def check_daemon(context: Context) -> Finding:
    """What the running daemon itself says."""
    document = context.daemon
    if document is None:
        return ok("no fmsupervisor is running")
    rows = list(document.get("conditions", ()))
    severities = {row.get("severity") for row in rows}
    verdict = Verdict.FAILED if "critical" in severities else Verdict.WARNING if "warning" in severities else Verdict.OK
    return Finding(
        verdict,
        f"{document.get('state')}: {document.get('reason')}",
        " ".join(dict.fromkeys(str(row.get("remedy")) for row in rows)),
        tuple(code for code in Code if any(row.get("code") == code for row in rows)),
        tuple(f"{row.get('code')} {row.get('title')}: {row.get('detail')}" for row in rows),
    )


CHECKS = (
    Check("vendor-unit", "The vendor's unit is out of the way", (Code.VENDOR_UNIT_ENABLED,), check_vendor_unit),
    Check("unit-type", "DAEMONIZE fits the unit", (Code.DAEMONIZE_MISMATCH,), check_unit_type),
    Check("package-hooks", "No package hook restarts Fabric Manager", (Code.PACKAGE_HOOK,), check_package_hooks),
    Check("foreign-fm", "No other Fabric Manager runs", (Code.FOREIGN_FABRIC_MANAGER,), check_foreign),
    Check("ports", "Ports are free", (Code.ADDRESS_IN_USE, Code.METRICS_UNAVAILABLE), check_ports),
    Check("daemon", "The running daemon", tuple(Code), check_daemon),
)

"""The parts of the report that are read from the kernel: PCI, /proc, /sys, the kernel log."""

import re
import stat
from collections.abc import Iterator

from fmsupervisor.errors import CannotObserve
from fmsupervisor.host.kernel_log import KMSG, KernelLine, KernelLog
from fmsupervisor.host.pci import DEVICES
from fmsupervisor.host.root import HostRoot
from fmsupervisor.support.confined import read_start, walk_files, whole_words
from fmsupervisor.support.piece import LOG_BYTES, Outcome, Piece, Source, file_piece, text_piece
from fmsupervisor.support.programs import run_program

_FILES = (
    ("/proc", "/proc/version"),
    ("/proc", "/proc/cmdline"),
    ("/proc", "/proc/devices"),
    ("/proc", "/proc/sys/kernel/osrelease"),
    ("/proc", "/proc/sys/kernel/tainted"),
    ("/proc", "/proc/sys/kernel/modules_disabled"),
    ("/sys", "/sys/kernel/security/lockdown"),
    ("/", "/etc/os-release"),
)
_TREES = (("/proc/driver", re.compile("nvidia"), 5), ("/sys/module", re.compile("nvidia|vfio"), 1))
_MODULE_FILES = re.compile(r"/sys/module/[^/]+/(?:version|srcversion|initstate|refcnt|taint|coresize|parameters/.*)")
_FILES_PER_TREE = 400
_FILE_BYTES = 64 << 10

_VENDOR_NVIDIA = "0x10de"
_ATTRIBUTES = (
    "vendor", "device", "subsystem_vendor", "subsystem_device", "class", "revision", "enable", "power_state", "irq",
    "numa_node", "driver_override", "current_link_speed", "current_link_width", "max_link_speed", "max_link_width",
    "reset_method", "sriov_numvfs", "sriov_totalvfs", "d3cold_allowed", "modalias", "resource", "aer_dev_fatal",
    "aer_dev_nonfatal", "aer_dev_correctable",
)  # fmt: skip
_BRIDGE_ATTRIBUTES = ("vendor", "device", "current_link_speed", "current_link_width")
_BUS_ID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.ASCII)
_FUNCTIONS = 256

_TELLING = re.compile(
    r"nvidia|nvrm|nvswitch|nvlink|\bs?xid\b|vfio|iommu|dmar|amd-vi|lockdown|secure boot|aer:|"
    r"\bmodule\b.*(?:sign|verif|taint|symbol|magic|blacklist|reject)",
    re.IGNORECASE,
)
_READS = 256


def host_files(source: Source) -> Iterator[Piece]:
    """Small texts of /proc, /sys and /etc, each under its own path."""
    for within, path in _FILES:
        yield file_piece(source, f"host{path}", path, within, _FILE_BYTES)
    for top, name, depth in _TREES:
        yield from _tree(source, top, name, depth)
    for path in walk_files(source.root, "/etc/modprobe.d", 0):
        yield file_piece(source, f"host{path}", path, "/etc/modprobe.d", _FILE_BYTES)


def _tree(source: Source, top: str, wanted: re.Pattern[str], depth: int) -> Iterator[Piece]:
    try:
        names = source.root.list_directory(top) or []
    except CannotObserve as error:
        yield Piece(f"host{top}", outcome=Outcome.ERROR, note=str(error))
        return
    count = 0
    for directory in (f"{top}/{name}" for name in names if wanted.match(name)):
        for path in walk_files(source.root, directory, depth):
            if top == "/sys/module" and not _MODULE_FILES.fullmatch(path):
                continue
            count += 1
            if count > _FILES_PER_TREE:
                yield Piece(f"host{top}", outcome=Outcome.CUT, note=f"more than {_FILES_PER_TREE} files")
                return
            yield file_piece(source, f"host{path}", path, top, _FILE_BYTES)
    if not count:
        yield Piece(f"host{top}/nvidia", outcome=Outcome.MISSING, note=f"{top} has nothing of NVIDIA")


def pci(source: Source) -> Iterator[Piece]:
    """Every NVIDIA function: attributes, driver, IOMMU group with its other members, and the bridges above it."""
    try:
        names = source.root.list_directory(DEVICES)
    except CannotObserve as error:
        yield Piece("pci.txt", outcome=Outcome.ERROR, note=str(error))
        return
    if names is None:
        yield Piece("pci.txt", outcome=Outcome.MISSING, note=f"{DEVICES} does not exist")
        return
    nvidia = [name for name in names if _attribute(source.root, name, "vendor") == _VENDOR_NVIDIA]
    text = "\n".join("\n".join(_function(source.root, name)) + "\n" for name in nvidia[:_FUNCTIONS])
    note = f"{len(nvidia)} NVIDIA functions of {len(names)}"
    outcome = Outcome.CUT if len(nvidia) > _FUNCTIONS else Outcome.OK
    yield Piece("pci.txt", (text or "no NVIDIA function\n").encode("utf-8", "backslashreplace"), outcome, note)


def _function(root: HostRoot, name: str) -> Iterator[str]:
    yield name
    yield f"  driver: {_link(root, f'{DEVICES}/{name}/driver') or '(none)'}"
    for attribute in _ATTRIBUTES:
        value = _attribute(root, name, attribute)
        if value is not None:
            yield f"  {attribute}: " + value.replace("\n", "\n    ")
    group = _link(root, f"{DEVICES}/{name}/iommu_group")
    yield f"  iommu_group: {group or '(none)'}"
    for member in _list(root, f"{DEVICES}/{name}/iommu_group/devices") if group else ():
        driver = _link(root, f"{DEVICES}/{member}/driver") or "(none)"
        yield f"    {member} {_identity(root, member)} driver {driver}"
    for bridge in _bridges(root, name):
        values = " ".join(_attribute(root, bridge, attribute) or "?" for attribute in _BRIDGE_ATTRIBUTES)
        yield f"  below {bridge}: {values}"


def _bridges(root: HostRoot, name: str) -> list[str]:
    """The bridges between the host and the function, the nearest first."""
    try:
        place = root.read_link(f"{DEVICES}/{name}") or ""
    except CannotObserve:
        return []
    return [part for part in reversed(place.split("/")[:-1]) if _BUS_ID.fullmatch(part)]


def _identity(root: HostRoot, name: str) -> str:
    return f"{_attribute(root, name, 'vendor')}:{_attribute(root, name, 'device')}"


def _attribute(root: HostRoot, name: str, attribute: str) -> str | None:
    try:
        found = read_start(root, f"{DEVICES}/{name}/{attribute}", "/sys", 4096)
    except CannotObserve as error:
        return f"({error.reason})"
    return found.content.decode("utf-8", "replace").strip() if found else None


def _link(root: HostRoot, path: str) -> str | None:
    """The last name of what the link points to."""
    try:
        target = root.read_link(path)
    except CannotObserve:
        return None
    return target.rstrip("/").rpartition("/")[2] if target else None


def _list(root: HostRoot, path: str) -> list[str]:
    try:
        return root.list_directory(path) or []
    except CannotObserve:
        return []


def kernel_log(source: Source) -> Iterator[Piece]:
    """Lines of the kernel log that speak of NVIDIA, IOMMUs, PCI errors and the loading of modules."""
    if not source.is_this_machine:
        yield Piece("kernel.log", outcome=Outcome.MISSING, note="the kernel log is that of another machine")
        return
    try:
        text = "\n".join(_shown(line) for line in _kernel_lines(source.root) if _TELLING.search(line.text))
    except CannotObserve as error:
        yield _journal_of_the_kernel(str(error))
        return
    content = text.encode("utf-8", "backslashreplace")
    if len(content) > LOG_BYTES:
        content = whole_words(content[-LOG_BYTES:], at_end=False)
        yield Piece("kernel.log", content + b"\n", Outcome.CUT, "the end of it")
    else:
        yield text_piece("kernel.log", text + "\n", f"from {KMSG}")


def _kernel_lines(root: HostRoot) -> list[KernelLine]:
    found = root.status(KMSG)
    if found is None or not stat.S_ISCHR(found.st_mode):
        raise CannotObserve(KMSG, "it is not there")
    log = KernelLog(root)
    lines: list[KernelLine] = []
    try:
        for _ in range(_READS):
            new = log.read_new()
            if not new:
                break
            lines += new
    finally:
        log.close()
    return lines


def _shown(line: KernelLine) -> str:
    return f"<{line.level}>[{line.seconds:12.6f}] {line.text}"


def _journal_of_the_kernel(reason: str) -> Piece:
    """What a user who may not read /dev/kmsg may perhaps read of the journal."""
    command = ("journalctl", "-k", "-b", "-o", "short-monotonic", "--no-hostname", "--no-pager", "-q", "-n", "50000")
    output = run_program(command, 15.0, 4 * LOG_BYTES)
    if output.status != 0:
        return Piece("kernel.log", outcome=Outcome.ERROR, note=f"{reason}; journalctl -k: {output.problem or 'failed'}")
    lines = [line for line in output.content.decode("utf-8", "replace").splitlines() if _TELLING.search(line)]
    content = ("\n".join(lines) + "\n").encode()
    is_cut = output.is_cut or len(content) > LOG_BYTES
    content = whole_words(content[-LOG_BYTES:], at_end=False) if len(content) > LOG_BYTES else content
    return Piece("kernel.log", content, Outcome.CUT if is_cut else Outcome.OK, f"from journalctl -k: {reason}")

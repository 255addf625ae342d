"""What the observers report: plain values, no I/O, no judgement.

Three things are kept apart everywhere: a value, ``None`` (it is not there), ``Unknown`` (it could not be looked at).
PCI bus ids are written ``dddd:bb:dd.f`` in lower case.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from types import MappingProxyType

from fmsupervisor.conditions import Code

EMPTY: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Unknown:
    """Could not be observed; ``reason`` says why, in a form fit for a person."""

    reason: str


@dataclass(frozen=True, slots=True)
class Problem:
    """One active condition: the registry's code and the particulars of this case.

    ``subject`` tells two instances of one condition apart (a PCI bus id, a path); empty when there can be only one.
    """

    code: Code
    detail: str
    subject: str = ""


# --- the machine: PCI, /proc, /sys


@dataclass(frozen=True, slots=True)
class PciFunction:
    """One NVIDIA function of /sys/bus/pci/devices."""

    pci_bus_id: str
    device_id: str  # "10de:22a3", from vendor and device
    driver: str | None  # base name of the driver link; None = no driver bound
    responds: bool | None = True  # False: the first bytes of config read ff (fell off the bus); None: could not be read


@dataclass(frozen=True, slots=True)
class LoadedModule:
    """/sys/module/nvidia."""

    initstate: str  # "coming", "live" or "going"
    version: str | None  # /sys/module/nvidia/version, else parsed from /proc/driver/nvidia/version


@dataclass(frozen=True, slots=True)
class Host:
    """One reading of everything that the kernel shows about switches, GPUs and the driver."""

    kernel_release: str
    switches: tuple[PciFunction, ...]  # vendor 10de, class 0x068000, by bus id
    gpus: tuple[PciFunction, ...]  # vendor 10de, class 0x0300xx or 0x0302xx, by bus id
    nvlink5_bridges: tuple[str, ...]  # PCI bus ids of InfiniBand devices whose VPD says SW_MNG
    module: LoadedModule | Unknown | None
    probed_switches: tuple[str, ...] | None  # /proc/driver/nvidia-nvswitch/devices; None: the directory does not exist
    majors: Mapping[str, int]  # character devices of /proc/devices whose name begins with "nvidia"
    fabric_management_minor: int | None  # DeviceFileMinor of /proc/driver/nvidia-nvlink/capabilities/fabric-mgmt
    fabric_management_mode: int | None  # DeviceFileMode of the same file
    problems: tuple[Problem, ...] = ()  # what could not be read, as conditions

    @property
    def is_module_live(self) -> bool:
        """Whether nvidia.ko finished its initialisation."""
        return isinstance(self.module, LoadedModule) and self.module.initstate == "live"


@dataclass(frozen=True, slots=True)
class ModuleMap:
    """Which module of the board each GPU is, by PCI bus id."""

    module_ids: Mapping[str, int]  # counted from 1
    contradicted: frozenset[str]  # of which contradictory things were learned


# --- the driver's own view: GET_DEVICES_V2


class DriverState(Enum):
    """The driver's watchdog on Fabric Manager, per switch (NVSWITCH_DRIVER_FABRIC_STATE)."""

    OFFLINE = 0
    STANDBY = 1
    CONFIGURED = 2
    MANAGER_TIMEOUT = 3
    MANAGER_ERROR = 4


class DeviceState(Enum):
    """The switch's own state (NVSWITCH_DEVICE_FABRIC_STATE)."""

    OFFLINE = 0
    STANDBY = 1
    CONFIGURED = 2
    BLACKLISTED = 3


@dataclass(frozen=True, slots=True)
class SwitchDevice:
    """One entry of GET_DEVICES_V2 (ioctl_nvswitch.h)."""

    minor: int
    uuid: str  # "SWX-..." upper case
    pci_bus_id: str
    driver_state: DriverState | int  # an int: a value newer than this program
    device_state: DeviceState | int
    device_reason: int  # 0 none, 1..9 as in ioctl_nvswitch.h
    physical_id: int | None  # None: 0xffffffff

    @property
    def is_usable(self) -> bool:
        """Whether the switch can be opened (a blacklisted one cannot)."""
        return self.device_state is not DeviceState.BLACKLISTED


@dataclass(frozen=True, slots=True)
class DriverView:
    """All switches that the driver has probed, by bus id."""

    devices: tuple[SwitchDevice, ...]


# --- the tree: module file, Fabric Manager, NSCQ


@dataclass(frozen=True, slots=True)
class ModuleChoice:
    """The nvidia.ko that would be loaded, and why this one."""

    path: str
    kernel_release: str  # the release it was built for
    version: str  # .modinfo version
    depends: tuple[str, ...]  # paths of modules to load first, in order (those not live yet)
    reason: str


@dataclass(frozen=True, slots=True)
class Installation:
    """What is installed in the tree (or by packages), as read without running the driver."""

    module: ModuleChoice | None
    fabric_manager_version: str | None
    nscq_version: str | None
    problems: tuple[Problem, ...]
    fingerprint: str  # changes when any of the files looked at changes
    watched_paths: tuple[str, ...]  # where a cure would show up
    is_module_checked: bool = True  # False: a module was live, so the file was not asked whether it can be loaded


# --- device nodes


@dataclass(frozen=True, slots=True)
class WantedNode:
    """A character device node that must exist."""

    path: str
    major: int
    minor: int
    mode: int
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class NodeResult:
    """What became of one wanted node: ``kept``, ``created``, ``replaced``, ``adjusted``, ``refused`` or ``failed``."""

    node: WantedNode
    outcome: str
    detail: str = ""


# --- Fabric Manager


@dataclass(frozen=True, slots=True)
class RenderedConfig:
    """The written fabricmanager.cfg."""

    path: str
    differences: tuple[str, ...]  # "KEY: stock value -> our value", in file order
    log_file: str  # LOG_FILE_NAME; "" = FM logs to stderr
    can_log_stop: bool  # LOG_MAX_ROTATE_COUNT is 0: FM stops logging at the size limit
    log_limit_bytes: int
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class ForeignFabricManager:
    """A running nv-fabricmanager that is not ours, or a stranger on FM's command port or socket."""

    pid: int | None
    description: str  # "pid 4711 (/usr/bin/nv-fabricmanager, unit nvidia-fabricmanager.service)"


# --- Fabric Manager's log


class LogKind(StrEnum):
    """What a log line is about. Wording drifts between versions; kinds do not."""

    SESSION_HEADER = "session-header"
    VERSION = "version"
    SETTING = "setting"
    CONNECTED = "connected"
    TOPOLOGY = "topology"
    SWITCH_ROW = "switch-row"
    ROUTING_STARTED = "routing-started"
    ROUTING_COMPLETED = "routing-completed"
    CONFIGURED = "configured"
    INBAND_STARTED = "inband-started"
    GPU_PROBE = "gpu-probe"
    GPU_ADDED = "gpu-added"
    GPU_ROW = "gpu-row"
    INBAND_MESSAGE = "inband-message"
    INBAND_FAILURE = "inband-failure"
    PAYLOAD = "payload"
    MULTICAST = "multicast"
    PARTITION = "partition"
    SWITCH_ERROR = "switch-error"
    STALE_HANDLE = "stale-handle"
    GPU_RESET_NEEDED = "gpu-reset-needed"
    NOTHING_TO_DO = "nothing-to-do"
    VERSION_MISMATCH = "version-mismatch"
    TOPOLOGY_MISMATCH = "topology-mismatch"
    CONFIG_INVALID = "config-invalid"
    DIRECTORY_DENIED = "directory-denied"
    ADDRESS_IN_USE = "address-in-use"
    LOADER_ERROR = "loader-error"
    OTHER_NOTICE = "other-notice"  # known and of no consequence
    BLANK = "blank"
    UNRECOGNISED = "unrecognised"


@dataclass(frozen=True, slots=True)
class LogRecord:
    """A line that matters, with the fields its kind defines (see fabric_manager.log_grammar)."""

    kind: LogKind
    level: str  # "INFO", "WARNING", "ERROR", "CRITICAL"; "" for lines without the bracket prefix
    text: str  # the message, without the bracket prefix, cut to a sane length
    fields: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SwitchErrorKey:
    """One SXid stream of one switch in Fabric Manager's log or the kernel's."""

    pci_bus_id: str
    sxid: int
    severity: str  # "fatal" or "non-fatal"; the kernel log also has "correctable" and "untagged"
    port: int | None


@dataclass(frozen=True, slots=True)
class LogBatch:
    """Everything new in one log source since the last batch. Counts are increments."""

    source: str  # "file", "stdout" or "stderr"
    lines_by_level: Mapping[str, int] = field(default_factory=dict)
    unrecognised: int = 0
    records: tuple[LogRecord, ...] = ()  # consequential records in order (not in-band traffic), bounded
    switch_errors: Mapping[SwitchErrorKey, int] = field(default_factory=dict)  # doubled lines counted once
    relay: tuple[LogRecord, ...] = ()  # lines worth relaying to the journal, bounded
    relay_suppressed: int = 0  # lines that would have been relayed beyond the bound
    file_size_bytes: int | None = None  # of the log file, when source is "file"
    problem: str = ""  # why the file cannot be followed at present; "" when it can
    is_old: bool = False  # it was written before this supervisor began, and an earlier one has told of it


# --- the kernel's log


class KernelKind(StrEnum):
    """What a line of the kernel log is about. Only lines of NVIDIA's drivers and of the module loader have a kind."""

    SWITCH_ERROR = "switch-error"  # an SXid: the line that counts
    SWITCH_ERROR_DETAIL = "switch-error-detail"  # its further lines (Severity, Data): they are not counted
    GPU_ERROR = "gpu-error"  # an Xid
    SWITCH_PROBING = "switch-probing"
    SWITCH_READY = "switch-ready"  # "using MSI": the probe is about to succeed, and the minor is known
    SWITCH_PROBE_FAILED = "switch-probe-failed"
    SWITCH_REMOVING = "switch-removing"
    SWITCH_BLACKLISTED = "switch-blacklisted"
    SWITCH_OPENED = "switch-opened"
    SWITCH_RELEASED = "switch-released"
    INTERRUPT_STORM = "interrupt-storm"
    STALE_DESCRIPTOR = "stale-descriptor"
    SWITCH_UNREADABLE = "switch-unreadable"  # "Failed to read fabric state"
    VERSION_MISMATCH = "version-mismatch"
    MODULE_LOADED = "module-loaded"
    GPU_OWNED = "gpu-owned"  # another driver has the GPU
    LOAD_FAILED = "load-failed"
    LOCKDOWN = "lockdown"
    SIGNATURE = "signature"
    MODULE_REFUSED = "module-refused"  # vermagic, symbols, blacklist
    OTHER_SWITCH_LINE = "other-switch-line"


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """A line of the kernel log that has a kind, with the fields that its kind defines (host.kernel_grammar)."""

    kind: KernelKind
    text: str
    fields: Mapping[str, str] = field(default_factory=dict)
    sequence: int = 0  # of /dev/kmsg
    seconds: float = 0.0  # since boot, on printk's clock
    is_old: bool = False  # it was there before the supervisor began to read
    details: tuple[str, ...] = ()  # further lines that belong to it


@dataclass(frozen=True, slots=True)
class KernelBatch:
    """Everything new in the kernel log since the last batch."""

    records: tuple[KernelRecord, ...] = ()  # in the order of the log, bounded by what is read at once
    lost: int = 0  # records that were overwritten before they could be read
    problem: str = ""  # why the log cannot be read; "" when it can


# --- guests


@dataclass(frozen=True, slots=True)
class Guest:
    """A running process that holds GPUs through vfio: a virtual machine (see host.guests)."""

    pid: int
    start_ticks: int  # field 22 of /proc/<pid>/stat; with the pid, this process and no other
    started: float  # the same on the supervisor's monotonic clock, in seconds
    name: str
    gpus: tuple[str, ...]  # PCI bus ids

    @property
    def identity(self) -> tuple[int, int]:
        """This process and no other, as long as the host is up."""
        return self.pid, self.start_ticks


@dataclass(frozen=True, slots=True)
class GuestReading:
    """One search for guests. ``hidden``: identities of processes that cannot be looked into and may be guests too."""

    guests: tuple[Guest, ...] = ()
    hidden: frozenset[tuple[int, int]] = frozenset()


# --- processes


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a process ended: exactly one of ``code`` and ``signal`` is set; both None = it cannot be known."""

    code: int | None = None
    signal: int | None = None

    def __str__(self) -> str:
        if self.signal is not None:
            return f"signal {self.signal}"
        return f"exit status {self.code}" if self.code is not None else "unknown exit status"


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in time on both clocks, in seconds: logic uses ``monotonic``, reports use ``wall`` (Unix time)."""

    monotonic: float
    wall: float

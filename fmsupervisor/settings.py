"""The settings: one frozen dataclass per TOML table, one field per key.

A field is the whole truth about its key: type, default, allowed values, unit (in the name) and meaning. The reader of the
TOML file, ``fmsupervisor config --default``, the documentation and the tests are made from these declarations (see
``config.py``). Paths may use ``{prefix}``, which stands for the top-level key of that name.
"""

from collections.abc import Mapping
from dataclasses import Field, dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any


class Form(StrEnum):
    """What a text looks like; the value is the description that people read.

    Every text is one line of printable characters without blanks at its ends.
    """

    TEXT = "text that is not empty"
    PATH = 'an absolute path without ".."'
    PATH_OR_EMPTY = 'an absolute path without "..", or ""'
    MODE = 'octal permissions such as "0660"'
    ADDRESS = 'HOST:PORT such as "127.0.0.1:9752" or "[::]:9752"'
    PARAMETER = "NAME=VALUE; a value with blanks in double quotes"


def setting(
    default: Any,
    meaning: str,
    *,
    allowed: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    packaged: Any = None,
    form: Form = Form.TEXT,
    maximum_bytes: int | None = None,
) -> Any:
    """Declare one key.

    ``allowed``, ``form`` and ``maximum_bytes`` are for texts and for the items of lists, ``minimum`` and ``maximum`` for
    numbers. ``packaged`` is the default when ``layout = "packaged"``, where that differs.
    """
    metadata = {
        "meaning": meaning,
        "allowed": allowed,
        "minimum": minimum,
        "maximum": maximum,
        "packaged": packaged,
        "form": form,
        "maximum_bytes": maximum_bytes,
    }
    if isinstance(default, dict):  # a read-only mapping has no hash of its own; equal settings still hash alike
        return field(default_factory=lambda: MappingProxyType(dict(default)), hash=False, metadata=metadata)
    return field(default=default, metadata=metadata)


def meaning(declared: Field[Any]) -> str:
    """The sentence that explains a key."""
    return str(declared.metadata["meaning"])


@dataclass(frozen=True, slots=True)
class ModuleSettings:
    """``[module]``: nvidia.ko and how it is loaded."""

    load: bool = setting(True, "Load nvidia.ko when it is not loaded. false: wait until something else loads it.")
    search_path: str = setting(
        "{prefix}/usr/lib/modules",
        "Directory with one subdirectory per kernel release, searched for nvidia.ko, .ko.zst, .ko.xz and .ko.gz.",
        packaged="/lib/modules",
        form=Form.PATH,
    )
    parameters: tuple[str, ...] = setting(
        (),
        'Module parameters, for example "NVreg_EnableGpuFirmware=1".',
        form=Form.PARAMETER,
    )
    allow_newer_build: bool = setting(
        False, "Also accept a module that was built for a newer kernel than the running one."
    )
    load_timeout_seconds: float = setting(
        600.0, "After this long a load is reported as slow. It is never killed.", minimum=1
    )
    gpu_guard: str = setting(
        "refuse",
        "What to do when loading nvidia.ko would take a GPU that has no driver: refuse to load, load with NVreg_RegisterPCIDriver=0, or load anyway.",
        allowed=("refuse", "no-register", "off"),
    )


@dataclass(frozen=True, slots=True)
class SwitchSettings:
    """``[switches]``: how many NVSwitches there must be and what to do when they do not come."""

    expected: int | str = setting(
        "auto",
        'How many NVSwitches to wait for. "auto": as many as have been seen on the PCI bus.',
        allowed=("auto",),
        minimum=1,
        maximum=64,
    )
    deadline_seconds: float = setting(
        300.0, "How long to wait for all expected switches before when_missing applies.", minimum=0
    )
    when_missing: str = setting(
        "wait",
        "After the deadline: go on waiting, start Fabric Manager with the switches that are there, or fail.",
        allowed=("wait", "start-anyway", "fail"),
    )
    gpus_belong_to_guests: bool = setting(
        True, "GPUs are for guests: one that is bound to the nvidia driver is reported (FMS-206)."
    )


@dataclass(frozen=True, slots=True)
class DeviceNodeSettings:
    """``[device_nodes]``: the character devices below /dev."""

    manage: tuple[str, ...] = setting(
        ("nvidia-nvswitchctl", "nvidia-nvswitch", "nvidia-nvlink", "nvidiactl", "fabric-mgmt"),
        "Which nodes to make and keep right. An empty list leaves /dev alone.",
        allowed=("nvidia-nvswitchctl", "nvidia-nvswitch", "nvidia-nvlink", "nvidiactl", "fabric-mgmt"),
    )
    mode: str = setting(
        "0666",
        "Permissions of the nodes, octal. A setuid nvidia-modprobe would set nvswitch nodes back to 0666.",
        form=Form.MODE,
    )
    owner: str = setting("root", "Owner of the nodes, name or number.")
    group: str = setting("root", "Group of the nodes, name or number.")


@dataclass(frozen=True, slots=True)
class FabricManagerSettings:
    """``[fabric_manager]``: the program, its configuration and its deadlines."""

    binary: str = setting(
        "{prefix}/usr/bin/nv-fabricmanager",
        "The program.",
        packaged="/usr/bin/nv-fabricmanager",
        form=Form.PATH,
    )
    library_paths: tuple[str, ...] = setting(
        ("{prefix}/usr/lib64", "{prefix}/usr/lib", "{prefix}/usr/lib/x86_64-linux-gnu"),
        "Directories searched first for libnvidia-nscq and other libraries; LD_LIBRARY_PATH of Fabric Manager, and of nothing else.",
        packaged=(),
        form=Form.PATH,
    )
    stock_config: str = setting(
        "{prefix}/usr/share/nvidia/nvswitch/fabricmanager.cfg",
        "The configuration file that came with Fabric Manager; it is read and never changed.",
        packaged="/usr/share/nvidia/nvswitch/fabricmanager.cfg",
        form=Form.PATH,
    )
    config: str = setting(
        "{prefix}/fm.cfg",
        "Where the configuration that Fabric Manager gets is written.",
        packaged="/run/fmsupervisor/fm.cfg",
        form=Form.PATH,
    )
    topology_path: str = setting(
        "{prefix}/usr/share/nvidia/nvswitch",
        "TOPOLOGY_FILE_PATH: directory of the topology files.",
        packaged="/usr/share/nvidia/nvswitch",
        form=Form.PATH,
        maximum_bytes=256,
    )
    log_file: str = setting(
        "{prefix}/fabricmanager.log",
        'LOG_FILE_NAME; "" makes Fabric Manager log to its standard error.',
        packaged="/var/log/fabricmanager.log",
        form=Form.PATH_OR_EMPTY,
        maximum_bytes=256,
    )
    state_file: str = setting(
        "{prefix}/fabricmanager.state",
        "STATE_FILE_NAME, used in fabric modes 1 and 2.",
        packaged="/var/lib/nvidia-fabricmanager/fabricmanager.state",
        form=Form.PATH,
        maximum_bytes=256,
    )
    database_path: str = setting(
        "{prefix}/database",
        "DATABASE_PATH, for the versions that know it (535 and later).",
        packaged="/var/lib/nvidia-fabricmanager",
        form=Form.PATH,
    )
    run_directory: str = setting(
        "/run/nvidia-fabricmanager",
        "Directory made before each start; Fabric Manager needs it.",
        form=Form.PATH,
    )
    fabric_mode: int = setting(
        0, "FABRIC_MODE: 0 bare metal or full pass-through, 1 shared NVSwitch, 2 vGPU.", minimum=0, maximum=2
    )
    resiliency_restart: bool = setting(
        False,
        "In fabric modes 1 and 2: restart with --restart when the state file is valid, so that activated partitions can be told again within 60 s.",
    )
    options: Mapping[str, str] = setting(
        {},
        "Any other KEY = VALUE of fabricmanager.cfg; keys that this Fabric Manager version does not know are refused.",
    )
    version_timeout_seconds: float = setting(10.0, "How long nv-fabricmanager --version may take.", minimum=0.1)
    start_timeout_seconds: float = setting(
        180.0,
        "How long Fabric Manager may take until the fabric is configured (up to 600 s have been seen in confidential guests).",
        minimum=1,
    )
    stop_timeout_seconds: float = setting(
        10.0, "How long Fabric Manager may take to end after SIGTERM before it is killed.", minimum=0.1
    )
    hang_seconds: float = setting(
        30.0, "For how long the driver must say MANAGER_TIMEOUT, with the process alive, to call it a hang.", minimum=0
    )
    hang_policy: str = setting(
        "report",
        "A hang is reported only, or Fabric Manager is restarted (which breaks NVLS in running guests).",
        allowed=("report", "restart"),
    )


@dataclass(frozen=True, slots=True)
class RestartSettings:
    """``[restart]``: after an unexpected death of Fabric Manager."""

    policy: str = setting(
        "always",
        "Whether Fabric Manager is restarted after an unexpected death: always; only when no guest holds a GPU (looked for every 15 s, FMS-518 names them); or never.",
        allowed=("always", "when-no-guests", "never"),
    )
    initial_delay_seconds: float = setting(1.0, "The first pause; it doubles with each death in a row.", minimum=0)
    maximum_delay_seconds: float = setting(60.0, "The longest pause.", minimum=0)
    jitter_seconds: float = setting(1.0, "A random addition to each pause, up to this much.", minimum=0)
    reset_after_seconds: float = setting(
        300.0, "After this long in configured, the next death counts as the first again.", minimum=0
    )
    crash_loop_count: int = setting(5, "That many deaths in a row are reported as a crash loop (FMS-511).", minimum=1)


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """``[service]``: what systemd and other programs are told."""

    ready_when: str = setting(
        "decided",
        "When systemd is told READY: once the outcome is known, good or bad; only when the fabric is configured; or at once.",
        allowed=("decided", "configured", "started"),
    )
    state_directory: str = setting(
        "/run/fmsupervisor",
        "Where status.json and the lock are kept; volatile, readable by all.",
        form=Form.PATH,
    )


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """``[metrics]``: the HTTP server for Prometheus."""

    enabled: bool = setting(True, "Serve /metrics, /healthz and /readyz.")
    listen: str = setting(
        "127.0.0.1:9752",
        'Address and port. "[::]:9752" listens on all addresses.',
        form=Form.ADDRESS,
    )
    web_config: str = setting(
        "",
        "A Prometheus exporter-toolkit web.yml with TLS and basic auth; re-read when it changes. Empty: plain HTTP.",
        form=Form.PATH_OR_EMPTY,
    )


@dataclass(frozen=True, slots=True)
class LoggingSettings:
    """``[logging]``: this program's log."""

    level: str = setting("info", "Least severe level that is written.", allowed=("debug", "info", "warning", "error"))
    format: str = setting(
        "auto",
        'Where and how to log. "auto": journald when started by systemd, key=value on a terminal, JSON otherwise.',
        allowed=("auto", "journal", "console", "json"),
    )
    relay_level: str = setting(
        "info",
        "Least severe level of Fabric Manager's own lines that is relayed.",
        allowed=("info", "warning", "error", "critical", "none"),
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """The whole file."""

    layout: str = setting(
        "tree",
        'Where the driver and Fabric Manager are: "tree", extracted below prefix; "packaged", installed by distribution packages.',
        allowed=("tree", "packaged"),
    )
    prefix: str = setting(
        "/usr/local/nvidia",
        "Directory that the driver and Fabric Manager packages were extracted to.",
        form=Form.PATH,
    )
    module: ModuleSettings = field(default_factory=ModuleSettings)
    switches: SwitchSettings = field(default_factory=SwitchSettings)
    device_nodes: DeviceNodeSettings = field(default_factory=DeviceNodeSettings)
    fabric_manager: FabricManagerSettings = field(default_factory=FabricManagerSettings)
    restart: RestartSettings = field(default_factory=RestartSettings)
    service: ServiceSettings = field(default_factory=ServiceSettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    logging: LoggingSettings = field(default_factory=LoggingSettings)

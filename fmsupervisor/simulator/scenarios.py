"""The scenarios: a host, a Fabric Manager, what happens to them, and what the daemon must make of it.

Data only; ``world.py`` builds the host and plays the timeline. All times are simulated seconds; the daemon's clock runs
as fast as the simulation.
"""

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fmsupervisor.conditions import Code
from fmsupervisor.simulator import elf_files, stock_files
from fmsupervisor.simulator.expectation import Expectation
from fmsupervisor.simulator.guests import SimulatedGuest
from fmsupervisor.simulator.hardware import GPUS, SWITCHES
from fmsupervisor.simulator.kernel import LoadFault
from fmsupervisor.simulator.tree import Behaviour, TreeOptions

# Real seconds.
_SHORTEST_SECONDS = {"start_timeout_seconds": 5.0, "version_timeout_seconds": 10.0, "stop_timeout_seconds": 0.5}


@dataclass(frozen=True, slots=True)
class Step:
    """Something happens: ``seconds`` after the start of the run, or after Fabric Manager has been configured first.

    ``action`` is a method of ``SimulatedKernel``, or one of those in ``world.py``.
    """

    seconds: float
    action: str
    arguments: tuple[Any, ...] = ()
    after: str = "configured"  # or "start"


@dataclass(frozen=True, slots=True)
class Scenario:
    """One row of the table."""

    name: str
    summary: str
    expectation: Expectation
    tree: TreeOptions = field(default_factory=TreeOptions)
    settings: Mapping[str, Any] = field(default_factory=dict)  # nested as in the TOML file
    load_fault: LoadFault | None = None
    preloaded_version: str | None = None  # nvidia.ko of this version is loaded before the daemon starts
    failing_probes: frozenset[str] = frozenset()
    timeline: tuple[Step, ...] = ()

    def settings_at(self, speed: float) -> dict[str, Any]:
        """The settings for a run at this speed, in simulated seconds."""
        return _scaled(_merged(_COMMON_SETTINGS, self.settings), speed)


_COMMON_SETTINGS: Mapping[str, Any] = {
    "switches": {"deadline_seconds": 60.0},
    "fabric_manager": {
        "start_timeout_seconds": 180.0,
        "stop_timeout_seconds": 10.0,
        "hang_seconds": 30.0,
    },
    "restart": {
        "initial_delay_seconds": 1.0,
        "maximum_delay_seconds": 60.0,
        "jitter_seconds": 0.0,
        "reset_after_seconds": 300.0,
    },
}


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        below = result.get(key)
        is_table = isinstance(value, Mapping) and isinstance(below, Mapping)
        result[key] = _merged(below, value) if is_table and below is not None else value
    return result


def _scaled(settings: Mapping[str, Any], speed: float) -> dict[str, Any]:
    """Deadlines that a real process must meet do not shrink below what a slow machine needs."""
    result: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            result[key] = _scaled(value, speed)
        elif key in _SHORTEST_SECONDS:
            result[key] = max(value, _SHORTEST_SECONDS[key] * speed)
        else:
            result[key] = value
    return result


SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
_PLAIN = TreeOptions()
_SYMVERS = {f"/usr/lib/modules/{_PLAIN.kernel_release}/symvers.gz": stock_files.symvers(stock_files.KERNEL_SYMBOLS)}
_ENFORCED = {"/sys/module/module/parameters/sig_enforce": b"Y\n"}
_CUT_SIGNATURE = elf_files.SIGNATURE[100:]


def _refused(
    name: str,
    number: int,
    code: Code,
    *lines: str,
    states: tuple[str, ...] = ("failed",),
    tree: TreeOptions = _PLAIN,
) -> Scenario:
    """nvidia.ko is refused with an errno (and the kernel's lines, kernel-side wording of Linux 6.12).

    ``tree``: shows the cause where a real host would show it, so that ``check`` foresees the refusal.
    """
    return Scenario(
        name=f"module-refused-{name}",
        summary=f"The kernel refuses nvidia.ko with {errno.errorcode[number]}: {lines[0] if lines else 'no line'}",
        load_fault=LoadFault(number, lines),
        expectation=Expectation(states, active=(code,), most_starts=0),
        tree=tree,
    )


_OWNERSHIP = (
    "NVRM: GPU 0000:91:00.0 is already bound to vfio-pci.",
    "NVRM: The NVIDIA probe routine was not called for 8 device(s).",
    "NVRM: No NVIDIA devices probed.",
)

_MODULE_REFUSALS = (
    _refused(
        "enoexec-vermagic",
        errno.ENOEXEC,
        Code.MODULE_VERMAGIC,
        "nvidia: version magic '6.12.0-160000.9-default SMP mod_unload modversions ' should be "
        "'6.12.0-160000.28-default SMP preempt mod_unload modversions '",
        # With a module of the kernel to compare with, the daemon would not even ask the kernel.
        tree=TreeOptions(module_flags="SMP mod_unload modversions", has_kernel_modules=False),
    ),
    _refused(
        "enoexec-modversions",
        errno.ENOEXEC,
        Code.MODULE_SYMBOL_VERSIONS,
        "nvidia: disagrees about version of symbol module_layout",
        tree=TreeOptions(module_symbols={"module_layout": 0x0BADC0DE}),
    ),
    _refused("enoexec-damaged", errno.ENOEXEC, Code.MODULE_DAMAGED),
    _refused(
        "einval",
        errno.EINVAL,
        Code.MODULE_SYMBOL_VERSIONS,
        "nvidia: disagrees about version of symbol pci_enable_device",
        "nvidia: Unknown symbol pci_enable_device (err -22)",
        tree=TreeOptions(module_symbols={"pci_enable_device": 0x0BADC0DE}, files=_SYMVERS),
    ),
    _refused(
        "enoent",
        errno.ENOENT,
        Code.MODULE_UNKNOWN_SYMBOL,
        "nvidia: Unknown symbol drm_gem_object_free (err -2)",
        tree=TreeOptions(module_symbols={"drm_gem_object_free": 0x2C3D4E5F}, files=_SYMVERS),
    ),
    _refused(
        "ekeyrejected",
        errno.EKEYREJECTED,
        Code.MODULE_SIGNATURE_REJECTED,
        "Loading of module with unavailable key is rejected",
        tree=TreeOptions(files=_ENFORCED),
    ),
    _refused(
        "ekeyrejected-unsigned",
        errno.EKEYREJECTED,
        Code.MODULE_SIGNATURE_REJECTED,
        "Loading of unsigned module is rejected",
        tree=TreeOptions(module_signature=None, files=_ENFORCED),
    ),
    _refused(
        "eperm-lockdown",
        errno.EPERM,
        Code.MODULE_LOCKDOWN,
        "Lockdown: fmsupervisor: unsigned module loading is restricted; see man kernel_lockdown.7",
        tree=TreeOptions(
            module_signature=None,
            files={"/sys/kernel/security/lockdown": b"none [integrity] confidentiality\n", SECURE_BOOT: b"\6\0\0\0\1"},
        ),
    ),
    _refused(
        "eperm",
        errno.EPERM,
        Code.MODULE_LOADING_FORBIDDEN,
        tree=TreeOptions(files={"/proc/sys/kernel/modules_disabled": b"1\n"}),
    ),
    _refused(
        "eperm-blacklist",
        errno.EPERM,
        Code.MODULE_BLACKLISTED,
        "Module nvidia is blacklisted",
        tree=TreeOptions(files={"/proc/cmdline": b"root=/dev/sda2 module_blacklist=nouveau,nvidia\n"}),
    ),
    _refused("enodev", errno.ENODEV, Code.MODULE_NO_DEVICE, "NVRM: No NVIDIA GPU found."),
    _refused("enodev-owned", errno.ENODEV, Code.MODULE_NO_DEVICE, *_OWNERSHIP),
    _refused(
        "eio",
        errno.EIO,
        Code.MODULE_INIT_FAILED,
        "NVRM: rm_init_rm() failed!",
        "NVRM: failed to initialize module.",
    ),
    _refused("ebadmsg", errno.EBADMSG, Code.MODULE_DAMAGED, tree=TreeOptions(module_signature=_CUT_SIGNATURE)),
    _refused("enodata", errno.ENODATA, Code.MODULE_DAMAGED),
    _refused("ebusy", errno.EBUSY, Code.MODULE_LOAD_BUSY, states=("waiting-for-module", "backoff", "failed")),
    _refused("enomem", errno.ENOMEM, Code.MODULE_LOAD_BUSY, states=("waiting-for-module", "backoff", "failed")),
)

_CONFIGURED = Expectation(("configured",), starts=1, gpus_registered=len(GPUS), switches_usable=len(SWITCHES))
_LAST = SWITCHES[3]


_VM1, _VM2 = "default_vm1", "default_vm2"
_GUESTS = (Step(3.0, "start_guest", (_VM1, GPUS[:4])), Step(4.0, "start_guest", (_VM2, GPUS[4:])))
_IN_GUESTS = TreeOptions(behaviour=Behaviour(registers_gpus=False))  # each asks when its guest starts
_SHARED: Mapping[str, Any] = {"fabric_manager": {"fabric_mode": 1, "resiliency_restart": True}}


def _failed(*codes: Code, most_starts: int | None = None, starts: int | None = None, **exits: int) -> Expectation:
    return Expectation(("failed",), active=codes, starts=starts, most_starts=most_starts, exits=exits)


def _tell(seconds: float, command: str) -> Step:
    """A command to the simulated nv-fabricmanager."""
    return Step(seconds, "tell_fabric_manager", (command,))


_START_UP = (
    Scenario("healthy", "Four switches, eight GPUs in guests, everything as it should be.", _CONFIGURED),
    Scenario(
        "no-switch",
        "A machine without NVSwitches: Fabric Manager has no business there.",
        Expectation(("not-applicable",), most_starts=0),
        TreeOptions(switches=()),
    ),
    Scenario(
        "nvlink5",
        "An NVLink 5 board (HGX B200): needs NVLSM.",
        Expectation(("failed",), active=(Code.NVLINK5_UNSUPPORTED,), most_starts=0),
        TreeOptions(switches=(), nvlink5_bridge="0000:05:00.0"),
    ),
    Scenario(
        "switch-missing",
        "One of four switches is not on the bus; the policy is to wait.",
        Expectation(("waiting-for-switches",), active=(Code.SWITCH_MISSING,), most_starts=0),
        TreeOptions(switches=SWITCHES[:3]),
        {"switches": {"expected": 4, "deadline_seconds": 10.0}},
    ),
    Scenario(
        "switch-not-probed",
        "All switches are on the bus, but the driver's probe of one fails.",
        Expectation(("waiting-for-switches",), active=(Code.SWITCH_NOT_PROBED,), most_starts=0),
        settings={"switches": {"deadline_seconds": 10.0}},
        failing_probes=frozenset({_LAST}),
    ),
    Scenario(
        "late-switches",
        "Two switches appear on the bus some seconds after the driver.",
        Expectation(
            ("configured",),
            inactive=(Code.SWITCH_MISSING, Code.STARTED_WITH_FEWER_SWITCHES),
            most_starts=1,
            gpus_registered=len(GPUS),
            switches_usable=len(SWITCHES),
        ),
        TreeOptions(switches=SWITCHES[:2]),
        {"switches": {"expected": 4}},
        timeline=(
            Step(20.0, "add_switch", (SWITCHES[2],), after="start"),
            Step(30.0, "add_switch", (SWITCHES[3],), after="start"),
        ),
    ),
    Scenario(
        "start-anyway",
        "One switch is missing, the policy is to start anyway, and this Fabric Manager accepts three.",
        Expectation(
            ("configured", "degraded"), active=(Code.SWITCH_MISSING, Code.STARTED_WITH_FEWER_SWITCHES), starts=1
        ),
        TreeOptions(switches=SWITCHES[:3], behaviour=Behaviour(required_switches=3)),
        {"switches": {"expected": 4, "deadline_seconds": 10.0, "when_missing": "start-anyway"}},
    ),
    Scenario(
        "topology-mismatch",
        "Three of four switches are seen and three are expected: Fabric Manager knows no such board.",
        _failed(Code.TOPOLOGY_MISMATCH, starts=1, most_starts=1, terminal=1),
        TreeOptions(switches=SWITCHES[:3]),
    ),
    Scenario(
        "module-other-flags",
        "nvidia.ko was built for a kernel without preemption; a module of the kernel shows that before the load.",
        _failed(Code.MODULE_VERMAGIC, most_starts=0),
        TreeOptions(module_flags="SMP mod_unload modversions"),
    ),
    Scenario(
        "version-mismatch",
        "Fabric Manager of another version than the driver.",
        _failed(Code.VERSION_MISMATCH, most_starts=0),
        TreeOptions(fabric_manager_version="580.159.03"),
    ),
    Scenario(
        "reload-needed",
        "The tree was upgraded while the old driver is still loaded.",
        _failed(Code.RELOAD_NEEDED, most_starts=0),
        preloaded_version="580.105.08",
    ),
    Scenario(
        "library-missing",
        "libnvidia-nscq needs a library that is neither in the tree nor on the host.",
        _failed(Code.LIBRARY_MISSING, most_starts=0),
        TreeOptions(nscq_needs=("libc.so.6", "libnvsdm.so.1")),
    ),
    Scenario(
        "loader-error",
        "The dynamic loader refuses Fabric Manager at its start.",
        _failed(Code.LOADER_ERROR, starts=1, most_starts=1, terminal=1),
        TreeOptions(behaviour=Behaviour("loader-error")),
    ),
    Scenario(
        "insecure-binary",
        "nv-fabricmanager can be changed by everybody.",
        _failed(Code.INSECURE_FILE, most_starts=0),
        TreeOptions(is_binary_writable=True),
    ),
    Scenario(
        "node-conflict",
        "A regular file stands where a device node must be.",
        _failed(Code.NODE_CONFLICT, most_starts=0),
        TreeOptions(node_conflict="/dev/nvidia-nvswitchctl"),
    ),
    Scenario(
        "gpu-would-be-taken",
        "A GPU has no driver yet: loading nvidia.ko would take it.",
        _failed(Code.GPU_WOULD_BE_TAKEN, most_starts=0),
        TreeOptions(gpus_without_driver=(GPUS[3],)),
    ),
    Scenario(
        "no-register",
        'A GPU has no driver and gpu_guard is "no-register": the module is loaded without taking it.',
        Expectation(("configured",), inactive=(Code.GPU_TAKEN,), starts=1),
        TreeOptions(gpus_without_driver=(GPUS[3],)),
        {"module": {"gpu_guard": "no-register"}},
    ),
    Scenario(
        "bad-config",
        "Fabric Manager rejects its configuration: one line on standard error, status 1.",
        _failed(Code.CONFIG_REJECTED, starts=1, most_starts=1, terminal=1),
        TreeOptions(behaviour=Behaviour("bad-config")),
    ),
    Scenario(
        "bad-config-exit-zero",
        "The same with exit status 0, as has been seen.",
        _failed(Code.CONFIG_REJECTED, starts=1, most_starts=1, terminal=1),
        TreeOptions(behaviour=Behaviour("bad-config-exit-zero")),
    ),
    Scenario(
        "nothing-to-do",
        "Fabric Manager says that there is no switch, although PCI shows four.",
        _failed(Code.NOTHING_TO_DO, starts=1, most_starts=1, terminal=1),
        TreeOptions(behaviour=Behaviour("nothing-to-do")),
    ),
    Scenario(
        "foreign-fm",
        "The vendor's unit has started a Fabric Manager already.",
        _failed(Code.FOREIGN_FABRIC_MANAGER, most_starts=0),
        TreeOptions(foreign_fabric_manager_pid=4711),
    ),
    Scenario(
        "forks-away",
        "Fabric Manager daemonises in spite of DAEMONIZE=0.",
        Expectation(("backoff", "failed", "starting", "configuring"), active=(Code.FORKED_AWAY,), starts=1),
        TreeOptions(behaviour=Behaviour("forks-away")),
    ),
    Scenario(
        "slow",
        "Fabric Manager takes 600 s, as in confidential guests; the deadline is 900 s.",
        Expectation(("configured",), inactive=(Code.START_TIMEOUT,), most_starts=1),
        TreeOptions(behaviour=Behaviour(configure_seconds=600.0)),
        {"fabric_manager": {"start_timeout_seconds": 900.0}},
    ),
    Scenario(
        "start-timeout",
        "Fabric Manager lives but never configures the fabric.",
        Expectation(("configuring", "degraded", "failed", "backoff"), active=(Code.START_TIMEOUT,), starts=1),
        TreeOptions(behaviour=Behaviour("never-configures")),
        {"restart": {"initial_delay_seconds": 600.0, "maximum_delay_seconds": 600.0}},
    ),
    Scenario(
        "without-success-line",
        "A version whose success line nobody knows: the driver's word must do.",
        Expectation(("configured",), active=(Code.SUCCESS_LINE_UNSEEN,), starts=1),
        TreeOptions(behaviour=Behaviour("without-success-line")),
    ),
    Scenario(
        "older-fm-535",
        "Driver and Fabric Manager 535: older wording, no UUID in /proc.",
        _CONFIGURED,
        TreeOptions(module_version="535.161.08", fabric_manager_version="535.161.08", nscq_version="535.161.08"),
    ),
    Scenario(
        "newer-fm-595",
        "Driver and Fabric Manager 595: newer wording and keys.",
        _CONFIGURED,
        TreeOptions(module_version="595.71.05", fabric_manager_version="595.71.05", nscq_version="595.71.05"),
    ),
)

_RUN_TIME = (
    Scenario(
        "switch-lost",
        "A switch is hot-removed while the fabric is in use.",
        Expectation(("degraded",), active=(Code.SWITCH_LOST,), most_starts=1, switches_usable=3),
        timeline=(Step(12.0, "remove_switch", (_LAST,)),),
    ),
    Scenario(
        "switch-returned",
        "A switch goes and comes back: it has no routes until Fabric Manager is restarted.",
        Expectation(("degraded",), active=(Code.SWITCH_UNCONFIGURED,), inactive=(Code.SWITCH_LOST,), most_starts=1),
        timeline=(Step(12.0, "remove_switch", (_LAST,)), Step(15.0, "return_switch", (_LAST,))),
    ),
    Scenario(
        "switch-silent",
        "A switch falls off the bus without any event.",
        Expectation(("degraded",), active=(Code.SWITCH_NOT_RESPONDING,), most_starts=1),
        timeline=(Step(12.0, "surprise_loss", (_LAST,)),),
    ),
    Scenario(
        "crash-after-configured",
        "Fabric Manager dies once after GPUs have registered, and is started again.",
        Expectation(
            ("configured",),
            active=(Code.GUEST_RESTART_REQUIRED,),
            inactive=(Code.REGISTRATIONS_LOST,),
            starts=2,
            exits={"unexpected": 1},
        ),
        _IN_GUESTS,
        timeline=(*_GUESTS, _tell(12.0, "crash 9")),
    ),
    Scenario(
        "crash-on-bare-metal",
        "The same, with the GPUs in the hands of the host.",
        Expectation(
            ("configured",),
            active=(Code.REGISTRATIONS_LOST,),
            inactive=(Code.GUEST_RESTART_REQUIRED,),
            starts=2,
            exits={"unexpected": 1},
        ),
        TreeOptions(gpus_without_driver=GPUS),
        {"module": {"gpu_guard": "off"}, "switches": {"gpus_belong_to_guests": False}},
        timeline=(*(_tell(3.0, f"register {gpu}") for gpu in GPUS), _tell(12.0, "crash 9")),
    ),
    Scenario(
        "guest-before-fabric",
        "One guest has been running since before the fabric was configured: its GPUs wait for an answer for ever.",
        Expectation(
            ("configured",),
            active=(Code.GUEST_RESTART_REQUIRED,),
            most_starts=1,
            gpus_registered=4,
        ),
        TreeOptions(guests=(SimulatedGuest(_VM1, GPUS[:4], age_seconds=3600.0),)),
    ),
    Scenario(
        "guest-power-cycled",
        "The same; the guest is power-cycled, which cures it.",
        Expectation(
            ("configured",),
            inactive=(Code.GUEST_RESTART_REQUIRED,),
            most_starts=1,
            gpus_registered=len(GPUS),
        ),
        TreeOptions(guests=(SimulatedGuest(_VM1, GPUS[:4], age_seconds=3600.0),)),
        timeline=(Step(20.0, "end_guest", (_VM1,)), Step(24.0, "start_guest", (_VM1, GPUS[:4]))),
    ),
    Scenario(
        "restart-when-no-guests",
        "Fabric Manager dies under guests; the policy is to restart it when no guest holds a GPU any more.",
        Expectation(
            ("configured",),
            inactive=(Code.GUEST_RESTART_REQUIRED, Code.REGISTRATIONS_LOST, Code.RESTART_WITHHELD),
            starts=2,
            exits={"unexpected": 1},
            passes_through=("failed",),
        ),
        _IN_GUESTS,
        {"restart": {"policy": "when-no-guests"}},
        timeline=(
            *_GUESTS,
            _tell(12.0, "crash 9"),
            Step(40.0, "end_guest", (_VM1,)),
            Step(60.0, "end_guest", (_VM2,)),
        ),
    ),
    Scenario(
        "resiliency",
        "In shared NVSwitch mode Fabric Manager is restarted with --restart and is told the active partitions.",
        Expectation(
            ("configured",), inactive=(Code.PARTITIONS_AWAITED,), starts=2, most_starts=2, exits={"unexpected": 1}
        ),
        settings=_SHARED,
        timeline=(_tell(12.0, "activate 3"), _tell(13.0, "crash 9"), _tell(30.0, "activate 3")),
    ),
    Scenario(
        "resiliency-untold",
        "The same; nobody tells the partitions, so it ends after 60 s.",
        Expectation(("backoff",), exits={"unexpected": 2}, starts=2),
        settings={**_SHARED, "restart": {"initial_delay_seconds": 60.0, "maximum_delay_seconds": 600.0}},
        timeline=(_tell(12.0, "crash 9"),),
    ),
    Scenario(
        "crash-loop",
        "Fabric Manager dies at every start.",
        Expectation(("backoff",), active=(Code.CRASH_LOOP,), starts=5, exits={"unexpected": 5}),
        TreeOptions(behaviour=Behaviour("dies-at-start", exit_after_seconds=0.1, exit_code=-6)),
        {"restart": {"initial_delay_seconds": 4.0, "maximum_delay_seconds": 600.0}},
    ),
    Scenario(
        "hang",
        "Fabric Manager lives, but its heartbeat to the driver stops; the policy is to report.",
        Expectation(("degraded",), active=(Code.FABRIC_MANAGER_HUNG,), most_starts=1),
        timeline=(_tell(12.0, "hang"),),
    ),
    Scenario(
        "hang-restart",
        "The same with the policy to restart.",
        Expectation(("configured", "degraded"), starts=2, inactive=(Code.FABRIC_MANAGER_HUNG,)),
        tree=_IN_GUESTS,
        settings={"fabric_manager": {"hang_policy": "restart"}},
        timeline=(*_GUESTS, _tell(12.0, "hang")),
    ),
    Scenario(
        "ignores-sigterm",
        "Fabric Manager does not end on SIGTERM: it hangs, is restarted by policy and must be killed for that.",
        Expectation(("configured", "degraded"), starts=2, last_signal=9),
        TreeOptions(behaviour=Behaviour("ignores-sigterm", registers_gpus=False)),
        {"fabric_manager": {"hang_policy": "restart"}},
        timeline=(*_GUESTS, _tell(12.0, "hang")),
    ),
    Scenario(
        "manager-error",
        "The driver reports MANAGER_ERROR for a switch.",
        Expectation(("degraded",), active=(Code.MANAGER_ERROR,), most_starts=1),
        timeline=(Step(12.0, "manager_error", (_LAST,)),),
    ),
    Scenario(
        "sxid-burst",
        "Non-fatal errors on several ports, each line doubled by Fabric Manager.",
        Expectation(
            ("configured",), inactive=(Code.SXID_FATAL,), most_starts=1, gpus_registered=8, switch_errors={12028: 9}
        ),
        timeline=tuple(
            Step(12.0, "switch_error", ("non-fatal", 12028, switch, port))
            for switch, port in (
                *((SWITCHES[1], port) for port in (35, 42)),
                *((SWITCHES[2], port) for port in (0, 1, 16)),
                *((SWITCHES[3], port) for port in (36, 42, 50, 61)),
            )
        ),
    ),
    Scenario(
        "sxid-fatal",
        "A fatal link error.",
        Expectation(("degraded",), active=(Code.SXID_FATAL,), most_starts=1, switch_errors={20034: 1}),
        timeline=(Step(12.0, "switch_error", ("fatal", 20034, _LAST, 33)),),
    ),
    Scenario(
        "sxid-kernel-only",
        "A fatal error while Fabric Manager is down: only the kernel log tells it.",
        Expectation(("failed",), active=(Code.SXID_FATAL, Code.RESTART_WITHHELD), switch_errors={20034: 1}),
        settings={"restart": {"policy": "never"}},
        timeline=(_tell(12.0, "crash 9"), Step(14.0, "print_switch_error", ("fatal", 20034, _LAST, 33))),
    ),
    Scenario(
        "kernel-log-overrun",
        "The kernel writes so much that some of it is lost unread; a fatal error after that is still seen.",
        Expectation(
            ("degraded",),
            active=(Code.KERNEL_LOG_OVERRUN, Code.SXID_FATAL),
            most_starts=1,
            switch_errors={20034: 1},
        ),
        timeline=(
            Step(12.0, "print_kernel_line", ("eth0: a packet was dropped", 5000)),
            Step(13.0, "switch_error", ("fatal", 20034, _LAST, 33)),
        ),
    ),
    Scenario(
        "interrupt-storm",
        "The driver switches off the interrupts of a switch.",
        Expectation(("degraded",), active=(Code.INTERRUPT_STORM,), most_starts=1),
        timeline=(Step(12.0, "print_kernel_line", ("nvidia-nvswitch3: Interrupts disabled to avoid a storm",)),),
    ),
    Scenario(
        "stale-handles",
        "A guest uses a registration of an earlier Fabric Manager session.",
        Expectation(("degraded",), active=(Code.STALE_HANDLES,), most_starts=1),
        timeline=(_tell(12.0, "stale-handle"),),
    ),
    Scenario(
        "reset-needed",
        "Fabric Manager asks for a reset of all GPUs.",
        Expectation(("degraded",), active=(Code.GPU_RESET_NEEDED,), most_starts=1),
        timeline=(_tell(12.0, "reset-needed"),),
    ),
    Scenario(
        "log-rotated",
        "Fabric Manager rotates its log under load; an error after that must still be seen.",
        Expectation(("degraded",), active=(Code.SXID_FATAL,), most_starts=1, switch_errors={20034: 1}),
        settings={"fabric_manager": {"options": {"LOG_FILE_MAX_SIZE": "1"}}},
        timeline=(_tell(12.0, "traffic 1500"), _tell(13.0, f"sxid fatal 20034 {_LAST} 33")),
    ),
    Scenario(
        "log-truncated",
        "Somebody truncates the log; an error after that must still be seen.",
        Expectation(("degraded",), active=(Code.SXID_FATAL,), most_starts=1, switch_errors={20034: 1}),
        timeline=(Step(12.0, "truncate_log"), _tell(13.0, f"sxid fatal 20034 {_LAST} 33")),
    ),
    Scenario(
        "log-silent-full",
        "The log reaches its limit and Fabric Manager stops logging.",
        Expectation(("configured", "degraded"), active=(Code.LOG_FULL,), most_starts=1),
        settings={"fabric_manager": {"options": {"LOG_FILE_MAX_SIZE": "1", "LOG_MAX_ROTATE_COUNT": "0"}}},
        timeline=(_tell(12.0, "traffic 1500"),),
    ),
    Scenario(
        "gpu-taken",
        "Somebody binds a guest's GPU to the nvidia driver.",
        Expectation(("configured",), active=(Code.GPU_TAKEN,), most_starts=1),
        timeline=(Step(12.0, "bind_gpu", (GPUS[0], "nvidia")),),
    ),
    Scenario(
        "event-flood",
        "So many uevents that some are lost, then a switch goes away.",
        Expectation(("degraded",), active=(Code.SWITCH_LOST,), most_starts=1),
        timeline=(Step(12.0, "flood", (5000,)), Step(12.0, "remove_switch", (_LAST,))),
    ),
)

SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario for scenario in (*_START_UP, *_RUN_TIME, *_MODULE_REFUSALS)
}

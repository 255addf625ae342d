"""The registry of conditions: everything that can be wrong, once.

Journal, metrics, status, documentation and alert rules take code, severity, cause and remedy from here. A code keeps its
number and its MESSAGE_ID for ever; a retired number is never used again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Severity(StrEnum):
    """How urgent: ``critical`` wakes somebody up, ``warning`` waits for the morning, ``info`` only explains."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


class Code(StrEnum):
    """Stable names of the conditions; the value is what people and alert rules see."""

    FABRIC_MANAGER_MISSING = "FMS-101"
    NSCQ_MISSING = "FMS-102"
    VERSION_MISMATCH = "FMS-103"
    RELOAD_NEEDED = "FMS-104"
    LIBRARY_MISSING = "FMS-105"
    INSECURE_FILE = "FMS-106"
    VERSION_UNREADABLE = "FMS-107"
    STOCK_CONFIG_MISSING = "FMS-108"
    TOPOLOGY_MISSING = "FMS-109"
    MODULE_NOT_FOUND = "FMS-201"
    MODULE_TOO_NEW = "FMS-202"
    MODULE_VERMAGIC = "FMS-203"
    MODULE_DEPENDENCY_MISSING = "FMS-204"
    GPU_WOULD_BE_TAKEN = "FMS-205"
    GPU_TAKEN = "FMS-206"
    MODULE_SIGNATURE_REJECTED = "FMS-207"
    MODULE_LOCKDOWN = "FMS-208"
    MODULE_LOADING_FORBIDDEN = "FMS-209"
    MODULE_BLACKLISTED = "FMS-210"
    MODULE_SYMBOL_VERSIONS = "FMS-211"
    MODULE_UNKNOWN_SYMBOL = "FMS-212"
    MODULE_NO_DEVICE = "FMS-213"
    MODULE_INIT_FAILED = "FMS-214"
    MODULE_LOAD_SLOW = "FMS-215"
    MODULE_LOAD_BUSY = "FMS-216"
    MODULE_DAMAGED = "FMS-217"
    MODULE_NOT_LOADED = "FMS-218"
    SWITCH_MISSING = "FMS-301"
    SWITCH_NOT_PROBED = "FMS-302"
    SWITCH_PASSED_THROUGH = "FMS-303"
    SWITCH_BLACKLISTED = "FMS-304"
    SWITCH_LOST = "FMS-305"
    SWITCH_NOT_RESPONDING = "FMS-306"
    SWITCH_UNCONFIGURED = "FMS-307"
    NVLINK5_UNSUPPORTED = "FMS-308"
    STARTED_WITH_FEWER_SWITCHES = "FMS-309"
    HARDWARE_UNOBSERVABLE = "FMS-310"
    NODE_CONFLICT = "FMS-401"
    NODE_FAILED = "FMS-402"
    CONFIG_KEY_UNKNOWN = "FMS-501"
    CONFIG_UNWRITABLE = "FMS-502"
    FOREIGN_FABRIC_MANAGER = "FMS-503"
    CONFIG_REJECTED = "FMS-504"
    VERSION_REJECTED = "FMS-505"
    TOPOLOGY_MISMATCH = "FMS-506"
    NOTHING_TO_DO = "FMS-507"
    RUN_DIRECTORY_DENIED = "FMS-508"
    LOADER_ERROR = "FMS-509"
    FABRIC_MANAGER_DIED = "FMS-510"
    CRASH_LOOP = "FMS-511"
    START_TIMEOUT = "FMS-512"
    FABRIC_MANAGER_HUNG = "FMS-513"
    MANAGER_ERROR = "FMS-514"
    FORKED_AWAY = "FMS-515"
    STOP_ESCALATED = "FMS-516"
    SPAWN_FAILED = "FMS-517"
    RESTART_WITHHELD = "FMS-518"
    ADDRESS_IN_USE = "FMS-519"
    PARTITIONS_AWAITED = "FMS-520"
    SXID_FATAL = "FMS-601"
    STALE_HANDLES = "FMS-603"
    LOG_FULL = "FMS-604"
    LOG_UNREADABLE = "FMS-605"
    WITNESSES_DISAGREE = "FMS-606"
    DRIVER_UNOBSERVABLE = "FMS-607"
    REGISTRATIONS_LOST = "FMS-608"
    SUCCESS_LINE_UNSEEN = "FMS-609"
    GPU_RESET_NEEDED = "FMS-610"
    SXID_FATAL_EARLIER = "FMS-611"
    INTERRUPT_STORM = "FMS-612"
    VERSION_CONFLICT = "FMS-613"
    GPU_LOST = "FMS-614"
    GPU_NVLINK_ERROR = "FMS-615"
    KERNEL_LOG_UNREADABLE = "FMS-616"
    KERNEL_LOG_OVERRUN = "FMS-617"
    SWITCH_OVERHEATED = "FMS-618"
    GUEST_RESTART_REQUIRED = "FMS-619"
    METRICS_UNAVAILABLE = "FMS-701"
    SETTINGS_INVALID = "FMS-702"
    RESTART_NEEDED = "FMS-703"
    WEB_CONFIG_INVALID = "FMS-704"
    STATUS_UNWRITABLE = "FMS-705"
    SUCCESSOR_REFUSED = "FMS-706"
    BOARD_UNKNOWN = "FMS-801"
    IOMMU_GROUP = "FMS-802"
    MODULE_UNSUPPORTED = "FMS-803"
    FIRMWARE_MISSING = "FMS-804"
    ISOLATION_NOT_PROMISED = "FMS-805"
    DISK_SPACE = "FMS-806"
    CLOCK_WRONG = "FMS-807"
    VENDOR_UNIT_ENABLED = "FMS-808"
    DAEMONIZE_MISMATCH = "FMS-809"
    PACKAGE_HOOK = "FMS-810"
    GPU_NOT_PINNED = "FMS-811"
    GUEST_UNCERTAIN = "FMS-812"
    MANAGER_IN_GUEST = "FMS-813"
    GUEST_NOT_REGISTERED = "FMS-814"
    GUEST_REGISTRATION_FAILED = "FMS-815"


@dataclass(frozen=True, slots=True)
class Condition:
    """One entry of the registry. ``blocks_start``: Fabric Manager is not started while it holds."""

    code: Code
    severity: Severity
    blocks_start: bool
    title: str
    cause: str
    remedy: str
    message_id: str  # of journald: 128 bits in hexadecimal

    @property
    def anchor(self) -> str:
        """The condition's heading in docs/runbook.md."""
        return self.code.lower()


REGISTRY: Mapping[Code, Condition] = MappingProxyType(
    {
        condition.code: condition
        for condition in (
            Condition(
                Code.FABRIC_MANAGER_MISSING,
                Severity.CRITICAL,
                True,
                "Fabric Manager is not installed",
                "There is no nv-fabricmanager where the settings say.",
                "Extract the nvidia-fabricmanager package of the driver's version into the tree, or set fabric_manager.binary.",
                "07d58cacfdf45f478cf8519b1a7927c5",
            ),
            Condition(
                Code.NSCQ_MISSING,
                Severity.CRITICAL,
                True,
                "libnvidia-nscq is not installed",
                "Fabric Manager talks to the switches through libnvidia-nscq, which is not in the tree.",
                "Extract the libnvidia-nscq package of the driver's version into the tree, or set fabric_manager.library_paths.",
                "be88cf4f2bc1541696fbb067c5d0d8e9",
            ),
            Condition(
                Code.VERSION_MISMATCH,
                Severity.CRITICAL,
                True,
                "Driver, Fabric Manager and NSCQ are not of one version",
                "NVIDIA's kernel driver, Fabric Manager and NSCQ work together only when their versions are exactly equal.",
                "Install the packages named in the detail so that all versions agree.",
                "7ea14b7f9c6d5fb8bcac09660f9d669a",
            ),
            Condition(
                Code.RELOAD_NEEDED,
                Severity.CRITICAL,
                True,
                "A newer driver is installed than the one loaded",
                "The kernel still runs the driver that was loaded before the upgrade.",
                "Reboot the host, or stop all guests and users of the driver and reload nvidia.ko.",
                "5c1249ca3fbb5f66a3e67eb5703c0a90",
            ),
            Condition(
                Code.LIBRARY_MISSING,
                Severity.CRITICAL,
                True,
                "A shared library is missing",
                "A library that Fabric Manager or NSCQ is linked with is neither in the tree nor on the host.",
                "Put the named library into one of fabric_manager.library_paths.",
                "a0fdfa79a39d5c8e9bdefd01da225f18",
            ),
            Condition(
                Code.INSECURE_FILE,
                Severity.CRITICAL,
                True,
                "A program or library can be changed by others than root",
                "Fabric Manager runs as root, so whoever can write its files owns the host.",
                "chown root and chmod go-w the named file and the directories above it.",
                "928e8daf70875acca4b643f9d42487de",
            ),
            Condition(
                Code.VERSION_UNREADABLE,
                Severity.WARNING,
                False,
                "A version could not be read",
                "nv-fabricmanager --version, the module file or the loaded module did not tell its version.",
                "Run nv-fabricmanager --version by hand with fabric_manager.library_paths in LD_LIBRARY_PATH and look at what it prints.",
                "6bd7765681ca5e8f87995371424f6ec3",
            ),
            Condition(
                Code.STOCK_CONFIG_MISSING,
                Severity.WARNING,
                False,
                "The stock fabricmanager.cfg is missing",
                "The tree has no fabricmanager.cfg, so only the settings of this program are written and the rest is Fabric Manager's built-in default.",
                "Extract the whole nvidia-fabricmanager package, or set fabric_manager.stock_config.",
                "291afaf45f47587aa931a5cd54867c54",
            ),
            Condition(
                Code.TOPOLOGY_MISSING,
                Severity.CRITICAL,
                True,
                "The topology files are missing",
                "Fabric Manager refuses to start when TOPOLOGY_FILE_PATH is not a directory.",
                "Extract the whole nvidia-fabricmanager package, or set fabric_manager.topology_path.",
                "d9faad8f6ee659f29001b3565132a59f",
            ),
            Condition(
                Code.MODULE_NOT_FOUND,
                Severity.CRITICAL,
                True,
                "No nvidia.ko fits the running kernel",
                "The tree holds no nvidia.ko that was built for this kernel or for an older one of its family.",
                "Extract the driver package whose kernel build is equal to or older than the running kernel, of the same family.",
                "44305796f4e45fabb8914364edd93ca3",
            ),
            Condition(
                Code.MODULE_TOO_NEW,
                Severity.CRITICAL,
                True,
                "Only a newer kernel's nvidia.ko is in the tree",
                "A module built for a newer kernel may use what this kernel does not have.",
                "Extract a driver package built for this kernel or an older one of its family, or set module.allow_newer_build = true.",
                "9bb4b1a7d59e5af481ebd7fc283b8867",
            ),
            Condition(
                Code.MODULE_VERMAGIC,
                Severity.CRITICAL,
                True,
                "nvidia.ko was built for another kind of kernel",
                "The flags in the module's vermagic differ from the running kernel's, so the kernel refuses it.",
                "Extract the driver package that was built for this kernel flavour.",
                "7d27c415b59e5dfdab8c60f8cf8fff57",
            ),
            Condition(
                Code.MODULE_DEPENDENCY_MISSING,
                Severity.CRITICAL,
                True,
                "A module that nvidia.ko depends on is missing",
                "The module's own depends= names a module that is neither loaded nor found for the running kernel.",
                "Load the named module, or provide it below /lib/modules for the running kernel.",
                "a8b1939b9b5258c7967be173bdb085fd",
            ),
            Condition(
                Code.GPU_WOULD_BE_TAKEN,
                Severity.CRITICAL,
                True,
                "Loading nvidia.ko would take a GPU",
                "A GPU has no driver now, so nvidia.ko would bind it and a guest could not have it.",
                'Bind each named GPU to vfio-pci: echo vfio-pci > /sys/bus/pci/devices/BUS_ID/driver_override; echo BUS_ID > /sys/bus/pci/drivers_probe. For the next boot pin them (options vfio-pci ids=..., softdep nvidia pre: vfio-pci; never the NVSwitch id). Or set module.gpu_guard = "no-register", which loads nvidia.ko without taking any GPU.',
                "7803839f3951574fbd2cc144b48bc5fd",
            ),
            Condition(
                Code.GPU_TAKEN,
                Severity.CRITICAL,
                False,
                "A GPU is bound to the nvidia driver",
                "A GPU meant for guests is held by the host's nvidia driver, so no guest can have it.",
                "With no user of that GPU left: echo BUS_ID > /sys/bus/pci/drivers/nvidia/unbind; echo vfio-pci > /sys/bus/pci/devices/BUS_ID/driver_override; echo BUS_ID > /sys/bus/pci/drivers_probe. Pin it for the next boot (options vfio-pci ids=..., softdep nvidia pre: vfio-pci).",
                "2a7d53cd49b252e6a6988bbc22e08eea",
            ),
            Condition(
                Code.MODULE_SIGNATURE_REJECTED,
                Severity.CRITICAL,
                True,
                "The kernel rejected the signature of nvidia.ko",
                "The kernel accepts only signed modules and does not trust this one's key (EKEYREJECTED).",
                "Use the distribution's signed driver package, or enrol its key (mokutil) and reboot.",
                "0058e9468ce85deea503e2c140cdb36f",
            ),
            Condition(
                Code.MODULE_LOCKDOWN,
                Severity.CRITICAL,
                True,
                "Kernel lockdown forbids the module",
                "Secure Boot lockdown does not allow unsigned modules.",
                "Use the distribution's signed driver package, or sign nvidia.ko with a key of your own, enrol that (mokutil) and reboot.",
                "9f5fc226732756abb3259f45091085a4",
            ),
            Condition(
                Code.MODULE_LOADING_FORBIDDEN,
                Severity.CRITICAL,
                True,
                "Module loading is switched off",
                "The kernel no longer loads modules (kernel.modules_disabled=1), or this process lacks CAP_SYS_MODULE.",
                "Reboot without modules_disabled, or give the unit CAP_SYS_MODULE.",
                "fd5e2a3e274858bdb1f7224eb8d75828",
            ),
            Condition(
                Code.MODULE_BLACKLISTED,
                Severity.CRITICAL,
                True,
                "nvidia is on the kernel's module_blacklist",
                "The kernel command line says module_blacklist=nvidia.",
                "Remove nvidia from module_blacklist= on the kernel command line and reboot.",
                "1fdd71e581075cc78ee5081f74f7008b",
            ),
            Condition(
                Code.MODULE_SYMBOL_VERSIONS,
                Severity.CRITICAL,
                True,
                "nvidia.ko disagrees with the kernel about symbol versions",
                "The module was built against a kernel with another ABI (modversions).",
                "Extract the driver package whose kernel build is nearest to the running kernel.",
                "e3adb455183a59ea8a4088e623a92cf8",
            ),
            Condition(
                Code.MODULE_UNKNOWN_SYMBOL,
                Severity.CRITICAL,
                True,
                "nvidia.ko needs a symbol that the kernel does not have",
                "A module that it depends on is not loaded, or the kernel lacks the symbol.",
                "Load the module that provides the named symbol, or use the driver package built for this kernel.",
                "56b723bd1cf150e692caf4d7774d5364",
            ),
            Condition(
                Code.MODULE_NO_DEVICE,
                Severity.CRITICAL,
                True,
                "The driver found no NVIDIA device",
                "nvidia.ko gave up because it saw neither a GPU of its own nor an NVSwitch (ENODEV).",
                "Check with lspci -d 10de: that the switches are on the bus; with driver 470 add NVreg_RegistryDwords=RmAllowNoGpuInit=1 to module.parameters.",
                "0ec92038e71b53f2a551258eec8c8b0f",
            ),
            Condition(
                Code.MODULE_INIT_FAILED,
                Severity.CRITICAL,
                True,
                "The driver failed to initialise",
                "nvidia.ko was accepted by the kernel but its own initialisation failed.",
                "Read the kernel lines in the detail; a reboot is often the only cure.",
                "f98cfbac264450e4935f40563e2711e8",
            ),
            Condition(
                Code.MODULE_LOAD_SLOW,
                Severity.WARNING,
                False,
                "Loading nvidia.ko takes unusually long",
                "A switch may take 10 s each to come up; longer means trouble. The load is never killed.",
                "Look at the kernel log; if nothing moves, reboot the host.",
                "bb115e3f6f6d50eabeda97f91280ab67",
            ),
            Condition(
                Code.MODULE_LOAD_BUSY,
                Severity.WARNING,
                False,
                "Loading nvidia.ko failed for a passing reason",
                "Another load was in progress, or memory was short. It is tried again.",
                "Nothing, unless it stays: then look at the kernel log.",
                "1f77f55734615a9ea2ea0d79eaa3e20b",
            ),
            Condition(
                Code.MODULE_DAMAGED,
                Severity.CRITICAL,
                True,
                "The file nvidia.ko is damaged",
                "The module file is truncated, cannot be decompressed, or is no module for this machine.",
                "Extract the driver package again and compare checksums.",
                "ec34dfd538075466b3cc56619a24d49c",
            ),
            Condition(
                Code.MODULE_NOT_LOADED,
                Severity.WARNING,
                False,
                "nvidia.ko is not loaded and must not be loaded here",
                "module.load = false: another program is expected to load the driver.",
                "Load the driver, or set module.load = true.",
                "932c13bc06865200bab5d63e521667aa",
            ),
            Condition(
                Code.SWITCH_MISSING,
                Severity.CRITICAL,
                False,
                "Fewer NVSwitches than expected",
                "One or more NVSwitches are not on the PCI bus.",
                "Look for the missing switch in the kernel log and the BMC; a cold reboot often brings it back. If the board has fewer, set switches.expected.",
                "f2a9608ffa2c58e3887b74d42ae41d45",
            ),
            Condition(
                Code.SWITCH_NOT_PROBED,
                Severity.CRITICAL,
                False,
                "An NVSwitch has no working driver",
                "The switch is on the bus, but the driver did not take it or failed its probe.",
                "Read the driver's lines about that bus id (journalctl -k -g nvidia-nvswitch; SXid 10007 to 10009); a reboot is the usual cure.",
                "2b675e455c1353df92bd57bc144265ef",
            ),
            Condition(
                Code.SWITCH_PASSED_THROUGH,
                Severity.CRITICAL,
                False,
                "An NVSwitch belongs to another driver",
                "The switch is bound to vfio-pci or another driver, so Fabric Manager cannot reach it. Shared fabrics need all switches on the host.",
                "Take the NVSwitch id out of vfio-pci ids= and of the pass-through configuration, then give it back: echo BUS_ID > /sys/bus/pci/drivers/vfio-pci/unbind; echo BUS_ID > /sys/bus/pci/drivers_probe.",
                "c77cbad7444650479e636425d1a4b4c3",
            ),
            Condition(
                Code.SWITCH_BLACKLISTED,
                Severity.CRITICAL,
                False,
                "The driver has blacklisted an NVSwitch",
                "The switch was excluded, by configuration or because its links failed.",
                "See the reason in the detail; remove it from NvSwitchBlacklist, or have the hardware looked at.",
                "bcf92e1e474d55f4bc44b2927aa5e5c2",
            ),
            Condition(
                Code.SWITCH_LOST,
                Severity.CRITICAL,
                False,
                "An NVSwitch went away at run time",
                "A switch that was working is no longer on the bus or lost its driver.",
                "Expect broken NVLink traffic in all guests, and start no new ones. Look at the kernel log and the BMC; plan a reboot of the host. If the switch comes back by itself, FMS-307 says what is left to do.",
                "02ceee3ec00a5b3bb93e2761e1fac266",
            ),
            Condition(
                Code.SWITCH_NOT_RESPONDING,
                Severity.CRITICAL,
                False,
                "An NVSwitch does not answer on PCI",
                "Its configuration space reads ff: the switch fell off the bus although the kernel still lists it.",
                "Plan a cold reboot of the host; if it comes back, have the board looked at.",
                "d7ef2a52954b5927b1dbf6055b8aa303",
            ),
            Condition(
                Code.SWITCH_UNCONFIGURED,
                Severity.CRITICAL,
                False,
                "An NVSwitch is not configured",
                "A switch came back, or was never configured, while Fabric Manager runs for the others.",
                "Restart Fabric Manager in a maintenance window: every guest with a GPU must be power-cycled after it.",
                "9844b92db56253ac94c2f2a0d68eb270",
            ),
            Condition(
                Code.NVLINK5_UNSUPPORTED,
                Severity.CRITICAL,
                True,
                "This board needs NVLSM",
                "NVLink 5 boards (HGX B200 and later) need the NVLink Subnet Manager beside Fabric Manager, which this version does not run yet.",
                "Use NVIDIA's own nvidia-fabricmanager-start.sh on this host.",
                "4c03dc0902dd598cb9ec071d67dfee69",
            ),
            Condition(
                Code.STARTED_WITH_FEWER_SWITCHES,
                Severity.WARNING,
                False,
                "Fabric Manager was started with fewer switches than expected",
                "The deadline passed and switches.when_missing is start-anyway.",
                "Bring the missing switch back; see FMS-301.",
                "fa2a8bc23ff15656913697510ddac54d",
            ),
            Condition(
                Code.HARDWARE_UNOBSERVABLE,
                Severity.WARNING,
                False,
                "The hardware cannot be looked at",
                "A file of /sys or /proc could not be read. The last verdict holds.",
                "See the detail for the path and the reason.",
                "dc28058d5fce5ad7af529fbe3c3d4597",
            ),
            Condition(
                Code.NODE_CONFLICT,
                Severity.CRITICAL,
                True,
                "Something else is in the place of a device node",
                "A regular file, directory or symbolic link stands where a device node must be. It is not followed and not removed.",
                "Find out who made it, remove it, and the node will be made.",
                "162c8ffe0a5c546bb0fc0880b02fd380",
            ),
            Condition(
                Code.NODE_FAILED,
                Severity.CRITICAL,
                True,
                "A device node could not be made",
                "mknod, chmod or chown failed.",
                "See the detail; the unit needs CAP_MKNOD and a writable /dev.",
                "6d550312d80954fd8c1582ac33390235",
            ),
            Condition(
                Code.CONFIG_KEY_UNKNOWN,
                Severity.CRITICAL,
                True,
                "An option is not known to this Fabric Manager",
                "Fabric Manager refuses to start when its configuration has a key of another version.",
                "Remove the key from fabric_manager.options, or install the version that knows it.",
                "a69687ab71495a3eb9766fdf5234cc51",
            ),
            Condition(
                Code.CONFIG_UNWRITABLE,
                Severity.CRITICAL,
                True,
                "Fabric Manager's files cannot be prepared",
                "The rendered configuration or one of the directories it names could not be written.",
                "See the detail; the directory must be writable and on a disk with space.",
                "279329e8a2b651129ea57b67c32ea3bc",
            ),
            Condition(
                Code.FOREIGN_FABRIC_MANAGER,
                Severity.CRITICAL,
                True,
                "Another Fabric Manager is running",
                "Two Fabric Managers on one fabric disturb each other. The other one is not ours and is not killed.",
                "Leave it alone while guests run: ending it breaks NVLS in them. In a maintenance window: systemctl disable --now nvidia-fabricmanager; systemctl mask nvidia-fabricmanager. fmsupervisor then starts its own by itself, and the guests with GPUs must be power-cycled.",
                "e66164216ba05488b570a63cd769505f",
            ),
            Condition(
                Code.CONFIG_REJECTED,
                Severity.CRITICAL,
                True,
                "Fabric Manager rejected its configuration",
                "Fabric Manager exited because an item of its configuration is invalid.",
                "Correct the named item in fabric_manager.options or the settings.",
                "0b42e5959df653e3a8920bd087a8d6b9",
            ),
            Condition(
                Code.VERSION_REJECTED,
                Severity.CRITICAL,
                True,
                "Fabric Manager refused the loaded driver's version",
                "Fabric Manager and the loaded driver are not of the same version.",
                "Install the Fabric Manager of the loaded driver's version, or reload the driver of Fabric Manager's version.",
                "46f8830820ac5324b29e95b733ae4b9b",
            ),
            Condition(
                Code.TOPOLOGY_MISMATCH,
                Severity.CRITICAL,
                True,
                "Fabric Manager does not know a board with this many switches",
                "The number of NVSwitches that Fabric Manager found fits no topology file: one is missing.",
                "Find the missing switch (kernel log, BMC); a cold reboot often brings it back.",
                "b1b4a5b3008c59e5972ea0d31b6256b1",
            ),
            Condition(
                Code.NOTHING_TO_DO,
                Severity.CRITICAL,
                True,
                "Fabric Manager found no NVSwitch",
                "The driver told Fabric Manager that there is no switch, although PCI shows some.",
                "Look at the switches' kernel lines; inside a guest Fabric Manager must not run at all.",
                "d9471852440f514c943cc488accea485",
            ),
            Condition(
                Code.RUN_DIRECTORY_DENIED,
                Severity.CRITICAL,
                False,
                "Fabric Manager cannot use its run directory",
                "Its run directory does not exist or is not writable.",
                "Make /run/nvidia-fabricmanager writable for root; it is tried again.",
                "401e3837017c5dad97927755646aed0d",
            ),
            Condition(
                Code.LOADER_ERROR,
                Severity.CRITICAL,
                True,
                "Fabric Manager cannot be executed",
                "The dynamic loader could not find or use a library.",
                "Put the named library into one of fabric_manager.library_paths.",
                "d1ade655fa7350358f7cd730c373e310",
            ),
            Condition(
                Code.FABRIC_MANAGER_DIED,
                Severity.WARNING,
                False,
                "Fabric Manager ended unexpectedly",
                "Fabric Manager ended although nobody asked it to.",
                "Read its last lines in fmsupervisor status and its log. It is restarted as restart.policy says; FMS-619 then names the guests that must be power-cycled.",
                "f5dd422ee7025e40b63c703e962901a2",
            ),
            Condition(
                Code.CRASH_LOOP,
                Severity.CRITICAL,
                False,
                "Fabric Manager keeps dying",
                "Fabric Manager ended several times in a row without staying configured.",
                "Read its last lines in fmsupervisor status and its log. fmsupervisor keeps trying with growing pauses.",
                "ee8c683edf005db1b80d58dca410345d",
            ),
            Condition(
                Code.START_TIMEOUT,
                Severity.CRITICAL,
                False,
                "Fabric Manager did not configure the fabric in time",
                "Fabric Manager runs, but neither its log nor the driver said configured before the deadline.",
                "Read Fabric Manager's log; raise fabric_manager.start_timeout_seconds on slow machines (up to 600 s have been seen).",
                "3fc9228758dc55e58370892cfcbd19ff",
            ),
            Condition(
                Code.FABRIC_MANAGER_HUNG,
                Severity.CRITICAL,
                False,
                "Fabric Manager hangs",
                "Its process lives, but the driver no longer receives its heartbeat (MANAGER_TIMEOUT).",
                'With fabric_manager.hang_policy = "report" it is left as it is: nothing new can register and errors are not handled, so start no guests. Keep /proc/PID/stack of the named pid, then in a maintenance window: systemctl restart fmsupervisor, and power-cycle the guests with GPUs.',
                "a42176fd3469523c91fe11f70ab067ca",
            ),
            Condition(
                Code.MANAGER_ERROR,
                Severity.CRITICAL,
                False,
                "The driver reports an error of Fabric Manager",
                "The driver's state for a switch is MANAGER_ERROR.",
                "Explain the ERROR lines of Fabric Manager's log of that time (fmsupervisor explain 'LINE'). If it stays: in a maintenance window systemctl restart fmsupervisor, and power-cycle the guests with GPUs.",
                "039794866297530c9b079e330e6c8d96",
            ),
            Condition(
                Code.FORKED_AWAY,
                Severity.CRITICAL,
                False,
                "Fabric Manager left its supervisor",
                "Fabric Manager daemonised in spite of DAEMONIZE=0; what it left behind was ended.",
                "Check that nothing overrides DAEMONIZE in the configuration, and the version of Fabric Manager.",
                "5787261a0cb5537d80f0520dbac09fe4",
            ),
            Condition(
                Code.STOP_ESCALATED,
                Severity.WARNING,
                False,
                "Fabric Manager had to be killed",
                "It did not end within fabric_manager.stop_timeout_seconds after SIGTERM.",
                "Raise the timeout if it was busy; otherwise report it to NVIDIA.",
                "5d1efc33ab435c169682cfb363489436",
            ),
            Condition(
                Code.SPAWN_FAILED,
                Severity.CRITICAL,
                False,
                "Fabric Manager could not be executed",
                "The system refused to start a process (memory, descriptors, permissions). It is tried again.",
                "Find what is short: memory (free), processes (the unit's TasksMax), descriptors; or why the file cannot be executed. It is tried again by itself.",
                "6eaa87fc133d5d6eb8af89ce4c6d1d18",
            ),
            Condition(
                Code.RESTART_WITHHELD,
                Severity.CRITICAL,
                True,
                "Fabric Manager is not restarted by policy",
                "restart.policy forbids restarting Fabric Manager after an unexpected death, always or while guests hold GPUs.",
                'Prepare the guests, then run systemctl restart fmsupervisor. With restart.policy = "when-no-guests" it is restarted by itself when the named guests have ended.',
                "70ca9ea12e445b25b5e5a2a0250907a1",
            ),
            Condition(
                Code.ADDRESS_IN_USE,
                Severity.CRITICAL,
                False,
                "Fabric Manager's port or socket is taken",
                "Another program listens on a port or socket that Fabric Manager needs. It is tried again.",
                "Find the program (ss -lptn) and stop it, or move FM_CMD_PORT_NUMBER or STARTING_TCP_PORT in fabric_manager.options.",
                "047333044a3a50a9a68697f17e024a81",
            ),
            Condition(
                Code.PARTITIONS_AWAITED,
                Severity.WARNING,
                False,
                "Fabric Manager waits to be told the active partitions",
                "It was started with --restart and ends by itself 60 s later, unless it is told which partitions are active.",
                "Whoever manages the partitions must call fmSetActivatedFabricPartitions now (fmpm --set-activated-list).",
                "a690e37a8a8747463bfbafd7692506cc",
            ),
            Condition(
                Code.SXID_FATAL,
                Severity.CRITICAL,
                False,
                "A fatal NVSwitch error was reported",
                "A switch reported an error that breaks NVLink traffic of a port or of the whole fabric.",
                "fmsupervisor explain 'SXid NUMBER' tells what is broken and what to do; usually the guest of the affected GPU must be power-cycled, or all GPUs and switches reset.",
                "53bea92b305250fa8687545c98331db2",
            ),
            Condition(
                Code.STALE_HANDLES,
                Severity.CRITICAL,
                False,
                "Guests use registrations that this Fabric Manager does not know",
                "A multicast (NVLS) request named a GPU handle of an earlier Fabric Manager session.",
                "Power-cycle the guests that hold GPUs (on bare metal: reset the GPUs).",
                "526e7dff2503514d983ba129ba643d6f",
            ),
            Condition(
                Code.LOG_FULL,
                Severity.WARNING,
                False,
                "Fabric Manager has stopped logging",
                "Its log reached LOG_FILE_MAX_SIZE and LOG_MAX_ROTATE_COUNT is 0.",
                "Set LOG_MAX_ROTATE_COUNT = 3 in fabric_manager.options and restart Fabric Manager in a maintenance window, or move the file away.",
                "f36f7cfba32150f1adac8aa1939359d7",
            ),
            Condition(
                Code.LOG_UNREADABLE,
                Severity.WARNING,
                False,
                "Fabric Manager's log cannot be followed",
                "The log file cannot be opened or is no regular file.",
                "Put a regular file, or nothing, at the named path. Until then only the driver's word and standard error are known of Fabric Manager.",
                "40cbeda1655c5f9a9a27c0efd904a1ca",
            ),
            Condition(
                Code.WITNESSES_DISAGREE,
                Severity.CRITICAL,
                False,
                "The log and the driver disagree",
                "Fabric Manager's log says configured, the driver says otherwise for at least one switch.",
                "Trust neither: test with a guest, and restart Fabric Manager in a maintenance window if CUDA fails there.",
                "f7760ac0e31c5508a84956a1532d19c4",
            ),
            Condition(
                Code.DRIVER_UNOBSERVABLE,
                Severity.WARNING,
                False,
                "The driver's view of the fabric cannot be read",
                "GET_DEVICES_V2 on /dev/nvidia-nvswitchctl does not work, so a hang of Fabric Manager cannot be seen.",
                "See the detail; the control node must be among device_nodes.manage.",
                "db1735e2c54154d098b3fc1ac027710f",
            ),
            Condition(
                Code.REGISTRATIONS_LOST,
                Severity.CRITICAL,
                False,
                "GPUs lost their registration",
                "Fabric Manager was restarted after GPUs had registered: NVLink multicast (NVLS) fails for their users although nvidia-smi still says Completed.",
                "On bare metal, in a maintenance window: stop the users of the GPUs and DCGM, systemctl stop fmsupervisor, nvidia-smi -r, systemctl start fmsupervisor. Where guests hold the GPUs (FMS-619 names those that can be seen): power-cycle them.",
                "f7ffb1484e5c5452b655dd393b32bee3",
            ),
            Condition(
                Code.SUCCESS_LINE_UNSEEN,
                Severity.INFO,
                False,
                "Configured by the driver's word only",
                "The driver says configured on all switches, but no success line was seen in Fabric Manager's log.",
                "Nothing; if the log is not full, report its wording so that it can be recognised.",
                "450ebd1e1c52523c86c21385fee548e3",
            ),
            Condition(
                Code.GPU_RESET_NEEDED,
                Severity.CRITICAL,
                False,
                "Fabric Manager asks for a GPU reset",
                "Fabric Manager says that all GPUs of the partition must be reset to recover.",
                "Power-cycle the guests that hold GPUs (on bare metal: reset the GPUs).",
                "d595a973a882525cb7bfabed3f44197d",
            ),
            Condition(
                Code.SXID_FATAL_EARLIER,
                Severity.WARNING,
                False,
                "A fatal NVSwitch error happened before the supervisor began",
                "The kernel log holds a fatal SXid of this switch from before, and the switch has not been reset since: links may be down and their interrupts masked.",
                "If guests have NVLink trouble, reset all GPUs and switches or reboot the host; otherwise it goes away with the next reset of the switch.",
                "1ea9b70114c044b78dd958e6e5e1c3f8",
            ),
            Condition(
                Code.INTERRUPT_STORM,
                Severity.CRITICAL,
                False,
                "The driver has switched off an NVSwitch's interrupts",
                "The switch raised so many interrupts that the driver disabled them: its errors are no longer reported.",
                "Stop the guests and reset all GPUs and switches, or reboot the host; if it comes back, have the board checked.",
                "e1eb2b40d9ef4b3e8d45318ad0a28093",
            ),
            Condition(
                Code.VERSION_CONFLICT,
                Severity.WARNING,
                False,
                "A program of another version talks to the NVSwitch driver",
                "The driver refused a program (a Fabric Manager, NSCQ, DCGM) whose version differs from its own.",
                "Find the program (a container with its own libraries, or an old package) and give it the driver's version.",
                "56dd39cf8cac456f8bc4b799592fd65e",
            ),
            Condition(
                Code.GPU_LOST,
                Severity.CRITICAL,
                False,
                "A GPU has fallen off the bus",
                "The driver reported Xid 79: the GPU no longer answers on PCI. All switches then report its links as failed (SXid 20034).",
                "Power-cycle the host; if it comes back, have the GPU checked.",
                "a1076644bb034ac389cd00c98dd69138",
            ),
            Condition(
                Code.GPU_NVLINK_ERROR,
                Severity.WARNING,
                False,
                "A GPU reported an NVLink error",
                "The driver reported an Xid that is about NVLink or the fabric for a GPU of this host.",
                "Stop the GPU's users and reset it; if it comes back, look at the SXids of the switches and have the link checked.",
                "4cccf11aa8d448b8800960c6d1adfd9f",
            ),
            Condition(
                Code.KERNEL_LOG_UNREADABLE,
                Severity.WARNING,
                False,
                "The kernel log cannot be read",
                "Without /dev/kmsg, errors of the switches are known only from Fabric Manager's log, and not at all while it is down.",
                "Give the service CAP_SYSLOG and /dev/kmsg (no ProtectKernelLogs=, no PrivateDevices=).",
                "41442f2bac2644ee888117430e685e5b",
            ),
            Condition(
                Code.KERNEL_LOG_OVERRUN,
                Severity.INFO,
                False,
                "Kernel messages were lost",
                "The kernel wrote faster than its log could be read, so errors of switches may have been missed. It holds for an hour.",
                "Look for what floods the kernel log (dmesg), or boot with a larger log_buf_len=.",
                "ad08232c469142c0863da80ea3201eb4",
            ),
            Condition(
                Code.SWITCH_OVERHEATED,
                Severity.CRITICAL,
                False,
                "An NVSwitch is too hot",
                "The switch reported that its temperature is above the warning threshold (SXid 10004) or that it shuts down for that (10006).",
                "Check the fans and the air of the host now; it ends by itself when the switch reports a lower temperature.",
                "ecdff7981d4f43888a97b1f8eb8cd6ba",
            ),
            Condition(
                Code.GUEST_RESTART_REQUIRED,
                Severity.CRITICAL,
                False,
                "A guest must be power-cycled",
                "It has held GPUs since before the running Fabric Manager configured the fabric. A GPU asks to join once, when its driver starts: it waits for ever (In Progress), or its registration belongs to a Fabric Manager that is gone, so that NVLink multicast (NVLS) fails although nvidia-smi still says Completed.",
                "Power-cycle the named guest: stop it and start it again, since a reboot inside is not enough. The condition ends when its process is gone.",
                "45adf48b9fbffc67779e7ac6d657a0ef",
            ),
            Condition(
                Code.METRICS_UNAVAILABLE,
                Severity.WARNING,
                False,
                "The metrics port cannot be opened",
                "The configured address is taken or not allowed. The fabric is brought up all the same, and the port is tried again.",
                "Find the program that listens there (ss -lptn), or change metrics.listen.",
                "e631e27f6d905b9e83d95670a63db78e",
            ),
            Condition(
                Code.SETTINGS_INVALID,
                Severity.WARNING,
                False,
                "The changed settings are not valid",
                "A reload found mistakes in the settings file; the old settings stay in force.",
                "Correct the file (fmsupervisor config --config FILE checks it) and reload again.",
                "ec37b234e7385e65a555f6f6c029884c",
            ),
            Condition(
                Code.RESTART_NEEDED,
                Severity.INFO,
                False,
                "Some changed settings wait for a restart",
                "A reload does not restart Fabric Manager, since that breaks running guests.",
                "Run systemctl restart fmsupervisor in a maintenance window.",
                "2fdff1fcab005c9d96ab77280b20d806",
            ),
            Condition(
                Code.WEB_CONFIG_INVALID,
                Severity.WARNING,
                False,
                "The metrics server's web configuration is not valid",
                "The web.yml could not be read, or names certificates that cannot be used; the last good one stays in force.",
                "Correct the file; it is re-read when it changes.",
                "440001975c1950809b03b4aa658cbe0b",
            ),
            Condition(
                Code.STATUS_UNWRITABLE,
                Severity.WARNING,
                False,
                "A file of the service's state cannot be written",
                "Without status.json, fmsupervisor status and wait do not work; without handover.json, a crash of the supervisor leaves a Fabric Manager that the next one cannot take over.",
                "Make service.state_directory writable.",
                "4f65c207d31a57588d42d5e9cf034700",
            ),
            Condition(
                Code.SUCCESSOR_REFUSED,
                Severity.WARNING,
                False,
                "The installed version of fmsupervisor was not executed",
                "The files of fmsupervisor have changed, and what is installed now did not pass its start-up check; the version that runs goes on, and so does Fabric Manager.",
                "Read the reason, repair or reinstall fmsupervisor or its settings, then systemctl reload fmsupervisor.",
                "ae1c5368d9e44d9fac879960185eac75",
            ),
            Condition(
                Code.BOARD_UNKNOWN,
                Severity.WARNING,
                False,
                "The board is not known or not complete",
                "The device ids or the number of GPUs on the PCI bus fit no board in the tables of this program.",
                "Compare with lspci -d 10de: and the board's documentation; set switches.expected when the board is new.",
                "5e237939a24d45aba189835b859ab98a",
            ),
            Condition(
                Code.IOMMU_GROUP,
                Severity.WARNING,
                False,
                "A GPU cannot be given to a guest by itself",
                "The GPU has no IOMMU group, or shares it with another device, so vfio gives away all of the group or nothing.",
                "Switch the IOMMU (VT-d, AMD-Vi) and ACS on in the firmware, and intel_iommu=on on the kernel command line of Intel hosts.",
                "c7ac4ad0d023494a97c84407f141d785",
            ),
            Condition(
                Code.MODULE_UNSUPPORTED,
                Severity.WARNING,
                False,
                "SUSE's modprobe refuses the module",
                "The module has no supported= tag, and SUSE's modprobe loads only supported modules unless told otherwise.",
                "Use the driver package of the distribution, or set allow_unsupported_modules 1 in /etc/modprobe.d for what loads it with modprobe.",
                "c3d130d5154a45c4988095c579eca503",
            ),
            Condition(
                Code.FIRMWARE_MISSING,
                Severity.WARNING,
                False,
                "The GSP firmware of the driver's version is missing",
                "The driver asks for it when it initialises a GPU; without it that GPU does not come up on the host.",
                "Extract the firmware of exactly the driver's version, and set firmware_class.path to its directory or put it below /lib/firmware.",
                "71aaf2d8e4c64167bc3b82ef7a27f0b7",
            ),
            Condition(
                Code.ISOLATION_NOT_PROMISED,
                Severity.WARNING,
                False,
                "The fabric mode does not fit the use of the GPUs",
                "In fabric mode 0 all GPUs are one NVLink domain: isolation between guests that hold GPUs of it is not promised.",
                "Give the GPUs to guests of one owner, or use FABRIC_MODE=1 (shared NVSwitch) with partitions.",
                "a4bccf4d95cb4c0c82d7e522cd8de43b",
            ),
            Condition(
                Code.DISK_SPACE,
                Severity.WARNING,
                False,
                "The disk of Fabric Manager's log is too small",
                "Fabric Manager's log may grow to LOG_FILE_MAX_SIZE times the number of files that are kept.",
                "Free some space, lower LOG_FILE_MAX_SIZE in fabric_manager.options, or set fabric_manager.log_file to another disk.",
                "8a003928b1b24d2d9ea0f1a64a854cda",
            ),
            Condition(
                Code.CLOCK_WRONG,
                Severity.WARNING,
                False,
                "The clock is wrong or not synchronised",
                "Times in the logs of host and guests cannot be compared, and certificates may count as invalid.",
                "Start the time service (chronyd, systemd-timesyncd) and check its servers.",
                "127014fefd734f61865526b2919bf0c6",
            ),
            Condition(
                Code.VENDOR_UNIT_ENABLED,
                Severity.WARNING,
                False,
                "The vendor's unit is enabled",
                "nvidia-fabricmanager.service starts a second Fabric Manager at the next boot or package upgrade.",
                "Run systemctl disable nvidia-fabricmanager and systemctl mask nvidia-fabricmanager; stop a running one only in a maintenance window.",
                "1d10b4709493490b9eb70691dce15f0a",
            ),
            Condition(
                Code.DAEMONIZE_MISMATCH,
                Severity.WARNING,
                False,
                "DAEMONIZE does not fit the type of the unit",
                "A unit of Type=simple or notify loses a Fabric Manager that goes to the background, and one of Type=forking waits for ever for one that does not.",
                "Mask the vendor's unit, or set DAEMONIZE=1 with Type=forking and DAEMONIZE=0 with Type=simple.",
                "fdf9772eb9c1444aa3ee4c9e4c2052bf",
            ),
            Condition(
                Code.PACKAGE_HOOK,
                Severity.WARNING,
                False,
                "A package tool may restart or replace Fabric Manager",
                "A restart of Fabric Manager by needrestart or an unattended upgrade breaks NVLS in running guests.",
                "Set $nrconf{override_rc}{qr(^fmsupervisor)} = 0 in /etc/needrestart/conf.d, and put nvidia into Unattended-Upgrade::Package-Blacklist.",
                "d1601b353e344b299aaa444db900d4d8",
            ),
            Condition(
                Code.GPU_NOT_PINNED,
                Severity.WARNING,
                False,
                "A GPU is not pinned to vfio-pci",
                "At boot the nvidia driver may take the GPU before vfio-pci has it, and no guest can have it then.",
                "In /etc/modprobe.d/: options vfio-pci ids=<GPU ids, never the NVSwitch's> and softdep nvidia pre: vfio-pci; then renew the initrd.",
                "1287778a1dbc4ca2901589a65a3a72d5",
            ),
            Condition(
                Code.GUEST_UNCERTAIN,
                Severity.WARNING,
                False,
                "It is not certain that this is a guest of a host's fabric",
                "No sign of a virtual machine was found, or its GPUs are not bound to the nvidia driver.",
                "Run check without --guest on hosts; in a guest install and load the driver first.",
                "537026312aef436389140f4f9e36a8f9",
            ),
            Condition(
                Code.MANAGER_IN_GUEST,
                Severity.CRITICAL,
                False,
                "Fabric Manager is set up in a guest",
                "The switches belong to the host, so Fabric Manager in the guest finds nothing to do and fails.",
                "Remove or mask Fabric Manager and fmsupervisor in the guest; they belong on the host.",
                "b13f26ee9ee5471aab68aa4412c41eac",
            ),
            Condition(
                Code.GUEST_NOT_REGISTERED,
                Severity.CRITICAL,
                False,
                "GPUs of this guest have not registered with Fabric Manager",
                "The GPU asked for the fabric when its driver started, and the host's Fabric Manager has not answered. CUDA fails with error 802.",
                "On the host: fmsupervisor status must say configured. Then power-cycle this guest: a GPU asks only once, and a reboot inside may not be enough.",
                "aa9ca64b37ae4f12a444ec2f814e16df",
            ),
            Condition(
                Code.GUEST_REGISTRATION_FAILED,
                Severity.CRITICAL,
                False,
                "Fabric Manager refused GPUs of this guest",
                "The registration is completed with an error, so these GPUs have no NVLink to the others.",
                "On the host: look for SXids and in-band errors of these GPUs in Fabric Manager's log; then reset the GPUs or power-cycle the guest.",
                "66a8814727c74b6ca358691c69784844",
            ),
        )
    }
)

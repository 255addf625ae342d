"""The kernel of the simulated host: everything that a directory tree cannot do by itself.

State is kept in the tree wherever the real kernel shows it there, so that what observers read and what this class
believes cannot differ; only minors, scripted faults and the moment of each probe are kept here. Every change of the
tree is made before its uevent is sent, as in the kernel. The switch driver's watchdog on Fabric Manager (STANDBY,
CONFIGURED, MANAGER_TIMEOUT) is computed from the heartbeat file of the simulated nv-fabricmanager (kernel: nvswitch.c,
nvswitch_fabric_state_heartbeat: 10 s).

Methods may be called from any thread.
"""

import errno
import json
import os
import stat
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fmsupervisor.errors import CannotObserve
from fmsupervisor.facts import DeviceState, DriverState, DriverView, ModuleChoice, SwitchDevice
from fmsupervisor.host.kernel import ModuleLoadFailed, NodeStatus
from fmsupervisor.host.root import HostRoot
from fmsupervisor.simulator import driver, hardware, pci_bus
from fmsupervisor.simulator.kernel_log import KernelLogReader, SimulatedKernelLog
from fmsupervisor.simulator.uevents import SimulatedUevents

_CONTROL_NODE = "/dev/nvidia-nvswitchctl"
_HEARTBEAT_TIMEOUT_SECONDS = 10.0  # NVSWITCH_DEFAULT_FM_HEARTBEAT_TIMEOUT_MSEC
_SHORTEST_HEARTBEAT_TIMEOUT_SECONDS = 1.5  # at high speed: several heartbeats even on a busy machine
_REASON_MANUAL_OUT_OF_BAND = 1  # ioctl_nvswitch.h
_SXID_TEXTS = {12028: "egress non-posted PRIV error", 20034: "LTSSM Fault Up"}
_NO_DEVICE_LINES = ("NVRM: No NVIDIA GPU found.",)


@dataclass(frozen=True, slots=True)
class LoadFault:
    """The next load of nvidia.ko fails with this errno and these kernel log lines."""

    errno: int
    kernel_lines: tuple[str, ...] = ()


class SimulatedKernel:
    """``fmsupervisor.host.kernel.Kernel`` on a tree of ``build_tree``, and the hands that change its world."""

    def __init__(
        self,
        root: HostRoot,
        *,
        speed: float = 1.0,
        load_fault: LoadFault | None = None,
        load_delay_seconds: float = 0.0,
        failing_probes: frozenset[str] = frozenset(),
    ) -> None:
        self._root = root
        self._speed = speed
        self._load_fault = load_fault
        self._load_delay_seconds = load_delay_seconds
        self._failing_probes = failing_probes
        self._lock = threading.RLock()
        self._minors: dict[str, int] = {}
        self._probed_at: dict[str, float] = {}
        self._blacklisted: set[str] = set()
        self._manager_errors: set[str] = set()
        self._listeners: list[SimulatedUevents] = []
        self._log = SimulatedKernelLog()
        for switch in root.list_directory(f"{driver.NVSWITCH_PROC}/devices") or []:
            self._assign_minor(switch)

    # --- Kernel

    def load_module(self, choice: ModuleChoice, parameters: Sequence[str]) -> None:
        """Load the dependencies and nvidia.ko, or fail as scripted."""
        if driver.is_live(self._root):
            return
        time.sleep(self._load_delay_seconds / self._speed)
        with self._lock:
            if self._load_fault is not None:
                self._log.write(*self._load_fault.kernel_lines)
                raise ModuleLoadFailed(self._load_fault.errno, self._load_fault.kernel_lines, choice.path)
            for path in choice.depends:
                self._load_dependency(path)
            registers_gpus = "NVreg_RegisterPCIDriver=0" not in parameters
            self._load(choice.version, choice.path, registers_gpus=registers_gpus)

    def driver_view(self) -> DriverView:
        """The switches with the watchdog's verdict. Needs the control node, right major and minor included."""
        with self._lock:
            self._check_control_node()
            heartbeat = self._heartbeat()
            return DriverView(tuple(self._device(switch, heartbeat) for switch in sorted(self._minors)))

    def monitor_uevents(self) -> SimulatedUevents:
        """Begin to listen."""
        with self._lock:
            listener = SimulatedUevents()
            self._listeners.append(listener)
            return listener

    def monitor_kernel_log(self) -> KernelLogReader:
        """Begin to read, from the oldest record."""
        return self._log.open()

    def node_status(self, path: str) -> NodeStatus | None:
        """A simulated node counts as a device; everything else is what lstat(2) says."""
        status = self._root.status(path, follow_symlinks=False)
        if status is None:
            return None
        permissions = stat.S_IMODE(status.st_mode)
        kind = _kind(status.st_mode)
        if kind == "file" and (node := hardware.parse_node(self._root.read_text(path, 4096) or "")) is not None:
            return NodeStatus("char", *node)
        return NodeStatus(kind, 0, 0, permissions, status.st_uid, status.st_gid)

    def make_node(self, path: str, major: int, minor: int, mode: int, uid: int, gid: int) -> None:
        """Write the node's record in one step; only a node may be replaced."""
        found = self.node_status(path)
        if found is not None and found.kind != "char":
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        real = self._root.path(path)
        temporary = f"{os.path.dirname(real)}/.{os.path.basename(real)}.new"
        with open(temporary, "w", encoding="ascii") as file:
            file.write(hardware.format_node(major, minor, mode, uid, gid))
        os.replace(temporary, real)

    def adjust_node(self, path: str, mode: int, uid: int, gid: int) -> None:
        """Rewrite the record with other permissions."""
        found = self.node_status(path)
        if found is None or found.kind != "char":
            raise OSError(errno.ENOENT if found is None else errno.ENOTTY, "not a simulated device", path)
        self.make_node(path, found.major, found.minor, mode, uid, gid)

    def make_node_directory(self, path: str) -> None:
        """A directory below /dev."""
        os.makedirs(self._root.path(path), 0o755, exist_ok=True)

    # --- the hands: hardware and drivers at run time

    def load(self, version: str, *, registers_gpus: bool = True) -> None:
        """nvidia.ko of this version is loaded by somebody else."""
        with self._lock:
            self._load(version, "nvidia.ko", registers_gpus=registers_gpus)

    def unload_module(self) -> None:
        """``rmmod nvidia``."""
        with self._lock:
            for switch in sorted(self._minors):
                self._release(switch)
            driver.remove(self._root, self._emit)

    def add_switch(self, switch: str) -> None:
        """A switch appears on the bus, and is probed when the driver is there."""
        with self._lock:
            pci_bus.add(self._root, pci_bus.nvswitch(switch))
            self._emit("pci", "add")
            if driver.is_live(self._root):
                self._probe(switch)

    return_switch = add_switch

    def remove_switch(self, switch: str) -> None:
        """Hot removal: unbind, then remove."""
        with self._lock:
            self._release(switch)
            pci_bus.unbind(self._root, switch)
            pci_bus.remove(self._root, switch)
            self._emit("pci", "remove")

    def unbind_driver(self, function: str) -> None:
        """``echo BUS_ID > /sys/bus/pci/drivers/.../unbind``."""
        with self._lock:
            if function in self._minors:
                self._release(function)
            else:
                pci_bus.unbind(self._root, function)
                self._emit("pci", "unbind")

    def bind_gpu(self, gpu: str, name: str) -> None:
        """Another driver gets the GPU."""
        with self._lock:
            if pci_bus.driver(self._root, gpu) is not None:
                self.unbind_driver(gpu)
            pci_bus.bind(self._root, gpu, name)
            self._emit("pci", "bind")

    def surprise_loss(self, function: str) -> None:
        """The function falls off the bus: only its configuration space shows it, and no uevent comes."""
        pci_bus.fall_off_the_bus(self._root, function)

    def blacklist(self, switch: str) -> None:
        """The driver excludes the switch."""
        with self._lock:
            self._blacklisted.add(switch)

    def manager_error(self, switch: str) -> None:
        """The driver reports MANAGER_ERROR for the switch."""
        with self._lock:
            self._manager_errors.add(switch)

    def print_switch_error(self, severity: str, sxid: int, switch: str, port: int) -> None:
        """An SXid: the line that counts, and the two that belong to it (error_nvswitch.c)."""
        prefix = f"nvidia-nvswitch{self._minors.get(switch, 0)}: SXid (PCI:{switch}): {sxid:05d}, "
        number = int(severity == "fatal")
        self._log.write(
            f"{prefix}{severity.capitalize()}, Link {port:02d} {_SXID_TEXTS.get(sxid, 'error')}",
            f"{prefix}Severity {number} Engine instance {port:02d} Sub-engine instance 00",
            f"{prefix}Data {{{', '.join(['0x10000000'] * 2 + ['0x00000000'] * 7)}}}",
        )

    def print_kernel_line(self, text: str, count: int = 1) -> None:
        """Any message, as often as wanted, faster than it can be read."""
        self._log.write(*[text] * count)

    def set_load_fault(self, fault: LoadFault | None) -> None:
        """How loads fail from now on; None: they work."""
        with self._lock:
            self._load_fault = fault

    def flood(self, count: int) -> None:
        """So many uevents that listeners lose some."""
        for _ in range(count):
            self._emit("net", "change")

    # --- inside

    def _load(self, version: str, path: str, *, registers_gpus: bool) -> None:
        if not pci_bus.switches(self._root) and not (registers_gpus and self._has_free_gpu()):
            self._log.write(*_NO_DEVICE_LINES)
            raise ModuleLoadFailed(errno.ENODEV, _NO_DEVICE_LINES, path)
        driver.begin(self._root, version)
        pci_bus.register_driver(self._root, "nvidia-nvswitch")
        for switch in pci_bus.switches(self._root):
            self._probe(switch)
        self._emit("drivers", "add")
        if registers_gpus:
            pci_bus.register_driver(self._root, "nvidia")
            driver.probe_gpus(self._root, self._emit)
            self._emit("drivers", "add")
        self._log.write(f"NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build")
        driver.finish(self._root, self._emit)

    def _has_free_gpu(self) -> bool:
        return any(pci_bus.driver(self._root, gpu) is None for gpu in pci_bus.gpus(self._root))

    def _load_dependency(self, path: str) -> None:
        name = os.path.basename(path).partition(".ko")[0].replace("-", "_")
        self._root.make_directory(f"/sys/module/{name}")
        pci_bus.write(self._root, f"/sys/module/{name}/initstate", b"live\n")
        self._emit("module", "add")

    def _probe(self, switch: str) -> None:
        if pci_bus.driver(self._root, switch) is not None:
            return
        self._log.write(
            f"nvidia-nvswitch: Probing device {switch}, Vendor Id = 0x10de, Device Id = 0x22a3, Class = 0x68000"
        )
        if switch in self._failing_probes:
            self._log.write(
                f"nvidia-nvswitch{self._free_minor()}: Failed to initialize device : -5",
                f"nvidia-nvswitch {switch}: probe with driver nvidia-nvswitch failed with error -5",
            )
            return
        self._assign_minor(switch)
        self._log.write(f"nvidia-nvswitch{self._minors[switch]}: using MSI")
        self._probed_at[switch] = time.monotonic()
        driver.probe_switch(self._root, switch, self._emit)

    def _assign_minor(self, switch: str) -> None:
        self._minors[switch] = self._free_minor()

    def _free_minor(self) -> int:
        """nvswitch_find_minor(): the lowest number that no probed switch has."""
        taken = set(self._minors.values())
        return next(minor for minor in range(hardware.CONTROL_MINOR) if minor not in taken)

    def _release(self, switch: str) -> None:
        minor = self._minors.pop(switch, None)
        if minor is not None:
            self._log.write(f"nvidia-nvswitch{minor}: removing device {switch}")
            driver.release_switch(self._root, switch, self._emit)

    def _emit(self, subsystem: str, _action: str) -> None:
        with self._lock:
            self._listeners = [listener for listener in self._listeners if listener.emit(subsystem)]

    def _check_control_node(self) -> None:
        status = self.node_status(_CONTROL_NODE)
        if status is None:
            raise CannotObserve(_CONTROL_NODE, os.strerror(errno.ENOENT))
        major = hardware.parse_majors(self._root.read_text("/proc/devices") or "").get("nvidia-nvswitch")
        if status.kind != "char":
            raise CannotObserve(_CONTROL_NODE, "not a device node")
        if (status.major, status.minor) != (major, hardware.CONTROL_MINOR):
            raise CannotObserve(_CONTROL_NODE, os.strerror(errno.ENXIO))

    def _heartbeat(self) -> dict[str, Any]:
        text = self._root.read_text(hardware.HEARTBEAT_FILE)
        return json.loads(text) if text else {}

    def _device(self, switch: str, heartbeat: dict[str, Any]) -> SwitchDevice:
        is_blacklisted = switch in self._blacklisted
        has_routes = (
            heartbeat.get("state") == "configured"
            and switch in heartbeat["switches"]
            and self._probed_at.get(switch, 0.0) <= heartbeat["started"]
        )
        device_state = DeviceState.CONFIGURED if has_routes else DeviceState.STANDBY
        return SwitchDevice(
            minor=self._minors[switch],
            uuid=hardware.switch_uuid(switch),
            pci_bus_id=switch,
            driver_state=self._driver_state(switch, heartbeat, has_routes=has_routes),
            device_state=DeviceState.BLACKLISTED if is_blacklisted else device_state,
            device_reason=_REASON_MANUAL_OUT_OF_BAND if is_blacklisted else 0,
            physical_id=hardware.physical_id(switch),
        )

    def _driver_state(self, switch: str, heartbeat: dict[str, Any], *, has_routes: bool) -> DriverState:
        if switch in self._manager_errors:
            return DriverState.MANAGER_ERROR
        if not has_routes:
            return DriverState.STANDBY
        timeout = max(_SHORTEST_HEARTBEAT_TIMEOUT_SECONDS, _HEARTBEAT_TIMEOUT_SECONDS / self._speed)
        is_late = time.monotonic() - heartbeat["at"] > timeout
        return DriverState.MANAGER_TIMEOUT if is_late else DriverState.CONFIGURED


def _kind(mode: int) -> str:
    match stat.S_IFMT(mode):
        case stat.S_IFREG:
            return "file"
        case stat.S_IFDIR:
            return "directory"
        case stat.S_IFLNK:
            return "symlink"
        case stat.S_IFCHR:
            return "char"
        case _:
            return "other"

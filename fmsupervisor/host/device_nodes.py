"""The device nodes that Fabric Manager and NSCQ need, and how they are made right.

nvidia.ko makes no class device, so neither devtmpfs nor udev creates these nodes; names, minors and modes are a
convention of NVIDIA's nvidia-modprobe (nvidia-modprobe-utils.h; linux_nvswitch.c, nv-chardev-numbers.h, nv-caps.c).
Majors are dynamic and come from /proc/devices; a family whose major is not there is not wanted yet. Nothing but a
device is ever replaced: a regular file, directory or symbolic link at the path is somebody else's and is reported.
"""

import grp
import pwd
import re
from collections.abc import Iterable

from fmsupervisor.errors import CannotObserve, ConfigError
from fmsupervisor.facts import DriverView, Host, NodeResult, WantedNode
from fmsupervisor.host.kernel import Kernel, NodeStatus
from fmsupervisor.settings import DeviceNodeSettings

CAPABILITY_DIRECTORY = "/dev/nvidia-caps"

_CONTROL_MINOR = (
    255  # of nvidia-nvswitchctl (NVSWITCH_CTL_MINOR) and of nvidiactl (NV_MINOR_DEVICE_NUMBER_CONTROL_DEVICE)
)
_HIGHEST_ID = 0xFFFFFFFE  # (uid_t)-1 means "unchanged" to chown(2)
_CAPABILITY_MODE = 0o400  # when the capability's proc file does not say


def wanted_nodes(
    host: Host, driver: DriverView | None, settings: DeviceNodeSettings, uid: int, gid: int
) -> tuple[WantedNode, ...]:
    """The nodes that should exist now. ``driver`` is None when the control node could not be asked yet."""
    mode = parse_mode(settings.mode)
    nodes = []
    for family in settings.manage:
        for name, major, minor, own_mode in _family(family, host, driver):
            nodes.append(WantedNode(f"/dev/{name}", major, minor, mode if own_mode is None else own_mode, uid, gid))
    return tuple(nodes)


def ensure_nodes(kernel: Kernel, wanted: Iterable[WantedNode]) -> tuple[NodeResult, ...]:
    """Make each node right. Never raises: what did not work is in the results (``refused`` or ``failed``)."""
    return tuple(_ensure(kernel, node) for node in wanted)


def resolve_owner(owner: str, group: str) -> tuple[int, int]:
    """User and group id of names or numbers. Raises ``ConfigError`` when there is no such name on this host."""
    try:
        uid = int(owner) if owner.isdecimal() else pwd.getpwnam(owner).pw_uid
    except KeyError as error:
        raise ConfigError(f"device_nodes.owner: {owner!r} is not a user of this host") from error
    try:
        gid = int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid
    except KeyError as error:
        raise ConfigError(f"device_nodes.group: {group!r} is not a group of this host") from error
    if max(uid, gid) > _HIGHEST_ID:
        raise ConfigError(f"device_nodes.owner, group: {owner}:{group} is beyond the highest id, {_HIGHEST_ID}")
    return uid, gid


def parse_mode(text: str) -> int:
    """Permission bits from octal text such as "0660". Raises ``ConfigError``."""
    if not re.fullmatch(r"0?[0-7]{3}", text, re.ASCII):
        raise ConfigError(f'device_nodes.mode: {text!r} is not an octal mode from "0000" to "0777"')
    return int(text, 8)


def _family(family: str, host: Host, driver: DriverView | None) -> list[tuple[str, int, int, int | None]]:
    """Name below /dev, major, minor and the family's own mode of each node of one key of ``device_nodes.manage``."""
    majors = host.majors
    switch = majors.get("nvidia-nvswitch")
    match family:
        case "nvidia-nvswitchctl" if switch is not None:
            return [("nvidia-nvswitchctl", switch, _CONTROL_MINOR, None)]
        case "nvidia-nvswitch" if switch is not None:
            return [(f"nvidia-nvswitch{minor}", switch, minor, None) for minor in _switch_minors(host, driver)]
        case "nvidia-nvlink" if (major := majors.get("nvidia-nvlink")) is not None:
            return [("nvidia-nvlink", major, 0, None)]
        case "nvidiactl":
            major = majors.get("nvidiactl", majors.get("nvidia-frontend"))  # nvidia-frontend up to branch 535
            return [] if major is None else [("nvidiactl", major, _CONTROL_MINOR, None)]
        case "fabric-mgmt":
            major, minor = majors.get("nvidia-caps"), host.fabric_management_minor
            if major is None or minor is None:
                return []
            mode = host.fabric_management_mode
            return [
                (f"nvidia-caps/nvidia-cap{minor}", major, minor, _CAPABILITY_MODE if mode is None else mode & 0o777)
            ]
    return []


def _switch_minors(host: Host, driver: DriverView | None) -> list[int]:
    """A probe takes the lowest free minor (``nvswitch_find_minor``), so without the driver's word they count from 0."""
    if driver is not None:
        return sorted(device.minor for device in driver.devices)
    return list(range(len(host.probed_switches or ())))


def _ensure(kernel: Kernel, node: WantedNode) -> NodeResult:
    try:
        if conflict := _prepare_directory(kernel, node.path.rpartition("/")[0]):
            return NodeResult(node, "refused", conflict)
        status = kernel.node_status(node.path)
        if status is not None and status.kind != "char":
            return NodeResult(node, "refused", f"{_describe(status, node.path)}; it is left alone")
        return _make_right(kernel, node, status)
    except CannotObserve as error:
        return NodeResult(node, "failed", str(error))
    except OSError as error:
        return NodeResult(node, "failed", f"cannot make {node.path}: {error.strerror or error}")


def _make_right(kernel: Kernel, node: WantedNode, status: NodeStatus | None) -> NodeResult:
    if status is None:
        kernel.make_node(node.path, node.major, node.minor, node.mode, node.uid, node.gid)
        return NodeResult(node, "created")
    if (status.major, status.minor) != (node.major, node.minor):
        kernel.make_node(node.path, node.major, node.minor, node.mode, node.uid, node.gid)
        return NodeResult(node, "replaced", f"it was the device {status.major}:{status.minor}")
    if (status.mode, status.uid, status.gid) != (node.mode, node.uid, node.gid):
        kernel.adjust_node(node.path, node.mode, node.uid, node.gid)
        return NodeResult(node, "adjusted", f"it was {status.mode:04o} {status.uid}:{status.gid}")
    return NodeResult(node, "kept")


def _prepare_directory(kernel: Kernel, directory: str) -> str:
    """Make a subdirectory of /dev; the reason when something else is in its place."""
    if directory == "/dev":
        return ""
    status = kernel.node_status(directory)
    if status is None:
        kernel.make_node_directory(directory)
    elif status.kind != "directory":
        return f"{_describe(status, directory)}; it is left alone"
    return ""


def _describe(status: NodeStatus, path: str) -> str:
    names = {"symlink": "a symbolic link", "directory": "a directory", "file": "a regular file", "char": "a device"}
    return f"there is {names.get(status.kind, 'something that is not a character device')} at {path}"

"""What the simulated nv-fabricmanager checks before it opens its log. Refusals are bare lines on standard error.

Wording for a missing device node and for an unknown configuration key is not known from public logs; the nearest known
message is used. Cheap imports only.
"""

import contextlib
import errno
import os
from typing import NoReturn

from fmsupervisor.simulator import hardware, messages, stock_files
from fmsupervisor.simulator.driver_link import device_minors, device_number

_INTEGER_RANGES = {
    "LOG_LEVEL": (0, 4),
    "LOG_APPEND_TO_LOG": (0, 1),
    "LOG_FILE_MAX_SIZE": (1, 1 << 20),
    "LOG_MAX_ROTATE_COUNT": (0, 1000),
    "DAEMONIZE": (0, 1),
    "FABRIC_MODE": (0, 2),
    "FABRIC_MODE_RESTART": (0, 1),
    "FM_CMD_PORT_NUMBER": (0, 65535),
}


def read_config(path: str) -> dict[str, str]:
    """The active lines of fabricmanager.cfg; none when there is no file (built-in defaults)."""
    options = {}
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                key, equals, value = line.partition("=")
                if equals and not line.lstrip().startswith("#"):
                    options[key.strip()] = value.strip()
    except FileNotFoundError:
        return {}
    except OSError as error:
        refuse(f"cannot read {path}: {error.strerror}")
    return options


def refuse_by_behaviour(kind: str) -> None:
    """The scripted refusals."""
    match kind:
        case "bad-config":
            refuse(messages.invalid_item("FABRIC_NODE_CONFIG_FILE"))
        case "bad-config-exit-zero":
            refuse(messages.invalid_item("LOG_FILE_NAME"), status=0)
        case "nothing-to-do":
            refuse(messages.NOTHING_TO_DO)
        case "loader-error":
            refuse(messages.loader_error("libnvidia-nscq.so.2"), status=127)


def check_config(host: str, version: str, options: dict[str, str]) -> None:
    """Keys, numbers, and that the directories exist that the configuration names."""
    known = stock_files.known_keys(version)
    for key, value in options.items():
        low, high = _INTEGER_RANGES.get(key, (0, 0))
        if key not in known or (key in _INTEGER_RANGES and not (value.isdigit() and low <= int(value) <= high)):
            refuse(messages.invalid_item(key))
    log_directory = os.path.dirname(options.get("LOG_FILE_NAME", "/var/log/fabricmanager.log"))
    if log_directory and not os.path.isdir(host + log_directory):
        refuse(messages.invalid_item("LOG_FILE_NAME"), status=0 if options.get("DAEMONIZE") == "1" else 1)
    directories = {
        "TOPOLOGY_FILE_PATH": options.get("TOPOLOGY_FILE_PATH", "/usr/share/nvidia/nvswitch"),
        "DATABASE_PATH": options.get("DATABASE_PATH", ""),
    }
    if options.get("FABRIC_MODE", "0") != "0":
        directories["STATE_FILE_NAME"] = os.path.dirname(options.get("STATE_FILE_NAME", ""))
    for key, directory in directories.items():
        if directory and not os.path.isdir(host + directory):
            refuse(messages.invalid_item(key))
    if not os.access(f"{host}/run/nvidia-fabricmanager", os.W_OK | os.X_OK):
        refuse(messages.directory_denied("/var/run/nvidia-fabricmanager"))


def check_driver(host: str, version: str) -> None:
    """The nodes that Fabric Manager opens, and the driver's version, which must be its own."""
    majors = hardware.parse_majors(_read(f"{host}/proc/devices") or "")
    nvswitch = majors.get("nvidia-nvswitch")
    if not _has_node(host, "nvidia-nvswitchctl", nvswitch, hardware.CONTROL_MINOR):
        refuse(messages.NOTHING_TO_DO)
    words = (_read(f"{host}/proc/driver/nvidia/version") or "").split()
    driver = next((word for word in words if word[:3].isdigit()), "")
    if driver != version:
        refuse(messages.version_rejected(version, driver))
    switches = probed_switches(host)
    minors = device_minors(host)
    nodes = [("nvidia-nvlink", majors.get("nvidia-nvlink"), 0)]
    nodes += [
        (f"nvidia-nvswitch{minor}", nvswitch, minor) for minor in (range(len(switches)) if minors is None else minors)
    ]
    if not switches or not all(_has_node(host, *node) for node in nodes):
        refuse(messages.NOTHING_TO_DO)


def probed_switches(host: str) -> list[str]:
    """Bus ids of the switches that the driver has."""
    try:
        return sorted(os.listdir(f"{host}/proc/driver/nvidia-nvswitch/devices"))
    except FileNotFoundError:
        return []


def refuse(message: str, *, status: int = 1) -> NoReturn:
    """End with a bare line on standard error."""
    with contextlib.suppress(OSError):
        os.write(2, f"{message}\n".encode())
    os._exit(status)


def _has_node(host: str, name: str, major: int | None, minor: int) -> bool:
    device = device_number(f"{host}/dev/{name}")
    if device is not None:
        return (os.major(device), os.minor(device)) == (major, minor)
    node = hardware.parse_node(_read(f"{host}/dev/{name}") or "")
    return node is not None and node[:2] == (major, minor)


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 16)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.ENXIO):
            return None
        raise

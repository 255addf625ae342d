"""The keys of fabricmanager.cfg and the driver branches that know them.

Fabric Manager refuses to start on a key that it does not know, so a key is written only when there is a reason to
believe that this version knows it: the stock file that came with it mentions the key, or the table below has it for
the branch.

Sources of the table: the Fabric Manager User Guide (releases of 2021, 2024 and 2025), the complete stock file of
595.71.05, and the cases where an older binary refused a newer key. Keys whose first branch is not known exactly carry
the oldest one for which there is evidence; an older version that knows such a key mentions it in its stock file.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

ALWAYS = 0

OWNED_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "LOG_FILE_NAME": "fabric_manager.log_file",
        "TOPOLOGY_FILE_PATH": "fabric_manager.topology_path",
        "STATE_FILE_NAME": "fabric_manager.state_file",
        "DATABASE_PATH": "fabric_manager.database_path",
        "FABRIC_MODE": "fabric_manager.fabric_mode",
        "FABRIC_MODE_RESTART": "fabric_manager.resiliency_restart",
    }
)
"""Keys that have a setting of their own, and that setting."""

FIXED_KEYS: Mapping[str, str] = MappingProxyType({"DAEMONIZE": "0", "LOG_USE_SYSLOG": "0"})
"""Keys that supervision leaves no choice: a process that forks away, or whose log goes elsewhere, cannot be watched."""

_ALWAYS_KEYS = (
    "LOG_LEVEL",
    "LOG_FILE_NAME",
    "LOG_APPEND_TO_LOG",
    "LOG_FILE_MAX_SIZE",
    "LOG_USE_SYSLOG",
    "DAEMONIZE",
    "BIND_INTERFACE_IP",
    "STARTING_TCP_PORT",
    "UNIX_SOCKET_PATH",
    "FABRIC_MODE",
    "FABRIC_MODE_RESTART",
    "STATE_FILE_NAME",
    "FM_CMD_BIND_INTERFACE",
    "FM_CMD_PORT_NUMBER",
    "FM_CMD_UNIX_SOCKET_PATH",
    "FM_STAY_RESIDENT_ON_FAILURES",
    "ACCESS_LINK_FAILURE_MODE",
    "TRUNK_LINK_FAILURE_MODE",
    "NVSWITCH_FAILURE_MODE",
    "ABORT_CUDA_JOBS_ON_FM_EXIT",
    "TOPOLOGY_FILE_PATH",
)

_LATER_KEYS = {
    "DATABASE_PATH": 535,
    "FABRIC_NODE_CONFIG_FILE": 535,
    "LOG_MAX_ROTATE_COUNT": 560,
    "FM_SM_MGMT_PORT_GUID": 570,
    "FM_SM_IPC_INTERFACE": 570,
    "FM_CMD_VSOCK_CID": 595,
    "FM_CMD_VSOCK_PORT_NUMBER": 595,
    "USE_RPC": 595,
    "NETWORK_INTERFACE": 595,
    "ENABLE_AUTH_ENCRYPTION": 595,
    "AUTH_SOURCE": 595,
    "SERVER_KEY": 595,
    "SERVER_CERT": 595,
    "SERVER_CERT_AUTH": 595,
    "CLIENT_KEY": 595,
    "CLIENT_CERT": 595,
    "CLIENT_CERT_AUTH": 595,
    "SECURITY_TARGET_OVERRIDE": 595,
    "MNNVL_RESILIENCY_MODE": 595,
    "MNNVL_ENABLE_DEFAULT_PARTITION": 595,
    "PARTITION_RAIL_POLICY": 595,
}

FIRST_BRANCH: Mapping[str, int] = MappingProxyType(dict.fromkeys(_ALWAYS_KEYS, ALWAYS) | _LATER_KEYS)
"""The first driver branch that knows a key. No key is known to have been removed again."""

MULTI_NODE_KEYS = frozenset(
    {
        "ENABLE_LOCALFM",
        "GFM_WAIT_TIMEOUT",
        "ENABLE_TOPOLOGY_VALIDATION",
        "MULTI_NODE_TOPOLOGY",
        "MULTI_NODE_ENABLE_ALL_NODE_PARTITION",
    }
)
"""Keys of multi-node systems only; they are accepted when the stock file mentions them."""


@dataclass(frozen=True, slots=True)
class UnknownKey:
    """A key that this Fabric Manager would refuse to start with, and why that is believed."""

    key: str
    reason: str


def unknown_keys(keys: Iterable[str], version: str | None, stock_keys: frozenset[str]) -> tuple[UnknownKey, ...]:
    """Those of ``keys`` that must not be written, in their order.

    ``version`` is Fabric Manager's ("570.124.06"), None when it is not known; ``stock_keys`` are all keys that the
    stock file mentions, set or commented out.
    """
    reasons = ((key, _reason_to_refuse(key, version, stock_keys)) for key in keys)
    return tuple(UnknownKey(key, reason) for key, reason in reasons if reason)


def is_known(key: str, version: str | None, stock_keys: frozenset[str]) -> bool:
    """Whether this Fabric Manager knows the key."""
    return not _reason_to_refuse(key, version, stock_keys)


def driver_branch(version: str | None) -> int | None:
    """The branch that a driver version belongs to (570 for "570.124.06"); None when it cannot be told."""
    found = re.match(r"(\d{3,4})\.", version or "")
    return int(found[1]) if found else None


def _reason_to_refuse(key: str, version: str | None, stock_keys: frozenset[str]) -> str:
    """Empty when the key is known."""
    first = FIRST_BRANCH.get(key)
    if key in stock_keys or first == ALWAYS:
        return ""
    if key in MULTI_NODE_KEYS:
        return "it is for multi-node systems only and the stock file does not mention it"
    if first is None:
        return "neither the stock file mentions it nor is any version known to have it" + _suggestion(key, stock_keys)
    branch = driver_branch(version)
    if branch is None:
        return f"it came with {first}, and the version of this Fabric Manager is not known"
    return "" if branch >= first else f"it came with {first}, and this Fabric Manager is {version}"


def _suggestion(key: str, stock_keys: frozenset[str]) -> str:
    from difflib import get_close_matches  # noqa: PLC0415  needed for mistakes only

    close = get_close_matches(key, sorted(stock_keys | FIRST_BRANCH.keys()), n=1)
    return f" (did you mean {close[0]}?)" if close else ""

"""The file in which the map of modules and PCI bus ids is kept over restarts of the daemon and of the host.

JSON, beside the rendered fabricmanager.cfg, since that directory must be writable anyway. It belongs to one machine:
/sys/class/dmi/id/product_uuid (of SMBIOS; readable by root) is stored with it, and another machine's map is ignored, as
is a file that is damaged, cut or of another make.
"""

import json
import re

from fmsupervisor.errors import CannotObserve
from fmsupervisor.facts import ModuleMap
from fmsupervisor.host.root import HostRoot

FILE_NAME = "fmsupervisor-modules.json"

_PRODUCT_UUID = "/sys/class/dmi/id/product_uuid"
_SCHEMA = 1
_LIMIT_BYTES = 1 << 16
_BUS_ID = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def store_path(config_path: str) -> str:
    """The file that belongs to this fabricmanager.cfg."""
    return f"{config_path.rpartition('/')[0]}/{FILE_NAME}"


def load(root: HostRoot, path: str) -> ModuleMap | None:
    """What was kept; None when there is nothing that can be used."""
    try:
        record = json.loads(root.read_text(path, _LIMIT_BYTES) or "null")
    except (CannotObserve, ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("schema") != _SCHEMA or record.get("machine") != _machine(root):
        return None
    module_ids, contradicted = record.get("module_ids"), record.get("contradicted")
    if not isinstance(module_ids, dict) or not isinstance(contradicted, list):
        return None
    return ModuleMap(
        {bus_id: number for bus_id, number in module_ids.items() if _is_bus_id(bus_id) and type(number) is int},
        frozenset(bus_id for bus_id in contradicted if _is_bus_id(bus_id)),
    )


def save(root: HostRoot, path: str, known: ModuleMap) -> None:
    """Replace the file. Raises ``ActionFailed``."""
    record = {
        "schema": _SCHEMA,
        "machine": _machine(root),
        "module_ids": dict(sorted(known.module_ids.items())),
        "contradicted": sorted(known.contradicted),
    }
    root.write_atomically(path, json.dumps(record, indent=1).encode() + b"\n", durable=False)


def _machine(root: HostRoot) -> str:
    try:
        return (root.read_text(_PRODUCT_UUID, 256) or "").strip().lower()
    except CannotObserve:
        return ""


def _is_bus_id(value: object) -> bool:
    return isinstance(value, str) and _BUS_ID.fullmatch(value) is not None

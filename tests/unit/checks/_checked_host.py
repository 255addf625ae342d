"""A simulated host and what a check says of it."""

import os
import stat
from collections.abc import Mapping
from typing import Any

from fmsupervisor import config
from fmsupervisor.checks.context import Context, Disk
from fmsupervisor.checks.finding import Finding
from fmsupervisor.checks.registry import GUEST_CHECKS, HOST_CHECKS
from fmsupervisor.checks.runner import answer
from fmsupervisor.fabric_manager.installation import VersionOutput
from fmsupervisor.host.root import HostRoot
from fmsupervisor.simulator.kernel import SimulatedKernel
from fmsupervisor.simulator.tree import TreeOptions, build_tree

CHECKS = {check.name: check for check in (*HOST_CHECKS, *GUEST_CHECKS)}
PLENTY = Disk(100 << 30, is_read_only=False)


def make_context(directory: object, settings: str = "", **changes: Any) -> Context:
    """The host below ``directory`` with these settings (TOML); nv-fabricmanager is not really executed."""
    root = HostRoot(str(directory))
    parts: dict[str, Any] = {
        "run_program": lambda arguments, environment, timeout: VersionOutput(_version(root), "", 0),
        "environment": {"PATH": "/nowhere"},
        "disk": lambda root, path: PLENTY,
    }
    parts |= changes
    node_status = parts.pop("node_status", None) or SimulatedKernel(root).node_status
    return Context(root, config.load_text(settings, "test.toml").settings, node_status, **parts)


def _version(root: HostRoot) -> str:
    import json

    version = json.loads(root.read_bytes("/.simulator/fabric_manager.json") or b"{}").get("version")
    return f"Fabric Manager version is : {version}\n"


def build(directory: object, **options: Any) -> HostRoot:
    build_tree(str(directory), TreeOptions(**options))
    return HostRoot(str(directory))


def ask(context: Context, name: str) -> Finding:
    return answer(CHECKS[name], context)


def put(root: HostRoot, logical: str, content: str | bytes) -> None:
    """Write a file, with its directory, readable by all and writable by its owner alone."""
    root.make_directory(os.path.dirname(logical))
    root.write_atomically(logical, content.encode() if isinstance(content, str) else content, durable=False)


def put_link(root: HostRoot, logical: str, target: str) -> None:
    root.make_directory(os.path.dirname(logical))
    os.symlink(target, root.path(logical))


def add_machine(root: HostRoot, pid: int, started: int, groups: Mapping[int, int], name: str = "qemu-kvm") -> None:
    """A virtual machine with vfio groups open: descriptor to group."""
    put(root, f"/proc/{pid}/comm", f"{name}\n")
    put(root, f"/proc/{pid}/stat", f"{pid} ({name}) S " + "0 " * 18 + f"{started} 0 0\n")
    for descriptor, group in groups.items():
        put_link(root, f"/proc/{pid}/fd/{descriptor}", f"/dev/vfio/{group}")


def picture(directory: str) -> dict[str, tuple[object, ...]]:
    """Everything in a tree, times included; what a reader must leave as it was."""
    found: dict[str, tuple[object, ...]] = {}
    for parent, directories, files in os.walk(directory):
        for name in (*directories, *files, "."):
            path = os.path.join(parent, name)
            status = os.lstat(path)
            content: object = os.readlink(path) if stat.S_ISLNK(status.st_mode) else status.st_size
            found[path] = (
                status.st_mode,
                status.st_ino,
                status.st_uid,
                content,
                status.st_mtime_ns,
                status.st_ctime_ns,
            )
    return found

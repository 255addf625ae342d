"""Is somebody else's Fabric Manager there already?

Two at once fight over the switches, so before a start everything passive is asked: the processes of /proc (the
vendor's unit, a container, one that daemonised long ago) and the listening sockets of /proc/net (a stranger on the
command port or socket would make our start fail). Nothing is connected to and nothing is killed. Sources:
proc_pid_comm(5), proc_pid_stat(5), proc_pid_cgroup(5); Linux net/ipv4/tcp_ipv4.c ``get_openreq4``, net/unix/af_unix.c
``unix_seq_show``. Processes of containers are seen with their pid here; sockets only in this network namespace.
"""

import re
from collections.abc import Iterator

from fmsupervisor.errors import CannotObserve
from fmsupervisor.facts import ForeignFabricManager
from fmsupervisor.host.root import HostRoot

PROGRAM = "nv-fabricmanager"

_COMM = PROGRAM[:15]  # TASK_COMM_LEN is 16 with the NUL; NVIDIA's nv-fabricmanager-start.sh has the same comm
_TABLE_LIMIT_BYTES = 16 << 20
_TCP_LISTEN = "0A"  # TCP_LISTEN of include/net/tcp_states.h
_UNIX_LISTENING = 0x10000  # __SO_ACCEPTCON
_CONTROLLER_SERVICE = re.compile(r"[^/]+\.service$")


def find_foreign(
    root: HostRoot, own_pids: frozenset[int], command_port: int | None, command_socket: str
) -> tuple[ForeignFabricManager, ...]:
    """Every Fabric Manager that is not ours, and whoever else listens on its command port or socket.

    ``command_port``: None when Fabric Manager has no TCP port; ``command_socket``: empty when it has no Unix socket.
    Raises ``CannotObserve`` when /proc cannot be listed; single processes that cannot be looked at are skipped.
    """
    pids = _pids(root)
    found = {pid: _describe(root, pid) for pid in pids if pid not in own_pids and _is_fabric_manager(root, pid)}
    foreign = [ForeignFabricManager(pid, description) for pid, description in found.items()]
    listeners = _listeners(root, command_port, command_socket)
    if not listeners:
        return tuple(foreign)
    owners = _owners(root, pids, frozenset(listeners))
    for inode, address in listeners.items():
        owner = owners.get(inode)
        if owner is None:
            foreign.append(ForeignFabricManager(None, f"an unknown process listens on {address}"))
        elif owner not in own_pids and owner not in found:
            foreign.append(ForeignFabricManager(owner, f"{_describe(root, owner)} listens on {address}"))
    return tuple(foreign)


# --- processes


def _pids(root: HostRoot) -> tuple[int, ...]:
    names = root.list_directory("/proc")
    if names is None:
        raise CannotObserve("/proc", "it does not exist")
    return tuple(sorted(int(name) for name in names if name.isascii() and name.isdecimal()))


def _is_fabric_manager(root: HostRoot, pid: int) -> bool:
    """By comm first, one read for the thousands of others; then by the program or the first two arguments."""
    if _read(root, f"/proc/{pid}/comm").rstrip("\n") != _COMM or _is_dead(root, pid):
        return False
    program = _program(root, pid)
    arguments = _arguments(root, pid)
    names = [_base_name(program), *map(_base_name, arguments[:2])]  # argument 1: the script of an interpreter
    return PROGRAM in names or not (program or arguments)


def _is_dead(root: HostRoot, pid: int) -> bool:
    """A zombie, or gone: the state follows the parenthesised comm, which may itself hold parentheses."""
    state = _read(root, f"/proc/{pid}/stat").rpartition(")")[2].split(maxsplit=1)[:1]
    return state in (["Z"], ["X"], ["x"])


def _describe(root: HostRoot, pid: int) -> str:
    """For a person: ``pid 4711 (/usr/bin/nv-fabricmanager, unit nvidia-fabricmanager.service)``."""
    arguments = _arguments(root, pid)
    what = _program(root, pid) or (arguments[0] if arguments else _read(root, f"/proc/{pid}/comm").strip())
    return f"pid {pid} ({', '.join(filter(None, (what, _place(root, pid))))})"


def _place(root: HostRoot, pid: int) -> str:
    """The systemd unit, or the control group of a container; empty for the root group."""
    group = ""
    for line in _read(root, f"/proc/{pid}/cgroup").splitlines():
        _, _, rest = line.partition(":")  # "0::/path" (v2) or "9:name=systemd:/path" (v1)
        controllers, _, path = rest.partition(":")
        if controllers in ("", "name=systemd") and path not in ("", "/"):
            group = path
    unit = _CONTROLLER_SERVICE.search(group)
    return f"unit {unit[0]}" if unit else group and f"cgroup {group}"


def _program(root: HostRoot, pid: int) -> str:
    """Path of the executable; empty when hidden from us. An upgraded package leaves `` (deleted)``."""
    try:
        return (root.read_link(f"/proc/{pid}/exe") or "").removesuffix(" (deleted)")
    except CannotObserve:
        return ""


def _arguments(root: HostRoot, pid: int) -> list[str]:
    text = _read(root, f"/proc/{pid}/cmdline")
    return text.rstrip("\0").split("\0") if text.strip("\0") else []


def _base_name(path: str) -> str:
    return path.rpartition("/")[2]


# --- sockets


def _listeners(root: HostRoot, command_port: int | None, command_socket: str) -> dict[int, str]:
    """Inode and address of every socket that listens where Fabric Manager would."""
    found: dict[int, str] = {}
    if command_port is not None:
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            found |= dict.fromkeys(_tcp_inodes(_read(root, table), command_port), f"TCP port {command_port}")
    if command_socket:
        inodes = _unix_inodes(_read(root, "/proc/net/unix"), _without_var(command_socket))
        found |= dict.fromkeys(inodes, f"socket {command_socket}")
    return found


def _tcp_inodes(table: str, port: int) -> Iterator[int]:
    """Rows: ``sl local_address rem_address st tx:rx tr:when retrnsmt uid timeout inode``, the port in hexadecimal."""
    for line in table.splitlines()[1:]:
        columns = line.split(maxsplit=10)
        if len(columns) > 9 and columns[3] == _TCP_LISTEN and columns[1].endswith(f":{port:04X}"):  # noqa: PLR2004
            yield from _number(columns[9])


def _unix_inodes(table: str, path: str) -> Iterator[int]:
    """Rows: ``Num RefCount Protocol Flags Type St Inode Path``; flags in hexadecimal."""
    for line in table.splitlines()[1:]:
        columns = line.split(maxsplit=7)
        if len(columns) < 8 or _without_var(columns[7]) != path:  # noqa: PLR2004
            continue
        if any(flags & _UNIX_LISTENING for flags in _number(columns[3], 16)):
            yield from _number(columns[6])


def _owners(root: HostRoot, pids: tuple[int, ...], inodes: frozenset[int]) -> dict[int, int]:
    """Which process holds each socket, as far as /proc/<pid>/fd lets us look."""
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    owners: dict[int, int] = {}
    for pid in pids:
        try:
            descriptors = root.list_directory(f"/proc/{pid}/fd") or ()
        except CannotObserve:
            continue
        for descriptor in descriptors:
            inode = wanted.get(_read_link(root, f"/proc/{pid}/fd/{descriptor}"))
            if inode is not None:
                owners.setdefault(inode, pid)
        if len(owners) == len(inodes):
            break
    return owners


def _without_var(path: str) -> str:
    """/var/run is /run on every systemd host, and Fabric Manager's stock configuration uses the former."""
    return path.removeprefix("/var") if path.startswith("/var/run/") else path


def _number(text: str, base: int = 10) -> Iterator[int]:
    try:
        yield int(text, base)
    except ValueError:
        return


def _read(root: HostRoot, path: str) -> str:
    """The file's text; empty when the process has gone or hides it."""
    try:
        return root.read_text(path, _TABLE_LIMIT_BYTES) or ""
    except CannotObserve:
        return ""


def _read_link(root: HostRoot, path: str) -> str:
    try:
        return root.read_link(path) or ""
    except CannotObserve:
        return ""

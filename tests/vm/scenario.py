"""What the scenarios say to the daemon in the virtual machine, and ask of it and of the kernel."""

import json
import shlex
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from bed import CommandFailed, Machine

MODULES = "/usr/local/test/modules"
SELFTEST = f"{MODULES}/selftest"
SERVICE = "fmsupervisor.service"
SETTINGS = "/etc/fmsupervisor.toml"
STATUS = "/run/fmsupervisor/status.json"
BEHAVIOUR = "/usr/local/simulator/fabric_manager.json"
TREE_MODULES = "/usr/local/nvidia/usr/lib/modules/$(uname -r)/updates"
SWITCHES = [f"0000:{bus}:00.0" for bus in (83, 84, 85, 86)]
GPUS = [f"0000:{bus}:00.0" for bus in ("91", "92", "a1", "a2", "b1", "b2", "c1", "c2")]

PLUG = f"insmod {MODULES}/fake_hgx.ko"
GUESTS_TAKE_GPUS = "modprobe vfio-pci ids=10de:2335,10de:20b2,10de:2901"

# For Bed.restore(after=). A start of the daemon takes most of a scenario's time, so nearly all plug the board in afterwards.
BOARD = (f"{GUESTS_TAKE_GPUS} && {PLUG} && udevadm settle",)  # the board and no daemon
IDLE = (f"{GUESTS_TAKE_GPUS} && systemctl start {SERVICE}",)  # the daemon runs on a host without board
RUNNING = (*IDLE, f'{PLUG} && until grep -q \'"state": *"configured"\' {STATUS}; do sleep 0.5; done')

Document = dict[str, Any]


def document(machine: Machine) -> Document:
    """The status document, as ``fmsupervisor status --json`` prints it, without the seconds that the command takes."""
    found: Document = json.loads(machine.get(STATUS))
    return found


def codes(found: Document) -> set[str]:
    """The active conditions."""
    return {row["code"] for row in found["conditions"]}


def condition(found: Document, code: str) -> Document:
    """The first condition of that code."""
    return next(row for row in found["conditions"] if row["code"] == code)


def wait_until(machine: Machine, what: Callable[[Document], bool], timeout: float = 120) -> Document:
    """The status document as soon as ``what`` is true of it. Raises ``TimeoutError``."""
    deadline = time.monotonic() + timeout
    found: Document = {"state": "no status", "reason": "", "conditions": []}
    read = machine.get  # at first as it is, then each time it changes
    while time.monotonic() < deadline:
        try:
            found = json.loads(read(STATUS))
        except CommandFailed:
            pass  # not there yet
        else:
            if what(found):
                return found
        read = partial(machine.change, timeout=2)
    raise TimeoutError(f"not within {timeout:g} s; {found['state']}: {found['reason']}; {found['conditions']}")


def wait_for_state(machine: Machine, state: str, timeout: float = 120) -> Document:
    return wait_until(machine, lambda found: found["state"] == state, timeout)


def wait_for_code(machine: Machine, code: str, words: str = "", timeout: float = 120) -> Document:
    """Until the condition holds with these words in its detail. Returns the condition."""

    def holds(found: Document) -> bool:
        return any(row["code"] == code and words in row["detail"] for row in found["conditions"])

    return condition(wait_until(machine, holds, timeout), code)


def start(machine: Machine) -> None:
    """Begin; does not wait for the outcome."""
    machine.check(f"systemctl start --no-block {SERVICE}")


def plug(machine: Machine, parameters: str = "") -> None:
    """The board appears on the PCI bus."""
    machine.check(f"{PLUG} {parameters}")


def settings(machine: Machine, text: str, *, is_running: bool = False) -> None:
    """Write the settings file; the running daemon reads it again."""
    machine.put(SETTINGS, text.encode())
    if is_running:
        machine.check(f"systemctl reload {SERVICE}")


def tell(machine: Machine, command: str) -> None:
    """One command to the simulated Fabric Manager."""
    machine.check(f"echo {shlex.quote(command)} >/.simulator/commands", 10)


def behave(machine: Machine, **changes: object) -> None:
    """How Fabric Manager behaves from its next start on."""
    now = json.loads(machine.get(BEHAVIOUR))
    machine.put(BEHAVIOUR, json.dumps({**now, **changes}).encode())


def install_module(machine: Machine, name: str, edit: str = "cat") -> None:
    """Put a variant in the place of nvidia.ko of the tree, in one step, passed through the filter ``edit``."""
    suffix = name.partition(".")[2] or "ko"
    machine.check(
        f"cd {TREE_MODULES} && {edit} <{MODULES}/{name.partition('.')[0]}.{suffix} >.new && "
        f"mv .new nvidia.{suffix} && for other in nvidia.ko*; do [ $other = nvidia.{suffix} ] || rm $other; done"
    )


def is_loaded(machine: Machine, module: str = "nvidia") -> bool:
    """By the kernel's word."""
    return machine.run(f"grep -q '^{module} ' /proc/modules").code == 0


def switch_list(machine: Machine) -> dict[str, tuple[int, int]]:
    """The driver's own word, asked past the daemon: bus id -> (minor, driver state); 2 is CONFIGURED."""
    rows = [line.split() for line in machine.check(f"{SELFTEST} list").splitlines()]
    return {row[1]: (int(row[0]), int(row[2].partition("=")[2])) for row in rows}


def driver_of(machine: Machine, bus_id: str) -> str:
    """The driver that the kernel has bound, "" without one."""
    return machine.check(f"basename $(readlink /sys/bus/pci/devices/{bus_id}/driver) 2>/dev/null || true").strip()


def major_of(machine: Machine, name: str) -> int:
    """Of /proc/devices."""
    return int(machine.check(f"awk '$2 == \"{name}\" {{ print $1 }}' /proc/devices"))


def node(machine: Machine, path: str) -> tuple[str, int, int, str]:
    """Kind, major, minor, "mode owner" of what is at the path, by stat(1)."""
    kind, major, minor, permissions = machine.check(f"stat -c '%F|%Hr|%Lr|%a %U:%G' {path}").strip().split("|")
    return kind, int(major), int(minor), permissions


def words(machine: Machine) -> str:
    """All that the daemon has written to the journal."""
    return "\n".join(str(entry["MESSAGE"]) for entry in machine.journal(f"_SYSTEMD_UNIT={SERVICE}"))

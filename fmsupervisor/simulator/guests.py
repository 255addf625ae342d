"""Guests of the simulated host: processes of its /proc that hold vfio groups, as a KubeVirt node has them.

A guest's process is what ``host.guests`` looks at: comm, cmdline, cgroup, stat and the descriptors. When it was started
is written in ticks since the boot of the real host, as everything else in the simulation goes by the real clock.
Sources of the forms: proc_pid_stat(5), proc_pid_cmdline(5), qemu(1) and the control groups of Kubernetes.
"""

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass

from fmsupervisor.host.root import HostRoot
from fmsupervisor.simulator import hardware
from fmsupervisor.simulator.pci_bus import write

_FIRST_PID = 60001
_FIRST_DESCRIPTOR = 30


@dataclass(frozen=True, slots=True)
class SimulatedGuest:
    """One virtual machine. ``age_seconds``: simulated, for how long it has been running."""

    name: str  # namespace_name
    gpus: tuple[str, ...]
    age_seconds: float = 0.0


def present_guests(guests: tuple[SimulatedGuest, ...]) -> Iterator[tuple[int, SimulatedGuest]]:
    """The guests of a new tree with their pids."""
    return enumerate(guests, _FIRST_PID)


def start_guest(root: HostRoot, guest: SimulatedGuest, speed: float = 1.0) -> int:
    """Its process appears; the pid. The descriptors come last, so that nobody sees half a guest."""
    taken = [int(name) for name in root.list_directory("/proc") or () if name.isdecimal()]
    pid = max([_FIRST_PID - 1, *taken]) + 1
    ticks_per_second = os.sysconf("SC_CLK_TCK")
    age = guest.age_seconds / speed
    ticks = max(1, int((time.clock_gettime(time.CLOCK_BOOTTIME) - age) * ticks_per_second))
    process = f"/proc/{pid}"
    root.make_directory(process)
    name = f"guest={guest.name},debug-threads=on"
    arguments = ("/usr/libexec/qemu-kvm", "-name", name, "-machine", "q35", "-m", "2048000", "-nodefaults")
    texts = {
        "comm": "qemu-kvm\n",
        "cmdline": "\0".join(arguments) + "\0",
        "cgroup": f"0::{_group(pid)}\n",
        "stat": f"{pid} (qemu-kvm) S 1 {pid} {pid} 0 -1 138412416 {'0 ' * 12}{ticks} 0 0\n",
        "status": f"Name:\tqemu-kvm\nState:\tS (sleeping)\nPid:\t{pid}\nPPid:\t1\n",
    }
    for file, text in texts.items():
        write(root, f"{process}/{file}", text.encode())
    links = ["/dev/null", "/dev/vfio/vfio", *(f"/dev/vfio/{hardware.bus_number(gpu)}" for gpu in guest.gpus)]
    root.make_directory(f"{process}/fd.new")
    for descriptor, target in enumerate(links, _FIRST_DESCRIPTOR):
        os.symlink(target, root.path(f"{process}/fd.new/{descriptor}"))
    os.rename(root.path(f"{process}/fd.new"), root.path(f"{process}/fd"))
    return pid


def end_guest(root: HostRoot, pid: int, gpus: tuple[str, ...]) -> None:
    """Its process goes, and vfio resets its GPUs, so that they may ask to join the fabric again."""
    gone = root.path(f"{hardware.SIMULATOR_DIRECTORY}/ended-{pid}")
    os.rename(root.path(f"/proc/{pid}"), gone)
    shutil.rmtree(gone)
    for gpu in gpus:
        if os.path.exists(asked_file := root.path(f"{hardware.REGISTRATIONS}/{gpu}")):
            os.unlink(asked_file)


def note_request(root: HostRoot, gpu: str) -> None:
    """The GPU has asked to join; it does so once, whether there is a Fabric Manager to answer or not."""
    write(root, f"{hardware.REGISTRATIONS}/{gpu}", b"")


def _group(pid: int) -> str:
    pod = f"kubepods-burstable-podc5fd9c4f_0d6e_4e0e_8d6e_3d3b8c2b{pid % 10000:04d}.slice"
    return f"/kubepods.slice/kubepods-burstable.slice/{pod}/cri-containerd-{pid:064x}.scope"

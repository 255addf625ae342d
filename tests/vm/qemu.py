"""One QEMU process and the two lines to it: QMP (QEMU's control protocol) and the agent in the guest.

Both are socket pairs that QEMU inherits, so that there is no path to agree upon and nothing to clean up. The process is
killed by the kernel when the test run dies, and it is nice to tests with deadlines that run beside it. Forwarded ports are asked for at run time (the kernel chooses them): so a
saved state does not contain them, and machines run side by side.
"""

import json
import re
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

QEMU = "qemu-system-x86_64"

# What is at the same address in every process is translated once for all of them, which halves the start of a program. The
# rest of the second line also only costs time here.
_COMMAND_LINE = (
    "console=ttyS0 quiet loglevel=4 net.ifnames=0 intel_iommu=on tsc=reliable panic=-1 "
    "norandmaps nokaslr mitigations=off init_on_alloc=0 randomize_kstack_offset=off apparmor=0 audit=0 "
    "rcupdate.rcu_expedited=1 udev.children_max=2"
)
# la57=off: page tables of five levels cost time. One processor: two are slower in sum, for then every atomic operation must
# be one, and they patch code under each other's feet; better two machines side by side. The IOMMU must come first.
_MACHINE = """
    -nodefaults -no-user-config -display none -no-reboot
    -machine q35 -accel tcg -cpu max,la57=off -smp 1 -m 640
    -device intel-iommu
    -chardev file,id=console,path=console,append=on -serial chardev:console
    -device virtio-serial-pci -device virtserialport,chardev=agent,name=agent
    -netdev user,id=net0,restrict=on -device virtio-net-pci,netdev=net0,romfile=
    -mon chardev=qmp,mode=control
"""


class MachineDied(Exception):
    """QEMU ended, or the guest's kernel gave up; the message holds the end of the console."""


@dataclass(frozen=True, slots=True)
class Drives:
    """What a machine is made of."""

    kernel: Path
    initrd: Path
    image: Path  # read-only, shared
    disk: Path  # /usr/local, its own


class Line:
    """A socket to the guest or to QEMU that is read by size or by line, each with a deadline (monotonic seconds)."""

    def __init__(self, end: socket.socket, qemu: "Qemu") -> None:
        self._socket = end
        self._qemu = qemu
        self._pending = b""

    def send(self, data: bytes) -> None:
        self._socket.settimeout(300)
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise self._qemu.died() from error

    def read_line(self, deadline: float) -> str:
        while b"\n" not in self._pending:
            self._receive(deadline)
        line, _, self._pending = self._pending.partition(b"\n")
        return line.decode()

    def read(self, size: int, deadline: float) -> bytes:
        while len(self._pending) < size:
            self._receive(deadline)
        data, self._pending = self._pending[:size], self._pending[size:]
        return data

    def close(self) -> None:
        self._socket.close()

    def _receive(self, deadline: float) -> None:
        """More bytes. Looks at the console once a second: a guest that crashed never answers."""
        while True:
            self._socket.settimeout(1)
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                if self._qemu.has_crashed():
                    raise self._qemu.died() from None
                if time.monotonic() > deadline:
                    raise TimeoutError("the virtual machine does not answer") from None
                continue
            except OSError as error:
                raise self._qemu.died() from error
            if not data:
                raise self._qemu.died()
            self._pending += data
            return


class Qemu:
    """A running process. ``incoming`` restores a saved state instead of booting."""

    def __init__(self, directory: Path, drives: Drives, options: str, *, incoming: Path | None = None) -> None:
        self._console = directory / "console"
        self._messages = directory / "qemu.txt"
        self._console_start = len(self.console())
        agent, agent_far = socket.socketpair()
        qmp, qmp_far = socket.socketpair()
        with agent_far, qmp_far:
            arguments = [
                *("nice", "-n", "5", "setpriv", "--pdeathsig", "KILL", "--", QEMU, *_MACHINE.split()),
                *("-chardev", f"socket,id=agent,fd={agent_far.fileno()}"),
                *("-chardev", f"socket,id=qmp,fd={qmp_far.fileno()}"),
                *("-kernel", str(drives.kernel), "-initrd", str(drives.initrd)),
                *("-append", f"{_COMMAND_LINE} {options}"),
                *_drive("image", drives.image, "readonly=on"),
                *_drive("disk", drives.disk, "cache=unsafe"),
                *(("-incoming", f"exec:cat '{incoming}'") if incoming else ()),
            ]
            with open(self._messages, "wb") as messages:
                self._process = subprocess.Popen(
                    arguments,
                    cwd=directory,
                    stdin=subprocess.DEVNULL,
                    stdout=messages,
                    stderr=messages,
                    pass_fds=(agent_far.fileno(), qmp_far.fileno()),
                )
        self.agent = Line(agent, self)
        self._qmp = Line(qmp, self)
        self._qmp.read_line(time.monotonic() + 60)  # greeting
        self.command("qmp_capabilities")

    def command(self, name: str, **arguments: Any) -> Any:
        """One QMP command; events are skipped."""
        self._qmp.send(json.dumps({"execute": name, "arguments": arguments}).encode())
        while True:
            answer = json.loads(self._qmp.read_line(time.monotonic() + 60))
            if "return" in answer:
                return answer["return"]
            if "error" in answer:
                raise RuntimeError(f"QEMU refused {name}: {answer['error']['desc']}")

    def save(self, path: Path) -> None:
        """Stop for ever and write the state of the machine, without its disks."""
        self.command("stop")
        self.command("migrate-set-parameters", **{"max-bandwidth": 1 << 33})
        self.command("migrate", uri=f"exec:cat >'{path}'")
        self._wait_for("query-migrate", "completed")
        self.command("quit")
        self._process.wait(60)

    def resume(self) -> None:
        """After a restore: run as soon as the state has been read."""
        self._wait_for("query-status", "paused")
        self.command("cont")

    def forward(self, port: int) -> int:
        """Open a port of the guest on the loopback address of this machine and return its number here."""
        self.command("human-monitor-command", **{"command-line": f"hostfwd_add net0 tcp:127.0.0.1:0-10.0.2.15:{port}"})
        table = self.command("human-monitor-command", **{"command-line": "info usernet"})
        found = re.findall(rf"HOST_FORWARD\]\s+\d+\s+127\.0\.0\.1\s+(\d+)\s+10\.0\.2\.15\s+{port}\s", table)
        return int(found[-1])

    def console(self) -> str:
        """What came out of the serial port, over all boots of this machine."""
        try:
            return self._console.read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def has_crashed(self) -> bool:
        """Whether QEMU has ended or the guest's kernel printed a crash."""
        text = self.console()[self._console_start :]
        return self._process.poll() is not None or "Kernel panic" in text or "Oops: " in text

    def died(self) -> MachineDied:
        """The exception for it."""
        self.close()
        messages = self._messages.read_text(errors="replace")
        return MachineDied(f"the virtual machine died\n{messages}\n{self.console()[-4000:]}")

    def wait_for_end(self, seconds: float) -> None:
        """Until the guest has switched itself off."""
        self._process.wait(seconds)
        self.close()

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self.agent.close()
        self._qmp.close()

    def _wait_for(self, query: str, status: str) -> None:
        deadline = time.monotonic() + 60
        while (answer := self.command(query)).get("status") != status:
            if answer.get("status") == "failed" or time.monotonic() > deadline:
                raise RuntimeError(f"{query} says {answer}")
            time.sleep(0.02)


def is_installed() -> bool:
    """Whether QEMU can be run."""
    return shutil.which(QEMU) is not None


def _drive(name: str, path: Path, option: str) -> tuple[str, ...]:
    drive = f"if=none,id={name},format=raw,file={path},{option}"
    return ("-drive", drive, "-device", f"virtio-blk-pci,drive={name}")

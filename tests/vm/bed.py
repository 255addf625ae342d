"""A virtual HGX host: boots once, is saved, and is restored as often as a scenario needs a fresh one.

    bed = Bed(Path("build/vm"))
    bed.build()                         # root; minutes the first time, nothing the second
    with bed.restore() as machine:      # about a second
        machine.run("insmod /usr/local/test/modules/fake_hgx.ko", 60)
        machine.wait_for("test -e /sys/bus/pci/devices/0000:83:00.0")

In the machine: Debian with systemd and without Python; /usr/local/nvidia as extracted from the vendor's packages;
/usr/local/bin/fmsupervisor; /usr/local/test/modules with all variants of the modules. The board is not there before
fake_hgx.ko is loaded. ``root`` is "writable" or "sealed" (see guest/init). A machine whose ``with`` block ends with an
exception writes its console and journal into ``Bed.artifacts``.

Why no snapshots inside QEMU: state file and disk are separate here, so that the disk is a plain file that is copied, and
many machines may be restored from one state. A state is valid only for this QEMU, these arguments and this disk; it is made
anew by every run. Without KVM everything takes about ten times as long as on a real machine: so do the time limits here.
"""

import fcntl
import json
import os
import shlex
import shutil
import subprocess
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import bundle
from payload import build_disk
from qemu import QEMU, Drives, MachineDied, Qemu

HERE = Path(__file__).resolve().parent
TOOLS = (QEMU, "mmdebstrap", "mkfs.erofs", "mkfs.ext4", "cpio", "busybox", "modprobe", "zstd", "xz", "setpriv")
METRICS_PORT = 9752

_BOOT_SECONDS = 180
_BOOT_ATTEMPTS = 3  # QEMU without KVM crashes about one boot in 35: two processors patch the same code
_SETTLE = "systemctl is-system-running --wait; udevadm settle"


def obstacle() -> str | None:
    """Why there can be no virtual machine here; None when there can."""
    if os.uname().machine != "x86_64":
        return "the virtual machine is built for x86_64 only"
    if os.geteuid() != 0:
        return "needs root (builds a file system image)"
    missing = [
        tool for tool in TOOLS if shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None
    ]
    if missing:
        return f"not installed: {', '.join(missing)} (make deps)"
    return bundle.obstacle()


@dataclass(frozen=True, slots=True)
class Result:
    """What a command in the guest came to: both streams in one text."""

    code: int
    output: str


class CommandFailed(Exception):
    """A command in the guest ended with another status than 0."""


class Machine:
    """A running virtual host. Use it as a context manager, or ``close`` it."""

    def __init__(self, drives: Drives, options: str, artifacts: Path | None, *, state: Path | None = None) -> None:
        self._directory = drives.disk.parent
        self._drives = drives
        self._options = options
        self._artifacts = artifacts
        self._ports: dict[int, int] = {}
        self._qemu = self._start(state)
        if state is not None:
            try:
                self._qemu.resume()
                self.set_clock()
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exception: type[BaseException] | None, *_: object) -> None:
        try:
            if exception is not None and issubclass(exception, Exception):
                self.keep()
        finally:
            self.close()

    @property
    def console(self) -> str:
        """The text of the serial console since the first boot."""
        return self._qemu.console()

    def run(self, command: str, timeout: float = 60) -> Result:
        """Run a bash script in the guest as root, in /root, with nothing on standard input."""
        begun = time.monotonic()
        code, output = self._ask("run", command.encode(), timeout)
        text = output.decode(errors="replace")
        if code == 124 and time.monotonic() - begun >= timeout:
            raise TimeoutError(f"not within {timeout:g} s: {command}\n{text[-2000:]}")
        return Result(code, text)

    def check(self, command: str, timeout: float = 60) -> str:
        """The output of a script that must succeed. Raises ``CommandFailed``."""
        result = self.run(command, timeout)
        if result.code != 0:
            raise CommandFailed(f"status {result.code} from {command!r}:\n{result.output}")
        return result.output

    def put(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Write a file in the guest; its directory is made. Raises ``CommandFailed``."""
        self._fetch("put", f"{mode:o} {path}\0".encode() + content, 60)

    def get(self, path: str) -> bytes:
        """Read a file of the guest. Raises ``CommandFailed``."""
        return self._fetch("get", path.encode(), 60)

    def change(self, path: str, timeout: float) -> bytes:
        """A file of the guest as soon as it is another one than at the last call, or after ``timeout`` as it is.

        Costs the guest next to nothing. Raises ``CommandFailed``.
        """
        return self._fetch("change", path.encode(), timeout)

    def wait_for(self, predicate: str, timeout: float = 120) -> None:
        """Until a command in the guest succeeds. Raises ``TimeoutError``."""
        try:
            pause = "read -rt 0.2 -u 9 || :"  # of a pipe in which nothing ever comes: without a program
            self.check(f"exec 9<> <(:)\nuntil {{\n{predicate}\n}}; do {pause}; done >/run/agent/tries 2>&1", timeout)
        except TimeoutError:
            tries = self.run("tail -n 5 /run/agent/tries").output
            raise TimeoutError(f"not within {timeout} s: {predicate}\n{tries}") from None

    def scrape(self, path: str = "/metrics", port: int = METRICS_PORT) -> str:
        """GET from outside the machine. What listens must listen on more than the guest's loopback address."""
        here = self._ports.get(port)
        if here is None:
            here = self._ports[port] = self._qemu.forward(port)
        with urllib.request.urlopen(f"http://127.0.0.1:{here}{path}", timeout=60) as answer:
            return str(answer.read().decode())

    def journal(self, *matches: str) -> list[dict[str, Any]]:
        """Entries of the journal in the order of time; ``matches`` as for journalctl (``_PID=1``, ``--unit=NAME``)."""
        text = self.check(f"journalctl --sync; journalctl -q -o json --all {shlex.join(matches)}", 120)
        return [json.loads(line) for line in text.splitlines()]

    def set_clock(self) -> None:
        """A restored machine believes that it is the time at which it was saved."""
        self.check(f"date -s @{time.time():.3f}")

    def reboot(self, root: str = "", options: str = "") -> None:
        """Shut the guest down in order and boot it from cold with the same disk. Services start as at any boot.

        ``root`` and ``options``, where given, are for this boot and those to come.
        """
        if root:
            self._options = f"root={root} {options}"
        self.check("systemd-run --quiet --on-active=0.5 --timer-property=AccuracySec=0.1 systemctl reboot")
        self._qemu.wait_for_end(_BOOT_SECONDS)
        self._ports.clear()
        self._qemu = self._start(None)

    def save(self, directory: Path) -> None:
        """End the machine; its state and its disk are then in ``directory``."""
        self._qemu.save(directory / "state")
        shutil.move(self._drives.disk, directory / "disk.img")

    def keep(self, directory: Path | None = None) -> None:
        """Write what people need after a failure: console, journal, state of units and devices."""
        if directory is None:
            if self._artifacts is None:
                return
            directory = self._artifacts / self._directory.name
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "console.txt").write_text(self.console)
        reports = {
            "journal.txt": "journalctl --no-pager -o short-monotonic",
            "units.txt": "systemctl --no-pager --failed; systemctl --no-pager status fmsupervisor",
            "devices.txt": "lspci -nnk; ls -l /dev/nvidia*; cat /proc/devices /proc/modules",
            "status.txt": "fmsupervisor status; fmsupervisor status --json",
        }
        for name, command in reports.items():
            try:
                (directory / name).write_text(self.run(command, 60).output)
            except (MachineDied, TimeoutError, OSError) as error:
                (directory / name).write_text(f"{error}\n")

    def close(self) -> None:
        """End QEMU at once."""
        self._qemu.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self, state: Path | None) -> Qemu:
        if state is not None:
            return Qemu(self._directory, self._drives, self._options, incoming=state)
        return self._boot(_BOOT_ATTEMPTS)

    def _boot(self, attempts: int) -> Qemu:
        disk = self._drives.disk
        before = disk.with_suffix(".before")
        _copy(disk, before)
        qemu = self._qemu = Qemu(self._directory, self._drives, self._options)
        try:
            qemu.agent.read_line(time.monotonic() + _BOOT_SECONDS)  # "ready"
            self.run(_SETTLE, _BOOT_SECONDS)
        except (MachineDied, TimeoutError):
            qemu.close()
            if attempts == 1:
                raise
            os.replace(before, disk)
            return self._boot(attempts - 1)
        before.unlink()
        return qemu

    def _fetch(self, verb: str, request: bytes, timeout: float) -> bytes:
        code, output = self._ask(verb, request, timeout)
        if code != 0:
            raise CommandFailed(output.decode(errors="replace"))
        return output

    def _ask(self, verb: str, request: bytes, timeout: float) -> tuple[int, bytes]:
        """The guest answers within ``timeout``; only a guest that has crashed lets the longer wait here end."""
        deadline = time.monotonic() + timeout + 60
        self._qemu.agent.send(f"{verb} {len(request)} {timeout:g}\n".encode() + request)
        code, size = map(int, self._qemu.agent.read_line(deadline).split())
        return code, self._qemu.agent.read(size, deadline)


class Bed:
    """Builds into ``out`` and keeps there what the next run can use."""

    def __init__(self, out: Path) -> None:
        self.out = out.resolve()
        self.artifacts: Path | None = None  # where machines that are made from now on leave what explains a failure
        self._directory: Path | None = None
        self._states: dict[tuple[str, tuple[str, ...]], Path] = {}  # by root and scripts

    def build(self) -> None:
        """Kernel modules, image, bundle and disk, as far as they have changed. Raises ``RuntimeError``."""
        self.out.mkdir(parents=True, exist_ok=True)
        with open(self.out / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            out = str(self.out)
            steps = [partial(_narrate, "build_modules.sh", out), partial(_narrate, "build_image.sh", out, "root")]
            with ThreadPoolExecutor() as pool:
                started = [pool.submit(step) for step in (*steps, partial(bundle.build_bundle, self.out))]
            for each in started:
                each.result()
            _narrate("build_image.sh", out)
            build_disk(self.out)
            self._remove_left_behind()
            self._directory = self.out / f"run-{os.getpid()}"
            self._directory.mkdir(exist_ok=True)

    def boot(self, root: str = "writable", options: str = "") -> Machine:
        """A cold boot, 15 to 30 s; ``options`` are for the kernel's command line."""
        return Machine(self._new_drives(self.out / "disk.img"), f"root={root} {options}", self.artifacts)

    def restore(self, root: str = "writable", after: tuple[str, ...] = ()) -> Machine:
        """A fresh machine as it was after its boot and after the scripts ``after``, in about a second.

        What many scenarios have in common belongs into ``after``: each script runs once, on a machine that is then saved.
        """
        saved = self._states.get((root, after)) or self._save(root, after)
        drives = self._new_drives(saved / "disk.img")
        return Machine(drives, f"root={root}", self.artifacts, state=saved / "state")

    def close(self) -> None:
        """Throw the saved states away."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _save(self, root: str, after: tuple[str, ...]) -> Path:
        saved = Path(tempfile.mkdtemp(prefix="state-", dir=self._run_directory()))
        with self.restore(root, after[:-1]) if after else self.boot(root) as machine:
            for script in (*after[-1:], "sync"):
                machine.check(script, 300)
            machine.save(saved)
        self._states[root, after] = saved
        return saved

    def _new_drives(self, disk: Path) -> Drives:
        own = Path(tempfile.mkdtemp(prefix="machine-", dir=self._run_directory())) / "disk.img"
        _copy(disk, own)
        return Drives(self.out / "kernel/vmlinuz", self.out / "initrd", self.out / "image.erofs", own)

    def _remove_left_behind(self) -> None:
        """What runs that were killed could not remove."""
        for directory in self.out.glob("run-*"):
            if not Path("/proc", directory.name.removeprefix("run-")).exists():
                shutil.rmtree(directory, ignore_errors=True)

    def _run_directory(self) -> Path:
        if self._directory is None:
            raise RuntimeError("the bed has not been built")
        return self._directory


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "--sparse=always", "--reflink=auto", source, target], check=True)


def _narrate(script: str, *arguments: str) -> None:
    """Run a build step; its output is shown only when it fails."""
    command = ["nice", str(HERE / script), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        output = done.stdout.decode(errors="replace")
        raise RuntimeError(f"{script} failed with status {done.returncode}:\n{output[-8000:]}")

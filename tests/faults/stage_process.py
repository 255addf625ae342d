"""The daemon as a process of its own on a simulated host, with hands for what can be done only from inside.

Run by ``stage.py`` with one JSON object as its argument. Commands are JSON lists, one a line, on standard input; each is
answered by one line of JSON. When standard input ends, so does the daemon, as by SIGTERM.

Everything is the daemon's own but the kernel (simulated), the clock (whose wall clock can be stepped) and, where asked
for, mounts in a namespace of its own.
"""

import asyncio
import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from fmsupervisor import config, signals
from fmsupervisor.clock import Clock
from fmsupervisor.daemon import Daemon
from fmsupervisor.errors import ActionRefused, CannotObserve, FmsupervisorError
from fmsupervisor.exit_codes import ExitCode
from fmsupervisor.facts import Moment
from fmsupervisor.host.kernel import UeventSource
from fmsupervisor.host.root import HostRoot
from fmsupervisor.report import journal
from fmsupervisor.report.systemd import SERVICE_MANAGER_VARIABLES, SystemdNotifier
from fmsupervisor.settings import Settings
from fmsupervisor.simulator.command import _toml
from fmsupervisor.simulator.kernel import SimulatedKernel
from fmsupervisor.simulator.scenarios import SCENARIOS, _merged
from fmsupervisor.simulator.world import World
from tests.faults.disk import BALLAST, fill

SETTINGS_FILE = "/etc/fmsupervisor.toml"
BIND_RETRY_SECONDS = 0.2

_SMALL_DISK = "512k"
_CLONE_NEWNS = 0x20000
_MS_REC_PRIVATE = 0x4000 | 0x40000
_MS_BIND = 0x1000
_MS_REMOUNT_BIND_READ_ONLY = 0x20 | 0x1000 | 0x1
_MNT_DETACH = 2


class SteppedClock(Clock):
    """A clock whose wall clock somebody sets."""

    def __init__(self, speed: float) -> None:
        super().__init__(speed)
        self.wall_offset_seconds = 0.0

    def now(self) -> Moment:
        found = super().now()
        return Moment(found.monotonic, found.wall + self.wall_offset_seconds)


class DeafKernel(SimulatedKernel):
    """A kernel whose uevents cannot be listened to."""

    def monitor_uevents(self) -> UeventSource:  # type: ignore[override]
        raise CannotObserve("kernel uevents", "no netlink here")


class Mounts:
    """Mounts in a namespace of this process's own."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._check(self._libc.unshare(_CLONE_NEWNS))
        self._mount("none", "/", "", _MS_REC_PRIVATE, "")

    def small_disk(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)
        self._mount("none", path, "tmpfs", 0, f"mode=755,size={_SMALL_DISK}")

    def make_read_only(self, path: str) -> None:
        """A read-only view over the directory: what is open stays writable, whatever is opened from now on is not."""
        self._mount(path, path, "", _MS_BIND, "")
        self._mount("none", path, "", _MS_REMOUNT_BIND_READ_ONLY, "")

    def unmount(self, path: str) -> None:
        self._check(self._libc.umount2(path.encode(), _MNT_DETACH))

    def _mount(self, source: str, target: str, kind: str, flags: int, data: str) -> None:
        arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
        self._check(self._libc.mount(*arguments))

    def _check(self, result: int) -> None:
        if result:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


class SpawnFault:
    """Makes the execution of programs fail, as the kernel does when it is out of something."""

    def __init__(self) -> None:
        self._real = os.posix_spawn

    def set(self, number: int | None) -> None:
        def refuse(*_arguments: Any, **_options: Any) -> int:
            raise OSError(number, os.strerror(number or 0))

        os.posix_spawn = self._real if number is None else refuse


class Hands:
    """Carries out what standard input says, in a thread of its own: also while the daemon's loop is busy."""

    def __init__(self, daemon: Daemon, kernel: SimulatedKernel, clock: SteppedClock, mounts: Mounts | None) -> None:
        self._daemon = daemon
        self._kernel = kernel
        self._clock = clock
        self._mounts = mounts
        self._spawn_fault = SpawnFault()

    def begin(self) -> None:
        threading.Thread(target=self._run, name="hands", daemon=True).start()

    def _run(self) -> None:
        signals.hold()
        for line in sys.stdin:
            answer: object
            try:
                answer = self._obey(*json.loads(line))
            except (OSError, FmsupervisorError) as error:
                answer = {"error": str(error)}
            os.write(1, json.dumps(answer).encode() + b"\n")
        os.kill(os.getpid(), signal.SIGTERM)

    def _obey(self, word: str, *arguments: Any) -> object:
        match word, arguments:
            case "kernel", (method, *rest):
                act: Callable[..., object] = getattr(self._kernel, method)
                act(*rest)
            case "step-clock", (seconds,):
                self._clock.wall_offset_seconds += seconds
            case "spawn-errno", (number,):
                self._spawn_fault.set(number)
            case "mount", (method, *rest):
                getattr(self._mounts, method)(*rest)
            case "looked-at", ():
                return self._daemon.supervisor.state.host_observed_at
            case "wall-clock", ():
                return self._clock.now().wall
            case _:
                raise ValueError(word)
        return None


def main() -> int:
    options = json.loads(sys.argv[1])
    signals.hold()
    root, kernel = _host(options)
    mounts = Mounts() if options["small_disks"] else None
    if mounts is not None:
        for logical in options["small_disks"]:
            mounts.small_disk(root.path(logical))
        for logical in options["full_disks"]:
            fill(f"{root.path(logical)}/{BALLAST}")
    clock = SteppedClock(options["speed"])
    log = open(options["log"], "a", encoding="utf-8")  # noqa: SIM115 - to the end of the process

    def read_settings() -> Settings:
        settings = config.load(root.path(SETTINGS_FILE), required=True).settings
        environment = {"JOURNAL_STREAM": os.environ.get("JOURNAL_STREAM", "")}
        journal.configure_logging(settings.logging, environment, log)
        return settings

    settings = read_settings()
    notifier = SystemdNotifier(os.environ)
    for name in SERVICE_MANAGER_VARIABLES:
        os.environ.pop(name, None)
    daemon = Daemon(settings, root, kernel, clock, notifier, read_settings, bind_retry_seconds=BIND_RETRY_SECONDS)
    Hands(daemon, kernel, clock, mounts).begin()
    try:
        asyncio.run(daemon.run())
    except ActionRefused as error:
        sys.stderr.write(f"fmsupervisor: {error}\n")
        return ExitCode.ALREADY_RUNNING
    except FmsupervisorError as error:
        sys.stderr.write(f"fmsupervisor: {error}\n")
        return 1
    return ExitCode.OK


def _host(options: dict[str, Any]) -> tuple[HostRoot, SimulatedKernel]:
    """A new host, or the one that is there with the driver as it is."""
    directory, speed = options["directory"], options["speed"]
    if options["is_new"]:
        scenario = SCENARIOS[options["scenario"]]
        world = World(scenario, directory, speed)
        root, kernel = world.root, world.kernel
        text = "".join(_toml(_merged(scenario.settings_at(speed), options["settings"])))
        root.write_atomically(SETTINGS_FILE, text.encode(), durable=False)
    else:
        root = HostRoot(directory)
        kernel = SimulatedKernel(root, speed=speed)
    if options["is_deaf"]:
        kernel = DeafKernel(root, speed=speed)
    return root, kernel


if __name__ == "__main__":
    sys.exit(main())

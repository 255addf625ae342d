"""Drives one daemon on a simulated host and looks at it from outside: its log, /proc, the files, the metrics.

The daemon's own log is the first witness: unlike status.json and the metrics it is there whatever else is broken. It
lies outside of the disks that tests fill.
"""

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

SPEED = 20.0
PATIENCE_SECONDS = 40.0
GPUS = 8
_SETTLED_LOOKS = 20

# Where each sort of file of the daemon and of Fabric Manager is kept, so that each can have a disk of its own.
LOG_DIRECTORY = "/var/log/fabric"
CONFIG_DIRECTORY = "/var/lib/fabric"
STATE_DIRECTORY = "/run/fmsupervisor"
RUN_DIRECTORY = "/run/nvidia-fabricmanager"
LOG_FILE = f"{LOG_DIRECTORY}/fabricmanager.log"
CONFIG_FILE = f"{CONFIG_DIRECTORY}/fm.cfg"
STATUS_FILE = f"{STATE_DIRECTORY}/status.json"
LOCK_FILE = f"{STATE_DIRECTORY}/lock"

# The supervisor's ten states by letter, as in the scenarios.
LETTERS = {
    "waiting-for-module": "M",
    "waiting-for-switches": "W",
    "starting": "S",
    "configuring": "c",
    "configured": "C",
    "degraded": "D",
    "backoff": "B",
    "failed": "F",
    "not-applicable": "N",
    "stopping": "X",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """What the daemon is given at its start."""

    scenario: str = "healthy"
    settings: Mapping[str, Any] = field(default_factory=dict)
    small_disks: tuple[str, ...] = ()  # directories with a small file system of their own; needs root
    full_disks: tuple[str, ...] = ()  # of these, without any room from the start
    is_deaf: bool = False  # no uevents
    has_taken_port: bool = False  # something else listens on the metrics' port
    hears_systemd: bool = False  # there is a notify socket
    log: str = ""  # where the daemon logs; else a file that the stage reads


@dataclass(frozen=True, slots=True)
class Inventory:
    """What the daemon holds. It must not be more after a fault than before."""

    descriptors: Mapping[str, int]
    threads: int
    zombies: int
    temporary_files: tuple[str, ...]

    def exceeds(self, other: "Inventory") -> list[str]:
        """What is more here."""
        names = self.descriptors.keys() | other.descriptors.keys()
        found = [name for name in names if self.descriptors.get(name, 0) > other.descriptors.get(name, 0)]
        found += ["threads"] if self.threads > other.threads else []
        found += ["zombies"] if self.zombies > other.zombies else []
        return found + sorted({*self.temporary_files} - {*other.temporary_files})


class Stage:
    """One simulated host with one daemon; a context manager."""

    def __init__(self, directory: Path, setting: Setting, port: int | None = None) -> None:
        self.directory = directory
        self.setting = setting
        self.taken = socket.create_server(("127.0.0.1", 0)) if setting.has_taken_port else None
        self.port = port or (self.taken.getsockname()[1] if self.taken else _free_port())
        self.errors = directory.parent / f"{directory.name}-errors"
        self.log = Path(setting.log) if setting.log else directory.parent / f"{directory.name}-log"
        self._log_offset = 0
        self._lines: list[dict[str, Any]] = []
        self.notify_path = str(directory.parent / "notify")
        self.notified = listen_to_notifications(self.notify_path) if setting.hears_systemd else None
        self._process: subprocess.Popen[str] | None = None
        directory.mkdir(exist_ok=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._process is not None and self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            for pid in self.processes():
                os.kill(pid, signal.SIGKILL)
        finally:
            self.close()

    def close(self) -> None:
        """End the daemon, if it runs, and what is open here."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for opened in (self.taken, self.notified):
            if opened is not None:
                opened.close()
        self._close_pipes()

    def _close_pipes(self) -> None:
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()

    # --- the daemon's life

    def start(self, *, is_new: bool = True) -> None:
        """Execute the daemon."""
        options = {
            "directory": str(self.directory),
            "speed": SPEED,
            "scenario": self.setting.scenario,
            "settings": _with_places(self.setting.settings, self.port),
            "small_disks": self.setting.small_disks,
            "full_disks": self.setting.full_disks,
            "is_deaf": self.setting.is_deaf,
            "is_new": is_new,
            "log": str(self.log),
        }
        self._close_pipes()
        variables = {"NOTIFY_SOCKET": self.notify_path} if self.notified else {}
        repository = str(Path(__file__).parents[2])
        with self.errors.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("stage_process.py")), json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **variables, "PYTHONPATH": repository},
            )

    @property
    def process(self) -> "subprocess.Popen[str]":
        """The daemon."""
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    def end(self, signal_number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the exit status."""
        self.process.send_signal(signal_number)
        return self.wait()

    def wait(self, seconds: float = PATIENCE_SECONDS) -> int:
        return self.process.wait(seconds)

    def do(self, *words: object) -> Any:
        """A command to the hands inside; what they answer."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(words) + "\n")
        stdin.flush()
        answer = json.loads(stdout.readline() or '{"error": "it has ended"}')
        assert not (isinstance(answer, dict) and "error" in answer), f"{words}: {answer}"
        return answer

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Look until the condition gives something true, and return that; the daemon must live on."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (found := condition()):
            assert self.process.poll() is None, f"it has ended while waiting: {what}\n{self.words()}"
            assert time.monotonic() < deadline, f"not in time: {what}\n{self.words()}"
            time.sleep(0.01)
        return found

    def until_running(self) -> None:
        """Configured, and all GPUs have registered."""
        self.until(lambda: self.letters.endswith("C"), "configured")
        self.until(lambda: self._gpus_registered() == GPUS, "all GPUs registered")

    def _gpus_registered(self) -> object:
        if self.setting.has_taken_port:
            return self.status.get("fabric_manager", {}).get("gpus_registered")
        return self.metric("fabricmanager_gpus_registered")

    def until_looked_again(self) -> None:
        """The daemon has read the hardware anew, twice: what it makes of the present can be seen."""
        for _ in range(2):
            before = self.do("looked-at")
            self.until(lambda before=before: self.do("looked-at") > before, "the hardware looked at again")

    # --- what the daemon says

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The daemon's log."""
        if self.log.is_file():
            with self.log.open("rb") as file:
                file.seek(self._log_offset)
                content = file.read()
            complete = content[: content.rfind(b"\n") + 1]
            self._log_offset += len(complete)
            self._lines += [json.loads(line) for line in complete.splitlines()]
        return self._lines

    @property
    def letters(self) -> str:
        """The states so far."""
        return "".join(LETTERS[line["state"]] for line in self.lines if line["event"] == "state-changed")

    @property
    def raised(self) -> list[str]:
        """Every condition so far, in order."""
        return [line["condition"] for line in self.lines if line["event"] == "condition-raised"]

    @property
    def active(self) -> set[str]:
        """The conditions that hold now."""
        held: set[tuple[str, str | None]] = set()
        for line in self.lines:
            if line["event"] == "condition-raised":
                held.add((line["condition"], line.get("subject")))
            elif line["event"] == "condition-cleared":
                held.discard((line["condition"], line.get("subject")))
        return {code for code, _ in held}

    @property
    def managers(self) -> list[int]:
        """The pids of all Fabric Managers so far."""
        return [line["fm_pid"] for line in self.lines if line["event"] == "fm-started"]

    @property
    def status(self) -> dict[str, Any]:
        """status.json; empty when there is none."""
        try:
            return dict(json.loads(self.path(STATUS_FILE).read_bytes()))
        except FileNotFoundError:
            return {}

    def get(self, path: str) -> tuple[int, str]:
        """What the metrics server answers; 0 when it does not."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=PATIENCE_SECONDS) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, ""
        except OSError:
            return 0, ""

    def metric(self, series: str) -> float | None:
        """The value of a series, spelled as in the exposition; None when there is none."""
        found = re.search(rf"^{re.escape(series)} (\S+)$", self.get("/metrics")[1], re.MULTILINE)
        return float(found[1]) if found else None

    def words(self) -> str:
        """Everything it said, for failures."""
        own = [line for line in self.lines if line["event"] not in ("fm-line", "nodes-changed", "config-rendered")]
        said = "\n".join(f"{line['event']}: {line['message']}" for line in own[-40:])
        return f"{self.letters}\n{said}\n{self.errors.read_text()}"

    # --- its host and its process

    def path(self, logical: str) -> Path:
        """A file of the host as the daemon sees it (its mounts are its own)."""
        inside = Path(f"/proc/{self.pid}/root") if self.setting.small_disks else Path("/")
        return inside / str(self.directory)[1:] / logical[1:]

    def tell(self, command: str) -> None:
        """A command to Fabric Manager."""
        descriptor = os.open(self.path("/.simulator/commands"), os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(descriptor, f"{command}\n".encode())
        finally:
            os.close(descriptor)

    def crash(self) -> None:
        """Fabric Manager dies."""
        started = len(self.managers)
        os.kill(self.managers[-1], signal.SIGKILL)
        self.until(lambda: len([line for line in self.lines if line["event"] == "fm-exited"]) >= started, "it has died")

    def settled_inventory(self) -> Inventory:
        """What it holds when nothing is under way."""
        found = [self.inventory()]
        self.until(lambda: found.append(self.inventory()) or self._is_settled(found), "nothing is under way")
        return found[-1]

    @staticmethod
    def _is_settled(found: list[Inventory]) -> bool:
        return len(found) >= _SETTLED_LOOKS and all(one == found[-1] for one in found[-_SETTLED_LOOKS:])

    def inventory(self) -> Inventory:
        hidden = (path for path in self.directory.rglob(".*") if path.is_file() and ".simulator" not in path.parts)
        return Inventory(
            Counter(self._descriptors()),
            len(os.listdir(f"/proc/{self.pid}/task")),
            sum(_state(pid) == "Z" for pid in _children(self.pid)),
            tuple(sorted(path.name for path in hidden)),
        )

    def _descriptors(self) -> list[str]:
        found = []
        for name in os.listdir(f"/proc/{self.pid}/fd"):
            try:
                target = os.readlink(f"/proc/{self.pid}/fd/{name}")
            except OSError:
                continue
            found.append(re.sub(r":\[\d+\]$|\.[a-z0-9_]{8}$| \(deleted\)$", "", target))
        return found

    def memory(self, name: str) -> int:
        """A line of /proc/PID/status in bytes: VmRSS, VmHWM."""
        found = re.search(rf"^{name}:\s+(\d+) kB$", Path(f"/proc/{self.pid}/status").read_text(), re.MULTILINE)
        assert found is not None
        return int(found[1]) << 10

    def set_limit(self, limit: int, value: int) -> int:
        """Set the soft limit of a resource; returns what it was."""
        soft, hard = resource.prlimit(self.pid, limit)
        resource.prlimit(self.pid, limit, (value, hard))
        return soft

    def processes(self) -> list[int]:
        """Processes that have the host in their command line, but the daemon."""
        found = []
        for name in filter(str.isdecimal, os.listdir("/proc")):
            try:
                arguments = Path(f"/proc/{name}/cmdline").read_bytes()
            except OSError:
                continue
            is_daemon = self._process is not None and int(name) == self._process.pid
            if f"{self.directory}/".encode() in arguments and int(name) != os.getpid() and not is_daemon:
                found.append(int(name))
        return found


def _with_places(settings: Mapping[str, Any], port: int) -> dict[str, Any]:
    """Settings that keep the sorts of files apart."""
    manager = {
        "log_file": LOG_FILE,
        "config": CONFIG_FILE,
        "state_file": f"{CONFIG_DIRECTORY}/fabricmanager.state",
        "database_path": CONFIG_DIRECTORY,
        "run_directory": RUN_DIRECTORY,
    }
    tables: dict[str, Any] = {
        "fabric_manager": manager,
        "metrics": {"listen": f"127.0.0.1:{port}"},
        "restart": {"initial_delay_seconds": 4.0},  # long enough to be seen on a busy machine
    }
    for name, table in settings.items():
        tables[name] = {**tables.get(name, {}), **table}
    return tables


def listen_to_notifications(path: str) -> socket.socket:
    """The service manager's end of sd_notify(3)."""
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    opened.bind(path)
    return opened


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        try:
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
        except OSError:
            continue
    return found


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""

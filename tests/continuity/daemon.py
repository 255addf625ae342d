"""The daemon as a process of its own on a simulated host, which outlives it: to be killed, replaced and started again."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fmsupervisor
from fmsupervisor.simulator.command import _free_address, _toml
from fmsupervisor.simulator.scenarios import SCENARIOS, _merged
from fmsupervisor.simulator.world import World, tell_fabric_manager

SPEED = 20.0
PATIENCE_SECONDS = 60.0
PACKAGE = Path(fmsupervisor.__file__).parent


class Host:
    """One simulated host and the daemons that run on it, one after the other."""

    def __init__(self, directory: Path, scenario: str = "healthy", settings: Mapping[str, Any] | None = None) -> None:
        self.directory = directory / "host"
        self.directory.mkdir()
        self.world = World(SCENARIOS[scenario], str(self.directory), SPEED)
        self.address = _free_address()
        self.settings = _merged(
            SCENARIOS[scenario].settings_at(SPEED),
            _merged(
                {
                    "metrics": {"listen": self.address},
                    "logging": {"format": "json"},
                    # At this speed its default would be half a second of a busy machine.
                    "fabric_manager": {"version_timeout_seconds": 600.0},
                },
                settings or {},
            ),
        )
        self.write_settings({})
        self.program: Path | None = None
        self.daemon: subprocess.Popen[bytes] | None = None

    def write_settings(self, changes: Mapping[str, Any]) -> None:
        """The settings of the scenario with these changes."""
        self.config.write_text("".join(_toml(_merged(self.settings, changes))))

    @property
    def config(self) -> Path:
        return self.directory / "etc/fmsupervisor.toml"

    def install_own_program(self) -> Path:
        """A copy of the package, to be changed under the running daemon; its directory."""
        self.program = self.directory.parent / "program"
        shutil.copytree(PACKAGE, self.program / "fmsupervisor", ignore=shutil.ignore_patterns("__pycache__"))
        return self.program / "fmsupervisor"

    def start(self, *command: str) -> int:
        """Start a daemon; its pid."""
        command = command or (sys.executable, "-m", "fmsupervisor")
        arguments = ("run", "--root", str(self.directory), "--speed", str(SPEED), "--config", str(self.config))
        environment = dict(os.environ)
        if self.program is not None:
            environment["PYTHONPATH"] = str(self.program)
        with open(self.directory / "log", "ab") as log:
            self.daemon = subprocess.Popen((*command, *arguments), stderr=log, env=environment, cwd="/")
        return self.daemon.pid

    def crash(self, number: int = signal.SIGKILL) -> None:
        """The daemon ends by this signal."""
        assert self.daemon is not None
        self.daemon.send_signal(number)
        self.daemon.wait(PATIENCE_SECONDS)

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        assert self.daemon is not None
        if self.daemon.poll() is None:
            self.daemon.terminate()
        return self.daemon.wait(PATIENCE_SECONDS)

    @property
    def document(self) -> dict[str, Any]:
        """The status document of the daemon that runs now; empty while there is none."""
        with suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads((self.directory / "run/fmsupervisor/status.json").read_text())
            if self.daemon is not None and found["pid"] == self.daemon.pid:
                return found
        return {}

    @property
    def state(self) -> str:
        return str(self.document.get("state"))

    @property
    def codes(self) -> set[str]:
        return {row["code"] for row in self.document.get("conditions", ())}

    @property
    def manager(self) -> int:
        """The pid of Fabric Manager; 0 when none runs."""
        found = self.document.get("fabric_manager") or {}
        return int(found.get("pid") or 0)

    @property
    def handover(self) -> Path:
        return self.directory / "run/fmsupervisor/handover.json"

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for it. A daemon that ends meanwhile is a failure."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert self.daemon is not None
            assert self.daemon.poll() is None, f"it ended by itself: {self.log_text[-3000:]}"
            assert time.monotonic() < deadline, f"not reached in {self.state}: {self.log_text[-3000:]}"
            time.sleep(0.01)

    def until_configured(self) -> None:
        self.until(lambda: self.state == "configured")

    @property
    def log_text(self) -> str:
        return (self.directory / "log").read_text()

    def events(self, since: int = 0) -> list[dict[str, Any]]:
        """The structured log from a position (``len(log_text)`` at some time) on."""
        lines = self.log_text[since:].splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def states(self, since: int = 0) -> list[str]:
        return [line["state"] for line in self.events(since) if line["event"] == "state-changed"]

    def scrape(self) -> str:
        with urllib.request.urlopen(f"http://{self.address}/metrics", timeout=20) as answer:
            return str(answer.read().decode())

    def metric(self, name: str) -> float:
        """The sum of all series of one name."""
        return sum(float(value) for value in re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", self.scrape(), re.MULTILINE))

    def tell(self, command: str) -> None:
        """A command for the simulated Fabric Manager."""
        self.until(lambda: tell_fabric_manager(self.world.root, command))

    def processes(self) -> dict[int, str]:
        """Living processes that were started from this host's tree, but for one that only tells its version."""
        found = {}
        for name in os.listdir("/proc"):
            if not name.isdecimal():
                continue
            with suppress(OSError):
                command = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                is_dead = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
                if f"{self.directory}/usr/local" in command and "--version" not in command and not is_dead:
                    found[int(name)] = command
        return found

    def close(self) -> None:
        """End everything that is left."""
        if self.daemon is not None and self.daemon.poll() is None:
            self.daemon.kill()
            self.daemon.wait()
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def host(directory: Path, scenario: str = "healthy", settings: Mapping[str, Any] | None = None) -> Iterator[Host]:
    """A host that leaves no process behind."""
    made = Host(directory, scenario, settings)
    try:
        yield made
    finally:
        made.close()

"""The machine that the tests of the units drive: commands, files, units and the journal inside a booted container.

Most tests replace one thing in the shipped unit: what it executes is the daemon on a simulated host. ``simulate`` makes
a host with a story, anew for each start. ``build_host`` makes one that stays as it is from start to start, so that a
daemon finds there what the one before has left; its /run/fmsupervisor is the machine's own, where the unit's other
commands look.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fmsupervisor.simulator.hardware import COMMAND_FIFO

HOST = "/run/fmsupervisor-host"  # the simulated host inside the container
STATE = "/run/fmsupervisor"
SETTINGS = f"{HOST}/etc/fmsupervisor.toml"
PROGRAM = "/usr/local/bin/fmsupervisor"
SERVICE = "fmsupervisor.service"
WAIT = "nvidia-fabric-wait.service"
TARGET = "nvidia-fabric.target"

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DEADLINE_SECONDS = 60.0


def python_program(code: str) -> str:
    """An executable file inside that runs ``code`` with the interpreter, the libraries and the sources of the tests."""
    interpreter = os.path.relpath(os.path.realpath(sys.executable), os.path.realpath(sys.base_prefix))
    return (
        f"#!/opt/python/{interpreter} -IB\n"
        "import sys\n"
        f'sys.path[:0] = ["/opt/fmsupervisor", "/opt/site-packages"]\n{code}'
    )


BUILDER = "/usr/local/bin/fmsupervisor-build-host"

_BUILD = """
import os
from dataclasses import replace
from fmsupervisor.simulator.command import SETTINGS_FILE, _toml
from fmsupervisor.simulator.scenarios import SCENARIOS
from fmsupervisor.simulator.tree import set_behaviour
from fmsupervisor.simulator.world import World

host, state, name, speed, metrics, kind = sys.argv[1:]
os.makedirs(f"{host}/run")
os.makedirs(state, exist_ok=True)
os.symlink(os.path.relpath(state, f"{host}/run"), f"{host}/run/fmsupervisor")
scenario = SCENARIOS[name]
world = World(scenario, host, float(speed))
tables = scenario.settings_at(float(speed))
tables["metrics"] = {"listen": metrics} if metrics else {"enabled": False}
world.root.write_atomically(SETTINGS_FILE, "".join(_toml(tables)).encode(), durable=False)
if kind:
    tree = replace(scenario.tree, speed=float(speed))
    set_behaviour(world.root, tree, replace(tree.behaviour, kind=kind))
"""


class Machine:
    """The booted container. ``leader`` is the pid of its systemd."""

    def __init__(self, leader: int) -> None:
        self.leader = leader
        self._began = 0  # of the present test, by the journal's clock, in microseconds
        self._made: list[Path] = []

    # --- commands and files

    def run(self, *command: str, timeout: float = 90.0) -> "subprocess.CompletedProcess[str]":
        """Run a command inside; its failure is for the test to judge."""
        return subprocess.run(
            ["nsenter", "-t", str(self.leader), "-a", "--", *command],
            env={"PATH": SEARCH_PATH, "LC_ALL": "C.UTF-8"},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def path(self, path: str) -> Path:
        """A file inside, seen from here."""
        return Path(f"/proc/{self.leader}/root{path}")

    def systemctl(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return self.run("systemctl", "--no-pager", *arguments)

    def do(self, *arguments: str) -> None:
        """A ``systemctl`` command that must succeed."""
        result = self.systemctl(*arguments)
        assert result.returncode == 0, f"{arguments}: {result.stderr}\n{self.words(SERVICE)}"

    def show(self, unit: str, *names: str) -> dict[str, str]:
        """Properties of a unit."""
        text = self.systemctl("show", unit, *(f"--property={name}" for name in names)).stdout
        return dict(line.split("=", 1) for line in text.splitlines())

    def property(self, unit: str, name: str) -> str:
        return self.show(unit, name)[name]

    def wait_for(self, met: Callable[[], Any], what: str) -> Any:
        """Look until ``met`` gives something true, and return that."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (found := met()):
            assert time.monotonic() < deadline, f"not in time: {what}\n{self.words(SERVICE)}"
            time.sleep(0.02)
        return found

    def wait_for_property(self, unit: str, name: str, *values: str) -> str:
        what = f"{name} of {unit} is {' or '.join(values)}"
        return str(self.wait_for(lambda: (value := self.property(unit, name)) in values and value, what))

    # --- units

    def drop_in(self, unit: str, content: str, name: str = "test") -> None:
        """Change a unit for this test."""
        path = self.path(f"/etc/systemd/system/{unit}.d/{name}.conf")
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
        self._made.append(path)
        self.do("daemon-reload")

    def unit(self, name: str, content: str) -> None:
        """A unit for this test."""
        path = self.path(f"/etc/systemd/system/{name}")
        path.write_text(content)
        self._made.append(path)
        self.do("daemon-reload")

    def install_program(self, path: str, content: str) -> None:
        """A program for this test."""
        self.path(path).write_text(content)
        self.path(path).chmod(0o755)
        self._made.append(self.path(path))

    def simulate(self, scenario: str = "healthy", speed: float = 20.0, more: str = "") -> None:
        """Let the service run on a simulated host. ``more``: further lines for the [Service] section."""
        command = f"{PROGRAM} simulate --scenario {scenario} --speed {speed} --directory {HOST}"
        self.drop_in(
            SERVICE,
            f"[Service]\nExecStartPre=/bin/rm -rf {HOST}\nExecStart=\nExecStart={command}\n{more}\n",
            "simulate",
        )

    def build_host(
        self,
        scenario: str = "healthy",
        speed: float = 20.0,
        *,
        program: str = PROGRAM,
        more: str = "",
        metrics: str = "",
        behaviour: str = "",
    ) -> None:
        """Make a simulated host and let the service run there, as ``program``.

        ``more``: further lines for the [Service] section. ``metrics``: where they are served, nowhere if not said.
        ``behaviour``: the kind of simulated Fabric Manager, if it is not the scenario's.
        """
        self.install_program(BUILDER, python_program(_BUILD))
        built = self.run(BUILDER, HOST, STATE, scenario, str(speed), metrics, behaviour)
        assert built.returncode == 0, built.stderr
        command = f"{program} run --root {HOST} --speed {speed} --config {SETTINGS}"
        self.drop_in(SERVICE, f"[Service]\nExecStart=\nExecStart={command}\n{more}\n", "simulate")

    def await_simulated(self, timeout_seconds: float) -> None:
        """Let the wait service look at the simulated host."""
        command = f"{PROGRAM} wait --root {HOST} --timeout {timeout_seconds}"
        self.drop_in(WAIT, f"[Service]\nExecStart=\nExecStart={command}\n", "simulate")

    def document(self) -> dict[str, Any]:
        """The status document of the daemon on the simulated host."""
        document: dict[str, Any] = json.loads(self.path(f"{HOST}/run/fmsupervisor/status.json").read_text())
        return document

    def main_pid(self) -> int:
        """The pid of the daemon; 0 when there is none."""
        return int(self.property(SERVICE, "MainPID"))

    def manager_pid(self) -> int:
        """The pid of Fabric Manager, as the daemon tells it."""
        return int(self.document()["fabric_manager"]["pid"])

    def is_alive(self, pid: int) -> bool:
        """Whether there is such a process."""
        return self.path(f"/proc/{pid}").exists()

    def kill(self, pid: int, signal_name: str) -> None:
        """Send a signal."""
        assert self.run("kill", f"-{signal_name}", str(pid)).returncode == 0

    def tell_manager(self, command: str) -> None:
        """A command for the simulated Fabric Manager (see there)."""
        fifo = os.open(self.path(f"{HOST}{COMMAND_FIFO}"), os.O_WRONLY | os.O_NONBLOCK)
        with open(fifo, "w", encoding="utf-8") as file:
            file.write(f"{command}\n")

    def processes(self, unit: str = SERVICE) -> list[int]:
        """Every process in the unit's control group."""
        group = self.property(unit, "ControlGroup")
        if not group:
            return []
        text = self.run("cat", f"/sys/fs/cgroup{group}/cgroup.procs").stdout
        return [int(pid) for pid in text.split()]

    def reset(self) -> None:
        """As after the boot, but for the journal, of which only what follows is looked at."""
        for path in self._made:
            path.unlink(missing_ok=True)
        self._made.clear()
        self.path("/etc/fmsupervisor.toml").unlink(missing_ok=True)
        units = f"guest.service virtqemud.service {TARGET} {WAIT} {SERVICE}"
        tidy = f"systemctl stop {units}; systemctl daemon-reload; systemctl reset-failed; rm -rf {HOST} {STATE}"
        self.run("sh", "-c", tidy)
        self.wait_for(lambda: not self.processes(), "a simulated Fabric Manager without a host ends")
        last = self.run("journalctl", "--quiet", "--lines=1", "-o", "json").stdout
        self._began = int(json.loads(last)["__REALTIME_TIMESTAMP"]) if last.strip() else 0

    # --- the journal

    def journalctl(self, *arguments: str) -> list[dict[str, Any]]:
        """The entries of this test that ``journalctl`` finds."""
        self.run("journalctl", "--sync")
        # Not --after-cursor: systemd 252 with it leaves out the first entry that a match finds.
        since = f"--since=@{self._began // 1_000_000}"
        result = self.run("journalctl", "--quiet", "--all", "-o", "json", since, *arguments)
        assert result.returncode in (0, 1), result.stderr  # 1: nothing was found
        entries = map(json.loads, result.stdout.splitlines())
        return [entry for entry in entries if int(entry["__REALTIME_TIMESTAMP"]) > self._began]

    def journal(self, unit: str, *matches: str) -> list[dict[str, Any]]:
        return self.journalctl(f"--unit={unit}", *matches)

    def events(self, kind: str, *matches: str) -> list[dict[str, Any]]:
        """What the daemon reported of this kind ("state-changed")."""
        return self.journalctl(f"--unit={SERVICE}", f"FMSUPERVISOR_EVENT={kind}", *matches)

    def words(self, unit: str) -> str:
        """The messages of a unit, for people and for failures."""
        return "\n".join(str(entry["MESSAGE"]) for entry in self.journal(unit))

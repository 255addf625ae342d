"""Runs ``fmsupervisor simulate`` as a process of its own and looks at it from outside, as people and Prometheus do."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fmsupervisor.simulator.scenarios import SCENARIOS, Scenario

DEADLINE_SECONDS = 90.0
COMMAND = (sys.executable, "-m", "fmsupervisor")


@dataclass
class Outcome:
    """What one scenario came to."""

    scenario: Scenario
    document: dict[str, Any]  # status --json at the end state
    metrics: str
    status_exit: int
    status_text: str
    exit_status: int  # of the daemon, after SIGINT
    log: list[dict[str, Any]]  # structured log
    directory: Path
    left_behind: list[str] = field(default_factory=list)

    @property
    def states(self) -> list[str]:
        """The states in order, as the log tells them."""
        return [line["state"] for line in self.log if line["event"] == "state-changed"]

    @property
    def conditions_raised(self) -> list[str]:
        """The codes in the order in which they were first raised."""
        raised = [line["condition"] for line in self.log if line["event"] == "condition-raised"]
        return list(dict.fromkeys(raised))

    def metric(self, name: str, **labels: str) -> float | None:
        """The value of one series; None when there is no such series."""
        for line in self.metrics.splitlines():
            found = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
            if found and dict(re.findall(r'(\w+)="([^"]*)"', found[1] or "")) == labels:
                return float(found[2])
        return None


def run(name: str, directory: Path, speed: float = 20.0) -> Outcome:
    """Let the scenario come to its end state, take everything down, and stop it."""
    scenario = SCENARIOS[name]
    arguments = (*COMMAND, "simulate", "--scenario", name, "--speed", str(speed), "--directory", str(directory))
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            document = _wait_for(scenario, directory, process)
            metrics = _scrape(directory)
            status = _status(directory, "--json")
            text = _status(directory)
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=DEADLINE_SECONDS)
    lines = (directory / "fmsupervisor.log").read_text().splitlines()
    return Outcome(
        scenario=scenario,
        document=document,
        metrics=metrics,
        status_exit=status.returncode,
        status_text=text.stdout,
        exit_status=process.returncode,
        log=[json.loads(line) for line in lines],
        directory=directory,
        left_behind=_processes_of(directory),
    )


def _wait_for(scenario: Scenario, directory: Path, process: "subprocess.Popen[str]") -> dict[str, Any]:
    path = directory / "run/fmsupervisor/status.json"
    deadline = time.monotonic() + DEADLINE_SECONDS
    document: dict[str, Any] = {}
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"it ended by itself: {process.stdout.read() if process.stdout else ''}")
        if path.exists():
            document = json.loads(path.read_text())
            if scenario.expectation.met(document):
                return document
        time.sleep(0.02)
    raise AssertionError(f"not reached: {scenario.expectation.missing(document)} in {json.dumps(document, indent=1)}")


def _scrape(directory: Path) -> str:
    listen = re.search(r'listen = "(.*)"', (directory / "etc/fmsupervisor.toml").read_text())
    assert listen is not None
    with urllib.request.urlopen(f"http://{listen[1]}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def _status(directory: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    arguments = (*COMMAND, "status", "--root", str(directory), *options)
    return subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=60)


def _processes_of(directory: Path) -> list[str]:
    """Command lines of living processes that mention the simulated host."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        try:
            command = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"{directory}/" in command:
            found.append(command)
    return found

"""Simulated hosts, a Prometheus that scrapes them, an Alertmanager, and a webhook of ours: all real but the hardware."""

import json
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fmsupervisor.mixin.alerts import ALERTS
from fmsupervisor.mixin.options import Options
from fmsupervisor.mixin.render import files
from tests.scenarios.runner import COMMAND

SPEED = 5.0  # of the simulated hosts, but
SPEEDS = {"switch-returned": 1.5}  # it is back so soon that it could be missed
HASTE = 120  # how much faster the rules are than in production
DEADLINE_SECONDS = 120.0

_MILLISECONDS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


@dataclass(frozen=True)
class Node:
    """One simulated host."""

    scenario: str
    cluster: str
    address: str

    @property
    def labels(self) -> dict[str, str]:
        """What Prometheus puts onto its series."""
        return {"job": "fmsupervisor", "cluster": self.cluster, "instance": self.address}


@dataclass
class Fleet:
    """All of it. ``delivered`` grows by what Alertmanager sends."""

    nodes: Mapping[str, Node]  # by scenario
    prometheus: str
    delivered: list[dict[str, Any]]
    directory: Path
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def start(self, scenario: str, *, instead_of: str = "") -> None:
        """Start the daemon of this scenario, at its own address or at another's."""
        node = self.nodes[instead_of or scenario]
        directory = self.directory / f"host-{scenario}-{len(self.processes)}"
        arguments = ("simulate", "--scenario", scenario, "--directory", str(directory))
        speed = SPEEDS.get(scenario, SPEED)
        self.processes[instead_of or scenario] = subprocess.Popen(
            (*COMMAND, *arguments, "--speed", str(speed), "--metrics", node.address),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def stop(self, scenario: str) -> None:
        """Stop it in order."""
        _end(self.processes.pop(scenario))

    def query(self, expression: str, *, seconds: int = 0) -> list[Any]:
        """What Prometheus answers now, or of the last seconds."""
        now = time.time()
        words: dict[str, object] = {"query": expression}
        if seconds:
            words |= {"start": now - seconds, "end": now, "step": "1s"}
        path = f"query{'_range' if seconds else ''}?{urllib.parse.urlencode(words)}"
        with urllib.request.urlopen(f"http://{self.prometheus}/api/v1/{path}", timeout=20) as answer:
            return list(json.load(answer)["data"]["result"])

    def deliveries(self, node: str, alert: str, status: str) -> list[dict[str, Any]]:
        """What has come of one alert."""
        instance = self.nodes[node].address
        return [
            one
            for one in list(self.delivered)
            if one["status"] == status
            and (one["labels"]["alertname"], one["labels"].get("instance")) == (alert, instance)
        ]

    def wait_for(self, node: str, alert: str, status: str) -> dict[str, Any]:
        """The first delivery of it."""
        return wait_until(lambda: self.deliveries(node, alert, status), f"{alert} of {node} {status}")[0]


def wait_until(look: Callable[[], Any], what: str) -> Any:
    """The first true answer."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (found := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"it did not come: {what}")
        time.sleep(0.1)
    return found


def free_address() -> str:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@contextmanager
def fleet(scenarios: Mapping[str, str], directory: Path) -> Iterator[Fleet]:
    """The hosts of these scenarios (each with its cluster), all started, watched and judged in haste."""
    nodes = {scenario: Node(scenario, cluster, free_address()) for scenario, cluster in scenarios.items()}
    with ExitStack() as stack:
        webhook, delivered = stack.enter_context(_webhook())
        alertmanager = stack.enter_context(_alertmanager(directory, webhook))
        prometheus = stack.enter_context(_prometheus(directory, nodes.values(), alertmanager))
        made = Fleet(nodes, prometheus, delivered, directory)
        try:
            for scenario in scenarios:
                made.start(scenario)
            yield made
        finally:
            for process in made.processes.values():
                process.send_signal(signal.SIGINT)
            for process in made.processes.values():
                _end(process)


@contextmanager
def _webhook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    delivered: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            delivered.extend(document["alerts"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/", delivered
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def _alertmanager(directory: Path, webhook: str) -> Iterator[str]:
    configuration = {
        "route": {"receiver": "test", "group_by": ["..."], "group_wait": "0s", "group_interval": "1s"},
        "receivers": [{"name": "test", "webhook_configs": [{"url": webhook, "send_resolved": True}]}],
    }
    (directory / "alertmanager.yml").write_text(json.dumps(configuration))
    address = free_address()
    with _process(
        directory / "alertmanager.log",
        "prometheus-alertmanager",
        f"--config.file={directory / 'alertmanager.yml'}",
        f"--storage.path={directory / 'alertmanager'}",
        f"--web.listen-address={address}",
        "--cluster.listen-address=",
    ):
        yield address


@contextmanager
def _prometheus(directory: Path, nodes: Any, alertmanager: str) -> Iterator[str]:
    """Scrapes and judges twice a second."""
    for name, text in hasty_rules().items():
        (directory / name).write_text(text)
    targets = [{"targets": [node.address], "labels": {"cluster": node.cluster}} for node in nodes]
    times = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
    configuration = {
        "global": times,
        "rule_files": ["recording.yaml", "alerts.yaml"],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
        "scrape_configs": [{"job_name": "fmsupervisor", "static_configs": targets}],
    }
    (directory / "prometheus.yml").write_text(json.dumps(configuration))
    address = free_address()
    with _process(
        directory / "prometheus.log",
        "prometheus",
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'prometheus'}",
        f"--web.listen-address={address}",
    ):
        wait_until(lambda: _answers(f"http://{address}/-/ready"), "Prometheus")
        yield address


def hasty_rules() -> dict[str, str]:
    """The rules with a label of the user's, and with all durations shortened."""
    options = Options(
        labels={"team": "fabric"}, for_={alert.name: _hasty(alert.lasts) for alert in ALERTS}, link_sxids_per_hour=1
    )
    made = files(options)
    return {
        name: re.sub(r"\[(\w+)\]", lambda found: f"[{_hasty(found[1])}]", made[name])
        for name in ("alerts.yaml", "recording.yaml")
    }


def _hasty(duration: str) -> str:
    """Shorter, but never so short that two scrapes are not in it."""
    return f"{max(int(duration[:-1]) * _MILLISECONDS[duration[-1]] // HASTE, 0 if duration == '0m' else 1000)}ms"


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


@contextmanager
def _process(log: Path, *arguments: str) -> Iterator[None]:
    with log.open("wb") as output, subprocess.Popen(arguments, stdout=output, stderr=output) as process:
        try:
            yield
        finally:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(DEADLINE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise

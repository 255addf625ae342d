"""A real Prometheus scrapes the daemon; promtool judges what it serves."""

import json
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.runner import COMMAND, run

DEADLINE_SECONDS = 90.0
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


@needs_promtool
@pytest.mark.parametrize("name", ["healthy", "no-switch", "sxid-burst", "crash-after-configured", "version-mismatch"])
def test_promtool_has_nothing_to_say(name: str, tmp_path: Path) -> None:
    outcome = run(name, tmp_path / "host")
    verdict = subprocess.run(
        ("promtool", "check", "metrics"), input=outcome.metrics, capture_output=True, text=True, check=False, timeout=60
    )
    assert (verdict.returncode, verdict.stdout, verdict.stderr) == (0, "", "")


@needs_prometheus
def test_prometheus_sees_the_fabric_come_up(tmp_path: Path) -> None:
    host = tmp_path / "host"
    with _process(*COMMAND, "simulate", "--speed", "5", "--directory", str(host)):
        settings = _until((host / "etc/fmsupervisor.toml").read_text)
        listen = re.search(r'listen = "(.*)"', settings)
        assert listen is not None
        with _prometheus(tmp_path, listen[1]) as address:
            up = _until(lambda: _query(address, 'fabricmanager_state{state="configured"} == 1'))
            assert len(up) == 1
            assert up[0]["metric"]["job"] == "fmsupervisor"
            registered = _until(lambda: _query(address, "fabricmanager_gpus_registered == fabricmanager_gpus_expected"))
            assert registered[0]["value"][1] == "8"
            assert len(_query(address, 'nvswitch_driver_state{state="CONFIGURED"} == 1')) == 4
            assert _query(address, "sum(fabricmanager_state)")[0]["value"][1] == "1"
            assert _query(address, "up")[0]["value"][1] == "1"


@contextmanager
def _process(*arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(DEADLINE_SECONDS)


@contextmanager
def _prometheus(directory: Path, target: str) -> Iterator[str]:
    """A Prometheus that scrapes the target twice a second; its address."""
    configuration = directory / "prometheus.yml"
    job = {"job_name": "fmsupervisor", "static_configs": [{"targets": [target]}]}
    scrape = {"scrape_interval": "500ms", "scrape_timeout": "500ms"}
    configuration.write_text(json.dumps({"global": scrape, "scrape_configs": [job]}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with _process(
        "prometheus",
        f"--config.file={configuration}",
        f"--storage.tsdb.path={directory / 'tsdb'}",
        f"--web.listen-address={address}",
    ):
        yield address


def _query(address: str, expression: str) -> list[Any]:
    query = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"http://{address}/api/v1/query?{query}", timeout=10) as answer:
        return list(json.load(answer)["data"]["result"])


def _until(look: Any) -> Any:
    """The first true answer."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        try:
            if found := look():
                return found
        except OSError:
            pass
        if time.monotonic() > deadline:
            raise AssertionError("it did not come")
        time.sleep(0.1)

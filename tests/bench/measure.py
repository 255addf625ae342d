"""What the benchmarks and the budget tests share: a daemon in a process of its own, and instruments to look at it.

Everything is seen from outside, through /proc, the structured log and the metrics port, so that measuring costs the
daemon nothing but the scrapes.
"""

import json
import math
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from bench_log import traffic

from fmsupervisor.simulator.hardware import GPUS, SWITCHES
from fmsupervisor.simulator.tree import PREFIX

DEADLINE_SECONDS = 60.0
NO_BACKOFF = {"restart": {"initial_delay_seconds": 0.0, "maximum_delay_seconds": 0.0, "jitter_seconds": 0.0}}
ALL_SWITCHES = {"switches": {"expected": len(SWITCHES)}}

_PROGRAM = Path(__file__).with_name("simulated_daemon.py")
_KIB = 1024


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process holds, and how often it has been woken."""

    resident_bytes: int
    proportional_bytes: int  # shared pages divided among those who share them
    private_dirty_bytes: int
    threads: int
    descriptors: int
    wake_ups: int  # voluntary context switches of all its threads, since each began
    cpu_seconds: float


def usage(pid: int) -> Usage:
    """Of a process, from /proc."""
    proc = Path(f"/proc/{pid}")
    memory = dict(re.findall(r"^(\w+): +(\d+) kB", (proc / "smaps_rollup").read_text(), re.MULTILINE))
    statuses = [(task / "status").read_text() for task in (proc / "task").iterdir()]
    ticks = (proc / "stat").read_text().rpartition(")")[2].split()[11:13]
    return Usage(
        resident_bytes=int(memory["Rss"]) * _KIB,
        proportional_bytes=int(memory["Pss"]) * _KIB,
        private_dirty_bytes=int(memory["Private_Dirty"]) * _KIB,
        threads=len(statuses),
        descriptors=len(list((proc / "fd").iterdir())),
        wake_ups=sum(int(re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", text, re.MULTILINE)[0]) for text in statuses),
        cpu_seconds=sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"),
    )


class Daemon:
    """A running ``simulated_daemon.py``. Its structured log is read by a thread, line by line, as it comes."""

    def __init__(self, directory: str, settings: Mapping[str, Any]) -> None:
        self.directory = Path(directory)
        self.address = f"127.0.0.1:{_free_port()}"
        arguments = (sys.executable, str(_PROGRAM), directory, self.address, json.dumps(settings))
        self._process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        self._lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def log_file(self) -> Path:
        """Fabric Manager's."""
        return self.directory / f"{PREFIX}/fabricmanager.log".lstrip("/")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(json.loads(line))

    def wait_for(self, event: str, **fields: object) -> dict[str, Any]:
        """The next line of the log with this event and these fields; lines before it are dropped."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"no {event} {fields} in the log") from None
            if line["event"] == event and all(line.get(name) == value for name, value in fields.items()):
                return line

    def wait_until_idle(self) -> None:
        """Configured, all GPUs registered, nothing more to come."""
        self.wait_for("state-changed", state="configured")
        wait_until(lambda: self.metric("fabricmanager_gpus_registered") == len(GPUS))
        time.sleep(2.0)  # the status file is written a second after the last news

    def tell_kernel(self, method: str, *arguments: object) -> None:
        """Let something happen on the simulated host."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([method, *arguments]) + "\n")
        self._process.stdin.flush()

    def scrape(self) -> str:
        """The metrics."""
        with urllib.request.urlopen(f"http://{self.address}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    def probe(self) -> None:
        """Whether its loop turns; an error when it does not."""
        urllib.request.urlopen(f"http://{self.address}/healthz", timeout=10).close()

    def metric(self, name: str) -> float:
        """The sum over all series of this name, 0 when there is none."""
        found = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", self.scrape(), re.MULTILINE)
        return sum(map(float, found))

    def usage(self) -> Usage:
        """Now."""
        return usage(self.pid)

    def close(self) -> None:
        """Stop it, in order."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(DEADLINE_SECONDS)
        finally:
            self._process.kill()  # nothing, when it has ended
            self._reader.join()
            self._process.stdin.close()
            self._process.stdout.close()


@contextmanager
def running_daemon(*settings: Mapping[str, Any]) -> Iterator[Daemon]:
    """A daemon on a simulated HGX H200, just started. Settings are nested as in the TOML file."""
    merged = {name: table for tables in settings for name, table in tables.items()}
    # As /run, /proc and /sys are: nothing waits for a disk.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="fmsupervisor-bench-", dir=memory) as directory:
        daemon = Daemon(directory, merged)
        try:
            yield daemon
        finally:
            daemon.close()


def crash_to_start_seconds(daemon: Daemon, times: int) -> list[float]:
    """From SIGKILL to the configured Fabric Manager until the next one has been executed; for a daemon just started."""
    found = []
    pid = int(daemon.wait_for("fm-started")["fm_pid"])
    for _ in range(times):
        daemon.wait_for("state-changed", state="configured")
        began = time.time()
        os.kill(pid, signal.SIGKILL)
        started = daemon.wait_for("fm-started")
        found.append(_wall(started) - began)
        pid = int(started["fm_pid"])
    return found


def switch_to_start_seconds(daemon: Daemon, times: int) -> list[float]:
    """From the arrival of the last switch (on the bus, so a little more) until Fabric Manager has been executed."""
    found = []
    pid = int(daemon.wait_for("fm-started")["fm_pid"])
    for _ in range(times):
        daemon.wait_for("state-changed", state="configured")
        daemon.tell_kernel("remove_switch", SWITCHES[-1])
        daemon.wait_for("state-changed", state="degraded")
        os.kill(pid, signal.SIGKILL)
        daemon.wait_for("state-changed", state="waiting-for-switches")
        began = time.time()
        daemon.tell_kernel("add_switch", SWITCHES[-1])
        started = daemon.wait_for("fm-started")
        found.append(_wall(started) - began)
        pid = int(started["fm_pid"])
    return found


@dataclass(frozen=True, slots=True)
class Flood:
    """What a busy log costs the whole daemon."""

    lines_per_second: float
    lines_per_cpu_second: float
    growth_bytes: int  # of the resident memory, over the second half
    scrape_seconds: list[float]  # of /metrics, meanwhile
    loop_seconds: list[float]  # of /healthz, which asks the supervisor's loop


def flood(daemon: Daemon, lines: int) -> Flood:
    """Append realistic lines to the log of an idle daemon as fast as the disk takes them, and wait until all count."""
    piece = b"".join(traffic(min(lines, 100_000)))
    count = piece.count(b"\n")
    rounds = max(1, lines // count)
    base = daemon.metric("fabricmanager_log_lines_total")
    before, began = daemon.usage(), time.monotonic()
    scrapes: list[float] = []
    turns: list[float] = []
    resident: list[int] = []
    writer = threading.Thread(target=_append, args=(daemon.log_file, piece, rounds))
    writer.start()
    read = 0.0
    while read < rounds * count:
        if time.monotonic() - began > DEADLINE_SECONDS:
            raise TimeoutError(f"{read:.0f} of {rounds * count} lines read")
        turns.append(_timed(daemon.probe))
        start = time.monotonic()
        read = daemon.metric("fabricmanager_log_lines_total") - base
        scrapes.append(time.monotonic() - start)
        resident.append(daemon.usage().resident_bytes)
        time.sleep(0.1)
    elapsed, after = time.monotonic() - began, daemon.usage()
    writer.join()
    cpu_seconds = after.cpu_seconds - before.cpu_seconds
    growth = resident[-1] - resident[len(resident) // 2]
    return Flood(read / elapsed, read / cpu_seconds, growth, scrapes, turns)


def _append(path: Path, piece: bytes, rounds: int) -> None:
    with path.open("ab", buffering=0) as file:
        for _ in range(rounds):
            file.write(piece)


def run_seconds(*arguments: str) -> float:
    """How long the interpreter takes to execute these arguments (``-c``, code or ``-m``, module, ...)."""
    return _timed(lambda: subprocess.run((sys.executable, *arguments), capture_output=True, check=False))


def wait_until(is_so: Callable[[], bool]) -> None:
    """Look again until it is so. Raises ``TimeoutError``."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.05)


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def _timed(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


def _wall(line: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(line["timestamp"]).timestamp()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

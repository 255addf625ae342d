"""What the daemon needs and how fast it reacts: ``python tests/bench/bench_daemon.py [seconds of idleness]``.

Prints figures and asserts nothing; the budgets, with room for a busy machine, are asserted by ``test_budgets``. The host
is simulated and in memory, Fabric Manager configures within 0.1 s, and pauses before a restart are 0.
"""

import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from measure import (
    ALL_SWITCHES,
    NO_BACKOFF,
    crash_to_start_seconds,
    flood,
    percentile,
    run_seconds,
    running_daemon,
    switch_to_start_seconds,
)

CRASHES = 50
SWITCHES_ADDED = 20
FLOOD_LINES = 3_000_000
DAEMON_IMPORTS = (
    "import asyncio, fmsupervisor.daemon, fmsupervisor.host.linux_kernel, fmsupervisor.report.metrics_server"
)

Figures = Iterator[tuple[str, str]]


def idle(seconds: float) -> Figures:
    """Configured, all GPUs registered, nobody scrapes."""
    with running_daemon() as daemon:
        daemon.wait_until_idle()
        before = daemon.usage()
        time.sleep(seconds)
        after = daemon.usage()
    for name, value in asdict(after).items():
        if name.endswith("bytes"):
            yield f"idle, {name.removesuffix('_bytes')} memory", f"{value / 1e6:.1f} MB"
    yield "idle, threads", f"{after.threads - 1}"  # one is the bench's own
    yield "idle, descriptors", f"{after.descriptors}"
    yield "idle, wake-ups", f"{(after.wake_ups - before.wake_ups) / seconds * 60:.1f} a minute"
    yield "idle, processor time", f"{(after.cpu_seconds - before.cpu_seconds) / seconds * 1000:.2f} ms a second"


def reactions() -> Figures:
    """To a death, and to the arrival of what was missing."""
    with running_daemon(NO_BACKOFF) as daemon:
        crashes = crash_to_start_seconds(daemon, CRASHES)
    yield "crash to new Fabric Manager, first", f"{crashes[0] * 1000:.1f} ms"
    yield from _distribution("crash to new Fabric Manager", crashes)
    with running_daemon(NO_BACKOFF, ALL_SWITCHES) as daemon:
        yield from _distribution("last NVSwitch to Fabric Manager", switch_to_start_seconds(daemon, SWITCHES_ADDED))


def log() -> Figures:
    """The whole daemon with a busy log, and how it answers meanwhile."""
    with running_daemon() as daemon:
        daemon.wait_until_idle()
        found = flood(daemon, FLOOD_LINES)
        yield "log, lines a second", f"{found.lines_per_second:,.0f}"
        yield "log, lines per second of processor time", f"{found.lines_per_cpu_second:,.0f}"
        yield "log, growth over the second half", f"{found.growth_bytes / 1024:.0f} KiB"
        yield "log, resident memory after it", f"{daemon.usage().resident_bytes / 1e6:.1f} MB"
    yield from _distribution("log, /metrics meanwhile", found.scrape_seconds)
    yield from _distribution("log, turn of the loop (/healthz) meanwhile", found.loop_seconds)


def starts() -> Figures:
    """Of the interpreter with what it has to import."""
    for name, arguments in (
        ("start, python -c pass", ("-c", "pass")),
        ("start, imports of the daemon", ("-c", DAEMON_IMPORTS)),
        ("start, fmsupervisor --version", ("-m", "fmsupervisor", "--version")),
        ("start, fmsupervisor status", ("-m", "fmsupervisor", "status")),
    ):
        times = [run_seconds(*arguments) for _ in range(20)]
        yield name, f"{percentile(times, 50) * 1000:.0f} ms"


def _distribution(name: str, seconds: Sequence[float]) -> Figures:
    for percent in (50, 99):
        yield f"{name}, p{percent} of {len(seconds)}", f"{percentile(seconds, percent) * 1000:.1f} ms"


def main(idle_seconds: float) -> None:
    """Print everything, a line each."""
    loads = "/".join(f"{load:.1f}" for load in os.getloadavg())
    print(f"Python {platform.python_version()}, {os.cpu_count()} processors, load {loads}")  # noqa: T201
    for figures in (idle(idle_seconds), reactions(), log(), starts()):
        for name, value in figures:
            print(f"{name:55} {value:>14}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0)

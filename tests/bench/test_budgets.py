"""The budgets, with room for a machine that is busy with other tests: docs/benchmarks.md has the figures.

Times may be ``BUSY`` times the budget; what does not depend on the machine's mood (memory, wake-ups, imports, processor
time against processor time in the same run) is held to the budget itself.
"""

import statistics
import subprocess
import sys
import time

import pytest
from bench_log import measure as measure_parser
from measure import (
    ALL_SWITCHES,
    NO_BACKOFF,
    crash_to_start_seconds,
    flood,
    run_seconds,
    running_daemon,
    switch_to_start_seconds,
)

BUSY = 5
MEGABYTE = 1_000_000
WATCHED_SECONDS = 8.0

pytestmark = pytest.mark.slow


def loaded_modules(imported: str) -> set[str]:
    """What is loaded after importing ``imported`` into a fresh interpreter."""
    code = f"import {imported}, sys; print(*sys.modules)"
    found = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True)
    return set(found.stdout.split())


def test_an_idle_daemon_stays_within_its_memory_and_hardly_ever_wakes_up() -> None:
    with running_daemon() as daemon:
        daemon.wait_until_idle()
        before = daemon.usage()
        time.sleep(WATCHED_SECONDS)
        after = daemon.usage()
    assert after.resident_bytes <= 40 * MEGABYTE
    assert after.wake_ups - before.wake_ups <= WATCHED_SECONDS
    assert after.threads <= 2 + 1  # the loop, the metrics; and the thread that plays the kernel
    assert after.descriptors == before.descriptors


def test_a_new_fabric_manager_is_executed_at_once_after_a_crash() -> None:
    with running_daemon(NO_BACKOFF) as daemon:
        assert statistics.median(crash_to_start_seconds(daemon, 7)) <= 0.050 * BUSY


def test_fabric_manager_is_executed_at_once_when_the_last_switch_arrives() -> None:
    with running_daemon(NO_BACKOFF, ALL_SWITCHES) as daemon:
        assert statistics.median(switch_to_start_seconds(daemon, 5)) <= 0.100 * BUSY


def test_a_busy_log_costs_little_more_than_reading_it_and_the_daemon_answers_meanwhile() -> None:
    parser = measure_parser(200_000)["lines_per_second"]
    with running_daemon() as daemon:
        daemon.wait_until_idle()
        before = daemon.usage()
        found = flood(daemon, 500_000)
        after = daemon.usage()
    assert found.lines_per_cpu_second >= parser / 4
    assert after.resident_bytes - before.resident_bytes <= 4 * MEGABYTE
    assert statistics.median(found.loop_seconds) <= 0.1 * BUSY
    assert statistics.median(found.scrape_seconds) <= 0.1 * BUSY


def test_the_commands_of_people_start_fast() -> None:
    interpreter = min(run_seconds("-c", "pass") for _ in range(3))
    status = min(run_seconds("-m", "fmsupervisor", "status", "--root", "/nonexistent") for _ in range(3))
    assert status <= interpreter * 12


@pytest.mark.parametrize(
    ("imported", "unwanted"),
    [
        pytest.param("fmsupervisor.cli", ("fmsupervisor.config", "fmsupervisor.daemon", "asyncio"), id="--version"),
        pytest.param("fmsupervisor.client", ("fmsupervisor.core", "asyncio", "structlog"), id="status"),
        pytest.param("fmsupervisor.daemon", ("fmsupervisor.simulator", "fmsupervisor.client"), id="run"),
        pytest.param("fmsupervisor.daemon", ("prometheus_client",), id="run without metrics"),
        pytest.param(
            "fmsupervisor.daemon, fmsupervisor.report.metrics_server, fmsupervisor.host.linux_kernel",
            ("tenacity", "zstandard", "yaml", "bcrypt"),
            id="run, until it is needed",
        ),
    ],
)
def test_only_what_a_command_needs_is_imported(imported: str, unwanted: tuple[str, ...]) -> None:
    assert loaded_modules(imported) & {*unwanted} == set()

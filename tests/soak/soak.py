"""``make soak``: the long forms. Prints a table for docs/reliability.md; the exit status is 1 when a promise broke."""

# ruff: noqa: T201
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.soak import runs

RUNS: tuple[Callable[[Path], runs.Measured], ...] = (
    partial(runs.crashes, count=10_000, warm_up=1_000),
    partial(runs.successors, count=1_000),
    partial(runs.kills, count=200),
)


def main() -> int:
    """Run all of them, one after the other."""
    print(f"`make soak`, {time.strftime('%Y-%m-%d', time.gmtime())}\n")
    print("| what | times | seconds | RSS growth | descriptors before, after | broken promises |")
    print("|---|---|---|---|---|---|")
    has_failed = False
    for run in RUNS:
        with tempfile.TemporaryDirectory(prefix="fmsupervisor-soak-") as directory:
            one = run(Path(directory))
        faults = "; ".join(one.faults) or "none"
        opened = f"{one.descriptors_before}, {one.descriptors_after}"
        print(
            f"| {one.what} | {one.count} | {one.seconds:.0f} | {one.rss_growth_kb} KiB | {opened} | {faults} |",
            flush=True,
        )
        has_failed |= bool(one.faults)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())

"""How fast Fabric Manager's log is read: ``python tests/bench/bench_log.py [lines]``.

Realistic traffic: the multicast conversation of NCCL communicators, as Fabric Manager 535 logs it, with a burst of SXid
lines (each doubled) after every hundredth communicator.
"""

import resource
import sys
import time
from collections.abc import Iterator

from fmsupervisor.fabric_manager.log_grammar import LogParser

_COMMUNICATOR = """\
[{time}] [INFO] [tid 1803] Received an inband message:  Message header details: magic Id:adbc request Id:{request:x} status:0 type:2 length:56
Message payload details:Team setup request: Allocation Size:60000000 Flags:0 Number of GPUs:8 GPU Handles:{handles}

[{time}] [INFO] [tid 1808] multicast group {group} is allocated.
[{time}] [INFO] [tid 1808] successfully setup multicast team for request id {request}.
[{time}] [INFO] [tid 1584] Sending inband response message:  Message header details: magic Id:adbc request Id:{request:x} status:0 type:3 length:24
Message payload details:Team setup response: Team Handle:{team:x} Flags:0 Address Base:c000000000000 Address Size:60000000

[{time}] [INFO] [tid 1803] Received an inband message:  Message header details: magic Id:adbc request Id:{request:x} status:0 type:4 length:14
Message payload details:Team release request: Team Handle:{team:x} Flags:0

[{time}] [INFO] [tid 1808] multicast group {group} is freed.
[{time}] [INFO] [tid 1808] successfully released multicast team with handle {team}.
"""
_SXID = (
    "[{time}] [ERROR] [tid 1374] detected NVSwitch non-fatal error 12028 on fid 0 on NVSwitch "
    "pci bus id 00000000:{bus:x}:00.0 physical id {switch} port {port}\n"
)


def traffic(lines: int) -> Iterator[bytes]:
    """About ``lines`` lines, in pieces of one communicator or one burst."""
    written = number = 0
    while written < lines:
        number += 1
        seed = number * 0x9E3779B97F4A7C15 % (1 << 64)
        clock = f"Feb {1 + number // 86400 % 28:02d} 2025 {number // 3600 % 24:02d}:{number // 60 % 60:02d}:{number % 60:02d}"
        handles = " ".join(f"{seed * (2 * gpu + 3) % (1 << 64):x}" for gpu in range(8))
        piece = _COMMUNICATOR.format(
            time=clock, request=seed, team=seed ^ 0x5DEECE66D, handles=handles, group=number % 1024
        )
        if number % 100 == 0:
            for port in range(18):
                switch = port % 4
                piece += 2 * _SXID.format(time=clock, bus=0x83 + switch, switch=switch, port=32 + port)
        written += piece.count("\n")
        yield piece.encode()


def resident_bytes() -> int:
    """This process's resident memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def measure(lines: int, block_bytes: int = 1 << 18) -> dict[str, float]:
    """Feed ``lines`` lines in blocks as the follower does, a batch after each block; only the parser is timed."""
    parser = LogParser("file")
    seconds = 0.0
    total_lines = total_bytes = switch_errors = 0
    block = bytearray()
    parser.feed(b"".join(traffic(20_000)))  # memory is compared with that of a parser that has warmed up
    parser.take_batch()
    before = resident_bytes()
    for piece in traffic(lines):
        block += piece
        if len(block) < block_bytes:
            continue
        data = bytes(block)
        block.clear()
        start = time.perf_counter()
        parser.feed(data)
        batch = parser.take_batch()
        seconds += time.perf_counter() - start
        total_lines += sum(batch.lines_by_level.values())
        total_bytes += len(data)
        switch_errors += sum(batch.switch_errors.values())
    return {
        "lines": total_lines,
        "lines_per_second": total_lines / seconds,
        "bytes_per_second": total_bytes / seconds,
        "switch_errors": switch_errors,
        "resident_growth_bytes": resident_bytes() - before,
    }


if __name__ == "__main__":
    for name, value in measure(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000).items():
        print(f"{name:24} {value:>16,.0f}")  # noqa: T201

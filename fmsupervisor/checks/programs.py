"""Runs a foreign program with a deadline and a bound on its output."""

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from fmsupervisor.fabric_manager.installation import VersionOutput

_OUTPUT_LIMIT_BYTES = 16 << 20
_PIECE_BYTES = 1 << 16


def run_program(arguments: Sequence[str], environment: Mapping[str, str], timeout_seconds: float) -> VersionOutput:
    """Run it with exactly this environment, in its own process group, which does not outlive the deadline.

    Never raises for what the program does.
    """
    try:
        child = subprocess.Popen(
            list(arguments),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return VersionOutput("", "", None, f"cannot be executed: {error.strerror or error}")
    with child:
        outputs, failure = _collect(child, time.monotonic() + timeout_seconds)
        if failure:
            _kill(child)
            return VersionOutput(*outputs, None, failure.format(seconds=timeout_seconds))
    if child.returncode < 0:
        return VersionOutput(*outputs, None, f"ended by signal {-child.returncode}")
    return VersionOutput(*outputs, child.returncode)


def _collect(child: "subprocess.Popen[bytes]", deadline: float) -> tuple[tuple[str, str], str]:
    """Standard output and error, and why the program has to be ended ("" when it ended by itself)."""
    contents = [bytearray(), bytearray()]

    def outcome(failure: str = "") -> tuple[tuple[str, str], str]:
        stdout, stderr = (content.decode("utf-8", "replace") for content in contents)
        return (stdout, stderr), failure

    with selectors.DefaultSelector() as selector:
        for place, stream in enumerate((child.stdout, child.stderr)):
            if stream is not None:
                selector.register(stream, selectors.EVENT_READ, place)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                return outcome("took longer than {seconds:g} s")
            for key, _ in ready:
                piece = os.read(key.fd, _PIECE_BYTES)
                contents[key.data] += piece
                if not piece:
                    selector.unregister(key.fileobj)
                if len(contents[key.data]) > _OUTPUT_LIMIT_BYTES:
                    return outcome(f"printed more than {_OUTPUT_LIMIT_BYTES >> 20} MiB")
    try:
        child.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return outcome("took longer than {seconds:g} s")
    return outcome()


def _kill(child: "subprocess.Popen[bytes]") -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass

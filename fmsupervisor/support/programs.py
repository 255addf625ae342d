"""Runs a program of the host for its output: bounded in time and in size, and never waits for what it left behind."""

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fmsupervisor.support.confined import whole_words

_ENVIRONMENT = {"LC_ALL": "C.UTF-8", "SYSTEMD_PAGER": "", "SYSTEMD_COLORS": "0", "SYSTEMD_URLIFY": "0"}
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Output:
    """What a program wrote, standard output and error together. ``problem``: why it is not all."""

    content: bytes
    status: int | None  # exit status; None: it could not be executed or had to be killed
    is_cut: bool = False
    problem: str = ""


def run_program(
    command: Sequence[str], timeout_seconds: float, limit_bytes: int, environment: Mapping[str, str] | None = None
) -> Output:
    """The last ``limit_bytes`` of the program's output. Never raises for what the program does."""
    variables = {"PATH": os.environ.get("PATH", _PATH), **_ENVIRONMENT, **(environment or {})}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
        )
    except OSError as error:
        return Output(b"", None, problem=f"cannot execute {command[0]}: {error.strerror}")
    deadline = time.monotonic() + timeout_seconds
    content, is_cut, is_complete = _read(process, deadline, limit_bytes)
    if is_complete:
        try:
            status = process.wait(max(0.0, deadline - time.monotonic()) + 0.5)
            return Output(content, status, is_cut)
        except subprocess.TimeoutExpired:
            pass
    _kill(process)
    return Output(content, None, is_cut, f"{command[0]} did not end within {timeout_seconds:g} s")


def _read(process: "subprocess.Popen[bytes]", deadline: float, limit_bytes: int) -> tuple[bytes, bool, bool]:
    """The end of the output, whether something before it is missing, and whether the program closed its output."""
    kept = bytearray()
    is_cut = is_complete = False
    with selectors.DefaultSelector() as selector, process.stdout as stream:  # type: ignore[union-attr]
        selector.register(stream, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if not selector.select(left):
                break
            chunk = os.read(stream.fileno(), 1 << 16)
            if not chunk:
                is_complete = True
                break
            kept += chunk
            if len(kept) > 2 * limit_bytes:
                del kept[:-limit_bytes]
                is_cut = True
    if len(kept) > limit_bytes:
        del kept[:-limit_bytes]
        is_cut = True
    return whole_words(bytes(kept), at_end=False) if is_cut else bytes(kept), is_cut, is_complete


def _kill(process: "subprocess.Popen[bytes]") -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except OSError:
        pass
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:  # in the kernel, where no signal reaches it
        pass

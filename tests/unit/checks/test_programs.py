"""Foreign programs: deadline, bounded output, no zombie, nothing raised."""

import os
import time

import pytest

from fmsupervisor.checks.programs import run_program


def sh(script: str, timeout: float = 10.0):
    return run_program(["/bin/sh", "-c", script], {"PATH": os.defpath, "A": "b"}, timeout)


def test_output_status_and_environment_are_those_of_the_program() -> None:
    output = sh('echo "$A"; echo oops >&2; exit 3')
    assert (output.stdout, output.stderr, output.status, output.failure) == ("b\n", "oops\n", 3, "")


@pytest.mark.parametrize(
    ("script", "failure"),
    [
        ("kill -9 $$", "ended by signal 9"),
        ("sleep 60", "took longer than 0.2 s"),
        ("sleep 60 & echo x", "took longer than 0.2 s"),  # a grandchild holds the pipe
        ("exec 1>&- 2>&-; sleep 60", "took longer than 0.2 s"),
    ],
)
def test_a_program_without_an_exit_status_says_why(script: str, failure: str) -> None:
    began = time.monotonic()
    output = sh(script, 0.2)
    assert (output.status, output.failure) == (None, failure)
    assert time.monotonic() - began < 30


def test_endless_output_is_cut_off() -> None:
    output = sh("exec cat /dev/zero", 30.0)
    assert (output.status, output.failure) == (None, "printed more than 16 MiB")


@pytest.mark.parametrize("path", ["/nonexistent", "/etc/passwd", "/"])
def test_a_program_that_cannot_be_executed_says_so(path: str) -> None:
    output = run_program([path], {}, 5.0)
    assert output.status is None
    assert output.failure.startswith("cannot be executed: ")

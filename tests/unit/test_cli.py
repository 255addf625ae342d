"""The command line: exit statuses, messages, and that every output can be used by another program."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fmsupervisor import __version__, config
from fmsupervisor.cli import main
from fmsupervisor.daemon_lock import InstanceLock
from fmsupervisor.host.root import HostRoot
from fmsupervisor.simulator.scenarios import SCENARIOS

COMMANDS = ("run", "config", "status", "wait", "explain", "report", "check", "simulate")
PATIENCE_SECONDS = 20.0


@dataclass
class Result:
    status: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Result]]:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def run(*arguments: str) -> Result:
        try:
            status = main(arguments)
        except SystemExit as end:
            status = int(end.code or 0)
        return Result(status, *capsys.readouterr())

    yield run
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # a command may hold signals to the end of its process


def start(*arguments: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "fmsupervisor", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[HostRoot]:
    """A host on which a daemon seems to run."""
    root = HostRoot(str(tmp_path))
    root.make_directory("/run/fmsupervisor")
    lock = InstanceLock(root, "/run/fmsupervisor")
    lock.acquire()
    yield root
    lock.release()


def say(root: HostRoot, state: str, updated_at: float = 2.0, directory: str = "/run/fmsupervisor") -> None:
    document = {
        "schema": 1, "version": "1.2.3", "pid": os.getpid(), "updated_at": updated_at, "state": state, "reason": "reason",
        "since": 1.0, "ready": state == "configured", "steps": [], "switches": [], "gpus": [], "conditions": [],
        "fabric_manager": {"pid": None, "last_exit": None},
    }  # fmt: skip
    root.write_atomically(f"{directory}/status.json", json.dumps(document).encode(), durable=False)


class TestHelp:
    @pytest.mark.parametrize("command", COMMANDS)
    def test_is_there_for_every_command(self, run, command: str) -> None:
        result = run(command, "--help")
        assert result.status == 0
        assert result.out.startswith(f"usage: fmsupervisor {command}")

    def test_lists_every_command(self, run) -> None:
        result = run("--help")
        assert result.status == 0
        assert all(command in result.out for command in COMMANDS)

    def test_version_is_the_packages(self, run) -> None:
        assert run("--version") == Result(0, f"fmsupervisor {__version__}\n", "")

    @pytest.mark.parametrize(
        "arguments",
        [(), ("fly",), ("status", "--fly"), ("wait", "--timeout", "-1"), ("wait", "--timeout", "soon"),
         ("wait", "--timeout", "inf"), ("wait", "--timeout", "nan"), ("simulate", "--speed", "0"),
         ("simulate", "--speed", "nan")],
        ids=" ".join,
    )  # fmt: skip
    def test_a_wrong_command_line_ends_with_2_and_the_usage(self, run, arguments: tuple[str, ...]) -> None:
        result = run(*arguments)
        assert result.status == 2
        assert result.err.startswith("usage: fmsupervisor")
        assert "Traceback" not in result.err


class TestConfig:
    def test_default_loads_back_to_the_defaults(self, run, tmp_path: Path) -> None:
        result = run("config", "--default")
        assert result.status == 0
        file = tmp_path / "fmsupervisor.toml"
        file.write_text(result.out)
        assert config.load(str(file), required=True).settings == config.load_text("", "").settings
        assert run("config", "--config", str(file)).status == 0

    def test_shows_the_effective_value_and_where_it_comes_from(self, run, tmp_path: Path) -> None:
        file = tmp_path / "fmsupervisor.toml"
        file.write_text("[switches]\nexpected = 6\n")
        lines = [line for line in run("config", "--config", str(file)).out.splitlines() if "expected" in line]
        assert any("6" in line and f"{file}:2" in line for line in lines)

    @pytest.mark.parametrize(
        ("content", "named"),
        [
            pytest.param("[switches]\nexpectd = 6\n", "switches.expectd", id="unknown-key"),
            pytest.param("[switches]\nexpected = 0\n", "switches.expected", id="impossible-value"),
            pytest.param("[switches\n", "not valid TOML", id="no-toml"),
        ],
    )
    @pytest.mark.parametrize("command", ["config", "run"])
    def test_that_is_wrong_ends_every_command_with_78_and_names_the_place(
        self, run, tmp_path: Path, command: str, content: str, named: str
    ) -> None:
        file = tmp_path / "fmsupervisor.toml"
        file.write_text(content)
        result = run(command, "--config", str(file))
        assert (result.status, result.out) == (78, "")
        assert named in result.err
        assert str(file) in result.err
        assert "Traceback" not in result.err

    def test_that_is_missing_is_wrong_when_it_was_named(self, run, tmp_path: Path) -> None:
        result = run("config", "--config", str(tmp_path / "none.toml"))
        assert result.status == 78
        assert "No such file or directory" in result.err


class TestStatus:
    @pytest.mark.parametrize(("state", "expected"), [("configured", 0), ("starting", 1)])
    def test_ends_with_0_or_1(self, run, host: HostRoot, state: str, expected: int) -> None:
        say(host, state)
        assert run("status", "--root", host.directory).status == expected

    def test_ends_with_3_and_a_sentence_without_a_daemon(self, run, tmp_path: Path) -> None:
        result = run("status", "--root", str(tmp_path))
        assert (result.status, result.out) == (3, "")
        assert result.err.startswith("no fmsupervisor is running with /run/fmsupervisor\n")

    @pytest.mark.parametrize("command", [("status",), ("wait", "--timeout", "0")])
    def test_finds_the_daemon_in_spite_of_a_mistake_in_the_settings(self, run, tmp_path: Path, command) -> None:
        """The daemon goes on with the settings from before; a guest must not be refused for an edit."""
        file = tmp_path / "fmsupervisor.toml"
        file.write_text("oops [")
        result = run(*command, "--config", str(file), "--root", str(tmp_path))
        assert result.status == 3
        assert "not valid TOML" in result.err
        assert "no fmsupervisor is running" in result.err

    def test_json_is_json(self, run, host: HostRoot) -> None:
        say(host, "configured")
        assert json.loads(run("status", "--json", "--root", host.directory).out)["state"] == "configured"

    def test_reads_the_settings_of_the_host_that_it_looks_at(self, run, tmp_path: Path) -> None:
        root = HostRoot(str(tmp_path))
        root.make_directory("/etc")
        root.make_directory("/run/elsewhere")
        root.write_atomically("/etc/fmsupervisor.toml", b'[service]\nstate_directory = "/run/elsewhere"\n')
        lock = InstanceLock(root, "/run/elsewhere")
        lock.acquire()
        assert run("status", "--root", str(tmp_path)).status == 3  # it has not spoken yet
        say(root, "configured", directory="/run/elsewhere")
        assert run("status", "--root", str(tmp_path)).status == 0
        lock.release()

    def test_that_cannot_be_read_ends_with_1_and_the_cause(self, run, host: HostRoot) -> None:
        os.symlink("status.json", host.path("/run/fmsupervisor/status.json"))
        result = run("status", "--root", host.directory)
        assert (result.status, result.out) == (1, "")
        assert result.err.startswith("fmsupervisor: cannot observe /run/fmsupervisor/status.json")

    def test_watch_prints_again_on_a_change_and_ends_on_sigint(self, host: HostRoot) -> None:
        say(host, "starting")
        with start("status", "--watch", "--root", host.directory) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert b"fabric     starting" in _read_until(process.stdout.fileno(), b"starting")
            say(host, "configured", updated_at=3.0)
            assert b"fabric     configured" in _read_until(process.stdout.fileno(), b"configured")
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_SECONDS) == 130
            assert process.stderr.read() == b""


def _read_until(descriptor: int, wanted: bytes) -> bytes:
    content = b""
    while wanted not in content:
        assert select.select([descriptor], [], [], PATIENCE_SECONDS)[0], f"nothing more after {content!r}"
        chunk = os.read(descriptor, 1 << 16)
        assert chunk, f"it ended after {content!r}"
        content += chunk
    return content


class TestWait:
    @pytest.mark.parametrize(("state", "expected"), [("configured", 0), ("not-applicable", 0), ("failed", 1)])
    def test_ends_with_0_when_there_is_nothing_more_to_wait_for(
        self, run, host: HostRoot, state: str, expected: int
    ) -> None:
        say(host, state)
        assert run("wait", "--timeout", "0", "--root", host.directory).status == expected

    def test_ends_with_3_without_a_daemon(self, run, tmp_path: Path) -> None:
        result = run("wait", "--timeout", "0", "--root", str(tmp_path))
        assert result.status == 3
        assert "no fmsupervisor is running" in result.err


class TestSimulate:
    def test_lists_every_scenario_with_its_summary(self, run) -> None:
        result = run("simulate", "--list")
        assert result.status == 0
        assert [line.split()[0] for line in result.out.splitlines()] == list(SCENARIOS)

    def test_names_the_scenarios_when_it_does_not_know_the_one_asked_for(self, run) -> None:
        result = run("simulate", "--scenario", "earthquake")
        assert (result.status, result.out) == (2, "")
        assert "earthquake" in result.err
        assert "--list" in result.err

    def test_does_not_build_a_host_over_files(self, run, tmp_path: Path) -> None:
        (tmp_path / "precious").write_text("precious")
        result = run("simulate", "--directory", str(tmp_path))
        assert result.status == 78
        assert os.listdir(tmp_path) == ["precious"]


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-", "2>&-"])
def test_descriptors_that_were_closed_are_no_fault(closed: str) -> None:
    command = f"exec '{sys.executable}' -m fmsupervisor config --default {closed}"
    assert subprocess.run(["/bin/sh", "-c", command], check=False, capture_output=True).returncode == 0


class TestAReaderThatGoesAway:
    @pytest.mark.parametrize(
        "arguments",
        [("config", "--default"), ("simulate", "--list"), ("config", "--config", "/dev/null/x")],
        ids=" ".join,
    )
    def test_is_no_fault(self, arguments: tuple[str, ...]) -> None:
        with start(*arguments) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            assert process.wait(PATIENCE_SECONDS) in (0, 78)
            assert b"Traceback" not in process.stderr.read()

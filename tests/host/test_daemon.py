"""The daemon as a whole on a simulated host: what systemd, probes and other programs see of it, and how it ends.

Where it must have a process of its own it is ``fmsupervisor simulate``; else it runs in this process's event loop.
"""

import asyncio
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from fmsupervisor import config
from fmsupervisor.clock import Clock
from fmsupervisor.core.events import StopRequested
from fmsupervisor.daemon import Daemon
from fmsupervisor.errors import CannotObserve
from fmsupervisor.report import journal
from fmsupervisor.report.systemd import SERVICE_MANAGER_VARIABLES, SystemdNotifier
from fmsupervisor.settings import LoggingSettings
from fmsupervisor.simulator.command import _toml
from fmsupervisor.simulator.kernel import SimulatedKernel
from fmsupervisor.simulator.scenarios import SCENARIOS, _merged
from fmsupervisor.simulator.uevents import SimulatedUevents
from fmsupervisor.simulator.world import World

SPEED = 20.0
PATIENCE_SECONDS = 30.0
SETTINGS_FILE = "/etc/fmsupervisor.toml"
STATUS_FILE = "/run/fmsupervisor/status.json"


class NotifySocket:
    """The other end of sd_notify(3). Keeps each assignment with the time of its arrival."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._lines: list[tuple[float, str]] = []
        self._thread = threading.Thread(target=self._receive)
        self._thread.start()

    def _receive(self) -> None:
        while message := self._socket.recv(1 << 16):
            now = time.monotonic()
            self._lines += [(now, line) for line in message.decode().split("\n")]

    @property
    def lines(self) -> list[str]:
        return [line for _, line in self._lines]

    def times(self, line: str) -> list[float]:
        return [at for at, text in self._lines if text == line]

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stop:
            stop.sendto(b"", self.path)
        self._thread.join()
        self._socket.close()


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[NotifySocket]:
    opened = NotifySocket(tmp_path)
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def _process_state() -> Iterator[None]:
    """The daemon sets these for its whole process."""
    umask = os.umask(0o022)
    journal.configure_logging(LoggingSettings(), {}, io.StringIO())
    yield
    os.umask(umask)


@pytest.fixture
def host(tmp_path: Path) -> Path:
    made = tmp_path / "host"
    made.mkdir()
    return made


class Running:
    """A daemon in the present event loop."""

    def __init__(
        self,
        directory: Path,
        scenario: str,
        settings: Mapping[str, Any],
        environment: Mapping[str, str],
        **options: Any,
    ) -> None:
        self.world = World(SCENARIOS[scenario], str(directory), SPEED)
        self.root = self.world.root
        self._settings = _merged(
            SCENARIOS[scenario].settings_at(SPEED), {"metrics": {"listen": f"127.0.0.1:{free_port()}"}, **settings}
        )
        self.write_settings({})
        self.daemon = Daemon(
            self._load(),
            self.root,
            self.world.kernel,
            Clock(SPEED),
            SystemdNotifier(environment),
            self._load,
            **options,
        )
        self.task = asyncio.ensure_future(self.daemon.run())

    def _load(self) -> Any:
        return config.load(self.root.path(SETTINGS_FILE), required=True).settings

    def write_settings(self, changes: Mapping[str, Any]) -> None:
        self.root.write_atomically(SETTINGS_FILE, "".join(_toml(_merged(self._settings, changes))).encode())

    def write_text(self, text: str) -> None:
        self.root.write_atomically(SETTINGS_FILE, text.encode())

    @property
    def state(self) -> str | None:
        return self.daemon.reporter.document.get("state")

    @property
    def codes(self) -> set[str]:
        return {row["code"] for row in self.daemon.reporter.document.get("conditions", ())}

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():
                if self.task.done():
                    self.task.result()
                    raise AssertionError("the daemon has ended")
                await asyncio.sleep(0.005)

    async def get(self, path: str) -> tuple[int, str]:
        """Status and body of the metrics server's answer, asked for in a thread; 0 when nobody answers."""
        port = self.daemon._settings.metrics.listen.rpartition(":")[2]
        return await asyncio.to_thread(_get, f"http://127.0.0.1:{port}{path}")

    async def stop(self) -> None:
        if not self.task.done():
            self.daemon.supervisor.feed(StopRequested())
        await asyncio.wait_for(self.task, PATIENCE_SECONDS)
        self.daemon.reporter.notifier.close()


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except urllib.error.URLError:
        return 0, ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def running(
    directory: Path,
    scenario: str = "healthy",
    settings: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> AsyncIterator[Running]:
    one = Running(directory, scenario, settings or {}, environment or {}, **options)
    try:
        yield one
    finally:
        await one.stop()


def play(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scene)


def processes_of(directory: Path) -> list[int]:
    """Processes that run a program below the directory, or have it in their command line; not we ourselves."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            arguments = Path(f"/proc/{name}/cmdline").read_bytes()
        except OSError:
            continue
        if str(directory).encode() in arguments and int(name) != os.getpid():
            found.append(int(name))
    return found


class Simulation:
    """``fmsupervisor simulate`` in a process of its own."""

    def __init__(self, directory: Path, scenario: str, environment: Mapping[str, str]) -> None:
        self._directory = directory
        self.log = directory.parent / "output"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fmsupervisor", "simulate", "--scenario", scenario, "--speed", f"{SPEED:g}",
                 "--directory", str(directory)],
                stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environment},
            )  # fmt: skip

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert self.process.poll() is None, f"it has ended: {self.log.read_text()}"
            assert time.monotonic() < deadline, f"it does not happen: {self.log.read_text()}"
            time.sleep(0.005)

    def until_printed(self, text: str) -> None:
        self.until(lambda: text in self.log.read_text())

    @property
    def status(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self._directory / STATUS_FILE[1:]).read_text()))
        except FileNotFoundError:
            return {"state": None}

    def end(self, signal_number: int = signal.SIGTERM) -> int:
        self.process.send_signal(signal_number)
        return self.process.wait(PATIENCE_SECONDS)


@pytest.fixture
def simulate(host: Path) -> Iterator[Callable[..., Simulation]]:
    begun: list[Simulation] = []

    def simulate(scenario: str = "healthy", **environment: str) -> Simulation:
        begun.append(Simulation(host, scenario, environment))
        return begun[-1]

    yield simulate
    for one in begun:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()
    for pid in processes_of(host):
        os.kill(pid, signal.SIGKILL)


class TestTheEnd:
    @pytest.mark.parametrize(
        ("scenario", "printed"),
        [
            pytest.param("healthy", "reading the installed", id="reading-the-tree"),
            pytest.param("healthy", "loading nvidia.ko", id="loading-the-module"),
            pytest.param("switch-missing", "WAITING-FOR-SWITCHES", id="waiting-for-switches"),
            pytest.param("slow", "CONFIGURING", id="configuring"),
            pytest.param("healthy", "CONFIGURED", id="configured"),
            pytest.param("crash-loop", "BACKOFF", id="backoff"),
            pytest.param("version-mismatch", "FAILED", id="failed"),
            pytest.param("no-switch", "NOT-APPLICABLE", id="not-applicable"),
            pytest.param("ignores-sigterm", "CONFIGURED", id="fabric-manager-that-ignores-sigterm"),
            pytest.param("forks-away", "FMS-", id="fabric-manager-that-daemonised"),
        ],
    )
    def test_comes_in_order_at_any_time_and_leaves_no_process(
        self, simulate: Callable[..., Simulation], host: Path, scenario: str, printed: str
    ) -> None:
        simulation = simulate(scenario)
        simulation.until_printed(printed)
        assert simulation.end() == 0, simulation.log.read_text()
        assert "Traceback" not in simulation.log.read_text()
        assert simulation.status["state"] == "stopping"
        assert simulation.status["fabric_manager"]["pid"] is None
        assert processes_of(host) == []

    def test_comes_with_sigint_as_with_sigterm(self, simulate: Callable[..., Simulation], host: Path) -> None:
        simulation = simulate()
        simulation.until(lambda: simulation.status["state"] == "configured")
        assert simulation.end(signal.SIGINT) == 0
        assert processes_of(host) == []

    def test_waits_for_signals_that_come_too_early_and_ignores_those_that_come_too_late(
        self, simulate: Callable[..., Simulation], host: Path
    ) -> None:
        simulation = simulate()
        simulation.until((host / "run/fmsupervisor/lock").exists)
        simulation.process.send_signal(signal.SIGHUP)
        while simulation.process.poll() is None:
            simulation.process.send_signal(signal.SIGTERM)
            time.sleep(0.001)
        assert simulation.process.returncode == 0, simulation.log.read_text()
        assert "Traceback" not in simulation.log.read_text()
        assert processes_of(host) == []


class TestASecondDaemon:
    def test_in_the_same_state_directory_ends_with_75_and_names_the_first(
        self, simulate: Callable[..., Simulation], host: Path, tmp_path: Path
    ) -> None:
        first = simulate("no-switch")
        first.until(lambda: first.status["state"] == "not-applicable")
        settings = tmp_path / "second.toml"
        settings.write_text(f'[service]\nstate_directory = "{host}/run/fmsupervisor"\n[metrics]\nenabled = false\n')
        command = [sys.executable, "-m", "fmsupervisor", "run", "--config", str(settings)]
        second = subprocess.run(command, capture_output=True, timeout=PATIENCE_SECONDS, check=False)
        assert second.returncode == 75
        assert f"another fmsupervisor is running (pid {first.process.pid})".encode() in second.stderr
        assert b"Traceback" not in second.stderr
        assert first.status["pid"] == first.process.pid

    def test_that_cannot_make_its_state_directory_says_so(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        settings = tmp_path / "settings.toml"
        settings.write_text(f'[service]\nstate_directory = "{tmp_path}/file/below"\n[metrics]\nenabled = false\n')
        command = [sys.executable, "-m", "fmsupervisor", "run", "--config", str(settings)]
        ended = subprocess.run(command, capture_output=True, timeout=PATIENCE_SECONDS, check=False)
        assert ended.returncode == 1
        assert ended.stderr.decode() == f"fmsupervisor: cannot make directory {tmp_path}/file/below: Not a directory\n"


class TestSystemd:
    def test_hears_every_change_and_ready_once_the_outcome_is_known(self, host: Path, systemd: NotifySocket) -> None:
        async def scene() -> None:
            async with running(host, environment={"NOTIFY_SOCKET": systemd.path}) as one:
                await one.until(lambda: one.state == "configured")
                await one.until(lambda: "READY=1" in systemd.lines)
            await asyncio.to_thread(wait_for, lambda: "STOPPING=1" in systemd.lines)

        play(scene())
        lines = systemd.lines
        ready = lines.index("READY=1")
        states = [line.removeprefix("STATUS=").partition(":")[0] for line in lines if line.startswith("STATUS=")]
        distinct = [state for state, before in zip(states, [None, *states], strict=False) if state != before]
        assert distinct[0] == "waiting-for-module"
        assert distinct[-3:] == ["configuring", "configured", "stopping"]
        assert last_status(lines[:ready]).startswith("configured: ")
        assert any(line.startswith("EXTEND_TIMEOUT_USEC=") for line in lines[:ready])
        assert not any(line.startswith("EXTEND_TIMEOUT_USEC=") for line in lines[ready:])
        assert lines.count("READY=1") == 1
        assert lines.count("STOPPING=1") == 1

    @pytest.mark.parametrize(
        ("ready_when", "scenario", "is_ready", "status"),
        [
            pytest.param("decided", "version-mismatch", True, "FAILED FMS-", id="decided-failed"),
            pytest.param("decided", "no-switch", True, "not-applicable: ", id="decided-not-applicable"),
            pytest.param("configured", "version-mismatch", False, "FAILED FMS-", id="configured-failed"),
            pytest.param("configured", "no-switch", True, "not-applicable: ", id="configured-not-applicable"),
            pytest.param("started", "version-mismatch", True, "", id="started"),
        ],
    )
    def test_hears_ready_by_policy(
        self, host: Path, systemd: NotifySocket, ready_when: str, scenario: str, is_ready: bool, status: str
    ) -> None:
        async def scene() -> None:
            settings = {"service": {"ready_when": ready_when}}
            async with running(host, scenario, settings, {"NOTIFY_SOCKET": systemd.path}) as one:
                await one.until(lambda: one.state in ("failed", "not-applicable"))
            await asyncio.to_thread(wait_for, lambda: "STOPPING=1" in systemd.lines)

        play(scene())
        assert ("READY=1" in systemd.lines) == is_ready
        before = systemd.lines[: systemd.lines.index("READY=1" if is_ready else "STOPPING=1")]
        assert last_status(before).startswith(status)
        if ready_when == "started":
            assert not last_status(before).startswith("FAILED")

    def test_hears_from_the_watchdog_at_half_the_interval_and_nothing_while_the_loop_is_blocked(
        self, host: Path, systemd: NotifySocket
    ) -> None:
        limit = 0.4
        environment = {"NOTIFY_SOCKET": systemd.path, "WATCHDOG_USEC": str(round(limit * 1e6))}

        async def scene() -> None:
            async with running(host, "no-switch", environment=environment) as one:
                await one.until(lambda: len(systemd.times("WATCHDOG=1")) > 6)
                asyncio.get_running_loop().call_soon(time.sleep, 3 * limit)
                await asyncio.sleep(0)
                seen = len(systemd.times("WATCHDOG=1"))
                await one.until(lambda: len(systemd.times("WATCHDOG=1")) > seen + 1)

        play(scene())
        times = systemd.times("WATCHDOG=1")
        gaps = [after - before for before, after in pairwise(times)]
        assert limit / 4 < median(gaps[:6]) < limit * 3 / 4
        assert max(gaps) > limit * 2

    def test_is_never_known_to_fabric_manager(self, simulate: Callable[..., Simulation], systemd: NotifySocket) -> None:
        variables = dict.fromkeys(SERVICE_MANAGER_VARIABLES, "1") | {"NOTIFY_SOCKET": systemd.path}
        simulation = simulate(**variables)
        simulation.until(lambda: simulation.status["state"] == "configured")
        environment = Path(f"/proc/{simulation.status['fabric_manager']['pid']}/environ").read_text()
        names = {entry.partition("=")[0] for entry in environment.rstrip("\0").split("\0")}
        assert names == {"PATH", "LANG", "LD_LIBRARY_PATH", "FMSUPERVISOR_TOKEN"}
        simulation.until(lambda: "READY=1" in systemd.lines)
        simulation.end()


def last_status(lines: list[str]) -> str:
    return next((line.removeprefix("STATUS=") for line in reversed(lines) if line.startswith("STATUS=")), "")


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class TestSighup:
    def test_reads_the_settings_again_and_says_so(self, host: Path, systemd: NotifySocket) -> None:
        async def scene() -> None:
            async with running(host, environment={"NOTIFY_SOCKET": systemd.path}) as one:
                await one.until(lambda: "READY=1" in systemd.lines)
                before = time.monotonic()
                one.write_settings({"restart": {"crash_loop_count": 9}, "fabric_manager": {"fabric_mode": 1}})
                os.kill(os.getpid(), signal.SIGHUP)
                await one.until(lambda: one.daemon.supervisor.state.settings.restart.crash_loop_count == 9)
                await one.until(lambda: systemd.lines.count("READY=1") == 2)
                await one.until(lambda: "FMS-703" in one.codes)  # needs a restart of Fabric Manager, which is not done
                assert one.daemon.reporter.document["fabric_manager"]["starts"] == 1
                begun = systemd.lines.index("RELOADING=1")
                name, _, value = systemd.lines[begun + 1].partition("=")
                assert name == "MONOTONIC_USEC"
                assert before <= int(value) / 1e6 <= time.monotonic()
                assert "READY=1" in systemd.lines[begun:]

        play(scene())

    def test_keeps_the_settings_when_the_file_is_broken_until_it_is_mended(
        self, host: Path, systemd: NotifySocket
    ) -> None:
        async def scene() -> None:
            async with running(host, "no-switch", environment={"NOTIFY_SOCKET": systemd.path}) as one:
                await one.until(lambda: one.state == "not-applicable")
                settings = one.daemon.supervisor.state.settings
                one.write_text("[restart]\ncrash_loop_count = 0\n")
                os.kill(os.getpid(), signal.SIGHUP)
                await one.until(lambda: "FMS-702" in one.codes)
                assert one.daemon.supervisor.state.settings is settings
                await one.until(lambda: systemd.lines.count("READY=1") == 2)
                one.write_settings({"restart": {"crash_loop_count": 9}})
                os.kill(os.getpid(), signal.SIGHUP)
                await one.until(lambda: "FMS-702" not in one.codes)
                assert one.daemon.supervisor.state.settings.restart.crash_loop_count == 9

        play(scene())


class TestWhatChangesUnderneath:
    def test_a_configuration_that_cannot_be_read_while_another_fabric_manager_is_there(self, host: Path) -> None:
        async def scene() -> None:
            async with running(host, "foreign-fm") as one:
                await one.until(lambda: one.state == "failed")
                path = one.root.path(one.daemon.supervisor.state.settings.fabric_manager.config)
                os.unlink(path)
                os.mkdir(path)
                looked_at = one.daemon.supervisor.state.foreign_looked_at
                await one.until(lambda: one.daemon.supervisor.state.foreign_looked_at > looked_at)
                assert one.codes >= {"FMS-503"}

        play(scene())

    def test_a_user_who_is_removed_makes_the_nodes_fail_and_not_the_service(self, host: Path) -> None:
        async def scene() -> None:
            async with running(host) as one:
                await one.until(lambda: one.state == "configured")
                one.write_settings({"device_nodes": {"owner": "nobody-of-that-name"}})
                os.kill(os.getpid(), signal.SIGHUP)
                await one.until(lambda: "FMS-402" in one.codes)
                one.write_settings({})
                os.kill(os.getpid(), signal.SIGHUP)
                await one.until(lambda: "FMS-402" not in one.codes)
                assert one.state == "configured"

        play(scene())

    def test_threads_that_cannot_be_started_are_waited_for(self, host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        refused = []

        def refuse(_thread: threading.Thread) -> None:
            refused.append(_thread)
            raise RuntimeError("can't start new thread")

        async def scene() -> None:
            async with running(host) as one:
                await one.until(lambda: one.state == "configured")
                with monkeypatch.context() as patch:
                    patch.setattr(threading.Thread, "start", refuse)
                    (host / "usr/local/nvidia/usr/bin/other").mkdir()
                    await one.until(lambda: refused)
                assert one.daemon.supervisor.state.is_inspecting
                await one.until(lambda: not one.daemon.supervisor.state.is_inspecting)

        play(scene())

    def test_a_file_mended_in_place_is_a_cure(self, host: Path) -> None:
        async def scene() -> None:
            program = host / "usr/local/nvidia/usr/bin/nv-fabricmanager"
            async with running(host) as one:
                right = program.read_text()
                program.write_text("#!/bin/sh\necho Fabric Manager version is : 570.1.1\n")
                await one.until(lambda: one.state == "failed")
                program.write_text(right)
                await one.until(lambda: one.state == "configured")

        play(scene())

    def test_uevents_that_cannot_be_heard_are_listened_for_again(
        self, host: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        heard: list[object] = []
        listen = SimulatedKernel.monitor_uevents

        def refuse_once(kernel: SimulatedKernel) -> SimulatedUevents:
            if not heard:
                heard.append(None)
                raise CannotObserve("netlink", "no descriptor left")
            heard.append(listen(kernel))
            return heard[-1]  # type: ignore[return-value]

        monkeypatch.setattr(SimulatedKernel, "monitor_uevents", refuse_once)

        async def scene() -> None:
            async with running(host) as one:
                await one.until(lambda: "FMS-310" in one.codes)
                await one.until(lambda: one.state == "configured" and "FMS-310" not in one.codes)
                assert len(heard) == 2

        play(scene())

    def test_a_module_that_comes_to_a_directory_that_was_empty_is_loaded(self, host: Path) -> None:
        async def scene() -> None:
            async with running(host) as one:
                module = f"{host}/usr/local/nvidia/usr/lib/modules/6.12.0-160000.9-default/updates/nvidia.ko.zst"
                os.rename(module, f"{host}/away")
                await one.until(lambda: "FMS-201" in one.codes)
                os.rename(f"{host}/away", module)
                await one.until(lambda: one.state == "configured")

        play(scene())


class TestTheMetricsPort:
    def test_in_use_does_not_keep_the_fabric_down_and_is_bound_when_it_is_free(self, host: Path) -> None:
        taken = socket.create_server(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"

        async def scene() -> None:
            settings = {"metrics": {"listen": address}}
            async with running(host, settings=settings, bind_retry_seconds=0.05) as one:
                await one.until(lambda: one.state == "configured")
                assert "FMS-701" in one.codes
                taken.close()
                await one.until(lambda: "FMS-701" not in one.codes)
                status, body = await one.get("/metrics")
                assert status == 200
                assert 'fabricmanager_state{state="configured"} 1.0' in body
                assert 'fmsupervisor_condition_active{code="FMS-701",severity="warning"} 0.0' in body

        play(scene())

    def test_is_not_tried_again_after_the_end(self, host: Path) -> None:
        taken = socket.create_server(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"

        async def scene() -> None:
            settings = {"metrics": {"listen": address}}
            async with running(host, "no-switch", settings, bind_retry_seconds=0.05) as one:
                await one.until(lambda: "FMS-701" in one.codes)
            taken.close()
            await asyncio.sleep(0.15)
            assert one.daemon.metrics is None

        play(scene())

    def test_is_not_opened_when_metrics_are_off(self, host: Path) -> None:
        async def scene() -> None:
            async with running(host, "no-switch", {"metrics": {"enabled": False}}) as one:
                await one.until(lambda: one.state == "not-applicable")
                assert one.daemon.metrics is None

        play(scene())

    def test_answers_healthz_while_the_loop_turns_and_only_then(self, host: Path) -> None:
        async def scene() -> None:
            async with running(host, "no-switch", alive_answer_seconds=0.1) as one:
                await one.until(lambda: one.state == "not-applicable")
                assert await one.get("/healthz") == (200, "ok\n")
                answers: list[tuple[int, str]] = []
                port = one.daemon._settings.metrics.listen.rpartition(":")[2]
                asking = threading.Thread(
                    target=lambda: answers.append(_get(f"http://127.0.0.1:{port}/healthz")), daemon=True
                )

                def block() -> None:
                    asking.start()
                    asking.join(PATIENCE_SECONDS)

                asyncio.get_running_loop().call_soon(block)
                await one.until(lambda: answers)
                assert answers[0][0] == 503
                assert (await one.get("/healthz"))[0] == 200

        play(scene())

    def test_answers_readyz_as_the_fabric_is(self, host: Path) -> None:
        async def scene() -> None:
            async with running(host) as one:
                await one.until(lambda: one.state is not None and one.daemon.metrics is not None)
                status, sentence = await one.get("/readyz")
                assert (status, sentence.partition(":")[0]) == (503, "waiting-for-module")
                await one.until(lambda: one.state == "configured")
                status, sentence = await one.get("/readyz")
                assert (status, sentence.partition(":")[0]) == (200, "configured")

        play(scene())


class TestTheModuleMap:
    FILE = "usr/local/nvidia/fmsupervisor-modules.json"

    def test_is_learned_kept_and_known_again_after_a_restart(self, tmp_path: Path) -> None:
        def known(one: Running) -> list[int | None]:
            return [row["module_id"] for row in one.daemon.reporter.document.get("gpus", ())]

        async def scene() -> None:
            (tmp_path / "first").mkdir()
            async with running(tmp_path / "first") as one:
                await one.until(lambda: sorted(map(bool, known(one))) == [True] * 8)
                learned = known(one)
            (tmp_path / "second").mkdir()
            async with running(tmp_path / "second", "no-register", {"module": {"load": False}}) as one:
                (tmp_path / "second" / self.FILE).write_bytes((tmp_path / "first" / self.FILE).read_bytes())
                await one.until(lambda: known(one) == learned)
                assert {row["module_id_source"] for row in one.daemon.reporter.document["gpus"]} == {"learned"}
                assert one.state != "configured"

        play(scene())

    def test_that_cannot_be_written_does_not_disturb(self, host: Path) -> None:
        async def scene() -> None:
            async with running(host) as one:
                (host / self.FILE).mkdir()
                await one.until(
                    lambda: one.daemon.reporter.document.get("fabric_manager", {}).get("gpus_registered") == 8
                )
                assert one.state == "configured"

        play(scene())


class TestTheStatusFile:
    def test_stays_beside_the_lock_when_the_settings_name_another_directory(self, host: Path) -> None:
        async def scene() -> None:
            async with running(host, "no-switch") as one:
                await one.until(lambda: one.state == "not-applicable")
                (host / "run/other").mkdir()
                one.write_settings({"service": {"state_directory": "/run/other"}})
                os.kill(os.getpid(), signal.SIGHUP)
                await one.until(lambda: one.daemon.supervisor.state.settings.service.state_directory == "/run/other")
            assert list((host / "run/other").iterdir()) == []

        play(scene())

    def test_is_complete_whenever_it_is_read(self, host: Path) -> None:
        seen: set[str] = set()
        faults: list[str] = []
        is_over = threading.Event()

        def read_on() -> None:
            while not is_over.is_set():
                try:
                    document = json.loads((host / STATUS_FILE[1:]).read_bytes())
                except FileNotFoundError:
                    if seen:
                        faults.append("it was gone")
                except ValueError as error:
                    faults.append(str(error))
                else:
                    seen.add(document["state"])

        async def scene() -> None:
            async with running(host) as one:
                await one.until(lambda: one.daemon.reporter.document.get("fabric_manager", {}).get("gpus_registered"))

        reading = threading.Thread(target=read_on)
        reading.start()
        try:
            play(scene())
        finally:
            is_over.set()
            reading.join()
        assert faults == []
        assert {"waiting-for-module", "configured", "stopping"} <= seen
        assert [name for name in os.listdir(host / "run/fmsupervisor") if name not in ("lock", "status.json")] == []

    @pytest.mark.parametrize(
        "way",
        [
            "replaced-by-a-file",  # one that is only gone is made again: tests/faults
            pytest.param("unwritable", marks=pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")),
        ],
    )
    def test_that_cannot_be_written_is_a_condition_and_not_the_end(self, host: Path, way: str) -> None:
        directory, aside = host / "run/fmsupervisor", host / "run/aside"

        def spoil() -> None:
            if way == "unwritable":
                directory.chmod(0o555)
                return
            directory.rename(aside)
            directory.write_text("in the way")

        def mend() -> None:
            if way == "unwritable":
                directory.chmod(0o755)
                return
            directory.unlink()
            aside.rename(directory)

        async def scene() -> None:
            async with running(host) as one:
                await one.until(lambda: one.state == "configured")
                spoil()
                await one.until(lambda: "FMS-705" in one.codes)
                assert one.state == "configured"
                mend()
                await one.until(lambda: "FMS-705" not in one.codes)

        play(scene())


@pytest.mark.skipif(
    any("10de" in Path(file).read_text() for file in Path("/sys/bus/pci/devices").glob("*/vendor")),
    reason="this machine has NVIDIA hardware, which a test must not touch",
)
def test_the_daemon_on_this_very_machine_is_ready_and_quiet(tmp_path: Path, systemd: NotifySocket) -> None:
    settings = tmp_path / "fmsupervisor.toml"
    settings.write_text(f'[service]\nstate_directory = "{tmp_path}/state"\n[metrics]\nenabled = false\n')
    command = [sys.executable, "-m", "fmsupervisor", "run", "--config", str(settings)]
    environment = {**os.environ, "NOTIFY_SOCKET": systemd.path}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as process:
        try:
            wait_for(lambda: "READY=1" in systemd.lines or process.poll() is not None)
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_SECONDS) == 0
        finally:
            process.kill()
        assert process.stderr is not None
        events = [json.loads(line) for line in process.stderr.read().splitlines()]
    assert events
    assert not [event for event in events if event["level"] in ("warning", "error", "critical")]
    assert last_status(systemd.lines[: systemd.lines.index("READY=1")]).startswith("not-applicable: ")

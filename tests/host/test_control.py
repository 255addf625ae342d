"""Fabric Manager's control: what it is executed with, and in which order its words and its end are told."""

import asyncio
import os
import re
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import pytest

from fmsupervisor.core.events import (
    Event,
    FabricManagerExited,
    FabricManagerStarted,
    LogRead,
    OrphansEnded,
    SpawnFailed,
)
from fmsupervisor.fabric_manager.control import FabricManagerControl, environment, read_version
from fmsupervisor.fabric_manager.process import Children, become_subreaper
from fmsupervisor.facts import ExitStatus, LogKind, Moment, RenderedConfig
from fmsupervisor.host.root import HostRoot
from fmsupervisor.settings import FabricManagerSettings, Settings
from fmsupervisor.simulator.tree import PREFIX, TreeOptions, build_tree

PATIENCE_SECONDS = 20.0
HEADER = "Fabric Manager Log initializing at: 11/30/2026 10:00:00.000"
FAILURE = (
    "[Nov 30 2026 10:00:01] [ERROR] [tid 1] detected number of NVSwitches don't match with any supported system "
    "topology, aborting fabric manager"
)
MANAGER = FabricManagerSettings(
    binary="/fm", config="/fm.cfg", log_file="/fm.log", state_file="/fm.state", library_paths=("/lib64", "/lib")
)

E = TypeVar("E", bound=Event)


NOW = Moment(1.0, 1.0)


def config_of(manager: FabricManagerSettings) -> RenderedConfig:
    return RenderedConfig(manager.config, (), manager.log_file, can_log_stop=False, log_limit_bytes=1 << 30)


def of_process(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


class Stage:
    """A host whose nv-fabricmanager is a shell script, and what its control tells."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.root = HostRoot(str(directory))
        self.loop = asyncio.get_running_loop()
        self.children = Children(self.loop)
        self.loop.add_signal_handler(signal.SIGCHLD, self.children.reap)
        self.events: list[Event] = []
        self.control = FabricManagerControl(self.root, self.loop, self.children, self.events.append)

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def install(self, script: str, mode: int = 0o755) -> None:
        (self.directory / "fm").write_text(f"#!/bin/sh\ncd {self.directory}\n{script}\n")
        (self.directory / "fm").chmod(mode)

    def start(self, manager: FabricManagerSettings = MANAGER, *, resiliency: bool = False) -> None:
        self.control.start(Settings(fabric_manager=manager), config_of(manager), NOW, resiliency=resiliency)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():  # noqa: ASYNC110 - what is waited for is no event of this program
                await asyncio.sleep(0.005)

    async def finish(self, manager: FabricManagerSettings = MANAGER, *, resiliency: bool = False) -> None:
        self.start(manager, resiliency=resiliency)
        await self.until(lambda: self.of(FabricManagerExited))


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Callable[[Stage], Awaitable[None]]], None]:
    """Run a scene in an event loop, and leave no process behind."""

    def run(scene: Callable[[Stage], Awaitable[None]]) -> None:
        async def whole() -> None:
            stage = Stage(tmp_path)
            try:
                await scene(stage)
            finally:
                stage.control.kill()
                await stage.until(lambda: not stage.control.pids)
                stage.control.close()

        asyncio.run(whole())

    return run


Play = Callable[[Callable[[Stage], Awaitable[None]]], None]


class TestWhatItIsExecutedWith:
    def test_is_an_environment_of_three_variables(self) -> None:
        assert environment(HostRoot("/host"), MANAGER) == {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "LD_LIBRARY_PATH": "/host/lib64:/host/lib",
        }

    def test_has_no_library_path_when_there_is_none(self) -> None:
        manager = replace(MANAGER, library_paths=())
        assert environment(HostRoot("/"), manager) == {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}

    def test_reaches_the_process_unchanged(self, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "LISTEN_FDS", "LD_PRELOAD_NOT"):
            monkeypatch.setenv(name, "1")

        async def scene(stage: Stage) -> None:
            stage.install("exec /bin/sleep 60")
            stage.start()
            (pid,) = stage.control.pids
            await stage.until(lambda: of_process(pid, "comm") == "sleep\n")
            shown = of_process(pid, "environ").rstrip("\0").split("\0")
            names = {entry.partition("=")[0] for entry in shown} - {"PWD", "OLDPWD"}  # sh adds these
            assert names == {"PATH", "LANG", "LD_LIBRARY_PATH", "FMSUPERVISOR_TOKEN"}

        play(scene)

    @pytest.mark.parametrize(
        ("state", "resiliency", "expected"),
        [
            pytest.param(b"state", True, " --restart", id="state-file"),
            pytest.param(b"state", False, "", id="not-asked-for"),
            pytest.param(b"", True, "", id="empty-state-file"),
            pytest.param(None, True, "", id="no-state-file"),
            pytest.param("directory", True, "", id="directory"),
            pytest.param("loop", True, "", id="unreadable"),
        ],
    )
    def test_is_restart_only_with_a_state_to_restart_from(
        self, play: Play, tmp_path: Path, state: bytes | str | None, resiliency: bool, expected: str
    ) -> None:
        path = tmp_path / "fm.state"
        match state:
            case bytes(content):
                path.write_bytes(content)
            case "directory":
                path.mkdir()
            case "loop":
                path.symlink_to("fm.state")

        async def scene(stage: Stage) -> None:
            stage.install('echo "$@" > arguments')
            await stage.finish(resiliency=resiliency)
            assert (tmp_path / "arguments").read_text() == f"-c {tmp_path}/fm.cfg{expected}\n"

        play(scene)

    def test_is_a_session_of_start_time_and_process_id(self, play: Play) -> None:
        async def scene(stage: Stage) -> None:
            stage.install("exit 0")
            await stage.finish()
            (started,) = stage.of(FabricManagerStarted)
            assert re.fullmatch(rf"\d{{8}}T\d{{6}}Z-{started.pid}", started.session)

        play(scene)


class TestAProgramThatCannotBeExecuted:
    @pytest.mark.parametrize(
        ("kind", "cause"),
        [
            pytest.param("missing", "No such file or directory", id="missing"),
            pytest.param("not-executable", "Permission denied", id="not-executable"),
            pytest.param("directory", "Permission denied", id="directory"),
            pytest.param("text", "Exec format error", id="neither-elf-nor-script"),
        ],
    )
    def test_is_told_with_its_path_and_the_cause(self, play: Play, tmp_path: Path, kind: str, cause: str) -> None:
        async def scene(stage: Stage) -> None:
            match kind:
                case "not-executable":
                    stage.install("exit 0", 0o644)
                case "directory":
                    (tmp_path / "fm").mkdir()
                case "text":
                    (tmp_path / "fm").write_text("nothing\n")
                    (tmp_path / "fm").chmod(0o755)
            stage.start()
            assert stage.events == [SpawnFailed(f"cannot execute /fm: {cause}")]
            assert stage.control.pids == frozenset()

        play(scene)

    def test_looks_like_status_126_when_it_is_asked_for_its_version(self, play: Play, tmp_path: Path) -> None:
        async def scene(stage: Stage) -> None:
            result = await read_version(stage.children, [str(tmp_path / "fm"), "--version"], {}, PATIENCE_SECONDS)
            assert result == (ExitStatus(code=126), b"", b"No such file or directory")

        play(scene)


class TestWords:
    def test_in_the_log_file_are_told_before_the_exit_even_when_written_just_before_it(self, play: Play) -> None:
        async def scene(stage: Stage) -> None:
            stage.install(f'echo "{HEADER}" >> fm.log\necho "{FAILURE}" >> fm.log\nexit 1')
            await stage.finish()
            assert isinstance(stage.events[-1], FabricManagerExited)
            kinds = [record.kind for event in stage.of(LogRead) for record in event.batch.records]
            assert kinds == [LogKind.SESSION_HEADER, LogKind.TOPOLOGY_MISMATCH]

        play(scene)

    def test_without_a_newline_at_the_end_count(self, play: Play) -> None:
        async def scene(stage: Stage) -> None:
            stage.install(f'echo "{HEADER}" >> fm.log\nprintf "%s" "{FAILURE}" >> fm.log\nexit 1')
            await stage.finish()
            kinds = [record.kind for event in stage.of(LogRead) for record in event.batch.records]
            assert kinds[-1] is LogKind.TOPOLOGY_MISMATCH

        play(scene)

    def test_of_the_session_before_do_not_count(self, play: Play, tmp_path: Path) -> None:
        (tmp_path / "fm.log").write_text(f"{HEADER}\n{FAILURE}\n")

        async def scene(stage: Stage) -> None:
            stage.install(f'echo "{HEADER}" >> fm.log')
            await stage.finish()
            kinds = [record.kind for event in stage.of(LogRead) for record in event.batch.records]
            assert kinds == [LogKind.SESSION_HEADER]

        play(scene)

    @pytest.mark.parametrize("log_file", ["/fm.log", ""], ids=["log-file", "no-log-file"])
    def test_on_standard_error_are_told_and_are_the_last_lines(self, play: Play, log_file: str) -> None:
        async def scene(stage: Stage) -> None:
            stage.install(f'echo "{FAILURE}" >&2; echo bye; exit 1')
            await stage.finish(replace(MANAGER, log_file=log_file))
            batches = [event.batch for event in stage.of(LogRead)]
            assert [record.kind for batch in batches for record in batch.records if batch.source == "stderr"] == [
                LogKind.TOPOLOGY_MISMATCH
            ]
            (exited,) = stage.of(FabricManagerExited)
            assert exited.status == ExitStatus(code=1)
            assert set(exited.last_lines) == {FAILURE, "bye"}

        play(scene)

    def test_in_a_long_backlog_let_other_work_have_its_turn(self, play: Play, tmp_path: Path) -> None:
        line = "[Nov 30 2026 10:00:01] [INFO] [tid 1] multicast group 1 is freed.\n"
        content = f"{HEADER}\n" + line * 30_000

        async def scene(stage: Stage) -> None:
            stage.install("exec /bin/sleep 60")
            stage.start()
            (tmp_path / "fm.log").write_text(content)
            order: list[str] = []

            def other_work() -> None:
                order.append("other")
                stage.loop.call_soon(other_work)

            def told() -> int:
                batches = [event.batch for event in stage.of(LogRead)]
                order.extend(["log"] * (len(batches) - order.count("log")))
                return sum(sum(batch.lines_by_level.values()) for batch in batches)

            stage.loop.call_soon(other_work)
            stage.control.read_log()
            stage.control.read_log()  # in the meantime: does not read twice
            for _ in range(1000):
                if told() >= 30_000:
                    break
                await asyncio.sleep(0)
            assert told() in (30_000, 30_001)
            assert order.count("log") >= len(content) >> 18
            assert all(pair != ("log", "log") for pair in pairwise(order))

        play(scene)


class TestTheEnd:
    def test_is_asked_for_by_sigterm(self, play: Play) -> None:
        async def scene(stage: Stage) -> None:
            stage.install("trap 'exit 3' TERM\necho ready\nwhile :; do sleep 0.01; done")
            stage.start()
            await stage.until(lambda: stage.of(LogRead))
            stage.control.terminate()
            await stage.until(lambda: stage.of(FabricManagerExited))
            assert stage.of(FabricManagerExited)[0].status == ExitStatus(code=3)
            assert stage.control.pids == frozenset()
            stage.control.terminate()
            stage.control.kill()

        play(scene)

    def test_is_enforced_by_sigkill(self, play: Play) -> None:
        async def scene(stage: Stage) -> None:
            stage.install("trap '' TERM\necho ready\nexec /bin/sleep 60")
            stage.start()
            await stage.until(lambda: stage.of(LogRead))
            stage.control.terminate()
            stage.control.kill()
            await stage.until(lambda: stage.of(FabricManagerExited))
            assert stage.of(FabricManagerExited)[0].status == ExitStatus(signal=9)

        play(scene)

    def test_is_complete_only_when_what_was_left_behind_has_ended(self, play: Play, tmp_path: Path) -> None:
        assert become_subreaper()

        async def scene(stage: Stage) -> None:
            stage.install(
                "(trap '' TERM; echo ready > marker; exec sleep 60) &\nwhile [ ! -s marker ]; do :; done\nexit 0"
            )
            stage.control = FabricManagerControl(
                stage.root, stage.loop, stage.children, stage.events.append, speed=1000.0
            )  # its clock, and so its patience
            await stage.finish(replace(MANAGER, stop_timeout_seconds=100.0))
            (exited,) = stage.of(FabricManagerExited)
            assert exited.orphans == 1
            await stage.until(lambda: stage.of(OrphansEnded))
            assert stage.events.index(exited) < stage.events.index(OrphansEnded())
            assert not stage.children.orphans()

        play(scene)

    def test_can_be_followed_by_the_next_start(self, play: Play) -> None:
        async def scene(stage: Stage) -> None:
            stage.install(f'echo "{HEADER}" >> fm.log')
            for number in range(1, 4):
                stage.start()
                await stage.until(lambda wanted=number: len(stage.of(FabricManagerExited)) == wanted)
            assert len({event.session for event in stage.of(FabricManagerStarted)}) == 3

        play(scene)


def test_the_simulated_fabric_manager_tells_its_version(tmp_path: Path) -> None:
    build_tree(str(tmp_path), TreeOptions())

    async def scene() -> None:
        children = Children(asyncio.get_running_loop())
        binary = f"{tmp_path}{PREFIX}/usr/bin/nv-fabricmanager"
        status, output, _ = await read_version(children, [binary, "--version"], dict(os.environ), PATIENCE_SECONDS)
        assert status == ExitStatus(code=0)
        assert b"580.126.09" in output

    asyncio.run(scene())

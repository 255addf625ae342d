"""Child processes: what they get, what is heard of them, and that nothing of them remains. All processes are real."""

import asyncio
import ctypes
import os
import resource
import signal
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pytest

from fmsupervisor.fabric_manager.process import Child, Children, Command, become_subreaper, seal_descriptors
from fmsupervisor.facts import ExitStatus

PATIENCE_SECONDS = 20.0  # for what must happen; only a broken program uses it up
PATH = {"PATH": "/usr/bin:/bin"}
PR_SET_CHILD_SUBREAPER = 36
GLIBC_SIGNALS = 0b11 << 31  # 32 and 33: glibc's posix_spawn lets them be ignored, its programs set them up anew

DAEMONISE = """
import os, signal, sys, time
def leave_behind(depth):
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    {on_term}
    if depth > 1:
        leave_behind(depth - 1)
    with open(sys.argv[1], "a") as file:
        file.write(f"{{os.getpid()}}\\n")
    time.sleep(120)
    os._exit(0)
leave_behind({depth})
while len(open(sys.argv[1], "a+").readlines() or open(sys.argv[1]).readlines()) < {depth}:
    time.sleep(0.005)
os._exit(0)
"""


def shell(script: str, environment: Mapping[str, str] = PATH) -> Command:
    return Command(("/bin/sh", "-c", script), environment)


def python(script: str, *arguments: str, environment: Mapping[str, str] = PATH) -> Command:
    return Command((sys.executable, "-IS", "-c", textwrap.dedent(script), *arguments), environment)


def daemonising(file: Path, on_term: str = "pass", depth: int = 1) -> Command:
    """Ends with status 0 when ``depth`` processes, each the parent of the next, are detached; pids are in ``file``."""
    return python(DAEMONISE.format(on_term=on_term, depth=depth), str(file))


def pids_in(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().split()]


def exists(pid: int) -> bool:
    """Whether there is such a process, be it a zombie."""
    return os.path.exists(f"/proc/{pid}")


def own_children() -> dict[int, str]:
    """Every child of this process with its state letter, zombies included."""
    found = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            state, parent, *_ = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(parent) == os.getpid():
            found[int(name)] = state
    return found


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


class Stage:
    """An event loop with ``Children`` in it, wired as the supervisor does."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.children = Children(self.loop)
        self.output: dict[str, bytes] = {"stdout": b"", "stderr": b""}
        self.orphans: list[int] = []
        self.loop.add_signal_handler(signal.SIGCHLD, self.children.reap)

    def start(self, command: Command) -> tuple[Child, "asyncio.Future[ExitStatus]"]:
        ended: asyncio.Future[ExitStatus] = self.loop.create_future()

        def output(source: str, content: bytes) -> None:
            assert not ended.done(), "output after the exit was told"
            self.output[source] += content

        def on_exit(status: ExitStatus, orphans: int) -> None:
            self.orphans.append(orphans)
            ended.set_result(status)  # raises when it is told twice

        return self.children.execute(command, output, on_exit), ended

    async def finish(self, command: Command) -> ExitStatus:
        _, ended = self.start(command)
        return await asyncio.wait_for(ended, PATIENCE_SECONDS)

    async def output_of(self, command: Command) -> str:
        assert await self.finish(command) == ExitStatus(code=0)
        return self.output["stdout"].decode()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():  # noqa: ASYNC110 - what is waited for is no event of this program
                await asyncio.sleep(0.005)

    async def end_orphans(self, patience_seconds: float) -> None:
        done: asyncio.Future[None] = self.loop.create_future()
        self.children.end_orphans(patience_seconds, lambda: done.set_result(None))
        await asyncio.wait_for(done, PATIENCE_SECONDS)

    async def clear(self) -> None:
        """Leave nothing behind, whatever the test did."""
        while self.children.orphans():
            self.children.kill_orphans()
            self.children.reap()
            await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def _subreaper() -> Iterator[None]:
    assert become_subreaper()
    yield
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def play(scene: Callable[[Stage], Awaitable[None]]) -> None:
    async def run() -> None:
        stage = Stage()
        try:
            await scene(stage)
        finally:
            await stage.clear()

    asyncio.run(run())


class TestExit:
    @pytest.mark.parametrize(
        ("script", "expected"),
        [
            pytest.param("exit 0", ExitStatus(code=0), id="zero"),
            pytest.param("exit 7", ExitStatus(code=7), id="status"),
            pytest.param("exit 255", ExitStatus(code=255), id="largest-status"),
            pytest.param("kill -TERM $$", ExitStatus(signal=15), id="SIGTERM"),
            pytest.param("kill -KILL $$", ExitStatus(signal=9), id="SIGKILL"),
        ],
    )
    def test_is_told_as_status_or_signal(self, script: str, expected: ExitStatus) -> None:
        async def scene(stage: Stage) -> None:
            assert await stage.finish(shell(script)) == expected
            assert stage.orphans == [0]

        play(scene)

    def test_is_noticed_much_sooner_than_by_a_loop_that_sleeps_200_ms(self) -> None:
        async def scene(stage: Stage) -> None:
            noticed = []
            for _ in range(15):
                child, ended = stage.start(Command(("/bin/sleep", "60"), PATH))
                began = time.monotonic()
                child.send(signal.SIGKILL)
                await ended
                noticed.append(time.monotonic() - began)
            began = time.monotonic()
            await asyncio.sleep(0.2)
            assert median(noticed) < (time.monotonic() - began) / 4

        play(scene)

    def test_is_not_held_up_by_a_grandchild_that_keeps_the_pipe_open(self) -> None:
        async def scene(stage: Stage) -> None:
            assert await stage.finish(shell("sleep 120 & echo $!; exit 4")) == ExitStatus(code=4)
            assert exists(int(stage.output["stdout"]))
            assert stage.orphans == [1]

        play(scene)

    def test_leaves_no_zombie_and_no_descriptor_after_200_quick_ones(self) -> None:
        async def scene(stage: Stage) -> None:
            await stage.finish(shell("exit 1"))
            before = open_descriptors()
            for _ in range(20):
                await asyncio.gather(*(stage.finish(shell("true & exit 3")) for _ in range(10)))
            await stage.until(lambda: not own_children())
            assert open_descriptors() == before
            assert not stage.children.orphans()

        play(scene)

    def test_makes_send_harmless_even_when_the_descriptor_belongs_to_another_process(self) -> None:
        async def scene(stage: Stage) -> None:
            first, ended = stage.start(shell("exit 0"))
            await ended
            others = [stage.start(Command(("/bin/sleep", "60"), PATH)) for _ in range(5)]
            first.send(signal.SIGKILL)
            first.kill_group()
            for child, _ in others:
                child.send(signal.SIGTERM)
            assert [await one for _, one in others] == [ExitStatus(signal=15)] * 5

        play(scene)


class TestOutput:
    def test_is_delivered_from_the_first_byte_to_the_last_before_the_exit(self) -> None:
        async def scene(stage: Stage) -> None:
            script = "import os; os.write(1, b'a' * 65535 + b'z'); os.write(2, b'e' * 65535 + b'z'); os._exit(1)"
            assert await stage.finish(python(script)) == ExitStatus(code=1)
            assert stage.output == {"stdout": b"a" * 65535 + b"z", "stderr": b"e" * 65535 + b"z"}

        play(scene)

    def test_of_both_pipes_is_kept_apart_however_it_is_interleaved(self) -> None:
        async def scene(stage: Stage) -> None:
            script = """
            import os
            for number in range(2000):
                os.write(1, b"out %d;" % number)
                os.write(2, b"err %d\\n" % number)
            """
            child, ended = stage.start(python(script))
            await ended
            assert stage.output["stdout"] == b"".join(b"out %d;" % number for number in range(2000))
            assert stage.output["stderr"] == b"".join(b"err %d\n" % number for number in range(2000))
            assert child.last_lines[:20] == tuple(f"err {number}" for number in range(1980, 2000))
            assert child.last_lines[20].startswith("out 0;out 1;")

        play(scene)

    def test_without_a_newline_at_the_end_is_among_the_last_lines(self) -> None:
        async def scene(stage: Stage) -> None:
            child, ended = stage.start(shell("printf 'one\\n\\n  \\ntwo' >&2; printf ' ' "))
            await ended
            assert child.last_lines == ("one", "two")

        play(scene)

    def test_of_1_mb_without_a_newline_is_delivered_whole_and_remembered_in_part(self) -> None:
        async def scene(stage: Stage) -> None:
            script = "import os\nfor _ in range(16): os.write(2, b'x' * 65536)"
            child, ended = stage.start(python(script))
            await ended
            assert len(stage.output["stderr"]) == 1 << 20
            assert [len(line) for line in child.last_lines] == [2000]

        play(scene)

    def test_that_is_not_text_is_remembered_readably(self) -> None:
        async def scene(stage: Stage) -> None:
            child, ended = stage.start(python("import os; os.write(2, b'caf\\xe9 \\xff\\x00\\nend')"))
            await ended
            assert child.last_lines == ("caf� �\x00", "end")

        play(scene)


class TestWhatTheChildGets:
    def test_is_exactly_the_listed_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NOTIFY_SOCKET", "/run/systemd/notify")

        async def scene(stage: Stage) -> None:
            listed = {"PATH": "/usr/bin", "LD_LIBRARY_PATH": "/a:/b", "LANG": "C.UTF-8"}
            shown = await stage.output_of(Command(("/bin/cat", "/proc/self/environ"), listed))
            assert dict(entry.split("=", 1) for entry in shown.rstrip("\0").split("\0")) == listed

        play(scene)

    @pytest.mark.parametrize("has_leak", [False, True], ids=["clean-parent", "parent-with-a-leaked-descriptor"])
    def test_is_standard_input_output_and_error_and_no_other_descriptor(self, has_leak: bool) -> None:
        async def scene(stage: Stage) -> None:
            leak = os.open("/dev/null", os.O_RDONLY)
            try:
                os.set_inheritable(leak, has_leak)
                seal_descriptors()
                script = """
                import os
                def is_open(number):
                    try:
                        return bool(os.fstat(number))
                    except OSError:
                        return False
                print([number for number in range(1024) if is_open(number)], os.readlink("/proc/self/fd/0"))
                """
                assert await stage.output_of(python(script)) == "[0, 1, 2] /dev/null\n"
            finally:
                os.close(leak)

        play(scene)

    def test_is_an_empty_signal_mask_and_no_ignored_signal(self) -> None:
        async def scene(stage: Stage) -> None:
            with _signals_disturbed():
                shown = await stage.output_of(Command(("/bin/cat", "/proc/self/status"), PATH))
            fields = dict(line.split(":\t") for line in shown.splitlines() if line.startswith("Sig"))
            assert int(fields["SigBlk"], 16) == int(fields["SigCgt"], 16) == 0
            assert int(fields["SigIgn"], 16) & ~GLIBC_SIGNALS == 0

        play(scene)

    def test_is_a_session_and_a_process_group_of_its_own(self) -> None:
        async def scene(stage: Stage) -> None:
            pid, _, _, parent, group, session, terminal = (await stage.output_of(_cat("stat"))).split()[:7]
            assert (group, session, terminal) == (pid, pid, "0")
            assert int(parent) == os.getpid()

        play(scene)

    def test_is_the_working_directory_and_the_umask_of_the_daemon(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        before = os.umask(0o027)

        async def scene(stage: Stage) -> None:
            shown = await stage.output_of(shell("umask; readlink /proc/self/cwd"))
            assert shown == f"0027\n{tmp_path}\n"

        try:
            play(scene)
        finally:
            os.umask(before)

    def test_are_limits_as_high_as_they_may_be(self) -> None:
        async def scene(stage: Stage) -> None:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
            try:
                child, ended = stage.start(Command(("/bin/sleep", "60"), PATH))
                child.raise_limits()
                assert resource.prlimit(child.pid, resource.RLIMIT_NOFILE) == (hard, hard)
                _, core = resource.getrlimit(resource.RLIMIT_CORE)
                assert resource.prlimit(child.pid, resource.RLIMIT_CORE) == (core, core)
                assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(soft, 512)
                child.send(signal.SIGKILL)
                await ended
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

        play(scene)


def _cat(name: str) -> Command:
    return Command(("/bin/cat", f"/proc/self/{name}"), PATH)


@contextmanager
def _signals_disturbed() -> Iterator[None]:
    """SIGHUP ignored as under nohup, SIGPIPE ignored as Python does, SIGUSR1 and SIGTERM blocked."""
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
    assert signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGHUP, handler)


class TestExecutionThatFails:
    @pytest.mark.parametrize(
        ("kind", "expected"),
        [
            pytest.param("missing", FileNotFoundError, id="ENOENT"),
            pytest.param("not-executable", PermissionError, id="EACCES"),
            pytest.param("directory", PermissionError, id="directory"),
            pytest.param("not-a-program", OSError, id="ENOEXEC"),
            pytest.param("interpreter-missing", FileNotFoundError, id="interpreter"),
        ],
    )
    def test_raises_and_leaves_neither_descriptor_nor_process(
        self, tmp_path: Path, kind: str, expected: type[OSError]
    ) -> None:
        program = tmp_path / "program"
        contents = {
            "not-executable": "#!/bin/sh\n",
            "not-a-program": "neither ELF nor #!\n",
            "interpreter-missing": "#!/no/such/interpreter\n",
        }
        if kind == "directory":
            program.mkdir()
        elif kind in contents:
            program.write_text(contents[kind])
            program.chmod(0o644 if kind == "not-executable" else 0o755)

        async def scene(stage: Stage) -> None:
            before = open_descriptors()
            with pytest.raises(expected):
                stage.start(Command((str(program),), PATH))
            assert open_descriptors() == before
            assert not own_children()

        play(scene)


class TestWhatIsLeftBehind:
    def test_by_a_child_that_daemonises_is_found_and_ends_on_sigterm(self, tmp_path: Path) -> None:
        async def scene(stage: Stage) -> None:
            note = tmp_path / "note"
            on_term = f"signal.signal(15, lambda *_: (open({str(note)!r}, 'w').close(), os._exit(0)))"
            assert await stage.finish(daemonising(tmp_path / "pids", on_term)) == ExitStatus(code=0)
            (pid,) = pids_in(tmp_path / "pids")
            assert stage.children.orphans() == (pid,)
            assert stage.orphans == [1]
            await stage.end_orphans(PATIENCE_SECONDS)
            assert note.exists()
            assert not exists(pid)

        play(scene)

    def test_is_killed_with_its_own_descendants_when_it_ignores_sigterm(self, tmp_path: Path) -> None:
        async def scene(stage: Stage) -> None:
            await stage.finish(daemonising(tmp_path / "pids", "signal.signal(15, signal.SIG_IGN)", depth=3))
            pids = pids_in(tmp_path / "pids")
            assert len(pids) == 3
            await stage.end_orphans(0.1)
            await stage.until(lambda: not own_children())
            assert not any(map(exists, pids))

        play(scene)

    def test_ends_generation_by_generation_on_sigterm(self, tmp_path: Path) -> None:
        async def scene(stage: Stage) -> None:
            await stage.finish(daemonising(tmp_path / "pids", depth=3))
            await stage.end_orphans(PATIENCE_SECONDS)
            assert not any(map(exists, pids_in(tmp_path / "pids")))

        play(scene)

    def test_is_done_with_at_once_when_there_is_nothing(self) -> None:
        async def scene(stage: Stage) -> None:
            done: list[bool] = []
            stage.children.end_orphans(PATIENCE_SECONDS, lambda: done.append(True))
            assert done == [True]

        play(scene)

    def test_is_looked_for_again_when_no_descriptor_is_left(self, tmp_path: Path) -> None:
        async def scene(stage: Stage) -> None:
            await stage.finish(daemonising(tmp_path / "pids"))
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
            try:
                stage.children.reap()
                assert stage.children.orphans() == ()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert len(stage.children.orphans()) == 1

        play(scene)

    def test_is_never_the_child_that_still_runs(self, tmp_path: Path) -> None:
        async def scene(stage: Stage) -> None:
            child, ended = stage.start(Command(("/bin/sleep", "60"), PATH))
            await stage.finish(daemonising(tmp_path / "pids"))
            assert stage.children.orphans() == tuple(pids_in(tmp_path / "pids"))
            await stage.end_orphans(PATIENCE_SECONDS)
            assert not ended.done()
            child.send(signal.SIGTERM)
            await ended

        play(scene)


class TestRun:
    def test_returns_status_and_output(self) -> None:
        async def scene(stage: Stage) -> None:
            result = await stage.children.run(shell("echo version; echo warning >&2; exit 2"), PATIENCE_SECONDS)
            assert result == (ExitStatus(code=2), b"version\n", b"warning\n")

        play(scene)

    def test_keeps_64_kib_of_each_output(self) -> None:
        async def scene(stage: Stage) -> None:
            command = python("import os\nfor _ in range(20): os.write(1, b'x' * 10000)")
            _, output, _ = await stage.children.run(command, PATIENCE_SECONDS)
            assert len(output) == 1 << 16

        play(scene)

    def test_kills_what_takes_too_long_and_what_that_has_started(self) -> None:
        async def scene(stage: Stage) -> None:
            status, output, _ = await stage.children.run(shell("sleep 120 & echo $$ $!; wait"), 0.3)
            assert status is None
            pids = [int(word) for word in output.split()]
            assert len(pids) == 2
            await stage.until(lambda: not any(map(exists, pids)))

        play(scene)

    def test_kills_what_it_has_left_behind_and_nothing_that_was_there_before(self, tmp_path: Path) -> None:
        async def scene(stage: Stage) -> None:
            before, left = tmp_path / "before", tmp_path / "left"
            await stage.finish(daemonising(before))
            status, _, _ = await stage.children.run(daemonising(left), PATIENCE_SECONDS)
            assert status == ExitStatus(code=0)
            await stage.until(lambda: not exists(pids_in(left)[0]))
            assert exists(pids_in(before)[0])

        play(scene)

    def test_kills_nothing_that_may_be_another_childs(self, tmp_path: Path) -> None:
        async def scene(stage: Stage) -> None:
            other, ended = stage.start(shell("exec sleep 120"))
            await stage.children.run(daemonising(tmp_path / "left"), PATIENCE_SECONDS)
            await asyncio.sleep(0)
            assert exists(pids_in(tmp_path / "left")[0])
            other.send(signal.SIGKILL)
            await ended

        play(scene)

    def test_kills_it_when_it_is_cancelled(self, tmp_path: Path) -> None:
        async def scene(stage: Stage) -> None:
            file = tmp_path / "pid"
            task = asyncio.ensure_future(
                stage.children.run(shell(f"echo $$ > {file}; exec sleep 120"), PATIENCE_SECONDS)
            )
            await stage.until(lambda: file.exists() and bool(file.read_text()))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await stage.until(lambda: not exists(int(file.read_text())))

        play(scene)

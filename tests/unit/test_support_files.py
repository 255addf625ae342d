"""Reading for the report: bounded, regular files only, never outside; and programs that are bounded too."""

import os
import sys
import time
from pathlib import Path

import pytest

from fmsupervisor.errors import CannotObserve
from fmsupervisor.host.root import HostRoot
from fmsupervisor.support.confined import Excerpt, find_last, read_end, read_range, read_start, walk_files, whole_words
from fmsupervisor.support.programs import run_program


@pytest.fixture
def root(tmp_path: Path) -> HostRoot:
    """A host with a log, and a secret outside of it and one inside."""
    (tmp_path / "secret").write_text("outside\n")
    host = tmp_path / "host"
    for directory in ("var/log", "etc", "real/log"):
        (host / directory).mkdir(parents=True)
    (host / "etc/shadow").write_text("root:secret\n")
    (host / "var/log/fm.log").write_text("one\ntwo\nthree\n")
    return HostRoot(str(host))


def at(root: HostRoot, logical: str) -> Path:
    return Path(root.path(logical))


class TestLinks:
    @pytest.mark.parametrize(
        "target", ["/etc/shadow", "../../etc/shadow", "../../../secret", "/../../../../secret", "/proc/self/environ"]
    )
    def test_one_that_leads_out_is_refused(self, root: HostRoot, target: str) -> None:
        at(root, "/var/log/x.log").symlink_to(target)
        with pytest.raises(CannotObserve, match="outside of /var/log"):
            read_start(root, "/var/log/x.log", "/var/log", 100)

    def test_one_of_a_directory_above_is_refused_too(self, root: HostRoot) -> None:
        at(root, "/var/log/sub").symlink_to("/etc")
        with pytest.raises(CannotObserve, match="outside of /var/log"):
            read_end(root, "/var/log/sub/shadow", "/var/log", 100)

    def test_one_that_stays_inside_is_followed(self, root: HostRoot) -> None:
        at(root, "/var/log/current").symlink_to("fm.log")
        assert read_start(root, "/var/log/current", "/var/log", 100) == Excerpt(b"one\ntwo\nthree\n", is_cut=False)

    def test_an_absolute_one_starts_at_the_root_that_is_looked_at(self, root: HostRoot) -> None:
        at(root, "/etc/os-release").symlink_to("/var/log/fm.log")
        found = read_start(root, "/etc/os-release", "/", 100)
        assert found is not None
        assert found.content == b"one\ntwo\nthree\n"

    def test_a_circle_of_them_is_an_error(self, root: HostRoot) -> None:
        at(root, "/var/log/a").symlink_to("b")
        at(root, "/var/log/b").symlink_to("a")
        with pytest.raises(CannotObserve, match="too many"):
            read_start(root, "/var/log/a", "/var/log", 100)


class TestReading:
    def test_a_file_that_is_not_there_is_nothing(self, root: HostRoot) -> None:
        assert read_start(root, "/var/log/none", "/var/log", 100) is None
        assert read_end(root, "/none/none", "/none", 100) is None
        assert find_last(root, "/var/log/none", "/var/log", b"x", 100) is None

    def test_a_fifo_and_a_directory_are_errors_and_do_not_block(self, root: HostRoot) -> None:
        os.mkfifo(root.path("/var/log/fifo"))
        for name in ("fifo", "../log"):
            with pytest.raises(CannotObserve, match="regular"):
                read_start(root, f"/var/log/{name}", "/var/log", 100)

    def test_a_name_with_a_nul_is_an_error(self, root: HostRoot) -> None:
        with pytest.raises((CannotObserve, ValueError)):
            read_start(root, "/var/log/a\0b", "/var/log", 100)

    def test_the_end_begins_with_a_whole_line(self, root: HostRoot) -> None:
        assert read_end(root, "/var/log/fm.log", "/var/log", 12) == Excerpt(b"two\nthree\n", is_cut=True)
        assert read_end(root, "/var/log/fm.log", "/var/log", 14) == Excerpt(b"one\ntwo\nthree\n", is_cut=False)

    def test_the_start_ends_with_a_whole_line(self, root: HostRoot) -> None:
        assert read_start(root, "/var/log/fm.log", "/var/log", 6) == Excerpt(b"one\n", is_cut=True)
        assert read_range(root, "/var/log/fm.log", "/var/log", 4, 6) == Excerpt(b"two\n", is_cut=True)

    @pytest.mark.parametrize(
        ("content", "at_end", "kept"),
        [
            pytest.param(b"alpha beta GPU-1111", True, b"alpha beta ", id="no-line-but-words"),
            pytest.param(b"2222-3333 gamma delta", False, b"gamma delta", id="no-line-but-words-at-the-start"),
            pytest.param(b"x" * 50, True, b"", id="one-endless-word"),
            pytest.param(b"x" * 50, False, b"", id="one-endless-word-at-the-start"),
        ],
    )
    def test_half_a_word_is_dropped(self, content: bytes, at_end: bool, kept: bytes) -> None:
        assert whole_words(content, at_end=at_end) == kept

    def test_the_last_of_many_is_found_in_a_huge_sparse_file(self, root: HostRoot) -> None:
        with at(root, "/var/log/huge").open("wb") as file:
            file.seek(3 << 30)
            file.write(b"\nHEADER one\n" + b"x" * (1 << 20) + b"\nHEADER two\n" + b"y" * (3 << 20))
        begin = time.monotonic()
        offset = find_last(root, "/var/log/huge", "/var/log", b"HEADER", 16 << 20)
        assert offset is not None
        found = read_range(root, "/var/log/huge", "/var/log", offset, 11)
        assert found is not None
        assert found.content == b"HEADER two\n"
        end = read_end(root, "/var/log/huge", "/var/log", 1 << 20)
        assert end is not None
        assert end.content == b""  # one endless word
        assert time.monotonic() - begin < 10

    def test_the_wanted_text_is_found_across_two_blocks(self, root: HostRoot) -> None:
        at(root, "/var/log/edge").write_bytes(b"a" * 100 + b"HEADER" + b"b" * ((1 << 20) - 3))
        assert find_last(root, "/var/log/edge", "/var/log", b"HEADER", 4 << 20) == 100

    def test_only_regular_files_are_walked_and_not_too_deep(self, root: HostRoot) -> None:
        at(root, "/real/log/deep/er").mkdir(parents=True)
        for name in ("a", "deep/b", "deep/er/c"):
            at(root, f"/real/log/{name}").touch()
        at(root, "/real/log/link").symlink_to("/etc")
        os.mkfifo(root.path("/real/log/fifo"))
        assert list(walk_files(root, "/real/log", 1)) == ["/real/log/a", "/real/log/deep/b"]
        assert list(walk_files(root, "/nowhere", 1)) == []


class TestPrograms:
    def run(self, code: str, seconds: float = 20.0, limit: int = 1000):
        return run_program([sys.executable, "-c", code], seconds, limit)

    def test_both_outputs_and_the_status_are_told(self) -> None:
        output = self.run("import sys; print('out', flush=True); sys.exit('err')")
        assert (output.content, output.status, output.is_cut, output.problem) == (b"out\nerr\n", 1, False, "")

    def test_of_too_much_the_end_is_kept_from_a_whole_line(self) -> None:
        output = self.run("for i in range(100000): print('line', i)")
        assert output.is_cut
        assert output.status == 0
        assert len(output.content) <= 1000
        assert output.content.startswith(b"line ")
        assert output.content.endswith(b"line 99999\n")

    def test_one_that_does_not_end_is_killed_with_its_children(self) -> None:
        code = "import os, time; print(os.fork() and 1, flush=True); time.sleep(600)"
        begin = time.monotonic()
        output = self.run(code, 1.0)
        assert time.monotonic() - begin < 10
        assert output.status is None
        assert "did not end within 1 s" in output.problem
        assert b"1\n" in output.content

    def test_one_that_is_not_there_is_a_problem(self) -> None:
        output = run_program(["/no/such/program"], 1.0, 10)
        assert (output.status, output.content) == (None, b"")
        assert "cannot execute /no/such/program" in output.problem

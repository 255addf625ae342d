"""``fmsupervisor report`` as a whole: what is in it, what never is, and that nothing on a host can make it fail."""

import io
import json
import os
import stat
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fmsupervisor import config
from fmsupervisor.cli import main
from fmsupervisor.daemon_lock import InstanceLock
from fmsupervisor.errors import ActionFailed, ActionRefused
from fmsupervisor.host.root import HostRoot
from fmsupervisor.report.status_text import STATUS_FILE
from fmsupervisor.simulator import hardware
from fmsupervisor.simulator.tree import PREFIX, TreeOptions, build_tree
from fmsupervisor.support import archive, own_parts, program_parts
from fmsupervisor.support.command import PARTS, collect, report
from fmsupervisor.support.piece import Outcome, Piece, Source

GPU = "GPU-11112222-3333-4444-5555-666677778886"
SWITCH = "SWX-0A1B2C3D-0000-1111-2222-333344445550"
SERIAL = "1654321000123"
PRIVATE = (GPU.removeprefix("GPU-"), SWITCH.removeprefix("SWX-").lower(), SERIAL, "10.20.30.40", "2001:db8::77",
           "02:42:ac:11:00:02", "alice", "hgx07", "prod.example", "9f8e7d6c5b4a39281706f5e4d3c2b1a0")  # fmt: skip
LOG = f"""Fabric Manager Log initializing at: 12/19/2024 22:08:53.808
[Dec 19 2024 22:08:53] [INFO] [tid 1570] FM Library communication bind interface = 10.20.30.40
[Dec 19 2024 22:08:55] [INFO] [tid 1804] added GPU with UUID {GPU} based on NVLink Inband GPU probe request.
"""

Archive = dict[str, str]  # name -> content
QUICK = [(name, part) for name, part in PARTS if name != "checks"]  # which are a program of their own


@pytest.fixture
def host(tmp_path: Path) -> HostRoot:
    return build_host(tmp_path / "host")


def build_host(directory: Path) -> HostRoot:
    """A simulated host that tells on itself wherever it can."""
    directory.mkdir()
    build_tree(str(directory), TreeOptions())
    root = HostRoot(str(directory))
    for logical, text in {
        "/proc/sys/kernel/hostname": "hgx07.prod.example.com\n",
        "/proc/version": "Linux version 6.12.0 (alice@hgx07) #1\n",
        "/proc/cmdline": f"root=UUID={GPU.removeprefix('GPU-')} ip=10.20.30.40 systemd.machine_id=9f8e7d6c5b4a39281706f5e4d3c2b1a0\n",
        "/proc/driver/nvidia/version": "NVRM version: 580.126.09 Release Build (dvs@builder)\n",
        f"/proc/driver/nvidia/gpus/{hardware.GPUS[0]}/information": f"GPU UUID: {GPU}\nSerial Number: {SERIAL}\n",
        f"{PREFIX}/fabricmanager.log": LOG,
        f"{PREFIX}/fm.cfg": f"DAEMONIZE=0\nBIND_INTERFACE_IP=10.20.30.40\nLOG_FILE_NAME=/home/alice/{SERIAL}.log\n",
        f"/run/fmsupervisor/{STATUS_FILE}": json.dumps({"switches": [{"uuid": SWITCH}], "why": "a\n2001:db8::77 02:42:ac:11:00:02"}),
        "/etc/modprobe.d/nvidia.conf": "options nvidia NVreg_Foo=1 # hgx07\n",
    }.items():  # fmt: skip
        root.make_directory(os.path.dirname(logical))
        root.write_atomically(logical, text.encode(), durable=False)
    return root


def unpack(path: Path) -> Archive:
    files: Archive = {}
    with tarfile.open(path) as found:
        for entry in found:
            assert entry.isreg()
            assert entry.name.startswith(f"{archive.TOP}/")
            content = found.extractfile(entry)
            assert content is not None
            name = entry.name.removeprefix(f"{archive.TOP}/")
            assert name not in files
            files[name] = content.read().decode()
    return files


def make(host: HostRoot, output: Path, *, redacts: bool = True) -> Archive:
    assert report(host, None, str(output), redacts=redacts, parts=QUICK) == 0
    return unpack(output)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Archive:
    """The report on that host, made by the command itself."""
    directory = tmp_path_factory.mktemp("content")
    host = build_host(directory / "host")
    assert main(["report", "--root", host.directory, "--output", str(directory / "r.tar.gz")]) == 0
    return unpack(directory / "r.tar.gz")


def outcomes(files: Archive) -> dict[str, str]:
    """Name -> outcome, of the manifest."""
    rows = files["MANIFEST"].partition("piece\n")[2].splitlines()
    return {row.split()[2]: row.split()[0] for row in rows}


def source(host: HostRoot) -> Source:
    return Source(host, config.load_text("", "").settings, None)


class TestContent:
    def test_the_checks_are_told_for_programs_and_for_people(self, files: Archive) -> None:
        assert isinstance(json.loads(files["check.json"]), dict)
        assert files["check.txt"]

    def test_everything_that_the_host_has_is_in_it(self, files: Archive) -> None:
        expected = {
            "MANIFEST", "versions.txt", "status.json", "settings.txt", "fabric-manager/stock.cfg", "fabric-manager/rendered.cfg",
            "fabric-manager/cfg.diff", "fabric-manager/log.txt", "pci.txt", "installed.txt", "host/proc/version",
            "host/proc/devices", "host/etc/modprobe.d/nvidia.conf", "host/proc/driver/nvidia/version",
        }  # fmt: skip
        assert expected <= set(files)
        assert outcomes(files)["fabric-manager/log.txt"] == "ok"

    def test_the_manifest_lists_each_file_and_each_that_is_missing(self, files: Archive) -> None:
        listed = outcomes(files)
        assert set(files) - {"MANIFEST"} <= set(listed)
        assert listed["journal/fmsupervisor.txt"] == "missing"  # programs would tell of this machine
        assert listed["kernel.log"] == "missing"
        assert set(listed.values()) <= set(Outcome)

    def test_the_switches_and_gpus_are_told_with_driver_group_and_bridges(self, files: Archive) -> None:
        assert all(f"{bus_id}\n" in files["pci.txt"] for bus_id in (*hardware.SWITCHES, *hardware.GPUS))
        assert "driver: vfio-pci" in files["pci.txt"]

    def test_the_difference_of_the_configuration_is_shown(self, files: Archive) -> None:
        assert "+DAEMONIZE=0" in files["fabric-manager/cfg.diff"]

    def test_nothing_private_is_in_it(self, files: Archive) -> None:
        everything = "\n".join(f"{name}\n{text}" for name, text in files.items()).lower()
        for private in PRIVATE:
            assert private.lower() not in everything, private

    def test_equal_things_have_one_name_in_all_files(self, files: Archive) -> None:
        assert "added GPU with UUID GPU-1 based" in files["fabric-manager/log.txt"]
        assert "root=UUID=GPU-1" in files["host/proc/cmdline"]
        (information,) = (text for name, text in files.items() if name.endswith("/information"))
        assert "GPU UUID: GPU-1" in information
        serial = information.partition("Serial Number: ")[2].strip()
        assert f"/{serial}.log" in files["fabric-manager/rendered.cfg"]

    def test_without_redaction_all_is_there_and_it_is_said(
        self, host: HostRoot, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        files = make(host, tmp_path / "open.tar.gz", redacts=False)
        assert GPU in files["fabric-manager/log.txt"]
        assert "NOT redacted" in files["MANIFEST"]
        assert "not redacted" in capsys.readouterr().out

    def test_the_status_of_a_running_daemon_is_told_from_that_of_a_dead_one(self, host: HostRoot) -> None:
        (before,) = own_parts.status(source(host))
        lock = InstanceLock(host, "/run/fmsupervisor")
        lock.acquire()
        (during,) = own_parts.status(source(host))
        lock.release()
        assert before.content == during.content
        assert "no daemon is running" in before.note
        assert f"pid {os.getpid()}" in during.note

    def test_settings_that_are_not_valid_are_shown_as_they_are(self, host: HostRoot, tmp_path: Path) -> None:
        host.write_atomically("/etc/fmsupervisor.toml", b"[switches]\nexpected = 0\n", durable=False)
        files = make(host, tmp_path / "r.tar.gz")
        assert "switches.expected" in files["settings.txt"]
        assert files["fmsupervisor.toml"] == "[switches]\nexpected = 0\n"
        assert outcomes(files)["settings.txt"] == "error"

    def test_of_a_long_log_the_end_and_the_last_sessions_begin_are_kept(self, host: HostRoot, tmp_path: Path) -> None:
        line = "[Dec 19 2024 22:08:55] [INFO] [tid 1] Received an inband message:  Message header details: magic\n"
        noise = line * (5 * 1024 * 1024 // len(line))
        log = LOG.replace("bind", "old") + noise + LOG + noise + "[Dec 20 2024 00:00:00] [ERROR] [tid 1] the last\n"
        host.write_atomically(f"{PREFIX}/fabricmanager.log", log.encode(), durable=False)
        files = make(host, tmp_path / "r.tar.gz")
        assert files["fabric-manager/log.txt"].endswith("the last\n")
        assert files["fabric-manager/log-begin.txt"].startswith("Fabric Manager Log initializing")
        assert "bind interface" in files["fabric-manager/log-begin.txt"]
        assert outcomes(files)["fabric-manager/log.txt"] == "cut"
        assert (tmp_path / "r.tar.gz").stat().st_size < 2 << 20


class TestHostileHost:
    def test_an_empty_directory_gives_a_report(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        files = make(HostRoot(str(tmp_path / "empty")), tmp_path / "r.tar.gz")
        assert "versions.txt" in files

    def test_no_link_is_followed_out_of_its_place(self, host: HostRoot, tmp_path: Path) -> None:
        secret = tmp_path / "secret"
        secret.write_text("TOPSECRET\n")
        host.make_directory("/etc/private")
        host.write_atomically("/etc/private/key", b"TOPSECRET\n", durable=False)
        links = {
            f"{PREFIX}/fabricmanager.log": str(secret), f"{PREFIX}/fm.cfg": "/etc/private/key",
            "/proc/driver/nvidia/params": "/etc/private/key", "/etc/modprobe.d/x.conf": "/etc/private/key",
            f"/run/fmsupervisor/{STATUS_FILE}": "../../etc/private/key", "/proc/version": str(secret),
        }  # fmt: skip
        for logical, target in links.items():
            path = Path(host.path(logical))
            path.unlink(missing_ok=True)
            path.symlink_to(target)
        files = make(host, tmp_path / "r.tar.gz")
        assert not any("TOPSECRET" in text for text in files.values())
        assert outcomes(files)["fabric-manager/log.txt"] == "error"

    @pytest.mark.parametrize("content", [b"", b"\0" * 5000, os.urandom(5000), b"\xff\xfe" * 99, b"[" * 100_000, b"{}"])
    def test_files_of_any_content_are_taken(self, host: HostRoot, tmp_path: Path, content: bytes) -> None:
        for directory, _, names in os.walk(host.path("/proc")):
            for name in names:
                Path(directory, name).write_bytes(content)
        for logical in (
            f"/run/fmsupervisor/{STATUS_FILE}",
            f"{PREFIX}/fabricmanager.log",
            f"{PREFIX}/fm.cfg",
            "/etc/os-release",
        ):
            Path(host.path(logical)).write_bytes(content)
        assert report(host, None, str(tmp_path / "r.tar.gz"), redacts=True, parts=QUICK) == 0
        unpack(tmp_path / "r.tar.gz")

    def test_hostile_names_become_harmless_ones(self, host: HostRoot, tmp_path: Path) -> None:
        directory = Path(host.path("/proc/driver/nvidia/gpus"))
        for name in ("-rf", "a b;$(reboot)", "x\ny\x1b[31m", "é" * 60, "\udcff", GPU):
            Path(os.fsdecode(os.fsencode(directory / name))).write_text("text\n")
        files = make(host, tmp_path / "r.tar.gz")
        names = [name for name in files if name.startswith("host/proc/driver/nvidia/gpus/")]
        assert len(names) >= 6
        assert all(set(name) <= set(archive_alphabet()) for name in names)
        assert not any(part.startswith("-") for name in names for part in name.split("/"))
        assert not any(GPU in name for name in names)

    def test_a_huge_file_is_cut(self, host: HostRoot, tmp_path: Path) -> None:
        Path(host.path("/proc/driver/nvidia/params")).write_text("key: value\n" * 1_000_000)
        files = make(host, tmp_path / "r.tar.gz")
        assert len(files["host/proc/driver/nvidia/params"]) <= 64 << 10
        assert outcomes(files)["host/proc/driver/nvidia/params"] == "cut"

    def test_fifos_do_not_block_it(self, host: HostRoot, tmp_path: Path) -> None:
        for logical in (f"{PREFIX}/fabricmanager.log", f"{PREFIX}/fm.cfg", "/proc/version"):
            Path(host.path(logical)).unlink()
            os.mkfifo(host.path(logical))
        files = make(host, tmp_path / "r.tar.gz")
        assert outcomes(files)["host/proc/version"] == "error"

    @pytest.mark.root
    @pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
    def test_it_works_without_root_on_files_that_may_not_be_read(self, host: HostRoot, tmp_path: Path) -> None:
        for path in (tmp_path, *tmp_path.parents):
            if (
                path.stat().st_uid == os.geteuid()
                and path != Path(path.anchor)
                and not path.stat().st_mode & stat.S_IXOTH
            ):
                path.chmod(path.stat().st_mode | 0o711)
        os.chmod(host.path(f"{PREFIX}/fabricmanager.log"), 0o600)
        output = tmp_path / "mine"
        output.mkdir()
        os.chown(output, 65534, 65534)
        code = (
            "import encodings.idna, os, sys\n"
            "from fmsupervisor.host.root import HostRoot\n"
            "from fmsupervisor.support.command import report\n"
            "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "sys.exit(report(HostRoot(sys.argv[1]), None, sys.argv[2], redacts=True))\n"
        )
        command = [sys.executable, "-c", code, host.directory, str(output / "r.tar.gz")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd="/")
        assert done.returncode == 0, done.stderr
        assert outcomes(unpack(output / "r.tar.gz"))["fabric-manager/log.txt"] == "error"


def archive_alphabet() -> str:
    return "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:+@=,-/"


class TestParts:
    def test_one_that_fails_is_an_error_with_what_it_had(self, host: HostRoot) -> None:
        def broken(_: Source) -> Iterator[Piece]:
            yield Piece("first", b"x")
            raise RuntimeError("no more")

        found = collect(source(host), [("broken", broken), ("fine", lambda _: iter([Piece("fine")]))])
        assert [(piece.name, piece.outcome) for piece in found] == [
            *(("first", Outcome.OK), ("broken", Outcome.ERROR), ("fine", Outcome.OK)),
        ]
        assert found[1].note == "RuntimeError: no more"

    def test_one_that_hangs_is_left_behind(self, host: HostRoot) -> None:
        release = threading.Event()

        def hanging(_: Source) -> Iterator[Piece]:
            yield Piece("first", b"x")
            release.wait(60)

        begin = time.monotonic()
        first, error = collect(source(host), [("hanging", hanging)], part_seconds=0.2)
        release.set()
        assert time.monotonic() - begin < 10
        assert first.content == b"x"
        assert (error.outcome, error.note) == (Outcome.ERROR, "not done after 0.2 s")

    @pytest.mark.parametrize("part", [part for _, part in PARTS], ids=[name for name, _ in PARTS])
    def test_each_copes_with_a_host_that_has_nothing(self, tmp_path: Path, part) -> None:
        for piece in part(source(HostRoot(str(tmp_path)))):
            assert piece.outcome is Outcome.OK or piece.note


class TestThisMachine:
    """The parts that ask the running system: safe anywhere, whatever it answers."""

    def test_every_part_comes_to_an_end(self) -> None:
        this = Source(HostRoot("/"), config.load_text("", "").settings, None)
        found = collect(this, QUICK, part_seconds=60)
        assert {"kernel.log", "units/show.txt", "journal/fmsupervisor.txt", "host/proc/version"} <= {
            each.name for each in found
        }
        assert not any(each.note.startswith("not done") for each in found)

    def test_secrets_in_the_environment_of_units_are_left_out(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        program = tmp_path / "systemctl"
        program.write_text(
            "#!/bin/sh\nprintf '[Service]\\nEnvironment=TOKEN=abc \\\\\\n  MORE=def\\nExecStart=/bin/x\\n'\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        this = Source(HostRoot("/"), config.load_text("", "").settings, None)
        cat, _ = program_parts.units(this)
        assert cat.content == b"[Service]\nEnvironment=(left out)\nExecStart=/bin/x\n"

    def test_a_program_that_is_not_there_is_an_error_in_the_manifest(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        this = Source(HostRoot("/"), config.load_text("", "").settings, None)
        for piece in (*program_parts.units(this), *program_parts.journals(this)):
            assert piece.outcome is Outcome.ERROR
            assert "cannot execute" in piece.note


class TestBounds:
    def test_what_does_not_fit_is_cut_at_a_line_and_said(self) -> None:
        pieces = [Piece("a", b"line one\nline two\n"), Piece("b", b"line one\nline two\n"), Piece("c", b"x")]
        bounded = list(archive.bound_pieces(pieces, 30))
        assert [piece.content for piece in bounded] == [b"line one\nline two\n", b"line one\n", b"x"]
        assert bounded[1].outcome is Outcome.CUT

    def test_names_are_unique_and_do_not_hide_the_manifest(self) -> None:
        names = [
            piece.name
            for piece in archive.bound_pieces([Piece("a b"), Piece("a;b"), Piece("/MANIFEST"), Piece("../..")])
        ]
        assert names == ["a_b", "a_b.2", "MANIFEST.2", "_"]

    def test_very_many_pieces_are_bounded(self) -> None:
        bounded = list(archive.bound_pieces([Piece(f"p{number}", b"x") for number in range(5000)]))
        assert len(bounded) == 2001
        assert "3000" in bounded[-1].note


class TestFile:
    def test_only_its_owner_may_read_it(self, host: HostRoot, tmp_path: Path) -> None:
        make(host, tmp_path / "r.tar.gz")
        assert stat.S_IMODE((tmp_path / "r.tar.gz").stat().st_mode) == 0o600
        assert [path.name for path in tmp_path.glob("*report*")] == []

    def test_by_default_it_gets_a_new_name_here(
        self, host: HostRoot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert main(["report", "--root", host.directory]) == 0
        (made,) = tmp_path.glob("fmsupervisor-report-*.tar.gz")
        assert capsys.readouterr().out.startswith(f"{made.name} (")

    @pytest.mark.parametrize("kind", ["file", "link", "directory"])
    def test_what_is_there_is_never_overwritten(self, tmp_path: Path, kind: str) -> None:
        path, target = tmp_path / "r.tar.gz", tmp_path / "target"
        match kind:
            case "file":
                path.write_text("old")
            case "link":
                path.symlink_to(target)
            case _:
                path.mkdir()
        with pytest.raises(ActionRefused, match="exists already"):
            archive.write_new(str(path), b"new")
        assert not target.exists()
        assert kind != "file" or path.read_text() == "old"
        assert sorted(each.name for each in tmp_path.iterdir()) == ["r.tar.gz"]

    @pytest.mark.parametrize("path", ["/no/such/directory/r.tar.gz", "/proc/r.tar.gz", "a\0b"])
    def test_a_place_that_cannot_be_written_is_told(self, path: str) -> None:
        with pytest.raises(ActionFailed, match="cannot write"):
            archive.write_new(path, b"new")

    def test_the_command_says_so_with_status_1(
        self, host: HostRoot, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "r.tar.gz").write_text("old")
        assert main(["report", "--root", host.directory, "--output", str(tmp_path / "r.tar.gz")]) == 1
        assert "exists already" in capsys.readouterr().err

    def test_what_is_packed_is_a_tar_that_others_read(self, tmp_path: Path) -> None:
        content = archive.pack([Piece("a/b", b"text\n"), Piece("empty")], "manifest\n")
        path = tmp_path / "x.tar.gz"
        path.write_bytes(content)
        listed = subprocess.run(["tar", "tzf", path], capture_output=True, text=True, check=True).stdout.split()
        assert listed == ["fmsupervisor-report/MANIFEST", "fmsupervisor-report/a/b"]
        with tarfile.open(fileobj=io.BytesIO(content)) as found:
            assert all((entry.uid, entry.gid, entry.uname, entry.mode) == (0, 0, "", 0o600) for entry in found)

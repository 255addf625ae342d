"""fabric_manager.installation: what is installed, whether it may be run, and whether the versions agree."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import _elf as build
import pytest

from fmsupervisor.conditions import Code
from fmsupervisor.core.versions import version_problems
from fmsupervisor.fabric_manager.installation import VersionOutput, fingerprint_of, inspect
from fmsupervisor.fabric_manager.versions import embedded_version, printed_version, version_of_file_name
from fmsupervisor.facts import Installation, ModuleChoice
from fmsupervisor.host.root import HostRoot
from fmsupervisor.host.trusted_path import find_untrusted, resolve
from fmsupervisor.settings import FabricManagerSettings, ModuleSettings, Settings

RUNNING = "6.12.0-160000.28-default"
VERSION = "580.126.09"
NV = "/usr/local/nvidia"
BINARY = f"{NV}/usr/bin/nv-fabricmanager"
NSCQ = f"{NV}/usr/lib64/libnvidia-nscq.so.{VERSION}"
MODULE = f"{NV}/usr/lib/modules/6.12.0-160000.9-default/updates/nvidia.ko"
TOPOLOGY = f"{NV}/usr/share/nvidia/nvswitch"
SETTINGS = Settings(
    module=ModuleSettings(search_path=f"{NV}/usr/lib/modules"),
    fabric_manager=FabricManagerSettings(
        binary=BINARY,
        library_paths=(f"{NV}/usr/lib64", f"{NV}/usr/lib"),
        stock_config=f"{TOPOLOGY}/fabricmanager.cfg",
        topology_path=TOPOLOGY,
    ),
)
PACKAGED = Settings(
    layout="packaged",
    module=ModuleSettings(search_path="/lib/modules"),
    fabric_manager=FabricManagerSettings(
        binary="/usr/bin/nv-fabricmanager",
        library_paths=(),
        stock_config="/usr/share/nvidia/nvswitch/fabricmanager.cfg",
        topology_path="/usr/share/nvidia/nvswitch",
    ),
)
PRINTED = f"Fabric Manager version is : {VERSION}\nBuild Info - Branch: rel/gpu_drv/r610/r610_85-4, Changelist: 0"
NEVER_RUN = VersionOutput("", "it must not be run", 99)


class Host:
    """A complete installation in a directory, and what nv-fabricmanager --version prints."""

    def __init__(self, directory: Path) -> None:
        self.root = HostRoot(str(directory))
        self.output = VersionOutput(PRINTED, "", 0)
        self.runs: list[tuple[list[str], dict[str, str], float]] = []
        os.chmod(directory, 0o755)

    def write(self, path: str, content: bytes, mode: int = 0o644) -> None:
        real = Path(self.root.path(path))
        umask = os.umask(0o022)
        real.parent.mkdir(parents=True, exist_ok=True)
        os.umask(umask)
        real.unlink(missing_ok=True)
        real.write_bytes(content)
        real.chmod(mode)

    def remove(self, path: str) -> None:
        os.unlink(self.root.path(path))

    def run_version(self, command: list[str], environment: dict[str, str], timeout_seconds: float) -> VersionOutput:
        self.runs.append((command, environment, timeout_seconds))
        return self.output

    def inspect(self, settings: Settings = SETTINGS) -> Installation:
        return inspect(self.root, settings, RUNNING, self.run_version)

    def codes(self, settings: Settings = SETTINGS) -> list[Code]:
        return [problem.code for problem in self.inspect(settings).problems]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    made = Host(tmp_path)
    made.write(BINARY, build.shared_object(["libc.so.6"]), 0o755)
    made.write(NSCQ, build.shared_object(["libc.so.6"], soname="libnvidia-nscq.so.2"), 0o755)
    Path(made.root.path(f"{NV}/usr/lib64/libnvidia-nscq.so.2")).symlink_to(f"libnvidia-nscq.so.{VERSION}")
    made.write("/lib64/libc.so.6", build.shared_object())
    made.write(MODULE, build.module())
    made.write(f"{TOPOLOGY}/fabricmanager.cfg", b"DAEMONIZE=1\n")
    made.write(f"{TOPOLOGY}/dgxh100_hgxh100_topology", b"x")
    return made


class TestInspection:
    def test_of_a_complete_tree_finds_everything_and_nothing_wrong(self, host: Host) -> None:
        found = host.inspect()
        assert found.problems == ()
        assert found.module is not None
        assert (found.module.path, found.module.version) == (MODULE, VERSION)
        assert (found.fabric_manager_version, found.nscq_version) == (VERSION, VERSION)

    def test_asks_fabric_manager_with_the_trees_libraries_and_a_timeout(self, host: Host) -> None:
        host.inspect()
        [(command, environment, timeout_seconds)] = host.runs
        assert command == [host.root.path(BINARY), "--version"]
        assert environment["LD_LIBRARY_PATH"] == f"{host.root.path(NV)}/usr/lib64:{host.root.path(NV)}/usr/lib"
        assert set(environment) == {"PATH", "LANG", "LD_LIBRARY_PATH"}
        assert timeout_seconds == SETTINGS.fabric_manager.version_timeout_seconds

    def test_of_an_empty_host_names_everything_that_is_missing(self, tmp_path: Path) -> None:
        empty = Host(tmp_path)
        assert empty.codes() == [
            Code.MODULE_NOT_FOUND,
            Code.FABRIC_MANAGER_MISSING,
            Code.NSCQ_MISSING,
            Code.TOPOLOGY_MISSING,
            Code.STOCK_CONFIG_MISSING,
        ]
        assert empty.runs == []
        assert empty.inspect().watched_paths[0] == "/"

    def test_of_a_packaged_host_finds_everything_where_packages_put_it(self, host: Host) -> None:
        host.write("/usr/bin/nv-fabricmanager", b"#!/bin/sh\n", 0o755)
        host.write(f"/usr/lib/x86_64-linux-gnu/libnvidia-nscq.so.{VERSION}", build.shared_object())
        host.write(f"/lib/modules/{RUNNING}/updates/dkms/nvidia.ko", build.module(vermagic=f"{RUNNING} SMP "))
        host.write("/usr/share/nvidia/nvswitch/fabricmanager.cfg", b"")
        found = host.inspect(PACKAGED)
        assert found.problems == ()
        assert (found.nscq_version, found.fabric_manager_version) == (VERSION, VERSION)
        assert "LD_LIBRARY_PATH" not in host.runs[0][1]

    @pytest.mark.parametrize(
        ("change", "code"),
        [
            pytest.param(lambda host: host.remove(BINARY), Code.FABRIC_MANAGER_MISSING, id="no binary"),
            pytest.param(
                lambda host: os.chmod(host.root.path(BINARY), 0o644), Code.FABRIC_MANAGER_MISSING, id="not executable"
            ),
            pytest.param(
                lambda host: host.remove(f"{TOPOLOGY}/fabricmanager.cfg"), Code.STOCK_CONFIG_MISSING, id="no cfg"
            ),
            pytest.param(lambda host: host.remove("/lib64/libc.so.6"), Code.LIBRARY_MISSING, id="no libc"),
            pytest.param(lambda host: host.write(MODULE, b"\x7fELF"), Code.MODULE_DAMAGED, id="module damaged"),
            pytest.param(
                lambda host: host.write(MODULE, build.module(version=None)), Code.VERSION_UNREADABLE, id="module mute"
            ),
        ],
    )
    def test_names_what_is_wrong_and_nothing_else(self, host: Host, change: Callable[[Host], None], code: Code) -> None:
        change(host)
        assert host.codes() == [code]

    def test_of_a_live_module_does_not_ask_whether_the_file_could_be_loaded(self, host: Host) -> None:
        host.write(MODULE, build.module(vermagic="5.0.0 SMP ", versions=None))
        assert host.codes() == [Code.MODULE_VERMAGIC]
        host.write("/sys/module/nvidia/initstate", b"live\n")
        found = host.inspect()
        assert found.problems == ()
        assert not found.is_module_checked
        assert found.module is not None
        assert found.module.version == VERSION
        host.remove(MODULE)
        assert host.inspect().module is None
        assert host.codes() == []

    def test_does_not_ask_for_a_module_that_must_not_be_loaded(self, host: Host) -> None:
        host.remove(MODULE)
        settings = Settings(
            module=ModuleSettings(load=False, search_path=SETTINGS.module.search_path),
            fabric_manager=SETTINGS.fabric_manager,
        )
        assert host.codes(settings) == []


class TestNscqVersion:
    def put(self, host: Host, name: str, content: bytes) -> str | None:
        host.remove(NSCQ)
        host.remove(f"{NV}/usr/lib64/libnvidia-nscq.so.2")
        host.write(f"{NV}/usr/lib64/{name}", content)
        return host.inspect().nscq_version

    def test_is_in_the_name_of_the_file_behind_the_link(self, host: Host) -> None:
        host.write(f"{NV}/usr/lib64/libnvidia-nscq.so.999.1.1", build.shared_object())
        assert host.inspect().nscq_version == VERSION

    def test_is_in_the_soname_else(self, host: Host) -> None:
        content = build.shared_object(soname="libnvidia-nscq.so.570.211.01")
        assert self.put(host, "libnvidia-nscq.so.2.0", content) == "570.211.01"

    def test_is_among_the_strings_else(self, host: Host) -> None:
        content = build.shared_object(soname="libnvidia-nscq.so.2", content=b"x\x00570.211.01\x00y\x00")
        assert self.put(host, "libnvidia-nscq.so.2.0", content) == "570.211.01"

    def test_is_told_to_be_unreadable_when_nothing_says_it(self, host: Host) -> None:
        assert self.put(host, "libnvidia-nscq.so.2.0", build.shared_object(["libc.so.6"])) is None
        assert host.codes() == [Code.VERSION_UNREADABLE]


class TestPermissions:
    @pytest.mark.parametrize(
        "path",
        [BINARY, f"{NV}/usr/bin", NV, NSCQ, f"{NV}/usr/lib64", "/lib64/libc.so.6", "/usr", "/"],
    )
    @pytest.mark.parametrize("bit", [stat.S_IWOTH, stat.S_IWGRP], ids=["by all", "by the group"])
    def test_what_others_can_write_is_refused_and_not_run(self, host: Host, path: str, bit: int) -> None:
        real = host.root.path(path)
        os.chmod(real, stat.S_IMODE(os.stat(real).st_mode) | bit)
        host.output = NEVER_RUN
        found = host.inspect()
        assert {problem.code for problem in found.problems} == {Code.INSECURE_FILE}
        assert any(problem.detail.find(f"{path} can be written") >= 0 for problem in found.problems)
        assert host.runs == []

    def test_a_module_that_others_can_write_is_not_offered_for_loading(self, host: Host) -> None:
        os.chmod(host.root.path(MODULE), 0o666)
        found = host.inspect()
        assert found.module is None
        assert [(problem.code, problem.subject) for problem in found.problems] == [(Code.INSECURE_FILE, MODULE)]

    def test_a_sticky_directory_on_the_way_protects_what_is_in_it(self, host: Host) -> None:
        os.chmod(host.root.path("/usr"), 0o1777)
        assert host.codes() == []
        os.chmod(host.root.path(f"{NV}/usr/lib64"), 0o1777)
        assert set(host.codes()) == {Code.INSECURE_FILE}

    def test_an_owner_who_is_neither_root_nor_this_user_is_refused(self, host: Host) -> None:
        owner = os.stat(host.root.path(BINARY)).st_uid
        if owner == 0:
            os.chown(host.root.path(BINARY), 12345, -1)
            reason = find_untrusted(host.root, BINARY, 0)
            assert reason == f"{BINARY} belongs to user 12345"
            assert find_untrusted(host.root, BINARY, 12345) is None
        else:
            assert find_untrusted(host.root, BINARY, owner + 1) is not None

    def test_links_count_with_everything_on_their_way(self, host: Host) -> None:
        Path(host.root.path("/opt/link")).parent.mkdir()
        os.chmod(host.root.path("/opt"), 0o777)
        Path(host.root.path("/opt/link")).symlink_to(BINARY)
        assert find_untrusted(host.root, "/opt/link", os.geteuid()) == "/opt can be written by everybody (mode 0777)"
        assert find_untrusted(host.root, BINARY, os.geteuid()) is None

    def test_links_in_a_circle_lead_nowhere(self, host: Host) -> None:
        Path(host.root.path("/a")).symlink_to("b")
        Path(host.root.path("/b")).symlink_to("/a")
        assert resolve(host.root, "/a/x") is None


class TestVersionOutput:
    @pytest.mark.parametrize(
        ("output", "code", "subject"),
        [
            pytest.param(
                VersionOutput(
                    "",
                    f"{BINARY}: error while loading shared libraries: libz.so.1: cannot open shared object file: No such",
                    127,
                ),
                Code.LIBRARY_MISSING,
                "libz.so.1",
                id="a library that is missing",
            ),
            pytest.param(
                VersionOutput("", f"{BINARY}: error while loading shared libraries: libz.so.1: file too short", 127),
                Code.LOADER_ERROR,
                "",
                id="a library that is damaged",
            ),
            pytest.param(
                VersionOutput("", f"{BINARY}: /lib64/libc.so.6: version `GLIBC_2.38' not found (required by x)", 1),
                Code.LOADER_ERROR,
                "",
                id="a libc that is too old",
            ),
            pytest.param(
                VersionOutput("", "", None, "took longer than 10 s"), Code.VERSION_UNREADABLE, BINARY, id="too slow"
            ),
            pytest.param(VersionOutput("usage:", "bad\nworse\n\n", 1), Code.VERSION_UNREADABLE, BINARY, id="refused"),
            pytest.param(VersionOutput("", "", 0), Code.VERSION_UNREADABLE, BINARY, id="silent"),
        ],
    )
    def test_that_has_no_version_is_explained(
        self, host: Host, output: VersionOutput, code: Code, subject: str
    ) -> None:
        host.output = output
        found = host.inspect()
        assert found.fabric_manager_version is None
        assert [(problem.code, problem.subject) for problem in found.problems] == [(code, subject)]
        assert "worse" not in output.stderr or "worse" in found.problems[0].detail

    @pytest.mark.parametrize(
        ("text", "version"),
        [
            (PRINTED, VERSION),
            ("Fabric Manager version is : 610.57.04", "610.57.04"),
            ("nv-fabricmanager Version: 535.183", "535.183"),
            ("version", None),
            ("1.2.3", None),
            ("", None),
        ],
    )
    def test_is_read_for_the_number_after_the_word(self, text: str, version: str | None) -> None:
        assert printed_version(text) == version


@pytest.mark.parametrize(
    ("name", "version"),
    [("libnvidia-nscq.so.580.126.09", VERSION), ("libnvidia-nscq.so.2.0", None), ("libnvidia-nscq.so", None)],
)
def test_a_driver_version_is_told_from_an_abi_number(name: str, version: str | None) -> None:
    assert version_of_file_name(name) == version


def test_an_embedded_version_must_be_the_only_one() -> None:
    assert embedded_version(b"\0" + b"580.126.09\0x\0" + b"580.126.09\0") == VERSION
    assert embedded_version(b"\x00580.126.09\0x\x00570.211.01\0") is None


class TestFingerprint:
    @pytest.mark.parametrize(
        "change",
        [
            pytest.param(lambda host: host.write(BINARY, b"new", 0o755), id="new binary"),
            pytest.param(lambda host: os.chmod(host.root.path(BINARY), 0o700), id="mode"),
            pytest.param(lambda host: os.chmod(host.root.path(NV), 0o700), id="mode of a directory above"),
            pytest.param(lambda host: host.write(f"{NV}/usr/lib64/libz.so.1", b""), id="library added to the tree"),
            pytest.param(lambda host: host.write("/lib64/libz.so.1", b""), id="library added to the host"),
            pytest.param(lambda host: host.write(f"{TOPOLOGY}/new", b""), id="topology file"),
            pytest.param(lambda host: host.remove(f"{TOPOLOGY}/fabricmanager.cfg"), id="stock configuration gone"),
            pytest.param(lambda host: host.write(MODULE + ".zst", b""), id="another module file"),
            pytest.param(
                lambda host: host.write(f"{NV}/usr/lib/modules/{RUNNING}/updates/nvidia.ko", b""), id="another build"
            ),
            pytest.param(lambda host: host.write(f"/lib/modules/{RUNNING}/modules.dep", b""), id="depmod"),
        ],
    )
    def test_changes_with_what_was_looked_at(self, host: Host, change: Callable[[Host], None]) -> None:
        before = fingerprint_of(host.root, SETTINGS)
        assert host.inspect().fingerprint == before
        change(host)
        assert fingerprint_of(host.root, SETTINGS) != before

    def test_stays_when_fabric_manager_writes_its_own_files(self, host: Host) -> None:
        before = fingerprint_of(host.root, SETTINGS)
        for name in ("fm.cfg", "fabricmanager.log", "database/data.mdb"):
            host.write(f"{NV}/{name}", b"x")
        assert fingerprint_of(host.root, SETTINGS) == before

    def test_watches_where_a_cure_would_show_up(self, host: Host) -> None:
        watched = host.inspect().watched_paths
        assert {os.path.dirname(path) for path in (BINARY, NSCQ, MODULE)} <= set(watched)
        assert TOPOLOGY in watched
        host.remove(MODULE)
        assert os.path.dirname(MODULE) in host.inspect().watched_paths
        assert all(host.root.is_directory(path) for path in watched)


class TestAgreement:
    @staticmethod
    def installation(module: str | None, fabric_manager: str | None, nscq: str | None) -> Installation:
        choice = None if module is None else ModuleChoice("/nvidia.ko", RUNNING, module, (), "")
        return Installation(choice, fabric_manager, nscq, (), "", ())

    @pytest.mark.parametrize(
        ("installed", "loaded", "codes"),
        [
            pytest.param(("1.1", "1.1", "1.1"), "1.1", [], id="all equal"),
            pytest.param(("1.1", "1.1", "1.1"), None, [], id="nothing loaded"),
            pytest.param((None, None, None), "1.1", [], id="nothing installed"),
            pytest.param(("", "1.1", None), "1.1", [], id="what is unknown is not compared"),
            pytest.param(("1.1", "1.2", "1.1"), None, [Code.VERSION_MISMATCH], id="Fabric Manager differs"),
            pytest.param(("1.1", "1.1", "1.2"), "1.1", [Code.VERSION_MISMATCH], id="NSCQ differs"),
            pytest.param(("1.10", "1.10", "1.10"), "1.9", [Code.RELOAD_NEEDED], id="upgraded under a loaded driver"),
            pytest.param(("1.9", "1.9", "1.9"), "1.10", [Code.VERSION_MISMATCH], id="older than the loaded driver"),
            pytest.param((None, "1.2", "1.2"), "1.1", [Code.VERSION_MISMATCH], id="no newer module to reload"),
            pytest.param(("1.2", "1.1", "1.1"), "1.1", [Code.VERSION_MISMATCH], id="only the module was upgraded"),
            pytest.param(("1.2", "1.2", "1.1"), "1.1", [Code.VERSION_MISMATCH], id="half upgraded"),
            pytest.param(("580.126.9", "580.126.09", None), None, [Code.VERSION_MISMATCH], id="compared as text"),
        ],
    )
    def test_is_exact(self, installed: tuple[str | None, ...], loaded: str | None, codes: list[Code]) -> None:
        problems = version_problems(self.installation(*installed), loaded)
        assert [problem.code for problem in problems] == codes
        for version in filter(None, (*installed, loaded)):
            assert all(version in problem.detail for problem in problems)

    def test_says_what_to_install(self) -> None:
        [problem] = version_problems(self.installation("1.1", "1.2", "1.3"), "1.1")
        assert problem.detail.endswith(
            "to agree with the loaded module, install version 1.1 of nv-fabricmanager and libnvidia-nscq"
        )

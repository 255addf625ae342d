"""host.kernel_release, host.module_search: which nvidia.ko, and why this one."""

import itertools
from dataclasses import replace
from pathlib import Path

import _elf as build
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from fmsupervisor.conditions import Code
from fmsupervisor.facts import ModuleChoice, Problem
from fmsupervisor.host.kernel_release import Verdict, compare, consider
from fmsupervisor.host.module_search import choose_module, find_module_file, select_module
from fmsupervisor.host.root import HostRoot
from fmsupervisor.settings import ModuleSettings, Settings

RUNNING = "6.12.0-160000.28-default"
FLAGS = "SMP preempt mod_unload modversions"
TREE = "/usr/local/nvidia/usr/lib/modules"
SETTINGS = Settings(module=ModuleSettings(search_path=TREE))
PACKAGED = Settings(layout="packaged", module=ModuleSettings(search_path="/lib/modules"))


class Host:
    """A directory with modules in it."""

    def __init__(self, directory: Path) -> None:
        self.root = HostRoot(str(directory))

    def write(self, path: str, content: bytes | str) -> None:
        real = Path(self.root.path(path))
        real.parent.mkdir(parents=True, exist_ok=True)
        real.write_bytes(content.encode() if isinstance(content, str) else content)

    def module(self, path: str, release: str = "", *, flags: str = FLAGS, **options: object) -> None:
        """A module at ``path``, built for ``release`` (default: the directory that says so)."""
        release = release or next(part for part in path.split("/") if part[:1].isdigit())
        content = build.module(vermagic=f"{release} {flags} ", **options)
        self.write(path, zstandard.compress(content) if path.endswith(".zst") else content)

    def link(self, path: str, target: str) -> None:
        real = Path(self.root.path(path))
        real.parent.mkdir(parents=True, exist_ok=True)
        real.symlink_to(target)

    def choose(self, settings: Settings = SETTINGS, running: str = RUNNING) -> ModuleChoice:
        choice = choose_module(self.root, settings, running)
        assert isinstance(choice, ModuleChoice), choice
        return choice

    def problem(self, settings: Settings = SETTINGS, running: str = RUNNING) -> Problem:
        choice = choose_module(self.root, settings, running)
        assert isinstance(choice, Problem), choice
        return choice


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


class TestComparison:
    @pytest.mark.parametrize(
        ("release", "running", "verdict"),
        [
            pytest.param("6.12.0-160000.28-default", RUNNING, Verdict.EXACT, id="the same"),
            pytest.param("6.12.0-160000.9-default", RUNNING, Verdict.OLDER, id="SUSE: 9 is older than 28"),
            pytest.param("6.12.0-160000.29-default", RUNNING, Verdict.NEWER, id="SUSE: 29 is newer"),
            pytest.param("6.12.0-160000.28.1-default", RUNNING, Verdict.NEWER, id="SUSE: a respin is newer"),
            pytest.param("6.12.0-160000.9-rt", RUNNING, Verdict.OTHER_FAMILY, id="SUSE: another flavour"),
            pytest.param("6.12.0-160100.5-default", RUNNING, Verdict.OTHER_FAMILY, id="SUSE: another codestream"),
            pytest.param("6.4.0-150600.23-default", RUNNING, Verdict.OTHER_FAMILY, id="SUSE: another version"),
            pytest.param(
                "5.14.0-427.13.1.el9_4.x86_64", "5.14.0-503.11.1.el9_5.x86_64", Verdict.OLDER, id="RHEL minor releases"
            ),
            pytest.param(
                "5.14.0-427.13.1.el9_4.x86_64",
                "5.14.0-427.13.1.el9_4.x86_64+debug",
                Verdict.OTHER_FAMILY,
                id="RHEL debug",
            ),
            pytest.param("6.8.0-31-generic", "6.8.0-101-generic", Verdict.OLDER, id="Ubuntu: numbers, not text"),
            pytest.param("6.8.0-1009-aws", "6.8.0-101-generic", Verdict.OTHER_FAMILY, id="Ubuntu: another flavour"),
            pytest.param("6.1.0-18-amd64", "6.1.0-17-amd64", Verdict.NEWER, id="Debian"),
            pytest.param("6.12.48+deb13-amd64", "6.12.57+deb13-amd64", Verdict.OTHER_FAMILY, id="Debian 13"),
            pytest.param("extras", RUNNING, Verdict.OTHER_FAMILY, id="no release at all"),
        ],
    )
    def test_is_by_family_and_numbers(self, release: str, running: str, verdict: Verdict) -> None:
        assert compare(release, running) is verdict

    @given(st.text(max_size=30), st.text(max_size=30))
    def test_takes_any_text_and_is_antisymmetric(self, one: str, other: str) -> None:
        mirrored = {Verdict.OLDER: Verdict.NEWER, Verdict.NEWER: Verdict.OLDER}
        verdict = compare(one, other)
        assert compare(other, one) is mirrored.get(verdict, verdict)

    @pytest.mark.parametrize("order", list(itertools.permutations(["9", "28", "27", "29", "3"]))[::17])
    def test_does_not_depend_on_the_order_of_the_directory(self, order: tuple[str, ...]) -> None:
        found = consider(RUNNING, [f"6.12.0-160000.{number}-default" for number in order])
        assert [candidate.release.split(".")[-1].split("-")[0] for candidate in found] == ["28", "27", "9", "3", "29"]


class TestChoice:
    def test_takes_the_build_for_the_running_kernel(self, host: Host) -> None:
        for number in (9, 28, 29):
            host.module(f"{TREE}/6.12.0-160000.{number}-default/updates/nvidia.ko.zst")
        choice = host.choose()
        assert choice.path == f"{TREE}/{RUNNING}/updates/nvidia.ko.zst"
        assert choice.reason.startswith(f"built for the running {RUNNING}; ")

    def test_takes_the_nearest_older_build_else_and_says_so(self, host: Host) -> None:
        for number in (7, 9, 29):
            host.module(f"{TREE}/6.12.0-160000.{number}-default/updates/nvidia.ko.zst")
        choice = host.choose()
        assert choice.path == f"{TREE}/6.12.0-160000.9-default/updates/nvidia.ko.zst"
        assert (choice.kernel_release, choice.version, choice.depends) == ("6.12.0-160000.9-default", "580.126.09", ())
        assert choice.reason == (
            "built for 6.12.0-160000.9-default: the nearest older build of the same family as the running "
            "6.12.0-160000.28-default; 6.12.0-160000.7-default is an older build of the same family; "
            "6.12.0-160000.29-default is newer"
        )

    def test_never_takes_a_newer_build_by_itself(self, host: Host) -> None:
        host.module(f"{TREE}/6.12.0-160000.29-default/updates/nvidia.ko")
        problem = host.problem()
        assert problem.code is Code.MODULE_TOO_NEW
        assert "6.12.0-160000.29-default is newer" in problem.detail

    def test_takes_the_nearest_newer_build_when_allowed(self, host: Host) -> None:
        for number in (31, 29):
            host.module(f"{TREE}/6.12.0-160000.{number}-default/updates/nvidia.ko")
        choice = host.choose(replace(SETTINGS, module=replace(SETTINGS.module, allow_newer_build=True)))
        assert choice.kernel_release == "6.12.0-160000.29-default"

    def test_prefers_an_older_build_even_when_a_newer_one_is_allowed(self, host: Host) -> None:
        for number in (2, 29):
            host.module(f"{TREE}/6.12.0-160000.{number}-default/updates/nvidia.ko")
        choice = host.choose(replace(SETTINGS, module=replace(SETTINGS.module, allow_newer_build=True)))
        assert choice.kernel_release == "6.12.0-160000.2-default"

    def test_tells_what_there_is_when_nothing_fits(self, host: Host) -> None:
        host.module(f"{TREE}/6.4.0-150600.23.7-default/updates/nvidia.ko")
        problem = host.problem()
        assert problem.code is Code.MODULE_NOT_FOUND
        assert "6.4.0-150600.23.7-default is of another family" in problem.detail

    @pytest.mark.parametrize(
        "files", [(), (f"{TREE}/{RUNNING}/updates/nvidia-uvm.ko",)], ids=["no tree", "no nvidia.ko"]
    )
    def test_says_where_it_looked_when_there_is_nothing(self, host: Host, files: tuple[str, ...]) -> None:
        for path in files:
            host.module(path)
        problem = host.problem()
        assert problem.code is Code.MODULE_NOT_FOUND
        assert TREE in problem.detail

    def test_of_a_damaged_file_is_a_problem_that_names_it(self, host: Host) -> None:
        host.write(f"{TREE}/{RUNNING}/updates/nvidia.ko.zst", b"\x28\xb5\x2f\xfd garbage")
        problem = host.problem()
        assert problem.code is Code.MODULE_DAMAGED
        assert f"{TREE}/{RUNNING}/updates/nvidia.ko.zst" in problem.detail

    def test_packaged_looks_at_the_running_release_only(self, host: Host) -> None:
        host.module("/lib/modules/6.12.0-160000.9-default/updates/nvidia.ko")
        assert host.problem(PACKAGED).code is Code.MODULE_NOT_FOUND
        host.module(f"/lib/modules/{RUNNING}/updates/nvidia.ko")
        assert host.choose(PACKAGED).path == f"/lib/modules/{RUNNING}/updates/nvidia.ko"


class TestPrecedenceWithinARelease:
    @pytest.mark.parametrize(
        "paths",
        [
            pytest.param(("updates/nvidia.ko", "extra/nvidia.ko"), id="updates before extra"),
            pytest.param(("extra/nvidia.ko", "weak-updates/nvidia.ko"), id="extra before weak-updates"),
            pytest.param(("weak-updates/nvidia.ko", "kernel/drivers/video/nvidia.ko"), id="weak-updates before kernel"),
            pytest.param(("kernel/nvidia.ko", "misc/nvidia.ko"), id="kernel before the rest"),
            pytest.param(
                ("updates/nvidia.ko.zst", "updates/nvidia.ko"), id="the package's file before an unpacked copy"
            ),
            pytest.param(("updates/nv-580.126/nvidia.ko", "updates/nv-570.211/nvidia.ko"), id="the greater version"),
            pytest.param(("updates/nv-580.126/nvidia.ko", "updates/nv-58.9/nvidia.ko"), id="by number, not by text"),
        ],
    )
    def test_the_first_wins(self, host: Host, paths: tuple[str, ...]) -> None:
        for path in paths:
            host.module(f"{TREE}/{RUNNING}/{path}")
        assert find_module_file(host.root, f"{TREE}/{RUNNING}") == f"{TREE}/{RUNNING}/{paths[0]}"

    def test_modules_dep_decides_when_it_is_there(self, host: Host) -> None:
        directory = f"/lib/modules/{RUNNING}"
        for path in ("updates/nvidia.ko", "kernel/nvidia.ko"):
            host.module(f"{directory}/{path}")
        host.write(f"{directory}/modules.dep", "kernel/nvidia.ko: kernel/ecc.ko\nkernel/ecc.ko:\n")
        assert find_module_file(host.root, directory) == f"{directory}/kernel/nvidia.ko"

    def test_a_stale_modules_dep_does_not_hide_the_file(self, host: Host) -> None:
        host.module(f"{TREE}/{RUNNING}/updates/nvidia.ko")
        host.write(f"{TREE}/{RUNNING}/modules.dep", "kernel/gone/nvidia.ko:\n\0\xff: x\n")
        assert find_module_file(host.root, f"{TREE}/{RUNNING}") == f"{TREE}/{RUNNING}/updates/nvidia.ko"

    def test_links_lead_to_their_file_inside_the_tree(self, host: Host) -> None:
        host.module("/lib/modules/6.12.0-160000.9-default/updates/nvidia.ko")
        host.link(
            f"/lib/modules/{RUNNING}/weak-updates/updates/nvidia.ko",
            "/lib/modules/6.12.0-160000.9-default/updates/nvidia.ko",
        )
        choice = host.choose(PACKAGED)
        assert choice.path == "/lib/modules/6.12.0-160000.9-default/updates/nvidia.ko"
        assert choice.kernel_release == "6.12.0-160000.9-default"

    def test_dangling_links_and_circles_are_passed_over(self, host: Host) -> None:
        host.link(f"{TREE}/{RUNNING}/updates/nvidia.ko", "/nowhere/nvidia.ko")
        host.link(f"{TREE}/{RUNNING}/updates/loop", ".")
        host.link(f"{TREE}/{RUNNING}/build", "/")
        host.module(f"{TREE}/{RUNNING}/extra/nvidia.ko")
        assert find_module_file(host.root, f"{TREE}/{RUNNING}") == f"{TREE}/{RUNNING}/extra/nvidia.ko"


class TestVermagic:
    IN_TREE = f"/lib/modules/{RUNNING}/kernel/lib/small.ko"

    def test_flags_like_the_running_kernels_are_accepted(self, host: Host) -> None:
        host.module(self.IN_TREE)
        host.module(f"{TREE}/6.12.0-160000.9-default/updates/nvidia.ko")
        host.choose()

    def test_other_flags_are_refused(self, host: Host) -> None:
        host.module(self.IN_TREE)
        host.module(f"{TREE}/6.12.0-160000.9-default/updates/nvidia.ko", flags="SMP preempt_rt mod_unload modversions")
        problem = host.problem()
        assert problem.code is Code.MODULE_VERMAGIC
        assert "preempt_rt" in problem.detail

    def test_without_an_in_tree_module_there_is_no_verdict(self, host: Host) -> None:
        host.write(self.IN_TREE, b"damaged")
        host.module(f"{TREE}/{RUNNING}/updates/nvidia.ko", flags="SMP preempt_rt mod_unload modversions")
        host.choose()

    def test_without_symbol_versions_the_release_must_be_equal(self, host: Host) -> None:
        host.module(f"{TREE}/6.12.0-160000.9-default/updates/nvidia.ko", versions=None)
        assert host.problem().code is Code.MODULE_VERMAGIC
        host.module(f"{TREE}/{RUNNING}/updates/nvidia.ko", versions=None)
        host.choose()

    def test_a_module_in_the_wrong_directory_is_found_out(self, host: Host) -> None:
        host.module(f"{TREE}/{RUNNING}/updates/nvidia.ko", "6.4.0-1-default", versions=None)
        assert host.problem().code is Code.MODULE_VERMAGIC

    def test_a_module_without_vermagic_is_refused(self, host: Host) -> None:
        host.write(f"{TREE}/{RUNNING}/updates/nvidia.ko", build.module(vermagic=None))
        assert host.problem().code is Code.MODULE_VERMAGIC

    def test_the_in_tree_module_is_found_through_modules_dep(self, host: Host) -> None:
        host.module(f"/lib/modules/{RUNNING}/kernel/a/b/c/small.ko")
        host.module(f"/lib/modules/{RUNNING}/updates/other.ko", flags="SMP preempt_rt")
        host.write(f"/lib/modules/{RUNNING}/modules.dep", "updates/other.ko:\nkernel/a/b/c/small.ko:\n")
        host.module(f"{TREE}/{RUNNING}/updates/nvidia.ko")
        host.choose()


class TestDependencies:
    def nvidia(self, host: Host, depends: str) -> None:
        host.module(f"{TREE}/{RUNNING}/updates/nvidia.ko", depends=depends)

    def test_are_loaded_in_order_the_deepest_first(self, host: Host) -> None:
        base = f"/lib/modules/{RUNNING}"
        self.nvidia(host, "drm,ecc")
        host.module(f"{base}/kernel/drm.ko", name="drm", depends="i2c-core,backlight")
        host.module(f"{base}/kernel/i2c-core.ko.zst", name="i2c_core")
        host.module(f"{base}/kernel/backlight.ko", name="backlight", depends="i2c-core")
        host.module(f"{base}/kernel/ecc.ko", name="ecc", depends="drm")
        host.write(
            f"{base}/modules.dep",
            "kernel/drm.ko: x\nkernel/i2c-core.ko.zst:\nkernel/backlight.ko: x\nkernel/ecc.ko: x\n",
        )
        expected = ("i2c-core.ko.zst", "backlight.ko", "drm.ko", "ecc.ko")
        assert host.choose().depends == tuple(f"{base}/kernel/{name}" for name in expected)

    def test_that_lead_in_a_circle_end(self, host: Host) -> None:
        self.nvidia(host, "a")
        host.module(f"/lib/modules/{RUNNING}/kernel/a.ko", name="a", depends="b")
        host.module(f"/lib/modules/{RUNNING}/kernel/b.ko", name="b", depends="a,nvidia")
        host.write(f"/lib/modules/{RUNNING}/modules.dep", "kernel/a.ko:\nkernel/b.ko:\n")
        assert host.choose().depends == tuple(f"/lib/modules/{RUNNING}/kernel/{name}.ko" for name in "ba")

    @pytest.mark.parametrize(
        "files",
        [
            pytest.param({"/sys/module/i2c_core/initstate": "live\n"}, id="live"),
            pytest.param({"/sys/module/i2c_core/parameters/x": "1"}, id="built in, with parameters"),
            pytest.param(
                {f"/lib/modules/{RUNNING}/modules.builtin": "kernel/drivers/i2c/i2c-core.ko\n"}, id="built in"
            ),
            pytest.param({f"/usr/lib/modules/{RUNNING}/modules.builtin": "kernel/i2c-core.ko\n"}, id="only /usr/lib"),
        ],
    )
    def test_that_the_kernel_has_already_need_no_file(self, host: Host, files: dict[str, str]) -> None:
        for path, content in files.items():
            host.write(path, content)
        self.nvidia(host, "i2c-core")
        assert host.choose().depends == ()

    def test_are_found_without_modules_dep(self, host: Host) -> None:
        self.nvidia(host, "ecc")
        host.module(f"/lib/modules/{RUNNING}/kernel/crypto/ecc.ko", name="ecc")
        assert host.choose().depends == (f"/lib/modules/{RUNNING}/kernel/crypto/ecc.ko",)

    def test_are_found_beside_the_module(self, host: Host) -> None:
        self.nvidia(host, "ecc")
        host.module(f"{TREE}/{RUNNING}/updates/ecc.ko", name="ecc")
        assert host.choose().depends == (f"{TREE}/{RUNNING}/updates/ecc.ko",)

    def test_that_are_missing_are_named_with_what_needs_them(self, host: Host) -> None:
        self.nvidia(host, "drm")
        host.module(f"/lib/modules/{RUNNING}/kernel/drm.ko", name="drm", depends="backlight")
        problem = host.problem()
        assert (problem.code, problem.subject) == (Code.MODULE_DEPENDENCY_MISSING, "backlight")
        assert problem.detail.startswith("backlight, needed by drm, is neither loaded nor below ")

    def test_that_are_damaged_are_named(self, host: Host) -> None:
        self.nvidia(host, "drm")
        host.write(f"/lib/modules/{RUNNING}/kernel/drm.ko", b"x")
        problem = host.problem()
        assert (problem.code, problem.subject) == (Code.MODULE_DAMAGED, "drm")


def test_a_selection_needs_no_readable_file(host: Host) -> None:
    host.write(f"{TREE}/{RUNNING}/updates/nvidia.ko", b"damaged")
    selected = select_module(host.root, SETTINGS, RUNNING)
    assert not isinstance(selected, Problem)
    assert selected.release == RUNNING

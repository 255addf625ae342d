"""host.module_load, host.load_failure: handing a module to the kernel, and why the kernel refused it."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import _elf as build
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from fmsupervisor.conditions import Code
from fmsupervisor.facts import ModuleChoice
from fmsupervisor.host.kernel import ModuleLoadFailed
from fmsupervisor.host.module_load import LinuxModuleCalls, explain_load_failure, load_module, quote_parameters
from fmsupervisor.host.root import HostRoot

RUNNING = "6.12.0-160000.28-default"
CHOICE = ModuleChoice("/nvidia.ko", RUNNING, "580.126.09", (), "built for it")
PLAIN = build.module(signature=b"sig~Module signature appended~\n")
COMPRESSED = zstandard.compress(PLAIN)


class RecordingCalls:
    """Stands in for the two system calls: notes what it gets, answers from a script (0 when that is used up)."""

    def __init__(self, *answers: int, during: Callable[[], object] = lambda: None) -> None:
        self.calls: list[tuple[str, bytes, str, int]] = []
        self.answers = list(answers)
        self.during = during

    def _answer(self) -> int:
        self.during()
        return self.answers.pop(0) if self.answers else 0

    def load_file(self, descriptor: int, parameters: str, flags: int) -> int:
        self.calls.append(("file", os.pread(descriptor, 1 << 20, 0), parameters, flags))
        return self._answer()

    def load_image(self, image: bytes, parameters: str) -> int:
        self.calls.append(("image", image, parameters, 0))
        return self._answer()


@pytest.fixture
def root(tmp_path: Path) -> HostRoot:
    (tmp_path / "nvidia.ko").write_bytes(PLAIN)
    (tmp_path / "nvidia.ko.zst").write_bytes(COMPRESSED)
    (tmp_path / "sys/module").mkdir(parents=True)
    return HostRoot(str(tmp_path))


def choice(path: str = "/nvidia.ko", depends: tuple[str, ...] = ()) -> ModuleChoice:
    return ModuleChoice(path, RUNNING, "580.126.09", depends, "built for it")


def kernel_decompresses(root: HostRoot, algorithm: str) -> None:
    Path(root.path("/sys/module/compression")).write_text(f"{algorithm}\n")


def set_initstate(root: HostRoot, state: str) -> None:
    os.makedirs(root.path("/sys/module/nvidia"), exist_ok=True)
    Path(root.path("/sys/module/nvidia/initstate")).write_text(f"{state}\n")


class TestWayIntoTheKernel:
    def test_a_plain_file_is_loaded_by_its_descriptor_without_flags(self, root: HostRoot) -> None:
        calls = RecordingCalls()
        load_module(root, choice(), ["NVreg_A=1"], calls=calls)
        assert calls.calls == [("file", PLAIN, "NVreg_A=1", 0)]

    def test_a_compressed_file_is_left_to_a_kernel_that_knows_the_algorithm(self, root: HostRoot) -> None:
        kernel_decompresses(root, "zstd")
        calls = RecordingCalls()
        load_module(root, choice("/nvidia.ko.zst"), [], calls=calls)
        assert calls.calls == [("file", COMPRESSED, "", 4)]

    @pytest.mark.parametrize("algorithm", ["", "xz"])
    def test_else_it_is_decompressed_here_with_its_signature(self, root: HostRoot, algorithm: str) -> None:
        if algorithm:
            kernel_decompresses(root, algorithm)
        calls = RecordingCalls()
        load_module(root, choice("/nvidia.ko.zst"), ["a=b"], calls=calls)
        assert calls.calls == [("image", PLAIN, "a=b", 0)]

    @pytest.mark.parametrize("refusal", [errno.EOPNOTSUPP, errno.EINVAL])
    def test_a_kernel_that_cannot_decompress_it_after_all_gets_it_decompressed(
        self, root: HostRoot, refusal: int
    ) -> None:
        kernel_decompresses(root, "zstd")
        calls = RecordingCalls(refusal)
        load_module(root, choice("/nvidia.ko.zst"), [], calls=calls)
        assert [call[0] for call in calls.calls] == ["file", "image"]

    def test_a_refusal_for_the_modules_sake_is_not_tried_again(self, root: HostRoot) -> None:
        kernel_decompresses(root, "zstd")
        calls = RecordingCalls(errno.EKEYREJECTED)
        with pytest.raises(ModuleLoadFailed) as failed:
            load_module(root, choice("/nvidia.ko.zst"), [], calls=calls)
        assert (failed.value.errno, failed.value.path) == (errno.EKEYREJECTED, "/nvidia.ko.zst")
        assert len(calls.calls) == 1

    def test_dependencies_are_loaded_first_and_without_our_parameters(self, root: HostRoot) -> None:
        Path(root.path("/ecc.ko")).write_bytes(build.module(name="ecc"))
        calls = RecordingCalls()
        load_module(root, choice(depends=("/ecc.ko",)), ["x=1"], calls=calls)
        assert [(call[1] == PLAIN, call[2]) for call in calls.calls] == [(False, ""), (True, "x=1")]

    def test_a_refused_dependency_is_named_and_ends_the_load(self, root: HostRoot) -> None:
        Path(root.path("/ecc.ko")).write_bytes(build.module(name="ecc"))
        calls = RecordingCalls(errno.ENOEXEC)
        with pytest.raises(ModuleLoadFailed) as failed:
            load_module(root, choice(depends=("/ecc.ko",)), [], calls=calls)
        assert failed.value.path == "/ecc.ko"
        assert len(calls.calls) == 1

    @pytest.mark.parametrize(
        ("path", "content", "code"),
        [
            pytest.param("/gone.ko", None, Code.MODULE_NOT_FOUND, id="gone"),
            pytest.param("/bad.ko.zst", COMPRESSED[:200], Code.MODULE_DAMAGED, id="truncated"),
            pytest.param("/bad.ko", b"", Code.MODULE_DAMAGED, id="empty"),
        ],
    )
    def test_a_file_that_cannot_be_read_is_a_failed_load_with_the_reason(
        self, root: HostRoot, path: str, content: bytes | None, code: Code
    ) -> None:
        if content is not None:
            Path(root.path(path)).write_bytes(content)
        with pytest.raises(ModuleLoadFailed) as failed:
            load_module(root, choice(path), [], calls=RecordingCalls())
        problem = explain_load_failure(failed.value.errno, failed.value.kernel_lines, choice(path), RUNNING)
        assert problem.code is code
        assert path in problem.detail


class TestAModuleThatIsThereAlready:
    def test_counts_as_loaded_when_it_is_live(self, root: HostRoot) -> None:
        set_initstate(root, "live")
        load_module(root, choice(), [], calls=RecordingCalls(errno.EEXIST))

    def test_is_waited_for_while_it_is_coming(self, root: HostRoot) -> None:
        set_initstate(root, "coming")
        slept: list[float] = []

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 3:
                set_initstate(root, "live")

        load_module(root, choice(), [], calls=RecordingCalls(errno.EEXIST), sleep=sleep)
        assert len(slept) == 3

    def test_is_busy_when_it_stays_half_loaded(self, root: HostRoot) -> None:
        set_initstate(root, "coming")
        now = [0.0]

        def sleep(seconds: float) -> None:
            now[0] += seconds

        with pytest.raises(ModuleLoadFailed) as failed:
            load_module(
                root,
                choice(),
                [],
                calls=RecordingCalls(errno.EEXIST),
                wait_seconds=5,
                clock=lambda: now[0],
                sleep=sleep,
            )
        assert failed.value.errno == errno.EBUSY

    def test_is_busy_when_it_goes_away_again(self, root: HostRoot) -> None:
        with pytest.raises(ModuleLoadFailed) as failed:
            load_module(root, choice(), [], calls=RecordingCalls(errno.EEXIST))
        assert failed.value.errno == errno.EBUSY


class TestKernelLines:
    RECORD = b"4,1,100,-;nvidia: version magic 'A' should be 'B'\\x0ausb 1-1: new device\\x0aNVRM: two\n SUBSYSTEM=x\n"

    def test_are_those_since_the_load_began_that_speak_of_the_module(self, root: HostRoot) -> None:
        os.makedirs(root.path("/dev"))
        log = Path(root.path("/dev/kmsg"))
        log.write_bytes(b"4,0,1,-;nvidia: an old line\n")

        def happen() -> None:
            descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
            os.write(descriptor, self.RECORD)
            os.close(descriptor)

        with pytest.raises(ModuleLoadFailed) as failed:
            load_module(root, choice(), [], calls=RecordingCalls(errno.ENOEXEC, during=happen))
        assert failed.value.kernel_lines == ("nvidia: version magic 'A' should be 'B'", "NVRM: two")

    def test_are_empty_without_a_kernel_log(self, root: HostRoot) -> None:
        with pytest.raises(ModuleLoadFailed) as failed:
            load_module(root, choice(), [], calls=RecordingCalls(errno.ENOEXEC))
        assert failed.value.kernel_lines == ()


class TestParameters:
    @pytest.mark.parametrize(
        ("given_parameters", "expected"),
        [
            pytest.param([], "", id="none"),
            pytest.param(["a=1", "b=2"], "a=1 b=2", id="two"),
            pytest.param(["flag"], "flag", id="no value"),
            pytest.param(["a=x y"], 'a="x y"', id="blanks"),
            pytest.param(['a="x y"'], 'a="x y"', id="quoted already"),
            pytest.param(["a=k=v;l=w"], "a=k=v;l=w", id="registry words"),
        ],
    )
    def test_are_quoted_as_the_kernel_takes_them_apart(self, given_parameters: list[str], expected: str) -> None:
        assert quote_parameters(given_parameters) == expected

    @pytest.mark.parametrize("parameter", ['a=x "y" z', "a b=1", "a=\0"])
    def test_that_cannot_be_expressed_are_refused(self, root: HostRoot, parameter: str) -> None:
        calls = RecordingCalls()
        with pytest.raises(ModuleLoadFailed) as failed:
            load_module(root, choice(), [parameter], calls=calls)
        assert calls.calls == []
        problem = explain_load_failure(failed.value.errno, failed.value.kernel_lines, choice(), RUNNING)
        assert problem.code is Code.MODULE_INIT_FAILED
        assert "parameter" in problem.detail


EXPLANATIONS = [
    # kernel-driver facts: the loader's own refusals
    (errno.ENOEXEC, "nvidia: version magic '6.4.0 SMP ' should be '6.12.0 SMP '", Code.MODULE_VERMAGIC),
    (errno.ENOEXEC, "nvidia: disagrees about version of symbol module_layout", Code.MODULE_SYMBOL_VERSIONS),
    (errno.EINVAL, "nvidia: disagrees about version of symbol pci_enable", Code.MODULE_SYMBOL_VERSIONS),
    (errno.EINVAL, "nvidia: Unknown symbol pci_enable (err -22)", Code.MODULE_SYMBOL_VERSIONS),
    (errno.ENOENT, "nvidia: Unknown symbol drm_gem_x (err -2)", Code.MODULE_UNKNOWN_SYMBOL),
    (errno.ENOENT, "", Code.MODULE_UNKNOWN_SYMBOL),
    (errno.EKEYREJECTED, "Loading of unsigned module is rejected", Code.MODULE_SIGNATURE_REJECTED),
    (errno.EKEYREJECTED, "Loading of module with unavailable key is rejected", Code.MODULE_SIGNATURE_REJECTED),
    (errno.EKEYREJECTED, "", Code.MODULE_SIGNATURE_REJECTED),
    (errno.ENOKEY, "", Code.MODULE_SIGNATURE_REJECTED),
    (
        errno.EPERM,
        "Lockdown: fmsupervisor: unsigned module loading is restricted; see man kernel_lockdown.7",
        Code.MODULE_LOCKDOWN,
    ),
    (errno.EPERM, "", Code.MODULE_LOADING_FORBIDDEN),
    (errno.EPERM, "Module nvidia is blacklisted", Code.MODULE_BLACKLISTED),
    (errno.EEXIST, "", Code.MODULE_LOAD_BUSY),
    (errno.EBUSY, "", Code.MODULE_LOAD_BUSY),
    (errno.ENOMEM, "", Code.MODULE_LOAD_BUSY),
    (errno.EAGAIN, "", Code.MODULE_LOAD_BUSY),
    (errno.EINTR, "", Code.MODULE_LOAD_BUSY),
    (errno.EOPNOTSUPP, "", Code.MODULE_DAMAGED),
    (errno.EBADMSG, "", Code.MODULE_DAMAGED),
    (errno.ENODATA, "", Code.MODULE_DAMAGED),
    (errno.ENOEXEC, "", Code.MODULE_DAMAGED),
    (errno.ENOEXEC, "nvidia: loading out-of-tree module taints kernel.", Code.MODULE_DAMAGED),
    # nvidia_init_module's own
    (errno.ENODEV, "NVRM: No NVIDIA GPU found.", Code.MODULE_NO_DEVICE),
    (errno.ENODEV, "NVRM: No NVIDIA devices probed.", Code.MODULE_NO_DEVICE),
    (errno.ENODEV, "NVRM: None of the NVIDIA devices were initialized.", Code.MODULE_NO_DEVICE),
    (errno.ENODEV, "NVRM: No NVIDIA PCI devices found.", Code.MODULE_NO_DEVICE),
    (errno.ENODEV, "", Code.MODULE_NO_DEVICE),
    (errno.EIO, "NVRM: rm_init_rm() failed!", Code.MODULE_INIT_FAILED),
    (errno.EIO, "", Code.MODULE_INIT_FAILED),
    (errno.EINVAL, "nvidia: `x' invalid for parameter `NVreg_NvLinkDisable'", Code.MODULE_INIT_FAILED),
    (errno.EINVAL, "", Code.MODULE_INIT_FAILED),
    (errno.ENOSYS, "", Code.MODULE_LOADING_FORBIDDEN),
    (123456, "", Code.MODULE_INIT_FAILED),
]


class TestExplanation:
    @pytest.mark.parametrize(
        ("number", "line", "code"),
        [
            pytest.param(*row, id=f"{errno.errorcode.get(row[0], row[0])}: {row[1] or 'no kernel line'}"[:70])
            for row in EXPLANATIONS
        ],
    )
    def test_names_the_condition_the_errno_and_the_deciding_line(self, number: int, line: str, code: Code) -> None:
        noise = ("nvidia: module license 'NVIDIA' taints kernel.", "NVRM: hello")
        lines = (noise[0], line, noise[1]) if line and "taints" not in line else tuple(filter(None, (line,)))
        problem = explain_load_failure(number, lines, CHOICE, RUNNING)
        assert problem.code is code
        assert errno.errorcode.get(number, "123456") in problem.detail
        if line and "taints" not in line:
            assert line in problem.detail

    def test_names_the_symbol(self) -> None:
        problem = explain_load_failure(errno.ENOENT, ["nvidia: Unknown symbol drm_x (err -2)"], CHOICE, RUNNING)
        assert "symbol drm_x" in problem.detail

    def test_takes_a_missing_symbol_before_one_of_another_version(self) -> None:
        lines = ["nvidia: Unknown symbol old (err -22)", "nvidia: Unknown symbol gone (err -2)"]
        problem = explain_load_failure(errno.ENOENT, lines, CHOICE, RUNNING)
        assert (problem.code, "symbol gone" in problem.detail) == (Code.MODULE_UNKNOWN_SYMBOL, True)

    def test_says_for_which_kernel_the_module_was_built_when_that_is_another(self) -> None:
        built_for = ModuleChoice("/x.ko", "6.12.0-160000.9-default", "1", (), "")
        detail = explain_load_failure(errno.ENOEXEC, (), built_for, RUNNING).detail
        assert "built for 6.12.0-160000.9-default" in detail

    def test_names_the_dependency_that_was_refused(self) -> None:
        assert explain_load_failure(errno.ENOEXEC, (), CHOICE, RUNNING, path="/ecc.ko").detail.startswith("/ecc.ko: ")

    @given(st.integers(-5, 600), st.lists(st.text(max_size=60), max_size=5))
    def test_is_total(self, number: int, lines: list[str]) -> None:
        assert explain_load_failure(number, lines, CHOICE, RUNNING).code in Code


def test_the_real_system_calls_refuse_what_is_no_module(tmp_path: Path) -> None:
    calls = LinuxModuleCalls()
    (tmp_path / "no.ko").write_bytes(b"this is no module")
    with (tmp_path / "no.ko").open("rb") as file:
        answers = {calls.load_file(file.fileno(), "", 0), calls.load_image(b"this is no module", "")}
    assert answers <= {errno.EPERM, errno.ENOSYS, errno.ENOEXEC, errno.EACCES}

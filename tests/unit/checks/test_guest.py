"""Inside a guest: where this is, that Fabric Manager does not run, and what nvidia-smi says."""

import os
from pathlib import Path

import pytest
from _checked_host import ask, build, make_context, put, put_link

from fmsupervisor.checks.finding import Verdict
from fmsupervisor.checks.guest import GpuFabric, judge_fabric, parse_fabric
from fmsupervisor.checks.programs import run_program
from fmsupervisor.conditions import Code
from fmsupervisor.host.root import HostRoot
from fmsupervisor.simulator import pci_bus
from fmsupervisor.simulator.hardware import GPUS, SWITCHES

GPU = """
  <gpu id="00000000:{bus}:00.0">
    <product_name>{product}</product_name>
    <fabric>
      <state>{state}</state>
      <status>{status}</status>
      <cliqueId>0</cliqueId>
      <clusterUuid>00000000-0000-0000-0000-000000000000</clusterUuid>
      <health><bandwidth>N/A</bandwidth></health>
    </fabric>
  </gpu>"""


def answer(*gpus: tuple[str, str], product: str = "NVIDIA H200") -> str:
    blocks = [
        GPU.format(bus=f"{place:02x}", product=product, state=state, status=status)
        for place, (state, status) in enumerate(gpus)
    ]
    return (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>\n'
        f"  <timestamp>Tue Jun  3 09:14:01 2025</timestamp>\n{''.join(blocks)}\n</nvidia_smi_log>\n"
    )


def make_guest(directory: Path, *, is_virtual: bool = True, switches: tuple[str, ...] = ()) -> HostRoot:
    """A guest with two GPUs bound to nvidia."""
    root = build(directory, switches=switches, gpus=GPUS[:2])
    for gpu in GPUS[:2]:
        pci_bus.unbind(root, gpu)
        pci_bus.bind(root, gpu, "nvidia")
    flags = "fpu vme hypervisor lahf_lm" if is_virtual else "fpu vme"
    put(root, "/proc/cpuinfo", f"processor\t: 0\nflags\t\t: {flags}\n")
    return root


def with_smi(directory: Path, script: str) -> dict[str, object]:
    """An nvidia-smi in PATH that is a shell script."""
    programs = directory / "programs"
    programs.mkdir()
    path = programs / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return {"environment": {"PATH": f"{programs}:{os.defpath}"}, "run_program": run_program}


class TestPlace:
    @pytest.mark.parametrize(
        ("path", "text"),
        [
            ("/proc/cpuinfo", "flags\t\t: fpu hypervisor\n"),
            ("/sys/hypervisor/type", "xen\n"),
            ("/sys/class/dmi/id/sys_vendor", "QEMU\n"),
            ("/sys/class/dmi/id/product_name", "Standard PC (Q35 + ICH9, 2009) KVM\n"),
        ],
    )
    def test_a_virtual_machine_is_known_by_several_signs(self, tmp_path, path: str, text: str) -> None:
        root = make_guest(tmp_path, is_virtual=False)
        put(root, path, text)
        finding = ask(make_context(tmp_path), "guest-place")
        assert finding.verdict is Verdict.OK
        assert "the host owns the fabric" in finding.found

    def test_a_physical_machine_is_told(self, tmp_path) -> None:
        make_guest(tmp_path, is_virtual=False)
        assert ask(make_context(tmp_path), "guest-place").codes == (Code.GUEST_UNCERTAIN,)

    def test_gpus_without_the_driver_are_told(self, tmp_path) -> None:
        root = make_guest(tmp_path)
        for gpu in GPUS[:2]:
            pci_bus.unbind(root, gpu)
        assert ask(make_context(tmp_path), "guest-place").codes == (Code.GUEST_UNCERTAIN,)

    def test_with_switches_passed_through_fabric_manager_belongs_here(self, tmp_path) -> None:
        make_guest(tmp_path, switches=SWITCHES)
        context = make_context(tmp_path)
        assert "must run in this guest" in "".join(ask(context, "guest-place").details)
        assert ask(context, "guest-no-fm").verdict is Verdict.OK


class TestNoFabricManager:
    def test_none_is_right(self, tmp_path) -> None:
        make_guest(tmp_path)
        assert ask(make_context(tmp_path), "guest-no-fm").verdict is Verdict.OK

    def test_a_running_one_is_wrong(self, tmp_path) -> None:
        root = make_guest(tmp_path)
        put(root, "/proc/77/comm", "nv-fabricmanage\n")
        put(root, "/proc/77/cmdline", "/usr/bin/nv-fabricmanager\0")
        finding = ask(make_context(tmp_path), "guest-no-fm")
        assert (finding.verdict, finding.codes) == (Verdict.FAILED, (Code.MANAGER_IN_GUEST,))

    def test_an_enabled_unit_is_wrong(self, tmp_path) -> None:
        root = make_guest(tmp_path)
        unit = "/usr/lib/systemd/system/nvidia-fabricmanager.service"
        put(root, unit, "[Service]\n")
        put_link(root, "/etc/systemd/system/multi-user.target.wants/nvidia-fabricmanager.service", unit)
        finding = ask(make_context(tmp_path), "guest-no-fm")
        assert (finding.verdict, finding.codes) == (Verdict.WARNING, (Code.MANAGER_IN_GUEST,))


FABRIC_ROWS = {
    "all registered": ([("Completed", "Success")] * 2, Verdict.OK, None, "all 2 GPUs have registered"),
    "one in progress": ([("Completed", "Success"), ("In Progress", "N/A")], Verdict.FAILED, Code.GUEST_NOT_REGISTERED, "802"),
    "not started": ([("Not Started", "N/A")], Verdict.FAILED, Code.GUEST_NOT_REGISTERED, "Not Started"),
    "completed with an error": ([("Completed", "Insufficient Resources")], Verdict.FAILED, Code.GUEST_REGISTRATION_FAILED, "Insufficient Resources"),
    "completed without a status": ([("Completed", "")], Verdict.FAILED, Code.GUEST_REGISTRATION_FAILED, "absent"),
    "no state": ([("N/A", "N/A")], Verdict.CANNOT_TELL, None, "too old"),
    "a new state": ([("Pondering", "Success")], Verdict.CANNOT_TELL, None, "Pondering"),
}  # fmt: skip


class TestFabric:
    @pytest.mark.parametrize("row", FABRIC_ROWS.values(), ids=FABRIC_ROWS)
    def test_the_states_mean(self, tmp_path, row) -> None:
        gpus, verdict, code, says = row
        make_guest(tmp_path)
        (tmp_path / "answer.xml").write_text(answer(*gpus))
        context = make_context(tmp_path, **with_smi(tmp_path, f'[ "$*" = "-q -x" ] && cat {tmp_path}/answer.xml'))
        finding = ask(context, "guest-fabric")
        assert (finding.verdict, finding.codes) == (verdict, (code,) if code else ())
        assert says in finding.found + "".join(finding.details)
        assert len(finding.details) >= len(gpus) or verdict is Verdict.CANNOT_TELL

    def test_an_a100_tells_no_state_and_that_is_normal(self) -> None:
        gpus = parse_fabric(answer(("N/A", "N/A"), product="NVIDIA A100-SXM4-80GB"))
        assert gpus
        assert judge_fabric(gpus).verdict is Verdict.OK
        assert "802" in judge_fabric(gpus).found

    @pytest.mark.parametrize(
        ("script", "says"),
        [
            ("exec sleep 60", "took longer than"),
            (
                "echo 'Failed to initialize NVML: Driver/library version mismatch' >&2; exit 18",
                "Driver/library version mismatch",
            ),
            ("echo '<nvidia_smi_log><gpu id=\"1\">'", "exit status 0"),
            ("head -c 100000 /dev/urandom", "exit status 0"),
            ("exit 0", "exit status 0"),
            ("kill -9 $$", "ended by signal 9"),
            ("echo '<nvidia_smi_log></nvidia_smi_log>'", "lists no GPU"),
        ],
    )
    def test_an_nvidia_smi_that_does_not_answer_leaves_it_open(self, tmp_path, script: str, says: str) -> None:
        make_guest(tmp_path)
        changes = with_smi(tmp_path, script)
        changes["run_program"] = lambda arguments, environment, timeout: run_program(
            arguments, environment, min(timeout, 1.0)
        )
        finding = ask(make_context(tmp_path, **changes), "guest-fabric")
        assert finding.verdict is Verdict.CANNOT_TELL
        assert says in finding.found

    def test_without_nvidia_smi_it_stays_open(self, tmp_path) -> None:
        make_guest(tmp_path)
        assert "not in PATH" in ask(make_context(tmp_path), "guest-fabric").found

    def test_warnings_before_the_document_do_not_matter(self) -> None:
        text = "WARNING: infoROM is corrupted\n" + answer(("Completed", "Success"))
        assert parse_fabric(text) == (GpuFabric("0000:00:00.0", "NVIDIA H200", "Completed", "Success"),)

    def test_a_gpu_without_a_fabric_section_has_no_state(self) -> None:
        assert parse_fabric("<nvidia_smi_log><gpu/></nvidia_smi_log>") == (GpuFabric("GPU 0", "", "", ""),)

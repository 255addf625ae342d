"""``fmsupervisor explain``: every code, every SXid, every kind of line has an answer, and what is unknown is said to be."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmsupervisor.cli import main
from fmsupervisor.conditions import REGISTRY
from fmsupervisor.explain import explain, suggest
from fmsupervisor.explain_lines import FABRIC_MANAGER_LINES, KERNEL_LINES
from fmsupervisor.explain_sxid import _HARDWARE, explain_sxid, numbers
from fmsupervisor.explain_words import WORDS
from fmsupervisor.explanation import Explanation
from fmsupervisor.facts import KernelKind, LogKind
from fmsupervisor.host.kernel_grammar import without_prefix
from fmsupervisor.sxid import catalogue, is_ambiguous
from fmsupervisor.xid import FABRIC_XIDS

FM_FATAL = (
    "[Jul 23 2024 07:53:55] [ERROR] [tid 841] detected NVSwitch fatal error 20034 on fid 0 on NVSwitch pci bus id "
    "00000000:86:00.0 physical id 3 port 33"
)
KERNEL_FATAL = "nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 48 LTSSM Fault Up (First)"


def facts(explanation: Explanation) -> dict[str, str]:
    return dict(explanation.facts)


def only(question: str) -> Explanation:
    (explanation,) = explain(question)
    return explanation


class TestConditions:
    @pytest.mark.parametrize("code", REGISTRY)
    def test_each_has_cause_remedy_runbook_and_message_id(self, code: str) -> None:
        explanation = only(code)
        found = facts(explanation)
        condition = REGISTRY[explanation.name]  # type: ignore[index]
        assert explanation.title == condition.title
        assert (found["cause"], found["what_to_do"]) == (condition.cause, condition.remedy)
        assert found["runbook"].endswith(f"#{condition.anchor}")
        assert found["message_id"] == condition.message_id
        assert found["meanwhile"].endswith(".")

    @pytest.mark.parametrize("written", ["FMS-601", "fms-601", "FMS601", "fms_601", " FMS-601 "])
    def test_the_code_may_be_written_carelessly(self, written: str) -> None:
        assert only(written).name == "FMS-601"

    def test_a_line_of_the_supervisor_is_explained_by_its_code(self) -> None:
        line = "Nov 30 12:00:00 host fmsupervisor[7]: FMS-305 An NVSwitch went away at run time: 0000:07:00.0 is gone."
        assert only(line).name == "FMS-305"

    @pytest.mark.parametrize(
        ("line", "names"),
        [
            (
                "FMS-601 A fatal NVSwitch error was reported: SXid 20034 on 0000:86:00.0 port 33",
                ["FMS-601", "SXid 20034"],
            ),
            ("FMS-614 A GPU has fallen off the bus: Xid 79 of 0000:91:00.0: x", ["FMS-614", "Xid 79"]),
            ("FMS-601: SXid 99999 on 0000:86:00.0", ["FMS-601"]),
        ],
    )
    def test_and_by_the_errors_that_it_names(self, line: str, names: list[str]) -> None:
        assert [each.name for each in explain(line)] == names


class TestSxids:
    @pytest.mark.parametrize("number", numbers())
    def test_each_is_explained_completely(self, number: int) -> None:
        explanation = only(f"{number:05d}")
        found = facts(explanation)
        assert explanation.title
        assert "[" not in explanation.title.replace("[%d]", "")
        assert found["symbol"].startswith("NVSWITCH_ERR_HW_")
        assert found["hardware"] == _HARDWARE[number // 1000]
        assert all(found[name] for name in ("severity", "chips", "guide", "what_to_do"))
        assert ("by_branch" in found) is is_ambiguous(number)

    @pytest.mark.parametrize("written", ["20034", "SXid 20034", "sxid: 20034", "sxid#20034"])
    def test_the_number_may_be_written_in_several_ways(self, written: str) -> None:
        assert only(written).name == "SXid 20034"

    def test_the_symbol_finds_the_number(self) -> None:
        assert only("NVSWITCH_ERR_HW_DLPL_LTSSM_FAULT_UP").name == "SXid 20034"

    @pytest.mark.parametrize(
        ("number", "name", "words"),
        [
            pytest.param(11002, "chips", "not raised", id="not-raised"),
            pytest.param(10002, "chips", "only LR10", id="one-chip"),
            pytest.param(20034, "chips", "LR10 (A100) and LS10", id="both-chips"),
            pytest.param(10000, "chips", "base of its group", id="class-base"),
            pytest.param(23001, "guide", "always fatal", id="always-fatal"),
            pytest.param(23001, "what_to_do", "all GPUs and switches", id="whole-fabric"),
            pytest.param(11012, "what_to_do", "corrected", id="corrected-ecc"),
            pytest.param(22013, "what_to_do", "Ignore", id="ignored"),
            pytest.param(12028, "what_to_do", "Xid 45", id="one-guest-stalls"),
            pytest.param(10007, "severity", "on LS10 (H100, H200): ", id="differs-by-chip"),
            pytest.param(10001, "severity", '"Fatal"; the link needs a reset, or written as "Non-fatal"', id="differs-by-place"),
            pytest.param(11002, "what_to_do", "do not write it", id="nothing-known"),
        ],
    )  # fmt: skip
    def test_the_table_is_told_in_sentences(self, number: int, name: str, words: str) -> None:
        assert words in facts(only(str(number)))[name]

    def test_every_severity_of_the_table_has_a_sentence(self) -> None:
        for number, entry in catalogue().items():
            said = facts(only(str(number)))["severity"]
            assert "written" in said, entry.severity

    def test_a_number_that_moved_is_told_by_branch(self) -> None:
        explanation = only("28006")  # known before 550 only
        assert explanation.title == "MC TS crumbstore MCTO"
        assert "driver 550 and later: not known" in facts(explanation)["by_branch"]
        assert "driver 525 to 545: NVSWITCH_ERR_HW_NPORT_REDUCTIONTSTATE" in facts(only("29006"))["by_branch"]
        assert "driver 515: NVSWITCH_ERR_HW_NPORT_EGRESS_TIMESTAMP_LOG" in facts(only("12034"))["by_branch"]

    def test_the_word_in_the_line_wins(self) -> None:
        calm, fatal = explain_sxid(19049), explain_sxid(19049, "fatal")  # non-fatal in the guide
        assert calm is not None
        assert fatal is not None
        assert "Nothing" in facts(calm)["what_to_do"]
        assert facts(fatal)["what_to_do"].startswith("The line says fatal.")

    @pytest.mark.parametrize("number", FABRIC_XIDS)
    def test_an_xid_of_the_fabric_leads_to_its_condition(self, number: int) -> None:
        assert facts(only(f"Xid {number}"))["condition"].startswith("FMS-6")


class TestLines:
    def test_every_kind_of_line_has_a_meaning(self) -> None:
        assert set(FABRIC_MANAGER_LINES) == set(LogKind) - {LogKind.UNRECOGNISED, LogKind.BLANK}
        assert set(KERNEL_LINES) == set(KernelKind)

    @pytest.mark.parametrize(
        ("line", "name", "condition"),
        [
            pytest.param("Fabric Manager Log initializing at: 12/19/2024 22:08:53.808", "session-header", "", id="header"),
            pytest.param("[Dec 19 2024 22:08:55] [INFO] [tid 1804] added GPU with UUID GPU-11112222-3333-4444-5555-666677778886 "
                         "based on NVLink Inband GPU probe request.", "gpu-added", "", id="gpu"),
            pytest.param("[Sep 17 2024 06:01:46] [ERROR] [tid 1230079] failed to find the GPU handle 5410063385821516767 in the "
                         "multicast team request setup 6130285411925746235.", "stale-handle", "FMS-603", id="stale-handle"),
            pytest.param("Sep 26 19:32:46 hgx nv-fabricmanager[77]: detected number of NVSwitches don't match with any supported "
                         "system topology, aborting fabric manager", "topology-mismatch", "FMS-506", id="journal"),
            pytest.param("request to query NVSwitch device information from NVSwitch driver failed with error:WARNING Nothing to "
                         "do [NV_WARN_NOTHING_TO_DO]", "nothing-to-do", "FMS-507", id="nothing-to-do"),
            pytest.param("nvidia-nvswitch0: Interrupts disabled to avoid a storm", "interrupt-storm", "FMS-612", id="storm"),
            pytest.param("[   12.345678] Lockdown: insmod: unsigned module loading is restricted; see man kernel_lockdown.7",
                         "lockdown", "FMS-208", id="lockdown"),
            pytest.param("NVRM: No NVIDIA GPU found.", "load-failed", "FMS-213", id="no-device"),
            pytest.param("nvidia: disagrees about version of symbol module_layout", "module-refused", "FMS-211", id="symbols"),
            pytest.param("nvidia: version magic '6.4.0 SMP' should be '6.12.0 SMP'", "module-refused", "FMS-203", id="vermagic"),
            pytest.param("Module nvidia is blacklisted", "module-refused", "FMS-210", id="blacklist"),
            pytest.param("nvidia-nvswitch2: Failed to initialize device : -5", "switch-probe-failed", "FMS-302", id="probe"),
            pytest.param("nvidia-nvswitch2: using MSI", "switch-ready", "", id="calm-kernel-line"),
        ],
    )  # fmt: skip
    def test_a_pasted_line_is_recognised(self, line: str, name: str, condition: str) -> None:
        explanation = only(line)
        assert explanation.name == name
        assert facts(explanation).get("condition", "").startswith(condition)
        assert facts(explanation)["what_to_do"]

    @pytest.mark.parametrize("line", [FM_FATAL, KERNEL_FATAL, f"[6781753.400584] {KERNEL_FATAL}"])
    def test_an_sxid_line_is_explained_and_so_is_its_number(self, line: str) -> None:
        event, number = explain(line)
        assert facts(event)["condition"].startswith("FMS-601")
        assert "severity fatal" in facts(event)["it_names"]
        assert number.name == "SXid 20034"

    def test_a_switch_that_is_too_hot_leads_to_its_own_condition(self) -> None:
        line = "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 10004, NVSWITCH Temperature 92C | TSENSE WARN Threshold 90C"
        event, number = explain(line)
        assert facts(event)["condition"].startswith("FMS-618")
        assert number.name == "SXid 10004"

    def test_the_further_lines_of_an_sxid_are_no_events(self) -> None:
        line = "nvidia-nvswitch2: SXid (PCI:0000:07:00.0): 20034, Severity 1 Engine instance 60 Sub-engine instance 00"
        detail, number = explain(line)
        assert "not another event" in facts(detail)["meaning"]
        assert "condition" not in facts(detail)
        assert number.name == "SXid 20034"

    def test_an_xid_line_is_explained_and_so_is_its_number(self) -> None:
        line, number = explain(
            "NVRM: Xid (PCI:0000:91:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
        )
        assert "0000:91:00.0" in facts(line)["it_names"]
        assert facts(number)["condition"].startswith("FMS-614")

    def test_of_several_lines_each_is_explained_once(self) -> None:
        names = [each.name for each in explain(f"{KERNEL_FATAL}\n\nFMS-301\n{KERNEL_FATAL}\n")]
        assert names == ["switch-error", "SXid 20034", "FMS-301"]


class TestWords:
    """What an on-call or the owner of a guest has in hand."""

    @pytest.mark.parametrize(
        ("text", "name", "condition"),
        [
            ("CUDA error 802: system not yet initialized", "cuda-802", "FMS-814"),
            ("RuntimeError: ... Error 802: system not yet initialized", "cuda-802", "FMS-814"),
            ("cudaErrorSystemNotReady", "cuda-802", "FMS-814"),
            ("Fabric State : In Progress", "fabric-state", "FMS-814"),
            ("        State                             : Completed", "fabric-state", ""),
            ("NV_WARN_NOTHING_TO_DO", "nothing-to-do", "FMS-507"),
            ("Nov 30 hgx systemd[1]: fmsupervisor.service: Main process exited, code=exited, status=75/TEMPFAIL", "own-unit", ""),
            ("fmsupervisor.service: Main process exited, code=exited, status=78/CONFIG", "own-unit", "FMS-702"),
            ("fmsupervisor.service: Watchdog timeout (limit 30s)!", "own-unit", ""),
            ("Dependency failed for nvidia-fabric.target - NVIDIA fabric.", "own-unit", ""),
            ("nvidia-fabricmanager.service: Killing process 76454 (nv-fabricmanage) with signal SIGKILL", "vendor-unit", ""),
            ("Nov 15 14:15:47 hgx systemd[1]: Starting NVIDIA fabric manager service...", "vendor-unit", ""),
            ("[6781741.548783] NVRM: GPU 0000:91:00.0: GPU has fallen off the bus.", "gpu-lost", "FMS-614"),
            ("nvidia 0000:91:00.0: Direct firmware load for nvidia/580.126.09/gsp_ga10x.bin failed with error -2", "firmware-missing", "FMS-804"),
            ("NVRM: nvCheckOkFailedNoLog: Check failed: Requested object not found [NV_ERR_OBJECT_NOT_FOUND] (0x00000057) returned from status @ mem_multicast_fabric.c:2917.", "stale-handle", "FMS-603"),
            ("nvidia: loading out-of-tree module taints kernel.", "taint", ""),
            ("nvidia: unknown parameter 'NVreg_X' ignored", "parameter", ""),
            ("NVRM: This can occur when another driver was loaded and", "gpu-owned", ""),
            ("nvidia-nvlink: Nvlink Core is being initialized, major device number 239", "driver-notice", ""),
        ],
    )  # fmt: skip
    def test_are_explained(self, text: str, name: str, condition: str) -> None:
        explanation = only(text)
        assert explanation.name == name
        assert facts(explanation).get("condition", "").startswith(condition)
        assert facts(explanation)["what_to_do"].endswith(".")

    def test_lines_that_the_daemon_reads_come_first(self) -> None:
        (explanation,) = explain(
            "request to query NVSwitch device information from NVSwitch driver failed with error:WARNING Nothing to do "
            "[NV_WARN_NOTHING_TO_DO]"
        )
        assert explanation.kind == "fabric-manager-line"

    def test_every_entry_of_the_table_is_found_by_a_test_above(self) -> None:
        marks = type(self).test_are_explained.pytestmark[0]  # type: ignore[attr-defined]
        found = {
            next(words for words in WORDS if words.pattern.search(without_prefix(row[0]))) for row in marks.args[1]
        }
        assert found == set(WORDS)


class TestUnknown:
    @pytest.mark.parametrize(
        ("question", "nearest"),
        [
            pytest.param("FMS-602", "FMS-60", id="code"),
            pytest.param("28013", "SXid 2800", id="number"),
            pytest.param("the metrics port", "FMS-701", id="words"),
        ],
    )
    def test_the_nearest_codes_are_suggested(self, question: str, nearest: str) -> None:
        assert explain(question) == ()
        assert any(each.startswith(nearest) for each in suggest(question))

    @pytest.mark.parametrize(
        "question", ["", "hello world", "what : is", "\0\x1b[31m", "x" * 100_000, "9" * 50, "\ud800"]
    )
    def test_it_is_said_with_status_1(self, question: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["explain", question]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("fmsupervisor: cannot explain ")
        assert "\x1b" not in err
        assert len(err) < 1000

    @given(st.text(max_size=200) | st.from_regex(r"nvidia-nvswitch\d: SXid \(PCI:.{0,20}\): \d{1,8}, .{0,20}"))
    def test_no_text_makes_it_fail(self, question: str) -> None:
        for explanation in explain(question):
            assert explanation.name
        suggest(question)


class TestCommand:
    def test_prints_the_same_in_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["explain", "--json", "SXid", "20034"]) == 0
        document = json.loads(capsys.readouterr().out)
        (answer,) = document["explanations"]
        assert document["question"] == "SXid 20034"
        assert (answer["kind"], answer["name"]) == ("sxid", "SXid 20034")
        assert answer["symbol"] == "NVSWITCH_ERR_HW_DLPL_LTSSM_FAULT_UP"

    def test_prints_json_also_when_it_knows_nothing(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["explain", "--json", "FMS-602"]) == 1
        document = json.loads(capsys.readouterr().out)
        assert document["explanations"] == []
        assert document["suggestions"]

    def test_prints_lines_of_bounded_width(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["explain", "29006"]) == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 104

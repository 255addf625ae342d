"""Every scenario of the simulator, end to end: the states on the way, the conditions, the metrics, the journal, the exit.

The daemon runs as a process of its own on the simulated host; it is looked at from outside only.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from fmsupervisor.conditions import REGISTRY, Code
from fmsupervisor.core.verdict import FabricState
from fmsupervisor.simulator.hardware import GPUS, SWITCHES
from fmsupervisor.simulator.scenarios import SCENARIOS
from tests.scenarios.runner import Outcome, run

# The states on the way, shortened: the supervisor's ten states by letter.
LETTERS = {
    "M": "waiting-for-module",
    "W": "waiting-for-switches",
    "S": "starting",
    "c": "configuring",
    "C": "configured",
    "D": "degraded",
    "B": "backoff",
    "F": "failed",
    "N": "not-applicable",
    "X": "stopping",
}
UP = "MScC"


@dataclass(frozen=True)
class Story:
    """What must be seen of one scenario: the states (before the final stop) and the conditions, in order."""

    states: str
    conditions: tuple[Code, ...] = ()
    speed: float = 20.0


STORIES = {
    "healthy": Story(UP),
    "no-switch": Story("N"),
    "nvlink5": Story("F", (Code.NVLINK5_UNSUPPORTED,)),
    "switch-missing": Story("MW", (Code.SWITCH_MISSING,)),
    "switch-not-probed": Story("MW", (Code.SWITCH_NOT_PROBED,)),
    "late-switches": Story("MWScC"),
    "start-anyway": Story("MWScD", (Code.SWITCH_MISSING, Code.STARTED_WITH_FEWER_SWITCHES)),
    "topology-mismatch": Story("MScF", (Code.TOPOLOGY_MISMATCH,)),
    "module-other-flags": Story("MF", (Code.MODULE_VERMAGIC,)),
    "version-mismatch": Story("MF", (Code.VERSION_MISMATCH,)),
    "reload-needed": Story("MF", (Code.RELOAD_NEEDED,)),
    "library-missing": Story("MF", (Code.LIBRARY_MISSING,)),
    "loader-error": Story("MSF", (Code.LOADER_ERROR,)),
    "insecure-binary": Story("MF", (Code.INSECURE_FILE,)),
    "node-conflict": Story("MF", (Code.NODE_CONFLICT, Code.DRIVER_UNOBSERVABLE)),
    "gpu-would-be-taken": Story("MF", (Code.GPU_WOULD_BE_TAKEN,)),
    "no-register": Story(UP),
    "bad-config": Story("MSF", (Code.CONFIG_REJECTED,)),
    "bad-config-exit-zero": Story("MSF", (Code.CONFIG_REJECTED,)),
    "nothing-to-do": Story("MSF", (Code.NOTHING_TO_DO,)),
    "foreign-fm": Story("MF", (Code.FOREIGN_FABRIC_MANAGER,)),
    "forks-away": Story("MScF", (Code.FORKED_AWAY,)),
    "slow": Story(UP, speed=200.0),
    "start-timeout": Story("MScXB", (Code.START_TIMEOUT, Code.FABRIC_MANAGER_DIED), speed=40.0),
    "without-success-line": Story(UP, (Code.SUCCESS_LINE_UNSEEN,)),
    "older-fm-535": Story(UP),
    "newer-fm-595": Story(UP),
    "switch-lost": Story(UP + "D", (Code.SWITCH_LOST,)),
    "switch-returned": Story(UP + "D", (Code.SWITCH_LOST, Code.SWITCH_UNCONFIGURED)),
    "switch-silent": Story(UP + "D", (Code.SWITCH_NOT_RESPONDING,)),
    "crash-after-configured": Story(UP + "BScC", (Code.FABRIC_MANAGER_DIED, Code.GUEST_RESTART_REQUIRED)),
    "crash-on-bare-metal": Story(UP + "BScC", (Code.FABRIC_MANAGER_DIED, Code.REGISTRATIONS_LOST)),
    "guest-before-fabric": Story(UP, (Code.GUEST_RESTART_REQUIRED,)),
    "guest-power-cycled": Story(UP, (Code.GUEST_RESTART_REQUIRED,)),
    "restart-when-no-guests": Story(UP + "BFBScC", (Code.FABRIC_MANAGER_DIED, Code.RESTART_WITHHELD)),
    "resiliency": Story(UP + "BScC", (Code.FABRIC_MANAGER_DIED, Code.PARTITIONS_AWAITED)),
    "resiliency-untold": Story(UP + "BScCB", (Code.FABRIC_MANAGER_DIED, Code.PARTITIONS_AWAITED)),
    "crash-loop": Story("M" + "ScB" * 5, (Code.FABRIC_MANAGER_DIED, Code.CRASH_LOOP)),
    "hang": Story(UP + "D", (Code.FABRIC_MANAGER_HUNG,)),
    "hang-restart": Story(
        UP + "DXBScC", (Code.FABRIC_MANAGER_HUNG, Code.FABRIC_MANAGER_DIED, Code.GUEST_RESTART_REQUIRED)
    ),
    "ignores-sigterm": Story(
        UP + "DXBScC",
        (Code.FABRIC_MANAGER_HUNG, Code.FABRIC_MANAGER_DIED, Code.STOP_ESCALATED, Code.GUEST_RESTART_REQUIRED),
    ),
    "manager-error": Story(UP + "D", (Code.MANAGER_ERROR,)),
    "sxid-burst": Story(UP),
    "sxid-fatal": Story(UP + "D", (Code.SXID_FATAL,)),
    "sxid-kernel-only": Story(UP + "F", (Code.FABRIC_MANAGER_DIED, Code.RESTART_WITHHELD, Code.SXID_FATAL)),
    "kernel-log-overrun": Story(UP + "D", (Code.KERNEL_LOG_OVERRUN, Code.SXID_FATAL)),
    "interrupt-storm": Story(UP + "D", (Code.INTERRUPT_STORM,)),
    "stale-handles": Story(UP + "D", (Code.STALE_HANDLES,)),
    "reset-needed": Story(UP + "D", (Code.GPU_RESET_NEEDED,)),
    "log-rotated": Story(UP + "D", (Code.SXID_FATAL,)),
    "log-truncated": Story(UP + "D", (Code.SXID_FATAL,)),
    "log-silent-full": Story(UP, (Code.LOG_FULL,)),
    "gpu-taken": Story(UP, (Code.GPU_TAKEN,)),
    "event-flood": Story(UP + "D", (Code.SWITCH_LOST,)),
    "module-refused-enoexec-vermagic": Story("MF", (Code.MODULE_VERMAGIC,)),
    "module-refused-enoexec-modversions": Story("MF", (Code.MODULE_SYMBOL_VERSIONS,)),
    "module-refused-enoexec-damaged": Story("MF", (Code.MODULE_DAMAGED,)),
    "module-refused-einval": Story("MF", (Code.MODULE_SYMBOL_VERSIONS,)),
    "module-refused-enoent": Story("MF", (Code.MODULE_UNKNOWN_SYMBOL,)),
    "module-refused-ekeyrejected": Story("MF", (Code.MODULE_SIGNATURE_REJECTED,)),
    "module-refused-ekeyrejected-unsigned": Story("MF", (Code.MODULE_SIGNATURE_REJECTED,)),
    "module-refused-eperm-lockdown": Story("MF", (Code.MODULE_LOCKDOWN,)),
    "module-refused-eperm": Story("MF", (Code.MODULE_LOADING_FORBIDDEN,)),
    "module-refused-eperm-blacklist": Story("MF", (Code.MODULE_BLACKLISTED,)),
    "module-refused-enodev": Story("MF", (Code.MODULE_NO_DEVICE,)),
    "module-refused-enodev-owned": Story("MF", (Code.MODULE_NO_DEVICE,)),
    "module-refused-eio": Story("MF", (Code.MODULE_INIT_FAILED,)),
    "module-refused-ebadmsg": Story("MF", (Code.MODULE_DAMAGED,)),
    "module-refused-enodata": Story("MF", (Code.MODULE_DAMAGED,)),
    "module-refused-ebusy": Story("M", (Code.MODULE_LOAD_BUSY,)),
    "module-refused-enomem": Story("M", (Code.MODULE_LOAD_BUSY,)),
}


def test_every_scenario_has_a_story() -> None:
    assert STORIES.keys() == SCENARIOS.keys()


@pytest.mark.parametrize("name", STORIES)
def test_scenario(name: str, tmp_path: Path) -> None:
    story = STORIES[name]
    outcome = run(name, tmp_path / "host", story.speed)
    check_states(outcome, story)
    check_conditions(outcome, story)
    check_metrics(outcome)
    check_log(outcome)
    check_end(outcome)
    extra = globals().get(f"check_{name.replace('-', '_')}")
    if extra is not None:
        extra(outcome)


def check_states(outcome: Outcome, story: Story) -> None:
    """The whole way, and after the end state nothing but the stop (or the next round of a loop)."""
    seen = "".join({name: letter for letter, name in LETTERS.items()}[state] for state in outcome.states)
    # At this speed "configuring" lasts 50 ms; a busy machine may read the whole log at once.
    way = re.match(story.states.replace("c", "c?"), seen)
    assert way is not None, f"{seen} instead of {story.states}"
    assert seen.endswith("X")
    rest = seen[way.end() : -1]
    assert rest == "" or story.states[-1] == "B", f"went on with {rest}"


def check_conditions(outcome: Outcome, story: Story) -> None:
    raised = outcome.conditions_raised
    assert sorted(raised) == sorted(story.conditions)
    for row in outcome.document["conditions"]:
        assert row["remedy"] == REGISTRY[Code(row["code"])].remedy
        assert row["code"] in outcome.status_text
        assert row["remedy"] in outcome.status_text


def check_metrics(outcome: Outcome) -> None:
    """The metrics tell the same as the status document."""
    for state in FabricState:
        assert outcome.metric("fabricmanager_state", state=state) == (outcome.document["state"] == state)
    active = {row["code"] for row in outcome.document["conditions"]}
    for code, condition in REGISTRY.items():
        value = outcome.metric("fmsupervisor_condition_active", code=code, severity=condition.severity)
        assert value == (code in active), code
    manager = outcome.document["fabric_manager"]
    assert outcome.metric("fabricmanager_up") == (manager["pid"] is not None)
    assert (outcome.metric("fabricmanager_starts_total") or 0) >= manager["starts"]
    for exit_class, count in manager["exits"].items():
        assert (outcome.metric("fabricmanager_exits_total", **{"class": exit_class}) or 0) >= count
    assert "_created" not in outcome.metrics


def check_log(outcome: Outcome) -> None:
    """Every state change says why; every condition carries its own MESSAGE_ID; FM's lines carry pid and session."""
    for line in outcome.log:
        assert line["message_id"]
        if line["event"] == "state-changed":
            assert line["reason"]
        if line["event"] == "condition-raised":
            assert line["message_id"] == REGISTRY[Code(line["condition"])].message_id
    sessions = [line["session"] for line in outcome.log if line["event"] == "fm-started"]
    assert len(set(sessions)) == len(sessions)
    assert all(re.fullmatch(r"\d{8}T\d{6}Z-\d+", session) for session in sessions)
    assert len(sessions) == len([line for line in outcome.log if line["event"] == "fm-exited"])
    # What a detached process writes after its session has ended belongs to none.
    orphaned = sessions[-1] if outcome.scenario.name == "forks-away" else None
    for line in outcome.log:
        if line["event"] == "fm-line":
            assert line.get("session", orphaned) in sessions


def check_end(outcome: Outcome) -> None:
    assert outcome.status_exit == (0 if outcome.document["state"] == "configured" else 1)
    assert outcome.exit_status == 0
    assert outcome.left_behind == []
    hidden = [path for path in outcome.directory.rglob(".*") if path.is_file() and ".simulator" not in path.parts]
    assert hidden == [], "temporary files"


# --- what is special about some


def check_healthy(outcome: Outcome) -> None:
    for bus_id in SWITCHES:
        assert outcome.metric("nvswitch_driver_state", pci_bus_id=bus_id, state="CONFIGURED") == 1
        assert outcome.metric("nvswitch_driver_state", pci_bus_id=bus_id, state="STANDBY") == 0
    assert outcome.metric("fabricmanager_gpus_registered") == len(GPUS)
    assert {row["module_id"] for row in outcome.document["gpus"]} == set(range(1, 9))
    assert outcome.metric("fabricmanager_configure_duration_seconds") is not None
    dev = outcome.directory / "dev"
    names = {path.name for path in dev.iterdir()}
    assert names >= {"nvidia-nvswitchctl", "nvidia-nvswitch0", "nvidia-nvswitch3", "nvidia-nvlink", "nvidiactl"}
    rendered = (outcome.directory / "usr/local/nvidia/fm.cfg").read_text()
    assert "DAEMONIZE=0" in rendered
    assert "TOPOLOGY_FILE_PATH=/usr/local/nvidia/usr/share/nvidia/nvswitch" in rendered
    loading = next(line for line in outcome.log if line["message"].startswith("loading"))
    assert "nearest older build" in loading["message"]


def check_no_switch(outcome: Outcome) -> None:
    assert outcome.document["conditions"] == []
    assert [line["level"] for line in outcome.log] == ["info"] * len(outcome.log)
    assert not (outcome.directory / "sys/module/nvidia").exists(), "nvidia.ko was loaded"


def check_version_mismatch(outcome: Outcome) -> None:
    detail = outcome.document["conditions"][0]["detail"]
    assert "580.126.09" in detail
    assert "580.159.03" in detail


def check_switch_missing(outcome: Outcome) -> None:
    assert outcome.metric("nvswitches_expected") == 4
    assert outcome.metric("nvswitches_present") == 3
    assert "3 of 4" in outcome.document["reason"]


def check_switch_lost(outcome: Outcome) -> None:
    assert outcome.metric("nvswitches_present") == 3
    assert outcome.metric("nvswitch_driver_state", pci_bus_id=SWITCHES[3], state="CONFIGURED") is None


def check_bad_config(outcome: Outcome) -> None:
    last = outcome.document["fabric_manager"]["last_exit"]
    assert last["class"] == "terminal"
    assert last["status"] == 1
    assert "invalid value" in last["reason"]
    assert "waits for a change of" in outcome.document["reason"]
    assert outcome.metric("fabricmanager_last_exit_info", **{"class": "terminal", "status": "1", "signal": ""}) == 1


def check_bad_config_exit_zero(outcome: Outcome) -> None:
    assert outcome.document["fabric_manager"]["last_exit"]["status"] == 0


def check_gpu_would_be_taken(outcome: Outcome) -> None:
    assert GPUS[3] in outcome.document["conditions"][0]["detail"]
    assert not (outcome.directory / "sys/module/nvidia").exists(), "nvidia.ko was loaded"


def check_no_register(outcome: Outcome) -> None:
    assert outcome.metric("fabric_gpu_info", pci_bus_id=GPUS[3], driver="", module_id="")
    driver = next(row["driver"] for row in outcome.document["gpus"] if row["pci_bus_id"] == GPUS[3])
    assert driver is None


def check_foreign_fm(outcome: Outcome) -> None:
    detail = outcome.document["conditions"][0]["detail"]
    assert "4711" in detail
    assert "nvidia-fabricmanager.service" in detail


def check_crash_after_configured(outcome: Outcome) -> None:
    rows = [row for row in outcome.document["conditions"] if row["code"] == Code.GUEST_RESTART_REQUIRED]
    rows.sort(key=lambda row: row["subject"])
    assert ["default_vm1" in row["detail"] for row in rows] == [True, False]
    assert [[bus_id for bus_id in GPUS if bus_id in row["detail"]] for row in rows] == [list(GPUS[:4]), list(GPUS[4:])]
    assert outcome.document["fabric_manager"]["last_exit"]["signal"] == 9
    assert outcome.metric("fabricmanager_gpu_registrations_lost") == len(GPUS)
    check_guests_to_restart(outcome, *GPUS)


def check_guests_to_restart(outcome: Outcome, *gpus: str) -> None:
    """Exactly the guests of these GPUs, for all audiences."""
    for row in outcome.document["gpus"]:
        bus_id = row["pci_bus_id"]
        assert row["guest_restart_required"] == (bus_id in gpus)
        assert outcome.metric("fmsupervisor_guest_restart_required", pci_bus_id=bus_id) == (bus_id in gpus)
    for guest in outcome.document["guests"]:
        assert guest["name"] in outcome.status_text
        assert guest["restart_required"] == (guest["gpus"][0] in gpus)


def check_crash_on_bare_metal(outcome: Outcome) -> None:
    lost = next(row for row in outcome.document["conditions"] if row["code"] == Code.REGISTRATIONS_LOST)
    for bus_id in GPUS:
        assert bus_id in lost["detail"]
        assert outcome.metric("fmsupervisor_gpu_reset_required", pci_bus_id=bus_id) == 1
    assert "reset the GPU" in outcome.status_text


def check_guest_before_fabric(outcome: Outcome) -> None:
    check_guests_to_restart(outcome, *GPUS[:4])


def check_guest_power_cycled(outcome: Outcome) -> None:
    check_guests_to_restart(outcome)
    assert len(outcome.document["guests"]) == 1
    cleared = [line["condition"] for line in outcome.log if line["event"] == "condition-cleared"]
    assert cleared == [Code.GUEST_RESTART_REQUIRED]


def check_restart_when_no_guests(outcome: Outcome) -> None:
    withheld = next(line for line in outcome.log if line.get("condition") == Code.RESTART_WITHHELD)
    assert "default_vm1" in withheld["message"]
    assert "default_vm2" in withheld["message"]
    assert outcome.document["guests"] == []


def check_resiliency(outcome: Outcome) -> None:
    assert outcome.document["fabric_manager"]["resilient"] is True
    assert outcome.document["fabric_manager"]["partitions_told_at"] is not None


def check_resiliency_untold(outcome: Outcome) -> None:
    assert "not told the active partitions" in outcome.document["fabric_manager"]["last_exit"]["reason"]


def check_crash_loop(outcome: Outcome) -> None:
    pauses = [line for line in outcome.log if line["event"] == "state-changed" and line["state"] == "backoff"]
    assert len(pauses) >= 5
    assert outcome.document["fabric_manager"]["failures_in_a_row"] >= 5


def check_ignores_sigterm(outcome: Outcome) -> None:
    assert outcome.document["fabric_manager"]["last_exit"]["signal"] == 9


def check_sxid_burst(outcome: Outcome) -> None:
    total = sum(
        outcome.metric("nvswitch_sxid_total", pci_bus_id=bus_id, sxid="12028", severity="non-fatal") or 0
        for bus_id in SWITCHES
    )
    assert total == 9, "doubled lines are counted once"
    assert [row["last_hour"] for row in outcome.document["links"]] == [1] * 9
    assert outcome.metric("nvswitch_link_sxids_last_hour", pci_bus_id=SWITCHES[3], port="61") == 1
    relayed = [line for line in outcome.log if line.get("sxid") == "12028"]
    assert relayed
    assert all(line["pci_bus_id"] in SWITCHES and line["level"] == "error" for line in relayed)


def check_sxid_fatal(outcome: Outcome) -> None:
    assert outcome.metric("nvswitch_sxid_total", pci_bus_id=SWITCHES[3], sxid="20034", severity="fatal") == 1


def check_sxid_kernel_only(outcome: Outcome) -> None:
    check_sxid_fatal(outcome)
    (line,) = [line for line in outcome.log if line["event"] == "kernel-line" and "sxid" in line]
    assert (line["pci_bus_id"], line["sxid"], line["nvlink_port"]) == (SWITCHES[3], "20034", "33")
    assert len(line["details"]) == 2, "three lines of the kernel are one entry"


def check_kernel_log_overrun(outcome: Outcome) -> None:
    check_sxid_fatal(outcome)
    assert (outcome.metric("fmsupervisor_kernel_log_lost_total") or 0) > 1000


def check_interrupt_storm(outcome: Outcome) -> None:
    assert outcome.document["conditions"][0]["subject"] == SWITCHES[3]


def check_hang(outcome: Outcome) -> None:
    states = {row["driver_state"] for row in outcome.document["switches"]}
    assert states == {"MANAGER_TIMEOUT"}
    assert outcome.document["fabric_manager"]["pid"] is not None, "report only: it must not be restarted"


def check_log_silent_full(outcome: Outcome) -> None:
    size = outcome.metric("fabricmanager_log_size_bytes")
    assert size is not None
    assert size >= 1 << 20


def check_gpu_taken(outcome: Outcome) -> None:
    row = next(row for row in outcome.document["conditions"] if row["code"] == Code.GPU_TAKEN)
    assert row["subject"] == GPUS[0]

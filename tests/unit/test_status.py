"""The status document and how people see it. ``RENEW_GOLDEN=1 pytest`` rewrites the golden file; read the diff."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fmsupervisor import __version__
from fmsupervisor.conditions import REGISTRY, Code
from fmsupervisor.core.state import Counters, Exit, ExitClass, Run, State
from fmsupervisor.core.verdict import FabricState, Verdict
from fmsupervisor.facts import (
    DeviceState,
    DriverState,
    DriverView,
    ExitStatus,
    Guest,
    Host,
    Installation,
    LoadedModule,
    ModuleChoice,
    Moment,
    NodeResult,
    PciFunction,
    Problem,
    RenderedConfig,
    SwitchDevice,
    SwitchErrorKey,
    Unknown,
    WantedNode,
)
from fmsupervisor.report.reporter import status_sentence
from fmsupervisor.report.status import status_document
from fmsupervisor.report.status_text import render_text
from fmsupervisor.settings import Settings

GOLDEN = Path(__file__).parents[1] / "golden" / "status.txt"
WALL = 1_790_000_000.0
SWITCHES = ("0000:05:00.0", "0000:06:00.0")
GPUS = ("0000:18:00.0", "0000:2a:00.0", "0000:3a:00.0")


def begun() -> State:
    """Nothing is known yet."""
    return State(Settings(), Moment(1000.0, WALL), Moment(1030.0, WALL + 30))


def host(*switches: str, module: LoadedModule | Unknown | None = None, driver: str | None = "nvidia-nvswitch") -> Host:
    return Host(
        kernel_release="6.4.0-150600.23.47-default",
        switches=tuple(PciFunction(bus_id, "10de:22a3", driver) for bus_id in switches),
        gpus=tuple(PciFunction(bus_id, "10de:2335", "vfio-pci" if bus_id != GPUS[2] else None) for bus_id in GPUS),
        nvlink5_bridges=(),
        module=module,
        probed_switches=switches if module else None,
        majors={"nvidia-nvswitch": 240} if module else {},
        fabric_management_minor=None,
        fabric_management_mode=None,
    )


def running() -> State:
    """A configured fabric, one of the GPUs registered."""
    devices = tuple(
        SwitchDevice(
            minor, f"SWX-{minor}", bus_id, DriverState.CONFIGURED, DeviceState.CONFIGURED, 0, 8 + minor or None
        )
        for minor, bus_id in enumerate(SWITCHES)
    )
    nodes = tuple(WantedNode(f"/dev/nvidia-nvswitch{minor}", 240, minor, 0o666, 0, 0) for minor in (0, 1, 255))
    run = Run(
        "20260921T141310Z-4711",
        4711,
        Moment(1010.0, WALL + 10),
        is_log_seen=True,
        version="570.211.01",
        success=Moment(1019.0, WALL + 19),
        configured=Moment(1019.5, WALL + 19.5),
        registered={"GPU-a": GPUS[0]},
    )
    return replace(
        begun(),
        host=host(*SWITCHES, module=LoadedModule("live", "570.211.01")),
        seen_switches=frozenset(SWITCHES),
        working_switches=frozenset(SWITCHES),
        installation=Installation(
            ModuleChoice("/m/nvidia.ko", "6.4.0", "570.211.01", (), ""), "570.211.01", "570.211.01", (), "f", ()
        ),
        is_installation_stale=False,
        driver=DriverView(devices),
        nodes=tuple(NodeResult(node, "kept") for node in nodes),
        nodes_for="something",
        config=RenderedConfig(
            "/usr/local/nvidia/fm.cfg", ("DAEMONIZE: 1 -> 0", "LOG_FILE_NAME: a -> b"), "/f", False, 1
        ),
        run=run,
        module_ids={GPUS[0]: 1, GPUS[1]: 3},
        guests=(Guest(4800, 7, 1005.0, "default_vm1 (pod 0-1)", GPUS[:1]), Guest(4801, 8, 1020.0, "web", GPUS[1:2])),
        guests_looked_at=1020.0,
        counters=Counters(starts=1, log_lines={"INFO": 120, "ERROR": 1}),
    )


def degraded() -> State:
    """The same after a crash, with an SXid and a switch that is gone."""
    before = running()
    killed = Exit(
        "20260921T141300Z-4700",
        4700,
        Moment(1008.0, WALL + 8),
        ExitStatus(signal=11),
        ExitClass.UNEXPECTED,
        "it was ended by signal 11",
        ("last words",),
    )
    return replace(
        before,
        host=host(SWITCHES[0], module=LoadedModule("live", "570.211.01")),
        driver=DriverView((replace(before.driver.devices[0], driver_state=DriverState.MANAGER_TIMEOUT),))
        if isinstance(before.driver, DriverView)
        else None,
        last_exit=killed,
        failures=1,
        guests_to_restart=frozenset({(4800, 7)}),
        guests_unknown="the descriptors of 1 processes cannot be read",
        counters=Counters(
            starts=2,
            exits={ExitClass.UNEXPECTED: 1},
            switch_errors={SwitchErrorKey(SWITCHES[0], 20034, "fatal", 33): 2},
        ),
    )


LOST = Problem(Code.SWITCH_LOST, f"{SWITCHES[1]} is no longer on the bus", SWITCHES[1])
MISMATCH = Problem(Code.VERSION_MISMATCH, "Fabric Manager 580.159.03, driver 570.211.01")

CASES: dict[str, tuple[State, Verdict]] = {
    "at the beginning": (
        begun(),
        Verdict(FabricState.WAITING_FOR_MODULE, "looking at the hardware", False, ()),
    ),
    "without a switch": (
        replace(begun(), host=host()),
        Verdict(FabricState.NOT_APPLICABLE, "this machine has no NVSwitch", True, ()),
    ),
    "module loading": (
        replace(begun(), host=host(*SWITCHES, driver=None), seen_switches=frozenset(SWITCHES), is_loading=True),
        Verdict(FabricState.WAITING_FOR_MODULE, "loading nvidia.ko", False, ()),
    ),
    "configured": (
        running(),
        Verdict(FabricState.CONFIGURED, "2 NVSwitches configured, 1 GPUs registered", True, ()),
    ),
    "degraded": (degraded(), Verdict(FabricState.DEGRADED, f"{LOST.code} an NVSwitch went away", True, (LOST,))),
    "failed": (
        replace(running(), run=None, next_start_at=1042.0),
        Verdict(FabricState.FAILED, f"{MISMATCH.code} versions differ", True, (MISMATCH,)),
    ),
}


def document(name: str) -> dict[str, Any]:
    """The document of a case, with what differs from run to run made the same."""
    state, verdict = CASES[name]
    made = status_document(state, verdict, WALL + 25, {(LOST.code, LOST.subject): WALL + 26})
    assert (made["pid"], made["version"]) == (os.getpid(), __version__)
    return made | {"pid": 1234, "version": "1.2.3"}


def keys_of(value: object, path: str = "") -> set[str]:
    """Every key of a document, as dotted paths."""
    match value:
        case dict():
            return set().union(*({f"{path}{key}"} | keys_of(below, f"{path}{key}.") for key, below in value.items()))
        case list():
            return set().union(*(keys_of(below, path) for below in value))
        case _:
            return set()


def test_people_see_what_the_golden_file_shows() -> None:
    text = "".join(f"--- {name}\n{render_text(document(name))}\n" for name in CASES)
    if os.environ.get("RENEW_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


class TestTheDocument:
    @pytest.mark.parametrize("name", CASES)
    def test_is_json_and_the_same_after_a_journey(self, name: str) -> None:
        made = document(name)
        assert json.loads(json.dumps(made, allow_nan=False)) == made

    @pytest.mark.parametrize("name", CASES)
    def test_has_the_same_top_level_keys_in_every_state(self, name: str) -> None:
        assert set(document(name)) == {
            "schema", "version", "pid", "started_at", "updated_at", "state", "reason", "since", "ready", "decided",
            "session", "steps", "switches", "gpus", "device_nodes", "fabric_manager", "conditions", "counters",
            "kernel_log", "links", "guests", "guests_unknown",
        }  # fmt: skip

    def test_has_these_keys_below(self) -> None:
        made = document("degraded")
        assert set(made["fabric_manager"]) == {
            "pid", "version", "fabric_mode", "session", "started_at", "configured_at", "gpus_registered", "starts",
            "log_file", "failures_in_a_row", "exits", "last_exit", "backoff_seconds", "next_start_at", "config_differences",
            "resilient", "partitions_told_at",
        }  # fmt: skip
        assert keys_of(made["fabric_manager"]["last_exit"]) == {
            "session", "class", "status", "signal", "at", "reason", "last_lines", "configured_at",
        }  # fmt: skip
        assert keys_of(made["switches"]) == {
            "pci_bus_id", "present", "driver", "usable", "minor", "physical_id", "uuid", "driver_state", "device_state",
        }  # fmt: skip
        assert keys_of(made["gpus"]) == {
            "pci_bus_id", "driver", "module_id", "module_id_source", "registered", "registration_lost", "guest",
            "guest_restart_required", "gpu_reset_required",
        }  # fmt: skip
        assert keys_of(made["guests"]) == {"pid", "name", "gpus", "started_at", "restart_required"}
        assert keys_of(made["device_nodes"]) == {"path", "outcome", "detail"}
        assert keys_of(made["steps"]) == {"name", "status", "detail"}
        assert keys_of(made["conditions"]) == {"code", "severity", "title", "detail", "subject", "remedy", "since"}
        assert set(made["counters"]) == {
            "log_lines", "unrecognised", "stale_handles", "switch_errors", "switch_errors_before_start",
        }  # fmt: skip
        assert set(made["kernel_log"]) == {"readable", "problem", "lost"}
        assert keys_of(made["counters"]["switch_errors"]) == {"pci_bus_id", "sxid", "severity", "port", "count"}

    def test_shows_a_switch_that_is_gone(self) -> None:
        gone = document("degraded")["switches"][1]
        assert (gone["pci_bus_id"], gone["present"], gone["driver"], gone["minor"]) == (SWITCHES[1], False, None, None)

    def test_keeps_absent_apart_from_zero(self) -> None:
        made = document("at the beginning")
        assert made["session"] is None
        assert made["fabric_manager"]["pid"] is None
        assert made["fabric_manager"]["last_exit"] is None
        assert made["fabric_manager"]["next_start_at"] is None
        assert document("configured")["switches"][0]["minor"] == 0

    def test_tells_unix_times(self) -> None:
        made = document("failed")
        assert (made["started_at"], made["updated_at"], made["since"]) == (WALL, WALL + 30, WALL + 25)
        assert made["fabric_manager"]["next_start_at"] == WALL + 42
        assert made["fabric_manager"]["backoff_seconds"] == 12.0

    def test_tells_conditions_with_remedy_and_since_when(self) -> None:
        (condition,) = document("degraded")["conditions"]
        assert condition["code"] == LOST.code
        assert condition["remedy"] == REGISTRY[LOST.code].remedy
        assert condition["since"] == WALL + 26

    @pytest.mark.parametrize(
        ("name", "ready", "decided"),
        [("at the beginning", False, False), ("configured", True, True), ("degraded", False, True)],
    )
    def test_is_ready_only_when_the_fabric_is_configured(self, name: str, ready: bool, decided: bool) -> None:
        made = document(name)
        assert (made["ready"], made["decided"]) == (ready, decided)

    def test_has_no_step_that_waits_for_nodes_when_none_are_managed(self) -> None:
        state, verdict = CASES["configured"]
        made = status_document(replace(state, nodes=()), verdict, WALL, {})
        assert {step["name"]: step["status"] for step in made["steps"]}["device-nodes"] == "ok"

    def test_names_the_node_that_could_not_be_made(self) -> None:
        state, verdict = CASES["configured"]
        wrong = replace(state.nodes[1], outcome="refused", detail="a regular file is there")
        made = status_document(replace(state, nodes=(state.nodes[0], wrong)), verdict, WALL, {})
        step = next(step for step in made["steps"] if step["name"] == "device-nodes")
        assert (step["status"], step["detail"]) == ("failed", "/dev/nvidia-nvswitch1: a regular file is there")

    def test_says_unknown_of_a_module_that_cannot_be_looked_at(self) -> None:
        state, verdict = CASES["configured"]
        made = status_document(
            replace(state, host=host(*SWITCHES, module=Unknown("permission denied"))), verdict, WALL, {}
        )
        assert made["steps"][1] == {"name": "module", "status": "unknown", "detail": "permission denied"}

    def test_shows_driver_states_newer_than_this_program_as_numbers(self) -> None:
        state, verdict = CASES["configured"]
        assert isinstance(state.driver, DriverView)
        newer = replace(state.driver.devices[0], driver_state=9, device_state=7)
        made = status_document(replace(state, driver=DriverView((newer,))), verdict, WALL, {})
        assert (made["switches"][0]["driver_state"], made["switches"][0]["device_state"]) == ("9", "7")


class TestTheSentenceForSystemd:
    @pytest.mark.parametrize(
        ("state", "reason", "decided", "problems", "expected"),
        [
            pytest.param("starting", "executed", False, (), "starting: executed", id="undecided"),
            pytest.param("configured", "4 of 4", True, (), "configured: 4 of 4", id="configured"),
            pytest.param("not-applicable", "none", True, (), "not-applicable: none", id="not-applicable"),
            pytest.param("degraded", "FMS-304 x", True, (LOST,), "degraded: FMS-304 x", id="degraded"),
            pytest.param("failed", "FMS-104 x", True, (MISMATCH,), "FAILED FMS-104 x", id="failed-with-code"),
            pytest.param(
                "failed",
                "blocked",
                True,
                (MISMATCH,),
                f"FAILED {MISMATCH.code} failed: blocked",
                id="failed-without-code",
            ),
            pytest.param("backoff", "pausing", True, (), "FAILED backoff: pausing", id="crash-loop"),
            pytest.param(
                "waiting-for-switches", "FMS-301 3 of 4", True, (), "FAILED FMS-301 3 of 4", id="after-the-deadline"
            ),
        ],
    )
    def test_begins_with_failed_and_the_code_when_it_is_decided_and_bad(
        self, state: str, reason: str, decided: bool, problems: tuple[Problem, ...], expected: str
    ) -> None:
        assert status_sentence(Verdict(FabricState(state), reason, decided, problems)) == expected

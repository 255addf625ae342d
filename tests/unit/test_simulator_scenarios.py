"""The table of scenarios is complete and consistent; expectations judge a status document."""

import pytest

from fmsupervisor.conditions import REGISTRY, Code
from fmsupervisor.simulator.expectation import Expectation
from fmsupervisor.simulator.kernel import SimulatedKernel
from fmsupervisor.simulator.scenarios import SCENARIOS, Scenario, Step
from fmsupervisor.simulator.world import World

STATES = {
    "waiting-for-module",
    "waiting-for-switches",
    "starting",
    "configuring",
    "configured",
    "degraded",
    "backoff",
    "failed",
    "not-applicable",
    "stopping",
}
WORLD_ACTIONS = {"tell_fabric_manager", "truncate_log", "switch_error", "start_guest", "end_guest"}


def document(state="configured", codes=(), starts=1, exits=None, registered=8, usable=4, errors=(), last_signal=None):
    return {
        "state": state,
        "reason": "because",
        "conditions": [{"code": code.value} for code in codes],
        "fabric_manager": {
            "starts": starts,
            "exits": exits or {},
            "last_exit": last_signal and {"signal": last_signal},
        },
        "gpus": [{"registered": number < registered} for number in range(8)],
        "switches": [{"usable": number < usable} for number in range(4)],
        "counters": {"switch_errors": [{"sxid": sxid, "count": count} for sxid, count in errors]},
    }


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS.keys())
class TestEveryScenario:
    def test_names_only_known_states_actions_and_codes(self, scenario):
        assert scenario.expectation.states
        assert set(scenario.expectation.states) <= STATES
        assert {*scenario.expectation.active, *scenario.expectation.inactive} <= set(REGISTRY)
        for step in scenario.timeline:
            assert step.action in WORLD_ACTIONS or hasattr(SimulatedKernel, step.action)

    def test_describes_itself(self, scenario):
        assert scenario.summary.endswith((".", "line")) or scenario.load_fault is not None
        assert scenario.expectation.describe()

    def test_can_be_built(self, scenario, tmp_path):
        world = World(scenario, str(tmp_path), speed=100.0)
        assert world.root.read_text("/proc/sys/kernel/osrelease") == "6.12.0-160000.28-default\n"

    def test_names_only_settings_that_exist(self, scenario):
        from dataclasses import fields

        from fmsupervisor.settings import Settings

        settings = Settings()
        for table, keys in scenario.settings_at(1.0).items():
            assert set(keys) <= {field.name for field in fields(getattr(settings, table))}


def test_the_required_scenarios_are_there():
    required = """healthy no-switch switch-missing late-switches switch-lost version-mismatch bad-config
    bad-config-exit-zero topology-mismatch crash-after-configured crash-loop slow hang ignores-sigterm forks-away
    sxid-burst sxid-fatal log-rotated log-truncated log-silent-full stale-handles gpu-taken foreign-fm
    gpu-would-be-taken no-register library-missing nvlink5 node-conflict insecure-binary switch-returned start-anyway
    older-fm-535 newer-fm-595 nothing-to-do reload-needed"""
    assert set(required.split()) <= SCENARIOS.keys()


@pytest.mark.parametrize(
    ("speed", "start_timeout", "stop_timeout"), [(1.0, 180.0, 10.0), (100.0, 500.0, 50.0)], ids=["real-time", "fast"]
)
def test_deadlines_of_real_processes_have_floors_in_real_seconds(speed, start_timeout, stop_timeout):
    settings = SCENARIOS["switch-missing"].settings_at(speed)
    assert settings["switches"] == {"deadline_seconds": 10.0, "expected": 4}
    assert settings["fabric_manager"]["start_timeout_seconds"] == start_timeout
    assert settings["fabric_manager"]["stop_timeout_seconds"] == stop_timeout


class TestExpectation:
    @pytest.mark.parametrize(
        ("expectation", "given", "is_met"),
        [
            (Expectation(("configured",)), document(), True),
            (Expectation(("configured",)), document("degraded"), False),
            (Expectation(("configured",), active=(Code.GPU_TAKEN,)), document(), False),
            (Expectation(("configured",), active=(Code.GPU_TAKEN,)), document(codes=(Code.GPU_TAKEN,)), True),
            (Expectation(("configured",), inactive=(Code.GPU_TAKEN,)), document(codes=(Code.GPU_TAKEN,)), False),
            (Expectation(("configured",), starts=2), document(starts=1), False),
            (Expectation(("configured",), most_starts=1), document(starts=2), False),
            (Expectation(("configured",), exits={"unexpected": 1}), document(exits={"unexpected": 2}), True),
            (Expectation(("configured",), exits={"unexpected": 1}), document(), False),
            (Expectation(("configured",), last_signal=9), document(last_signal=9), True),
            (Expectation(("configured",), last_signal=9), document(last_signal=15), False),
            (Expectation(("configured",), last_signal=9), document(), False),
            (Expectation(("configured",), gpus_registered=8), document(registered=7), False),
            (Expectation(("configured",), switches_usable=4), document(usable=3), False),
            (Expectation(("configured",), switch_errors={12028: 2}), document(errors=((12028, 1), (12028, 1))), True),
            (Expectation(("configured",), switch_errors={12028: 2}), document(errors=((12028, 4),)), False),
        ],
    )
    def test_is_met_when_everything_is_as_said(self, expectation, given, is_met):
        assert expectation.met(given) is is_met

    @pytest.mark.parametrize(
        ("expectation", "given", "is_impossible"),
        [
            (Expectation(("configured",)), document("failed"), True),
            (Expectation(("configured",)), document("not-applicable"), True),
            (Expectation(("configured",)), document("backoff"), False),
            (Expectation(("configured",), passes_through=("failed",)), document("failed"), False),
            (Expectation(("failed",)), document("failed"), False),
            (Expectation(("failed",), most_starts=0), document(starts=1), True),
            (Expectation(("configured",), switch_errors={12028: 2}), document(errors=((12028, 4),)), True),
        ],
    )
    def test_says_when_it_cannot_be_met_any_more(self, expectation, given, is_impossible):
        assert (expectation.impossible(given) is not None) is is_impossible


class TestWorld:
    def make(self, directory, *timeline: Step) -> World:
        return World(Scenario("x", "", Expectation(("configured",)), timeline=timeline), str(directory), speed=10.0)

    def test_plays_steps_after_start_and_after_configured(self, tmp_path):
        world = self.make(
            tmp_path,
            Step(5.0, "add_switch", ("0000:87:00.0",), after="start"),
            Step(10.0, "remove_switch", ("0000:83:00.0",)),
        )
        devices = "/sys/bus/pci/devices"
        assert world.advance(0.0, document("starting")) == pytest.approx(0.5)
        world.advance(0.5, document("starting"))
        assert world.root.is_directory(f"{devices}/0000:87:00.0")
        assert not world.is_over
        assert world.outcome(document()) is None
        assert world.advance(2.0, document("configured")) == pytest.approx(1.0)
        assert world.advance(3.0, document("configured")) is None
        assert not world.root.is_directory(f"{devices}/0000:83:00.0")
        assert world.is_over
        assert world.outcome(document()) is True

    def test_waits_with_a_command_until_fabric_manager_listens(self, tmp_path):
        world = self.make(tmp_path, Step(0.0, "tell_fabric_manager", ("hang",)))
        assert world.advance(1.0, document()) is not None
        assert not world.is_over

    def test_gives_up_early_when_the_end_cannot_come(self, tmp_path):
        world = self.make(tmp_path, Step(10.0, "remove_switch", ("0000:83:00.0",)))
        outcome = world.outcome(document("failed"))
        assert isinstance(outcome, str)
        assert "failed" in outcome

"""The metrics: what each state looks like to Prometheus."""

import os
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import openmetrics
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import parser  # noqa: F401 - makes openmetrics.parser
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.samples import Sample

from fmsupervisor import __version__, sxid
from fmsupervisor.conditions import REGISTRY, Code
from fmsupervisor.core.state import Counters, Exit, ExitClass, Run, State
from fmsupervisor.core.verdict import FabricState, Verdict, verdict
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
    PciFunction,
    Problem,
    SwitchDevice,
    SwitchErrorKey,
    Unknown,
)
from fmsupervisor.report.metrics import JOURNAL_DROPPED, FabricCollector, Snapshot
from fmsupervisor.report.metrics_table import METRICS, Kind, render_reference
from fmsupervisor.settings import Settings

REPOSITORY = Path(__file__).parents[2]
PROMTOOL = Path("/usr/bin/promtool")
SWITCHES = tuple(f"0000:{bus:02x}:00.0" for bus in (0x05, 0x06, 0x07, 0x08))
GPUS = tuple(f"0000:{bus:02x}:00.0" for bus in (0x18, 0x2A, 0x3A, 0x5D, 0x9A, 0xAB, 0xBA, 0xDB))


def bare() -> State:
    """Just begun, nothing looked at."""
    return State(Settings(), Moment(100.0, 1_700_000_000.0), Moment(160.5, 1_700_000_060.5))


def host() -> Host:
    return Host(
        kernel_release="6.4.0-150600.23.47-default",
        switches=tuple(PciFunction(bus_id, "10de:22a3", "nvidia-nvswitch") for bus_id in SWITCHES),
        gpus=tuple(PciFunction(bus_id, "10de:2335", "vfio-pci" if bus_id != GPUS[7] else None) for bus_id in GPUS),
        nvlink5_bridges=(),
        module=LoadedModule("live", "570.211.01"),
        probed_switches=SWITCHES,
        majors={},
        fabric_management_minor=None,
        fabric_management_mode=None,
    )


def device(index: int, state: DriverState | int = DriverState.CONFIGURED) -> SwitchDevice:
    physical_id = 8 + index if index else None
    return SwitchDevice(index, f"SWX-{index}", SWITCHES[index], state, DeviceState.CONFIGURED, 0, physical_id)


def rich() -> State:
    """Everything that can be known, and something wrong."""
    return replace(
        bare(),
        host=host(),
        seen_switches=frozenset(SWITCHES),
        working_switches=frozenset(SWITCHES),
        installation=Installation(
            ModuleChoice("/m/nvidia.ko.zst", "6.4.0", "570.211.01", (), ""), "570.211.01", "570.211.01", (), "", ()
        ),
        driver=DriverView((device(0), device(1), device(2, DriverState.MANAGER_TIMEOUT), device(3, 9))),
        run=Run(
            "1700000030-4711",
            4711,
            Moment(130.0, 1_700_000_030.0),
            version="570.211.01",
            success=Moment(139.0, 1_700_000_039.0),
            configured=Moment(139.5, 1_700_000_039.5),
            registered={"GPU-a": GPUS[0], "GPU-b": GPUS[1]},
        ),
        last_exit=Exit(
            "s", 4700, Moment(125.0, 1_700_000_025.0), ExitStatus(signal=11), ExitClass.UNEXPECTED, "signal 11", ()
        ),
        failures=1,
        lost_registrations=frozenset({"GPU-c"}),
        module_ids={GPUS[0]: 1, GPUS[1]: 3},
        log_size_bytes=123_456,
        counters=Counters(
            starts=2,
            exits={ExitClass.UNEXPECTED: 1},
            log_lines={"INFO": 2_000_000, "ERROR": 3, "": 4, "TRACE": 2},
            log_unrecognised=5,
            switch_errors={
                SwitchErrorKey(SWITCHES[0], 12028, "non-fatal", 3): 2,
                SwitchErrorKey(SWITCHES[0], 12028, "non-fatal", 4): 5,
                SwitchErrorKey(SWITCHES[1], 11012, "fatal", 60): 1,
                SwitchErrorKey(SWITCHES[1], 99999, "fatal", None): 7,
                SwitchErrorKey("0000:ff:00.0", 12028, "fatal", None): 1,
            },
            switch_errors_before_start={SwitchErrorKey(SWITCHES[2], 20034, "fatal", 33): 4},
            kernel_lost=8,
            stale_handles=6,
        ),
        guests=(
            Guest(4800, 7, 90.0, "default_vm1", GPUS[:2]),
            Guest(4801, 8, 150.0, "default_vm2", GPUS[2:3]),
        ),
        guests_to_restart=frozenset({(4800, 7)}),
        guests_looked_at=150.0,
        is_kernel_log_read=True,
        link_errors={(SWITCHES[0], 4): {0: 2, -100: 3}},
        link_faults={(SWITCHES[1], 60): {0: 1}},
    )


def collector(state: State, **extra: float) -> FabricCollector:
    snapshot = Snapshot(state, verdict(state), extra)
    return FabricCollector(lambda: snapshot)


def samples(state: State) -> list[Sample]:
    return [sample for family in collector(state).collect() for sample in family.samples]


def values(state: State, name: str) -> dict[tuple[str, ...], float]:
    """Value by label values, of one metric."""
    return {tuple(sample.labels.values()): sample.value for sample in samples(state) if sample.name == name}


def check_golden(path: Path, actual: str) -> None:
    if os.environ.get("RENEW_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(actual)
    assert path.read_text() == actual, "read the difference; renew with RENEW_GOLDEN=1"


class TestWholeOutput:
    def test_is_the_golden_text(self) -> None:
        text = generate_latest(collector(rich(), **{JOURNAL_DROPPED: 8})).decode()
        check_golden(REPOSITORY / "tests/golden/metrics.txt", text.replace(f'"{__version__}"', '"VERSION"'))

    def test_reference_is_current(self) -> None:
        check_golden(REPOSITORY / "docs/metrics.md", render_reference())

    def test_readings_of_every_metric_have_its_labels(self) -> None:
        paused = replace(rich(), run=None, next_start_at=163.5, backoff_seconds=4.0)
        seen = {}
        for sample in (*samples(rich()), *samples(paused)):
            seen[sample.name] = tuple(sample.labels)
        assert seen == {metric.name: metric.labels for metric in METRICS.values()}

    @pytest.mark.parametrize("state", [bare(), rich()], ids=["bare", "rich"])
    def test_no_series_appears_twice(self, state: State) -> None:
        found = Counter((sample.name, *sorted(sample.labels.items())) for sample in samples(state))
        assert [key for key, count in found.items() if count > 1] == []

    @pytest.mark.skipif(not PROMTOOL.exists(), reason="promtool is not installed")
    @pytest.mark.parametrize("state", [bare(), rich()], ids=["bare", "rich"])
    def test_promtool_is_silent(self, state: State) -> None:
        text = generate_latest(collector(state))
        done = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")

    @pytest.mark.parametrize("state", [bare(), rich()], ids=["bare", "rich"])
    def test_is_valid_openmetrics_without_created_series(self, state: State) -> None:
        text = generate_openmetrics(collector(state)).decode()
        families = list(openmetrics.parser.text_string_to_metric_families(text))
        assert len(families) == len({sample.name for sample in samples(state)})
        assert "_created" not in text

    def test_before_the_first_state_only_the_version_is_known(self) -> None:
        families = list(FabricCollector(lambda: None).collect())
        assert [family.name for family in families] == ["fmsupervisor_build"]


class TestKnownSets:
    def test_every_condition_is_there_and_the_active_ones_are_1(self) -> None:
        state = rich()
        found = values(state, "fmsupervisor_condition_active")
        assert set(found) == {(code, condition.severity) for code, condition in REGISTRY.items()}
        active = {problem.code for problem in verdict(state).problems}
        assert {code for (code, _), value in found.items() if value} == active
        assert Code.GUEST_RESTART_REQUIRED in active

    @pytest.mark.parametrize("present", list(FabricState))
    def test_exactly_one_fabric_state_is_1(self, present: FabricState) -> None:
        made = FabricCollector(lambda: Snapshot(bare(), Verdict(present, "", False, ()))).collect()
        states = {
            sample.labels["state"]: sample.value
            for family in made
            for sample in family.samples
            if sample.name == "fabricmanager_state"
        }
        assert states == {state: float(state is present) for state in FabricState}

    def test_exit_classes_and_log_levels_start_at_0(self) -> None:
        assert values(bare(), "fabricmanager_exits_total") == {(one,): 0 for one in ExitClass}
        levels = values(bare(), "fabricmanager_log_lines_total")
        assert levels == {(level,): 0 for level in ("CRITICAL", "ERROR", "WARNING", "INFO", "OTHER")}

    @pytest.mark.parametrize(
        ("says", "label"),
        [*((state, state.name) for state in DriverState), (77, "other")],
        ids=[*(state.name for state in DriverState), "newer than this program"],
    )
    def test_exactly_one_driver_state_is_1(self, says: DriverState | int, label: str) -> None:
        state = replace(rich(), driver=DriverView((device(1, says),)))
        found = values(state, "nvswitch_driver_state")
        assert set(found) == {(SWITCHES[1], name) for name in (*DriverState.__members__, "other")}
        assert [key for key, value in found.items() if value] == [(SWITCHES[1], label)]


class TestUnknown:
    @pytest.mark.parametrize(
        ("state", "absent"),
        [
            (bare(), {"nvswitches_expected", "nvswitches_present", "fabricmanager_gpus_expected", "nvswitches_usable"}),
            (
                replace(rich(), driver=Unknown("refused")),
                {"nvswitches_usable", "nvswitches_configured", "nvswitch_info"},
            ),
            (replace(rich(), driver=None), {"nvswitches_usable", "nvswitches_configured", "nvswitch_driver_state"}),
            (replace(rich(), log_size_bytes=None), {"fabricmanager_log_size_bytes"}),
        ],
        ids=["hardware not seen", "driver cannot be asked", "driver not asked yet", "log not found"],
    )
    def test_what_cannot_be_observed_is_left_out(self, state: State, absent: set[str]) -> None:
        assert absent.isdisjoint({sample.name for sample in samples(state)})

    def test_without_a_loaded_driver_no_switch_is_usable(self) -> None:
        state = replace(rich(), host=replace(host(), module=None), driver=Unknown("no such device"))
        assert values(state, "nvswitches_usable") == values(state, "nvswitches_configured") == {(): 0}


class TestThingsThatAreGone:
    def test_a_removed_switch_takes_its_series_along(self) -> None:
        left = replace(host(), switches=host().switches[:3], probed_switches=SWITCHES[:3])
        state = replace(rich(), host=left)
        assert {bus_id for bus_id, *_ in values(state, "nvswitch_info")} == set(SWITCHES[:3])
        assert values(state, "nvswitches_expected") == {(): 4}
        assert values(state, "nvswitches_present") == {(): 3}

    def test_without_a_process_there_is_no_session(self) -> None:
        state = replace(rich(), run=None)
        names = {sample.name for sample in samples(state)}
        assert "fabricmanager_info" not in names
        assert "fabricmanager_start_timestamp_seconds" not in names
        assert values(state, "fabricmanager_up") == values(state, "fabricmanager_gpus_registered") == {(): 0}


class TestPause:
    def test_shows_the_pause_and_when_it_ends(self) -> None:
        state = replace(rich(), run=None, next_start_at=163.5, backoff_seconds=4.0)
        assert values(state, "fabricmanager_restart_backoff_seconds") == {(): 4.0}
        assert values(state, "fabricmanager_next_start_timestamp_seconds") == {(): 1_700_000_063.5}

    def test_is_0_when_there_is_none(self) -> None:
        assert values(replace(rich(), backoff_seconds=4.0), "fabricmanager_restart_backoff_seconds") == {(): 0}


class TestSwitchErrors:
    def test_ports_are_summed_and_unknown_labels_are_other(self) -> None:
        assert values(rich(), "nvswitch_sxid_total") == {
            (SWITCHES[0], "12028", "non-fatal"): 7,
            (SWITCHES[1], "11012", "fatal"): 1,
            (SWITCHES[1], "other", "fatal"): 7,
            ("other", "12028", "fatal"): 1,
        }

    def test_links_have_a_last_hour_and_a_last_day(self) -> None:
        assert values(rich(), "nvswitch_link_sxids_last_hour") == {(SWITCHES[0], "4"): 2}
        assert values(rich(), "nvswitch_link_sxids_last_day") == {(SWITCHES[0], "4"): 5}

    def test_those_from_before_the_start_are_apart(self) -> None:
        assert values(rich(), "nvswitch_sxids_before_start") == {(SWITCHES[2], "20034", "fatal"): 4}

    @pytest.mark.parametrize(("version", "label"), [("535.161.08", "28006"), ("570.211.01", "other"), (None, "other")])
    def test_a_number_is_known_when_the_loaded_driver_has_it(self, version: str | None, label: str) -> None:
        errors = {SwitchErrorKey(SWITCHES[0], 28006, "non-fatal", 46): 1}
        module = LoadedModule("live", version)
        state = replace(rich(), host=replace(host(), module=module), counters=Counters(switch_errors=errors))
        assert values(state, "nvswitch_sxid_total") == {(SWITCHES[0], label, "non-fatal"): 1}

    def test_correctable_and_untagged_ones_are_not_fatal(self) -> None:
        errors = {SwitchErrorKey(SWITCHES[0], 12028, word, 1): 1 for word in ("correctable", "untagged", "non-fatal")}
        state = replace(rich(), counters=Counters(switch_errors=errors))
        assert values(state, "nvswitch_sxid_total") == {(SWITCHES[0], "12028", "non-fatal"): 3}

    def test_catalogue_has_the_numbers_of_the_driver(self) -> None:
        assert len(sxid.catalogue()) == 420
        assert sxid.catalogue()[12028].symbol == "NVSWITCH_ERR_HW_NPORT_EGRESS_PRIVRSPERR"


class TestRegistrations:
    def test_are_shown_of_each_gpu(self) -> None:
        found = values(rich(), "fabric_gpu_registered")
        assert found == {(bus_id,): float(bus_id in GPUS[:2]) for bus_id in GPUS}

    def test_are_left_out_where_no_gpu_registers(self) -> None:
        lr10 = tuple(replace(switch, device_id="10de:1af1") for switch in host().switches)
        assert values(replace(rich(), host=replace(host(), switches=lr10)), "fabric_gpu_registered") == {}

    def test_gpus_in_guests_are_left_out_while_guests_are_unknown(self) -> None:
        name = "fmsupervisor_gpu_in_guest"
        assert values(rich(), name) == {(bus_id,): float(bus_id in GPUS[:3]) for bus_id in GPUS}
        assert values(replace(rich(), guests_unknown="denied"), name) == {}

    @pytest.mark.parametrize("bus_id", ["", "0000:ff:00.0"], ids=["not told", "of the guest"])
    def test_are_left_out_when_it_is_not_known_whose_they_are(self, bus_id: str) -> None:
        run = rich().run
        assert run is not None
        state = replace(rich(), run=replace(run, registered={"GPU-a": GPUS[0], "GPU-b": bus_id}))
        assert values(state, "fabric_gpu_registered") == {}


class TestKernelLog:
    @pytest.mark.parametrize(
        ("is_read", "problem", "value"),
        [(False, "", None), (True, "", 1), (False, "denied", 0), (True, "denied", 0)],
    )
    def test_is_readable_or_not_or_not_known_yet(self, is_read: bool, problem: str, value: float | None) -> None:
        state = replace(rich(), is_kernel_log_read=is_read, kernel_log_problem=problem)
        assert values(state, "fmsupervisor_kernel_log_readable").get(()) == value


class TestHostileState:
    def test_number_of_series_is_bounded(self) -> None:
        """Twice (switches seen + 1) x (catalogue + 1) x 2 for SXids; all else by the hardware that is there."""
        errors = {
            SwitchErrorKey(f"bus {number % 50}" if number % 3 else SWITCHES[number % 4], number, severity, number): 1
            for number in range(10_000, 30_007)
            for severity in ("fatal", "non-fatal", "nonsense")
        }
        counters = replace(
            rich().counters,
            switch_errors=errors,
            switch_errors_before_start=errors,
            log_lines={f"L{number}": 1 for number in range(1000)},
            exits={f"c{number}": 1 for number in range(1000)},
        )
        state = replace(
            rich(),
            counters=counters,
            service_problems={str(n): Problem(Code.METRICS_UNAVAILABLE, str(n), str(n)) for n in range(1000)},
            module_ids={f"gpu {number}": number for number in range(1000)},
        )
        usual = len(samples(rich())) - len(values(rich(), "nvswitch_sxid_total"))
        bound = 2 * (len(SWITCHES) + 1) * (len(sxid.catalogue()) + 1) * 2
        assert len(samples(state)) <= usual + bound
        assert sum(values(state, "nvswitch_sxid_total").values()) == len(errors)

    def test_label_values_are_short_and_can_be_encoded(self) -> None:
        run = rich().run
        assert run is not None
        state = replace(rich(), run=replace(run, version='\udcff\n"\\' + "x" * 10_000))
        text = generate_openmetrics(collector(state)).decode()
        assert max(map(len, text.splitlines())) < 600
        list(openmetrics.parser.text_string_to_metric_families(text))

    def test_a_part_that_cannot_be_made_does_not_cost_the_scrape(self) -> None:
        state = replace(rich(), counters=replace(rich().counters, switch_errors={"nonsense": 1}))  # type: ignore[dict-item]
        success = values(state, "fmsupervisor_collector_success")
        assert [key for key, value in success.items() if not value] == [("sxids",)]
        assert len(success) == 11
        assert values(state, "nvswitches_present") == {(): 4}


def test_names_follow_the_rules_for_their_types() -> None:
    for name, metric in METRICS.items():
        assert name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert name.endswith("_info") == (metric.kind is Kind.INFO)

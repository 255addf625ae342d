"""core.log_facts: what Fabric Manager writes becomes progress, registrations, failures, faults and counts."""

import pytest
from _builders import GPUS, SWITCHES, after, codes, configured, executed, make_view, ready, record, run_of, said

from fmsupervisor.conditions import Code
from fmsupervisor.core import events
from fmsupervisor.core.diagnosis import problems
from fmsupervisor.core.log_facts import bounded_gpus
from fmsupervisor.facts import ExitStatus, LogKind, LogRecord, SwitchErrorKey

FATAL = SwitchErrorKey(SWITCHES[0], 20034, "fatal", 7)
HARMLESS = SwitchErrorKey(SWITCHES[0], 12028, "non-fatal", None)
CRASH = events.FabricManagerExited(ExitStatus(signal=11), ())


def gpu(kind: LogKind = LogKind.GPU_ADDED, uuid: str = "GPU-1", bus_id: str = GPUS[0], **fields: str) -> LogRecord:
    """A line about a GPU."""
    return record(kind, uuid=uuid, pci_bus_id=bus_id, **fields)


@pytest.mark.parametrize(
    "kind",
    [
        LogKind.SESSION_HEADER,
        LogKind.VERSION,
        LogKind.SETTING,
        LogKind.CONNECTED,
        LogKind.ROUTING_STARTED,
        LogKind.CONFIGURED,
    ],
)
def test_a_line_of_its_start_means_that_its_log_has_begun(kind: LogKind) -> None:
    assert run_of(after(executed(), said(kind))).is_log_seen


@pytest.mark.parametrize("kind", [LogKind.UNRECOGNISED, LogKind.BLANK, LogKind.OTHER_NOTICE, LogKind.LOADER_ERROR])
def test_other_lines_do_not(kind: LogKind) -> None:
    assert not run_of(after(executed(), said(kind))).is_log_seen


def test_the_first_success_line_counts() -> None:
    state = after(executed(), said(LogKind.CONFIGURED))
    assert run_of(after(state, said(LogKind.CONFIGURED), seconds=5)).success == state.now


def test_lines_without_a_fabric_manager_are_counted_and_say_nothing() -> None:
    state = after(ready(), said(LogKind.CONFIGURED, LogKind.STALE_HANDLE, lines_by_level={"INFO": 2}))
    assert (state.run, state.latched, state.counters.log_lines) == (None, {}, {"INFO": 2})


def test_a_gpu_registers_with_its_bus_and_its_module_counted_from_1() -> None:
    state = after(configured(), said(gpu(module_id="0")))
    assert run_of(state).registered == {"GPU-1": GPUS[0]}
    assert (state.gpu_buses, state.module_ids) == ({"GPU-1": GPUS[0]}, {GPUS[0]: 1})


def test_a_probe_teaches_the_bus_but_is_no_registration() -> None:
    state = after(configured(), said(gpu(LogKind.GPU_PROBE, physical_id="3")))
    assert (run_of(state).registered, state.module_ids) == ({}, {GPUS[0]: 4})


@pytest.mark.parametrize("bus_id", ["", "0000:ff:00.0"], ids=["not told", "as the guest sees it"])
def test_a_bus_that_is_not_on_this_host_is_not_learned(bus_id: str) -> None:
    state = after(configured(), said(gpu(bus_id=bus_id, module_id="0")))
    assert (len(run_of(state).registered), state.gpu_buses, state.module_ids) == (1, {}, {})


@pytest.mark.parametrize("module_id", ["x", "-1", ""])
def test_a_module_id_that_is_no_number_is_not_learned(module_id: str) -> None:
    assert after(configured(), said(gpu(module_id=module_id))).module_ids == {}


def test_a_gpu_without_a_name_does_not_register() -> None:
    assert run_of(after(configured(), said(gpu(uuid="")))).registered == {}


def test_a_restart_orphans_registrations_until_each_gpu_registers_again() -> None:
    state = after(configured(), said(gpu(), gpu(uuid="GPU-2", bus_id=GPUS[1])))
    state = after(state, CRASH, events.FabricManagerStarted(2, "second"), seconds=1)
    assert state.lost_registrations == frozenset()
    state = after(state, events.DriverObserved(make_view()), said(LogKind.CONFIGURED))
    assert state.lost_registrations == {"GPU-1", "GPU-2"}
    assert Code.REGISTRATIONS_LOST in codes(problems(state))
    state = after(state, said(gpu()))
    assert state.lost_registrations == {"GPU-2"}
    assert Code.REGISTRATIONS_LOST not in codes(problems(after(state, said(gpu(uuid="GPU-2", bus_id=GPUS[1])))))


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (said(LogKind.STALE_HANDLE), Code.STALE_HANDLES),
        (said(LogKind.GPU_RESET_NEEDED), Code.GPU_RESET_NEEDED),
        (said(switch_errors={FATAL: 2}), Code.SXID_FATAL),
    ],
    ids=lambda value: str(value) if isinstance(value, Code) else "",
)
def test_a_fault_holds_until_a_later_session_has_configured(event: events.Event, code: Code) -> None:
    state = after(configured(), event, said(LogKind.CONFIGURED))
    assert code in codes(problems(state))
    state = after(state, CRASH, events.FabricManagerStarted(2, "second"))
    assert code in codes(problems(state))
    assert code not in codes(problems(after(state, said(LogKind.CONFIGURED))))
    # A fault that the later session reports too is the later session's.
    assert code in codes(problems(after(state, event, said(LogKind.CONFIGURED))))


def test_switch_errors_are_summed_and_only_fatal_ones_are_faults() -> None:
    state = after(configured(), said(switch_errors={FATAL: 2, HARMLESS: 5}), said(switch_errors={HARMLESS: 1}))
    assert state.counters.switch_errors == {FATAL: 2, HARMLESS: 6}
    assert [one.subject for one in problems(state) if one.code == Code.SXID_FATAL] == [SWITCHES[0]]


def test_errors_of_switches_that_do_not_exist_are_counted_together() -> None:
    stranger = SwitchErrorKey("0000:ff:00.0", 20034, "fatal", 7)
    state = after(configured(), said(switch_errors={stranger: 1}))
    assert state.counters.switch_errors == {SwitchErrorKey("other", 20034, "fatal", 7): 1}
    assert [one.subject for one in problems(state) if one.code == Code.SXID_FATAL] == ["other"]


def test_only_the_file_says_whether_it_can_be_followed() -> None:
    state = after(configured(), said(problem="gone", file_size_bytes=7))
    assert (state.log_problem, state.log_size_bytes) == ("gone", 7)
    assert after(state, said(source="stderr")).log_problem == "gone"
    state = after(state, said())
    assert (state.log_problem, state.log_size_bytes) == ("", 7)


def test_too_many_gpus_are_cut_always_in_the_same_way() -> None:
    names = frozenset(f"GPU-{number:04}" for number in range(1000))
    assert bounded_gpus(names) == bounded_gpus(names)
    assert len(bounded_gpus(names)) == 256

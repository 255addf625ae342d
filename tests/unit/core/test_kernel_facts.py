"""core.kernel_facts: what the kernel log says becomes conditions, and ends again."""

import pytest
from _builders import (
    BLIND,
    GPUS,
    SWITCHES,
    after,
    codes,
    configured,
    executed,
    kernel_record,
    kernel_said,
    make_view,
    ready,
    said,
    sxid,
)

from fmsupervisor.conditions import REGISTRY, Code
from fmsupervisor.core import events
from fmsupervisor.core.diagnosis import blocking, problems
from fmsupervisor.core.state import State
from fmsupervisor.core.verdict import FabricState, verdict
from fmsupervisor.facts import ExitStatus, KernelBatch, KernelKind, KernelRecord, LogKind, SwitchErrorKey

BUS = SWITCHES[2]
UNREADABLE = events.KernelLogRead(KernelBatch(problem="cannot read /dev/kmsg: Operation not permitted"))
PROBING = kernel_record(KernelKind.SWITCH_PROBING, pci_bus_id=BUS)
STORM = kernel_record(KernelKind.INTERRUPT_STORM, minor="2")
OLD_STORM = kernel_record(KernelKind.INTERRUPT_STORM, minor="2", is_old=True)
BLACKLISTED = kernel_record(KernelKind.SWITCH_BLACKLISTED, minor="2")
MISMATCH = kernel_record(KernelKind.VERSION_MISMATCH, kernel_version="580.1", user_version="570.1")
HOT = sxid(SwitchErrorKey(BUS, 10004, "untagged", None))
SHUTS_DOWN = sxid(SwitchErrorKey(BUS, 10006, "untagged", None))
COOL = sxid(SwitchErrorKey(BUS, 10005, "untagged", None))
OLD_FATAL = sxid(SwitchErrorKey(BUS, 20034, "fatal", 7), is_old=True)
HARMLESS = sxid(SwitchErrorKey(BUS, 12028, "non-fatal", 7))


def xid(number: int, *, is_old: bool = False) -> KernelRecord:
    """An error of a GPU."""
    return kernel_record(KernelKind.GPU_ERROR, xid=str(number), pci_bus_id=GPUS[1], is_old=is_old)


def found(state: State) -> set[Code]:
    """The codes of the active conditions."""
    return codes(problems(state))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        pytest.param([STORM], {Code.INTERRUPT_STORM}, id="interrupt storm"),
        pytest.param([OLD_STORM], {Code.INTERRUPT_STORM}, id="interrupt storm of before"),
        pytest.param([STORM, PROBING], set(), id="interrupt storm, then a reset"),
        pytest.param([PROBING, STORM], {Code.INTERRUPT_STORM}, id="a reset, then an interrupt storm"),
        pytest.param([MISMATCH], {Code.VERSION_CONFLICT}, id="a program of another version"),
        pytest.param([HOT], {Code.SWITCH_OVERHEATED}, id="hot"),
        pytest.param([SHUTS_DOWN], {Code.SWITCH_OVERHEATED}, id="shutting down"),
        pytest.param([HOT, COOL], set(), id="hot and cool again"),
        pytest.param([OLD_FATAL], {Code.SXID_FATAL_EARLIER}, id="fatal before the start"),
        pytest.param([OLD_FATAL, PROBING], set(), id="fatal before the start, then a reset"),
        pytest.param([xid(79)], {Code.GPU_LOST}, id="Xid 79"),
        pytest.param([xid(79, is_old=True)], set(), id="Xid 79 of before"),
        pytest.param([xid(74)], {Code.GPU_NVLINK_ERROR}, id="an NVLink Xid"),
        pytest.param([xid(45)], set(), id="an Xid of an application"),
        pytest.param([HARMLESS], set(), id="a non-fatal SXid"),
        pytest.param([BLACKLISTED], set(), id="blacklisted, and the driver says otherwise"),
        pytest.param([kernel_record(kind) for kind in (KernelKind.MODULE_LOADED, KernelKind.LOAD_FAILED)], set(), id="loads"),
    ],
)  # fmt: skip
def test_a_line_makes_a_condition(lines: list[KernelRecord], expected: set[Code]) -> None:
    state = after(configured(), kernel_said(*lines))
    assert found(state) == expected
    # Read one by one it comes to the same.
    assert found(after(configured(), *(kernel_said(line) for line in lines))) == expected


def test_a_blacklisting_is_a_condition_when_the_driver_cannot_be_asked() -> None:
    state = after(configured(), kernel_said(BLACKLISTED), events.DriverObserved(BLIND))
    assert found(state) == {Code.SWITCH_BLACKLISTED, Code.DRIVER_UNOBSERVABLE}
    assert found(after(state, events.DriverObserved(make_view()))) == set()


@pytest.mark.parametrize(
    ("state", "lines"),
    [
        pytest.param(configured(), [], id="by the driver"),
        pytest.param(
            ready(driver=None),
            [kernel_record(KernelKind.SWITCH_PROBING, pci_bus_id=BUS), kernel_record(KernelKind.SWITCH_READY, minor="2")],
            id="by its probe",
        ),
        pytest.param(
            ready(driver=None),
            [kernel_record(KernelKind.SWITCH_ERROR, minor="2", pci_bus_id=BUS, sxid="1", severity="non-fatal")],
            id="by an earlier SXid",
        ),
    ],
)  # fmt: skip
def test_a_minor_becomes_a_bus_id(state: State, lines: list[KernelRecord]) -> None:
    state = after(state, kernel_said(*lines), kernel_said(STORM))
    assert [one.subject for one in problems(state) if one.code is Code.INTERRUPT_STORM] == [BUS]


def test_a_minor_of_which_nothing_is_known_keeps_its_name() -> None:
    state = after(ready(driver=None), kernel_said(STORM))
    assert [one.subject for one in problems(state) if one.code is Code.INTERRUPT_STORM] == ["nvidia-nvswitch2"]


def test_a_version_conflict_is_shown_for_an_hour() -> None:
    state = after(configured(), kernel_said(MISMATCH))
    assert found(after(state, seconds=3599)) == {Code.VERSION_CONFLICT}
    assert found(after(state, seconds=3601)) == set()


def test_lost_records_are_counted_and_shown_for_an_hour() -> None:
    state = after(configured(), kernel_said(lost=5), kernel_said(lost=2))
    assert (state.counters.kernel_lost, found(state)) == (7, {Code.KERNEL_LOG_OVERRUN})
    assert found(after(state, seconds=3601)) == set()


def test_an_unreadable_kernel_log_is_a_condition_until_it_can_be_read() -> None:
    state = after(configured(), UNREADABLE)
    assert found(state) == {Code.KERNEL_LOG_UNREADABLE}
    assert found(after(state, kernel_said())) == set()


@pytest.mark.parametrize("event", [UNREADABLE, kernel_said(lost=9)], ids=["unreadable", "overrun"])
def test_not_being_able_to_look_neither_sets_nor_clears_a_fault(event: events.Event) -> None:
    assert verdict(after(configured(), event)).state is FabricState.CONFIGURED
    faulty = after(configured(), kernel_said(STORM, HOT, xid(79)))
    about_observing = {Code.KERNEL_LOG_UNREADABLE, Code.KERNEL_LOG_OVERRUN}
    assert found(after(faulty, event)) - about_observing == found(faulty)
    assert verdict(after(faulty, event)).state is FabricState.DEGRADED


@pytest.mark.parametrize("line", [STORM, HOT, xid(79)], ids=["interrupt storm", "hot", "GPU lost"])
def test_what_breaks_the_fabric_degrades_it(line: KernelRecord) -> None:
    assert verdict(after(configured(), kernel_said(line))).state is FabricState.DEGRADED


@pytest.mark.parametrize("line", [MISMATCH, OLD_FATAL, xid(74), HARMLESS], ids=["version", "before", "NVLink", "SXid"])
def test_what_may_be_harmless_does_not(line: KernelRecord) -> None:
    assert verdict(after(configured(), kernel_said(line))).state is FabricState.CONFIGURED


def test_nothing_of_it_keeps_fabric_manager_from_being_started() -> None:
    state = after(ready(), kernel_said(STORM, HOT, MISMATCH, xid(79), OLD_FATAL, lost=1), UNREADABLE)
    assert blocking(state) is None
    assert not any(REGISTRY[code].blocks_start for code in found(state))


def test_a_lost_gpu_is_told_until_a_later_session_has_configured_the_fabric() -> None:
    crash = events.FabricManagerExited(ExitStatus(signal=9), ())
    state = after(configured(), kernel_said(xid(79)), crash)
    assert Code.GPU_LOST in found(state)
    state = after(state, events.FabricManagerStarted(2, "second"), said(LogKind.SESSION_HEADER, LogKind.CONFIGURED))
    assert Code.GPU_LOST not in found(after(state, events.DriverObserved(make_view())))


def test_memory_is_bounded() -> None:
    state = executed()
    for number in range(2000):
        minor = kernel_record(KernelKind.INTERRUPT_STORM, minor=str(number))
        version = kernel_record(KernelKind.VERSION_MISMATCH, kernel_version="1", user_version=str(number))
        learned = kernel_record(
            KernelKind.SWITCH_ERROR, minor=str(number), pci_bus_id=f"{number:04x}:00:00.0", sxid="1", severity="x"
        )
        state = after(state, kernel_said(minor, version, learned))
    assert len(state.kernel_problems) <= 256
    assert len(state.kernel_minors) <= 256

"""What one supervisor leaves to the next: written, read, and read by a version with other fields."""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any, get_type_hints

import pytest

from fmsupervisor import handover
from fmsupervisor.codec import DecodeError, decode, encode
from fmsupervisor.conditions import Code
from fmsupervisor.core.actions import StopCause
from fmsupervisor.core.state import Aspect, Counters, Exit, ExitClass, Latched, Run, State, Stop
from fmsupervisor.fabric_manager.control import ManagerMemory
from fmsupervisor.fabric_manager.ownership import Identity, ManagerRecord, boot_id
from fmsupervisor.facts import (
    DeviceState,
    DriverState,
    DriverView,
    ExitStatus,
    Moment,
    Problem,
    RenderedConfig,
    SwitchDevice,
    SwitchErrorKey,
    Unknown,
)
from fmsupervisor.handover import Live, ReporterMemory
from fmsupervisor.settings import Settings

NOW = Moment(100.5, 1_700_000_000.25)
SWITCH = "0000:83:00.0"
KEY = SwitchErrorKey(SWITCH, 12028, "fatal", None)
SETTINGS = Settings()
RUN = Run(
    "20261130T100000Z-7",
    7,
    NOW,
    stop=Stop(NOW, StopCause.HANG),
    registered=MappingProxyType({"GPU-1": "0000:1a:00.0"}),
    settings=SETTINGS.fabric_manager,
)
STATE = State(
    settings=SETTINGS,
    begun=NOW,
    now=NOW,
    run=RUN,
    config=RenderedConfig("/fm.cfg", ("A: 1 -> 2",), "/fm.log", can_log_stop=True, log_limit_bytes=1 << 20),
    driver=DriverView((SwitchDevice(0, "SWX-0", SWITCH, DriverState.CONFIGURED, DeviceState.CONFIGURED, 0, None),)),
    last_exit=Exit("s", 6, NOW, ExitStatus(signal=11), ExitClass.UNEXPECTED, "it died", ("a", "b")),
    failures=3,
    latched=MappingProxyType({("FMS-601", SWITCH): Latched(Problem(Code.SXID_FATAL, "x", SWITCH), "s")}),
    lost_registrations=frozenset({"GPU-1", "GPU-2"}),
    link_errors=MappingProxyType({(SWITCH, 3): MappingProxyType({5: 2})}),
    counters=Counters(starts=2, switch_errors=MappingProxyType({KEY: 4})),
)
IDENTITY = Identity(7, 12345, "/usr/bin/nv-fabricmanager", "0::/fmsupervisor.service\n")
RECORD = ManagerRecord("token", boot_id(), NOW, STATE.config, SETTINGS.fabric_manager, IDENTITY, RUN.session)
PROBLEM = Problem(Code.VERSION_MISMATCH, "driver 1, program 2")
LIVE = Live(
    "0.1",
    5,
    "/run/fmsupervisor",
    ManagerMemory(((8, "stdout"),), (), None, "/fm.log", ("last",), 10.0),
    ReporterMemory(True, "configured", 1.5, ((PROBLEM, 2.5),)),
    blocks=((PROBLEM, (Aspect.INSTALLATION,)),),
    settings=SETTINGS,
)
FRESH = State(settings=SETTINGS, begun=Moment(200.0, 2.0), now=Moment(200.0, 2.0))


def changed(content: bytes, change: Mapping[str, Any]) -> bytes:
    return json.dumps({**json.loads(content), **change}).encode()


def test_every_field_of_the_state_can_be_handed_over_or_is_listed_as_made_anew() -> None:
    """A new field whose type the codec does not know would be lost without a word."""
    hints = get_type_hints(State)
    for field in fields(State):
        value = getattr(STATE, field.name)
        if field.name in handover._NOT_CARRIED:
            continue
        assert decode(hints[field.name], json.loads(json.dumps(encode(value)))) == value, field.name
    names = {field.name for field in fields(State)}
    assert names >= handover._NOT_CARRIED
    assert names >= handover._KEPT


class TestInPlace:
    def test_everything_goes_on(self) -> None:
        found = handover.parse(handover.document(RECORD, STATE, (1.0, 2.0), LIVE))
        assert (found.record, found.live, found.clock, found.dropped) == (RECORD, LIVE, (1.0, 2.0), ())
        state = found.begin(FRESH)
        carried = handover.carried(STATE, whole=True)
        assert {name: getattr(state, name) for name in carried if name != "run"} == {
            name: value for name, value in carried.items() if name != "run"
        }
        assert state.run is None  # until its process was found
        assert found.values["run"] == RUN

    def test_a_block_holds_against_the_facts_that_are_handed_over(self) -> None:
        state = handover.parse(handover.document(RECORD, STATE, (1.0, 2.0), LIVE)).begin(FRESH)
        (block,) = state.blocks
        assert (block.problem, block.aspects, block.values) == (PROBLEM, (Aspect.INSTALLATION,), (None,))

    def test_a_block_falls_with_other_settings(self) -> None:
        other = replace(SETTINGS, prefix="/opt/nvidia")
        found = handover.parse(handover.document(RECORD, STATE, (1.0, 2.0), LIVE))
        assert found.begin(replace(FRESH, settings=other)).blocks == ()


class TestAfterACrash:
    def test_counters_begin_again_and_what_was_latched_holds(self) -> None:
        found = handover.parse(handover.document(RECORD, STATE, (1.0, 2.0)))
        state = found.begin(FRESH)
        assert state.counters == Counters()
        assert (state.latched, state.failures, state.last_exit) == (STATE.latched, 3, STATE.last_exit)
        assert state.lost_registrations == STATE.lost_registrations
        assert (state.driver, state.begun) == (None, FRESH.begun)

    def test_nothing_holds_from_before_the_last_boot(self) -> None:
        found = handover.parse(changed(handover.document(RECORD, STATE, (1.0, 2.0)), {"boot_id": "another"}))
        assert (found.record, dict(found.values)) == (None, {})
        assert found.begin(FRESH) == FRESH


class TestAnotherVersion:
    def test_with_more_fields_is_understood(self) -> None:
        content = json.loads(handover.document(RECORD, STATE, (1.0, 2.0), LIVE))
        content["new"] = 1
        for part in ("state", "record", "live"):
            content[part]["new"] = {"x": [1]}
        content["state"]["run"]["new"] = "y"
        found = handover.parse(json.dumps(content).encode())
        assert (found.record, found.live, found.values["run"], found.dropped) == (RECORD, LIVE, RUN, ())

    def test_with_fewer_fields_leaves_defaults(self) -> None:
        content = json.loads(handover.document(RECORD, STATE, (1.0, 2.0), LIVE))
        del content["state"]["failures"], content["state"]["run"]["registered"], content["live"]["blocks"]
        found = handover.parse(json.dumps(content).encode())
        assert found.dropped == ()
        assert (found.begin(FRESH).failures, found.values["run"].registered) == (0, {})

    def test_with_a_field_of_another_type_loses_that_field_and_says_so(self) -> None:
        content = json.loads(handover.document(RECORD, STATE, (1.0, 2.0), LIVE))
        content["state"]["failures"] = "many"
        content["state"]["latched"] = 5
        found = handover.parse(json.dumps(content).encode())
        assert found.dropped == ("failures: str in place of int", "latched: int in place of a list")
        assert found.begin(FRESH).last_exit == STATE.last_exit

    @pytest.mark.parametrize("layout", [0, 2, None, "1", [1]])
    def test_of_another_layout_gives_the_record_alone(self, layout: object) -> None:
        found = handover.parse(changed(handover.document(RECORD, STATE, (1.0, 2.0), LIVE), {"layout": layout}))
        assert (found.record, dict(found.values), found.live) == (RECORD, {}, None)
        assert len(found.dropped) == 1


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"1", b'"x"', b"\xff\xfe", b"[" * 50_000, b'{"a":' * 50_000]
)
def test_anything_else_is_nothing_and_says_so(content: bytes) -> None:
    found = handover.parse(content)
    assert (found.record, dict(found.values), found.live) == (None, {}, None)
    assert found.dropped


class TestTheCodec:
    @pytest.mark.parametrize(
        ("kind", "value", "document"),
        [
            (int | None, None, None),
            (float, 1.5, 1.5),
            (float, 2.0, 2),
            (tuple[str, int], ("a", 1), ["a", 1]),
            (frozenset[str], frozenset({"b", "a"}), ["a", "b"]),
            (DriverState | int, DriverState.STANDBY, 1),
            (DriverState | int, 77, 77),
            (DriverView | Unknown | None, Unknown("gone"), {"reason": "gone"}),
            (Mapping[tuple[str, int], int], {("a", 1): 2}, [[["a", 1], 2]]),
            (Mapping[str, int], {"a": 1}, {"a": 1}),
        ],
        ids=lambda _: "",
    )
    def test_understands(self, kind: Any, value: object, document: object) -> None:
        assert decode(kind, document) == value

    @pytest.mark.parametrize(
        ("kind", "document", "words"),
        [
            (int, True, "bool in place of int"),
            (bool, 1, "int in place of bool"),
            (int, 1.5, "float in place of int"),
            (str, None, "NoneType in place of str"),
            (tuple[str, int], ["a"], "1 items in place of 2"),
            (frozenset[str], {"a": 1}, "dict in place of a list"),
            (ExitClass, "nonsense", "'nonsense' is no ExitClass"),
            (Moment, {"monotonic": 1.0}, "value.wall: missing"),
            (Moment, [1.0, 2.0], "list in place of Moment"),
            (Mapping[tuple[str, int], int], [["a", 1, 2]], "not a mapping"),
        ],
        ids=lambda _: "",
    )
    def test_refuses_and_says_where(self, kind: Any, document: object, words: str) -> None:
        with pytest.raises(DecodeError, match=words):
            decode(kind, document)

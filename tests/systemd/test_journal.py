"""What journald keeps of the daemon, asked back with journalctl as an operator would."""

from typing import Any

import pytest

from fmsupervisor.conditions import REGISTRY, Code
from fmsupervisor.report.journal import Event
from fmsupervisor.simulator.hardware import SWITCHES
from tests.systemd.machine import SERVICE, Machine

pytestmark = [pytest.mark.root, pytest.mark.xdist_group("systemd-journal")]

SXID = "20034"
SWITCH = SWITCHES[3]


@pytest.fixture(scope="module")
def struck(booted: Machine) -> Machine:
    """A fabric that was configured and then had a fatal error."""
    machine = booted
    machine.reset()
    machine.simulate("sxid-fatal", speed=40.0)
    machine.do("start", SERVICE)
    machine.wait_for(lambda: machine.events("condition-raised"), "the error is told")
    machine.wait_for(lambda: machine.events("kernel-line", f"SXID={SXID}"), "the kernel's line is read")
    return machine


def kinds(entries: list[dict[str, Any]]) -> list[str]:
    return [entry["FMSUPERVISOR_EVENT"] for entry in entries]


def test_a_state_change_carries_both_states_the_reason_and_the_session(struck: Machine) -> None:
    entries = struck.events("state-changed")
    assert [entry["FMSUPERVISOR_STATE"] for entry in entries] == [
        *("waiting-for-module", "starting", "configuring", "configured", "degraded"),
    ]
    last = entries[-1]
    (started,) = struck.events("fm-started")
    assert last["FMSUPERVISOR_PREVIOUS_STATE"] == "configured"
    assert last["FMSUPERVISOR_REASON"].startswith("FMS-601 ")
    assert (last["PRIORITY"], last["MESSAGE_ID"]) == ("4", Event.STATE_CHANGED.value)
    assert last["FM_SESSION"] == started["FM_SESSION"]
    assert last["SYSLOG_IDENTIFIER"] == "fmsupervisor"
    assert last["_SYSTEMD_UNIT"] == SERVICE


def test_a_condition_carries_its_code_its_message_id_its_severity_and_the_remedy(struck: Machine) -> None:
    (entry,) = struck.events("condition-raised")
    condition = REGISTRY[Code.SXID_FATAL]
    assert entry["FMSUPERVISOR_CONDITION"] == "FMS-601"
    assert (entry["MESSAGE_ID"], entry["PRIORITY"]) == (condition.message_id, "2")
    assert entry["FMSUPERVISOR_SEVERITY"] == condition.severity
    assert entry["FMSUPERVISOR_SUBJECT"] == SWITCH
    assert entry["FMSUPERVISOR_REMEDY"] == condition.remedy


def test_a_line_of_fabric_manager_carries_its_pid_level_and_the_switch_error(struck: Machine) -> None:
    (started,) = struck.events("fm-started")
    (line,) = struck.events("fm-line", f"SXID={SXID}")
    assert line["FM_PID"] == started["FM_PID"]
    assert (line["FM_LEVEL"], line["PRIORITY"], line["FM_SOURCE"]) == ("ERROR", "3", "file")
    assert (line["PCI_BUS_ID"], line["NVLINK_PORT"], line["SXID_SEVERITY"]) == (SWITCH, "33", "fatal")
    assert line["MESSAGE_ID"] == Event.FM_LINE.value


def test_a_line_of_the_kernel_carries_its_place_and_the_switch_error(struck: Machine) -> None:
    (line,) = struck.events("kernel-line", f"SXID={SXID}")
    assert (line["PCI_BUS_ID"], line["NVLINK_PORT"], line["SXID_SEVERITY"]) == (SWITCH, "33", "fatal")
    assert (line["PRIORITY"], line["NVSWITCH"], line["KERNEL_KIND"]) == ("3", "3", "switch-error")
    assert int(line["KERNEL_SEQUENCE"]) > 0
    assert len(line["MESSAGE"].splitlines()) == 3
    assert line["MESSAGE_ID"] == Event.KERNEL_LINE.value


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        pytest.param(["FMSUPERVISOR_CONDITION=FMS-601"], ["condition-raised"], id="by the code of a condition"),
        pytest.param(
            [f"MESSAGE_ID={REGISTRY[Code.SXID_FATAL].message_id}"], ["condition-raised"], id="by its message id"
        ),
        pytest.param([f"MESSAGE_ID={Event.FM_STARTED.value}"], ["fm-started"], id="by the message id of an event"),
        pytest.param(["-p", "err"], ["fm-line", "kernel-line", "condition-raised"], id="errors"),
        pytest.param(["-p", "warning..warning"], ["state-changed"], id="warnings"),
        pytest.param([f"PCI_BUS_ID={SWITCH}", "-p", "err"], ["fm-line", "kernel-line"], id="by a switch"),
    ],
)
def test_a_query_finds_exactly_its_lines(struck: Machine, query: list[str], expected: list[str]) -> None:
    """The kernel's line and Fabric Manager's come in either order."""
    assert sorted(kinds(struck.journal(SERVICE, *query))) == sorted(expected)

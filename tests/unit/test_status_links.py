"""How people see the links that have errors, in ``fmsupervisor status``."""

from dataclasses import replace

from fmsupervisor.core.state import State
from fmsupervisor.core.verdict import verdict
from fmsupervisor.facts import Moment
from fmsupervisor.report.status import status_document
from fmsupervisor.report.status_text import Document, render_text
from fmsupervisor.settings import Settings

BUS = "0000:05:00.0"
STATE = State(Settings(), Moment(100_000.0, 1_790_000_000.0), Moment(100_000.0, 1_790_000_000.0))
SLOT = 100_000 // 600


def document(state: State) -> Document:
    return status_document(state, verdict(state), 1_790_000_000.0, {})


def test_the_worst_link_of_the_last_hour_stands_first() -> None:
    state = replace(
        STATE,
        link_errors={(BUS, 1): {SLOT - 10: 99}, (BUS, 2): {SLOT: 3, SLOT - 20: 4}, (BUS, 3): {SLOT: 7}},
        link_faults={(BUS, 3): {SLOT: 1}, (BUS, 4): {SLOT: 1, SLOT - 50: 4}},
    )
    assert document(state)["links"] == [
        {"pci_bus_id": BUS, "port": 3, "last_hour": 7, "last_day": 7, "fatal_last_day": 1},
        {"pci_bus_id": BUS, "port": 2, "last_hour": 3, "last_day": 7, "fatal_last_day": 0},
        {"pci_bus_id": BUS, "port": 4, "last_hour": 0, "last_day": 0, "fatal_last_day": 5},
        {"pci_bus_id": BUS, "port": 1, "last_hour": 0, "last_day": 99, "fatal_last_day": 0},
    ]
    rows = [line.split() for line in render_text(document(state)).splitlines() if line.strip().startswith(BUS)]
    assert rows == [
        [BUS, "3", "7,", "7;", "1"],
        [BUS, "2", "3,", "7;", "0"],
        [BUS, "4", "0,", "0;", "5"],
        [BUS, "1", "0,", "99;", "0"],
    ]


def test_no_table_is_shown_when_no_link_has_errors() -> None:
    assert "non-fatal errors" not in render_text(document(STATE))


def test_ten_links_are_shown_and_the_others_counted() -> None:
    text = render_text(document(replace(STATE, link_errors={(BUS, port): {SLOT: 1} for port in range(13)})))
    assert text.count(f"  {BUS}") == 10
    assert "3 links more" in text


def test_a_document_of_an_older_daemon_can_be_shown() -> None:
    made = document(STATE)
    del made["links"]
    assert render_text(made)

"""From a simulated fault to the webhook: the alert arrives with its labels and its texts, and is resolved."""

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fmsupervisor.mixin.dashboards import dashboards
from fmsupervisor.mixin.options import Options
from fmsupervisor.simulator.hardware import GPUS, SWITCHES
from tests.prometheus._fleet import Fleet, fleet, wait_until

REPOSITORY = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
    pytest.mark.skipif(shutil.which("prometheus-alertmanager") is None, reason="Alertmanager is not installed"),
]

# Scenario of each node, and its cluster.
NODES = {
    "healthy": "west",
    "no-switch": "west",
    "hang-restart": "west",
    "guest-power-cycled": "west",
    "switch-returned": "west",
    "version-mismatch": "east",
    "switch-missing": "east",
    "sxid-fatal": "east",
    "sxid-burst": "east",
    "gpu-taken": "east",
    "crash-loop": "east",
}


@dataclass(frozen=True)
class Arrival:
    """An alert that must come, its labels besides the target's, and whether it is resolved while the daemon runs."""

    node: str
    alert: str
    labels: dict[str, str] = field(default_factory=dict)
    severity: str = "critical"
    is_resolved: bool = False

    def __str__(self) -> str:
        return f"{self.node}-{self.alert}"


ARRIVALS = (
    Arrival("hang-restart", "FabricManagerTimeout", is_resolved=True),
    Arrival("guest-power-cycled", "GuestRestartRequired", is_resolved=True),
    Arrival("switch-returned", "NVSwitchLost", {"code": "FMS-305"}, is_resolved=True),
    Arrival("switch-returned", "FabricConditionCritical", {"code": "FMS-307"}),
    Arrival("version-mismatch", "FabricVersionMismatch", {"code": "FMS-103"}),
    Arrival("version-mismatch", "FabricNotConfigured"),
    Arrival("switch-missing", "NVSwitchMissing", {"code": "FMS-301"}),
    Arrival("sxid-fatal", "NVSwitchFatalSXid", {"pci_bus_id": SWITCHES[3], "sxid": "20034"}),
    Arrival("sxid-burst", "NVLinkErrorsRising", {"pci_bus_id": SWITCHES[1], "port": "35"}, "warning"),
    Arrival("gpu-taken", "GPUOnWrongDriver", {"pci_bus_id": GPUS[0], "driver": "nvidia"}),
    Arrival("crash-loop", "FabricManagerCrashLooping"),
)
DASHBOARDS: dict[str, Any] = dashboards(Options())
WITHOUT_FAULT = ("healthy", "no-switch")


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet(NODES, tmp_path_factory.mktemp("fleet")) as made:
        yield made


@pytest.mark.parametrize("arrival", ARRIVALS, ids=str)
def test_an_alert_arrives(watched: Fleet, arrival: Arrival) -> None:
    delivery = watched.wait_for(arrival.node, arrival.alert, "firing")
    target = watched.nodes[arrival.node].labels
    own = {"alertname": arrival.alert, "severity": arrival.severity, "team": "fabric"}
    matching = [
        one
        for one in watched.deliveries(arrival.node, arrival.alert, "firing")
        if one["labels"] == target | arrival.labels | own
    ]
    assert matching, delivery["labels"]
    texts = matching[0]["annotations"]
    assert target["instance"] in texts["summary"]
    assert not re.search(r"\{\{|<no value>|error expanding", " ".join(texts.values()))
    page, _, anchor = texts["runbook_url"].partition("#")
    headings = re.findall(r"^#+ (.*)$", (REPOSITORY / page).read_text(), re.MULTILINE)
    assert anchor in [heading.lower() for heading in headings]


def test_the_text_of_waiting_guests_names_the_gpus(watched: Fleet) -> None:
    delivery = watched.wait_for("guest-power-cycled", "GuestRestartRequired", "firing")
    assert " ".join(GPUS[:4]) in delivery["annotations"]["description"]


def test_the_text_of_an_unconfigured_fabric_names_the_condition(watched: Fleet) -> None:
    delivery = watched.wait_for("version-mismatch", "FabricNotConfigured", "firing")
    assert "FMS-103" in delivery["annotations"]["description"]


@pytest.mark.parametrize("arrival", [one for one in ARRIVALS if one.is_resolved], ids=str)
def test_an_alert_is_resolved_when_its_cause_is_gone(watched: Fleet, arrival: Arrival) -> None:
    delivery = watched.wait_for(arrival.node, arrival.alert, "resolved")
    assert delivery["labels"].items() >= arrival.labels.items()
    assert delivery["endsAt"] > delivery["startsAt"]


@pytest.mark.parametrize("node", WITHOUT_FAULT)
def test_nothing_comes_of_a_node_without_a_fault(watched: Fleet, node: str) -> None:
    watched.wait_for("crash-loop", "FabricManagerCrashLooping", "firing")  # the last to come
    instance = watched.nodes[node].address
    # A start on a busy machine may take longer than the hasty rule has patience.
    names = {one["labels"]["alertname"] for one in watched.delivered if one["labels"].get("instance") == instance}
    assert names <= {"FabricNotConfigured", "FmsupervisorDown"}


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_query_of_a_dashboard_finds_something(watched: Fleet, name: str) -> None:
    """Of the node's, at least on one node: none has all faults."""
    watched.wait_for("crash-loop", "FabricManagerCrashLooping", "firing")
    empty = []
    for panel in DASHBOARDS[name]["panels"]:
        for target in panel["targets"]:
            wanted = [target["expr"].replace("$node", node.address) for node in watched.nodes.values()]
            seconds = 60 if target["range"] else 0
            if not any(watched.query(_as_grafana_asks(one), seconds=seconds) for one in dict.fromkeys(wanted)):
                empty.append((panel["title"], target["expr"]))
    assert empty == []


def test_the_choices_of_a_dashboard_are_there(watched: Fleet) -> None:
    assert {one["metric"]["cluster"] for one in watched.query("fmsupervisor_build_info")} == {"east", "west"}


def _as_grafana_asks(expression: str) -> str:
    return expression.replace("$cluster", ".*").replace("$__rate_interval", "10s").replace("$__range", "60s")


def test_a_daemon_that_is_gone_is_told_and_takes_its_alerts_along(watched: Fleet) -> None:
    watched.wait_for("sxid-fatal", "NVSwitchFatalSXid", "firing")
    watched.stop("sxid-fatal")
    watched.wait_for("sxid-fatal", "NVSwitchFatalSXid", "resolved")
    before = len(watched.deliveries("sxid-fatal", "FmsupervisorDown", "resolved"))
    watched.wait_for("sxid-fatal", "FmsupervisorDown", "firing")
    watched.start("healthy", instead_of="sxid-fatal")
    wait_until(lambda: len(watched.deliveries("sxid-fatal", "FmsupervisorDown", "resolved")) > before, "its return")

"""The dashboards: what Grafana's own model of them keeps, a grid without holes or overlaps, names that people can tell."""

import json
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from fmsupervisor.mixin.dashboards import dashboards
from fmsupervisor.mixin.dashboards.panels import GRID_COLUMNS
from fmsupervisor.mixin.options import Options

DOCUMENTS: dict[str, Any] = dashboards(Options())

each = pytest.mark.parametrize("document", DOCUMENTS.values(), ids=list(DOCUMENTS))


def as_grafana_reads(document: object) -> Any:
    register_default_plugins()
    return json.loads(json.dumps(Dashboard.from_json(document), cls=JSONEncoder))  # type: ignore[arg-type]


def not_kept(ours: object, theirs: object, place: str = "") -> list[str]:
    """What of ours the other does not have, or has otherwise. More may be there: defaults."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [
            found
            for key, value in ours.items()
            for found in (not_kept(value, theirs[key], f"{place}.{key}") if key in theirs else [f"{place}.{key}"])
        ]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [found for number, (one, other) in pairs for found in not_kept(one, other, f"{place}[{number}]")]
    return [] if ours == theirs else [place]


@each
def test_grafana_knows_every_field(document: Any) -> None:
    assert not_kept(document, as_grafana_reads(document)) == []


@pytest.mark.parametrize(
    "path", [("options", "colourMode"), ("gridPos", "z"), ("fieldConfig", "default")], ids=lambda path: path[-1]
)
def test_a_field_that_it_does_not_know_would_be_seen(path: tuple[str, str]) -> None:
    document = json.loads(json.dumps(DOCUMENTS["dashboard-node"]))
    document["panels"][0][path[0]][path[1]] = 1
    assert not_kept(document, as_grafana_reads(document)) == [f".panels[0].{path[0]}.{path[1]}"]


@each
def test_panels_do_not_overlap_and_leave_no_hole(document: Any) -> None:
    fields = [
        (x, y)
        for position in (panel["gridPos"] for panel in document["panels"])
        for x in range(position["x"], position["x"] + position["w"])
        for y in range(position["y"], position["y"] + position["h"])
    ]
    assert len(fields) == len(set(fields))
    height = max(y for _, y in fields) + 1
    assert len(fields) == GRID_COLUMNS * height


@each
def test_panels_are_told_apart_and_explained(document: Any) -> None:
    assert len({panel["id"] for panel in document["panels"]}) == len(document["panels"])
    kinds = [(panel["type"], panel["title"]) for panel in document["panels"]]
    assert len(set(kinds)) == len(kinds)
    assert all(panel["description"].rstrip(".") != panel["title"] for panel in document["panels"])
    assert all(panel["description"].endswith(".") for panel in document["panels"])


@each
def test_queries_go_to_the_chosen_data_source(document: Any) -> None:
    names = {variable["name"] for variable in document["templating"]["list"]}
    assert "datasource" in names
    for panel in document["panels"]:
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_the_two_are_not_one() -> None:
    assert len({document["uid"] for document in DOCUMENTS.values()}) == len(DOCUMENTS)

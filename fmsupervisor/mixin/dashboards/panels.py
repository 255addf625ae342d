"""The parts that the dashboards are made of: queries, panels, the grid, template variables."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fmsupervisor.core.verdict import FabricState
from fmsupervisor.facts import DriverState
from fmsupervisor.mixin.expression import name_labels, render
from fmsupervisor.mixin.options import Options

GRID_COLUMNS = 24
DATASOURCE: Mapping[str, str] = {"type": "prometheus", "uid": "${datasource}"}

_SCHEMA_VERSION = 39  # of Grafana 11; older ones read it, newer ones migrate it
_LEGEND = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
_NO_LEGEND = {**_LEGEND, "showLegend": False}
_TOOLTIP = {"mode": "multi", "sort": "desc"}
_LAST = {"calcs": ["lastNotNull"], "fields": "", "values": False}

GREEN, YELLOW, ORANGE, RED, BLUE, GREY = "green", "yellow", "orange", "red", "blue", "text"

_FABRIC_COLOURS: Mapping[FabricState, str] = {
    FabricState.CONFIGURED: GREEN,
    FabricState.NOT_APPLICABLE: GREY,
    FabricState.DEGRADED: ORANGE,
    FabricState.FAILED: RED,
    FabricState.BACKOFF: RED,
}
_DRIVER_COLOURS: Mapping[str, str] = {
    "CONFIGURED": GREEN,
    "STANDBY": YELLOW,
    "OFFLINE": GREY,
    "MANAGER_TIMEOUT": RED,
    "MANAGER_ERROR": RED,
}


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel. An instant one is asked once, for the end of the shown time."""

    expression: str
    legend: str = ""
    is_instant: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel; ``width`` of 24 columns."""

    kind: str
    title: str
    help: str
    queries: tuple[Query, ...]
    width: int
    height: int
    options: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    transformations: tuple[Mapping[str, Any], ...] = ()


def stat(title: str, help_: str, *queries: Query, width: int, **defaults: Any) -> Panel:
    """Large figures, coloured by the thresholds."""
    options = {
        "colorMode": "value",
        "graphMode": "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "percentChangeColorMode": "standard",
        "reduceOptions": _LAST,
        "showPercentChange": False,
        "textMode": "auto",
        "wideLayout": True,
    }
    return Panel("stat", title, help_, queries, width, 4, options, {"thresholds": thresholds(), **defaults})


def graph(title: str, help_: str, *queries: Query, width: int = 12, **defaults: Any) -> Panel:
    """Lines over time."""
    custom = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 10, "showPoints": "auto", "spanNulls": False}
    settings = {"min": 0, "custom": custom, "color": {"mode": "palette-classic"}, **defaults}
    return Panel("timeseries", title, help_, queries, width, 8, {"legend": _LEGEND, "tooltip": _TOOLTIP}, settings)


def timeline(title: str, help_: str, query: Query, mappings: Any, *, width: int, height: int = 8) -> Panel:
    """Which of some states held when."""
    options = {
        "alignValue": "left",
        "legend": _NO_LEGEND,
        "mergeValues": True,
        "rowHeight": 0.9,
        "showValue": "auto",
        "tooltip": {"mode": "single", "sort": "none"},
    }
    defaults = {"mappings": mappings, "custom": {"fillOpacity": 70, "lineWidth": 0}, "color": {"mode": "thresholds"}}
    return Panel(
        "state-timeline", title, help_, (query,), width, height, options, defaults | {"thresholds": thresholds()}
    )


def heat_map(title: str, help_: str, query: Query, *, width: int, height: int = 8, **defaults: Any) -> Panel:
    """One row for each series, one coloured field for each stretch of time."""
    options = {
        "colWidth": 0.95,
        "legend": _NO_LEGEND,
        "rowHeight": 0.9,
        "showValue": "never",
        "tooltip": {"mode": "single", "sort": "none"},
    }
    settings = {"custom": {"fillOpacity": 80, "lineWidth": 0}, "color": {"mode": "thresholds"}, **defaults}
    return Panel("status-history", title, help_, (query,), width, height, options, settings)


def bars(title: str, help_: str, *queries: Query, width: int, height: int = 8, **defaults: Any) -> Panel:
    """One bar for each series, its last value."""
    options = {
        "displayMode": "basic",
        "legend": _NO_LEGEND,
        "maxVizHeight": 300,
        "minVizHeight": 16,
        "minVizWidth": 8,
        "namePlacement": "auto",
        "orientation": "horizontal",
        "reduceOptions": _LAST,
        "showUnfilled": True,
        "sizing": "auto",
        "valueMode": "color",
    }
    return Panel("bargauge", title, help_, queries, width, height, options, {"min": 0, **defaults})


def table(title: str, help_: str, *queries: Query, width: int, hidden: Sequence[str] = (), height: int = 8) -> Panel:
    """Labels as columns; the rows of all queries together."""
    options = {"cellHeight": "sm", "frameIndex": 0, "showHeader": True}
    organize = {"excludeByName": dict.fromkeys(("Time", "Value", "__name__", *hidden), True)}
    transformations = (
        {"id": "merge", "options": {}},
        {"id": "organize", "options": organize},
    )
    return Panel("table", title, help_, queries, width, height, options, {}, transformations)


def thresholds(*steps: tuple[float, str], base: str = GREY) -> dict[str, Any]:
    """Colours by value: ``base`` below the first step."""
    rows: list[dict[str, Any]] = [{"color": base, "value": None}]
    return {"mode": "absolute", "steps": rows + [{"color": colour, "value": value} for value, colour in steps]}


def words(*rows: tuple[str, str]) -> list[dict[str, Any]]:
    """A text and a colour for the values 0, 1, 2 and so on."""
    options = {str(value): {"index": value, "text": text, "color": colour} for value, (text, colour) in enumerate(rows)}
    return [{"type": "value", "options": options}]


def no_or_yes(no: str, yes: str) -> list[dict[str, Any]]:
    """The colours of 0 and 1."""
    return words(("no", no), ("yes", yes))


# A state set as one number, since a panel can colour numbers only.
FABRIC_STATES = words(*((state.value, _FABRIC_COLOURS.get(state, BLUE)) for state in FabricState))
DRIVER_STATES = words(*((name, _DRIVER_COLOURS.get(name, ORANGE)) for name in (*DriverState.__members__, "other")))


def fabric_state_number() -> str:
    """PromQL: the position of the state that holds."""
    return _numbered("fabricmanager_state", "state", tuple(FabricState))


def driver_state_number() -> str:
    """PromQL: the same for the driver's word on each NVSwitch."""
    return _numbered("nvswitch_driver_state", "state", (*DriverState.__members__, "other"))


def _numbered(metric: str, label: str, values: Iterable[str]) -> str:
    terms = (f'{number} * ({metric}{{{label}="{value}"}} == 1)' for number, value in enumerate(values))
    return f"max without ({label}) ({' or '.join(terms)})"


def document(
    uid: str,
    title: str,
    description: str,
    panels: Sequence[Panel],
    variables: Sequence[Mapping[str, Any]],
    options: Options,
) -> dict[str, Any]:
    """The JSON of a dashboard."""
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": ["fmsupervisor"],
        "schemaVersion": _SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_datasource_variable(), *variables]},
        "annotations": {"list": []},
        "links": [],
        "panels": list(_placed(panels, options)),
    }


def variable(name: str, label: str, series: str, options: Options, *, is_all: bool, filters: Sequence[str] = ()) -> Any:
    """A choice among the values of a label."""
    query = f"label_values({render(series, options, *filters)}, {name_labels(label, options)})"
    chosen: dict[str, Any] = {"includeAll": True, "multi": True, "allValue": ".*"} if is_all else {"includeAll": False}
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "current": {"text": "All", "value": "$__all"} if is_all else {},
        **chosen,
    }


def _datasource_variable() -> Mapping[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1}


def _placed(panels: Sequence[Panel], options: Options) -> Iterator[Mapping[str, Any]]:
    """The panels from left to right, in rows as high as their highest."""
    x = y = row_height = 0
    for number, panel in enumerate(panels, 1):
        if x + panel.width > GRID_COLUMNS:
            x, y, row_height = 0, y + row_height, 0
        yield _panel(number, panel, {"x": x, "y": y, "w": panel.width, "h": panel.height}, options)
        x += panel.width
        row_height = max(row_height, panel.height)


def _panel(number: int, panel: Panel, position: Mapping[str, int], options: Options) -> Mapping[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": DATASOURCE,
        "gridPos": position,
        "targets": [_target(chr(ord("A") + place), query, options) for place, query in enumerate(panel.queries)],
        "options": dict(panel.options),
        "fieldConfig": {"defaults": dict(panel.defaults), "overrides": []},
        "transformations": list(panel.transformations),
    }


def _target(ref_id: str, query: Query, options: Options) -> Mapping[str, Any]:
    return {
        "refId": ref_id,
        "datasource": DATASOURCE,
        "expr": query.expression,
        "legendFormat": name_labels(query.legend, options) or "__auto",
        "instant": query.is_instant,
        "range": not query.is_instant,
        "format": "table" if query.is_instant else "time_series",
        "editorMode": "code",
    }

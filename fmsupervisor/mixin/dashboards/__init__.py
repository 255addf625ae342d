"""Grafana dashboards: the fleet, and one node. Classic JSON model, for Grafana 10 and later."""

from fmsupervisor.mixin.dashboards import fleet, node
from fmsupervisor.mixin.options import Options


def dashboards(options: Options) -> dict[str, object]:
    """The JSON document of each dashboard, by the name of its file."""
    return {"dashboard-fleet": fleet.dashboard(options), "dashboard-node": node.dashboard(options)}

"""The fleet: how many nodes have their fabric, which do not, and what stands open."""

from typing import Any

from fmsupervisor.mixin.dashboards.panels import (
    FABRIC_STATES,
    GREEN,
    ORANGE,
    RED,
    YELLOW,
    Panel,
    Query,
    document,
    fabric_state_number,
    graph,
    stat,
    table,
    thresholds,
    timeline,
    variable,
)
from fmsupervisor.mixin.expression import render
from fmsupervisor.mixin.options import Options

UID = "fmsupervisor-fleet"
_TITLE = "NVLink fabric: fleet"
_HELP = "Fabric Manager and NVSwitches of all nodes, as fmsupervisor sees them. Needs the recorded series of the mixin."


def dashboard(options: Options) -> dict[str, Any]:
    """The JSON of the dashboard."""
    variables = [variable("cluster", "<cluster>", "fmsupervisor_build_info{}", options, is_all=True)]
    return document(UID, _TITLE, _HELP, _panels(options), variables, options)


def _panels(options: Options) -> list[Panel]:
    cluster, node = options.cluster_label, options.node_label
    chosen = f'{cluster}=~"$cluster"'

    def ours(expression: str) -> str:
        return render(expression, options, chosen)

    def recorded(name: str, *more: str) -> str:
        return f"{name}{{{', '.join((chosen, *more))}}}"

    fatal = recorded("instance:nvswitch_sxid:sum", 'severity="fatal"')
    open_conditions = ours('fmsupervisor_condition_active{severity!="info"}')
    bad_from_one = thresholds((0, GREEN), (1, RED))
    state = f"max by ({cluster}, {node}) ({ours(fabric_state_number())})"
    return [
        stat(
            "Nodes with a fabric",
            "Nodes with NVSwitches whose supervisor answers.",
            Query(f"sum({recorded('cluster:fabric_nodes:count')})"),
            width=4,
        ),
        stat(
            "Configured",
            "The share of these whose fabric is configured.",
            Query(f"avg({recorded('instance:fabric_configured:bool')})"),
            width=4,
            unit="percentunit",
            min=0,
            max=1,
            thresholds=thresholds((0, RED), (0.9, YELLOW), (1, GREEN)),
        ),
        stat(
            "Not answering",
            "Supervisors that cannot be scraped: nothing is known of their nodes.",
            Query(ours("count(up{}) - sum(up{})")),
            width=4,
            thresholds=bad_from_one,
        ),
        stat(
            "Critical conditions",
            "Open ones, on all nodes. The table below names them.",
            Query(ours('sum(fmsupervisor_condition_active{severity="critical"})')),
            width=4,
            thresholds=bad_from_one,
        ),
        stat(
            "GPUs that wait for a restart of their guest",
            "Their guests hold GPUs that cannot use the fabric until they are power-cycled.",
            Query(f"sum({recorded('cluster:guests_waiting:sum')})"),
            width=4,
            thresholds=thresholds((0, GREEN), (1, ORANGE)),
        ),
        stat(
            "Fatal SXids",
            "Within the shown time.",
            Query(f"sum(increase({fatal}[$__range]))"),
            width=4,
            decimals=0,
            thresholds=bad_from_one,
        ),
        timeline(
            "State of the fabric, by node",
            "Green is configured. Blue is on its way. Grey has no NVSwitch.",
            Query(state, f"{{{{{node}}}}}"),
            FABRIC_STATES,
            width=24,
            height=10,
        ),
        table(
            "Open conditions",
            "`fmsupervisor explain CODE` and the runbook say what each means and what to do.",
            Query(
                f"max by ({cluster}, {node}, code, severity) ({open_conditions}) == 1",
                is_instant=True,
            ),
            width=12,
        ),
        table(
            "Versions",
            "Of Fabric Manager, of the loaded driver, and of fmsupervisor.",
            Query(
                ours(f"count by ({cluster}, {node}, version, fabric_mode) (fabricmanager_info{{}})"), is_instant=True
            ),
            width=12,
        ),
        graph(
            "Share of nodes configured",
            "By cluster.",
            Query(recorded("cluster:fabric_configured:ratio"), "{{<cluster>}}"),
            Query(recorded("cluster:fabric_configured:avg_1d"), "{{<cluster>}}, mean of a day"),
            unit="percentunit",
            max=1,
        ),
        graph(
            "Time to configured",
            "From the execution of Fabric Manager to the configured fabric, of the last start on each node.",
            Query(recorded("cluster:fabricmanager_configure_duration_seconds:quantile"), "{{<cluster>}} {{quantile}}"),
            unit="s",
        ),
        graph(
            "SXids",
            "Per hour, by cluster and severity.",
            Query(f"3600 * {recorded('cluster:nvswitch_sxid:rate1h')}", "{{<cluster>}} {{severity}}"),
        ),
        graph(
            "Ends of Fabric Manager",
            "Within a day, by cluster and class. Only unexpected ones are deaths.",
            Query(recorded("cluster:fabricmanager_exits:increase1d"), "{{<cluster>}} {{class}}"),
        ),
        graph(
            "GPUs that wait for a restart of their guest",
            "By cluster.",
            Query(recorded("cluster:guests_waiting:sum"), "{{<cluster>}}"),
        ),
        graph(
            "Links with the most errors",
            "Non-fatal SXids in the last hour of the ten worst links.",
            Query(ours("topk(10, nvswitch_link_sxids_last_hour{})"), "{{<node>}} {{pci_bus_id}} port {{port}}"),
        ),
    ]

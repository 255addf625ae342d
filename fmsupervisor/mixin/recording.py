"""The recorded series of a fleet, by cluster and by node.

Names follow level:metric:operations. ``instance:`` ones keep all labels of the target. A counter of SXids is born at 1,
so its first event is in no ``rate()``; the recorded sums are 0 from the start and therefore have it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fmsupervisor.mixin.expression import render
from fmsupervisor.mixin.options import Options


@dataclass(frozen=True, slots=True)
class Recording:
    """One recorded series. ``help`` is one line."""

    name: str
    expression: str
    help: str


def _sxids(severity: str) -> str:
    """The SXids of a node, 0 when there are none yet."""
    return (
        f'sum without (pci_bus_id, sxid) (nvswitch_sxid_total{{severity="{severity}"}}) or '
        f'label_replace(0 * fabricmanager_up{{}}, "severity", "{severity}", "", "")'
    )


def _quantile(quantile: str) -> str:
    durations = "quantile by (<cluster>) ({0}, fabricmanager_configure_duration_seconds{{}})"
    return f'label_replace({durations.format(quantile)}, "quantile", "{quantile}", "", "")'


RECORDINGS: tuple[Recording, ...] = (
    Recording(
        "instance:fabric_configured:bool",
        'sum without (state) (fabricmanager_state{state="configured"}) unless ignoring (state) '
        'fabricmanager_state{state="not-applicable"} == 1',
        "Whether the fabric of the node is configured; only of nodes that have one.",
    ),
    Recording(
        "instance:fabric_configured:avg_1d",
        "avg_over_time(instance:fabric_configured:bool[1d])",
        "The share of the last day in which it was.",
    ),
    Recording(
        "instance:nvswitch_sxid:sum",
        f"{_sxids('fatal')} or {_sxids('non-fatal')}",
        "SXids of the node since its supervisor began, by severity.",
    ),
    Recording(
        "instance:nvswitch_sxid:rate1h",
        "rate(instance:nvswitch_sxid:sum[1h])",
        "SXids of the node per second, by severity.",
    ),
    Recording(
        "cluster:fabric_nodes:count",
        "count by (<cluster>) (instance:fabric_configured:bool)",
        "Nodes with a fabric.",
    ),
    Recording(
        "cluster:fabric_configured:ratio",
        "avg by (<cluster>) (instance:fabric_configured:bool)",
        "The share of these whose fabric is configured.",
    ),
    Recording(
        "cluster:fabric_configured:avg_1d",
        "avg by (<cluster>) (instance:fabric_configured:avg_1d)",
        "The share of the last day, over all nodes with a fabric.",
    ),
    Recording(
        "cluster:fabricmanager_configure_duration_seconds:quantile",
        " or ".join(map(_quantile, ("0.5", "0.9", "1"))),
        "From Fabric Manager's execution to the configured fabric, of the last start on each node: median, 90 % and "
        "the slowest, by the label quantile.",
    ),
    Recording(
        "cluster:nvswitch_sxid:rate1h",
        "sum by (<cluster>, severity) (instance:nvswitch_sxid:rate1h)",
        "SXids of the cluster per second, by severity.",
    ),
    Recording(
        "cluster:fabricmanager_exits:increase1d",
        "sum by (<cluster>, class) (increase(fabricmanager_exits_total{}[1d]))",
        "Ends of Fabric Manager within a day, by class.",
    ),
    Recording(
        "cluster:guests_waiting:sum",
        "sum by (<cluster>) (fmsupervisor_guest_restart_required{})",
        "GPUs whose guests must be power-cycled.",
    ),
)


def rules(options: Options) -> list[Mapping[str, object]]:
    """The recorded series as rules of Prometheus."""
    return [
        MappingProxyType({"record": recording.name, "expr": render(recording.expression, options)})
        for recording in RECORDINGS
    ]

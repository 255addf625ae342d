"""One node: the chain from the bus to the guests, who says what of each NVSwitch, and what happened when."""

from typing import Any

from fmsupervisor.mixin.dashboards.panels import (
    DRIVER_STATES,
    FABRIC_STATES,
    GREEN,
    GREY,
    ORANGE,
    RED,
    YELLOW,
    Panel,
    Query,
    bars,
    document,
    driver_state_number,
    fabric_state_number,
    graph,
    heat_map,
    no_or_yes,
    stat,
    table,
    thresholds,
    timeline,
    variable,
)
from fmsupervisor.mixin.expression import render
from fmsupervisor.mixin.options import Options

UID = "fmsupervisor-node"
_TITLE = "NVLink fabric: node"
_HELP = "Fabric Manager, NVSwitches, links, GPUs and guests of one node, as fmsupervisor sees them."


def dashboard(options: Options) -> dict[str, Any]:
    """The JSON of the dashboard."""
    cluster = f'{options.cluster_label}=~"$cluster"'
    variables = [
        variable("cluster", "<cluster>", "fmsupervisor_build_info{}", options, is_all=True),
        variable("node", "<node>", "fmsupervisor_build_info{}", options, is_all=False, filters=(cluster,)),
    ]
    return document(UID, _TITLE, _HELP, _panels(options), variables, options)


def _panels(options: Options) -> list[Panel]:
    target = (f'{options.cluster_label}=~"$cluster"', f'{options.node_label}="$node"')

    def ours(expression: str) -> str:
        return render(expression, options, *target)

    def chain(name: str, expression: str) -> Query:
        return Query(ours(expression), name)

    return [
        stat(
            "The chain",
            "NVSwitches on the bus, with the driver, probed, configured; GPUs that have joined. "
            "The first figure that is smaller than the one before is where it stops.",
            chain("expected", "nvswitches_expected{}"),
            chain("on the bus", "nvswitches_present{}"),
            chain("bound", "nvswitches_bound{}"),
            chain("usable", "nvswitches_usable{}"),
            chain("configured", "nvswitches_configured{}"),
            chain("GPUs", "fabricmanager_gpus_expected{}"),
            chain("registered", "fabricmanager_gpus_registered{}"),
            width=15,
        ),
        stat(
            "Fabric",
            "The state now; docs/states.md explains them.",
            chain("state", fabric_state_number()),
            width=4,
            mappings=FABRIC_STATES,
        ),
        stat(
            "Fabric Manager",
            "Whether its process runs.",
            chain("runs", "fabricmanager_up{}"),
            width=2,
            mappings=no_or_yes(RED, GREEN),
        ),
        stat(
            "Configured in",
            "From its execution to the configured fabric.",
            chain("", "fabricmanager_configure_duration_seconds{}"),
            width=3,
            unit="s",
        ),
        timeline(
            "State of the fabric",
            "What the supervisor said when.",
            Query(ours(fabric_state_number()), "fabric"),
            FABRIC_STATES,
            width=24,
            height=4,
        ),
        timeline(
            "Conditions",
            "Those that held within the shown time. `fmsupervisor explain CODE` says what each means.",
            Query(
                ours(
                    "sum without (severity) (fmsupervisor_condition_active{}) and ignoring (severity) "
                    "max_over_time(fmsupervisor_condition_active{}[$__range]) == 1"
                ),
                "{{code}}",
            ),
            no_or_yes("transparent", RED),
            width=24,
        ),
        heat_map(
            "NVSwitches: the driver's word on Fabric Manager",
            "Each switch over time. MANAGER_TIMEOUT: the driver has missed Fabric Manager's heartbeat.",
            Query(ours(driver_state_number()), "{{pci_bus_id}}"),
            width=12,
            mappings=DRIVER_STATES,
            thresholds=thresholds(),
        ),
        heat_map(
            "NVSwitches: SXids",
            "New ones of each switch over time.",
            Query(ours("sum by (pci_bus_id) (increase(nvswitch_sxid_total{}[$__rate_interval]))"), "{{pci_bus_id}}"),
            width=12,
            decimals=0,
            thresholds=thresholds((0, GREEN), (1, YELLOW), (10, ORANGE), (100, RED)),
        ),
        bars(
            "SXids by link, last day",
            "Non-fatal ones of the twenty worst links, and fatal ones. One far above the others is a cable, a "
            "connector or a GPU.",
            Query(ours("topk(20, nvswitch_link_sxids_last_day{})"), "{{pci_bus_id}} port {{port}}"),
            Query(ours("nvswitch_link_fatal_sxids_last_day{}"), "{{pci_bus_id}} port {{port}}, fatal"),
            width=12,
            thresholds=thresholds(
                (0, GREEN), (options.link_sxids_per_hour, YELLOW), (24 * options.link_sxids_per_hour, RED)
            ),
        ),
        graph(
            "SXids by link, last hour",
            "Non-fatal ones, of links that had any within a day.",
            Query(ours("nvswitch_link_sxids_last_hour{}"), "{{pci_bus_id}} port {{port}}"),
        ),
        graph(
            "SXids by number",
            "Since the supervisor began. `fmsupervisor explain NUMBER` says what it means.",
            Query(ours("sum by (sxid, severity) (nvswitch_sxid_total{})"), "{{sxid}} {{severity}}"),
        ),
        timeline(
            "GPUs that have joined the fabric",
            "A GPU joins once, when its guest's driver starts.",
            Query(ours("fabric_gpu_registered{}"), "{{pci_bus_id}}"),
            no_or_yes(GREY, GREEN),
            width=12,
        ),
        timeline(
            "Guests that must be power-cycled",
            "By their GPUs.",
            Query(ours("fmsupervisor_guest_restart_required{}"), "{{pci_bus_id}}"),
            no_or_yes(GREEN, RED),
            width=12,
        ),
        graph(
            "Starts and ends of Fabric Manager",
            "Since the supervisor began.",
            Query(ours("fabricmanager_starts_total{}"), "starts"),
            Query(ours("fabricmanager_exits_total{}"), "ends: {{class}}"),
            decimals=0,
        ),
        graph(
            "Lines of Fabric Manager's log",
            "Per second, by level.",
            Query(ours("sum by (level) (rate(fabricmanager_log_lines_total{}[$__rate_interval]))"), "{{level}}"),
        ),
        graph(
            "Size of Fabric Manager's log",
            "Without rotation Fabric Manager stops logging at its limit (FMS-604).",
            Query(ours("fabricmanager_log_size_bytes{}"), "size"),
            unit="bytes",
        ),
        table(
            "NVSwitches",
            "As the driver knows them.",
            Query(ours("nvswitch_info{}"), is_instant=True),
            width=12,
            hidden=("job", options.cluster_label, options.node_label),
        ),
        table(
            "GPUs",
            "Driver and module id.",
            Query(ours("fabric_gpu_info{}"), is_instant=True),
            width=12,
            hidden=("job", options.cluster_label, options.node_label),
        ),
        table(
            "Sessions of Fabric Manager",
            "Those of the shown time. After each new one partitions must be activated again.",
            Query(
                ours("last_over_time(fabricmanager_info{}[$__range])"),
                is_instant=True,
            ),
            width=12,
            hidden=("job", options.cluster_label, options.node_label),
        ),
        table(
            "Driver",
            "The loaded one, and the file that would be loaded.",
            Query(ours("nvidia_module_info{}"), is_instant=True),
            width=12,
            hidden=("job", options.cluster_label, options.node_label),
        ),
    ]

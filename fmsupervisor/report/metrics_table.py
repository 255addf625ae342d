"""Every metric that is exported: name, type, labels and meaning, once.

The collector, docs/metrics.md and the tests are made from this table. Rules for names: prometheus/docs
practices/naming.md and instrumenting/writing_exporters.md; ``promtool check metrics`` is silent on the output.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Kind(StrEnum):
    """Metric types, by the names of prometheus_client."""

    COUNTER = "counter"
    GAUGE = "gauge"
    INFO = "info"  # always 1; the labels are the message. A gauge in the plain text format


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. ``help`` is one line."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str


@dataclass(frozen=True, slots=True)
class Section:
    """Metrics that describe one thing."""

    title: str
    metrics: tuple[Metric, ...]


def _counter(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, Kind.COUNTER, labels, meaning)


def _gauge(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, labels, meaning)


def _info(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, Kind.INFO, labels, meaning)


SECTIONS: tuple[Section, ...] = (
    Section(
        "The supervisor",
        (
            _info("fmsupervisor_build_info", "The running version of fmsupervisor.", "version"),
            _gauge(
                "fmsupervisor_start_timestamp_seconds",
                "When the supervisor began, in Unix time. All counters count since then.",
            ),
            _gauge(
                "fmsupervisor_condition_active",
                "Whether a condition of the runbook holds now, for every code that there is.",
                "code",
                "severity",
            ),
            _gauge(
                "fmsupervisor_collector_success",
                "Whether this part of the metrics could be made from the last state.",
                "collector",
            ),
            _gauge(
                "fmsupervisor_kernel_log_readable",
                "Whether /dev/kmsg can be read. Without it, SXids are known only from Fabric Manager's log.",
            ),
            _counter(
                "fmsupervisor_kernel_log_lost_total",
                "Records of the kernel log that were overwritten before they could be read, of whatever they were.",
            ),
            _counter("fmsupervisor_journal_dropped_total", "Log entries that journald did not take in time."),
        ),
    ),
    Section(
        "Fabric Manager",
        (
            _gauge("fabricmanager_state", "The state of the fabric. Exactly one is 1.", "state"),
            _gauge("fabricmanager_up", "Whether the supervised nv-fabricmanager process runs."),
            _info(
                "fabricmanager_info",
                "The running Fabric Manager. A new session means that partitions must be activated again.",
                "version",
                "fabric_mode",
                "session",
            ),
            _counter("fabricmanager_starts_total", "Executions of nv-fabricmanager."),
            _counter("fabricmanager_exits_total", "Ends of nv-fabricmanager, by what follows from them.", "class"),
            _info(
                "fabricmanager_last_exit_info",
                "The last end of nv-fabricmanager: its class, and exit status or signal number.",
                "class",
                "status",
                "signal",
            ),
            _gauge("fabricmanager_last_exit_timestamp_seconds", "When nv-fabricmanager ended last, in Unix time."),
            _gauge(
                "fabricmanager_start_timestamp_seconds", "When the running nv-fabricmanager was executed, in Unix time."
            ),
            _gauge(
                "fabricmanager_configured_timestamp_seconds",
                "When the running nv-fabricmanager had configured the fabric, in Unix time.",
            ),
            _gauge(
                "fabricmanager_configure_duration_seconds",
                "How long the running nv-fabricmanager took from its execution to the configured fabric.",
            ),
            _gauge("fabricmanager_restart_failures", "Deaths and failed starts in a row."),
            _gauge(
                "fabricmanager_restart_backoff_seconds", "The pause chosen before the next start; 0 when there is none."
            ),
            _gauge(
                "fabricmanager_next_start_timestamp_seconds",
                "When the present pause ends, in Unix time. Only while pausing.",
            ),
            _counter(
                "fabricmanager_log_lines_total",
                "Lines that Fabric Manager wrote, by their level; OTHER for lines without a known one.",
                "level",
            ),
            _counter(
                "fabricmanager_log_unrecognised_lines_total",
                "Lines that Fabric Manager wrote and that are of no known kind.",
            ),
            _gauge("fabricmanager_log_size_bytes", "Size of Fabric Manager's log file."),
        ),
    ),
    Section(
        "GPUs",
        (
            _gauge("fabricmanager_gpus_expected", "GPUs on the PCI bus of this host."),
            _gauge("fabricmanager_gpus_registered", "GPUs that have joined the fabric of the running Fabric Manager."),
            _gauge(
                "fabric_gpu_registered",
                "Whether this GPU has joined the running fabric; left out on A100, or if the log names GPUs otherwise.",
                "pci_bus_id",
            ),
            _gauge(
                "fabricmanager_gpu_registrations_lost",
                "GPUs that had joined an earlier session and not this one, and are not known to have been reset since.",
            ),
            _gauge(
                "fmsupervisor_guests",
                "Running processes that hold GPUs through vfio; left out while it cannot be looked at all of them.",
            ),
            _gauge(
                "fmsupervisor_gpu_in_guest",
                "Whether a running process holds this GPU through vfio; left out while that is unknown.",
                "pci_bus_id",
            ),
            _gauge(
                "fmsupervisor_guest_restart_required",
                "Whether the guest that holds this GPU must be power-cycled (FMS-619); left out when that is unknown.",
                "pci_bus_id",
            ),
            _gauge(
                "fmsupervisor_gpu_reset_required",
                "Whether this GPU, used by the host itself, must be reset after a restart of Fabric Manager (FMS-608).",
                "pci_bus_id",
            ),
            _counter(
                "fabricmanager_stale_handles_total",
                "Requests of GPUs that Fabric Manager refused because they had joined an earlier session.",
            ),
            _info(
                "fabric_gpu_info",
                "A GPU on the PCI bus, its driver (empty: none), and its module id once FM's log told it.",
                "pci_bus_id",
                "driver",
                "module_id",
            ),
        ),
    ),
    Section(
        "NVSwitches and their driver",
        (
            _gauge("nvswitches_expected", "NVSwitches that there must be: configured, or as many as have been seen."),
            _gauge("nvswitches_present", "NVSwitches on the PCI bus."),
            _gauge("nvswitches_bound", "NVSwitches that the nvidia-nvswitch driver is bound to."),
            _gauge("nvswitches_usable", "NVSwitches that the driver has probed and not blacklisted."),
            _gauge(
                "nvswitches_configured", "NVSwitches of which the driver says that Fabric Manager has configured them."
            ),
            _info(
                "nvswitch_info",
                "An NVSwitch that the driver has probed. physical_id is empty when the driver does not know it.",
                "pci_bus_id",
                "minor",
                "physical_id",
                "uuid",
            ),
            _gauge(
                "nvswitch_driver_state",
                "The driver's word on Fabric Manager per NVSwitch (NVSWITCH_DRIVER_FABRIC_STATE). Exactly one is 1.",
                "pci_bus_id",
                "state",
            ),
            _counter(
                "nvswitch_sxid_total",
                "SXids of the kernel's and Fabric Manager's log, each once; other: unknown numbers and switches.",
                "pci_bus_id",
                "sxid",
                "severity",
            ),
            _gauge(
                "nvswitch_sxids_before_start",
                "SXids that the kernel log held from before the supervisor began; they are not in nvswitch_sxid_total.",
                "pci_bus_id",
                "sxid",
                "severity",
            ),
            _gauge(
                "nvswitch_link_sxids_last_hour",
                "Non-fatal SXids of a link in the last hour, without 22013; only of links that had any within a day.",
                "pci_bus_id",
                "port",
            ),
            _gauge(
                "nvswitch_link_sxids_last_day",
                "Non-fatal SXids of a link in the last 24 hours, without 22013; only of links that had any.",
                "pci_bus_id",
                "port",
            ),
            _gauge(
                "nvswitch_link_fatal_sxids_last_day",
                "Fatal SXids of a link in the last 24 hours; a link that comes and goes has more of them than others.",
                "pci_bus_id",
                "port",
            ),
            _info(
                "nvidia_module_info",
                "Version of the NVIDIA kernel module: the loaded one, and the file that would be loaded.",
                "version",
                "source",
            ),
        ),
    ),
)

METRICS: Mapping[str, Metric] = MappingProxyType(
    {metric.name: metric for section in SECTIONS for metric in section.metrics}
)

_INTRODUCTION = """\
# Metrics

<!-- Made from fmsupervisor/report/metrics_table.py by the tests: RENEW_GOLDEN=1 pytest tests/unit/test_metrics.py -->

`GET /metrics` at `metrics.listen` (127.0.0.1:9752 unless set otherwise) answers in the Prometheus text format or in
OpenMetrics, compressed when the client accepts gzip. Each scrape shows one moment: everything in it comes from the
same state.

What cannot be observed is left out, never 0. Label values that are known beforehand are there from the start with the
value 0; series of things that are gone disappear. Points in time are Unix time in seconds. An `info` metric is a gauge
that is always 1; its labels are the message. PCI bus ids are written `dddd:bb:dd.f` in lower case. Values of labels are
cut to 128 characters.

Beside it: `/healthz` answers 200 while the supervisor's loop turns, `/readyz` answers 200 when the fabric is
configured, and 503 with the state and its reason otherwise.
"""

_WEB_CONFIG = """\
## TLS and passwords

`metrics.web_config` names a `web.yml` of the Prometheus exporter-toolkit. The file, its certificates and its keys are
read again when they change; a file that is not valid is reported (FMS-704) and the last good one stays in force. It
covers all paths, `/healthz` and `/readyz` too. Differences from the exporter-toolkit, all on the safe side:

- `client_auth_type` is `NoClientCert`, `VerifyClientCertIfGiven` or `RequireAndVerifyClientCert`; the types that take a
  certificate without verifying it are refused. The verifying ones need `client_ca_file`.
- A client whose certificate has none of `client_allowed_sans` gets the answer 403.
- `min_version` and `max_version` are `TLS12` or `TLS13`.
- `cert`, `key` and `client_ca` (certificates inside the file), `curve_preferences` and `rate_limit` are refused.
- `prefer_server_cipher_suites` and `http2` are accepted and have no effect.
"""


def render_reference() -> str:
    """docs/metrics.md."""
    parts = [_INTRODUCTION]
    for section in SECTIONS:
        rows = "".join(_row(metric) for metric in section.metrics)
        parts.append(f"## {section.title}\n\n| name | type | labels | meaning |\n|---|---|---|---|\n{rows}")
    parts.append(_WEB_CONFIG)
    return "\n".join(parts)


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |\n"

"""The alerts, once: expression, duration, severity, texts, and the conditions that each stands for.

Symptoms first (the fabric is not configured, a guest must be restarted), then causes that an operator can act on. Every
condition of the registry that is critical or a warning is heard: those without an alert of their own come through
FabricConditionCritical and FabricConditionWarning, so that a new condition needs no new rule.

What comes and goes. An alert on a state that passes by itself (Fabric Manager is down for a moment) has a duration, and
a signal that comes and goes faster never reaches it; coming and going itself is what FabricManagerCrashLooping is for.
An alert on what is bad even when it passed (a switch was lost) looks back some minutes instead, so it does not fire
anew each time. ``keep_firing_for`` would do this too, but rule files with it are refused before Prometheus 2.42.

Counters are not asked with ``increase()`` where one event counts: a series that is born with the value 1 has not
increased. Fatal SXids therefore come from the condition, which the daemon keeps over a restart of itself (the counters
it does not), and deaths from the smallest value
within the hour, which is exact.

What a daemon cannot observe it leaves out. Such an alert ends then, and another begins: the conditions about not being
able to look are warnings, FmsupervisorMetricsIncomplete and FmsupervisorDown are about the daemon itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fmsupervisor.conditions import REGISTRY, Code, Condition, Severity
from fmsupervisor.mixin.expression import name_labels, render
from fmsupervisor.mixin.options import Options


def _listed(series: str, label: str) -> str:
    """A template: the label's values of the node's series that are 1. Prometheus is asked when the alert is made."""
    name, _, matchers = series.rstrip("}").partition("{")
    target = ", ".join(filter(None, ("<selector>", matchers, "<cluster>=%q, <node>=%q")))
    return (
        f"{{{{ range printf `{name}{{{target}}} == 1` $labels.<cluster> $labels.<node> "
        f'| query | sortByLabel "{label}" }}}}{{{{ .Labels.{label} }}}} {{{{ else }}}}none {{{{ end }}}}'
    )


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert. ``codes``: the conditions it stands for; without one it is explained in docs/alerts.md alone.

    ``severity`` is the first condition's unless it says otherwise. With ``has_code`` its series carry the label code;
    ``is_for_the_rest``: it takes the conditions that no other alert is for.
    """

    name: str
    expression: str
    lasts: str
    summary: str
    description: str
    codes: tuple[Code, ...] = ()
    severity: Severity | None = None
    has_code: bool = False
    is_for_the_rest: bool = False

    @property
    def urgency(self) -> Severity:
        """How urgent it is."""
        return self.severity or REGISTRY[self.codes[0]].severity


def _series(*codes: Code) -> str:
    """PromQL: whether each of the conditions holds."""
    return f'fmsupervisor_condition_active{{code=~"{"|".join(codes)}"}}'


_OPEN_CONDITIONS = _listed('fmsupervisor_condition_active{severity="critical"}', "code")
_GPUS_TO_RESTART = _listed("fmsupervisor_guest_restart_required", "pci_bus_id")
_FATAL_SXIDS = 'nvswitch_sxid_total{severity="fatal"} > 0'
_MISSING = (Code.SWITCH_MISSING, Code.SWITCH_NOT_PROBED, Code.SWITCH_PASSED_THROUGH, Code.SWITCH_BLACKLISTED)
_LOST = (Code.SWITCH_LOST, Code.SWITCH_NOT_RESPONDING)
_VERSIONS = (Code.VERSION_MISMATCH, Code.RELOAD_NEEDED, Code.VERSION_REJECTED)

_OWN_ALERTS = (
    Alert(
        "FabricNotConfigured",
        'sum without (state) (fabricmanager_state{state=~"configured|degraded|not-applicable"}) == 0',
        "15m",
        "The NVLink fabric of {{ $labels.<node> }} is not configured.",
        "Guests started now get CUDA error 802. `fmsupervisor status` on the node names the step that holds it. "
        f"Open conditions: {_OPEN_CONDITIONS}",
        severity=Severity.CRITICAL,
    ),
    Alert(
        "FabricDegraded",
        'sum without (state) (fabricmanager_state{state="degraded"}) == 1 unless '
        'max without (code, severity) (fmsupervisor_condition_active{severity="critical"}) == 1',
        "10m",
        "The NVLink fabric of {{ $labels.<node> }} is degraded, and no condition says why.",
        "The driver or the log no longer says configured. `fmsupervisor status` on the node gives the reason.",
        severity=Severity.WARNING,
    ),
    Alert(
        "FabricManagerDown",
        "fabricmanager_up{} == 0 and fabricmanager_starts_total{} > 0 unless ignoring (state) "
        'fabricmanager_state{state="not-applicable"} == 1',
        "2m",
        "Fabric Manager on {{ $labels.<node> }} has ended and does not run.",
        "Running guests keep their routes; no GPU can join the fabric. GPUs that had joined lose their registration.",
        (Code.FABRIC_MANAGER_DIED,),
        Severity.CRITICAL,
    ),
    Alert(
        "FabricManagerCrashLooping",
        f"max without (code, severity) ({_series(Code.CRASH_LOOP)}) == 1 or "
        'max without (class) (fabricmanager_exits_total{class="unexpected"} - '
        'min_over_time(fabricmanager_exits_total{class="unexpected"}[1h])) >= 3',
        "0m",
        "Fabric Manager on {{ $labels.<node> }} dies again and again.",
        "Three or more unexpected deaths within an hour, or so many in a row that restart.crash_loop_count is reached.",
        (Code.CRASH_LOOP,),
    ),
    Alert(
        "FabricManagerTimeout",
        'count without (pci_bus_id, state) (nvswitch_driver_state{state="MANAGER_TIMEOUT"} == 1) '
        "and fabricmanager_up{} == 1 and fabricmanager_configured_timestamp_seconds{}",
        "1m",
        "The NVSwitch driver on {{ $labels.<node> }} has not heard from Fabric Manager.",
        "The driver's watchdog says MANAGER_TIMEOUT of {{ $value }} NVSwitches although the process lives.",
        (Code.FABRIC_MANAGER_HUNG,),
    ),
    Alert(
        "FabricManagerLogFull",
        f"{_series(Code.LOG_FULL)} == 1",
        "5m",
        "Fabric Manager's log on {{ $labels.<node> }} is full.",
        "Fabric Manager has stopped logging: errors and registrations are no longer seen.",
        (Code.LOG_FULL,),
    ),
    Alert(
        "FabricVersionMismatch",
        f"{_series(*_VERSIONS)} == 1",
        "2m",
        "Driver, Fabric Manager and NSCQ on {{ $labels.<node> }} are not of one version ({{ $labels.code }}).",
        "Fabric Manager refuses a driver of any other version than its own.",
        _VERSIONS,
        has_code=True,
    ),
    Alert(
        "NVSwitchMissing",
        f"{_series(*_MISSING)} == 1",
        "5m",
        "An NVSwitch of {{ $labels.<node> }} is missing or has no working driver ({{ $labels.code }}).",
        "Without all its NVSwitches the fabric cannot be configured, or only in part.",
        _MISSING,
        has_code=True,
    ),
    Alert(
        "NVSwitchLost",
        f"max_over_time({_series(*_LOST)}[5m]) == 1",
        "0m",
        "An NVSwitch of {{ $labels.<node> }} that worked is lost ({{ $labels.code }}).",
        "Traffic of running guests through this switch fails.",
        _LOST,
        has_code=True,
    ),
    Alert(
        "NVSwitchFatalSXid",
        f"{_FATAL_SXIDS} and ignoring (pci_bus_id, sxid, severity, code) {_series(Code.SXID_FATAL)} == 1 or "
        f"max without (code, severity) ({_series(Code.SXID_FATAL)} == 1 unless "
        f"ignoring (pci_bus_id, sxid, severity, code) {_FATAL_SXIDS})",
        "0m",
        "An NVSwitch{{ with $labels.pci_bus_id }} ({{ . }}){{ end }} of {{ $labels.<node> }} reported a fatal "
        "SXid{{ with $labels.sxid }} ({{ . }}){{ end }}.",
        "It holds until a later Fabric Manager session has configured the fabric. `fmsupervisor explain NUMBER` says "
        "what a number means. An alert without one: the supervisor has begun to count anew since.",
        (Code.SXID_FATAL,),
    ),
    Alert(
        "NVLinkErrorsRising",
        "nvswitch_link_sxids_last_hour{} >= <link_sxids> and nvswitch_link_sxids_last_hour{} > "
        "2 * (nvswitch_link_sxids_last_day{} - nvswitch_link_sxids_last_hour{}) / 23 "
        "or nvswitch_link_sxids_last_day{} >= 24 * <link_sxids>",
        "10m",
        "Port {{ $labels.port }} of NVSwitch {{ $labels.pci_bus_id }} on {{ $labels.<node> }} reports ever more SXids.",
        "Non-fatal SXids of one link: more than <link_sxids> in an hour and twice the rate of the day, or that many in "
        "every hour of the day. One link with many errors is a cable, a connector or a GPU. Compare the links in "
        "`fmsupervisor status`, and have the link checked before it fails.",
        severity=Severity.WARNING,
    ),
    Alert(
        "GPUOnWrongDriver",
        'max without (module_id) (fabric_gpu_info{driver="nvidia"}) == 1 and '
        f"ignoring (pci_bus_id, driver, code, severity) {_series(Code.GPU_TAKEN)} == 1",
        "2m",
        "GPU {{ $labels.pci_bus_id }} of {{ $labels.<node> }} is bound to the driver {{ $labels.driver }}.",
        "No guest can have it.",
        (Code.GPU_TAKEN,),
    ),
    Alert(
        "GPUNotRegistered",
        "fabric_gpu_registered{} == 0 and fmsupervisor_gpu_in_guest{} == 1 unless "
        "fmsupervisor_guest_restart_required{} == 1",
        "15m",
        "GPU {{ $labels.pci_bus_id }} of {{ $labels.<node> }} is in a guest and has not joined the fabric.",
        "CUDA in that guest fails with error 802, or it has no driver.",
        (Code.GUEST_NOT_REGISTERED,),
        Severity.WARNING,
    ),
    Alert(
        "GuestRestartRequired",
        "sum without (pci_bus_id) (fmsupervisor_guest_restart_required{}) > 0",
        "1m",
        "Guests on {{ $labels.<node> }} must be power-cycled: {{ $value }} of their GPUs cannot use the fabric.",
        f"GPUs: {_GPUS_TO_RESTART}; `fmsupervisor status` names the guests.",
        (Code.GUEST_RESTART_REQUIRED,),
    ),
    Alert(
        "FmsupervisorDown",
        "up{} == 0",
        "5m",
        "fmsupervisor on {{ $labels.<node> }} does not answer.",
        "Nothing is known of the fabric of this node. `systemctl status fmsupervisor` on the node says why.",
        severity=Severity.CRITICAL,
    ),
    Alert(
        "FmsupervisorAbsent",
        "absent(up{})",
        "10m",
        "Prometheus has no fmsupervisor to scrape.",
        "No target matches {<selector>}: the scrape configuration or the service discovery is broken.",
        severity=Severity.CRITICAL,
    ),
    Alert(
        "FmsupervisorMetricsIncomplete",
        "fmsupervisor_collector_success{} == 0",
        "5m",
        "fmsupervisor on {{ $labels.<node> }} cannot make the metrics of its part {{ $labels.collector }}.",
        "Alerts on these metrics cannot fire. It is a mistake in fmsupervisor: report it with `fmsupervisor report`.",
        severity=Severity.WARNING,
    ),
)

_SPOKEN_FOR = frozenset(code for alert in _OWN_ALERTS for code in alert.codes)


def _others(severity: Severity) -> tuple[Code, ...]:
    return tuple(one.code for one in REGISTRY.values() if one.severity is severity and one.code not in _SPOKEN_FOR)


def _all_others(severity: Severity, lasts: str) -> Alert:
    """For the conditions without an alert of their own, also those that are not invented yet."""
    spoken_for = "|".join(sorted(_SPOKEN_FOR))
    return Alert(
        f"FabricCondition{severity.title()}",
        f'fmsupervisor_condition_active{{severity="{severity}", code!~"{spoken_for}"}} == 1',
        lasts,
        "Condition {{ $labels.code }} holds on {{ $labels.<node> }}.",
        "`fmsupervisor status` on the node says what was found.",
        _others(severity),
        severity,
        has_code=True,
        is_for_the_rest=True,
    )


ALERTS: tuple[Alert, ...] = (
    *_OWN_ALERTS,
    _all_others(Severity.CRITICAL, "2m"),
    _all_others(Severity.WARNING, "15m"),
)

NAMES = frozenset(alert.name for alert in ALERTS)


def rules(options: Options) -> list[Mapping[str, object]]:
    """The alerts as rules of Prometheus."""
    return [_rule(alert, options) for alert in ALERTS if alert.name not in options.omit]


def _rule(alert: Alert, options: Options) -> Mapping[str, object]:
    urgency = options.severities.get(alert.urgency, str(alert.urgency))
    annotations = {
        "summary": _text(alert.summary, options),
        "description": _text(describe(alert), options),
        "runbook_url": runbook_url(alert, options),
    }
    return MappingProxyType(
        {
            "alert": alert.name,
            "expr": render(alert.expression, options),
            "for": options.for_.get(alert.name, alert.lasts),
            "labels": {"severity": urgency, **options.labels},
            "annotations": annotations,
        }
    )


def describe(alert: Alert) -> str:
    """What it means, and what to do or who says so."""
    condition = _condition(alert)
    if condition:
        return f"{alert.description} What to do: {condition.remedy}"
    if alert.has_code:
        return f"{alert.description} What to do: see runbook_url, or `fmsupervisor explain {{{{ $labels.code }}}}`."
    return alert.description


def runbook_url(alert: Alert, options: Options) -> str:
    """Where the remedy stands: the condition's place in the runbook, else the alert's own."""
    if alert.has_code:
        return options.runbook_url.format(anchor="{{ $labels.code | toLower }}")
    condition = _condition(alert)
    if condition:
        return options.runbook_url.format(anchor=condition.anchor)
    return options.alerts_url.format(anchor=alert.name.lower())


def _condition(alert: Alert) -> Condition | None:
    return REGISTRY[alert.codes[0]] if alert.codes and not alert.has_code else None


def _text(text: str, options: Options) -> str:
    return name_labels(text.replace("<selector>", options.selector), options)

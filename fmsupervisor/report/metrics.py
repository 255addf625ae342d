"""The metrics, made from one frozen snapshot of the state per scrape.

Nothing is counted or looked at here: whatever is exported stands in the state, so a scrape costs no I/O and its series
agree with each other. The collector is given to the encoders of prometheus_client directly; there is no registry and
therefore no process, platform or ``_created`` series.

A part that cannot be made (a mistake in it, on a state that nobody foresaw) costs its own series and sets
``fmsupervisor_collector_success`` to 0; the rest of the scrape is served.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.core import Metric as Family

from fmsupervisor import __version__, sxid
from fmsupervisor.conditions import REGISTRY
from fmsupervisor.core import guests, link_history, switches
from fmsupervisor.core.state import NEVER, ExitClass, State
from fmsupervisor.core.verdict import FabricState
from fmsupervisor.facts import DriverState, LoadedModule, SwitchErrorKey
from fmsupervisor.report.metrics_table import METRICS, Kind, Metric
from fmsupervisor.report.snapshot import JOURNAL_DROPPED, Snapshot

OTHER = "other"

_LOG_LEVELS = ("CRITICAL", "ERROR", "WARNING", "INFO")
_LABEL_CHARACTERS = 128
# What a mistake raises on values that nobody foresaw.
_MISTAKES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Sample:
    """One series: the metric's name, its value, its labels in the order of the table."""

    name: str
    value: float
    labels: tuple[str, ...] = ()


class FabricCollector:
    """Makes the metric families. ``snapshot`` returns the last one, None before the first."""

    def __init__(self, snapshot: Callable[[], Snapshot | None]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Family]:
        """All families that have a series, in the order of the table."""
        by_name: dict[str, list[Sample]] = {}
        for sample in _samples(self._snapshot()):
            by_name.setdefault(sample.name, []).append(sample)
        for name, metric in METRICS.items():
            if name in by_name:
                yield _family(metric, by_name[name])


def _samples(snapshot: Snapshot | None) -> Iterator[Sample]:
    yield Sample("fmsupervisor_build_info", 1, (__version__,))
    if snapshot is None:
        return
    for name, part in _PARTS.items():
        try:
            made = list(part(snapshot))
        except _MISTAKES:
            yield Sample("fmsupervisor_collector_success", 0, (name,))
        else:
            yield Sample("fmsupervisor_collector_success", 1, (name,))
            yield from made


def _family(metric: Metric, samples: Iterable[Sample]) -> Family:
    match metric.kind:
        case Kind.COUNTER:
            counter = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
            for sample in samples:
                counter.add_metric([_label(text) for text in sample.labels], sample.value)
            return counter
        case Kind.GAUGE:
            gauge = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
            for sample in samples:
                gauge.add_metric([_label(text) for text in sample.labels], sample.value)
            return gauge
        case Kind.INFO:
            info = InfoMetricFamily(metric.name.removesuffix("_info"), metric.help, labels=metric.labels)
            for sample in samples:
                info.add_metric((), dict(zip(metric.labels, map(_label, sample.labels), strict=True)))
            return info


def _label(text: str) -> str:
    """A label value of bounded length that can always be encoded."""
    return text[:_LABEL_CHARACTERS].encode("utf-8", "backslashreplace").decode("utf-8")


def _one_hot(name: str, before: tuple[str, ...], values: Iterable[str], present: str) -> Iterator[Sample]:
    """A series for each of ``values``, 1 for the present one and 0 for the others."""
    for value in values:
        yield Sample(name, float(value == present), (*before, value))


def _supervisor(snapshot: Snapshot) -> Iterator[Sample]:
    yield Sample("fmsupervisor_start_timestamp_seconds", snapshot.state.begun.wall)
    active = {problem.code for problem in snapshot.verdict.problems}
    for code, condition in REGISTRY.items():
        yield Sample("fmsupervisor_condition_active", float(code in active), (code, condition.severity))
    yield Sample("fmsupervisor_journal_dropped_total", snapshot.extra.get(JOURNAL_DROPPED, 0))


def _fabric_manager(snapshot: Snapshot) -> Iterator[Sample]:
    state = snapshot.state
    yield from _one_hot("fabricmanager_state", (), FabricState, snapshot.verdict.state)
    yield Sample("fabricmanager_up", float(state.run is not None))
    yield Sample("fabricmanager_starts_total", state.counters.starts)
    for exit_class in ExitClass:
        yield Sample("fabricmanager_exits_total", state.counters.exits.get(exit_class, 0), (exit_class,))
    yield Sample("fabricmanager_restart_failures", state.failures)
    pause_ends_at = state.next_start_at if state.run is None else None
    yield Sample("fabricmanager_restart_backoff_seconds", state.backoff_seconds if pause_ends_at is not None else 0)
    if pause_ends_at is not None:
        wall = state.now.wall + pause_ends_at - state.now.monotonic
        yield Sample("fabricmanager_next_start_timestamp_seconds", wall)


def _run(snapshot: Snapshot) -> Iterator[Sample]:
    state = snapshot.state
    last = state.last_exit
    if last is not None:
        code, signal = (_text(number) for number in (last.status.code, last.status.signal))
        yield Sample("fabricmanager_last_exit_info", 1, (last.exit_class, code, signal))
        yield Sample("fabricmanager_last_exit_timestamp_seconds", last.at.wall)
    run = state.run
    if run is None:
        return
    installed = state.installation.fabric_manager_version if state.installation else None
    mode = str(state.settings.fabric_manager.fabric_mode)
    yield Sample("fabricmanager_info", 1, (run.version or installed or "", mode, run.session))
    yield Sample("fabricmanager_start_timestamp_seconds", run.started.wall)
    if run.configured is not None:
        yield Sample("fabricmanager_configured_timestamp_seconds", run.configured.wall)
        seconds = run.configured.monotonic - run.started.monotonic
        yield Sample("fabricmanager_configure_duration_seconds", seconds)


def _log(snapshot: Snapshot) -> Iterator[Sample]:
    counters = snapshot.state.counters
    for level in _LOG_LEVELS:
        yield Sample("fabricmanager_log_lines_total", counters.log_lines.get(level, 0), (level,))
    others = sum(count for level, count in counters.log_lines.items() if level not in _LOG_LEVELS)
    yield Sample("fabricmanager_log_lines_total", others, (OTHER.upper(),))
    yield Sample("fabricmanager_log_unrecognised_lines_total", counters.log_unrecognised)
    yield Sample("fabricmanager_stale_handles_total", counters.stale_handles)
    if snapshot.state.log_size_bytes is not None:
        yield Sample("fabricmanager_log_size_bytes", snapshot.state.log_size_bytes)


def _gpus(snapshot: Snapshot) -> Iterator[Sample]:
    state = snapshot.state
    yield Sample("fabricmanager_gpus_registered", len(state.run.registered) if state.run else 0)
    yield Sample("fabricmanager_gpu_registrations_lost", len(state.lost_registrations))
    if state.host is None:
        return
    yield Sample("fabricmanager_gpus_expected", len(state.host.gpus))
    for gpu in state.host.gpus:
        module_id = _text(state.module_ids.get(gpu.pci_bus_id))
        yield Sample("fabric_gpu_info", 1, (gpu.pci_bus_id, gpu.driver or "", module_id))
    registered = {state.gpu_buses.get(uuid, bus) for uuid, bus in state.run.registered.items()} if state.run else set()
    is_told = registered <= {gpu.pci_bus_id for gpu in state.host.gpus}
    if state.run is not None and is_told and switches.registers_in_band(state):
        for gpu in state.host.gpus:
            yield Sample("fabric_gpu_registered", float(gpu.pci_bus_id in registered), (gpu.pci_bus_id,))


def _guests(snapshot: Snapshot) -> Iterator[Sample]:
    """One series for each GPU, however many guests there are."""
    state = snapshot.state
    is_known = state.guests_looked_at != NEVER and not guests.why_unknown(state)
    if is_known:
        yield Sample("fmsupervisor_guests", len(state.guests))
    to_restart = {gpu for guest in guests.to_restart(state) for gpu in guest.gpus}
    to_reset = guests.gpus_to_reset(state)
    in_guests = {gpu for guest in state.guests for gpu in guest.gpus}
    for gpu in state.host.gpus if state.host else ():
        bus_id = gpu.pci_bus_id
        if is_known:
            yield Sample("fmsupervisor_gpu_in_guest", float(bus_id in in_guests), (bus_id,))
        if is_known or bus_id in to_restart:
            yield Sample("fmsupervisor_guest_restart_required", float(bus_id in to_restart), (bus_id,))
        yield Sample("fmsupervisor_gpu_reset_required", float(bus_id in to_reset), (bus_id,))


def _switches(snapshot: Snapshot) -> Iterator[Sample]:
    state = snapshot.state
    if state.installation is not None and state.installation.module is not None:
        yield Sample("nvidia_module_info", 1, (state.installation.module.version, "file"))
    if state.host is None:
        return
    if isinstance(state.host.module, LoadedModule) and state.host.module.version is not None:
        yield Sample("nvidia_module_info", 1, (state.host.module.version, "loaded"))
    present = switches.present(state)
    bound = [switch for switch in present if switch.driver == switches.SWITCH_DRIVER]
    yield Sample("nvswitches_expected", switches.expected(state))
    yield Sample("nvswitches_present", len(present))
    yield Sample("nvswitches_bound", len(bound))


def _driver(snapshot: Snapshot) -> Iterator[Sample]:
    """The driver's word. It is unknown when a live driver cannot be asked, and nothing when there is no driver."""
    state = snapshot.state
    is_unloaded = state.host is not None and state.host.module is None
    if state.driver_view is None and not is_unloaded:
        return
    devices = () if is_unloaded else switches.devices(state)
    usable = [device for device in devices if device.is_usable]
    configured = [device for device in usable if device.driver_state is DriverState.CONFIGURED]
    yield Sample("nvswitches_usable", len(usable))
    yield Sample("nvswitches_configured", len(configured))
    for device in devices:
        identity = (device.pci_bus_id, str(device.minor), _text(device.physical_id), device.uuid)
        yield Sample("nvswitch_info", 1, identity)
        says = device.driver_state.name if isinstance(device.driver_state, DriverState) else OTHER
        known = (*DriverState.__members__, OTHER)
        yield from _one_hot("nvswitch_driver_state", (device.pci_bus_id,), known, says)


def _sxids(snapshot: Snapshot) -> Iterator[Sample]:
    """Summed over ports. At most (switches seen + 1) x (numbers that the driver has + 1) x 2 series for each metric."""
    state = snapshot.state
    for name, errors in (
        ("nvswitch_sxid_total", state.counters.switch_errors),
        ("nvswitch_sxids_before_start", state.counters.switch_errors_before_start),
    ):
        counts: dict[tuple[str, str, str], int] = {}
        for key, count in errors.items():
            labels = _sxid_labels(state, key)
            counts[labels] = counts.get(labels, 0) + count
        for labels, count in sorted(counts.items()):
            yield Sample(name, count, labels)


def _links(snapshot: Snapshot) -> Iterator[Sample]:
    """At most as many links as ``core.link_history`` keeps."""
    state = snapshot.state
    last_hour = link_history.errors_within(state, link_history.HOUR_SECONDS)
    for link, count in sorted(link_history.errors_within(state, link_history.DAY_SECONDS).items()):
        bus_id, port = link
        yield Sample("nvswitch_link_sxids_last_hour", last_hour.get(link, 0), (bus_id, str(port)))
        yield Sample("nvswitch_link_sxids_last_day", count, (bus_id, str(port)))
    for (bus_id, port), count in sorted(link_history.faults_within(state, link_history.DAY_SECONDS).items()):
        yield Sample("nvswitch_link_fatal_sxids_last_day", count, (bus_id, str(port)))


def _sxid_labels(state: State, key: SwitchErrorKey) -> tuple[str, str, str]:
    """Everything that was not called fatal is non-fatal here."""
    module = state.host.module if state.host else None
    version = module.version if isinstance(module, LoadedModule) else None
    bus_id = key.pci_bus_id if key.pci_bus_id in state.seen_switches else OTHER
    number = str(key.sxid) if sxid.lookup(key.sxid, version) else OTHER
    return bus_id, number, "fatal" if key.severity == "fatal" else "non-fatal"


def _kernel_log(snapshot: Snapshot) -> Iterator[Sample]:
    state = snapshot.state
    if state.is_kernel_log_read or state.kernel_log_problem:
        yield Sample("fmsupervisor_kernel_log_readable", float(not state.kernel_log_problem))
    yield Sample("fmsupervisor_kernel_log_lost_total", state.counters.kernel_lost)


def _text(number: int | None) -> str:
    return "" if number is None else str(number)


_PARTS: Mapping[str, Callable[[Snapshot], Iterator[Sample]]] = MappingProxyType(
    {
        "supervisor": _supervisor,
        "fabric_manager": _fabric_manager,
        "run": _run,
        "log": _log,
        "gpus": _gpus,
        "guests": _guests,
        "switches": _switches,
        "driver": _driver,
        "sxids": _sxids,
        "links": _links,
        "kernel_log": _kernel_log,
    }
)

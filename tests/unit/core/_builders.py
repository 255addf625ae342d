"""A healthy HGX H200 host and its Fabric Manager, as values; each builder takes what is different this time."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from fmsupervisor.conditions import Code
from fmsupervisor.core import actions, events
from fmsupervisor.core.reduce import reduce
from fmsupervisor.core.state import Run, State
from fmsupervisor.core.verdict import config_key, nodes_key
from fmsupervisor.facts import (
    DeviceState,
    DriverState,
    DriverView,
    Guest,
    GuestReading,
    Host,
    Installation,
    KernelBatch,
    KernelKind,
    KernelRecord,
    LoadedModule,
    LogBatch,
    LogKind,
    LogRecord,
    ModuleChoice,
    Moment,
    NodeResult,
    PciFunction,
    Problem,
    RenderedConfig,
    SwitchDevice,
    SwitchErrorKey,
    Unknown,
    WantedNode,
)
from fmsupervisor.settings import Settings

VERSION = "580.126.09"
SWITCHES = tuple(f"0000:{bus:02x}:00.0" for bus in (5, 6, 7, 8))
GPUS = tuple(f"0000:{bus:02x}:00.0" for bus in (0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF))
LIVE = LoadedModule("live", VERSION)
COMING = LoadedModule("coming", None)
CHOICE = ModuleChoice("/lib/modules/nvidia.ko", "6.12.0", VERSION, (), "it is built for the running kernel")
BLIND = Unknown("the control node cannot be opened")
BEGUN = 1000.0


def moment(seconds: float = BEGUN) -> Moment:
    """``seconds`` on the monotonic clock."""
    return Moment(seconds, 1_700_000_000.0 + seconds)


def settings(**tables: Mapping[str, Any]) -> Settings:
    """The defaults with some keys changed: ``settings(restart={"policy": "never"})``."""
    default = Settings()
    return replace(default, **{name: replace(getattr(default, name), **keys) for name, keys in tables.items()})


def switch(bus_id: str, driver: str | None = "nvidia-nvswitch", responds: bool | None = True) -> PciFunction:
    """An NVSwitch on the bus."""
    return PciFunction(bus_id, "10de:22a3", driver, responds)


def make_host(
    on_bus: Iterable[str] = SWITCHES,
    *,
    module: LoadedModule | Unknown | None = LIVE,
    unbound: Iterable[str] = (),
    gpu_driver: str | None = "vfio-pci",
    **changes: Any,
) -> Host:
    """A host whose driver is live and has probed every switch that is not ``unbound``."""
    is_live = module == LIVE
    bound = [bus_id for bus_id in on_bus if is_live and bus_id not in tuple(unbound)]
    healthy = Host(
        kernel_release="6.12.0",
        switches=tuple(switch(one, "nvidia-nvswitch" if one in bound else None) for one in on_bus),
        gpus=tuple(PciFunction(bus_id, "10de:2335", gpu_driver) for bus_id in GPUS),
        nvlink5_bridges=(),
        module=module,
        probed_switches=tuple(bound) if is_live else None,
        majors=MappingProxyType({"nvidia": 195, "nvidia-nvswitch": 235} if is_live else {}),
        fabric_management_minor=1 if is_live else None,
        fabric_management_mode=0o600 if is_live else None,
    )
    return replace(healthy, **changes)


def make_view(
    says: DriverState | int = DriverState.CONFIGURED, on_bus: Iterable[str] = SWITCHES, *, first_minor: int = 0
) -> DriverView:
    """The driver says the same of every switch."""
    return DriverView(
        tuple(
            SwitchDevice(minor, f"SWX-{bus_id}", bus_id, says, DeviceState.STANDBY, 0, minor + 1)
            for minor, bus_id in enumerate(on_bus, first_minor)
        )
    )


def make_installation(*problems: Problem, **changes: Any) -> Installation:
    """Everything installed, of one version."""
    found = Installation(CHOICE, VERSION, VERSION, problems, "first", ("/nv/usr/bin/nv-fabricmanager",))
    return replace(found, **changes)


def make_config(*problems: Problem, **changes: Any) -> RenderedConfig:
    """A rendered configuration."""
    return replace(RenderedConfig("/etc/fm.cfg", (), "/var/log/fabricmanager.log", False, 1 << 20, problems), **changes)


def node(outcome: str = "kept", path: str = "/dev/nvidia-nvswitchctl") -> NodeResult:
    """What became of a device node."""
    return NodeResult(
        WantedNode(path, 235, 255, 0o666, 0, 0), outcome, "a regular file" if outcome == "refused" else ""
    )


def record(kind: LogKind, text: str = "what it said", **fields: str) -> LogRecord:
    """A line of Fabric Manager's log."""
    return LogRecord(kind, "INFO", text, fields)


def said(*records: LogRecord | LogKind, source: str = "file", **changes: Any) -> events.LogRead:
    """Fabric Manager wrote these lines."""
    lines = tuple(one if isinstance(one, LogRecord) else record(one) for one in records)
    return events.LogRead(LogBatch(source, records=lines, **changes))


def kernel_record(kind: KernelKind, text: str = "what it said", *, is_old: bool = False, **fields: str) -> KernelRecord:
    """A line of the kernel log."""
    return KernelRecord(kind, text, fields, is_old=is_old)


def sxid(key: SwitchErrorKey, *, is_old: bool = False, what: str = "an error") -> KernelRecord:
    """An SXid in the kernel log."""
    port = {} if key.port is None else {"port": str(key.port)}
    fields = {"pci_bus_id": key.pci_bus_id, "sxid": str(key.sxid), "severity": key.severity, "what": what, **port}
    return kernel_record(KernelKind.SWITCH_ERROR, is_old=is_old, minor="0", **fields)


def kernel_said(*records: KernelRecord, lost: int = 0) -> events.KernelLogRead:
    """The kernel wrote these lines."""
    return events.KernelLogRead(KernelBatch(records, lost))


def make_state(wanted: Settings | None = None, **changes: Any) -> State:
    """The daemon has just begun: nothing is known."""
    state = State(settings=wanted or Settings(), begun=moment(), now=moment())
    return replace(state, **changes)


def ready(wanted: Settings | None = None, **changes: Any) -> State:
    """Everything was looked at a second ago, nothing is in the way: the next action is to start."""
    state = make_state(wanted, now=moment(BEGUN + 1))
    state = after(state, events.InstallationInspected(make_installation()), events.HostObserved(make_host()))
    state = replace(state, is_installation_stale=False)
    state = after(state, events.ConfigPrepared(make_config()), events.ForeignLookedFor(()))
    state = after(state, events.DriverObserved(make_view(DriverState.STANDBY)))
    state = after(state, events.NodesEnsured((node(),)), *looked_for())
    return replace(state, **changes)


def looked_for(*guests: Guest, hidden: Iterable[tuple[int, int]] = ()) -> tuple[events.Event, ...]:
    """A search for guests, and what it found."""
    reading = GuestReading(guests, frozenset(hidden))
    return events.ActionTaken(actions.LookForGuests()), events.GuestsLookedFor(reading)


def guest(
    pid: int = 77, *, started: float = 0.0, gpus: Iterable[str] = GPUS[:1], name: str = "default_vm1", ticks: int = 0
) -> Guest:
    """A guest; ``started`` is on the monotonic clock."""
    return Guest(pid, ticks or int(started * 100) + 1, started, name, tuple(gpus))


def executed(wanted: Settings | None = None, **changes: Any) -> State:
    """Fabric Manager was executed a moment ago; the driver has not been asked about it."""
    return replace(after(ready(wanted), events.FabricManagerStarted(4711, "first-4711")), **changes)


def configured(wanted: Settings | None = None, **changes: Any) -> State:
    """Both witnesses have said configured."""
    state = after(executed(wanted), events.DriverObserved(make_view(DriverState.STANDBY)))
    state = after(state, said(LogKind.SESSION_HEADER, LogKind.CONFIGURED), events.DriverObserved(make_view()))
    return replace(after(state, *looked_for()), **changes)


def after(state: State, *happened: events.Event, seconds: float = 0.0) -> State:
    """The state after these events, ``seconds`` later."""
    now = moment(state.now.monotonic + seconds)
    for event in happened or (events.TimePassed(),):
        state = reduce(state, event, now)
    return state


def looked_at(state: State) -> State:
    """The same with configuration and nodes made for what is known now."""
    return replace(state, config_for=config_key(state), nodes_for=nodes_key(state))


def run_of(state: State) -> Run:
    """The running Fabric Manager; there must be one."""
    if state.run is None:
        raise AssertionError("no Fabric Manager runs")
    return state.run


def codes(problems: Iterable[Problem]) -> set[Code]:
    """The codes alone."""
    return {problem.code for problem in problems}

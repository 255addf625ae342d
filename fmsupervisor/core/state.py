"""What the supervisor knows: one frozen value, folded from events by ``reduce``.

Only facts and history live here. Whatever can be derived (the fabric state, the active conditions, the next action) is
derived, in ``diagnosis``, ``verdict`` and ``plan``, so that it cannot disagree with the facts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from fmsupervisor.core.actions import StopCause
from fmsupervisor.facts import (
    DriverView,
    ExitStatus,
    ForeignFabricManager,
    Guest,
    Host,
    Installation,
    LogRecord,
    Moment,
    NodeResult,
    Problem,
    RenderedConfig,
    SwitchErrorKey,
    Unknown,
)
from fmsupervisor.settings import FabricManagerSettings, Settings

NEVER = float("-inf")


def _nothing() -> Mapping[Any, Any]:
    """The empty mapping (a mapping cannot be a default by itself)."""
    return MappingProxyType({})


class ExitClass(StrEnum):
    """Why Fabric Manager ended, which decides what follows (DESIGN decision 5)."""

    REQUESTED = "requested"  # we stopped it
    NOT_APPLICABLE = "not-applicable"  # there is nothing for it to do on this machine
    TERMINAL = "terminal"  # it will fail again until something named changes
    EXTERNAL = "external"  # something outside is in the way; try again
    UNEXPECTED = "unexpected"  # it died


class Aspect(StrEnum):
    """A part of the world whose change may cure a terminal failure."""

    INSTALLATION = "the installed files"
    LOADED_MODULE = "the loaded driver"
    SWITCHES = "the NVSwitches on the bus"
    GPU_DRIVERS = "the drivers of the GPUs"
    SETTINGS = "the settings"


LOAD_CURES = (Aspect.INSTALLATION, Aspect.SWITCHES, Aspect.SETTINGS, Aspect.LOADED_MODULE)


@dataclass(frozen=True, slots=True)
class Block:
    """A failure that is not retried until one of ``aspects`` differs from what it was then (``values``)."""

    problem: Problem
    aspects: tuple[Aspect, ...]
    values: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Fabric Manager was asked to end."""

    asked: Moment
    cause: StopCause
    is_killed: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """One execution of Fabric Manager."""

    session: str  # start time and pid: clients of FM's partition API compare it to see a restart
    pid: int
    started: Moment
    stop: Stop | None = None
    is_log_seen: bool = False  # its log has begun
    version: str | None = None  # as it says in its log
    success: Moment | None = None  # the success line in its log
    configured: Moment | None = None  # all witnesses agreed for the first time
    is_driver_seen_unconfigured: bool = False  # the driver's present word is about this run, not about the one before
    registered: Mapping[str, str] = field(
        default_factory=_nothing
    )  # GPU UUID -> PCI bus id as FM printed it ("" = not told)
    failures: tuple[LogRecord, ...] = ()  # start-up failures that it reported
    unmanaged_since: float | None = None  # the driver says MANAGER_TIMEOUT since then
    is_driver_gone: bool = False  # the driver was unloaded in this run and has not been heard since
    adopted: Moment | None = None  # this supervisor took it over then
    was_configured: Moment | None = None  # an earlier supervisor saw that all witnesses agreed
    settings: FabricManagerSettings | None = None  # as they were when it was executed
    is_resilient: bool = False  # it was started with --restart
    partitions_told: Moment | None = None  # it activated a partition for the first time


@dataclass(frozen=True, slots=True)
class Exit:
    """The last end of Fabric Manager."""

    session: str
    pid: int
    at: Moment
    status: ExitStatus
    exit_class: ExitClass
    reason: str
    last_lines: tuple[str, ...]
    configured: Moment | None = None  # when it had configured the fabric


@dataclass(frozen=True, slots=True)
class Latched:
    """A problem that was reported once and holds until a later session has configured the fabric."""

    problem: Problem
    session: str


Link = tuple[str, int]  # bus id of the switch, port
ErrorStream = tuple[str, int, int | None]  # bus id, SXid, port


@dataclass(frozen=True, slots=True)
class Balance:
    """The kernel's events of one stream less Fabric Manager's reports of it (core.switch_errors)."""

    ahead: int
    at: float  # the last of either, monotonic


@dataclass(frozen=True, slots=True)
class KernelProblem:
    """A problem that the kernel log told, until ``until`` (monotonic) or until the switch is reset."""

    problem: Problem
    until: float


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals since the daemon began."""

    starts: int = 0
    exits: Mapping[str, int] = field(default_factory=_nothing)  # by ExitClass
    log_lines: Mapping[str, int] = field(default_factory=_nothing)  # by level
    log_unrecognised: int = 0
    switch_errors: Mapping[SwitchErrorKey, int] = field(default_factory=_nothing)
    switch_errors_before_start: Mapping[SwitchErrorKey, int] = field(default_factory=_nothing)  # in the kernel log
    kernel_lost: int = 0  # records of the kernel log that were overwritten before they could be read
    stale_handles: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """Everything that is known."""

    settings: Settings
    begun: Moment
    now: Moment
    first_settings: Settings | None = None  # those in force when the daemon began

    host: Host | None = None  # the last successful reading
    host_unknown: str = ""  # why the last reading failed; "" = it did not
    is_host_stale: bool = True
    host_observed_at: float = NEVER
    bus_changed_at: float = NEVER  # switches or GPUs have come to or left the PCI bus since the first look
    seen_switches: frozenset[str] = frozenset()  # bus ids that have been on the bus
    working_switches: frozenset[str] = frozenset()  # bus ids that have been bound and probed
    switch_wait_since: float | None = None  # the module is live and switches are missing since then

    installation: Installation | None = None
    is_installation_stale: bool = True
    is_inspecting: bool = False

    is_loading: bool = False
    load_began_at: float = NEVER
    load_failures: int = 0
    load_retry_at: float | None = None
    load_problem: Problem | None = None  # the last failure of a kind that is retried
    load_basis: tuple[object, ...] = ()  # the aspects in LOAD_CURES when the load began

    driver: DriverView | Unknown | None = None  # its last word to this run; Unknown only when it has not said any
    driver_unknown: str = ""  # why the last look failed; "" = it did not
    driver_observed_at: float = NEVER  # the last look
    driver_heard_at: float = NEVER  # the last look that succeeded

    nodes: tuple[NodeResult, ...] = ()
    nodes_for: object = None  # plan.nodes_key when they were ensured

    config: RenderedConfig | None = None
    config_for: object = None  # plan.config_key when it was prepared

    foreign: tuple[ForeignFabricManager, ...] = ()
    foreign_looked_at: float = NEVER

    guests: tuple[Guest, ...] = ()  # processes that hold GPUs, by pid; see core.guests
    guests_unknown: str = ""  # why the last search could not look at everything; "" = it could
    guests_looked_at: float = NEVER  # when the last search that has ended began
    guest_search_began_at: float = NEVER
    is_looking_for_guests: bool = False
    guests_to_restart: frozenset[tuple[int, int]] = frozenset()  # identities of guests that must be power-cycled

    run: Run | None = None
    has_orphans: bool = False  # what the last one left behind is still being ended
    last_exit: Exit | None = None
    failures: int = 0  # deaths in a row
    next_start_at: float | None = None
    backoff_seconds: float = 0.0  # the pause that was chosen when next_start_at was set
    blocks: tuple[Block, ...] = ()
    latched: Mapping[tuple[str, str], Latched] = field(default_factory=_nothing)  # by code, subject
    registered_before: frozenset[str] = frozenset()  # GPU UUIDs of runs that ended, until the next one is configured
    lost_registrations: frozenset[str] = frozenset()  # and not with the one that was configured next (core.guests)
    gpu_buses: Mapping[str, str] = field(default_factory=_nothing)  # GPU UUID -> PCI bus id
    module_ids: Mapping[str, int] = field(
        default_factory=lambda: MappingProxyType({})
    )  # GPU bus id -> 1-based module id
    contradicted_modules: frozenset[str] = frozenset()  # GPU bus ids of which contradictory module ids were learned

    is_kernel_log_read: bool = False  # at least once
    kernel_log_problem: str = ""
    kernel_problems: Mapping[tuple[str, str], KernelProblem] = field(default_factory=_nothing)  # by code, subject
    kernel_minors: Mapping[str, str] = field(default_factory=_nothing)  # minor -> bus id, as the kernel log told it
    kernel_probing: str = ""  # the switch that the driver has begun to probe
    error_balances: Mapping[ErrorStream, Balance] = field(default_factory=_nothing)
    link_errors: Mapping[Link, Mapping[int, int]] = field(default_factory=_nothing)  # see core.link_history
    link_faults: Mapping[Link, Mapping[int, int]] = field(default_factory=_nothing)

    log_problem: str = ""
    log_size_bytes: int | None = None
    service_problems: Mapping[str, Problem] = field(default_factory=_nothing)

    is_stopping: bool = False
    has_ended: bool = False  # nothing of ours is left
    counters: Counters = field(default_factory=Counters)

    @property
    def driver_view(self) -> DriverView | None:
        """The driver's present word; None when it cannot be asked now."""
        return self.driver if isinstance(self.driver, DriverView) and not self.driver_unknown else None


def aspect_value(state: State, aspect: Aspect) -> object:
    """The present value of an aspect; comparable, not meant to be read."""
    host = state.host
    match aspect:
        case Aspect.INSTALLATION:
            return state.installation.fingerprint if state.installation else None
        case Aspect.LOADED_MODULE:
            return host.module if host else None
        case Aspect.SWITCHES:
            return (host.switches, host.probed_switches) if host else None
        case Aspect.GPU_DRIVERS:
            return tuple((gpu.pci_bus_id, gpu.driver) for gpu in host.gpus) if host else None
        case Aspect.SETTINGS:
            return state.settings


def aspect_values(state: State, aspects: tuple[Aspect, ...]) -> tuple[object, ...]:
    """The present values of several aspects."""
    return tuple(aspect_value(state, aspect) for aspect in aspects)


def make_block(state: State, problem: Problem, *aspects: Aspect) -> Block:
    """A block that holds until one of ``aspects`` changes from what it is now."""
    return Block(problem, aspects, aspect_values(state, aspects))


def is_cured(state: State, block: Block) -> bool:
    """Whether something that the block waits for has changed."""
    return aspect_values(state, block.aspects) != block.values

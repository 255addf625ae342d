"""Everything that can happen to the supervisor, as values."""

from dataclasses import dataclass

from fmsupervisor.core.actions import Action
from fmsupervisor.core.state import Run
from fmsupervisor.facts import (
    DriverView,
    ExitStatus,
    ForeignFabricManager,
    GuestReading,
    Host,
    Installation,
    KernelBatch,
    LogBatch,
    ModuleMap,
    NodeResult,
    Problem,
    RenderedConfig,
    Unknown,
)
from fmsupervisor.settings import Settings


@dataclass(frozen=True, slots=True)
class HostObserved:
    """/sys and /proc were read; Unknown when not even the PCI bus could be listed."""

    host: Host | Unknown


@dataclass(frozen=True, slots=True)
class HostMayHaveChanged:
    """A uevent arrived, or events were lost: look again."""


@dataclass(frozen=True, slots=True)
class PathsChanged:
    """Watched files changed (logical paths)."""

    paths: frozenset[str]


@dataclass(frozen=True, slots=True)
class InstallationInspected:
    """The tree was read."""

    installation: Installation


@dataclass(frozen=True, slots=True)
class ModuleLoadEnded:
    """A load of nvidia.ko came back; None = loaded."""

    problem: Problem | None


@dataclass(frozen=True, slots=True)
class DriverObserved:
    """The control node was asked."""

    driver: DriverView | Unknown


@dataclass(frozen=True, slots=True)
class NodesEnsured:
    """The device nodes were made or checked."""

    results: tuple[NodeResult, ...]


@dataclass(frozen=True, slots=True)
class ConfigPrepared:
    """fabricmanager.cfg and its directories were prepared."""

    config: RenderedConfig


@dataclass(frozen=True, slots=True)
class ForeignLookedFor:
    """The process table and the sockets were searched for another Fabric Manager."""

    foreign: tuple[ForeignFabricManager, ...]


@dataclass(frozen=True, slots=True)
class GuestsLookedFor:
    """The processes were searched for those that hold GPUs; Unknown when /proc does not show them."""

    reading: GuestReading | Unknown


@dataclass(frozen=True, slots=True)
class BackoffDrawn:
    """The pause before the next start."""

    seconds: float


@dataclass(frozen=True, slots=True)
class FabricManagerStarted:
    """Fabric Manager was executed."""

    pid: int
    session: str
    is_resilient: bool = False  # with --restart
    state_problem: str = ""  # why not, though it was wanted


@dataclass(frozen=True, slots=True)
class FabricManagerAdopted:
    """A Fabric Manager that an earlier supervisor executed was taken over, running or just found dead."""

    run: Run
    config: RenderedConfig | None


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """The system refused to execute Fabric Manager."""

    reason: str


@dataclass(frozen=True, slots=True)
class FabricManagerExited:
    """Fabric Manager's main process ended. ``orphans``: descendants that it left behind (they are being ended)."""

    status: ExitStatus
    last_lines: tuple[str, ...]
    orphans: int = 0
    was_unseen: bool = False  # it ended while no supervisor ran


@dataclass(frozen=True, slots=True)
class OrphansEnded:
    """Nothing of what Fabric Manager left behind is left."""


@dataclass(frozen=True, slots=True)
class LogRead:
    """New lines of Fabric Manager."""

    batch: LogBatch


@dataclass(frozen=True, slots=True)
class KernelLogRead:
    """New lines of the kernel log, or why it cannot be read."""

    batch: KernelBatch


@dataclass(frozen=True, slots=True)
class ModulesRecalled:
    """What an earlier run of the supervisor has learned of the board was read."""

    modules: ModuleMap


@dataclass(frozen=True, slots=True)
class SettingsReloaded:
    """SIGHUP: the settings file was read again and is valid; ``problem`` says why it is not, and nothing changes."""

    settings: Settings
    problem: Problem | None = None


@dataclass(frozen=True, slots=True)
class ServiceProblem:
    """A part of the supervisor itself has a problem, or (``is_active`` false) has it no longer."""

    problem: Problem
    is_active: bool


@dataclass(frozen=True, slots=True)
class StopRequested:
    """SIGTERM or SIGINT."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """A deadline of ``plan.next_deadline`` was reached."""


@dataclass(frozen=True, slots=True)
class ActionTaken:
    """The shell begins to carry out this action."""

    action: Action


Event = (
    HostObserved
    | HostMayHaveChanged
    | PathsChanged
    | InstallationInspected
    | ModuleLoadEnded
    | DriverObserved
    | NodesEnsured
    | ConfigPrepared
    | ForeignLookedFor
    | GuestsLookedFor
    | BackoffDrawn
    | FabricManagerStarted
    | FabricManagerAdopted
    | SpawnFailed
    | FabricManagerExited
    | OrphansEnded
    | LogRead
    | KernelLogRead
    | ModulesRecalled
    | SettingsReloaded
    | ServiceProblem
    | StopRequested
    | TimePassed
    | ActionTaken
)

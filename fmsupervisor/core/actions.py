"""Everything the supervisor can do to the host, as values. ``reason`` is the sentence that people get to read."""

from dataclasses import dataclass
from enum import StrEnum

from fmsupervisor.facts import ModuleChoice


@dataclass(frozen=True, slots=True)
class ObserveHost:
    """Read /sys and /proc."""


@dataclass(frozen=True, slots=True)
class InspectInstallation:
    """Read the tree and ask Fabric Manager for its version (takes a while; answered by ``InstallationInspected``)."""


@dataclass(frozen=True, slots=True)
class LoadModule:
    """Load nvidia.ko (may take minutes; answered by ``ModuleLoadEnded``)."""

    choice: ModuleChoice
    parameters: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class EnsureNodes:
    """Make the device nodes right."""


@dataclass(frozen=True, slots=True)
class ObserveDriver:
    """GET_DEVICES_V2."""


@dataclass(frozen=True, slots=True)
class PrepareConfig:
    """Render fabricmanager.cfg and make the directories it names."""

    version: str | None


@dataclass(frozen=True, slots=True)
class LookForForeign:
    """Search for another Fabric Manager."""


@dataclass(frozen=True, slots=True)
class LookForGuests:
    """Search the processes for those that hold GPUs (takes a moment; answered by ``GuestsLookedFor``)."""


@dataclass(frozen=True, slots=True)
class DrawBackoff:
    """Choose the pause before the next start: the ``attempt``-th failure in a row."""

    attempt: int


@dataclass(frozen=True, slots=True)
class StartFabricManager:
    """Execute Fabric Manager."""

    resiliency: bool
    reason: str


class StopCause(StrEnum):
    """Why Fabric Manager is being stopped."""

    REQUESTED = "requested"
    HANG = "hang"
    START_TIMEOUT = "start-timeout"


@dataclass(frozen=True, slots=True)
class TerminateFabricManager:
    """SIGTERM to Fabric Manager."""

    cause: StopCause
    reason: str


@dataclass(frozen=True, slots=True)
class KillFabricManager:
    """SIGKILL to Fabric Manager and its descendants."""

    reason: str


@dataclass(frozen=True, slots=True)
class EndService:
    """Leave the loop: everything is stopped."""


Action = (
    ObserveHost
    | InspectInstallation
    | LoadModule
    | EnsureNodes
    | ObserveDriver
    | PrepareConfig
    | LookForForeign
    | LookForGuests
    | DrawBackoff
    | StartFabricManager
    | TerminateFabricManager
    | KillFabricManager
    | EndService
)

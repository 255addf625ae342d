"""What one supervisor leaves to the next, so that what happens to the supervisor does not happen to the fabric.

Two ways lead from one to the next, and one document serves both:

* **In place.** A new version is executed in this very process (execve). Children stay children, descriptors stay open,
  so it goes on as if nothing had been: ``Live`` has where every reader has come to. Nothing is counted or told twice.
* **After a crash.** There is only what was written to ``FILE`` before: the record of Fabric Manager (``ownership``) and
  the part of the state that cannot be observed again (``_KEPT``). Counters begin at zero again, as after any restart of
  a process; Prometheus knows that. Carried on from an old copy they would seem to run backwards and count twice.

The state goes field by field, by the names and types of ``core.state.State``. A field that the reader does not know is
ignored, one that is missing or damaged keeps its default and is named in ``dropped``. So versions with other fields
understand each other as far as they agree. ``LAYOUT`` changes only when a field changes its meaning: such a document
still gives the record, which keeps its form for ever. A new version that cannot read it all is not executed.

Not handed over: what is observed again at once (``_NOT_CARRIED``), and failures that the earlier version found terminal
when it crashed: they are tried once more.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from fmsupervisor.codec import DecodeError, decode, encode
from fmsupervisor.core.state import Aspect, Block, State, aspect_values
from fmsupervisor.errors import ActionFailed, CannotObserve
from fmsupervisor.fabric_manager.control import ManagerMemory
from fmsupervisor.fabric_manager.ownership import ManagerRecord, boot_id
from fmsupervisor.facts import Problem
from fmsupervisor.host.root import HostRoot
from fmsupervisor.settings import Settings

LAYOUT = 1
FILE = "handover.json"
VARIABLE = "FMSUPERVISOR_HANDOVER"  # the descriptor of the document, for the program that is executed in place

_LIMIT_BYTES = 1 << 25
_MODE = 0o600  # the token is in it

# Made anew by the next one.
_NOT_CARRIED = frozenset(
    {
        "settings",
        "first_settings",
        "now",
        "is_host_stale",
        "is_installation_stale",
        "is_inspecting",
        "is_loading",
        "is_looking_for_guests",
        "guest_search_began_at",
        "load_basis",
        "nodes_for",
        "config_for",
        "blocks",
        "service_problems",
        "is_stopping",
        "has_ended",
    }
)
# Of the rest, what a crash must not make us forget.
_KEPT = frozenset(
    {
        "run",
        "config",
        "has_orphans",
        "last_exit",
        "failures",
        "next_start_at",
        "backoff_seconds",
        "latched",
        "registered_before",
        "lost_registrations",
        "gpu_buses",
        "seen_switches",
        "working_switches",
        "switch_wait_since",
        "link_errors",
        "link_faults",
    }
)


@dataclass(frozen=True, slots=True)
class ReporterMemory:
    """What was told last."""

    is_ready: bool
    state: str
    since_wall: float
    conditions: tuple[tuple[Problem, float], ...]  # active ones, and since when (Unix time)


@dataclass(frozen=True, slots=True)
class Live:
    """Where everything has come to, for the program that goes on in this process."""

    version: str
    lock: int
    state_directory: str
    manager: ManagerMemory
    reporter: ReporterMemory
    listening: int = -1  # the socket of the metrics server
    listens_on: str = ""
    kernel_sequence: int | None = None
    blocks: tuple[tuple[Problem, tuple[Aspect, ...]], ...] = ()
    settings: Settings | None = None

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Those that execve must not close."""
        own = [descriptor for descriptor in (self.lock, self.listening) if descriptor >= 0]
        return (*own, *self.manager.descriptors)


@dataclass(frozen=True, slots=True)
class Handover:
    """The document, as far as it could be understood; ``dropped`` names the rest."""

    record: ManagerRecord | None = None
    values: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    live: Live | None = None
    clock: tuple[float, float] | None = None  # the base of its clock
    is_stopping: bool = False  # it had been asked to end
    dropped: tuple[str, ...] = ()

    def begin(self, fresh: State) -> State:
        """The state to begin with: ``fresh``, with what was handed over."""
        later = ("run",) if self.live else ("run", "config")  # known when Fabric Manager's process has been found
        state = replace(fresh, **{name: value for name, value in self.values.items() if name not in later})
        if self.live is None or self.live.settings != fresh.settings:
            return state
        blocks = tuple(Block(problem, aspects, aspect_values(state, aspects)) for problem, aspects in self.live.blocks)
        return replace(state, blocks=blocks)


def carried(state: State, *, whole: bool) -> dict[str, Any]:
    """The fields of the state that are handed over: all that can be, or what a crash must not make us forget."""
    names = [name for name in State.__dataclass_fields__ if name not in _NOT_CARRIED and (whole or name in _KEPT)]
    return {name: getattr(state, name) for name in names}


def document(record: ManagerRecord | None, state: State, clock: tuple[float, float], live: Live | None = None) -> bytes:
    """For ``parse``."""
    values = carried(state, whole=live is not None)
    content = {
        "layout": LAYOUT,
        "boot_id": boot_id(),
        "record": encode(record),
        "state": encode(values),
        "live": encode(live),
        "clock": encode(clock),
        "is_stopping": state.is_stopping,
    }
    return json.dumps(content, separators=(",", ":")).encode()


def parse(content: bytes) -> Handover:
    """Never raises; what cannot be understood is named in ``dropped``."""
    try:
        found = json.loads(content)
        if not isinstance(found, dict):
            raise DecodeError(f"{type(found).__name__} in place of a table")
    except (ValueError, RecursionError) as error:
        return Handover(dropped=(f"the whole: {error}",))
    dropped: list[str] = []
    record = _part(ManagerRecord | None, found, "record", dropped)
    if found.get("layout") != LAYOUT:
        dropped.append(f"state: its layout is {found.get('layout')!r}, this version knows {LAYOUT}")
        return Handover(record, dropped=tuple(dropped))
    if found.get("boot_id") != boot_id():
        return Handover(dropped=("everything: it is from before the last boot",))
    return Handover(
        record,
        _values(found.get("state"), dropped),
        _part(Live | None, found, "live", dropped),
        _part(tuple[float, float] | None, found, "clock", dropped),
        is_stopping=found.get("is_stopping") is True,
        dropped=tuple(dropped),
    )


def _part(kind: Any, found: dict[str, Any], name: str, dropped: list[str]) -> Any:
    try:
        return decode(kind, found.get(name), name)
    except (DecodeError, RecursionError, OverflowError) as error:
        dropped.append(str(error))
        return None


def _values(found: object, dropped: list[str]) -> Mapping[str, Any]:
    from typing import get_type_hints  # noqa: PLC0415 - only when there is something to hand over

    if not isinstance(found, dict):
        dropped.append("state: not a table")
        return {}
    hints = get_type_hints(State)
    values = {}
    for name, content in found.items():
        if name not in hints or name in _NOT_CARRIED:
            continue
        try:
            values[name] = decode(hints[name], content, name)
        except (DecodeError, RecursionError, OverflowError) as error:
            dropped.append(str(error))
    return values


def load(root: HostRoot, state_directory: str) -> Handover:
    """What a supervisor that has died left; empty when it left nothing, or ended in order."""
    path = f"{state_directory}/{FILE}"
    try:
        content = root.read_bytes(path, _LIMIT_BYTES)
    except CannotObserve as error:
        return Handover(dropped=(str(error),))
    if content is None:
        return Handover()
    return replace(parse(content), live=None)


def save(
    root: HostRoot, state_directory: str, record: ManagerRecord | None, state: State, clock: tuple[float, float]
) -> None:
    """Keep it for the case of a crash. Raises ``ActionFailed``."""
    root.write_atomically(f"{state_directory}/{FILE}", document(record, state, clock), _MODE, durable=False)


def forget(root: HostRoot, state_directory: str) -> None:
    """The supervisor ends in order. Raises ``ActionFailed``."""
    try:
        os.unlink(root.path(f"{state_directory}/{FILE}"))
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ActionFailed(f"cannot remove {state_directory}/{FILE}: {error.strerror}") from error


def read_descriptor(descriptor: int) -> Handover:
    """What the program that executed this one in its place left, and close it. Raises ``OSError``."""
    with open(descriptor, "rb") as file:
        file.seek(0)
        return parse(file.read(_LIMIT_BYTES))


def write_descriptor(content: bytes) -> int:
    """The document in memory, in a descriptor that execve closes unless told otherwise. Raises ``OSError``."""
    descriptor = os.memfd_create("fmsupervisor-handover")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    return descriptor

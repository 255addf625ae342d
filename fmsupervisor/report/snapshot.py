"""What the reporting is made of at one moment: frozen, so that another thread may read it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from fmsupervisor.core.state import State
from fmsupervisor.core.verdict import Verdict

JOURNAL_DROPPED = "journal_dropped"  # the key of ``Snapshot.extra``


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state and what follows from it. ``extra``: counters that are kept outside the state."""

    state: State
    verdict: Verdict
    extra: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

"""What a scenario must come to, checked against the daemon's status document."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from fmsupervisor.conditions import Code

_NO_EXITS: Mapping[str, int] = MappingProxyType({})
_FINAL_STATES = frozenset({"failed", "not-applicable"})

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Expectation:
    """The end state. Numbers are minima, unless ``None``, which means any."""

    states: tuple[str, ...]
    active: tuple[Code, ...] = ()
    inactive: tuple[Code, ...] = ()
    starts: int | None = None  # of Fabric Manager, at least
    most_starts: int | None = None
    exits: Mapping[str, int] = field(default_factory=lambda: _NO_EXITS)  # class -> at least
    last_signal: int | None = None  # that ended Fabric Manager last
    gpus_registered: int | None = None
    switches_usable: int | None = None  # exactly
    switch_errors: Mapping[int, int] = field(default_factory=dict)  # SXid -> exact sum over switches
    passes_through: tuple[str, ...] = ()  # final-looking states that are not the end here

    def met(self, document: Document) -> bool:
        """Whether the document shows all of it."""
        return not self.missing(document)

    def missing(self, document: Document) -> list[str]:
        """What is not as expected yet, as phrases."""
        active = {condition["code"] for condition in document["conditions"]}
        manager = document["fabric_manager"]
        starts = manager["starts"]
        exits = manager["exits"]
        registered = sum(1 for gpu in document["gpus"] if gpu["registered"])
        usable = sum(1 for switch in document["switches"] if switch["usable"])
        findings = [
            (document["state"] in self.states, f"state is {document['state']}"),
            *((code.value in active, f"{code.value} is not active") for code in self.active),
            *((code.value not in active, f"{code.value} is active") for code in self.inactive),
            (starts >= (self.starts or 0), f"{starts} starts"),
            (self.most_starts is None or starts <= self.most_starts, f"{starts} starts"),
            *(
                (exits.get(name, 0) >= least, f"{exits.get(name, 0)} exits {name}")
                for name, least in self.exits.items()
            ),
            (self.last_signal in (None, _last_signal(manager)), f"the last exit was by signal {_last_signal(manager)}"),
            (registered >= (self.gpus_registered or 0), f"{registered} GPUs registered"),
            (self.switches_usable in (None, usable), f"{usable} switches usable"),
            *(
                (_count(document, sxid) == exact, f"SXid {sxid} counted {_count(document, sxid)} times")
                for sxid, exact in self.switch_errors.items()
            ),
        ]
        return [phrase for is_fine, phrase in findings if not is_fine]

    def impossible(self, document: Document) -> str | None:
        """Why the end state cannot be reached any more; None while it can."""
        state = document["state"]
        if state in _FINAL_STATES and state not in self.states and state not in self.passes_through:
            return f"the state is {state} ({document.get('reason', '')}), expected was {self.describe()}"
        starts = document["fabric_manager"]["starts"]
        if self.most_starts is not None and starts > self.most_starts:
            return f"Fabric Manager was started {starts} times, expected was {self.describe()}"
        for sxid, exact in self.switch_errors.items():
            if _count(document, sxid) > exact:
                return f"SXid {sxid} was counted {_count(document, sxid)} times, expected was {self.describe()}"
        return None

    def describe(self) -> str:
        """The end state in one line."""
        parts = [" or ".join(self.states)]
        if self.active:
            parts.append("with " + ", ".join(code.value for code in self.active))
        if self.inactive:
            parts.append("without " + ", ".join(code.value for code in self.inactive))
        if self.starts is not None:
            parts.append(f"at least {self.starts} starts")
        if self.most_starts is not None:
            parts.append(f"at most {self.most_starts} starts")
        parts += [f"at least {least} exits {name}" for name, least in self.exits.items()]
        if self.last_signal is not None:
            parts.append(f"last exit by signal {self.last_signal}")
        if self.gpus_registered is not None:
            parts.append(f"{self.gpus_registered} GPUs registered")
        if self.switches_usable is not None:
            parts.append(f"{self.switches_usable} switches usable")
        parts += [f"SXid {sxid} counted {exact} times" for sxid, exact in self.switch_errors.items()]
        return ", ".join(parts)


def _count(document: Document, sxid: int) -> int:
    errors = document["counters"]["switch_errors"]
    return sum(error["count"] for error in errors if error["sxid"] == sxid)


def _last_signal(manager: Document) -> int | None:
    last_exit = manager.get("last_exit")
    signal: int | None = last_exit["signal"] if last_exit else None
    return signal

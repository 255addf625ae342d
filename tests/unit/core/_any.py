"""Any event, made from the type annotations of the union ``Event``: a new event or field is covered by itself.

Texts come from what the other values use, so that things meet (a line about a switch that is there), and from a supply
that never ends, as a hostile log would have it. Hardware is finite.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from random import Random
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from _builders import BEGUN, CHOICE, GPUS, SWITCHES, VERSION, moment, settings

from fmsupervisor.core import actions
from fmsupervisor.core.events import Event
from fmsupervisor.facts import (
    DeviceState,
    DriverState,
    ExitStatus,
    Guest,
    Host,
    KernelBatch,
    KernelRecord,
    LoadedModule,
    LogBatch,
    LogRecord,
    ModuleChoice,
    Moment,
    NodeResult,
    PciFunction,
    SwitchDevice,
    SwitchErrorKey,
    WantedNode,
)
from fmsupervisor.settings import Settings

EVENTS: tuple[type[Any], ...] = get_args(Event)
BUSES = (*SWITCHES, "0000:09:00.0")
SETTINGS = (
    Settings(),
    settings(restart={"policy": "never", "crash_loop_count": 2}),
    settings(restart={"policy": "when-no-guests"}),
    settings(restart={"policy": "when-no-guests"}),
    settings(switches={"expected": 5, "deadline_seconds": 0.0, "when_missing": "fail"}),
    settings(switches={"expected": 2, "deadline_seconds": 1.0, "when_missing": "start-anyway"}),
    settings(module={"load": False}, fabric_manager={"hang_policy": "restart", "hang_seconds": 0.0}),
    settings(module={"gpu_guard": "no-register"}, fabric_manager={"fabric_mode": 1, "resiliency_restart": True}),
)
_WORDS = (*BUSES, *GPUS, "", "GPU-a", "GPU-b", "nvidia-nvswitch0", "/sys/module/nvidia", "/dev/nvidia-nvswitchctl")
_SECONDS = (0.0, 0.5, 1.0, 60.0)


class Anything:
    """Makes values; the same source of chance makes the same values. ``novelty``: how often a text is a new one."""

    def __init__(self, chance: Random, *, novelty: float = 0.1) -> None:
        self._chance = chance
        self._novelty = novelty
        self._new = 0
        self.now = BEGUN  # moments are before it

    def event(self, kind: type[Any] | None = None) -> Event:
        """An event of that kind, else of any."""
        made: Event = self.value(kind or self._chance.choice(EVENTS))
        return made

    def action(self) -> actions.Action:
        """An action that the plan might or might not have wanted now."""
        made: actions.Action = self.value(actions.Action)
        return made

    def value(self, kind: Any, where: tuple[type[Any], str] | None = None) -> Any:
        """A value of the type, which is that of a field when ``where`` names one."""
        if where in _FIELDS:
            return _FIELDS[where](self)
        if kind in _KINDS:
            return _KINDS[kind](self)
        origin, arguments = get_origin(kind), get_args(kind)
        if origin in (Union, UnionType):
            return self.value(self.one_of(arguments))
        if origin is tuple and arguments[1:] == (...,):
            return tuple(self.value(arguments[0]) for _ in range(self._few()))
        if origin is tuple:
            return tuple(self.value(one) for one in arguments)
        if origin is frozenset:
            return frozenset(self.value(arguments[0]) for _ in range(self._few()))
        if origin is not None and issubclass(origin, Mapping):
            key, item = arguments
            return MappingProxyType({self.value(key): self.value(item) for _ in range(self._few())})
        if is_dataclass(kind):
            return self._built(kind)
        if isinstance(kind, type) and issubclass(kind, Enum):
            return self.one_of(tuple(kind))
        raise AssertionError(f"nobody knows how to make {kind} for {where}")

    def one_of(self, choices: tuple[Any, ...]) -> Any:
        """One of them."""
        return choices[self._chance.randrange(len(choices))]

    def some_of(self, choices: tuple[Any, ...]) -> tuple[Any, ...]:
        """Some of them, in their order."""
        return tuple(one for one in choices if self._chance.random() < 0.7)

    def text(self) -> str:
        """A known text or one that has never been seen."""
        if self._chance.random() >= self._novelty:
            return str(self.one_of(_WORDS))
        self._new += 1
        return f"new-{self._new}"

    def number(self, below: int = 4) -> int:
        """A small number."""
        return self._chance.randrange(below)

    def _few(self) -> int:
        return self.one_of((0, 0, 1, 1, 2, 3))  # type: ignore[no-any-return]

    def _built(self, kind: Any) -> Any:
        hints = _hints(kind)
        return kind(**{one.name: self.value(hints[one.name], (kind, one.name)) for one in fields(kind)})

    def novel_fields(self, **known: tuple[str, ...]) -> Mapping[str, str]:
        """Fields of a line: each from its words, rarely something new."""
        return {
            name: self.text() if name in ("uuid", "text") and self.number(8) == 0 else self.one_of(words)
            for name, words in known.items()
        }


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _functions(make: Anything, bus_ids: tuple[str, ...], drivers: tuple[str | None, ...]) -> tuple[PciFunction, ...]:
    return tuple(
        PciFunction(bus_id, "10de:22a3", make.one_of(drivers), make.one_of((True, True, True, None, False)))
        for bus_id in make.some_of(bus_ids)
    )


def _kernel_fields(make: Anything) -> Mapping[str, str]:
    known = make.novel_fields(
        pci_bus_id=(*BUSES, *GPUS),
        minor=("0", "1", "2", "300"),
        sxid=("10004", "10005", "10006", "12028", "22013", str(make.number(30_000))),
        severity=("fatal", "non-fatal", "correctable", "untagged"),
        port=("0", "1", "63", ""),
        xid=("45", "74", "79"),
        kernel_version=("1.2",),
        user_version=("1.2", "1.3", make.text()),
    )
    return {name: text for name, text in known.items() if text or name != "port"}


def _log_fields(make: Anything) -> Mapping[str, str]:
    known = make.novel_fields(
        uuid=("", "GPU-a", "GPU-b", "GPU-c"),
        pci_bus_id=("", "nonsense", *GPUS),
        module_id=("", "0", "3", "x", "99999999999"),
        version=(VERSION, ""),
        text=("", "x"),
    )
    return {name: text for name, text in known.items() if text}


def _exit_status(make: Anything) -> ExitStatus:
    return make.one_of(  # type: ignore[no-any-return]
        (ExitStatus(code=0), ExitStatus(code=1), ExitStatus(code=127), ExitStatus(signal=11), ExitStatus())
    )


_KINDS: Mapping[Any, Callable[[Anything], Any]] = {
    NoneType: lambda _: None,
    bool: lambda make: make.one_of((False, True)),
    int: lambda make: make.number(),
    float: lambda make: make.one_of(_SECONDS),
    str: lambda make: make.text(),
    Any: lambda make: make.text(),
    object: lambda make: make.text(),
    Settings: lambda make: make.one_of(SETTINGS),
    ExitStatus: _exit_status,
    ModuleChoice: lambda _: CHOICE,
    Moment: lambda make: moment(make.now - make.one_of((0.0, 1.0, 60.0, 1000.0))),
}
_FIELDS: Mapping[Any, Callable[[Anything], Any]] = {
    (Host, "switches"): lambda make: _functions(make, BUSES, ("nvidia-nvswitch", "nvidia-nvswitch", "vfio-pci", None)),
    (Host, "gpus"): lambda make: _functions(make, GPUS, ("vfio-pci", "vfio-pci", "nvidia", None)),
    (Host, "nvlink5_bridges"): lambda make: make.one_of(((), (), ("0000:0c:00.0",))),
    (Host, "probed_switches"): lambda make: make.one_of((None, make.some_of(BUSES))),
    (LoadedModule, "initstate"): lambda make: make.one_of(("live", "live", "live", "coming", "going")),
    (LoadedModule, "version"): lambda make: make.one_of((VERSION, VERSION, "570.1", None)),
    (SwitchDevice, "pci_bus_id"): lambda make: make.one_of(BUSES),
    (SwitchDevice, "driver_state"): lambda make: make.one_of((*DriverState, DriverState.CONFIGURED, 99)),
    (SwitchDevice, "device_state"): lambda make: make.one_of((*DeviceState, DeviceState.STANDBY, 99)),
    (KernelRecord, "fields"): _kernel_fields,
    (LogRecord, "fields"): _log_fields,
    (KernelBatch, "lost"): lambda make: make.number(2),
    (KernelBatch, "problem"): lambda make: make.one_of(("", "", "permission denied")),
    (LogBatch, "problem"): lambda make: make.one_of(("", "", "permission denied")),
    (LogBatch, "source"): lambda make: make.one_of(("file", "stdout", "stderr")),
    (LogBatch, "relay"): lambda _: (),
    (LogBatch, "file_size_bytes"): lambda make: make.one_of((None, 0, 1 << 21)),
    (SwitchErrorKey, "severity"): lambda make: make.one_of(("fatal", "non-fatal", "correctable", "untagged")),
    (SwitchErrorKey, "sxid"): lambda make: make.one_of((12028, 20034, make.number(30_000))),
    (WantedNode, "path"): lambda make: make.one_of(("/dev/nvidia-nvswitchctl", "/dev/nvidia-nvswitch0", make.text())),
    (Guest, "started"): lambda make: make.now - make.one_of((1.0, 60.0, 1000.0)),
    (Guest, "gpus"): lambda make: make.some_of(GPUS[:3]),
    (NodeResult, "outcome"): lambda make: make.one_of(("kept", "kept", "created", "refused", "failed")),
}

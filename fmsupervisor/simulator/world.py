"""Builds the host of a scenario and plays its timeline."""

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fmsupervisor.host.root import HostRoot
from fmsupervisor.simulator import hardware
from fmsupervisor.simulator.expectation import Document
from fmsupervisor.simulator.guests import SimulatedGuest, end_guest, note_request, present_guests, start_guest
from fmsupervisor.simulator.kernel import SimulatedKernel
from fmsupervisor.simulator.scenarios import Scenario, Step
from fmsupervisor.simulator.tree import PREFIX, build_tree

_RUNNING_STATES = frozenset({"configured", "degraded"})


class World:
    """One run of one scenario.

    ``root`` and ``kernel`` are what the daemon runs on; ``advance`` is called from time to time with the seconds since
    the start of the run (any monotonic clock) and the daemon's latest status document.
    """

    def __init__(self, scenario: Scenario, directory: str, speed: float = 1.0) -> None:
        self.scenario = scenario
        self.root = HostRoot(directory)
        build_tree(directory, replace(scenario.tree, speed=speed))
        self.kernel = SimulatedKernel(
            self.root,
            speed=speed,
            load_fault=scenario.load_fault,
            load_delay_seconds=0.5,
            failing_probes=scenario.failing_probes,
        )
        if scenario.preloaded_version is not None:
            self.kernel.load(scenario.preloaded_version)
        self._speed = speed
        self._configured_at: float | None = None
        self._left = list(scenario.timeline)
        self._guests = {guest.name: (pid, guest.gpus) for pid, guest in present_guests(scenario.tree.guests)}

    @property
    def is_over(self) -> bool:
        """Whether the whole timeline has been played."""
        return not self._left

    def advance(self, seconds: float, document: Document) -> float | None:
        """Play what is due. Returns real seconds until the next step; None when that is not known or none is left."""
        if self._configured_at is None and document["state"] in _RUNNING_STATES:
            self._configured_at = seconds
        waits = []
        for step in list(self._left):
            due = self._due(step)
            if due is None:
                continue
            if due > seconds:
                waits.append(due - seconds)
                continue
            if self._perform(step.action, step.arguments):
                self._left.remove(step)
            else:
                waits.append(0.05)
        return min(waits, default=None)

    def outcome(self, document: Document) -> bool | str | None:
        """True when the end state is reached, a sentence when it cannot be any more, None while it is open."""
        if self.is_over and self.scenario.expectation.met(document):
            return True
        return self.scenario.expectation.impossible(document)

    def _due(self, step: Step) -> float | None:
        start = 0.0 if step.after == "start" else self._configured_at
        return None if start is None else start + step.seconds / self._speed

    def _perform(self, action: str, arguments: tuple[Any, ...]) -> bool:
        """Whether it could be done now."""
        match action:
            case "tell_fabric_manager":
                return tell_fabric_manager(self.root, *arguments)
            case "switch_error":
                return self._switch_error(*arguments)
            case "start_guest":
                self._start_guest(*arguments)
            case "end_guest":
                self._end_guest(*arguments)
            case "truncate_log":
                os.truncate(self.root.path(f"{PREFIX}/fabricmanager.log"), 0)
            case _:
                method: Callable[..., None] = getattr(self.kernel, action)
                method(*arguments)
        return True

    def _start_guest(self, name: str, gpus: tuple[str, ...]) -> None:
        """Its driver asks for the fabric at once; when no Fabric Manager listens, in vain."""
        self._guests[name] = (start_guest(self.root, SimulatedGuest(name, gpus)), gpus)
        for gpu in gpus:
            note_request(self.root, gpu)
            tell_fabric_manager(self.root, f"register {gpu}")

    def _end_guest(self, name: str) -> None:
        end_guest(self.root, *self._guests.pop(name))

    def _switch_error(self, severity: str, sxid: int, switch: str, port: int) -> bool:
        """One SXid: the kernel prints it, and Fabric Manager reports it."""
        is_told = tell_fabric_manager(self.root, f"sxid {severity} {sxid} {switch} {port}")
        if is_told:
            self.kernel.print_switch_error(severity, sxid, switch, port)
        return is_told


def tell_fabric_manager(root: HostRoot, command: str) -> bool:
    """Send a command line to the running simulated nv-fabricmanager; False when none listens."""
    try:
        descriptor = os.open(root.path(hardware.COMMAND_FIFO), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return False
        raise
    try:
        os.write(descriptor, f"{command}\n".encode())
    except (BlockingIOError, BrokenPipeError):
        return False
    finally:
        os.close(descriptor)
    return True

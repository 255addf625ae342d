"""What a start of Fabric Manager did to running guests, and which of them must be power-cycled.

On Hopper and later a GPU joins the fabric in band, once: when its driver starts, inside the guest. Fabric Manager keeps
the registrations in memory. So a guest's GPUs are out of the fabric in two cases, and both look alike from the host:

* the guest was there before Fabric Manager was configured for the first time: its request was never answered (Fabric
  State: In Progress, for ever);
* it had registered with a Fabric Manager that has died since: multicast (NVLS) fails, while nvidia-smi goes on saying
  Completed.

Either way the guest's process is older than the running Fabric Manager's configured moment, and only a new process (a
power cycle, which resets the GPUs through vfio) cures it. A reboot inside the guest keeps the process. So nothing needs
to be remembered: the start times of processes and the moment of the present run tell it, also after a restart of the
supervisor. Only while no run is configured the last judgement is kept, for those that are still there.

Three things speak for a guest that is older: its GPUs have registered in this run (FM's log says so, by the bus ids of
the host, or by number when all of the board have); it has been started so shortly before that its driver may not
have; or the switches are A100's (LR10), where links come up through Fabric Manager alone and nothing registers.

A search that could not look into everything neither finds nor clears: a guest that was seen stays until it is seen to
be gone.
"""

from collections.abc import Iterator
from dataclasses import replace

from fmsupervisor.conditions import Code
from fmsupervisor.core import switches
from fmsupervisor.core.plan_times import GUEST_SEARCH_SLOW_SECONDS, guest_search_slow_at
from fmsupervisor.core.state import ExitClass, Run, State
from fmsupervisor.facts import Guest, GuestReading, Problem, Unknown

_BOOT_SECONDS = 300.0  # from the start of a guest's process until its driver has asked; 600 s have been seen once
_HIDDEN_NAMED = 5
_MOST_GUESTS = 64


def guests_found(state: State, reading: GuestReading | Unknown) -> State:
    """A search has ended."""
    state = replace(state, is_looking_for_guests=False, guests_looked_at=state.guest_search_began_at)
    if isinstance(reading, Unknown):
        return replace(state, guests_unknown=reading.reason)
    known = {guest.identity: guest for guest in state.guests}
    found = {guest.identity: guest for guest in reading.guests}
    for identity, guest in known.items():
        if identity in found:  # when it was started is told best by the first look (host.guests)
            found[identity] = replace(found[identity], started=guest.started)
        elif identity in reading.hidden:
            found[identity] = guest
    guests = sorted(found.values(), key=lambda guest: guest.pid)[:_MOST_GUESTS]
    state = replace(
        state,
        guests=tuple(guests),
        guests_unknown=_hidden_sentence(reading),
        guests_to_restart=state.guests_to_restart & found.keys(),
    )
    return state if reading.hidden else _without_cured(state)


def _without_cured(state: State) -> State:
    """Forget registrations of GPUs that nobody holds any more: vfio has reset them. All guests are known now."""
    if state.host is None or state.last_exit is None or not (state.registered_before or state.lost_registrations):
        return state
    drivers = {gpu.pci_bus_id: gpu.driver for gpu in state.host.gpus}
    died = state.last_exit.at.monotonic
    if state.guest_search_began_at < died:
        return state
    held = frozenset(gpu for guest in state.guests if guest.started <= died for gpu in guest.gpus)

    def is_cured(uuid: str) -> bool:
        bus_id = state.gpu_buses.get(uuid, "")
        if drivers.get(bus_id) == switches.GPU_DRIVER:
            return False
        return bus_id not in held if bus_id else not held

    return replace(
        state,
        registered_before=frozenset(uuid for uuid in state.registered_before if not is_cured(uuid)),
        lost_registrations=frozenset(uuid for uuid in state.lost_registrations if not is_cured(uuid)),
    )


def _hidden_sentence(reading: GuestReading) -> str:
    if not reading.hidden:
        return ""
    pids = sorted(pid for pid, _ in reading.hidden)
    named = ", ".join(map(str, pids[:_HIDDEN_NAMED])) + (", ..." if len(pids) > _HIDDEN_NAMED else "")
    what = "1 process" if len(pids) == 1 else f"{len(pids)} processes"
    return f"the descriptors of {what} cannot be read, which needs CAP_SYS_PTRACE (pid {named})"


def note_guests(state: State) -> State:
    """Judge the guests by the present run, once it is configured."""
    run = state.run
    if run is None or run.configured is None:
        return state
    judged = frozenset(guest.identity for guest in _older(state, run))
    return state if judged == state.guests_to_restart else replace(state, guests_to_restart=judged)


def _older(state: State, run: Run) -> Iterator[Guest]:
    if not state.guests or not switches.registers_in_band(state):
        return
    moments = [one.monotonic for one in (run.success, run.configured) if one is not None]
    since = min(moments)
    registered = registered_gpus(state, run)
    lost = frozenset(state.gpu_buses.get(uuid, "") for uuid in state.lost_registrations)
    for guest in state.guests:
        if guest.started >= since or registered.issuperset(guest.gpus):
            continue
        may_still_ask = since - guest.started < _BOOT_SECONDS and state.now.monotonic - guest.started < _BOOT_SECONDS
        if not may_still_ask or not lost.isdisjoint(guest.gpus):
            yield guest


def registered_gpus(state: State, run: Run) -> frozenset[str]:
    """Bus ids of this host's GPUs that have joined the fabric in this run; none when the log names them otherwise."""
    on_host = frozenset(gpu.pci_bus_id for gpu in state.host.gpus) if state.host else frozenset()
    if on_host and len(run.registered) >= len(on_host):
        return on_host
    named = frozenset(state.gpu_buses.get(uuid, bus_id) for uuid, bus_id in run.registered.items())
    return named if named <= on_host else frozenset()


def to_restart(state: State) -> tuple[Guest, ...]:
    """The guests that must be power-cycled."""
    return tuple(guest for guest in state.guests if guest.identity in state.guests_to_restart)


def why_unknown(state: State) -> str:
    """Why it is not known which guests there are; "" when it is."""
    if state.now.monotonic >= guest_search_slow_at(state):
        return f"the search for guests takes longer than {GUEST_SEARCH_SLOW_SECONDS:g} s"
    return state.guests_unknown


def has_looked_since(state: State, monotonic: float) -> bool:
    """Whether a search that began after that moment has ended, or is given up."""
    return state.guests_looked_at >= monotonic or state.now.monotonic >= guest_search_slow_at(state)


def gpus_to_reset(state: State) -> tuple[str, ...]:
    """Bus ids of the GPUs in the host's own hands that must be reset (bare metal)."""
    drivers = {gpu.pci_bus_id: gpu.driver for gpu in state.host.gpus} if state.host else {}
    buses = {state.gpu_buses.get(uuid, "") for uuid in state.lost_registrations}
    return tuple(sorted(bus_id for bus_id in buses if drivers.get(bus_id) == switches.GPU_DRIVER))


def guest_problems(state: State) -> Iterator[Problem]:
    """What is wrong with guests and with registrations; a GPU of a guest that is named is not named again."""
    reason = why_unknown(state)
    if reason:
        yield Problem(Code.HARDWARE_UNOBSERVABLE, f"guests cannot be looked for: {reason}", "guests")
    hedge = "; it was restarted with --restart: try NVLS in the guest first" if _is_resilient(state) else ""
    named: set[str] = set()
    for guest in to_restart(state):
        named.update(guest.gpus)
        detail = f"{described(guest)} was started before the fabric was configured{hedge}"
        yield Problem(Code.GUEST_RESTART_REQUIRED, detail, f"{guest.name}, pid {guest.pid}")
    buses = {uuid: state.gpu_buses.get(uuid, "") for uuid in state.lost_registrations}
    others = sorted(bus_id or uuid for uuid, bus_id in buses.items() if bus_id not in named and (bus_id or not named))
    if others:
        yield Problem(Code.REGISTRATIONS_LOST, f"registered before the restart: {', '.join(others)}")


def _is_resilient(state: State) -> bool:
    return state.run is not None and state.run.is_resilient


def described(guest: Guest) -> str:
    """``default_vm1 (pid 4711) with 0000:1b:00.0, 0000:43:00.0``."""
    return f"{guest.name} (pid {guest.pid}) with {', '.join(guest.gpus)}"


# --- restart.policy


def is_death_undecided(state: State) -> bool:
    """Whether restart.policy asks for guests, and they have not been looked for since Fabric Manager's death."""
    last = state.last_exit
    return last is not None and _asks_for_guests(state) and not has_looked_since(state, last.at.monotonic)


def withholding(state: State) -> str:
    """Why restart.policy forbids a restart now; "" when it does not."""
    last = state.last_exit
    if last is None or not _follows_death(state):
        return ""
    if state.settings.restart.policy == "never":
        return "restart.policy is never"
    if not _asks_for_guests(state) or is_death_undecided(state):
        return ""
    if reason := why_unknown(state):
        return f"restart.policy is when-no-guests, and guests cannot be looked for: {reason}"
    if not state.guests:
        return ""
    return f"restart.policy is when-no-guests, and there are {'; '.join(map(described, state.guests))}"


def _follows_death(state: State) -> bool:
    last = state.last_exit
    is_death = last is not None and last.exit_class is ExitClass.UNEXPECTED
    return is_death and state.failures > 0 and state.run is None


def _asks_for_guests(state: State) -> bool:
    """Not after one that had not configured the fabric: nothing has registered with it that could be lost."""
    last = state.last_exit
    has_configured = last is not None and last.configured is not None
    return state.settings.restart.policy == "when-no-guests" and _follows_death(state) and has_configured

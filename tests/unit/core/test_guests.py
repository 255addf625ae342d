"""core.guests: what a start of Fabric Manager did to running guests, and what restart.policy makes of them."""

from dataclasses import replace

import pytest
from _builders import (
    BEGUN,
    GPUS,
    SWITCHES,
    after,
    codes,
    configured,
    executed,
    guest,
    looked_for,
    make_host,
    make_view,
    ready,
    record,
    said,
    settings,
)

from fmsupervisor.conditions import Code
from fmsupervisor.core import actions, events, guests
from fmsupervisor.core.diagnosis import problems
from fmsupervisor.core.plan_times import GUEST_SEARCH_SLOW_SECONDS, guests_due_at
from fmsupervisor.core.state import State
from fmsupervisor.core.verdict import FabricState, gate, verdict
from fmsupervisor.facts import DriverState, ExitStatus, Guest, LogKind, PciFunction, Problem, Unknown

CRASH = events.FabricManagerExited(ExitStatus(signal=11), ())
WAITS = settings(restart={"policy": "when-no-guests"})
CONFIGURED_AT = BEGUN + 1  # by the builders
OLD = guest(77, started=10.0, gpus=GPUS[:2])


def registered(*gpus: str) -> events.LogRead:
    """These GPUs join the fabric."""
    return said(*(record(LogKind.GPU_ADDED, uuid=f"GPU-{gpu}", pci_bus_id=gpu) for gpu in gpus))


def restarted(state: State, seconds: float = 5.0) -> State:
    """Fabric Manager dies and the next one configures."""
    state = after(state, CRASH, *looked_for(*state.guests), seconds=1)
    state = after(state, events.FabricManagerStarted(4712, "second-4712"), seconds=seconds)
    state = after(state, events.DriverObserved(make_view(DriverState.STANDBY)))
    state = after(state, said(LogKind.SESSION_HEADER, LogKind.CONFIGURED), events.DriverObserved(make_view()))
    return after(state, *looked_for(*state.guests))


def found(state: State, code: Code) -> list[Problem]:
    """The active conditions of that code."""
    return [problem for problem in problems(state) if problem.code is code]


def to_restart(state: State) -> list[int]:
    """The pids of the guests that must be power-cycled."""
    return [one.pid for one in guests.to_restart(state)]


class TestGuestsOlderThanTheFabric:
    """FMS-619."""

    def test_one_that_was_there_before_the_first_configuration_is_named(self) -> None:
        state = after(configured(), *looked_for(OLD, guest(78, started=CONFIGURED_AT, gpus=GPUS[2:3])))
        (problem,) = found(state, Code.GUEST_RESTART_REQUIRED)
        assert "default_vm1" in problem.detail
        assert "77" in problem.detail
        assert all(gpu in problem.detail for gpu in OLD.gpus)

    def test_each_guest_is_a_subject_of_its_own(self) -> None:
        both = (OLD, guest(78, started=20.0, gpus=GPUS[2:3]))
        subjects = {one.subject for one in found(after(configured(), *looked_for(*both)), Code.GUEST_RESTART_REQUIRED)}
        assert len(subjects) == 2

    def test_it_does_not_make_the_fabric_degraded(self) -> None:
        assert verdict(after(configured(), *looked_for(OLD))).state is FabricState.CONFIGURED

    @pytest.mark.parametrize(
        ("gpus", "pids"),
        [(GPUS[:2], []), (GPUS[:1], [77]), (GPUS, []), (("0000:06:10.0", *GPUS[:2]), [77])],
        ids=["all of its GPUs", "one of two", "all of the board", "the log has the guests' own bus ids"],
    )
    def test_registrations_in_this_run_speak_for_it(self, gpus: tuple[str, ...], pids: list[int]) -> None:
        assert to_restart(after(configured(), *looked_for(OLD), registered(*gpus))) == pids

    def test_as_many_registrations_as_gpus_speak_for_all_of_them(self) -> None:
        inside = tuple(f"0000:06:{number:02x}.0" for number in range(len(GPUS)))
        assert to_restart(after(configured(), *looked_for(OLD), registered(*inside))) == []

    def test_a_restart_orphans_the_registered_ones(self) -> None:
        state = after(configured(), *looked_for(OLD), registered(*OLD.gpus))
        assert to_restart(state) == []
        assert to_restart(restarted(state)) == [77]

    def test_one_that_may_still_be_booting_is_given_time(self) -> None:
        booting = guest(77, started=CONFIGURED_AT - 20, gpus=GPUS[:2])
        state = after(configured(), *looked_for(booting))
        assert to_restart(state) == []
        assert to_restart(after(state, seconds=300)) == [77]
        assert to_restart(after(state, registered(*booting.gpus), seconds=300)) == []

    def test_one_whose_registration_was_lost_is_not_given_time(self) -> None:
        young = guest(77, started=CONFIGURED_AT, gpus=GPUS[:2])
        state = after(configured(), *looked_for(young), registered(*young.gpus), seconds=50)
        assert to_restart(restarted(state)) == [77]

    def test_on_a100_nothing_registers_so_nothing_is_lost(self) -> None:
        a100 = tuple(PciFunction(one, "10de:1af1", "nvidia-nvswitch") for one in SWITCHES)
        state = after(configured(), events.HostObserved(make_host(switches=a100)), *looked_for(OLD))
        assert to_restart(state) == []

    def test_it_holds_until_the_process_has_gone(self) -> None:
        state = after(configured(), *looked_for(OLD), seconds=100)
        assert to_restart(after(state, *looked_for(OLD), seconds=100)) == [77]
        successor = guest(78, started=state.now.monotonic, gpus=OLD.gpus)
        assert to_restart(after(state, *looked_for(successor), seconds=100)) == []

    def test_a_pid_that_is_used_again_is_another_process(self) -> None:
        state = after(configured(), *looked_for(OLD))
        again = guest(77, started=CONFIGURED_AT + 50, gpus=OLD.gpus)
        assert to_restart(after(state, *looked_for(again), seconds=60)) == []

    def test_it_holds_while_the_next_fabric_manager_is_not_configured(self) -> None:
        state = after(configured(), *looked_for(OLD))
        for event in (CRASH, events.FabricManagerStarted(4712, "second")):
            state = after(state, event, *looked_for(OLD), seconds=5)
            assert to_restart(state) == [77]
        assert to_restart(after(state, *looked_for(), seconds=5)) == []

    def test_nothing_but_the_run_and_the_guests_is_needed(self) -> None:
        """A supervisor that took over this run, and knows nothing else, comes to the same."""
        state = restarted(after(configured(), *looked_for(OLD), registered(*OLD.gpus)))
        fresh = replace(ready(), run=state.run, now=state.now)
        assert to_restart(after(fresh, *looked_for(OLD))) == to_restart(state) == [77]

    def test_the_first_answer_on_its_start_is_kept(self) -> None:
        """A suspend of the host makes it seem older."""
        young = guest(77, started=CONFIGURED_AT + 5, ticks=5, gpus=GPUS[:2])
        state = after(configured(), *looked_for(young), seconds=10)
        state = after(state, *looked_for(replace(young, started=1.0)), seconds=1000)
        assert to_restart(state) == []


class TestWhatCannotBeLookedAt:
    """Neither finds nor clears."""

    def test_a_search_that_fails_keeps_what_was_known_and_says_so(self) -> None:
        state = after(configured(), *looked_for(OLD))
        state = after(state, *looked_for()[:1], events.GuestsLookedFor(Unknown("/proc is not mounted")), seconds=60)
        assert to_restart(state) == [77]
        assert "guests" in {one.subject for one in found(state, Code.HARDWARE_UNOBSERVABLE)}

    def test_one_that_is_hidden_is_still_there(self) -> None:
        state = after(configured(), *looked_for(OLD))
        assert to_restart(after(state, *looked_for(hidden=[OLD.identity]), seconds=60)) == [77]
        assert to_restart(after(state, *looked_for(hidden=[(5, 5)]), seconds=60)) == []

    def test_a_search_that_does_not_end_is_given_up(self) -> None:
        state = after(configured(), events.ActionTaken(actions.LookForGuests()))
        assert guests.why_unknown(after(state, seconds=GUEST_SEARCH_SLOW_SECONDS - 1)) == ""
        assert "longer than" in guests.why_unknown(after(state, seconds=GUEST_SEARCH_SLOW_SECONDS))


class TestLostRegistrations:
    """FMS-608 is about the GPUs that no guest that must be power-cycled stands for."""

    def lost(self, *known: Guest, driver: str = "vfio-pci") -> State:
        """All GPUs had registered when Fabric Manager was restarted."""
        state = after(configured(), events.HostObserved(make_host(gpu_driver=driver)), *looked_for(*known))
        return restarted(after(state, registered(*GPUS)))

    def test_a_guest_is_named_once(self) -> None:
        state = self.lost(replace(OLD, gpus=tuple(GPUS)))
        assert {Code.GUEST_RESTART_REQUIRED} == codes(problems(state)) & {
            Code.GUEST_RESTART_REQUIRED,
            Code.REGISTRATIONS_LOST,
        }
        assert len(state.lost_registrations) == len(GPUS)

    def test_gpus_that_nobody_holds_any_more_were_reset(self) -> None:
        state = self.lost(OLD)
        assert state.lost_registrations == {f"GPU-{gpu}" for gpu in OLD.gpus}
        assert after(state, *looked_for(), seconds=15).lost_registrations == frozenset()

    def test_on_bare_metal_they_must_be_reset(self) -> None:
        state = self.lost(driver="nvidia")
        assert guests.gpus_to_reset(state) == tuple(sorted(GPUS))
        (problem,) = found(state, Code.REGISTRATIONS_LOST)
        assert GPUS[0] in problem.detail
        assert guests.gpus_to_reset(after(state, registered(*GPUS[1:]))) == GPUS[:1]

    def test_without_a_search_since_the_death_all_are_named(self) -> None:
        state = after(configured(), registered(*GPUS))
        state = after(state, CRASH, events.FabricManagerStarted(4712, "second"), seconds=5)
        assert not found(state, Code.REGISTRATIONS_LOST)
        state = after(state, said(LogKind.CONFIGURED), events.DriverObserved(make_view()))
        (problem,) = found(state, Code.REGISTRATIONS_LOST)
        assert all(gpu in problem.detail for gpu in GPUS)
        assert not found(after(state, *looked_for(), seconds=1), Code.REGISTRATIONS_LOST)


class TestRestartPolicy:
    """restart.policy = "when-no-guests"."""

    def died(self, *known: Guest, policy: object = WAITS) -> State:
        """Fabric Manager died under these guests a second ago, and they were looked for since."""
        return after(after(configured(policy), CRASH, seconds=1), *looked_for(*known), seconds=1)  # type: ignore[arg-type]

    def test_it_waits_for_the_guests_and_names_them(self) -> None:
        state = self.died(OLD)
        (problem,) = found(state, Code.RESTART_WITHHELD)
        assert "default_vm1 (pid 77)" in problem.detail
        assert gate(state).action is None
        assert "the guests (looked for every 15 s)" in gate(state).reason
        assert guests_due_at(state) == state.guests_looked_at + 15

    def test_it_goes_on_when_they_are_gone(self) -> None:
        state = after(self.died(OLD), *looked_for(), seconds=15)
        assert not found(state, Code.RESTART_WITHHELD)

    def test_nothing_is_decided_before_they_were_looked_for(self) -> None:
        state = after(configured(WAITS), CRASH, seconds=1)
        assert not found(state, Code.RESTART_WITHHELD)
        assert guests.is_death_undecided(state)
        assert guests_due_at(state) <= state.now.monotonic

    def test_not_knowing_is_no_reason_to_restart(self) -> None:
        state = after(configured(WAITS), CRASH, seconds=1)
        state = after(state, *looked_for()[:1], events.GuestsLookedFor(Unknown("/proc is not mounted")), seconds=1)
        (problem,) = found(state, Code.RESTART_WITHHELD)
        assert "/proc is not mounted" in problem.detail
        hidden = after(state, *looked_for(hidden=[(5, 5)]), seconds=1)
        assert "CAP_SYS_PTRACE" in found(hidden, Code.RESTART_WITHHELD)[0].detail

    def test_one_that_had_not_configured_is_restarted_under_guests(self) -> None:
        state = after(executed(WAITS), CRASH, *looked_for(OLD), seconds=1)
        assert not found(state, Code.RESTART_WITHHELD)

    def test_guests_do_not_matter_to_always(self) -> None:
        assert not found(self.died(OLD, policy=settings()), Code.RESTART_WITHHELD)


class TestResiliency:
    """The 60 s after a start with --restart."""

    def resumed(self) -> State:
        """Fabric Manager was started with --restart."""
        return after(ready(), events.FabricManagerStarted(4711, "first", is_resilient=True))

    def test_people_are_told_until_the_partitions_are(self) -> None:
        state = self.resumed()
        assert found(after(state, seconds=59), Code.PARTITIONS_AWAITED)
        told = after(state, said(record(LogKind.PARTITION, partition="3", state="activated")), seconds=30)
        assert not found(told, Code.PARTITIONS_AWAITED)
        assert not found(after(state, seconds=60), Code.PARTITIONS_AWAITED)

    def test_a_deactivation_tells_nothing(self) -> None:
        state = after(self.resumed(), said(record(LogKind.PARTITION, partition="3", state="deactivated")), seconds=30)
        assert found(state, Code.PARTITIONS_AWAITED)

    def test_when_it_ends_for_that_the_reason_says_so(self) -> None:
        state = after(self.resumed(), CRASH, seconds=61)
        assert state.last_exit is not None
        assert "not told the active partitions" in state.last_exit.reason

    def test_an_ordinary_start_waits_for_nothing(self) -> None:
        assert not found(executed(), Code.PARTITIONS_AWAITED)

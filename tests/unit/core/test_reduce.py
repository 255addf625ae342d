"""core.reduce: how each event changes what is known, and what it leaves alone."""

from dataclasses import replace

import pytest
from _builders import (
    BLIND,
    CHOICE,
    COMING,
    LIVE,
    SWITCHES,
    after,
    codes,
    configured,
    executed,
    make_config,
    make_host,
    make_installation,
    make_state,
    make_view,
    node,
    ready,
    run_of,
    said,
    settings,
    switch,
)
from _world import hide

from fmsupervisor.conditions import Code
from fmsupervisor.core import events, switches
from fmsupervisor.core.actions import (
    EndService,
    InspectInstallation,
    KillFabricManager,
    LoadModule,
    StopCause,
    TerminateFabricManager,
)
from fmsupervisor.core.diagnosis import problems
from fmsupervisor.core.state import NEVER, Aspect, ExitClass, State
from fmsupervisor.core.verdict import config_key, nodes_key
from fmsupervisor.facts import DriverState, ExitStatus, LogKind, Problem, Unknown

CRASH = events.FabricManagerExited(ExitStatus(signal=11), ("bye",))
STANDBY = events.DriverObserved(make_view(DriverState.STANDBY))
TIMEOUT = events.DriverObserved(make_view(DriverState.MANAGER_TIMEOUT))
SAYS_CONFIGURED = events.DriverObserved(make_view())
UNLOADED = events.HostObserved(make_host(module=None))
REFUSED = Problem(Code.MODULE_NO_DEVICE, "ENODEV")
LOAD = events.ActionTaken(LoadModule(CHOICE, (), "because"))
FILES = ("/proc/driver/nvidia-nvswitch/devices", "/proc/devices", "/sys/module/nvidia")


class TestTheHost:
    def test_a_look_that_fails_keeps_what_is_known(self) -> None:
        state = after(configured(), events.HostObserved(Unknown("no")))
        assert (state.host, state.host_unknown, state.is_host_stale) == (make_host(), "no", False)
        assert after(state, events.HostObserved(make_host())).host_unknown == ""

    @pytest.mark.parametrize("hidden", [*FILES, *SWITCHES])
    def test_a_part_that_cannot_be_read_is_as_it_was(self, hidden: str) -> None:
        state = after(configured(), events.HostObserved(hide(make_host(), [hidden])))
        assert state.host is not None
        assert replace(state.host, problems=()) == make_host()

    def test_a_device_that_does_not_answer_still_does_not_when_it_cannot_be_read(self) -> None:
        silent = replace(make_host(), switches=(switch(SWITCHES[0], responds=False), *make_host().switches[1:]))
        unread = replace(make_host(), switches=(switch(SWITCHES[0], responds=None), *make_host().switches[1:]))
        state = after(configured(), events.HostObserved(silent), events.HostObserved(unread))
        assert Code.SWITCH_NOT_RESPONDING in codes(problems(state))

    def test_what_was_never_read_stays_unknown(self) -> None:
        state = after(make_state(), events.HostObserved(hide(make_host(), FILES)))
        assert state.host is not None
        assert isinstance(state.host.module, Unknown)
        assert state.host.probed_switches is None

    def test_a_change_makes_the_driver_worth_asking_again(self) -> None:
        asked = replace(configured(), driver_observed_at=1001.0)
        assert after(asked, events.HostObserved(make_host())).driver_observed_at == 1001.0
        assert after(asked, events.HostObserved(make_host(SWITCHES[:3]))).driver_observed_at == NEVER

    def test_switches_are_remembered_for_ever_and_working_ones_until_the_driver_is_unloaded(self) -> None:
        state = after(ready(), events.HostObserved(make_host(on_bus=())))
        assert state.seen_switches == state.working_switches == set(SWITCHES)
        assert after(state, events.HostObserved(make_host(module=COMING))).working_switches == set(SWITCHES)
        assert after(state, UNLOADED).working_switches == set()

    def test_a_driver_that_vanishes_below_fabric_manager_took_the_switches_along(self) -> None:
        assert Code.SWITCH_LOST in codes(problems(after(configured(), UNLOADED)))

    def test_the_deadline_of_switches_runs_from_when_the_driver_is_live(self) -> None:
        incomplete = events.HostObserved(make_host(unbound=SWITCHES[:1]))
        state = after(make_state(), UNLOADED, seconds=100)
        assert state.switch_wait_since is None
        state = after(state, incomplete, seconds=100)
        assert state.switch_wait_since == 1200.0
        assert after(state, incomplete, seconds=100).switch_wait_since == 1200.0
        assert after(state, events.HostObserved(make_host())).switch_wait_since is None


class TestFiles:
    def test_only_watched_files_make_the_installation_stale(self) -> None:
        state = ready()
        assert not after(state, events.PathsChanged(frozenset({"/elsewhere"}))).is_installation_stale
        changed = after(state, events.PathsChanged(frozenset(make_installation().watched_paths)))
        assert changed.is_installation_stale
        inspecting = after(changed, events.ActionTaken(InspectInstallation()))
        assert (inspecting.is_installation_stale, inspecting.is_inspecting) == (False, True)
        # A file that changes while it is read is read again.
        again = after(inspecting, events.PathsChanged(frozenset(make_installation().watched_paths)))
        assert after(again, events.InstallationInspected(make_installation())).is_installation_stale

    def test_a_changed_node_is_ensured_again(self) -> None:
        assert after(ready(), events.PathsChanged(frozenset({node().node.path}))).nodes_for is None

    def test_a_hardware_event_may_bring_a_missing_dependency(self) -> None:
        missing = make_installation(Problem(Code.MODULE_DEPENDENCY_MISSING, "drm"))
        assert after(ready(installation=missing), events.HostMayHaveChanged()).is_installation_stale
        assert not after(ready(), events.HostMayHaveChanged()).is_installation_stale

    def test_nodes_that_were_made_anew_let_the_driver_be_asked_anew(self) -> None:
        asked = replace(ready(), driver_observed_at=1001.0)
        assert after(asked, events.NodesEnsured((node("kept"),))).driver_observed_at == 1001.0
        assert after(asked, events.NodesEnsured((node("created"),))).driver_observed_at == NEVER
        assert after(asked, events.NodesEnsured((node(),))).nodes_for == nodes_key(asked)

    def test_a_configuration_that_could_not_be_written_is_tried_at_the_next_look(self) -> None:
        unwritable = make_config(Problem(Code.CONFIG_UNWRITABLE, "no space"))
        state = after(ready(), events.ConfigPrepared(unwritable))
        assert state.config_for == config_key(state)
        assert after(state, events.HostObserved(make_host())).config_for is None


class TestTheModule:
    def test_a_refused_module_is_not_loaded_again_although_the_kernel_showed_it_meanwhile(self) -> None:
        state = after(ready(), UNLOADED, LOAD)
        assert state.is_loading
        state = after(state, events.HostObserved(make_host(module=COMING)), events.ModuleLoadEnded(REFUSED))
        assert [block.problem for block in after(state, UNLOADED).blocks] == [REFUSED]

    @pytest.mark.parametrize(
        "cure",
        [
            events.InstallationInspected(make_installation(fingerprint="another")),
            events.HostObserved(make_host()),
            events.HostObserved(make_host(SWITCHES[:2], module=None)),
            events.SettingsReloaded(settings(module={"gpu_guard": "off"})),
        ],
        ids=["files", "loaded by hand", "switches", "settings"],
    )
    def test_a_block_goes_with_any_change_of_what_it_waits_for(self, cure: events.Event) -> None:
        state = after(ready(), UNLOADED, LOAD, events.ModuleLoadEnded(REFUSED), UNLOADED)
        assert state.blocks
        assert not after(state, cure).blocks

    @pytest.mark.parametrize(
        "event",
        [
            events.HostObserved(Unknown("no")),
            events.HostObserved(hide(make_host(module=None), FILES)),
            events.SettingsReloaded(settings()),
            events.InstallationInspected(make_installation()),
            events.TimePassed(),
        ],
        ids=["not seen", "partly seen", "the same settings", "the same files", "time"],
    )
    def test_a_block_stays_when_nothing_has_changed(self, event: events.Event) -> None:
        state = after(ready(), UNLOADED, LOAD, events.ModuleLoadEnded(REFUSED), UNLOADED)
        assert after(state, event).blocks == state.blocks

    def test_what_is_only_busy_is_tried_again_later_and_later(self) -> None:
        busy = events.ModuleLoadEnded(Problem(Code.MODULE_LOAD_BUSY, "EBUSY"))
        state = after(ready(), UNLOADED, LOAD, busy)
        assert (state.load_retry_at, state.blocks, state.is_loading) == (1006.0, (), False)
        assert after(state, LOAD, busy).load_retry_at == 1011.0

    def test_a_module_that_is_gone_after_a_good_load_is_not_loaded_without_a_pause(self) -> None:
        state = after(ready(), UNLOADED, LOAD, events.ModuleLoadEnded(None), UNLOADED)
        assert state.load_retry_at == 1006.0


class TestTheDriver:
    def test_a_driver_that_cannot_be_asked_has_said_what_it_said(self) -> None:
        state = after(configured(), STANDBY, events.DriverObserved(BLIND))
        assert switches.is_configured_by_driver(state) is False
        assert (state.driver_view, state.driver_unknown) == (None, BLIND.reason)
        assert after(state, SAYS_CONFIGURED).driver_view == make_view()

    def test_what_it_said_about_the_fabric_manager_before_is_forgotten(self) -> None:
        state = after(configured(), CRASH, events.FabricManagerStarted(2, "second"))
        assert (state.driver, state.driver_observed_at) == (None, NEVER)

    def test_a_driver_that_is_unloaded_has_said_nothing(self) -> None:
        assert after(configured(), UNLOADED).driver is None

    def test_a_hang_is_measured_between_looks_that_succeeded(self) -> None:
        state = after(after(configured(), TIMEOUT), TIMEOUT, seconds=20)
        assert run_of(state).unmanaged_since == 1001.0
        state = after(state, events.DriverObserved(BLIND), seconds=60)
        assert Code.FABRIC_MANAGER_HUNG not in codes(problems(state))
        assert Code.FABRIC_MANAGER_HUNG in codes(problems(after(state, TIMEOUT)))
        assert run_of(after(state, SAYS_CONFIGURED)).unmanaged_since is None

    def test_a_missing_heartbeat_before_success_is_no_hang(self) -> None:
        assert run_of(after(executed(), TIMEOUT)).unmanaged_since is None


class TestFabricManager:
    def test_a_start_begins_a_session(self) -> None:
        state = after(ready(failures=2, next_start_at=1.0), events.FabricManagerStarted(4711, "s"))
        run = run_of(state)
        assert (run.session, run.pid, run.configured, state.next_start_at) == ("s", 4711, None, None)
        assert (state.counters.starts, state.failures) == (1, 2)

    def test_a_death_is_classified_counted_and_remembered(self) -> None:
        state = after(configured(), CRASH)
        last = state.last_exit
        assert last is not None
        assert (last.pid, last.exit_class, last.last_lines) == (4711, ExitClass.UNEXPECTED, ("bye",))
        assert (state.run, state.failures, state.counters.exits) == (None, 1, {"unexpected": 1})
        assert state.is_host_stale
        assert state.foreign_looked_at == NEVER

    def test_a_terminal_failure_is_no_death_in_a_row_but_a_block(self) -> None:
        state = after(executed(), said(LogKind.CONFIG_INVALID), CRASH)
        assert state.failures == 0
        assert [block.aspects for block in state.blocks] == [(Aspect.SETTINGS, Aspect.INSTALLATION)]

    def test_an_exit_of_nobody_is_ignored(self) -> None:
        assert after(ready(), CRASH) == ready()

    def test_orphans_are_waited_for(self) -> None:
        state = after(executed(), events.FabricManagerExited(ExitStatus(code=0), (), orphans=1))
        assert state.has_orphans
        assert not after(state, events.OrphansEnded()).has_orphans

    def test_the_pause_is_known_while_it_lasts(self) -> None:
        state = after(after(configured(), CRASH), events.BackoffDrawn(4.5))
        assert (state.next_start_at, state.backoff_seconds) == (1005.5, 4.5)

    def test_stopping_goes_step_by_step(self) -> None:
        state = after(configured(), events.StopRequested())
        state = after(state, events.ActionTaken(TerminateFabricManager(StopCause.REQUESTED, "because")))
        stop = run_of(state).stop
        assert stop is not None
        assert (stop.cause, stop.is_killed) == (StopCause.REQUESTED, False)
        state = after(state, events.ActionTaken(KillFabricManager("because")))
        state = after(state, events.FabricManagerExited(ExitStatus(signal=9), ()))
        assert Code.STOP_ESCALATED in codes(problems(state))
        assert after(state, events.ActionTaken(EndService())).has_ended

    def test_configured_is_the_first_time_that_the_witnesses_agreed(self) -> None:
        state = after(configured(), STANDBY, SAYS_CONFIGURED, said(LogKind.CONFIGURED), seconds=60)
        assert run_of(state).configured == run_of(configured()).configured

    def test_a_fabric_manager_that_is_being_stopped_does_not_become_configured(self) -> None:
        state = after(executed(), events.ActionTaken(TerminateFabricManager(StopCause.HANG, "because")))
        assert run_of(after(state, STANDBY, said(LogKind.CONFIGURED), SAYS_CONFIGURED)).configured is None


class TestSettings:
    def test_a_file_that_is_wrong_changes_nothing_but_is_told(self) -> None:
        wrong = events.SettingsReloaded(settings(), Problem(Code.SETTINGS_INVALID, "line 3"))
        state = after(configured(), wrong)
        assert replace(state, service_problems={}) == configured()
        assert Code.SETTINGS_INVALID not in codes(problems(after(state, events.SettingsReloaded(settings()))))

    def test_what_a_running_fabric_manager_does_not_notice_is_pending_until_it_is_restarted(self) -> None:
        changed = events.SettingsReloaded(settings(fabric_manager={"fabric_mode": 1, "hang_seconds": 1.0}))
        state = after(configured(), changed)
        assert pending(state) == ["for Fabric Manager: fabric_manager.fabric_mode"]
        assert pending(after(state, events.SettingsReloaded(settings()))) == []
        assert pending(after(state, CRASH, events.FabricManagerStarted(2, "second"))) == []
        assert pending(after(ready(), changed)) == []

    def test_what_only_a_new_daemon_notices_is_pending_for_good(self) -> None:
        first = replace(ready(), first_settings=settings())
        changed = events.SettingsReloaded(
            settings(metrics={"listen": "127.0.0.1:1"}, service={"ready_when": "started"})
        )
        state = after(first, changed, events.FabricManagerStarted(2, "second"))
        assert pending(state) == ["for fmsupervisor: metrics.listen"]

    def test_problems_of_the_service_come_and_go_by_code_and_subject(self) -> None:
        one, other = (Problem(Code.WEB_CONFIG_INVALID, "x", subject) for subject in ("one", "other"))
        state = after(ready(), *(events.ServiceProblem(problem, is_active=True) for problem in (one, other, one)))
        assert len(state.service_problems) == 2
        state = after(state, events.ServiceProblem(replace(one, detail="y"), is_active=False))
        assert list(state.service_problems.values()) == [other]


def pending(state: State) -> list[str]:
    return [problem.detail for problem in problems(state) if problem.code == Code.RESTART_NEEDED]


@pytest.mark.parametrize("state", [make_state(), ready(), executed(), configured()], ids=["new", "ready", "run", "up"])
def test_time_alone_changes_only_the_time(state: State) -> None:
    later = after(state, events.TimePassed(), seconds=1)
    assert replace(later, now=state.now) == state


def test_a_live_module_is_one_that_has_finished_its_initialisation() -> None:
    assert make_host(module=LIVE).is_module_live
    assert not make_host(module=COMING).is_module_live

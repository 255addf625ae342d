"""Tell every audience what is new: the journal, systemd, the status file, the metrics.

``note`` is called with each event as it is folded in (news that leave no trace in the state); ``report`` once the dust
has settled, with the state in which the supervisor comes to rest. Both only compare and tell; they decide nothing.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from fmsupervisor.clock import Clock
from fmsupervisor.conditions import REGISTRY, Code
from fmsupervisor.core import actions, events
from fmsupervisor.core.state import State
from fmsupervisor.core.verdict import FabricState, Verdict, verdict
from fmsupervisor.errors import ActionFailed
from fmsupervisor.facts import Problem
from fmsupervisor.handover import ReporterMemory
from fmsupervisor.host.root import HostRoot
from fmsupervisor.report import journal, kernel_journal
from fmsupervisor.report.journal import Event
from fmsupervisor.report.snapshot import JOURNAL_DROPPED, Snapshot
from fmsupervisor.report.status import status_document
from fmsupervisor.report.status_text import STATUS_FILE
from fmsupervisor.report.systemd import SystemdNotifier

_QUIET_WRITE_SECONDS = 1.0  # counters alone do not rewrite the status file more often than this
_WRITE_COST_SHARE = 0.02  # of the time may go into that, also when the document has grown large
_LONGEST_QUIET_WRITE_SECONDS = 15.0
_EXTENSION_SECONDS = 120.0  # of systemd's start time-out, which would kill a daemon that is still waiting
_STEADY = frozenset({FabricState.CONFIGURED, FabricState.NOT_APPLICABLE})


class Reporter:
    """Knows what was last told to whom."""

    def __init__(self, root: HostRoot, clock: Clock, notifier: SystemdNotifier) -> None:
        self.notifier = notifier
        self._root = root
        self._clock = clock
        self._snapshot: Snapshot | None = None
        self._since_wall = 0.0
        self._conditions_since: dict[tuple[str, str], float] = {}  # by the wall clock, for people
        self._conditions_begun: dict[tuple[str, str], float] = {}  # by the monotonic clock, which nobody sets
        self._is_ready = False
        self._feed: Callable[[events.Event], None] | None = None
        self._document: dict[str, Any] | None = None  # of the last report, once somebody has asked for it
        self._write_timer: asyncio.TimerHandle | None = None
        self._written_at = float("-inf")  # on the loop's clock
        self._quiet_write_seconds = _QUIET_WRITE_SECONDS
        self._extended_at = float("-inf")
        self._status_problem = ""
        self._start_reason = ""

    @property
    def document(self) -> dict[str, Any]:
        """The present status document; empty before the first report."""
        if self._document is None and self._snapshot is not None:
            state, now = self._snapshot.state, self._snapshot.verdict
            self._document = status_document(state, now, self._since_wall, self._conditions_since)
        return self._document or {}

    def snapshot(self) -> Snapshot | None:
        """What the metrics are made of: one reference, replaced as a whole."""
        return self._snapshot

    def memory(self) -> ReporterMemory:
        """What was told, for ``resume``."""
        now = self._snapshot.verdict if self._snapshot else None
        conditions = tuple(
            (problem, self._conditions_since.get((problem.code, problem.subject), self._since_wall))
            for problem in (now.problems if now else ())
        )
        return ReporterMemory(self._is_ready, str(now.state) if now else "", self._since_wall, conditions)

    def resume(self, memory: ReporterMemory, state: State) -> None:
        """Go on as the one that told this: only what differs is news."""
        self._is_ready = memory.is_ready
        self._since_wall = memory.since_wall
        self._conditions_since = {(one.code, one.subject): since for one, since in memory.conditions}
        boot_wall = state.now.wall - state.now.monotonic
        self._conditions_begun = {key: since - boot_wall for key, since in self._conditions_since.items()}
        try:
            before = FabricState(memory.state)
        except ValueError:
            return
        problems = tuple(problem for problem, _ in memory.conditions)
        self._snapshot = Snapshot(state, Verdict(before, "", is_decided=True, problems=problems))

    def begin(self, feed: Callable[[events.Event], None]) -> None:
        """Problems of the reporting itself go to ``feed``."""
        self._feed = feed

    def time_passed(self) -> None:
        """Say how often what was left out has been repeated."""
        journal.flush_repeats()

    def end(self) -> None:
        """Write the last word."""
        journal.flush_repeats(everything=True)
        if self._write_timer is not None:
            self._write_timer.cancel()
        if self._snapshot is not None:
            self._write()

    def note(self, event: events.Event, state: State) -> None:  # noqa: C901, PLR0912 - one case per kind of news
        """Tell what only the event knows."""
        session = state.run.session if state.run else None
        match event:
            case events.ActionTaken(action=actions.LoadModule(choice=choice, reason=reason)):
                journal.log_event(Event.ACTION_TAKEN, "info", f"loading {choice.path} ({choice.version}): {reason}")
            case events.ActionTaken(action=actions.StartFabricManager(reason=reason)):
                self._start_reason = reason
            case events.ActionTaken(action=actions.TerminateFabricManager(reason=reason)):
                self._action("asking Fabric Manager to end", reason, state)
            case events.ActionTaken(action=actions.KillFabricManager(reason=reason)):
                self._action("killing Fabric Manager", reason, state)
            case events.ModuleLoadEnded(problem=None):
                journal.log_event(Event.MODULE_LOADED, "info", "nvidia.ko is loaded")
            case events.NodesEnsured(results=results):
                for result in results:
                    if result.outcome in ("created", "replaced", "adjusted"):
                        text = f"{result.outcome} {result.node.path} c {result.node.major} {result.node.minor}"
                        journal.log_event(Event.NODES_CHANGED, "info", f"{text} {result.detail}".rstrip())
            case events.ConfigPrepared(config=config):
                text = "; ".join(config.differences) or "no difference"
                journal.log_event(Event.CONFIG_RENDERED, "info", f"{config.path} against the stock file: {text}")
            case events.FabricManagerStarted(pid=pid, state_problem=problem):
                version = state.installation.fabric_manager_version if state.installation else None
                journal.log_fabric_manager_started(pid, session or "", version, self._start_reason)
                if problem:
                    self.action_failed(f"started without --restart, so no partition is active: {problem}")
            case events.FabricManagerAdopted(run=run):
                journal.log_fabric_manager_adopted(run.pid, run.session, run.started.wall)
            case events.FabricManagerExited(status=status, last_lines=lines) if state.last_exit:
                last = state.last_exit
                journal.log_fabric_manager_exited(last.pid, last.session, last.exit_class, status, last.reason, lines)
            case events.LogRead(batch=batch) if not batch.is_old:
                manager = state.run.pid if state.run else None
                for record in batch.relay:
                    journal.log_fabric_manager_line(record, manager, session, batch.source)
                if batch.relay_suppressed:
                    journal.log_suppressed(batch.relay_suppressed, "lines of Fabric Manager")
            case events.KernelLogRead(batch=batch):
                kernel_journal.log_kernel_batch(batch)
            case events.SettingsReloaded(problem=None):
                changed = ", ".join(self._changed_settings(state)) or "nothing"
                journal.log_event(Event.SETTINGS_RELOADED, "info", f"the settings were read again; changed: {changed}")
            case events.StopRequested():
                self.notifier.stopping()
                journal.log_event(Event.SERVICE_STOPPING, "info", "stopping")
            case _:
                pass

    def _changed_settings(self, state: State) -> Iterator[str]:
        """The keys that a reload changed."""
        before = self._snapshot.state.settings if self._snapshot else state.settings
        for table in fields(state.settings):
            old, new = getattr(before, table.name), getattr(state.settings, table.name)
            if not is_dataclass(new):
                yield from [table.name] if old != new else []
                continue
            for key in fields(new):
                if getattr(old, key.name) != getattr(new, key.name):
                    yield f"{table.name}.{key.name}"

    def _action(self, what: str, reason: str, state: State) -> None:
        pid = state.run.pid if state.run else None
        session = state.run.session if state.run else None
        journal.log_event(Event.ACTION_TAKEN, "warning", f"{what}: {reason}", fm_pid=pid, session=session)

    def action_failed(self, text: str) -> None:
        """Something that nothing depends on could not be done."""
        journal.log_event(Event.ACTION_FAILED, "warning", text)

    def report(self, state: State) -> None:
        """Tell the difference to the last report."""
        now = verdict(state)
        before = self._snapshot
        self._snapshot = Snapshot(state, now, {JOURNAL_DROPPED: float(journal.dropped_messages())})
        has_changed = before is None or before.verdict.state is not now.state
        if has_changed:
            self._since_wall = state.now.wall
            previous = str(before.verdict.state) if before else None
            session = state.run.session if state.run else None
            journal.log_state_change(previous, str(now.state), now.reason, session)
        self._report_conditions(before.verdict.problems if before else (), now.problems, state)
        self._tell_systemd(state, now)
        is_news = has_changed or before is None or _headline(before) != _headline(self._snapshot)
        self._document = None
        self._plan_write(is_urgent=is_news)

    def _report_conditions(self, before: tuple[Problem, ...], now: tuple[Problem, ...], state: State) -> None:
        had = {(problem.code, problem.subject): problem for problem in before}
        has = {(problem.code, problem.subject): problem for problem in now}
        for key, problem in has.items():
            if key not in had:
                self._conditions_since[key] = state.now.wall
                self._conditions_begun[key] = state.now.monotonic
                journal.log_condition(problem, raised=True)
        for key, problem in had.items():
            if key not in has:
                self._conditions_since.pop(key, None)
                begun = self._conditions_begun.pop(key, state.now.monotonic)
                if state.is_stopping:
                    continue  # nothing got better, it is only no longer looked at
                journal.log_condition(problem, raised=False, active_seconds=state.now.monotonic - begun)

    def _tell_systemd(self, state: State, now: Verdict) -> None:
        self.notifier.status(status_sentence(now))
        if self._is_ready or state.is_stopping:
            return
        match state.settings.service.ready_when:
            case "started":
                is_due = True
            case "configured":
                is_due = now.state in _STEADY  # where there is no fabric, there is nothing to wait for
            case _:
                is_due = now.is_decided
        if is_due:
            self._is_ready = True
            self.notifier.ready()
        elif state.now.monotonic - self._extended_at >= _EXTENSION_SECONDS / 4:  # also when it waits for a person
            self._extended_at = state.now.monotonic
            self.notifier.extend_timeout(_EXTENSION_SECONDS)

    def reload_begins(self) -> None:
        """Tell systemd, if it thinks that we are ready."""
        if self._is_ready:
            self.notifier.reloading(int(asyncio.get_running_loop().time() * 1_000_000))

    def reload_ends(self) -> None:
        """The counterpart of ``reload_begins``."""
        if self._is_ready:
            self.notifier.ready()

    def _plan_write(self, *, is_urgent: bool) -> None:
        """Write now; without urgency at once only if the last time is long enough ago, which costs no wake-up."""
        loop = asyncio.get_running_loop()
        pause = self._written_at + self._quiet_write_seconds - loop.time()
        if is_urgent or pause <= 0:
            self._write()
        elif self._write_timer is None:
            self._write_timer = loop.call_later(pause, self._write)

    def _write(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        self._written_at = asyncio.get_running_loop().time()
        path = f"{self._directory()}/{STATUS_FILE}"
        content = json.dumps(self.document, separators=(",", ":")).encode()
        try:
            self._root.write_atomically(path, content, durable=False)
        except ActionFailed as error:
            self._tell_status_problem(str(error))
        else:
            self._tell_status_problem("")
        cost = asyncio.get_running_loop().time() - self._written_at
        pause = max(_QUIET_WRITE_SECONDS, cost / _WRITE_COST_SHARE)
        self._quiet_write_seconds = min(pause, _LONGEST_QUIET_WRITE_SECONDS)

    def _directory(self) -> str:
        if self._snapshot is None:
            return "/run/fmsupervisor"
        state = self._snapshot.state
        return (state.first_settings or state.settings).service.state_directory  # where the lock is, after a reload too

    def _tell_status_problem(self, detail: str) -> None:
        if detail == self._status_problem or self._feed is None:
            return
        problem = Problem(Code.STATUS_UNWRITABLE, detail or self._status_problem)
        self._status_problem = detail
        asyncio.get_running_loop().call_soon(self._feed, events.ServiceProblem(problem, is_active=bool(detail)))


def status_sentence(now: Verdict) -> str:
    """The line of ``systemctl status``: FAILED and the code first, when that is what it is."""
    if not now.is_decided or now.state in _STEADY or now.state is FabricState.DEGRADED:
        return f"{now.state}: {now.reason}"
    if now.reason.startswith("FMS-"):
        return f"FAILED {now.reason}"
    critical = [problem.code for problem in now.problems if REGISTRY[problem.code].severity == "critical"]
    return " ".join(["FAILED", *critical[:1], f"{now.state}: {now.reason}"])


def _headline(snapshot: Snapshot) -> object:
    """What is worth an immediate rewrite of the status file."""
    state = snapshot.state
    return (
        snapshot.verdict.reason,
        snapshot.verdict.problems,
        state.run,
        state.last_exit,
        state.next_start_at,
        state.nodes,
        state.driver,
    )

"""From the supervisor before to this one, and from this one to the next (``handover`` has the document and why).

``take_over`` is called once, before anything else happens. What a predecessor left that executed this program in its
place is gone on with as it is. What one left that has died is told in events, which the core folds like all others: a
Fabric Manager that was adopted, the lines of its log, and, when it died meanwhile, its end.
"""

from collections.abc import Callable
from dataclasses import replace

from fmsupervisor import handover
from fmsupervisor.clock import Clock
from fmsupervisor.conditions import Code
from fmsupervisor.core import events
from fmsupervisor.core.state import Run, State
from fmsupervisor.errors import ActionFailed, CannotObserve
from fmsupervisor.fabric_manager import ownership
from fmsupervisor.fabric_manager.control import FabricManagerControl
from fmsupervisor.fabric_manager.ownership import ManagerRecord
from fmsupervisor.facts import ExitStatus, Problem
from fmsupervisor.handover import Handover
from fmsupervisor.host.root import HostRoot

_NOT_WORTH_A_WRITE = ("link_errors", "link_faults")  # they are written along with the rest


class Continuity:
    """What was inherited, and what is kept for the case of a crash. ``tell`` takes sentences for the journal."""

    def __init__(self, inherited: Handover, root: HostRoot, clock: Clock, tell: Callable[[str], None]) -> None:
        self.inherited = inherited
        self._root = root
        self._clock = clock
        self._tell = tell
        self._kept: dict[str, object] = {}
        self._problem = ""

    def take_over(
        self, state: State, manager: FabricManagerControl, observe_host: Callable[[], events.HostObserved]
    ) -> tuple[State, list[events.Event]]:
        """Watch the Fabric Manager that is there already: the state to begin with, and what happened before."""
        for text in self.inherited.dropped:
            self._tell(f"of what the earlier supervisor left, this cannot be used: {text}")
        record, live, run = self.inherited.record, self.inherited.live, self.inherited.values.get("run")
        if record is None:
            return state, []
        if record.has_ended:
            return replace(state, has_orphans=manager.hunt(record) > 0), []
        if live is not None and isinstance(run, Run):
            try:
                manager.resume(record, live.manager)
            except OSError as error:
                self._tell(f"cannot go on with Fabric Manager as before: {error}; taking it over anew")
            else:
                return replace(state, run=run), []
        known = run if isinstance(run, Run) and run.session == record.session else None
        return state, self._adopt(record, known, manager, observe_host)

    def _adopt(
        self,
        record: ManagerRecord,
        run: Run | None,
        manager: FabricManagerControl,
        observe_host: Callable[[], events.HostObserved],
    ) -> list[events.Event]:
        try:
            found = ownership.find(record)
        except (ownership.NotOurs, CannotObserve) as error:
            self._tell(f"a Fabric Manager is not taken over: {error}")
            return []
        if found is not None:
            batches = manager.adopt(record, *found)
            record, exited = manager.record or record, None
        elif record.identity is not None:
            batches, lines, orphans = manager.bury(record)
            exited = events.FabricManagerExited(ExitStatus(), lines, orphans, was_unseen=True)
        else:
            return []  # it was never executed
        pid = record.identity.pid if record.identity else 0
        run = run or Run(record.session, pid, record.started, settings=record.settings)
        told: list[events.Event] = [observe_host()]  # its log is about what is there
        told.append(events.FabricManagerAdopted(run, record.config))
        told += [events.LogRead(batch) for batch in batches]
        return told if exited is None else [*told, exited]

    def keep(self, directory: str, state: State, record: ManagerRecord | None) -> events.ServiceProblem | None:
        """Store what a crash must not make us forget, if it has changed; an event when that begins or ends to fail."""
        values = handover.carried(state, whole=False) | {"record": record, "is_stopping": state.is_stopping}
        news = {name: value for name, value in values.items() if name not in _NOT_WORTH_A_WRITE}
        if news == self._kept or state.has_ended:
            return None
        problem = ""
        try:
            handover.save(self._root, directory, record, state, self._clock.base)
            self._kept = news
        except ActionFailed as error:
            problem = str(error)
        if problem == self._problem:
            return None
        path = f"{directory}/{handover.FILE}"
        event = events.ServiceProblem(Problem(Code.STATUS_UNWRITABLE, problem or self._problem, path), bool(problem))
        self._problem = problem
        return event

    def keep_again(self) -> None:
        """What was stored may be gone."""
        self._kept = {}

    def forget(self, directory: str) -> None:
        """This supervisor ends in order, and leaves nothing to be taken over."""
        try:
            handover.forget(self._root, directory)
        except ActionFailed as error:
            self._tell(str(error))

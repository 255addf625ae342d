"""The process around the supervisor: one instance, a clean start, the metrics server, the successor, the end.

``systemctl reload`` after an upgrade executes the new version in this process. First it is asked, as a process of its
own, to read its settings and what would be handed over to it; only when it can, and nothing is under way that cannot be
interrupted, the metrics server finishes what it is answering, and execve follows. From there on nothing can go wrong
that a crash could not do as well, and a crash leaves Fabric Manager alone (``handover``).
"""

import asyncio
import os
import socket
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

from fmsupervisor import __version__, handover
from fmsupervisor.clock import Clock
from fmsupervisor.conditions import Code
from fmsupervisor.core import events
from fmsupervisor.core.verdict import FabricState
from fmsupervisor.daemon_lock import InstanceLock
from fmsupervisor.errors import ActionFailed, ActionRefused, CannotObserve
from fmsupervisor.fabric_manager.process import Command, become_subreaper, seal_descriptors
from fmsupervisor.facts import Problem
from fmsupervisor.handover import Handover, Live
from fmsupervisor.host.file_watch import FileWatch
from fmsupervisor.host.kernel import Kernel
from fmsupervisor.host.root import HostRoot
from fmsupervisor.program import Program
from fmsupervisor.report import journal
from fmsupervisor.report.reporter import Reporter
from fmsupervisor.report.systemd import SERVICE_MANAGER_VARIABLES, SystemdNotifier
from fmsupervisor.settings import Settings
from fmsupervisor.supervisor import Supervisor

if TYPE_CHECKING:
    from fmsupervisor.report.metrics_server import MetricsServer

CHECK_OPTION = "--check-handover"

_BIND_RETRY_SECONDS = 10.0
_ALIVE_ANSWER_SECONDS = 2.0
_CHECK_SECONDS = 60.0
_QUIET_POLL_SECONDS = 0.1


class Daemon:
    """A supervisor with everything that belongs to its process.

    ``inherited``: what the program left that executed this one in its place. ``program``: this one; None when no
    successor is ever to be executed.
    """

    def __init__(  # noqa: PLR0913 - what one process is made of
        self,
        settings: Settings,
        root: HostRoot,
        kernel: Kernel,
        clock: Clock,
        notifier: SystemdNotifier,
        reload_settings: Callable[[], Settings],
        *,
        inherited: Handover | None = None,
        program: Program | None = None,
        bind_retry_seconds: float = _BIND_RETRY_SECONDS,
        alive_answer_seconds: float = _ALIVE_ANSWER_SECONDS,
    ) -> None:
        self._bind_retry_seconds = bind_retry_seconds
        self._alive_answer_seconds = alive_answer_seconds
        self._bind_retry: asyncio.TimerHandle | None = None
        self._root = root
        self._kernel = kernel
        self._clock = clock
        self._reload_settings = reload_settings
        self._program = program
        self._inherited = inherited
        self._live = inherited.live if inherited else None
        if self._live is not None:
            service = replace(settings.service, state_directory=self._live.state_directory)
            settings = replace(settings, service=service)  # where the lock is
        self._settings = settings
        self._lock = InstanceLock(root, settings.service.state_directory, self._live.lock if self._live else -1)
        self._lock_watch: FileWatch | None = None
        self._replacing: asyncio.Task[None] | None = None
        self.reporter = Reporter(root, clock, notifier)
        self.supervisor = self._make_supervisor(inherited)
        self.metrics: MetricsServer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def _make_supervisor(self, inherited: Handover | None) -> Supervisor:
        return Supervisor(
            self._settings,
            self._root,
            self._kernel,
            self.reporter,
            self._clock,
            self._reload_settings,
            inherited,
            execute_successor=self._begin_replacement,
        )

    async def run(self) -> None:
        """Until stopped. Raises ``ActionRefused`` when another one runs, ``ActionFailed`` when that cannot be told."""
        self._loop = asyncio.get_running_loop()
        os.umask(0o022)  # what is made here is for everybody to read
        directory = self._settings.service.state_directory
        self._root.make_directory(directory)
        self._lock.acquire()
        seal_descriptors()
        self._guard_lock()
        become_subreaper()
        if self._live is not None:
            self.reporter.resume(self._live.reporter, self.supervisor.state)
            version, was = __version__, self._live.version
            journal.log_event(
                journal.Event.SERVICE_CONTINUED, "info", f"going on as version {version}, in place of {was}"
            )
            self._loop.call_soon(self.reporter.reload_ends)  # that the version before has begun; once this one listens
        else:  # only now: nobody else writes it
            left = handover.load(self._root, directory)
            self._clock.go_on(left.clock)
            self.supervisor = self._make_supervisor(left)
        self._begin_metrics(self._inherited_socket())
        try:
            await self.supervisor.run()
        finally:
            for pending in (self._bind_retry, self._replacing):
                if pending is not None:
                    pending.cancel()
            if self.metrics is not None:
                self.metrics.stop()
            if self._lock_watch is not None:
                self._loop.remove_reader(self._lock_watch.fileno())
                self._lock_watch.close()
            self._lock.release()

    def _guard_lock(self) -> None:
        """Without its lock file a second supervisor could start, and take over our Fabric Manager."""
        if self._loop is None:
            return
        try:
            self._lock_watch = FileWatch(self._root)
            self._lock_watch.set_paths((self._lock.path,))
        except CannotObserve as error:
            self.reporter.action_failed(f"a deleted lock file will not be noticed: {error}")
        if self._lock_watch is not None:
            self._loop.add_reader(self._lock_watch.fileno(), self._restore_lock, self._lock_watch)

    def _restore_lock(self, watch: FileWatch) -> None:
        try:
            watch.drain()
            self._root.make_directory(os.path.dirname(self._lock.path))
            is_restored = self._lock.restore()
        except (CannotObserve, ActionFailed, ActionRefused) as error:
            self.reporter.action_failed(f"the lock file was deleted: {error}")
            return
        if is_restored:
            self.reporter.action_failed("the lock file was deleted; it has been made again")
            self.supervisor.write_again()

    def _inherited_socket(self) -> socket.socket | None:
        live = self._live
        if live is None or live.listening < 0:
            return None
        listening = socket.socket(fileno=live.listening)
        metrics = self._settings.metrics
        if metrics.enabled and metrics.listen == live.listens_on:
            return listening
        listening.close()
        return None

    def _begin_metrics(self, listening: socket.socket | None = None) -> None:
        if not self._settings.metrics.enabled or self._loop is None:
            return
        from fmsupervisor.report.metrics import FabricCollector  # noqa: PLC0415 - costs memory, and may be disabled
        from fmsupervisor.report.metrics_server import MetricsServer  # noqa: PLC0415

        server = MetricsServer(
            self._settings.metrics,
            FabricCollector(self.reporter.snapshot),
            self._is_alive,
            self._is_configured,
            self._root,
            on_problem=self._web_problem,
            listening=listening,
        )
        try:
            server.start()
        except ActionFailed as error:
            problem = Problem(Code.METRICS_UNAVAILABLE, str(error))
            self._loop.call_soon(self.supervisor.feed, events.ServiceProblem(problem, is_active=True))
            self._bind_retry = self._loop.call_later(self._bind_retry_seconds, self._begin_metrics)
            return
        self.metrics = server
        gone = Problem(Code.METRICS_UNAVAILABLE, "")
        self._loop.call_soon(self.supervisor.feed, events.ServiceProblem(gone, is_active=False))

    def _web_problem(self, problem: Problem | None) -> None:
        """Called by a thread of the metrics server."""
        event = events.ServiceProblem(problem or Problem(Code.WEB_CONFIG_INVALID, ""), is_active=problem is not None)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.supervisor.feed, event)

    def _is_alive(self) -> bool:
        """Called by a thread of the metrics server: the loop lives when it answers."""
        if self._loop is None:
            return False
        answer: Future[bool] = Future()
        try:
            self._loop.call_soon_threadsafe(answer.set_result, True)
            return answer.result(self._alive_answer_seconds)
        except (TimeoutError, RuntimeError):
            return False

    def _is_configured(self) -> tuple[bool, str]:
        snapshot = self.reporter.snapshot()
        if snapshot is None:
            return False, "starting"
        now = snapshot.verdict
        return now.state is FabricState.CONFIGURED, f"{now.state}: {now.reason}"

    # --- the successor

    def _begin_replacement(self) -> bool:
        """When the installed program is another one: begin to become it, which ends the reload. False: it is not."""
        if self._program is None or self._loop is None or not self._program.has_changed():
            self._tell_refusal("")
            return False
        if self._replacing is None or self._replacing.done():
            self._replacing = self._loop.create_task(self._replace(self._program))
        return True

    async def _replace(self, program: Program) -> None:
        try:
            refusal = await self._check(program) or await self._execute(program)
        except Exception as error:  # noqa: BLE001 - whatever it is: this version goes on
            refusal = f"it could not be tried: {error!r}"
        self._tell_refusal(refusal)
        self.reporter.reload_ends()

    async def _check(self, program: Program) -> str:
        """Let the successor read everything; why it must not be executed, "" when it may."""
        await self._quiet()
        descriptor = handover.write_descriptor(self._document(self._live_now(-1)))
        try:
            command = (*program.command, CHECK_OPTION, f"/proc/{os.getpid()}/fd/{descriptor}")
            silent = {name: text for name, text in program.environment.items() if name not in SERVICE_MANAGER_VARIABLES}
            status, stdout, stderr = await self.supervisor.children.run(Command(command, silent), _CHECK_SECONDS)
        finally:
            os.close(descriptor)
        if status is None:
            return f"its start-up check took longer than {_CHECK_SECONDS:g} s"
        if status.code == 0:
            return ""
        said = (stderr or stdout).decode(errors="replace").strip().splitlines()
        return f"its start-up check failed with {status}" + (f": {said[-1]}" if said else "")

    async def _quiet(self) -> None:
        while not self.supervisor.is_quiet:  # noqa: ASYNC110 - a module may load for minutes, and cannot be interrupted
            await asyncio.sleep(_QUIET_POLL_SECONDS)

    async def _execute(self, program: Program) -> str:
        """Does not return when it works; why it did not."""
        listening = await self._close_metrics()
        while not self.supervisor.is_quiet:
            self._begin_metrics(listening)
            await self._quiet()
            listening = await self._close_metrics()
        try:
            live = self._live_now(listening.fileno() if listening else -1)
            descriptor = handover.write_descriptor(self._document(live))
            try:
                program.execute((descriptor, *live.descriptors), {handover.VARIABLE: str(descriptor)})
            finally:
                os.close(descriptor)
        except OSError as error:
            return f"it cannot be executed: {error.strerror}"
        finally:
            self._begin_metrics(listening)
        return "execve returned"

    async def _close_metrics(self) -> socket.socket | None:
        server, self.metrics = self.metrics, None
        if self._bind_retry is not None:
            self._bind_retry.cancel()
        return await server.hand_over() if server is not None else None

    def _document(self, live: Live) -> bytes:
        return handover.document(self.supervisor.manager.record, self.supervisor.state, self._clock.base, live)

    def _live_now(self, listening: int) -> Live:
        state = self.supervisor.state
        return Live(
            __version__,
            self._lock.descriptor,
            self._settings.service.state_directory,
            self.supervisor.manager.memory(),
            self.reporter.memory(),
            listening,
            self._settings.metrics.listen,
            self.supervisor.kernel_sequence,
            tuple((block.problem, block.aspects) for block in state.blocks),
            state.settings,
        )

    def _tell_refusal(self, text: str) -> None:
        problem = Problem(Code.SUCCESSOR_REFUSED, text)
        self.supervisor.feed(events.ServiceProblem(problem, is_active=bool(text)))

"""The process around the supervisor: one instance, a clean start, the metrics server, the end."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from fmsupervisor.clock import Clock
from fmsupervisor.conditions import Code
from fmsupervisor.core import events
from fmsupervisor.core.verdict import FabricState
from fmsupervisor.daemon_lock import InstanceLock
from fmsupervisor.errors import ActionFailed
from fmsupervisor.fabric_manager.process import become_subreaper, seal_descriptors
from fmsupervisor.facts import Problem
from fmsupervisor.host.kernel import Kernel
from fmsupervisor.host.root import HostRoot
from fmsupervisor.report.reporter import Reporter
from fmsupervisor.report.systemd import SystemdNotifier
from fmsupervisor.settings import Settings
from fmsupervisor.supervisor import Supervisor

if TYPE_CHECKING:
    from fmsupervisor.report.metrics_server import MetricsServer

_BIND_RETRY_SECONDS = 10.0
_ALIVE_ANSWER_SECONDS = 2.0


class Daemon:
    """A supervisor with everything that belongs to its process."""

    def __init__(
        self,
        settings: Settings,
        root: HostRoot,
        kernel: Kernel,
        clock: Clock,
        notifier: SystemdNotifier,
        reload_settings: Callable[[], Settings],
        *,
        bind_retry_seconds: float = _BIND_RETRY_SECONDS,
        alive_answer_seconds: float = _ALIVE_ANSWER_SECONDS,
    ) -> None:
        self._bind_retry_seconds = bind_retry_seconds
        self._alive_answer_seconds = alive_answer_seconds
        self._bind_retry: asyncio.TimerHandle | None = None
        self._settings = settings
        self._root = root
        self.reporter = Reporter(root, clock, notifier)
        self.supervisor = Supervisor(settings, root, kernel, self.reporter, clock, reload_settings)
        self.metrics: MetricsServer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self) -> None:
        """Until stopped. Raises ``ActionRefused`` when another one runs, ``ActionFailed`` when that cannot be told."""
        self._loop = asyncio.get_running_loop()
        os.umask(0o022)  # what is made here is for everybody to read
        directory = self._settings.service.state_directory
        self._root.make_directory(directory)
        lock = InstanceLock(self._root, directory)
        lock.acquire()
        seal_descriptors()
        become_subreaper()
        self._begin_metrics()
        try:
            await self.supervisor.run()
        finally:
            if self._bind_retry is not None:
                self._bind_retry.cancel()
            if self.metrics is not None:
                self.metrics.stop()
            lock.release()

    def _begin_metrics(self) -> None:
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

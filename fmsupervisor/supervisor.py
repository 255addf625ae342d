"""The loop: observers turn the outside into events, the core decides, this carries out.

``feed`` is the only way in. It folds the event, then asks the core for one action after the other until there is none
left, then tells the audiences what is new. Actions that block for long (loading the module, reading the tree) run in
threads of their own, which nothing waits for at the end: a load cannot be stopped, and must not hold up a stop.
"""

import asyncio
import signal
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, assert_never

from fmsupervisor import signals
from fmsupervisor.clock import Clock
from fmsupervisor.conditions import Code
from fmsupervisor.continuity import Continuity
from fmsupervisor.core import actions, events
from fmsupervisor.core.module_map import module_map
from fmsupervisor.core.plan import next_action, next_deadline
from fmsupervisor.core.reduce import reduce
from fmsupervisor.core.restart import backoff_seconds
from fmsupervisor.core.state import State
from fmsupervisor.errors import ActionFailed, CannotObserve, ConfigError
from fmsupervisor.fabric_manager import config_file, foreign, installation
from fmsupervisor.fabric_manager.control import FabricManagerControl, read_version
from fmsupervisor.fabric_manager.process import Children
from fmsupervisor.facts import ExitStatus, Installation, ModuleMap, NodeResult, Problem, Unknown
from fmsupervisor.handover import Handover
from fmsupervisor.host import device_nodes, guests, load_failure, module_store, snapshot
from fmsupervisor.host.file_watch import FileWatch
from fmsupervisor.host.kernel import Kernel, ModuleLoadFailed, UeventSource
from fmsupervisor.host.root import HostRoot
from fmsupervisor.kernel_watch import KernelWatch
from fmsupervisor.report.reporter import Reporter
from fmsupervisor.settings import Settings

_MAX_ACTIONS_PER_EVENT = 100  # a correct plan needs a dozen; more is a fault of the plan, not of the host
_UEVENT_PAUSE_SECONDS = 0.05  # bursts of uevents are read together
_UEVENT_RETRY_SECONDS = 60.0
_THREAD_RETRY_SECONDS = 1.0
_WATCHDOG_MARGIN_SECONDS = 0.001


class Supervisor:
    """One daemon on one host."""

    def __init__(
        self,
        settings: Settings,
        root: HostRoot,
        kernel: Kernel,
        reporter: Reporter,
        clock: Clock,
        reload_settings: Callable[[], Settings],
        inherited: Handover | None = None,
        *,
        execute_successor: Callable[[], bool] = lambda: False,
    ) -> None:
        """``inherited``: what an earlier one left. ``execute_successor``: see ``Daemon``; True when it is tried."""
        self._root = root
        self._kernel = kernel
        self._reporter = reporter
        self._clock = clock
        self._reload_settings = reload_settings
        now = clock.now()
        self._continuity = Continuity(inherited or Handover(), root, clock, reporter.action_failed)
        self._execute_successor = execute_successor
        self.state = self._continuity.inherited.begin(
            State(settings=settings, begun=now, now=now, first_settings=settings)
        )
        self._threads = 0
        self._queue: deque[events.Event] = deque()
        self._is_feeding = False
        self._timer: asyncio.TimerHandle | None = None
        self._uevents: UeventSource | None = None
        self._uevent_timer: asyncio.TimerHandle | None = None
        self._uevent_problem: Problem | None = None
        self._watch: FileWatch | None = None
        self._watched: frozenset[str] = frozenset()
        self._compared: Installation | None = None  # with the files, since they are watched
        self._kernel_watch: KernelWatch | None = None
        self._kept_modules: ModuleMap | None = None

    async def run(self) -> None:
        """Supervise until asked to stop by SIGTERM or SIGINT, and until Fabric Manager has ended."""
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._loop.set_exception_handler(self._give_up)
        self.children = Children(self._loop)
        self.manager = FabricManagerControl(
            self._root, self._loop, self.children, self.feed, keep=self._keep, speed=self._clock.speed
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self.feed, events.StopRequested())
        self._loop.add_signal_handler(signal.SIGHUP, self._reload)
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.LISTENED_TO)
        self._loop.add_signal_handler(signal.SIGCHLD, self.children.reap)
        self._begin_observing()
        self._reporter.begin(self.feed)
        try:
            self._ping_watchdog()
            self.state, before = self._continuity.take_over(self.state, self.manager, self._observe_host)
            for event in before:
                self._fold(event)
            self.feed(events.TimePassed())
            await self._ended
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # held again, if they were before
            self._loop.remove_signal_handler(signal.SIGCHLD)
            self._end_observing()
            self.manager.close()
            self._reporter.end()
            if self.state.has_ended:
                self._continuity.forget(self._directory)

    def _give_up(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A fault of this program: do not go on in an unknown state. ``run`` raises it and systemd restarts us."""
        error = context.get("exception")
        if not self._ended.done():
            self._ended.set_exception(
                error if isinstance(error, BaseException) else RuntimeError(str(context.get("message")))
            )

    def feed(self, event: events.Event) -> None:
        """Take in an event and do everything that follows from it."""
        self._queue.append(event)
        if self._is_feeding:
            return
        self._is_feeding = True
        try:
            while self._queue:
                self._fold(self._queue.popleft())
                if not self._queue:
                    self._act()
        finally:
            self._is_feeding = False
        self._keep()  # first: what people have been told survives a crash
        self._reporter.report(self.state)
        self._keep_modules()
        self._set_timer()
        self._set_watches()

    def _fold(self, event: events.Event) -> None:
        before = self.state
        self.state = reduce(before, event, self._clock.now())
        self._reporter.note(event, self.state)

    def _act(self) -> None:
        for _ in range(_MAX_ACTIONS_PER_EVENT):
            action = next_action(self.state)
            if action is None:
                return
            self._fold(events.ActionTaken(action))
            self._perform(action)
            while self._queue:
                self._fold(self._queue.popleft())
        raise RuntimeError(f"the plan does not come to rest: {next_action(self.state)}")

    def _perform(self, action: actions.Action) -> None:  # noqa: C901, PLR0912 - one line per action
        match action:
            case actions.ObserveHost():
                self.feed(self._observe_host())
            case actions.InspectInstallation():
                self._in_thread(self._inspect)
            case actions.LoadModule():
                self._in_thread(lambda: self._load(action))
            case actions.EnsureNodes():
                self.feed(events.NodesEnsured(self._ensure_nodes()))
            case actions.ObserveDriver():
                self._observe_driver()
            case actions.PrepareConfig(version=version):
                self.feed(events.ConfigPrepared(config_file.prepare(self._root, self.state.settings, version)))
            case actions.LookForForeign():
                self._look_for_foreign()
            case actions.LookForGuests():
                self._look_for_guests()
            case actions.DrawBackoff(attempt=attempt):
                self.feed(events.BackoffDrawn(backoff_seconds(self.state.settings.restart, attempt)))
            case actions.StartFabricManager(resiliency=resiliency):
                now = self._clock.now()
                self.manager.start(self.state.settings, self.state.config, now, resiliency=resiliency)
                backoff_seconds(self.state.settings.restart, 1)  # loads tenacity now, not while the fabric is down
            case actions.TerminateFabricManager():
                self.manager.terminate()
            case actions.KillFabricManager():
                self.manager.kill()
            case actions.EndService():
                if not self._ended.done():
                    self._ended.set_result(None)
            case _:
                assert_never(action)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is under way that another program could not go on with."""
        state = self.state
        is_busy = state.is_loading or state.is_inspecting or state.has_orphans or state.is_stopping
        return not (is_busy or self._threads or self._is_feeding)

    @property
    def kernel_sequence(self) -> int | None:
        """The last record of the kernel log that was read."""
        return self._kernel_watch.last_sequence if self._kernel_watch else None

    @property
    def _directory(self) -> str:
        """Where the lock is: after a reload too."""
        return (self.state.first_settings or self.state.settings).service.state_directory

    def _keep(self) -> None:
        event = self._continuity.keep(self._directory, self.state, self.manager.record)
        if event is not None:
            self._loop.call_soon(self.feed, event)

    def write_again(self) -> None:
        """The files of the state directory may be gone."""
        self._continuity.keep_again()
        self.feed(events.TimePassed())

    def _observe_host(self) -> events.HostObserved:
        try:
            return events.HostObserved(snapshot.observe_host(self._root))
        except CannotObserve as error:
            return events.HostObserved(Unknown(str(error)))

    def _observe_driver(self) -> None:
        try:
            self.feed(events.DriverObserved(self._kernel.driver_view()))
        except CannotObserve as error:
            self.feed(events.DriverObserved(Unknown(str(error))))

    def _ensure_nodes(self) -> tuple[NodeResult, ...]:
        host, settings = self.state.host, self.state.settings.device_nodes
        if host is None:
            return ()
        try:
            uid, gid = device_nodes.resolve_owner(settings.owner, settings.group)
        except ConfigError as error:  # the user or group was there when the settings were read
            wanted = device_nodes.wanted_nodes(host, self.state.driver_view, settings, 0, 0)
            return tuple(NodeResult(node, "failed", str(error)) for node in wanted)
        wanted = device_nodes.wanted_nodes(host, self.state.driver_view, settings, uid, gid)
        return device_nodes.ensure_nodes(self._kernel, wanted)

    def _look_for_foreign(self) -> None:
        port, path = self._command_endpoint()
        problem = Problem(Code.HARDWARE_UNOBSERVABLE, "/proc cannot be searched for another Fabric Manager", "/proc")
        try:
            found = foreign.find_foreign(self._root, self.manager.pids, port, path)
        except CannotObserve:
            self.feed(events.ServiceProblem(problem, is_active=True))
            found = ()
        else:
            self.feed(events.ServiceProblem(problem, is_active=False))
        self.feed(events.ForeignLookedFor(found))

    def _look_for_guests(self) -> None:
        """In a thread: there may be thousands of processes, and what belongs to one that is stuck may hang."""
        gpus = [gpu.pci_bus_id for gpu in self.state.host.gpus] if self.state.host else []

        def look() -> events.Event:
            try:
                return events.GuestsLookedFor(guests.find_guests(self._root, gpus, self._clock.at_boot_seconds))
            except CannotObserve as error:
                return events.GuestsLookedFor(Unknown(str(error)))

        self._in_thread(look)

    def _command_endpoint(self) -> tuple[int | None, str]:
        """Where ours will listen. An unreadable configuration, which is a condition of its own, names nothing."""
        try:
            text = self._root.read_text(self.state.settings.fabric_manager.config)
        except CannotObserve:
            text = None
        return config_file.command_endpoint(text or "")

    def _inspect(self) -> events.Event:
        """In a thread: the tree may be large, and a program is asked for its version."""

        def run_version(
            arguments: list[str], variables: dict[str, str], timeout_seconds: float
        ) -> installation.VersionOutput:
            answer: Future[tuple[ExitStatus | None, bytes, bytes]] = Future()

            def begin() -> None:  # in the loop, which owns all waits; never run when it has ended meanwhile
                asking = read_version(self.children, arguments, variables, timeout_seconds / self._clock.speed)
                task = self._loop.create_task(asking)
                task.add_done_callback(
                    lambda done: answer.cancel() if done.cancelled() else answer.set_result(done.result())
                )

            self._loop.call_soon_threadsafe(begin)
            status, stdout, stderr = answer.result()
            return installation.VersionOutput(
                stdout.decode(errors="replace"),
                stderr.decode(errors="replace"),
                status.code if status else None,
                f"{status or f'took longer than {timeout_seconds:g} s'}",
            )

        release = self.state.host.kernel_release if self.state.host else ""
        return events.InstallationInspected(installation.inspect(self._root, self.state.settings, release, run_version))

    def _load(self, action: actions.LoadModule) -> events.Event:
        """In a thread: the kernel takes its time, and cannot be interrupted."""
        try:
            self._kernel.load_module(action.choice, action.parameters)
        except ModuleLoadFailed as error:
            release = self.state.host.kernel_release if self.state.host else ""
            return events.ModuleLoadEnded(
                load_failure.explain_load_failure(
                    error.errno, error.kernel_lines, action.choice, release, path=error.path
                )
            )
        return events.ModuleLoadEnded(None)

    def _in_thread(self, work: Callable[[], events.Event]) -> None:
        def run() -> None:
            signals.hold()
            try:
                event = work()
            except BaseException as error:  # noqa: BLE001 - handed to the loop, which raises it
                tell(self._give_up, self._loop, {"exception": error})
            else:
                tell(done, event)

        def done(event: events.Event) -> None:
            self._threads -= 1
            self.feed(event)

        def tell(function: Callable[..., None], *arguments: object) -> None:
            try:
                self._loop.call_soon_threadsafe(function, *arguments)
            except RuntimeError:
                pass  # the loop was closed meanwhile

        try:
            threading.Thread(target=run, daemon=True).start()
            self._threads += 1
        except RuntimeError:  # no thread can be started now (TasksMax=, memory)
            self._loop.call_later(_THREAD_RETRY_SECONDS, self._in_thread, work)

    def _begin_observing(self) -> None:
        self._listen_for_uevents()
        try:
            self._watch = FileWatch(self._root)
            self._loop.add_reader(self._watch.fileno(), self._files_changed)
        except CannotObserve as error:
            self._stop_watching(error)
        self._recall_modules()
        live = self._continuity.inherited.live
        self._kernel_watch = KernelWatch(
            self._kernel, self._loop, self.feed, read_until=live.kernel_sequence if live else None
        )
        self._kernel_watch.begin()

    def _recall_modules(self) -> None:
        path = module_store.store_path(self.state.settings.fabric_manager.config)
        kept = module_store.load(self._root, path)
        if kept is not None:
            self._kept_modules = kept
            self._loop.call_soon(self.feed, events.ModulesRecalled(kept))

    def _keep_modules(self) -> None:
        known = module_map(self.state)
        if known == self._kept_modules or not (known.module_ids or known.contradicted):
            return
        self._kept_modules = known
        try:
            module_store.save(self._root, module_store.store_path(self.state.settings.fabric_manager.config), known)
        except ActionFailed as error:
            self._reporter.action_failed(str(error))

    def _stop_watching(self, error: CannotObserve) -> None:
        """Without inotify the files are compared on the timer."""
        if self._watch is not None:
            self._loop.remove_reader(self._watch.fileno())
            self._watch.close()
            self._watch = None
        self.feed_later(Problem(Code.HARDWARE_UNOBSERVABLE, f"{error}; looking on a timer instead", "inotify"))

    def feed_later(self, problem: Problem) -> None:
        """Report a problem of the service itself from outside of ``feed``."""
        self._loop.call_soon(self.feed, events.ServiceProblem(problem, is_active=True))

    def _end_observing(self) -> None:
        if self._kernel_watch is not None:
            self._kernel_watch.close()
        for timer in (self._timer, self._uevent_timer):
            if timer is not None:
                timer.cancel()
        if self._uevents is not None:
            self._loop.remove_reader(self._uevents.fileno())
            self._uevents.close()
        if self._watch is not None:
            self._loop.remove_reader(self._watch.fileno())
            self._watch.close()

    def _listen_for_uevents(self) -> None:
        try:
            self._uevents = self._kernel.monitor_uevents()
        except CannotObserve as error:
            self._uevents_fail(error)
            return
        self._loop.add_reader(self._uevents.fileno(), self._uevent)
        if self._uevent_problem is not None:
            self._loop.call_soon(self.feed, events.ServiceProblem(self._uevent_problem, is_active=False))
            self._loop.call_soon(self.feed, events.HostMayHaveChanged())
            self._uevent_problem = None

    def _uevents_fail(self, error: CannotObserve) -> None:
        """Look on the timer instead, and try again."""
        self._uevent_problem = Problem(Code.HARDWARE_UNOBSERVABLE, f"{error}; looking every 15 s instead", "uevents")
        self.feed_later(self._uevent_problem)
        self._uevent_timer = self._loop.call_later(_UEVENT_RETRY_SECONDS / self._clock.speed, self._listen_again)

    def _listen_again(self) -> None:
        self._uevent_timer = None
        self._listen_for_uevents()

    def _uevent(self) -> None:
        if self._uevents is None:
            return
        try:
            is_news = self._uevents.drain()
        except CannotObserve as error:
            self._loop.remove_reader(self._uevents.fileno())
            self._uevents.close()
            self._uevents = None
            if self._uevent_timer is not None:
                self._uevent_timer.cancel()
            self._uevents_fail(error)
            return
        if not is_news or self._uevent_timer is not None:
            return
        elapsed = self._clock.now().monotonic - self.state.host_observed_at
        pause = max(0.0, _UEVENT_PAUSE_SECONDS - elapsed)
        self._uevent_timer = self._loop.call_later(pause, self._hardware_changed)

    def _hardware_changed(self) -> None:
        self._uevent_timer = None
        self.feed(events.HostMayHaveChanged())

    def _files_changed(self) -> None:
        if self._watch is None:
            return
        try:
            paths = self._watch.drain()
        except CannotObserve as error:
            paths = self._watched
            self._stop_watching(error)
        log_file = self.state.config.log_file if self.state.config else ""
        if log_file in paths:
            self.manager.read_log()
        others = paths - {log_file}
        if others:
            self.feed(events.PathsChanged(others))

    def _set_watches(self) -> None:
        if self._watch is None:
            return
        installed = self.state.installation.watched_paths if self.state.installation else ()
        nodes = (result.node.path for result in self.state.nodes)
        log_file = self.state.config.log_file if self.state.config else ""
        wanted = frozenset({*installed, *nodes} | ({log_file} if log_file else set()))
        if wanted == self._watched:
            return
        self._watched = wanted
        try:
            self._watch.set_paths(wanted)
        except CannotObserve as error:
            self._stop_watching(error)
        found = self.state.installation
        if found is not None and found is not self._compared:
            self._compared = found
            self._in_thread(lambda: self._compare_with(found))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._ended.done():
            return
        seconds = self._clock.real_seconds_until(next_deadline(self.state))
        self._timer = self._loop.call_later(seconds, self._time_passed)

    def _time_passed(self) -> None:
        self.manager.read_log()
        if self._watch is None:
            self._compare_files()
        self.feed(events.TimePassed())
        self._reporter.time_passed()

    def _compare_files(self) -> None:
        """In place of inotify: whether what is installed has changed."""
        if self.state.installation is not None:
            self.feed(self._compare_with(self.state.installation))

    def _compare_with(self, found: Installation) -> events.Event:
        """Also what has changed after it was inspected and before it was watched is news."""
        is_same = installation.fingerprint_of(self._root, self.state.settings) == found.fingerprint
        return events.TimePassed() if is_same else events.PathsChanged(frozenset(found.watched_paths))

    def _ping_watchdog(self) -> None:
        """Only this loop pings, so that a loop that hangs is noticed."""
        interval = self._reporter.notifier.watchdog_interval_seconds
        if interval is None or self._ended.done():
            return
        self._reporter.notifier.watchdog()
        self._loop.call_later(interval - _WATCHDOG_MARGIN_SECONDS, self._ping_watchdog)

    def _reload(self) -> None:
        self._reporter.reload_begins()
        try:
            settings = self._reload_settings()
        except ConfigError as error:
            problem = Problem(Code.SETTINGS_INVALID, str(error))
            self.feed(events.SettingsReloaded(self.state.settings, problem))
        else:
            self.feed(events.SettingsReloaded(settings))
        if not self._execute_successor():
            self._reporter.reload_ends()

"""``fmsupervisor simulate``: the daemon, as it is, on a simulated host, with a play-by-play for the person watching."""

import asyncio
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from fmsupervisor import config
from fmsupervisor.clock import Clock
from fmsupervisor.core.events import StopRequested
from fmsupervisor.daemon import Daemon
from fmsupervisor.errors import ConfigError
from fmsupervisor.exit_codes import ExitCode
from fmsupervisor.report import journal
from fmsupervisor.report.systemd import SystemdNotifier
from fmsupervisor.simulator.scenarios import SCENARIOS, Scenario
from fmsupervisor.simulator.world import World

SETTINGS_FILE = "/etc/fmsupervisor.toml"
LOG_FILE = "/fmsupervisor.log"

_LOOK_SECONDS = 0.02  # real; how often the play-by-play looks at the status
_LIMIT_SECONDS = 1800.0  # simulated; the end state of every scenario is reached long before
_LIMIT_REAL_SECONDS = 45.0  # and on a slow machine, not before this


def list_scenarios() -> str:
    """One line per scenario."""
    width = max(map(len, SCENARIOS))
    return "".join(f"{name:<{width}}  {scenario.summary}\n" for name, scenario in SCENARIOS.items())


def simulate(name: str, speed: float, directory: str | None, metrics: str | None, *, once: bool) -> int:
    """Run the daemon in the scenario until interrupted, or with ``once`` until the end state (exit status 0 or 1)."""
    scenario = SCENARIOS.get(name)
    if scenario is None:
        import difflib  # noqa: PLC0415 - only after a mistake

        near = ", ".join(difflib.get_close_matches(name, SCENARIOS)) or "see --list"
        print(f"fmsupervisor: no scenario {name!r}; {near}", file=sys.stderr)
        return ExitCode.USAGE
    path = os.path.abspath(directory) if directory else tempfile.mkdtemp(prefix="fmsupervisor-simulation-")
    if directory:
        _make_empty(path)
    try:
        return asyncio.run(Simulation(scenario, path, speed, metrics, is_kept=directory is not None).run(once=once))
    finally:
        if directory is None:
            shutil.rmtree(path, ignore_errors=True)


def _make_empty(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
        names = os.listdir(path)
    except OSError as error:
        raise ConfigError(f"--directory {path}: {error.strerror}") from error
    if names:
        raise ConfigError(f"--directory {path}: it is not empty")


class Simulation:
    """One run of one scenario."""

    def __init__(
        self, scenario: Scenario, directory: str, speed: float, metrics: str | None, *, is_kept: bool = True
    ) -> None:
        self.world = World(scenario, directory, speed)
        self._scenario = scenario
        self._directory = directory
        self._speed = speed
        self._is_kept = is_kept
        text = "".join(_toml(scenario.settings_at(speed) | {"metrics": {"listen": metrics or _free_address()}}))
        self.world.root.write_atomically(SETTINGS_FILE, text.encode(), durable=False)
        self.daemon = Daemon(
            self._load(), self.world.root, self.world.kernel, Clock(speed), SystemdNotifier(os.environ), self._load
        )
        self._shown: dict[str, str] = {}
        self._began = time.monotonic()

    def _load(self) -> Any:
        return config.load(self.world.root.path(SETTINGS_FILE), required=True).settings

    async def run(self, *, once: bool) -> int:
        """The exit status: 0; with ``once``, 1 when the end state was not reached."""
        settings = self._load()
        print(f"scenario   {self._scenario.name}: {self._scenario.summary}")
        print(f"host       {self._directory}{'' if self._is_kept else ' (removed at the end)'}")
        print(f"status     {_program()} status --root {self._directory}")
        print(f"metrics    http://{settings.metrics.listen}/metrics")
        if journal.is_connected_to_journal(os.environ, sys.stderr):
            print("log        the journal, as in production\n", flush=True)
            journal.configure_logging(settings.logging, os.environ)
            outcome = await self._play(once=once)
        else:
            print(f"log        {self._directory}{LOG_FILE}")
            print("Ctrl-C     stops it in order\n", flush=True)
            with self._open_log() as log:
                journal.configure_logging(settings.logging, {}, log)
                try:
                    outcome = await self._play(once=once)
                finally:
                    journal.configure_logging(settings.logging, {}, sys.stderr)
        print("stopped")
        return self._conclude(outcome) if once else ExitCode.OK

    def _open_log(self) -> TextIO:
        return open(self.world.root.path(LOG_FILE), "a", encoding="utf-8")

    async def _play(self, *, once: bool) -> bool | str | None:
        """The daemon's whole life, and what the audience makes of it."""
        self._began = time.monotonic()
        daemon = asyncio.create_task(self.daemon.run())
        audience = asyncio.create_task(self._watch(once=once))
        await asyncio.wait({daemon, audience}, return_when=asyncio.FIRST_COMPLETED)
        if not daemon.done():
            self.daemon.supervisor.feed(StopRequested())  # the end state, or nobody looks any more
            await asyncio.wait({daemon})
        daemon.result()
        if not audience.done():
            audience.cancel()
            return None
        return audience.result()

    async def _watch(self, *, once: bool) -> bool | str:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            document = self.daemon.reporter.document
            if not document:
                continue
            self._show(document)
            elapsed = time.monotonic() - self._began
            self.world.advance(elapsed, document)
            if not once:
                continue
            outcome = self.world.outcome(document)
            if outcome is None and elapsed > max(_LIMIT_SECONDS / self._speed, _LIMIT_REAL_SECONDS):
                outcome = f"time is up: {'; '.join(self._scenario.expectation.missing(document))}"
            if outcome is not None:
                return outcome

    def _conclude(self, outcome: object) -> int:
        expected = self._scenario.expectation.describe()
        if outcome is True:
            print(f"\nas expected: {expected}")
            return ExitCode.OK
        print(f"\nNOT as expected: {outcome or 'it was interrupted'}\nexpected was: {expected}")
        return ExitCode.NOT_CONFIGURED

    def _show(self, document: Mapping[str, Any]) -> None:
        """Print the lines of the chain that are new; of a stop only that it is one."""
        if document["state"] == "stopping" and self.daemon.supervisor.state.is_stopping:
            return
        elapsed = (time.monotonic() - self._began) * self._speed
        for key, line in _chain(document):
            if self._shown.get(key) != line:
                self._shown[key] = line
                print(f"{elapsed:9.2f} s  {line}", flush=True)
        for key in self._shown.keys() - {key for key, _ in _chain(document)}:
            print(f"{elapsed:9.2f} s  over     {self._shown.pop(key)}", flush=True)


def _chain(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if not document:
        return
    for step in document["steps"]:
        if step["name"] != "fabric":
            yield step["name"], f"{step['status']:<8} {step['name']:<17} {step['detail']}"
    yield "state", f"{'':8} {document['state'].upper():<17} {document['reason']}"
    for row in document["conditions"]:
        yield (
            f"{row['code']} {row['subject']}",
            f"{row['severity']:<8} {row['code']:<17} {row['title']}: {row['detail']}",
        )


def _program() -> str:
    """How this program was called, so that the line can be copied."""
    name = sys.argv[0]
    return f"{sys.executable} -m fmsupervisor" if name.endswith("__main__.py") else name


def _free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def _toml(tables: Mapping[str, Any], name: str = "") -> Iterator[str]:
    """Nested mappings as a TOML file."""
    if name:
        yield f"[{name}]\n"
    below = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            below[key] = value
        else:
            yield f"{key} = {_literal(value)}\n"
    for key, value in below.items():
        yield from _toml(value, f"{name}.{key}" if name else key)


def _literal(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, int | float) else '"' + str(value).replace('"', '\\"') + '"'

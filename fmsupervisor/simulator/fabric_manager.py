"""A simulated nv-fabricmanager: reads the configuration, opens the nodes, logs and heartbeats like the real one.

``tree.build_tree`` installs it as a script. The supervisor gives its child an exactly defined environment, so
nothing comes from there: the host is the directory above the script that holds ``.simulator``, the behaviour is in its
JSON file, and paths inside the configuration are paths of that host. At run time it takes commands, one a line, from a
FIFO:

    register BUS_ID                  a guest started its driver: the GPU joins the fabric
    activate PARTITION               a client of the API activated it, or told that it is active
    traffic COUNT                    that many multicast teams come and go
    sxid SEVERITY NUMBER BUS_ID PORT one switch error (logged twice, as the real one does)
    stale-handle, reset-needed       the messages of lost registrations
    hang, resume                     stop and restart the heartbeat to the driver
    exit STATUS, crash SIGNAL        end
    ignore-sigterm                   from now on
    child                            start a process that ignores SIGTERM and outlives this one
    line LEVEL TEXT                  any line
    say TEXT                         a line on standard error, where the real one says why it ends

Behaviours (``kind``): normal; bad-config and bad-config-exit-zero (standard error only, status 1 and 0); nothing-to-do;
loader-error; ignores-sigterm; forks-away (daemonises in spite of DAEMONIZE=0); dies-at-start (before the success line);
never-configures; without-success-line.

The driver sees a heartbeat (driver_link.py). The process also ends when its host's directory is gone, so that nothing
is left behind. Only cheap standard modules are imported: it must be up within 60 ms.
"""

import heapq
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from fmsupervisor.simulator import hardware, messages
from fmsupervisor.simulator.driver_link import DeviceNodes, DriverLink, HeartbeatFile, device_minors
from fmsupervisor.simulator.manager_checks import (
    check_config,
    check_driver,
    probed_switches,
    read_config,
    refuse,
    refuse_by_behaviour,
)
from fmsupervisor.simulator.manager_log import Log
from fmsupervisor.simulator.messages import Message

_PARTITIONS_SECONDS = 60.0  # after --restart it waits for the active partitions that long
_HEARTBEAT_SECONDS = 1.0
_SHORTEST_HEARTBEAT_SECONDS = 0.2  # at high speed; the driver's timeout has a floor as well


def main(argv: list[str]) -> NoReturn:
    """The command line of nv-fabricmanager: -v, -h, -c FILE, -r."""
    host = _find_host(os.path.realpath(argv[0]))
    behaviour = _read_json(host + hardware.BEHAVIOUR_FILE)
    arguments = iter(argv[1:])
    config = host + "/usr/share/nvidia/nvswitch/fabricmanager.cfg"
    is_resuming = False
    for argument in arguments:
        if argument in ("-v", "--version"):
            sys.stdout.write(messages.version_output(behaviour["version"]))
            sys.stdout.flush()
            _leave(0)
        elif argument in ("-c", "--config"):
            config = next(arguments, config)
        elif argument in ("-r", "--restart"):
            is_resuming = True
        else:
            sys.stdout.write("usage: nv-fabricmanager [-h] [-v] [-c FILE] [-r]\n")
            sys.stdout.flush()
            _leave(0 if argument in ("-h", "--help") else 1)
    FabricManager(host, behaviour, config, is_resuming=is_resuming).run()


class FabricManager:
    """One run of the program."""

    def __init__(self, host: str, behaviour: dict[str, Any], config: str, *, is_resuming: bool = False) -> None:
        self._host = host
        self._behaviour = behaviour
        self._kind = str(behaviour["kind"])
        self._version = str(behaviour["version"])
        self._speed = float(behaviour["speed"])
        self._gpus = [str(gpu) for gpu in behaviour["gpus"]]
        self._options = read_config(config)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._is_hung = False
        self._is_resuming = is_resuming
        self._state = "standby"
        self._switches: list[str] = []
        self._teams = 0
        self._pending = b""

    def run(self) -> NoReturn:
        """Until a signal or a command ends it."""
        self._install_signals()
        refuse_by_behaviour(self._kind)
        check_config(self._host, self._version, self._options)
        check_driver(self._host, self._version)
        self._driver = _open_driver(self._host)
        self._log = Log(self._host, self._options)
        self._log.header()
        self._log.write(messages.settings_echo(self._version, self._options))
        self._find_switches()
        self._commands = os.open(self._host + hardware.COMMAND_FIFO, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        if self._options.get("DAEMONIZE", "1") == "1" or self._kind == "forks-away":
            self._daemonise()
        self._later(0, self._heartbeat)
        if self._is_resuming:
            self._later(_PARTITIONS_SECONDS, self._give_up_waiting)
        self._later(self._behaviour["configure_seconds"] / 2, self._show_topology)
        if self._kind != "never-configures":
            self._later(self._behaviour["configure_seconds"], self._configure)
        if self._kind == "dies-at-start":
            self._later(self._behaviour["exit_after_seconds"] or 0, self._end)
        self._loop()

    def _loop(self) -> NoReturn:
        while True:
            wait = max(0.0, self._queue[0][0] - time.monotonic()) if self._queue else None
            readable, _, _ = select.select([self._commands], [], [], wait)
            if readable:
                self._take_commands()
            while self._queue and self._queue[0][0] <= time.monotonic():
                heapq.heappop(self._queue)[2]()

    def _later(self, seconds: float, action: Callable[[], None], *, is_scaled: bool = True) -> None:
        self._sequence += 1
        due = time.monotonic() + (seconds / self._speed if is_scaled else seconds)
        heapq.heappush(self._queue, (due, self._sequence, action))

    # --- with the log open

    def _find_switches(self) -> None:
        self._switches = probed_switches(self._host)
        if len(self._switches) != self._behaviour["required_switches"]:
            self._log.write([("ERROR", messages.TOPOLOGY_MISMATCH)])
            refuse(messages.TOPOLOGY_MISMATCH)

    def _show_topology(self) -> None:
        path = self._options.get("TOPOLOGY_FILE_PATH", "/usr/share/nvidia/nvswitch")
        self._log.write(messages.topology(self._version, path, self._switches))

    def _configure(self) -> None:
        self._log.write(messages.routing(self._switches))
        self._state = "configured"
        self._driver.beat(self._state, self._switches)
        if self._kind != "without-success-line":
            self._log.write([("INFO", messages.CONFIGURED)])
        self._log.write([("INFO", "FM starting NvLink Inband started")])
        if self._behaviour["registers_gpus"]:
            # A running guest does not register its GPU a second time, whatever becomes of Fabric Manager.
            asking = [gpu for gpu in self._gpus if not os.path.exists(self._registration_file(gpu))]
            order = [gpu for _, gpu in sorted(zip(os.urandom(len(asking)), asking, strict=True))]
            pause = self._behaviour["registration_seconds"] / max(1, len(order))
            for number, gpu in enumerate(order, 1):
                self._later(number * pause, self._registration_of(gpu))
        if self._behaviour["exit_after_seconds"] is not None and self._kind != "dies-at-start":
            self._later(self._behaviour["exit_after_seconds"], self._end)

        self._keep_state()

    def _keep_state(self) -> None:
        """The state file; its format is not public."""
        path = self._options.get("STATE_FILE_NAME", "")
        if path and self._options.get("FABRIC_MODE", "0") != "0":
            descriptor = os.open(self._host + path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            os.write(descriptor, b"simulated state\n")
            os.close(descriptor)

    def _give_up_waiting(self) -> None:
        if self._is_resuming:
            _leave(1)

    def _registration_of(self, gpu: str) -> Callable[[], None]:
        return lambda: self._log.write(self._register(gpu))

    def _register(self, gpu: str) -> list[Message]:
        try:
            os.close(os.open(self._registration_file(gpu), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
        except FileNotFoundError:
            _leave(0)  # the host is gone
        return list(messages.registration(self._version, gpu))

    def _registration_file(self, gpu: str) -> str:
        return f"{self._host}{hardware.REGISTRATIONS}/{gpu}"

    def _end(self) -> None:
        """Leave with the scripted status; a negative one is a signal."""
        status = int(self._behaviour["exit_code"])
        if status < 0:
            _die_by_signal(-status)
        _leave(status)

    def _heartbeat(self) -> None:
        if not os.path.isdir(self._host + hardware.SIMULATOR_DIRECTORY):
            _leave(0)
        if not self._is_hung:
            self._driver.beat(self._state, self._switches)
        pause = max(_SHORTEST_HEARTBEAT_SECONDS, _HEARTBEAT_SECONDS / self._speed)
        self._later(pause, self._heartbeat, is_scaled=False)

    def _take_commands(self) -> None:
        try:
            self._pending += os.read(self._commands, 1 << 16)
        except BlockingIOError:
            return  # another process of this kind was faster
        *lines, self._pending = self._pending.split(b"\n")
        for line in lines:
            self._obey(line.decode().split(" "))

    def _obey(self, words: list[str]) -> None:
        match words:
            case ["hang" | "resume" as word]:
                self._is_hung = word == "hang"
            case ["exit", status]:
                _leave(int(status))
            case ["crash", number]:
                _die_by_signal(int(number))
            case ["ignore-sigterm"]:
                self._ignore_signals()
            case ["child"]:
                self._start_child()
            case ["traffic", count]:
                self._communicate(int(count))
            case ["say", *text]:
                os.write(2, f"{' '.join(text)}\n".encode())
            case _:
                self._log.write(self._scripted_lines(words))

    def _scripted_lines(self, words: list[str]) -> list[Message]:
        match words:
            case ["register", gpu]:
                return self._register(gpu)
            case ["activate", partition]:
                self._is_resuming = False
                return [("INFO", f"NodeId 0 partition id {partition} is activated.")]
            case ["sxid", severity, number, switch, port]:
                return [messages.switch_error(self._version, severity, int(number), switch, int(port))] * 2
            case ["stale-handle"]:
                return list(messages.stale_handle(self._version))
            case ["reset-needed"]:
                return [("ERROR", messages.RESET_NEEDED)]
            case ["line", level, *text]:
                return [(level, " ".join(text))]
            case _:
                return [("WARNING", f"simulator: unknown command {' '.join(words)}")]

    def _communicate(self, count: int) -> None:
        for _ in range(count):
            self._teams += 1
            self._log.write(messages.multicast(self._version, self._teams, self._gpus))

    # --- processes and signals

    def _install_signals(self) -> None:
        if self._kind == "ignores-sigterm":
            self._ignore_signals()
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: _leave(0))

    def _ignore_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    def _start_child(self) -> None:
        if os.fork():
            return
        self._ignore_signals()
        while os.path.isdir(self._host + hardware.SIMULATOR_DIRECTORY):
            time.sleep(_SHORTEST_HEARTBEAT_SECONDS)
        _leave(0)

    def _daemonise(self) -> None:
        """fork, setsid, fork: the parent ends with status 0, as before Type=forking.

        It waits for the one between, which systemd could take for the main process otherwise.
        """
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            _leave(0)
        os.setsid()
        if os.fork():
            _leave(0)


def _open_driver(host: str) -> DriverLink:
    minors = device_minors(host)
    if minors is None:
        return HeartbeatFile(host)
    try:
        return DeviceNodes(host, minors)
    except OSError:
        refuse(messages.NOTHING_TO_DO)


def _find_host(script: str) -> str:
    """The nearest directory above the script that holds the simulator's own directory; "" for the root directory."""
    directory = os.path.dirname(script)
    while not os.path.isdir(directory + hardware.SIMULATOR_DIRECTORY):
        if directory == "/":
            refuse("this simulated nv-fabricmanager is not below a simulated host")
        directory = os.path.dirname(directory)
    return "" if directory == "/" else directory


def _read_json(path: str) -> dict[str, Any]:
    with open(path, encoding="utf-8") as file:
        record: dict[str, Any] = json.load(file)
    return record


def _leave(status: int) -> NoReturn:
    """End at once, also from within a signal handler; nothing is buffered."""
    os._exit(status)


def _die_by_signal(number: int) -> NoReturn:
    """End as if the signal had come from outside, without a core file."""
    import resource  # noqa: PLC0415 - start-up time

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    signal.pause()
    _leave(128 + number)

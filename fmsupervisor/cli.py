"""The command line: one function per command, each importing only what it needs."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fmsupervisor import __version__
from fmsupervisor.errors import ActionRefused, ConfigError, FmsupervisorError

if TYPE_CHECKING:
    from fmsupervisor.client import StatusReader
    from fmsupervisor.config import LoadedSettings
    from fmsupervisor.host.root import HostRoot
    from fmsupervisor.settings import Settings

DEFAULT_CONFIG = "/etc/fmsupervisor.toml"

_WAIT_HELP = "block until the fabric is configured: 0 it is, or there is none here; 1 not in time; 3 no daemon in time"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - None when the descriptor was closed
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    options = _parser().parse_args(arguments)
    try:
        status = int(options.command(options))
        sys.stdout.flush()  # here, where it can be told what went wrong
        return status
    except ConfigError as error:
        print(f"fmsupervisor: {error}", file=sys.stderr)
        return 78
    except FmsupervisorError as error:
        print(f"fmsupervisor: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            print(f"fmsupervisor: {error.strerror or error}", file=sys.stderr)
            _forget_output()
            return 74  # EX_IOERR: what was to be written could not be
        _forget_output()  # nobody reads on; that is no fault of ours
        return 0
    except KeyboardInterrupt:
        return 130


def _forget_output() -> None:
    """What is still buffered goes nowhere, instead of failing again at the end of the interpreter."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fmsupervisor",
        description="Brings up and supervises NVIDIA Fabric Manager on hosts that keep their NVSwitches.",
    )
    parser.add_argument("--version", action="version", version=f"fmsupervisor {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = _command(commands, "run", run_daemon, "run the daemon (started by systemd)")
    _add_config(run)
    run.add_argument("--root", default="/", help=argparse.SUPPRESS)  # a simulated host
    run.add_argument("--speed", type=_speed, default=1.0, help=argparse.SUPPRESS)
    run.add_argument("--check-handover", metavar="FILE", help=argparse.SUPPRESS)  # see daemon.py

    after = _command(commands, "after-stop", clean_up, "end what a stopped daemon has left (called by its unit)")
    _add_config(after)

    config = _command(commands, "config", show_config, "print the effective settings and where each came from")
    _add_config(config)
    _add_root(config)
    config.add_argument("--default", action="store_true", help="print a commented file with the defaults instead")

    status = _command(commands, "status", show_status, "show the chain, step by step: 0 configured, 1 not, 3 no daemon")
    _add_config(status)
    _add_root(status)
    status.add_argument("--json", action="store_true", help="print the status document")
    status.add_argument("--watch", action="store_true", help="print again whenever it changes")

    wait = _command(commands, "wait", wait_until_configured, _WAIT_HELP)
    _add_config(wait)
    _add_root(wait)
    wait.add_argument(
        "--timeout", type=_seconds, default=None, metavar="S", help="give up after S seconds (default: never)"
    )

    explain = _command(commands, "explain", explain_question, "say what a code, an SXid or a log line means, offline")
    explain.add_argument("question", nargs="+", metavar="CODE|SXID|LINE", help="FMS-601, 20034, or a line in quotes")
    explain.add_argument("--json", action="store_true", help="print a document")

    check = _command(commands, "check", check_host, "look at the whole chain, read-only: 0 ok, 1 failed, 2 warnings")
    _add_config(check)
    _add_root(check)
    check.add_argument("--json", action="store_true", help="print a document")
    check.add_argument("--guest", action="store_true", help="look at a guest whose host owns the fabric")
    check.add_argument("--condition", metavar="CODE", help="one line on one condition: 0 ok, 1 problem, 2 unknown")

    report = _command(commands, "report", write_report, "write everything that a support case needs into one tar.gz")
    _add_config(report)
    _add_root(report)
    report.add_argument("--output", metavar="FILE", help="the archive (default: a new name in the working directory)")
    report.add_argument("--no-redact", action="store_true", help="keep serial numbers, UUIDs, names and addresses")

    simulate = _command(commands, "simulate", simulate_host, "run the daemon on a simulated HGX H200 host")
    simulate.add_argument("--scenario", default="healthy", metavar="NAME", help="what happens (default: healthy)")
    simulate.add_argument("--speed", type=_speed, default=1.0, metavar="X", help="let time pass X times as fast")
    simulate.add_argument("--once", action="store_true", help="end as soon as the scenario's end state is reached")
    simulate.add_argument("--list", action="store_true", help="list the scenarios")
    simulate.add_argument("--directory", metavar="DIR", help="build the host there and keep it (default: temporary)")
    simulate.add_argument("--metrics", metavar="ADDRESS:PORT", help="where to serve the metrics (default: a free port)")
    return parser


def _command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, function: Any, text: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(command=function)
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help=f"the settings file (default: {DEFAULT_CONFIG})")


def _add_root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", default="/", metavar="DIR", help="look at the (simulated) host below DIR")


def _seconds(text: str) -> float:
    return _number(text, 0, 1e9, "a number of seconds")


def _speed(text: str) -> float:
    return _number(text, 0.001, 1000, "a number between 0.001 and 1000")  # beyond, processes start too slowly


def _number(text: str, least: float, most: float, allowed: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not {allowed}")
    return value


def _load(options: argparse.Namespace, default: str = DEFAULT_CONFIG) -> "LoadedSettings":
    from fmsupervisor import config

    return config.load(options.config or default, required=options.config is not None)


def run_daemon(options: argparse.Namespace) -> int:
    """``fmsupervisor run``."""
    import asyncio

    from fmsupervisor import handover, signals
    from fmsupervisor.clock import Clock
    from fmsupervisor.daemon import Daemon
    from fmsupervisor.exit_codes import ExitCode
    from fmsupervisor.host.device_nodes import resolve_owner
    from fmsupervisor.host.root import HostRoot
    from fmsupervisor.host.trusted_path import find_untrusted
    from fmsupervisor.program import this_program
    from fmsupervisor.report import journal
    from fmsupervisor.report.systemd import SERVICE_MANAGER_VARIABLES, SystemdNotifier

    signals.hold()
    inherited = os.environ.pop(handover.VARIABLE, None)
    root = HostRoot(options.root)
    arguments = ["run"]
    if options.config is not None:
        options.config = os.path.abspath(options.config)
        arguments += ["--config", options.config]
    if root.directory != "/":
        arguments += ["--root", root.directory, "--speed", str(options.speed)]
    program = this_program(arguments, os.environ)

    def read_settings() -> "Settings":
        settings = _load(options).settings
        untrusted = find_untrusted(HostRoot("/"), options.config or DEFAULT_CONFIG, os.geteuid())
        if untrusted:
            raise ConfigError(f"{untrusted}: the settings say what is executed as root")
        resolve_owner(settings.device_nodes.owner, settings.device_nodes.group)
        journal.configure_logging(settings.logging, os.environ)
        return settings

    settings = read_settings()
    if options.check_handover is not None:
        return _check_handover(options.check_handover)
    notifier = SystemdNotifier(os.environ)
    for name in SERVICE_MANAGER_VARIABLES:
        os.environ.pop(name, None)
    os.chdir("/")
    left = handover.read_descriptor(int(inherited)) if inherited else None
    clock = Clock(options.speed)
    clock.go_on(left.clock if left else None)
    kernel = _kernel(root, options.speed)
    daemon = Daemon(settings, root, kernel, clock, notifier, read_settings, inherited=left, program=program)
    try:
        asyncio.run(daemon.run())
    except ActionRefused as error:
        journal.log_event(journal.Event.ACTION_FAILED, "error", str(error))
        return ExitCode.ALREADY_RUNNING
    return ExitCode.OK


def _check_handover(path: str) -> int:
    """Whether this version can go on with what the running one would leave: its start-up check."""
    from fmsupervisor import handover
    from fmsupervisor.report import metrics, metrics_server  # noqa: F401 - can they be imported?

    with open(path, "rb") as file:
        found = handover.parse(file.read())
    if found.live is None or found.dropped:
        print(f"fmsupervisor: cannot read what is handed over: {'; '.join(found.dropped)}", file=sys.stderr)
        return 1
    return 0


def _kernel(root: "HostRoot", speed: float = 1.0) -> Any:
    """The kernel of the host, which may be a simulated one."""
    if root.directory != "/" and root.is_directory("/.simulator"):
        from fmsupervisor.simulator.kernel import SimulatedKernel

        return SimulatedKernel(root, speed=speed)  # whose device nodes are files
    from fmsupervisor.host.linux_kernel import LinuxKernel

    return LinuxKernel(root)


def clean_up(options: argparse.Namespace) -> int:
    """``fmsupervisor after-stop``."""
    from fmsupervisor.after_stop import after_stop
    from fmsupervisor.host.root import HostRoot
    from fmsupervisor.settings import Settings

    try:
        settings = _load(options).settings
    except ConfigError as error:  # a stop is a stop all the same
        print(f"fmsupervisor: {error}", file=sys.stderr)
        settings = Settings()
    return after_stop(HostRoot("/"), settings, os.environ)


def show_config(options: argparse.Namespace) -> int:
    """``fmsupervisor config``."""
    from fmsupervisor import config

    if options.default:
        print(config.render_default(), end="")
    else:
        from fmsupervisor.host.root import HostRoot

        default = HostRoot(options.root).path(DEFAULT_CONFIG)
        print(config.render_effective(_load(options, default)), end="")
    return 0


def show_status(options: argparse.Namespace) -> int:
    """``fmsupervisor status``."""
    return _status_reader(options).show(as_json=options.json, watch=options.watch)


def wait_until_configured(options: argparse.Namespace) -> int:
    """``fmsupervisor wait``."""
    return _status_reader(options).wait(options.timeout)


def _status_reader(options: argparse.Namespace) -> "StatusReader":
    from fmsupervisor.client import StatusReader
    from fmsupervisor.host.root import HostRoot

    root = HostRoot(options.root)
    try:
        settings = _load(options, root.path(DEFAULT_CONFIG)).settings
    except ConfigError as error:
        # A mistake in the file must not hide the daemon, which goes on with the settings from before.
        from fmsupervisor.settings import Settings

        settings = Settings()
        print(f"fmsupervisor: {error}\nfmsupervisor: looking in the default state directory", file=sys.stderr)
    return StatusReader(settings, root)


def explain_question(options: argparse.Namespace) -> int:
    """``fmsupervisor explain``."""
    from fmsupervisor import explain

    return explain.run(" ".join(options.question), as_json=options.json)


def check_host(options: argparse.Namespace) -> int:
    """``fmsupervisor check``."""
    from fmsupervisor.checks.command import check
    from fmsupervisor.host.root import HostRoot

    root = HostRoot(options.root)
    return check(
        root, _kernel(root), options.config, condition=options.condition, guest=options.guest, as_json=options.json
    )


def write_report(options: argparse.Namespace) -> int:
    """``fmsupervisor report``."""
    from fmsupervisor.host.root import HostRoot
    from fmsupervisor.support.command import report

    return report(HostRoot(options.root), options.config, options.output, redacts=not options.no_redact)


def simulate_host(options: argparse.Namespace) -> int:
    """``fmsupervisor simulate``."""
    from fmsupervisor import signals
    from fmsupervisor.simulator.command import list_scenarios, simulate

    if options.list:
        print(list_scenarios(), end="")
        return 0
    signals.hold()
    return simulate(options.scenario, options.speed, options.directory, options.metrics, once=options.once)

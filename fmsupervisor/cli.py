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
    from fmsupervisor.settings import Settings

DEFAULT_CONFIG = "/etc/fmsupervisor.toml"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
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
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads on; that is no fault of ours
        return 0
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fmsupervisor",
        description="Brings up and supervises NVIDIA Fabric Manager on hosts that keep their NVSwitches.",
    )
    parser.add_argument("--version", action="version", version=f"fmsupervisor {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = _command(commands, "run", run_daemon, "run the daemon (started by systemd)")
    _add_config(run)

    config = _command(commands, "config", show_config, "print the effective settings and where each came from")
    _add_config(config)
    config.add_argument("--default", action="store_true", help="print a commented file with the defaults instead")

    status = _command(commands, "status", show_status, "show the chain, step by step: 0 configured, 1 not, 3 no daemon")
    _add_config(status)
    _add_root(status)
    status.add_argument("--json", action="store_true", help="print the status document")
    status.add_argument("--watch", action="store_true", help="print again whenever it changes")

    wait = _command(commands, "wait", wait_until_configured, "block until the fabric is configured")
    _add_config(wait)
    _add_root(wait)
    wait.add_argument("--timeout", type=_seconds, default=None, metavar="S", help="give up after S seconds (exit 1)")

    explain = _command(commands, "explain", explain_question, "say what a code, an SXid or a log line means, offline")
    explain.add_argument("question", nargs="+", metavar="CODE|SXID|LINE", help="FMS-601, 20034, or a line in quotes")
    explain.add_argument("--json", action="store_true", help="print a document")

    check = _command(commands, "check", check_host, "look at the whole chain, read-only: 0 ok, 1 failed, 2 warnings")
    _add_config(check)
    _add_root(check)
    check.add_argument("--json", action="store_true", help="print a document")
    check.add_argument("--guest", action="store_true", help="look at a guest whose host owns the fabric")
    check.add_argument("--condition", metavar="CODE", help="one line on one condition: 0 ok, 1 problem, 2 unknown")

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
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return value


def _speed(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1000:  # noqa: PLR2004 - faster than that, processes start too slowly to keep up
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1000")
    return value


def _load(options: argparse.Namespace, default: str = DEFAULT_CONFIG) -> "LoadedSettings":
    from fmsupervisor import config

    return config.load(options.config or default, required=options.config is not None)


def run_daemon(options: argparse.Namespace) -> int:
    """``fmsupervisor run``."""
    from fmsupervisor import signals

    signals.hold()
    import asyncio

    from fmsupervisor.clock import Clock
    from fmsupervisor.daemon import Daemon
    from fmsupervisor.exit_codes import ExitCode
    from fmsupervisor.host.device_nodes import resolve_owner
    from fmsupervisor.host.linux_kernel import LinuxKernel
    from fmsupervisor.host.root import HostRoot
    from fmsupervisor.report import journal
    from fmsupervisor.report.systemd import SERVICE_MANAGER_VARIABLES, SystemdNotifier

    if options.config is not None:
        options.config = os.path.abspath(options.config)

    def read_settings() -> "Settings":
        settings = _load(options).settings
        resolve_owner(settings.device_nodes.owner, settings.device_nodes.group)
        journal.configure_logging(settings.logging, os.environ)
        return settings

    settings = read_settings()
    notifier = SystemdNotifier(os.environ)
    for name in SERVICE_MANAGER_VARIABLES:
        os.environ.pop(name, None)
    os.chdir("/")
    root = HostRoot("/")
    daemon = Daemon(settings, root, LinuxKernel(root), Clock(), notifier, read_settings)
    try:
        asyncio.run(daemon.run())
    except ActionRefused as error:
        journal.log_event(journal.Event.ACTION_FAILED, "error", str(error))
        return ExitCode.ALREADY_RUNNING
    return ExitCode.OK


def show_config(options: argparse.Namespace) -> int:
    """``fmsupervisor config``."""
    from fmsupervisor import config

    print(config.render_default() if options.default else config.render_effective(_load(options)), end="")
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
    return StatusReader(_load(options, root.path(DEFAULT_CONFIG)).settings, root)


def explain_question(options: argparse.Namespace) -> int:
    """``fmsupervisor explain``."""
    from fmsupervisor import explain

    return explain.run(" ".join(options.question), as_json=options.json)


def check_host(options: argparse.Namespace) -> int:
    """``fmsupervisor check``."""
    from fmsupervisor.checks.command import check
    from fmsupervisor.host.linux_kernel import LinuxKernel
    from fmsupervisor.host.root import HostRoot

    root = HostRoot(options.root)
    kernel: Any = LinuxKernel(root)
    if root.directory != "/" and root.is_directory("/.simulator"):
        from fmsupervisor.simulator.kernel import SimulatedKernel

        kernel = SimulatedKernel(root)  # whose device nodes are files
    return check(
        root, kernel, options.config, condition=options.condition, guest=options.guest, as_json=options.json
    )


def simulate_host(options: argparse.Namespace) -> int:
    """``fmsupervisor simulate``."""
    from fmsupervisor import signals
    from fmsupervisor.simulator.command import list_scenarios, simulate

    if options.list:
        print(list_scenarios(), end="")
        return 0
    signals.hold()
    return simulate(options.scenario, options.speed, options.directory, options.metrics, once=options.once)

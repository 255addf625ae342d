"""``fmsupervisor check``."""

import sys

from fmsupervisor import config
from fmsupervisor.checks import rendering
from fmsupervisor.checks.context import Context, kernel_clock_is_synchronised
from fmsupervisor.checks.guest import why_not_applicable
from fmsupervisor.checks.registry import GUEST_CHECKS, HOST_CHECKS
from fmsupervisor.checks.runner import run_checks, with_code
from fmsupervisor.conditions import Code
from fmsupervisor.errors import ConfigError
from fmsupervisor.host.kernel import Kernel
from fmsupervisor.host.root import HostRoot

_UNKNOWN = 2  # of node-problem-detector


def check(
    root: HostRoot, kernel: Kernel, settings_path: str | None, *, condition: str | None, guest: bool, as_json: bool
) -> int:
    """Run the checks, print what they found, and return the exit status."""
    context = make_context(root, kernel, settings_path)
    checks = GUEST_CHECKS if guest else HOST_CHECKS
    if condition is not None:
        line, status = _one_condition(context, condition)
        print(line)  # noqa: T201
        return status
    report = run_checks(context, checks, why_not_applicable if guest else Context.why_not_applicable)
    if as_json:
        import json  # noqa: PLC0415

        print(json.dumps(rendering.document(report), indent=2))  # noqa: T201
    else:
        sys.stdout.write(rendering.render_text(report))
    return report.exit_status


def make_context(root: HostRoot, kernel: Kernel, settings_path: str | None) -> Context:
    """Settings that cannot be used become a finding, and the defaults are looked at instead."""
    error = ""
    try:
        path = settings_path or root.path(config.DEFAULT_PATH)
        settings = config.load(path, required=settings_path is not None).settings
    except ConfigError as failure:
        settings, error = config.load_text("", "defaults").settings, str(failure)
    is_this_machine = root.directory == "/"
    clock = kernel_clock_is_synchronised if is_this_machine else (lambda: None)
    return Context(root, settings, kernel.node_status, error, is_clock_synchronised=clock)


def _one_condition(context: Context, text: str) -> tuple[str, int]:
    """Only the checks that can tell it. A condition of the running daemon alone is unknown without one."""
    code = next((code for code in Code if code == text.upper()), None)
    if code is None:
        return f"{text}: no such condition", _UNKNOWN
    checks = with_code((*HOST_CHECKS, *GUEST_CHECKS), code)
    report = run_checks(context, checks)
    tells = [check.name for check in checks if check.name != "daemon"]
    if not tells and not report.not_applicable and context.daemon is None:
        return f"{code} unknown: only a running fmsupervisor can tell, and none is running", _UNKNOWN
    return rendering.condition_line(report, code)

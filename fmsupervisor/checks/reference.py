"""docs/checks.md, made from the table of checks. Not for the daemon."""

from collections.abc import Iterable, Iterator

from fmsupervisor.checks.context import Context
from fmsupervisor.checks.finding import Check
from fmsupervisor.checks.registry import GUEST_CHECKS, HOST_CHECKS
from fmsupervisor.conditions import Code

_INTRODUCTION = """# Checks

<!-- Made from fmsupervisor/checks by the tests: RENEW_GOLDEN=1 pytest tests/unit/checks/test_reference.py -->

`fmsupervisor check` looks at the whole chain, before anything is installed, beside a running daemon, or without one. It
only reads: nothing is written, made, loaded, connected to or sent. The one program that it runs is
`nv-fabricmanager --version`, and with `--guest` `nvidia-smi -q -x`.

Each check says `ok`, `warning`, `failed` or `cannot tell` (something could not be looked at, with the reason), what was
found, and what to do. Exit status: 0 all is well, 1 something failed, 2 there are warnings or something could not be
looked at. A machine without NVSwitches is not applicable, which is well. No check takes longer than its deadline, all
together 25 s at most.

`--json` prints a document. `--condition CODE` prints one line and exits with 0 (does not hold), 1 (holds) or 2
(unknown), as node-problem-detector's custom plugins expect. Conditions that only a run of Fabric Manager shows are
taken from the running daemon. All are explained in [runbook.md](runbook.md).
"""


def render_reference() -> str:
    """The whole document."""
    host = "\n".join(_table(HOST_CHECKS))
    guest = "\n".join(_table(GUEST_CHECKS))
    return f"{_INTRODUCTION}\n## On a host\n\n{host}\n\n## In a guest (`--guest`)\n\n{guest}\n"


def _table(checks: Iterable[Check[Context]]) -> Iterator[str]:
    yield "| check | looks at | conditions |"
    yield "|---|---|---|"
    for check in checks:
        meaning = " ".join((check.function.__doc__ or "").split("\n\n", 1)[0].split()).replace("``", "`")
        codes = "all" if set(check.codes) == set(Code) else ", ".join(check.codes)
        yield f"| `{check.name}` | {meaning} | {codes} |"

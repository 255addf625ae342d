"""docs/runbook.md, made from the registry of conditions. Not for the daemon."""

from fmsupervisor.conditions import REGISTRY, Condition

_INTRODUCTION = """# Runbook

<!-- Made from fmsupervisor/conditions.py by the tests: RENEW_GOLDEN=1 pytest tests/unit/test_runbook.py -->

Every condition that fmsupervisor can report, by code. `fmsupervisor status` shows the open ones and what was found;
`journalctl FMSUPERVISOR_CONDITION=FMS-301` finds the history of one. One that blocks the start keeps Fabric Manager
from being started while it holds.
"""


def render_runbook() -> str:
    """The whole document."""
    return "\n".join([_INTRODUCTION, *map(_section, REGISTRY.values())])


def _section(condition: Condition) -> str:
    blocks = "blocks the start" if condition.blocks_start else "does not block the start"
    return (
        f"## {condition.code}\n\n"
        f"**{condition.title}** ({condition.severity}, {blocks})\n\n"
        f"{condition.cause}\n\n"
        f"What to do: {condition.remedy}\n\n"
        f"MESSAGE_ID={condition.message_id}\n"
    )

"""docs/runbook.md, made from the registry of conditions. Not for the daemon."""

from fmsupervisor.conditions import REGISTRY, Code, Condition

_INTRODUCTION = """# Runbook

<!-- Made from fmsupervisor/conditions.py by the tests: RENEW_GOLDEN=1 pytest tests/unit/test_runbook.py -->

Every condition that fmsupervisor can report, by code. `fmsupervisor status` shows the open ones and what was found;
`journalctl FMSUPERVISOR_CONDITION=FMS-301` finds the history of one. One that blocks the start keeps Fabric Manager
from being started while it holds; while an NVSwitch is missing, `switches.when_missing` decides.
"""


_RETRIED = frozenset(
    {
        Code.MODULE_LOAD_BUSY,
        Code.RUN_DIRECTORY_DENIED,
        Code.FABRIC_MANAGER_DIED,
        Code.CRASH_LOOP,
        Code.START_TIMEOUT,
        Code.SPAWN_FAILED,
        Code.ADDRESS_IN_USE,
    }
)


_SWITCHES = frozenset({Code.SWITCH_MISSING, Code.SWITCH_NOT_PROBED, Code.SWITCH_PASSED_THROUGH})


def meanwhile(condition: Condition) -> str:
    """What the supervisor does while the condition holds."""
    if condition.code in _RETRIED:
        return "fmsupervisor tries again, after pauses that grow."
    if condition.code in _SWITCHES:
        return "before Fabric Manager is started, fmsupervisor does as switches.when_missing says; later it reports."
    if condition.blocks_start:
        return (
            "fmsupervisor does not start Fabric Manager while this holds, leaves one that runs alone, and goes on by "
            "itself when the cause is gone."
        )
    return "fmsupervisor reports it until it is over."


def render_runbook() -> str:
    """The whole document."""
    return "\n".join([_INTRODUCTION, *map(_section, REGISTRY.values())])


def _section(condition: Condition) -> str:
    blocks = "blocks the start" if condition.blocks_start else "does not block the start"
    if condition.code in _SWITCHES:
        blocks = "blocks the start as switches.when_missing says"
    return (
        f"## {condition.code}\n\n"
        f"**{condition.title}** ({condition.severity}, {blocks})\n\n"
        f"{condition.cause}\n\n"
        f"What to do: {condition.remedy}\n\n"
        f"Meanwhile: {meanwhile(condition)}\n\n"
        f"MESSAGE_ID={condition.message_id}\n"
    )

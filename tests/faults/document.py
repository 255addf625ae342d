"""docs/faults.md, made from the fault matrix."""

import re

from tests.faults.matrix import ELSEWHERE, GROUPS, Elsewhere, Fault
from tests.faults.stage import LETTERS

_INTRODUCTION = """# Faults

<!-- Made from tests/faults/matrix.py by the tests: RENEW_GOLDEN=1 pytest tests/faults/test_document.py -->

What can go wrong around fmsupervisor, what comes of it, and what after the cause is gone. The fabric is configured and
all GPUs have joined it when a fault begins. Each row is a test: the daemon as a process of its own on a simulated host,
with a simulated Fabric Manager that is real in its process, files, pipes and signals.

In every row, without being said again: the daemon does not end; when all is over it has no more descriptors, threads,
zombies and temporary files than before; what it says at the end of the test is in order, and no process is left.
What the death of Fabric Manager means for guests (FMS-608, FMS-619) is not repeated in each row.
"""

_COLUMNS = "| Fault | Meanwhile | Conditions | After | Then | Fabric Manager |\n|---|---|---|---|---|---|"
_COLUMNS_ELSEWHERE = "| Fault | What comes of it | Tested in |\n|---|---|---|"
_NAMES = {letter: name for name, letter in LETTERS.items()}


def render_faults() -> str:
    """The whole document."""
    parts = [f"## {name}\n\n{_COLUMNS}\n" + "\n".join(map(_row, rows)) for name, rows in GROUPS.items()]
    groups = "\n\n".join(parts)
    others = "\n".join(map(_row_elsewhere, ELSEWHERE))
    return f"{_INTRODUCTION}\n{groups}\n\n## Tested in other ways\n\n{_COLUMNS_ELSEWHERE}\n{others}\n"


def _row(row: Fault) -> str:
    conditions = [f"{code} (passes)" if code in row.passing else str(code) for code in row.before + row.conditions]
    conditions += [f"{code} (for a moment, perhaps)" for code in row.maybe]
    then = _states(row.recovered) or "as before"
    then += "".join(f"; {code} stays" for code in row.lasting)
    kept = "the same process" if row.is_manager_kept else "another process"
    cells = (row.fault, _states(row.states) or "as before", ", ".join(conditions) or "none", row.cure, then, kept)
    return f"| {' | '.join(cells)} |"


def _row_elsewhere(row: Elsewhere) -> str:
    return f"| {row.fault} | {row.outcome} | {row.test} |"


def _states(states: str) -> str:
    """The letters of a row as people read them; a group that repeats in brackets."""
    words = re.sub(r"\(\?:(\w+)\)\*", lambda found: f"[{_listed(found[1])}, again and again] ", states)
    if words == states:
        return _listed(states)
    return ", ".join(part if part[0] == "[" else _listed(part) for part in re.findall(r"\[[^]]*\]|[A-Za-z]+", words))


def _listed(letters: str) -> str:
    return ", ".join(_NAMES[letter] for letter in letters)

"""systemd/fmsupervisor.catalog: what ``journalctl -x`` shows below a message. Made from the registries.

Format: systemd's catalog, ``-- MESSAGE_ID``, headers, an empty line, a text. ``@FIELD@`` stands for the entry's field.
A field that the entry does not have comes out as its bare name, so only fields that are always there are used. Not for
the daemon.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from fmsupervisor.conditions import REGISTRY, Condition
from fmsupervisor.report.journal import Event
from fmsupervisor.runbook import meanwhile

_HEAD = """# What journalctl -x shows for fmsupervisor's messages.
# Made from fmsupervisor/conditions.py and fmsupervisor/catalogue.py by the tests:
# RENEW_GOLDEN=1 pytest tests/unit/test_catalogue.py
"""
_DEFINED_BY = "fmsupervisor"
_COLUMNS = 96

# Subject, then the paragraphs of the text.
_EVENTS: Mapping[Event, tuple[str, ...]] = {
    Event.STATE_CHANGED: (
        "The fabric is @FMSUPERVISOR_STATE@",
        "The supervisor's state has changed, because: @FMSUPERVISOR_REASON@",
        "Guests can use NVLink, and CUDA at all, only in the state configured.",
        "`fmsupervisor status` shows the chain step by step; docs/states.md explains the states.",
    ),
    Event.CONDITION_RAISED: (
        "Condition @FMSUPERVISOR_CONDITION@",
        "Something is wrong (@FMSUPERVISOR_SEVERITY@). What to do: @FMSUPERVISOR_REMEDY@",
    ),
    Event.CONDITION_CLEARED: (
        "Condition @FMSUPERVISOR_CONDITION@ is over",
        "What was reported before does not hold any more. Nothing has to be done.",
        "Its history: journalctl FMSUPERVISOR_CONDITION=@FMSUPERVISOR_CONDITION@",
    ),
    Event.FM_STARTED: (
        "Fabric Manager was started",
        "Fabric Manager runs as process @FM_PID@, because: @FMSUPERVISOR_REASON@",
        "All messages of this start: journalctl FM_SESSION=@FM_SESSION@",
    ),
    Event.FM_ADOPTED: (
        "Fabric Manager was taken over",
        "An earlier supervisor did not end in order (a crash, SIGKILL, out of memory).",
        "Its Fabric Manager was left alone, so guests have noticed nothing.",
        "How it will end cannot be known: its exit status will be unknown.",
        "Why the earlier one ended: journalctl -u fmsupervisor -b, and coredumpctl.",
    ),
    Event.FM_EXITED: (
        "Fabric Manager has ended (@FM_EXIT_CLASS@)",
        "Why: @FMSUPERVISOR_REASON@",
        "requested, not-applicable: nothing follows.",
        "terminal: it is not started again until the cause has changed.",
        "external, unexpected: it is started again after a pause.",
        "GPUs lose their registration with it: running guests must be power-cycled.",
        "All messages of this start: journalctl FM_SESSION=@FM_SESSION@",
    ),
    Event.FM_LINE: (
        "A line of Fabric Manager",
        "It was read from Fabric Manager's @FM_SOURCE@. `fmsupervisor explain` says what it means.",
    ),
    Event.KERNEL_LINE: (
        "A line of the kernel log",
        "NVIDIA's driver, or the loading of its module, wrote it (@KERNEL_KIND@).",
        "`fmsupervisor explain` says what the line, an SXid or an Xid means.",
    ),
    Event.KERNEL_HISTORY: (
        "What the kernel log held before",
        "It was written before the supervisor began to read, so it tells of the past.",
    ),
    Event.MODULE_LOADED: ("nvidia.ko was loaded", "The kernel accepted the module. The NVSwitches are probed next."),
    Event.NODES_CHANGED: (
        "A device node was made or changed",
        "Fabric Manager reaches the NVSwitches through it. [device_nodes] of the settings says which, and how.",
    ),
    Event.CONFIG_RENDERED: (
        "fabricmanager.cfg was written",
        "The message lists what differs from the stock file. The stock file itself is never changed.",
    ),
    Event.SETTINGS_RELOADED: (
        "The settings were read again",
        "What needs a restart of Fabric Manager is reported as FMS-703 and not done by itself.",
    ),
    Event.HARDWARE_CHANGED: (
        "The hardware has changed",
        "An NVSwitch, a GPU or a driver appeared or went away on the PCI bus.",
    ),
    Event.SUPPRESSED: (
        "Messages were left out",
        "The same message came too often, or too many came at once. The message says how many.",
    ),
    Event.SERVICE_STARTED: ("The supervisor has started", "It looks at the host and brings up Fabric Manager."),
    Event.SERVICE_CONTINUED: (
        "Another version of the supervisor goes on",
        "systemctl reload found other files of fmsupervisor installed, checked them,",
        "and executed them in the same process.",
        "Fabric Manager was left alone; counters go on.",
    ),
    Event.SERVICE_STOPPING: (
        "The supervisor is stopping",
        "Fabric Manager is ended with it. Guests keep their routes, but no GPU can register until it runs again.",
    ),
    Event.ACTION_TAKEN: ("The supervisor acts", "The message says what is done and why."),
    Event.ACTION_FAILED: (
        "An action of the supervisor failed",
        "The message says which and why. What follows is reported as a condition: see `fmsupervisor status`.",
    ),
}


def render_catalogue() -> str:
    """The whole file."""
    return "\n".join([_HEAD, *_entries()])


def _entries() -> Iterator[str]:
    for event in Event:
        subject, *paragraphs = _EVENTS[event]
        yield _entry(event.value, subject, "docs/states.md", paragraphs)
    for condition in REGISTRY.values():
        subject = f"{condition.code} {condition.title}"
        yield _entry(condition.message_id, subject, f"docs/runbook.md#{condition.anchor}", _paragraphs(condition))


def _paragraphs(condition: Condition) -> tuple[str, ...]:
    return (
        condition.cause,
        f"What to do: {condition.remedy}",
        f"Meanwhile: {meanwhile(condition)}",
        "Severity: @FMSUPERVISOR_SEVERITY@. History: journalctl FMSUPERVISOR_CONDITION=@FMSUPERVISOR_CONDITION@",
    )


def _entry(message_id: str, subject: str, documentation: str, paragraphs: Sequence[str]) -> str:
    wrapped = (
        "\n".join(textwrap.wrap(text, _COLUMNS, break_long_words=False, break_on_hyphens=False)) for text in paragraphs
    )
    headers = f"Subject: {subject}\nDefined-By: {_DEFINED_BY}\nDocumentation: {documentation}\n"
    return f"-- {message_id}\n{headers}\n" + "\n\n".join(wrapped) + "\n"

"""The program's log: one chain for every message, and the wording of what the supervisor says.

``configure_logging`` builds the chain (structlog's native fast path): level filter, repeat filter, renderer, output.
The renderer and the output are chosen once: journald's native socket, a terminal, or JSON lines. Messages of libraries
(standard ``logging``) and Python warnings enter the same chain. CODE_FILE and its like are not sent: every message of
the supervisor comes from this file, so they would say nothing; MESSAGE_ID and FMSUPERVISOR_EVENT are what to filter by.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, TextIO, cast

import structlog
from structlog.processors import TimeStamper, add_log_level, format_exc_info
from structlog.typing import FilteringBoundLogger, Processor

from fmsupervisor.conditions import REGISTRY, Severity
from fmsupervisor.facts import ExitStatus, KernelRecord, LogRecord, Problem
from fmsupervisor.report.journald_socket import JOURNAL_SOCKET
from fmsupervisor.report.log_outputs import JournalOutput, StreamOutput, lost_messages
from fmsupervisor.report.log_renderers import ConsoleRenderer, JournalRenderer, JsonRenderer
from fmsupervisor.report.log_repeats import Repeated, RepeatFilter
from fmsupervisor.settings import LoggingSettings


class Event(Enum):
    """What the supervisor reports; the value is the journald MESSAGE_ID and never changes.

    A condition that is raised carries the MESSAGE_ID of its own entry in ``conditions.REGISTRY`` instead.
    """

    STATE_CHANGED = "e8dc19e83fff40808f6d1b25b0a527b3"
    CONDITION_RAISED = "953a854957904d9883de54fb7462e994"
    CONDITION_CLEARED = "d7350f73cc954f55bbd66ed70b297063"
    FM_STARTED = "bc17a0c22681480c97147ad463cda3ad"
    FM_ADOPTED = "1ae6f0cbed014236b2dfeff8e54afcec"
    FM_EXITED = "df7ce268440247bc88899383b0162a1d"
    FM_LINE = "9d58f3d3df1c4db7a00d237c27fa776d"
    KERNEL_LINE = "4b1f0c7c3e5d4a0b9d3a6a1c27e85f10"
    KERNEL_HISTORY = "0d2f6f8c91b34c53a4d7e2b81f6c9a35"
    MODULE_LOADED = "2de0e9a0c0994a9aa51ba6219a041c8a"
    NODES_CHANGED = "11546e09e0654369b894e64cd07d5551"
    CONFIG_RENDERED = "39bfcec211ed4304801275e6eca2d439"
    SETTINGS_RELOADED = "0f98cc34503f48c49ebdce67f4dbfba4"
    HARDWARE_CHANGED = "ec6f73c42a37442591210b123dacb2e1"
    SUPPRESSED = "46afc7c6569546cc895b8626229d0b3e"
    SERVICE_STARTED = "ac7ce10e71a04df4b3c0d95165ece152"
    SERVICE_CONTINUED = "375acc726dab4fae880edd88139df71e"
    SERVICE_STOPPING = "2ae36bcaaeed4ca6875174ea05fd08b3"
    ACTION_TAKEN = "def8cd1aed88476fab0324dd97cc59c7"
    ACTION_FAILED = "bcc3c6a0adc7435ca5d133c6c4492997"

    @property
    def label(self) -> str:
        """For people and filters: "state-changed"."""
        return self.name.lower().replace("_", "-")


# The history of the service: each of these is news, even when the words are the same.
_NEVER_REPEATS = (
    Event.STATE_CHANGED,
    Event.FM_STARTED,
    Event.FM_ADOPTED,
    Event.FM_EXITED,
    Event.SERVICE_CONTINUED,
    Event.SUPPRESSED,
)

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50, "none": 100}
_LEVEL_OF_SEVERITY = {Severity.INFO: "info", Severity.WARNING: "warning", Severity.CRITICAL: "critical"}
_LEVEL_OF_FM = {"DEBUG": "debug", "INFO": "info", "WARNING": "warning", "ERROR": "error", "CRITICAL": "critical"}
_LEVEL_OF_STATE = {"failed": "error", "backoff": "warning", "degraded": "warning"}
_LEVEL_OF_EXIT = {"requested": "info", "not-applicable": "info", "external": "warning"}


class _Chain:
    """What ``configure_logging`` set up; logging is one per process."""

    def __init__(self) -> None:
        self.logger: FilteringBoundLogger | None = None
        self.repeats: RepeatFilter | None = None
        self.output: JournalOutput | StreamOutput = StreamOutput(sys.stderr)
        self.relay_from = _LEVELS["info"]


_chain = _Chain()


def configure_logging(
    settings: LoggingSettings,
    environment: Mapping[str, str],
    stream: TextIO | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    journal_socket: str = JOURNAL_SOCKET,
) -> None:
    """Send everything that is logged from now on where ``settings`` say; may be called again after a reload.

    ``stream`` is standard error unless given. ``clock`` (monotonic, seconds) drives the suppression of repeats.
    """
    flush_repeats(everything=True)
    stream = sys.stderr if stream is None else stream
    output: JournalOutput | StreamOutput
    ending: list[Processor]
    match _format(settings.format, environment, stream, journal_socket):
        case "journal":
            output, ending = JournalOutput(journal_socket), [JournalRenderer()]
        case "console":
            output, ending = StreamOutput(stream), _console_ending(environment, stream)
        case _:
            output, ending = StreamOutput(stream), [TimeStamper("iso", utc=True), JsonRenderer()]
    _chain.output.close()
    _chain.output = output
    _chain.repeats = RepeatFilter(clock, _report_repeated, exempt=_NEVER_REPEATS)
    _chain.relay_from = _LEVELS[settings.relay_level]
    processors: list[Processor] = [add_log_level, _chain.repeats, format_exc_info, *ending]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(settings.level),
        logger_factory=lambda *_: output,
        cache_logger_on_first_use=True,
    )
    _chain.logger = structlog.get_logger()
    _StandardLibraryHandler.install(_LEVELS[settings.level])


def get_logger() -> FilteringBoundLogger:
    """The configured logger; before ``configure_logging``, plain lines on standard error.

    Ask each time instead of keeping it: a reload configures anew.
    """
    if _chain.logger is not None:
        return _chain.logger
    return cast(
        "FilteringBoundLogger",
        structlog.wrap_logger(
            StreamOutput(sys.stderr),
            processors=[add_log_level, format_exc_info, *_console_ending({"NO_COLOR": "1"}, sys.stderr)],
            wrapper_class=structlog.make_filtering_bound_logger("info"),
        ),
    )


def dropped_messages() -> int:
    """How many messages were lost since the program began, because journald or the stream did not take them."""
    return lost_messages()


def flush_repeats(*, everything: bool = False) -> None:
    """Report repeats whose window is over (or all). Call it from any slow timer, and once at the end."""
    if _chain.repeats is not None:
        _chain.repeats.flush(everything=everything)


def log_event(event: Event, level: str, message: str, **fields: Any) -> None:
    """Write one event. ``level`` is debug, info, warning, error or critical; keys: see ``log_renderers``."""
    get_logger().log(_LEVELS[level], message, kind=event, **fields)


# --- the wording


def log_state_change(previous: str | None, state: str, reason: str, session: str | None = None) -> None:
    """The supervisor's state is another one now."""
    way = f"{previous} -> {state}" if previous else state
    level = _LEVEL_OF_STATE.get(state, "info")
    fields = {"state": state, "previous_state": previous, "reason": reason, "session": session}
    log_event(Event.STATE_CHANGED, level, f"State {way}: {reason}", **fields)


def log_condition(problem: Problem, *, raised: bool, active_seconds: float | None = None, count: int = 1) -> None:
    """A condition holds now, or no more. ``count``: how often it was seen while it held."""
    condition = REGISTRY[problem.code]
    fields: dict[str, Any] = {
        "condition": str(problem.code),
        "severity": str(condition.severity),
        "subject": problem.subject or None,
        "count": count if count > 1 else None,
    }
    times = f" ({count} times)" if count > 1 else ""
    if raised:
        cause = _sentence(problem.detail or condition.cause)
        message = f"{problem.code} {condition.title}{times}: {cause} {condition.remedy}"
        level = _LEVEL_OF_SEVERITY[condition.severity]
        fields |= {"message_id": condition.message_id, "reason": problem.detail or None, "remedy": condition.remedy}
        log_event(Event.CONDITION_RAISED, level, message, **fields)
        return
    subject = f" ({problem.subject})" if problem.subject else ""
    after = f" after {active_seconds:.1f} s" if active_seconds is not None else ""
    message = f"{problem.code} {condition.title}{subject}: over{after}{times}."
    log_event(Event.CONDITION_CLEARED, "info", message, active_seconds=active_seconds, **fields)


def log_fabric_manager_started(pid: int, session: str, version: str | None, reason: str) -> None:
    """Fabric Manager has been executed."""
    named = f"Fabric Manager {version}" if version else "Fabric Manager"
    fields = {"fm_pid": pid, "session": session, "fm_version": version, "reason": reason}
    log_event(Event.FM_STARTED, "info", f"{named} started as pid {pid}: {reason}", **fields)


def log_fabric_manager_adopted(pid: int, session: str, started_wall: float) -> None:
    """A Fabric Manager that an earlier supervisor executed is watched by this one."""
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(started_wall))
    text = (
        f"taking over Fabric Manager, pid {pid}, which runs since {since}: the supervisor before did not end in order"
    )
    log_event(Event.FM_ADOPTED, "warning", text, fm_pid=pid, session=session)


def log_fabric_manager_exited(
    pid: int | None, session: str, exit_class: str, status: ExitStatus, reason: str, last_lines: Sequence[str] = ()
) -> None:
    """Fabric Manager has ended. ``last_lines`` are the last it wrote to standard error; they belong to the message."""
    level = _LEVEL_OF_EXIT.get(exit_class, "error")
    fields = {
        "fm_pid": pid,
        "session": session,
        "fm_exit_class": str(exit_class),
        "fm_exit_status": status.code,
        "fm_exit_signal": status.signal,
        "reason": reason,
        "details": tuple(last_lines),
    }
    log_event(Event.FM_EXITED, level, f"Fabric Manager ended ({exit_class}): {reason}", **fields)


def log_fabric_manager_line(record: LogRecord, fm_pid: int | None, session: str | None, source: str) -> None:
    """Relay a line of Fabric Manager, when ``logging.relay_level`` lets it pass.

    A line without a level is a warning when it comes from standard error (the loader, the C library), else information.
    """
    level = _LEVEL_OF_FM.get(record.level, "warning" if source == "stderr" and not record.level else "info")
    if _LEVELS[level] < _chain.relay_from:
        return
    found = record.fields
    fields = {
        "fm_pid": fm_pid,
        "fm_level": record.level or None,
        "fm_source": source,
        "session": session,
        "pci_bus_id": found.get("pci_bus_id"),
        "sxid": found.get("sxid"),
        "sxid_severity": found.get("severity"),
        "nvlink_port": found.get("port"),
    }
    log_event(Event.FM_LINE, level, f"nv-fabricmanager: {record.text}", **fields)


def log_kernel_line(record: KernelRecord, level: str) -> None:
    """A line of the kernel log, with the further lines that belong to it."""
    found = record.fields
    fields = {
        "kernel_sequence": record.sequence,
        "kernel_seconds": record.seconds,
        "kernel_kind": str(record.kind),
        "pci_bus_id": found.get("pci_bus_id"),
        "nvswitch": found.get("minor"),
        "sxid": found.get("sxid"),
        "sxid_severity": found.get("severity"),
        "nvlink_port": found.get("port"),
        "xid": found.get("xid"),
        "details": record.details,
    }
    log_event(Event.KERNEL_LINE, level, f"kernel: {record.text}", **fields)


def log_suppressed(count: int, what: str) -> None:
    """``count`` of ``what`` ("lines of Fabric Manager") were not written."""
    if count > 0:
        log_event(Event.SUPPRESSED, "warning", f"{count} {what} left out.", suppressed=count)


def _report_repeated(repeated: Repeated) -> None:
    often = "once more" if repeated.count == 1 else f"{repeated.count} more times"
    message = f"Repeated {often} in {repeated.seconds:.0f} s: {repeated.message}"
    log_event(Event.SUPPRESSED, repeated.level, message, suppressed=repeated.count, **repeated.fields)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


# --- the chain


def _format(wanted: str, environment: Mapping[str, str], stream: TextIO, journal_socket: str) -> str:
    """Resolve "auto"."""
    if wanted != "auto":
        return wanted
    if is_connected_to_journal(environment, stream) and os.path.exists(journal_socket):
        return "journal"
    return "console" if stream.isatty() else "json"


def is_connected_to_journal(environment: Mapping[str, str], stream: TextIO) -> bool:
    """Whether systemd connected ``stream`` itself to journald: JOURNAL_STREAM alone is inherited (systemd.exec(5))."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):  # not a real file
        return False
    return environment.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def _console_ending(environment: Mapping[str, str], stream: TextIO) -> list[Processor]:
    is_coloured = stream.isatty() and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"
    return [TimeStamper("%H:%M:%S", utc=False), ConsoleRenderer(is_coloured=is_coloured)]


class _StandardLibraryHandler(logging.Handler):
    """Brings what libraries log, and Python's warnings, into the chain."""

    @classmethod
    def install(cls, level: int) -> None:
        root = logging.getLogger()
        for handler in [*root.handlers]:
            if isinstance(handler, cls):
                root.removeHandler(handler)
        root.addHandler(cls())
        root.setLevel(level)
        logging.captureWarnings(True)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except (TypeError, ValueError, KeyError):  # the library's format does not fit its arguments
            message = f"{record.msg} {record.args}"
        level = min(max(record.levelno // 10 * 10, logging.DEBUG), logging.CRITICAL)
        get_logger().log(level, message.strip(), logger=record.name, exc_info=record.exc_info)

"""Exit statuses of the commands."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit statuses of the commands (sysexits.h where it has one)."""

    OK = 0
    NOT_CONFIGURED = 1
    USAGE = 2
    NO_DAEMON = 3
    ALREADY_RUNNING = 75  # EX_TEMPFAIL
    CONFIG = 78  # EX_CONFIG

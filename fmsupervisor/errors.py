"""The exceptions of this package. Each says what was tried, on what, and why it did not happen."""


class FmsupervisorError(Exception):
    """Base of every error raised on purpose; its text is fit for a person to read."""


class ConfigError(FmsupervisorError):
    """The settings file cannot be used: names the file, the key, what was found and what is allowed."""


class CannotObserve(FmsupervisorError):
    """Something could not be looked at. Neither good nor bad: the last verdict holds.

    ``path`` is what was looked at, ``reason`` why it did not work.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"cannot observe {path}: {reason}")
        self.path = path
        self.reason = reason


class ActionRefused(FmsupervisorError):
    """An action was not even tried, because it could do harm."""


class ActionFailed(FmsupervisorError):
    """An action was tried and did not succeed."""

"""``fmsupervisor check``: the whole chain looked at once, read-only. The daemon does not import this package."""

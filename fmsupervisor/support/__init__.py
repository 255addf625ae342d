"""``fmsupervisor report``: everything a support case needs in one archive. The daemon does not import this package."""

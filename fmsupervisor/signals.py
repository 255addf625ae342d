"""The signals that the supervisor listens to.

Until it listens, and once it has ended, their default action would end the process: at the start with a status that
says nothing, at the end in the middle of cleaning up. So the commands that run it hold them back from first to last,
and the supervisor takes them only while it listens. Its children begin with an empty mask all the same.
"""

import signal

LISTENED_TO = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


def hold() -> None:
    """Let them wait in this thread, to its end. Also for every other thread: they are for the main thread only."""
    signal.pthread_sigmask(signal.SIG_BLOCK, LISTENED_TO)

"""``fmsupervisor after-stop``: the unit's ExecStopPost, which makes a stop a stop and a crash harmless.

The unit has KillMode=process, so that Fabric Manager outlives a supervisor that crashes: systemd ends nothing but the
supervisor itself. What is left then is decided here.

* The service was stopped: it ended in order ($SERVICE_RESULT is ``success``), or it had begun to stop when it died, or
  systemd has been asked to stop or restart the unit, which its list of jobs tells. Then Fabric Manager is ended (it has
  its own time to do so), and everything else that is left in the unit's control group.
* It crashed, was killed, or ran out of memory or time: everything is left as it is, for the next start to take over. So
  it is when systemd cannot be asked: a Fabric Manager too many is seen and taken over, one too few breaks guests.

ExecStop would be no witness: systemd.service(5) has it run after a crash as well, and it does not run when a start is
stopped. Called by hand, when no supervisor runs, it ends what the last one has left: after the unit has failed for good
there is nothing that ``systemctl stop`` would do.

Only processes with the token of the record, and those in the control group that this process is in itself, are ended:
nothing else was started by this service. Sources: systemd.exec(5) ($SERVICE_RESULT), systemd.kill(5), cgroups(7).
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress

from fmsupervisor import handover
from fmsupervisor.daemon_lock import InstanceLock
from fmsupervisor.errors import ActionFailed, CannotObserve
from fmsupervisor.fabric_manager import ownership
from fmsupervisor.host.root import HostRoot
from fmsupervisor.settings import Settings

# Where systemd has its hierarchy, by its kind: v2, alone or beside v1 ("hybrid"), and v1.
_GROUPS = {"": ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"), "name=systemd": ("/sys/fs/cgroup/systemd",)}
_KILL_SECONDS = 5.0
_ASK_SECONDS = 10.0
_STOPS = ("stop", "restart", "try-restart")


def after_stop(root: HostRoot, settings: Settings, environment: Mapping[str, str], group: str | None = None) -> int:
    """End what is left, or leave it, and say what was done: 0; 1 when it is not for this process to decide.

    ``group``: the directory of the unit's control group, if it is not the one that this process is in.
    """
    directory = settings.service.state_directory
    group = _own_group() if group is None else group
    holder = InstanceLock(root, directory).holder()
    if holder is not None:  # the record is its own
        _say(f"a supervisor is running (pid {holder or 'unknown'}); to end Fabric Manager, stop it")
        return 1
    left = handover.load(root, directory)
    pids = [] if left.record is None else list(ownership.marked(left.record.token))
    if not (left.is_stopping or _is_stop(environment, os.path.basename(group))):
        if pids:
            _say(f"the supervisor has ended ({environment['SERVICE_RESULT']}); Fabric Manager is left running")
        return 0
    if "SERVICE_RESULT" in environment and group:
        pids += [pid for pid in _processes(group) if pid not in pids]
    if pids:
        _say(f"ending what the supervisor has left: processes {', '.join(map(str, pids))}")
        _end(pids, settings.fabric_manager.stop_timeout_seconds)
    with suppress(ActionFailed):
        handover.forget(root, directory)
    return 0


def _is_stop(environment: Mapping[str, str], unit: str) -> bool:
    """Whether somebody wants the service to be stopped: by its result, by systemd's jobs, or by calling this."""
    if environment.get("SERVICE_RESULT", "success") == "success":
        return True
    command = ["systemctl", "--no-legend", "--plain", "--no-pager", "list-jobs", unit]
    try:
        jobs = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        _say(f"cannot ask systemd whether this is a stop, so it is taken for a crash: {error}")
        return False
    return any(row[1:3] in ([unit, kind] for kind in _STOPS) for row in map(str.split, jobs.stdout.splitlines()))


def _say(text: str) -> None:
    sys.stderr.write(f"fmsupervisor: {text}\n")


def _end(pids: list[int], patience_seconds: float) -> None:
    """SIGTERM, time, SIGKILL. What they start meanwhile is in the control group, which systemd looks at afterwards."""
    pidfds = {}
    for pid in pids:
        with suppress(OSError):
            pidfds[os.pidfd_open(pid)] = pid
    for number, seconds in ((signal.SIGTERM, patience_seconds), (signal.SIGKILL, _KILL_SECONDS)):
        for pidfd in pidfds:
            with suppress(OSError):
                signal.pidfd_send_signal(pidfd, number)
        _wait(pidfds, seconds)
    if pidfds:
        _say(f"processes {', '.join(map(str, pidfds.values()))} could not be ended")


def _wait(pidfds: dict[int, int], seconds: float) -> None:
    """Until all have ended or the time is over; those that have are taken out."""
    deadline = time.monotonic() + seconds
    while pidfds and (left := deadline - time.monotonic()) > 0:
        ended, _, _ = select.select(list(pidfds), [], [], left)
        for pidfd in ended:
            os.close(pidfd)
            del pidfds[pidfd]


def _processes(group: str) -> Iterator[int]:
    """All others in the control group and below it. Raises ``CannotObserve``."""
    for directory, _, names in os.walk(group):
        if "cgroup.procs" not in names:
            continue
        try:
            with open(f"{directory}/cgroup.procs", encoding="ascii") as file:
                yield from (pid for line in file if (pid := int(line)) not in (0, os.getpid(), os.getppid()))
        except (OSError, ValueError) as error:
            raise CannotObserve(f"{directory}/cgroup.procs", str(error)) from error


def _own_group() -> str:
    """The directory of the control group that this process is in; empty when it is no service of systemd."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return ""
    for line in lines:
        _, kind, path = line.split(":", 2)
        for mount in _GROUPS.get(kind, ()):
            if path.endswith(".service") and os.path.isdir(mount + path):
                return mount + path
    return ""

"""The fault matrix: what can go wrong around the daemon, what must come of it, and what after it has been mended.

One row per fault. ``test_matrix.py`` drives each against the daemon as a process; docs/faults.md is made from the table.
States are letters (``stage.LETTERS``); "BScC" means: backoff, starting, configuring, configured.
"""

import errno
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from fmsupervisor.conditions import Code
from tests.faults import making
from tests.faults.stage import (
    CONFIG_DIRECTORY,
    LOG_DIRECTORY,
    RUN_DIRECTORY,
    STATE_DIRECTORY,
    Setting,
)

DISKS = Setting(small_disks=(LOG_DIRECTORY, CONFIG_DIRECTORY, STATE_DIRECTORY, RUN_DIRECTORY))
PLAIN = Setting()

_AGAIN = "BScC"  # Fabric Manager died, a pause, the fabric comes back
_DIED = (Code.FABRIC_MANAGER_DIED,)
_NO_FILE_OPENS = (Code.HARDWARE_UNOBSERVABLE, Code.DRIVER_UNOBSERVABLE, Code.STATUS_UNWRITABLE)
# Deaths in a row are forgotten soon, so that a crash loop ends within the test.
_SHORT_MEMORY = {"restart": {"reset_after_seconds": 20.0}}

# What the death of Fabric Manager means for guests is not this table's matter.
ABOUT_GUESTS = frozenset({Code.REGISTRATIONS_LOST, Code.GUEST_RESTART_REQUIRED})


@dataclass(frozen=True, slots=True)
class Fault:
    """One row. The daemon never ends, leaks nothing and ends in order after it; that is not said again in each row."""

    name: str
    fault: str
    make: Callable[..., AbstractContextManager[None]]
    arguments: tuple[Any, ...] = ()
    cure: str = "it is gone"
    states: str = ""  # from the fault on; "" = as before
    before: tuple[Code, ...] = ()  # the fault is there from the daemon's start, and these with it
    conditions: tuple[Code, ...] = ()  # raised by the fault or by what it leads to
    passing: tuple[Code, ...] = ()  # of these, gone by themselves while the fault lasts
    maybe: tuple[Code, ...] = ()  # raised for a moment, or not, as it happens
    recovered: str = ""  # states from the cure on
    late: tuple[Code, ...] = ()  # raised after the cure
    lasting: tuple[Code, ...] = ()  # held still after the cure: a person has to do something
    is_manager_kept: bool = True  # the process of Fabric Manager is the same before and after
    is_answering: bool = True  # /healthz says ok while the fault lasts
    setting: Setting = PLAIN


_FILE_SYSTEMS = (
    Fault(
        "log-full",
        "no space left for Fabric Manager's log",
        making.full,
        (LOG_DIRECTORY,),
        cure="there is room again",
        setting=DISKS,
    ),
    Fault(
        "log-full-at-start",
        "no space left for Fabric Manager's log, and Fabric Manager dies",
        making.full_and_crash,
        (LOG_DIRECTORY,),
        cure="there is room again",
        states=_AGAIN,
        conditions=(*_DIED, Code.SUCCESS_LINE_UNSEEN),
        passing=_DIED,
        lasting=(Code.SUCCESS_LINE_UNSEEN,),
        is_manager_kept=False,
        setting=DISKS,
    ),
    Fault("log-read-only", "the log's file system is read-only", making.read_only, (LOG_DIRECTORY,), setting=DISKS),
    Fault(
        "config-full",
        "no space left for the configuration",
        making.full,
        (CONFIG_DIRECTORY,),
        setting=DISKS,
    ),
    Fault(
        "config-full-at-start",
        "no space left for the configuration, which was edited by hand, and Fabric Manager dies",
        making.full_edited_and_crash,
        (CONFIG_DIRECTORY,),
        cure="there is room again",
        states="F",
        conditions=(*_DIED, Code.CONFIG_UNWRITABLE),
        recovered=_AGAIN,
        is_manager_kept=False,
        setting=DISKS,
    ),
    Fault(
        "config-read-only",
        "the configuration's file system is read-only",
        making.read_only,
        (CONFIG_DIRECTORY,),
        setting=DISKS,
    ),
    Fault(
        "config-read-only-at-start",
        "the configuration's file system is read-only, the file was edited by hand, and Fabric Manager dies",
        making.read_only_edited_and_crash,
        (CONFIG_DIRECTORY,),
        states="F",
        conditions=(*_DIED, Code.CONFIG_UNWRITABLE),
        recovered=_AGAIN,
        is_manager_kept=False,
        setting=DISKS,
    ),
    Fault(
        "state-full",
        "no space left for status.json",
        making.full,
        (STATE_DIRECTORY,),
        cure="there is room again",
        conditions=(Code.STATUS_UNWRITABLE,),
        setting=DISKS,
    ),
    Fault(
        "state-read-only",
        "the state directory's file system is read-only",
        making.read_only,
        (STATE_DIRECTORY,),
        conditions=(Code.STATUS_UNWRITABLE,),
        setting=DISKS,
    ),
    Fault(
        "state-full-at-start",
        "no space left for status.json, and Fabric Manager dies",
        making.full_and_crash,
        (STATE_DIRECTORY,),
        cure="there is room again",
        states=_AGAIN,
        conditions=(*_DIED, Code.STATUS_UNWRITABLE),
        passing=_DIED,
        is_manager_kept=False,
        setting=DISKS,
    ),
    Fault(
        "state-full-from-the-start",
        "no space left for status.json when the daemon starts",
        making.full_from_the_start,
        (STATE_DIRECTORY,),
        cure="there is room again",
        before=(Code.STATUS_UNWRITABLE,),
        setting=replace(DISKS, full_disks=(STATE_DIRECTORY,)),
    ),
    Fault(
        "state-directory-deleted",
        "the state directory is deleted",
        making.state_directory_deleted,
        cure="(none needed: it is made again)",
        maybe=(Code.STATUS_UNWRITABLE,),
    ),
    Fault(
        "run-full-at-start",
        "no space left in Fabric Manager's run directory, and Fabric Manager dies",
        making.full_and_crash,
        (RUN_DIRECTORY,),
        states=_AGAIN,
        conditions=_DIED,
        passing=_DIED,
        is_manager_kept=False,
        setting=DISKS,
    ),
    Fault(
        "run-read-only-at-start",
        "Fabric Manager's run directory is on a read-only file system, and Fabric Manager, which needs it, dies",
        making.read_only_and_crash,
        (RUN_DIRECTORY,),
        states="B(?:SB)*",
        conditions=(*_DIED, Code.RUN_DIRECTORY_DENIED, Code.CRASH_LOOP),
        passing=_DIED,
        recovered="(?:SB)*ScC",
        is_manager_kept=False,
        setting=replace(DISKS, settings=_SHORT_MEMORY),
    ),
)

_RESOURCES = (
    Fault(
        "no-descriptors",
        "the daemon can open no more files (EMFILE)",
        making.no_descriptors,
        cure="it can again",
        conditions=_NO_FILE_OPENS,
        is_answering=False,
    ),
    Fault(
        "spawn-without-descriptors",
        "the daemon can open no more files (EMFILE), and Fabric Manager dies",
        making.no_descriptors_and_crash,
        cure="it can again",
        states="F",
        conditions=(*_DIED, *_NO_FILE_OPENS, Code.CONFIG_UNWRITABLE),
        recovered=_AGAIN,
        is_manager_kept=False,
        is_answering=False,
    ),
    Fault(
        "reload-without-descriptors",
        "the daemon can open no more files (EMFILE), and is told to reload",
        making.no_descriptors_and_reload,
        cure="it can again, and is told to reload",
        conditions=(*_NO_FILE_OPENS, Code.SETTINGS_INVALID),
        is_answering=False,
    ),
    Fault(
        "metrics-without-descriptors",
        "the metrics' port was taken and is free again, but the daemon can open no more files (EMFILE)",
        making.no_descriptors_when_the_port_is_free,
        cure="it can again",
        conditions=_NO_FILE_OPENS,
        is_answering=False,
        before=(Code.METRICS_UNAVAILABLE,),
        setting=Setting(has_taken_port=True),
    ),
    *(
        Fault(
            f"spawn-{errno.errorcode[number].lower()}",
            f"Fabric Manager dies, and its execution fails with {errno.errorcode[number]}",
            making.failing_spawn,
            (number,),
            cure="it succeeds",
            states="B",
            conditions=(*_DIED, Code.SPAWN_FAILED, Code.CRASH_LOOP),
            recovered="ScC",
            is_manager_kept=False,
            setting=Setting(settings=_SHORT_MEMORY),
        )
        for number in (errno.ENOMEM, errno.EAGAIN)
    ),
    *(
        Fault(
            f"clock-stepped-{word}",
            f"Fabric Manager dies, and the clock is set {making.HOURS} hours {word}",
            making.clock_stepped,
            (hours,),
            cure="it is set right",
            states=_AGAIN,
            conditions=_DIED,
            passing=_DIED,
            is_manager_kept=False,
        )
        for word, hours in (("back", -making.HOURS), ("forward", making.HOURS))
    ),
)

_MANAGER = (
    *(
        Fault(
            f"log-replaced-by-a-{kind}",
            f"Fabric Manager's log is replaced by a {what}",
            making.log_replaced,
            (kind,),
            cure="it is put back",
            conditions=(Code.LOG_UNREADABLE,),
        )
        for kind, what in (("directory", "directory"), ("fifo", "FIFO"), ("symlink", "symbolic link"))
    ),
    Fault("log-deleted", "Fabric Manager's log is deleted while it writes", making.log_deleted, cure="(none needed)"),
    Fault(
        "config-edited",
        "fabricmanager.cfg is edited by hand while Fabric Manager runs",
        making.config_edited,
        cure="Fabric Manager dies: the file is written anew",
        recovered=_AGAIN,
        late=_DIED,
        is_manager_kept=False,
    ),
    Fault(
        "long-line-in-the-log",
        f"Fabric Manager logs {making.LONG_LINE_MEGABYTES} MB without a newline",
        making.long_line_in_the_log,
        cure="the line ends",
    ),
    Fault(
        "long-line-on-standard-output",
        f"Fabric Manager writes {making.LONG_LINE_MEGABYTES} MB without a newline to its standard output",
        making.long_line_on_standard_output,
        cure="the line ends",
    ),
    Fault(
        "manager-stopped",
        "Fabric Manager is stopped (SIGSTOP)",
        making.stopped,
        cure="it is continued (SIGCONT)",
        states="D",
        conditions=(Code.FABRIC_MANAGER_HUNG,),
        recovered="C",
    ),
    Fault(
        "child-left-behind",
        "Fabric Manager dies and leaves a child that ignores SIGTERM",
        making.child_left_behind,
        cure="(none needed)",
        states=_AGAIN,
        conditions=_DIED,
        passing=_DIED,
        is_manager_kept=False,
    ),
)

_KERNEL = (
    Fault(
        "kernel-log-overrun",
        "the kernel log is overwritten faster than it is read (EPIPE)",
        making.kernel_log_overrun,
        cure="it is not any more (told for an hour)",
        conditions=(Code.KERNEL_LOG_OVERRUN,),
        lasting=(Code.KERNEL_LOG_OVERRUN,),
    ),
    Fault(
        "uevents-lost",
        "uevents are lost (ENOBUFS), one about a GPU that was taken among them",
        making.uevents_lost,
        cure="the GPU is given back",
        conditions=(Code.GPU_TAKEN,),
    ),
    Fault(
        "no-uevents",
        "uevents cannot be heard at all, and a GPU is taken",
        making.gpu_taken,
        cure="the GPU is given back",
        conditions=(Code.GPU_TAKEN,),
        setting=Setting(is_deaf=True),
    ),
    Fault("node-deleted", "a device node is deleted", making.node_deleted, cure="(none needed)"),
    Fault(
        "node-with-another-minor",
        "a device node is replaced by that of another minor",
        making.node_with_another_minor,
        cure="(none needed)",
    ),
    Fault(
        "node-replaced-by-a-file",
        "a device node is replaced by a regular file",
        making.node_replaced_by_a_file,
        cure="the file is deleted",
        conditions=(Code.NODE_CONFLICT,),
    ),
    Fault(
        "module-reloaded",
        "nvidia.ko is unloaded by hand under a running Fabric Manager",
        making.module_reloaded,
        cure="it is loaded again, and Fabric Manager is ended by hand",
        states="D",
        conditions=(Code.SWITCH_LOST,),
        maybe=(Code.DRIVER_UNOBSERVABLE,),
        recovered=_AGAIN,
        late=(*_DIED, Code.SWITCH_UNCONFIGURED),
        is_manager_kept=False,
    ),
    Fault(
        "switches-with-other-minors",
        "two switches are removed",
        making.switches_with_other_minors,
        cure="they return with each other's minors, and Fabric Manager is ended by hand",
        states="D",
        conditions=(Code.SWITCH_LOST,),
        maybe=(Code.DRIVER_UNOBSERVABLE,),
        recovered=_AGAIN,
        late=(*_DIED, Code.SWITCH_UNCONFIGURED),
        is_manager_kept=False,
    ),
)

_AUDIENCE = (
    Fault(
        "metrics-port-taken",
        "the metrics' port is taken when the daemon starts",
        making.metrics_port_taken,
        cure="it is free",
        before=(Code.METRICS_UNAVAILABLE,),
        setting=Setting(has_taken_port=True),
        is_answering=False,
    ),
    Fault(
        "clients-that-never-read",
        "40 clients ask for metrics and do not read them",
        making.clients_that_never_read,
        cure="they are gone",
    ),
    Fault("idle-connections", "1,000 idle connections", making.idle_connections, cure="they are gone"),
    Fault(
        "notify-socket-gone",
        "systemd's notify socket is gone, and Fabric Manager dies",
        making.notify_socket_gone,
        cure="it is there again, and Fabric Manager dies",
        states=_AGAIN,
        conditions=_DIED,
        passing=_DIED,
        recovered=_AGAIN,
        is_manager_kept=False,
        setting=Setting(hears_systemd=True),
    ),
)

GROUPS = {
    "File systems": _FILE_SYSTEMS,
    "What the daemon itself needs": _RESOURCES,
    "Fabric Manager": _MANAGER,
    "The kernel and its devices": _KERNEL,
    "Those who listen": _AUDIENCE,
}
FAULTS = {row.name: row for group in GROUPS.values() for row in group}


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A fault that another test makes."""

    fault: str
    outcome: str
    test: str  # file::class::function


_OWN = "tests/faults/test_supervisors.py"
ELSEWHERE = (
    Elsewhere(
        "a second supervisor is started",
        "it ends with status 75 and names the pid of the first",
        f"{_OWN}::TestTwoSupervisors::test_the_second_ends_with_75_and_names_the_first",
    ),
    Elsewhere(
        "several supervisors are started at once",
        "one runs, the others end with status 75",
        f"{_OWN}::TestTwoSupervisors::test_of_many_that_are_started_at_once_one_runs",
    ),
    Elsewhere(
        "the lock file, or the whole state directory, is deleted",
        "the running supervisor makes it again; a second one is refused as before",
        f"{_OWN}::TestTwoSupervisors::test_a_deleted_lock_lets_in_no_second_one",
    ),
    Elsewhere(
        "SIGTERM, in each of the ten states",
        "Fabric Manager is ended first; status 0, no process left",
        f"{_OWN}::TestSigterm::test_ends_it_in_order",
    ),
    Elsewhere(
        "the disk of the daemon's own log is full",
        "messages are lost and counted, nothing else",
        f"{_OWN}::TestItsOwnLog::test_that_is_full_is_counted_and_does_not_disturb",
    ),
    Elsewhere(
        "the daemon can get no more memory",
        "it ends with a status that is not 0, or hangs until systemd's watchdog ends it; Fabric Manager lives, and the "
        "next daemon takes it over",
        f"{_OWN}::TestItsOwnMemory::test_that_is_short_costs_the_daemon_and_not_the_fabric",
    ),
    Elsewhere(
        "no state directory can be made, or no lock in it",
        "the daemon says so and ends with status 1; systemd tries again",
        "tests/host/test_daemon.py::TestASecondDaemon::test_that_cannot_make_its_state_directory_says_so",
    ),
    Elsewhere(
        "no thread can be started",
        "what needs one waits until it can",
        "tests/host/test_daemon.py::TestWhatChangesUnderneath::test_threads_that_cannot_be_started_are_waited_for",
    ),
    Elsewhere(
        "real uevents overflow the socket (ENOBUFS)",
        "the hardware is read anew",
        "tests/host/test_uevents.py::TestRealKernel::test_lost_events_concern_us",
    ),
    Elsewhere(
        "udevd does not run",
        "nothing: the kernel itself is listened to",
        "tests/vm/test_nodes.py::TestWithoutUdevd::test_everything_works",
    ),
    Elsewhere(
        "the kernel log has overwritten what was not read (EPIPE)",
        "what was lost is counted (FMS-617)",
        "tests/host/test_kernel_log.py::test_overwritten_records_are_counted",
    ),
    Elsewhere(
        "journald is restarted",
        "the messages after it arrive",
        "tests/systemd/test_service.py::TestJournald::test_a_restart_of_journald_loses_nothing_that_comes_after_it",
    ),
    Elsewhere(
        "journald is absent",
        "messages are lost and counted, nothing else",
        "tests/systemd/test_service.py::TestJournald::test_messages_during_the_absence_of_journald_do_not_stop_the_daemon",
    ),
    Elsewhere(
        "the daemon is killed, dies, or its loop is stuck until systemd's watchdog ends it",
        "Fabric Manager lives, and the next daemon takes it over",
        "tests/systemd/test_crash.py::TestACrash::test_leaves_fabric_manager_and_the_next_daemon_takes_it_over",
    ),
)

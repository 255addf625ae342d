"""How each fault is made and taken away again: context managers on a stage, used by the table in ``matrix.py``.

Entered when the daemon is as the row says; left when everything that the row expects of the fault has been seen.
"""

import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fmsupervisor.simulator.hardware import GPUS, SWITCHES, parse_node
from fmsupervisor.simulator.tree import VERSION
from tests.faults.disk import BALLAST, fill
from tests.faults.stage import CONFIG_FILE, LOG_FILE, STATE_DIRECTORY, Stage, listen_to_notifications

LONG_LINE_MEGABYTES = 100
HOURS = 5
_MEMORY_FOR_A_LONG_LINE = 24 << 20
_IDLE_CONNECTIONS = 1000
_FAR_TOO_FEW_DESCRIPTORS = 5
_RECEIVE_BUFFER_BYTES = 2304


# --- file systems


@contextmanager
def full(stage: Stage, directory: str) -> Iterator[None]:
    ballast = stage.path(f"{directory}/{BALLAST}")
    fill(str(ballast))
    yield
    ballast.unlink()


@contextmanager
def full_from_the_start(stage: Stage, directory: str) -> Iterator[None]:
    yield
    stage.path(f"{directory}/{BALLAST}").unlink()


@contextmanager
def read_only(stage: Stage, directory: str) -> Iterator[None]:
    real = str(stage.directory) + directory
    stage.do("mount", "make_read_only", real)
    yield
    stage.do("mount", "unmount", real)


@contextmanager
def full_and_crash(stage: Stage, directory: str) -> Iterator[None]:
    with full(stage, directory):
        stage.crash()
        yield


@contextmanager
def read_only_and_crash(stage: Stage, directory: str) -> Iterator[None]:
    with read_only(stage, directory):
        stage.crash()
        yield


@contextmanager
def full_edited_and_crash(stage: Stage, directory: str) -> Iterator[None]:
    """The configuration must be written anew, and cannot be."""
    _edit(stage.path(CONFIG_FILE))
    with full_and_crash(stage, directory):
        yield


@contextmanager
def read_only_edited_and_crash(stage: Stage, directory: str) -> Iterator[None]:
    _edit(stage.path(CONFIG_FILE))
    with read_only_and_crash(stage, directory):
        yield


def _edit(path: Path) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write("FABRIC_MODE=2\n")


# --- descriptors, memory, time


@contextmanager
def no_descriptors(stage: Stage) -> Iterator[None]:
    before = stage.set_limit(resource.RLIMIT_NOFILE, _FAR_TOO_FEW_DESCRIPTORS)
    yield
    stage.set_limit(resource.RLIMIT_NOFILE, before)


@contextmanager
def no_descriptors_and_crash(stage: Stage) -> Iterator[None]:
    with no_descriptors(stage):
        os.kill(stage.managers[-1], signal.SIGKILL)
        yield


@contextmanager
def no_descriptors_and_reload(stage: Stage) -> Iterator[None]:
    with no_descriptors(stage):
        os.kill(stage.pid, signal.SIGHUP)
        yield
    os.kill(stage.pid, signal.SIGHUP)


@contextmanager
def no_descriptors_when_the_port_is_free(stage: Stage) -> Iterator[None]:
    with no_descriptors(stage):
        assert stage.taken is not None
        stage.taken.close()
        yield


@contextmanager
def failing_spawn(stage: Stage, number: int) -> Iterator[None]:
    stage.do("spawn-errno", number)
    stage.crash()
    yield
    stage.do("spawn-errno", None)


@contextmanager
def clock_stepped(stage: Stage, hours: float) -> Iterator[None]:
    """Among other things while Fabric Manager is in its pause."""
    stage.crash()
    stage.do("step-clock", hours * 3600)
    yield
    stage.do("step-clock", -hours * 3600)
    for line in stage.lines:
        assert 0 <= line.get("active_seconds", 0) < 3600, line["message"]


# --- Fabric Manager's files


@contextmanager
def log_replaced(stage: Stage, kind: str) -> Iterator[None]:
    log = stage.path(LOG_FILE)
    aside = log.with_name("aside")
    log.rename(aside)
    match kind:
        case "directory":
            log.mkdir()
        case "fifo":
            os.mkfifo(log)
        case _:
            log.symlink_to(aside)
    yield
    if kind == "directory":
        log.rmdir()
    else:
        log.unlink()
    aside.rename(log)
    _must_be_heard(stage)


@contextmanager
def log_deleted(stage: Stage) -> Iterator[None]:
    stage.path(LOG_FILE).unlink()
    _must_be_heard(stage)
    yield


@contextmanager
def config_edited(stage: Stage) -> Iterator[None]:
    config = stage.path(CONFIG_FILE)
    before = config.read_bytes()
    _edit(config)
    yield
    stage.crash()
    stage.until(lambda: config.read_bytes() == before, "the configuration is written anew")


@contextmanager
def long_line_in_the_log(stage: Stage) -> Iterator[None]:
    yield from _long_line(stage, stage.path(LOG_FILE))


@contextmanager
def long_line_on_standard_output(stage: Stage) -> Iterator[None]:
    yield from _long_line(stage, Path(f"/proc/{stage.managers[-1]}/fd/1"))


def _long_line(stage: Stage, path: Path) -> Iterator[None]:
    before = stage.memory("VmHWM")
    with path.open("ab", buffering=0) as file:
        for _ in range(LONG_LINE_MEGABYTES):
            _write(file.fileno(), b"x" * (1 << 20))
        yield
        _write(file.fileno(), b"\n")
    _must_be_heard(stage)
    assert stage.memory("VmHWM") - before < _MEMORY_FOR_A_LONG_LINE


def _write(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def _must_be_heard(stage: Stage) -> None:
    """A line of Fabric Manager comes through to the daemon's log."""
    text = f"heard {time.monotonic_ns()}"
    stage.tell(f"line ERROR {text}")
    stage.until(lambda: any(text in line["message"] for line in stage.lines if line["event"] == "fm-line"), text)


# --- Fabric Manager's process


@contextmanager
def stopped(stage: Stage) -> Iterator[None]:
    os.kill(stage.managers[-1], signal.SIGSTOP)
    yield
    os.kill(stage.managers[-1], signal.SIGCONT)


@contextmanager
def child_left_behind(stage: Stage) -> Iterator[None]:
    before = len(stage.processes())
    stage.tell("child")
    stage.until(lambda: len(stage.processes()) == before + 1, "the child")
    stage.crash()
    yield
    assert len(stage.processes()) == before


# --- the kernel


@contextmanager
def kernel_log_overrun(stage: Stage) -> Iterator[None]:
    stage.do("kernel", "print_kernel_line", "noise", 5000)
    yield


@contextmanager
def uevents_lost(stage: Stage) -> Iterator[None]:
    """The one that matters is among those that are lost."""
    stage.do("kernel", "flood", 5000)
    stage.do("kernel", "bind_gpu", GPUS[0], "nvidia")
    stage.do("kernel", "flood", 5000)
    yield
    stage.do("kernel", "bind_gpu", GPUS[0], "vfio-pci")


@contextmanager
def gpu_taken(stage: Stage) -> Iterator[None]:
    stage.do("kernel", "bind_gpu", GPUS[0], "nvidia")
    yield
    stage.do("kernel", "bind_gpu", GPUS[0], "vfio-pci")


@contextmanager
def node_deleted(stage: Stage) -> Iterator[None]:
    node = stage.path("/dev/nvidia-nvswitch0")
    before = node.read_text()
    node.unlink()
    yield
    stage.until(lambda: node.exists() and node.read_text() == before, "the node is made again")


@contextmanager
def node_with_another_minor(stage: Stage) -> Iterator[None]:
    node = stage.path("/dev/nvidia-nvswitch0")
    before = node.read_text()
    other = node.with_name("other")
    other.write_text(stage.path("/dev/nvidia-nvswitch1").read_text())
    other.rename(node)
    yield
    stage.until(lambda: node.read_text() == before, "the node is right again")


@contextmanager
def node_replaced_by_a_file(stage: Stage) -> Iterator[None]:
    node = stage.path("/dev/nvidia-nvswitch0")
    node.unlink()
    node.write_text("a file of somebody else")
    yield
    assert node.read_text() == "a file of somebody else"
    node.unlink()
    stage.until(node.exists, "the node is made again")


@contextmanager
def module_reloaded(stage: Stage) -> Iterator[None]:
    stage.do("kernel", "unload_module")
    yield
    stage.do("kernel", "load", VERSION)
    stage.until_looked_again()
    stage.crash()


@contextmanager
def switches_with_other_minors(stage: Stage) -> Iterator[None]:
    first, second = SWITCHES[:2]
    before = _minors(stage)
    for switch in (first, second):
        stage.do("kernel", "remove_switch", switch)
    yield
    for switch in (second, first):
        stage.do("kernel", "return_switch", switch)
    stage.until(lambda: (now := _minors(stage)) and now[first] == before[second], "the other minors")
    for minor in range(len(SWITCHES)):
        record = parse_node(stage.path(f"/dev/nvidia-nvswitch{minor}").read_text())
        assert record is not None
        assert record[1] == minor
    stage.crash()


def _minors(stage: Stage) -> dict[str, int]:
    return {row["pci_bus_id"]: row["minor"] for row in stage.status["switches"]}


# --- those who listen


@contextmanager
def metrics_port_taken(stage: Stage) -> Iterator[None]:
    yield
    assert stage.taken is not None
    stage.taken.close()
    stage.until(lambda: stage.get("/metrics")[0] == 200, "metrics are served")


@contextmanager
def clients_that_never_read(stage: Stage) -> Iterator[None]:
    with ExitStack() as clients:
        for _ in range(40):
            client = clients.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
            client.connect(("127.0.0.1", stage.port))
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        yield


@contextmanager
def idle_connections(stage: Stage) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2 * _IDLE_CONNECTIONS)), hard))
    with ExitStack() as clients:
        for _ in range(_IDLE_CONNECTIONS):
            clients.enter_context(socket.create_connection(("127.0.0.1", stage.port)))
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def notify_socket_gone(stage: Stage) -> Iterator[None]:
    assert stage.notified is not None
    stage.notified.close()
    os.unlink(stage.notify_path)
    stage.crash()
    yield
    stage.notified = listen_to_notifications(stage.notify_path)
    stage.notified.settimeout(30)
    stage.crash()
    while b"STATUS=backoff" not in stage.notified.recv(1 << 16):
        pass


@contextmanager
def state_directory_deleted(stage: Stage) -> Iterator[None]:
    directory = stage.path(STATE_DIRECTORY)
    names = sorted(os.listdir(directory))
    directory.rename(stage.path("/run/deleted"))
    yield
    stage.until(lambda: directory.is_dir() and sorted(os.listdir(directory)) == names, "the files are made again")

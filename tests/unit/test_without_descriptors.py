"""What the daemon opens while it runs, when no descriptor is left: nothing raises what would end it."""

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fmsupervisor.errors import ActionFailed
from fmsupervisor.host.root import HostRoot
from fmsupervisor.report.journald_socket import JournaldSocket
from fmsupervisor.report.metrics import FabricCollector
from fmsupervisor.report.metrics_server import MetricsServer
from fmsupervisor.settings import MetricsSettings


@contextmanager
def no_descriptors(but: int = 0) -> Iterator[None]:
    """No more than so many can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.open(os.devnull, os.O_RDONLY) for _ in range(but + 1)]
    for descriptor in free:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_messages_to_journald_are_lost_until_there_are_some(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journald:
        journald.bind(path)
        with no_descriptors():
            endpoint = JournaldSocket(path)
            assert not endpoint.send(b"MESSAGE=lost\n")
        assert endpoint.send(b"MESSAGE=heard\n")
        assert journald.recv(100) == b"MESSAGE=heard\n"
        endpoint.close()


@pytest.mark.parametrize("left", range(4))
def test_metrics_cannot_be_served_until_there_are_some(left: int) -> None:
    """The listening socket needs one, its event loop three."""
    server = MetricsServer(
        MetricsSettings(listen="127.0.0.1:0"),
        FabricCollector(lambda: None),
        lambda: True,
        lambda: (True, ""),
        HostRoot("/"),
    )
    before = len(os.listdir("/proc/self/fd"))
    with no_descriptors(left), pytest.raises(ActionFailed, match="cannot serve metrics"):
        server.start()
    assert len(os.listdir("/proc/self/fd")) == before
    server.start()
    server.stop()

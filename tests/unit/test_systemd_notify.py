"""What systemd gets to read, on real datagram sockets."""

import os
import socket
import uuid

import pytest

from fmsupervisor.report.systemd import SERVICE_MANAGER_VARIABLES, SystemdNotifier


class Manager:
    """A service manager's socket; reads are non-blocking, since sending is synchronous."""

    def __init__(self, address):
        self.address = address
        self.variable = address.replace("\0", "@")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.socket.bind(address)

    def receive(self):
        return self.socket.recv(8192).decode()

    def is_silent(self):
        try:
            self.socket.recv(8192)
        except BlockingIOError:
            return True
        return False

    def drain(self):
        received = []
        try:
            while True:
                received.append(self.socket.recv(8192).decode())
        except BlockingIOError:
            return received


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path):
    address = str(tmp_path / "notify") if request.param == "path" else f"\0fmsupervisor-test-{uuid.uuid4().hex}"
    manager = Manager(address)
    yield manager
    manager.socket.close()


@pytest.fixture
def notifier(manager):
    notifier = SystemdNotifier({"NOTIFY_SOCKET": manager.variable})
    yield notifier
    notifier.close()


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        pytest.param(lambda n: n.ready(), "READY=1", id="ready"),
        pytest.param(lambda n: n.stopping(), "STOPPING=1", id="stopping"),
        pytest.param(lambda n: n.reloading(123456789), "RELOADING=1\nMONOTONIC_USEC=123456789", id="reloading"),
        pytest.param(lambda n: n.extend_timeout(1.5), "EXTEND_TIMEOUT_USEC=1500000", id="extend"),
        pytest.param(lambda n: n.watchdog(), "WATCHDOG=1", id="watchdog"),
        pytest.param(lambda n: n.error_number(2), "ERRNO=2", id="errno"),
        pytest.param(lambda n: n.status("all well"), "STATUS=all well", id="status"),
        pytest.param(lambda n: n.status("Prüfung läuft → gut"), "STATUS=Prüfung läuft → gut", id="UTF-8"),
        pytest.param(lambda n: n.status("a\nREADY=1\x1b[31m\tb"), "STATUS=a READY=1 [31m b", id="no second assignment"),
    ],
)
def test_each_message_is_one_datagram_in_the_documented_form(manager, notifier, act, expected):
    act(notifier)
    assert manager.receive() == expected
    assert manager.is_silent()


def test_a_status_is_sent_only_when_it_differs(manager, notifier):
    for sentence in ("one", "one", "two", "two", "one"):
        notifier.status(sentence)
    assert manager.drain() == ["STATUS=one", "STATUS=two", "STATUS=one"]


@pytest.mark.parametrize("character", ["a", "ü", "→", "😀"])
def test_a_long_status_is_cut_between_characters(manager, notifier, character):
    notifier.status(character * 1000)
    text = manager.receive().removeprefix("STATUS=")
    assert 390 < len(text.encode()) <= 400
    assert text.endswith("...")
    assert set(text[:-3]) == {character}


def test_a_lone_surrogate_in_a_status_does_no_harm(manager, notifier):
    notifier.status("file \udcff.ko")
    assert manager.receive() == "STATUS=file .ko"


@pytest.mark.parametrize("variable", ["", "vsock:2:1234", "relative", "@", "/" + "x" * 200, "/no/such/socket"])
def test_nothing_happens_without_a_usable_socket(variable):
    notifier = SystemdNotifier({"NOTIFY_SOCKET": variable} if variable else {})
    notifier.ready()
    notifier.status("unheard")
    notifier.watchdog()
    notifier.close()


def test_it_is_active_only_with_an_address_of_a_service_manager(tmp_path):
    assert SystemdNotifier({"NOTIFY_SOCKET": "@abstract"}).is_active
    assert SystemdNotifier({"NOTIFY_SOCKET": str(tmp_path)}).is_active
    assert not SystemdNotifier({}).is_active
    assert not SystemdNotifier({"NOTIFY_SOCKET": "vsock:2:1234"}).is_active


def test_the_environment_is_not_needed_after_the_construction(manager):
    environment = {"NOTIFY_SOCKET": manager.variable}
    notifier = SystemdNotifier(environment)
    environment.clear()
    notifier.ready()
    notifier.close()
    assert manager.receive() == "READY=1"


def test_a_vanished_socket_is_found_again_and_gets_what_was_missed(tmp_path):
    first = Manager(str(tmp_path / "notify"))
    notifier = SystemdNotifier({"NOTIFY_SOCKET": first.address})
    notifier.status("starting")
    first.socket.close()
    os.unlink(first.address)
    notifier.status("configured")
    notifier.ready()
    second = Manager(first.address)
    notifier.watchdog()
    assert second.drain() == ["STATUS=configured\nREADY=1\nWATCHDOG=1"]
    notifier.close()
    second.socket.close()


def test_a_full_socket_never_blocks_and_only_the_newest_of_each_sort_waits(manager, notifier):
    sent = 0
    while not notifier._waiting and sent < 100_000:
        notifier.error_number(sent)
        sent += 1
    assert notifier._waiting, "the socket never filled up"
    notifier.status("old")
    notifier.status("new")
    notifier.reloading(1)
    notifier.ready()
    for _ in range(1000):
        notifier.watchdog()
    manager.drain()
    notifier.watchdog()
    assert manager.receive().splitlines() == [f"ERRNO={sent - 1}", "STATUS=new", "READY=1", "WATCHDOG=1"]
    notifier.watchdog()
    assert manager.receive() == "WATCHDOG=1"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        pytest.param({"WATCHDOG_USEC": "30000000"}, 15.0, id="any process"),
        pytest.param({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "42"}, 15.0, id="this process"),
        pytest.param({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "43"}, None, id="another process"),
        pytest.param({"WATCHDOG_PID": "42"}, None, id="no limit"),
        pytest.param({"WATCHDOG_USEC": "0"}, None, id="zero"),
        pytest.param({"WATCHDOG_USEC": "-5"}, None, id="negative"),
        pytest.param({"WATCHDOG_USEC": "soon"}, None, id="not a number"),
        pytest.param({"WATCHDOG_USEC": "²"}, None, id="not a decimal digit"),
        pytest.param({"WATCHDOG_USEC": "9" * 5000}, None, id="absurd"),
        pytest.param({}, None, id="nothing"),
    ],
)
def test_the_watchdog_interval_is_half_of_the_limit(environment, expected):
    assert SystemdNotifier(environment, pid=42).watchdog_interval_seconds == expected


def test_the_variables_to_keep_from_children_are_those_of_the_service_manager():
    assert {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"} <= set(
        SERVICE_MANAGER_VARIABLES
    )


def test_a_child_does_not_inherit_the_socket(notifier):
    notifier.ready()
    assert notifier.socket is not None
    assert not os.get_inheritable(notifier.socket.fileno())

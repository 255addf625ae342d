"""The metrics server on real sockets: what it answers, whom it cuts off, what it survives."""

import gzip
import http.client
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from prometheus_client import openmetrics
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.openmetrics import parser  # noqa: F401 - makes openmetrics.parser

from fmsupervisor.core.state import State
from fmsupervisor.core.verdict import verdict
from fmsupervisor.errors import ActionFailed
from fmsupervisor.facts import Moment
from fmsupervisor.host.root import HostRoot
from fmsupervisor.report.metrics import FabricCollector, Snapshot
from fmsupervisor.report.metrics_server import MetricsServer
from fmsupervisor.settings import MetricsSettings, Settings

PATIENCE_SECONDS = 20.0
FAR_SECONDS = 3600.0  # no deadline helps
PROMTOOL = Path("/usr/bin/promtool")
PROMETHEUS = Path("/usr/bin/prometheus")
ROOT = HostRoot("/")
STATE = State(Settings(), Moment(1.0, 1_700_000_000.0), Moment(2.0, 1_700_000_001.0))
SNAPSHOT = Snapshot(STATE, verdict(STATE))
COLLECTOR = FabricCollector(lambda: SNAPSHOT)


class LargeCollector(FabricCollector):
    """More than the buffers of the kernel take in."""

    def __init__(self) -> None:
        super().__init__(lambda: None)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily("large", "x" * 10_000_000)
        family.add_metric((), 1)
        yield family


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def make(listen: str = "127.0.0.1:0", collector: FabricCollector = COLLECTOR, **options) -> MetricsServer:
    answers = {"is_alive": lambda: True, "is_configured": lambda: (True, "configured: all is well")}
    wanted = {**answers, **options}
    return MetricsServer(MetricsSettings(listen=listen), collector, root=ROOT, **wanted)


@pytest.fixture
def serve() -> Iterator[Callable[..., MetricsServer]]:
    """Starts servers like ``make`` and stops them at the end."""
    started: list[MetricsServer] = []

    def start(*arguments, **options) -> MetricsServer:
        server = make(*arguments, **options)
        server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()


def connect(server: MetricsServer) -> socket.socket:
    return socket.create_connection(server.address, PATIENCE_SECONDS)


def ask(server: MetricsServer, path: str = "/metrics", method: str = "GET", body: bytes | None = None, **headers: str):
    """The answer and its body."""
    connection = http.client.HTTPConnection(*server.address, timeout=PATIENCE_SECONDS)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


def exchange(server: MetricsServer, sent: bytes) -> bytes:
    """Everything that comes back for ``sent``."""
    with connect(server) as client:
        client.sendall(sent)
        received = b""
        while chunk := client.recv(65536):
            received += chunk
        return received


def is_cut_off(client: socket.socket) -> bool:
    """Whether the server ends the connection, by an end or by a reset, without a word."""
    client.settimeout(PATIENCE_SECONDS)
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True


class TestAnswers:
    def test_metrics_as_text(self, serve):
        answer, body = ask(serve())
        assert (answer.status, answer.getheader("Content-Type")) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert b'fabricmanager_state{state="waiting-for-module"} 1.0\n' in body

    def test_metrics_as_openmetrics(self, serve):
        answer, body = ask(serve(), Accept="application/openmetrics-text; version=1.0.0,text/plain;q=0.5")
        assert answer.getheader("Content-Type", "").startswith("application/openmetrics-text; version=1.0.0")
        assert list(openmetrics.parser.text_string_to_metric_families(body.decode()))

    def test_metrics_compressed(self, serve):
        server = serve()
        answer, body = ask(server, Accept_Encoding="deflate, gzip;q=0.5")
        assert answer.getheader("Content-Encoding") == "gzip"
        assert gzip.decompress(body) == ask(server)[1]

    @pytest.mark.parametrize("version", ["1.x", "x", "", "-1", "2.0.0", "9" * 4000, "\xff"])
    def test_any_accept_header_gets_metrics(self, serve, version):
        answer, body = ask(serve(), Accept=f"application/openmetrics-text; version={version}")
        assert (answer.status, b"fmsupervisor_build_info" in body or b"fmsupervisor_build" in body) == (200, True)

    def test_head_has_the_headers_only(self, serve):
        server = serve()
        answer, body = ask(server, method="HEAD")
        assert (answer.status, body) == (200, b"")
        assert int(answer.getheader("Content-Length", "")) == len(ask(server)[1])

    @pytest.mark.parametrize(
        ("path", "is_alive", "is_configured", "expected"),
        [
            ("/healthz", True, False, (200, b"ok\n")),
            ("/healthz", False, True, (503, b"the supervisor's loop does not turn\n")),
            ("/readyz", True, True, (200, b"the sentence\n")),
            ("/readyz?verbose", True, False, (503, b"the sentence\n")),
        ],
    )
    def test_probes(self, serve, path, is_alive, is_configured, expected):
        server = serve(is_alive=lambda: is_alive, is_configured=lambda: (is_configured, "the sentence"))
        answer, body = ask(server, path)
        assert (answer.status, body) == expected

    def test_a_page_that_leads_to_the_others(self, serve):
        answer, body = ask(serve(), "/")
        assert (answer.status, answer.getheader("Content-Type")) == (200, "text/html; charset=utf-8")
        assert b'href="/metrics"' in body

    def test_other_paths_are_not_found_and_other_methods_not_allowed(self, serve):
        server = serve()
        assert ask(server, "/metrics/")[0].status == 404
        answer, _ = ask(server, method="POST", body=b"x" * 50_000)
        assert (answer.status, answer.getheader("Allow")) == (405, "GET, HEAD")

    def test_headers_are_cautious(self, serve):
        headers = dict(ask(serve(), "/")[0].getheaders())
        assert headers["Server"] == "fmsupervisor"
        assert headers["Connection"] == "close"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")

    @pytest.mark.parametrize(
        ("sent", "status"),
        [
            (b"nonsense\r\n\r\n", b"400"),
            (b"GET /metrics\r\n\r\n", b"400"),
            (b"GET /metrics HTTP/1.1\r\nno colon\r\n\r\n", b"400"),
            (b"GET /metrics HTTP/1.1\r\nA: b\rc\r\n\r\n", b"400"),
            (b"GET /metrics HTTP/1.1\r\nA : b\r\n\r\n", b"400"),
            (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"400"),
            (b"GET / HTTP/2.0\r\n\r\n", b"505"),
            (b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n\r\n", b"414"),
            (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", b"431"),
            (b"GET / HTTP/1.1\r\nA: " + b"x" * 20_000, b"431"),
            (b"GET / HTTP/1.1\r\nA: " + b"x" * 20_000 + b"\r\n\r\n", b"431"),
        ],
    )
    def test_bad_requests_are_told_so(self, serve, sent, status):
        assert exchange(serve(), sent).split(b" ")[1] == status

    def test_a_request_in_pieces_is_understood(self, serve):
        with connect(serve()) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for byte in b"GET /healthz HTTP/1.0\r\n\r\n":
                client.sendall(bytes((byte,)))
            assert client.recv(65536).startswith(b"HTTP/1.1 200 ")


class TestAddresses:
    def test_a_taken_port_is_told_and_can_be_had_later(self, serve):
        server = serve()
        host, port = server.address
        other = make(f"{host}:{port}")
        with pytest.raises(ActionFailed, match=f"{host}:{port}: Address already in use"):
            other.start()
        server.stop()
        other.start()
        assert ask(other, "/healthz")[0].status == 200
        other.stop()

    @pytest.mark.parametrize("listen", ["192.0.2.1:0", "no-such-host.invalid:0"])
    def test_an_impossible_address_is_told(self, listen):
        with pytest.raises(ActionFailed, match="cannot serve metrics on "):
            make(listen).start()

    @pytest.mark.skipif(not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
    def test_all_addresses_of_both_families(self, serve):
        port = serve("[::]:0").address[1]
        for host in ("127.0.0.1", "::1"):
            with socket.create_connection((host, port), PATIENCE_SECONDS) as client:
                client.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
                assert client.recv(65536).startswith(b"HTTP/1.1 200 ")

    def test_a_socket_that_listens_already_is_taken_over(self, serve):
        listening = socket.create_server(("127.0.0.1", 0))
        expected = listening.getsockname()
        server = serve("127.0.0.1:1", listening=listening)
        assert server.address == expected
        assert server.fileno() == listening.fileno()
        assert ask(server, "/healthz")[0].status == 200

    def test_stopped_is_stopped_and_can_be_started_again(self, serve):
        server = serve()
        address = server.address
        client = connect(server)
        server.stop()
        server.stop()
        assert is_cut_off(client)
        client.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, PATIENCE_SECONDS)
        server.start()
        assert ask(server, "/healthz")[0].status == 200


class TestBadCompany:
    def test_a_client_that_never_finishes_its_request_is_cut_off(self, serve):
        server = serve(deadline_seconds=0.3)
        with connect(server) as silent, connect(server) as slow:
            slow.sendall(b"GET /metrics HTTP/1.1\r\nA: ")
            assert is_cut_off(silent)
            assert is_cut_off(slow)

    def test_a_client_that_does_not_read_is_cut_off(self, serve):
        server = serve(collector=LargeCollector(), deadline_seconds=1.0)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(server.address)
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert eventually(lambda: bool(server._connections))
            assert eventually(lambda: not server._connections)

    def test_a_large_answer_reaches_a_client_that_reads(self, serve):
        _, body = ask(serve(collector=LargeCollector()))
        assert len(body) > 10_000_000

    def test_a_thousand_idle_clients_do_not_keep_a_scrape_out(self, serve):
        process = psutil.Process()
        server = serve(deadline_seconds=FAR_SECONDS)
        before = process.num_fds()
        clients = [connect(server) for _ in range(1000)]
        assert ask(server)[0].status == 200
        assert eventually(lambda: len(server._connections) <= 32)
        assert eventually(lambda: process.num_fds() <= before + len(clients) + 32)
        for client in clients:
            client.close()
        assert eventually(lambda: process.num_fds() <= before)

    def test_out_of_descriptors_it_waits_and_goes_on(self, serve):
        server = serve()
        client = socket.socket()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 50, limits[1]))
        held: list[int] = []
        try:
            with pytest.raises(OSError, match="Too many open files"):
                held.extend(os.dup(client.fileno()) for _ in range(1000))
            client.connect(server.address)
            client.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            client.settimeout(0.3)
            with pytest.raises(TimeoutError):
                client.recv(1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for descriptor in held:
                os.close(descriptor)
        client.settimeout(PATIENCE_SECONDS)
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
        client.close()

    def test_clients_that_vanish_leave_nothing_behind(self, serve):
        process = psutil.Process()
        server = serve(collector=LargeCollector())
        before = process.num_fds()
        for sent in (b"", b"GET", b"GET /metrics HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n") * 5:
            with connect(server) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset
                client.sendall(sent)
        assert eventually(lambda: process.num_fds() <= before)
        assert ask(server, "/healthz")[0].status == 200

    def test_a_probe_that_hangs_does_not_hold_up_a_scrape(self, serve):
        release = threading.Event()
        server = serve(is_alive=lambda: release.wait(PATIENCE_SECONDS))
        with connect(server) as client:
            client.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            assert eventually(lambda: bool(server._connections))
            assert ask(server)[0].status == 200
            release.set()
            assert client.recv(65536).startswith(b"HTTP/1.1 200 ")

    def test_a_mistake_in_an_answer_costs_that_answer_only(self, serve, caplog):
        server = serve(is_configured=lambda: 1 / 0)
        with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
            ask(server, "/readyz")
        assert ask(server, "/healthz")[0].status == 200
        assert eventually(lambda: "cannot answer a request for metrics" in caplog.text)


def test_the_server_does_not_keep_the_process_alive():
    program = """
from fmsupervisor.host.root import HostRoot
from fmsupervisor.report.metrics import FabricCollector
from fmsupervisor.report.metrics_server import MetricsServer
from fmsupervisor.settings import MetricsSettings
import time, urllib.request
server = MetricsServer(
    MetricsSettings(listen="127.0.0.1:0"), FabricCollector(lambda: None), lambda: time.sleep(600) or True,
    lambda: (True, ""), HostRoot("/"))
server.start()
try:
    urllib.request.urlopen("http://%s:%d/healthz" % server.address, timeout=0.2)
except TimeoutError:
    print("still asking")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "still asking\n", "")


@pytest.mark.skipif(not PROMTOOL.exists(), reason="promtool is not installed")
def test_promtool_is_silent_about_what_is_served(serve):
    _, body = ask(serve())
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=body, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.slow
@pytest.mark.skipif(not PROMETHEUS.exists(), reason="the Prometheus server is not installed")
def test_a_prometheus_server_scrapes_it(serve, tmp_path):
    host, port = serve().address
    with socket.create_server(("127.0.0.1", 0)) as probe:
        own = probe.getsockname()[1]
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [{"job_name": "fm", "static_configs": [{"targets": [f"{host}:{port}"]}]}],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    command = [
        PROMETHEUS,
        f"--config.file={tmp_path}/prometheus.yml",
        f"--storage.tsdb.path={tmp_path}/data",
        f"--web.listen-address=127.0.0.1:{own}",
    ]

    def query(expression: str) -> list[dict[str, object]]:
        url = f"http://127.0.0.1:{own}/api/v1/query?query={expression}"
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
                return list(json.load(answer)["data"]["result"])
        except OSError:
            return []

    with open(tmp_path / "log", "wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as prometheus:
        try:
            assert eventually(lambda: bool(query("up==1"))), (tmp_path / "log").read_text()
            assert len(query("fmsupervisor_condition_active")) > 50
            assert len(query("fabricmanager_state==1")) == 1
        finally:
            prometheus.terminate()

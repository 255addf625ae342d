"""The metrics server with a web.yml: TLS, client certificates, passwords, and changes while it runs."""

import base64
import datetime as dt
import http.client
import ipaddress
import os
import shutil
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import bcrypt
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fmsupervisor.conditions import Code
from fmsupervisor.errors import ActionFailed
from fmsupervisor.facts import Problem
from fmsupervisor.host.root import HostRoot
from fmsupervisor.report.metrics import FabricCollector
from fmsupervisor.report.metrics_server import MetricsServer
from fmsupervisor.settings import MetricsSettings

PATIENCE_SECONDS = 20.0
FAR_SECONDS = 3600.0  # no deadline helps
PATH = "/etc/fm/web.yml"
TLS = "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n"
MUTUAL = TLS + "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.crt\n"
USERS = f"basic_auth_users:\n  alice: {bcrypt.hashpw(b'secret', bcrypt.gensalt(4)).decode()}\n"


class Authority:
    """A throw-away certificate authority that writes PEM files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"authority {directory.name}")])
        self.certificate = self._sign(self._name, self._key, x509.BasicConstraints(ca=True, path_length=0))
        self.file = self._write("ca.crt", self.certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *alternative: x509.GeneralName, passphrase: bytes | None = None) -> x509.Certificate:
        """Write ``name``.crt and ``name``.key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._sign(subject, key, *([x509.SubjectAlternativeName(alternative)] if alternative else []))
        encryption = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
        pem = serialization.Encoding.PEM
        self._write(f"{name}.crt", certificate.public_bytes(pem))
        self._write(f"{name}.key", key.private_bytes(pem, serialization.PrivateFormat.PKCS8, encryption))
        return certificate

    def issue_server(self, **options: bytes) -> x509.Certificate:
        return self.issue("server", x509.IPAddress(ipaddress.ip_address("127.0.0.1")), **options)

    def client(self, name: str = "") -> ssl.SSLContext:
        """Trusts this authority, and shows the certificate ``name`` when asked."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.file)
        if name:
            context.load_cert_chain(self.directory / f"{name}.crt", self.directory / f"{name}.key")
        return context

    def _sign(self, subject, key, *extensions) -> x509.Certificate:
        now = dt.datetime.now(dt.UTC)
        builder = x509.CertificateBuilder(self._name, subject, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now - dt.timedelta(hours=1))
        builder = builder.not_valid_after(now + dt.timedelta(hours=1))
        for extension in extensions:
            builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        return builder.sign(self._key, hashes.SHA256())

    def _write(self, name: str, content: bytes) -> Path:
        file = self.directory / name
        file.write_bytes(content)
        return file


class Site:
    """A host root with a web.yml and its certificates, and the server on it."""

    def __init__(self, directory: Path) -> None:
        self.root = HostRoot(str(directory))
        self.told: list[Problem | None] = []
        os.makedirs(self.root.path("/etc/fm"))
        self.authority = Authority(Path(self.root.path("/etc/fm")))
        self.certificate = self.authority.issue_server()
        self.server: MetricsServer | None = None

    def configure(self, text: str) -> None:
        Path(self.root.path(PATH)).write_text(text)

    def start(self, text: str, deadline_seconds: float = PATIENCE_SECONDS) -> None:
        self.configure(text)
        self.server = MetricsServer(
            MetricsSettings(listen="127.0.0.1:0", web_config=PATH),
            FabricCollector(lambda: None),
            lambda: True,
            lambda: (True, "configured"),
            self.root,
            on_problem=self.told.append,
            deadline_seconds=deadline_seconds,
        )
        self.server.start()

    @property
    def address(self) -> tuple[str, int]:
        assert self.server is not None
        return self.server.address

    def ask(self, context: ssl.SSLContext | None = None, **headers: str) -> http.client.HTTPResponse:
        if context is None:
            connection = http.client.HTTPConnection(*self.address, timeout=PATIENCE_SECONDS)
        else:
            connection = http.client.HTTPSConnection(*self.address, timeout=PATIENCE_SECONDS, context=context)
        try:
            connection.request("GET", "/metrics", headers=headers)
            answer = connection.getresponse()
            answer.read()
            return answer
        finally:
            connection.close()

    def shown_serial(self) -> int:
        """Serial number of the certificate that the server shows."""
        with (
            socket.create_connection(self.address, PATIENCE_SECONDS) as plain,
            self.authority.client().wrap_socket(plain, server_hostname="127.0.0.1") as client,
        ):
            shown = client.getpeercert(binary_form=True)
            assert shown is not None
            return x509.load_der_x509_certificate(shown).serial_number


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    if made.server is not None:
        made.server.stop()


def basic(user: str, password: str) -> str:
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"


def is_refused(ask: Callable[[], object]) -> bool:
    """Whether the connection comes to nothing: in TLS 1.3 the client sees the refusal when it reads."""
    try:
        ask()
    except (ssl.SSLError, ConnectionError, http.client.RemoteDisconnected):
        return True
    return False


class TestTls:
    @pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
    def test_serves_over_tls(self, site, version):
        site.start(TLS)
        context = site.authority.client()
        context.minimum_version = context.maximum_version = version
        assert site.ask(context).status == 200

    def test_a_version_below_the_minimum_is_refused(self, site):
        site.start(TLS + "  min_version: TLS13\n")
        context = site.authority.client()
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        assert is_refused(lambda: site.ask(context))
        assert site.ask(site.authority.client()).status == 200

    def test_only_the_chosen_ciphers_are_used(self, site):
        site.start(TLS + "  max_version: TLS12\n  cipher_suites: [TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384]\n")
        with (
            socket.create_connection(site.address, PATIENCE_SECONDS) as plain,
            site.authority.client().wrap_socket(plain, server_hostname="127.0.0.1") as client,
        ):
            assert client.cipher() == ("ECDHE-ECDSA-AES256-GCM-SHA384", "TLSv1.2", 256)

    def test_plain_http_is_refused(self, site):
        site.start(TLS)
        assert is_refused(site.ask)

    def test_a_client_that_never_shakes_hands_is_cut_off(self, site):
        site.start(TLS, deadline_seconds=0.3)
        with socket.create_connection(site.address, PATIENCE_SECONDS) as client:
            assert client.recv(1) == b""

    def test_two_hundred_idle_clients_do_not_keep_a_scrape_out(self, site):
        site.start(TLS, deadline_seconds=FAR_SECONDS)
        clients = [socket.create_connection(site.address, PATIENCE_SECONDS) for _ in range(200)]
        assert site.ask(site.authority.client()).status == 200
        for client in clients:
            client.close()

    def test_headers_of_the_file_are_sent(self, site):
        site.start("http_server_config:\n  headers:\n    Content-Security-Policy: default-src 'self'\n")
        assert site.ask().getheader("Content-Security-Policy") == "default-src 'self'"


class TestClientCertificates:
    def test_the_right_one_is_let_in_and_others_are_not(self, site, tmp_path):
        site.start(MUTUAL)
        site.authority.issue("prometheus")
        (tmp_path / "foreign").mkdir()
        foreign = Authority(tmp_path / "foreign")
        foreign.issue("prometheus")
        stranger = site.authority.client()
        stranger.load_cert_chain(tmp_path / "foreign/prometheus.crt", tmp_path / "foreign/prometheus.key")
        assert site.ask(site.authority.client("prometheus")).status == 200
        assert is_refused(lambda: site.ask(site.authority.client()))
        assert is_refused(lambda: site.ask(stranger))

    def test_an_optional_one_may_be_missing_but_not_wrong(self, site, tmp_path):
        site.start(MUTUAL.replace("RequireAndVerifyClientCert", "VerifyClientCertIfGiven"))
        (tmp_path / "foreign").mkdir()
        foreign = Authority(tmp_path / "foreign")
        foreign.issue("prometheus")
        stranger = site.authority.client()
        stranger.load_cert_chain(tmp_path / "foreign/prometheus.crt", tmp_path / "foreign/prometheus.key")
        assert site.ask(site.authority.client()).status == 200
        assert is_refused(lambda: site.ask(stranger))

    def test_its_names_must_be_on_the_list(self, site):
        site.start(MUTUAL + "  client_allowed_sans: [prometheus.example, 'fd00::1']\n")
        site.authority.issue("named", x509.DNSName("other"), x509.DNSName("prometheus.example"))
        site.authority.issue("numbered", x509.IPAddress(ipaddress.ip_address("fd00::1")))
        site.authority.issue("wrong", x509.DNSName("prometheus.example.org"))
        site.authority.issue("nameless")
        statuses = {
            name: site.ask(site.authority.client(name)).status for name in ("named", "numbered", "wrong", "nameless")
        }
        assert statuses == {"named": 200, "numbered": 200, "wrong": 403, "nameless": 403}


class TestPasswords:
    @pytest.mark.parametrize(
        ("header", "status"),
        [
            (basic("alice", "secret"), 200),
            (basic("alice", "wrong"), 401),
            (basic("bob", "secret"), 401),
            ("", 401),
            ("Bearer x", 401),
        ],
    )
    def test_basic_auth(self, site, header, status):
        site.start(USERS)
        for _ in range(2):  # the second answer comes from memory
            answer = site.ask(**({"Authorization": header} if header else {}))
            assert answer.status == status
            assert answer.getheader("WWW-Authenticate") == ('Basic realm="fmsupervisor"' if status == 401 else None)

    def test_together_with_tls(self, site):
        site.start(TLS + USERS)
        assert site.ask(site.authority.client(), Authorization=basic("alice", "secret")).status == 200
        assert site.ask(site.authority.client()).status == 401


class TestChanges:
    def test_a_new_certificate_is_used_without_a_restart(self, site):
        site.start(TLS)
        assert site.shown_serial() == site.certificate.serial_number
        renewed = site.authority.issue_server()
        assert site.shown_serial() == renewed.serial_number
        assert site.told == []

    def test_a_certificate_that_does_not_fit_its_key_is_told_and_the_old_pair_stays(self, site):
        site.start(TLS)
        directory = site.authority.directory
        shutil.copy(directory / "server.key", directory / "old.key")
        renewed = site.authority.issue_server()
        shutil.move(directory / "server.key", directory / "new.key")
        shutil.copy(directory / "old.key", directory / "server.key")
        assert site.shown_serial() == site.certificate.serial_number
        assert [problem and problem.code for problem in site.told] == [Code.WEB_CONFIG_INVALID]
        shutil.move(directory / "new.key", directory / "server.key")
        assert site.shown_serial() == renewed.serial_number
        assert site.told[1:] == [None]

    def test_a_client_authority_that_changes_is_believed_at_once(self, site, tmp_path):
        site.start(MUTUAL)
        site.authority.issue("prometheus")
        context = site.authority.client("prometheus")
        assert site.ask(context).status == 200
        (tmp_path / "next").mkdir()
        shutil.copy(Authority(tmp_path / "next").file, site.authority.file)
        assert is_refused(lambda: site.ask(context))

    def test_a_broken_file_never_opens_the_door(self, site):
        site.start(USERS)
        site.configure("basic_auth_users: {")
        assert site.ask().status == 401
        assert site.ask(Authorization=basic("alice", "secret")).status == 200
        assert [problem and problem.code for problem in site.told] == [Code.WEB_CONFIG_INVALID]

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("nonsense: 1\n", "there is no such key"),
            (TLS.replace("server.crt", "absent.crt"), "cannot use /etc/fm/absent.crt"),
            (MUTUAL.replace("ca.crt", "server.key"), "cannot use /etc/fm/server.key"),
        ],
        ids=["file", "certificate", "authority"],
    )
    def test_does_not_start_with_a_file_that_cannot_be_used(self, site, text, words):
        with pytest.raises(ActionFailed, match=words):
            site.start(text)
        assert [problem and problem.code for problem in site.told] == [Code.WEB_CONFIG_INVALID]

    def test_a_key_with_a_passphrase_is_an_error_and_not_a_question(self, site):
        site.authority.issue_server(passphrase=b"secret")
        with pytest.raises(ActionFailed, match=r"server\.key"):
            site.start(TLS)

"""web.yml: TLS and passwords of the metrics server, in the format of the Prometheus exporter-toolkit.

Source: exporter-toolkit docs/web-configuration.md and web/tls_config.go. Read as strictly as there. Where
Python's ssl cannot do what a key asks for, the key is refused rather than weakened; docs/metrics.md lists these.
"""

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from fmsupervisor.conditions import Code
from fmsupervisor.errors import CannotObserve, ConfigError
from fmsupervisor.facts import Problem
from fmsupervisor.host.root import HostRoot
from fmsupervisor.report.basic_auth import is_bcrypt_hash
from fmsupervisor.report.yaml_table import Table, read_table

_LIMIT_BYTES = 1 << 16

_VERSIONS = MappingProxyType({"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3})
_CLIENT_AUTH = MappingProxyType(
    {
        "": ssl.CERT_NONE,
        "NoClientCert": ssl.CERT_NONE,
        "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
        "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
    }
)
_UNVERIFIED = ("RequestClientCert", "RequireAnyClientCert", "RequireClientCert")

# Go's names (crypto/tls CipherSuites) to OpenSSL's. Those of TLS 1.3 cannot be chosen, in Go neither.
_TLS12_CIPHERS = MappingProxyType(
    {
        "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
        "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
        "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
        "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
        "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
        "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
        "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
        "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
        "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
        "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
    }
)
_TLS13_CIPHERS = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")

# Headers that may be set, with their allowed values where these are few (exporter-toolkit web/handler.go).
_HEADERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "Content-Security-Policy": (),
        "Strict-Transport-Security": (),
        "X-Content-Type-Options": ("", "nosniff"),
        "X-Frame-Options": ("", "deny", "sameorigin"),
        "X-XSS-Protection": (),
    }
)
_REFUSED = MappingProxyType(
    {
        "tls_server_config.cert": "name the file in cert_file",
        "tls_server_config.key": "name the file in key_file",
        "tls_server_config.client_ca": "name the file in client_ca_file",
        "tls_server_config.curve_preferences": "the defaults of OpenSSL apply",
        "rate_limit": "the server bounds its connections by itself",
    }
)


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """tls_server_config. Files are logical paths; ``ciphers`` is empty for OpenSSL's defaults."""

    cert_file: str
    key_file: str
    client_ca_file: str
    client_auth: ssl.VerifyMode
    client_allowed_sans: frozenset[str] | None
    minimum: ssl.TLSVersion
    maximum: ssl.TLSVersion
    ciphers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WebConfig:
    """The whole file. Without ``tls`` the server speaks plain HTTP, without ``users`` everybody may ask."""

    tls: TlsConfig | None = None
    headers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    users: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))  # name to bcrypt hash


def load(root: HostRoot, path: str) -> WebConfig:
    """Read web.yml at the logical ``path``. Raises ``ConfigError`` that names the file and the key."""
    top = read_table(root, path, _LIMIT_BYTES)
    config = WebConfig(_read_tls(top), _read_headers(top.table("http_server_config")), _read_users(top))
    top.finish(_REFUSED)
    return config


def make_context(root: HostRoot, path: str, tls: TlsConfig) -> ssl.SSLContext:
    """The TLS context; ``path`` is that of web.yml, for messages. Raises ``ConfigError``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version, context.maximum_version = tls.minimum, tls.maximum
    context.set_alpn_protocols(["http/1.1"])
    what = f"{tls.cert_file} with {tls.key_file}"
    try:
        # A key with a passphrase is an error, not a question on the terminal.
        context.load_cert_chain(root.path(tls.cert_file), root.path(tls.key_file), password=lambda: b"")
        what = tls.client_ca_file
        if what:
            context.load_verify_locations(root.path(what))
        what = "cipher_suites"
        if tls.ciphers:
            context.set_ciphers(":".join(tls.ciphers))
    except (OSError, ValueError) as error:
        cause = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: tls_server_config: cannot use {what}: {cause}") from error
    context.verify_mode = tls.client_auth
    return context


def has_allowed_san(tls: TlsConfig, certificate: Mapping[str, Any] | None) -> bool:
    """Whether the client may connect: nothing is asked for, or one of its subject alternative names is allowed.

    ``certificate`` is what ``SSLObject.getpeercert`` returns.
    """
    if tls.client_allowed_sans is None:
        return True
    names = (certificate or {}).get("subjectAltName", ())
    return any(_san(kind, value) in tls.client_allowed_sans for kind, value in names)


def _san(kind: str, value: str) -> str:
    """A name as Go writes it: OpenSSL prints IPv6 addresses in long upper case form."""
    if kind != "IP Address":
        return value
    import ipaddress  # noqa: PLC0415

    try:
        return str(ipaddress.ip_address(value.strip()))
    except ValueError:
        return value


def _read_tls(top: Table) -> TlsConfig | None:
    table = top.table("tls_server_config")
    if table.is_empty:
        return None
    auth = table.text("client_auth_type")
    if auth in _UNVERIFIED:
        raise table.error("client_auth_type", f"{auth} takes certificates without verifying them; not supported")
    if auth not in _CLIENT_AUTH:
        raise table.error("client_auth_type", f"found {auth!r}, allowed are {', '.join(filter(None, _CLIENT_AUTH))}")
    suites = table.texts("cipher_suites") or ()
    for suite in suites:
        if suite not in _TLS12_CIPHERS and suite not in _TLS13_CIPHERS:
            raise table.error("cipher_suites", f"unknown cipher {suite!r}")
    ciphers = tuple(_TLS12_CIPHERS[suite] for suite in suites if suite in _TLS12_CIPHERS)
    sans = table.texts("client_allowed_sans")
    oldest = "TLS13" if suites and not ciphers else "TLS12"
    tls = TlsConfig(
        cert_file=table.file("cert_file"),
        key_file=table.file("key_file"),
        client_ca_file=table.file("client_ca_file"),
        client_auth=_CLIENT_AUTH[auth],
        client_allowed_sans=None if sans is None else frozenset(sans),
        minimum=_VERSIONS[table.text("min_version", tuple(_VERSIONS)) or oldest],
        maximum=_VERSIONS[table.text("max_version", tuple(_VERSIONS)) or "TLS13"],
        ciphers=ciphers,
    )
    table.boolean("prefer_server_cipher_suites")
    table.finish(_REFUSED)
    _check_tls(table, tls, has_suites=bool(suites))
    return tls


def _check_tls(table: Table, tls: TlsConfig, *, has_suites: bool) -> None:
    for key, value in (("cert_file", tls.cert_file), ("key_file", tls.key_file)):
        if not value:
            raise table.error(key, "is missing")
    if tls.minimum > tls.maximum:
        raise table.error("min_version", "is newer than max_version")
    if has_suites and not tls.ciphers and tls.minimum < ssl.TLSVersion.TLSv1_3:
        raise table.error("cipher_suites", "none of them is of TLS 1.2, which min_version allows")
    if tls.client_auth is ssl.CERT_NONE and tls.client_ca_file:
        raise table.error("client_ca_file", "has no effect without client_auth_type")
    if tls.client_auth is not ssl.CERT_NONE and not tls.client_ca_file:
        raise table.error("client_ca_file", "is missing; client_auth_type needs it")
    if tls.client_allowed_sans is not None and tls.client_auth is not ssl.CERT_REQUIRED:
        raise table.error("client_allowed_sans", "needs client_auth_type RequireAndVerifyClientCert")


def _read_headers(http: Table) -> Mapping[str, str]:
    http.boolean("http2")
    table = http.table("headers")
    headers = {name: table.text(name, allowed) for name, allowed in _HEADERS.items()}
    table.finish(_REFUSED)
    http.finish(_REFUSED)
    return MappingProxyType({name: value for name, value in headers.items() if value})


def _read_users(top: Table) -> Mapping[str, str]:
    table = top.table("basic_auth_users")
    users = {name: table.text(name) for name in table.names()}
    for name, hashed in users.items():
        if not is_bcrypt_hash(hashed):
            raise table.error(name, "is not a bcrypt hash ($2y$...)")
    return MappingProxyType(users)


@dataclass(frozen=True, slots=True)
class LoadedWebConfig:
    """A web.yml that is in force, with the TLS context made of it."""

    config: WebConfig
    context: ssl.SSLContext | None


class WebConfigFile:
    """The web.yml in force: looked at for each connection, read again when it or a file it names has changed.

    ``on_problem`` is told, in the thread that asks, when the file on disk becomes unusable (the last good one stays in
    force) and, with None, when it is usable again.
    """

    def __init__(self, root: HostRoot, path: str, on_problem: Callable[[Problem | None], None]) -> None:
        self._root = root
        self._path = path
        self._on_problem = on_problem
        self._problem: Problem | None = None
        self._loaded: LoadedWebConfig | None = None
        self._stamps: dict[str, object] = {}  # of the files in force; empty: read again in any case

    def current(self) -> LoadedWebConfig:
        """The configuration in force. Raises ``ConfigError`` when there has not been a good one yet."""
        if self._loaded is not None and self._is_unchanged():
            return self._loaded
        try:
            self._loaded = self._read()
        except ConfigError as error:
            self._stamps = {}
            self._report(Problem(Code.WEB_CONFIG_INVALID, str(error), self._path))
            if self._loaded is None:
                raise
        else:
            self._report(None)
        return self._loaded

    def _is_unchanged(self) -> bool:
        return bool(self._stamps) and all(self._stamp(path) == stamp for path, stamp in self._stamps.items())

    def _read(self) -> LoadedWebConfig:
        """Stamps are taken before the files are read, so that a change in between is seen the next time."""
        stamps = {self._path: self._stamp(self._path)}
        config = load(self._root, self._path)
        context = None
        if config.tls is not None:
            named = (config.tls.cert_file, config.tls.key_file, config.tls.client_ca_file)
            stamps.update({path: self._stamp(path) for path in named if path})
            context = make_context(self._root, self._path, config.tls)
        self._stamps = stamps
        return LoadedWebConfig(config, context)

    def _stamp(self, path: str) -> object:
        try:
            status = self._root.status(path)
        except CannotObserve as error:
            return error.reason
        return status and (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def _report(self, problem: Problem | None) -> None:
        if problem != self._problem:
            self._problem = problem
            self._on_problem(problem)

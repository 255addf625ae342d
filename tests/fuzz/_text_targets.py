"""Files that people write, and requests that strangers send: settings, web.yml, HTTP."""

import json

from _input import MemoryRoot, check

from fmsupervisor import config
from fmsupervisor.config_schema import keys
from fmsupervisor.errors import ConfigError
from fmsupervisor.report import basic_auth, http_message, web_config

_NAME = "/etc/fmsupervisor.toml"
_WEB = "/etc/web.yml"
_MOST_CHARACTERS = 400  # of one mistake, besides what is allowed


def settings_file(data: bytes) -> None:
    """ConfigError, one line per mistake, each naming the file; or settings that survive being written and read."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    try:
        loaded = config.load_text(text, _NAME)
    except ConfigError as error:
        mistakes = str(error).split("\n")
        check(all(line.startswith(_NAME) for line in mistakes), mistakes)
        check(all(line.isprintable() for line in mistakes), mistakes)
        check(max(map(len, mistakes)) < 1500, mistakes)
        return
    check(set(loaded.sources) >= {key.path for key in keys()}, "a key without a source")
    again = config.load_text(config.render_effective(loaded), _NAME)
    check(again.settings == loaded.settings, "it does not survive being written")
    check(hash(again.settings) == hash(loaded.settings), "equal and of another hash")


def web_yml(data: bytes) -> None:
    """ConfigError that names the file; or a configuration whose headers and users cannot forge anything."""
    try:
        found = web_config.load(MemoryRoot({_WEB: data}), _WEB)
    except ConfigError as error:
        text = str(error)
        check(_WEB in text and len(text) < 1000 + 4 * len(data), text)
        check("\n" not in text, text)
        return
    check(all(value.isprintable() for value in found.headers.values()), found.headers)
    check(all(basic_auth.is_bcrypt_hash(hashed) for hashed in found.users.values()), found.users)
    tls = found.tls
    if tls is not None:
        files = (tls.cert_file, tls.key_file, tls.client_ca_file)
        check(all(name == "" or name.startswith("/") for name in files), files)
        check(bool(tls.cert_file and tls.key_file) and tls.minimum <= tls.maximum, tls)
    response = http_message.render_response(
        http_message.plain(http_message.HTTPStatus.OK), found.headers, with_body=True
    )
    check(response.count(http_message.HEAD_END) == 1, response)


def http_request(data: bytes) -> None:
    """BadRequest or a request whose parts cannot forge a log line or a header."""
    head = data + http_message.HEAD_END
    try:
        request = http_message.parse_request(head)
    except http_message.BadRequest as error:
        check(400 <= error.status.value < 600, error.status)
        return
    parts = (request.method, request.path, *request.headers, *request.headers.values())
    check(not any(character in part for part in parts for character in "\r\n\0"), parts)
    check(all(name == name.lower() for name in request.headers), request.headers)
    json.dumps([*parts, request.has_body])
    credentials = basic_auth.parse_authorization(request.headers.get("authorization", ""))
    if credentials is not None:
        check(":" not in credentials.user, credentials)
        credentials.user.encode("utf-8", "backslashreplace")


def settings_seeds() -> list[bytes]:
    """The default file, and one with every kind of mistake."""
    assigned = [
        line[1:] for line in config.render_default().splitlines() if line.startswith(("#", "[")) and "=" in line
    ]
    return [
        config.render_default().encode(),
        config.render_effective(config.load_text("", _NAME)).encode(),
        b'layout = "packaged"\nprefix = "/opt/n"\n[fabric_manager.options]\nLOG_LEVEL = 3\nUNIX_SOCKET_PATH="/a"\n',
        b'[switches]\nexpected = 4\nwhen_missing = "fail"\n[restart]\nmaximum_delay_seconds = 1.5\ninitial_delay_seconds = 9\n',
        b'[[module]]\nx = """\n[fake]\n"""\nfabric_manager.fabric_mode = true\n',
        b'[fabric_manager]\nresiliency_restart = true\nlog_file = ""\n"ab\\u0000c" = 1979-05-27T07:32:00Z\n[a.b]\nc={d=[1e400,nan]}\n',
        *(line.encode() for line in assigned[:8]),
    ]


def web_yml_seeds() -> list[bytes]:
    """What the exporter-toolkit documents, and YAML's darker corners."""
    hashed = b"$2y$10$" + b"a" * 53
    return [
        b"tls_server_config:\n  cert_file: a.crt\n  key_file: /b.key\n  min_version: TLS13\n",
        b"tls_server_config: {cert_file: a, key_file: b, client_auth_type: RequireAndVerifyClientCert}\n",
        b"tls_server_config: {client_ca_file: c, client_allowed_sans: [x], cipher_suites: [TLS_AES_128_GCM_SHA256]}\n",
        b"http_server_config:\n  http2: false\n  headers:\n    X-Frame-Options: deny\n    Strict-Transport-Security: x\n",
        b"basic_auth_users:\n  alice: " + hashed + b"\n  bob: " + hashed + b"\n",
        b"a: &a [*a]\n<<: *a\n? [x]\n: !!python/object:os.system 1\n--- \n%YAML 9.9\n",
        b"rate_limit:\n  burst: 1\n\xff\xfea\0",
    ]


def http_request_seeds() -> list[bytes]:
    """A scrape, one with a password, and rubbish."""
    return [
        b"GET /metrics?x=1 HTTP/1.1\r\nHost: a\r\nAccept: text/plain\r\nContent-Length: 0",
        b"GET / HTTP/1.0\r\nAuthorization: Basic YWxpY2U6c2VjcmV0\r\nauthorization: x",
        b"\r\n\r\n",
        b"GET  / HTTP/2\r\n : x",
    ]

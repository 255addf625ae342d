"""web.yml: what is accepted, what is refused and with which words, and when it is read again."""

import asyncio
import threading
from pathlib import Path

import bcrypt
import pytest

from fmsupervisor.conditions import Code
from fmsupervisor.errors import ConfigError
from fmsupervisor.facts import Problem
from fmsupervisor.host.root import HostRoot
from fmsupervisor.report.basic_auth import Credentials, PasswordChecker, is_bcrypt_hash, parse_authorization
from fmsupervisor.report.web_config import TlsConfig, WebConfigFile, has_allowed_san, load

PATH = "/etc/fm/web.yml"
HASH = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
TLS = "tls_server_config:\n  cert_file: server.crt\n  key_file: keys/server.key\n"
MUTUAL = TLS + "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: /etc/pki/ca.crt\n"


def write(root: HostRoot, text: str | bytes) -> None:
    file = Path(root.path(PATH))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text.encode() if isinstance(text, str) else text)


@pytest.fixture
def root(tmp_path: Path) -> HostRoot:
    return HostRoot(str(tmp_path))


class TestAccepted:
    def test_an_empty_file_is_plain_http_for_everybody(self, root):
        write(root, "")
        config = load(root, PATH)
        assert (config.tls, dict(config.headers), dict(config.users)) == (None, {}, {})

    def test_file_names_are_relative_to_the_file(self, root):
        write(root, MUTUAL)
        tls = load(root, PATH).tls
        assert tls is not None
        assert (tls.cert_file, tls.key_file, tls.client_ca_file) == (
            "/etc/fm/server.crt",
            "/etc/fm/keys/server.key",
            "/etc/pki/ca.crt",
        )

    def test_everything_that_has_an_effect(self, root):
        write(
            root,
            MUTUAL + "  client_allowed_sans: [prometheus, 'fd00::1']\n"
            "  min_version: TLS12\n  max_version: TLS13\n  prefer_server_cipher_suites: true\n"
            "  cipher_suites:\n    - TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384\n    - TLS_AES_128_GCM_SHA256\n"
            "http_server_config:\n  http2: false\n  headers:\n    X-Frame-Options: deny\n    X-XSS-Protection: ''\n"
            f"basic_auth_users:\n  alice: {HASH}\n  123: {HASH}\n",
        )
        config = load(root, PATH)
        assert config.tls is not None
        assert config.tls.client_allowed_sans == {"prometheus", "fd00::1"}
        assert config.tls.ciphers == ("ECDHE-RSA-AES256-GCM-SHA384",)
        assert dict(config.headers) == {"X-Frame-Options": "deny"}
        assert dict(config.users) == {"alice": HASH, "123": HASH}

    def test_only_ciphers_of_tls_1_3_mean_tls_1_3(self, root):
        write(root, TLS + "  cipher_suites: [TLS_AES_128_GCM_SHA256]\n")
        tls = load(root, PATH).tls
        assert tls is not None
        assert tls.minimum.name == "TLSv1_3"


REFUSED = {
    "an unknown table": ("tls_server: {}\n", ":1: tls_server: there is no such key"),
    "an unknown key": (TLS + "  certfile: x\n", ":4: tls_server_config.certfile: there is no such key"),
    "a key twice": (TLS + "  cert_file: other\n", ":4: tls_server_config.cert_file: appears twice"),
    "a list for a table": ("tls_server_config: []\n", ":1: tls_server_config: expected a table"),
    "a table for a text": (
        "tls_server_config:\n  cert_file: {}\n",
        ":2: tls_server_config.cert_file: expected one line",
    ),
    "no key": ("tls_server_config:\n  cert_file: x\n", ": tls_server_config.key_file: is missing"),
    "no certificate": ("tls_server_config:\n  min_version: TLS12\n", ": tls_server_config.cert_file: is missing"),
    "an inline certificate": (TLS + "  cert: x\n", ".cert: is not supported: name the file in cert_file"),
    "curves": (TLS + "  curve_preferences: [X25519]\n", ".curve_preferences: is not supported"),
    "a rate limit": ("rate_limit:\n  burst: 1\n", ":2: rate_limit: is not supported"),
    "an old version": (TLS + "  min_version: TLS10\n", ":4: tls_server_config.min_version: found 'TLS10', allowed are"),
    "versions upside down": (TLS + "  min_version: TLS13\n  max_version: TLS12\n", "is newer than max_version"),
    "an unknown cipher": (TLS + "  cipher_suites: [RC4]\n", "cipher_suites: unknown cipher 'RC4'"),
    "ciphers that cannot be": (
        TLS + "  min_version: TLS12\n  cipher_suites: [TLS_AES_128_GCM_SHA256]\n",
        "none of them is of TLS 1.2",
    ),
    "unverified certificates": (TLS + "  client_auth_type: RequireAnyClientCert\n", "without verifying them"),
    "requested certificates": (TLS + "  client_auth_type: RequestClientCert\n", "without verifying them"),
    "an unknown type": (TLS + "  client_auth_type: Maybe\n", "found 'Maybe', allowed are NoClientCert"),
    "an authority without a type": (TLS + "  client_ca_file: x\n", "client_ca_file: has no effect without"),
    "a type without an authority": (
        TLS + "  client_auth_type: VerifyClientCertIfGiven\n",
        "client_ca_file: is missing; client_auth_type needs it",
    ),
    "names without certificates": (TLS + "  client_allowed_sans: [a]\n", "client_allowed_sans: needs client_auth_type"),
    "a text for a list": (MUTUAL + "  client_allowed_sans: a\n", "client_allowed_sans: expected a list"),
    "a header of one's own": ("http_server_config:\n  headers:\n    X-Own: a\n", "headers.X-Own: there is no such key"),
    "a header's value": ("http_server_config:\n  headers:\n    X-Frame-Options: any\n", "allowed are deny, sameorigin"),
    "a header with a line break": (
        'http_server_config:\n  headers:\n    X-XSS-Protection: "0\\r\\nSet-Cookie: a"\n',
        "expected one line",
    ),
    "http2 in words": ("http_server_config:\n  http2: perhaps\n", "http2: expected true or false"),
    "a password in clear": ("basic_auth_users:\n  alice: secret\n", "basic_auth_users.alice: is not a bcrypt hash"),
    "no YAML": ("a: [", "cannot use /etc/fm/web.yml: "),
    "binary": (b"\x00\xff\xfe", "cannot use /etc/fm/web.yml: "),
    "a tower": ("[" * 20_000, "cannot use /etc/fm/web.yml: "),
    "too much": ("#" * 70_000, "is larger than"),
    "a word": ("secret", "expected a table"),
}


class TestRefused:
    @pytest.mark.parametrize(("text", "words"), REFUSED.values(), ids=REFUSED.keys())
    def test_names_the_file_and_the_key(self, root, text, words):
        write(root, text)
        with pytest.raises(ConfigError) as caught:
            load(root, PATH)
        assert words in str(caught.value)
        assert PATH in str(caught.value)

    def test_a_password_is_not_repeated(self, root):
        write(root, "basic_auth_users:\n  alice: hunter2\n")
        with pytest.raises(ConfigError) as caught:
            load(root, PATH)
        assert "hunter2" not in str(caught.value)

    def test_a_missing_file(self, root):
        with pytest.raises(ConfigError, match="does not exist"):
            load(root, PATH)


class TestReadingAgain:
    def test_a_file_that_never_was_good_is_an_error_and_told_once(self, root):
        told: list[Problem | None] = []
        file = WebConfigFile(root, PATH, told.append)
        for _ in range(3):
            with pytest.raises(ConfigError):
                file.current()
        assert [problem and problem.code for problem in told] == [Code.WEB_CONFIG_INVALID]

    def test_the_last_good_one_stays_in_force_until_the_file_is_good_again(self, root):
        told: list[Problem | None] = []
        write(root, f"basic_auth_users:\n  alice: {HASH}\n")
        file = WebConfigFile(root, PATH, told.append)
        good = file.current()
        assert file.current() is good
        write(root, "basic_auth_users: wrong\n")
        assert file.current() is good
        write(root, TLS)  # well-formed, but there are no such certificates
        assert file.current() is good
        write(root, f"basic_auth_users:\n  bob: {HASH}\n")
        assert set(file.current().config.users) == {"bob"}
        assert [problem and problem.code for problem in told] == [
            Code.WEB_CONFIG_INVALID,
            Code.WEB_CONFIG_INVALID,
            None,
        ]
        assert "server.crt" in str(told[1])


class TestAllowedNames:
    @pytest.mark.parametrize(
        ("allowed", "names", "expected"),
        [
            (None, (), True),
            ((), (("DNS", "a"),), False),
            (("a",), (("DNS", "b"), ("DNS", "a")), True),
            (("a",), (("DNS", "a.b"),), False),
            (("fd00::1",), (("IP Address", "FD00:0:0:0:0:0:0:1"),), True),
            (("10.0.0.1",), (("IP Address", "10.0.0.1"),), True),
            (("x",), (("IP Address", "<invalid>"),), False),
            (("spiffe://a/b",), (("URI", "spiffe://a/b"),), True),
            (("a@b",), (("email", "a@b"),), True),
            (("a",), (("DirName", ((("commonName", "a"),),)),), False),
        ],
    )
    def test_one_exact_name_is_enough(self, root, allowed, names, expected):
        write(root, MUTUAL + (f"  client_allowed_sans: {list(allowed)}\n" if allowed is not None else ""))
        tls = load(root, PATH).tls
        assert isinstance(tls, TlsConfig)
        assert has_allowed_san(tls, {"subjectAltName": names}) is expected

    def test_no_certificate_has_no_name(self, root):
        write(root, MUTUAL + "  client_allowed_sans: [a]\n")
        tls = load(root, PATH).tls
        assert isinstance(tls, TlsConfig)
        assert not has_allowed_san(tls, None)


class TestPasswords:
    @pytest.mark.parametrize(
        ("header", "expected"),
        [
            ("Basic YWxpY2U6c2VjcmV0", Credentials("alice", b"secret")),
            ("basic YTpiOmM=", Credentials("a", b"b:c")),
            ("Basic Og==", Credentials("", b"")),
            ("", None),
            ("Bearer YWxpY2U6c2VjcmV0", None),
            ("Basic YWxpY2U=", None),
            ("Basic !!!", None),
            ("Basic ä", None),
        ],
    )
    def test_header(self, header, expected):
        assert parse_authorization(header) == expected

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            (HASH, True),
            (HASH.replace("$2b$", "$2y$"), True),
            (HASH.replace("$2b$", "$1$"), False),
            (HASH.replace("$04$", "$03$"), False),
            (HASH + "\n", False),
            (HASH[:-1], False),
        ],
        ids=["bcrypt", "2y", "other scheme", "too cheap", "newline", "too short"],
    )
    def test_hash(self, text, expected):
        assert is_bcrypt_hash(text) is expected

    @pytest.mark.parametrize(
        ("user", "password", "expected"),
        [
            ("alice", b"secret", True),
            ("alice", b"Secret", False),
            ("alice", b"", False),
            ("alice", b"\0", False),
            ("alice", b"x" * 1000, False),
            ("mallory", b"secret", False),
        ],
    )
    def test_verdict_is_the_same_the_first_time_and_from_memory(self, user, password, expected):
        async def ask_twice() -> list[bool]:
            checker = PasswordChecker()
            users = {"alice": HASH}
            answers = [await checker.is_right(users, Credentials(user, password)) for _ in range(2)]
            checker.stop()
            return answers

        assert asyncio.run(ask_twice()) == [expected, expected]

    def test_a_password_of_more_than_72_bytes_is_compared_as_bcrypt_does(self):
        hashed = bcrypt.hashpw(b"x" * 72, bcrypt.gensalt(4)).decode()

        async def ask() -> bool:
            checker = PasswordChecker()
            try:
                return await checker.is_right({"alice": hashed}, Credentials("alice", b"x" * 100))
            finally:
                checker.stop()

        assert asyncio.run(ask())

    def test_what_is_known_is_not_computed_again_and_wrong_ones_do_not_push_out_right_ones(self):
        slow = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()

        async def ask() -> int:
            checker = PasswordChecker()
            users = {"alice": slow}
            assert await checker.is_right(users, Credentials("alice", b"secret"))
            for number in range(100):
                assert not await checker.is_right(users, Credentials("alice", b"%d" % number))
            checker.stop()  # the next call would begin a new thread
            before = threading.active_count()
            assert await checker.is_right(users, Credentials("alice", b"secret"))
            return threading.active_count() - before

        assert asyncio.run(ask()) <= 0

    def test_a_changed_hash_makes_old_verdicts_worthless(self):
        other = bcrypt.hashpw(b"other", bcrypt.gensalt(4)).decode()

        async def ask() -> list[bool]:
            checker = PasswordChecker()
            credentials = Credentials("alice", b"secret")
            answers = [await checker.is_right({"alice": hashed}, credentials) for hashed in (HASH, other)]
            checker.stop()
            return answers

        assert asyncio.run(ask()) == [True, False]

"""What the report takes out of a text, and what it leaves."""

import ipaddress
import json
import string
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmsupervisor.conditions import REGISTRY, Code
from fmsupervisor.support.archive import redact_pieces
from fmsupervisor.support.piece import Piece
from fmsupervisor.support.redaction import Redactor

UUID = "11112222-3333-4444-5555-666677778886"


def redact(text: str, *host_names: str) -> str:
    redactor = Redactor(host_names)
    redactor.learn(text)
    return redactor.redact(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(f"added GPU with UUID GPU-{UUID} based", "added GPU with UUID GPU-1 based", id="gpu"),
        pytest.param("UUID : SWX-0A1B2C3D-0000-1111-2222-333344445550", "UUID : SWX-1", id="switch"),
        pytest.param("UUID: GPU-11112222-3333-44", "UUID: GPU-1", id="gpu-that-was-cut"),
        pytest.param(f"MIG-GPU-{UUID}/1/0", "MIG-GPU-1/1/0", id="mig"),
        pytest.param(f"root=UUID={UUID} ro", "root=UUID=uuid-1 ro", id="any-uuid"),
        pytest.param(f"{UUID} is GPU-{UUID}", "GPU-1 is GPU-1", id="uuid-with-and-without-its-prefix"),
        pytest.param(f"GPU-{UUID} GPU-{UUID.upper()}", "GPU-1 GPU-1", id="in-capitals"),
        pytest.param("-- Boot 0123456789abcdef0123456789abcdef --", "-- Boot uuid-1 --", id="boot-id"),
        pytest.param("NVRM: GPU Board Serial Number: 1654321000123", "NVRM: GPU Board Serial Number: serial-1", id="serial"),
        pytest.param("S/N: X12 board ABC-1234567 Serial: ABC-1234567.", "S/N: serial-1 board serial-2 Serial: serial-2.", id="serials-elsewhere"),
        pytest.param("<serial>1654321000</serial>", "<serial>serial-1</serial>", id="serial-in-xml"),
        pytest.param("NVLink GUID: 0x5000c500a1b2c3d4", "NVLink GUID: serial-1", id="guid"),
        pytest.param("from 10.1.2.3:6666 to 10.1.2.3.", "from ip-1:6666 to ip-1.", id="ipv4"),
        pytest.param("[fe80::1%eth0]:99, 2001:db8:0::5: no route", "[ip-1%eth0]:99, ip-2: no route", id="ipv6"),
        pytest.param("::ffff:10.1.2.3 and 2001:DB8::5 is 2001:db8:0:0::5", "ip-1 and ip-2 is ip-2", id="ipv6-forms"),
        pytest.param("ether 02:42:ac:11:00:02 or 02-42-AC-11-00-02", "ether mac-1 or mac-1", id="mac"),
        pytest.param("by alice.b@corp.example.com and root@builder", "by email-1 and email-2", id="email"),
        pytest.param("/home/alice/x /home/bob /var/home/alice", "/home/user-1/x /home/user-2 /var/home/user-1", id="users"),
        pytest.param("Dec 19 22:08:53 node17 kernel: x", "Dec 19 22:08:53 host-1 kernel: x", id="host-of-syslog"),
    ],
)  # fmt: skip
def test_what_is_private_is_replaced(text: str, expected: str) -> None:
    assert redact(text) == expected


def test_a_host_is_one_host_in_full_in_short_and_in_capitals() -> None:
    text = "hgx07.prod.example.com hgx07 HGX07-mgmt xhgx07 other.prod.example.com"
    assert redact(text, "hgx07.prod.example.com\n") == "host-1 host-1 host-1-mgmt xhgx07 other.host-2"


@pytest.mark.parametrize(
    "text",
    [
        "0000:83:00.0 00000000:9B:00.0 PCI:0000:06:00.0 10de:22a3",
        "22:08:53 Dec 19 2024 22:08:53 2026-11-30T14:45:08Z",
        "127.0.0.1 ::1 0.0.0.0 [::]:9752 localhost",
        "driver 595.71.05, kernel 6.12.0-160000.28-default, std::bad_alloc",
        "SXid (PCI:0000:86:00.0): 20034, Data {0x10000000, 0x00000000}",
        "user@1000.service getty@tty1.service",
        "GPU-I:05 the GPU-added line",
        "Dec 19 22:08:53 localhost nv-fabricmanager[7]: x",
        f"MESSAGE_ID={REGISTRY[Code.SXID_FATAL].message_id}",
        "Enabled Link Mask: ffffffff00000000 Handle: 33403c39190f91b6",
    ],
)
def test_what_tells_of_the_fault_stays(text: str) -> None:
    assert redact(text) == text


def test_a_document_is_redacted_by_its_structure() -> None:
    document = {
        "serial": "A1", "board_serial_number": 165432100, "uuid": f"GPU-{UUID}", "pid": 7, "ok": True, "none": None,
        "lines": ["first\nfe80::1 is down", {f"GPU-{UUID}": 1.5}],
    }  # fmt: skip
    (piece,) = redact_pieces([Piece("x.json", json.dumps(document).encode())], Redactor())
    assert json.loads(piece.content) == {
        "serial": "serial-1", "board_serial_number": "serial-2", "uuid": "GPU-1", "pid": 7, "ok": True, "none": None,
        "lines": ["first\nip-1 is down", {"GPU-1": 1.5}],
    }  # fmt: skip


def test_equal_things_are_equal_in_all_pieces_names_and_notes() -> None:
    pieces = [
        Piece(f"gpus/GPU-{UUID}", b"no label here: 1654321000123\n", note="10.0.0.1"),
        Piece("log", f"GPU-{UUID} Serial Number: 1654321000123 at 10.0.0.1\n".encode()),
    ]
    first, second = redact_pieces(pieces, Redactor())
    assert (first.name, first.content, first.note) == ("gpus/GPU-1", b"no label here: serial-1\n", "ip-1")
    assert second.content == b"GPU-1 Serial Number: serial-1 at ip-1\n"


hexadecimal = st.text("0123456789abcdef", min_size=32, max_size=32)
uuids = hexadecimal.map(lambda text: f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}")
secrets = st.one_of(
    st.builds("{}{}".format, st.sampled_from(["GPU-", "SWX-", "MIG-GPU-", ""]), uuids),
    st.ip_addresses(v=4).filter(lambda each: not each.is_loopback and int(each) not in (0, 2**32 - 1)).map(str),
    st.ip_addresses(v=6).filter(lambda each: int(each) > 1).map(str),
    st.ip_addresses(v=6).filter(lambda each: int(each) > 1).map(lambda each: each.exploded.upper()),
    st.binary(min_size=6, max_size=6).map(lambda octets: octets.hex(":")),
    st.builds("Serial Number: {}".format, st.from_regex(r"[A-Z0-9]{3}[0-9]{7,12}", fullmatch=True)),
    st.builds("/home/{}/x".format, st.from_regex(r"[a-z_][a-z0-9_-]{3,12}", fullmatch=True)),
    st.builds("{}@example.org".format, st.from_regex(r"[a-z][a-z0-9._]{2,12}", fullmatch=True)),
)
around = st.text(st.sampled_from(string.ascii_letters + " \n\t,;()[]{}=<>'\"|"), max_size=12)
ends = st.sampled_from([" ", "\n", "\t", "(", ")", "[", "]", "=", ",", ";", "'", '"', "<", ">", "|", "_"])


def core(secret: str) -> str:
    """What must not be found any more."""
    for head in ("Serial Number: ", "/home/", "GPU-", "SWX-", "MIG-GPU-"):
        secret = secret.removeprefix(head)
    return secret.removesuffix("/x").removesuffix("@example.org")


@settings(deadline=None)
@given(st.lists(st.tuples(around, ends, secrets, ends, around), min_size=1, max_size=8))
def test_nothing_private_survives_wherever_it_stands(parts: list[tuple[str, str, str, str, str]]) -> None:
    text = "".join(f"{before}{left}{secret}{right}{after}" for before, left, secret, right, after in parts)
    redacted = redact(text)
    for _, _, secret, _, _ in parts:
        if len(core(secret)) > 4 and not core(secret).isalpha():
            assert core(secret).lower() not in redacted.lower(), secret


@settings(deadline=None)
@given(st.lists(uuids, min_size=1, max_size=6), st.lists(st.integers(0, 5), max_size=20))
def test_equal_uuids_get_equal_names_and_different_ones_different(known: list[str], picks: list[int]) -> None:
    chosen = [known[pick % len(known)] for pick in picks]
    names = redact(" ".join(f"GPU-{uuid}" for uuid in chosen)).split()
    assert len(names) == len(chosen)
    for name, uuid in zip(names, chosen, strict=True):
        assert (name == names[chosen.index(uuid)]) is True
    assert len(set(names)) == len(set(chosen))


@settings(deadline=None)
@given(st.text(max_size=300))
def test_no_text_makes_it_fail(text: str) -> None:
    redact(text, text[:20], "x.y")


@settings(deadline=None)
@given(st.ip_addresses(v=6))
def test_pci_bus_ids_stay_beside_any_address(address: ipaddress.IPv6Address) -> None:
    assert "0000:83:00.0" in redact(f"{address} 0000:83:00.0 {address}")


@pytest.mark.parametrize(
    "unit",
    [
        "a",
        "ab:",
        "a" * 100 + " ",
        "serial ",
        "1.2.3.4 ",
        "GPU-abcd",
        "1.",
        "/home/",
        "@",
        "a@",
        "fe80::",
        "0" * 33 + " ",
    ],
)
def test_a_hostile_text_takes_time_in_proportion_to_its_length(unit: str) -> None:
    def seconds(length: int) -> float:
        text = unit * (length // len(unit)) + "@"
        begin = time.process_time()
        redact(text, "host.example")
        return time.process_time() - begin

    seconds(1000)
    assert seconds(200_000) < 40 * max(seconds(20_000), 0.01)

"""Passwords of HTTP basic authentication, kept as bcrypt hashes.

bcrypt is slow on purpose, so its verdicts are remembered: of right passwords, of which there are few, apart from wrong
ones, of which an attacker can make any number. What is remembered is a digest with a key drawn at start; an attacker
cannot predict it and so learns nothing from the time of the look-up. An unknown user costs as much as a known one.
"""

import hashlib
import os
import re
from binascii import Error as Base64Error
from binascii import a2b_base64
from collections.abc import Mapping
from dataclasses import dataclass

_REMEMBERED = 64
_BCRYPT_BYTES = 72  # bcrypt looks at no more; recent versions of the package refuse longer passwords
_HASH = re.compile(r"\$2[aby]\$(0[4-9]|[12]\d|3[01])\$[./A-Za-z0-9]{53}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a client sent."""

    user: str
    password: bytes


def is_bcrypt_hash(text: str) -> bool:
    """Whether ``text`` is a hash that the bcrypt package can check."""
    return _HASH.fullmatch(text) is not None


def parse_authorization(header: str) -> Credentials | None:
    """The credentials in an Authorization header; None when it is not well-formed basic authentication (RFC 7617)."""
    scheme, _, token = header.strip().partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        user, colon, password = a2b_base64(token.strip(), strict_mode=True).partition(b":")
    except (Base64Error, ValueError):
        return None
    return Credentials(user.decode("utf-8", "backslashreplace"), password) if colon else None


class PasswordMemory:
    """Checks credentials and remembers the verdicts. ``verify`` is the slow half and may run in another thread."""

    def __init__(self) -> None:
        self._key = os.urandom(32)
        self._right: dict[bytes, None] = {}
        self._wrong: dict[bytes, None] = {}

    def recall(self, users: Mapping[str, str], credentials: Credentials) -> bool | None:
        """The verdict on these credentials when it is known, else None."""
        digest = self._digest(users, credentials)
        if digest in self._right:
            return True
        return False if digest in self._wrong else None

    def verify(self, users: Mapping[str, str], credentials: Credentials) -> bool:
        """Check with bcrypt (tens of milliseconds to seconds, by the cost in the hash) and remember."""
        import bcrypt  # noqa: PLC0415 - only where passwords are configured

        is_known = credentials.user in users
        hashed = users[credentials.user] if is_known else next(iter(users.values()))
        try:
            is_match = bcrypt.checkpw(credentials.password[:_BCRYPT_BYTES], hashed.encode("ascii"))
        except ValueError:  # a NUL byte, in some versions
            is_match = False
        is_right = is_known and is_match
        memory = self._right if is_right else self._wrong
        memory[self._digest(users, credentials)] = None
        while len(memory) > _REMEMBERED:
            del memory[next(iter(memory))]
        return is_right

    def _digest(self, users: Mapping[str, str], credentials: Credentials) -> bytes:
        """Includes the hash in force: a changed password file makes the old verdicts worthless."""
        user = credentials.user.encode("utf-8", "backslashreplace")
        parts = (user, users.get(credentials.user, "").encode("ascii"), credentials.password)
        framed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hashlib.blake2b(framed, key=self._key).digest()

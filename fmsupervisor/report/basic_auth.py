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
from functools import partial

from fmsupervisor.report.worker import Worker

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


class PasswordChecker:
    """Checks credentials and remembers the verdicts. Belongs to one event loop.

    bcrypt runs in one thread of its own, one check after the other: a flood of wrong passwords costs one core at most
    and does not hold up what is known already.
    """

    def __init__(self) -> None:
        self._key = os.urandom(32)
        self._right: dict[bytes, None] = {}
        self._wrong: dict[bytes, None] = {}
        self._worker = Worker("passwords")

    async def is_right(self, users: Mapping[str, str], credentials: Credentials) -> bool:
        """Whether ``users`` (name to bcrypt hash, not empty) has this user with this password."""
        digest = self._digest(users, credentials)
        known = self._recall(digest)
        if known is not None:
            return known
        is_known_user = credentials.user in users
        hashed = users[credentials.user] if is_known_user else next(iter(users.values()))
        is_match = await self._worker.call(partial(_is_match, hashed, credentials.password))
        is_right = is_match and is_known_user
        self._remember(digest, is_right=is_right)
        return is_right

    def stop(self) -> None:
        """End the thread after the check that it is at."""
        self._worker.stop()

    def _recall(self, digest: bytes) -> bool | None:
        if digest in self._right:
            return True
        return False if digest in self._wrong else None

    def _remember(self, digest: bytes, *, is_right: bool) -> None:
        memory = self._right if is_right else self._wrong
        memory[digest] = None
        while len(memory) > _REMEMBERED:
            del memory[next(iter(memory))]

    def _digest(self, users: Mapping[str, str], credentials: Credentials) -> bytes:
        """Includes the hash in force: a changed password file makes the old verdicts worthless."""
        user = credentials.user.encode("utf-8", "backslashreplace")
        parts = (user, users.get(credentials.user, "").encode("ascii"), credentials.password)
        framed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hashlib.blake2b(framed, key=self._key).digest()


def _is_match(hashed: str, password: bytes) -> bool:
    import bcrypt  # noqa: PLC0415 - only where passwords are configured

    try:
        return bcrypt.checkpw(password[:_BCRYPT_BYTES], hashed.encode("ascii"))
    except ValueError:  # a NUL byte, in some versions
        return False

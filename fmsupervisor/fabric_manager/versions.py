"""NVIDIA's version numbers, where programs and libraries tell them. Pure."""

import re

_PRINTED = re.compile(r"version\D*?(\d+\.\d+(?:\.\d+)?)", re.IGNORECASE)
_FILE_NAME = re.compile(r"\.so\.(\d{3,}\.\d+(?:\.\d+)?)$")
_EMBEDDED = re.compile(rb"\0(\d{3,4}\.\d{2,3}(?:\.\d{2})?)\0")


def printed_version(text: str) -> str | None:
    """The version in the output of nv-fabricmanager --version ("Fabric Manager version is : 610.57.04")."""
    found = _PRINTED.search(text)
    return found[1] if found else None


def version_of_file_name(path: str) -> str | None:
    """The driver version at the end of a library's file name; None for a mere ABI number as in .so.2.0."""
    found = _FILE_NAME.search(path)
    return found[1] if found else None


def embedded_version(content: bytes) -> str | None:
    """The driver version among a library's strings, if there is exactly one that looks like it."""
    found = set(_EMBEDDED.findall(content))
    return found.pop().decode() if len(found) == 1 else None

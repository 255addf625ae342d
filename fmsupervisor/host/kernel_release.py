"""Kernel releases: which belong together, and which of two was built earlier. Pure functions on names.

A release is ``<upstream version>-<build numbers><flavour>``: 6.12.0-160000.28-default (SUSE), 6.8.0-31-generic
(Ubuntu), 5.14.0-427.13.1.el9_4.x86_64 (RHEL), 6.1.0-18-amd64 (Debian). Distributions keep the kernel ABI stable
between the builds of one family, so a module of an older build can be loaded; a newer one may use what the running
kernel does not have yet. Two releases are of one family when upstream version and flavour are equal. SUSE promises
the ABI within a service pack only ("codestream"), whose number leads the build numbers (150500, 160000), so it
belongs to the family, too. RHEL's minor release (el9_4) does not: its ABI list holds for the major release.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

_RELEASE = re.compile(r"(?P<upstream>\d+(?:\.\d+)+)(?:-(?P<build>\d+(?:\.\d+)*))?(?P<flavour>.*)", re.DOTALL)
_RHEL_MINOR = re.compile(r"(\.el\d+)_\d+")
_SMALLEST_CODESTREAM = 100_000  # SUSE: 150000 is SLE 15, 150500 its fifth service pack


@dataclass(frozen=True, slots=True)
class KernelRelease:
    """One release, taken apart."""

    text: str
    family: tuple[str, str, int]  # upstream version, flavour, SUSE's codestream (else 0)
    build: tuple[int, ...]


class Verdict(StrEnum):
    """What a build is in relation to the running kernel."""

    EXACT = "exact"
    OLDER = "older"
    NEWER = "newer"
    OTHER_FAMILY = "other-family"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One build that was considered. ``reason`` completes the sentence "6.12.0-160000.29-default ..."."""

    release: str
    verdict: Verdict
    reason: str


def parse(text: str) -> KernelRelease:
    """Take a release apart. A name that is no release becomes a family of its own."""
    found = _RELEASE.fullmatch(text)
    if found is None:
        return KernelRelease(text, ("", text, 0), ())
    build = tuple(_number(digits) for digits in (found["build"] or "").split(".") if digits)
    codestream = build[0] if build and build[0] >= _SMALLEST_CODESTREAM else 0
    flavour = _RHEL_MINOR.sub(r"\1", found["flavour"])
    return KernelRelease(text, (found["upstream"], flavour, codestream), build)


def compare(release: str, running: str) -> Verdict:
    """What a build for ``release`` is to the ``running`` kernel."""
    if release == running:
        return Verdict.EXACT
    one, other = parse(release), parse(running)
    if one.family != other.family:
        return Verdict.OTHER_FAMILY
    return Verdict.NEWER if (one.build, release) > (other.build, running) else Verdict.OLDER


def consider(running: str, releases: Iterable[str], *, allow_newer: bool = False) -> tuple[Candidate, ...]:
    """All builds in order of preference, each with the reason for its place.

    The first one is to be used if its verdict allows that: exact, older, or newer with ``allow_newer``.
    """
    verdicts = {release: compare(release, running) for release in releases}

    def of(verdict: Verdict, *, nearest_is_greatest: bool) -> list[str]:
        found = [release for release, its in verdicts.items() if its is verdict]
        return sorted(found, key=lambda release: (parse(release).build, release), reverse=nearest_is_greatest)

    candidates = [
        Candidate(release, Verdict.EXACT, "is the running kernel")
        for release in of(Verdict.EXACT, nearest_is_greatest=True)
    ]
    for place, release in enumerate(of(Verdict.OLDER, nearest_is_greatest=True)):
        which = "the nearest older build" if place == 0 else "an older build"
        candidates.append(Candidate(release, Verdict.OLDER, f"is {which} of the same family"))
    for place, release in enumerate(of(Verdict.NEWER, nearest_is_greatest=False)):
        if not allow_newer:
            reason = "is newer"
        else:
            reason = (
                f"is {'the nearest' if place == 0 else 'a'} newer build of the same family, which the settings allow"
            )
        candidates.append(Candidate(release, Verdict.NEWER, reason))
    candidates += [
        Candidate(release, Verdict.OTHER_FAMILY, "is of another family")
        for release in of(Verdict.OTHER_FAMILY, nearest_is_greatest=True)
    ]
    return tuple(candidates)


def _number(digits: str) -> int:
    """As ``int``, also for absurdly long numbers, which Python refuses to convert."""
    return int(digits[:18])

"""docs/checks.md is made from the table of checks."""

import os
from pathlib import Path

from fmsupervisor.checks.reference import render_reference
from fmsupervisor.checks.registry import GUEST_CHECKS, HOST_CHECKS

DOCUMENT = Path(__file__).parents[3] / "docs/checks.md"


def test_the_document_is_current() -> None:
    if os.environ.get("RENEW_GOLDEN"):
        DOCUMENT.write_text(render_reference())
    assert render_reference() == DOCUMENT.read_text()


def test_every_check_explains_itself() -> None:
    for check in (*HOST_CHECKS, *GUEST_CHECKS):
        assert (check.function.__doc__ or "").strip().endswith(".")
        assert check.title

"""docs/faults.md, and that what it names exists."""

import os
from pathlib import Path

import pytest

from tests.faults.document import render_faults
from tests.faults.matrix import ELSEWHERE, Elsewhere

REPOSITORY = Path(__file__).parents[2]
DOCUMENT = REPOSITORY / "docs/faults.md"


def test_the_document_is_current() -> None:
    if os.environ.get("RENEW_GOLDEN"):
        DOCUMENT.write_text(render_faults())
    assert render_faults() == DOCUMENT.read_text()


@pytest.mark.parametrize("row", ELSEWHERE, ids=lambda row: row.test)
def test_a_test_that_is_named_exists(row: Elsewhere) -> None:
    path, *names = row.test.split("::")
    text = (REPOSITORY / path).read_text()
    assert [name for name in names if f" {name}" not in text] == []

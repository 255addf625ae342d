"""The registry of conditions and the document made from it."""

import os
import re
from pathlib import Path

import pytest

from fmsupervisor.conditions import REGISTRY, Code, Condition
from fmsupervisor.runbook import render_runbook

RUNBOOK = Path(__file__).parents[2] / "docs/runbook.md"


def test_the_runbook_is_current() -> None:
    if os.environ.get("RENEW_GOLDEN"):
        RUNBOOK.write_text(render_runbook())
    assert render_runbook() == RUNBOOK.read_text()


def test_every_code_is_in_the_registry() -> None:
    assert set(REGISTRY) == set(Code)


def test_message_ids_are_unique() -> None:
    ids = [condition.message_id for condition in REGISTRY.values()]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("condition", REGISTRY.values(), ids=lambda condition: condition.code)
def test_an_entry_is_complete(condition: Condition) -> None:
    assert re.fullmatch(r"FMS-\d{3}", condition.code)
    assert re.fullmatch(r"[0-9a-f]{32}", condition.message_id)
    assert not condition.title.endswith(".")
    for sentence in (condition.cause, condition.remedy):
        assert sentence[-1] in ".)"
        assert "\n" not in sentence

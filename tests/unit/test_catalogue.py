"""The journal catalogue: made from the registries, current, and understood by the real journalctl."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from fmsupervisor.catalogue import render_catalogue
from fmsupervisor.conditions import REGISTRY, Code
from fmsupervisor.report.journal import Event

CATALOGUE = Path(__file__).parents[2] / "systemd/fmsupervisor.catalog"
MESSAGE_IDS = {*(event.value for event in Event), *(condition.message_id for condition in REGISTRY.values())}
# In every entry of the kind: see log_condition and its neighbours in report/journal.py.
FIELDS = {
    "FMSUPERVISOR_CONDITION", "FMSUPERVISOR_SEVERITY", "FMSUPERVISOR_REMEDY", "FMSUPERVISOR_STATE", "FMSUPERVISOR_REASON",
    "FM_PID", "FM_SESSION", "FM_EXIT_CLASS", "FM_SOURCE", "KERNEL_KIND",
}  # fmt: skip


def entry(message_id: str) -> str:
    return next(text for text in render_catalogue().split("\n-- ") if text.startswith(message_id))


def test_the_catalogue_is_current() -> None:
    if os.environ.get("RENEW_GOLDEN"):
        CATALOGUE.write_text(render_catalogue())
    assert render_catalogue() == CATALOGUE.read_text()


def test_it_has_each_event_and_each_condition_once() -> None:
    ids = re.findall(r"^-- (\w+)$", render_catalogue(), re.MULTILINE)
    assert set(ids) == MESSAGE_IDS
    assert len(ids) == len(MESSAGE_IDS)


def test_only_fields_that_an_entry_always_has_are_named() -> None:
    assert set(re.findall(r"@(\w*)@", render_catalogue())) == FIELDS
    assert render_catalogue().count("@") % 2 == 0


def test_a_condition_says_cause_remedy_and_what_happens_meanwhile() -> None:
    condition = REGISTRY[Code.SWITCH_LOST]
    text = " ".join(entry(condition.message_id).split())
    for sentence in (condition.title, condition.cause, f"What to do: {condition.remedy}", "Meanwhile: "):
        assert sentence in text


@pytest.fixture(scope="module")
def journalctl(tmp_path_factory: pytest.TempPathFactory):
    if shutil.which("journalctl") is None:
        pytest.skip("no journalctl here")
    root = tmp_path_factory.mktemp("root")
    for directory in ("usr/local/lib/systemd/catalog", "usr/lib/systemd/catalog", "var/lib/systemd/catalog"):
        (root / directory).mkdir(parents=True)
    shutil.copy(CATALOGUE, root / "usr/local/lib/systemd/catalog")

    def journalctl(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command: Sequence[str] = ("journalctl", f"--root={root}", *arguments)
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)

    made = journalctl("--update-catalog")
    assert (made.returncode, made.stderr) == (0, "")
    return journalctl


def test_the_real_journalctl_accepts_it_below_usr_local(journalctl) -> None:
    listed = dict(line.split(" ", 1) for line in journalctl("--list-catalog").stdout.splitlines())
    assert set(listed) == MESSAGE_IDS
    condition = REGISTRY[Code.SXID_FATAL]
    assert listed[condition.message_id] == f"fmsupervisor: FMS-601 {condition.title}"


def test_the_real_journalctl_shows_the_whole_text(journalctl) -> None:
    condition = REGISTRY[Code.SXID_FATAL]
    shown = journalctl("--dump-catalog", condition.message_id).stdout
    assert condition.cause in " ".join(shown.split())
    assert condition.remedy in " ".join(shown.split())

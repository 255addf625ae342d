"""The native protocol against a real systemd-journald, in mount and network namespaces of its own."""

import json
import os
import shutil
import subprocess
import sys

import pytest

JOURNALD = "/lib/systemd/systemd-journald"

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(
        os.geteuid() != 0 or not os.path.exists(JOURNALD) or not shutil.which("unshare"),
        reason="needs root, unshare and systemd-journald",
    ),
]

WRITE = """
from fmsupervisor.conditions import Code
from fmsupervisor.facts import ExitStatus, Problem
from fmsupervisor.report import journal
from fmsupervisor.settings import LoggingSettings

journal.configure_logging(LoggingSettings(format="journal"), {})
journal.log_condition(Problem(Code.SWITCH_LOST, "gone", "0000:07:00.0"), raised=True)
journal.log_fabric_manager_exited(7, "s-1", "unexpected", ExitStatus(code=1), "died", ("one", "two"))
journal.log_event(journal.Event.NODES_CHANGED, "info", "line \\u00fc\\n" * 300_000, nodes=("a", "b"))
assert journal.dropped_messages() == 0
"""

# No kernel log, no audit, no syslog: this journald must not touch the machine that runs the tests.
SCRIPT = f"""
mount -t tmpfs none /run && mkdir -p /run/systemd/journal /run/systemd/journald.conf.d || exit 77
printf '[Journal]\\nStorage=volatile\\nAudit=no\\nReadKMsg=no\\nForwardToSyslog=no\\nForwardToWall=no\\n' \
  >/run/systemd/journald.conf.d/test.conf
{JOURNALD} & journald=$!
trap 'kill $journald; wait $journald' EXIT
tries=0
until [ -S /run/systemd/journal/socket ] && "$PYTHON" -c "$WRITE" && journalctl --sync; do
  tries=$((tries + 1)); [ $tries -lt 100 ] || exit 1; sleep 0.05
done
journalctl -D /run/log/journal -t fmsupervisor -o json --all
"""


@pytest.fixture(scope="module")
def entries():
    result = subprocess.run(
        ["unshare", "--mount", "--net", "--propagation", "private", "sh", "-c", SCRIPT],
        env=os.environ | {"PYTHON": sys.executable, "WRITE": WRITE, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if result.returncode == 77:
        pytest.skip("no mount namespaces here")
    assert result.returncode == 0, result.stderr
    return {entry["FMSUPERVISOR_EVENT"]: entry for entry in map(json.loads, result.stdout.splitlines())}


def test_fields_are_searchable_as_they_were_sent(entries):
    entry = entries["condition-raised"]
    assert (entry["PRIORITY"], entry["FMSUPERVISOR_CONDITION"]) == ("2", "FMS-305")
    assert (entry["FMSUPERVISOR_SUBJECT"], entry["SYSLOG_IDENTIFIER"]) == ("0000:07:00.0", "fmsupervisor")


def test_a_message_of_several_lines_is_one_entry(entries):
    assert entries["fm-exited"]["MESSAGE"].splitlines()[1:] == ["one", "two"]


def test_an_entry_of_megabytes_arrives_whole_with_its_lists(entries):
    entry = entries["nodes-changed"]
    assert entry["MESSAGE"] == "line ü\n" * 300_000
    assert entry["FMSUPERVISOR_NODES"] == ["a", "b"]

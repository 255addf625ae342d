"""``journalctl -x`` on entries that a real systemd-journald took, in mount and network namespaces of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fmsupervisor.conditions import REGISTRY, Code

JOURNALD = "/lib/systemd/systemd-journald"
CATALOGUE = Path(__file__).parents[2] / "systemd/fmsupervisor.catalog"

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
journal.log_condition(Problem(Code.SWITCH_LOST, "", "0000:07:00.0"), raised=False)
journal.log_state_change("configured", "degraded", "a switch is lost")
journal.log_fabric_manager_started(7, "s-1", "580.126.09", "all switches are there")
journal.log_fabric_manager_exited(7, "s-1", "unexpected", ExitStatus(code=1), "died")
assert journal.dropped_messages() == 0
"""

# No kernel log, no audit, no syslog: this journald must not touch the machine that runs the tests.
SCRIPT = f"""
mount -t tmpfs none /run && mkdir -p /run/systemd/journal /run/systemd/journald.conf.d || exit 77
mount -t tmpfs none /usr/lib/systemd/catalog && mount -t tmpfs none /var/lib/systemd && mkdir /var/lib/systemd/catalog \
  || exit 77
cp "$CATALOGUE" /usr/lib/systemd/catalog/ && journalctl --update-catalog || exit 1
printf '[Journal]\\nStorage=volatile\\nAudit=no\\nReadKMsg=no\\nForwardToSyslog=no\\nForwardToWall=no\\n' \
  >/run/systemd/journald.conf.d/test.conf
{JOURNALD} & journald=$!
trap 'kill $journald; wait $journald' EXIT
tries=0
until [ -S /run/systemd/journal/socket ] && "$PYTHON" -c "$WRITE" && journalctl --sync; do
  tries=$((tries + 1)); [ $tries -lt 100 ] || exit 1; sleep 0.05
done
journalctl -D /run/log/journal -t fmsupervisor -x --no-pager
"""


@pytest.fixture(scope="module")
def shown() -> str:
    variables = {"PYTHON": sys.executable, "WRITE": WRITE, "CATALOGUE": str(CATALOGUE)}
    result = subprocess.run(
        ["unshare", "--mount", "--net", "--propagation", "private", "sh", "-c", SCRIPT],
        env=os.environ | variables | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if result.returncode == 77:
        pytest.skip("no mount namespaces here")
    assert result.returncode == 0, result.stderr
    return " ".join(result.stdout.replace("░░", " ").split())


def test_a_condition_is_explained_below_its_message(shown: str) -> None:
    condition = REGISTRY[Code.SWITCH_LOST]
    assert f"Subject: FMS-305 {condition.title} Defined-By: fmsupervisor" in shown
    assert f"{condition.cause} What to do: {condition.remedy} Meanwhile: " in shown


@pytest.mark.parametrize(
    "text",
    [
        "Subject: The fabric is degraded",
        "because: a switch is lost",
        "Fabric Manager runs as process 7, because: all switches are there",
        "Subject: Fabric Manager has ended (unexpected)",
        "journalctl FM_SESSION=s-1",
        "Subject: Condition FMS-305 is over",
        "Severity: critical. History: journalctl FMSUPERVISOR_CONDITION=FMS-305",
    ],
)
def test_the_fields_of_the_entry_stand_in_the_text(shown: str, text: str) -> None:
    assert text in shown


def test_no_field_is_missing(shown: str) -> None:
    assert "@" not in shown
    for field in ("FMSUPERVISOR_STATE", "FMSUPERVISOR_REASON", "FMSUPERVISOR_SEVERITY", "FM_PID", "FM_EXIT_CLASS"):
        assert field not in shown

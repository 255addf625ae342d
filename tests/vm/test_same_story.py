"""The simulator and a real kernel tell the same story: the same states in order, the same conditions.

Each scenario of the simulator that a virtual machine can play is run twice with one settings file: on the tree on disk,
and here with the plays below in place of its host and its timeline. Where they differ the simulator is wrong, or both
are. "configuring" is left out: whether it is seen depends on how the log is cut into reads. Here the daemon is already
there when the board appears, since its start is what takes longest; so a first "not-applicable" is left out as well.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from bed import Bed, Machine
from scenario import (
    BEHAVIOUR,
    GPUS,
    IDLE,
    MODULES,
    SERVICE,
    SWITCHES,
    behave,
    document,
    install_module,
    plug,
    settings,
    wait_until,
)

from fmsupervisor.simulator.scenarios import SCENARIOS, Scenario
from tests.scenarios.runner import run

LAST = SWITCHES[3]
ABSENT = "/sys/module/fake_hgx/parameters/absent"
RETURN = "echo 1 >/sys/bus/pci/rescan"
STRANGER = """
mkdir /run/vendor && cp /bin/sleep /run/vendor/nv-fabricmanager
systemd-run --quiet --unit=nvidia-fabricmanager /run/vendor/nv-fabricmanager infinity
"""
# The module of an earlier release, on its way when the board appears.
LOADED_BEFORE = f"""
(insmod {MODULES}/nvidia-older.ko init_delay_ms=8000 >/dev/null 2>&1 &)
until grep -q coming /sys/module/nvidia/initstate; do sleep 0.1; done
"""


@dataclass(frozen=True)
class Play:
    """How it is done in the virtual machine: the host, what Fabric Manager is like, and what happens later."""

    before: str = ""  # a script, on the host without the board
    board: str = ""  # its parameters
    behaviour: Mapping[str, Any] = field(default_factory=dict)
    module: str = ""  # a variant of nvidia.ko
    later: str = ""  # a script, once the fabric is configured and all GPUs are registered
    meanwhile: str = ""  # a script, once switches are waited for


def told(command: str) -> Play:
    return Play(later=f"echo '{command}' >/.simulator/commands")


PLAYS = {
    "healthy": Play(),
    "no-switch": Play(board="nvswitches=0"),
    "switch-missing": Play(board="absent=8"),
    "late-switches": Play(board="absent=12", meanwhile=f"echo 0 >{ABSENT}; {RETURN}"),
    "version-mismatch": Play(behaviour={"version": "580.159.03"}),
    "reload-needed": Play(LOADED_BEFORE),
    "node-conflict": Play("echo left behind >/dev/nvidia-nvswitchctl"),
    "gpu-would-be-taken": Play("rmmod vfio-pci"),
    "foreign-fm": Play(STRANGER),
    "bad-config": Play(behaviour={"kind": "bad-config"}),
    "forks-away": Play(behaviour={"kind": "forks-away"}),
    "module-refused-enoexec-vermagic": Play(module="nvidia-vermagic"),
    "switch-lost": Play(later=f"echo 1 >/sys/bus/pci/devices/{LAST}/remove"),
    "manager-error": Play(later="echo '3 1' >/sys/kernel/debug/nvidia_stub/manager_error"),
    "hang": Play(later="echo 3000 >/sys/kernel/debug/nvidia_stub/fm_timeout_ms; echo hang >/.simulator/commands"),
    "sxid-fatal": told(f"sxid fatal 20034 {LAST} 33"),
    "reset-needed": told("reset-needed"),
}


@dataclass(frozen=True)
class Story:
    """What was told."""

    states: tuple[str, ...]
    conditions: frozenset[str]


@pytest.mark.parametrize("name", PLAYS)
def test_both_tell_the_same_story(name: str, bed: Bed, tmp_path: Path) -> None:
    outcome = run(name, tmp_path / "host")
    simulated = Story(_shortened(outcome.states[:-1]), frozenset(outcome.conditions_raised))  # the last is the stop
    text = (outcome.directory / "etc/fmsupervisor.toml").read_text()
    assert _played(name, text, bed) == simulated


def _played(name: str, text: str, bed: Bed) -> Story:
    scenario, play = SCENARIOS[name], PLAYS[name]
    with bed.restore(after=IDLE) as machine:
        behave(machine, registration_seconds=1.0, **play.behaviour)
        if play.module:
            install_module(machine, play.module)
        if play.before:
            machine.check(play.before)
        text = re.sub(r"^listen = .*", "", text, flags=re.MULTILINE)  # needs a restart
        text = re.sub(r"^hang_seconds = .*", "hang_seconds = 4", text, flags=re.MULTILINE)  # time is real here
        settings(machine, text, is_running=True)
        plug(machine, play.board)
        _perform(machine, play)
        _wait_for_end(machine, scenario)
        return _story(machine)


def _perform(machine: Machine, play: Play) -> None:
    if play.meanwhile:
        wait_until(machine, lambda found: found["state"] == "waiting-for-switches")
        machine.check(play.meanwhile)
    if play.later:
        wait_until(machine, lambda found: found["fabric_manager"]["gpus_registered"] == len(GPUS))
        machine.check(play.later)


def _wait_for_end(machine: Machine, scenario: Scenario) -> None:
    try:
        wait_until(machine, scenario.expectation.met)
    except TimeoutError as error:
        missing = scenario.expectation.missing(document(machine))
        raise AssertionError(f"not reached: {missing}\n{error}\n{machine.run(f'cat {BEHAVIOUR}').output}") from None


def _story(machine: Machine) -> Story:
    entries = machine.journal(f"_SYSTEMD_UNIT={SERVICE}")
    told = [entry for entry in entries if "FMSUPERVISOR_EVENT" in entry]
    states = [entry["FMSUPERVISOR_STATE"] for entry in told if entry["FMSUPERVISOR_EVENT"] == "state-changed"]
    raised = {entry["FMSUPERVISOR_CONDITION"] for entry in told if entry["FMSUPERVISOR_EVENT"] == "condition-raised"}
    return Story(_shortened(states), frozenset(raised))


def _shortened(states: Sequence[str]) -> tuple[str, ...]:
    begun = states[1:] if states[0] == "not-applicable" else states
    return tuple(state for state in begun if state != "configuring")

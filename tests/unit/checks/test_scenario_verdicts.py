"""What ``check`` says of every host of the simulator: before the daemon starts, and after everything has happened."""

import pytest
from _checked_host import PLENTY

from fmsupervisor import config
from fmsupervisor.checks.context import Context
from fmsupervisor.checks.registry import HOST_CHECKS
from fmsupervisor.checks.runner import Report, run_checks
from fmsupervisor.conditions import Code
from fmsupervisor.simulator.command import _toml
from fmsupervisor.simulator.scenarios import SCENARIOS, Scenario
from fmsupervisor.simulator.world import World

# The scenarios in which something is wrong with the host from the start; with all others the check must be content,
# since only the daemon's run brings out what happens there.
BEFORE = {
    "nvlink5": {Code.NVLINK5_UNSUPPORTED},
    "switch-missing": {Code.SWITCH_MISSING},
    "late-switches": {Code.SWITCH_MISSING},
    "start-anyway": {Code.SWITCH_MISSING},
    "topology-mismatch": {Code.SWITCH_MISSING},
    "version-mismatch": {Code.VERSION_MISMATCH},
    "reload-needed": {Code.RELOAD_NEEDED},
    "library-missing": {Code.LIBRARY_MISSING},
    "insecure-binary": {Code.INSECURE_FILE},
    "node-conflict": {Code.NODE_CONFLICT},
    "gpu-would-be-taken": {Code.GPU_WOULD_BE_TAKEN},
    "foreign-fm": {Code.FOREIGN_FABRIC_MANAGER},
    "log-silent-full": {Code.LOG_FULL},
    "module-refused-enoexec-modversions": {Code.MODULE_SYMBOL_VERSIONS},
    "module-refused-einval": {Code.MODULE_SYMBOL_VERSIONS},
    "module-refused-enoent": {Code.MODULE_UNKNOWN_SYMBOL},
    "module-refused-ekeyrejected-unsigned": {Code.MODULE_SIGNATURE_REJECTED},
    "module-refused-eperm-lockdown": {Code.MODULE_LOCKDOWN},
    "module-refused-eperm": {Code.MODULE_LOADING_FORBIDDEN},
    "module-refused-eperm-blacklist": {Code.MODULE_BLACKLISTED},
    "module-refused-ebadmsg": {Code.MODULE_DAMAGED},
    "module-other-flags": {Code.MODULE_VERMAGIC},
}
ONLY_WARNINGS = {"log-silent-full", "module-refused-enoent"}

# Refusals of which a host shows nothing beforehand: a key that the kernel lacks, a file damaged in its middle, hardware,
# memory, and the kernel's flags where no module of the kernel is left to show them.
UNFORESEEN = {
    *("enoexec-vermagic", "enoexec-damaged", "ekeyrejected", "enodev", "enodev-owned", "eio", "enodata"),
    *("ebusy", "enomem"),
}

# What the kernel shows after nvidia.ko was loaded and the timeline was played.
AFTER = {
    "switch-not-probed": {Code.SWITCH_NOT_PROBED},
    "switch-lost": {Code.SWITCH_MISSING},
    "event-flood": {Code.SWITCH_MISSING},
    "switch-silent": {Code.SWITCH_NOT_RESPONDING},
    "gpu-taken": {Code.GPU_TAKEN},
    "switch-returned": set(),
}


def check(world: World, scenario: Scenario) -> Report:
    settings = config.load_text("".join(_toml(scenario.settings_at(1.0))), scenario.name).settings
    context = Context(world.root, settings, world.kernel.node_status, disk=lambda root, path: PLENTY)
    return run_checks(context, HOST_CHECKS)


def codes(report: Report) -> set[Code]:
    return {code for result in report.results for code in result.finding.codes}


@pytest.mark.parametrize("name", SCENARIOS)
def test_before_the_daemon_starts(tmp_path, name: str) -> None:
    scenario = SCENARIOS[name]
    report = check(World(scenario, str(tmp_path)), scenario)
    expected = BEFORE.get(name, set())
    assert codes(report) == expected, [result for result in report.results if result.finding.codes]
    assert report.exit_status == (2 if name in ONLY_WARNINGS else 1 if expected else 0)
    assert bool(report.not_applicable) == (name == "no-switch")


@pytest.mark.parametrize("name", AFTER)
def test_after_everything_has_happened(tmp_path, name: str) -> None:
    scenario = SCENARIOS[name]
    world = World(scenario, str(tmp_path))
    world.kernel.load(scenario.tree.module_version)
    for step in scenario.timeline:
        if step.action != "flood":
            getattr(world.kernel, step.action)(*step.arguments)
    found = codes(check(world, scenario)) - {Code.FIRMWARE_MISSING}  # of the GPU that the host has taken
    assert found == AFTER[name]


def test_the_expectations_name_scenarios() -> None:
    assert {*BEFORE, *AFTER} <= set(SCENARIOS)


def test_what_is_foreseen_of_a_refusal_is_what_the_kernel_says() -> None:
    refused = {name.removeprefix("module-refused-"): name for name in SCENARIOS if name.startswith("module-refused-")}
    assert {short for short, name in refused.items() if name not in BEFORE} == UNFORESEEN
    for name in set(refused.values()) & set(BEFORE):
        assert BEFORE[name] == set(SCENARIOS[name].expectation.active)

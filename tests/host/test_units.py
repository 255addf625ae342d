"""The units in systemd/, as systemd itself reads them."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

UNITS = Path(__file__).parents[2] / "systemd"
NAMES = ("fmsupervisor.service", "nvidia-fabric-wait.service", "nvidia-fabric.target")
DROP_IN = "50-nvidia-fabric.conf"  # for units that start guests
PROGRAM = "/usr/local/bin/fmsupervisor"

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")


def settings(name, content=None):
    """Every assignment of a unit: key -> values in order. Comments and sections are left out."""
    found = {}
    for line in (content or (UNITS / name).read_text()).splitlines():
        if match := re.fullmatch(r"([A-Za-z]+)=(.*)", line):
            found.setdefault(match[1], []).append(match[2])
    return found


@pytest.fixture
def installed(tmp_path):
    """The units with a program that exists."""
    for name in NAMES:
        (tmp_path / name).write_text((UNITS / name).read_text().replace(PROGRAM, shutil.which("true")))
    return tmp_path


def analyze(*arguments, directory):
    environment = os.environ | {
        "SYSTEMD_UNIT_PATH": f"{directory}:",
        "SYSTEMD_LOG_LEVEL": "warning",
        "LC_ALL": "C.UTF-8",
    }
    return subprocess.run(
        ["systemd-analyze", *arguments], env=environment, cwd=directory, capture_output=True, text=True, check=False
    )


def exposure(path):
    result = analyze("security", "--offline=true", "--no-pager", str(path), directory=path.parent)
    match = re.search(r"Overall exposure level for \S+: ([0-9.]+)", result.stdout)
    assert match, result.stdout + result.stderr
    return float(match[1])


@needs_systemd
@pytest.mark.parametrize("name", NAMES)
def test_systemd_finds_nothing_to_complain_about(installed, name):
    result = analyze("verify", "--man=no", f"./{name}", directory=installed)
    complaints = [line for line in result.stderr.splitlines() if any(unit in line for unit in NAMES)]
    assert (result.returncode, complaints) == (0, [])


@needs_systemd
def test_systemd_finds_nothing_to_complain_about_in_a_unit_with_the_drop_in(installed):
    guests = installed / "virtqemud.service"
    guests.write_text(f"[Service]\nExecStart={shutil.which('true')}\n")
    (installed / "virtqemud.service.d").mkdir()
    (installed / "virtqemud.service.d" / DROP_IN).write_text((UNITS / DROP_IN).read_text())
    result = analyze("verify", "--man=no", "./virtqemud.service", directory=installed)
    complaints = [line for line in result.stderr.splitlines() if "virtqemud" in line or "nvidia" in line]
    assert (result.returncode, complaints) == (0, [])


@needs_systemd
def test_the_check_above_would_see_a_misspelt_key(installed):
    path = installed / NAMES[0]
    path.write_text(path.read_text().replace("[Service]", "[Service]\nProtektSystem=strict"))
    result = analyze("verify", "--man=no", f"./{NAMES[0]}", directory=installed)
    assert "ProtektSystem" in result.stderr


@needs_systemd
@pytest.mark.parametrize(("name", "limit"), [("fmsupervisor.service", 0.5), ("nvidia-fabric-wait.service", 0.1)])
def test_the_sandbox_takes_away_at_least_its_share_of_the_exposure(installed, name, limit):
    command = settings(name)["ExecStart"][0]
    bare = installed / "bare.service"
    bare.write_text(f"[Service]\nExecStart={command}\n".replace(PROGRAM, shutil.which("true")))
    assert exposure(installed / name) <= limit * exposure(bare)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("Type", "notify"),
        ("NotifyAccess", "main"),
        ("WatchdogSec", "30"),
        ("Restart", "on-failure"),
        ("RestartPreventExitStatus", "78"),
        ("StartLimitIntervalSec", "0"),
        ("ExecReload", "/bin/kill -HUP $MAINPID"),
        ("KillMode", "process"),
        ("ExecStopPost", f"-{PROGRAM} after-stop"),
        ("RuntimeDirectoryPreserve", "yes"),
        ("OOMPolicy", "continue"),
        ("RuntimeDirectory", "fmsupervisor"),
        ("ExecStart", f"{PROGRAM} run"),
        ("NoNewPrivileges", "yes"),
        ("ProtectSystem", "strict"),
    ],
)
def test_the_service_says(key, expected):
    assert settings("fmsupervisor.service")[key] == [expected]


@pytest.mark.parametrize(
    "key",
    [
        pytest.param("Conflicts", id="Conflicts would stop a foreign Fabric Manager"),
        pytest.param("Before", id="guests are ordered behind the target"),
        pytest.param("ProtectKernelModules", id="ProtectKernelModules forbids the module"),
        pytest.param("PrivateDevices", id="PrivateDevices hides /dev"),
        pytest.param("ProtectClock", id="ProtectClock implies DeviceAllow and closes all other devices"),
        pytest.param("DeviceAllow", id="DeviceAllow closes all other devices"),
        pytest.param("DevicePolicy", id="DevicePolicy closes devices"),
        pytest.param("ProtectKernelLogs", id="ProtectKernelLogs hides /dev/kmsg"),
        pytest.param("ProcSubset", id="ProcSubset hides /proc/devices"),
        pytest.param("ProtectProc", id="ProtectProc hides a foreign Fabric Manager"),
        pytest.param("PrivateNetwork", id="PrivateNetwork hides the metrics"),
        pytest.param("MemoryDenyWriteExecute", id="MemoryDenyWriteExecute is inherited by Fabric Manager"),
        pytest.param("User", id="User loses root"),
        pytest.param("MemoryMax", id="MemoryMax counts Fabric Manager"),
        pytest.param("ExecStop", id="ExecStop may run after a crash too"),
    ],
)
def test_the_service_does_not_set_what_would_break_the_job(key):
    assert key not in settings("fmsupervisor.service")


def test_each_line_left_out_of_the_sandbox_is_explained():
    comments = [line for line in (UNITS / "fmsupervisor.service").read_text().splitlines() if line.startswith("#")]
    for key in (
        "ProtectKernelModules",
        "PrivateDevices",
        "ProtectClock",
        "ProtectKernelLogs",
        "MemoryDenyWriteExecute",
    ):
        assert any(f"{key}=" in line for line in comments), key


def test_exactly_the_needed_capabilities_are_left():
    (capabilities,) = settings("fmsupervisor.service")["CapabilityBoundingSet"]
    assert set(capabilities.split()) == {
        "CAP_SYS_MODULE",
        "CAP_MKNOD",
        "CAP_CHOWN",
        "CAP_FOWNER",
        "CAP_SYS_ADMIN",
        "CAP_DAC_OVERRIDE",
        "CAP_SYSLOG",
        "CAP_SYS_PTRACE",
    }


def test_the_default_settings_write_only_where_the_sandbox_allows():
    from fmsupervisor.settings import Settings

    defaults = Settings()
    manager = defaults.fabric_manager
    written = [
        *(manager.config, manager.log_file, manager.state_file, manager.database_path, manager.run_directory),
        defaults.service.state_directory,
    ]
    (line,) = settings("fmsupervisor.service")["ReadWritePaths"]
    writable = tuple(path.lstrip("-") + "/" for path in line.split())
    for path in written:
        assert path.replace("{prefix}", defaults.prefix).startswith(writable), path


def test_the_stop_timeout_leaves_room_for_a_fabric_manager_that_must_be_killed():
    from fmsupervisor.settings import Settings

    (seconds,) = settings("fmsupervisor.service")["TimeoutStopSec"]
    assert float(seconds) >= 2 * Settings().fabric_manager.stop_timeout_seconds


def test_no_unit_waits_for_the_network():
    for name in NAMES:
        assert not re.search(r"^[A-Za-z]+=.*network-online", (UNITS / name).read_text(), re.MULTILINE)


def test_the_target_is_reached_only_through_the_wait_service():
    target, wait = settings("nvidia-fabric.target"), settings("nvidia-fabric-wait.service")
    assert target["Requires"] == target["After"] == ["nvidia-fabric-wait.service"]
    assert wait["Requires"] == wait["After"] == ["fmsupervisor.service"]
    assert (wait["Type"], wait["RemainAfterExit"]) == (["oneshot"], ["yes"])


def test_what_starts_guests_is_only_ordered_so_that_it_starts_in_any_case():
    assert settings(DROP_IN) == {"Wants": ["nvidia-fabric.target"], "After": ["nvidia-fabric.target"]}


def test_the_target_gives_up_after_the_wait_service_which_says_why():
    (limit,) = settings("nvidia-fabric.target")["JobTimeoutSec"]
    assert int(limit) > int(settings("nvidia-fabric-wait.service")["TimeoutStartSec"][0])


def test_systemd_gives_the_wait_command_time_to_say_why_it_failed():
    wait = settings("nvidia-fabric-wait.service")
    match = re.fullmatch(rf"{PROGRAM} wait --timeout (\d+)", wait["ExecStart"][0])
    assert match
    assert int(wait["TimeoutStartSec"][0]) > int(match[1])

"""From the cold host to a configured fabric, with systemd's ordering, on both roots."""

import json
from typing import Any

import pytest
from bed import Bed, Machine
from scenario import (
    BOARD,
    IDLE,
    MODULES,
    SELFTEST,
    SERVICE,
    SWITCHES,
    behave,
    codes,
    install_module,
    plug,
    start,
    switch_list,
    tell,
    wait_for_state,
    wait_until,
    words,
)

SUCCESS = "Successfully configured all the available NVSwitches to route GPU NVLink traffic."
UNITS = "/usr/local/lib/systemd/system"  # survives the reboot of a sealed host, as systemd/README.md says
BOARD_UNIT = f"""
[Unit]
DefaultDependencies=no
Before=sysinit.target systemd-modules-load.service
[Service]
Type=oneshot
ExecStart=/usr/sbin/insmod {MODULES}/fake_hgx.ko
ExecStart=/usr/sbin/modprobe vfio-pci ids=10de:2335
"""
GUEST_UNIT = f"""
[Unit]
Wants=nvidia-fabric.target
After=nvidia-fabric.target
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart={SELFTEST} list
"""


def enable_for_ever(machine: Machine) -> None:
    """As on a host that forgets /etc: the units and the links that enable them are below /usr/local."""
    machine.put(f"{UNITS}/board.service", BOARD_UNIT.encode())
    machine.put(f"{UNITS}/guest.service", GUEST_UNIT.encode())
    machine.check(
        f"cd {UNITS} && mkdir -p sysinit.target.wants multi-user.target.wants && "
        "ln -s ../board.service sysinit.target.wants/ && "
        f"ln -s ../{SERVICE} ../guest.service multi-user.target.wants/ && sync"
    )


def moment(machine: Machine, unit: str, name: str) -> int:
    """A monotonic time stamp of a unit in microseconds."""
    return int(machine.check(f"systemctl show --value -p {name} {unit}"))


class TestColdBoot:
    @pytest.mark.parametrize(("root", "module"), [("writable", "nvidia.ko.xz"), ("sealed", "nvidia.ko.zst")])
    def test_ends_in_a_configured_fabric_before_the_first_guest(self, bed: Bed, root: str, module: str) -> None:
        with bed.restore(root) as machine:
            install_module(machine, module)
            enable_for_ever(machine)
            machine.reboot()
            found = wait_for_state(machine, "configured")
            assert codes(found) == set()
            assert machine.check("systemctl is-system-running") == "running\n"
            assert f"/{module} (580.126.09)" in words(machine)

            assert moment(machine, SERVICE, "ActiveEnterTimestampMonotonic") > 0
            order = [
                moment(machine, "board.service", "ExecMainExitTimestampMonotonic"),
                moment(machine, SERVICE, "ExecMainStartTimestampMonotonic"),
                moment(machine, SERVICE, "ActiveEnterTimestampMonotonic"),
                moment(machine, "nvidia-fabric-wait.service", "ActiveEnterTimestampMonotonic"),
                moment(machine, "nvidia-fabric.target", "ActiveEnterTimestampMonotonic"),
                moment(machine, "guest.service", "ExecMainStartTimestampMonotonic"),
            ]
            assert order == sorted(order)
            seen_by_guest = [str(entry["MESSAGE"]).split() for entry in machine.journal("_SYSTEMD_UNIT=guest.service")]
            assert [(row[1], row[2]) for row in seen_by_guest] == [(switch, "driver=2") for switch in SWITCHES]


class TestStart:
    @pytest.mark.parametrize("module", ["nvidia.ko", "nvidia.ko.gz"])
    def test_loads_the_module_however_it_is_compressed(self, bed: Bed, module: str) -> None:
        with bed.restore(after=IDLE) as machine:
            install_module(machine, module)
            plug(machine)
            wait_for_state(machine, "configured")
            assert f"/{module} (580.126.09)" in words(machine)
            assert {state for _, state in switch_list(machine).values()} == {2}
            assert json.loads(machine.check("fmsupervisor status --json"))["state"] == "configured"

    def test_is_ready_only_when_the_driver_says_configured_of_every_switch(self, bed: Bed) -> None:
        with bed.restore(after=BOARD) as machine:
            behave(machine, kind="never-configures")
            start(machine)
            wait_for_state(machine, "configuring")
            tell(machine, f"line INFO {SUCCESS}")  # the log says so, the driver does not
            wait_until(machine, lambda found: "waiting for the driver" in found["reason"])
            assert is_activating(machine)

            tell(machine, "hang")  # from now on the test is Fabric Manager's heartbeat
            for minor in range(3):
                machine.check(f"{SELFTEST} heartbeat {minor} 1")
            wait_until(machine, lambda found: found["reason"].endswith(f"to say so of {SWITCHES[3]}"))
            assert is_activating(machine)

            before = now(machine)
            machine.check(f"{SELFTEST} heartbeat all 1")
            wait_for_state(machine, "configured")
            machine.wait_for(f"systemctl is-active {SERVICE}")
            assert moment(machine, SERVICE, "ActiveEnterTimestampMonotonic") >= before
            told = [entry for entry in machine.journal() if is_about_readiness(entry)]
            assert [entry["_PID"] == "1" for entry in told] == [False, True]


def is_activating(machine: Machine) -> bool:
    return machine.check(f"systemctl show --value -p ActiveState {SERVICE}").strip() == "activating"


def now(machine: Machine) -> int:
    """The guest's monotonic clock in microseconds."""
    return int(float(machine.check("cut -d' ' -f1 /proc/uptime")) * 1e6)


def is_about_readiness(entry: dict[str, Any]) -> bool:
    message = str(entry["MESSAGE"])
    return "-> configured" in message or message.startswith(f"Started {SERVICE}")

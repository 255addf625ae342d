"""From the cold host to a configured fabric, with systemd's ordering, on both roots."""

import json
from typing import Any

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
    document,
    install_module,
    is_loaded,
    plug,
    start,
    switch_list,
    tell,
    wait_for_code,
    wait_for_state,
    wait_until,
    words,
)

SUCCESS = "Successfully configured all the available NVSwitches to route GPU NVLink traffic."
UNITS = "/usr/local/lib/systemd/system"
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
DROP_IN = """
[Service]
ExecStart=
ExecStart=/usr/local/bin/fmsupervisor run --config /usr/local/etc/fmsupervisor.toml
"""
WAIT_DROP_IN = """
[Service]
ExecStart=
ExecStart=/usr/local/bin/fmsupervisor wait --timeout 5
"""


def enable_for_ever(machine: Machine) -> None:
    """As systemd/README.md says for a host that forgets /etc: units, links that enable them and settings in /usr/local."""
    machine.put(f"{UNITS}/board.service", BOARD_UNIT.encode())
    machine.put(f"{UNITS}/guest.service", GUEST_UNIT.encode())
    machine.put(f"{UNITS}/{SERVICE}.d/settings.conf", DROP_IN.encode())
    machine.put(f"{UNITS}/nvidia-fabric-wait.service.d/sooner.conf", WAIT_DROP_IN.encode())
    machine.put("/usr/local/etc/fmsupervisor.toml", b'[logging]\nrelay_level = "none"\n')
    machine.check(
        f"cd {UNITS} && mkdir -p sysinit.target.wants multi-user.target.wants && "
        "ln -s ../board.service sysinit.target.wants/ && "
        f"ln -s ../{SERVICE} ../guest.service multi-user.target.wants/ && sync"
    )


def moment(machine: Machine, unit: str, name: str) -> int:
    """A monotonic time stamp of a unit in microseconds."""
    return int(machine.check(f"systemctl show --value -p {name} {unit}"))


class TestColdBoot:
    def test_ends_in_a_configured_fabric_before_the_first_guest_on_both_roots(self, bed: Bed) -> None:
        with bed.restore() as machine:
            enable_for_ever(machine)
            install_module(machine, "nvidia.ko.xz")
            machine.reboot()
            assert_guest_was_given_a_fabric(machine, "nvidia.ko.xz")

            install_module(machine, "nvidia.ko.zst")
            machine.reboot("sealed")
            for path in ("/x", "/usr/x", "/usr/lib/x", "/opt/x"):
                assert "Read-only file system" in machine.run(f"touch {path}").output
            machine.check("touch /etc/x /var/x /tmp/x /usr/local/x")
            assert_guest_was_given_a_fabric(machine, "nvidia.ko.zst")

            boot = machine.check("cat /proc/sys/kernel/random/boot_id")
            machine.reboot("sealed", "module_blacklist=nvidia")
            assert machine.check("cat /proc/sys/kernel/random/boot_id") != boot
            assert machine.check("ls /etc/x /var/x /tmp/x /usr/local/x 2>/dev/null || true") == "/usr/local/x\n"
            assert_guest_waits_and_is_then_told_why(machine)


def assert_guest_was_given_a_fabric(machine: Machine, module: str) -> None:
    """The guest was started behind the target, and when it asked the driver all switches were configured."""
    found = wait_for_state(machine, "configured")
    assert codes(found) == set()
    machine.wait_for("systemctl is-active guest.service")
    assert machine.check("systemctl is-system-running --wait") == "running\n"
    assert f"/{module} (580.126.09)" in words(machine)
    assert "nv-fabricmanager: " not in words(machine), "the settings were not read"
    order = [
        moment(machine, "board.service", "ExecMainExitTimestampMonotonic"),
        moment(machine, SERVICE, "ExecMainStartTimestampMonotonic"),
        moment(machine, SERVICE, "ActiveEnterTimestampMonotonic"),
        moment(machine, "nvidia-fabric-wait.service", "ActiveEnterTimestampMonotonic"),
        moment(machine, "nvidia-fabric.target", "ActiveEnterTimestampMonotonic"),
        moment(machine, "guest.service", "ExecMainStartTimestampMonotonic"),
    ]
    assert order[0] > 0
    assert order == sorted(order)
    seen_by_guest = [str(entry["MESSAGE"]).split() for entry in machine.journal("_SYSTEMD_UNIT=guest.service")]
    assert [(row[1], row[2]) for row in seen_by_guest] == [(switch, "driver=2") for switch in SWITCHES]


def assert_guest_waits_and_is_then_told_why(machine: Machine) -> None:
    """The service is ready, for the outcome is known; the guest comes late, not never."""
    wait_for_code(machine, "FMS-210", "Module nvidia is blacklisted")
    assert not is_loaded(machine)
    assert document(machine)["fabric_manager"]["starts"] == 0
    machine.wait_for("[ $(systemctl show -P ExecMainStartTimestampMonotonic guest.service) != 0 ]")
    order = [
        moment(machine, SERVICE, "ActiveEnterTimestampMonotonic"),
        moment(machine, "nvidia-fabric-wait.service", "ExecMainExitTimestampMonotonic"),
        moment(machine, "guest.service", "ExecMainStartTimestampMonotonic"),
    ]
    assert order[0] > 0
    assert order == sorted(order)
    assert machine.check("systemctl show -P ActiveState nvidia-fabric.target").strip() == "inactive"
    told = [str(entry["MESSAGE"]) for entry in machine.journal("_SYSTEMD_UNIT=nvidia-fabric-wait.service")]
    assert "FMS-210" in told[-1]


class TestStart:
    def test_loads_a_module_that_even_kmod_cannot_decompress(self, bed: Bed) -> None:
        """Plain ones are loaded in test_module.py, the other kinds above."""
        with bed.restore(after=IDLE) as machine:
            install_module(machine, "nvidia.ko.gz")
            plug(machine)
            wait_for_state(machine, "configured")
            assert "/nvidia.ko.gz (580.126.09)" in words(machine)
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

            tell(machine, "hang")  # from now on this is Fabric Manager's heartbeat
            machine.put("/run/beating", b"0 1 2")
            machine.check(
                f"(while sleep 0.5; do for minor in $(cat /run/beating); do {SELFTEST} heartbeat $minor 1; done; done "
                ">/dev/null 2>&1 &)"
            )
            wait_until(machine, lambda found: found["reason"].endswith(f"to say so of {SWITCHES[3]}"))
            assert is_activating(machine)

            before = now(machine)
            machine.put("/run/beating", b"0 1 2 3")
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

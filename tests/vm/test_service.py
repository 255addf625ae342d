"""The shipped unit on a real kernel: stop, start, watchdog, memory, the journal, and the vendor's unit beside it."""

import json
import re
from typing import Any

from bed import Machine
from guests import SETTINGS_TEXT
from scenario import (
    GPUS,
    SERVICE,
    SWITCHES,
    codes,
    condition,
    document,
    settings,
    switch_list,
    tell,
    wait_for_code,
    wait_for_state,
    wait_until,
)

CONFIGURED = 2
VENDOR = "nvidia-fabricmanager.service"
VENDOR_UNIT = """[Service]
Type=forking
ExecStart=/usr/local/vendor/nv-fabricmanager -c /usr/local/vendor/fabricmanager.cfg
"""
# The vendor's Fabric Manager: the same program elsewhere, daemonising, with a log of its own.
INSTALL_VENDOR = """
mkdir /usr/local/vendor && cd /usr/local/vendor
cp /usr/local/nvidia/usr/bin/nv-fabricmanager . && ln -s /usr/local/lib/fmsupervisor/_internal .
sed 's/^DAEMONIZE=.*/DAEMONIZE=1/; s/^LOG_FILE_NAME=.*/LOG_FILE_NAME=\\/var\\/log\\/fabricmanager.log/' \
  /usr/local/nvidia/fm.cfg >fabricmanager.cfg
systemctl daemon-reload
"""


def show(machine: Machine, name: str, unit: str = SERVICE) -> str:
    return machine.check(f"systemctl show -P {name} {unit}").strip()


def pids(machine: Machine) -> tuple[int, int]:
    """Of the daemon, as systemd knows it, and of Fabric Manager."""
    return int(show(machine, "MainPID")), int(document(machine)["fabric_manager"]["pid"])


def drop_in(machine: Machine, text: str) -> None:
    machine.put(f"/etc/systemd/system/{SERVICE}.d/test.conf", f"[Service]\n{text}\n".encode())
    machine.check("systemctl daemon-reload")


def events(machine: Machine, kind: str, *matches: str) -> list[dict[str, Any]]:
    return machine.journal(f"_SYSTEMD_UNIT={SERVICE}", f"FMSUPERVISOR_EVENT={kind}", *matches)


def is_alive(machine: Machine, pid: int) -> bool:
    return machine.run(f"[ -e /proc/{pid} ]").code == 0


class TestControl:
    def test_reload_restart_stop_and_start(self, whole: Machine) -> None:
        daemon, manager = pids(whole)
        settings(whole, SETTINGS_TEXT.replace("hang_seconds = 4", "hang_seconds = 6"), is_running=True)
        whole.wait_for(f"journalctl -q -u {SERVICE} FMSUPERVISOR_EVENT=settings-reloaded | grep -q .")
        assert pids(whole) == (daemon, manager), "a reload restarts nothing"

        whole.check(f"systemctl restart {SERVICE}", 120)
        assert show(whole, "StatusText").startswith("configured:"), "READY comes with the configured fabric"
        assert {daemon, manager}.isdisjoint(pids(whole))
        assert not is_alive(whole, manager)
        assert {state for _, state in switch_list(whole).values()} == {CONFIGURED}

        whole.check(f"systemctl stop {SERVICE}")
        assert (show(whole, "ActiveState"), show(whole, "Result")) == ("inactive", "success")
        assert whole.run("pgrep -f /nv-fabricmanager").output == ""
        assert whole.run("fmsupervisor status").code == 3
        whole.check("rmmod nvidia")  # nobody holds a node

        whole.check(f"systemctl start {SERVICE}", 120)
        assert document(whole)["state"] == "configured"
        assert show(whole, "NRestarts") == "0"

    def test_a_blocked_daemon_is_replaced_by_the_watchdog(self, whole: Machine) -> None:
        drop_in(whole, "WatchdogSec=5\nRestartSec=0")
        whole.check(f"systemctl restart {SERVICE}", 120)
        daemon, manager = pids(whole)
        whole.check(f"kill -STOP {daemon}")
        whole.wait_for(f"[ $(systemctl show -P NRestarts {SERVICE}) = 1 ] && systemctl is-active {SERVICE}")
        assert whole.journal("_PID=1", f"UNIT={SERVICE}", f"MESSAGE={SERVICE}: Failed with result 'watchdog'.")
        found = wait_for_state(whole, "configured")
        assert (found["fabric_manager"]["starts"], codes(found)) == (1, set())
        assert {daemon, manager}.isdisjoint(pids(whole))
        assert not is_alive(whole, manager)


class TestVendorUnit:
    def test_that_comes_second_fails_and_ours_goes_on(self, whole: Machine) -> None:
        ours = pids(whole)
        whole.put(f"/etc/systemd/system/{VENDOR}", VENDOR_UNIT.encode())
        assert whole.run(f"{INSTALL_VENDOR}\nsystemctl start {VENDOR}").code != 0, "nvidia-nvlink can be opened once"
        assert pids(whole) == ours
        assert {state for _, state in switch_list(whole).values()} == {CONFIGURED}
        assert wait_until(whole, lambda found: codes(found) == set())["state"] == "configured"


class TestJournal:
    def test_a_switch_error_of_the_kernel_is_one_entry_with_fields_and_is_counted_once(self, whole: Machine) -> None:
        whole.check("echo '3 20034 fatal 33 LTSSM Fault Up' >/sys/kernel/debug/nvidia_stub/sxid")
        assert SWITCHES[3] in wait_for_code(whole, "FMS-601")["subject"]
        (line,) = events(whole, "kernel-line", "SXID=20034")
        assert (line["PCI_BUS_ID"], line["NVLINK_PORT"], line["SXID_SEVERITY"]) == (SWITCHES[3], "33", "fatal")
        assert (line["PRIORITY"], line["SYSLOG_IDENTIFIER"]) == ("3", "fmsupervisor")
        (raised,) = events(whole, "condition-raised", "FMSUPERVISOR_CONDITION=FMS-601")
        assert raised["PRIORITY"] == "2"
        assert raised["FMSUPERVISOR_REMEDY"] == condition(document(whole), "FMS-601")["remedy"]
        assert counted(whole) == 1

        tell(whole, f"sxid fatal 20034 {SWITCHES[3]} 33")  # Fabric Manager's report of the same, written twice
        whole.wait_for(f"journalctl -q -u {SERVICE} FMSUPERVISOR_EVENT=fm-line SXID=20034 | grep -q .")
        wait_until(whole, lambda found: found["counters"]["log_lines"].get("ERROR", 0) >= 1)
        assert counted(whole) == 1

    def test_the_way_up_can_be_asked_back(self, whole: Machine) -> None:
        changes = events(whole, "state-changed")
        assert [entry["FMSUPERVISOR_STATE"] for entry in changes if entry["FMSUPERVISOR_STATE"] != "configuring"] == [
            *("waiting-for-module", "starting", "configured"),
        ]
        assert all(entry["FMSUPERVISOR_REASON"] and entry["PRIORITY"] == "6" for entry in changes)
        (started,) = events(whole, "fm-started")
        assert int(started["FM_PID"]) == pids(whole)[1]
        assert changes[-1]["FM_SESSION"] == started["FM_SESSION"] == document(whole)["session"]
        assert whole.journal(f"_SYSTEMD_UNIT={SERVICE}", "-p", "warning") == []


def counted(machine: Machine) -> int:
    return sum(row["count"] for row in document(machine)["counters"]["switch_errors"] if row["sxid"] == 20034)


class TestMetrics:
    def test_scraped_from_outside_tell_the_same_as_the_status_command(self, whole: Machine) -> None:
        metrics = whole.scrape()
        found = json.loads(whole.check("fmsupervisor status --json"))
        manager = found["fabric_manager"]
        assert sample(metrics, f'fabricmanager_state{{state="{found["state"]}"}}') == 1
        assert len(re.findall(r"^fabricmanager_state\{.*\} 1\.0$", metrics, re.MULTILINE)) == 1
        assert sample(metrics, "fabricmanager_starts_total") == manager["starts"] == 1
        assert sample(metrics, "fabricmanager_gpus_registered") == manager["gpus_registered"] == len(GPUS)
        assert sample(metrics, "nvswitches_configured") == len(found["switches"]) == len(SWITCHES)
        for row in found["switches"]:
            labels = f'pci_bus_id="{row["pci_bus_id"]}",state="{row["driver_state"]}"'
            assert sample(metrics, f"nvswitch_driver_state{{{labels}}}") == 1
        for row in found["gpus"]:
            labels = rf'(?=.*driver="{row["driver"]}")(?=.*pci_bus_id="{row["pci_bus_id"]}")'
            assert re.search(rf"^fabric_gpu_info\{{{labels}", metrics, re.MULTILINE)
        active = set(re.findall(r'^fmsupervisor_condition_active\{code="(.*?)".*\} 1\.0$', metrics, re.MULTILINE))
        assert active == codes(found) == set()


def sample(metrics: str, series: str) -> float:
    found = re.search(rf"^{re.escape(series)} (\S+)$", metrics, re.MULTILINE)
    assert found is not None, series
    return float(found[1])


class TestUnitFiles:
    def test_systemd_finds_nothing_wrong_and_the_sandbox_is_there(self, whole: Machine) -> None:
        units = f"{SERVICE} nvidia-fabric-wait.service nvidia-fabric.target"
        assert whole.check(f"cd /usr/local/lib/systemd/system && systemd-analyze verify {units}", 120) == ""
        overall = whole.check(f"systemd-analyze security --no-pager {SERVICE} | tail -n 1", 120)
        exposure = re.search(rf"{SERVICE}: ([\d.]+)", overall)
        assert exposure is not None
        assert float(exposure[1]) < 7, overall


class TestMemory:
    def test_60_mb_are_enough_for_daemon_and_fabric_manager_and_the_kernel_enforces_the_limit(
        self, whole: Machine
    ) -> None:
        drop_in(whole, "MemoryMax=60M")
        whole.check(f"systemctl restart {SERVICE}", 120)
        wait_until(whole, lambda found: found["state"] == "configured")
        group = f"/sys/fs/cgroup{show(whole, 'ControlGroup')}"
        assert whole.check(f"cat {group}/memory.max").strip() == str(60 << 20)
        assert "oom_kill 0\n" in whole.check(f"cat {group}/memory.events")

        # Far too little: the kernel kills, systemd tries again, and it is back as soon as there is enough.
        drop_in(whole, "MemoryMax=6M\nRestartSec=1")
        whole.check(f"systemctl restart --no-block {SERVICE}")
        whole.wait_for(f"[ $(systemctl show -P NRestarts {SERVICE}) -ge 1 ]")
        assert whole.journal("_TRANSPORT=kernel", "-g", "Memory cgroup out of memory")
        assert whole.journal("_PID=1", f"UNIT={SERVICE}", "-g", "killed by the OOM killer")
        drop_in(whole, "RestartSec=1")
        whole.wait_for(f"systemctl is-active {SERVICE} && fmsupervisor status")

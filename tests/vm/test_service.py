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
cp /usr/local/nvidia/usr/bin/nv-fabricmanager .
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
        assert_nothing_is_left(whole)
        assert show(whole, "NRestarts") == "0"
        assert whole.run("fmsupervisor status").code == 3

    def test_a_blocked_daemon_is_replaced_by_the_watchdog(self, whole: Machine) -> None:
        daemon, manager = pids(whole)
        whole.check(f"kill -STOP {daemon}")
        whole.wait_for(f"[ $(systemctl show -P NRestarts {SERVICE}) = 1 ] && systemctl is-active {SERVICE}")
        assert whole.journal("_PID=1", f"UNIT={SERVICE}", f"MESSAGE={SERVICE}: Failed with result 'watchdog'.")
        wait_until(whole, lambda found: found["pid"] != daemon and found["state"] == "configured")
        assert pids(whole)[1] == manager


class TestCrash:
    def test_fabric_manager_outlives_the_daemon_is_taken_over_and_ended_by_the_next_stop(self, whole: Machine) -> None:
        daemon, manager = pids(whole)
        session = document(whole)["session"]
        whole.check(f"kill -KILL {daemon}")
        found = wait_until(whole, lambda found: found["pid"] != daemon and found["state"] == "configured")
        assert (found["fabric_manager"]["pid"], found["session"]) == (manager, session)
        assert found["fabric_manager"]["gpus_registered"] == len(GPUS)
        assert codes(found) == set()
        assert {state for _, state in switch_list(whole).values()} == {CONFIGURED}
        after = [entry["FMSUPERVISOR_STATE"] for entry in events(whole, "state-changed", f"_PID={found['pid']}")]
        assert after == ["configured"], "straight there"

        whole.check(f"systemctl stop {SERVICE}")
        assert_nothing_is_left(whole)


def assert_nothing_is_left(machine: Machine) -> None:
    """After a stop."""
    assert (show(machine, "ActiveState"), show(machine, "Result")) == ("inactive", "success")
    assert machine.run("pgrep -f /nv-fabricmanager").output == ""
    assert machine.run(f"cat /sys/fs/cgroup/system.slice/{SERVICE}/cgroup.procs 2>/dev/null").output == ""
    machine.check("rmmod nvidia")  # nobody holds a node


class TestVendorUnit:
    def test_that_comes_first_is_told_and_left_alone_and_when_it_is_stopped_ours_goes_on(self, whole: Machine) -> None:
        whole.put(f"/etc/systemd/system/{VENDOR}", VENDOR_UNIT.encode())
        whole.check(f"{INSTALL_VENDOR}\nsystemctl stop {SERVICE} && systemctl start {VENDOR}", 120)
        vendors = int(show(whole, "MainPID", VENDOR))
        whole.check(f"systemctl start {SERVICE}", 120)  # ready: the outcome is known
        found = document(whole)
        assert (found["state"], found["fabric_manager"]["starts"]) == ("failed", 0)
        assert str(vendors) in condition(found, "FMS-503")["detail"]
        assert int(show(whole, "MainPID", VENDOR)) == vendors

        whole.check(f"systemctl stop {VENDOR}")
        found = wait_for_state(whole, "configured")
        assert codes(found) == set()

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
            *("not-applicable", "waiting-for-module", "starting", "configured"),
        ]
        assert all(entry["FMSUPERVISOR_REASON"] and entry["PRIORITY"] == "6" for entry in changes)
        (started,) = events(whole, "fm-started")
        assert int(started["FM_PID"]) == pids(whole)[1]
        assert changes[-1]["FM_SESSION"] == started["FM_SESSION"] == document(whole)["session"]
        assert whole.journal(f"_SYSTEMD_UNIT={SERVICE}", "-p", "warning") == []


class TestKernelLog:
    def test_that_overruns_its_reader_is_told_and_read_on(self, whole: Machine) -> None:
        daemon, _ = pids(whole)
        whole.check(f"""
            sysctl -q kernel.printk_devkmsg=on kernel.printk=1
            kill -STOP {daemon}
            printf -v text '%0900d' 0
            for ((i = 0; i < 1500; i++)); do echo "$text"; done >/dev/kmsg  # more than the kernel keeps
            kill -CONT {daemon}
        """)
        assert wait_for_code(whole, "FMS-617")
        found = document(whole)
        assert found["kernel_log"]["lost"] > 0
        assert sample(whole.scrape(), "fmsupervisor_kernel_log_lost_total") == found["kernel_log"]["lost"]

        whole.check("echo '3 20034 fatal 33 LTSSM Fault Up' >/sys/kernel/debug/nvidia_stub/sxid")
        assert SWITCHES[3] in wait_for_code(whole, "FMS-601")["subject"]
        assert pids(whole)[0] == daemon


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
        group = f"/sys/fs/cgroup{show(whole, 'ControlGroup')}"
        assert int(whole.check(f"cat {group}/memory.peak")) < 60 << 20, (
            "since its start, with what the kernel caches for it"
        )
        limit(whole, "60M")
        assert whole.check(f"cat {group}/memory.max").strip() == str(60 << 20)
        assert "oom_kill 0\n" in whole.check(f"cat {group}/memory.events")

        # Far too little: the kernel kills, systemd tries again, and it is back as soon as there is enough.
        limit(whole, "6M")
        whole.wait_for("journalctl -q _TRANSPORT=kernel -g 'Memory cgroup out of memory' >/dev/null")
        limit(whole, "infinity")
        whole.wait_for(f"[ $(systemctl show -P NRestarts {SERVICE}) -ge 1 ] && systemctl is-active {SERVICE}")
        assert whole.journal("_PID=1", f"UNIT={SERVICE}", "-g", "killed by the OOM killer")
        assert document(whole)["fabric_manager"]["pid"]
        wait_for_state(whole, "configured")


def limit(machine: Machine, memory: str) -> None:
    """For the running unit."""
    machine.check(f"systemctl set-property --runtime {SERVICE} MemoryMax={memory}")

"""What the bed promises to the scenarios."""

import os
import time
from collections.abc import Iterator

import pytest
from bed import METRICS_PORT, Bed, CommandFailed, Machine
from scenario import GPUS, MODULES, PLUG, SWITCHES

BOARD = f"{PLUG} && udevadm settle"
ANSWER = r"""
while read -r line && [ "$line" != $'\r' ]; do :; done
printf 'HTTP/1.0 200 OK\r\n\r\nI am %s\n' "$(cat /run/name)"
"""


def serve(machine: Machine, name: str) -> None:
    machine.put("/run/name", name.encode())
    machine.put("/run/answer", ANSWER.encode())
    machine.check(f"systemd-run --unit=web systemd-socket-activate --accept --inetd -l {METRICS_PORT} bash /run/answer")
    machine.wait_for(f"grep -q :{METRICS_PORT:04X} /proc/net/tcp /proc/net/tcp6", 60)


@pytest.fixture(scope="module")
def machine(bed: Bed) -> Iterator[Machine]:
    """One without the board; the tests here leave it as they found it, or fit to be used on."""
    with bed.restore() as made:
        yield made


class TestMachine:
    def test_is_a_whole_system_without_python(self, machine):
        assert machine.check("cat /proc/1/comm; systemctl is-system-running") == "systemd\nrunning\n"
        assert machine.run("command -v python3").code != 0

    def test_commands_give_status_and_both_streams(self, machine):
        result = machine.run("echo out; echo err >&2; exit 3")
        assert (result.code, result.output) == (3, "out\nerr\n")
        with pytest.raises(CommandFailed, match="err"):
            machine.check("echo err >&2; false")

    def test_a_command_that_takes_too_long_is_ended_and_the_next_one_works(self, machine):
        with pytest.raises(TimeoutError, match="sleep 1000"):
            machine.run("echo begun; sleep 1000", timeout=2)
        with pytest.raises(TimeoutError, match="test -e /nowhere"):
            machine.wait_for("test -e /nowhere", timeout=2)
        assert machine.check("pgrep -x sleep || echo none") == "none\n"

    def test_waits_for_a_condition(self, machine):
        machine.check("(sleep 1; touch /run/here) >/dev/null 2>&1 &")
        machine.wait_for("test -e /run/here")

    def test_files_travel_unchanged(self, machine):
        content = os.urandom(1 << 20)
        machine.put("/run/new/file", content, 0o640)
        assert machine.get("/run/new/file") == content
        assert machine.check("stat -c %a /run/new/file") == "640\n"
        with pytest.raises(CommandFailed, match="No such file"):
            machine.get("/nowhere")

    def test_the_journal_comes_as_records(self, machine):
        machine.check("echo hello | systemd-cat -t probe -p warning")
        (entry,) = machine.journal("--identifier=probe")
        assert (entry["MESSAGE"], entry["PRIORITY"], entry["SYSLOG_IDENTIFIER"]) == ("hello", "4", "probe")

    def test_two_machines_are_separate_and_reachable_from_outside(self, bed: Bed, machine):
        with bed.restore() as other:
            serve(machine, "one")
            serve(other, "two")
            assert [each.scrape("/anything") for each in (machine, other)] == ["I am one\n", "I am two\n"]

    def test_a_restored_machine_knows_the_time(self, machine):
        before = time.time()
        machine.set_clock()
        guest = float(machine.check("date +%s.%N"))
        assert before <= guest <= time.time() + 1

    def test_a_script_that_many_need_runs_once(self, bed: Bed):
        for _ in range(2):
            with bed.restore(after=("date +%N >>/usr/local/ran; echo x >/run/ran",)) as machine:
                assert len(machine.check("cat /usr/local/ran").splitlines()) == 1
                assert machine.check("cat /run/ran") == "x\n"

    def test_failures_leave_something_to_read(self, machine, tmp_path):
        machine.check("echo remember | systemd-cat")
        machine.keep(tmp_path)
        assert "remember" in (tmp_path / "journal.txt").read_text()
        assert (tmp_path / "console.txt").exists()


class TestBoard:
    def test_appears_on_the_bus_and_switches_and_gpus_get_their_drivers(self, machine):
        machine.check(BOARD)
        listed = machine.check("lspci -Dn -d 10de:").splitlines()
        assert [line.split()[:3] for line in listed] == [
            *([switch, "0680:", "10de:22a3"] for switch in SWITCHES),
            *([gpu, "0302:", "10de:2335"] for gpu in GPUS),
        ]
        for suffix in (".ko", ".ko.zst", ".ko.xz"):  # Debian's kmod knows no .gz
            machine.check(f"insmod {MODULES}/nvidia{suffix} NVreg_RegisterPCIDriver=0")
            assert machine.check("ls /proc/driver/nvidia-nvswitch/devices").split() == SWITCHES
            assert "nvidia-nvswitch\n" in machine.check("cat /proc/devices")
            machine.check("rmmod nvidia")
        machine.check("modprobe vfio-pci ids=10de:2335")
        assert machine.check("cd /sys/bus/pci/drivers/vfio-pci && ls -d 0000:*").split() == GPUS
        machine.wait_for(f"[ $(ls /dev/vfio | grep -c '^[0-9]') = {len(GPUS)} ]")


class TestPrograms:
    def test_the_daemon_and_fabric_manager_are_elf_files_that_need_no_python(self, machine):
        assert machine.check("fmsupervisor --version").startswith("fmsupervisor ")
        program = "/usr/local/nvidia/usr/bin/nv-fabricmanager"
        assert machine.check(f"{program} --version").startswith("Fabric Manager version is : 580.126.09\n")
        for path in ("/usr/local/bin/fmsupervisor", program):
            assert machine.get(path)[:4] == b"\x7fELF"

"""NVSwitches that are missing, late, slow, refused, blacklisted, lost, or back under another minor."""

from bed import Bed
from scenario import (
    BOARD,
    GPUS,
    IDLE,
    MODULES,
    RUNNING,
    SELFTEST,
    SWITCHES,
    behave,
    codes,
    condition,
    document,
    driver_of,
    is_loaded,
    major_of,
    node,
    plug,
    settings,
    switch_list,
    tell,
    wait_for_code,
    wait_for_state,
    wait_until,
    words,
)

DEVICE = "/sys/bus/pci/devices"
ABSENT = "/sys/module/fake_hgx/parameters/absent"
RESCAN = "echo 1 >/sys/bus/pci/rescan"
CONFIGURED = 2


class TestStandInDriver:
    def test_keeps_the_contract_that_the_scenarios_rely_on(self, bed: Bed) -> None:
        with bed.restore(after=BOARD) as machine:
            machine.check(f"insmod {MODULES}/nvidia.ko && {SELFTEST} check 4 && rmmod nvidia")


class TestWait:
    def test_a_switch_that_comes_late_is_waited_for(self, bed: Bed) -> None:
        with bed.restore(after=IDLE) as machine:
            waiting = "[switches]\nexpected = 4\ndeadline_seconds = 3\n"
            settings(machine, f"{waiting}[module]\nload = false\n", is_running=True)
            plug(machine, "absent=8")
            settings(machine, waiting, is_running=True)
            wait_for_state(machine, "waiting-for-switches")
            assert "3 of 4" in wait_for_code(machine, "FMS-301")["detail"]
            assert document(machine)["fabric_manager"]["starts"] == 0
            assert set(switch_list(machine)) == set(SWITCHES[:3])

            machine.check(f"echo 0 >{ABSENT} && {RESCAN}")
            found = wait_for_state(machine, "configured")
            assert codes(found) == set()
            assert {state for _, state in switch_list(machine).values()} == {CONFIGURED}

    def test_a_slow_probe_is_waited_for(self, bed: Bed) -> None:
        with bed.restore(after=IDLE) as machine:
            settings(
                machine,
                f'[module]\nparameters = ["slow_probe={SWITCHES[3]}", "probe_delay_ms=10000"]\n',
                is_running=True,
            )
            plug(machine)
            machine.wait_for(f"[ -e /proc/driver/nvidia-nvswitch/devices/{SWITCHES[2]} ]")
            found = document(machine)
            assert (found["state"], found["fabric_manager"]["starts"]) == ("waiting-for-module", 0)
            assert machine.run(f"[ -e /proc/driver/nvidia-nvswitch/devices/{SWITCHES[3]} ]").code == 1
            found = wait_for_state(machine, "configured")
            assert found["fabric_manager"]["starts"] == 1

    def test_a_failed_probe_is_told_and_so_is_a_blacklisted_switch_that_fabric_manager_then_goes_without(
        self, bed: Bed
    ) -> None:
        with bed.restore(after=IDLE) as machine:
            parameters = f'[module]\nparameters = ["fail_probe={SWITCHES[2]}", "blacklist={SWITCHES[1]}"]\n'
            settings(machine, f"{parameters}[switches]\ndeadline_seconds = 3\n", is_running=True)
            behave(machine, required_switches=3)
            plug(machine)
            wait_for_code(machine, "FMS-302", SWITCHES[2])
            found = document(machine)
            assert (found["state"], found["fabric_manager"]["starts"]) == ("waiting-for-switches", 0)
            assert driver_of(machine, SWITCHES[2]) == ""
            assert set(switch_list(machine)) == {*SWITCHES} - {SWITCHES[2]}
            assert SWITCHES[1] in condition(found, "FMS-304")["detail"]

            settings(
                machine,
                f'{parameters}[switches]\ndeadline_seconds = 3\nwhen_missing = "start-anyway"\n',
                is_running=True,
            )
            found = wait_until(machine, lambda found: found["fabric_manager"]["configured_at"] is not None)
            assert found["state"] == "degraded"
            assert codes(found) == {"FMS-302", "FMS-304", "FMS-309"}
            assert "No such device" in machine.run("head -c1 /dev/nvidia-nvswitch1").output


class TestWhileFabricManagerRuns:
    def test_a_switch_that_comes_back_under_another_minor_is_not_taken_for_configured(self, bed: Bed) -> None:
        with bed.restore(after=RUNNING) as machine:
            assert "is in use" in machine.run("rmmod nvidia").output
            first, second = SWITCHES[:2]
            machine.check(f"echo 1 >{DEVICE}/{first}/remove && echo 1 >{DEVICE}/{second}/remove")
            wait_until(machine, lambda found: {row["subject"] for row in found["conditions"]} == {first, second})
            found = document(machine)
            assert (found["state"], codes(found)) == ("degraded", {"FMS-305"})
            assert set(switch_list(machine)) == set(SWITCHES[2:])

            machine.check(f"echo 1 >{ABSENT} && {RESCAN} && echo 0 >{ABSENT} && {RESCAN}")  # the second one first
            wait_until(machine, lambda found: codes(found) == {"FMS-307"})
            found = wait_until(machine, lambda found: all(row["minor"] is not None for row in found["switches"]))
            assert {row["subject"] for row in found["conditions"]} == {first, second}
            minors = {row["pci_bus_id"]: row["minor"] for row in found["switches"]}
            assert minors == dict(zip((second, first, *SWITCHES[2:]), range(4), strict=True))
            assert minors == {bus_id: minor for bus_id, (minor, _) in switch_list(machine).items()}
            major = major_of(machine, "nvidia-nvswitch")
            for minor in range(4):
                assert node(machine, f"/dev/nvidia-nvswitch{minor}")[:3] == ("character special file", major, minor)
            assert found["fabric_manager"]["starts"] == 1, "guests are running"

    def test_a_silent_loss_is_noticed_within_30_seconds(self, bed: Bed) -> None:
        with bed.restore(after=RUNNING) as machine:
            since = float(machine.check(f"echo 8 >{ABSENT}; cut -d' ' -f1 /proc/uptime"))
            wait_for_code(machine, "FMS-306", SWITCHES[3])
            assert float(machine.check("cut -d' ' -f1 /proc/uptime")) - since < 30
            assert document(machine)["state"] == "degraded"
            assert driver_of(machine, SWITCHES[3]) == "nvidia-nvswitch", "the kernel has not noticed"

    def test_a_gpu_that_somebody_binds_to_the_host_is_told_until_it_is_given_back(self, bed: Bed) -> None:
        with bed.restore(after=RUNNING) as machine:
            gpu = GPUS[0]
            machine.check(
                f"echo nvidia >{DEVICE}/{gpu}/driver_override && echo {gpu} >{DEVICE}/{gpu}/driver/unbind && "
                f"echo {gpu} >/sys/bus/pci/drivers_probe"
            )
            wait_for_code(machine, "FMS-206", gpu)
            assert driver_of(machine, gpu) == "nvidia"
            assert document(machine)["state"] == "configured", "the fabric itself is whole"

            machine.check(
                f"echo vfio-pci >{DEVICE}/{gpu}/driver_override && echo {gpu} >{DEVICE}/{gpu}/driver/unbind && "
                f"echo {gpu} >/sys/bus/pci/drivers_probe"
            )
            wait_until(machine, lambda found: codes(found) == set())

    def test_a_module_that_is_reloaded_while_fabric_manager_is_down_gets_new_nodes(self, bed: Bed) -> None:
        with bed.restore(after=IDLE) as machine:
            settings(
                machine,
                "[restart]\ninitial_delay_seconds = 15\njitter_seconds = 0\n[module]\nload = false\n",
                is_running=True,
            )
            plug(machine)
            machine.check(f"insmod {MODULES}/nvidia.ko")
            wait_for_state(machine, "configured")
            before = major_of(machine, "nvidia-nvswitch")
            tell(machine, "crash 9")
            wait_for_state(machine, "backoff")
            machine.check(f"rmmod nvidia && insmod {MODULES}/nvidia.ko NVreg_ImexChannelCount=0")  # one major less
            after = major_of(machine, "nvidia-nvswitch")
            assert after != before
            wait_for_state(machine, "configured")
            assert node(machine, "/dev/nvidia-nvswitch3") == ("character special file", after, 3, "666 root:root")
            assert f"/dev/nvidia-nvswitch3 c {after} 3" in words(machine)
            assert {state for _, state in switch_list(machine).values()} == {CONFIGURED}


class TestOtherBoards:
    def test_without_a_pci_switch_there_is_nothing_to_do_and_six_switches_are_as_good_as_four(self, bed: Bed) -> None:
        with bed.restore(after=IDLE) as machine:
            behave(machine, required_switches=6)
            plug(machine, "board=b200")
            wait_until(machine, lambda found: len(found["gpus"]) == len(GPUS))
            assert document(machine)["state"] == "not-applicable"
            assert not is_loaded(machine)

            machine.check("rmmod fake_hgx")
            plug(machine, "board=a100")
            found = wait_for_state(machine, "configured")
            assert len(found["switches"]) == 6
            assert [state for _, state in switch_list(machine).values()] == [CONFIGURED] * 6
            assert node(machine, "/dev/nvidia-nvswitch5")[2] == 5

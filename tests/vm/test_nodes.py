"""The device nodes, which neither driver nor udev makes."""

from bed import Bed
from scenario import (
    IDLE,
    RUNNING,
    SWITCHES,
    codes,
    document,
    major_of,
    node,
    plug,
    switch_list,
    wait_for_code,
    wait_for_state,
)

CHARACTER = "character special file"
STALE_MAJOR = 200


class TestNodes:
    def test_have_the_drivers_numbers_and_are_made_right_again_when_somebody_changes_them(self, bed: Bed) -> None:
        with bed.restore(after=RUNNING) as machine:
            switch, link = major_of(machine, "nvidia-nvswitch"), major_of(machine, "nvidia-nvlink")
            wanted = {
                "/dev/nvidia-nvswitchctl": (CHARACTER, switch, 255, "666 root:root"),
                **{f"/dev/nvidia-nvswitch{minor}": (CHARACTER, switch, minor, "666 root:root") for minor in range(4)},
                "/dev/nvidia-nvlink": (CHARACTER, link, 0, "666 root:root"),
                "/dev/nvidiactl": (CHARACTER, 195, 255, "666 root:root"),
                "/dev/nvidia-caps/nvidia-cap0": (CHARACTER, major_of(machine, "nvidia-caps"), 0, "400 root:root"),
            }
            assert {path: node(machine, path) for path in wanted} == wanted
            assert set(machine.check("find /dev -name '*nvidia*' -type c").split()) == set(wanted)

            machine.check(
                "chmod 600 /dev/nvidia-nvswitch1; chown 1:1 /dev/nvidia-nvlink; rm /dev/nvidia-nvswitch2; "
                f"mknod /dev/stale c {STALE_MAJOR} 3 && mv /dev/stale /dev/nvidia-nvswitch3"
            )
            for path, (_, major, minor, permissions) in wanted.items():
                machine.wait_for(f"[ \"$(stat -c '%Hr %Lr %a %U:%G' {path})\" = '{major} {minor} {permissions}' ]")
            found = document(machine)
            assert (found["state"], codes(found), found["fabric_manager"]["starts"]) == ("configured", set(), 1)

    def test_what_somebody_planted_in_the_way_is_told_and_left_alone(self, bed: Bed) -> None:
        with bed.restore(after=IDLE) as machine:
            machine.check(
                "echo precious >/usr/local/victim && chmod 600 /usr/local/victim && "
                "ln -s /usr/local/victim /dev/nvidia-nvswitchctl && echo mine >/dev/nvidia-nvlink && "
                f"mknod /dev/nvidia-nvswitch0 c {STALE_MAJOR} 0"  # of an earlier load
            )
            plug(machine)
            wait_for_code(machine, "FMS-401", "a symbolic link at /dev/nvidia-nvswitchctl")
            found = document(machine)
            told = {row["subject"]: row["detail"] for row in found["conditions"] if row["code"] == "FMS-401"}
            assert set(told) == {"/dev/nvidia-nvswitchctl", "/dev/nvidia-nvlink"}
            assert "a regular file" in told["/dev/nvidia-nvlink"]
            assert (found["state"], found["fabric_manager"]["starts"]) == ("failed", 0)
            assert node(machine, "/usr/local/victim")[3] == "600 root:root"
            assert machine.check("cat /usr/local/victim /dev/nvidia-nvlink") == "precious\nmine\n"
            assert node(machine, "/dev/nvidia-nvswitch0")[1] == major_of(machine, "nvidia-nvswitch")

            machine.check("rm /dev/nvidia-nvswitchctl /dev/nvidia-nvlink")
            wait_for_state(machine, "configured")
            assert machine.check("cat /usr/local/victim") == "precious\n"


class TestWithoutUdevd:
    def test_everything_works(self, bed: Bed) -> None:
        with bed.restore(after=IDLE) as machine:
            machine.check(
                "systemctl stop systemd-udevd-kernel.socket systemd-udevd-control.socket systemd-udevd.service"
            )
            plug(machine)
            wait_for_state(machine, "configured")
            assert machine.run("systemctl is-active systemd-udevd.service").output == "inactive\n"
            machine.check(f"echo 1 >/sys/bus/pci/devices/{SWITCHES[3]}/remove")
            wait_for_code(machine, "FMS-305", SWITCHES[3])
            assert set(switch_list(machine)) == set(SWITCHES[:3])

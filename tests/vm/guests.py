"""A host on which a guest holds its GPU: a script for it, and one for ``Bed.restore(after=)`` with a whole fabric.

The guest is a process that has the IOMMU group of the last GPU open, as QEMU has.
"""

from bed import METRICS_PORT, Machine
from scenario import BOARD, GPUS, RUNNING, SETTINGS

HANG_SECONDS = 4
SETTINGS_TEXT = f"""[metrics]
listen = "0.0.0.0:{METRICS_PORT}"
[fabric_manager]
hang_seconds = {HANG_SECONDS}
stop_timeout_seconds = 4
[restart]
jitter_seconds = 0
"""

_GROUP = "/run/guest-group"
_GUEST = f"""
group=$(basename $(readlink /sys/bus/pci/devices/{GPUS[7]}/iommu_group)) && echo $group >{_GROUP}
systemd-run --quiet --unit=guest bash -c "exec 9<>/dev/vfio/$group && exec sleep infinity"
until ls -l /proc/$(systemctl show -P MainPID guest)/fd 2>/dev/null | grep -q /dev/vfio/; do sleep 0.2; done
"""

PREPARE = f"cat >{SETTINGS} <<'END'\n{SETTINGS_TEXT}END\n{_GUEST}"  # on a machine with the board
WHOLE = f"""{BOARD}
{PREPARE}
{RUNNING.removeprefix(f"{BOARD} && ")}
until grep -q '"gpus_registered": *8' /run/fmsupervisor/status.json; do sleep 0.2; done
"""


def guest(machine: Machine) -> str:
    """The pid of the guest."""
    return machine.check("systemctl show -P MainPID guest").strip()


def check_guest(machine: Machine, pid: str) -> None:
    """It still runs and still holds its group, and no GPU has changed hands."""
    assert guest(machine) == pid
    assert f"/dev/vfio/{machine.check(f'cat {_GROUP}').strip()}\n" in machine.check(f"ls -l /proc/{pid}/fd")
    drivers = machine.check("readlink " + " ".join(f"/sys/bus/pci/devices/{gpu}/driver" for gpu in GPUS)).split()
    assert {path.rpartition("/")[2] for path in drivers} == {"vfio-pci"}

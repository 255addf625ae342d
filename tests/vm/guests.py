"""A host on which a guest holds its GPU, for ``Bed.restore(after=)``: without a driver yet, and with a whole fabric.

The guest is a process that has the IOMMU group of the last GPU open, as QEMU has.
"""

from bed import METRICS_PORT, Machine
from scenario import GPUS, IDLE, PLUG, SERVICE, SETTINGS, STATUS

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
_WITH_SETTINGS = f"cat >{SETTINGS} <<'END'\n{SETTINGS_TEXT}END\n{IDLE[0]}"

# The daemon runs and may not load the module until the settings are SETTINGS_TEXT again.
HELD = (
    _WITH_SETTINGS,
    f"""
printf '[module]\\nload = false\\n' >>{SETTINGS} && systemctl reload {SERVICE}
{PLUG} && udevadm settle && {_GUEST}
""",
)
WHOLE = (
    _WITH_SETTINGS,
    f"""
{PLUG} && until grep -q '"gpus_registered": *8' {STATUS}; do sleep 0.5; done
{_GUEST}
""",
)


def guest(machine: Machine) -> str:
    """The pid of the guest."""
    return machine.check("systemctl show -P MainPID guest").strip()


def check_guest(machine: Machine, pid: str) -> None:
    """It still runs and still holds its group, and no GPU has changed hands."""
    assert guest(machine) == pid
    assert f"/dev/vfio/{machine.check(f'cat {_GROUP}').strip()}\n" in machine.check(f"ls -l /proc/{pid}/fd")
    drivers = machine.check("readlink " + " ".join(f"/sys/bus/pci/devices/{gpu}/driver" for gpu in GPUS)).split()
    assert {path.rpartition("/")[2] for path in drivers} == {"vfio-pci"}

"""The simulated board: who sits where, and how a simulated device node is written down.

Shared by the tree, the simulated kernel and the simulated nv-fabricmanager, which starts for every test: cheap imports
only. Bus ids, device ids and wording are those of an HGX H200 board; the identifiers are invented.
"""

SWITCHES = ("0000:83:00.0", "0000:84:00.0", "0000:85:00.0", "0000:86:00.0")
GPUS = (
    "0000:91:00.0",
    "0000:92:00.0",
    "0000:a1:00.0",
    "0000:a2:00.0",
    "0000:b1:00.0",
    "0000:b2:00.0",
    "0000:c1:00.0",
    "0000:c2:00.0",
)

SIMULATOR_DIRECTORY = "/.simulator"
BEHAVIOUR_FILE = "/.simulator/fabric_manager.json"
HEARTBEAT_FILE = "/.simulator/heartbeat.json"
COMMAND_FIFO = "/.simulator/commands"
REGISTRATIONS = "/.simulator/registrations"  # one file per GPU whose guest has registered it

CONTROL_MINOR = 255  # NVSWITCH_CTL_MINOR, linux_nvswitch.c

_NODE_MAGIC = "fmsupervisor simulated device node"
_MODULE_IDS = (4, 6, 5, 7, 0, 2, 1, 3)  # no order, as on real boards
_LINK_MASKS = ("ffffffff00000000", "ffffffff000000ff", "ffffffff000f000f", "ffffffff00000000")
_FIRST_SWITCH_BUS = 0x83


def bus_number(pci_bus_id: str) -> int:
    """0x83 of ``0000:83:00.0``."""
    return int(pci_bus_id.split(":")[1], 16)


def physical_id(switch: str) -> int:
    """Position of a switch on the board, 0 to 3."""
    return (bus_number(switch) - _FIRST_SWITCH_BUS) % 16


def link_mask(switch: str) -> str:
    """Enabled link mask in the spelling of the log."""
    return _LINK_MASKS[physical_id(switch) % len(_LINK_MASKS)]


def switch_uuid(switch: str) -> str:
    """As the driver spells it: SWX- and upper-case hexadecimal digits."""
    return f"SWX-5A{bus_number(switch):02X}40D1-7C3E-4B52-91AF-0E6D2B{bus_number(switch):02X}88C4"


def gpu_uuid(gpu: str) -> str:
    """As NVML spells it: GPU- and lower-case hexadecimal digits."""
    return f"GPU-e7{bus_number(gpu):02x}19b0-2d64-4f1a-8c05-93b7da{bus_number(gpu):02x}61fe"


def module_id(gpu: str) -> int:
    """Zero-based, as Fabric Manager's in-band lines count."""
    return _MODULE_IDS[GPUS.index(gpu)] if gpu in GPUS else bus_number(gpu) % 8


def format_node(major: int, minor: int, mode: int, uid: int, gid: int) -> str:
    """Contents of the regular file that stands for a character device."""
    return f"{_NODE_MAGIC}\nc {major} {minor} {mode:o} {uid} {gid}\n"


def parse_node(text: str) -> tuple[int, int, int, int, int] | None:
    """(major, minor, mode, uid, gid), or None when the file is no simulated node."""
    first, _, rest = text.partition("\n")
    fields = rest.split()
    if first != _NODE_MAGIC or len(fields) != 6 or fields[0] != "c":  # noqa: PLR2004 - "c" and five numbers
        return None
    try:
        return int(fields[1]), int(fields[2]), int(fields[3], 8), int(fields[4]), int(fields[5])
    except ValueError:
        return None


def parse_majors(devices: str) -> dict[str, int]:
    """Character devices of /proc/devices: name to major (fs/char_dev.c, chrdev_show)."""
    majors: dict[str, int] = {}
    for line in devices.partition("Block devices:")[0].splitlines():
        number, _, name = line.strip().partition(" ")
        if number.isdigit() and name:
            majors[name] = int(number)
    return majors

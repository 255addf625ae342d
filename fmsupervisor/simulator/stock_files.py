"""Contents of files that the simulated host has from the start.

The keys of fabricmanager.cfg, their order and their defaults are those of the package of driver 595; the comments are
our own. Column layout of /proc/net/tcp and unix: Documentation/networking/proc_net_tcp.rst and net/unix/af_unix.c.
"""

import gzip
import struct
from collections.abc import Mapping

PROC_DEVICES = """\
Character devices:
  1 mem
  4 /dev/vc/0
  4 tty
  5 /dev/tty
  7 vcs
 10 misc
 13 input
189 usb_device
226 drm
508 vfio
509 infiniband_mad

Block devices:
  7 loop
  8 sd
259 blkext
"""

VERMAGIC_FLAGS = "SMP preempt mod_unload modversions"
KERNEL_SYMBOLS = {"module_layout": 0x5F2A71C3, "pci_enable_device": 0x1B8C0D95}  # with CRC

NET_TCP_HEADER = (
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode".ljust(149) + "\n"
)
NET_TCP6_HEADER = (
    "  sl  local_address                         remote_address                        st tx_queue rx_queue"
    " tr tm->when retrnsmt   uid  timeout inode\n"
)
NET_TCP_PORT_6666 = (
    "   0: 0100007F:1A0A 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0"
    "        0 26211 1 0000000000000000 100 0 0 10 0".ljust(149)
    + "\n"
)
NET_UNIX_HEADER = "Num       RefCount Protocol Flags    Type St Inode Path\n"

TOPOLOGY = b"simulated topology of an HGX H100/H200 board\n" + bytes(range(256)) * 8

# Key, default, first driver branch that has the key, comment.
_KEYS = (
    ("LOG_LEVEL", "4", 0, "0 nothing, 1 critical, 2 error, 3 warning, 4 info; each with all that is worse"),
    ("LOG_FILE_NAME", "/var/log/fabricmanager.log", 0, "Log file; empty means standard error"),
    ("LOG_APPEND_TO_LOG", "1", 0, "0 begins the log anew at each start, 1 appends"),
    ("LOG_FILE_MAX_SIZE", "1024", 0, "Size limit of the log in MB"),
    ("LOG_MAX_ROTATE_COUNT", "3", 560, "Old logs to keep; 0 ends logging at the limit"),
    ("LOG_USE_SYSLOG", "0", 0, "1 sends everything to syslog"),
    ("DAEMONIZE", "1", 0, "1 goes to the background"),
    ("BIND_INTERFACE_IP", "127.0.0.1", 0, "Address of internal traffic"),
    ("STARTING_TCP_PORT", "16000", 0, "First port of internal traffic"),
    ("UNIX_SOCKET_PATH", "", 0, "Socket that replaces the port above"),
    ("FABRIC_MODE", "0", 0, "0 bare metal or full pass-through, 1 shared NVSwitch, 2 vGPU"),
    ("FABRIC_MODE_RESTART", "0", 0, "1 takes up the partitions of an earlier run"),
    ("STATE_FILE_NAME", "/tmp/fabricmanager.state", 0, "State of fabric modes 1 and 2"),  # noqa: S108 - the stock value
    ("FM_CMD_BIND_INTERFACE", "127.0.0.1", 0, "Address of the command API"),
    ("FM_CMD_PORT_NUMBER", "6666", 0, "Port of the command API"),
    ("FM_CMD_UNIX_SOCKET_PATH", "", 0, "Socket that replaces the command port"),
    ("FM_CMD_VSOCK_CID", "", 595, "Context id of the command API on vsock"),
    ("FM_CMD_VSOCK_PORT_NUMBER", "1447971919", 595, "Port of the command API on vsock"),
    ("FM_STAY_RESIDENT_ON_FAILURES", "0", 0, "1 stays alive after a failure"),
    ("ACCESS_LINK_FAILURE_MODE", "0", 0, "When a link between GPU and switch is down"),
    ("TRUNK_LINK_FAILURE_MODE", "0", 0, "When a link between switches is down"),
    ("NVSWITCH_FAILURE_MODE", "0", 0, "When a switch is down"),
    ("ABORT_CUDA_JOBS_ON_FM_EXIT", "1", 0, "A100 only"),
    ("TOPOLOGY_FILE_PATH", "/usr/share/nvidia/nvswitch", 0, "Directory of the topology files"),
    ("USE_RPC", "1", 595, "Multi-node only"),
    ("NETWORK_INTERFACE", "", 595, "Multi-node only"),
    ("ENABLE_AUTH_ENCRYPTION", "0", 595, "Multi-node only"),
    ("AUTH_SOURCE", "", 595, "Multi-node only"),
    ("SERVER_KEY", "", 595, "Multi-node only"),
    ("SERVER_CERT", "", 595, "Multi-node only"),
    ("SERVER_CERT_AUTH", "", 595, "Multi-node only"),
    ("CLIENT_KEY", "", 595, "Multi-node only"),
    ("CLIENT_CERT", "", 595, "Multi-node only"),
    ("CLIENT_CERT_AUTH", "", 595, "Multi-node only"),
    ("SECURITY_TARGET_OVERRIDE", "", 595, "Multi-node only"),
    ("MNNVL_RESILIENCY_MODE", "0", 595, "Rack scale only"),
    ("MNNVL_ENABLE_DEFAULT_PARTITION", "1", 595, "Rack scale only"),
    ("PARTITION_RAIL_POLICY", "greedy", 595, "greedy or symmetric"),
)


def stock_config(version: str | None) -> str:
    """fabricmanager.cfg as the package of this version ships it."""
    branch = int(version.partition(".")[0]) if version else 0
    blocks = [f"# {comment}.\n{key}={value}\n" for key, value, first, comment in _KEYS if branch >= first]
    return "# Settings of Fabric Manager, read once at its start. KEY=VALUE, no quotes.\n\n" + "\n".join(blocks)


def bridge_vpd() -> bytes:
    """Vital product data of a ConnectX device that manages switches (PCI Local Bus Specification, appendix I)."""
    name = b"Simulated NVLink bridge"
    fields = b"".join(
        key + struct.pack("B", len(value)) + value
        for key, value in ((b"PN", b"SIM-0001"), (b"VA", b"MLX:MN=MLNX:CSKU=V2:SMDL=SW_MNG:PCIB=05"))
    )
    fields += b"RV\x01\x00"
    return b"\x82" + struct.pack("<H", len(name)) + name + b"\x90" + struct.pack("<H", len(fields)) + fields + b"\x78"


def symvers(crcs: Mapping[str, int]) -> bytes:
    """symvers.gz of a kernel package: the symbols that the kernel exports, with their CRCs."""
    lines = (f"0x{crc:08x}\t{name}\tvmlinux\tEXPORT_SYMBOL\t\n" for name, crc in crcs.items())
    return gzip.compress("".join(lines).encode(), mtime=0)


def known_keys(version: str) -> frozenset[str]:
    """Keys that this version of Fabric Manager does not refuse."""
    branch = int(version.partition(".")[0])
    unlisted = {"DATABASE_PATH", "FABRIC_NODE_CONFIG_FILE", "FM_SM_MGMT_PORT_GUID", "FM_SM_IPC_INTERFACE"}
    listed = {key for key, _, first, _ in _KEYS if branch >= first}
    return frozenset(listed | (unlisted if branch >= 535 else set()))  # noqa: PLR2004 - driver branch

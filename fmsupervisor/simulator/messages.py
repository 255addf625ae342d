"""What nv-fabricmanager writes, word for word as public logs of it show, with the drift between driver branches.

Complete start-up and in-band traffic: 535.161.08 on HGX H100; other wordings: 550 to 595 and published error reports.
A message is (level, text); level "" is a line without the bracket prefix. Cheap imports only: see ``fabric_manager``.
"""

from collections.abc import Iterator, Mapping, Sequence

from fmsupervisor.simulator.hardware import bus_number, gpu_uuid, link_mask, module_id, physical_id, switch_uuid

Message = tuple[str, str]

CONFIGURED = (
    "Successfully configured all the available NVSwitches to route GPU NVLink traffic. "
    "NVLink Peer-to-Peer support will be enabled once the GPUs are successfully registered with the NVLink fabric."
)
NOTHING_TO_DO = (
    "request to query NVSwitch device information from NVSwitch driver failed with error:"
    "WARNING Nothing to do [NV_WARN_NOTHING_TO_DO]"
)
TOPOLOGY_MISMATCH = (
    "detected number of NVSwitches don't match with any supported system topology, aborting fabric manager"
)
RESET_NEEDED = "All GPUs in the partition need to be reset to recover"

# Echo of the configuration: text, key, default, unit.
_ECHO = (
    ("Logging level", "LOG_LEVEL", "4", ""),
    ("Logging file name/path", "LOG_FILE_NAME", "/var/log/fabricmanager.log", ""),
    ("Append to log file", "LOG_APPEND_TO_LOG", "1", ""),
    ("Max Log file size", "LOG_FILE_MAX_SIZE", "1024", " (MBs)"),
    ("Use Syslog file", "LOG_USE_SYSLOG", "0", ""),
    ("Fabric Manager communication ports", "STARTING_TCP_PORT", "16000", ""),
    ("Fabric Mode", "FABRIC_MODE", "0", ""),
    ("Fabric Mode Restart", "FABRIC_MODE_RESTART", "0", ""),
    ("FM Library communication bind interface", "FM_CMD_BIND_INTERFACE", "127.0.0.1", ""),
    ("FM Library communication unix domain socket", "FM_CMD_UNIX_SOCKET_PATH", "", ""),
    ("FM Library communication port number", "FM_CMD_PORT_NUMBER", "6666", ""),
    ("Continue to run when facing failures", "FM_STAY_RESIDENT_ON_FAILURES", "0", ""),
    ("Option when facing GPU to NVSwitch NVLink failure", "ACCESS_LINK_FAILURE_MODE", "0", ""),
    ("Option when facing NVSwitch to NVSwitch NVLink failure", "TRUNK_LINK_FAILURE_MODE", "0", ""),
    ("Option when facing NVSwitch failure", "NVSWITCH_FAILURE_MODE", "0", ""),
    ("Abort CUDA jobs when FM exits", "ABORT_CUDA_JOBS_ON_FM_EXIT", "1", ""),
)


def branch(version: str) -> int:
    """580 of ``580.126.09``."""
    return int(version.partition(".")[0])


def version_output(version: str) -> str:
    """Standard output of --version: two lines, the last without a newline."""
    number = branch(version)
    return (
        f"Fabric Manager version is : {version}\n"
        f"Build Info - Branch: rel/gpu_drv/r{number}/r{number}_00-1, Changelist: 0"
    )


def version_rejected(fabric_manager: str, driver: str) -> str:
    """Refusal of a loaded driver of another version; exit status 1."""
    return (
        f"fabric manager NVIDIA GPU driver interface version {fabric_manager} don't match with driver version "
        f"{driver}. Please update with matching NVIDIA driver package."
    )


def invalid_item(key: str) -> str:
    """Refusal of the configuration, on standard error only."""
    return f"fabric manager config file item: {key} has an invalid value"


def directory_denied(path: str) -> str:
    """Refusal of the run directory."""
    return f"fabric manager don't have access permissions to directory {path}"


def loader_error(library: str) -> str:
    """The dynamic loader's own message; exit status 127."""
    return (
        f"nv-fabricmanager: error while loading shared libraries: {library}: "
        "cannot open shared object file: No such file or directory"
    )


def settings_echo(version: str, options: Mapping[str, str]) -> Iterator[Message]:
    """The first lines of a session."""
    yield "INFO", f"Fabric Manager version {version} is running with the following configuration options"
    for text, key, default, unit in _ECHO:
        yield "INFO", f"{text} = {options.get(key, default)}{unit}"
    if branch(version) >= 535:  # noqa: PLR2004 - driver branch; so are the other numbers here
        yield "INFO", "LMDB_LOG: Successfully initialized LMDB"


def topology(version: str, topology_path: str, switches: Sequence[str]) -> Iterator[Message]:
    """From the connection to the table of switches."""
    if branch(version) >= 595:  # noqa: PLR2004
        yield "INFO", "Disabling RPC mode for single node configuration."
    yield "INFO", "Connected to 1 node."
    yield "", ""
    yield "INFO", "Getting fabric node FM version info"
    yield "INFO", "getting NVSwitch device information"
    yield "INFO", "detected system topology is based on DGX/HGX H100"
    file = f"{topology_path}/dgxh100_hgxh100_topology"
    yield (
        "INFO",
        (
            f"parsed fabric topology file {file} successfully. topology name: DGXH100_HGXH100, "
            "build time: Mon Feb 27 17:25:17 2023"
        ),
    )
    yield "", "."
    yield "INFO", f"fabric topology file {file} is parsed."
    yield "INFO", "number of devices specified in topology file NVSwitches: 4, GPUs: 8"
    yield "INFO", "getting NVSwitch device information"
    yield "INFO", "dumping all the detected NVSwitch information"
    for index, switch in enumerate(switches):
        yield (
            "",
            (
                f"  Index: {index:02d}  Physical Id: {physical_id(switch)}  PCI Bus ID: {eight_digits(switch)}  "
                f"Enabled Link Mask: {link_mask(switch)}  Arch Type: 3  UUID : {switch_uuid(switch)}"
            ),
        )
    yield "", ""
    yield "INFO", "number of GPU base board detected: 1"
    yield "INFO", "getting NVLink device information"
    yield (
        "INFO",
        "NVLink Inband feature is enabled. Hence Fabric Manager is not opening and operating on GPUs directly.",
    )
    yield "INFO", "NVLink Autonomous Link Initialization (ALI) feature is enabled."


def routing(switches: Sequence[str]) -> Iterator[Message]:
    """Routing of each switch."""
    for switch in switches:
        yield "INFO", f"start NVSwitch 0/{physical_id(switch)} routing configuration"
        yield "INFO", f"completed NVSwitch 0/{physical_id(switch)} routing configuration"


def registration(version: str, gpu: str) -> Iterator[Message]:
    """A GPU joins the fabric: probe request, the two lines of its acceptance, probe response."""
    index = bus_number(gpu) << 8
    request = f"{0x1812B35BE83A0000 + index:x}"
    handle = 0x33403C3919000000 + index
    yield from _inband(
        f"Received an inband message:{_blank(version)} Message header details: magic Id:adbc request Id:{request} "
        "status:0 type:0 length:4d",
        f"Message payload details: Probe request: Pci Info:{index:x} Module Id:{module_id(gpu)} Uuid:{gpu_uuid(gpu)} "
        "Discovered LinkMask:3ffff Enabled LinkMask:3ffff Cap Mask:0",
    )
    yield "INFO", f"added GPU with UUID {gpu_uuid(gpu)} based on NVLink Inband GPU probe request."
    yield (
        "INFO",
        (
            f"{_node_word(version)}: 0  Physical ID: {module_id(gpu)}  Index: {index}  "
            f"Handle: {handle & 0xFFFFFFFF:x}  PCI Bus ID: {eight_digits(gpu).upper()}  "
            f"Discovered Link Mask: 3ffff  Enabled Link Mask: 3ffff  UUID: {gpu_uuid(gpu)}"
        ),
    )
    yield "", ""
    yield from _inband(
        f"Sending inband response message:{_blank(version)} Message header details: magic Id:adbc request Id:{request} "
        "status:0 type:1 length:66",
        f"Message payload details: Probe response: Handle:{handle:x} GfId:0 FM Caps:7 Fabric Partition Id:ffff "
        "GPA Address:8260000000000 GPA Address Range:8000000000 FLA Address:260000000000 FLA Address Range:8000000000",
    )


def multicast(version: str, number: int, gpus: Sequence[str]) -> Iterator[Message]:
    """A communicator sets up its multicast team and releases it: nine lines and three blanks."""
    request = 0x73A12417A65C0000 + number
    team = 0x7777BFAB5A110000 + number
    blank = _blank(version)
    received = f"Received an inband message:{blank} Message header details: magic Id:adbc request Id:"
    handles = " ".join(f"{0x33403C3919000000 + (bus_number(gpu) << 8):x}" for gpu in gpus)
    yield from _inband(
        f"{received}{request:x} status:0 type:2 length:56",
        f"Message payload details:Team setup request: Allocation Size:60000000 Flags:0 Number of GPUs:{len(gpus)} "
        f"GPU Handles:{handles}",
    )
    yield "INFO", f"multicast group {number % 64} is allocated."
    yield "INFO", f"successfully setup multicast team for request id {request}."
    yield from _inband(
        f"Sending inband response message:{blank} Message header details: magic Id:adbc request Id:{request:x} "
        "status:0 type:3 length:24",
        f"Message payload details:Team setup response: Team Handle:{team:x} Flags:0 Address Base:c000000000000 "
        "Address Size:60000000",
    )
    yield from _inband(
        f"{received}{request + 1:x} status:0 type:4 length:14",
        f"Message payload details:Team release request: Team Handle:{team:x} Flags:0",
    )
    yield "INFO", f"multicast group {number % 64} is freed."
    yield "INFO", f"successfully released multicast team with handle {team}."


def switch_error(version: str, severity: str, sxid: int, switch: str, port: int) -> Message:
    """One line of an SXid; Fabric Manager writes each twice."""
    return (
        "ERROR",
        (
            f"detected NVSwitch {severity} error {sxid} on {_node_word(version)} 0 on NVSwitch pci bus id "
            f"{eight_digits(switch)} physical id {physical_id(switch)} port {port}"
        ),
    )


def stale_handle(version: str) -> Iterator[Message]:
    """A multicast request with a GPU handle of an earlier session, and the refusal."""
    if branch(version) < 570:  # noqa: PLR2004
        yield (
            "ERROR",
            (
                "failed to find the GPU handle 5410063385821516767 in the multicast team request setup "
                "6130285411925746235."
            ),
        )
    else:
        yield (
            "ERROR",
            (
                "failed to find the member GPU handle 2977498750880931997 in partition -1 in the multicast team setup "
                "request id 1758886358995437."
            ),
        )
    yield from _inband(
        f"Sending inband response message:{_blank(version)} Message header details: magic Id:adbc "
        "request Id:63fb2a4a0d1ed status:57 type:3 length:24",
        "Message payload details:Team setup response: Team Handle:0 Flags:0 Address Base:0 Address Size:0",
    )


def eight_digits(pci_bus_id: str) -> str:
    """Fabric Manager writes the PCI domain with eight digits."""
    return f"0000{pci_bus_id}"


def _inband(header: str, payload: str) -> Iterator[Message]:
    yield "INFO", header
    yield "", payload
    yield "", ""


def _node_word(version: str) -> str:
    return "fid" if branch(version) < 590 else "NodeId"  # noqa: PLR2004


def _blank(version: str) -> str:
    """Before the header details: one more blank until 570 or so (535 has two, a sample of 2025 has one)."""
    return " " if branch(version) < 570 else ""  # noqa: PLR2004

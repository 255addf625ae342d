"""The NVSwitch driver's own view of its switches: GET_DEVICES_V2 on /dev/nvidia-nvswitchctl.

Source: NVIDIA open-gpu-kernel-modules ioctl_nvswitch.h, ioctl_common_nvswitch.h, linux_nvswitch.c (515 to 595). The
ioctl needs no privilege, changes nothing, logs nothing and may be polled. Only this node is ever opened: an open of
nvidia-nvswitchN is logged by the kernel and pins the module, and nvidia-nvlink can be open only once, by Fabric
Manager. The driver refuses a buffer of the wrong size with EINVAL; entries have 56 bytes from 550.78 on, 52 before.
"""

import errno
import fcntl
import os
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fmsupervisor.errors import CannotObserve
from fmsupervisor.facts import DeviceState, DriverState, DriverView, SwitchDevice

CONTROL_NODE = "/dev/nvidia-nvswitchctl"
CONTROL_MINOR = 255  # NVSWITCH_CTL_MINOR
ENTRY_SIZES = (56, 52)  # bytes, in the order in which they are tried

_MAX_DEVICES = 64  # NVSWITCH_DEVICE_INSTANCE_MAX
_REQUESTS = {56: 0x8E046303, 52: 0x8D046303}  # _IOR('c', 3, u32 count + 64 entries)
_COUNT = struct.Struct("=I")
# deviceInstance, uuid, pciDomain, pciBus, pciDevice, pciFunction, driverState, deviceState, deviceReason, physId
_ENTRY = struct.Struct("=I16s8I")
_NO_PHYSICAL_ID = 0xFFFFFFFF
_DRIVER_STATES = frozenset(state.value for state in DriverState)
_DEVICE_STATES = frozenset(state.value for state in DeviceState)

Issue = Callable[[int, bytearray], object]  # ioctl(request, buffer) on the control node; raises OSError


def get_devices(path: str, major: int, minor: int = CONTROL_MINOR) -> DriverView:
    """Ask the driver. ``major`` is that of ``nvidia-nvswitch`` in /proc/devices. Raises ``CannotObserve``."""
    try:
        with _open_device(path, os.makedev(major, minor)) as descriptor:
            return query_devices(lambda request, buffer: fcntl.ioctl(descriptor, request, buffer, True))
    except OSError as error:
        raise CannotObserve(path, error.strerror or str(error)) from error


def query_devices(issue: Issue) -> DriverView:
    """GET_DEVICES_V2 in the form that the loaded driver knows. Raises the last ``OSError`` when it knows neither."""
    refusal = OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))
    for entry_size in ENTRY_SIZES:
        buffer = bytearray(_COUNT.size + _MAX_DEVICES * entry_size)
        try:
            issue(_REQUESTS[entry_size], buffer)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTTY):
                raise
            refusal = error
        else:
            return DriverView(decode_devices(bytes(buffer), entry_size))
    raise refusal


def decode_devices(buffer: bytes, entry_size: int) -> tuple[SwitchDevice, ...]:
    """The entries of the filled buffer, by bus id. A count beyond the buffer is cut to what is there."""
    if len(buffer) < _COUNT.size:
        return ()
    (count,) = _COUNT.unpack_from(buffer)
    complete = (len(buffer) - _COUNT.size) // entry_size
    offsets = (_COUNT.size + index * entry_size for index in range(min(count, complete, _MAX_DEVICES)))
    return tuple(sorted((_decode_entry(buffer, offset) for offset in offsets), key=lambda device: device.pci_bus_id))


def _decode_entry(buffer: bytes, offset: int) -> SwitchDevice:
    minor, uuid, domain, bus, device, function, driver_state, state, reason, physical_id = _ENTRY.unpack_from(
        buffer, offset
    )
    return SwitchDevice(
        minor=minor,
        uuid=_format_uuid(uuid),
        pci_bus_id=f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}",
        driver_state=DriverState(driver_state) if driver_state in _DRIVER_STATES else driver_state,
        device_state=DeviceState(state) if state in _DEVICE_STATES else state,
        device_reason=reason,
        physical_id=None if physical_id == _NO_PHYSICAL_ID else physical_id,
    )


def _format_uuid(uuid: bytes) -> str:
    digits = uuid.hex().upper()
    return f"SWX-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


@contextmanager
def _open_device(path: str, device: int) -> Iterator[int]:
    """Open the node only after it is known to be ``device``: opening something else could have an effect."""
    handle = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        if not stat.S_ISCHR(found.st_mode) or found.st_rdev != device:
            wanted = f"{os.major(device)}:{os.minor(device)}"
            raise CannotObserve(path, f"it is not the character device {wanted}")
        descriptor = os.open(f"/proc/self/fd/{handle}", os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
    finally:
        os.close(handle)
    try:
        yield descriptor
    finally:
        os.close(descriptor)

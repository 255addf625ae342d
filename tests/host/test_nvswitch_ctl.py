"""GET_DEVICES_V2: layout, both sizes, and what may be opened."""

import errno
import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmsupervisor.errors import CannotObserve
from fmsupervisor.facts import DeviceState, DriverState, DriverView, SwitchDevice
from fmsupervisor.host.linux_kernel import LinuxKernel
from fmsupervisor.host.nvswitch_ctl import decode_devices, get_devices, query_devices

UUID = bytes(range(0xA0, 0xB0))


def entry(*, minor=0, bus=0x83, driver_state=2, device_state=2, reason=0, physical_id=9, domain=0, size=56):
    packed = struct.pack("=I16s8I", minor, UUID, domain, bus, 0, 0, driver_state, device_state, reason, physical_id)
    return packed.ljust(size, b"\0")


def device_list(*entries, count=None, size=56):
    body = struct.pack("=I", len(entries) if count is None else count) + b"".join(entries)
    return body.ljust(4 + 64 * size, b"\0")


class OneSizeDriver:
    """The ioctl of a driver that knows one size only; it fills the buffer as the kernel does."""

    def __init__(self, size):
        self.request = {56: 0x8E046303, 52: 0x8D046303}[size]
        self.answer = device_list(entry(minor=1, size=size), size=size)
        self.refused = []

    def __call__(self, request, buffer):
        if request != self.request:
            self.refused.append(request)
            raise OSError(errno.EINVAL, "Invalid argument")
        assert len(buffer) == len(self.answer)
        buffer[:] = self.answer


class TestDecoding:
    @pytest.mark.parametrize("size", [56, 52])
    def test_an_entry_tells_minor_bus_id_uuid_and_states(self, size):
        assert decode_devices(device_list(entry(size=size), size=size), size) == (
            SwitchDevice(
                minor=0,
                uuid="SWX-A0A1A2A3-A4A5-A6A7-A8A9-AAABACADAEAF",
                pci_bus_id="0000:83:00.0",
                driver_state=DriverState.CONFIGURED,
                device_state=DeviceState.CONFIGURED,
                device_reason=0,
                physical_id=9,
            ),
        )

    def test_switches_come_by_bus_id_whatever_their_minors(self):
        buffer = device_list(entry(minor=0, bus=0x86), entry(minor=1, bus=0x83))
        assert [(device.pci_bus_id, device.minor) for device in decode_devices(buffer, 56)] == [
            ("0000:83:00.0", 1),
            ("0000:86:00.0", 0),
        ]

    def test_a_large_domain_keeps_its_digits(self):
        assert decode_devices(device_list(entry(domain=0x10000)), 56)[0].pci_bus_id == "10000:83:00.0"

    def test_states_newer_than_this_program_stay_numbers(self):
        (device,) = decode_devices(device_list(entry(driver_state=17, device_state=18)), 56)
        assert (device.driver_state, device.device_state) == (17, 18)

    def test_an_invalid_physical_id_is_none(self):
        assert decode_devices(device_list(entry(physical_id=0xFFFFFFFF)), 56)[0].physical_id is None

    def test_a_blacklisted_switch_is_not_usable(self):
        blacklisted, usable = decode_devices(device_list(entry(device_state=3), entry(bus=0x84)), 56)
        assert (blacklisted.is_usable, usable.is_usable) == (False, True)

    @pytest.mark.parametrize("count", [65, 0xFFFFFFFF])
    def test_a_count_beyond_the_buffer_is_cut(self, count):
        assert len(decode_devices(device_list(count=count), 56)) == 64

    @given(st.binary(max_size=300), st.sampled_from([52, 56]))
    def test_no_buffer_is_too_damaged_to_be_decoded(self, buffer, size):
        assert len(decode_devices(buffer, size)) <= 5


class TestSizes:
    @pytest.mark.parametrize("size", [56, 52])
    def test_the_form_that_the_driver_knows_is_found(self, size):
        driver = OneSizeDriver(size)
        assert [device.minor for device in query_devices(driver).devices] == [1]
        assert driver.refused == ([] if size == 56 else [0x8E046303])

    def test_an_error_that_is_no_matter_of_size_is_not_tried_again(self):
        requests = []

        def issue(request, buffer):
            requests.append(request)
            raise OSError(errno.ENODEV, "No such device")

        with pytest.raises(OSError, match="No such device"):
            query_devices(issue)
        assert requests == [0x8E046303]

    def test_no_switches_is_an_empty_view(self):
        assert query_devices(lambda request, buffer: 0) == DriverView(())


class TestNode:
    """/dev/null (1:3) and /dev/zero (1:5) stand in for a control node whose driver knows no such ioctl."""

    def test_a_device_without_this_ioctl_cannot_be_observed(self):
        with pytest.raises(CannotObserve, match="nappropriate ioctl"):
            get_devices("/dev/null", 1, 3)

    @pytest.mark.parametrize(("major", "minor"), [(1, 255), (234, 3)])
    def test_another_device_is_not_opened(self, major, minor):
        with pytest.raises(CannotObserve, match="not the character device"):
            get_devices("/dev/null", major, minor)

    def test_a_symbolic_link_is_not_followed(self, tmp_path):
        (tmp_path / "node").symlink_to("/dev/null")
        with pytest.raises(CannotObserve, match="not the character device"):
            get_devices(str(tmp_path / "node"), 1, 3)

    def test_a_regular_file_and_a_pipe_are_not_opened(self, tmp_path):
        (tmp_path / "file").touch()
        os.mkfifo(tmp_path / "pipe")
        for name in ("file", "pipe"):
            with pytest.raises(CannotObserve, match="not the character device"):
                get_devices(str(tmp_path / name), 1, 3)

    def test_an_absent_node_cannot_be_observed(self, tmp_path):
        with pytest.raises(CannotObserve, match="No such file"):
            get_devices(str(tmp_path / "absent"), 1, 3)

    def test_no_descriptor_stays_open(self, tmp_path):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(CannotObserve):
                get_devices("/dev/null", 1, 3)
            with pytest.raises(CannotObserve):
                get_devices("/dev/null", 1, 4)
        assert len(os.listdir("/proc/self/fd")) <= before

    def test_without_the_driver_there_is_nothing_to_ask(self, tree):
        tree.write("/proc/devices", "Character devices:\n  1 mem\n")
        with pytest.raises(CannotObserve, match="nvidia-nvswitch"):
            LinuxKernel(tree.root).driver_view()

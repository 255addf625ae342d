"""Questions about the NVSwitches that several parts ask."""

from fmsupervisor.core.state import State
from fmsupervisor.facts import DriverState, DriverView, PciFunction, SwitchDevice

SWITCH_DRIVER = "nvidia-nvswitch"  # NVSWITCH_DRIVER_NAME, export_nvswitch.h
GPU_DRIVER = "nvidia"


# LR10, the NVSwitch of A100: 1ae8, 1af0..1aff (nvswitch.c, nvswitch_lib_validate_device_id); and that of V100.
_WITHOUT_IN_BAND = frozenset({"10de:1ac2", "10de:1ae8", *(f"10de:{number:04x}" for number in range(0x1AF0, 0x1B00))})


def present(state: State) -> tuple[PciFunction, ...]:
    """The switches on the PCI bus."""
    return state.host.switches if state.host else ()


def expected(state: State) -> int:
    """How many there must be: configured, or as many as have ever been seen on the bus."""
    configured = state.settings.switches.expected
    return configured if isinstance(configured, int) else len(state.seen_switches)


def working(state: State) -> tuple[str, ...]:
    """Bus ids of the switches that the driver has bound and probed and that answer on PCI."""
    if state.host is None or state.host.probed_switches is None:
        return ()
    probed = frozenset(state.host.probed_switches)
    return tuple(
        switch.pci_bus_id
        for switch in state.host.switches
        if switch.driver == SWITCH_DRIVER and switch.pci_bus_id in probed and switch.responds is not False
    )


def devices(state: State) -> tuple[SwitchDevice, ...]:
    """The driver's entries of the switches that are on the bus now, by its last word; empty without one."""
    view = state.driver
    if not isinstance(view, DriverView):
        return ()
    on_bus = {switch.pci_bus_id for switch in present(state)}
    return tuple(device for device in view.devices if device.pci_bus_id in on_bus)


def unconfigured(state: State) -> tuple[SwitchDevice, ...]:
    """The usable switches of which the driver does not say CONFIGURED."""
    return tuple(
        device for device in devices(state) if device.is_usable and device.driver_state is not DriverState.CONFIGURED
    )


def is_configured_by_driver(state: State) -> bool | None:
    """Whether the driver says CONFIGURED of every usable switch; None when it has said nothing or sees none."""
    usable = [device for device in devices(state) if device.is_usable]
    if not usable:
        return None
    return not unconfigured(state)


def is_applicable(state: State) -> bool | None:
    """Whether this machine has, or must have, a fabric to manage; None before the first look."""
    if state.host is None:
        return None
    return bool(state.seen_switches or state.host.nvlink5_bridges) or isinstance(state.settings.switches.expected, int)


def registers_in_band(state: State) -> bool:
    """Whether GPUs join this fabric by a request in band, once: Hopper and later, and what is not known to be older."""
    return any(switch.device_id not in _WITHOUT_IN_BAND for switch in present(state))

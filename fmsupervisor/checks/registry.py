"""The table of all checks, in the order in which the chain depends on them."""

from fmsupervisor.checks import (
    configuration,
    devices,
    guest,
    hardware,
    kernel_policy,
    module_builds,
    neighbours,
    software,
)
from fmsupervisor.checks.context import Context
from fmsupervisor.checks.finding import Check

HOST_CHECKS: tuple[Check[Context], ...] = (
    *hardware.CHECKS,
    *module_builds.CHECKS,
    *kernel_policy.CHECKS,
    *software.CHECKS,
    *configuration.CHECKS,
    *neighbours.CHECKS,
    *devices.CHECKS,
)

GUEST_CHECKS: tuple[Check[Context], ...] = guest.CHECKS

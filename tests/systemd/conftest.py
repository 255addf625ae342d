"""A real systemd for the tests of the units, booted once per session."""

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.systemd.container import boot, control_groups, wait_until_booted
from tests.systemd.machine import Machine

_TOOLS = {
    "systemd-nspawn": "systemd-container",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}


@pytest.fixture(scope="session")
def booted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """The machine as the test before has left it."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool} (Debian package {package})")
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make a mount namespace")
    directory = tmp_path_factory.mktemp("systemd")
    with control_groups(f"fmsupervisor-tests-{os.getpid()}") as groups:
        container = boot(directory, groups)
        try:
            yield wait_until_booted(container, directory / "console.log")
        finally:
            container.terminate()
            try:
                container.wait(20)
            except subprocess.TimeoutExpired:
                container.kill()
                container.wait()


@pytest.fixture
def machine(booted: Machine) -> Machine:
    """A machine with the shipped units, nothing of them started, and an empty journal."""
    booted.reset()
    return booted

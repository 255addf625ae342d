"""A directory that stands in for a host's /proc, /sys and /dev, written file by file."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from fmsupervisor.host.root import HostRoot


class Tree:
    """Makes the files of a host below a directory. Paths are the host's ("logical") paths."""

    def __init__(self, directory: Path) -> None:
        self.root = HostRoot(str(directory))

    def write(self, path: str, content: str | bytes) -> None:
        real = Path(self.root.path(path))
        real.parent.mkdir(parents=True, exist_ok=True)
        real.write_bytes(content.encode() if isinstance(content, str) else content)

    def directory(self, path: str) -> None:
        Path(self.root.path(path)).mkdir(parents=True, exist_ok=True)

    def link(self, path: str, target: str) -> None:
        real = Path(self.root.path(path))
        real.parent.mkdir(parents=True, exist_ok=True)
        real.symlink_to(target)

    def unreadable(self, path: str) -> None:
        """Something whose open or list fails even for root: a symbolic link to itself (ELOOP)."""
        real = Path(self.root.path(path))
        real.unlink(missing_ok=True)
        self.link(path, real.name)

    def pci(
        self,
        bus_id: str,
        *,
        vendor: str = "0x10de",
        device: str = "0x22a3",
        pci_class: str = "0x068000",
        driver: str | None = None,
        config: bytes | None = b"\xde\x10\xa3\x22\x06\x01\x10\x00",
    ) -> None:
        """A function below /sys/devices and its link below /sys/bus/pci/devices, as the kernel shows them."""
        real = f"/sys/devices/pci{bus_id[:7]}/{bus_id}"
        self.write(f"{real}/vendor", f"{vendor}\n")
        self.write(f"{real}/device", f"{device}\n")
        self.write(f"{real}/class", f"{pci_class}\n")
        if config is not None:
            self.write(f"{real}/config", config)
        if driver is not None:
            self.link(f"{real}/driver", f"../../../bus/pci/drivers/{driver}")
        self.link(f"/sys/bus/pci/devices/{bus_id}", f"../../../devices/pci{bus_id[:7]}/{bus_id}")

    def switch(self, bus_id: str, driver: str | None = "nvidia-nvswitch") -> None:
        self.pci(bus_id, driver=driver)

    def gpu(self, bus_id: str, driver: str | None = "vfio-pci") -> None:
        self.pci(bus_id, device="0x2335", pci_class="0x030200", driver=driver)

    def infiniband(self, name: str, bus_id: str, vpd: bytes | None) -> None:
        self.directory(f"/sys/devices/pci0000:40/{bus_id}/infiniband/{name}")
        if vpd is not None:
            self.write(f"/sys/devices/pci0000:40/{bus_id}/vpd", vpd)
        self.link(f"/sys/devices/pci0000:40/{bus_id}/infiniband/{name}/device", f"../../../{bus_id}")
        self.link(f"/sys/class/infiniband/{name}", f"../../devices/pci0000:40/{bus_id}/infiniband/{name}")

    def process(
        self,
        pid: int,
        comm: str,
        *,
        exe: str | None = None,
        arguments: Sequence[str] = (),
        cgroup: str = "0::/\n",
        state: str = "S",
        descriptors: Sequence[str] = (),
    ) -> None:
        directory = f"/proc/{pid}"
        self.write(f"{directory}/comm", f"{comm}\n")
        self.write(f"{directory}/cmdline", "".join(f"{argument}\0" for argument in arguments))
        self.write(f"{directory}/stat", f"{pid} ({comm}) {state} 1 {pid} {pid} 0 -1 4194560\n")
        self.write(f"{directory}/cgroup", cgroup)
        if exe is not None:
            self.link(f"{directory}/exe", exe)
        self.directory(f"{directory}/fd")
        for number, target in enumerate(descriptors):
            self.link(f"{directory}/fd/{number}", target)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """An empty host: /proc and /sys are mounted and show nothing."""
    made = Tree(tmp_path / "host")
    for directory in ("/proc", "/sys/bus/pci/devices", "/dev"):
        made.directory(directory)
    return made


@pytest.fixture
def umask_077() -> object:
    """The strictest umask that a service is likely to have."""
    before = os.umask(0o077)
    yield
    os.umask(before)

"""The list of fuzz targets. A target takes bytes and raises when something does not hold that must."""

import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import _binary_targets as binary
import _handover_target as handover
import _host_targets as host
import _log_targets as log
import _text_targets as text

FOUND = Path(__file__).parent / "found"
CORPUS = Path(__file__).parent / "corpus"


@dataclass(frozen=True, slots=True)
class Target:
    """``seeds`` begin the search; ``most_bytes`` bounds what it tries."""

    check: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    most_bytes: int = 4096


TARGETS = {
    "fabric_manager_log": Target(log.fabric_manager_log, log.fabric_manager_log_seeds),
    "fabric_manager_config": Target(host.fabric_manager_config, host.fabric_manager_config_seeds),
    "elf": Target(binary.elf, binary.elf_seeds),
    "module_file": Target(binary.module_file, binary.module_file_seeds),
    "host_files": Target(host.host_files, host.host_file_seeds),
    "nvswitch_ioctl": Target(binary.nvswitch_ioctl, binary.nvswitch_ioctl_seeds),
    "kernel_log": Target(log.kernel_log_records, log.kernel_log_seeds),
    "settings_file": Target(text.settings_file, text.settings_seeds),
    "web_yml": Target(text.web_yml, text.web_yml_seeds),
    "handover": Target(handover.handover, handover.handover_seeds, most_bytes=8192),
    "http_request": Target(text.http_request, text.http_request_seeds),
}


def kept_inputs(name: str) -> Iterator[tuple[str, bytes]]:
    """Seeds, the kept corpus (one archive per target), and what was found, each with its name."""
    yield from ((f"seed-{number}", seed) for number, seed in enumerate(TARGETS[name].seeds()))
    archive = CORPUS / f"{name}.zip"
    if archive.is_file():
        with zipfile.ZipFile(archive) as kept:
            yield from ((one, kept.read(one)) for one in kept.namelist())
    yield from ((f"found/{path.name}", path.read_bytes()) for path in sorted((FOUND / name).glob("*")))

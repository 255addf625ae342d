"""A kernel of Debian, downloaded and unpacked but not installed: some thousand real modules.

The package is kept in build/kernel-package; of its modules half are enough, and all three compressions are made of them
with the tools that distributions use.
"""

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

DIRECTORY = Path(__file__).resolve().parents[2] / "build" / "kernel-package"
COMPRESSORS = {".xz": ["xz", "-0", "--keep"], ".zst": ["zstd", "-q", "-1"], ".gz": ["gzip", "-1", "--keep"]}

_LEAST = 500
_DECOMPRESSORS = {".xz": ["xz", "-d"], ".zst": ["zstd", "-q", "-d", "--rm"], ".gz": ["gzip", "-d"]}
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class NotHere(Exception):
    """The package cannot be had; the text says why."""


def kernel_modules() -> list[Path]:
    """At least 500 modules, not compressed; beside each the same with .xz, .zst and .gz. Raises ``NotHere``."""
    tools = ("apt-get", "apt-cache", "dpkg-deb", "modinfo", "modprobe", "xz", "zstd", "gzip")
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        raise NotHere(f"not installed: {', '.join(missing)}")
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    with open(DIRECTORY / ".lock", "wb") as lock:  # other workers of the same run
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = DIRECTORY / "modules"
        if not done.is_dir():
            _make(done)
    return sorted(done.glob("*.ko"))


def _make(done: Path) -> None:
    package = _download()
    unpacked, making = DIRECTORY / "unpacked", DIRECTORY / "making"
    for directory in (unpacked, making):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
    subprocess.run(["dpkg-deb", "-x", package, unpacked], check=True)
    found = sorted(path for path in unpacked.rglob("*.ko*") if not path.is_symlink())
    for path in found[:: max(1, len(found) // _LEAST)]:
        shutil.copy(path, making)
    for suffix, command in _DECOMPRESSORS.items():
        _run_on(command, sorted(making.glob(f"*.ko{suffix}")))
    for command in COMPRESSORS.values():
        _run_on(command, sorted(making.glob("*.ko")))
    shutil.rmtree(unpacked)
    making.rename(done)


def _run_on(command: list[str], paths: list[Path]) -> None:
    if paths:
        subprocess.run([*command, *paths], check=True)


def _download() -> Path:
    for attempt in range(2):
        name = _package_name()
        if name and _apt_get("download", name):
            return max(DIRECTORY.glob("*.deb"), key=lambda path: path.stat().st_mtime)
        if attempt == 0 and (os.geteuid() != 0 or not _apt_get("update")):
            break
    raise NotHere("no kernel package can be downloaded (needs a Debian, the network, and root for apt-get update)")


def _package_name() -> str:
    """The package with the newest kernel for clouds, which is the smallest that Debian has."""
    metapackage = f"linux-image-cloud-{_ARCHITECTURES.get(os.uname().machine, 'none')}"
    done = subprocess.run(["apt-cache", "depends", metapackage], capture_output=True, text=True, check=False)
    names = [line.split()[-1] for line in done.stdout.splitlines() if "Depends: linux-image-" in line]
    return names[0] if names else ""


def _apt_get(*arguments: str) -> bool:
    command = ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", *arguments]
    return subprocess.run(command, cwd=DIRECTORY, capture_output=True, check=False).returncode == 0

"""The disk that is /usr/local in the virtual machine.

/usr/local/bin/fmsupervisor             the daemon, a program without Python
/usr/local/lib/systemd/system           its units, not enabled
/usr/local/nvidia                       as extracted from the vendor's packages, made by the simulator; but nvidia.ko
                                        and nv-fabricmanager are real ELF files that do something
/usr/local/simulator                    how nv-fabricmanager behaves; seen as /.simulator
/usr/local/test/modules                 fake_hgx.ko and all variants of nvidia.ko
/usr/local/test/programs                launchers, also for what only compare.py runs
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from bundle import SOURCE, build_bundle

from fmsupervisor.host.root import HostRoot
from fmsupervisor.simulator.tree import PREFIX, TreeOptions, build_tree, set_behaviour

_SIZE = "512M"
_MODULE = "nvidia.ko.zst"


def tree_options(release: str) -> TreeOptions:
    """The simulator's options that fit the virtual machine with this kernel."""
    return TreeOptions(kernel_release=release, module_builds=(release,))


def build_disk(out: Path) -> Path:
    """Make ``out/disk.img`` unless it was made from the same parts. Needs the kernel and the modules in ``out``."""
    bundle = build_bundle(out)
    disk, stamp = out / "disk.img", out / ".disk.stamp"
    wanted = _fingerprint(out)
    if disk.exists() and stamp.exists() and stamp.read_text() == wanted:
        return disk
    with tempfile.TemporaryDirectory(dir=out) as directory:
        host, local = Path(directory, "host"), Path(directory, "local")
        host.mkdir()
        _make_local(local, host, out, bundle)
        disk.unlink(missing_ok=True)
        command = [
            "mkfs.ext4",
            "-q",
            "-F",
            "-L",
            "persistent",
            "-E",
            "root_owner=0:0",
            "-d",
            str(local),
            str(disk),
            _SIZE,
        ]
        environment = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
        subprocess.run(command, env=environment, check=True)
    stamp.write_text(wanted)
    return disk


def _make_local(local: Path, host: Path, out: Path, bundle: Path) -> None:
    release = (out / "kernel/release").read_text().strip()
    options = tree_options(release)
    build_tree(str(host), options)
    shutil.copytree(f"{host}{PREFIX}", local / "nvidia", symlinks=True)
    updates = local / "nvidia/usr/lib/modules" / release / "updates"
    shutil.copy(out / "modules" / _MODULE, updates / _MODULE)

    shutil.copytree(bundle, local / "lib/fmsupervisor", symlinks=True)
    (local / "bin").mkdir()
    shutil.copy(out / "programs/fmsupervisor", local / "bin/fmsupervisor")
    shutil.copy(out / "programs/nv-fabricmanager", local / "nvidia/usr/bin/nv-fabricmanager")

    shutil.copytree(out / "modules", local / "test/modules")
    shutil.copytree(out / "programs", local / "test/programs")
    units = local / "lib/systemd/system"
    units.mkdir(parents=True)
    for unit in (SOURCE / "systemd").glob("*.*"):
        if unit.suffix in (".service", ".target"):
            shutil.copy(unit, units)
    _make_simulator(local, options)
    local.chmod(0o755)


def _make_simulator(local: Path, options: TreeOptions) -> None:
    """Behaviour lives on the disk, since a boot may follow; registrations and commands die with the boot."""
    simulator = local / "simulator"
    simulator.mkdir()
    for name in ("registrations", "commands"):
        (simulator / name).symlink_to(f"/run/simulator/{name}")
    (local / ".simulator").symlink_to("simulator")
    set_behaviour(HostRoot(str(local)), options, options.behaviour)
    (local / ".simulator").unlink()


def _fingerprint(out: Path) -> str:
    digest = hashlib.sha256()
    for path in [Path(__file__), *sorted((SOURCE / "systemd").glob("*.*"))]:
        digest.update(path.read_bytes())
    for name in ("bundle", "modules", "kernel"):  # the launchers are made with the modules
        digest.update((out / f".{name}.stamp").read_bytes())
    return digest.hexdigest()

"""The daemon and the simulated nv-fabricmanager as programs that need no Python where they run.

Made by PyInstaller ("onedir"): ``bundle/fmsupervisor``, ``bundle/nv-fabricmanager`` and ``bundle/_internal`` with the
interpreter and the libraries of both. They run where the C library is at least as new as that of this interpreter.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2]

_PROGRAMS = {
    "fmsupervisor": "import sys\nfrom fmsupervisor.cli import main\nsys.exit(main())\n",
    "nv-fabricmanager": "import sys\nfrom fmsupervisor.simulator.fabric_manager import main\nmain(sys.argv)\n",
}


def is_possible() -> bool:
    """Whether PyInstaller is there."""
    return importlib.util.find_spec("PyInstaller") is not None


def build_bundle(out: Path) -> Path:
    """Make ``out/bundle`` unless it was made from the same sources. Raises ``RuntimeError``."""
    bundle, stamp, work = out / "bundle", out / ".bundle.stamp", out / "pyinstaller"
    wanted = _fingerprint()
    if bundle.is_dir() and stamp.exists() and stamp.read_text() == wanted:
        return bundle
    shutil.rmtree(work, ignore_errors=True)
    (work / "bundle").mkdir(parents=True)
    for name, text in _PROGRAMS.items():
        (work / "bundle" / f"run-{name}.py").write_text(text)
    command = [sys.executable, "-m", "PyInstaller", "--noconfirm", "--log-level", "WARN"]
    command += ["--workpath", str(work), "--distpath", str(out), str(Path(__file__).with_name("bundle.spec"))]
    environment = {**os.environ, "BUNDLE_SOURCE": str(SOURCE), "PYINSTALLER_CONFIG_DIR": str(work / "cache")}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"PyInstaller failed:\n{done.stdout.decode(errors='replace')[-8000:]}")
    shutil.rmtree(work)
    stamp.write_text(wanted)
    return bundle


def _fingerprint() -> str:
    """Changes with the sources, the interpreter and every distribution that could be bundled."""
    digest = hashlib.sha256(sys.version.encode())
    installed = {f"{found.name} {found.version}" for found in importlib.metadata.distributions()}
    digest.update("\n".join(sorted(installed)).encode())
    here = Path(__file__)
    for path in [here, here.with_name("bundle.spec"), *sorted((SOURCE / "fmsupervisor").rglob("*.py"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()

"""The daemon and the simulated nv-fabricmanager as programs on a host without Python.

``bundle/``, in the virtual machine /usr/local/lib/fmsupervisor, is a whole interpreter: this one, its standard library, the
distributions that the daemon needs, the package itself. Each program is an ELF file (programs/launcher.c)
that loads it. They run where the C library is at least as new as that of this interpreter.

Why not a tool like PyInstaller: its programs import through code of their own, which without KVM costs a program two
seconds at every start, and its build takes a minute, which is due whenever a line of the daemon has changed.
"""

import compileall
import hashlib
import importlib.metadata
import os
import py_compile
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2]
PROGRAMS = {
    "fmsupervisor": "from fmsupervisor.cli import main\nsys.exit(main())\n",
    "nv-fabricmanager": "from fmsupervisor.simulator.fabric_manager import main\nmain(sys.argv)\n",
}

_HEAD = "import sys\nsys.frozen = True\nsys.argv[0] = sys.executable = sys.orig_argv[0]\n"
_WITHOUT = shutil.ignore_patterns(
    *("__pycache__", "site-packages", "config-*", "test", "tests", "idlelib", "lib2to3", "tkinter", "turtledemo"),
    *("ensurepip", "pydoc_data", "unittest", "_tkinter.*", "_test*.so", "*.a"),
)


def obstacle() -> str | None:
    """Why it cannot be made of this interpreter; None when it can."""
    return None if _library().exists() else f"this Python has no {_library().name} (Debian: package libpython3.x)"


def build_bundle(out: Path) -> Path:
    """Make ``out/bundle`` unless it was made from the same sources. Raises ``OSError``."""
    bundle, stamp = out / "bundle", out / ".bundle.stamp"
    wanted = _fingerprint(*sorted((SOURCE / "fmsupervisor").rglob("*.py")))
    if bundle.is_dir() and stamp.exists() and stamp.read_text() == wanted:
        return bundle
    interpreter = _build_interpreter(out)
    shutil.rmtree(bundle, ignore_errors=True)
    shutil.copytree(interpreter, bundle, symlinks=True, copy_function=os.link)
    package = bundle / "lib" / _NAME / "fmsupervisor"
    shutil.copytree(SOURCE / "fmsupervisor", package, ignore=shutil.ignore_patterns("__pycache__"))
    _compile(package, is_beside=False)  # with sources, for what a traceback shows
    for name, text in PROGRAMS.items():
        (bundle / f"run-{name}.py").write_text(_HEAD + text)
    stamp.write_text(wanted)
    return bundle


def _build_interpreter(out: Path) -> Path:
    """Standard library, shared libraries and distributions in ``out/interpreter``."""
    made, stamp = out / "interpreter", out / ".interpreter.stamp"
    wanted = _fingerprint()
    if made.is_dir() and stamp.exists() and stamp.read_text() == wanted:
        return made
    shutil.rmtree(made, ignore_errors=True)
    library = made / "lib" / _NAME
    shutil.copytree(sysconfig.get_path("stdlib"), library, ignore=_WITHOUT)
    for distribution in _distributions("fmsupervisor", set()):
        _copy_distribution(distribution, library)
    _compile(library, is_beside=True)
    for source in library.rglob("*.py"):
        source.unlink()
    shutil.copy(_library(), made / "lib")
    (made / "lib/libpython.so").symlink_to(_library().name)
    shutil.copy(_libffi(library), made / "lib/libffi.so")
    stamp.write_text(wanted)
    return made


def _library() -> Path:
    """The interpreter's shared library."""
    return Path(sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME"))


def _distributions(name: str, seen: set[str]) -> Iterator[importlib.metadata.Distribution]:
    """All that the distribution needs, without extras and without itself."""
    for requirement in importlib.metadata.requires(name) or ():
        needed = re.split(r"[^\w.-]", requirement)[0].lower()
        if "extra ==" in requirement or needed in seen:
            continue
        seen.add(needed)
        try:
            yield importlib.metadata.distribution(needed)
        except importlib.metadata.PackageNotFoundError:
            continue  # not needed here, by its marker
        yield from _distributions(needed, seen)


def _copy_distribution(distribution: importlib.metadata.Distribution, library: Path) -> None:
    for file in distribution.files or ():
        if ".." in file.parts or "__pycache__" in file.parts:
            continue
        target = library / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(distribution.locate_file(file)), target)


def _compile(directory: Path, *, is_beside: bool) -> None:
    """Bytecode that is believed without a look at the source."""
    compileall.compile_dir(
        directory,
        quiet=2,
        legacy=is_beside,
        workers=os.cpu_count() or 1,
        stripdir=str(directory),
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )


def _libffi(library: Path) -> str:
    """Of what the compiled modules are linked to, the one thing that the virtual machine has not got by itself."""
    (module,) = (library / "lib-dynload").glob("_ctypes.*.so")
    shown = subprocess.run(["ldd", module], capture_output=True, text=True, check=True).stdout
    found = re.search(r"libffi\.so\S* => (/\S+)", shown)
    if found is None:
        raise OSError(f"libffi is not among what ldd shows of {module}:\n{shown}")
    return found[1]


def _fingerprint(*sources: Path) -> str:
    """Changes with the sources, the interpreter and every distribution that could be in it."""
    digest = hashlib.sha256(f"{sys.version}\n{sys.base_prefix}".encode())
    installed = {f"{found.name} {found.version}" for found in importlib.metadata.distributions()}
    digest.update("\n".join(sorted(installed)).encode())
    for path in (Path(__file__), *sources):
        digest.update(path.read_bytes())
    return digest.hexdigest()


_NAME = f"python{sys.version_info.major}.{sys.version_info.minor}"

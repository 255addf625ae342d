"""Nothing is written, made, loaded, connected to or sent; nothing but the version and nvidia-smi is executed."""

import os
import subprocess
import sys
import textwrap

import pytest
from _checked_host import build, picture

from fmsupervisor.simulator.kernel import SimulatedKernel
from fmsupervisor.simulator.tree import VERSION

WATCHED = textwrap.dedent(
    """
    import os, sys
    sys.dont_write_bytecode = True
    import fmsupervisor.cli
    FORBIDDEN = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.chmod", "os.chown", "os.link", "os.symlink",
                 "os.truncate", "os.utime", "os.kill", "os.killpg", "os.system", "os.setxattr", "os.putenv",
                 "socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "shutil.", "tempfile.", "ctypes.dlsym")
    WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    def watch(event, arguments):
        if event == "open" and arguments[0] == os.devnull:
            return
        if event.startswith(FORBIDDEN) or (event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING):
            sys.stderr.write(f"FORBIDDEN {event} {arguments}\\n")
            os._exit(99)
        if event == "subprocess.Popen" and os.path.basename(arguments[1][0]) not in ("nv-fabricmanager", "nvidia-smi"):
            sys.stderr.write(f"FORBIDDEN {event} {arguments}\\n")
            os._exit(99)
    sys.addaudithook(watch)
    sys.exit(fmsupervisor.cli.main(sys.argv[1:]))
    """
)


@pytest.mark.parametrize("is_loaded", [False, True], ids=["fresh", "driver-loaded"])
@pytest.mark.parametrize("arguments", [[], ["--json"], ["--guest"], ["--condition", "FMS-301"]], ids=" ".join)
def test_check_leaves_everything_as_it_was(tmp_path, is_loaded: bool, arguments: list[str]) -> None:
    root = build(tmp_path)
    if is_loaded:
        SimulatedKernel(root).load(VERSION)
    before = picture(root.directory)
    command = [sys.executable, "-B", "-c", WATCHED, "check", "--root", root.directory, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "HOME": "/"}
    )
    assert "FORBIDDEN" not in done.stderr, done.stderr
    assert done.returncode in (0, 2), done.stderr
    assert done.stdout
    assert picture(root.directory) == before


def test_the_daemon_does_not_import_the_checks() -> None:
    script = "import sys, fmsupervisor.daemon, fmsupervisor.cli; print([m for m in sys.modules if 'checks' in m])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"

"""``fmsupervisor run`` in a process that kills itself at one boundary between two steps.

The boundaries are what changes the world or decides to: every action of the plan, every file that is put in its place,
every node, the module, the execution of Fabric Manager. With ``FMSUPERVISOR_TEST_LIST`` they are written to that file
as they come; at the first one whose name is in ``FMSUPERVISOR_TEST_KILL`` the process is gone.
"""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from fmsupervisor import cli, supervisor
from fmsupervisor.fabric_manager import process
from fmsupervisor.host.root import HostRoot
from fmsupervisor.simulator.kernel import SimulatedKernel


def _boundary(name: str) -> None:
    if threading.get_ident() in _in_kernel:
        return
    if listing := os.environ.get("FMSUPERVISOR_TEST_LIST"):
        with open(listing, "a") as file:
            file.write(f"{name}\n")
    if os.environ.get("FMSUPERVISOR_TEST_KILL") == name:
        os.kill(os.getpid(), signal.SIGKILL)


def _wrap(owner: Any, name: str, describe: Callable[..., str], *, before: bool = True, after: bool = True) -> None:
    original = getattr(owner, name)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        what = describe(*arguments)
        if before:
            _boundary(f"before {what}")
        result = original(*arguments, **named)
        if after:
            _boundary(f"after {what}")
        return result

    setattr(owner, name, wrapped)


def _load(self: SimulatedKernel, *arguments: Any) -> None:
    """What the simulated driver does to its tree is one step: the real one does not stop half-way with us."""
    _boundary("before loading the module")
    _in_kernel.add(threading.get_ident())
    _original_load(self, *arguments)
    _in_kernel.clear()
    _boundary("after loading the module")


_in_kernel: set[int] = set()
_original_load = SimulatedKernel.load_module
SimulatedKernel.load_module = _load  # type: ignore[method-assign]
_wrap(supervisor.Supervisor, "_perform", lambda _self, action: type(action).__name__)
_wrap(HostRoot, "write_atomically", lambda _self, path, *_: f"writing {os.path.basename(path)}", before=False)
_wrap(os, "replace", lambda _old, new: f"renaming to {os.path.basename(new)}", after=False)
_wrap(HostRoot, "make_directory", lambda _self, path, *_: f"making {os.path.basename(path)}", after=False)
_wrap(process, "_spawn", lambda command: f"executing {os.path.basename(command.arguments[0])} {command.arguments[1]}")

raise SystemExit(cli.main())

"""Fabric Manager's control: what it is executed with, and in which order its words and its end are told."""

import asyncio
import os
import re
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fmsupervisor.core.events import (
    Event,
    FabricManagerExited,
    FabricManagerStarted,
    LogRead,
    OrphansEnded,
    SpawnFailed,
)
from fmsupervisor.fabric_manager.control import FabricManagerControl, environment, read_version
from fmsupervisor.fabric_manager.process import Children, become_subreaper
from fmsupervisor.facts import ExitStatus, LogKind
from fmsupervisor.host.root import HostRoot
from fmsupervisor.settings import FabricManagerSettings, Settings
from fmsupervisor.simulator.tree import PREFIX, TreeOptions, build_tree

PATIENCE_SECONDS = 20.0
HEADER = "[Nov 30 2026 10:00:00] [INFO] [tid 1] Fabric Manager Log initializing at: 11/30/2026 10:00:00.000"
FAILURE = "[Nov 30 2026 10:00:01] [ERROR] [tid 1] request to query NVSwitch device information failed"
MISMATCH = (
    "[Nov 30 2026 10:00:01] [ERROR] [tid 1] fabric manager NVIDIA GPU driver interface version 580.126.09 don't match "
    "with driver version 570.86.15. Please update with matching NVIDIA driver package."
)
SETTINGS = Settings(
    fabric_manager=FabricManagerSettings(
        binary="/fm", config="/fm.cfg", log_file="/fm.log", state_file="/fm.state", library_paths=("/lib64", "/lib")
    )
)


class Stage:
    """A host whose nv-fabricmanager is a shell script, and what its control tells."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.root = HostRoot(str(directory))
        self.loop = asyncio.get_running_loop()
        self.children = Children(self.loop)
        self.loop.add_signal_handler(signal.SIGCHLD, self.children.reap)
        self.events: list[Event] = []
        self.control = FabricManagerControl(self.root, self.loop, self.children, self.events.append)

    def install(self, script: str, mode: int = 0o755) -> None:
        (self.directory / "fm").write_text(f"#!/bin/sh\ncd {self.directory}\n{script}\n")
        (self.directory / "fm").chmod(mode)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():  # noqa: ASYNC110 - what is waited for is no event of this program
                await asyncio.sleep(0.005)

    async def play(
        self, settings: Settings = SETTINGS, *, log_file: str = "/fm.log", resiliency: bool = False
    ) -> FabricManagerExited:
        """From the start to the end."""
        self.control.start(settings, log_file, resiliency=resiliency)
        await self.until(lambda: bool(self.of(FabricManagerExited)))
        return self.of(FabricManagerExited)[0]

    def of[E](self, kind: type[E]) -> list[E]: ...  # type: ignore[empty-body]

"""The daemon on a simulated host, as a process that ``measure`` looks at: ``simulated_daemon.py DIRECTORY ADDRESS JSON``.

``fmsupervisor simulate`` without its play-by-play, which looks at the status fifty times a second. JSON holds settings,
ADDRESS is for the metrics. The structured log goes to standard output. Each line of standard input is a JSON list, a
method of ``SimulatedKernel`` and its arguments, called from a thread as the real kernel would act: at any time.
"""

import asyncio
import json
import sys
import threading
from dataclasses import replace

import pyudev  # noqa: F401 - what a real host's daemon holds counts too

from fmsupervisor.report import journal
from fmsupervisor.settings import LoggingSettings
from fmsupervisor.simulator.command import Simulation
from fmsupervisor.simulator.kernel import SimulatedKernel
from fmsupervisor.simulator.scenarios import SCENARIOS
from fmsupervisor.simulator.tree import Behaviour, TreeOptions

_TREE = TreeOptions(behaviour=Behaviour(configure_seconds=0.1, registration_seconds=0.1))


def obey(kernel: SimulatedKernel) -> None:
    """Until the end of standard input."""
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        getattr(kernel, method)(*arguments)


def main(directory: str, address: str, settings: str) -> None:
    """Until SIGTERM."""
    scenario = replace(SCENARIOS["healthy"], tree=_TREE, settings=json.loads(settings))
    simulation = Simulation(scenario, directory, speed=1.0, metrics=address)
    journal.configure_logging(LoggingSettings(), {}, sys.stdout)
    threading.Thread(target=obey, args=(simulation.world.kernel,), daemon=True).start()
    asyncio.run(simulation.daemon.run())


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Which module of the board a GPU is. Pure.

Allocators of shared-NVSwitch partitions think in module ids, PCI thinks in bus ids, and with all GPUs in guests nobody
on the host can ask a GPU. Fabric Manager's registration lines name both (and count modules from 0, everybody else from
1). How a board is wired does not change, so what was learned is kept over restarts.

What a guest's driver sends may be the bus id that the guest sees. Those that no GPU of this host has are not believed.
One that happens to be in use here contradicts, sooner or later, what is learned otherwise: two modules of one bus id,
or two bus ids of one module. Then all that are involved are unknown for good: no answer is better than a wrong one.
"""

from dataclasses import replace
from types import MappingProxyType

from fmsupervisor.core.state import State
from fmsupervisor.facts import ModuleMap

_MAX_GPUS = 256
_LAST_MODULE_ID = 64  # no board has more


def module_map(state: State) -> ModuleMap:
    """What is known now."""
    return ModuleMap(state.module_ids, state.contradicted_modules)


def learn(state: State, bus_id: str, module_id: int) -> State:
    """Fabric Manager said that the GPU at ``bus_id`` is this module."""
    known = state.module_ids
    if known.get(bus_id) == module_id or bus_id in state.contradicted_modules:
        return state
    if not 1 <= module_id <= _LAST_MODULE_ID or len(known) + len(state.contradicted_modules) >= _MAX_GPUS:
        return state
    rivals = {other for other, number in known.items() if number == module_id or other == bus_id}
    if not rivals:
        return replace(state, module_ids=MappingProxyType({**known, bus_id: module_id}))
    kept = {other: number for other, number in known.items() if other not in rivals}
    contradicted = state.contradicted_modules | rivals | {bus_id}
    return replace(state, module_ids=MappingProxyType(kept), contradicted_modules=contradicted)


def recall(state: State, recalled: ModuleMap) -> State:
    """What an earlier run of the supervisor has learned."""
    state = replace(state, contradicted_modules=state.contradicted_modules | recalled.contradicted)
    for bus_id, module_id in recalled.module_ids.items():
        state = learn(state, bus_id, module_id)
    return state

"""core.module_map: modules and PCI bus ids are learned, kept, and doubted when they contradict each other."""

import pytest
from _builders import GPUS, after, configured, make_state, record, said

from fmsupervisor.core import events
from fmsupervisor.core.module_map import learn, module_map, recall
from fmsupervisor.core.state import State
from fmsupervisor.facts import LogKind, ModuleMap


def learned(*pairs: tuple[str, int]) -> State:
    """Fabric Manager said these, one after the other."""
    state = make_state()
    for bus_id, module_id in pairs:
        state = learn(state, bus_id, module_id)
    return state


@pytest.mark.parametrize(
    ("pairs", "known", "contradicted"),
    [
        pytest.param([(GPUS[0], 1)], {GPUS[0]: 1}, set(), id="one"),
        pytest.param([(GPUS[0], 1), (GPUS[0], 1)], {GPUS[0]: 1}, set(), id="the same again"),
        pytest.param([(GPUS[0], 1), (GPUS[1], 2)], {GPUS[0]: 1, GPUS[1]: 2}, set(), id="two"),
        pytest.param([(GPUS[0], 1), (GPUS[0], 2)], {}, {GPUS[0]}, id="two modules of one bus id"),
        pytest.param([(GPUS[0], 1), (GPUS[1], 1)], {}, {GPUS[0], GPUS[1]}, id="two bus ids of one module"),
        pytest.param([(GPUS[0], 1), (GPUS[0], 2), (GPUS[0], 1)], {}, {GPUS[0]}, id="doubt stays"),
        pytest.param([(GPUS[0], 1), (GPUS[1], 1), (GPUS[2], 1)], {GPUS[2]: 1}, {GPUS[0], GPUS[1]}, id="a third one"),
        pytest.param(
            [(GPUS[0], 1), (GPUS[1], 2), (GPUS[0], 2)], {}, {GPUS[0], GPUS[1]}, id="both at once"
        ),
        pytest.param([(GPUS[0], 0), (GPUS[1], 65)], {}, set(), id="no module ids"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_unknown(
    pairs: list[tuple[str, int]], known: dict[str, int], contradicted: set[str]
) -> None:
    found = module_map(learned(*pairs))
    assert (dict(found.module_ids), found.contradicted) == (known, contradicted)


def test_it_survives_a_restart() -> None:
    before = module_map(learned((GPUS[0], 1), (GPUS[1], 2), (GPUS[2], 3), (GPUS[3], 3)))
    state = after(configured(), events.ModulesRecalled(before))
    assert module_map(state) == before
    assert module_map(recall(state, before)) == before


def test_what_is_recalled_does_not_outweigh_what_was_learned_since() -> None:
    line = record(LogKind.GPU_ADDED, uuid="GPU-1", pci_bus_id=GPUS[0], module_id="4")
    state = after(configured(), said(line), events.ModulesRecalled(ModuleMap({GPUS[0]: 1, GPUS[1]: 2}, frozenset())))
    assert (dict(state.module_ids), state.contradicted_modules) == ({GPUS[1]: 2}, {GPUS[0]})


def test_memory_is_bounded() -> None:
    state = learned(*((f"0000:{number:04x}:00.0", number % 64 + 1) for number in range(5000)))
    assert len(state.module_ids) + len(state.contradicted_modules) <= 300

"""The HGX boards whose switches are PCI functions, by device ids.

Sources: NVIDIA Fabric Manager User Guide (GPUs and switches per board), ``nvswitch_lib_validate_device_id`` of NVIDIA's
nvswitch.c (ranges of switch ids), the PCI id database (GPUs).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fmsupervisor.facts import PciFunction


@dataclass(frozen=True, slots=True)
class Board:
    """One kind of board. ``switches``: how many, with one and with two boards in the machine."""

    name: str
    switch_ids: range
    switches: tuple[int, ...]
    gpus: int = 8


_BOARDS = (
    Board("HGX-2", range(0x1AC2, 0x1AC3), (6, 12)),
    Board("HGX A100", range(0x1AE8, 0x1B00), (6, 12)),
    Board("HGX H100", range(0x22A0, 0x22B0), (4,)),
)

_GPUS = {
    "HGX A100": (0x20B0, 0x20B2, 0x20B3),
    "HGX A800": (0x20BD, 0x20F3),
    "HGX H100": (0x2330, 0x2336, 0x2337, 0x2338, 0x2339),
    "HGX H800": (0x2324,),
    "HGX H20": (0x2329, 0x232C),
    "HGX H200": (0x2335,),
    "HGX-2": (0x1DB1, 0x1DB5, 0x1DB8),
}
_NAMES = {gpu: name for name, gpus in _GPUS.items() for gpu in gpus}


def find_board(switches: Sequence[PciFunction]) -> Board | None:
    """The board that has these switches; None when they are of no known kind or of several."""
    ids = {number(switch) for switch in switches}
    found = [board for board in _BOARDS if ids and all(each in board.switch_ids for each in ids)]
    return found[0] if found else None


def board_gpus(gpus: Sequence[PciFunction]) -> tuple[PciFunction, ...]:
    """Those that are soldered to a board, not others that the machine may have (a display adapter)."""
    return tuple(gpu for gpu in gpus if number(gpu) in _NAMES)


def gpu_name(gpus: Sequence[PciFunction]) -> str:
    """The board's name by its GPUs; "" when they are not known or not of one kind."""
    names = {_NAMES.get(number(gpu), "") for gpu in gpus}
    return names.pop() if len(names) == 1 else ""


def wanted_switches(board: Board, present: int) -> int:
    """How many switches there must be: of one board, or of two when there are more than one has."""
    return next((count for count in board.switches if count >= present), board.switches[-1])


def number(function: PciFunction) -> int:
    """0x22a3 of ``10de:22a3``."""
    return int(function.device_id.partition(":")[2], 16)

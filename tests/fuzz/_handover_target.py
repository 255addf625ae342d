"""What one supervisor leaves to the next, damaged in any way."""

from dataclasses import replace

from _builders import configured, executed, make_config, make_state, moment
from _digest import tell_everybody
from _input import check

from fmsupervisor.conditions import Code
from fmsupervisor.core import events
from fmsupervisor.core.reduce import reduce
from fmsupervisor.core.state import State
from fmsupervisor.fabric_manager.control import ManagerMemory
from fmsupervisor.fabric_manager.log_follow import FollowerMemory
from fmsupervisor.fabric_manager.log_grammar import LogParser, ParserMemory
from fmsupervisor.fabric_manager.ownership import Identity, ManagerRecord, boot_id
from fmsupervisor.facts import Problem
from fmsupervisor.handover import Handover, Live, ReporterMemory, document, parse

_THIS_BOOT = b"@boot@"  # stands for the identity of the present boot


def handover(data: bytes) -> None:
    """Never raises; whatever is understood is good for a supervisor to begin with, and survives being handed on."""
    found = parse(data.replace(_THIS_BOOT, boot_id().encode()))
    check(all(isinstance(one, str) and 0 < len(one) < 2000 for one in found.dropped), found.dropped)
    state = found.begin(make_state())
    tell_everybody(reduce(state, events.TimePassed(), moment(state.now.monotonic + 1)))
    if found.live is not None:
        check(all(isinstance(one, int) for one in found.live.descriptors), found.live.descriptors)
        for source, memory in found.live.manager.parsers:
            parser = LogParser(source)
            parser.recall(memory)
            parser.feed(b"x\n")
            parser.take_batch()
    if found.values and not found.dropped:
        _check_again(found, state)


def _check_again(found: Handover, state: State) -> None:
    clock = found.clock or (0.0, 0.0)
    first = parse(document(found.record, state, clock, found.live))
    second = parse(document(first.record, first.begin(make_state()), clock, first.live))
    check(not first.dropped and not second.dropped, (first.dropped, second.dropped))
    check(first.record == found.record, "another record")
    # By their texts: a NaN is not equal to itself.
    check(repr(first.begin(make_state())) == repr(second.begin(make_state())), "another state")


def handover_seeds() -> list[bytes]:
    """A crash and an upgrade, of a fabric that is configured and of one that is not."""
    config = make_config()
    began = moment()
    record = ManagerRecord("token", boot_id(), began, config, None, Identity(4711, 99, "/x", "0::/y\n"), "s")
    memory = ManagerMemory(
        ((7, "stdout"),),
        (("stdout", ParserMemory("ab")),),
        FollowerMemory(5, 9, "h", None, ParserMemory()),
        "/l",
        ("t",),
        1.0,
    )
    told = ReporterMemory(True, "configured", 1.0, ((Problem(Code.SXID_FATAL, "x", "y"), 2.0),))
    live = Live("0.1", 3, "/run/fmsupervisor", memory, told, 4, "127.0.0.1:9752", 17)
    busy = reduce(configured(), events.SpawnFailed("x"), moment(2000.0))
    seeds = [
        document(record, configured(), (1.0, 2.0)),
        document(replace(record, identity=None), executed(), (1.0, 2.0), live),
        document(None, busy, (0.0, 0.0)),
        b'{"layout": 2, "record": null, "boot_id": "@boot@"}',
        b"[" * 3000,
        b'{"layout":1,"boot_id":"@boot@","state":{"failures":1e999,"next_start_at":NaN},"record":null,"live":null}',
    ]
    return [seed.replace(boot_id().encode(), _THIS_BOOT) for seed in seeds]

"""Fold what Fabric Manager wrote into the state: progress, registrations, failures, errors, counters."""

from dataclasses import replace
from types import MappingProxyType

from fmsupervisor.conditions import Code
from fmsupervisor.core.module_map import learn
from fmsupervisor.core.restart import FAILURE_KINDS
from fmsupervisor.core.state import Counters, Run, State
from fmsupervisor.core.switch_errors import count_reports, latch
from fmsupervisor.facts import LogBatch, LogKind, LogRecord, Problem

_MAX_LEVELS = 16
_MAX_GPUS = 256
_MAX_FAILURES = 32
_MODULE_ID_DIGITS = 9


def read_log(state: State, batch: LogBatch) -> State:
    """The state after a batch of lines of one source. Old lines tell their facts, and have been counted before."""
    if not batch.is_old:
        state = replace(state, counters=_count(state.counters, batch))
    if batch.source == "file":
        size = batch.file_size_bytes if batch.file_size_bytes is not None else state.log_size_bytes
        state = replace(state, log_problem=batch.problem, log_size_bytes=size)
    for record in batch.records:
        state = _read_record(state, record, is_old=batch.is_old)
    return count_reports(state, batch.switch_errors, is_old=batch.is_old)


def _count(counters: Counters, batch: LogBatch) -> Counters:
    levels = dict(counters.log_lines)
    for level, count in batch.lines_by_level.items():
        name = level if level in levels or len(levels) < _MAX_LEVELS else "OTHER"
        levels[name] = levels.get(name, 0) + count
    stale = sum(1 for record in batch.records if record.kind is LogKind.STALE_HANDLE)
    return replace(
        counters,
        log_lines=MappingProxyType(levels),
        log_unrecognised=counters.log_unrecognised + batch.unrecognised,
        stale_handles=counters.stale_handles + stale,
    )


def bounded_gpus(uuids: frozenset[str]) -> frozenset[str]:
    """As many as a machine can have."""
    return uuids if len(uuids) <= _MAX_GPUS else frozenset(sorted(uuids)[:_MAX_GPUS])


def _read_record(state: State, record: LogRecord, *, is_old: bool) -> State:
    run = state.run
    if run is None:
        return state
    fields = record.fields
    match record.kind:
        case LogKind.SESSION_HEADER | LogKind.SETTING | LogKind.CONNECTED | LogKind.ROUTING_STARTED:
            return state if run.is_log_seen else replace(state, run=replace(run, is_log_seen=True))
        case LogKind.VERSION:
            return replace(state, run=replace(run, is_log_seen=True, version=fields.get("version")))
        case LogKind.CONFIGURED:
            at = run.started if is_old else state.now  # when is not known: not later than any guest that it was for
            return replace(state, run=replace(run, is_log_seen=True, success=run.success or at))
        case LogKind.GPU_ADDED | LogKind.GPU_PROBE | LogKind.GPU_ROW:
            return _gpu_seen(state, run, record)
        case LogKind.PARTITION if run.partitions_told is None and fields.get("state", "").lower() == "activated":
            return replace(state, run=replace(run, partitions_told=state.now))
        case LogKind.STALE_HANDLE:
            problem = Problem(Code.STALE_HANDLES, record.text)
            return latch(state, problem)
        case LogKind.GPU_RESET_NEEDED:
            return latch(state, Problem(Code.GPU_RESET_NEEDED, record.text))
        case kind if kind in FAILURE_KINDS and len(run.failures) < _MAX_FAILURES:
            return replace(state, run=replace(run, failures=(*run.failures, record)))
        case _:
            return state


def _gpu_seen(state: State, run: Run, record: LogRecord) -> State:
    """A GPU has joined (added, row) or asks to join (probe). FM counts modules from 0, everybody else from 1."""
    fields = record.fields
    uuid = fields.get("uuid", "")
    bus_id = fields.get("pci_bus_id", "")
    if not uuid:
        return state
    raw_id = fields.get("module_id") or fields.get("physical_id") or ""
    on_host = {gpu.pci_bus_id for gpu in state.host.gpus} if state.host else set()
    if bus_id in on_host and len(state.gpu_buses) < _MAX_GPUS:
        state = replace(state, gpu_buses=MappingProxyType({**state.gpu_buses, uuid: bus_id}))
        if raw_id.isdecimal():
            state = learn(state, bus_id, int(raw_id[:_MODULE_ID_DIGITS]) + 1)
    if record.kind is LogKind.GPU_PROBE or len(run.registered) >= _MAX_GPUS:
        return state
    registered = MappingProxyType({**run.registered, uuid: bus_id or run.registered.get(uuid, "")})
    return replace(
        state,
        run=replace(run, is_log_seen=True, registered=registered),
        lost_registrations=state.lost_registrations - {uuid},
    )

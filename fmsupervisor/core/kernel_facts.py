"""Fold what the kernel log says into the state: errors of switches and GPUs, and how far the log can be relied on.

A problem that a switch's line tells (an interrupt storm, heat, a blacklisting) holds until the driver probes that
switch again, since only a reset cures it and no line says that it is over (of heat, one does). Lines from before the
supervisor began count for these too: what they tell may still be the case.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from fmsupervisor.conditions import Code
from fmsupervisor.core import switches
from fmsupervisor.core.state import KernelProblem, State
from fmsupervisor.core.switch_errors import KernelError, count_kernel_errors, fatal_problem, forget_credits, latch
from fmsupervisor.facts import KernelBatch, KernelKind, KernelRecord, Problem, SwitchErrorKey
from fmsupervisor.xid import FABRIC_XIDS, GPU_LOST

_FOR_GOOD = float("inf")
_TOLD_SECONDS = 3600.0  # for how long something that is over at once is shown
_MAX_PROBLEMS = 256
_MAX_MINORS = 256
# Of the class HOST (sxid.tsv); their lines have no word for how bad it is.
_THERMAL_START, _THERMAL_END, _THERMAL_SHUTDOWN = 10004, 10005, 10006


def read_kernel(state: State, batch: KernelBatch) -> State:
    """The state after a batch of the kernel log."""
    state = replace(state, kernel_log_problem=batch.problem)
    if batch.problem:
        return forget_credits(state)
    state = replace(state, is_kernel_log_read=True)
    if batch.lost:
        state = _lost(state, batch.lost)
    errors = [
        KernelError(_key(record), record.is_old) for record in batch.records if record.kind is KernelKind.SWITCH_ERROR
    ]
    if errors:
        state = count_kernel_errors(state, errors)
    for record in batch.records:
        state = _read_record(state, record)
    return state


def release_kernel_problems(state: State) -> State:
    """The state without what has been shown for long enough."""
    now = state.now.monotonic
    kept = {key: one for key, one in state.kernel_problems.items() if one.until > now}
    return state if len(kept) == len(state.kernel_problems) else _with_problems(state, kept)


def _lost(state: State, count: int) -> State:
    counters = replace(state.counters, kernel_lost=state.counters.kernel_lost + count)
    state = forget_credits(replace(state, counters=counters))
    detail = f"{counters.kernel_lost} records of /dev/kmsg were overwritten unread, {count} of them the last time"
    return _tell(state, Problem(Code.KERNEL_LOG_OVERRUN, detail), _TOLD_SECONDS)


def _key(record: KernelRecord) -> SwitchErrorKey:
    fields = record.fields
    port = int(fields["port"]) if "port" in fields else None
    return SwitchErrorKey(fields["pci_bus_id"], int(fields["sxid"]), fields["severity"], port)


def _read_record(state: State, record: KernelRecord) -> State:
    fields = record.fields
    match record.kind:
        case KernelKind.SWITCH_ERROR:
            state = _learn_minor(state, fields["minor"], fields["pci_bus_id"])
            return _switch_error(state, record, _key(record))
        case KernelKind.SWITCH_PROBING | KernelKind.SWITCH_REMOVING:
            probing = fields["pci_bus_id"] if record.kind is KernelKind.SWITCH_PROBING else ""
            return _forget_switch(replace(state, kernel_probing=probing), fields["pci_bus_id"])
        case KernelKind.SWITCH_READY if state.kernel_probing:
            return replace(_learn_minor(state, fields["minor"], state.kernel_probing), kernel_probing="")
        case KernelKind.SWITCH_BLACKLISTED:
            switch = _switch_of(state, fields["minor"])
            return _tell(state, Problem(Code.SWITCH_BLACKLISTED, f"{switch}: by the kernel log", switch))
        case KernelKind.INTERRUPT_STORM:
            switch = _switch_of(state, fields["minor"])
            return _tell(state, Problem(Code.INTERRUPT_STORM, f"{switch}: {record.text}", switch))
        case KernelKind.VERSION_MISMATCH if not record.is_old:
            versions = f"driver {fields['kernel_version']}, program {fields['user_version']}"
            return _tell(state, Problem(Code.VERSION_CONFLICT, versions, fields["user_version"]), _TOLD_SECONDS)
        case KernelKind.GPU_ERROR if not record.is_old:
            return _gpu_error(state, int(fields["xid"]), fields["pci_bus_id"])
        case _:
            return state


def _switch_error(state: State, record: KernelRecord, key: SwitchErrorKey) -> State:
    bus_id = key.pci_bus_id
    if key.sxid in (_THERMAL_START, _THERMAL_SHUTDOWN):
        return _tell(state, Problem(Code.SWITCH_OVERHEATED, f"{bus_id}: {record.fields.get('what', '')}", bus_id))
    if key.sxid == _THERMAL_END:
        return _untell(state, Code.SWITCH_OVERHEATED, bus_id)
    if record.is_old and key.severity == "fatal":
        return _tell(state, fatal_problem(state, key, 1, Code.SXID_FATAL_EARLIER))
    return state


def _gpu_error(state: State, xid: int, bus_id: str) -> State:
    if xid not in FABRIC_XIDS:
        return state
    on_host = {gpu.pci_bus_id for gpu in state.host.gpus} if state.host else set()
    code = Code.GPU_LOST if xid == GPU_LOST else Code.GPU_NVLINK_ERROR
    detail = f"Xid {xid} of {bus_id}: {FABRIC_XIDS[xid]}"
    return latch(state, Problem(code, detail, bus_id if bus_id in on_host else "other"))


def _learn_minor(state: State, minor: str, bus_id: str) -> State:
    known = state.kernel_minors
    if known.get(minor) == bus_id or (minor not in known and len(known) >= _MAX_MINORS):
        return state
    return replace(state, kernel_minors=MappingProxyType({**known, minor: bus_id}))


def _switch_of(state: State, minor: str) -> str:
    """The bus id behind a minor: by the driver's word, else by the kernel log, else its name."""
    by_driver = {str(device.minor): device.pci_bus_id for device in switches.devices(state)}
    return by_driver.get(minor) or state.kernel_minors.get(minor) or f"nvidia-nvswitch{minor}"


def _forget_switch(state: State, bus_id: str) -> State:
    """The driver begins anew with this switch, or lets go of it."""
    minors = {minor for minor, known in state.kernel_minors.items() if known == bus_id}
    others = {minor: known for minor, known in state.kernel_minors.items() if minor not in minors}
    state = replace(state, kernel_minors=MappingProxyType(others))
    subjects = {bus_id, *(f"nvidia-nvswitch{minor}" for minor in minors)}
    kept = {key: one for key, one in state.kernel_problems.items() if one.problem.subject not in subjects}
    return state if len(kept) == len(state.kernel_problems) else _with_problems(state, kept)


def _tell(state: State, problem: Problem, seconds: float = _FOR_GOOD) -> State:
    key = (str(problem.code), problem.subject)
    if key not in state.kernel_problems and len(state.kernel_problems) >= _MAX_PROBLEMS:
        return state
    until = state.now.monotonic + seconds
    return _with_problems(state, {**state.kernel_problems, key: KernelProblem(problem, until)})


def _untell(state: State, code: Code, subject: str) -> State:
    kept = {key: one for key, one in state.kernel_problems.items() if key != (str(code), subject)}
    return _with_problems(state, kept)


def _with_problems(state: State, problems: Mapping[tuple[str, str], KernelProblem]) -> State:
    return replace(state, kernel_problems=MappingProxyType(dict(problems)))

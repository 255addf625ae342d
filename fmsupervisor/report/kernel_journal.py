"""What of the kernel log goes into our own journal: lines that matter, each once, with their fields.

They stand in the kernel's journal as well; here they have fields to ask for (SXID, PCI_BUS_ID, NVLINK_PORT ...) and
stand in order with what Fabric Manager said of the same event. What was there before the supervisor began is summed up
in one line.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from fmsupervisor.facts import KernelBatch, KernelKind, KernelRecord
from fmsupervisor.report import journal
from fmsupervisor.report.journal import Event

_LINES_PER_BATCH = 100

# A kind that is not here is not written.
_LEVELS: Mapping[KernelKind, str] = MappingProxyType(
    {
        KernelKind.SWITCH_ERROR: "error",
        KernelKind.GPU_ERROR: "error",
        KernelKind.SWITCH_PROBING: "info",
        KernelKind.SWITCH_PROBE_FAILED: "error",
        KernelKind.SWITCH_REMOVING: "warning",
        KernelKind.SWITCH_BLACKLISTED: "error",
        KernelKind.INTERRUPT_STORM: "error",
        KernelKind.STALE_DESCRIPTOR: "warning",
        KernelKind.SWITCH_UNREADABLE: "warning",
        KernelKind.VERSION_MISMATCH: "error",
        KernelKind.GPU_OWNED: "info",
        KernelKind.LOAD_FAILED: "error",
        KernelKind.LOCKDOWN: "error",
        KernelKind.SIGNATURE: "warning",
        KernelKind.MODULE_REFUSED: "error",
    }
)


def log_kernel_batch(batch: KernelBatch) -> None:
    """Tell the new lines, and once what there was before."""
    wanted = [record for record in batch.records if record.kind in _LEVELS and not record.is_old]
    for record in wanted[:_LINES_PER_BATCH]:
        journal.log_kernel_line(record, _LEVELS[record.kind])
    journal.log_suppressed(len(wanted) - _LINES_PER_BATCH, "lines of the kernel")
    old = _summary(record for record in batch.records if record.is_old)
    if old:
        journal.log_event(Event.KERNEL_HISTORY, "info", f"the kernel log holds from before: {old}")


def _summary(records: Iterable[KernelRecord]) -> str:
    """The errors among the records, as in: 9 SXid 12028 (non-fatal) of 0000:06:00.0."""
    counts = Counter(_name(record) for record in records if record.kind in _ERRORS)
    shown = [f"{count} {name}" for name, count in counts.most_common(_NAMES_SHOWN)]
    if len(counts) > _NAMES_SHOWN:
        shown.append(f"{len(counts) - _NAMES_SHOWN} kinds more")
    return ", ".join(shown)


def _name(record: KernelRecord) -> str:
    found = record.fields
    bus_id = found.get("pci_bus_id", "")
    if record.kind is KernelKind.GPU_ERROR:
        return f"Xid {found['xid']} of {bus_id}"
    return f"SXid {found['sxid']} ({found['severity']}) of {bus_id}"


_ERRORS = frozenset({KernelKind.SWITCH_ERROR, KernelKind.GPU_ERROR})
_NAMES_SHOWN = 10

"""An ACPI table by which the kernel gives every PCI device, also one made by software, an IOMMU group.

QEMU's own DMAR table names only QEMU's devices, and vfio-pci refuses a device without a group. The kernel prefers a table
with a higher OEM revision that lies uncompressed before the initrd (CONFIG_ACPI_TABLE_UPGRADE; Documentation/admin-guide/
acpi/initrd_table_override.rst). Layout: Intel VT-d specification, chapter 8.
"""

import struct
import sys

_REGISTERS = 0xFED90000  # where QEMU puts its intel-iommu
_INCLUDE_PCI_ALL = 1
_PLATFORM_BUS = 0xFF  # QEMU's bus number of the IOAPIC


def dmar_table() -> bytes:
    """One remapping unit that is responsible for all of PCI, and the IOAPIC."""
    ioapic = struct.pack("<BBHBBBB", 3, 8, 0, 0, _PLATFORM_BUS, 0, 0)
    unit = struct.pack("<HHBBHQ", 0, 16 + len(ioapic), _INCLUDE_PCI_ALL, 0, 0, _REGISTERS) + ioapic
    width_and_flags = struct.pack("<BB10x", 38, 0)  # 39 bits of host address, no interrupt remapping
    length = 36 + len(width_and_flags) + len(unit)
    header = struct.pack("<4sIBB6s8sI4sI", b"DMAR", length, 1, 0, b"BOCHS ", b"BXPC    ", 2, b"BXPC", 1)
    table = bytearray(header + width_and_flags + unit)
    table[9] = -sum(table) & 0xFF
    return bytes(table)


if __name__ == "__main__":
    sys.stdout.buffer.write(dmar_table())

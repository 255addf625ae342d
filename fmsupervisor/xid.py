"""Xid numbers (errors of a GPU) that are about NVLink and the fabric. Source: nverror.h of the open kernel modules."""

from collections.abc import Mapping
from types import MappingProxyType

GPU_LOST = 79

FABRIC_XIDS: Mapping[int, str] = MappingProxyType(
    {
        74: "NVLink error",
        GPU_LOST: "the GPU has fallen off the bus",
        108: "NVLink remote translation error",
        136: "NVLink training failed (ALI)",
        137: "NVLink privilege error",
        144: "NVLink SAW error",
        145: "NVLink RLW error",
        146: "NVLink TLW error",
        147: "NVLink TREX error",
        148: "NVLink NVLPW control error",
        149: "NVLink NETIR error",
        150: "NVLink MSE error",
        155: "NVLink error defined by software",
        166: "NVLink secure error",
        170: "NVLink secure error",
    }
)

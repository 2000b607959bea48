"""What accelerators can do at most, by their makers' data sheets. Nothing here needs torch."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One device as a process sees it."""

    tflops: float
    """Peak of dense bfloat16 products, in TFLOP/s."""
    gigabytes: int
    """Memory, in 1e9 bytes."""
    called: str | None = None
    """Pattern of the whole name that torch gives it, less its maker; None where torch does not run on it here."""

    @property
    def memory(self) -> int:
        """Bytes."""
        return self.gigabytes * 10**9


DEVICES: dict[str, Device] = {
    "h200": Device(989.0, 141, "H200"),
    "h100-pcie": Device(756.0, 80, "H100 PCIe"),
    "h100-nvl": Device(835.0, 94, "H100 NVL"),
    "h100": Device(989.0, 80, "H100 80GB HBM3"),
    "b200": Device(2250.0, 180, "B200"),
    "a100-40gb": Device(312.0, 40, r"A100-(SXM4|PCIE)-40GB"),
    "a100": Device(312.0, 80, "A100-SXM4-80GB|A100 80GB PCIe"),
    "a40": Device(149.7, 48, "A40"),
    "a10": Device(125.0, 24, "A10"),
    "l40s": Device(362.0, 48, "L40S"),
    "l4": Device(121.0, 24, "L4"),
    "rtx4090": Device(165.2, 24, "GeForce RTX 4090"),
    "rtx3090": Device(71.0, 24, "GeForce RTX 3090"),
    "tpuv3-core": Device(61.5, 16),  # half a chip, as the paper counts (Table 2)
    "tpuv4": Device(275.0, 32),
}


def device_called(name: str) -> str | None:
    """The device of DEVICES that torch calls `name`, or None: one that is merely called alike has another peak (a
    laptop's, a part of a GPU as MIG makes it)."""
    there = ((key, device.called) for key, device in DEVICES.items() if device.called)
    return next((key for key, pattern in there if re.fullmatch(rf"(NVIDIA )?({pattern})", name)), None)

"""The table of devices: names as torch gives them, and nothing taken for another."""

import subprocess
import sys

import pytest
from vitlab.train.devices import DEVICES, device_called


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("A100-SXM4-80GB", "a100"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None),
        ("NVIDIA A100-SXM-64GB", None),
        ("NVIDIA A10-24Q", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA RTX A1000", None),
        ("cpu", None),
    ],
)
def test_names(name: str, key: str | None) -> None:
    assert device_called(name) == key


def test_memory_is_in_bytes() -> None:
    assert DEVICES["h100"].memory == 80 * 10**9
    assert all(8e9 <= device.memory <= 1e12 and 10 < device.tflops < 10_000 for device in DEVICES.values())


def test_half_a_chip_is_a_core() -> None:
    """Two cores on a TPUv3's chip of 123 TFLOP/s and 32 GB; torch does not run there, so that none is found by name."""
    core = DEVICES["tpuv3-core"]
    assert (2 * core.tflops, 2 * core.gigabytes, core.called) == (123, 32, None)


def test_the_command_line_has_it_without_torch() -> None:
    code = "import sys, vitlab.train.devices; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

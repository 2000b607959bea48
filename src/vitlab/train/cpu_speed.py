"""What this CPU computes faster: bfloat16 or float32, packed linear layers or `nn.Linear`.

Each is measured in about 30 ms, and once for each processor and version of torch: the cache folder keeps it, so that a
run resumes in the same precision.
"""

import contextlib
import functools
import hashlib
import json
import platform
import time
from collections.abc import Callable

import torch
from torch import nn

from vitlab.data.downloads import cache_folder
from vitlab.io import write_bytes
from vitlab.models import ViTConfig
from vitlab.models.encoder import MLP
from vitlab.models.packed import pack_linear

MIN_BFLOAT16_SPEEDUP = 1.3
"""Minimum bfloat16 speedup of matrix products to enable it. With AMX, or AVX-512 on AMD, they take half the time or
less; Intel's AVX-512 alone has half the instructions per cycle for them, and without either they take 100 times as
long."""
MIN_PACKED_SPEEDUP = 1.05
"""Minimum speedup of an MLP with packed layers to pack those of a frozen model."""


@functools.cache
def cpu_is_faster_in_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices at least MIN_BFLOAT16_SPEEDUP times as fast as float32 ones."""

    def speedup() -> float:
        (a, b), (c, d) = (torch.ones(2, 256, 256, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
        return _seconds(lambda: torch.mm(a, b)) / _seconds(lambda: torch.mm(c, d))

    return _measured_once("bfloat16", speedup) >= MIN_BFLOAT16_SPEEDUP


@functools.cache
def cpu_is_faster_packed(dtype: torch.dtype) -> bool:
    """Whether this CPU computes an MLP at least MIN_PACKED_SPEEDUP times as fast with packed linear layers."""

    @torch.inference_mode()
    def speedup() -> float:
        config = ViTConfig(image_size=16, patch_size=16, width=384, depth=1, heads=6, mlp_dim=1536)
        tokens = torch.ones(1, 256, 384, dtype=dtype)
        plain, packed = (MLP(config).to(dtype) for _ in range(2))
        for parameter in [*plain.parameters(), *packed.parameters()]:
            nn.init.constant_(parameter, 0.01)
        pack_linear(packed)
        return _seconds(lambda: plain(tokens)) / _seconds(lambda: packed(tokens))

    if not torch.backends.mkldnn.is_available() or platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return _measured_once(f"packed-{str(dtype).removeprefix('torch.')}", speedup) >= MIN_PACKED_SPEEDUP


def _measured_once(name: str, measure: Callable[[], float]) -> float:
    """`measure()`, or what it returned on this processor before."""
    # Virtual machines give processors of several generations one name.
    processor = f"{sorted(torch.cpu.get_capabilities().items())} {platform.processor()} {torch.__version__}"
    path = cache_folder() / "cpu_speed" / f"{name}-{hashlib.sha256(processor.encode()).hexdigest()[:16]}.json"
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # missing or corrupt
        return float(json.loads(path.read_bytes())["speedup"])
    speedup = measure()
    with contextlib.suppress(OSError):  # a folder that cannot be written
        write_bytes(path, json.dumps({"processor": processor, "speedup": speedup}).encode())
    return speedup


def _seconds(compute: Callable[[], object]) -> float:
    """The shortest time of as many calls as take 10 ms, at least two."""
    started, seconds = time.perf_counter(), []
    while len(seconds) < 2 or time.perf_counter() - started < 0.01:
        start = time.perf_counter()
        compute()
        seconds.append(time.perf_counter() - start)
    return min(seconds)

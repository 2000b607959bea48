"""In which numbers a run computes. The model knows nothing of it: float32 master weights are what is trained.

`float32`: the model computes with the master weights themselves.
`autocast`: the same, and torch casts weights to bfloat16 at each use.
`bfloat16`: the model holds one bfloat16 copy of the master weights, refreshed once a step; on a CPU this spares the
repeated casts of autocast.
"""

import contextlib
import ctypes
import sys
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from vitlab.models.attention import cpu_units

Precision = Literal["float32", "autocast", "bfloat16"]


def resolve_precision(asked: str, device: torch.device) -> Precision:
    """What `auto` means on this device; any other answer is the one asked for."""
    match asked:
        case "float32" | "autocast" | "bfloat16":
            return asked
        case _ if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
            return "autocast"
        case _ if device.type == "cpu" and cpu_is_faster_in_bfloat16():
            return "bfloat16"
        case _:
            return "float32"


def cpu_is_faster_in_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 matrices faster than float32 ones: by AMX, or by AVX-512 BF16.

    Not by Intel's AVX-512 BF16 alone, which has half the instructions a cycle: where AMX is hidden, as in some virtual
    machines, training in bfloat16 takes longer (docs/reproduce.md).
    """
    units = cpu_units()
    intel = "Intel" in str(units.get("cpu_name"))
    return bool(units.get("amx_bf16") or (units.get("avx512_bf16") and not intel))


class MasterWeights:
    """The float32 weights that are trained (`masters`, by name) and the model that computes with them.

    A `sharded` model brings its weights together in the lower precision by itself.
    """

    def __init__(self, model: nn.Module, precision: Precision, sharded: bool = False) -> None:
        self.precision = precision
        self._casts = precision == "autocast" and not sharded
        self.names = [name for name, _ in model.named_parameters()]
        self._parameters: list[Tensor] = list(model.parameters())
        self._copied = precision == "bfloat16" and not sharded
        if self._copied:
            self._masters = [p.detach().float().clone().requires_grad_() for p in self._parameters]
            model.to(torch.bfloat16)
        else:
            self._masters = self._parameters

    @property
    def masters(self) -> dict[str, Tensor]:
        """Name -> float32 parameter, in the model's order; gradients stand in `.grad`."""
        return dict(zip(self.names, self._masters, strict=True))

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """The context for a forward pass."""
        if not self._casts:
            return contextlib.nullcontext()
        return torch.autocast(self._parameters[0].device.type, dtype=torch.bfloat16)

    def collect_gradients(self) -> None:
        """Adds the gradients of the last backward pass to the masters'."""
        if not self._copied:
            return
        fresh = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._parameters]
        for master, gradient in zip(self._masters, fresh, strict=True):
            if master.grad is None:
                master.grad = gradient.float()
            else:
                master.grad.add_(gradient)
        for parameter in self._parameters:
            parameter.grad = None

    def clear_gradients(self) -> None:
        for master in self._masters:
            master.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Brings the model's copy up to the masters, after they have changed."""
        if self._copied:
            _copy(self._masters, self._parameters)


@torch.no_grad()
def _copy(source: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    torch._foreach_copy_(list(into), list(source))  # pyright: ignore[reportPrivateImportUsage]


def keep_freed_memory() -> bool:
    """Tells glibc to keep freed blocks instead of returning them to the system at every step; says if it did.

    A training step frees and asks again for the same large blocks; faulting their pages in anew costs a CPU run up to
    a third of its time. The block threshold must be set before the blocks are first allocated.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it, musl has not
    if mallopt is None:
        return False
    m_trim_threshold, m_mmap_threshold, largest = -1, -3, 2**31 - 1
    return bool(mallopt(m_mmap_threshold, 2**30)) and bool(mallopt(m_trim_threshold, largest))

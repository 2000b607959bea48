"""The precision of training. The model does not know it: float32 master weights are what is trained.

`float32`: the model computes with the master weights.
`autocast`: the same, and torch casts weights to bfloat16 at each use.
`bfloat16`: the model holds one bfloat16 copy of the master weights, updated once per step; on a CPU this saves the
repeated casts of autocast.
"""

import contextlib
import ctypes
from typing import Literal

import torch
from torch import Tensor, nn

from vitlab.errors import UserError
from vitlab.models.packed import pack_linear
from vitlab.train.cpu_speed import cpu_is_faster_in_bfloat16, cpu_is_faster_packed

Precision = Literal["float32", "autocast", "bfloat16"]


def resolve_precision(requested: str, device: torch.device) -> Precision:
    """The precision that `auto` means on this device; any other one as it is."""
    if requested == "float32" or requested == "autocast" or requested == "bfloat16":
        return requested
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return "autocast"
    if device.type == "cpu" and cpu_is_faster_in_bfloat16():
        return "bfloat16"
    return "float32"


def frozen_dtype(requested: str, device: torch.device) -> torch.dtype:
    """The dtype in which a model is evaluated without training: bfloat16 unless the precision resolves to float32."""
    return torch.float32 if resolve_precision(requested, device) == "float32" else torch.bfloat16


def prepare_for_inference(model: nn.Module, device: torch.device, dtype: torch.dtype, pack: bool = True) -> None:
    """Moves and casts a model for inference, in place; `pack` also packs its linear layers where this CPU is faster
    with them. Not with torch.compile, which cannot trace packed layers."""
    model.to(device=device, dtype=dtype)
    if pack and should_pack(device, dtype):
        pack_linear(model)


def should_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether inference on this device is faster with packed linear layers."""
    return device.type == "cpu" and cpu_is_faster_packed(dtype)


def choose_device(name: str) -> torch.device:
    """The device of this name; `auto` is the first GPU, or the CPU. Raises UserError for an unknown or missing
    device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    gpus = torch.cuda.device_count()
    if device is None or device.type not in ("cpu", "cuda") or (device.type == "cuda" and (device.index or 0) >= gpus):
        raise UserError(
            f"device {name!r} is unknown or missing; give auto, cpu, cuda or cuda:1. torch sees {gpus} GPUs."
        )
    return device


def device_name(device: torch.device) -> str:
    """The name of a GPU, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


class MasterWeights:
    """The float32 weights that are trained, by name, and the model that computes with them.

    A `sharded` model (FSDP2) casts to the lower precision when it gathers its weights.
    """

    def __init__(self, model: nn.Module, precision: Precision, sharded: bool = False) -> None:
        self.precision = precision
        self._autocast = precision == "autocast" and not sharded
        self._copied = precision == "bfloat16" and not sharded
        self._parameters = dict(model.named_parameters())
        self.masters: dict[str, Tensor] = self._parameters  # pyright: ignore[reportAttributeAccessIssue]
        """Name -> float32 parameter in the model's order, with gradients in `.grad`."""
        if self._copied:
            named = self._parameters.items()
            self.masters = {n: p.detach().float().clone().requires_grad_(p.requires_grad) for n, p in named}
            model.to(torch.bfloat16)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """The context of a forward pass."""
        if not self._autocast:
            return contextlib.nullcontext()
        return torch.autocast(next(iter(self.masters.values())).device.type, dtype=torch.bfloat16)

    def accumulate_gradients(self) -> None:
        """Adds the bfloat16 gradients of the last backward pass to the masters' gradients, in float32."""
        if not self._copied:
            return
        trained = ((name, parameter) for name, parameter in self._parameters.items() if parameter.requires_grad)
        for name, parameter in trained:
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            master = self.masters[name]
            if master.grad is None:
                master.grad = gradient.float()
            else:
                master.grad.add_(gradient)
            parameter.grad = None

    def zero_grad(self) -> None:
        for master in self.masters.values():
            master.grad = None

    @torch.no_grad()
    def copy_masters_to_model(self) -> None:
        """Rounds the masters to the model's bfloat16 weights, if it has any."""
        if self._copied:
            torch._foreach_copy_(list(self._parameters.values()), list(self.masters.values()))  # pyright: ignore[reportPrivateImportUsage]


def keep_freed_memory() -> bool:
    """Makes glibc keep freed blocks instead of returning them to the system at every step; returns whether it does.

    A training step frees and allocates the same large blocks again, and faulting in their pages costs a CPU run up to
    a third of its time. The block threshold must be set before the blocks are first allocated.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # missing in musl and on macOS
    if mallopt is None:
        return False
    m_trim_threshold, m_mmap_threshold, largest = -1, -3, 2**31 - 1
    # 2**25 is the limit of older glibc.
    mmap_threshold_set = mallopt(m_mmap_threshold, 2**30) or mallopt(m_mmap_threshold, 2**25)
    return bool(mallopt(m_trim_threshold, largest)) and bool(mmap_threshold_set)

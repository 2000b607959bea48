"""Linear layers of a frozen model on a CPU, with weights in the layout that oneDNN multiplies fastest.

`nn.Linear` reorders a bfloat16 weight at every call, and in float32 it calls MKL, which is slow on AMD. A packed weight
is reordered once, and the GELU of an MLP is computed while the products are still in the cache. `train/cpu_speed.py`
measures whether that is faster. The operators are private to torch; torch 2.15 has them.

    pack_linear(model)  # in place; only for inference
"""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitlab.models.encoder import MLP
from vitlab.models.variant_layers import Activation

Gelu = Literal["tanh", "none"]
"""The argument `approximate` of `F.gelu`."""
GELUS: dict[str, Gelu] = {"tanh": "tanh", "erf": "none"}
"""Kind of an `Activation` -> the argument; others are not fused."""


class PackedLinear(nn.Module):
    """An `nn.Linear`, with a GELU after it if `gelu` is given. It shares the parameters. The packed copy does not
    follow changes of them, so it must not be cast, copied, pickled or trained.

    With gradients enabled it computes as `nn.Linear` does: oneDNN's operator has no backward pass.
    """

    def __init__(self, linear: nn.Linear, gelu: Gelu | None = None) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.gelu = gelu
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    def forward(self, x: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        if torch.is_grad_enabled():
            y = F.linear(x, self.weight, self.bias)
            return y if self.gelu is None else F.gelu(y, approximate=self.gelu)
        operation, algorithm = ("none", "") if self.gelu is None else ("gelu", self.gelu)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, operation, [], algorithm)


def pack_linear(model: nn.Module) -> None:
    """Replaces the linear layers of a model on a CPU by packed ones, in place."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear:
                gelu = _take_gelu(parent) if name == "fc1" else None
                setattr(parent, name, PackedLinear(layer, gelu))


def _take_gelu(parent: nn.Module) -> Gelu | None:
    """Removes the GELU after `fc1` from an MLP and returns it; None for another activation."""
    if not isinstance(parent, MLP) or not isinstance(parent.activation, Activation):
        return None
    gelu = GELUS.get(parent.activation.kind)
    if gelu is not None:
        parent.activation = nn.Identity()
    return gelu

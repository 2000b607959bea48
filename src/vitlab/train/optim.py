"""The optimizers of the paper's time, schedules, clipping and the Polyak average (Sec. 4.1, App. B.1).

All work on float32 master weights, and none waits for the device.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from vitlab.config import OptimConfig
from vitlab.models.blocks import parameter_depths
from vitlab.train.parallel import full_tensor, is_sharded, local_shard

STAIRS = (0.3, 0.6, 0.9)


def learning_rate(config: OptimConfig, step: int | float, total_steps: int) -> float:
    """The rate of the update that follows `step` others: a pure function, so that a resumed run needs no state.

    As in optax, the first update of a warm-up has rate 0 and changes nothing. In a shortened run the step is a
    `Schedule.position`.
    """
    warmup = config.warmup_steps
    progress = min(max((step - warmup) / max(total_steps - warmup, 1), 0.0), 1.0)
    match config.schedule:
        case "cosine":
            rate = config.lr * 0.5 * (1.0 + math.cos(math.pi * progress))
        case "linear":
            rate = config.end_lr + (config.lr - config.end_lr) * (1.0 - progress)
        case "constant":
            rate = config.lr
        case "staircase":  # after the step that ends a stair, as in BiT's code
            rate = config.lr * 0.1 ** sum(step > fraction * total_steps for fraction in STAIRS)
    if warmup:
        rate *= min(1.0, step / warmup)
    return rate


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_scale"]


def is_decayed(name: str, parameter: Tensor, config: OptimConfig) -> bool:
    """Whether weight decay applies to this parameter.

    `kernels` are matrices and patch filters: no bias, LayerNorm, class token or position embedding.
    """
    if config.weight_decay == 0:
        return False
    return config.decay_on == "all" or (parameter.ndim >= 2 and name.rpartition(".")[2] == "weight")


class DecoupledSGD(torch.optim.SGD):
    """Momentum SGD with p <- p - lr * decay * p; torch's weight decay goes through the momentum."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.no_grad():
            for group in self.param_groups:
                parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
                if parameters and group["decay"]:
                    torch._foreach_mul_(parameters, 1.0 - group["lr"] * group["decay"])  # pyright: ignore[reportPrivateImportUsage]
        return super().step(closure)


def parameter_groups(named_parameters: Iterable[tuple[str, Tensor]], config: OptimConfig) -> list[dict[str, Any]]:
    """Groups for a torch optimizer: parameters that decay and those that do not, at each depth with `layer_decay`.

    A group has `params` (pairs of name and parameter), `weight_decay`, `lr`, and `lr_scale`, the factor
    in its learning rate. Frozen parameters are left out.
    """
    named = dict(named_parameters)
    depths = parameter_depths(named) if config.layer_decay < 1 else dict.fromkeys(named, 0)
    top = max(depths.values(), default=0)
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, parameter in named.items():
        if parameter.requires_grad:
            decayed = is_decayed(name, parameter, config)
            scale = config.layer_decay ** (top - depths[name])
            new = {"params": [], "weight_decay": config.weight_decay if decayed else 0.0}
            group = groups.setdefault((depths[name], not decayed), new | {"lr": config.lr * scale, "lr_scale": scale})
            group["params"].append((name, parameter))
    return [groups[key] for key in sorted(groups)]


def create_optimizer(named_parameters: Iterable[tuple[str, Tensor]], config: OptimConfig) -> torch.optim.Optimizer:
    """Adam or momentum SGD with decoupled weight decay, on `parameter_groups`.

    Adam is as in Flax when the paper was written; it equals torch's AdamW: bias-corrected, epsilon outside the
    root, decoupled decay. SGD's momentum starts with the whole first gradient, without Nesterov.
    """
    groups = parameter_groups(named_parameters, config)
    parameters = [parameter for group in groups for _, parameter in group["params"]]
    fused = all(parameter.device.type in ("cpu", "cuda") for parameter in parameters)
    if config.name == "adam":
        betas = (config.beta1, config.beta2)
        return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=1e-8, fused=fused)
    fused = fused and not any(is_sharded(parameter) for parameter in parameters)  # torch has no such kernel yet
    for group in groups:
        group["decay"] = group.pop("weight_decay")
    return DecoupledSGD(groups, lr=config.lr, momentum=config.momentum, fused=fused)


def state_per_weight(config: OptimConfig) -> int:
    """How many numbers of optimizer state each weight has."""
    return 2 if config.name == "adam" else int(config.momentum > 0)


@torch.no_grad()
def clip_by_global_norm(parameters: Iterable[Tensor], max_norm: float | None) -> Float[Tensor, ""]:
    """Scales all gradients so that their joint L2 norm is at most `max_norm`; returns the norm before.

    Divides by the norm itself, as optax does; torch's own function adds 1e-6 to it.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)  # of sharded gradients a DTensor, whose full tensor is the global norm
    if max_norm is not None:
        torch._foreach_mul_(grads, (max_norm / norm).clamp(max=1.0))  # pyright: ignore[reportPrivateImportUsage]
    return full_tensor(norm)


def update_average(average: Iterable[Tensor], parameters: Iterable[Tensor], decay: float) -> None:
    """Polyak averaging in place: average <- decay * average + (1 - decay) * parameter."""
    local_average, local = ([local_shard(tensor.detach()) for tensor in group] for group in (average, parameters))
    get_ema_multi_avg_fn(decay)(local_average, local, 0)


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer state as `parameter/quantity` -> tensor. Its settings are the run's config."""
    return {
        f"{name}/{quantity}": value
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
        for quantity, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    }


def load_optimizer_state(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """The inverse of `optimizer_state`, for an optimizer of the same config."""
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, _, quantity = key.rpartition("/")
        state.setdefault(names.index(name), {})[quantity] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})

"""All that changes during a run: made before its first step, kept in checkpoints, and put back from them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitlab.config import TrainConfig
from vitlab.train.distributed import Parallel, World, full_tensor, is_sharded, shard_like
from vitlab.train.optim import create_optimizer, pack_optimizer, unpack_optimizer
from vitlab.train.precision import MasterWeights, resolve_precision


@dataclass
class State:
    """All that changes during a run."""

    parallel: Parallel
    weights: MasterWeights
    optimizer: torch.optim.Optimizer
    average: dict[str, Tensor] | None
    sums: Tensor
    """Loss, accuracy and gradient norm, added up since the last record; and the first step whose loss was not finite
    (0: none)."""
    step: int = 0
    skipped: int = 0
    recorded: int = 0
    """The step of the last record."""
    evaluation_due: bool = False
    """Whether the evaluation of `step` was interrupted and has to be made before the next step."""

    @torch.no_grad()
    def tensors(self, wanted: bool = True) -> dict[str, Tensor]:
        """Everything to keep, whole. Where it is sharded every process has to ask, also one that has no use for it
        (`wanted`); one tensor after the other, as a device that holds a part may have no room for all of them."""
        named = {f"weights/{name}": master for name, master in self.weights.masters.items()}
        named |= {f"average/{name}": value for name, value in (self.average or {}).items()}
        named |= {f"optimizer/{name}": value for name, value in pack_optimizer(self.optimizer).items()}
        kept = {"sums": self.sums}
        for name, tensor in named.items():
            found = full_tensor(tensor)
            if wanted:
                kept[name] = found.cpu() if is_sharded(tensor) else found
        return kept

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor], step: int, plain: dict[str, Any]) -> None:
        parts: dict[str, dict[str, Tensor]] = {"weights": {}, "average": {}, "optimizer": {}}
        for key, value in tensors.items():
            part, _, name = key.partition("/")
            if name:
                parts[part][name] = value
        for name, master in self.weights.masters.items():
            master.copy_(shard_like(parts["weights"].pop(name), master))
        for name, value in (self.average or {}).items():
            value.copy_(shard_like(parts["average"].pop(name), value))
        assert not {**parts["weights"], **parts["average"]}, "a checkpoint of another model"
        masters = self.weights.masters
        remembered = {
            key: shard_like(value, masters[key.rpartition("/")[0]]) if value.ndim else value
            for key, value in parts["optimizer"].items()
        }
        unpack_optimizer(self.optimizer, remembered)
        self.sums.copy_(tensors["sums"])
        self.weights.refresh()
        self.step, self.skipped, self.recorded = step, plain["skipped"], plain["recorded"]
        self.evaluation_due = bool(plain.get("evaluation_due"))


def create_state(config: TrainConfig, model: nn.Module, device: torch.device, world: World) -> State:
    """The state of a run before its first step, whose `spread` computes with `model` from then on."""
    precision = resolve_precision(config.precision, device)
    parallel = Parallel(
        model.train(), world, device, precision=precision, fsdp=config.fsdp, float8=config.float8,
        recompute=config.activation_checkpointing, compiled=config.compile, uneven=config.data.on_error == "skip",
        graphs=config.cuda_graphs,
    )  # fmt: skip
    weights = MasterWeights(model, precision, sharded=parallel.sharded)
    masters = weights.masters
    average = {n: m.detach().clone() for n, m in masters.items()} if config.average_decay else None
    optimizer = create_optimizer(masters.items(), config.optim)
    return State(parallel, weights, optimizer, average, torch.zeros(4, dtype=torch.float64, device=device))

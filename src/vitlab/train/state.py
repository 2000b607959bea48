"""Everything that changes during a run: created before the first step, saved in checkpoints, restored from them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitlab.config import TrainConfig
from vitlab.train.distributed import World
from vitlab.train.optim import create_optimizer, load_optimizer_state, optimizer_state
from vitlab.train.parallel import Parallel, full_tensor, is_sharded, shard_like
from vitlab.train.precision import MasterWeights, resolve_precision


@dataclass
class TrainState:
    """Everything that changes during a run."""

    parallel: Parallel
    weights: MasterWeights
    optimizer: torch.optim.Optimizer
    average: dict[str, Tensor] | None
    """The Polyak average of the weights."""
    sums: Tensor
    """Loss, accuracy and gradient norm, summed since the last record; the first step that was not finite (0: none)."""
    step: int = 0
    skipped: int = 0
    """Images that could not be read."""
    recorded: int = 0
    """The step of the last record."""
    evaluation_due: bool = False
    """Whether the evaluation of `step` was interrupted and comes before the next step."""

    @torch.no_grad()
    def tensors(self, keep: bool = True) -> dict[str, Tensor]:
        """All tensors of a checkpoint, in full.

        A collective where they are sharded: ranks that do not save call it with `keep=False`. Gathers one tensor at a
        time, for a device that holds a shard may not have room for all.
        """
        named = {f"weights/{name}": master for name, master in self.weights.masters.items()}
        named |= {f"average/{name}": value for name, value in (self.average or {}).items()}
        named |= {f"optimizer/{name}": value for name, value in optimizer_state(self.optimizer).items()}
        tensors = {"sums": self.sums}
        for name, tensor in named.items():
            full = full_tensor(tensor)
            if keep:
                tensors[name] = full.cpu() if is_sharded(tensor) else full
        return tensors

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor], step: int, scalars: dict[str, Any]) -> None:
        """Restores what `tensors` and a checkpoint's plain data hold."""
        sections: dict[str, dict[str, Tensor]] = {"weights": {}, "average": {}, "optimizer": {}}
        for key, value in tensors.items():
            section, _, name = key.partition("/")
            if name:
                sections[section][name] = value
        masters, average = self.weights.masters, self.average or {}
        for targets, saved in ((masters, sections["weights"]), (average, sections["average"])):
            assert targets.keys() == saved.keys(), "a checkpoint of another model"
            for name, target in targets.items():
                target.copy_(shard_like(saved[name], target))
        load_optimizer_state(
            self.optimizer,
            {
                key: shard_like(value, masters[key.rpartition("/")[0]]) if value.ndim else value
                for key, value in sections["optimizer"].items()
            },
        )
        self.sums.copy_(tensors["sums"])
        self.weights.update_copy()
        self.step, self.skipped, self.recorded = step, scalars["skipped"], scalars["recorded"]
        self.evaluation_due = bool(scalars.get("evaluation_due"))


def create_state(config: TrainConfig, model: nn.Module, device: torch.device, world: World) -> TrainState:
    """The state of a run before its first step. From then on `state.parallel` computes with `model`."""
    precision = resolve_precision(config.precision, device)
    parallel = Parallel(
        model.train(),
        world,
        device,
        precision=precision,
        fsdp=config.fsdp,
        recompute=config.activation_checkpointing,
        compiled=config.compile,
        uneven=config.data.on_error == "skip",
    )
    weights = MasterWeights(model, precision, sharded=parallel.sharded)
    masters = weights.masters
    average = {n: m.detach().clone() for n, m in masters.items()} if config.average_decay else None
    optimizer = create_optimizer(masters.items(), config.optim)
    return TrainState(parallel, weights, optimizer, average, torch.zeros(4, dtype=torch.float64, device=device))

"""A model in training on all ranks: DDP or FSDP2, activation checkpointing, torch.compile."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vitlab.config import TrainConfig
from vitlab.models.blocks import model_blocks, set_grad_checkpointing
from vitlab.models.config import ResNetConfig
from vitlab.models.encoder import ResidualBranch
from vitlab.train.compile_cache import CompileCache, compile_cache, cpp_compiler
from vitlab.train.distributed import World
from vitlab.train.precision import Precision

COMPILE_FLOPS = {"cuda": 3e16, "cpu": 1e14}
"""Minimum FLOPs of a run for `compile="auto"`. On a GPU such a run takes two minutes or more without compiling, which
takes half a minute; then a step takes three quarters of the time. On two CPU cores the run takes a quarter of an hour,
compiling three to six minutes, and then a step two thirds of the time."""


def resolve_compile(config: TrainConfig, device: torch.device, steps: int) -> bool:
    """Whether a run of so many steps is compiled. With `auto` it is if it gains and torch finds a compiler. On a CPU
    convolutions gain (docs/records/speed.md); a ViT without them hardly does."""
    if config.compile != "auto":
        return config.compile
    model = config.model
    gains = device.type == "cuda" or isinstance(model, ResNetConfig) or model.stem is not None
    flops = 6.0 * model.training_macs * steps * config.batch_size
    return gains and flops >= COMPILE_FLOPS[device.type] and cpp_compiler() is not None


class Parallel:
    """A model in training on all ranks; call `forward` instead of the model.

    By default each rank has the whole model. DDP averages the gradients during the backward pass; with a bfloat16 copy
    of the weights, `average_gradients` does it after that, in float32. With `fsdp` (FSDP2) each rank has a shard of
    every weight, gradient and optimizer state; a block's weights are gathered when needed.

    A model is changed in the only order that works: 1. If it is sharded, each block is compiled. 2. Activation
    checkpointing. 3. Sharding or DDP. 4. If it is not sharded, the whole model is compiled. Every shape is compiled
    separately, unless unreadable images make batches smaller.
    """

    def __init__(
        self, model: nn.Module, world: World, device: torch.device, config: TrainConfig, precision: Precision
    ) -> None:
        self.world = world
        self.sharded = config.fsdp and world.world_size > 1
        self.forward: Callable[..., Any] = model
        self._model = model
        self._ddp: DistributedDataParallel | None = None
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # where NCCL looks for this rank's device
        compiled = config.compile is True  # `train` has replaced "auto"
        self._cache: CompileCache | None = compile_cache() if compiled else None  # until the first step is over
        dynamic = None if config.data.on_error == "skip" else False
        if self.sharded and compiled:
            _compile_blocks(model, device, dynamic)
        if config.activation_checkpointing:
            set_grad_checkpointing(model)
        if self.sharded:
            self._shard(device, precision)
            return
        if world.world_size > 1 and precision != "bfloat16":
            ids = [device.index] if device.type == "cuda" else None
            self.forward = self._ddp = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
        if compiled:
            self.forward = torch.compile(self.forward, dynamic=dynamic)

    def _shard(self, device: torch.device, precision: Precision) -> None:
        """FSDP2: each block, then the rest. Gradients are summed in float32."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(device.type, (self.world.world_size,))
        half = precision != "float32"
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
        for module in [*model_blocks(self._model), self._model]:
            fully_shard(module, mesh=mesh, mp_policy=policy)

    @contextlib.contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        """A forward and backward pass. Ranks exchange gradients only in the `last` micro-batch's."""
        if self.sharded:
            self._model.set_requires_gradient_sync(last)  # pyright: ignore[reportCallIssue]  # an FSDPModule's
        with self._ddp.no_sync() if self._ddp is not None and not last else contextlib.nullcontext():
            yield
        if self._cache is not None and last:
            self._cache.publish()
            self._cache = None

    def average_gradients(self, gradients: Iterable[Tensor]) -> None:
        """Averages a step's gradients over ranks, where the backward pass has not."""
        if self._ddp is None and not self.sharded:
            self.world.all_reduce_mean(gradients)


def _compile_blocks(model: nn.Module, device: torch.device, dynamic: bool | None) -> None:
    """Compiles each block separately, all to the same code.

    Their only difference, the rate of stochastic depth, becomes a tensor: a number would be part of the code, and torch
    keeps few versions of it.
    """
    for branch in (module for module in model.modules() if isinstance(module, ResidualBranch)):
        branch.drop_prob = torch.tensor(branch.drop_prob, dtype=torch.float32, device=device)
    for block in model_blocks(model):
        block.forward = torch.compile(block.forward, dynamic=dynamic)


def is_sharded(tensor: Tensor) -> bool:
    """Whether each rank has only a shard of it (a DTensor)."""
    return hasattr(tensor, "device_mesh")


def full_tensor(tensor: Tensor) -> Tensor:
    """All of a sharded tensor, on every rank (a collective); any other tensor as it is."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor, sharing its memory; any other tensor as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A full tensor, present on every rank, sharded as `like`; unchanged where `like` is not sharded."""
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)

"""The memory of a training step, counted without computing.

The model's own forward and backward pass run on torch's meta device, where tensors have shapes and types and no
content, while every allocation is recorded: in about a second, without memory. `DeviceRules` adds what other devices do
differently (autocast, attention and dropout in one kernel).

Not counted: workspace of libraries, fragmentation, the driver's memory, a checkpoint's copy, torch.compile's savings.
"""

import functools
import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from vitlab.config import MaskingConfig, TrainConfig
from vitlab.models import ModelConfig
from vitlab.models.attention import attention_backend, attention_weights, matmul_attention
from vitlab.models.blocks import freeze_blocks, model_blocks
from vitlab.models.vit import build_model
from vitlab.train.objectives import blank_batch, create_objective, create_training_model
from vitlab.train.optim import state_per_weight
from vitlab.train.precision import Precision


def rank_bytes(
    config: TrainConfig,
    microbatch: int,
    precision: Precision,
    device_type: str,
    world_size: int = 1,
    sharded: bool = False,
) -> dict[str, int]:
    """Bytes of a rank at the peak of a step, by what they hold; `microbatch` images go through the model at once.

    DDP: float32 weights, gradients and optimizer state. `sharded` (FSDP2): a shard of each; gathered in the precision
    of the products are the weights outside of blocks, those of the current block and of the next one, and the gradients
    of the first two, the block's also in float32. Gradients are whole until the last micro-batch of a step.
    """
    total, block, outside, trained = weight_counts(config.model, config.masking, config.trained_blocks)
    lower = sharded and precision != "float32"
    step = step_bytes(config, microbatch, "bfloat16" if lower else precision, device_type)
    local_batch = -(-config.batch_size // world_size)
    shard, trained_shard = (-(-4 * count // (world_size if sharded else 1)) for count in (total, trained))
    itemsize, copies, gradients, gathered = 2 if lower else 4, step.copies, trained_shard, 0
    if sharded:
        gathered = itemsize * (2 * outside + 3 * block) + 4 * block
        gradients = 4 * trained if microbatch < local_batch else trained_shard
    elif precision == "bfloat16":  # a copy of the weights, and its gradients
        copies, gradients = 2 * total, gradients + 2 * trained
    height, width = config.model.image_hw
    return {
        "weights": shard,
        "copies": copies,
        "gathered": gathered,
        "gradients": gradients,
        "optimizer": state_per_weight(config.optim) * trained_shard,
        "average": shard if config.average_decay else 0,
        "images": 2 * local_batch * 3 * height * width * 4,  # of this step and the next one
        "activations": step.activations,
        "work": step.work,
    }


@functools.cache
def weight_counts(
    config: ModelConfig, masking: MaskingConfig | None, trained_blocks: int | None = None
) -> tuple[int, int, int, int]:
    """The number of weights: in all, in the largest block, outside of blocks, and that are trained."""
    with torch.device("meta"):
        model = create_training_model(config, masking)
    blocks = [sum(p.numel() for p in block.parameters()) for block in model_blocks(model)]
    total = sum(p.numel() for p in model.parameters())
    freeze_blocks(model, trained_blocks)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return total, max(blocks, default=0), total - sum(blocks), trained


class StepBytes(NamedTuple):
    """Bytes of one micro-batch besides weights, their gradients and the images."""

    activations: int
    """What the forward pass saves for the backward pass."""
    copies: int
    """Weights that autocast has cast to bfloat16, which it keeps for the backward pass."""
    work: int
    """What the peak has besides these two: gradients of activations, a recomputed block."""


@functools.cache
def step_bytes(config: TrainConfig, num_images: int, precision: Precision, device_type: str = "cuda") -> StepBytes:
    """Bytes of a step of `config` with `num_images` at once. For `bfloat16` the model's weights are bfloat16."""
    rules = functools.partial(DeviceRules, device_type, autocast=precision == "autocast")
    with torch.device("meta"):
        model = create_training_model(config.model, config.masking).train()
        model.to("meta")  # with the buffers, which are computed
    if precision == "bfloat16":
        model.to(torch.bfloat16)
    if config.activation_checkpointing:
        recompute = functools.partial(
            checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: (nullcontext(), rules())
        )
        for block in model_blocks(model):
            block.forward = functools.partial(recompute, block.forward)
    freeze_blocks(model, config.trained_blocks)
    trained, objective = [p for p in model.parameters() if p.requires_grad], create_objective(config)
    batch = blank_batch(objective, torch.empty(num_images, 3, *config.model.image_hw, device="meta"))
    inputs = [tensor for tensor in (batch.images, batch.labels, batch.uniforms) if tensor is not None]
    forward_rules, memory = rules(), Allocations([*model.parameters(), *inputs])
    with memory, forward_rules, torch.device("meta"):
        images, targets = objective.prepare_batch(batch, np.random.default_rng(0))  # alive until the end, as in a step
        loss = objective.loss(model, images, targets)[0]
        casts = memory.numbers(forward_rules.casts.values())
        forward_rules.casts.clear()  # as autocast does after the forward pass; what the backward pass needs stays
        saved, copies = memory.in_use(), memory.in_use(casts)
        # Not `backward`, which only the training loop calls: nothing is learned here.
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    peak = memory.peak(memory.numbers(gradient for gradient in gradients if gradient is not None))
    return StepBytes(saved - copies, copies, peak - saved)


@functools.cache
def inference_bytes(config: ModelConfig, batch: int, dtype: torch.dtype, device_type: str) -> int:
    """Peak bytes of a forward pass without gradients: weights, images and the rest, all in `dtype`."""
    with torch.device("meta"):
        model, images = build_model(config).eval().to("meta", dtype), torch.empty(batch, 3, *config.image_hw)
    weights = list(model.parameters())
    with Allocations(weights) as memory, DeviceRules(device_type), torch.no_grad():
        model(images.to(dtype))
    return memory.peak() + sum(weight.nbytes for weight in weights)


class Allocations(TorchDispatchMode):
    """Records what operations allocate and free while it is entered, except for the memory of `ignored` tensors."""

    def __init__(self, ignored: Iterable[Tensor]) -> None:
        super().__init__()
        self._ignored = {_address(tensor) for tensor in ignored}
        self._live: dict[int, tuple[int, int]] = {}
        """Address -> number of the allocation, and its bytes."""
        self._events: list[tuple[int, int]] = []
        """Number of an allocation, and its bytes, which are negative where it is freed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._record(_address(tensor), tensor.untyped_storage())
        return result

    def _record(self, address: int, storage: torch.UntypedStorage) -> None:
        if address not in self._live and address not in self._ignored:
            self._live[address] = len(self._events), storage.nbytes()
            self._events.append(self._live[address])
            weakref.finalize(storage, self._free, address)

    def _free(self, address: int) -> None:
        number, size = self._live.pop(address)
        self._events.append((number, -size))

    def numbers(self, tensors: Iterable[Tensor]) -> set[int]:
        """The numbers of the allocations that hold these tensors."""
        return {self._live[_address(tensor)][0] for tensor in tensors if _address(tensor) in self._live}

    def in_use(self, only: set[int] | None = None) -> int:
        """Bytes in use now, of all or of these allocations."""
        return sum(size for number, size in self._live.values() if only is None or number in only)

    def peak(self, without: Iterable[int] = ()) -> int:
        """Most bytes in use at any time so far, without these allocations."""
        without = set(without)
        changes = [0 if number in without else change for number, change in self._events]
        return max(np.cumsum(changes, dtype=np.int64).tolist(), default=0)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


IN_BFLOAT16 = {F.linear, F.conv2d, torch.conv2d, torch.matmul, Tensor.matmul, Tensor.__matmul__}
"""What autocast computes in bfloat16 on a GPU, of all that the models do."""
IN_FLOAT32 = {F.layer_norm, F.group_norm, torch.softmax, F.softmax}


class DeviceRules(TorchFunctionMode):
    """Makes the meta device follow the rules of another type of device: kernels of attention and dropout, autocast."""

    def __init__(self, device_type: str, autocast: bool = False) -> None:
        super().__init__()
        self._device_type, self._autocast = device_type, autocast
        self.casts: dict[Tensor, Tensor] = {}
        """Weight -> its bfloat16 copy: each is cast once."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, is_attention = kwargs or {}, func is F.scaled_dot_product_attention
        if self._autocast and (is_attention or func in IN_BFLOAT16):
            args, kwargs = tree_map_only(Tensor, self._to_bfloat16, (args, kwargs))
        elif self._autocast and func in IN_FLOAT32:
            args, kwargs = tree_map_only(Tensor, Tensor.float, (args, kwargs))
        if is_attention:
            query, key, value = args
            return self._attention(query, key, value, kwargs["attn_mask"])
        if func is F.dropout and self._device_type != "cpu":
            active = kwargs["training"] and kwargs["p"]
            return torch.native_dropout(args[0], kwargs["p"], True)[0] if active else args[0]
        return func(*args, **kwargs)

    def _to_bfloat16(self, tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.float32:
            return tensor
        if not (tensor.is_leaf and tensor.requires_grad):
            return tensor.to(torch.bfloat16)
        if tensor not in self.casts:
            self.casts[tensor] = tensor.to(torch.bfloat16)
        return self.casts[tensor]

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        """`vitlab.models.attention.attention` on a device of this type."""
        needs_grad = torch.is_grad_enabled()
        if attention_backend(self._device_type, needs_grad, q.dtype, q.shape[:-1].numel() * k.shape[-2]) == "fused":
            return FusedAttention.apply(q, k, v, bias)
        if needs_grad:
            return matmul_attention(q, k, v, bias)
        return attention_weights(q * q.shape[-1] ** -0.5, k, bias) @ v


class FusedAttention(torch.autograd.Function):
    """Saves what a fused kernel does: its inputs, its output, and a number for each query (the logarithm of a sum)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, bias, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = zip(ctx.saved_tensors[:4], ctx.needs_input_grad, strict=True)
        return tuple(torch.empty_like(tensor) if needs_grad else None for tensor, needs_grad in inputs)

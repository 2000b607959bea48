"""What one training step holds in memory, counted by making it without numbers.

The model's own forward and backward pass run on torch's meta device, where tensors have shapes and types and no
content, while every piece of memory is noted as it comes and goes. That costs a second and no memory, whatever the
size. What a GPU does otherwise (autocast's casts, attention and dropout in one kernel) the meta device does not do by
itself: `AsOn` does it in its place.

Not counted: the workspace of the libraries, gaps of the allocator, the driver's own, and what torch.compile saves.
"""

import functools
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from vitlab.config import TrainConfig
from vitlab.data.loader import Batch
from vitlab.models.attention import MatmulAttention, attention_path
from vitlab.train.objectives import create_objective, create_training_model
from vitlab.train.optim import state_per_weight
from vitlab.train.parallel import model_blocks
from vitlab.train.precision import Precision


@dataclass(frozen=True)
class StepBytes:
    """Bytes of one micro-batch beyond weights, their gradients and the images themselves."""

    activations: int
    """What the forward pass leaves for the backward pass."""
    copies: int
    """Copies of the weights in bfloat16 that autocast makes, and keeps for the backward pass."""
    work: int
    """What the fullest moment holds more than these two: gradients of activations, a block computed again."""

    @property
    def total(self) -> int:
        return self.activations + self.copies + self.work


@dataclass(frozen=True)
class Sizes:
    """Numbers that a run's model learns: all, those of its largest block, and those that stand in no block."""

    whole: int
    block: int
    rest: int

    @classmethod
    def of(cls, config: TrainConfig) -> "Sizes":
        with torch.device("meta"):
            model = create_training_model(config)
        within = [sum(p.numel() for p in block.parameters()) for block in model_blocks(model)]
        whole = sum(p.numel() for p in model.parameters())
        return cls(whole, max(within, default=0), whole - sum(within))


def process_bytes(
    config: TrainConfig, sizes: Sizes, images: int, *, precision: Precision, device_type: str, count: int,
    sharded: bool,
) -> dict[str, int]:  # fmt: skip
    """Bytes of one of `count` processes, by what they are, at the fullest moment of a step; so many `images` at once.

    Whole (DDP): float32 weights, gradients, in whose memory they are exchanged, and the optimizer state.
    Sharded (FSDP2): a part of each. Besides, gathered in the precision of the products, what stands in no block, the
    block at work and the one fetched ahead; and the gradients of the first two, the block's also in float32, as they
    are added up. Until a step's last micro-batch gradients are kept whole, and in float32.
    """
    lower = sharded and precision != "float32"
    counted = step_bytes(config, images, "bfloat16" if lower else precision, device_type)
    share = -(-config.batch_size // count)
    own, width = -(-4 * sizes.whole // (count if sharded else 1)), 2 if lower else 4
    copies, gradients, gathered = counted.copies, own, 0
    if sharded:
        gathered = width * (sizes.rest + 2 * sizes.block) + width * (sizes.rest + sizes.block) + 4 * sizes.block
        gradients = 4 * sizes.whole if images < share else own
    elif precision == "bfloat16":  # a copy of the weights, and its gradients
        copies, gradients = 2 * sizes.whole, gradients + 2 * sizes.whole
    height, across = config.model.image_hw
    return {
        "weights": own,
        "copies": copies,
        "gathered": gathered,
        "gradients": gradients,
        "optimizer": state_per_weight(config.optim) * own,
        "average": own if config.average_decay else 0,
        "images": 2 * share * 3 * height * across * 4,  # this step's and the next one's
        "activations": counted.activations,
        "work": counted.work,
    }


def largest(total: Callable[[int], int], room: int, fails: int) -> int:
    """The most images with `total(images)` within `room`, where `fails` are too many; 0 where one is.

    The total grows nearly in proportion: a straight line between what fits and what does not tells where to try.
    """
    if fails <= 1 or total(1) > room:
        return 0
    fits = 1
    while fails - fits > 1:
        slope = (total(fails) - total(fits)) / (fails - fits)
        tried = fits + int((room - total(fits)) / slope) if slope > 0 else fits + 1
        tried = min(max(tried, fits + 1), fails - 1)
        fits, fails = (tried, fails) if total(tried) <= room else (fits, tried)
    return fits


@functools.cache
def step_bytes(config: TrainConfig, num_images: int, precision: Precision, device_type: str = "cuda") -> StepBytes:
    """Of a step of `config` with so many images at once, in `precision`, on a device of this type (`cpu`, `cuda`).

    bfloat16: the model's weights are a bfloat16 copy, as on a CPU, or as sharded weights are gathered.
    """
    as_on = functools.partial(AsOn, device_type, autocast=precision == "autocast")
    with torch.device("meta"):
        model = create_training_model(config).train().to("meta")  # what is computed and not learned, too
    if precision == "bfloat16":
        model.to(torch.bfloat16)
    if config.activation_checkpointing:
        again = functools.partial(
            checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: (nullcontext(), as_on())
        )
        for block in model_blocks(model):
            block.forward = functools.partial(again, block.forward)
    parameters, objective = list(model.parameters()), create_objective(config)
    height, width = config.model.image_hw
    with torch.device("meta"):
        images, labels = torch.empty(num_images, 3, height, width), torch.zeros(num_images, dtype=torch.int64)
        draws = torch.empty(num_images, objective.draws, dtype=torch.float64) if objective.draws else None
    batch = Batch(images, labels, labels, draws=draws)
    given = [*parameters, images, labels, *([] if draws is None else [draws])]
    casting, memory = as_on(), Memory(given)
    with memory, casting, torch.device("meta"):
        inputs, targets = objective.corrupt(batch, np.random.default_rng(0))
        loss = objective.loss(model, inputs, targets)[0]
        casts = memory.numbers(casting.casts.values())
        casting.casts.clear()  # as autocast does when the forward pass ends; what the backward pass needs is kept
        kept, copies = memory.held(), memory.held(casts)
        # not `backward`: the one training loop is elsewhere, and nothing is learned here
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
    peak = memory.peak(without=memory.numbers(each for each in found if each is not None))
    return StepBytes(kept - copies, copies, peak - kept)


class Memory(TorchDispatchMode):
    """Notes every piece of memory that comes and goes while it is entered, but for that of the `given` tensors."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self._given = {_place(tensor) for tensor in given}
        self._alive: dict[int, int] = {}
        self._sizes: list[int] = []
        self._events: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self._note(each)
        return result

    def _note(self, tensor: Tensor) -> None:
        storage, place = tensor.untyped_storage(), _place(tensor)
        if place not in self._alive and place not in self._given:
            self._alive[place] = number = len(self._sizes)
            self._sizes.append(storage.nbytes())
            self._events.append((number, storage.nbytes()))
            weakref.finalize(storage, self._gone, place)

    def _gone(self, place: int) -> None:
        number = self._alive.pop(place)
        self._events.append((number, -self._sizes[number]))

    def numbers(self, tensors: Iterable[Tensor]) -> set[int]:
        """Names for the memory of these tensors."""
        return {self._alive[_place(tensor)] for tensor in tensors if _place(tensor) in self._alive}

    def held(self, among: set[int] | None = None) -> int:
        """Bytes in use now, of all or of these."""
        return sum(self._sizes[number] for number in self._alive.values() if among is None or number in among)

    def peak(self, without: set[int]) -> int:
        """Most bytes in use at once so far, but for these."""
        now = most = 0
        for number, change in self._events:
            now += 0 if number in without else change
            most = max(most, now)
        return most


def _place(tensor: Tensor) -> int:
    """The same for tensors that share their memory."""
    return StorageWeakRef(tensor.untyped_storage()).cdata


MATRIX = {F.linear, F.conv2d, torch.conv2d, torch.matmul, Tensor.matmul, Tensor.__matmul__}
"""What autocast computes in bfloat16 on a GPU, of all that the models do."""
CAREFUL = {F.layer_norm, F.group_norm, torch.softmax, F.softmax}
"""What it computes in float32; a loss is given float32 anyway."""


class AsOn(TorchFunctionMode):
    """Makes the meta device do as a device of this type: its kernels for attention and dropout, and autocast."""

    def __init__(self, device_type: str, autocast: bool) -> None:
        super().__init__()
        self._cpu, self._autocast = device_type == "cpu", autocast
        self._fused = attention_path(device_type, True) == "fused"
        self.casts: dict[Tensor, Tensor] = {}
        """The weights that have been cast: each is cast once."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        attends = func is F.scaled_dot_product_attention
        if self._autocast and (attends or func in MATRIX):
            args, kwargs = tree_map_only(Tensor, self._lower, (args, kwargs))
        elif self._autocast and func in CAREFUL:
            args, kwargs = tree_map_only(Tensor, Tensor.float, (args, kwargs))
        if attends:
            bias = kwargs["attn_mask"]
            return FusedAttention.apply(*args, bias) if self._fused else MatmulAttention.apply(*args, bias)[0]
        if func is F.dropout and not self._cpu:
            drops = kwargs["training"] and kwargs["p"]
            return torch.native_dropout(args[0], kwargs["p"], True)[0] if drops else args[0]
        return func(*args, **kwargs)

    def _lower(self, tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.float32:
            return tensor
        if not (tensor.is_leaf and tensor.requires_grad):
            return tensor.to(torch.bfloat16)
        if tensor not in self.casts:
            self.casts[tensor] = tensor.to(torch.bfloat16)
        return self.casts[tensor]


class FusedAttention(torch.autograd.Function):
    """What a fused kernel keeps: its inputs, its output, and a number for each query (the logarithm of a sum)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, bias, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, *_ = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return tuple(
            torch.empty_like(each) if need else None for each, need in zip((q, k, v, bias), wanted, strict=True)
        )

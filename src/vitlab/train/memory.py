"""The memory of a training step and of inference, by a formula: the bytes of a plain (not compiled) model.

It is within 10 % of the peaks measured on a GPU (`docs/records/speed.md`) and of counts of every tensor of a step
(`tests/train/test_memory.py`), but up to 21 % above the count of a ResNet with frozen units under autocast. Not
counted: workspace of libraries (on a CPU a ResNet's convolutions take as much again), fragmentation, the driver's
memory, a checkpoint's copy, torch.compile's savings.

Letters: D width, M the MLP's width, k heads, T tokens. A number has `a` bytes in products and `n` in normalizations,
which autocast computes in float32.
"""

import functools
import itertools
import math

import torch

from vitlab.config import MaskingConfig, TrainConfig
from vitlab.models import ModelConfig
from vitlab.models.attention import attention_backend
from vitlab.models.blocks import freeze_blocks, model_blocks
from vitlab.models.config import ResNetConfig, ViTConfig
from vitlab.models.resnet_config import AXIAL_HEADS, ResNetBody, Unit
from vitlab.train.masking import num_outputs
from vitlab.train.objectives import create_training_model
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

    DDP: float32 weights, gradients and optimizer state. `sharded` (FSDP2): a shard of each. Gathered in the precision
    of the products: the weights outside of blocks, of the current block and of the next one; the gradients of the
    first two, the block's also in float32. Gradients are whole until the last micro-batch of a step.
    """
    total, block, outside, trained = weight_counts(config.model, config.masking, config.trained_blocks)
    lower = sharded and precision != "float32"
    saved, work = activation_bytes(config, "bfloat16" if lower else precision, device_type)
    local_batch = -(-config.batch_size // world_size)
    shard, trained_shard = (-(-4 * count // (world_size if sharded else 1)) for count in (total, trained))
    itemsize = 2 if lower else 4
    gradients = trained_shard
    gathered = 0
    copies = 0
    if not config.activation_checkpointing and (body := _body(config.model)):  # standardized filters
        filters = body.num_parameters(config.model.image_hw) * trained // total
        copies = filters * (6 if lower or precision == "bfloat16" else 4)
    if sharded:
        gathered = itemsize * (2 * outside + 3 * block) + 4 * block
        gradients = 4 * trained if microbatch < local_batch else trained_shard
    elif precision == "bfloat16":  # a copy of the weights, and its gradients
        copies, gradients = copies + 2 * total, gradients + 2 * trained
    elif precision == "autocast" and not config.activation_checkpointing:  # else cast again for each block
        copies += 2 * trained
    height, width = config.model.image_hw
    return {
        "weights": shard,
        "copies": copies,
        "gathered": gathered,
        "gradients": gradients,
        "optimizer": state_per_weight(config.optim) * trained_shard,
        "average": shard if config.average_decay else 0,
        "images": 2 * local_batch * 3 * height * width * 4,  # of this step and the next one
        "activations": microbatch * saved,
        "work": microbatch * work,
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


def inference_bytes(config: ModelConfig, batch: int, dtype: torch.dtype, device_type: str) -> int:
    """Peak bytes of a forward pass without gradients: weights, images and the rest, all in `dtype`."""
    body, numel = _body(config), 0
    if isinstance(config, ViTConfig):
        numel = max(batch * config.heads * tokens * length for tokens, length in _sequences(config, config.num_patches))
    fused = attention_backend(device_type, False, dtype, numel) == "fused"
    standardized = 8 * 9 * (body.channels // 4) ** 2 if body else 0  # the largest filters, twice in float32
    forward = dtype.itemsize * batch * _forward_numbers(config, fused)
    return dtype.itemsize * config.num_parameters + max(forward, standardized)


def _forward_numbers(config: ModelConfig, fused: bool = True) -> int:
    """The numbers of an image at the peak of a forward pass without gradients, the image included."""
    body = _body(config)
    pixels = config.in_chans * math.prod(config.image_hw)
    peaks = [0]
    if body:
        peaks = [body.width * math.prod(config.image_hw) // 4 * 3]
        for unit in body.units():
            before, after = _positions(unit, config.image_hw)
            peaks.append(unit.channels_out * after * (4 if body.version == "v1" else 3) + unit.inner * before)
    if isinstance(config, ViTConfig):
        d = config.width
        for tokens, length in _sequences(config, config.num_patches):
            peaks.append(tokens * (_hidden_layers(config) * config.mlp_dim + 3 * d))
            peaks.append(0 if fused else tokens * (6 * d + 2 * config.heads * length))
    return pixels + max(peaks)


def activation_bytes(config: TrainConfig, precision: Precision, device_type: str) -> tuple[int, int]:
    """Bytes of an image in training: what the forward pass saves, and what the peak has besides."""
    model = config.model
    body = _body(config.model)
    trained = config.trained_blocks
    a = 4 if precision == "float32" else 2
    n = 2 if precision == "bfloat16" else 4
    embedding, units, blocks, per_layer = 0, [], [], 1
    if body:
        units = _unit_bytes(body, model.image_hw, a, n)
        root = body.width * math.prod(model.image_hw) // 4
        embedding = 3 * a * math.prod(model.image_hw) + root * (n + 2)
        embedding += root * (n + _activated(a, n)) * (body.version == "v1")
    if isinstance(model, ViTConfig):
        embedding += a * model.num_patches * model.patch_size**2 * (body.channels if body else model.in_chans)
        blocks = _block_bytes(model, a, n, device_type)
        per_layer = 2 if model.encoder == "axial" else 1
    parts = units + blocks
    if trained is not None:  # a hybrid's stem is part of its embedding
        parts = (blocks or units)[::-1][: trained * per_layer][::-1]
        embedding = 0
    outputs = model.num_classes
    last = model.grid[0] * model.grid[1] * (body.channels if body else 0)
    if isinstance(model, ViTConfig):
        last = model.num_tokens * model.width
        if config.masking:
            outputs = config.masking.corrupted(model.num_patches) * num_outputs(config.masking, model.patch_size)
    outside = embedding + ((a + n) * last if parts else 0) + 8 * outputs  # 8: logits and log_softmax
    inputs = list(itertools.accumulate(part[0] for part in parts))
    if config.activation_checkpointing:
        saved = outside + sum(part[0] for part in parts)
        peaks = [outside + below + part[1] + part[2] for below, part in zip(inputs, parts, strict=True)]
    else:
        saved = outside + sum(part[1] for part in parts)
        peaks = [saved + part[2] for part in parts[-1:]]
    forward = (n if body else a) * _forward_numbers(model)  # of frozen blocks the peak may be here
    return saved, max([forward, saved + 8 * outputs, *peaks]) - saved


def _block_bytes(config: ViTConfig, a: int, n: int, device_type: str) -> list[tuple[int, int, int]]:
    """Bytes of an image in each block of a ViT: input, all that is saved, what the backward pass needs besides."""
    d = config.width
    m = config.mlp_dim
    hidden = _hidden_layers(config)
    parts = []
    matmul = attention_backend(device_type, needs_grad=True) == "matmul"
    relative, variant = config.position == "relative", config.variant
    # Per token: inputs of two LayerNorms, their outputs, q, k, v, the heads' output, the MLP's layers; options.
    token = 2 * n * d + 6 * a * d + hidden * a * m
    token += a * d * (2 * (variant.layer_scale is not None) + 3 * (variant.rotary is not None) + relative)
    token += (a + n) * d * variant.attention_norm + n * m * variant.mlp_norm
    token += (2 * d + m) * (a if device_type == "cpu" else 1) * (config.dropout > 0)  # masks
    for tokens, length in _sequences(config, config.kept_patches(config.num_patches)):
        matrix = tokens * config.heads * length
        work = tokens * m * (a * (hidden - 1) + 2 * n * variant.mlp_norm)
        if matmul:  # two gradients of the attention matrix, when the MLP's layers are free
            work = max(work, a * (2 * matrix - tokens * (hidden * m - d)))
        parts.append((a * tokens * d, tokens * token + a * matrix * (matmul or relative), work))
    return parts * config.depth


def _unit_bytes(body: ResNetBody, image_hw: tuple[int, int], a: int, n: int) -> list[tuple[int, int, int]]:
    """The same of each unit of a ResNet."""
    v1, activated, parts = body.version == "v1", _activated(a, n), []
    for unit in body.units():
        c, m, out = unit.channels_in, unit.inner, unit.channels_out
        before, after = _positions(unit, image_hw)
        normalized = m * (before + after) + out * after * (1 + (v1 and unit.projects))
        saved = n * normalized + activated * (m * (before + after) + (out * after if v1 else c * before))
        if body.mixing == "axial":  # two attentions, with relative positions
            saved += before * a * (12 * m + AXIAL_HEADS * sum(unit.grid(image_hw)))
        parts.append(((n if v1 else a) * c * before, saved, 2 * n * out * after))
    return parts


def _activated(a: int, n: int) -> int:
    """Bytes of a number after a ReLU, which autocast casts for the next convolution."""
    return a if a == n else a + n


def _positions(unit: Unit, image_hw: tuple[int, int]) -> tuple[int, int]:
    """Positions of a unit's input and output."""
    height, width = unit.grid(image_hw)
    return height * width, -(-height // unit.stride) * -(-width // unit.stride)


def _sequences(config: ViTConfig, patches: int) -> list[tuple[int, int]]:
    """For each attention in an encoder layer: the tokens of an image and of a sequence."""
    p = config.num_prefix_tokens
    return (
        [(p + patches, p + patches)]
        if config.encoder == "full"
        else [(patches // s * (p + s), p + s) for s in config.grid]
    )


def _hidden_layers(config: ViTConfig) -> int:
    """How many tensors as wide as `mlp_dim` an MLP makes."""
    return 4 if config.variant.swiglu else 3 if config.variant.gelu == "quick" else 2


def _body(config: ModelConfig) -> ResNetBody | None:
    return config.body if isinstance(config, ResNetConfig) else config.stem

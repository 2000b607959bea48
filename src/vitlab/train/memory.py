"""The memory of a training step and of inference, by a formula: the bytes of a plain (not compiled) model.

`rank_bytes` is a training step, `inference_bytes` a forward pass; `vitlab plan`, `vitlab bench` and the choice of a
micro-batch call them. The forward pass of training saves tensors for the backward pass (`saved`). The peak has more
(`work`): `activation_bytes` takes the highest of three moments, in the forward pass, in the loss or in the backward
pass of a block. The functions count the tensors of one image: of width d, with m in the MLP of a ViT or inside a unit
of a ResNet.

The sum is within 10% of the peaks measured on a GPU (`docs/records/speed.md`) and of counts of every tensor of a step
(`tests/train/test_memory.py`), but up to 21% above the count of a ResNet with frozen units under autocast. Not
counted: workspace of libraries (on a CPU a ResNet's convolutions take as much again), fragmentation, the driver's
memory, a checkpoint's copy, torch.compile's savings. The choice of a micro-batch has a margin for this
(`MEMORY_FRACTION`), `plan` and `bench` have none.
"""

import functools
import itertools
import math
from typing import NamedTuple

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
from vitlab.train.precision import Precision, should_pack


class WeightCounts(NamedTuple):
    """How many weights a model has."""

    total: int
    largest_block: int
    outside_blocks: int
    trained: int


class BlockBytes(NamedTuple):
    """Bytes of an image in a block of a ViT or in a unit of a ResNet."""

    input: int
    saved: int
    """All that the forward pass saves."""
    work: int
    """What the backward pass needs besides."""


class ItemSize(NamedTuple):
    """Bytes of a number: in matrix products and convolutions, and in normalizations (float32 with autocast)."""

    product: int
    norm: int

    @property
    def relu(self) -> int:
        """After a ReLU: where the next convolution casts it, both are saved."""
        return self.product if self.product == self.norm else self.product + self.norm


def rank_bytes(
    config: TrainConfig,
    microbatch: int,
    precision: Precision,
    device_type: str,
    world_size: int = 1,
    sharded: bool = False,
) -> dict[str, int]:
    """Bytes of a rank at the peak of a step, by what they hold; `microbatch` images go through the model at once.

    sharded: by FSDP2, with a shard of the float32 weights, gradients and optimizer state; otherwise all of them (DDP).
    """
    counts = weight_counts(config.model, config.masking, config.trained_blocks)
    num_shards = world_size if sharded else 1
    local_batch = -(-config.batch_size // world_size)
    weights = -(-4 * counts.total // num_shards)
    trained_weights = -(-4 * counts.trained // num_shards)
    if sharded and precision == "autocast":
        precision = "bfloat16"  # FSDP2 casts what it gathers
    gradients = trained_weights
    if sharded and microbatch < local_batch:
        gradients = 4 * counts.trained  # a sum over micro-batches, which is sharded after the last one
    if not sharded and precision == "bfloat16":
        gradients += 2 * counts.trained  # of the copy of the weights
    saved, work = activation_bytes(config, precision, device_type)
    height, width = config.model.image_hw
    return {
        "weights": weights,
        "copies": _copied_bytes(config, counts, precision, sharded),
        "gathered": _gathered_bytes(counts, precision) if sharded else 0,
        "gradients": gradients,
        "optimizer": state_per_weight(config.optim) * trained_weights,
        "average": weights if config.average_decay else 0,
        "images": 2 * local_batch * 3 * height * width * 4,  # of this step and the next one
        "activations": microbatch * saved,
        "work": microbatch * work,
    }


@functools.cache
def weight_counts(
    config: ModelConfig, masking: MaskingConfig | None, trained_blocks: int | None = None
) -> WeightCounts:
    """The counts of the model that is trained, which is built without memory."""
    with torch.device("meta"):
        model = create_training_model(config, masking)
    blocks = [sum(p.numel() for p in block.parameters()) for block in model_blocks(model)]
    total = sum(p.numel() for p in model.parameters())
    freeze_blocks(model, trained_blocks)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return WeightCounts(total, max(blocks, default=0), total - sum(blocks), trained)


def _copied_bytes(config: TrainConfig, counts: WeightCounts, precision: Precision, sharded: bool) -> int:
    """Bytes of weights that are standardized or cast for the products, besides what is gathered. With activation
    checkpointing each block frees its own; the model in bfloat16 stays."""
    body = _body(config.model)
    copies = 2 * counts.total if precision == "bfloat16" and not sharded else 0
    if config.activation_checkpointing:
        return copies
    if body:  # standardized in float32, then cast
        standardized = body.num_parameters(config.model.image_hw) * counts.trained // counts.total
        copies += standardized * (6 if precision == "bfloat16" else 4)
    if precision == "autocast" and not sharded:
        copies += 2 * counts.trained
    return copies


def _gathered_bytes(counts: WeightCounts, precision: Precision) -> int:
    """Bytes that FSDP2 gathers at once, in the precision of the products; the block's gradients also in float32."""
    outside, block = counts.outside_blocks, counts.largest_block
    weights = outside + block + block  # of the current block and of the next one
    gradients = outside + block
    return (4 if precision == "float32" else 2) * (weights + gradients) + 4 * block


def inference_bytes(config: ModelConfig, batch: int, dtype: torch.dtype, device_type: str) -> int:
    """Peak bytes of a forward pass without gradients: weights, images and the rest, all in `dtype`."""
    body = _body(config)
    matrix = 0  # numbers of the largest attention matrices
    if isinstance(config, ViTConfig):
        matrix = batch * config.heads * max(math.prod(shape) for shape in _sequences(config, config.num_patches))
    fused = attention_backend(device_type, False, dtype, matrix) == "fused"
    activations = dtype.itemsize * batch * _forward_numbers(config, fused)
    standardized = 2 * 4 * (3 * 3 * (body.channels // 4) ** 2) if body else 0  # the largest filters, twice in float32
    copies = 2 if should_pack(torch.device(device_type), dtype) else 1
    return copies * dtype.itemsize * config.num_parameters + max(activations, standardized)


def _forward_numbers(config: ModelConfig, fused: bool = True) -> int:
    """The numbers of an image at the peak of a forward pass without gradients, the image included."""
    body = _body(config)
    pixels = math.prod(config.image_hw)
    peaks = [0]
    if body:
        root = body.width * pixels // 4  # output of its convolution, at half of the resolution
        peaks.append(3 * root)  # v1: convolution, GroupNorm, ReLU; v2: convolution, padded, channels-last
        for unit in body.units():
            before, after = _positions(unit, config.image_hw)
            # The shortcut's result, the branch's, their sum, in v1 its ReLU; and a map inside the branch.
            outputs = 4 if body.version == "v1" else 3
            peaks.append(outputs * unit.channels_out * after + unit.inner * before)
    if isinstance(config, ViTConfig):
        d = config.width
        for tokens, length in _sequences(config, config.num_patches):
            # The block's input, its sum with the attention, that normalized; and the layers of the MLP.
            peaks.append(tokens * (3 * d + _mlp_layers(config) * config.mlp_dim))
            if not fused:  # two attention matrices; the input, that normalized, q, k, v and scaled q
                peaks.append(tokens * (6 * d + 2 * config.heads * length))
    return config.in_chans * pixels + max(peaks)


def activation_bytes(config: TrainConfig, precision: Precision, device_type: str) -> tuple[int, int]:
    """Bytes of an image in training: what the forward pass saves, and what the peak has besides."""
    model = config.model
    size = ItemSize(product=4 if precision == "float32" else 2, norm=2 if precision == "bfloat16" else 4)
    blocks = _trained_blocks(config, size, device_type)
    outputs = model.num_classes
    if config.masking and isinstance(model, ViTConfig):
        outputs = config.masking.corrupted(model.num_patches) * num_outputs(config.masking, model.patch_size)
    logits = (4 + 4) * outputs  # and their log_softmax, in float32
    outside = logits  # what is saved outside of blocks
    if config.trained_blocks is None:
        outside += _embedding_bytes(model, size)
    if blocks:  # input and output of the last normalization
        is_vit = isinstance(model, ViTConfig)
        features = model.num_tokens * model.width if is_vit else math.prod(model.grid) * model.body.channels
        outside += (size.norm + size.product) * features
    if config.activation_checkpointing:  # a block's input is saved, and the rest computed again, block after block
        saved = outside + sum(block.input for block in blocks)
        inputs = itertools.accumulate(block.input for block in blocks)
        in_blocks = [outside + below + block.saved + block.work for below, block in zip(inputs, blocks, strict=True)]
    else:  # the backward pass begins with the last block, when all others are still saved
        saved = outside + sum(block.saved for block in blocks)
        in_blocks = [saved + block.work for block in blocks[-1:]]
    in_loss = saved + logits  # with the gradients of logits and log_softmax
    in_forward = (size.norm if _body(model) else size.product) * _forward_numbers(model)  # highest with frozen blocks
    return saved, max(in_forward, in_loss, *in_blocks) - saved


def _trained_blocks(config: TrainConfig, size: ItemSize, device_type: str) -> list[BlockBytes]:
    """The blocks and units that are trained: only their tensors are saved."""
    model = config.model
    body = _body(model)
    units = _unit_bytes(body, model.image_hw, size) if body else []
    blocks = _block_bytes(model, size, device_type) if isinstance(model, ViTConfig) else []
    if config.trained_blocks is None:
        return units + blocks
    encoder = blocks or units  # the stem of a hybrid is frozen, as a part of its embedding
    count = config.trained_blocks * (2 if isinstance(model, ViTConfig) and model.encoder == "axial" else 1)
    return encoder[max(len(encoder) - count, 0) :]


def _embedding_bytes(config: ModelConfig, size: ItemSize) -> int:
    """Bytes that are saved of an image before the first block or unit."""
    body = _body(config)
    saved = 0
    if body:
        pixels = math.prod(config.image_hw)
        root = body.width * pixels // 4  # output of its convolution, at half of the resolution
        saved += size.product * 3 * pixels  # input of the root
        if body.version == "v1":
            saved += (size.norm + size.relu) * root  # inputs of its GroupNorm, output of its ReLU
        saved += (size.norm + 2) * root  # input of the max-pooling, and an index of 8 bytes for a quarter of it
    if isinstance(config, ViTConfig):
        channels = body.channels if body else config.in_chans
        saved += size.product * config.num_patches * config.patch_size**2 * channels  # input of the projection
    return saved


def _block_bytes(config: ViTConfig, size: ItemSize, device_type: str) -> list[BlockBytes]:
    """The blocks of a ViT, two for each axial layer."""
    variant = config.variant
    d = config.width
    m = config.mlp_dim
    layers = _mlp_layers(config)
    relative = config.position == "relative"
    matmul = attention_backend(device_type, needs_grad=True) == "matmul"
    per_token = (
        size.norm * 2 * d,  # inputs of the two LayerNorms
        size.product * 2 * d,  # their outputs
        size.product * 4 * d,  # q, k, v and the output of the heads
        size.product * layers * m,  # layers of the MLP
        size.product * 2 * d * (variant.layer_scale is not None),  # inputs of the two LayerScales
        size.product * 3 * d * (variant.rotary is not None),  # rotated q and k, and one more tensor of their size
        size.product * d * relative,  # scaled q
        (size.norm + size.product) * d * variant.attention_norm,  # input and output of this norm
        size.norm * m * variant.mlp_norm,  # input of this norm
        (size.product if device_type == "cpu" else 1) * (2 * d + m) * (config.dropout > 0),  # masks of dropout
    )
    blocks = []
    for tokens, length in _sequences(config, config.kept_patches(config.num_patches)):
        matrix = tokens * config.heads * length
        saved = tokens * sum(per_token)
        saved += size.product * matrix * (matmul or relative)  # the attention matrix, or what is added to its logits
        # Gradients inside the MLP, without the layer that is free by then; the norm's are its input's and output's.
        work = tokens * m * (size.product * (layers - 1) + 2 * size.norm * variant.mlp_norm)
        if matmul:  # two gradients of the attention matrix and one of width d; the MLP's layers are free by then
            work = max(work, size.product * (2 * matrix + tokens * d - tokens * layers * m))
        blocks.append(BlockBytes(size.product * tokens * d, saved, work))
    return blocks * config.depth


def _unit_bytes(body: ResNetBody, image_hw: tuple[int, int], size: ItemSize) -> list[BlockBytes]:
    """The units of a ResNet."""
    v1 = body.version == "v1"
    units = []
    for unit in body.units():
        c, m, out = unit.channels_in, unit.inner, unit.channels_out
        before, after = _positions(unit, image_hw)
        # m: results of the first two convolutions. out: in v1 the last one's and the shortcut's, in v2 their sum, which
        # the next unit normalizes.
        norm_inputs = m * (before + after) + out * after * (2 if v1 and unit.projects else 1)
        relu_outputs = m * (before + after) + (out * after if v1 else c * before)  # and v1's sum, or v2's input
        saved = size.norm * norm_inputs + size.relu * relu_outputs
        if body.mixing == "axial":  # two attentions: input, q, k, v, scaled q, output; relative logits
            saved += size.product * before * (2 * 6 * m + AXIAL_HEADS * sum(unit.grid(image_hw)))
        input_size = size.norm if v1 else size.product
        # work: two gradients of the unit's output.
        units.append(BlockBytes(input_size * c * before, saved, work=2 * size.norm * out * after))
    return units


def _positions(unit: Unit, image_hw: tuple[int, int]) -> tuple[int, int]:
    """Positions of a unit's input and output."""
    height, width = unit.grid(image_hw)
    return height * width, -(-height // unit.stride) * -(-width // unit.stride)


def _sequences(config: ViTConfig, patches: int) -> list[tuple[int, int]]:
    """For each attention in an encoder layer: the tokens of an image and of a sequence."""
    prefix = config.num_prefix_tokens
    if config.encoder == "full":
        return [(prefix + patches, prefix + patches)]
    return [(patches // side * (prefix + side), prefix + side) for side in config.grid]


def _mlp_layers(config: ViTConfig) -> int:
    """How many tensors as wide as `mlp_dim` an MLP makes."""
    return 4 if config.variant.swiglu else 3 if config.variant.gelu == "quick" else 2


def _body(config: ModelConfig) -> ResNetBody | None:
    """The convolutional stages of a ResNet or a hybrid."""
    return config.body if isinstance(config, ResNetConfig) else config.stem

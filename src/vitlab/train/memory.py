"""The memory of a training step and of inference, by a formula: the bytes of a plain (not compiled) model.

`rank_bytes` is a training step, `inference_bytes` a forward pass; `vitlab plan`, `vitlab bench` and the choice of a
micro-batch call them. The functions below count the tensors of an image: of width d, with m in the MLP of a ViT or
inside a unit of a ResNet.

The sum is within 10 % of the peaks measured on a GPU (`docs/records/speed.md`) and of counts of every tensor of a step
(`tests/train/test_memory.py`), but up to 21 % above the count of a ResNet with frozen units under autocast. Not
counted: workspace of libraries (on a CPU a ResNet's convolutions take as much again), fragmentation, the driver's
memory, a checkpoint's copy, torch.compile's savings.
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
from vitlab.train.precision import Precision


class ItemSize(NamedTuple):
    """Bytes of a number: in matrix products and convolutions, and in normalizations (float32 with autocast)."""

    product: int
    norm: int

    @property
    def relu(self) -> int:
        """After a ReLU: where the next convolution casts it, both are saved."""
        return self.product if self.product == self.norm else self.product + self.norm


class BlockBytes(NamedTuple):
    """Bytes of an image in a block of a ViT or in a unit of a ResNet."""

    input: int
    saved: int
    """All that the forward pass saves."""
    work: int
    """What the backward pass needs besides."""


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
    first two, the block's also in float32. A step of several micro-batches shards its gradients after the last one.
    """
    total, block, outside, trained = weight_counts(config.model, config.masking, config.trained_blocks)
    num_shards = world_size if sharded else 1
    weights = -(-4 * total // num_shards)
    trained_weights = -(-4 * trained // num_shards)
    local_batch = -(-config.batch_size // world_size)
    gathered = 0
    gradients = trained_weights
    if sharded:
        precision = "bfloat16" if precision == "autocast" else precision  # FSDP2 casts what it gathers
        itemsize = 4 if precision == "float32" else 2
        gathered = itemsize * (2 * outside + 3 * block) + 4 * block
        if microbatch < local_batch:
            gradients = 4 * trained
    elif precision == "bfloat16":
        gradients += 2 * trained  # of the copy of the weights
    saved, work = activation_bytes(config, precision, device_type)
    height, width = config.model.image_hw
    return {
        "weights": weights,
        "copies": _copied_bytes(config, precision, sharded),
        "gathered": gathered,
        "gradients": gradients,
        "optimizer": state_per_weight(config.optim) * trained_weights,
        "average": weights if config.average_decay else 0,
        "images": 2 * local_batch * 3 * height * width * 4,  # of this step and the next one
        "activations": microbatch * saved,
        "work": microbatch * work,
    }


def _copied_bytes(config: TrainConfig, precision: Precision, sharded: bool) -> int:
    """Bytes of weights that are standardized or cast for the products, besides what is gathered. With activation
    checkpointing each block frees its own; the model in bfloat16 stays."""
    total, _, _, trained = weight_counts(config.model, config.masking, config.trained_blocks)
    body = _body(config.model)
    copies = 2 * total if precision == "bfloat16" and not sharded else 0
    if config.activation_checkpointing:
        return copies
    if body:  # standardized in float32, then cast
        copies += body.num_parameters(config.model.image_hw) * trained // total * (6 if precision == "bfloat16" else 4)
    if precision == "autocast" and not sharded:
        copies += 2 * trained
    return copies


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
    body = _body(config)
    matrix = 0  # elements
    if isinstance(config, ViTConfig):
        matrix = batch * config.heads * max(math.prod(shape) for shape in _sequences(config, config.num_patches))
    fused = attention_backend(device_type, False, dtype, matrix) == "fused"
    activations = dtype.itemsize * batch * _forward_numbers(config, fused)
    standardized = 8 * 9 * (body.channels // 4) ** 2 if body else 0  # the largest filters, twice in float32
    return dtype.itemsize * config.num_parameters + max(activations, standardized)


def _forward_numbers(config: ModelConfig, fused: bool = True) -> int:
    """The numbers of an image at the peak of a forward pass without gradients, the image included."""
    body = _body(config)
    pixels = math.prod(config.image_hw)
    peaks = [0]
    if body:
        peaks.append(3 * (body.width * pixels // 4))
        for unit in body.units():
            before, after = _positions(unit, config.image_hw)
            peaks.append(unit.channels_out * after * (4 if body.version == "v1" else 3) + unit.inner * before)
    if isinstance(config, ViTConfig):
        d = config.width
        for tokens, length in _sequences(config, config.num_patches):
            peaks.append(tokens * (_mlp_layers(config) * config.mlp_dim + 3 * d))
            if not fused:
                peaks.append(tokens * (6 * d + 2 * config.heads * length))
    return config.in_chans * pixels + max(peaks)


def activation_bytes(config: TrainConfig, precision: Precision, device_type: str) -> tuple[int, int]:
    """Bytes of an image in training: what the forward pass saves, and what the peak has besides."""
    model = config.model
    body = _body(model)
    size = ItemSize(product=4 if precision == "float32" else 2, norm=2 if precision == "bfloat16" else 4)
    units = _unit_bytes(body, model.image_hw, size) if body else []
    blocks = _block_bytes(model, size, device_type) if isinstance(model, ViTConfig) else []
    outputs = model.num_classes
    if config.masking and isinstance(model, ViTConfig):
        outputs = config.masking.corrupted(model.num_patches) * num_outputs(config.masking, model.patch_size)
    outside = 8 * outputs  # logits and log_softmax, in float32
    if config.trained_blocks is None:
        trained = units + blocks
        outside += _embedding_bytes(model, size)
    else:  # the stem of a hybrid is frozen, as a part of its embedding
        encoder = blocks or units
        count = config.trained_blocks * (2 if isinstance(model, ViTConfig) and model.encoder == "axial" else 1)
        trained = encoder[max(len(encoder) - count, 0) :]
    if trained:  # input and output of the last normalization
        is_vit = isinstance(model, ViTConfig)
        features = model.num_tokens * model.width if is_vit else math.prod(model.grid) * model.body.channels
        outside += (size.norm + size.product) * features
    if config.activation_checkpointing:
        inputs = itertools.accumulate(block.input for block in trained)
        saved = outside + sum(block.input for block in trained)
        peaks = [outside + below + block.saved + block.work for below, block in zip(inputs, trained, strict=True)]
    else:
        saved = outside + sum(block.saved for block in trained)
        peaks = [saved + block.work for block in trained[-1:]]
    peaks.append(saved + 8 * outputs)
    peaks.append((size.norm if body else size.product) * _forward_numbers(model))  # higher where blocks are frozen
    return saved, max(peaks) - saved


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
    token = size.norm * 2 * d + size.product * 2 * d  # inputs and outputs of two LayerNorms
    token += size.product * 4 * d  # q, k, v and the output of the heads
    token += size.product * layers * m
    token += size.product * d * (2 * (variant.layer_scale is not None) + 3 * (variant.rotary is not None) + relative)
    token += (size.product + size.norm) * d * variant.attention_norm
    token += size.norm * m * variant.mlp_norm
    if config.dropout:
        token += (2 * d + m) * (size.product if device_type == "cpu" else 1)  # masks
    blocks = []
    for tokens, length in _sequences(config, config.kept_patches(config.num_patches)):
        matrix = tokens * config.heads * length
        saved = tokens * token + size.product * matrix * (matmul or relative)
        work = tokens * m * (size.product * (layers - 1) + 2 * size.norm * variant.mlp_norm)
        if matmul:  # two gradients of the attention matrix, when the MLP's layers are free
            work = max(work, size.product * (2 * matrix - tokens * (layers * m - d)))
        blocks.append(BlockBytes(size.product * tokens * d, saved, work))
    return blocks * config.depth


def _unit_bytes(body: ResNetBody, image_hw: tuple[int, int], size: ItemSize) -> list[BlockBytes]:
    """The units of a ResNet."""
    v1 = body.version == "v1"
    units = []
    for unit in body.units():
        c, m, out = unit.channels_in, unit.inner, unit.channels_out
        before, after = _positions(unit, image_hw)
        norm_inputs = m * (before + after) + out * after * (2 if v1 and unit.projects else 1)
        relu_outputs = m * (before + after) + (out * after if v1 else c * before)
        saved = size.norm * norm_inputs + size.relu * relu_outputs
        if body.mixing == "axial":  # two attentions: input, q, k, v, scaled q, output; relative logits
            saved += size.product * before * (2 * 6 * m + AXIAL_HEADS * sum(unit.grid(image_hw)))
        input_size = size.norm if v1 else size.product
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

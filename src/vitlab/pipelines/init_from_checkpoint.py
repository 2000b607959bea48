"""What a checkpoint brings to another task (Sec. 3.2), and what that task's size decides (BiT's rule)."""

import dataclasses
import functools
import hashlib
import json
import logging
import math
from pathlib import Path
from typing import TypeVar

import torch

from vitlab.config import DataConfig, FinetuneConfig, TrainConfig
from vitlab.errors import UserError
from vitlab.models.config import ImageSize, ModelConfig, ViTConfig, nearest_image_size
from vitlab.models.init import LEARNED_POSITIONS, redraw_positions
from vitlab.models.resnet_config import ResNetBody
from vitlab.models.vit import Model
from vitlab.preprocessing import Preprocessing
from vitlab.weights import load_model

logger = logging.getLogger(__name__)

CPU_WORK = 1e14
"""FLOPs of training that a CPU is given without a word: about ten minutes of two cores."""
CPU_SIZE = 224
"""Pixels at which a CPU fine-tunes a checkpoint of a larger size, unless one is asked for."""

Config = TypeVar("Config", bound=TrainConfig)


def by_size(config: FinetuneConfig, examples: int, device_type: str = "cuda") -> FinetuneConfig:
    """`config` with what it leaves to the number of training images: BiT's rule (HyperRule, big_transfer).

    500 steps below 20,000 images, 10,000 below 500,000, else 20,000; warm-up 100 or 500 steps, and never more than a
    fifth of them; mixup 0.1 from 20,000 images on. Deviations: the batch is the power of two up to an eighth of the
    images, from 32 to 512; BiT's is 512. The search tries each learning rate for a fifth of the steps, 20 at least.
    On a CPU, where this would be more than CPU_WORK: batches of 32 for 20 passes, and 100 to 500 steps.
    """
    small, asked = examples < 20_000, config.automatic
    batch = min(max(_power_of_two(examples / 8), 32), 512) if "batch_size" in asked else config.batch_size
    steps = 500 if small else 10_000 if examples < 500_000 else 20_000
    if device_type == "cpu" and 6 * config.model.forward_macs * batch * steps > CPU_WORK:
        batch = min(batch, 32) if "batch_size" in asked else batch
        steps = min(max(20 * examples // batch, 100), 500)
    config = dataclasses.replace(config, batch_size=batch)
    if "steps" in asked:
        config = dataclasses.replace(config, steps=steps, epochs=None)
    total = config.total_steps(examples)
    if "warmup_steps" in asked:
        warmup = min(100 if small else 500, total // 5)
        config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, warmup_steps=warmup))
    if "sweep_steps" in asked and len(config.learning_rates) > 1:
        config = dataclasses.replace(config, sweep_steps=min(max(total // 5, 20), total))
    if "mixup" in asked:
        config = dataclasses.replace(config, mixup=0.0 if small else 0.1)
    return dataclasses.replace(config, automatic=())


def default_image_size(source: ModelConfig, preprocessing: Preprocessing, device_type: str) -> ImageSize:
    """The size to fine-tune at where none is asked for: the one at which the checkpoint is evaluated; on a CPU at most
    CPU_SIZE, where the patch divides that."""
    size = preprocessing.image_size or source.image_size
    largest = size if isinstance(size, int) else max(size)
    if device_type != "cpu" or largest <= CPU_SIZE or not isinstance(source, ViTConfig):
        return size
    return max(CPU_SIZE // source.stride, 1) * source.stride


def with_preprocessing(data: DataConfig, preprocessing: Preprocessing) -> DataConfig:
    """`data`, whose test images are prepared as those of the checkpoint."""
    return dataclasses.replace(
        data,
        eval_resize=preprocessing.resize if preprocessing.keep_aspect else None,
        eval_interpolation=None if preprocessing.is_google else preprocessing.interpolation,
    )


def saved_choices(workdir: Path, config: FinetuneConfig) -> FinetuneConfig:
    """`config` with what it leaves to data and device as the fine-tuning in `workdir` has chosen it, which may go on on
    another device; as it is where there is none."""
    try:
        saved = json.loads((workdir / "config.json").read_bytes())
        chosen = {name: saved[name] for name in ("steps", "batch_size", "mixup", "sweep_steps") if name in saved}
        warmup, size = saved["optim"]["warmup_steps"], saved["model"]["image_size"]
        if "command" not in saved or saved["command"] != "finetune":
            return config
        asked = config.automatic
        config = dataclasses.replace(config, **{name: value for name, value in chosen.items() if name in asked})
        if "warmup_steps" in asked:
            config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, warmup_steps=warmup))
        if "preprocessing" in asked:
            saved_data = {name: saved["data"][name] for name in ("eval_resize", "eval_interpolation")}
            config = dataclasses.replace(config, data=dataclasses.replace(config.data, **saved_data))
        if "image_size" in asked:
            size = size if isinstance(size, int) else tuple(size)
            config = dataclasses.replace(config, model=dataclasses.replace(config.model, image_size=size))
        return dataclasses.replace(config, automatic=())
    except (OSError, ValueError, KeyError, TypeError):
        return config  # opening the folder says what is wrong with it, if anything is


def adapted(source: ModelConfig, config: Config, num_classes: int, image_size: ImageSize | None = None) -> Config:
    """`config` with the model of a checkpoint: its own shape, at the recipe's resolution or `image_size`.

    Where patches do not divide the recipe's resolution, the nearest larger one is taken, with a warning.

    Raises ValueError where the recipe's resolution is far from the checkpoint's, and none was asked for.
    """
    side = max(source.image_hw)
    if image_size is None and config.model.image_hw[0] ** 2 > 16 * side**2:
        raise UserError(
            f"the recipe's {config.model.image_hw[0]} pixels are far from the {side} that the checkpoint was trained "
            f"at, and would cost it {(config.model.image_hw[0] / side) ** 2:.0f} times the patches; say which size "
            f"you want, e.g. --image-size {2 * side}."
        )
    size = image_size
    if size is None:
        size = config.model.image_size
        if isinstance(source, ViTConfig) and isinstance(size, int):
            size = _divided(size, source.patch_size, source.stem)
    model = dataclasses.replace(source, image_size=size, num_classes=num_classes, head_bias=0.0)
    if isinstance(model, ViTConfig):
        assert isinstance(config.model, ViTConfig), "every fine-tuning recipe has a ViT's settings"
        model = dataclasses.replace(model, representation_size=None, dropout=config.model.dropout)
    elif isinstance(config.model, ViTConfig) and config.model.dropout:
        raise UserError(f"dropout={config.model.dropout}: the checkpoint is a ResNet, which has none; leave it out.")
    return dataclasses.replace(config, model=model)


@functools.cache  # to be said once
def _divided(size: int, patch_size: int, stem: ResNetBody | None) -> int:
    """The recipe's size, or the nearest larger one that patches divide."""
    nearest = nearest_image_size(size, patch_size, stem)
    if nearest != size:
        logger.warning(
            "the recipe's %d pixels cannot be cut into patches of %d: taking the nearest larger size, %d "
            "(--image-size sets another)", size, patch_size, nearest,
        )  # fmt: skip
    return nearest


def _power_of_two(most: float) -> int:
    """The largest power of two up to `most`; at least 1."""
    return 2 ** max(math.floor(math.log2(most)), 0)


def carried(checkpoint: str | Path, wanted: ModelConfig, new_positions: torch.Generator | None = None) -> Model:
    """The model `wanted` (see `adapted`) with the weights of a checkpoint and a new head of zeros.

    `new_positions` draws position embeddings for its grid in place of the interpolated ones; only the class token's
    stays (see `redraw_positions`).
    """
    vit = isinstance(wanted, ViTConfig)
    model = load_model(
        checkpoint, image_size=wanted.image_size, num_classes=wanted.num_classes, reset_head=True, pre_logits="drop",
        dropout=wanted.dropout if vit else None, interpolation=wanted.position_interpolation if vit else None,
    )  # fmt: skip
    assert model.config == wanted, f"{model.config} is not {wanted}"
    if new_positions is not None:
        assert isinstance(wanted, ViTConfig), "see `check_positions`"
        redraw_positions(model, wanted, new_positions)
    return model


def check_positions(model: ModelConfig) -> None:
    """Raises ValueError for a model without position embeddings that could be drawn anew."""
    if not isinstance(model, ViTConfig) or model.position not in LEARNED_POSITIONS:
        kind = f"position={model.position!r}" if isinstance(model, ViTConfig) else "a ResNet"
        raise UserError(
            f"fresh_positions draws learned position embeddings anew, and the checkpoint has none ({kind}); leave it "
            f"out."
        )


def identity(model: Model) -> tuple[ModelConfig, str]:
    """A model's shape, and a short name for exactly its weights, whatever file they came in."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return model.config, f"sha256:{digest.hexdigest()[:16]}"

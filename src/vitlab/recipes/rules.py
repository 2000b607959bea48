"""Rules for the settings that a recipe leaves open: BiT's HyperRule for the training images, the checkpoint's model and
image size, and what few epochs ask for. `resolve` and the plan of a time budget apply them."""

import dataclasses
import logging
import math
from collections.abc import Collection
from typing import Any, TypeVar

from vitlab.config import FinetuneConfig, TrainConfig
from vitlab.errors import UserError
from vitlab.models.config import ImageSize, ModelConfig, ViTConfig
from vitlab.models.image_size import nearest_image_size
from vitlab.preprocessing import Preprocessing

logger = logging.getLogger(__name__)
Config = TypeVar("Config", bound=TrainConfig)

MAX_CPU_FLOPS = 1e14
"""Largest default training budget on a CPU, about ten minutes of two cores; above it `bit_hyperrule` reduces batch size
and steps."""
REFIT_EPOCHS = 5.0
"""Epochs from which the final run trains again, on the held-out images too."""
SHORT_EPOCHS, SHORT_MIN_AREA, SHORT_RATE = 3.0, 0.7, 2.0
"""Epochs below which a training has larger crops, their `min_area`, and the factor of its learning rates."""
MAX_HELD_OUT = 1000
"""Training images that a sweep holds out at most, except one of each class."""
MAX_CPU_IMAGE_SIZE = 224
"""Largest default image size on a CPU, in pixels."""


def bit_hyperrule(
    config: FinetuneConfig, examples: int, device_type: str, open_settings: Collection[str]
) -> FinetuneConfig:
    """`config` with the settings that depend on the number of training images: BiT's HyperRule (big_transfer).

    500 steps below 20,000 images, 10,000 below 500,000, else 20,000; warm-up 100 or 500 steps, at most a fifth of
    them; mixup 0.1 from 20,000 images on. Deviations: the batch is the power of two up to an eighth of the images,
    from 32 to 512 (BiT: 512). The sweep tries each learning rate for a fifth of the steps, at least 20; from a
    least-squares head, which the first steps make worse, for all of them, with at most MAX_HELD_OUT images held out.
    On a CPU, where this would be more than MAX_CPU_FLOPS: batches of 32, 20 epochs, and 100 to 500 steps.
    """
    small = examples < 20_000
    batch_size = config.batch_size
    if "batch_size" in open_settings:
        batch_size = min(max(2 ** max(math.floor(math.log2(examples / 8)), 0), 32), 512)
    steps = 500 if small else 10_000 if examples < 500_000 else 20_000
    if device_type == "cpu" and 6 * config.model.forward_macs * batch_size * steps > MAX_CPU_FLOPS:
        batch_size = min(batch_size, 32) if "batch_size" in open_settings else batch_size
        steps = min(max(20 * examples // batch_size, 100), 500)
    changes: dict[str, Any] = {"batch_size": batch_size}
    if "steps" in open_settings:
        changes |= {"steps": steps, "epochs": None}
    total = dataclasses.replace(config, **changes).total_steps(examples)
    if "optim.warmup_steps" in open_settings:
        warmup_steps = min(100 if small else 500, total // 5)
        changes["optim"] = dataclasses.replace(config.optim, warmup_steps=warmup_steps)
    if "sweep_steps" in open_settings and config.tried_rates and not config.head:
        changes["sweep_steps"] = min(max(total // 5, 20), total)
    if "held_out" in open_settings:
        changes["held_out"] = min(config.held_out, MAX_HELD_OUT / examples)
    if "mixup" in open_settings:
        changes["mixup"] = 0.0 if small else 0.1
    if "head_views" in open_settings and not small:  # views help small sets
        changes["head_views"] = None
    return dataclasses.replace(config, **changes)


def adapt_to_epochs(config: FinetuneConfig, examples: int, open_settings: Collection[str]) -> FinetuneConfig:
    """`config` with the open settings that depend on the number of epochs: below REFIT_EPOCHS the
    best run of the sweep is the final one; below SHORT_EPOCHS crops and learning rates are larger."""
    if not config.runs:
        return config
    epochs = config.total_steps(examples) * config.batch_size / examples
    changes: dict[str, Any] = {}
    if "refit" in open_settings and config.tried_rates:
        changes["refit"] = epochs >= REFIT_EPOCHS
    if "data.min_area" in open_settings and epochs < SHORT_EPOCHS:
        changes["data"] = dataclasses.replace(config.data, min_area=SHORT_MIN_AREA)
    if "learning_rates" in open_settings and epochs < SHORT_EPOCHS:
        changes["optim"] = dataclasses.replace(config.optim, lr=SHORT_RATE * config.optim.lr)
        changes["learning_rates"] = tuple(SHORT_RATE * rate for rate in config.learning_rates)
    return dataclasses.replace(config, **changes)


def default_image_size(source: ModelConfig, preprocessing: Preprocessing, device_type: str) -> ImageSize:
    """The size at which the checkpoint is evaluated; on a CPU at most MAX_CPU_IMAGE_SIZE, in whole patches."""
    size = preprocessing.image_size or source.image_size
    largest = size if isinstance(size, int) else max(size)
    if device_type != "cpu" or largest <= MAX_CPU_IMAGE_SIZE or not isinstance(source, ViTConfig):
        return size
    return max(MAX_CPU_IMAGE_SIZE // source.stride, 1) * source.stride


def adapt_config(source: ModelConfig, config: Config, num_classes: int, image_size: ImageSize | None = None) -> Config:
    """`config` with the model of a checkpoint, at `image_size` or the recipe's resolution, and the recipe's dropout.

    If patches do not divide the recipe's resolution, the next larger one is taken, with a warning. Raises UserError
    where the recipe's resolution is far from the checkpoint's and `image_size` is not given.
    """
    side, recipe_side = max(source.image_hw), config.model.image_hw[0]
    if image_size is None and recipe_side**2 > 16 * side**2:
        raise UserError(
            f"the recipe's {recipe_side} pixels are far from the {side} of the checkpoint's training and would cost it "
            f"{(recipe_side / side) ** 2:.0f} times the patches; give the size, e.g. --image-size {2 * side}."
        )
    size = config.model.image_size if image_size is None else image_size
    if image_size is None and isinstance(source, ViTConfig) and isinstance(size, int):
        nearest = nearest_image_size(size, source.patch_size, source.stem)
        if nearest != size:
            message = "the recipe's %d pixels cannot be cut into patches of %d: taking %d (--image-size sets another)"
            logger.warning(message, size, source.patch_size, nearest)
        size = nearest
    model = dataclasses.replace(source, image_size=size, num_classes=num_classes, head_bias=0.0)
    if isinstance(model, ViTConfig):
        assert isinstance(config.model, ViTConfig), "every fine-tuning recipe has the settings of a ViT"
        hidden = model.representation_size if isinstance(config, FinetuneConfig) and config.pre_logits else None
        settings: dict[str, Any] = {"representation_size": hidden, "dropout": config.model.dropout}
        model = dataclasses.replace(model, **settings, dynamic_image_size=False)  # of one size, as training needs
    elif isinstance(config.model, ViTConfig) and config.model.dropout:
        raise UserError(f"dropout={config.model.dropout}: the checkpoint is a ResNet, which has none; leave it out.")
    return dataclasses.replace(config, model=model)

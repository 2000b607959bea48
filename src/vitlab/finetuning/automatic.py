"""Settings chosen from the number of training images, the checkpoint and the device."""

import dataclasses
import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from vitlab.config import FinetuneConfig
from vitlab.config.train import REMOVED
from vitlab.models.config import ImageSize, ModelConfig, ViTConfig
from vitlab.preprocessing import Preprocessing
from vitlab.settings import from_dict

MAX_CPU_FLOPS = 1e14
"""Largest default training budget on a CPU, about ten minutes of two cores; above it `bit_hyperrule` reduces batch size
and steps."""
REFIT_EPOCHS = 5.0
"""Passes over the training images from which the final run trains again, on those too that were held out."""
SHORT_EPOCHS, SHORT_MIN_AREA, SHORT_RATE = 3.0, 0.7, 2.0
"""Passes below which a training has larger crops, their `min_area`, and learning rates this many times as high."""
MAX_HELD_OUT = 1000
"""Training images that a sweep holds out at most, except one of each class."""
DIRECT = {
    *("steps", "epochs", "batch_size", "mixup", "learning_rates", "sweep_steps"),
    *("held_out", "refit", "runs", "loss", "head_views"),
}
"""Automatic settings that are fields of FinetuneConfig."""
MAX_CPU_IMAGE_SIZE = 224
"""Largest default image size on a CPU, in pixels."""


def bit_hyperrule(config: FinetuneConfig, examples: int, device_type: str = "cuda") -> FinetuneConfig:
    """`config` with the settings that depend on the number of training images: BiT's HyperRule (big_transfer).

    500 steps below 20,000 images, 10,000 below 500,000, else 20,000; warm-up 100 or 500 steps, at most a fifth of
    them; mixup 0.1 from 20,000 images on. Deviations: the batch is the power of two up to an eighth of the images,
    from 32 to 512 (BiT: 512). The sweep tries each learning rate for a fifth of the steps, at least 20; from a
    least-squares head, which the first steps make worse, for all of them, with at most MAX_HELD_OUT images held out.
    On a CPU, where this would be more than MAX_CPU_FLOPS: batches of 32, 20 epochs, and 100 to 500 steps.
    """
    small, automatic = examples < 20_000, config.automatic
    batch_size = config.batch_size
    if "batch_size" in automatic:
        batch_size = min(max(2 ** max(math.floor(math.log2(examples / 8)), 0), 32), 512)
    steps = 500 if small else 10_000 if examples < 500_000 else 20_000
    if device_type == "cpu" and 6 * config.model.forward_macs * batch_size * steps > MAX_CPU_FLOPS:
        batch_size = min(batch_size, 32) if "batch_size" in automatic else batch_size
        steps = min(max(20 * examples // batch_size, 100), 500)
    changes: dict[str, Any] = {"batch_size": batch_size}
    if "steps" in automatic:
        changes |= {"steps": steps, "epochs": None}
    total = dataclasses.replace(config, **changes).total_steps(examples)
    if "warmup_steps" in automatic:
        warmup_steps = min(100 if small else 500, total // 5)
        changes["optim"] = dataclasses.replace(config.optim, warmup_steps=warmup_steps)
    if "sweep_steps" in automatic and config.tried_rates and not config.head:
        changes["sweep_steps"] = min(max(total // 5, 20), total)
    if "held_out" in automatic:
        changes["held_out"] = min(config.held_out, MAX_HELD_OUT / examples)
    if "mixup" in automatic:
        changes["mixup"] = 0.0 if small else 0.1
    if "head_views" in automatic and not small:  # views help small sets
        changes["head_views"] = None
    return dataclasses.replace(config, **changes, automatic=())


def adapt_to_epochs(config: FinetuneConfig, examples: int, automatic: Collection[str]) -> FinetuneConfig:
    """`config` with the `automatic` settings that depend on the number of epochs: below REFIT_EPOCHS the final run is
    that of the sweep; below SHORT_EPOCHS crops and learning rates are larger."""
    if not config.runs:
        return config
    epochs = config.total_steps(examples) * config.batch_size / examples
    changes: dict[str, Any] = {}
    if "refit" in automatic and config.tried_rates:
        changes["refit"] = epochs >= REFIT_EPOCHS
    if "min_area" in automatic and epochs < SHORT_EPOCHS:
        changes["data"] = dataclasses.replace(config.data, min_area=SHORT_MIN_AREA)
    if "learning_rates" in automatic and epochs < SHORT_EPOCHS:
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


def load_automatic_settings(
    workdir: Path, config: FinetuneConfig, budget: bool = False
) -> tuple[FinetuneConfig, ImageSize | None]:
    """`config` with the automatic settings of the fine-tuning job in `workdir`, and its image size if it is automatic.

    So a job resumes on another device or with another speed, for which other settings would be chosen. What follows
    from these, and from a `budget`, is taken from there too.
    """
    try:
        settings = json.loads((workdir / "config.json").read_bytes())
        settings["optim"] = {name: value for name, value in settings["optim"].items() if name not in REMOVED}
        names = {field.name for field in dataclasses.fields(FinetuneConfig)}
        saved = from_dict(FinetuneConfig, {name: settings[name] for name in names & settings.keys()})
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return config, None  # opening the folder reports what is wrong with it
    if settings.get("command") != "finetune":
        return config, None
    automatic = set(config.automatic)
    if budget:
        automatic |= {"steps", "epochs", "warmup_steps", "sweep_steps"}
    if "image_size" in automatic and (budget or config.head):  # which scales that of the test images
        automatic |= {"preprocessing"}
    if "runs" in automatic and not saved.runs:  # the head alone
        automatic |= {"learning_rates", "sweep_steps", "refit"}
    direct = {name: getattr(saved, name) for name in automatic & DIRECT}
    lr = saved.optim.lr if "learning_rates" in config.automatic else config.optim.lr
    warmup_steps = saved.optim.warmup_steps if "warmup_steps" in automatic else config.optim.warmup_steps
    direct["optim"] = dataclasses.replace(config.optim, lr=lr, warmup_steps=warmup_steps)
    if "preprocessing" in automatic:
        source = saved.data if "preprocessing" in config.automatic else config.data
        sizes = {"eval_resize": saved.data.eval_resize, "eval_interpolation": source.eval_interpolation}
        direct["data"] = dataclasses.replace(config.data, **sizes)
    kept = {name: getattr(saved.data, name) for name in ("part", "min_area") if name in automatic}
    direct["data"] = dataclasses.replace(direct.get("data", config.data), **kept)
    size = saved.model.image_size if "image_size" in automatic else None
    return dataclasses.replace(config, **direct, automatic=()), size

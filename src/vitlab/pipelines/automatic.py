"""Settings of a fine-tuning that depend on the data, the checkpoint and the device: `FinetuneConfig.automatic`."""

import dataclasses
import json
import math
from pathlib import Path

from vitlab.config import DataConfig, FinetuneConfig
from vitlab.models.config import ImageSize, ModelConfig, ViTConfig
from vitlab.preprocessing import Preprocessing

CPU_WORK = 1e14
"""FLOPs of training on a CPU that need no request: about ten minutes of two cores."""
CPU_SIZE = 224
"""Default for the largest image size on a CPU, in pixels."""


def bit_hyperrule(config: FinetuneConfig, examples: int, device_type: str = "cuda") -> FinetuneConfig:
    """`config` with the settings that depend on the number of training images: BiT's HyperRule (big_transfer).

    500 steps below 20,000 images, 10,000 below 500,000, else 20,000; warm-up 100 or 500 steps, at most a fifth of
    them; mixup 0.1 from 20,000 images on. Deviations: the batch is the power of two up to an eighth of the images,
    from 32 to 512 (BiT: 512). The search tries each learning rate for a fifth of the steps, at least 20. On a CPU,
    where this would be more than CPU_WORK: batches of 32, 20 epochs, and 100 to 500 steps.
    """
    small, automatic = examples < 20_000, config.automatic
    batch_size = config.batch_size
    if "batch_size" in automatic:
        batch_size = min(max(2 ** max(math.floor(math.log2(examples / 8)), 0), 32), 512)
    steps = 500 if small else 10_000 if examples < 500_000 else 20_000
    if device_type == "cpu" and 6 * config.model.forward_macs * batch_size * steps > CPU_WORK:
        batch_size = min(batch_size, 32) if "batch_size" in automatic else batch_size
        steps = min(max(20 * examples // batch_size, 100), 500)
    config = dataclasses.replace(config, batch_size=batch_size)
    if "steps" in automatic:
        config = dataclasses.replace(config, steps=steps, epochs=None)
    total = config.total_steps(examples)
    if "warmup_steps" in automatic:
        config = _with_warmup(config, min(100 if small else 500, total // 5))
    if "sweep_steps" in automatic and len(config.learning_rates) > 1:
        config = dataclasses.replace(config, sweep_steps=min(max(total // 5, 20), total))
    if "mixup" in automatic:
        config = dataclasses.replace(config, mixup=0.0 if small else 0.1)
    return dataclasses.replace(config, automatic=())


def _with_warmup(config: FinetuneConfig, steps: int) -> FinetuneConfig:
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, warmup_steps=steps))


def default_image_size(source: ModelConfig, preprocessing: Preprocessing, device_type: str) -> ImageSize:
    """The size at which the checkpoint is evaluated; on a CPU at most CPU_SIZE, rounded to whole patches."""
    size = preprocessing.image_size or source.image_size
    largest = size if isinstance(size, int) else max(size)
    if device_type != "cpu" or largest <= CPU_SIZE or not isinstance(source, ViTConfig):
        return size
    return max(CPU_SIZE // source.stride, 1) * source.stride


def with_preprocessing(data: DataConfig, preprocessing: Preprocessing) -> DataConfig:
    """`data` with the test images prepared as those of the checkpoint."""
    return dataclasses.replace(
        data,
        eval_resize=preprocessing.resize if preprocessing.keep_aspect else None,
        eval_interpolation=None if preprocessing.is_google else preprocessing.interpolation,
    )


def saved_choices(workdir: Path, config: FinetuneConfig) -> FinetuneConfig:
    """`config` with the automatic settings of the fine-tuning in `workdir`, which may continue on another device."""
    try:
        saved = json.loads((workdir / "config.json").read_bytes())
        if saved.get("command") != "finetune":
            return config
        automatic, size = config.automatic, saved["model"]["image_size"]
        names = [
            name for name in ("steps", "batch_size", "mixup", "sweep_steps") if name in automatic and name in saved
        ]
        config = dataclasses.replace(config, **{name: saved[name] for name in names})
        if "warmup_steps" in automatic:
            config = _with_warmup(config, saved["optim"]["warmup_steps"])
        if "preprocessing" in automatic:
            names = ("eval_resize", "eval_interpolation")
            data = dataclasses.replace(config.data, **{name: saved["data"][name] for name in names})
            config = dataclasses.replace(config, data=data)
        if "image_size" in automatic:
            size = size if isinstance(size, int) else tuple(size)
            config = dataclasses.replace(config, model=dataclasses.replace(config.model, image_size=size))
        return dataclasses.replace(config, automatic=())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return config  # opening the folder reports what is wrong with it

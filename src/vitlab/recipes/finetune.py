"""Table 4: fine-tuning. SGD with momentum, cosine decay, batch 512, no decay, gradients clipped, 384 pixels.

The model of these configs is a stand-in that gives the resolution: `vitlab.transfer.finetune.adapted` puts the
checkpoint's own in its place. The learning rate is one of the row's grid.
"""

import dataclasses

from vitlab.models.config import ViTConfig
from vitlab.train.config import DataConfig, OptimConfig, TrainConfig

# Table 4: the base learning rates that are tried on a held-out part of the training split.
LEARNING_RATES = {
    "imagenet": (0.003, 0.01, 0.03, 0.06),
    "cifar100": (0.001, 0.003, 0.01, 0.03),
    "cifar10": (0.001, 0.003, 0.01, 0.03),
    "pets": (0.001, 0.003, 0.01, 0.03),
    "flowers": (0.001, 0.003, 0.01, 0.03),
    "vtab": (0.01,),
}


def imagenet() -> TrainConfig:
    """20,000 steps at 512 pixels (give `--image-size 518` for patches of 14), Polyak average 0.9999 (Sec. 4.1)."""
    run = _row("folder:imagenet", steps=20_000, warmup_steps=500, lr=0.03, image_size=512)
    return dataclasses.replace(run, average_decay=0.9999)


def cifar100() -> TrainConfig:
    return _row("cifar100", steps=10_000, warmup_steps=500)


def cifar10() -> TrainConfig:
    return _row("cifar10", steps=10_000, warmup_steps=500)


def pets() -> TrainConfig:
    return _row("folder:oxford_iiit_pet", steps=500, warmup_steps=100)


def flowers() -> TrainConfig:
    return _row("folder:oxford_flowers102", steps=500, warmup_steps=100)


def vtab() -> TrainConfig:
    """2,500 steps at rate 0.01, the same for all 19 tasks; give the task's folder with `--data.name`."""
    return _row("folder:vtab", steps=2_500, warmup_steps=500)


def _row(name: str, steps: int, warmup_steps: int, lr: float = 0.01, image_size: int = 384) -> TrainConfig:
    """Warm-up is not in the table; the steps are those of Google's code, as are crop, flip and squashed test
    pictures."""
    return TrainConfig(
        model=ViTConfig(image_size=image_size),
        data=DataConfig(name=name, train_split="trainval", eval_split="test", crop="inception", workers=2),
        optim=OptimConfig(name="sgd", lr=lr, momentum=0.9, schedule="cosine", warmup_steps=warmup_steps, clip_norm=1.0),
        steps=steps,
        batch_size=512,
    )

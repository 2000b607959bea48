"""Sec. 4.6, App. B.1.2: masked patch prediction, which needs no labels, and its small twins.

What comes out is a ViT without a head, to be fine-tuned as any other checkpoint.
"""

import dataclasses

from vitlab.config import DataConfig, MaskingConfig, OptimConfig, TrainConfig
from vitlab.errors import UserError
from vitlab.models.config import ViTConfig
from vitlab.models.registry import get_config


def masked(model: str = "ViT-B/16") -> TrainConfig:
    """Masked patch prediction on JFT-300M: a million steps, about 14 epochs (`--steps 100000` is nearly as good).

    The appendix gives batch, rate, warm-up and schedule; the decay is that of all models (Sec. 4.1), dropout and
    images those of pre-training on JFT.
    """
    return TrainConfig(
        model=_headless(get_config(model), dropout=0.0),
        data=DataConfig(name="shards:jft300m", crop="inception", min_area=0.05, flip=True, eval_resize=256, workers=8),
        optim=OptimConfig(lr=2e-4, weight_decay=0.1, schedule="cosine", warmup_steps=10_000),
        masking=MaskingConfig(target="mean-color", share=0.5),
        steps=1_000_000,
        batch_size=4096,
    )


def tiny_cifar10(model: str | None = None) -> TrainConfig:
    """Masked patch prediction on CIFAR-10 in 64 patches of 4 pixels; `--data.name shards:PATH` takes shards."""
    return TrainConfig(
        model=_small(model, 32),
        data=DataConfig(
            name="cifar10", train_split="trainval", eval_split="test", crop="inception", min_area=0.3, flip=True
        ),
        optim=OptimConfig(lr=1e-3, weight_decay=0.05, schedule="cosine", warmup_steps=500, clip_norm=1.0),
        masking=MaskingConfig(),
        epochs=20.0,
        batch_size=64,
        log_every=200,
        checkpoint_every=1000,
    )


def tiny_digits(model: str | None = None) -> TrainConfig:
    """Masked patch prediction on the handwritten digits, shown at 16 pixels."""
    return TrainConfig(
        model=_small(model, 16),
        data=DataConfig(name="digits", train_split="trainval", eval_split="test", crop="pad", pad=2, flip=False),
        optim=OptimConfig(lr=2e-3, weight_decay=0.05, schedule="cosine", warmup_steps=100, clip_norm=1.0),
        masking=MaskingConfig(),
        epochs=100.0,
        batch_size=64,
        log_every=50,
        checkpoint_every=500,
    )


def _small(model: str | None, side: int) -> ViTConfig:
    """Deviation: small, GELU and positions as in `tiny.py` and for its reasons; or a named model at this size."""
    if model is None:
        own = ViTConfig(width=128, depth=4, heads=4, mlp_dim=256)
    else:
        own = _headless(get_config(model))
    return dataclasses.replace(
        own, image_size=side, patch_size=4, num_classes=0, pool="gap", gelu="erf", position_std=1.0
    )


def _headless(config: object, dropout: float | None = None) -> ViTConfig:
    if not isinstance(config, ViTConfig) or config.stem is not None:
        raise UserError(
            "masked patch prediction needs patches that are cut from the image, and a ResNet or a hybrid has none; "
            "take a ViT (`vitlab list models 'ViT*'`)."
        )
    return dataclasses.replace(
        config, num_classes=0, representation_size=None, dropout=config.dropout if dropout is None else dropout
    )

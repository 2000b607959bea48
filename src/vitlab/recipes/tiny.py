"""Small versions of the recipes, on data that anyone has: they train in minutes on two cores.

Deviation: neither sizes nor settings are the paper's. docs/records/training.md holds what each reached, with the
command, the minutes and the machine. The exact GELU stands in for the tanh form, whose CPU kernels take three times as
long, and position embeddings and heads start wide: a short run with Google's 0.02 and 0 spends its first epochs growing
them.
"""

import dataclasses
from typing import Any

from vitlab.config import DataConfig, FinetuneConfig, MaskingConfig, OptimConfig, TrainConfig
from vitlab.models.config import ModelConfig, ViTConfig
from vitlab.models.registry import MODELS, get_config
from vitlab.models.resnet_config import ResNetBody
from vitlab.models.variant import Variant
from vitlab.recipes.pretrain import headless


def vit(side: int, patch_size: int, width: int, depth: int, **more: Any) -> ViTConfig:
    """A small ViT: four heads and an MLP of twice the width unless `more` says otherwise."""
    defaults = {"heads": 4, "mlp_dim": 2 * width, "num_classes": 10, "pool": "gap", "position_std": 1.0}
    sizes: dict[str, Any] = {"image_size": side, "patch_size": patch_size, "width": width, "depth": depth}
    return ViTConfig(variant=Variant(gelu="erf"), **(sizes | defaults | more))


def digits(model: str | None = None) -> TrainConfig:
    """scikit-learn's 1,797 handwritten digits, shown at 16 pixels."""
    return TrainConfig(
        model=_named(model, vit(16, 4, 96, 5)),
        data=_data("digits", crop="pad", pad=2, flip=False),
        optim=OptimConfig(lr=2e-3, weight_decay=0.05, schedule="cosine", warmup_steps=100, clip_norm=1.0),
        mixup=1.0,
        epochs=200.0,
        batch_size=64,
        average_decay=0.99,
        checkpoint_every=500,
    )


def fashion_mnist(model: str | None = None) -> TrainConfig:
    """Fashion-MNIST at twice its 28 pixels, by a small hybrid."""
    return _by_hybrid(model, _data("fashion_mnist", crop="pad", pad=2), epochs=12.0)


def cifar10(model: str | None = None) -> TrainConfig:
    """CIFAR-10 at 56 pixels, by Fashion-MNIST's hybrid. `--data.name shards:PATH` takes shards."""
    return _by_hybrid(model, _data("cifar10", crop="pad", pad=7), epochs=15.0)


def masked_cifar10(model: str | None = None) -> TrainConfig:
    """Masked patch prediction on CIFAR-10 in 64 patches of 4 pixels; `--data.name shards:PATH` takes shards."""
    return TrainConfig(
        model=_masked(model, 32),
        data=_data("cifar10", crop="inception", min_area=0.3),
        optim=OptimConfig(lr=1e-3, weight_decay=0.05, schedule="cosine", warmup_steps=500, clip_norm=1.0),
        masking=MaskingConfig(),
        epochs=20.0,
        batch_size=64,
        log_every=200,
    )


def masked_digits(model: str | None = None) -> TrainConfig:
    """Masked patch prediction on the handwritten digits, shown at 16 pixels."""
    return dataclasses.replace(
        digits(), model=_masked(model, 16), masking=MaskingConfig(), mixup=0.0, epochs=100.0, average_decay=None
    )


def finetune_digits() -> FinetuneConfig:
    """Digits at 32 pixels, twice the resolution of `digits`: Table 4 in small."""
    return FinetuneConfig(
        model=ViTConfig(image_size=32, patch_size=4),
        data=_data("digits", crop="pad", pad=4, flip=False),
        optim=OptimConfig(name="sgd", lr=0.03, schedule="cosine", warmup_steps=20, clip_norm=1.0),
        steps=200,
        batch_size=64,
        log_every=10,
        checkpoint_every=100,
    )


def _data(name: str, **settings: Any) -> DataConfig:
    return DataConfig(name=name, train_split="trainval", eval_split="test", **settings)


def _by_hybrid(model: str | None, data: DataConfig, epochs: float) -> TrainConfig:
    """A short run at 56 pixels by a small hybrid: convolutions to a grid of 4 x 4, then one block.

    The rate, the decay (ten times that of the digits) and the 16 channels in a group of GroupNorm were the best of
    those tried on held-out images.
    """
    stem = ResNetBody((2, 2, 2), width=32, version="v2", min_group_size=16)
    hybrid = vit(56, 1, 192, 1, head_std=0.1, stem=stem)
    return TrainConfig(
        model=_named(model, hybrid),
        data=data,
        optim=OptimConfig(lr=3e-3, weight_decay=0.5, schedule="cosine", warmup_steps=300, clip_norm=1.0),
        label_smoothing=0.1,
        epochs=epochs,
        batch_size=128,
        log_every=100,
    )


def _masked(model: str | None, side: int) -> ViTConfig:
    """A small ViT without a head, or a named one at this size."""
    return headless(_named(model, vit(side, 4, 128, 4)))


def _named(model: str | None, default: ViTConfig) -> ModelConfig:
    """`default`, or a named model at its resolution, with as many patches if they are cut from the image."""
    if model is None:
        return default
    names = ["image_size", "num_classes"]
    changes: dict[str, Any] = {}
    if isinstance(named := MODELS.get(model), ViTConfig):
        names += ["pool", "variant", "position_std", "head_std"]
        if named.stem is None:
            changes["patch_size"] = default.image_hw[0] // default.grid[0]
    return get_config(model, **{name: getattr(default, name) for name in names}, **changes)

"""Small twins of the recipes, on data that anyone has: they train in minutes on two cores.

Deviation: neither sizes nor settings are the paper's. docs/reproduce.md holds what each reached, with the command, the
minutes and the machine. The exact GELU stands in for the tanh form, whose CPU kernels take three times as long, and
position embeddings and heads start wide: a short run with Google's 0.02 and 0 spends its first epochs growing them.
"""

from typing import Any

from vitlab.config import DataConfig, FinetuneConfig, OptimConfig, TrainConfig
from vitlab.models.config import ModelConfig, ViTConfig
from vitlab.models.registry import MODELS, get_config
from vitlab.models.resnet_config import ResNetBody


def digits(model: str | None = None) -> TrainConfig:
    """scikit-learn's 1,797 handwritten digits, shown at 16 pixels."""
    own = ViTConfig(
        image_size=16, patch_size=4, width=96, depth=5, heads=4, mlp_dim=192, num_classes=10, pool="gap",
        gelu="erf", position_std=1.0,
    )  # fmt: skip
    return TrainConfig(
        model=_named(model, own),
        data=DataConfig(name="digits", train_split="trainval", eval_split="test", crop="pad", pad=2, flip=False),
        optim=OptimConfig(lr=2e-3, weight_decay=0.05, schedule="cosine", warmup_steps=100, clip_norm=1.0),
        mixup=1.0,
        epochs=200.0,
        batch_size=64,
        average_decay=0.99,
        log_every=50,
        checkpoint_every=500,
    )


def fashion_mnist(model: str | None = None) -> TrainConfig:
    """Fashion-MNIST at twice its 28 pixels, by a small hybrid."""
    data = DataConfig(name="fashion_mnist", train_split="trainval", eval_split="test", crop="pad", pad=2)
    return _by_hybrid(model, data, epochs=8.5)


def cifar10(model: str | None = None) -> TrainConfig:
    """CIFAR-10 at 56 pixels, by Fashion-MNIST's hybrid. `--data.name shards:PATH` takes shards."""
    data = DataConfig(name="cifar10", train_split="trainval", eval_split="test", crop="pad", pad=7)
    return _by_hybrid(model, data, epochs=10.0)


def finetune_digits() -> FinetuneConfig:
    """Digits at 32 pixels, twice the resolution of `digits`: Table 4 in small."""
    return FinetuneConfig(
        model=ViTConfig(image_size=32, patch_size=4),
        data=DataConfig(name="digits", train_split="trainval", eval_split="test", crop="pad", pad=4, flip=False),
        optim=OptimConfig(name="sgd", lr=0.03, schedule="cosine", warmup_steps=20, clip_norm=1.0),
        steps=200,
        batch_size=64,
        log_every=10,
        checkpoint_every=100,
    )


def finetune_small() -> FinetuneConfig:
    """Any small data set (`--dataset folder:PATH`): 500 steps of 64 images at 224 pixels."""
    return FinetuneConfig(
        model=ViTConfig(image_size=224),
        data=DataConfig(
            name="digits",
            train_split="trainval",
            eval_split="test",
            crop="inception",
            min_area=0.3,
            eval_interpolation="bilinear",
            workers=2,
        ),
        optim=OptimConfig(name="sgd", lr=0.01, schedule="cosine", warmup_steps=100, clip_norm=1.0),
        steps=500,
        batch_size=64,
        log_every=10,
        checkpoint_every=100,
    )


def _by_hybrid(model: str | None, data: DataConfig, epochs: float) -> TrainConfig:
    """A short run at 56 pixels by a small hybrid: convolutions to 4 x 4 places, then one block.

    The rate, and the decay, ten times that of the digits, were the best of those tried on held-out images.
    """
    own = ViTConfig(
        image_size=56, patch_size=1, width=192, depth=1, heads=4, mlp_dim=384, num_classes=10, pool="gap",
        gelu="erf", position_std=1.0, head_std=0.1, stem=ResNetBody((2, 2, 2), width=32, version="v2"),
    )  # fmt: skip
    return TrainConfig(
        model=_named(model, own),
        data=data,
        optim=OptimConfig(lr=3e-3, weight_decay=0.5, schedule="cosine", warmup_steps=300, clip_norm=1.0),
        label_smoothing=0.1,
        epochs=epochs,
        batch_size=128,
        log_every=100,
        checkpoint_every=1000,
    )


def _named(model: str | None, own: ViTConfig) -> ModelConfig:
    """`own`, or a named model at the same resolution (if it cuts its patches from the image, into as many)."""
    if model is None:
        return own
    wanted: dict[str, Any] = {"image_size": own.image_size, "num_classes": own.num_classes}
    named = MODELS.get(model)
    if isinstance(named, ViTConfig):
        wanted |= {"pool": own.pool, "gelu": own.gelu, "position_std": own.position_std, "head_std": own.head_std}
        if named.stem is None:
            wanted["patch_size"] = own.image_hw[0] // own.grid[0]
    return get_config(model, **wanted)

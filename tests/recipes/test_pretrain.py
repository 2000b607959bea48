"""Table 3 and App. B.1.2, row by row, in their numbers."""

import dataclasses

import pytest

from vitlab.config import MaskingConfig, OptimConfig, TrainConfig
from vitlab.models import ViTConfig, get_config
from vitlab.recipes import PRETRAIN, pretrain

JFT, IMAGENET21K, IMAGENET = 303_000_000, 14_197_122, 1_281_167


def check_common_settings(config: TrainConfig, model: str, head_bias: float = -10.0) -> ViTConfig:
    assert (config.batch_size, config.model.image_hw) == (4096, (224, 224))
    named = get_config(model)
    for size in ("patch_size", "width", "depth", "heads", "mlp_dim"):
        assert getattr(config.model, size) == getattr(named, size)
    assert isinstance(config.model, ViTConfig)
    assert config.model.representation_size == config.model.width
    assert (config.loss, config.model.head_bias) == ("sigmoid", head_bias)
    assert (config.data.crop, config.data.min_area, config.data.flip) == ("inception", 0.05, True)
    assert (config.data.randaugment_layers, config.mixup) == (0, 0.0)
    return config.model


@pytest.mark.parametrize(
    ("model", "epochs", "lr"),
    [
        ("ViT-B/16", 7, 8e-4),
        ("ViT-B/32", 7, 8e-4),
        ("ViT-L/32", 7, 6e-4),
        ("ViT-L/16", 14, 4e-4),
        ("ViT-H/14", 14, 3e-4),
        ("R50x1", 7, 1e-3),
        ("R50x2", 7, 1e-3),
        ("R101x1", 7, 8e-4),
        ("R152x1", 7, 6e-4),
        ("R152x2", 7, 6e-4),
        ("R50+ViT-B/16", 7, 8e-4),
        ("R50+ViT-B/32", 7, 8e-4),
        ("R50+ViT-L/32", 7, 2e-4),
        ("R50+ViT-L/16", 14, 4e-4),
    ],
)
def test_jft(model: str, epochs: int, lr: float) -> None:
    config = pretrain.jft(model)
    if not model.startswith("R"):
        assert check_common_settings(config, model).dropout == 0.0
    assert (config.epochs, config.model.num_classes, config.label_smoothing) == (epochs, 18_291, 0.0)
    assert config.optim == OptimConfig(lr=lr, weight_decay=0.1, schedule="linear", end_lr=1e-5, warmup_steps=10_000)
    assert config.total_steps(JFT) == {7: 517_822, 14: 1_035_645}[epochs]


@pytest.mark.parametrize("model", ["ViT-B/16", "ViT-L/32"])
def test_imagenet21k(model: str) -> None:
    config = pretrain.imagenet21k(model)
    vit = check_common_settings(config, model)
    assert (vit.num_classes, vit.dropout, config.epochs, config.label_smoothing) == (21_843, 0.1, 90, 1e-4)
    assert config.optim == OptimConfig(lr=1e-3, weight_decay=0.03, schedule="linear", end_lr=1e-5, warmup_steps=10_000)
    assert config.total_steps(IMAGENET21K) == 311_948
    assert dataclasses.replace(config, epochs=30.0).total_steps(IMAGENET21K) == 103_983


@pytest.mark.parametrize("model", ["ViT-B/16", "ViT-H/14"])
def test_imagenet(model: str) -> None:
    config = pretrain.imagenet(model)
    vit = check_common_settings(config, model, head_bias=-6.9)
    assert (vit.num_classes, vit.dropout, config.epochs, config.label_smoothing) == (1000, 0.1, 300, 1e-4)
    assert config.optim == OptimConfig(lr=3e-3, weight_decay=0.3, schedule="cosine", warmup_steps=10_000, clip_norm=1.0)
    assert config.total_steps(IMAGENET) == 93_835


@pytest.mark.parametrize(
    ("recipe", "model", "allowed"),
    [
        ("imagenet21k", "R50x1", "allowed: ViT-B/16"),
        ("imagenet", "R26+ViT-S/32", "the nearest: ViT-S/32"),
        ("masked", "R50x1", "take a ViT"),
        ("tiny-masked", "R26+ViT-S/32", "take a ViT"),
    ],
)
def test_model_without_a_row(recipe: str, model: str, allowed: str) -> None:
    with pytest.raises(ValueError, match=allowed):
        PRETRAIN[recipe](model)


def test_masked_patch_prediction() -> None:
    config = PRETRAIN["masked"]()
    assert (config.steps, config.batch_size) == (1_000_000, 4096)
    assert round(1_000_000 * 4096 / JFT) == 14  # "14 epochs"
    assert config.optim == OptimConfig(lr=2e-4, weight_decay=0.1, schedule="cosine", warmup_steps=10_000)
    assert config.masking == MaskingConfig(target="mean-color", share=0.5, masked=0.8, replaced=0.1)
    named = get_config("ViT-B/16")
    assert isinstance(named, ViTConfig)
    assert config.model == dataclasses.replace(named, num_classes=0, representation_size=None, dropout=0.0)

"""The small twins fit their data, and keep to the tables where size does not matter."""

import dataclasses

import pytest

from vitlab.config import TrainConfig
from vitlab.data.registry import DATASETS
from vitlab.models import ViTConfig
from vitlab.recipes import FINETUNE, PRETRAIN, tiny

TWINS = {name: recipe for name, recipe in PRETRAIN.items() if recipe.__module__ == tiny.__name__}


@pytest.mark.parametrize("name", TWINS)
def test_shaped_for_its_data(name: str) -> None:
    config = TWINS[name]()
    info = DATASETS[config.data.name]
    assert info.image_size is not None
    assert config.model.num_classes == info.num_classes
    assert config.model.image_hw[0] >= info.image_size[0], "images would lose detail"
    assert (config.data.train_split, config.data.eval_split) == ("trainval", "test")


def test_digits_are_not_mirrored() -> None:
    """A mirrored 2 is no 2."""
    assert not tiny.digits().data.flip
    assert not tiny.finetune_digits().data.flip


@pytest.mark.parametrize("name", TWINS)
def test_named_model_keeps_the_resolution(name: str) -> None:
    own, named = TWINS[name]().model, TWINS[name]("ViT-S/16").model
    assert isinstance(named, ViTConfig)
    assert (named.width, named.depth, named.heads, named.mlp_dim) == (384, 12, 6, 1536)
    kept = ("image_size", "grid", "num_classes", "pool")
    assert all(getattr(named, field) == getattr(own, field) for field in kept)


@pytest.mark.parametrize("name", TWINS)
def test_other_kinds_of_models_fit_too(name: str) -> None:
    """A hybrid keeps its own patches, which the stem's feature map gives; a ResNet has none."""
    own = TWINS[name]().model
    hybrid, resnet = TWINS[name]("R26+ViT-S/32").model, TWINS[name]("R50x1").model
    assert isinstance(hybrid, ViTConfig)
    assert (hybrid.stride, hybrid.image_size, hybrid.pool) == (32, own.image_size, "gap")
    assert (resnet.image_size, resnet.num_classes) == (own.image_size, own.num_classes)


def test_finetuning_doubles_the_resolution() -> None:
    before, after = tiny.digits().model, FINETUNE["tiny-digits"]().model
    assert isinstance(before, ViTConfig)
    assert isinstance(after, ViTConfig)
    assert after.image_hw == (2 * before.image_hw[0], 2 * before.image_hw[1])
    assert after.patch_size == before.patch_size


@pytest.mark.parametrize("name", ["tiny-digits", "tiny"])
def test_finetuning_as_in_table_4(name: str) -> None:
    """But for steps, batch and rate."""
    config, table = FINETUNE[name](), FINETUNE["cifar10"]()
    optim = dataclasses.replace(config.optim, lr=table.optim.lr, warmup_steps=table.optim.warmup_steps)
    assert optim == table.optim
    assert isinstance(config, TrainConfig)
    assert isinstance(config.model, ViTConfig)

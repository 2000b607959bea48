"""The small versions fit their data, and keep to the tables where size does not matter."""

import dataclasses

import pytest

from vitlab.data.registry import DATASETS
from vitlab.models import ViTConfig
from vitlab.recipes import FINETUNE, PRETRAIN


@pytest.mark.parametrize("name", [name for name in PRETRAIN if name.startswith("tiny")])
def test_pretraining_fits_its_data(name: str) -> None:
    config = PRETRAIN[name]()
    info = DATASETS[config.data.name]
    assert info.image_size is not None
    assert config.model.num_classes == (0 if config.masking else info.num_classes)
    assert config.model.image_hw[0] >= info.image_size[0], "images would lose detail"
    assert (config.data.train_split, config.data.eval_split) == ("trainval", "test")
    assert config.data.flip == ("digits" not in name)  # a mirrored 2 is not a digit
    assert config.masking == (PRETRAIN["masked"]().masking if "masked" in name else None)


@pytest.mark.parametrize("name", ["tiny-digits", "tiny-cifar10", "tiny-masked"])
def test_a_named_model_gets_the_default_resolution(name: str) -> None:
    """A hybrid keeps its patches, which the stem's feature map gives; a ResNet has none."""
    default, named = PRETRAIN[name]().model, PRETRAIN[name]("ViT-S/16").model
    assert isinstance(named, ViTConfig)
    assert (named.width, named.depth, named.heads, named.mlp_dim) == (384, 12, 6, 1536)
    for setting in ("image_size", "grid", "num_classes", "pool"):
        assert getattr(named, setting) == getattr(default, setting)
    if "masked" not in name:
        hybrid, resnet = PRETRAIN[name]("R26+ViT-S/32").model, PRETRAIN[name]("R50x1").model
        assert isinstance(hybrid, ViTConfig)
        assert (hybrid.stride, hybrid.image_size, hybrid.pool) == (32, default.image_size, "gap")
        assert (resnet.image_size, resnet.num_classes) == (default.image_size, default.num_classes)


def test_finetuning_doubles_the_resolution_and_is_as_in_table_4() -> None:
    before, config, table = PRETRAIN["tiny-digits"]().model, FINETUNE["tiny-digits"](), FINETUNE["cifar10"]()
    assert isinstance(before, ViTConfig)
    assert isinstance(config.model, ViTConfig)
    assert config.model.image_hw == (2 * before.image_hw[0], 2 * before.image_hw[1])
    assert config.model.patch_size == before.patch_size
    optim = dataclasses.replace(config.optim, lr=table.optim.lr, warmup_steps=table.optim.warmup_steps)
    assert optim == table.optim

"""App. B.1.2 in its own numbers, and the twins."""

import pytest

from vitlab.config import MaskingConfig
from vitlab.data.registry import DATASETS
from vitlab.models import ViTConfig, get_config
from vitlab.recipes import PRETRAIN, selfsup

JFT = 303_000_000
TWINS = ("tiny-masked", "tiny-masked-digits")


def test_the_papers_run() -> None:
    config = PRETRAIN["masked"]()
    assert (config.steps, config.batch_size) == (1_000_000, 4096)
    assert round(1_000_000 * 4096 / JFT) == 14  # "14 epochs"
    optim = config.optim
    assert (optim.name, optim.lr, optim.warmup_steps, optim.schedule) == ("adam", 2e-4, 10_000, "cosine")
    assert (optim.beta1, optim.beta2, optim.weight_decay, optim.clip_norm) == (0.9, 0.999, 0.1, None)  # Sec. 4.1
    assert config.masking == MaskingConfig(target="mean-color", share=0.5, masked=0.8, replaced=0.1)
    model, named = config.model, get_config("ViT-B/16")
    assert isinstance(model, ViTConfig)
    for size in ("image_hw", "patch_size", "width", "depth", "heads", "mlp_dim", "pool"):
        assert getattr(model, size) == getattr(named, size)
    assert (model.num_classes, model.representation_size, model.dropout) == (0, None, 0.0)


@pytest.mark.parametrize("name", TWINS)
def test_twin(name: str) -> None:
    config = PRETRAIN[name]()
    info = DATASETS[config.data.name]
    assert info.image_size is not None
    assert config.model.image_hw[0] % info.image_size[0] == 0
    assert config.masking == PRETRAIN["masked"]().masking
    assert config.data.flip == (name == "tiny-masked")  # a mirrored 2 is no 2


@pytest.mark.parametrize("name", ["masked", *TWINS])
@pytest.mark.parametrize("model", ["R50x1", "R26+ViT-S/32"])
def test_other_kinds_of_models_are_refused(name: str, model: str) -> None:
    with pytest.raises(ValueError, match="cut from the image, and a ResNet or a hybrid has none; take a ViT"):
        PRETRAIN[name](model)


def test_named_model_at_the_size_of_the_twin() -> None:
    model = selfsup.tiny_cifar10("ViT-S/16").model
    assert isinstance(model, ViTConfig)
    assert (model.width, model.depth, model.image_size, model.patch_size) == (384, 12, 32, 4)

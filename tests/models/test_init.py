"""The door to the models: names in, models out."""

import pytest
import torch

from vitlab.models import MODELS, create_model, list_models


def test_names_are_found_by_pattern() -> None:
    assert list_models() == list(MODELS)
    assert list_models("ViT-B*") == ["ViT-B/8", "ViT-B/14", "ViT-B/16", "ViT-B/32"]
    assert list_models("vit*") == []


def test_a_generator_alone_decides_the_weights() -> None:
    small = {"width": 12, "depth": 1, "heads": 2, "mlp_dim": 8, "image_size": 16, "representation_size": 6}
    torch.manual_seed(0)
    state = torch.get_rng_state()
    one, two = (
        create_model("ViT-B/16", generator=torch.Generator().manual_seed(3), **small).state_dict() for _ in range(2)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one[name], two[name]) for name in one)
    other = create_model("ViT-B/16", generator=torch.Generator().manual_seed(4), **small).state_dict()
    assert not torch.equal(one["embedding.weight"], other["embedding.weight"])


def test_overrides_are_settings() -> None:
    assert create_model("ViT-Ti/16", depth=1, image_size=(32, 48)).config.grid == (2, 3)
    with pytest.raises(ValueError, match=r"unknown model setting 'widht'; the nearest: width"):
        create_model("ViT-Ti/16", widht=3)

"""The words for a model: the paper's name where there is one, and nothing that is not so."""

from dataclasses import replace
from typing import Any

import pytest

from vitlab.inspect.summary import details_of, name_of, numbers_of
from vitlab.models import MODELS, ResNetBody, ResNetConfig, ViTConfig

SMALL = ViTConfig(image_size=(16, 24), patch_size=8, width=8, depth=3, heads=2, mlp_dim=32, num_classes=7)


@pytest.mark.parametrize("name", MODELS)
def test_the_papers_models_have_their_names(name: str) -> None:
    """At any size of image and for any task."""
    known = MODELS[name]
    assert name_of(replace(known, image_size=2 * known.image_hw[0], num_classes=3)) == name


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (SMALL, "ViT/8"),
        (replace(SMALL, encoder="axial"), "Axial ViT/8"),
        (replace(SMALL, image_size=32, patch_size=1, stem=ResNetBody((1, 1), width=32)), "Hybrid/8"),
        (ResNetConfig(image_size=32, body=ResNetBody((1, 1), width=32, version="v2")), "ResNet"),
    ],
)
def test_others_have_their_kinds(config: Any, name: str) -> None:
    assert name_of(config) == name
    assert numbers_of(config)["Model"] == name


def test_numbers_of_a_vit() -> None:
    gmacs = f"{SMALL.forward_macs / 1e9:.3g}"
    assert numbers_of(SMALL) == {
        "Model": "ViT/8", "Parameters": f"{SMALL.num_parameters:,}", "GMACs per image": gmacs,
        "Pixels, h × w": "16 × 24", "Patches, h × w": "2 × 3", "Layers × heads": "3 × 2",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "the class token (Eq. 4); 7 classes"),
        ({"pool": "gap"}, "the mean over patches (App. D.3); 7 classes"),
        ({"pool": "map"}, "a learned query's attention over all tokens; 7 classes"),
        ({"pool": "token+gap"}, "class token and mean over patches; 7 classes"),
        ({"distilled": True}, "class token and distillation token, each with a head of its own; 7 classes"),
        ({"num_classes": 0}, "none: no head"),
    ],
)
def test_where_the_answer_comes_from(settings: dict[str, Any], said: str) -> None:
    assert details_of(replace(SMALL, **settings))["prediction from"] == said


def test_of_a_resnet_there_is_less_to_say() -> None:
    resnet = ResNetConfig(image_size=32, body=ResNetBody((1, 1), width=32, version="v2"), num_classes=4)
    assert details_of(resnet) == {"kind": "ResNet (BiT)", "prediction from": "4 classes"}
    assert set(numbers_of(resnet)) == {"Model", "Parameters", "GMACs per image", "Pixels, h × w"}

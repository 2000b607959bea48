from dataclasses import replace
from typing import Any

import pytest
import torch

from vitlab.models import (
    MODELS,
    ModelConfig,
    ResNetBody,
    Variant,
    ViTConfig,
    create_model,
    get_config,
    list_models,
)
from vitlab.models.registry import name_of
from vitlab.models.variant import all_settings, override

# At 224 pixels with 1,000 classes. Where Google's code has the model, its count.
PARAMETERS = {
    "ViT-Ti/8": 5_719_720,
    "ViT-Ti/14": 5_694_376,
    "ViT-Ti/16": 5_717_416,
    "ViT-Ti/32": 6_131_560,
    "ViT-S/8": 22_055_272,
    "ViT-S/14": 22_004_584,
    "ViT-S/16": 22_050_664,
    "ViT-S/32": 22_878_952,
    "ViT-B/8": 86_576_872,
    "ViT-B/14": 86_475_496,
    "ViT-B/16": 86_567_656,
    "ViT-B/32": 88_224_232,
    "ViT-L/8": 304_338_920,
    "ViT-L/14": 304_203_752,
    "ViT-L/16": 304_326_632,
    "ViT-L/32": 306_535_400,
    "ViT-H/8": 632_214_760,
    "ViT-H/14": 632_045_800,
    "ViT-H/16": 632_199_400,
    "ViT-H/32": 634_960_360,
    "R50+ViT-B/16": 98_659_112,
    "R50+ViT-B/32": 110_945_832,
    "R50+ViT-L/16": 316_483_624,
    "R50+ViT-L/32": 328_994_856,
    "R26+ViT-S/32": 36_431_912,
    "R26+ViT-B/32": 101_383_976,
    "R+ViT-Ti/16": 6_337_704,
    "R26x1": 15_987_496,
    "R50x1": 25_549_352,
    "R50x2": 97_988_712,
    "R50x3": 217_319_080,
    "R101x1": 44_541_480,
    "R101x3": 387_934_888,
    "R152x1": 60_185_128,
    "R152x2": 236_335_208,
    "R152x4": 936_533_224,
    "R200x3": 568_633_000,
    "Axial-ViT-B/16": 171_622_120,
    "Axial-ViT-B/32": 173_278_696,
    "AxialResNet50": 24_355_192,
}

I21K = {"num_classes": 21_843}
GAP = {"pool": "gap"}
# Counts of Google's code for other settings.
OTHER_PARAMETERS = [
    ("ViT-S/16", GAP, 22_049_896),
    ("ViT-H/14", {**GAP, "width": 1536, "depth": 48, "mlp_dim": 8192}, 1_664_839_144),
    ("ViT-B/16", {"width": 10, "depth": 1, "heads": 2, "mlp_dim": 10}, 21_390),
    ("ViT-B/16", {**I21K, "representation_size": 768}, 103_186_515),
    ("ViT-B/16", {"image_size": 384}, 86_859_496),
    ("ViT-B/16", {"position": "none"}, 86_567_656 - 197 * 768),
    ("R50+ViT-B/16", {**I21K, "representation_size": 768}, 115_277_971),
    ("R50+ViT-B/16", {"image_size": 384}, 98_950_952),
    ("R50x1", I21K, 68_256_659),
    ("R50x1", {"body": ResNetBody()}, 25_557_032),
    # timm's
    ("ViT-Ti/16", {"distilled": True}, 5_910_800),
    ("ViT-S/14", {"image_size": 518, "layer_scale": 1e-5, "num_classes": 0}, 22_056_192),
    ("ViT-S/16", {"layer_scale": 1e-6, "class_position": False}, 22_059_496),
]


@pytest.mark.parametrize(
    ("name", "overrides", "parameters"), [*((name, {}, count) for name, count in PARAMETERS.items()), *OTHER_PARAMETERS]
)
def test_parameters(name: str, overrides: dict[str, Any], parameters: int) -> None:
    with torch.device("meta"):
        model = create_model(name, **overrides)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert model.config.num_parameters == parameters


def test_sizes_of_table_1() -> None:
    for name, row in (("B", (12, 768, 3072, 12)), ("L", (24, 1024, 4096, 16)), ("H", (32, 1280, 5120, 16))):
        config = MODELS[f"ViT-{name}/16"]
        assert isinstance(config, ViTConfig)
        assert (config.depth, config.width, config.mlp_dim, config.heads) == row


def test_an_unknown_name_or_setting_names_the_nearest() -> None:
    for name, nearest in (("ViT_B_16", "ViT-B/16"), ("resnet", "vitlab list models")):
        with pytest.raises(ValueError, match=f"{name}.*{nearest}"):
            create_model(name)
    for name, setting in (("ViT-B/16", "register"), ("R50x1", "depth"), ("R50x1", "registers")):
        with pytest.raises(ValueError, match=f"'{setting}'"):
            get_config(name, **{setting: 3})


def test_settings_of_the_variant_are_settings_of_the_model(kind: ModelConfig) -> None:
    settings = all_settings(kind)
    assert override(type(kind)(), **settings) == kind
    assert ("registers" in settings) == isinstance(kind, ViTConfig)
    both = Variant(registers=4, swiglu=True)
    assert get_config("ViT-S/16", registers=4, variant=Variant(swiglu=True)) == get_config("ViT-S/16", variant=both)
    assert both.differences == {"registers": 4, "swiglu": True}


@pytest.mark.parametrize(
    ("name", "billions"), [("ViT-B/16", 17.56), ("ViT-L/16", 61.55), ("R50x1", 4.089), ("R50+ViT-B/16", 21.54)]
)
def test_operations_of_known_models(name: str, billions: float) -> None:
    assert MODELS[name].forward_macs == pytest.approx(billions * 1e9, rel=1e-3)


def test_the_papers_models_have_their_names() -> None:
    """At any image size and for any task."""
    assert list(PARAMETERS) == list_models() == list(MODELS)
    for name, config in MODELS.items():
        assert name_of(replace(config, image_size=2 * config.image_hw[0], num_classes=3)) == name

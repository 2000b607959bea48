"""The architecture and the arguments from which timm builds our models."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, ViTConfig
from vitlab.preprocessing import Preprocessing
from vitlab.weights.timm import metadata_timm
from vitlab.weights.timm_arguments import timm_settings
from vitlab.weights.timm_layout import timm_layout

V2 = ResNetBody(width=32, version="v2", weight_eps=1e-10, weight_eps_on="variance", group_norm_eps=1e-5)


def test_timms_rounding_is_anticipated(tmp_path: Path) -> None:
    for width, mlp_dim in ((56, 488), (16, 23), (1152, 4304), (832, 2176)):
        card = timm_settings(ViTConfig(width=width, heads=8, mlp_dim=mlp_dim), {})
        assert int(width * card["model_args"]["mlp_ratio"]) == mlp_dim
    for side, resize in ((side, resize) for side in (16, 224, 384) for resize in range(384, 700, 17)):
        metadata = {"preprocessing": Preprocessing.google(side, resize).to_metadata()}
        card = timm_settings(ViTConfig(image_size=side, patch_size=8), metadata)
        (tmp_path / "config.json").write_text(json.dumps(card))
        assert metadata_timm(tmp_path)["preprocessing"]["resize"] == resize


@pytest.mark.parametrize(
    ("size", "resize", "keep_aspect", "warnings"),
    [(16, 24, True, 0), ((16, 24), None, True, 0), ((16, 24), 32, True, 2), ((16, 24), 32, False, 2)],
)
def test_a_crop_that_is_not_square_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size: Any, resize: int | None, keep_aspect: bool, warnings: int
) -> None:
    """Written and read: timm resizes both sides in proportion to those of the crop."""
    prepared = Preprocessing(size, resize, keep_aspect)
    card = timm_settings(ViTConfig(image_size=size, patch_size=8), {"preprocessing": prepared.to_metadata()})
    (tmp_path / "config.json").write_text(json.dumps(card))
    assert metadata_timm(tmp_path)["preprocessing"]["resize"] == resize
    assert caplog.text.count("images of that aspect ratio") == warnings
    assert "squashed" not in caplog.text


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (ViTConfig(width=192, heads=3, depth=1, patch_size=14, num_classes=2), "vit_base_patch16_224"),
        (ResNetConfig(num_classes=3, body=dataclasses.replace(V2, width=64)), "resnetv2_50x1_bit"),
        (ResNetConfig(body=dataclasses.replace(V2, width=96, layers=(3, 4, 23, 3))), "resnetv2_101x1_bit"),
        (ResNetConfig(body=dataclasses.replace(V2, width=256, layers=(3, 8, 36, 3))), "resnetv2_152x2_bit"),
    ],
)
def test_the_architecture_has_our_sizes(config: ModelConfig, name: str) -> None:
    card = timm_settings(config, {})
    assert card["architecture"] == name
    with torch.device("meta"):
        theirs = timm.create_model(name, num_classes=config.num_classes, **card["model_args"]).state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in theirs.items()}
    assert shapes == {name: slot.shape for name, slot in timm_layout(config).items()}

"""timm's config.json, read and written; timm itself is the reference."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from peers import check_prepared, photographs
from PIL import Image
from timm.data.config import resolve_data_config
from timm.data.transforms_factory import create_transform
from timm.models import save_for_hf

from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, ViTConfig, build_model
from vitlab.preprocessing import Preprocessing
from vitlab.weights.timm import card_timm, read_timm, timm_layout, write_timm
from vitlab.weights.timm_card import timm_card

CENTER = {"input_size": [3, 224, 224], "interpolation": "bicubic", "crop_pct": 0.9, "crop_mode": "center"}
HALF = (0.5, 0.5, 0.5)
V2 = ResNetBody(version="v2", weight_eps=1e-10, weight_eps_on="variance", group_norm_eps=1e-5)


def write_card(folder: Path, images: dict[str, Any]) -> None:
    card = {"architecture": "vit_tiny_patch16_224", "pretrained_cfg": images}
    (folder / "config.json").write_text(json.dumps(card))


def test_timms_own_card_is_read(tmp_path: Path) -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=1)
    save_for_hf(model, str(tmp_path), model_args={"depth": 1}, safe_serialization=True)
    expected = Preprocessing(224, 248, interpolation="bicubic", mean=HALF, std=HALF)
    assert Preprocessing.read(card_timm(tmp_path), "") == expected
    assert card_timm(tmp_path / "model.safetensors") == {}
    card = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(card | {"label_names": ["a", "b"]}))
    with pytest.raises(ValueError, match=r"config\.json names 2 classes and the model has 1000 outputs"):
        read_timm(tmp_path)


@pytest.mark.parametrize(
    "images",
    [
        CENTER,
        {"num_classes": 3},
        {**CENTER, "interpolation": "bilinear", "crop_pct": 0.875},
        {**CENTER, "interpolation": "lanczos", "crop_pct": 0.95},
        {**CENTER, "crop_pct": 1.0},
        {**CENTER, "crop_mode": "squash", "crop_pct": 1.0},
        {**CENTER, "crop_mode": "squash", "crop_pct": 0.9},
        {**CENTER, "test_input_size": [3, 256, 256], "test_crop_pct": 0.95},
    ],
)
def test_images_are_prepared_as_by_timm(tmp_path: Path, shared: Path, images: dict[str, Any]) -> None:
    write_card(tmp_path, {**images, "mean": [0] * 3, "std": [1] * 3})
    settings = resolve_data_config(pretrained_cfg=images, use_test_size=True)
    transform: Any = create_transform(**settings | {"mean": (0, 0, 0), "std": (1, 1, 1)})
    inputs = photographs(shared)
    check_prepared(card_timm(tmp_path), inputs, [transform(Image.fromarray(image)) for image in inputs])


def test_an_unsupported_crop_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_card(tmp_path, {**CENTER, "crop_mode": "border"})
    assert card_timm(tmp_path)["preprocessing"]["resize"] is None
    assert "squashed to size: crop_mode='border'" in caplog.text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "cannot be read"),
        ("[]", "JSON object"),
        ('{"model_type": "vit"}', "not a config.json of timm.*architecture"),
        ('{"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {"mean": 3}}', "not a config.json of timm"),
    ],
)
def test_an_invalid_card_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=problem):
        read_timm(tmp_path)


# --- writing -----------------------------------------------------------------------------------------------------


def test_the_width_of_the_mlp_survives_timms_rounding() -> None:
    for width, mlp_dim in ((56, 488), (16, 23), (1152, 4304), (832, 2176)):
        card = timm_card(ViTConfig(width=width, heads=8, mlp_dim=mlp_dim), {}, "")
        assert int(width * card["model_args"]["mlp_ratio"]) == mlp_dim


@pytest.mark.parametrize(("resize", "first"), [(19, (19, 19)), (None, (16, 16))])
def test_classes_and_preprocessing_are_written(tmp_path: Path, resize: int | None, first: Any) -> None:
    config = ViTConfig(image_size=16, patch_size=8, width=16, depth=1, heads=4, mlp_dim=8, num_classes=5)
    extra = {"classes": ["a", "b", "ç", "d", "e"], "eval_resize": resize, "source": "digits"}
    write_timm(build_model(config), tmp_path, extra)
    theirs: Any = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert theirs.pretrained_cfg["label_names"] == extra["classes"]
    transform: Any = create_transform(**resolve_data_config(model=theirs))
    size = transform.transforms[0].size
    assert (size if isinstance(size, tuple) else (size, size)) == first
    prepared = Preprocessing(16, resize, mean=HALF, std=HALF, keep_aspect=bool(resize))
    card = card_timm(tmp_path)
    assert card["classes"] == extra["classes"]
    assert Preprocessing.read(card, "").describe() == prepared.describe()


def test_every_resize_is_read_back(tmp_path: Path) -> None:
    for side in (16, 224, 384):
        for resize in range(384, 700, 7):
            (tmp_path / "config.json").write_text(
                json.dumps(timm_card(ViTConfig(image_size=side, patch_size=8), {"eval_resize": resize}, ""))
            )
            assert card_timm(tmp_path)["preprocessing"]["resize"] == resize


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (ViTConfig(width=192, heads=3, depth=1), "vit_tiny_patch16_224"),
        (ViTConfig(width=1280, heads=16, depth=1, mlp_dim=64, patch_size=14, num_classes=2), "vit_huge_patch14_224"),
        (ViTConfig(width=64, heads=1, depth=1, patch_size=14), "vit_base_patch16_224"),
        (ResNetConfig(num_classes=3, body=V2), "resnetv2_50x1_bit"),
        (ResNetConfig(body=dataclasses.replace(V2, width=96, layers=(3, 4, 23, 3))), "resnetv2_101x1_bit"),
        (ResNetConfig(body=dataclasses.replace(V2, width=256, layers=(3, 8, 36, 3))), "resnetv2_152x4_bit"),
        (ResNetConfig(body=dataclasses.replace(V2, width=32, layers=(3, 8, 36, 3))), "resnetv2_152x2_bit"),
    ],
)
def test_the_nearest_architecture_has_our_sizes(config: ModelConfig, name: str) -> None:
    card = timm_card(config, {}, "")
    assert card["architecture"] == name
    with torch.device("meta"):
        theirs = timm.create_model(name, num_classes=config.num_classes, **card["model_args"]).state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in theirs.items()}
    assert shapes == {name: slot.shape for name, slot in timm_layout(config).items()}

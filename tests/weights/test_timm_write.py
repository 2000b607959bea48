"""Models at a shrunken size, written for timm; timm itself is the judge."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from peers import check_timm, faint, loaded, stirred
from safetensors.torch import load_file
from timm.data.config import resolve_data_config
from timm.data.transforms_factory import create_transform

from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, ViTConfig, build_model
from vitlab.models.vit import Model, ViT
from vitlab.preprocessing import Preprocessing
from vitlab.weights.timm import card_timm, read_timm
from vitlab.weights.timm_names import timm_layout
from vitlab.weights.timm_write import timm_card, write_timm

VIT: dict[str, Any] = {
    "image_size": (16, 24), "patch_size": 8, "width": 16, "depth": 2, "heads": 4, "mlp_dim": 23, "num_classes": 5,
}  # fmt: skip
STEM: dict[str, Any] = {"weight_eps": 1e-8, "weight_eps_on": "variance", "group_norm_eps": 1e-5}
V2 = ResNetBody(width=32, version="v2", weight_eps=1e-10, weight_eps_on="variance", group_norm_eps=1e-5)

WRITABLE: dict[str, ModelConfig] = {
    "token": ViTConfig(**VIT),
    "no head": ViTConfig(**{**VIT, "num_classes": 0}),
    "gap": ViTConfig(**VIT, pool="gap", gelu="erf"),
    "map": ViTConfig(**VIT, pool="map"),
    "map, registers": ViTConfig(**VIT, pool="map", registers=2),
    "registers": ViTConfig(**VIT, registers=3, layer_scale=0.1),
    "registers without class token": ViTConfig(**VIT, registers=3, pool="gap"),
    "class token without row": ViTConfig(**VIT, class_position=False),
    "none": ViTConfig(**VIT, position="none", position_at="shared"),
    "2d": ViTConfig(**VIT, position="2d", registers=1),
    "sincos2d": ViTConfig(**VIT, position="sincos2d"),
    "distilled": ViTConfig(**VIT, distilled=True, layer_scale=0.1),
    "distilled without row": ViTConfig(**VIT, distilled=True, class_position=False),
    "distilled without positions": ViTConfig(**VIT, distilled=True, position="none"),
    "root": ViTConfig(**{**VIT, "image_size": 64}, stem=ResNetBody((), **STEM)),
    "hybrid": ViTConfig(
        **{**VIT, "image_size": (33, 48), "patch_size": 1}, stem=ResNetBody((3, 4, 9), group_norm_eps=1e-5)
    ),
    "bit": ResNetConfig(image_size=(37, 64), num_classes=0, body=V2),
}


def made(config: ModelConfig) -> Model:
    return stirred(build_model(config))


def from_timm(folder: Path) -> Any:
    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


@pytest.mark.parametrize("config", WRITABLE.values(), ids=WRITABLE)
def test_timm_loads_what_is_written(tmp_path: Path, config: ModelConfig) -> None:
    ours = made(config)
    write_timm(ours, tmp_path / "out", {})
    theirs = from_timm(tmp_path / "out")
    assert (theirs.pretrained_cfg["mean"], theirs.pretrained_cfg["std"]) == ([0.5] * 3, [0.5] * 3)
    check_timm(ours, theirs)
    check_timm(loaded(*read_timm(tmp_path / "out")), theirs)


@pytest.mark.parametrize(("on", "eps"), [("std", 1e-5), ("std", 1e-4), ("variance", 1e-10), ("variance", 1e-8)])
def test_weights_are_scaled_for_timm_s_eps(tmp_path: Path, on: Any, eps: float) -> None:
    stem = ResNetBody((), weight_eps=eps, weight_eps_on=on, group_norm_eps=1e-5)
    ours = faint(made(ViTConfig(**{**VIT, "image_size": 64}, stem=stem)))
    write_timm(ours, tmp_path / "out", {})
    check_timm(ours, from_timm(tmp_path / "out"))


def test_the_mlp_s_width_survives_timm_s_rounding() -> None:
    for width, mlp_dim in ((56, 488), (16, 23), (1152, 4304), (832, 2176)):
        card = timm_card(ViTConfig(width=width, heads=8, mlp_dim=mlp_dim), {})
        assert int(width * card["model_args"]["mlp_ratio"]) == mlp_dim


def test_a_plain_model_comes_back_to_the_bit(tmp_path: Path) -> None:
    model = made(ViTConfig(**VIT)).bfloat16()
    write_timm(model, tmp_path / "out", {})
    config, state = read_timm(tmp_path / "out")
    assert dataclasses.replace(config, position_interpolation=None) == model.config
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("resize", "first"), [(19, (19, 19)), (None, (16, 16))])
def test_the_card_names_classes_and_the_test_images_size(tmp_path: Path, resize: int | None, first: Any) -> None:
    extra = {"classes": ["a", "b", "ç", "d", "e"], "eval_resize": resize, "source": "digits"}
    write_timm(made(ViTConfig(**{**VIT, "image_size": 16})), tmp_path / "out", extra)
    theirs = from_timm(tmp_path / "out")
    assert theirs.pretrained_cfg["label_names"] == extra["classes"]
    transform: Any = create_transform(**resolve_data_config(model=theirs))
    size = transform.transforms[0].size
    assert (size if isinstance(size, tuple) else (size, size)) == first
    half = (0.5, 0.5, 0.5)  # Google's own ways of resizing have no name there
    prepared = Preprocessing(16, resize, mean=half, std=half, keep_aspect=bool(resize))
    read = card_timm(tmp_path / "out")
    assert read["classes"] == extra["classes"]
    assert Preprocessing.read(read, "").describe() == prepared.describe()


def test_every_size_of_test_images_comes_back(tmp_path: Path) -> None:
    for side in (16, 224, 384):
        for resize in range(384, 700, 7):
            card = timm_card(ViTConfig(**{**VIT, "image_size": side}), {"eval_resize": resize})
            (tmp_path / "config.json").write_text(json.dumps(card))
            assert card_timm(tmp_path)["preprocessing"]["resize"] == resize


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (ViTConfig(width=192, heads=3, depth=1), "vit_tiny_patch16_224"),
        (ViTConfig(width=1280, heads=16, depth=1, mlp_dim=64, patch_size=14, num_classes=2), "vit_huge_patch14_224"),
        (ViTConfig(width=64, heads=1, depth=1, patch_size=14), "vit_base_patch16_224"),
        (ResNetConfig(num_classes=3, body=dataclasses.replace(V2, width=64)), "resnetv2_50x1_bit"),
        (ResNetConfig(body=dataclasses.replace(V2, width=96, layers=(3, 4, 23, 3))), "resnetv2_101x1_bit"),
        (ResNetConfig(body=dataclasses.replace(V2, width=256, layers=(3, 8, 36, 3))), "resnetv2_152x4_bit"),
        (ResNetConfig(body=dataclasses.replace(V2, width=32, layers=(3, 8, 36, 3))), "resnetv2_152x2_bit"),
    ],
)
def test_the_nearest_architecture_is_named_and_has_our_sizes(config: ModelConfig, name: str) -> None:
    card = timm_card(config, {})
    assert card["architecture"] == name
    with torch.device("meta"):
        theirs = timm.create_model(name, num_classes=config.num_classes, **card["model_args"]).state_dict()
    expected = {name: slot.shape for name, slot in timm_layout(config).items()}
    assert {name: tuple(tensor.shape) for name, tensor in theirs.items()} == expected


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (ViTConfig(**VIT, representation_size=8), "representation_size=8, which timm cannot say"),
        (ViTConfig(**VIT, encoder="axial"), "encoder='axial'"),
        (ViTConfig(**VIT, position="relative", position_at="every"), "position='relative'"),
        (ViTConfig(**VIT, position_at="every"), "position_at='every', which timm cannot say: its models have 'stem'"),
        (ViTConfig(**VIT, pool="token+gap"), r"pool='token\+gap'"),
        (
            ViTConfig(**VIT, layer_norm_eps=1e-5),
            "layer_norm_eps=1e-05, which timm cannot say: its models have 1e-06\\.",
        ),
        (ViTConfig(**VIT, distilled=True, registers=1), "registers=1"),
        (ViTConfig(**{**VIT, "image_size": 64}, stem=ResNetBody((), 32, **STEM)), "width=32.*have 64"),
        (ViTConfig(**{**VIT, "image_size": 64}, stem=ResNetBody(())), "group_norm_eps=1e-06.*have 1e-05"),
        (ViTConfig(**{**VIT, "image_size": 64}, stem=ResNetBody((1, 1), **STEM)), r"layers=\(1, 1\)"),
        (ResNetConfig(body=ResNetBody(width=32)), "version='v1'.*have 'v2'"),
        (ResNetConfig(body=dataclasses.replace(V2, mixing="axial")), "mixing='axial'"),
        (ResNetConfig(body=dataclasses.replace(V2, pool_padding="-inf")), "pool_padding='-inf'"),
        (ResNetConfig(body=dataclasses.replace(V2, weight_eps=0.0)), r"weight_eps=0\.0.*have 1e-08"),
    ],
)
def test_what_timm_cannot_say_is_refused_by_name(tmp_path: Path, config: ModelConfig, said: str) -> None:
    with torch.device("meta"):
        model = build_model(config)
    with pytest.raises(ValueError, match=said):
        write_timm(model, tmp_path / "out", {})
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"already holds notes\.txt"):
        write_timm(tiny(), tmp_path, {})
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    for _ in range(2):  # a model that stands there is replaced
        write_timm(tiny(), tmp_path / "out", {})
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == timm_layout(tiny().config).keys()
    with pytest.raises(ValueError, match="names 2 classes"):
        write_timm(tiny(), tmp_path / "out", {"classes": ["a", "b"]})

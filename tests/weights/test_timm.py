"""timm's models at a shrunken size, read and written; timm itself is the reference."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from peers import (
    HYBRID,
    OBLONG,
    TIMM_BIT,
    VIT_ARGS,
    bare,
    check_equal,
    check_timm,
    faint,
    images,
    loaded,
    made,
    normalized,
    saved,
    stirred,
)
from safetensors.torch import save_file
from states import same
from torch import nn

from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, ViTConfig, build_model
from vitlab.models.vit import ViT
from vitlab.weights import load_checkpoint, load_model, save_model
from vitlab.weights.layout import parameter_shapes
from vitlab.weights.timm import read_timm, timm_layout, write_timm

FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # timm's architecture, its arguments, and entries of our configuration
    "augreg": ("vit_tiny_patch16_224", OBLONG, {"pool": "token", "gelu": "erf", "image_size": (16, 24)}),
    "no head": ("vit_base_patch16_224", {**OBLONG, "num_classes": 0}, {"num_classes": 0}),
    "gap": ("vit_base_patch16_gap_224", {**OBLONG, "num_heads": 16}, {"pool": "gap", "heads": 16}),
    "no qkv bias": ("vit_medium_patch16_gap_240", OBLONG, {"pool": "gap"}),
    "flexivit": ("flexivit_small", OBLONG, {"class_position": False}),
    "no positions": ("vit_tiny_patch16_224", {**OBLONG, "pos_embed": "none"}, {"position": "none"}),
    "siglip": ("vit_base_patch16_siglip_224", OBLONG, {"pool": "map", "gelu": "erf"}),
    "siglip tanh": ("vit_so400m_patch16_siglip_256", {**OBLONG, "num_classes": 0}, {"pool": "map", "gelu": "tanh"}),
    "registers with rows": ("vit_so150m_patch16_reg4_gap_256", OBLONG, {"pool": "gap", "registers": 4}),
    "class token and registers with rows": (
        "vit_small_patch14_reg4_dinov2",
        {**OBLONG, "no_embed_class": False},
        {"registers": 4, "class_position": True},
    ),
    "registers in map": (
        "vit_so150m_patch16_reg4_map_256",
        {**OBLONG, "pool_include_prefix": True},
        {"pool": "map", "registers": 4},
    ),
    "act_layer": ("vit_tiny_patch16_224", {**OBLONG, "act_layer": "gelu_tanh"}, {"gelu": "tanh"}),
    "deit distilled": ("deit_tiny_distilled_patch16_224", OBLONG, {"distilled": True}),
    "deit3": ("deit3_small_patch16_224", OBLONG, {"class_position": False, "layer_scale": 1e-5}),
    "dinov2": ("vit_small_patch14_dinov2", {**VIT_ARGS, "patch_size": 2, "img_size": 74}, {"layer_scale": 1e-5}),
    "dinov2 registers": ("vit_small_patch14_reg4_dinov2", OBLONG, {"registers": 4, "class_position": False}),
    "hybrid root": ("vit_tiny_r_s16_p8_224", {**HYBRID, "patch_size": 8}, {"patch_size": 8}),
    "hybrid": ("vit_base_r50_s16_384", {**HYBRID, "img_size": (32, 48)}, {"image_size": (32, 48)}),
    "bit": (
        "resnetv2_50x1_bit",
        {**TIMM_BIT, "pretrained_cfg_overlay": {"input_size": (3, 37, 64)}},
        {"image_size": (37, 64)},
    ),
}


# --- reading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_are_those_of_timm(tmp_path: Path, family: str) -> None:
    name, args, expected = FAMILIES[family]
    theirs = made(name, **args)
    ours = loaded(*read_timm(saved(theirs, tmp_path, args)))
    assert {key: getattr(ours.config, key) for key in expected} == expected
    check_timm(ours, theirs)


def test_weights_are_standardized_with_timms_eps(tmp_path: Path) -> None:
    args = {**HYBRID, "patch_size": 8}
    theirs = faint(made("vit_tiny_r_s16_p8_224", **args))
    check_timm(loaded(*read_timm(saved(theirs, tmp_path, args))), theirs)


@pytest.mark.parametrize(("mean", "std"), [((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), ((0, 0, 0), (1, 1, 1))])
def test_another_normalization_is_folded(tmp_path: Path, mean: Any, std: Any) -> None:
    theirs = made("vit_tiny_patch16_224", **OBLONG)
    theirs.pretrained_cfg |= {"mean": mean, "std": std}
    check_timm(loaded(*read_timm(saved(theirs, tmp_path, OBLONG))), theirs)


def test_another_normalization_of_a_stem_is_refused(tmp_path: Path) -> None:
    args = {**HYBRID, "patch_size": 8}
    theirs = made("vit_tiny_r_s16_p8_224", **args)
    theirs.pretrained_cfg |= {"mean": (0.485, 0.456, 0.406)}
    with pytest.raises(ValueError, match=r"0\.485.*Only mean and std of 0\.5"):
        read_timm(saved(theirs, tmp_path, args))


@pytest.mark.parametrize(("width", "heads"), [(192, 3), (384, 6), (1280, 16)])
def test_a_bare_file_has_the_usual_heads_and_normalization(tmp_path: Path, width: int, heads: int) -> None:
    args = {"patch_size": 2, "img_size": 6, "num_classes": 3, "depth": 1, "mlp_ratio": 0.05}
    theirs = made("vit_base_patch16_224", embed_dim=width, num_heads=heads, **args)
    ours = loaded(*read_timm(bare(theirs, tmp_path / "vit.safetensors")))
    assert ours.config.image_size == 6
    check_timm(ours, theirs)


def test_a_bare_resnet_is_for_224_pixels(tmp_path: Path) -> None:
    with torch.device("meta"):
        theirs = timm.create_model("resnetv2_50x1_bit", **{**TIMM_BIT, "num_classes": 0}).to_empty(device="cpu")
    config, _ = read_timm(bare(theirs, tmp_path / "bit.safetensors"))
    assert isinstance(config, ResNetConfig)
    assert (config.image_size, config.num_classes) == (224, 0)
    assert (config.body.layers, config.body.width) == ((3, 4, 6, 3), 32)


@pytest.mark.parametrize("registers", [0, 4])
def test_dinov2s_own_file_is_read_as_by_timm(tmp_path: Path, registers: int) -> None:
    """With a mask token, a row for the class token beside registers, and ImageNet's normalization."""
    args: dict[str, Any] = {
        "patch_size": 2,
        "img_size": 74,
        "embed_dim": 192,
        "num_heads": 3,
        "depth": 1,
        "mlp_ratio": 1,
    }
    name = "vit_small_patch14_reg4_dinov2" if registers else "vit_small_patch14_dinov2"
    state = made(name, **args).state_dict()
    state["mask_token"] = torch.randn(1, 192)
    if registers:
        state["register_tokens"] = state.pop("reg_token")
        state["pos_embed"] = torch.randn(1, 1 + 37 * 37, 192)
    save_file(state, tmp_path / "dinov2.safetensors")
    overlay: Any = {"file": str(tmp_path / "dinov2.safetensors")}
    theirs = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **args)
    ours = loaded(*read_timm(tmp_path / "dinov2.safetensors"))
    assert isinstance(ours.config, ViTConfig)
    assert (ours.config.registers, ours.config.class_position) == (registers, True)
    check_timm(ours, theirs.eval())


def test_the_hidden_layer_of_old_files(tmp_path: Path) -> None:
    theirs, hidden = made("vit_tiny_patch16_224", **OBLONG), stirred(nn.Linear(32, 32))
    folder = saved(theirs, tmp_path, OBLONG)
    old = {"pre_logits.fc.weight": hidden.weight.detach(), "pre_logits.fc.bias": hidden.bias.detach()}
    bare(theirs, folder / "model.safetensors", **old)
    ours = loaded(*read_timm(folder))
    inputs, cfg = images(ours.config.image_size), theirs.pretrained_cfg
    features = theirs.forward_features(normalized(inputs, cfg["mean"], cfg["std"]))
    expected = theirs.head(torch.tanh(hidden(theirs.forward_head(features, pre_logits=True))))
    torch.testing.assert_close(ours(inputs), expected, rtol=1e-4, atol=1e-4)


def test_older_cards_and_half_precision(tmp_path: Path) -> None:
    theirs = made("vit_tiny_patch16_224", **OBLONG)
    folder = saved(theirs, tmp_path, OBLONG)
    card = json.loads((folder / "config.json").read_text())
    flat = {**card.pop("pretrained_cfg"), **card, "input_size": [3, 16, 24]}
    (folder / "config.json").write_text(json.dumps(flat))
    check_timm(loaded(*read_timm(folder)), theirs)
    _, state = read_timm(saved(theirs.bfloat16(), tmp_path / "half", OBLONG))
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("vit_tiny_patch16_224", 224, 448),
        ("vit_small_patch14_reg4_dinov2", 518, 224),
        ("vit_base_patch16_siglip_224", 224, (160, 320)),
    ],
)
@torch.no_grad()
def test_positions_are_interpolated_as_by_timm(tmp_path: Path, name: str, old: int, new: Any) -> None:
    """Google's way is off by 0.01 and more."""
    args: dict[str, Any] = {"embed_dim": 64, "num_heads": 4, "depth": 1, "img_size": old}
    theirs: Any = timm.create_model(name, **args).eval()
    theirs.pos_embed.normal_()
    folder = saved(theirs, tmp_path, args)
    theirs.set_input_size(img_size=new)
    inputs, cfg = images(new), theirs.pretrained_cfg
    tokens = theirs.forward_features(normalized(inputs, cfg["mean"], cfg["std"]))
    ours = load_model(folder, image_size=new)
    check_equal(ours.forward_features(inputs), tokens)
    save_model(ours, tmp_path / "fine-tuned")
    config = load_model(tmp_path / "fine-tuned").config
    assert config.position_interpolation == "bicubic_antialias"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AssertionError):
        check_equal(load_model(folder, image_size=new, interpolation="corners").forward_features(inputs), tokens, 0.01)


@pytest.mark.parametrize(
    ("name", "width", "gelu"),
    [
        ("vit_so400m_patch16_siglip_256", 1152, "tanh"),
        ("vit_base_patch32_siglip_256", 768, "tanh"),
        ("vit_large_patch16_siglip_512", 1024, "tanh"),
        ("vit_large_patch16_siglip_256", 1024, "erf"),
        ("vit_base_patch16_siglip_224", 768, "erf"),
    ],
)
def test_gelu_of_a_bare_siglip(tmp_path: Path, name: str, width: int, gelu: str) -> None:
    heads = min(width // 64, 16)
    theirs = timm.create_model(name, embed_dim=width, num_heads=heads, depth=1, mlp_ratio=0.1, num_classes=0)
    config, _ = read_timm(bare(theirs, tmp_path / "vit.safetensors"))
    assert config.gelu == gelu  # pyright: ignore[reportAttributeAccessIssue]


def test_pixels_that_no_patch_covers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """timm's patches leave the last 6 of 384 pixels out."""
    args: dict[str, Any] = {"embed_dim": 32, "num_heads": 4, "depth": 1}
    folder = saved(timm.create_model("vit_so400m_patch14_siglip_384", **args), tmp_path, args)
    checkpoint = load_checkpoint(folder)
    assert (checkpoint.model.config.image_size, checkpoint.preprocessing.image_size) == (378, 378)
    assert "384x384" in caplog.text
    assert "378x378" in caplog.text


# --- layout and writing ------------------------------------------------------------------------------------------

VIT: dict[str, Any] = {
    "image_size": (16, 24),
    "patch_size": 8,
    "width": 16,
    "depth": 2,
    "heads": 4,
    "mlp_dim": 23,
    "num_classes": 5,
}
SQUARE = {**VIT, "image_size": 64}
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
    "root": ViTConfig(**SQUARE, stem=ResNetBody((), **STEM)),
    "hybrid": ViTConfig(
        **{**VIT, "image_size": (33, 48), "patch_size": 1}, stem=ResNetBody((3, 4, 9), group_norm_eps=1e-5)
    ),
    "bit": ResNetConfig(image_size=(37, 64), num_classes=0, body=V2),
    "bit with a head": ResNetConfig(image_size=(37, 64), num_classes=5, body=V2),
}


def from_timm(folder: Path) -> Any:
    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


@pytest.mark.parametrize("kind", WRITABLE)
def test_timm_loads_what_is_written(tmp_path: Path, kind: str) -> None:
    ours = stirred(build_model(WRITABLE[kind]))
    write_timm(ours, tmp_path, {})
    theirs = from_timm(tmp_path)
    assert (theirs.pretrained_cfg["mean"], theirs.pretrained_cfg["std"]) == ([0.5] * 3, [0.5] * 3)
    check_timm(ours, theirs)
    config, state = read_timm(tmp_path)
    check_timm(loaded(config, state), theirs)
    layout, sizes = timm_layout(config), dict.fromkeys(state, 0)
    assert layout.keys() == theirs.state_dict().keys()
    for slot in layout.values():
        sizes[slot.ours] += math.prod(slot.shape)
    assert sizes == {name: math.prod(shape) for name, shape in parameter_shapes(config).items()}


@pytest.mark.parametrize(("on", "eps"), [("std", 1e-5), ("std", 1e-4), ("variance", 1e-10), ("variance", 1e-8)])
def test_weights_are_scaled_for_timms_eps(tmp_path: Path, on: Any, eps: float) -> None:
    stem = ResNetBody((), weight_eps=eps, weight_eps_on=on, group_norm_eps=1e-5)
    ours = faint(stirred(build_model(ViTConfig(**SQUARE, stem=stem))))
    write_timm(ours, tmp_path, {})
    check_timm(ours, from_timm(tmp_path))


def test_a_plain_model_is_read_back_bit_equal(tmp_path: Path) -> None:
    model = stirred(build_model(ViTConfig(**VIT))).bfloat16()
    write_timm(model, tmp_path, {})
    config, state = read_timm(tmp_path)
    assert dataclasses.replace(config, position_interpolation=None) == model.config
    assert same(state, model)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (ViTConfig(**VIT, representation_size=8), "representation_size=8, which timm cannot represent"),
        (ViTConfig(**VIT, encoder="axial"), "encoder='axial'"),
        (ViTConfig(**VIT, position="relative", position_at="every"), "position='relative'"),
        (ViTConfig(**VIT, position_at="every"), "position_at='every'.*has 'stem'"),
        (ViTConfig(**VIT, pool="token+gap"), r"pool='token\+gap'"),
        (ViTConfig(**VIT, layer_norm_eps=1e-5), "layer_norm_eps=1e-05"),
        (ViTConfig(**VIT, distilled=True, registers=1), "registers=1"),
        (ViTConfig(**SQUARE, stem=ResNetBody((), 32, **STEM)), "stem.width=32.*has 64"),
        (ViTConfig(**SQUARE, stem=ResNetBody(())), "group_norm_eps=1e-06.*has 1e-05"),
        (ViTConfig(**SQUARE, stem=ResNetBody((1, 1), **STEM)), r"layers=\(1, 1\)"),
        (ResNetConfig(body=ResNetBody(width=32)), "version='v1'.*has 'v2'"),
        (ResNetConfig(body=dataclasses.replace(V2, mixing="axial")), "mixing='axial'"),
        (ResNetConfig(body=dataclasses.replace(V2, pool_padding="-inf")), "pool_padding='-inf'"),
        (ResNetConfig(body=dataclasses.replace(V2, weight_eps=0.0)), r"weight_eps=0\.0"),
    ],
)
def test_unsupported_settings_are_not_written(tmp_path: Path, config: ModelConfig, problem: str) -> None:
    with torch.device("meta"):
        model = build_model(config)
    with pytest.raises(ValueError, match=problem):
        write_timm(model, tmp_path / "out", {})
    assert not (tmp_path / "out").exists()


def test_only_a_model_is_replaced(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"already holds notes\.txt"):
        write_timm(tiny(), tmp_path, {})
    for _ in range(2):
        write_timm(tiny(), tmp_path / "out", {})
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    with pytest.raises(ValueError, match="names 2 classes"):
        write_timm(tiny(), tmp_path / "out", {"classes": ["a", "b"]})

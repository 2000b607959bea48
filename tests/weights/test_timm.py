"""timm's models at a shrunken size, read and written; timm itself is the reference."""

import dataclasses
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
    create_timm,
    images,
    loaded,
    noisy,
    normalized,
    save_timm,
    shrink_convolutions,
)
from states import same
from timm.data.config import resolve_data_config
from timm.data.transforms_factory import create_transform

from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, Rotary, ViTConfig
from vitlab.models.variant import all_settings, override
from vitlab.models.vit import build_model
from vitlab.preprocessing import Preprocessing
from vitlab.weights import load_model
from vitlab.weights.timm import metadata_timm, read_timm, write_timm
from vitlab.weights.timm_arguments import is_eva
from vitlab.weights.timm_layout import timm_layout

EVA02 = Rotary(1e4, "index", (16, 16))
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # timm's architecture, its arguments, and entries of our configuration
    "augreg": ("vit_tiny_patch16_224", OBLONG, {"pool": "token", "gelu": "erf", "image_size": (16, 24)}),
    "no qkv bias": ("vit_medium_patch16_gap_240", OBLONG, {"pool": "gap"}),
    "flexivit": ("flexivit_small", OBLONG, {"class_position": False}),
    "no positions": ("vit_tiny_patch16_224", {**OBLONG, "pos_embed": "none"}, {"position": "none"}),
    "siglip": ("vit_base_patch16_siglip_224", OBLONG, {"pool": "map", "gelu": "erf"}),
    "siglip tanh": ("vit_so400m_patch16_siglip_256", {**OBLONG, "num_classes": 0}, {"pool": "map", "gelu": "tanh"}),
    "registers with rows": ("vit_so150m_patch16_reg4_gap_256", OBLONG, {"pool": "gap", "registers": 4}),
    "all with rows": ("vit_small_patch14_reg4_dinov2", {**OBLONG, "no_embed_class": False}, {"class_position": True}),
    "map": ("vit_so150m_patch16_reg4_map_256", {**OBLONG, "pool_include_prefix": True}, {"pool": "map"}),
    "mean and its norm": ("vit_little_patch16_reg4_gap_256", OBLONG, {"final_norm": "mean", "registers": 4}),
    "mean beside a class token": (
        "vit_base_patch16_224",
        {**OBLONG, "global_pool": "avg"},
        {"pool": "gap", "final_norm": "mean", "registers": 1},
    ),
    "mean beside class token and registers": (
        "vit_small_patch14_reg4_dinov2",
        {**OBLONG, "global_pool": "avg", "fc_norm": False},
        {"pool": "gap", "final_norm": "tokens", "registers": 5},
    ),
    "clip": ("vit_base_patch16_clip_224", OBLONG, {"pre_norm": True, "gelu": "erf", "layer_norm_eps": 1e-5}),
    "clip of openai": ("vit_large_patch14_clip_quickgelu_224", OBLONG, {"pre_norm": True, "gelu": "quick"}),
    "act_layer": ("vit_tiny_patch16_224", {**OBLONG, "act_layer": "gelu_tanh"}, {"gelu": "tanh"}),
    "deit distilled": ("deit_tiny_distilled_patch16_224", OBLONG, {"distilled": True}),
    "deit3": ("deit3_small_patch16_224", OBLONG, {"class_position": False, "layer_scale": 1e-5}),
    "dinov2": ("vit_small_patch14_dinov2", {**VIT_ARGS, "patch_size": 2, "img_size": 74}, {"layer_scale": 1e-5}),
    "dinov2 giant": ("vit_giant_patch14_reg4_dinov2", {**OBLONG, "mlp_ratio": 2.0}, {"swiglu": True, "mlp_dim": 32}),
    "dinov3": ("vit_small_patch16_dinov3", OBLONG, {"position": "none", "rotary": Rotary(), "registers": 5}),
    "dinov3, class token": (
        "vit_base_patch16_dinov3_qkvb",
        {**OBLONG, "global_pool": "token"},
        {"rotary": Rotary(), "pool": "token", "registers": 4, "layer_norm_eps": 1e-5},
    ),
    "dinov3, swiglu": ("vit_huge_plus_patch16_dinov3", {**OBLONG, "mlp_ratio": 2.0}, {"swiglu": True}),
    "lingbot": ("vit_giant_patch16_lingbot", {**OBLONG, "num_heads": 2}, {"rotary": Rotary()}),
    "eva02": ("eva02_tiny_patch14_224", OBLONG, {"position": "1d", "swiglu": True, "rotary": EVA02}),
    "eva02 base": ("eva02_base_patch14_224", OBLONG, {"mlp_norm": True, "rotary": EVA02}),
    "eva02 clip": ("eva02_large_patch14_clip_336", OBLONG, {"attention_norm": True, "rotary": EVA02, "pool": "token"}),
    "beit3": ("beit3_base_patch16_224", OBLONG, {"attention_norm": True, "mlp_norm": True, "layer_norm_eps": 1e-5}),
    "rope": ("vit_medium_patch16_rope_reg1_gap_256", OBLONG, {"position": "none", "rotary": EVA02}),
    "rope, columns first": ("vit_small_patch16_rope_ape_224", OBLONG, {"rotary": Rotary(100.0, "index")}),
    "pe core": (
        "vit_pe_core_base_patch16_224",
        {**OBLONG, "embed_dim": 64, "mlp_ratio": 4.0},
        {"pool": "map", "map_heads": 8, "registers": 1, "rotary": Rotary(1e4, "index", (14, 14), 1.0)},
    ),
    "pe spatial": (
        "vit_pe_spatial_small_patch16_512",
        OBLONG,
        {"final_norm": "none", "pre_norm": True, "rotary": Rotary(1e4, "index", (32, 32), 1.0)},
    ),
    "radio": ("vit_base_patch16_radio_v3", {**OBLONG, "num_classes": 0}, {"final_norm": "none", "registers": 7}),
    "eva": ("eva_giant_patch14_224", OBLONG, {"pool": "gap", "final_norm": "mean", "registers": 1}),
    "hybrid root": ("vit_tiny_r_s16_p8_224", {**HYBRID, "patch_size": 8}, {"patch_size": 8}),
    "hybrid": ("vit_base_r50_s16_384", {**HYBRID, "img_size": (32, 48)}, {"image_size": (32, 48)}),
    "bit": ("resnetv2_50x1_bit", TIMM_BIT, {"image_size": (37, 64)}),
}


# --- reading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_are_those_of_timm(tmp_path: Path, family: str) -> None:
    name, args, expected = FAMILIES[family]
    theirs = create_timm(name, **args)
    if family == "hybrid root":  # where eps counts in the standardization of weights
        shrink_convolutions(theirs)
    ours = loaded(*read_timm(save_timm(theirs, tmp_path / "theirs", args)))
    assert {key: all_settings(ours.config)[key] for key in expected} == expected
    check_timm(ours, theirs)
    if not family.startswith("hybrid"):  # which are read only
        write_timm(ours, tmp_path / "ours", {})
        check_timm(ours, timm.create_model(f"local-dir:{tmp_path / 'ours'}", pretrained=True).eval())


@pytest.mark.parametrize("channels", [1, 4])
@torch.no_grad()
def test_other_channels_are_adapted_as_by_timm(tmp_path: Path, channels: int) -> None:
    """And written, so that timm loads the filters as they are."""
    folder = save_timm(create_timm("vit_tiny_patch16_224", **OBLONG), tmp_path / "rgb", OBLONG)
    theirs = timm.create_model("local-dir:" + str(folder), pretrained=True, in_chans=channels).eval()
    ours, inputs = load_model(folder, in_chans=channels), torch.rand(2, channels, 16, 24) * 2 - 1
    check_equal(ours(inputs), theirs(inputs))
    write_timm(ours, tmp_path / "ours", {})
    again = timm.create_model("local-dir:" + str(tmp_path / "ours"), pretrained=True).eval()
    check_equal(again(inputs), theirs(inputs))
    check_equal(load_model(tmp_path / "ours")(inputs), theirs(inputs))


@pytest.mark.parametrize("family", ["augreg", "deit distilled", "registers with rows", "dinov3", "eva02"])
def test_images_of_any_size_are_computed_as_by_timm(tmp_path: Path, family: str) -> None:
    name, args, _ = FAMILIES[family]
    args = {**args, "dynamic_img_size": True}
    theirs = create_timm(name, **args)
    ours = loaded(*read_timm(save_timm(theirs, tmp_path / "theirs", args)))
    for size in ((16, 24), (40, 32), (8, 48)):
        inputs, cfg = images(size), theirs.pretrained_cfg
        with torch.no_grad():
            check_equal(ours(inputs), theirs(normalized(inputs, cfg["mean"], cfg["std"])), within=2e-5)
    write_timm(ours, tmp_path / "ours", {})
    assert getattr(read_timm(tmp_path / "ours")[0], "dynamic_image_size")  # noqa: B009


@pytest.mark.parametrize(("mean", "std"), [((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), ((0, 0, 0), (1, 1, 1))])
def test_another_normalization_is_folded(tmp_path: Path, mean: Any, std: Any) -> None:
    theirs = create_timm("vit_tiny_patch16_224", **OBLONG)
    theirs.pretrained_cfg |= {"mean": mean, "std": std}
    check_timm(loaded(*read_timm(save_timm(theirs, tmp_path / "vit", OBLONG))), theirs)
    args = {**HYBRID, "patch_size": 8}
    theirs = create_timm("vit_tiny_r_s16_p8_224", **args)
    theirs.pretrained_cfg |= {"mean": mean, "std": std}
    with pytest.raises(ValueError, match=r"Only mean and std of 0\.5"):
        read_timm(save_timm(theirs, tmp_path / "hybrid", args))


def test_a_folder_of_transformers_timm_wrapper(tmp_path: Path) -> None:
    """A timm model that transformers' Trainer has saved: other tensor names, config.json on one level."""
    from transformers import TimmWrapperConfig, TimmWrapperForImageClassification

    args = {"depth": 2, "img_size": 32}
    settings = {"architecture": "vit_tiny_patch16_224", "model_args": args, "num_classes": 5}
    pretrained_cfg = {"input_size": [3, 32, 32], "mean": [0.5] * 3, "std": [0.25] * 3}
    config = TimmWrapperConfig.from_dict(settings | {"pretrained_cfg": pretrained_cfg})
    theirs = noisy(TimmWrapperForImageClassification(config))
    theirs.save_pretrained(tmp_path)
    inputs = images(32).double()  # in float32 such large pixels are rounded by 1.4e-5 on some processors
    with torch.inference_mode():
        expected = theirs.double()(normalized(inputs, [0.5] * 3, [0.25] * 3)).logits
        check_equal(load_model(tmp_path).double()(inputs), expected)
    assert metadata_timm(tmp_path)["classes"] == [f"LABEL_{number}" for number in range(5)]


def test_the_hidden_layer_of_old_files(tmp_path: Path) -> None:
    """pre_logits.fc of timm before 0.6."""
    theirs, hidden = create_timm("vit_tiny_patch16_224", **OBLONG), noisy(torch.nn.Linear(32, 32))
    folder = save_timm(theirs, tmp_path, OBLONG)
    old = {f"pre_logits.fc.{name}": tensor.detach() for name, tensor in hidden.named_parameters()}
    bare(theirs, folder / "model.safetensors", **old)
    ours = loaded(*read_timm(folder))
    inputs, cfg = images(ours.config.image_size), theirs.pretrained_cfg
    features = theirs.forward_features(normalized(inputs, cfg["mean"], cfg["std"]))
    check_equal(ours(inputs), theirs.head(torch.tanh(hidden(theirs.forward_head(features, pre_logits=True)))))


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
    """Google's method differs by 0.01 and more."""
    args: dict[str, Any] = {"embed_dim": 64, "num_heads": 4, "depth": 1, "img_size": old}
    theirs: Any = timm.create_model(name, **args).eval()
    theirs.pos_embed.normal_()
    folder = save_timm(theirs, tmp_path, args)
    theirs.set_input_size(img_size=new)
    inputs, cfg = images(new), theirs.pretrained_cfg
    tokens = theirs.forward_features(normalized(inputs, cfg["mean"], cfg["std"]))
    ours = load_model(folder, image_size=new)
    check_equal(ours.forward_features(inputs), tokens)
    assert ours.config.variant.position_interpolation == "bicubic_antialias"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AssertionError):
        check_equal(load_model(folder, image_size=new, interpolation="corners").forward_features(inputs), tokens, 0.01)


@torch.no_grad()
@pytest.mark.parametrize("name", ["vit_base_patch16_clip_224", "vit_small_patch14_reg4_dinov2"])
@pytest.mark.parametrize("norm", [True, False])
def test_intermediate_layers_are_those_of_timm(tmp_path: Path, name: str, norm: bool) -> None:
    theirs = create_timm(name, **OBLONG)
    ours = load_model(save_timm(theirs, tmp_path, OBLONG))
    inputs, cfg = images((16, 24)), theirs.pretrained_cfg
    for n in (1, 2, [0]):
        seen = normalized(inputs, cfg["mean"], cfg["std"])
        expected = theirs.get_intermediate_layers(seen, n, reshape=True, norm=norm)
        maps = ours.get_intermediate_layers(inputs, n, reshape=True, norm=norm)  # pyright: ignore
        for mine, other in zip(maps, expected, strict=True):
            check_equal(mine, other)


# --- writing -----------------------------------------------------------------------------------------------------

V2 = ResNetBody(width=32, version="v2", weight_eps=1e-10, weight_eps_on="variance", group_norm_eps=1e-5)


def vit(**settings: Any) -> Any:
    sizes = {"image_size": (16, 24), "patch_size": 8, "width": 16, "depth": 2, "heads": 4, "mlp_dim": 23}
    return override(ViTConfig(), **{**sizes, "num_classes": 5, **settings})


def exact(**settings: Any) -> Any:
    return vit(gelu="erf", **settings)


WRITABLE: dict[str, ModelConfig] = {
    "token": vit(),
    "map, registers": vit(pool="map", registers=2),
    "registers": vit(registers=3, layer_scale=0.1),
    "gap and its norm": exact(pool="gap", final_norm="mean", layer_norm_eps=1e-5, registers=1),
    "clip": vit(pre_norm=True, gelu="quick", layer_norm_eps=1e-5),
    "clip's norm without its eps": vit(pre_norm=True, position="none"),
    "class token without row": vit(class_position=False),
    "none": vit(position="none", position_at="shared", num_classes=0),
    "2d": vit(position="2d", registers=1),
    "sincos2d": vit(position="sincos2d"),
    "distilled": vit(distilled=True, layer_scale=0.1),
    "distilled without positions": vit(distilled=True, position="none"),
    "no last norm": vit(final_norm="none"),
    "rotary and table": exact(rotary=EVA02, position="2d", layer_norm_eps=1e-5),
    "rotary of any kind": exact(position="none", rotary=Rotary(30.0, "index", None, 0.5), pool="gap"),
    "rotary and clip's norm": exact(position="none", rotary=Rotary(), pre_norm=True, registers=2),
    "swiglu and tanh": vit(swiglu=True, layer_scale=0.1),
    "swiglu with a norm": exact(swiglu=True, mlp_norm=True, registers=1),
    "heads of map": exact(pool="map", map_heads=2, registers=1),
    "norms inside, no positions": exact(attention_norm=True, mlp_norm=True, position="none"),
    "rotary, no last norm": exact(rotary=EVA02, final_norm="none"),
    "rotary, norm of the mean": exact(rotary=EVA02, pool="gap", final_norm="mean"),
    "bit": ResNetConfig(image_size=(37, 64), num_classes=0, body=V2),
}


@pytest.mark.parametrize("kind", WRITABLE)
def test_timm_loads_a_written_folder(tmp_path: Path, kind: str) -> None:
    ours = noisy(build_model(WRITABLE[kind]))
    for _ in range(2):  # a model is replaced
        write_timm(ours, tmp_path, {})
    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    settings: Any = theirs.pretrained_cfg
    assert (settings["mean"], settings["std"]) == ([0.5] * 3, [0.5] * 3)
    check_timm(ours, theirs)
    config, state = read_timm(tmp_path)
    check_timm(loaded(config, state), theirs)
    if kind == "token":  # nothing is folded in
        assert same(state, ours)
    if not is_eva(config):  # whose names differ
        assert timm_layout(config).keys() == theirs.state_dict().keys()


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (vit(representation_size=8), "representation_size=8, which timm cannot represent"),
        (vit(encoder="axial"), "encoder='axial'"),
        (vit(position_at="every"), "position_at='every'.*has 'stem'"),
        (vit(distilled=True, registers=1), "registers=1"),
        (vit(rotary=EVA02), "gelu='tanh'"),
        (exact(swiglu=True, distilled=True), "distilled=True"),
        (exact(swiglu=True, pool="map"), "pool='map'.*has 'token' or 'gap'"),
        (exact(swiglu=True, layer_norm_eps=1e-3), "layer_norm_eps=0.001"),
        (vit(image_size=64, stem=ResNetBody(())), "stem=ResNetBody"),
        (ResNetConfig(body=ResNetBody(width=32)), "version='v1'.*has 'v2'"),
        (ResNetConfig(body=dataclasses.replace(V2, layers=(1, 1))), r"layers=\(1, 1\)"),
    ],
)
def test_unsupported_settings_are_not_written(tmp_path: Path, config: ModelConfig, problem: str) -> None:
    with torch.device("meta"):
        model = build_model(config)
    with pytest.raises(ValueError, match=problem):
        write_timm(model, tmp_path / "out", {})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("resize", "first"), [(19, (19, 19)), (None, (16, 16))])
def test_classes_and_preprocessing_are_written(tmp_path: Path, resize: int | None, first: Any) -> None:
    model = build_model(vit(image_size=16))
    labels = {"classes": ["a", "b", "ç", "d", "e"]}
    labels |= {"multi_label": True, "label_thresholds": [0.1, 0.2, 0.3, 0.4, 0.5]} if resize else {}
    write_timm(model, tmp_path, labels | {"preprocessing": Preprocessing.google(16, resize).to_metadata()})
    theirs: Any = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert theirs.pretrained_cfg["label_names"] == labels["classes"]
    transform: Any = create_transform(**resolve_data_config(model=theirs))
    size = transform.transforms[0].size
    assert (size if isinstance(size, tuple) else (size, size)) == first
    prepared = Preprocessing(16, resize, mean=(0.5,) * 3, std=(0.5,) * 3, keep_aspect=bool(resize))
    card = metadata_timm(tmp_path)
    assert card.items() >= labels.items()
    assert Preprocessing.read(card, "").describe() == prepared.describe()
    with pytest.raises(ValueError, match="2 names"):
        write_timm(model, tmp_path, {"classes": ["a", "b"]})


@torch.no_grad()
def test_pixels_that_no_patch_covers_are_written(tmp_path: Path) -> None:
    model = noisy(build_model(vit(image_size=16)))
    prepared = Preprocessing(16, 24, crop_size=19, mean=(0.5,) * 3, std=(0.5,) * 3)
    write_timm(model, tmp_path, {"preprocessing": prepared.to_metadata()})
    assert Preprocessing.read(metadata_timm(tmp_path), "") == prepared
    assert read_timm(tmp_path)[0].image_size == 16
    theirs: Any = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    transform: Any = create_transform(**resolve_data_config(model=theirs))
    assert [step.size for step in transform.transforms[:2]] == [24, (19, 19)]
    inputs = images(19)
    check_equal(model(inputs[..., :16, :16]), theirs.eval()(inputs))

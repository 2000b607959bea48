"""timm's config.json, and models of timm's that are refused; timm itself is the reference."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
from peers import OBLONG, bare, check_prepared, create_timm, photographs, save_timm
from PIL import Image
from timm.data.config import resolve_data_config
from timm.data.transforms_factory import create_transform

from vitlab.preprocessing import Preprocessing
from vitlab.weights.timm import metadata_timm, read_timm

CENTER = {"input_size": [3, 224, 224], "interpolation": "bicubic", "crop_pct": 0.9, "crop_mode": "center"}


def write_card(folder: Path, images: dict[str, Any], architecture: str | None = "vit_tiny_patch16_224") -> None:
    card = {"architecture": architecture, "pretrained_cfg": images}
    (folder / "config.json").write_text(json.dumps(card))


def edit_card(folder: Path, **changes: Any) -> None:
    card = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**card, **changes}))


def test_timms_own_card_is_read(tmp_path: Path) -> None:
    save_timm(timm.create_model("vit_tiny_patch16_224", depth=1), tmp_path, {"depth": 1})
    expected = Preprocessing(224, 248, interpolation="bicubic", mean=(0.5,) * 3, std=(0.5,) * 3)
    assert Preprocessing.read(metadata_timm(tmp_path), "") == expected
    bare = Preprocessing.read(metadata_timm(tmp_path / "model.safetensors"), "")
    assert bare == Preprocessing(224, mean=(0.5,) * 3, std=(0.5,) * 3)
    edit_card(tmp_path, label_names=["a", "b"])
    assert metadata_timm(tmp_path)["classes"] == ["a", "b"]
    with pytest.raises(ValueError, match=r"config\.json: .* 2 names, and the model has 1000 outputs"):
        read_timm(tmp_path)


FAMILIES = {
    "augreg": "vit_base_patch16_224.augreg_in21k",
    "CLIP, squashed": "vit_base_patch16_clip_384.openai_ft_in12k_in1k",
    "SigLIP, pixels that no patch covers": "vit_so400m_patch14_siglip_384.webli",
    "DINOv2": "vit_small_patch14_dinov2.lvd142m",
    "DINOv3": "vit_small_patch16_dinov3.lvd1689m",
    "EVA-02": "eva02_large_patch14_448.mim_in22k_ft_in1k",
    "BiT": "resnetv2_50x1_bit.goog_in21k",
}
OTHERS = {
    "nothing given": {"num_classes": 3},
    "lanczos": {**CENTER, "interpolation": "lanczos", "crop_pct": 0.95},
    "squashed and cropped": {**CENTER, "crop_mode": "squash", "crop_pct": 0.9},
    "test size": {**CENTER, "test_input_size": [3, 256, 256], "test_crop_pct": 0.95},
}


@pytest.mark.parametrize("case", [*FAMILIES, *OTHERS])
def test_images_are_prepared_as_by_timm(tmp_path: Path, shared: Path, case: str) -> None:
    if case in FAMILIES:
        published = timm.get_pretrained_cfg(FAMILIES[case])
        assert published is not None
        write_card(tmp_path, published.to_dict(remove_source=True, remove_null=True), published.architecture)
        images = published.to_dict()
    else:
        write_card(tmp_path, images := OTHERS[case])
    transform: Any = create_transform(**resolve_data_config(pretrained_cfg=images, use_test_size=True))
    inputs = photographs(shared)[::3]
    check_prepared(metadata_timm(tmp_path), inputs, [transform(Image.fromarray(image)) for image in inputs])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not valid JSON"),
        ('{"model_type": "vit"}', "not a config.json of timm.*architecture"),
        ('{"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {"mean": 3}}', "mean is 3"),
    ],
)
def test_an_invalid_card_is_refused(tmp_path: Path, text: str, problem: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=problem):
        read_timm(tmp_path)
    write_card(tmp_path, {**CENTER, "crop_mode": "border"})
    assert metadata_timm(tmp_path)["preprocessing"]["resize"] is None
    assert "crop_mode='border'" in caplog.text


# --- the model of the tensors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "width", "gelu"),
    [("vit_large_patch16_siglip_512", 1024, "tanh"), ("vit_large_patch16_siglip_256", 1024, "erf")],
)
def test_gelu_of_a_bare_siglip(tmp_path: Path, name: str, width: int, gelu: str) -> None:
    heads = min(width // 64, 16)
    theirs = timm.create_model(name, embed_dim=width, num_heads=heads, depth=1, mlp_ratio=0.1, num_classes=0)
    config, _ = read_timm(bare(theirs, tmp_path / "vit.safetensors"))
    assert config.variant.gelu == gelu  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("name", "args", "extra", "problem"),
    [
        ("vit_base_patch16_rpn_224", {}, {}, "LayerNorm after each branch"),
        ("vit_base_patch16_224", {"qk_norm": True}, {}, r"unknown: .*attn\.[kq]_norm"),
        ("vit_relpos_small_patch16_224", {}, {}, "relative positions"),
        ("vit_base_patch16_224", {"act_layer": "relu"}, {}, "act_layer='relu'"),
        ("vit_base_patch16_224", {"global_pool": "avg", "pool_include_prefix": True}, {}, "pool_include_prefix=True"),
        ("vit_so150m_patch16_reg4_map_256", {}, {}, "pool_include_prefix=False"),
        ("vit_so150m_patch16_reg4_gap_256", {"pool_include_prefix": True}, {}, "pool_include_prefix=True"),
        ("vit_tiny_patch16_224", {}, {"block_fn": "ParallelThingsBlock"}, "model_args: block_fn='Parallel"),
    ],
)
def test_other_vits_are_refused(tmp_path: Path, name: str, args: Any, extra: Any, problem: str) -> None:
    """By their architecture, tensors or arguments, which may change the outputs."""
    args = {**OBLONG, **args}
    folder = save_timm(create_timm(name, **args), tmp_path, args)
    if extra:
        edit_card(folder, model_args={**args, "drop_path_rate": 0.1, **extra})
    with pytest.raises(ValueError, match=problem):
        read_timm(folder)


def test_a_bare_eva_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has blocks\.0\..*EVA family.*give the folder"):
        read_timm(bare(create_timm("eva02_base_patch14_224", **OBLONG), tmp_path / "eva.safetensors"))


def test_sizes_that_no_tensor_shows_are_required(tmp_path: Path) -> None:
    file = bare(create_timm("vit_tiny_patch16_224", **{**OBLONG, "img_size": 16}), tmp_path / "vit.safetensors")
    with pytest.raises(ValueError, match=r"width 32.*--assume\.heads.*num_heads in"):
        read_timm(file)
    file = bare(create_timm("vit_tiny_patch16_224", **OBLONG), tmp_path / "vit.safetensors")
    with pytest.raises(ValueError, match=r"table has 7 rows.*img_size in"):
        read_timm(file)

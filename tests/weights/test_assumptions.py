"""What is assumed for a bare file; timm's models are the reference."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import OBLONG, VIT_ARGS, bare, check_normalized, create_timm

from vitlab.errors import UserError, warn_once
from vitlab.models.vit import Model
from vitlab.weights import load_metadata, load_model, save_model
from vitlab.weights.huggingface_layout import HALF, IMAGENET, OPENAI

SQUARE = {**VIT_ARGS, "img_size": 24, "num_classes": 5}
HEADS = {"heads": 4}


def test_assumptions_are_named_once_and_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = {**SQUARE, "embed_dim": 192, "num_heads": 6, "act_layer": "quick_gelu"}
    theirs = create_timm("vit_tiny_patch16_224", **args)
    path = bare(theirs, tmp_path / "vit.safetensors")
    warn_once.cache_clear()
    assumed, _ = load_model(path), load_model(path)
    (line,) = caplog.messages
    for part in ("heads 3", "gelu erf", "layer_norm_eps 1e-06", "pool token", "24x24 (3x3 patches of 8)", "mean (0.5"):
        assert part in line
    assert all(
        flag in line for flag in ("--assume.heads", ".gelu", ".layer-norm-eps", ".pool", ".mean", "--image-size")
    )
    with pytest.raises(AssertionError):
        check_normalized(assumed, theirs)
    right = {"heads": 6, "gelu": "quick", "mean": list(IMAGENET[0]), "std": list(IMAGENET[1])}
    check_normalized(load_model(path, assume=right), theirs)
    changed: Any = load_model(path, assume={"layer_norm_eps": 1e-3, "pool": "gap"}).config
    assert (changed.variant.layer_norm_eps, changed.pool, changed.variant.registers) == (1e-3, "gap", 1)


def test_assume_is_checked(tmp_path: Path, tiny: Callable[..., Model], unchecked: None) -> None:
    path = bare(create_timm("vit_tiny_patch16_224", **SQUARE), tmp_path / "vit.safetensors")
    for assume, message in (({"head": 4}, "the nearest: heads"), ({"heads": 0}, "heads"), ({"gelu": "relu"}, "gelu")):
        with pytest.raises(UserError, match=message):
            load_model(path, assume=assume)
    save_model(tiny(), tmp_path / "model")
    with pytest.raises(UserError, match="is for a bare"):
        load_model(tmp_path / "model", assume=HEADS)


@pytest.mark.parametrize(
    ("name", "args", "mean_std"),
    [
        ("vit_small_patch16_224", {"num_classes": 0}, IMAGENET),  # DINO and others without labels
        ("vit_tiny_patch16_224", {}, HALF),
        ("deit_tiny_distilled_patch16_224", {}, IMAGENET),
        ("deit3_small_patch16_224", {}, IMAGENET),
        ("vit_base_patch16_clip_224", {}, OPENAI),
        ("vit_base_patch16_siglip_224", {"num_classes": 0}, HALF),
    ],
)
def test_normalization_follows_from_names(tmp_path: Path, name: str, args: dict[str, Any], mean_std: Any) -> None:
    theirs = create_timm(name, **{**SQUARE, **args})
    path = bare(theirs, tmp_path / "vit.safetensors")
    check_normalized(load_model(path, assume=HEADS), theirs, mean_std)
    prepared = load_metadata(path, assume=HEADS)["preprocessing"]
    assert (prepared["mean"], prepared["std"], prepared["image_size"]) == (*mean_std, 24)


def test_image_size_is_that_of_the_position_table(tmp_path: Path) -> None:
    theirs = create_timm("vit_tiny_patch16_224", **{**OBLONG, "embed_dim": 192, "num_heads": 3, "img_size": (32, 72)})
    path = bare(theirs, tmp_path / "vit.safetensors")
    check_normalized(load_model(path, image_size=(32, 72)), theirs, HALF)  # 4x9 patches
    assert load_model(path).config.image_size == 48
    assert load_model(path, image_size=96).config.image_size == 96
    bare(theirs, path, pos_embed=torch.zeros(1, 33, 192))
    for size in (None, 48):
        with pytest.raises(UserError, match=r"33 rows.*--image-size"):
            load_model(path, image_size=size)
    assert load_model(path, image_size=(32, 64)).config.image_size == (32, 64)

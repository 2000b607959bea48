"""The config beside open_clip's weights; timm's models are the reference."""

import json
from pathlib import Path
from typing import Any

import pytest
from originals import State, behind, clip, save
from peers import VIT_ARGS, check_normalized, create_timm

from vitlab.errors import UserError
from vitlab.weights import load_checkpoint, load_model
from vitlab.weights.huggingface_layout import HALF, IMAGENET, OPENAI

ARGS = {**VIT_ARGS, "num_classes": 5}
VISION = {"image_size": 24, "width": 32, "head_width": 8}


def create(**args: Any) -> Any:
    """timm's CLIP, whose head here has no bias, as the projection of open_clip."""
    theirs = create_timm("vit_base_patch16_clip_224", **{**ARGS, "img_size": 24, **args})
    theirs.head.bias.data.zero_()
    return theirs


def folder(path: Path, state: State, vision: dict[str, Any], images: dict[str, Any], **model: Any) -> Path:
    path.mkdir()
    save(state, path / "open_clip_model.safetensors")
    (path / "open_clip_pytorch_model.bin").write_bytes(b"the same, not read")
    settings = {"model_cfg": {"vision_cfg": vision, **model}, "preprocess_cfg": images}
    (path / "open_clip_config.json").write_text(json.dumps(settings))
    return path


CASES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    # timm's arguments, additions to VISION, to model_cfg
    ({}, {}, {}),
    ({"act_layer": "quick_gelu"}, {}, {"quick_gelu": True}),
    ({"act_layer": "gelu_tanh"}, {"act_kwargs": {"approximate": "tanh"}, "norm_kwargs": None}, {}),
    ({"num_heads": 2}, {"head_width": 16}, {}),
    ({"global_pool": "avg", "fc_norm": False}, {"pool_type": "avg"}, {}),
    ({"global_pool": "avg", "fc_norm": True}, {"pool_type": "avg", "final_ln_after_pool": True}, {}),
    ({"img_size": (16, 24)}, {"image_size": [16, 24]}, {}),
]


@pytest.mark.parametrize(("args", "vision", "model"), CASES)
def test_the_model_is_as_described(
    tmp_path: Path, args: dict[str, Any], vision: dict[str, Any], model: dict[str, Any], caplog: Any
) -> None:
    theirs = create(**args)
    state = theirs.state_dict()
    state |= {f"norm.{leaf}": state.pop(f"fc_norm.{leaf}") for leaf in ("weight", "bias") if args.get("fc_norm")}
    path = folder(tmp_path / "clip", clip(state), VISION | vision, {"mean": HALF[0], "std": HALF[1]}, **model)
    check_normalized(load_model(path), theirs, HALF)
    assert "assumed" not in caplog.text
    check_normalized(load_model(path / "open_clip_model.safetensors"), theirs, HALF)


def test_a_trunk_of_timm(tmp_path: Path) -> None:
    name = "vit_base_patch32_siglip_256"  # with the tanh approximation, which no tensor shows
    theirs = create_timm(name, **{**ARGS, "num_classes": 0, "img_size": 24})
    vision = {"image_size": 24, "timm_model_name": name, "timm_pool": "map"}
    state = behind("visual.trunk.", theirs.state_dict())
    config: Any = load_model(folder(tmp_path / "siglip", state, vision, {"mean": HALF[0]}), assume={"heads": 4}).config
    assert (config.variant.gelu, config.pool, config.heads) == ("tanh", "map", 4)
    vision["timm_model_name"] = "swin_base_patch4_window7_224"
    with pytest.raises(UserError, match="swin"):
        load_model(folder(tmp_path / "swin", state, vision, {}))


@pytest.mark.parametrize(
    ("images", "described"),
    [
        ({}, "resize 24 (bicubic, antialias), center crop 24x24"),
        ({"resize_mode": "squash", "interpolation": "bilinear"}, "squash to 24x24 (bilinear, antialias)"),
        ({"resize_mode": "longest"}, "squash to 24x24 (bicubic, antialias)"),
    ],
)
def test_images_are_prepared_as_described(
    tmp_path: Path, images: dict[str, Any], described: str, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = create()
    for stated, mean_std in (({}, OPENAI), ({"mean": IMAGENET[0], "std": IMAGENET[1]}, IMAGENET)):
        path = folder(tmp_path / str(mean_std == OPENAI), clip(theirs.state_dict()), VISION, images | stated)
        loaded = load_checkpoint(path)
        check_normalized(loaded.model, theirs, mean_std)
        assert loaded.preprocessing.describe().startswith(described)
        assert loaded.preprocessing.mean == tuple(mean_std[0])
    assert ("'longest' is not supported" in caplog.text) == (images.get("resize_mode") == "longest")


def test_an_invalid_config_names_the_field(tmp_path: Path) -> None:
    path = folder(tmp_path / "clip", clip(create().state_dict()), VISION | {"pool_type": "none"}, {})
    with pytest.raises(UserError, match=r"open_clip_config.json: model_cfg: vision_cfg: pool_type is 'none'"):
        load_model(path)
    path = folder(tmp_path / "eps", clip(create().state_dict()), VISION | {"norm_kwargs": {"eps": 1e-3}}, {})
    config: Any = load_model(path).config
    assert config.variant.layer_norm_eps == 1e-3

"""timm's models at a shrunken size, read; timm itself is the judge."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from peers import check_equal, check_prepared, check_timm, faint, images, loaded, normalized, photographs, stirred
from PIL import Image
from safetensors.torch import save_file
from timm.data.config import resolve_data_config
from timm.data.transforms_factory import create_transform
from timm.models import save_for_hf
from torch import nn

from vitlab.models import ResNetConfig, ViTConfig
from vitlab.preprocessing import Preprocessing
from vitlab.weights import load_checkpoint, load_model, save_model
from vitlab.weights.timm import card_timm, read_timm

SMALL: dict[str, Any] = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "mlp_ratio": 1.5}
OBLONG = {**SMALL, "img_size": (16, 24), "num_classes": 5}
HYBRID = {"img_size": 64, "embed_dim": 32, "depth": 1, "num_heads": 4, "num_classes": 5}
BIT = {"channels": (128, 256, 512, 1024), "stem_chs": 32, "num_classes": 5}

FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # label: timm's architecture, its arguments, and what our configuration must say
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
        "vit_small_patch14_reg4_dinov2", {**OBLONG, "no_embed_class": False}, {"registers": 4, "class_position": True},
    ),
    "registers in map": (
        "vit_so150m_patch16_reg4_map_256", {**OBLONG, "pool_include_prefix": True}, {"pool": "map", "registers": 4},
    ),
    "act_layer": ("vit_tiny_patch16_224", {**OBLONG, "act_layer": "gelu_tanh"}, {"gelu": "tanh"}),
    "deit": ("deit_tiny_patch16_224", OBLONG, {"pool": "token"}),
    "deit distilled": ("deit_tiny_distilled_patch16_224", OBLONG, {"distilled": True}),
    "deit3": ("deit3_small_patch16_224", OBLONG, {"class_position": False, "layer_scale": 1e-5}),
    "dinov2": ("vit_small_patch14_dinov2", {**SMALL, "patch_size": 2, "img_size": 74}, {"layer_scale": 1e-5}),
    "dinov2 registers": ("vit_small_patch14_reg4_dinov2", OBLONG, {"registers": 4, "class_position": False}),
    "hybrid root": ("vit_tiny_r_s16_p8_224", {**HYBRID, "patch_size": 8}, {"patch_size": 8}),
    "hybrid": ("vit_base_r50_s16_384", {**HYBRID, "img_size": (32, 48)}, {"image_size": (32, 48)}),
    "bit": (
        "resnetv2_50x1_bit", {**BIT, "pretrained_cfg_overlay": {"input_size": (3, 37, 64)}}, {"image_size": (37, 64)},
    ),
}  # fmt: skip


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any], dict[str, Any]]:
    return FAMILIES[request.param]


def made(name: str, **args: Any) -> Any:
    return stirred(timm.create_model(name, **args))


def saved(model: Any, folder: Path, args: dict[str, Any]) -> Path:
    """The folder that timm itself writes for the hub."""
    args = {name: value for name, value in args.items() if name != "pretrained_cfg_overlay"}
    save_for_hf(model, str(folder), model_args=args, safe_serialization=True)
    return folder


def test_answers_are_timm_s(tmp_path: Path, family: tuple[str, dict[str, Any], dict[str, Any]]) -> None:
    name, args, expected = family
    theirs = made(name, **args)
    ours = loaded(*read_timm(saved(theirs, tmp_path, args)))
    assert {key: getattr(ours.config, key) for key in expected} == expected
    check_timm(ours, theirs)


def test_weights_are_standardized_with_timm_s_eps(tmp_path: Path) -> None:
    args = {**HYBRID, "patch_size": 8}
    theirs = faint(made("vit_tiny_r_s16_p8_224", **args))
    check_timm(loaded(*read_timm(saved(theirs, tmp_path, args))), theirs)


@pytest.mark.parametrize(("mean", "std"), [((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), ((0, 0, 0), (1, 1, 1))])
def test_another_normalization_is_folded(tmp_path: Path, mean: Any, std: Any) -> None:
    theirs = made("vit_tiny_patch16_224", **OBLONG)
    theirs.pretrained_cfg |= {"mean": mean, "std": std}
    check_timm(loaded(*read_timm(saved(theirs, tmp_path, OBLONG))), theirs)


def test_a_normalization_that_a_stem_cannot_take_is_refused(tmp_path: Path) -> None:
    args = {**HYBRID, "patch_size": 8}
    theirs = made("vit_tiny_r_s16_p8_224", **args)
    theirs.pretrained_cfg |= {"mean": (0.485, 0.456, 0.406)}
    with pytest.raises(ValueError, match=r"0\.485.*Only mean and std of 0\.5"):
        read_timm(saved(theirs, tmp_path, args))


def bare(model: nn.Module, path: Path, **changes: Any) -> Path:
    """The parameters alone, some changed and some (...) taken out."""
    state = {**model.state_dict(), **changes}
    save_file({name: tensor.clone() for name, tensor in state.items() if tensor is not ...}, path)
    return path


@pytest.mark.parametrize("width", [192, 384, 1280])
def test_a_bare_file_is_for_the_usual_heads_and_images_in_minus_one_to_one(tmp_path: Path, width: int) -> None:
    theirs = made(
        "vit_base_patch16_224", patch_size=2, img_size=6, embed_dim=width, num_classes=3, depth=1, mlp_ratio=0.05,
        num_heads={192: 3, 384: 6, 1280: 16}[width],
    )  # fmt: skip
    ours = loaded(*read_timm(bare(theirs, tmp_path / "vit.safetensors")))
    assert ours.config.image_size == 6
    check_timm(ours, theirs)


def test_a_bare_resnet_is_for_224_pixels(tmp_path: Path) -> None:
    with torch.device("meta"):
        theirs = timm.create_model("resnetv2_50x1_bit", **{**BIT, "num_classes": 0}).to_empty(device="cpu")
    config, _ = read_timm(bare(theirs, tmp_path / "bit.safetensors"))
    assert isinstance(config, ResNetConfig)
    assert (config.image_size, config.num_classes) == (224, 0)
    assert (config.body.layers, config.body.width) == ((3, 4, 6, 3), 32)


@pytest.mark.parametrize("registers", [0, 4])
def test_dinov2_s_own_file_gives_what_timm_makes_of_it(tmp_path: Path, registers: int) -> None:
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
    theirs = timm.create_model(
        name, pretrained=True, pretrained_cfg_overlay={"file": str(tmp_path / "dinov2.safetensors")}, **args
    )
    ours = loaded(*read_timm(tmp_path / "dinov2.safetensors"))
    assert isinstance(ours.config, ViTConfig)
    assert (ours.config.registers, ours.config.class_position) == (registers, True)
    check_timm(ours, theirs.eval())


def test_the_hidden_layer_of_old_files_is_kept(tmp_path: Path) -> None:
    theirs = made("vit_tiny_patch16_224", **OBLONG)
    hidden = stirred(nn.Linear(32, 32))
    folder = saved(theirs, tmp_path, OBLONG)
    old = {"pre_logits.fc.weight": hidden.weight, "pre_logits.fc.bias": hidden.bias}
    bare(theirs, folder / "model.safetensors", **{name: each.detach() for name, each in old.items()})
    ours = loaded(*read_timm(folder))
    inputs = images(ours.config.image_size)
    features = theirs.forward_features(normalized(inputs, *(theirs.pretrained_cfg[each] for each in ("mean", "std"))))
    seen = torch.tanh(hidden(theirs.forward_head(features, pre_logits=True)))
    torch.testing.assert_close(ours(inputs), theirs.head(seen), rtol=1e-4, atol=1e-4)


def test_half_precision_is_kept(tmp_path: Path) -> None:
    theirs = made("vit_tiny_patch16_224", **OBLONG).bfloat16()
    _, state = read_timm(saved(theirs, tmp_path, OBLONG))
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}


def test_other_numbers_of_names_than_of_outputs_are_refused(tmp_path: Path) -> None:
    theirs = made("vit_tiny_patch16_224", **OBLONG)
    folder = saved(theirs, tmp_path, OBLONG)
    card = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(card | {"label_names": ["a", "b"]}))
    with pytest.raises(
        ValueError, match=rf"config\.json names 2 classes and the model has {theirs.num_classes} outputs"
    ):
        read_timm(folder)


def test_older_cards_say_all_in_one(tmp_path: Path) -> None:
    theirs = made("vit_tiny_patch16_224", **OBLONG)
    folder = saved(theirs, tmp_path, OBLONG)
    card = json.loads((folder / "config.json").read_text())
    flat = {**card.pop("pretrained_cfg"), **card, "input_size": [3, 16, 24]}
    (folder / "config.json").write_text(json.dumps(flat))
    check_timm(loaded(*read_timm(folder)), theirs)


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("vit_giant_patch14_dinov2", {"mlp_ratio": 2.0}, r"halves are packed.*SwiGLU\) \(blocks\.0\.mlp\.fc1\.weight"),
        ("vit_base_patch16_224", {"global_pool": "avg"}, r"LayerNorm after the mean over tokens.*\(fc_norm\."),
        ("vit_base_patch16_clip_224", {}, r"in front of the first block, as CLIP \(norm_pre\."),
        ("vit_base_patch16_224", {"qk_norm": True}, r"normalized queries and keys \(blocks\.0\.attn\.[kq]_norm"),
        ("vit_base_patch16_224", {"scale_mlp_norm": True}, r"a LayerNorm inside attention or MLP"),
        ("vit_base_patch16_224", {"final_norm": False}, r"missing: norm\.weight, norm\.bias"),
        ("vit_small_patch16_18x2_224", {}, r"attention and MLP side by side.*\(blocks\.0\.attns"),
        ("vit_dlittle_patch16_reg1_gap_256", {"fc_norm": False}, r"differential attention"),
        ("vit_relpos_small_patch16_224", {}, r"relative position biases \(blocks\.0\.attn\.rel_pos"),
        ("beit_base_patch16_224", {}, "relative position biases"),
        ("vit_base_patch16_224", {"act_layer": "quick_gelu"}, r"act_layer='quick_gelu'.*'gelu_tanh'"),
        ("vit_base_patch16_224", {"norm_layer": "rmsnorm"}, r"norm_layer='rmsnorm'"),
        ("vit_base_patch16_224", {"global_pool": "max", "fc_norm": False}, r"global_pool='max' with a class token"),
        ("vit_base_patch16_224", {"global_pool": "avg", "fc_norm": False}, r"global_pool='avg' with a class token"),
        ("vit_so150m_patch16_reg4_map_256", {}, r"global_pool='map' without a class token, and registers not counted"),
        (
            "vit_so150m_patch16_reg4_gap_256", {"pool_include_prefix": True},
            r"global_pool='avg' without a class token, and registers counted",
        ),
    ],
)  # fmt: skip
def test_what_is_not_plain_is_refused_by_name(tmp_path: Path, name: str, args: dict[str, Any], said: str) -> None:
    args = {**OBLONG, **args}
    with pytest.raises(ValueError, match=said) as caught:
        read_timm(saved(made(name, **args), tmp_path, args))
    assert f"({name})" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("vit_small_patch16_dinov3", OBLONG, r"no position table \(pos_embed\).*DINOv3"),
        ("eva02_base_patch14_224", OBLONG, r"gated MLPs \(SwiGLU\)"),
        ("resnetv2_50d_gn", {}, r"another stem than BiT's \(stem\.conv1\.weight\)"),
        ("resnetv2_50", {}, r"BatchNorm"),
        ("resnet18", {}, r"no model of timm that can be read|BatchNorm"),
        ("mixer_s32_224", {}, r"stem\.conv\.weight is missing.*supported are plain Vision Transformers"),
    ],
)
def test_other_models_of_timm_are_refused(tmp_path: Path, name: str, args: dict[str, Any], said: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, **args)
    state = {key: torch.zeros((1,) * tensor.ndim) for key, tensor in model.state_dict().items()}
    save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=said):
        read_timm(tmp_path / "other.safetensors")


def test_tensors_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    theirs = made("vit_tiny_patch16_224", **{**OBLONG, "embed_dim": 192, "num_heads": 3, "img_size": 16})
    changes = {"norm.bias": ..., "extra.weight": torch.zeros(2), "cls_token": torch.zeros(1, 1, 7)}
    with pytest.raises(ValueError) as caught:
        read_timm(bare(theirs, tmp_path / "vit.safetensors", **changes))
    said = str(caught.value)
    assert "1 missing: norm.bias" in said
    assert "1 unknown: extra.weight" in said
    assert "cls_token has shape (1, 1, 7) instead of (1, 1, 192)" in said


def test_what_no_tensor_tells_is_asked_for(tmp_path: Path) -> None:
    file = bare(made("vit_tiny_patch16_224", **{**OBLONG, "img_size": 16}), tmp_path / "vit.safetensors")
    with pytest.raises(ValueError, match=r"width 32, and no tensor tells the number of attention heads.*num_heads in"):
        read_timm(file)
    file = bare(made("vit_tiny_patch16_224", **OBLONG), tmp_path / "vit.safetensors")
    with pytest.raises(ValueError, match=r"table of 7 rows.*unknown; with 0, 1 of them.*no square.*img_size in"):
        read_timm(file)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no config.json of timm's"),
        ("[]", "no config.json of timm's"),
        ('{"model_type": "vit"}', "no config.json of timm's.*architecture"),
        ('{"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {"mean": 3}}', "no config.json of timm's"),
        ('{"architecture": "vit_tiny_patch16_224", "model_args": {"num_heads": 5, "img_size": [16, 24]}}', "heads=5"),
    ],
)
def test_a_card_that_is_none_is_told(tmp_path: Path, text: str, said: str) -> None:
    saved(made("vit_tiny_patch16_224", **OBLONG), tmp_path, OBLONG)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=said):
        read_timm(tmp_path)


def test_files_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    (tmp_path / "vit.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        read_timm(tmp_path / "vit.safetensors")
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        read_timm(tmp_path)


def test_timm_s_own_card_is_understood(tmp_path: Path) -> None:
    saved(timm.create_model("vit_tiny_patch16_224", depth=1), tmp_path, {"depth": 1})
    half = (0.5, 0.5, 0.5)
    expected = Preprocessing(224, 248, interpolation="bicubic", mean=half, std=half)
    assert Preprocessing.read(card_timm(tmp_path), "") == expected
    assert card_timm(tmp_path / "model.safetensors") == {}


CENTER = {"input_size": [3, 224, 224], "interpolation": "bicubic", "crop_pct": 0.9, "crop_mode": "center"}


@pytest.mark.parametrize(
    "said",
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
def test_images_are_prepared_as_by_timm(tmp_path: Path, shared: Path, said: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"architecture": "vit_tiny_patch16_224", "pretrained_cfg": {**said, "mean": [0] * 3, "std": [1] * 3}}
        )
    )
    settings = resolve_data_config(pretrained_cfg=said, use_test_size=True)
    transform: Any = create_transform(**settings | {"mean": (0, 0, 0), "std": (1, 1, 1)})
    inputs = photographs(shared)
    check_prepared(card_timm(tmp_path), inputs, [transform(Image.fromarray(image)) for image in inputs])


def test_what_timm_does_beyond_that_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Borders around an image: it is squashed instead."""
    said = {**CENTER, "crop_mode": "border"}
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit_tiny_patch16_224", "pretrained_cfg": said}))
    assert card_timm(tmp_path)["preprocessing"]["resize"] is None
    assert "images are squashed to size, because crop_mode='border'" in caplog.text


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("vit_tiny_patch16_224", 224, 448),
        ("vit_small_patch14_dinov2", 518, 224),
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
    save_model(ours, tmp_path / "fine-tuned")  # and then back to the first size
    assert load_model(tmp_path / "fine-tuned").config.position_interpolation == "bicubic_antialias"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AssertionError):
        check_equal(load_model(folder, image_size=new, interpolation="corners").forward_features(inputs), tokens, 0.01)


@pytest.mark.parametrize(
    ("name", "args", "extra"),
    [
        ("resnetv2_50x1_bit", BIT, {"output_stride": 16}),
        ("resnetv2_50x1_bit", BIT, {"avg_down": True}),
        ("vit_tiny_patch16_224", OBLONG, {"block_fn": "ParallelThingsBlock"}),
        ("vit_tiny_patch16_224", OBLONG, {"in_chans": 1}),
    ],
)
def test_arguments_that_may_change_the_answers_are_refused(
    tmp_path: Path, name: str, args: dict[str, Any], extra: dict[str, Any]
) -> None:
    folder = saved(made(name, **args), tmp_path, args)
    read_timm(folder)
    config = json.loads((folder / "config.json").read_text())
    config["model_args"] = {**args, "drop_path_rate": 0.1, **extra}
    (folder / "config.json").write_text(json.dumps(config))
    ((key, value),) = extra.items()
    with pytest.raises(ValueError, match=f"model_args that are not supported: {key}={value!r}. Supported are"):
        read_timm(folder)


@pytest.mark.parametrize(
    ("name", "args", "gelu"),
    [
        ("vit_so400m_patch16_siglip_256", {"embed_dim": 1152, "num_heads": 16}, "tanh"),
        ("vit_so400m_patch16_siglip_gap_256", {"embed_dim": 1152, "num_heads": 16}, "tanh"),
        ("vit_base_patch32_siglip_256", {"embed_dim": 768, "num_heads": 12}, "tanh"),
        ("vit_large_patch16_siglip_512", {"embed_dim": 1024, "num_heads": 16}, "tanh"),
        ("vit_large_patch16_siglip_256", {"embed_dim": 1024, "num_heads": 16}, "erf"),
        ("vit_base_patch16_siglip_224", {"embed_dim": 768, "num_heads": 12}, "erf"),
    ],
)
def test_a_bare_siglip_has_its_own_gelu(tmp_path: Path, name: str, args: dict[str, Any], gelu: str) -> None:
    theirs = timm.create_model(name, **args, depth=1, mlp_ratio=0.1, num_classes=0)
    config, _ = read_timm(bare(theirs, tmp_path / "vit.safetensors"))
    assert isinstance(config, ViTConfig)
    assert config.gelu == gelu


def test_pixels_that_no_patch_covers_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """timm's patches leave the last 6 of 384 pixels out."""
    args: dict[str, Any] = {"embed_dim": 32, "num_heads": 4, "depth": 1}
    folder = saved(timm.create_model("vit_so400m_patch14_siglip_384", **args), tmp_path, args)
    found = load_checkpoint(folder)
    assert found.model.config.image_size == 378
    assert found.preprocessing.image_size == 378
    assert "says 384x384 pixels and its positions are for 378x378" in caplog.text

"""Bare files by the names of other code, wrapped or not, and beside open_clip's config; timm, which reads most of them,
and torchvision are the reference."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import VIT_ARGS, check_normalized, create_timm, noisy
from safetensors.torch import save_file
from timm.models import eva, vision_transformer
from torch import Tensor
from torchvision.models import VisionTransformer

from vitlab.errors import UserError
from vitlab.models.variant import all_settings
from vitlab.weights import load_checkpoint, load_metadata, load_model
from vitlab.weights.huggingface_layout import HALF, IMAGENET, OPENAI

State = dict[str, Tensor]
TO_CLIP = {
    r"^cls_token$": "class_embedding",
    r"^pos_embed$": "positional_embedding",
    r"^patch_embed\.proj\.": "conv1.",
    r"^norm_pre\.": "ln_pre.",
    r"^norm\.": "ln_post.",
    r"^blocks\.": "transformer.resblocks.",
    r"\.norm(\d)\.": r".ln_\1.",
    r"\.qkv\.": ".in_proj_",
    r"\.attn\.proj\.": ".attn.out_proj.",
    r"\.fc1\.": ".c_fc.",
    r"\.fc2\.": ".c_proj.",
}
SQUARE = {**VIT_ARGS, "img_size": 24, "num_classes": 5}
HEADS = {"heads": 4}
SWIGLU = {r"\.fc1_g\.": ".w1.", r"\.fc1_x\.": ".w2.", r"\.fc2\.": ".w3."}


def rename(state: State, names: dict[str, str]) -> State:
    def new(name: str) -> str:
        for pattern, replacement in names.items():
            name = re.sub(pattern, replacement, name)
        return name

    return {new(name): tensor for name, tensor in state.items()}


def behind(prefix: str, state: State) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


def save(state: State, path: Path) -> Path:
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in state.items()}, path)
    return path


def clip(state: State) -> State:
    """open_clip's, with what its text tower has."""
    named = rename(state, TO_CLIP) | {"proj": state["head.weight"].T}
    named["class_embedding"], named["positional_embedding"] = state["cls_token"][0, 0], state["pos_embed"][0]
    del named["head.weight"], named["head.bias"]
    text = {"positional_embedding": torch.ones(7, 8), "transformer.resblocks.0.ln_1.weight": torch.ones(8)}
    return behind("visual.", named) | text | {"token_embedding.weight": torch.ones(9, 8), "logit_scale": torch.ones(())}


# --- original names ----------------------------------------------------------------------------------------------


def openai(state: State) -> State:
    return clip(state) | {"input_resolution": torch.tensor(24)}


def dinov2(state: State) -> State:
    named = rename(state, {r"^reg_token$": "register_tokens", r"\.fc1\.": ".w12.", r"\.fc2\.": ".w3."})
    return named | {"mask_token": torch.ones(1, 32), "pos_embed": torch.randn(1, 10, 32)}


def chunked(state: State) -> State:
    """By FSDP, with DINO's and iBOT's heads, and the student beside."""
    numbered = rename(dinov2(state), {r"^blocks\.0\.": "blocks.0.0.", r"^blocks\.1\.": "blocks.1.1."})
    heads = {"teacher.dino_head.mlp.0.weight": torch.ones(8, 32), "teacher.ibot_head.last_layer.weight": torch.ones(8)}
    return behind("teacher.backbone.", numbered) | behind("student.backbone.", rename(state, {})) | heads


def dinov3(state: State) -> State:
    """With biases of keys behind a mask, and periods in bfloat16."""
    gated = SWIGLU if "blocks.0.mlp.fc1_g.weight" in state else {}
    named = rename(state, {r"^reg_token$": "storage_tokens", r"\.gamma_(\d)$": r".ls\1.gamma", **gated})
    for i in range(2):
        q, v = (named.pop(f"blocks.{i}.attn.{part}_bias") for part in "qv")
        named[f"blocks.{i}.attn.qkv.bias"] = torch.cat([q, torch.ones(32), v])
        named[f"blocks.{i}.attn.qkv.bias_mask"] = torch.tensor([1.0, 0.0, 1.0]).repeat_interleave(32)
    periods = 100.0 ** (torch.arange(2) / 2)
    return named | {"mask_token": torch.ones(1, 32), "rope_embed.periods": periods.bfloat16()}


def mae(state: State) -> State:
    decoder = {"decoder_pos_embed": torch.ones(1, 10, 8), "decoder_blocks.0.norm1.weight": torch.ones(8)}
    return state | decoder | {"mask_token": torch.ones(1, 1, 8)}


GIANT = {**SQUARE, "mlp_ratio": 2.0, "num_classes": 0}
LARGE = GIANT | {"global_pool": "token", "img_size": 224, "patch_size": 32}
ORIGINALS: dict[str, tuple[str, dict[str, Any], Callable[[State], State], Any, dict[str, Any]]] = {
    # timm's architecture and arguments, its names -> theirs, mean and std, entries of our configuration
    "open_clip": ("vit_base_patch16_clip_224", SQUARE, clip, OPENAI, {"gelu": "erf", "layer_norm_eps": 1e-5}),
    "OpenAI's CLIP": ("vit_base_patch16_clip_quickgelu_224", SQUARE, openai, OPENAI, {"gelu": "quick"}),
    "DINOv2": ("vit_giant_patch14_reg4_dinov2", GIANT, dinov2, IMAGENET, {"swiglu": True, "registers": 4}),
    "DINOv2 in chunks": ("vit_giant_patch14_reg4_dinov2", GIANT, chunked, IMAGENET, {"depth": 2}),
    "DINOv3": ("vit_small_patch16_dinov3_qkvb", GIANT | {"global_pool": "token"}, dinov3, IMAGENET, {"registers": 4}),
    "DINOv3, gated": ("vit_huge_plus_patch16_dinov3_qkvb", LARGE, dinov3, IMAGENET, {"swiglu": True}),
    "MAE": ("vit_base_patch16_224", SQUARE | {"num_classes": 0}, mae, IMAGENET, {"pool": "token"}),
    "MAE, fine-tuned": ("vit_base_patch16_224", SQUARE | {"global_pool": "avg"}, dict, IMAGENET, {"pool": "gap"}),
}


@pytest.mark.parametrize("case", ORIGINALS)
def test_original_names_are_read_as_by_timm(tmp_path: Path, case: str) -> None:
    name, args, convert, mean_std, expected = ORIGINALS[case]
    theirs = create_timm(name, **args)
    state = convert(theirs.state_dict())
    path = save(state, tmp_path / "original.safetensors")
    if case == "DINOv2 in chunks":  # which timm does not read
        state = {key.removeprefix("teacher.backbone."): state[key] for key in state if key.startswith("teacher.b")}
        state = rename(state, {r"^blocks\.\d\.": "blocks."})
    module = eva if case.startswith("DINOv3") else vision_transformer
    timms = module.checkpoint_filter_fn(dict(state), theirs)
    theirs.load_state_dict({key: tensor for key, tensor in timms.items() if not key.startswith("decoder_")})
    assume = {} if case.startswith("DINOv3") else HEADS
    ours = load_model(path, assume=assume, image_size=args["img_size"])
    assert {key: all_settings(ours.config)[key] for key in expected} == expected
    check_normalized(ours, theirs, mean_std)
    prepared = load_metadata(path, image_size=args["img_size"], assume=assume)["preprocessing"]
    assert (prepared["mean"], prepared["std"]) == mean_std
    assert prepared["interpolation"] == "bicubic"
    assert prepared["keep_aspect"]


@pytest.mark.parametrize("hidden", [None, 20])
@pytest.mark.parametrize("old", [False, True])
def test_torchvisions_names(tmp_path: Path, hidden: int | None, old: bool) -> None:
    sizes: Any = {"image_size": 24, "patch_size": 8, "num_layers": 2, "num_heads": 3, "hidden_dim": 192, "mlp_dim": 48}
    theirs = noisy(VisionTransformer(**sizes, num_classes=5, representation_size=hidden))
    old_names = {r"\.mlp\.0\.": ".mlp.linear_1.", r"\.mlp\.3\.": ".mlp.linear_2."}
    path = save(rename(theirs.state_dict(), old_names if old else {}), tmp_path / "vit.safetensors")
    ours = load_model(path)
    check_normalized(ours, theirs)
    assert ours.config.num_features == (hidden or 192)


# --- wrapped names -----------------------------------------------------------------------------------------------

PREFIXES = ("module.", "_orig_mod.", "encoder.", "visual.trunk.", "a.module.model.")


@pytest.mark.parametrize("prefix", PREFIXES)
def test_any_prefix_is_removed(tmp_path: Path, prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    theirs = create_timm("vit_tiny_patch16_224", **SQUARE)
    state = behind(prefix, rename(theirs.state_dict(), {r"^blocks\.1\.": "blocks.1._checkpoint_wrapped_module."}))
    path = save(state | {"queue.weight": torch.ones(3)} if "." in prefix[:-1] else state, tmp_path / "vit.safetensors")
    ours = load_model(path, assume=HEADS | {"mean": IMAGENET[0], "std": IMAGENET[1]})
    check_normalized(ours, theirs)
    assert ("left out: queue (1)" in caplog.text) == ("." in prefix[:-1])


PAIRS = [
    ("teacher.backbone.", "student.backbone.", None),
    ("module.base_encoder.", "module.momentum_encoder.", None),
    ("target_encoder.module.", "encoder.module.", None),
    ("model_ema.module.", "model.", None),
    ("net_a.", "net_b.", "net_a"),
    ("", "module.", ""),
]


@pytest.mark.parametrize(("read", "other", "prefix"), PAIRS)
def test_one_of_two_models_is_read(tmp_path: Path, read: str, other: str, prefix: str | None) -> None:
    first, second = (create_timm("vit_tiny_patch16_224", **SQUARE, global_pool="token") for _ in range(2))
    path = save(behind(read, first.state_dict()) | behind(other, second.state_dict()), tmp_path / "two.safetensors")
    mean_std = IMAGENET if "teacher" in read else HALF
    if prefix is None:
        check_normalized(load_model(tmp_path, assume=HEADS), first, mean_std)  # a folder of the file alone
        return
    for assume in (HEADS, HEADS | {"prefix": "net_c"}):
        with pytest.raises(UserError, match=r"--assume\.prefix|names begin with"):
            load_model(path, assume=assume)
    for chosen, theirs in ((prefix, first), (other, second)):
        check_normalized(load_model(path, assume=HEADS | {"prefix": chosen}), theirs, mean_std)


@pytest.mark.parametrize("head", ["classifier.", "backbone.head.1.", "module.fc."])
def test_a_linear_layer_beside_the_model_is_its_head(tmp_path: Path, head: str) -> None:
    theirs = create_timm("vit_tiny_patch16_224", **SQUARE)
    state = behind("backbone.", theirs.state_dict())
    linear = {f"{head}{leaf}": state.pop(f"backbone.head.{leaf}") for leaf in ("weight", "bias")}
    check_normalized(load_model(save(state | linear, tmp_path / "vit.safetensors"), assume=HEADS), theirs, HALF)


def test_projection_heads_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs = create_timm("vit_tiny_patch16_224", **{**SQUARE, "num_classes": 0})
    heads = {"head.0.weight": torch.ones(8, 32), "head.1.weight": torch.ones(8), "head.3.weight": torch.ones(6, 8)}
    path = save(theirs.state_dict() | heads, tmp_path / "moco.safetensors")
    check_normalized(load_model(path, assume=HEADS), theirs)
    assert "left out: head (3)" in caplog.text


# --- what is not read --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "guess"),
    [
        (["vit.embeddings.cls_token", "vit.encoder.layer.0.output.dense.weight"], "Hugging Face's: give their folder"),
        (["embedding.weight", "cls"], "give the folder of save_model"),
        (["conv1.weight", "layer1.0.conv1.weight", "fc.bias"], "convolutional network"),
        (["base_model.model.blocks.0.attn.qkv.lora_A.weight"], "unmerged adapters"),
        (["something"], "unknown: something"),
    ],
)
def test_unknown_names_say_what_is_read(tmp_path: Path, names: list[str], guess: str) -> None:
    path = save({name: torch.ones(2, 2) for name in names}, tmp_path / "other.safetensors")
    for load in (load_model, load_metadata):
        with pytest.raises(UserError, match=guess):
            load(path)


SHAPES = [
    ("open_clip", "visual.attn_pool.query", (2, 32)),  # pooling by attention, which is not supported
    ("open_clip", "visual.proj", ()),
    ("open_clip", "visual.class_embedding", ()),
    ("open_clip", "visual.positional_embedding", ()),
    ("open_clip", "visual.conv1.weight", (3,)),
    ("DINOv3", "blocks.0.attn.qkv.bias", ()),
    ("DINOv3", "blocks.1.attn.qkv.bias", (7,)),
    ("DINOv3", "rope_embed.periods", ()),
    ("DINOv3", "rope_embed.periods", (2,)),
    ("DINOv3", "storage_tokens", (4,)),
]


@pytest.mark.parametrize(("case", "name", "shape"), SHAPES)
def test_a_tensor_of_another_shape_is_an_error(tmp_path: Path, case: str, name: str, shape: tuple[int, ...]) -> None:
    architecture, args, convert, _, _ = ORIGINALS[case]
    state = convert(create_timm(architecture, **args).state_dict())
    path = save(state | {name: torch.full(shape, 5.0)}, tmp_path / "original.safetensors")
    with pytest.raises(UserError):
        load_model(path, assume=HEADS if name != "rope_embed.periods" or shape else {})


def test_a_corrupt_patch_embedding_next_to_a_head_is_an_error(tmp_path: Path) -> None:
    state = {"patch_embed.proj.weight": torch.tensor(1.0), "head.weight": torch.zeros(2, 4)}
    with pytest.raises(UserError):
        load_model(save(state | {"rope_embed.periods": torch.ones(1)}, tmp_path / "original.safetensors"))


# --- open_clip_config.json ---------------------------------------------------------------------------------------

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

"""What is refused of timm's models."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from peers import OBLONG, TIMM_BIT, bare, made, saved
from safetensors.torch import save_file

from vitlab.weights.timm import read_timm


def edit_card(folder: Path, **changes: Any) -> None:
    card = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**card, **changes}))


@pytest.mark.parametrize(
    ("name", "args", "problem"),
    [
        ("vit_giant_patch14_dinov2", {"mlp_ratio": 2.0}, r"halves are packed.*SwiGLU\) \(blocks\.0\.mlp\.fc1\.weight"),
        ("vit_base_patch16_224", {"global_pool": "avg"}, r"\(fc_norm\."),
        ("vit_base_patch16_clip_224", {}, r"\(norm_pre\."),
        ("vit_base_patch16_224", {"qk_norm": True}, r"\(blocks\.0\.attn\.[kq]_norm"),
        ("vit_base_patch16_224", {"scale_mlp_norm": True}, "LayerNorm inside attention or MLP"),
        ("vit_base_patch16_224", {"final_norm": False}, r"missing: norm\.weight, norm\.bias"),
        ("vit_small_patch16_18x2_224", {}, r"\(blocks\.0\.attns"),
        ("vit_dlittle_patch16_reg1_gap_256", {"fc_norm": False}, "differential attention"),
        ("vit_relpos_small_patch16_224", {}, r"relative position biases \(blocks\.0\.attn\.rel_pos"),
        ("vit_base_patch16_224", {"act_layer": "quick_gelu"}, "act_layer='quick_gelu'.*'gelu_tanh'"),
        ("vit_base_patch16_224", {"norm_layer": "rmsnorm"}, "norm_layer='rmsnorm'"),
        ("vit_base_patch16_224", {"global_pool": "max", "fc_norm": False}, "global_pool='max' with a class token"),
        ("vit_base_patch16_224", {"global_pool": "avg", "fc_norm": False}, "global_pool='avg' with a class token"),
        ("vit_so150m_patch16_reg4_map_256", {}, "global_pool='map' without.*pool_include_prefix=False"),
        ("vit_so150m_patch16_reg4_gap_256", {"pool_include_prefix": True}, "'avg' without.*pool_include_prefix=True"),
    ],
)
def test_other_vits_are_refused(tmp_path: Path, name: str, args: dict[str, Any], problem: str) -> None:
    args = {**OBLONG, **args}
    with pytest.raises(ValueError, match=problem) as caught:
        read_timm(saved(made(name, **args), tmp_path, args))
    assert f"({name})" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "args", "problem"),
    [
        ("vit_small_patch16_dinov3", OBLONG, r"no position table \(pos_embed\).*DINOv3"),
        ("eva02_base_patch14_224", OBLONG, r"gated MLPs \(SwiGLU\)"),
        ("resnetv2_50d_gn", {}, r"another stem than BiT's \(stem\.conv1\.weight\)"),
        ("resnetv2_50", {}, "BatchNorm"),
        ("mixer_s32_224", {}, r"stem\.conv\.weight is missing"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, name: str, args: dict[str, Any], problem: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, **args)
    state = {key: torch.zeros((1,) * tensor.ndim) for key, tensor in model.state_dict().items()}
    save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=problem):
        read_timm(tmp_path / "other.safetensors")


@pytest.mark.parametrize(
    ("name", "args", "extra"),
    [
        ("resnetv2_50x1_bit", TIMM_BIT, {"output_stride": 16}),
        ("resnetv2_50x1_bit", TIMM_BIT, {"avg_down": True}),
        ("vit_tiny_patch16_224", OBLONG, {"block_fn": "ParallelThingsBlock"}),
        ("vit_tiny_patch16_224", OBLONG, {"in_chans": 1}),
    ],
)
def test_arguments_that_may_change_the_outputs_are_refused(
    tmp_path: Path, name: str, args: dict[str, Any], extra: dict[str, Any]
) -> None:
    folder = saved(made(name, **args), tmp_path, args)
    read_timm(folder)
    edit_card(folder, model_args={**args, "drop_path_rate": 0.1, **extra})
    ((key, value),) = extra.items()
    with pytest.raises(ValueError, match=f"unsupported model_args: {key}={value!r}. Supported"):
        read_timm(folder)


def test_tensors_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    theirs = made("vit_tiny_patch16_224", **{**OBLONG, "embed_dim": 192, "num_heads": 3, "img_size": 16})
    changes = {"norm.bias": ..., "extra.weight": torch.zeros(2), "cls_token": torch.zeros(1, 1, 7)}
    with pytest.raises(ValueError, match=r"1 missing: norm.bias; 1 unknown: extra.weight; .*\(1, 1, 7\)"):
        read_timm(bare(theirs, tmp_path / "vit.safetensors", **changes))


def test_what_no_tensor_shows_is_required(tmp_path: Path) -> None:
    file = bare(made("vit_tiny_patch16_224", **{**OBLONG, "img_size": 16}), tmp_path / "vit.safetensors")
    with pytest.raises(ValueError, match=r"width 32.*num_heads in"):
        read_timm(file)
    file = bare(made("vit_tiny_patch16_224", **OBLONG), tmp_path / "vit.safetensors")
    with pytest.raises(ValueError, match=r"table of 7 rows.*img_size in"):
        read_timm(file)

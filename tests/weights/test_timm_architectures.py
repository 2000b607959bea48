"""What the names of timm's architectures say, beside timm's own models."""

from typing import Any

import pytest
import timm
import torch

from vitlab.errors import UserError
from vitlab.weights.timm_architectures import HEADS, WRITTEN, check_architecture, named_args, rotary_of, written_eps


def loads(name: str) -> bool:
    try:
        check_architecture("model", name)
    except UserError:
        return False
    return True


@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("module", ["vision_transformer", "deit", "vision_transformer_hybrid", "eva"])
def test_tables_agree_with_timm(module: str, step: int) -> None:
    """For one in eight of its architectures, or for all."""
    for name in [*filter(loads, timm.list_models("*", module=module))][::step]:
        with torch.device("meta"):
            model: Any = timm.create_model(name, depth=1)
        block, args = model.blocks[0], named_args(name)
        assert args.get("num_heads", HEADS.get(model.embed_dim)) == block.attn.num_heads, name
        assert block.norm1.eps == args.get("eps", 1e-6), name
        has_norm = any(isinstance(norm, torch.nn.LayerNorm) for norm in (model.norm, model.fc_norm))
        assert has_norm == args.get("final_norm", True), name
        rope, (rotary, order) = getattr(model, "rope", None), rotary_of(args)
        assert (rope is None) == (rotary is None), name
        if rope is None or rotary is None:
            continue
        assert (order is None) == block.attn.rotate_half, name
        assert rotary.base == rope.temperature, name
        if rotary.coordinates == "index":
            assert (order == "columns") == (rope.grid_indexing == "xy"), name
            assert (rotary.reference, rotary.offset) == (
                rope.ref_feat_shape and (*rope.ref_feat_shape,),
                rope.grid_offset,
            )


def test_an_architecture_for_every_eps_is_written() -> None:
    assert {kind: [*written_eps(kind)] for kind in WRITTEN} == {
        "vit": [1e-6, 1e-5],
        "distilled": [1e-6],
        "eva": [1e-6, 1e-5],
    }

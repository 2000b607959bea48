"""Which arrays of a file are the image model's, and their names."""

import pytest
import torch

from vitlab.models import ViTConfig
from vitlab.weights.huggingface_layout import NAMING, huggingface_layout, select_arrays

CONFIG = ViTConfig(image_size=16, patch_size=8, width=8, depth=1, heads=2, mlp_dim=12, num_classes=3)


@pytest.mark.parametrize("kind", sorted(NAMING.keys() - {"bit"}))
@pytest.mark.parametrize("swiglu", [False, True])
def test_names_are_different_and_have_the_rows_of_their_parts(kind: str, swiglu: bool) -> None:
    config = ViTConfig(**{**vars(CONFIG), "swiglu": swiglu, "pre_norm": True, "pool": "map"})
    layout = huggingface_layout(kind, config)
    rows = {name: slot.shape[0] for name, slot in layout.items() if name.startswith(f"{NAMING[kind].blocks}0.")}
    assert len({(slot.ours, slot.rows) for slot in layout.values()}) == len(layout)
    assert [rows[f"{NAMING[kind].blocks}0.{part}.weight"] for part in NAMING[kind].qkv] == [8, 8, 8]
    assert sum(rows.values()) == 2 * (24 + 8 + 12 * (1 + swiglu) + 8) + 4 * 8  # weights and biases, two LayerNorms


def test_the_image_tower_of_clip() -> None:
    arrays = {
        "vision_model.embeddings.class_embedding": torch.ones(8),
        "vision_model.embeddings.position_embedding.weight": torch.ones(5, 8),
        "vision_model.embeddings.position_ids": torch.arange(5)[None],
        "vision_model.embeddings.patch_embedding.weight": torch.ones(8, 3, 8, 8),
        "text_model.embeddings.token_embedding.weight": torch.ones(9, 8),
        "text_projection.weight": torch.ones(4, 8),
        "visual_projection.weight": torch.ones(4, 8),
        "logit_scale": torch.tensor(2.0),
    }
    assert {name: tuple(array.shape) for name, array in select_arrays("clip", arrays).items()} == {
        "embeddings.class_embedding": (1, 1, 8),
        "embeddings.position_embedding.weight": (1, 5, 8),
        "embeddings.patch_embedding.weight": (8, 3, 8, 8),
        "embeddings.patch_embedding.bias": (8,),
        "classifier.weight": (4, 8),
        "classifier.bias": (4,),
    }


def test_what_dinov3_stores_of_nothing() -> None:
    arrays = {
        "embeddings.register_tokens": torch.ones(1, 0, 8),
        "embeddings.mask_token": torch.ones(1, 1, 8),
        "layer.0.attention.k_proj.weight": torch.ones(8, 8, dtype=torch.bfloat16),
    }
    selected = select_arrays("dinov3_vit", arrays)
    assert selected.keys() == {"layer.0.attention.k_proj.weight", "layer.0.attention.k_proj.bias"}
    assert selected["layer.0.attention.k_proj.bias"].tolist() == [0.0] * 8
    assert selected["layer.0.attention.k_proj.bias"].dtype == torch.bfloat16

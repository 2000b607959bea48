from typing import Any

import pytest
import torch

from vitlab.models import Rotary, ViTConfig
from vitlab.models.variant import override
from vitlab.weights.huggingface_layout import FAMILIES, from_file, huggingface_layout, to_file

CONFIG = ViTConfig(image_size=16, patch_size=8, width=8, depth=1, heads=2, mlp_dim=12, num_classes=3)


@pytest.mark.parametrize("kind", sorted(FAMILIES.keys() - {"bit"}))
@pytest.mark.parametrize("swiglu", [False, True])
def test_names_are_different_and_have_the_rows_of_their_parts(kind: str, swiglu: bool) -> None:
    config = override(CONFIG, swiglu=swiglu, pre_norm=True, pool="map")
    family = FAMILIES[kind]
    layout = huggingface_layout(family, config)
    rows = {name: slot.shape[0] for name, slot in layout.items() if name.startswith(f"{family.blocks}0.")}
    assert len({(slot.ours, slot.rows) for slot in layout.values()}) == len(layout)
    assert [rows[f"{family.blocks}0.{part}.weight"] for part in family.qkv] == [8, 8, 8]
    assert sum(rows.values()) == 2 * (24 + 8 + 12 * (1 + swiglu) + 8) + 4 * 8  # weights and biases, two LayerNorms


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("vit", {}),
        ("vit", {"representation_size": 6, "num_classes": 0}),
        ("deit", {"distilled": True}),
        ("deit", {"registers": 1}),
        ("ijepa", {"pool": "gap"}),
        ("dinov2", {"pool": "token+gap", "layer_scale": 1.0}),
        ("dinov2_with_registers", {"registers": 2, "layer_scale": 1.0, "num_classes": 0}),
        ("dinov3_vit", {"rotary": Rotary(), "position": "none", "num_classes": 0, "layer_scale": 1.0}),
        ("dinov3_vit", {"rotary": Rotary(), "position": "none", "num_classes": 0, "layer_scale": 1.0, "registers": 2}),
        ("clip", {"pre_norm": True, "pool": "gap", "final_norm": "none", "registers": 1}),
        ("clip_vision_model", {"pre_norm": True}),
        ("siglip_vision_model", {"pool": "map", "num_classes": 0}),
    ],
)
def test_a_file_has_the_arrays_of_the_layout(kind: str, changes: dict[str, Any]) -> None:
    """What `to_file` changes, `from_file` changes back."""
    family, config = FAMILIES[kind], override(CONFIG, **changes)
    arrays = {name: torch.randn(slot.shape) for name, slot in huggingface_layout(family, config).items()}
    patches = "embeddings.patch_embedding.bias"
    for name in {"clip": (patches,), "clip_vision_model": (patches, "classifier.bias")}.get(kind, ()):
        arrays[name].zero_()  # CLIP's files have none
    settings = {"architectures": ["CLIPForImageClassification"]} if kind == "clip" else {}
    again = from_file(family, settings, to_file(family, settings, arrays))
    assert again.keys() == arrays.keys()
    assert all(torch.equal(again[name], array) for name, array in arrays.items())

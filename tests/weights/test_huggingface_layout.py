import pytest

from vitlab.models import ViTConfig
from vitlab.weights.huggingface_layout import FAMILIES, huggingface_layout

CONFIG = ViTConfig(image_size=16, patch_size=8, width=8, depth=1, heads=2, mlp_dim=12, num_classes=3)


@pytest.mark.parametrize("kind", sorted(FAMILIES.keys() - {"bit"}))
@pytest.mark.parametrize("swiglu", [False, True])
def test_names_are_different_and_have_the_rows_of_their_parts(kind: str, swiglu: bool) -> None:
    config = ViTConfig(**{**vars(CONFIG), "swiglu": swiglu, "pre_norm": True, "pool": "map"})
    layout, family = huggingface_layout(kind, config), FAMILIES[kind]
    rows = {name: slot.shape[0] for name, slot in layout.items() if name.startswith(f"{family.blocks}0.")}
    assert len({(slot.ours, slot.rows) for slot in layout.values()}) == len(layout)
    assert [rows[f"{family.blocks}0.{part}.weight"] for part in family.qkv] == [8, 8, 8]
    assert sum(rows.values()) == 2 * (24 + 8 + 12 * (1 + swiglu) + 8) + 4 * 8  # weights and biases, two LayerNorms

import pytest
import torch

from vitlab.models import Variant, ViTConfig
from vitlab.weights.timm_layout import eva_names, rename_eva, reorder_pairs


@pytest.mark.parametrize("mlp_norm", [False, True])
def test_names_and_halves_of_the_first_layer_are_restored(mlp_norm: bool) -> None:
    config = ViTConfig(variant=Variant(swiglu=True, mlp_norm=mlp_norm))
    tensors = {"blocks.0.mlp.fc1.weight": torch.randn(6, 2), "blocks.0.ls1.gamma": torch.randn(2)}
    theirs = eva_names(tensors, config)
    assert ("blocks.0.mlp.fc1_g.weight" in theirs) == mlp_norm
    assert "blocks.0.gamma_1" in theirs
    ours = rename_eva(theirs)
    assert ours.keys() == tensors.keys()
    assert all(torch.equal(ours[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("order", "expected"), [("rows", [0, 2, 4, 6, 1, 3, 5, 7]), ("columns", [4, 6, 0, 2, 5, 7, 1, 3])]
)
def test_pairs_of_queries_and_keys_move_half_a_head_apart(order: str, expected: list[int]) -> None:
    """The first rows of our pairs are of the row, the last of the column."""
    tensors = {"blocks.0.attn.qkv.bias": torch.arange(8.0).repeat(3)}
    reordered = reorder_pairs(tensors, ViTConfig(width=8, heads=1), order)
    assert reordered["blocks.0.attn.qkv.bias"].tolist() == [*expected, *expected, *range(8)]

"""The parts of a step: a table of names, and shares that sum to 1."""

import pytest
import torch

from vitlab.cost.parts import PARTS, REST, as_text, part_of, profile_step, shares
from vitlab.cost.peers import OURS, Work, build
from vitlab.models import ViTConfig

SMALL = ViTConfig(image_size=16, patch_size=4, width=32, depth=2, heads=2, mlp_dim=64, num_classes=5)


def test_no_operation_is_in_two_parts() -> None:
    names = [name for part in PARTS.values() for name in part]
    assert len(names) == len(set(names))


def test_part_of() -> None:
    assert part_of("aten::addmm") == "matrix products"
    assert part_of("aten::bmm") == "attention"
    assert part_of("autograd::engine::evaluate_function: AddmmBackward0") == REST


def test_shares_are_of_all_time() -> None:
    found = shares([("aten::mm", 5.0), ("aten::addmm", 1.0), ("aten::gelu", 2.0), ("who knows", 2.0)])
    assert found == {
        **dict.fromkeys([*PARTS, REST], 0.0),
        "matrix products": 0.6,
        "activation functions": 0.2,
        REST: 0.2,
    }
    assert as_text(found) == "matrix products 60%, activation functions 20%, the rest 20%"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_training_step_has_every_part(dtype: str) -> None:
    step = build(OURS, Work(SMALL, "train", 4, "float32" if dtype == "float32" else "bfloat16")).step
    found = profile_step(step, torch.device("cpu"), steps=2)
    assert sum(found.values()) == pytest.approx(1)
    assert set(found) == {*PARTS, REST}
    assert all(share > 0 for share in found.values()), found


def test_every_name_is_an_operation_of_torch() -> None:
    """But for those that only some builds have."""
    optional = {"cudnn_convolution", "mkldnn_convolution", "_foreach_lerp_"}
    for names in PARTS.values():
        for name in set(names) - optional:
            assert hasattr(torch.ops.aten, name), name

import pytest
import torch

from vitlab.models import ResNetBody, ViTConfig
from vitlab.weights.layout import (
    check_arrays,
    check_supported,
    read_state,
    renamed_layout,
    write_state,
)


def test_rows_are_split_in_order_and_joined_again() -> None:
    def rename(ours: str) -> dict[str, int]:
        return {f"{ours}.q": 1, f"{ours}.kv": 2} if "qkv" in ours else {ours.upper(): 1}

    name, config = "blocks.0.attention.qkv.weight", ViTConfig(image_size=16, width=8, depth=1, heads=2, mlp_dim=12)
    layout = {theirs: slot for theirs, slot in renamed_layout(config, rename).items() if slot.ours == name}
    state = {name: torch.arange(24.0)[:, None].expand(24, 8)}
    arrays = write_state(layout, state)
    assert arrays[f"{name}.kv"].shape == (16, 8)
    assert arrays[f"{name}.kv"][0, 0] == 8
    check_arrays("x", layout, arrays)
    assert torch.equal(read_state(layout, arrays)[name], state[name])


def test_the_first_unsupported_setting_is_named() -> None:
    with pytest.raises(ValueError, match=r"stem\.width=64, which X cannot represent; it has 1 or 2.*save_model"):
        check_supported("X", ResNetBody(), {"version": ("v1",), "width": (1, 2)}, prefix="stem.")

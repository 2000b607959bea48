import pytest
import torch

from vitlab.models import ResNetBody, ViTConfig
from vitlab.weights.layout import (
    check_shapes,
    check_supported,
    count_units,
    one_of,
    preview,
    read_state,
    renamed_layout,
    require_shape,
    write_state,
)

CONFIG = ViTConfig(image_size=16, width=8, depth=1, heads=2, mlp_dim=12, num_classes=3)


def test_rows_are_split_in_order_and_joined_again() -> None:
    def rename(ours: str) -> dict[str, int]:
        return {f"{ours}.q": 1, f"{ours}.kv": 2} if "qkv" in ours else {ours.upper(): 1}

    name = "blocks.0.attention.qkv.weight"
    layout = {theirs: slot for theirs, slot in renamed_layout(CONFIG, rename).items() if slot.ours == name}
    assert layout[f"{name}.kv"].shape == (16, 8)
    state = {name: torch.arange(24.0)[:, None].expand(24, 8)}
    arrays = write_state(layout, state)
    assert arrays[f"{name}.kv"][0, 0] == 8
    assert torch.equal(read_state(layout, arrays)[name], state[name])
    assert arrays == {}


def test_arrays_that_do_not_fit_are_listed() -> None:
    check_shapes("x", {"a": (1, 2), "b": ()}, {"b": (), "a": (1, 2)})
    with pytest.raises(ValueError, match=r"1 missing: c; 1 unknown: d; 1 of another shape: b .* \(9,\) .* \(2,\)"):
        check_shapes("x", {"a": (1,), "b": (2,), "c": (3,)}, {"a": (1,), "b": (9,), "d": (4,)})
    assert preview([str(i) for i in range(15)], most=3) == "0, 1, 2 and 12 more"


def test_arrays_that_sizes_are_read_from_are_required() -> None:
    arrays = {"a": torch.zeros(2, 3), "empty": torch.zeros(0, 3)}
    assert require_shape("x.npz", arrays, "a", 2) == (2, 3)
    for name, ndim, problem in (("b", 1, "b is missing"), ("a", 3, r"\(2, 3\)"), ("empty", 2, r"\(0, 3\)")):
        with pytest.raises(ValueError, match=rf"x.npz .*{problem}.*has a, empty"):
            require_shape("x.npz", arrays, name, ndim)


def test_units_are_counted_by_stage() -> None:
    assert count_units({("10", "1"), ("2", "1"), ("2", "2")}) == (2, 1)


def test_the_first_unsupported_setting_is_named() -> None:
    body = ResNetBody()
    check_supported("X", body, {"width": one_of(body.width, 64)})
    with pytest.raises(ValueError, match=r"stem\.width=64, which X cannot represent; it has 1 or 2.*save_model"):
        check_supported("X", body, {"version": (True, ""), "width": one_of(body.width, 1, 2)}, "stem.")

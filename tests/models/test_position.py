import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitlab.models import ViTConfig
from vitlab.models.position import interpolate_offsets, interpolate_positions, resize_positions
from vitlab.models.vit import ViT


def bilinear(grid: np.ndarray, new: tuple[int, int]) -> np.ndarray:
    """Corner-aligned bilinear interpolation of [h, w, D], one output at a time."""
    h, w, _ = grid.shape
    out = np.zeros((*new, grid.shape[-1]))
    for i in range(new[0]):
        for j in range(new[1]):
            y = i * (h - 1) / (new[0] - 1) if new[0] > 1 else 0.0
            x = j * (w - 1) / (new[1] - 1) if new[1] > 1 else 0.0
            y0, x0 = min(int(y), h - 1), min(int(x), w - 1)
            y1, x1 = min(y0 + 1, h - 1), min(x0 + 1, w - 1)
            top = grid[y0, x0] * (1 - (x - x0)) + grid[y0, x1] * (x - x0)
            bottom = grid[y1, x0] * (1 - (x - x0)) + grid[y1, x1] * (x - x0)
            out[i, j] = top * (1 - (y - y0)) + bottom * (y - y0)
    return out


def test_interpolation_is_googles(shared: Path) -> None:
    with np.load(shared / "golden" / "posemb.npz") as archive:
        cases = sorted({key.rsplit("/", 1)[0] for key in archive.files if key.startswith("interp/")})
        assert len(cases) == 5
        for case in cases:
            table, theirs = archive[f"{case}/in"], archive[f"{case}/out"].astype(np.float64)
            old, new = int(table.shape[1] ** 0.5), int(theirs.shape[1] ** 0.5)
            prefix = table.shape[1] - old * old
            ours = interpolate_positions(torch.from_numpy(table), (old, old), (new, new), prefix).double().numpy()
            assert np.abs(ours - theirs).max() <= 1e-6 * np.sqrt((theirs**2).mean()), case


@given(
    old=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    new=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    prefix=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_interpolation_is_bilinear_with_corners_aligned(
    old: tuple[int, int], new: tuple[int, int], prefix: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(1, prefix + old[0] * old[1], 3, generator=generator)
    ours = interpolate_positions(table, old, new, prefix)
    assert torch.equal(ours[:, :prefix], table[:, :prefix])
    grid = table[0, prefix:].double().numpy().reshape(*old, 3)
    np.testing.assert_allclose(ours[0, prefix:].numpy().reshape(*new, 3), bilinear(grid, new), rtol=0, atol=1e-6)


def test_precision_and_length_of_a_table() -> None:
    table = torch.randn(1, 10, 4).bfloat16()
    assert interpolate_positions(table, (3, 3), (3, 3), 1) is table
    exact = interpolate_positions(table.float(), (3, 3), (5, 5), 1)
    assert torch.equal(interpolate_positions(table, (3, 3), (5, 5), 1), exact.bfloat16())
    with pytest.raises(ValueError, match="10 rows"):
        interpolate_positions(torch.zeros(1, 10, 4), (3, 3), (4, 4), 0)
    with pytest.raises(ValueError, match="10 offsets"):
        interpolate_offsets(torch.zeros(1, 10, 4), (2, 3), (4, 4))


def rows_and_columns(offset: int, width: int) -> tuple[int, int]:
    """An offset in reading order as rows, and columns of which there are at most half a row."""
    down = math.floor((offset + width // 2) / width)
    return down, offset - down * width


@pytest.mark.parametrize(("old", "new"), [((3, 5), (5, 9)), ((3, 8), (3, 5))])
def test_offsets_between_the_old_ones_are_their_bilinear_mean(old: tuple[int, int], new: tuple[int, int]) -> None:
    """A table that is linear in rows and columns remains so, but where columns continue in the next row."""
    (h, w), (h2, w2) = old, new
    offsets = [rows_and_columns(offset, w) for offset in range(1 - h * w, h * w)]
    table = torch.tensor([[[1 + 2.0 * dy - 3.0 * dx, dy * dx] for dy, dx in offsets]])
    resized = interpolate_offsets(table, old, new)[0]
    assert resized.shape == (2 * h2 * w2 - 1, 2)
    checked = 0
    for offset in range(1 - h2 * w2, h2 * w2):
        dy, dx = rows_and_columns(offset, w2)
        y, x = dy * (h - 1) / (h2 - 1), dx * (w - 1) / (w2 - 1)
        if abs(dy) < h2 and -(w // 2) <= math.floor(x) and math.ceil(x) <= w - 1 - w // 2:
            torch.testing.assert_close(resized[offset + h2 * w2 - 1], torch.tensor([1 + 2 * y - 3 * x, y * x]))
            checked += 1
    assert checked > h2 * w2


def test_every_kind_is_resized_to_another_grid(vit_kind: ViTConfig) -> None:
    """Rows and columns separately, offsets between the corners, and every copy alike."""
    (h, w), method = vit_kind.grid, "bicubic"
    image_size = ((h + 2) * vit_kind.stride, (w + 2) * vit_kind.stride)
    with torch.device("meta"):
        new = ViT(dataclasses.replace(vit_kind, image_size=image_size))
    state, before = ViT(vit_kind).state_dict(), vit_kind.num_position_prefix
    resized = resize_positions(state, vit_kind, new.config.grid, method)
    assert resized.keys() == {name for name in state if name.startswith("position.")} - {"position.prefix"}
    for name, tensor in resized.items():
        axis = {"position.rows": 0, "position.columns": 1}.get(name)
        if axis is not None:
            sides = (1, vit_kind.grid[axis]), (1, new.config.grid[axis])
            expected = interpolate_positions(state[name], *sides, 0, method)
        elif vit_kind.position == "1d":
            expected = interpolate_positions(state[name], (h, w), (h + 2, w + 2), before, method)
        else:
            expected = interpolate_offsets(state[name], (h, w), (h + 2, w + 2))
        torch.testing.assert_close(tensor, expected)
        assert tensor.shape == new.state_dict()[name].shape

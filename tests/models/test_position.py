from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitlab.models import ViTConfig
from vitlab.models.position import PositionEmbedding, interpolate_positions


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


def test_interpolation_is_google_s(shared: Path) -> None:
    with np.load(shared / "golden" / "posemb.npz") as archive:
        cases = sorted({key.rsplit("/", 1)[0] for key in archive.files if key.startswith("interp/")})
        assert len(cases) == 5
        for case in cases:
            given, theirs = archive[f"{case}/in"], archive[f"{case}/out"].astype(np.float64)
            old, new = int(given.shape[1] ** 0.5), int(theirs.shape[1] ** 0.5)
            prefix = given.shape[1] - old * old
            ours = interpolate_positions(torch.from_numpy(given), (old, old), (new, new), prefix).double().numpy()
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


@pytest.mark.parametrize(("old", "new"), [(28, 48), (28, 24), (24, 22), (16, 30), (16, 59)])
def test_the_last_row_is_not_lost(old: int, new: int) -> None:
    """Deviation: for these pairs scipy's rounding leaves zeros in Google's last row and column."""
    table = torch.randn(1, 1 + old * old, 2)
    ours = interpolate_positions(table, (old, old), (new, new), 1)[0, 1:].reshape(new, new, 2)
    corners = table[0, 1:].reshape(old, old, 2)
    for i in (0, -1):
        for j in (0, -1):
            torch.testing.assert_close(ours[i, j], corners[i, j], rtol=0, atol=1e-6)
    assert ours[-1].abs().min() > 0
    assert ours[:, -1].abs().min() > 0


def test_the_same_grid_is_the_same_table() -> None:
    table = torch.randn(1, 10, 4)
    assert interpolate_positions(table, (3, 3), (3, 3), 1) is table


def test_half_precision_is_kept() -> None:
    table = torch.randn(1, 10, 4).bfloat16()
    ours = interpolate_positions(table, (3, 3), (5, 5), 1)
    assert ours.dtype == torch.bfloat16
    exact = interpolate_positions(table.float(), (3, 3), (5, 5), 1)
    assert torch.equal(ours, exact.bfloat16())


def test_a_table_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"10 rows does not fit 0 prefix tokens and a grid of 3x3 patches \(9 rows\)"):
        interpolate_positions(torch.zeros(1, 10, 4), (3, 3), (4, 4), 0)


def test_positions_are_added_to_every_token() -> None:
    config = ViTConfig(image_size=8, patch_size=4, width=6, heads=2)
    position = PositionEmbedding(config)
    assert position.table is not None
    assert position.table.shape == (1, 5, 6)
    torch.nn.init.normal_(position.table)
    tokens = torch.randn(3, 5, 6)
    assert torch.equal(position(tokens), tokens + position.table)


def test_no_positions_leave_the_tokens_alone() -> None:
    position = PositionEmbedding(ViTConfig(image_size=8, patch_size=4, width=6, heads=2, position="none"))
    tokens = torch.randn(3, 5, 6)
    assert position(tokens) is tokens
    assert position.state_dict() == {}

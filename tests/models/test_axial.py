import pytest
import torch
from torch import nn

from vitlab.models.resnet import AxialMixing


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("grid", [(4, 5), (1, 6)])
def test_mixing_is_attention_of_every_row_then_of_every_column(grid: tuple[int, int], stride: int) -> None:
    mixing = AxialMixing(16, grid, stride)
    for parameter in mixing.parameters():
        nn.init.normal_(parameter, std=0.3)
    maps = torch.randn(2, 16, *grid)
    rows = [mixing.rows(maps[:, :, i].transpose(1, 2), mixing.row_offsets) for i in range(grid[0])]
    out = torch.stack(rows, dim=1)
    columns = [mixing.columns(out[:, :, j], mixing.column_offsets) for j in range(grid[1])]
    out = torch.stack(columns, dim=2).permute(0, 3, 1, 2)
    mixed = mixing(maps)
    assert mixed.shape == (2, 16, -(-grid[0] // stride), -(-grid[1] // stride))
    for i in range(mixed.shape[2]):
        for j in range(mixed.shape[3]):
            window = out[:, :, i * stride : (i + 1) * stride, j * stride : (j + 1) * stride]
            torch.testing.assert_close(mixed[:, :, i, j], window.mean(dim=(2, 3)), rtol=1e-4, atol=1e-5)

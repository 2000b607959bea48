from collections.abc import Callable

import pytest
import torch
from torch import nn

from vitlab.models.resnet import AxialMixing, ResNet


def randomize(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)


# --- instead of a convolution ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("grid", [(3, 4), (4, 5), (1, 6)])
def test_mixing_is_attention_of_every_row_then_of_every_column(grid: tuple[int, int], stride: int) -> None:
    mixing = AxialMixing(16, grid, stride)
    randomize(mixing)
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


def test_maps_of_another_size_are_refused(small_resnet: Callable[..., ResNet]) -> None:
    model = small_resnet(mixing="axial", version="v2")
    with pytest.raises(ValueError, match="built for 24x32 pixels and the images have 28x32"):
        model(torch.randn(1, 3, 28, 32))
    assert small_resnet(version="v2")(torch.randn(1, 3, 28, 32)).shape == (1, 5)

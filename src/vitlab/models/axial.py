"""App. D.6: attention along rows, then along columns, instead of among all positions."""

import torch
import torch.fx
from jaxtyping import Float
from torch import Tensor, nn

from vitlab.errors import UserError
from vitlab.models.attention import Attention
from vitlab.models.config import ViTConfig
from vitlab.models.encoder import Block
from vitlab.models.resnet_config import AXIAL_HEADS


class AxialBlock(nn.Module):
    """Replaces one encoder block: a block (attention and MLP) along the rows, then one along the columns.

    The paper does not describe the class token. Here every row gets a copy of the prefix tokens, which
    attend and are attended to like its patches; after the rows the copies are averaged, and the same with columns. On
    a grid of one row the first half is then exactly a block of full attention.
    """

    def __init__(self, config: ViTConfig, drop_path: float = 0.0) -> None:
        super().__init__()
        self.grid, self.prefix = config.grid, config.num_prefix_tokens
        self.rows = Block(config, drop_path)
        self.columns = Block(config, drop_path)

    def forward(
        self, tokens: Float[Tensor, "B T D"], relative: Float[Tensor, "R Dh"] | None = None
    ) -> Float[Tensor, "B T D"]:
        assert relative is None, "ViTConfig refuses it"
        prefix, patches = tokens[:, : self.prefix], tokens[:, self.prefix :].unflatten(1, self.grid)
        prefix, patches = _along(self.rows, prefix, patches)
        prefix, columns = _along(self.columns, prefix, patches.transpose(1, 2))
        return torch.cat([prefix, columns.transpose(1, 2).flatten(1, 2)], dim=1)


def _along(
    block: nn.Module, prefix: Float[Tensor, "B p D"], lines: Float[Tensor, "B n s D"]
) -> tuple[Float[Tensor, "B p D"], Float[Tensor, "B n s D"]]:
    """Applies the block to n lines of s positions, every one a sequence with a copy of the prefix in front."""
    batch, count = lines.shape[:2]
    size = prefix.shape[1]
    copies = prefix[:, None].expand(-1, count, -1, -1)
    out = block(torch.cat([copies, lines], dim=2).flatten(0, 1)).unflatten(0, (batch, count))
    return out[:, :, :size].mean(dim=1), out[:, :, size:]


class AxialMixing(nn.Module):
    """Replaces a 3x3 convolution of a ResNet: attention along rows, then columns, with relative encodings.

    A stride of 2 is the mean over 2x2 positions afterwards, of which those at an odd border have fewer.
    """

    def __init__(self, channels: int, grid: tuple[int, int], stride: int) -> None:
        super().__init__()
        self.grid = grid
        self.rows = Attention(channels, AXIAL_HEADS)
        self.columns = Attention(channels, AXIAL_HEADS)
        head = channels // AXIAL_HEADS
        self.row_offsets = nn.Parameter(torch.empty(2 * grid[1] - 1, head))
        self.column_offsets = nn.Parameter(torch.empty(2 * grid[0] - 1, head))
        self.pool = nn.AvgPool2d(stride, ceil_mode=True) if stride > 1 else nn.Identity()

    def forward(self, maps: Float[Tensor, "B C h w"]) -> Float[Tensor, "B C h2 w2"]:
        maps = _check_grid(maps, self.grid)
        height, width = self.grid
        rows = self.rows(maps.permute(0, 2, 3, 1).flatten(0, 1), self.row_offsets).unflatten(0, (-1, height))
        columns = self.columns(rows.transpose(1, 2).flatten(0, 1), self.column_offsets).unflatten(0, (-1, width))
        return self.pool(columns.permute(0, 3, 2, 1))


@torch.fx.wrap  # one node of a symbolic trace, which knows no shapes
def _check_grid(maps: Float[Tensor, "B C h w"], grid: tuple[int, int]) -> Float[Tensor, "B C h w"]:
    if tuple(maps.shape[-2:]) != grid:
        raise UserError(
            f"axial attention was built for a feature map of {grid[0]}x{grid[1]} and got one of "
            f"{maps.shape[-2]}x{maps.shape[-1]}; resize the images to the model's image_size."
        )
    return maps

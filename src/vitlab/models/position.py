"""App. D.4: where a token stands. Position embeddings, and their interpolation to another grid (Sec. 3.2)."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitlab.models.config import ViTConfig


class PositionEmbedding(nn.Module):
    """E_pos of Eq. 1: one learned row for every token, added at the stem (`1d`), or nothing (`none`)."""

    table: nn.Parameter | None

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        if config.position == "none":
            self.register_parameter("table", None)
        else:
            self.table = nn.Parameter(torch.zeros(1, config.num_tokens, config.width))

    def forward(self, tokens: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return tokens if self.table is None else tokens + self.table


def interpolate_positions(
    table: Float[Tensor, "1 T D"], old_grid: tuple[int, int], new_grid: tuple[int, int], prefix: int
) -> Float[Tensor, "1 T2 D"]:
    """The rows of `table` resampled from one grid of patches to another (Sec. 3.2).

    Bilinear with the corner patches' centres aligned, as scipy's `zoom(order=1)` in Google's code; the first
    `prefix` rows (the class token's) are kept as they are.

    Deviation: for some pairs of sizes (28 -> 48, say) rounding inside scipy makes Google's last row and column
    zero. That is an accident, not a method, and is not repeated here.
    """
    if table.shape[1] != prefix + old_grid[0] * old_grid[1]:
        raise ValueError(
            f"a position table of {table.shape[1]} rows does not fit {prefix} prefix tokens and a grid of "
            f"{old_grid[0]}x{old_grid[1]} patches ({prefix + old_grid[0] * old_grid[1]} rows)."
        )
    if tuple(old_grid) == tuple(new_grid):
        return table
    grid = table[:, prefix:].unflatten(1, old_grid).permute(0, 3, 1, 2)
    grid = F.interpolate(grid.double(), size=tuple(new_grid), mode="bilinear", align_corners=True)
    return torch.cat([table[:, :prefix], grid.flatten(2).transpose(1, 2).to(table.dtype)], dim=1)

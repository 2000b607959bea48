"""Position embeddings: E_pos of Eq. 1, the alternatives of App. D.4 (Table 8), and kinds of other checkpoints.

For another image size the patches stay as they are, so there are more or fewer of them: `interpolate_positions`
resamples the embeddings on their grid (Sec. 3.2). It is where the paper puts knowledge of the image's 2D structure in
by hand. `load_model(..., image_size=...)` calls it once; with `dynamic_image_size` each forward pass does.

    interpolate_positions(torch.zeros(1, 197, 768), (14, 14), (24, 24), 1)  # [1, 577, 768]
"""

import torch
import torch.fx
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitlab.errors import UserError
from vitlab.models.config import ViTConfig
from vitlab.models.variant import Interpolation
from vitlab.models.variant_layers import FLOAT64, rotary_table

NAMES = ("table", "columns", "rows", "prefix", "rotation")
Tables = dict[str, Tensor]
"""The tensors of a `PositionEmbedding` by name: its own, or those of another grid."""


class PositionEmbedding(nn.Module):
    """The position embeddings of a model, J of them: one, or one for every block (`position_at`, Table 8).

    | kind | parameters | added to a token |
    |---|---|---|
    | `none` | | nothing |
    | `1d` | `table` [J, T, D] | the row of its position in row-major order (E_pos of Eq. 1) |
    | `2d` | `columns` [J, w, D/2], `rows` [J, h, D/2], `prefix` | column's and row's halves, one after the other |
    | `sincos2d` | | `sincos_table`, fixed |
    | `relative` | `table` [J, 2N-1, D/k] | nothing: `relative_logits` reads it inside attention |

    RoPE, besides any of these but `relative`, is the fixed `rotation` [N, Dh], which `rotate` reads inside attention.

    T counts tokens with a position: registers, and with `class_position` off the class token, have none.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        kind, d, (h, w) = config.position, config.width, config.grid
        self.kind = kind
        num_prefix = config.num_position_prefix
        self.num_with_position = 0 if kind == "sincos2d" else num_prefix
        """The first prefix tokens, which have a row: of a class token and 4 registers the class token."""
        self.num_without_position = config.num_prefix_tokens - self.num_with_position
        copies = config.depth if config.position_at == "every" else 1
        self.table: nn.Parameter | Tensor | None = None
        if kind == "1d":
            self.table = nn.Parameter(torch.empty(copies, num_prefix + h * w, d))
        elif kind == "relative":
            self.table = nn.Parameter(torch.empty(copies, 2 * h * w - 1, d // config.heads))
        elif kind == "2d":
            self.columns = nn.Parameter(torch.empty(copies, w, d // 2))
            self.rows = nn.Parameter(torch.empty(copies, h, d // 2))
            self.prefix = nn.Parameter(torch.empty(copies, num_prefix, d)) if num_prefix else None
        for name, table in fixed_tables(config, config.grid).items():
            self.__dict__.pop(name, None)  # `register_buffer` refuses a name that is an attribute, such as `table`
            self.register_buffer(name, table, persistent=False)

    def tables(self, grid: tuple[int, int] | None = None) -> Tables:
        """The tensors above by name; with `grid`, those of a model that is loaded at that size."""
        tables = {name: getattr(self, name) for name in NAMES if getattr(self, name, None) is not None}
        return tables if grid is None else resampled(tables, self.config, grid)

    def added_rows(self, layer: int = 0, tables: Tables | None = None) -> Float[Tensor, "T D"] | None:
        """What is added to the tokens in front of block `layer`; None for kinds without. `tables`: of another grid."""
        if self.kind in ("none", "relative"):
            return None
        tables = self.tables() if tables is None else tables
        if self.kind == "2d":
            layer = layer % tables["rows"].shape[0]  # one table for every block, or one for all
            columns, rows = tables["columns"][layer], tables["rows"][layer]
            h, w = rows.shape[0], columns.shape[0]
            grid = torch.cat([columns[None].expand(h, -1, -1), rows[:, None].expand(-1, w, -1)], dim=-1)
            table = grid.flatten(0, 1)
            if self.num_with_position:
                table = torch.cat([tables["prefix"][layer], table])
        else:
            table = tables["table"][layer % tables["table"].shape[0]]
        if not self.num_without_position:
            return table
        zeros = table.new_zeros(self.num_without_position, table.shape[1])
        return torch.cat([table[: self.num_with_position], zeros, table[self.num_with_position :]])

    def in_attention(self, layer: int, tables: Tables | None = None) -> Float[Tensor, "R Dh"] | None:
        """The `positions` of block `layer`'s attention: embeddings of offsets (`relative`), rotations, or None."""
        tables = self.tables() if tables is None else tables
        if self.kind == "relative":
            return tables["table"][layer % tables["table"].shape[0]]
        return tables["rotation"] if self.config.variant.rotary else None

    def forward(
        self, tokens: Float[Tensor, "B T D"], layer: int = 0, tables: Tables | None = None
    ) -> Float[Tensor, "B T D"]:
        rows = self.added_rows(layer, tables)
        return tokens if rows is None else tokens + rows.to(tokens.dtype)


def fixed_tables(config: ViTConfig, grid: tuple[int, int]) -> dict[str, Tensor]:
    """The tables that are computed: `table` of `sincos2d`, and `rotation`."""
    tables, width = {}, config.width
    if config.position == "sincos2d":
        tables["table"] = sincos_table(grid, width)
    if config.variant.rotary:
        tables["rotation"] = rotary_table(grid, width // config.heads, config.variant.rotary)
    return tables


@torch.fx.wrap  # one node of a symbolic trace, which knows no sizes
def resampled(tables: Tables, config: ViTConfig, grid: tuple[int, int]) -> Tables:
    """`tables` of the configuration's grid, for another one."""
    if same_grid(config.grid, grid):
        return tables
    state = {f"position.{name}": table for name, table in tables.items()}
    learned = {name.removeprefix("position."): table for name, table in resize_positions(state, config, grid).items()}
    fixed = {name: table.to(tables[name]) for name, table in fixed_tables(config, grid).items()}
    return tables | learned | fixed


def same_grid(old: tuple[int, int], new: tuple[int, int]) -> bool:
    """Whether two grids are equal. A grid of an export with dynamic sizes is symbolic: to compare it would fix it."""
    return all(isinstance(side, int) for side in new) and tuple(old) == tuple(new)


def sincos_table(grid: tuple[int, int], width: int) -> Float[Tensor, "1 N D"]:
    """big_vision's fixed positions: sin and cos of the column, then of the row, at D/4 wavelengths."""
    rows, columns = torch.meshgrid(*(torch.arange(side, **FLOAT64) for side in grid), indexing="ij")
    omega = 10_000.0 ** -torch.linspace(0, 1, width // 4, **FLOAT64)
    x, y = columns.reshape(-1, 1) * omega, rows.reshape(-1, 1) * omega
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1)[None].float()


def resize_positions(
    state: dict[str, Tensor], config: ViTConfig, grid: tuple[int, int], method: Interpolation | None = None
) -> dict[str, Tensor]:
    """The entries of `state` that are position embeddings of `config`'s grid, for another grid; resampled by `method`,
    or by the configuration's method."""
    method = method or config.variant.position_interpolation or "corners"
    h, w = config.grid
    h2, w2 = grid
    if config.position == "1d":
        table = state["position.table"]
        return {"position.table": interpolate_positions(table, (h, w), grid, config.num_position_prefix, method)}
    if config.position == "2d":
        rows, columns = state["position.rows"], state["position.columns"]
        return {
            "position.rows": interpolate_positions(rows, (h, 1), (h2, 1), 0, method),
            "position.columns": interpolate_positions(columns, (w, 1), (w2, 1), 0, method),
        }
    if config.position == "relative":
        return {"position.table": interpolate_offsets(state["position.table"], (h, w), grid)}
    return {}


def interpolate_positions(
    table: Float[Tensor, "J T D"],
    old_grid: tuple[int, int],
    new_grid: tuple[int, int],
    num_prefix_tokens: int,
    method: Interpolation = "corners",
) -> Float[Tensor, "J T2 D"]:
    """The rows of `table` resampled from one grid of patches to another (Sec. 3.2).

    `corners` is what scipy's `zoom(order=1)` computes in Google's code; the first `num_prefix_tokens` rows stay.

    Deviation: for some pairs of sizes (28 -> 48, say) rounding inside scipy makes Google's last row and column
    zero. That is an accident, not a method, and is not repeated here.
    """
    p, rows = num_prefix_tokens, num_prefix_tokens + old_grid[0] * old_grid[1]
    if table.shape[1] != rows:
        raise UserError(
            f"a position table of {table.shape[1]} rows does not fit {p} prefix tokens and a grid of "
            f"{old_grid[0]}x{old_grid[1]} patches ({rows} rows)."
        )
    if same_grid(old_grid, new_grid):
        return table
    grid = table[:, p:].unflatten(1, old_grid).permute(0, 3, 1, 2)
    grid = grid.float() if torch.compiler.is_exporting() else grid.double()  # onnxruntime resamples float32 alone
    if method == "corners":
        grid = F.interpolate(grid, size=new_grid, mode="bilinear", align_corners=True)
    else:
        grid = F.interpolate(grid, size=new_grid, mode="bicubic", antialias=method == "bicubic_antialias")
    return torch.cat([table[:, :p], grid.flatten(2).transpose(1, 2).to(table.dtype)], dim=1)


def interpolate_offsets(
    table: Float[Tensor, "J R Dh"], old_grid: tuple[int, int], new_grid: tuple[int, int]
) -> Float[Tensor, "J R2 Dh"]:
    """Embeddings of offsets in row-major order for another grid, which the paper does not describe.

    An offset is split into rows and at most half a row of columns: 5 on a grid of 4 columns is 1 down and 1 to the
    right, 3 is 1 down and 1 to the left. Both are scaled as the distance between the corner patches. The result falls
    between four offsets of the old grid, and is their bilinear mean.
    """
    (h, w), (h2, w2) = old_grid, new_grid
    if table.shape[1] != 2 * h * w - 1:
        raise UserError(
            f"a table of {table.shape[1]} offsets does not fit a grid of {h}x{w} patches ({2 * h * w - 1} offsets)."
        )
    if same_grid(old_grid, new_grid):
        return table
    offsets = torch.arange(-(h2 * w2 - 1), h2 * w2, device=table.device)
    down = torch.div(offsets + w2 // 2, w2, rounding_mode="floor").clamp(-(h2 - 1), h2 - 1)
    across = offsets - down * w2
    y = down.double() * ((h - 1) / max(h2 - 1, 1))
    x = across.double() * ((w - 1) / max(w2 - 1, 1))
    resized = table.new_zeros(table.shape[0], offsets.shape[0], table.shape[2], dtype=torch.float64)
    for row, weight_y in ((y.floor(), 1 - y % 1), (y.floor() + 1, y % 1)):
        for column, weight_x in ((x.floor(), 1 - x % 1), (x.floor() + 1, x % 1)):
            index = (row * w + column).long().clamp(-(h * w - 1), h * w - 1) + h * w - 1
            resized += (weight_y * weight_x)[None, :, None] * table[:, index].double()
    return resized.to(table.dtype)

"""Attention maps, attention rollout and mean attention distance (Sec. 4.5, Fig. 6, Fig. 7 right, App. D.7, App. D.8).

The maps are the A of Eq. 6, from `models.attention.attention_weights`. Rollout multiplies them from the last layer to
the first, and shows from which patches the prediction comes (Fig. 6). The attention distance of a head is the mean
number of pixels between a patch and what it attends to (Fig. 7). A layer here is one softmax over tokens; a block of an
axial encoder has two layers, rows and columns. `capture.py` calls these for the page of `vitlab inspect`.

    attention_rollout(attention_maps(model, images))  # [B, T, T]
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitlab.errors import UserError
from vitlab.models.attention import Attention, Heads
from vitlab.models.encoder import AxialBlock, Block
from vitlab.models.vit import ViT, evaluation_mode, unwrap, unwrap_module

Axis = Literal["all", "rows", "columns"]


def attention_layers(model: nn.Module) -> tuple[str, ...]:
    """Names of the layers, lowest first: "1", "2", ...; of an axial encoder "1 rows", "1 columns", "2 rows", ..."""
    return tuple(name for name, _, _ in _layers(unwrap_vit(model)))


def visit_attention(
    model: nn.Module, images: Float[Tensor, "B 3 H W"], visit: Callable[[int, Tensor], None]
) -> Float[Tensor, "B T D"]:
    """Calls `visit(layer, map)` after each layer, lowest first, counted from 0; returns `forward_features(images)`.

    A map is softmax(q k^T / sqrt(Dh)) of every head (App. A, Eq. 6; App. D.4): [B, k, T, T], float32. Row i holds the
    attention of token i and sums to one; the prefix (class token, distillation token, registers) comes first. No map is
    stored here: memory is B k T T x 4 bytes. In maps along the rows (columns) of an axial encoder, tokens of other rows
    (columns) are 0, and the row of a prefix token is the mean over its copies, as its output is (`AxialBlock`).

    The model, which may be compiled or wrapped, runs in eval mode without gradients and keeps its state. Raises
    UserError for a ResNet and for images of another size.
    """
    vit = unwrap_vit(model)
    layers = _layers(vit)
    layers_per_block = len(layers) // vit.config.depth
    tables = functools.cache(lambda: vit.position.tables(vit._grid(images)))

    def hook(number: int, axis: Axis) -> Callable[..., None]:
        def take(_module: Any, _args: Any, qkv: Tensor) -> None:
            with torch.autocast(qkv.device.type, enabled=False):
                positions = vit.position.in_attention(number // layers_per_block, tables())
                prefix = vit.config.num_prefix_tokens
                maps = _maps(layers[number][1], layers[number][1].split(qkv), positions, prefix)
                visit(number, maps if axis == "all" else _over_all_tokens(maps, axis, vit.config.grid, prefix))

        return take

    # A hook on the projection to q, k and v works for every attention path and leaves `forward` as it is.
    with contextlib.ExitStack() as stack:
        stack.enter_context(evaluation_mode(vit))
        stack.enter_context(torch.no_grad())
        if "torch._dynamo" in sys.modules:  # blocks that are compiled already would skip new hooks
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for number, (_, attention, axis) in enumerate(layers):
            stack.callback(attention.qkv.register_forward_hook(hook(number, axis)).remove)
        return vit.forward_features(images)


def attention_maps(model: nn.Module, images: Float[Tensor, "B 3 H W"]) -> list[Float[Tensor, "B k T T"]]:
    """The maps of all layers, lowest first (`visit_attention`): 22 MB per image with B/16 at 224."""
    maps: list[Tensor] = []
    visit_attention(model, images, lambda _, attention: maps.append(attention))
    return maps


def unwrap_vit(model: nn.Module) -> ViT:
    """The Vision Transformer or hybrid that `unwrap` returns. Raises UserError for a ResNet."""
    if not isinstance(inner := unwrap(model), ViT):
        raise UserError(f"a {type(inner).__name__} has no attention; give a Vision Transformer or a hybrid.")
    return inner


def _layers(model: ViT) -> list[tuple[str, Attention, Axis]]:
    """Name, attention, and what its softmax is over, of each layer, lowest first."""
    layers: list[tuple[str, Attention, Axis]] = []
    for number, block in enumerate(map(unwrap_module, model.blocks), start=1):
        if isinstance(block, AxialBlock):
            layers.append((f"{number} rows", block.rows.attention, "rows"))
            layers.append((f"{number} columns", block.columns.attention, "columns"))
        elif isinstance(block, Block):
            layers.append((str(number), block.attention, "all"))
    return layers


def _maps(
    attention: Attention, heads: Heads, positions: Float[Tensor, "R Dh"] | None = None, prefix: int = 0
) -> Float[Tensor, "B k T S"]:
    """The attention weights in float32, whatever the precision of q and k."""
    maps = torch.empty(*heads[0].shape[:3], heads[1].shape[2], dtype=torch.float32, device=heads[0].device)
    for q, k, out in zip(*(tensor.split(_images_per_chunk(maps)) for tensor in (*heads[:2], maps)), strict=True):
        out.copy_(attention.weights(q, k, positions, prefix))
    return maps


def _images_per_chunk(maps: Float[Tensor, "B k T S"]) -> int:
    """A number for which temporary tensors are small compared with all maps."""
    return max(1, 2**20 // maps[0].numel())


def _over_all_tokens(
    lines: Float[Tensor, "Bn k s s"], axis: Axis, grid: tuple[int, int], prefix: int
) -> Float[Tensor, "B k T T"]:
    """The maps of the n lines (rows, or columns) of each image as one map: 0 between patches of different lines.

    The s tokens of a line are its copy of the prefix, p tokens, and its l patches.
    """

    def by_line(part: Tensor, dim: int) -> Tensor:
        """A view of a part of `full`: at `dim`, for a patch, its line and its position in the line."""
        cells = part.unflatten(dim, grid)
        return cells if axis == "rows" else cells.transpose(dim, dim + 1)

    count = grid[0] if axis == "rows" else grid[1]
    lines = lines.unflatten(0, (-1, count)).transpose(1, 2)  # [B, k, n, s, s]
    tokens = prefix + grid[0] * grid[1]
    full = lines.new_zeros(*lines.shape[:2], tokens, tokens)
    patches = by_line(by_line(full[:, :, prefix:, prefix:], 3), 2)  # [B, k, n, l, n, l]
    within = patches.diagonal(dim1=2, dim2=4)  # [B, k, l, l, n]
    within.copy_(lines[..., prefix:, prefix:].movedim(2, -1))
    by_line(full[:, :, prefix:, :prefix], 2).copy_(lines[..., prefix:, :prefix])
    of_prefix = lines[..., :prefix, :].movedim(2, 3) / count  # [B, k, p, n, s]
    by_line(full[:, :, :prefix, prefix:], 3).copy_(of_prefix[..., prefix:])
    full[:, :, :prefix, :prefix] = of_prefix[..., :prefix].sum(dim=3)
    return full


def attention_rollout(maps: Iterable[Float[Tensor, "B k T T"]], residual: bool = True) -> Float[Tensor, "B T T"]:
    """How much of each input token reaches each output token through attention alone (App. D.8); rows sum to one.

    The maps, lowest layer first, are averaged over heads and multiplied. With `residual` each layer is half its
    attention and half the identity (Abnar and Zuidema, 2020); without it the paper's sentence is taken literally.
    """
    layers = [attention.mean(dim=1) for attention in maps]
    return rollout_rows(torch.eye(layers[0].shape[-1]).to(layers[0]).expand_as(layers[0]), layers, residual)


def rollout_rows(
    rows: Float[Tensor, "B R T"], layers: Sequence[Float[Tensor, "B T T"]], residual: bool = True
) -> Float[Tensor, "B R T"]:
    """Mixtures of output tokens as mixtures of input tokens; `layers` are maps averaged over heads, lowest first."""
    # From the top down, a single row (the prediction's) costs T times less than the whole rollout.
    for attention in reversed(layers):
        mixed = rows @ attention
        rows = (rows + mixed) / 2 if residual else mixed
    return rows


def prediction_weights(model: nn.Module, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B T"]:
    """The weight of each output token in the input of the head; rows sum to one.

    For a MAP head, they are the attention of its learned query, averaged over heads, which takes a forward pass.
    """
    vit = unwrap_vit(model)
    config, (rows, columns) = vit.config, vit._grid(images) or vit.config.grid
    if vit.map is not None:
        with evaluation_mode(vit), torch.no_grad():
            tokens = vit.forward_features(images)
            probe = vit.map.probe.to(tokens.dtype).expand(len(tokens), -1, -1)
            heads = vit.map.attention.project_cross(probe, tokens)
            with torch.autocast(tokens.device.type, enabled=False):
                return _maps(vit.map.attention, heads).mean(dim=1)[:, 0]
    weights = torch.zeros(config.num_prefix_tokens + rows * columns, device=images.device)
    share = 0.5 if config.variant.distilled or config.pool == "token+gap" else 1.0
    if config.has_class_token:
        weights[: 2 if config.variant.distilled else 1] = share
    if config.pool in ("gap", "token+gap"):
        weights[config.num_prefix_tokens :] = share / (rows * columns)
    return weights.expand(len(images), -1)


def prediction_grid(
    attention: Float[Tensor, "B *k T T"], weights: Float[Tensor, "B T"], grid: tuple[int, int]
) -> Float[Tensor, "B *k h w"]:
    """The attention of the prediction to each patch, on the grid of patches (Fig. 6).

    `attention` is a rollout or one layer's maps; `weights` are `prediction_weights`. With a class token alone this is
    its row. Attention to the prefix is left out and the rest is not rescaled, so the sum is at most one.
    """
    rows = weights.reshape(len(weights), *(1,) * (attention.ndim - 2), -1) @ attention
    return rows[..., 0, -grid[0] * grid[1] :].unflatten(-1, grid)


def mean_attention_distance(
    maps: Iterable[Float[Tensor, "B k T T"]], grid: tuple[int, int], patch_size: int, prefix: int
) -> Float[Tensor, "L k"]:
    """Mean attention distance of each head in each layer, in pixels (Fig. 7 right, Fig. 11, App. D.7).

    For every patch, the distances from its center to the centers of all patches (0 to itself) are weighted by its
    attention, then averaged over patches and images. The paper leaves open what happens to the class token: here the
    prefix is dropped, as queries and as keys, and each row is rescaled to sum to one. `patch_size` is config.stride.
    """
    distances, layers = patch_distances(grid, patch_size), []
    for attention in maps:
        if attention.shape[-1] != prefix + len(distances):
            raise UserError(
                f"attention over {attention.shape[-1]} tokens does not fit {prefix} prefix tokens and a grid of "
                f"{grid[0]}x{grid[1]} patches; pass the model's config.num_prefix_tokens and config.grid."
            )
        layers.append(head_distances(attention, distances.to(attention)).mean(dim=0))
    return torch.stack(layers)


def patch_distances(grid: tuple[int, int], patch_size: int) -> Float[Tensor, "N N"]:
    """Pixels between the centers of all pairs of patches, in row-major order."""
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    centers = torch.stack([rows.flatten(), columns.flatten()], dim=1).double() * patch_size
    return (centers[:, None] - centers[None]).norm(dim=-1).float()


def head_distances(attention: Float[Tensor, "B k T T"], distances: Float[Tensor, "N N"]) -> Float[Tensor, "B k"]:
    """Mean attention distance of each head in each image; the first T - N tokens are the prefix.

    A patch with no attention to any patch (in float32 all of it can be on the prefix) counts as 0 pixels.
    """
    prefix = attention.shape[-1] - len(distances)
    parts = []
    for patches in attention[:, :, prefix:, prefix:].split(_images_per_chunk(attention)):
        totals = patches.sum(dim=-1).clamp_min(torch.finfo(patches.dtype).tiny)
        parts.append(((patches * distances).sum(dim=-1) / totals).mean(dim=-1))
    return torch.cat(parts)

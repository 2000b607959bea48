"""Sec. 4.5, App. D.7, D.8: what attends to what. Every number is computed from what `forward` itself computed.

Maps are large, so they are looked at as they come: `visit_attention` hands over each layer's and lets it go. What the
paper shows is built of a few small functions, which `capture` puts together; `attention_maps` keeps all maps of a few
images. One softmax over all tokens is one layer here; a block of an axial encoder has two.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitlab.errors import UserError
from vitlab.models.attention import Attention, Heads, relative_logits
from vitlab.models.axial import AxialBlock
from vitlab.models.encoder import Block
from vitlab.models.vit import Model, ViT, evaluation_mode

Along = Literal["all", "rows", "columns"]


def attention_layers(model: Model) -> tuple[str, ...]:
    """Names of a model's maps, lowest first: "1", "2", ...; of an axial encoder "1 rows", "1 columns", "2 rows", ..."""
    return tuple(name for name, _, _ in _layers(model))


def visit_attention(
    model: Model, images: Float[Tensor, "B 3 H W"], visit: Callable[[int, Tensor], None]
) -> Float[Tensor, "B T D"]:
    """Calls `visit(layer, map)` for each layer, lowest first and counted from 0, as soon as it ran; returns the tokens.

    A map is softmax(q k^T / sqrt(Dh)) of every head, with relative positions where the model has them (App. A,
    Eq. 6; App. D.4): [B, k, T, T], float32. Row i says where token i looks, and sums to one; the prefix (class
    token, distillation token, registers) stands first. Nothing here keeps a map, so that one layer's maps of one batch
    are alive at a time: B k T T x 4 bytes (L/16 at 224: 2.5 MB a image).

    Along the rows (columns) of an axial encoder, what is out of a token's reach is 0, and the row of a prefix token is
    the mean over its copies, as its output is (`AxialBlock`).

    `forward` is not touched: a hook takes the queries and keys from the layer's own projection, so the maps are
    those of whichever path attention takes. The model runs in eval mode and without gradients, and is left as it was.
    The tokens are those of `forward_features`. Raises ValueError for a ResNet, and for images of another size.
    """
    layers = _layers(model)
    assert isinstance(model, ViT)
    halves = len(layers) // model.config.depth
    seen = 0

    def hook(number: int, along: Along) -> Callable[[nn.Module, Any, Tensor], None]:
        def take(_module: nn.Module, _args: Any, qkv: Tensor) -> None:
            nonlocal seen
            seen += 1
            with torch.autocast(qkv.device.type, enabled=False):
                relative = model.position.relative(number // halves)
                weights = _weights(layers[number][1].split(qkv), relative, model.config.num_prefix_tokens)
                if along != "all":
                    weights = _of_all_tokens(weights, along, model.config.grid, model.config.num_prefix_tokens)
                visit(number, weights)

        return take

    with contextlib.ExitStack() as stack:
        stack.enter_context(at_rest(model))
        if "torch._dynamo" in sys.modules:  # compiled blocks would skip hooks that are younger than they are
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for number, (_, attention, along) in enumerate(layers):
            stack.callback(attention.qkv.register_forward_hook(hook(number, along)).remove)
        tokens = model.forward_features(images)
    assert seen == len(layers), "every layer must be seen exactly once"
    return tokens


def attention_maps(model: Model, images: Float[Tensor, "B 3 H W"]) -> list[Float[Tensor, "B k T T"]]:
    """The maps of every layer at once, lowest first: `visit_attention` for a few images (B/16 at 224: 22 MB each)."""
    maps: list[Tensor] = []
    visit_attention(model, images, lambda _, attention: maps.append(attention))
    return maps


def _layers(model: Model) -> list[tuple[str, Attention, Along]]:
    if not isinstance(model, ViT):
        raise UserError(f"a {type(model).__name__} has no attention to look at; give a Vision Transformer or a hybrid.")
    found: list[tuple[str, Attention, Along]] = []
    for number, block in enumerate(model.blocks, start=1):
        if isinstance(block, AxialBlock):
            found.append((f"{number} rows", block.rows.attention, "rows"))
            found.append((f"{number} columns", block.columns.attention, "columns"))
        else:
            assert isinstance(block, Block)
            found.append((str(number), block.attention, "all"))
    return found


def _weights(heads: Heads, relative: Float[Tensor, "R Dh"] | None = None, prefix: int = 0) -> Float[Tensor, "B k T S"]:
    """From queries and keys in the model's own precision; from there on float32."""
    maps = torch.empty(*heads[0].shape[:3], heads[1].shape[2], dtype=torch.float32, device=heads[0].device)
    for q, k, weights in zip(*(tensor.split(_at_once(maps)) for tensor in (*heads[:2], maps)), strict=True):
        q, k = q.float(), k.float()
        logits = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        if relative is not None:
            logits += relative_logits(q, relative.float(), prefix)
        torch.softmax(logits, dim=-1, out=weights)
    return maps


def _at_once(maps: Float[Tensor, "B k T S"]) -> int:
    """Images that are worked on together, so that what is computed on the way stays small beside all maps."""
    return max(1, 2**20 // maps[0].numel())


def _of_all_tokens(
    lines: Float[Tensor, "Bn k s s"], along: Along, grid: tuple[int, int], prefix: int
) -> Float[Tensor, "B k T T"]:
    """The maps of all rows (or columns) of each image, the prefix's copy in front of each, as one map."""
    rows, count = along == "rows", grid[0] if along == "rows" else grid[1]
    lines = lines.unflatten(0, (-1, count)).transpose(1, 2)  # [B, k, n, s, s]
    tokens = prefix + grid[0] * grid[1]
    full = lines.new_zeros(*lines.shape[:2], tokens, tokens)
    # Views of the parts of `full`, in which each patch's place is two axes, row and column.
    patches = full[:, :, prefix:, prefix:].unflatten(3, grid).unflatten(2, grid)
    within = patches.diagonal(dim1=2, dim2=4) if rows else patches.diagonal(dim1=3, dim2=5)  # [B, k, s, s, n]
    within.copy_(lines[..., prefix:, prefix:].movedim(2, -1))
    full[:, :, prefix:, :prefix].unflatten(2, grid).copy_(
        lines[..., prefix:, :prefix] if rows else lines[..., prefix:, :prefix].transpose(2, 3)
    )
    of_prefix = lines[..., :prefix, :].movedim(2, 3) / count  # [B, k, p, n, s]
    full[:, :, :prefix, prefix:].unflatten(3, grid).copy_(
        of_prefix[..., prefix:] if rows else of_prefix[..., prefix:].transpose(3, 4)
    )
    full[:, :, :prefix, :prefix] = of_prefix[..., :prefix].sum(dim=3)
    return full


@contextlib.contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """No gradients and eval mode inside; afterwards each module is again in the mode that it was in by itself."""
    with evaluation_mode(model), torch.no_grad():
        yield


def attention_rollout(maps: Iterable[Float[Tensor, "B k T T"]], residual: bool = True) -> Float[Tensor, "B T T"]:
    """How much of each input token reaches each output token, if attention were all that moves them (App. D.8).

    The maps, lowest layer first, are averaged over heads and multiplied up through the layers. With
    `residual` each layer is half its attention and half the identity, since Eq. 2 adds the input to the
    output (Abnar and Zuidema, 2020); without it the paper's sentence is taken by its word. Each row sums to
    one either way.
    """
    mixing = [attention.mean(dim=1) for attention in maps]
    if not mixing:
        raise UserError("attention_rollout was given no maps; it needs one of each layer, lowest layer first.")
    return roll_down(torch.eye(mixing[0].shape[-1]).to(mixing[0]).expand_as(mixing[0]), mixing, residual)


def roll_down(
    rows: Float[Tensor, "B R T"], mixing: Sequence[Float[Tensor, "B T T"]], residual: bool = True
) -> Float[Tensor, "B R T"]:
    """Rows of a rollout: what mixtures of output tokens are made of in terms of the input tokens. `mixing` are the maps
    averaged over heads, lowest layer first. One row, the answer's, costs nothing beside the T of all tokens."""
    for attention in reversed(mixing):
        below = rows @ attention
        rows = (rows + below) / 2 if residual else below
    return rows


def answer_weights(model: ViT, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B T"]:
    """How much of the answer is read from each of the last tokens; rows sum to one.

    All of it from the class token (Eq. 4), halves from class and distillation token, the same from every patch
    where the model averages over them (App. D.3), half and half for class token and mean together. A MAP head's
    learned query looks at all tokens: that is the mean of its heads' own attention, which needs a pass of the model.
    """
    config = model.config
    if model.map is not None:
        with at_rest(model):
            tokens = model.forward_features(images)
            probe = model.map.probe.to(tokens.dtype).expand(len(tokens), -1, -1)
            heads = model.map.attention.project_cross(probe, tokens)
            with torch.autocast(tokens.device.type, enabled=False):
                return _weights(heads).mean(dim=1)[:, 0]
    weights = torch.zeros(config.num_tokens, device=images.device)
    patches = weights[config.num_prefix_tokens :]
    if config.has_class_token:
        weights[: 2 if config.distilled else 1] = 0.5 if config.distilled or config.pool == "token+gap" else 1.0
    if config.pool in ("gap", "token+gap"):
        patches[:] = (0.5 if config.pool == "token+gap" else 1.0) / config.num_patches
    return weights.expand(len(images), -1)


def answer_grid(
    attention: Float[Tensor, "B *k T T"], weights: Float[Tensor, "B T"], grid: tuple[int, int]
) -> Float[Tensor, "B *k h w"]:
    """Where the answer looks: one weight for each patch, at the patch's place in the image (Fig. 6).

    `attention` is a rollout, or one layer's map of each head; `weights` are `answer_weights`. With a class token
    alone it is that token's row. What falls on the prefix itself is left out and the rest is not scaled up: the
    weights sum to one at most.
    """
    places = grid[0] * grid[1]
    if attention.shape[-1] < places:
        raise UserError(
            f"attention over {attention.shape[-1]} tokens does not fit a grid of {grid[0]}x{grid[1]} patches; pass the "
            f"model's config.grid."
        )
    rows = weights.reshape(len(weights), *(1,) * (attention.ndim - 2), -1) @ attention
    return rows[..., 0, -places:].unflatten(-1, grid)


def mean_attention_distance(
    maps: Iterable[Float[Tensor, "B k T T"]], grid: tuple[int, int], patch_size: int, prefix: int
) -> Float[Tensor, "L k"]:
    """Mean distance, in pixels, over which each head of each layer gathers (Fig. 7 right, Fig. 11, App. D.7).

    For every patch the distances from its center to all patches' centers (its own included, at 0) are
    weighted by its attention; then averaged over patches and images. The paper does not say what it does with the
    class token: here the whole prefix is dropped, as queries and as keys, and each row is scaled up to sum to one
    again. Uniform attention over 14x14 patches of 16 pixels gives 116.5 pixels. `patch_size` is the model's
    config.stride: pixels from one patch to the next. `capture` does the same over any number of images.
    """
    apart = patch_distances(grid, patch_size)
    layers: list[Tensor] = []
    for attention in maps:
        if attention.shape[-1] != prefix + len(apart):
            raise UserError(
                f"attention over {attention.shape[-1]} tokens does not fit {prefix} prefix tokens and a grid of "
                f"{grid[0]}x{grid[1]} patches ({prefix + len(apart)} tokens); pass the model's config.grid and "
                f"num_prefix_tokens."
            )
        layers.append(head_distances(attention, apart.to(attention)).mean(dim=0))
    if not layers:
        raise UserError("mean_attention_distance was given no maps; it needs one of each layer.")
    return torch.stack(layers)


def patch_distances(grid: tuple[int, int], patch_size: int) -> Float[Tensor, "N N"]:
    """Pixels from the center of each patch to that of every other, patches in reading order."""
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    centers = torch.stack([rows.flatten(), columns.flatten()], dim=1).double() * patch_size
    return (centers[:, None] - centers[None]).norm(dim=-1).float()


def head_distances(attention: Float[Tensor, "B k T T"], apart: Float[Tensor, "N N"]) -> Float[Tensor, "B k"]:
    """Mean distance over which each head gathers in each image, as `mean_attention_distance` has it.

    `apart` are the `patch_distances`; the first T - N tokens are the prefix. A patch that looks at no patch at all (in
    float32 everything can fall on the prefix) counts as 0 pixels.
    """
    prefix = attention.shape[-1] - len(apart)
    found = []
    for patches in attention[:, :, prefix:, prefix:].split(_at_once(attention)):
        gathered = (patches * apart).sum(dim=-1) / patches.sum(dim=-1).clamp_min(torch.finfo(patches.dtype).tiny)
        found.append(gathered.mean(dim=-1))
    return torch.cat(found)

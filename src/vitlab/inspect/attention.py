"""App. D.7, D.8: what attends to what. Every number here is computed from what `forward` itself was given.

Everything below is a mean or a row over pictures, so many pictures are looked at in batches: nothing but one
batch's maps lies in memory.
"""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitlab.models.encoder import Attention, Block, relative_logits
from vitlab.models.vit import Model, ViT


def attention_maps(model: Model, images: Float[Tensor, "B 3 H W"]) -> list[Float[Tensor, "B k T T"]]:
    """softmax(q k^T / sqrt(Dh)) of every layer and head (App. A, Eq. 6), lowest layer first, in float32.

    Row i of a map says where token i looks; each row sums to one; the class token, if there is one, is token 0.
    `forward` is not touched: a hook takes what each attention layer is given, and the map is computed beside
    it, from the layer's own queries and keys. So the maps are those of whichever path attention takes. The
    model runs in eval mode and without gradients, and is left as it was. A map takes B k T T x 4 bytes
    (B/16 at 224: 1.9 MB a picture and layer); pass pictures in batches.
    """
    if not isinstance(model, ViT):
        raise ValueError(
            f"a {type(model).__name__} has no attention to look at; give a Vision Transformer or a hybrid."
        )
    if model.config.encoder == "axial":
        raise ValueError("an axial encoder attends along rows and columns; maps of all tokens are not defined for it.")
    maps: list[Tensor] = []

    def record(module: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(module, Attention)
        maps.append(_weights(module, *args))

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_eval_mode(model))
        if "torch._dynamo" in sys.modules:  # compiled blocks would skip hooks that are younger than they are
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for block in model.blocks:
            assert isinstance(block, Block)
            handle = block.attention.register_forward_pre_hook(record)
            stack.callback(handle.remove)
        model.forward_features(images)
    assert len(maps) == len(model.blocks), "every layer must be seen exactly once"
    return maps


def _weights(
    layer: Attention, tokens: Float[Tensor, "B T D"], relative: Float[Tensor, "R Dh"] | None = None, prefix: int = 0
) -> Float[Tensor, "B k T T"]:
    """The layer's queries and keys as it computes them, in its own precision; from there on float32."""
    q, k, _ = layer.project(tokens)
    with torch.autocast(tokens.device.type, enabled=False):
        logits = (q.float() * q.shape[-1] ** -0.5) @ k.float().transpose(-2, -1)
        if relative is not None:
            logits = logits + relative_logits(q.float(), relative.float(), prefix)
        return torch.softmax(logits, dim=-1)


@contextlib.contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards each module is again in the mode that it was in by itself."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def attention_rollout(maps: Iterable[Float[Tensor, "B k T T"]], residual: bool = True) -> Float[Tensor, "B T T"]:
    """How much of each input token reaches each output token, if attention were all that moves them (App. D.8).

    The maps, lowest layer first, are averaged over heads and multiplied up through the layers. With
    `residual` each layer is half its attention and half the identity, since Eq. 2 adds the input to the
    output (Abnar and Zuidema, 2020); without it the paper's sentence is taken by its word. Each row sums to
    one either way.
    """
    rollout: Tensor | None = None
    for attention in maps:
        mixing = attention.mean(dim=1)
        if residual:
            mixing = (mixing + torch.eye(mixing.shape[-1], device=mixing.device, dtype=mixing.dtype)) / 2
        rollout = mixing if rollout is None else mixing @ rollout
    if rollout is None:
        raise ValueError("attention_rollout was given no maps; it needs one of each layer, lowest layer first.")
    return rollout


def class_attention_grid(
    attention: Float[Tensor, "B T T"], grid: tuple[int, int], prefix: int
) -> Float[Tensor, "B h w"]:
    """Where the answer looks: one weight for each patch, at the patch's place in the picture (Fig. 6).

    `attention` is a rollout, or one layer's map averaged over heads. With a class token (`prefix` 1) it is
    that token's row; models that average over patches (`prefix` 0) have none, and the mean over all queries
    stands for it, which is exactly how their answer is pooled. What falls on the class token itself is left
    out and the rest is not scaled up: the weights sum to one at most.
    """
    _check_tokens(attention.shape[-1], grid, prefix)
    row = attention[:, 0] if prefix else attention.mean(dim=1)
    return row[:, prefix:].unflatten(1, grid)


def mean_attention_distance(
    maps: Iterable[Float[Tensor, "B k T T"]], grid: tuple[int, int], patch_size: int, prefix: int
) -> Float[Tensor, "L k"]:
    """Mean distance, in pixels, over which each head of each layer gathers (Fig. 7 right, Fig. 11, App. D.7).

    For every patch the distances from its centre to all patches' centres (its own included, at 0) are
    weighted by its attention; then averaged over patches and pictures. Over several batches of equal size,
    average the results. The paper does not say what it does with the class token: here it is dropped, as a
    query and as a key, and each row is scaled up to sum to one again. Uniform attention over 14x14 patches of
    16 pixels gives 116.5 pixels.
    """
    distances: Tensor | None = None
    layers: list[Tensor] = []
    for attention in maps:
        _check_tokens(attention.shape[-1], grid, prefix)
        if distances is None:
            distances = _patch_distances(grid, patch_size).to(attention)
        patches = attention[:, :, prefix:, prefix:]
        weighted = torch.einsum("bkts,ts->bkt", patches, distances) / patches.sum(dim=-1)
        layers.append(weighted.mean(dim=(0, 2)))
    if not layers:
        raise ValueError("mean_attention_distance was given no maps; it needs one of each layer.")
    return torch.stack(layers)


def _patch_distances(grid: tuple[int, int], patch_size: int) -> Float[Tensor, "N N"]:
    """Pixels from the centre of each patch to that of every other, patches in reading order."""
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    centres = torch.stack([rows.flatten(), columns.flatten()], dim=1).double() * patch_size
    return (centres[:, None] - centres[None]).norm(dim=-1)


def _check_tokens(tokens: int, grid: tuple[int, int], prefix: int) -> None:
    """Raises ValueError unless the tokens are the prefix and one for each patch."""
    if tokens != prefix + grid[0] * grid[1]:
        raise ValueError(
            f"attention over {tokens} tokens does not fit {prefix} prefix tokens and a grid of {grid[0]}x{grid[1]} "
            f"patches ({prefix + grid[0] * grid[1]} tokens); pass the model's config.grid and num_prefix_tokens."
        )

"""Sec. 4.5: what the embeddings have learned: filters of patches, and their places (Fig. 7, Fig. 10)."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def position_similarity(table: Float[Tensor, "1 T D"], grid: tuple[int, int], prefix: int) -> Float[Tensor, "h w h w"]:
    """Cosine similarity of every patch's position embedding to every other's (Fig. 7 centre, Fig. 10).

    `similarity[i, j]` is the picture of the patch in row i, column j: how near each place is to it. The first
    `prefix` rows of the table (the class token's) have no place and are left out.
    """
    if table.shape[1] != prefix + grid[0] * grid[1]:
        raise ValueError(
            f"a position table of {table.shape[1]} rows does not fit {prefix} prefix tokens and a grid of "
            f"{grid[0]}x{grid[1]} patches ({prefix + grid[0] * grid[1]} rows)."
        )
    rows = F.normalize(table.detach()[0, prefix:].float(), dim=-1)
    return (rows @ rows.T).reshape(*grid, *grid)


def filter_components(weight: Float[Tensor, "D 3 P P"], n: int = 28) -> Float[Tensor, "n P P 3"]:
    """The first principal components of the D filters that embed the patches, as RGB in [0, 1] (Fig. 7 left).

    Each filter is one observation of 3 P^2 numbers; the mean filter is taken off first. Components come
    largest variance first, each stretched to fill [0, 1] by itself; a component's sign means nothing, and is
    chosen so that its largest number is positive. There are no more than min(n, D - 1, 3 P^2) of them.
    """
    filters = weight.detach().float().permute(0, 2, 3, 1).flatten(1)
    n = min(n, filters.shape[0] - 1, filters.shape[1])
    if n < 1:
        raise ValueError(f"no components to show of {filters.shape[0]} filters; ask for n >= 1 of two filters or more.")
    components = torch.linalg.svd(filters - filters.mean(dim=0), full_matrices=False).Vh[:n]
    largest = components.gather(1, components.abs().argmax(dim=1, keepdim=True))
    components = components * largest.sign()
    low, high = components.amin(dim=1, keepdim=True), components.amax(dim=1, keepdim=True)
    side = weight.shape[-1]
    return ((components - low) / (high - low).clamp_min(1e-12)).reshape(n, side, side, 3)

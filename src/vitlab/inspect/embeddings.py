"""Sec. 4.5: what the embeddings have learned: filters of patches, their places (Fig. 7, Fig. 10), what they become."""

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from vitlab.errors import UserError
from vitlab.models.vit import ViT


def filters_of(model: ViT, n: int = 28) -> Float[np.ndarray, "n P P 3"]:
    """`filter_components` of what meets the image's pixels: the patch embedding's filters or, of a hybrid, those of
    its ResNet's first convolution, standardized as they convolve. The paper shows 28 of ViT-L/32's."""
    with torch.no_grad():
        weight = model.embedding.weight if model.stem is None else model.stem.root.standardized()
        return filter_components(weight.float().cpu(), n).numpy()


def positions_of(model: ViT) -> Float[np.ndarray, "J h w h2 w2"] | None:
    """`position_similarity` of every position embedding of absolute places that the model has, learned or fixed.

    J is 1, or the number of blocks where each has its own. Of the 2-D kind it is the row's and the column's halves
    together, as they are added to a token. None for models without positions, and for relative ones: those belong to
    no place.
    """
    config = model.config
    copies = config.depth if config.position_at == "every" else 1
    tables = [model.position.absolute(layer) for layer in range(copies)]
    found = [
        position_similarity(table[None].cpu(), config.grid, config.num_prefix_tokens).numpy()
        for table in tables
        if table is not None
    ]
    return np.stack(found) if found else None


def position_similarity(table: Float[Tensor, "1 T D"], grid: tuple[int, int], prefix: int) -> Float[Tensor, "h w h w"]:
    """Cosine similarity of every patch's position embedding to every other's (Fig. 7 center, Fig. 10).

    `similarity[i, j]` is the image of the patch in row i, column j: how near each place is to it. The first
    `prefix` rows of the table (the class token's) have no place and are left out.
    """
    if table.shape[1] != prefix + grid[0] * grid[1]:
        raise UserError(
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
        raise UserError(f"no components to show of {filters.shape[0]} filters; ask for n >= 1 of two filters or more.")
    components = torch.linalg.svd(filters - filters.mean(dim=0), full_matrices=False).Vh[:n]
    largest = components.gather(1, components.abs().argmax(dim=1, keepdim=True))
    components = components * largest.sign()
    low, high = components.amin(dim=1, keepdim=True), components.amax(dim=1, keepdim=True)
    side = weight.shape[-1]
    return ((components - low) / (high - low).clamp_min(1e-12)).reshape(n, side, side, 3)


def token_components(tokens: Float[np.ndarray, "n h w D"]) -> Float[np.ndarray, "n h w 3"]:
    """The three principal components of patch tokens as red, green and blue in [0, 1]: like colors mark patches that
    the model takes for alike.

    All n images have one basis, of their own tokens and no others', so that a color means the same in each of
    them and as much difference as possible is seen. Each component is stretched so that its lowest and highest
    hundredth are 0 and 1; its sign means nothing, and is chosen so that its number farthest from zero is positive.
    A component that does not vary (there are fewer than three, say in one image of two patches) is 0.5 everywhere.
    """
    patches = tokens.reshape(-1, tokens.shape[-1]).astype(np.float32)
    patches = patches - patches.mean(axis=0, dtype=np.float64).astype(np.float32)
    # Of both products with itself that have its components, the smaller; in float64, summed up in bounded memory.
    wide = patches.shape[0] < patches.shape[1]
    product = np.zeros((min(patches.shape),) * 2)
    for part in np.array_split(patches, -(-patches.size // 2**22), axis=int(wide)):
        part = part.astype(np.float64)
        product += part @ part.T if wide else part.T @ part
    values, vectors = np.linalg.eigh(product)
    colors = np.full((len(patches), 3), 0.5, np.float32)
    for color in range(min(3, len(values))):
        if values[-1 - color] <= 1e-10 * max(values[-1], 1e-30):
            break
        vector = vectors[:, -1 - color]
        scores = vector if wide else patches @ vector
        farthest = np.abs(scores) >= 0.999 * np.abs(scores).max()  # the first of equals: rounding must not choose
        scores = scores * np.sign(scores[farthest.argmax()])
        low, high = np.quantile(scores, [0.01, 0.99])
        colors[:, color] = ((scores - low) / max(high - low, 1e-30)).clip(0, 1)
    return colors.reshape(*tokens.shape[:3], 3)

"""What the embeddings have learned (Sec. 4.5): patch filters and positions (Fig. 7, Fig. 10), tokens as colors."""

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitlab.inspection.attention import unwrap_vit


def filters_of(model: nn.Module, n: int = 28) -> Float[np.ndarray, "n P P 3"]:
    """`filter_components` of the patch embedding or, of a hybrid, of its ResNet's first, standardized convolution."""
    vit = unwrap_vit(model)
    with torch.no_grad():
        weight = vit.embedding.weight if vit.stem is None else vit.stem.root.standardized()
        return filter_components(weight.float().cpu(), n).numpy()


def positions_of(model: nn.Module) -> Float[np.ndarray, "J h w h2 w2"] | None:
    """`position_similarity` of every absolute position embedding, learned or fixed; None where the model has none.

    J is 1, or the number of blocks where each block has its own. Relative positions belong to no patch: None.
    """
    vit = unwrap_vit(model)
    config = vit.config
    tables = [vit.position.added_rows(layer) for layer in range(config.depth if config.position_at == "every" else 1)]
    grid, prefix = config.grid, config.num_prefix_tokens
    maps = [position_similarity(table[None].cpu(), grid, prefix).numpy() for table in tables if table is not None]
    return np.stack(maps) if maps else None


def position_similarity(table: Float[Tensor, "1 T D"], grid: tuple[int, int], prefix: int) -> Float[Tensor, "h w h w"]:
    """Cosine similarity between the position embeddings of all pairs of patches (Fig. 7 center, Fig. 10).

    `similarity[i, j]` is the map of the patch in row i, column j. The first `prefix` rows of the table are left out.
    """
    rows = F.normalize(table.detach()[0, prefix:].float(), dim=-1)
    return (rows @ rows.T).reshape(*grid, *grid)


def filter_components(weight: Float[Tensor, "D 3 P P"], n: int = 28) -> Float[Tensor, "n P P 3"]:
    """The first principal components of D filters, largest variance first, as RGB in [0, 1] (Fig. 7 left).

    Each filter is one observation of 3 P^2 numbers; the mean filter is subtracted first. Each component is stretched to
    [0, 1] by itself, with the sign that makes its largest number positive. Returns min(n, D - 1, 3 P^2) components.
    """
    filters = weight.detach().float().permute(0, 2, 3, 1).flatten(1)
    n = min(n, filters.shape[0] - 1, filters.shape[1])
    components = torch.linalg.svd(filters - filters.mean(dim=0), full_matrices=False).Vh[:n]
    largest = components.gather(1, components.abs().argmax(dim=1, keepdim=True))
    components = components * largest.sign()
    low, high = components.amin(dim=1, keepdim=True), components.amax(dim=1, keepdim=True)
    side = weight.shape[-1]
    return ((components - low) / (high - low).clamp_min(1e-12)).reshape(n, side, side, 3)


def token_components(tokens: Float[np.ndarray, "n h w D"]) -> Float[np.ndarray, "n h w 3"]:
    """The first three principal components of patch tokens as red, green and blue in [0, 1].

    The basis comes from the tokens of all images, so a color means the same in each. Each component is stretched from
    its 1st to its 99th percentile, with the sign that makes its largest number positive. One without variance is 0.5.
    """
    patches = tokens.reshape(-1, tokens.shape[-1]).astype(np.float32)
    patches = patches - patches.mean(axis=0, dtype=np.float64).astype(np.float32)
    covariance = np.zeros((patches.shape[1],) * 2)
    for part in np.array_split(patches, -(-patches.size // 2**22)):  # float64 takes twice the memory
        part = part.astype(np.float64)
        covariance += part.T @ part
    values, vectors = np.linalg.eigh(covariance)
    colors = np.full((len(patches), 3), 0.5, np.float32)
    for color in range(min(3, len(values))):
        if values[-1 - color] <= 1e-10 * max(values[-1], 1e-30):
            break
        scores = patches @ vectors[:, -1 - color]
        farthest = np.abs(scores) >= 0.999 * np.abs(scores).max()  # the first of equals: rounding must not decide
        scores = scores * np.sign(scores[farthest.argmax()])
        low, high = np.quantile(scores, [0.01, 0.99])
        colors[:, color] = ((scores - low) / max(high - low, 1e-30)).clip(0, 1)
    return colors.reshape(*tokens.shape[:3], 3)

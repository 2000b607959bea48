"""All numbers behind the figures of Sec. 4.5, App. D.7 and App. D.8, from one pass over images."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitlab.errors import UserError
from vitlab.inspection.attention import (
    attention_layers,
    head_distances,
    patch_distances,
    prediction_grid,
    prediction_weights,
    rollout_rows,
    unwrap_vit,
    visit_attention,
)
from vitlab.inspection.embeddings import token_components
from vitlab.models.vit import ViT, evaluation_mode


@dataclass(frozen=True, eq=False)
class Capture:
    """Attention and tokens of a model over a set of images, as float32 arrays.

    `distances` covers all `count` images; the other arrays cover the first n = min(keep, count).
    """

    count: int
    layers: tuple[str, ...]
    """Names of the L layers (`attention_layers`)."""
    distances: Float[np.ndarray, "L k"]
    """Mean attention distance in pixels (`mean_attention_distance`; Fig. 7 right, Fig. 11)."""
    heads: Float[np.ndarray, "n L k h w"]
    """Attention of the prediction in each layer, by head (`prediction_grid`)."""
    rollout: Float[np.ndarray, "n h w"]
    """Attention of the prediction through all layers: `attention_rollout` with the residual (Fig. 6, Fig. 14)."""
    rollout_plain: Float[np.ndarray, "n h w"]
    """The same without the residual."""
    components: Float[np.ndarray, "n h w 3"]
    """Patch tokens after the last LayerNorm as colors (`token_components`)."""
    image_distances: Float[np.ndarray, "n L k"]
    """Mean attention distance in each image."""
    logits: Float[np.ndarray, "n K"]
    """K is 0 without a head."""


def capture(model: nn.Module, batches: Iterable[Float[Tensor, "_ 3 H W"]], *, keep: int = 16) -> Capture:
    """Runs `model` on batches of images in [-1, 1], of any batch sizes, and returns what attention and tokens show.

    Memory does not grow with the number of batches. A MAP head takes a second pass over the first `keep` images. Raises
    UserError for a ResNet, for no images, and for output that is not finite.
    """
    layers, vit = attention_layers(model), unwrap_vit(model)
    device = next(vit.parameters()).device
    distances = patch_distances(vit.config.grid, vit.config.stride).to(device)
    count, total = 0, torch.zeros(len(layers), vit.config.heads, dtype=torch.float64)
    parts: list[dict[str, np.ndarray]] = []
    for images in batches:
        shown = max(min(len(images), keep - count), 0)
        batch_distances, part = _capture_batch(vit, images.to(device), shown, distances)
        count += len(images)
        total += batch_distances.double().sum(dim=0).cpu()
        if shown:
            parts.append(part)
    if not parts:
        raise UserError("there are no images; give at least one.")
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    if not (total.isfinite().all() and all(np.isfinite(array).all() for array in arrays.values())):
        raise UserError("the model's output is not finite; check weights and images, or compute in float32.")
    components = token_components(arrays.pop("patches"))
    return Capture(count, layers, (total / count).float().numpy(), components=components, **arrays)


@torch.no_grad()
def _capture_batch(
    model: ViT, images: Float[Tensor, "B 3 H W"], shown: int, patch_distances: Float[Tensor, "N N"]
) -> tuple[Float[Tensor, "B L k"], dict[str, np.ndarray]]:
    """Mean attention distances in each image, and the arrays of the first `shown` images by name."""
    grid = model.config.grid
    weights = prediction_weights(model, images[:shown]) if shown else None
    distances: list[Tensor] = []
    heads: list[Tensor] = []
    means: list[Tensor] = []  # over heads, of each layer: all together about as large as one layer's maps

    def visit(_layer: int, attention: Tensor) -> None:
        distances.append(head_distances(attention, patch_distances))
        if weights is not None:
            heads.append(prediction_grid(attention[:shown], weights, grid))
            means.append(attention[:shown].mean(dim=1))

    tokens = visit_attention(model, images, visit)[:shown]
    image_distances = torch.stack(distances, dim=1)
    if weights is None:
        return image_distances, {}
    with evaluation_mode(model):
        logits = model.forward_head(tokens).float() if model.config.num_classes else tokens.new_zeros(shown, 0)
    rollout, plain = (rollout_rows(weights[:, None], means, residual)[:, 0] for residual in (True, False))
    tensors = {
        "heads": torch.stack(heads, dim=1),
        "rollout": rollout[:, -len(patch_distances) :].unflatten(1, grid),
        "rollout_plain": plain[:, -len(patch_distances) :].unflatten(1, grid),
        "patches": tokens[:, model.config.num_prefix_tokens :].unflatten(1, grid),
        "image_distances": image_distances[:shown],
        "logits": logits,
    }
    return image_distances, {name: tensor.float().cpu().numpy() for name, tensor in tensors.items()}

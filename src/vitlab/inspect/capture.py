"""Everything that the figures of a model's inside need, in one pass over images (Sec. 4.5, App. D.7, D.8)."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vitlab.errors import UserError
from vitlab.inspect.attention import (
    answer_grid,
    answer_weights,
    at_rest,
    attention_layers,
    head_distances,
    patch_distances,
    roll_down,
    visit_attention,
)
from vitlab.inspect.embeddings import token_components
from vitlab.models.vit import Model, ViT


@dataclass(frozen=True, eq=False)
class Capture:
    """What one pass over images tells of a model; float32 arrays on the CPU."""

    count: int
    """Images seen, all of which are in `distances`."""
    layers: tuple[str, ...]
    """Names of the L maps: "1", "2", ...; of an axial encoder "1 rows", "1 columns", ..."""
    distances: Float[np.ndarray, "L k"]
    """Mean attention distance in pixels, over all images (`mean_attention_distance`; Fig. 7 right, Fig. 11)."""
    # What follows is of the first n = min(keep, count) images.
    heads: Float[np.ndarray, "n L k h w"]
    """Where the answer looks in each layer, by each head: `answer_grid` of its map."""
    rollout: Float[np.ndarray, "n h w"]
    """Where the answer looks through all layers: `attention_rollout` with the residual half (Fig. 6, Fig. 14)."""
    rollout_plain: Float[np.ndarray, "n h w"]
    """The paper's sentence by its word, without it."""
    components: Float[np.ndarray, "n h w 3"]
    """Patch tokens after the last LayerNorm as colors: `token_components`."""
    image_distances: Float[np.ndarray, "n L k"]
    """Mean attention distance in each image."""
    probabilities: Float[np.ndarray, "n K"] | None
    """Softmax of the logits; None for a model without a head."""


def capture(model: Model, batches: Iterable[Float[Tensor, "_ 3 H W"]], *, keep: int = 16) -> Capture:
    """Looks into `model` while it sees batches of images in [-1, 1], of any sizes of batch, each once.

    Memory is bounded by one batch with one layer's maps of it (`visit_attention`) and their mean over heads in all
    layers, and by what is returned, whose size goes with `keep`; so `batches` may be a stream of any length. Only a
    MAP head's answer takes a second pass of the images that are kept. Raises ValueError for a ResNet, for no
    images, and for tokens that are not finite.
    """
    layers = attention_layers(model)
    assert isinstance(model, ViT)
    if keep < 1:
        raise UserError(f"keep={keep}: give the number of images to show, 1 or more.")
    device = next(model.parameters()).device
    apart = patch_distances(model.config.grid, model.config.stride).to(device)
    count, total, parts = 0, torch.zeros(len(layers), model.config.heads, dtype=torch.float64), list[_Part]()
    with at_rest(model):
        for images in batches:
            if not len(images):
                continue
            distances, part = _look_at(model, images.to(device), max(min(len(images), keep - count), 0), apart)
            count += len(images)
            total += distances.double().sum(dim=0).cpu()
            if part is not None:
                parts.append(part)
    if not count:
        raise UserError("there were no images to look at; give a batch of one image at least.")
    return Capture(
        count=count,
        layers=layers,
        distances=(total / count).float().numpy(),
        heads=np.concatenate([part.heads for part in parts]),
        rollout=np.concatenate([part.rollout for part in parts]),
        rollout_plain=np.concatenate([part.rollout_plain for part in parts]),
        components=token_components(np.concatenate([part.patches for part in parts])),
        image_distances=np.concatenate([part.distances for part in parts]),
        probabilities=np.concatenate([part.probabilities for part in parts]) if model.config.num_classes else None,
    )


@dataclass(frozen=True, eq=False)
class _Part:
    """What is kept of one batch, as `Capture` has it."""

    heads: np.ndarray
    rollout: np.ndarray
    rollout_plain: np.ndarray
    patches: np.ndarray
    """[n, h, w, D]: the last tokens."""
    distances: np.ndarray
    probabilities: np.ndarray
    """[n, K]; without columns for a model without a head."""


def _look_at(
    model: ViT, images: Float[Tensor, "B 3 H W"], shown: int, apart: Float[Tensor, "N N"]
) -> tuple[Float[Tensor, "B L k"], _Part | None]:
    """Mean attention distances in one batch of images, and all that is kept of the first `shown` of them."""
    grid = model.config.grid
    weights = answer_weights(model, images[:shown]) if shown else None
    distances: list[Tensor] = []
    heads: list[Tensor] = []
    mixing: list[Tensor] = []  # of each layer the mean over heads: all together about as large as one layer's maps

    def visit(_layer: int, attention: Tensor) -> None:
        distances.append(head_distances(attention, apart))
        if weights is not None:
            heads.append(answer_grid(attention[:shown], weights, grid))
            mixing.append(attention[:shown].mean(dim=1))

    tokens = visit_attention(model, images, visit)
    if not tokens.isfinite().all():
        raise UserError(
            "the model's last tokens are not all finite, so there is nothing to show; check its weights and the "
            "images, or compute in float32."
        )
    far = torch.stack(distances, dim=1)
    if weights is None:
        return far, None
    rollout, plain = (roll_down(weights[:, None], mixing, residual)[:, 0, -len(apart) :] for residual in (True, False))
    tokens = tokens[:shown]
    patches = tokens[:, model.config.num_prefix_tokens :].unflatten(1, grid)
    logits = model.forward_head(tokens).float() if model.config.num_classes else tokens.new_zeros(shown, 0)
    return far, _Part(
        heads=_array(torch.stack(heads, dim=1)),
        rollout=_array(rollout.unflatten(1, grid)),
        rollout_plain=_array(plain.unflatten(1, grid)),
        patches=_array(patches),
        distances=_array(far[:shown]),
        probabilities=_array(torch.softmax(logits, dim=-1)),
    )


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.float().cpu().numpy()

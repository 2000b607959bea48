"""Masked patch prediction (Sec. 4.6, App. B.1.2).

Half of a ViT's patch embeddings are corrupted. The output token at the position of a corrupted patch predicts the
patch: its mean color in 3 bits per channel, by cross-entropy.

Of the corrupted embeddings 80% become the learned mask, 10% the embedding of another patch, 10% stay. A
`Corruption` lists (position, source) for the corrupted patches of each image: the source of the new embedding is
another position, or MASK. It is a function of the image's own uniform numbers, so that neither the batch nor the rank
changes it.
`objectives.py` hands `MaskedPatch` and `MaskedViT` to the loop.

    draw_corruption(MaskingConfig(), torch.rand(1, 196 + 2 * 98, dtype=torch.float64), 196)  # [1, 98, 2]
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn

from vitlab.config import MaskingConfig
from vitlab.data.loader import Batch
from vitlab.data.resize import resize_area
from vitlab.models.config import ViTConfig
from vitlab.models.init import linear
from vitlab.models.vit import ViT

MASK = -1
"""The source of the learned mask embedding."""
LEVELS = 2**3  # 3 bits per channel
COLORS = LEVELS**3  # 512
STEP = 256 // LEVELS  # 32 values per level
EPSILON = 2.0**-9
"""Added before rounding down, so that images that another device has made an ulp darker lose no level."""

Corruption = Int64[Tensor, "B n 2"]


def draw_corruption(masking: MaskingConfig, uniforms: Float64[Tensor, "B d"], patches: int) -> Corruption:
    """(position, source) of the `masking.corrupted(patches)` corrupted patches of each image, all positions different.

    As in BERT their number is the same in every image, and each draws its kind: MASK (80%), another position (10%),
    or its own (10%). The paper does not say where the other patch comes from. Here it is any other of the same image,
    corrupted or not, with equal probability: so an image's corruption does not depend on the batch.
    """
    count = masking.corrupted(patches)
    order, kind, other = uniforms.split([patches, count, count], dim=1)
    positions = order.argsort(dim=1, stable=True)[:, :count]
    others = (other * (patches - 1)).long()
    others = others + (others >= positions)  # skips the patch itself
    sources = torch.where(kind < masking.masked + masking.replaced, others, positions)
    return torch.stack([positions, torch.where(kind < masking.masked, MASK, sources)], dim=2)


def cells_per_side(masking: MaskingConfig, patch: int) -> int:
    """Cells along a side of a patch of `patch` pixels for which a color is predicted: 1, 4, or every pixel."""
    return {"mean-color": 1, "downsized": 4, "regression": patch}[masking.target]


def num_outputs(masking: MaskingConfig, patch: int) -> int:
    """Outputs per patch: 512 logits for each cell, or the 3 values of each pixel."""
    return cells_per_side(masking, patch) ** 2 * (3 if masking.target == "regression" else COLORS)


def patch_colors(images: Float[Tensor, "B 3 H W"], patch: int, side: int) -> Float[Tensor, "B N c 3"]:
    """Mean color, in [0, 255], of the side x side cells of each patch, in reading order; images in [-1, 1].

    Cells need not be whole pixels: 4 cells across a patch of 14 pixels are 3.5 pixels wide, and a pixel between two
    counts half for each.
    """
    h, w = images.shape[2] // patch, images.shape[3] // patch
    cells = images * 127.5 + 127.5
    if side != patch:
        cells = resize_area(cells, (h * side, w * side))
    cells = cells.unflatten(3, (w, side)).unflatten(2, (h, side))  # [B, 3, h, side, w, side]
    return cells.permute(0, 2, 4, 3, 5, 1).flatten(3, 4).flatten(1, 2)


def color_classes(colors: Float[Tensor, "*S 3"]) -> Int64[Tensor, "*S"]:
    """The class of each color in [0, 255] at 3 bits per channel, 0 to 511.

    A channel's mean m has level floor(m / 32), and the class is 64 red + 8 green + blue. A patch of mean color (200.5,
    96, 31.9) has levels 6, 3 and 0, and class 64 * 6 + 8 * 3 + 0 = 408. The mean is taken before rounding: half black
    and half white is 127.5, level 3.
    """
    red, green, blue = ((colors + EPSILON) / STEP).floor().clamp(0, LEVELS - 1).long().unbind(-1)
    return (red * LEVELS + green) * LEVELS + blue


def class_colors(classes: Int64[Tensor, "*S"]) -> Float[Tensor, "*S 3"]:
    """The central color of each class, in [0, 255]: 16 above the smallest value of each level."""
    levels = torch.stack([classes // LEVELS**2, classes // LEVELS % LEVELS, classes % LEVELS], dim=-1)
    return (levels * STEP + STEP / 2).float()


def patch_targets(
    masking: MaskingConfig, patch: int, images: Float[Tensor, "B 3 H W"], corruption: Corruption
) -> Tensor:
    """The targets of the corrupted patches: classes, int64 [B, n, c] for c cells; for regression the pixels' values in
    the range of the images, float [B, n, P^2, 3]."""
    colors = patch_colors(images, patch, cells_per_side(masking, patch))
    selected = colors[torch.arange(len(corruption), device=corruption.device)[:, None], corruption[..., 0]]
    return selected / 127.5 - 1 if masking.target == "regression" else color_classes(selected)


def patch_losses(
    masking: MaskingConfig, outputs: Float[Tensor, "B n O"], targets: Tensor
) -> tuple[Float[Tensor, "B n c"], Float[Tensor, "B n c"]]:
    """Loss of each cell, and whether its most likely class is right (NaN for regression).

    The loss is the cross-entropy of 512 classes, or the mean square of the three channels' errors in units of the
    images' range [-1, 1]. (The paper gives no unit: in [0, 255] it would be 127.5^2 times as large.)
    """
    cells = outputs.float().unflatten(2, (targets.shape[2], -1))
    if masking.target == "regression":
        losses = (cells - targets).square().mean(dim=3)
        return losses, torch.full_like(losses, torch.nan)
    losses = F.cross_entropy(cells.flatten(0, 2), targets.flatten(), reduction="none").view(targets.shape)
    return losses, (cells.detach().argmax(dim=3) == targets).float()


@dataclass(frozen=True)
class MaskedPatch:
    """The objective: the mean loss over all corrupted patches, of all three kinds."""

    masking: MaskingConfig
    model: ViTConfig

    @property
    def num_uniforms(self) -> int:
        """Uniform numbers that the loader draws for each example."""
        return self.masking.num_uniforms(self.model.num_patches)

    def prepare_batch(self, batch: Batch, rng: np.random.Generator) -> tuple[Float[Tensor, "B 3 H W"], Corruption]:
        """(images, the corruption of their patches), from the examples' own uniform numbers: `rng` is not used."""
        assert batch.uniforms is not None
        return batch.images, draw_corruption(self.masking, batch.uniforms, self.model.num_patches)

    def loss(
        self, model: Callable[..., Tensor], images: Float[Tensor, "B 3 H W"], targets: Corruption
    ) -> tuple[Tensor, Tensor]:
        """(mean loss, accuracy), both 0-d; the accuracy of regression is NaN."""
        cells = patch_targets(self.masking, self.model.patch_size, images, targets)
        losses, correct = patch_losses(self.masking, model(images, targets), cells)
        return losses.mean(), correct.mean()


class MaskedViT(nn.Module):
    """A plain ViT, the learned mask embedding, and a linear layer that predicts corrupted patches."""

    def __init__(self, config: ViTConfig, masking: MaskingConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config, self.masking = config, masking
        self.vit = ViT(config, generator=generator)
        self.mask = nn.Parameter(torch.empty(1, 1, config.width))
        self.predictor = linear(config.width, num_outputs(masking, config.patch_size))
        if not self.mask.is_meta:
            nn.init.normal_(self.mask, std=0.02, generator=generator)
            nn.init.xavier_uniform_(self.predictor.weight, generator=generator)
            nn.init.zeros_(self.predictor.bias)

    def forward(self, images: Float[Tensor, "B 3 H W"], corruption: Corruption) -> Float[Tensor, "B n O"]:
        """The predictions for the corrupted patches, each from the output token at its position."""
        patches = self.vit.embed(images)
        positions, sources = corruption.unbind(2)
        rows = torch.arange(1, patches.shape[1] + 1, device=corruption.device).expand(len(corruption), -1)
        rows = rows.scatter(1, positions, sources + 1)  # row 0 is the mask
        table = torch.cat([self.mask.to(patches.dtype).expand(len(corruption), -1, -1), patches], dim=1)
        # A product, because its gradient sums in a fixed order; that of indexing does not on every device.
        corrupted = F.one_hot(rows, table.shape[1]).to(table.dtype) @ table
        tokens = self.vit.encode(corrupted)[:, self.config.num_prefix_tokens :]
        return self.predictor(tokens.gather(1, positions[..., None].expand(-1, -1, tokens.shape[2])))

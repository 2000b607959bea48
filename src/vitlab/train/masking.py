"""Sec. 4.6, App. B.1.2: masked patch prediction. Of half of its patches a ViT gets corrupted embeddings, and tells from
the token that stands there what the image shows.

What is corrupted, and how, is a `Plan`: for each corrupted patch of each image its place and the source of the
embedding that it gets, MASK or a place. It is made from the image's own draws (`Batch.draws`), so that neither the
batch nor the process that a image comes to changes it.
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
from vitlab.data.transforms import resize_area
from vitlab.models.config import ViTConfig
from vitlab.models.init import linear
from vitlab.models.vit import ViT

MASK = -1
"""The source of an embedding that is the learned one."""
BITS = 3
LEVELS = 2**BITS
COLORS = LEVELS**3  # 512
STEP = 256 // LEVELS  # 32: values that share a level
HAIR = 2.0**-9
"""Added before rounding down: images that another device has made an ulp darker lose no level."""

Plan = Int64[Tensor, "B n 2"]


# ------------------------------------------------------------------------------------------------------- what is hidden


def corruption(masking: MaskingConfig, draws: Float64[Tensor, "B d"], patches: int) -> Int64[Tensor, "B n 2"]:
    """(place, source) of the `masking.corrupted(patches)` corrupted patches of each image, places all different.

    As in BERT their number is the same in every image (the share, rounded), and each gets its kind by itself: the
    source is MASK (80 %), the place of another patch (10 %), or its own place (10 %).
    The paper does not say where the other patch comes from. Here it is of the same image, any but the patch itself
    and all equally likely, corrupted or not: so a image's corruption does not depend on its neighbors in the batch.
    """
    count = masking.corrupted(patches)
    order, kind, other = draws.split([patches, count, count], dim=1)
    places = order.argsort(dim=1, stable=True)[:, :count]
    others = (other * (patches - 1)).long()
    others = others + (others >= places)  # steps over the patch itself
    sources = torch.where(kind < masking.masked + masking.replaced, others, places)
    return torch.stack([places, torch.where(kind < masking.masked, MASK, sources)], dim=2)


# -------------------------------------------------------------------------------------------------- what is to be told


def cells_of(masking: MaskingConfig, patch: int) -> int:
    """Cells along a side of a patch of `patch` pixels, each of which is told a color: 1, 4, or every pixel."""
    return {"mean-color": 1, "downsized": 4, "regression": patch}[masking.target]


def outputs_of(masking: MaskingConfig, patch: int) -> int:
    """Numbers that are predicted for a patch: 512 for each cell, or the 3 values of each pixel."""
    return cells_of(masking, patch) ** 2 * (3 if masking.target == "regression" else COLORS)


def patch_colors(images: Float[Tensor, "B 3 H W"], patch: int, side: int) -> Float[Tensor, "B N c 3"]:
    """Mean color, in [0, 255], of the side x side cells of each patch, in reading order; images in [-1, 1].

    Cells need not be whole pixels: 4 of them across a patch of 14 pixels are 3.5 pixels wide, and each counts the pixel
    that it shares by halves.
    """
    h, w = images.shape[2] // patch, images.shape[3] // patch
    cells = images * 127.5 + 127.5
    if side != patch:
        cells = resize_area(cells, (h * side, w * side))
    cells = cells.unflatten(3, (w, side)).unflatten(2, (h, side))  # [B, 3, h, side, w, side]
    return cells.permute(0, 2, 4, 3, 5, 1).flatten(3, 4).flatten(1, 2)


def color_classes(colors: Float[Tensor, "*S 3"]) -> Int64[Tensor, "*S"]:
    """The class of each color in [0, 255] at 3 bits a channel, 0 to 511.

    3 bits are 8 levels of 32 values each: a channel's mean m has level floor(m / 32), and the class is
    64 red + 8 green + blue. A patch whose mean color is (200.5, 96, 31.9), say, has the levels 6 (192 to 224), 3 (96
    to 128) and 0 (0 to 32), and the class 64 * 6 + 8 * 3 + 0 = 408. A mean is taken first and rounded then: half black
    and half white is 127.5, level 3.
    """
    red, green, blue = ((colors + HAIR) / STEP).floor().clamp(0, LEVELS - 1).long().unbind(-1)
    return (red * LEVELS + green) * LEVELS + blue


def class_colors(classes: Int64[Tensor, "*S"]) -> Float[Tensor, "*S 3"]:
    """The middle of each class, in [0, 255]: 16 above the least value of each level."""
    levels = torch.stack([classes // LEVELS**2, classes // LEVELS % LEVELS, classes % LEVELS], dim=-1)
    return (levels * STEP + STEP / 2).float()


def wanted(masking: MaskingConfig, patch: int, images: Float[Tensor, "B 3 H W"], plan: Plan) -> Tensor:
    """What is to be told of the corrupted patches: classes, int64 [B, n, c] of c cells; for the regression the pixels'
    values in the images' own range, float [B, n, P^2, 3]."""
    colors = patch_colors(images, patch, cells_of(masking, patch))
    chosen = colors[torch.arange(len(plan), device=plan.device)[:, None], plan[..., 0]]
    return chosen / 127.5 - 1 if masking.target == "regression" else color_classes(chosen)


def judge(
    masking: MaskingConfig, predictions: Float[Tensor, "B n O"], answers: Tensor
) -> tuple[Float[Tensor, "B n c"], Float[Tensor, "B n c"]]:
    """Loss of each cell and whether its most likely class is right, which for a regression is not a number.

    The loss is the cross-entropy of 512 classes, or the mean square of the three channels' errors in units of the
    images' range [-1, 1]. (The paper gives no unit: in one of [0, 255] it would be 127.5^2 times as large.)
    """
    cells = predictions.float().unflatten(2, (answers.shape[2], -1))
    if masking.target == "regression":
        losses = (cells - answers).square().mean(dim=3)
        return losses, torch.full_like(losses, torch.nan)
    losses = F.cross_entropy(cells.flatten(0, 2), answers.flatten(), reduction="none").view(answers.shape)
    return losses, (cells.detach().argmax(dim=3) == answers).float()


@dataclass(frozen=True)
class MaskedPatch:
    """The loss is the mean over all corrupted patches, of all three kinds."""

    masking: MaskingConfig
    model: ViTConfig

    @property
    def draws(self) -> int:
        """Uniform numbers that each example has to bring."""
        return self.masking.draws(self.model.num_patches)

    def corrupt(self, batch: Batch, rng: np.random.Generator) -> tuple[Float[Tensor, "B 3 H W"], Plan]:
        """(images, what is corrupted of them); the examples bring their own draws, and `rng` is not needed."""
        assert batch.draws is not None, "the batches were asked for without draws"
        return batch.images, corruption(self.masking, batch.draws, self.model.num_patches)

    def loss(
        self, model: Callable[..., Tensor], images: Float[Tensor, "B 3 H W"], targets: Plan
    ) -> tuple[Tensor, Tensor]:
        """(mean loss, share of right cells), both 0-d; a regression has no right cells, and its share is NaN."""
        answers = wanted(self.masking, self.model.patch_size, images, targets)
        losses, right = judge(self.masking, model(images, targets), answers)
        return losses.mean(), right.mean()


# ------------------------------------------------------------------------------------------------------------ the model


class MaskedViT(nn.Module):
    """A plain ViT, the embedding that stands in for hidden patches, and one dense layer that tells what they show."""

    def __init__(self, config: ViTConfig, masking: MaskingConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config, self.masking = config, masking
        self.vit = ViT(config, generator=generator)
        self.mask = nn.Parameter(torch.empty(1, 1, config.width))
        self.predictor = linear(config.width, outputs_of(masking, config.patch_size))
        if not self.mask.is_meta:
            nn.init.normal_(self.mask, std=0.02, generator=generator)
            nn.init.xavier_uniform_(self.predictor.weight, generator=generator)
            nn.init.zeros_(self.predictor.bias)

    def forward(self, images: Float[Tensor, "B 3 H W"], plan: Plan) -> Float[Tensor, "B n O"]:
        """What is told of the patches in `plan`, each from the token at its own place."""
        patches = self.vit.embed(images)
        places, sources = plan.unbind(2)
        rows = torch.arange(1, patches.shape[1] + 1, device=plan.device).expand(len(plan), -1)
        rows = rows.scatter(1, places, sources + 1)  # row 0 is the mask
        table = torch.cat([self.mask.to(patches.dtype).expand(len(plan), -1, -1), patches], dim=1)
        # As a product, whose derivative adds up in the same order each time; indexing's does not on every device.
        corrupted = F.one_hot(rows, table.shape[1]).to(table.dtype) @ table
        tokens = self.vit.encode(corrupted)[:, self.config.num_prefix_tokens :]
        return self.predictor(tokens.gather(1, places[..., None].expand(-1, -1, tokens.shape[2])))

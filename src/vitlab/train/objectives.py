"""What a run minimises. An objective draws its randomness once for the whole batch, then scores any part of it.

`corrupt(batch, rng)` makes the targets (mixup here), `loss(model, images, targets)` gives the mean loss and metrics
of a micro-batch; the loop weighs micro-batches by their size, so accumulation changes nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from vitlab.data.loader import Batch
from vitlab.data.transforms import mixup

LossKind = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class Classification:
    """Softmax or sigmoid cross-entropy on K classes, with label smoothing and mixup."""

    num_classes: int
    kind: LossKind = "softmax"
    label_smoothing: float = 0.0
    mixup: float = 0.0

    def corrupt(self, batch: Batch, rng: np.random.Generator) -> tuple[Float[Tensor, "B 3 H W"], Tensor]:
        """(images, targets): class numbers [B], or with mixup shares of classes [B, K]."""
        if not self.mixup:
            return batch.images, batch.labels
        return mixup(batch.images, F.one_hot(batch.labels, self.num_classes).float(), self.mixup, rng)

    def loss(
        self, model: Callable[..., Tensor], images: Float[Tensor, "B 3 H W"], targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(mean loss, share of correct top-1 answers), both 0-d."""
        logits = model(images).float()
        hard = targets if targets.ndim == 1 else targets.argmax(dim=1)
        accuracy = (logits.detach().argmax(dim=1) == hard).float().mean()
        return classification_loss(logits, targets, self.kind, self.label_smoothing), accuracy


def classification_loss(
    logits: Float[Tensor, "B K"],
    targets: Int[Tensor, " B"] | Float[Tensor, "B K"],
    kind: LossKind = "softmax",
    label_smoothing: float = 0.0,
) -> Float[Tensor, ""]:
    """Mean over pictures of the cross-entropy between targets and logits.

    Softmax: smoothing spreads its share evenly over all classes. Sigmoid, as in Google's pre-training: binary
    cross-entropies are summed over classes, and smoothing s makes the targets 1 - s and s.
    """
    if kind == "softmax":
        return F.cross_entropy(logits, targets, label_smoothing=label_smoothing)
    if targets.ndim == 1:
        targets = F.one_hot(targets, logits.shape[1]).to(logits.dtype)
    targets = targets * (1 - 2 * label_smoothing) + label_smoothing
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / logits.shape[0]

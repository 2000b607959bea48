"""Sec. 3.2: a trained model carried to another picture size and another task."""

import dataclasses
from typing import Literal

from torch import Tensor

from vitlab.models.config import ViTConfig
from vitlab.models.position import interpolate_positions


def adapt(
    config: ViTConfig,
    state: dict[str, Tensor],
    *,
    image_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    reset_head: bool = False,
    pre_logits: Literal["keep", "drop"] = "keep",
    head_bias: float = 0.0,
) -> tuple[ViTConfig, dict[str, Tensor]]:
    """Configuration and parameters for another picture size or task; what is given stays as it is.

    `image_size`: another one interpolates the position embeddings (corners aligned, the class token's row
    kept). `num_classes`, `reset_head`: another number of classes means a new head, and so does `reset_head`
    with the same number, which a new task needs as well; 0 classes mean no head. A new head is zero, its bias
    `head_bias`. `pre_logits="drop"` leaves out the hidden layer before the head, as Google's fine-tuning
    does; the head that was trained on it must go as well.

    Raises ValueError for a size that the patch does not divide, or a head left without what it was trained
    on.
    """
    if pre_logits not in ("keep", "drop"):
        raise ValueError(f"pre_logits is {pre_logits!r}; allowed: 'keep', 'drop'.")
    state = dict(state)
    new = dataclasses.replace(
        config,
        image_size=config.image_size if image_size is None else image_size,
        num_classes=config.num_classes if num_classes is None else num_classes,
        representation_size=config.representation_size if pre_logits == "keep" else None,
    )
    reset_head = reset_head or new.num_classes != config.num_classes
    if new.representation_size != config.representation_size:
        if not reset_head and config.num_classes:
            raise ValueError(
                f"pre_logits='drop' leaves out the layer that the head of {config.num_classes} classes was "
                f"trained on; add reset_head=True for a new head, or num_classes=0 for none."
            )
        del state["pre_logits.weight"], state["pre_logits.bias"]
    if new.grid != config.grid and new.position == "1d":
        table = state["position.table"]
        state["position.table"] = interpolate_positions(table, config.grid, new.grid, config.num_prefix_tokens)
    if reset_head:
        new = dataclasses.replace(new, head_bias=head_bias)
        like = state["embedding.bias"]
        state.pop("head.weight", None)
        state.pop("head.bias", None)
        if new.num_classes:
            state["head.weight"] = like.new_zeros(new.num_classes, new.representation_size or new.width)
            state["head.bias"] = like.new_full((new.num_classes,), head_bias)
    return new, state

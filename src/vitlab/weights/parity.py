"""Whether a written file computes what the model computes."""

import typing
from collections.abc import Callable, Iterable
from typing import Any

from vitlab.errors import RunError

if typing.TYPE_CHECKING:
    from torch import Tensor

PARITY_BATCHES = (1, 3)
"""Sizes of the batches of random images on which a written model is compared."""


class ParityError(RunError):
    """A written file does not compute what its model computes."""


def check_parity(
    model: Any,
    other: "Callable[[Tensor], Any]",
    what: str,
    tolerance: float = 1e-4,
    *,
    batches: "Iterable[Tensor] | None" = None,
    prepare: "Callable[[Tensor], Tensor]" = lambda images: images,
) -> float:
    """The largest difference of `other`'s float32 outputs from the model's, over the root mean square of the model's.

    Outputs are a tensor, or tensors by name, compared separately. The images are random and of the size in
    `model.config`, or `batches` for `other`; `prepare` converts `batches` to the model's input. Raises ParityError,
    naming `what`, where a difference passes `tolerance` or is not a number.
    """
    import torch

    generator, largest = torch.Generator().manual_seed(0), 0.0
    if batches is None:
        shape = (model.config.in_chans, *model.config.image_hw)
        batches = [torch.rand(batch, *shape, generator=generator) * 2 - 1 for batch in PARITY_BATCHES]
    for images in batches:
        with torch.no_grad():
            expected, found = model(prepare(images)), other(images)
        if isinstance(expected, torch.Tensor):
            expected, found = {"outputs": expected}, {"outputs": found}
        for name, ours in expected.items():
            theirs = found[name]
            if ours.shape != theirs.shape:
                raise ParityError(f"the {name} of {what} are {list(theirs.shape)} instead of {list(ours.shape)}.")
            if not ours.isfinite().all():
                raise ParityError(
                    f"the model's {name} are not finite for random images, so that {what} cannot be compared: its "
                    f"weights are too large for float32. Take an earlier checkpoint."
                )
            # An untrained head returns zeros: then the other has to return them as well.
            error = float((ours - theirs).abs().max() / ours.square().mean().sqrt().clamp(min=1e-12))
            if not error <= tolerance:
                raise ParityError(
                    f"the {name} of {what} differ from the model's by {error:.1e} of their root mean square; "
                    f"{tolerance:.0e} is allowed. Do not use the file, and report this with the model's configuration."
                )
            largest = max(largest, error)
    return largest

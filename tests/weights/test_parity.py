"""A written file is compared with the model."""

from collections.abc import Callable

import pytest
import torch

from vitlab.models.vit import ViT
from vitlab.weights import ParityError
from vitlab.weights.parity import check_parity


def test_outputs_are_compared(tiny: Callable[..., ViT]) -> None:
    model = tiny()
    assert 0 < check_parity(model, lambda images: model(images) * (1 + 1e-5), "x") < 1e-4
    assert check_parity(model, lambda images: model(images) * (1 + 2e-4), "x", 1e-3) > 1e-4
    for other, problem in (
        (lambda images: model(images) * (1 + 2e-4), r"differ .* by \d\.\de-04 .*1e-04 is allowed"),
        (lambda images: model(images) * torch.nan, "differ .* by nan"),
        (lambda images: model(images)[:1, :2], r"\[1, 2\] instead of \[1, 5\]"),
    ):
        with pytest.raises(ParityError, match=problem):
            check_parity(model, other, "x")
    with torch.no_grad():
        model.embedding.weight.mul_(1e38)
    with pytest.raises(ParityError, match=r"outputs are not finite .*earlier checkpoint"):
        check_parity(model, model, "x")
    torch.nn.init.ones_(model.embedding.weight)
    torch.nn.init.zeros_(model.head.weight)  # pyright: ignore[reportOptionalMemberAccess]
    torch.nn.init.zeros_(model.head.bias)  # pyright: ignore[reportOptionalMemberAccess]
    assert check_parity(model, model, "an untrained model") == 0

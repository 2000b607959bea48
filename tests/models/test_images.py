"""The input of a model: clear errors for other tensors."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vitlab.errors import UserError
from vitlab.models import ModelConfig
from vitlab.models.resnet import ResNet
from vitlab.models.vit import ViT


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        (torch.zeros(3, 24, 32), r"shape \[3, 24, 32\].*images\[None\]"),
        (torch.zeros(2, 1, 24, 32), r"shape \[2, 1, 24, 32\].*gray.*expand"),
        (torch.zeros(2, 24, 32, 3), r"permute\(0, 3, 1, 2\)"),
        (torch.zeros(2, 3, 24, 32, dtype=torch.uint8), r"torch\.uint8.*/ 127\.5 - 1"),
    ],
)
def test_other_images_are_refused(
    small: Callable[..., ViT], small_resnet: Callable[..., ResNet], inputs: Tensor, problem: str
) -> None:
    for model in (small(), small_resnet()):
        with pytest.raises(UserError, match=problem):
            model(inputs)


@pytest.mark.parametrize("grad", [True, False])
def test_an_empty_batch_has_an_empty_output(kind: ModelConfig, model: ViT | ResNet, grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        logits = model(torch.zeros(0, 3, *kind.image_hw))
    assert logits.shape == (0, kind.num_classes or kind.num_features)

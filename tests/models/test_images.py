"""What a model is given: clear errors for what it cannot take, and nothing in the way of what traces it."""

from collections.abc import Callable

import jaxtyping
import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx

from vitlab.errors import UserError
from vitlab.models import ModelConfig, images
from vitlab.models.images import check_images
from vitlab.models.resnet import ResNet
from vitlab.models.vit import ViT

PIXELS = torch.arange(256.0).repeat(18).reshape(2, 3, 24, 32)


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the tests' own check would come first


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (torch.zeros(3, 24, 32), r"shape \[3, 24, 32\].*images\[None\]"),
        (torch.zeros(2, 1, 24, 32), r"shape \[2, 1, 24, 32\].*gray.*expand"),
        (torch.zeros(2, 4, 24, 32), r"alpha.*images\[:, :3\]"),
        (torch.zeros(2, 24, 32, 3), r"permute\(0, 3, 1, 2\)"),
        (torch.zeros(2, 5, 24, 32), r"red, green and blue"),
        (torch.zeros(1, 2, 3, 24, 32), r"stack"),
        (PIXELS.to(torch.uint8), r"torch\.uint8.*/ 127\.5 - 1"),
        (PIXELS, r"values from 0 to 255.*/ 127\.5 - 1"),
        ((PIXELS - 0.5) / 0.5, r"values from -1 to 509"),
    ],
)
def test_other_images_are_refused(
    small: Callable[..., ViT], small_resnet: Callable[..., ResNet], given: Tensor, said: str
) -> None:
    for model in (small(), small_resnet()):
        with pytest.raises(UserError, match=said):
            model(given)


@pytest.mark.parametrize("given", [PIXELS / 127.5 - 1, PIXELS / 255, 100 * torch.randn(2, 3, 24, 32), PIXELS[:0]])
def test_normalized_images_and_noise_pass(given: Tensor) -> None:
    assert check_images(given) is given


@pytest.mark.parametrize("grad", [True, False])
def test_an_empty_batch_has_an_empty_answer(kind: ModelConfig, model: ViT | ResNet, grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        logits = model(torch.zeros(0, 3, *kind.image_hw))
    assert logits.shape == (0, kind.num_classes or kind.num_features)


def test_values_are_read_in_plain_calls_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, traced, mapped or on another device, reading them would fail or wait."""
    read: list[bool] = []
    true = images._is_readable

    def spy(given: Tensor) -> bool:
        read.append(true(given))
        return read[-1]

    monkeypatch.setattr(images, "_is_readable", spy)
    given = PIXELS / 255
    check_images(given)
    assert read == [True]
    vmap(lambda one: check_images(one[None]))(given)
    make_fx(lambda all_of: check_images(all_of))(given)
    torch.jit.trace(lambda all_of: check_images(all_of), given, check_trace=False)  # pyright: ignore[reportPrivateImportUsage]
    check_images(given.to("meta"))
    check_images(given[:0])
    assert read == [True] + 5 * [False]


@pytest.mark.usefixtures("traceable")
def test_checks_survive_compilation(small: Callable[..., ViT]) -> None:
    """Shape and type are known then, values are not."""
    compiled = torch.compile(small(), backend="eager", fullgraph=True)
    assert compiled(PIXELS).shape == (2, 5)

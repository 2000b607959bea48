"""What holds of every kind of model."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.errors import UserError
from vitlab.models import ModelConfig, ViTConfig, create_model, list_models
from vitlab.models.resnet import ResNet
from vitlab.models.vit import ViT


def test_models_are_listed_by_pattern_and_built_by_name() -> None:
    assert list_models("ViT-B*") == ["ViT-B/8", "ViT-B/14", "ViT-B/16", "ViT-B/32"]
    assert list_models("*ViT-Ti/16") == ["ViT-Ti/16", "R+ViT-Ti/16"]
    assert list_models("vit*") == []
    with torch.device("meta"):
        assert create_model("ViT-Ti/16", depth=1, image_size=(32, 48)).config.grid == (2, 3)
        assert create_model("R26x1", num_classes=0).config.num_classes == 0


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("inputs", "way_out"),
    [
        (torch.zeros(3, 24, 32), r"images\[None\]"),
        (torch.zeros(2, 24, 32, 3), r"permute\(0, 3, 1, 2\)"),
        (torch.zeros(2, 3, 24, 32, dtype=torch.uint8), r"/ 127\.5 - 1"),
        (torch.zeros(2, 3, 16, 16), "image_size=16,"),
        (torch.zeros(2, 3, 8, 16), r"image_size=\(8, 16\)"),
    ],
)
def test_other_images_are_refused(
    small: Callable[..., ViT], small_resnet: Callable[..., ResNet], inputs: Tensor, way_out: str
) -> None:
    for model in (small(), small_resnet(mixing="axial", version="v2")):
        with pytest.raises(UserError, match=way_out):
            model(inputs)
    assert small_resnet(version="v2")(torch.zeros(1, 3, 28, 32)).shape == (1, 5)  # convolutions take any size


@torch.no_grad()
def test_shapes_and_half_precision(kind: ModelConfig, model: ViT | ResNet, images: Tensor) -> None:
    tokens = model.forward_features(images)
    rep, logits = model.forward_head(tokens, pre_logits=True), model.forward_head(tokens)
    prefix, width = (kind.num_prefix_tokens, kind.width) if isinstance(kind, ViTConfig) else (0, kind.body.channels)
    assert tokens.shape == (2, prefix + kind.grid[0] * kind.grid[1], width)
    assert rep.shape == (2, kind.num_features)
    assert logits.shape == (2, kind.num_classes or kind.num_features)
    assert torch.equal(logits, model(images))
    assert all(output.isfinite().all() and output.std() > 0 for output in (tokens, rep, logits))
    torch.testing.assert_close(model(images[1:]), logits[1:], rtol=1e-4, atol=1e-4)  # no image affects another
    assert model(images[:0]).shape == (0, *logits.shape[1:])
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(images)
    half = model.bfloat16()(images)
    assert half.dtype == torch.bfloat16
    for output in (mixed, half):
        assert (output.float() - logits).norm() < 0.15 * logits.norm()


def test_every_parameter_learns_also_in_mixed_precision(kind: ModelConfig, model: ViT | ResNet, images: Tensor) -> None:
    parameters = dict(model.named_parameters())
    assert sum(parameter.numel() for parameter in parameters.values()) == kind.num_parameters
    exact = torch.autograd.grad(model(images).square().sum(), list(parameters.values()))
    assert model(images[:0]).shape[0] == 0
    assert all(grad.isfinite().all() and grad.any() for grad in exact)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(images)
    mixed = torch.autograd.grad(logits.float().square().sum(), list(parameters.values()))
    ours, theirs = (torch.cat([grad.flatten().float() for grad in grads]) for grads in (mixed, exact))
    assert F.cosine_similarity(ours, theirs, dim=0) > 0.9


@pytest.mark.usefixtures("traceable")
def test_it_compiles_as_one_graph(model: ViT | ResNet, images: Tensor) -> None:
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(images), model(images), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("traceable")
@pytest.mark.parametrize(("backend", "skip"), [("aot_eager", 0.5), ("inductor", 0.0)])  # the last draws other numbers
def test_it_compiles_in_training_and_without_gradients(small: Callable[..., ViT], backend: str, skip: float) -> None:
    model, images = small(position="relative", position_at="every", stochastic_depth=skip), torch.randn(6, 3, 24, 32)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        torch.testing.assert_close(compiled(images), model(images), rtol=1e-4, atol=1e-5)
    model.train()
    results = []
    for forward in (model, compiled):
        torch.manual_seed(0)
        logits = forward(images)
        results.append((logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

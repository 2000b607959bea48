"""The door to the models: names in, models out; and what holds of every kind of model that comes out."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load, save
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vitlab.models import MODELS, ModelConfig, ResNetConfig, ViTConfig, build_model, create_model, list_models
from vitlab.models.resnet import ResNet
from vitlab.models.vit import ViT


def test_names_are_found_by_pattern() -> None:
    assert list_models() == list(MODELS)
    assert list_models("ViT-B*") == ["ViT-B/8", "ViT-B/14", "ViT-B/16", "ViT-B/32"]
    assert list_models("*ViT-Ti/16") == ["ViT-Ti/16", "R+ViT-Ti/16"]
    assert list_models("R152*") == ["R152x1", "R152x2", "R152x4"]
    assert list_models("Axial*") == ["Axial-ViT-B/16", "Axial-ViT-B/32", "AxialResNet50"]
    assert list_models("vit*") == []


def test_overrides_are_settings() -> None:
    assert create_model("ViT-Ti/16", depth=1, image_size=(32, 48)).config.grid == (2, 3)
    assert create_model("R26x1", num_classes=0).config == ResNetConfig(body=MODELS["R26x1"].body, num_classes=0)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match=r"unknown model setting 'widht'; the nearest: width"):
        create_model("ViT-Ti/16", widht=3)
    with pytest.raises(ValueError, match=r"unknown model setting 'depth'; "):
        create_model("R50x1", depth=3)


# --- every kind of model -----------------------------------------------------------------------------------------


def test_a_generator_alone_decides_the_weights(kind: ModelConfig) -> None:
    before = torch.get_rng_state()
    one, again, other = (
        build_model(kind, generator=torch.Generator().manual_seed(seed)).state_dict() for seed in (3, 3, 4)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], again[name]) for name in one)
    drawn = next(name for name in one if name.endswith(("embedding.weight", "root.weight")))
    assert not torch.equal(one[drawn], other[drawn])


@torch.no_grad()
def test_shapes(kind: ModelConfig, model: ViT | ResNet, images: Tensor) -> None:
    tokens = model.forward_features(images)
    rep, logits = model.forward_head(tokens, pre_logits=True), model.forward_head(tokens)
    prefix, width = (kind.num_prefix_tokens, kind.width) if isinstance(kind, ViTConfig) else (0, kind.body.channels)
    assert tokens.shape == (2, prefix + kind.grid[0] * kind.grid[1], width)
    assert rep.shape == (2, kind.num_features)
    assert logits.shape == (2, kind.num_classes or kind.num_features)
    assert torch.equal(logits, model(images))
    assert all(each.isfinite().all() and each.std() > 0 for each in (tokens, rep, logits))
    if not kind.num_classes:
        assert torch.equal(rep, logits)


def test_each_image_is_judged_by_itself(model: ViT | ResNet, images: Tensor) -> None:
    both, alone = model(images), model(images[1:])
    torch.testing.assert_close(both[1:], alone, rtol=1e-4, atol=1e-4)
    assert (both[0] - both[1]).abs().max() > 1e-3


def test_every_parameter_learns_and_both_attention_paths_agree(model: ViT | ResNet, images: Tensor) -> None:
    """With gradients, attention is plain products here; without, it is fused."""
    logits = model(images)
    with torch.no_grad():
        torch.testing.assert_close(model(images), logits, rtol=1e-4, atol=1e-5)
    logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_two_steps_of_training_lower_the_loss(kind: ModelConfig, images: Tensor) -> None:
    model, labels = build_model(kind), torch.tensor([1, 3])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss() -> Tensor:
        return F.cross_entropy(model(images), labels)

    with torch.no_grad():
        before = loss()
    for _ in range(2):
        model.train()
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        assert loss() < before - 1e-3


@pytest.mark.usefixtures("traceable")
def test_it_compiles_as_one_graph(model: ViT | ResNet, images: Tensor) -> None:
    torch.testing.assert_close(
        torch.compile(model, fullgraph=True, backend="eager")(images), model(images), rtol=1e-4, atol=1e-5
    )


@pytest.mark.usefixtures("traceable")
@pytest.mark.parametrize(
    ("backend", "skip"),
    [("aot_eager", 0.5), pytest.param("inductor", 0.0, marks=pytest.mark.slow)],  # which draws other random numbers
)
def test_it_compiles_in_training_and_without_gradients(small: Callable[..., ViT], backend: str, skip: float) -> None:
    settings = {"position": "relative", "position_at": "every", "stochastic_depth": skip, "depth": 3}
    model, images = small(**settings), torch.randn(6, 3, 24, 32)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(images), model(images), rtol=1e-4, atol=1e-5)
    model.train()
    answers = []
    for forward in (model, compiled):
        torch.manual_seed(0)
        logits = forward(images)
        answers.append((logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))))
    for ours, theirs in zip(*answers, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_parameters_are_counted_without_building(kind: ModelConfig, model: ViT | ResNet) -> None:
    assert sum(parameter.numel() for parameter in model.parameters()) == kind.num_parameters


@pytest.mark.parametrize("grad", [True, False])
def test_counted_operations_are_those_that_run(kind: ModelConfig, grad: bool) -> None:
    """By products where gradients are needed, by fused attention otherwise, which torch 2.11 counts on no CPU."""
    counter = FlopCounterMode(display=False)
    device = "cpu" if grad else "meta"
    model = build_model(kind).requires_grad_(False).to(device)
    images = torch.randn(2, 3, *kind.image_hw, device=device, requires_grad=grad)
    with counter:
        model(images)
    assert 2 * 2 * kind.forward_macs == counter.get_total_flops()


def test_weights_go_through_safetensors(kind: ModelConfig, model: ViT | ResNet, images: Tensor) -> None:
    """None is stored twice, or under two names."""
    state = load(save(model.state_dict()))
    other = build_model(kind).eval()
    other.load_state_dict(state)
    assert torch.equal(other(images), model(images))
    assert sum(tensor.numel() for tensor in state.values()) == kind.num_parameters


@torch.no_grad()
def test_half_precision_is_close(model: ViT | ResNet, images: Tensor) -> None:
    exact = model(images)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(images)
    half = model.bfloat16()(images)
    assert half.dtype == torch.bfloat16
    for ours in (mixed.float(), half.float()):
        assert (ours - exact).norm() < 0.15 * exact.norm()


def test_mixed_precision_trains(model: ViT | ResNet, images: Tensor) -> None:
    """Half precision forward, and a backward outside of the autocast, as in training."""
    parameters = list(model.parameters())
    exact = torch.autograd.grad(model(images).square().sum(), parameters)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(images)
    mixed = torch.autograd.grad(logits.float().square().sum(), parameters)
    ours, theirs = (torch.cat([each.flatten().float() for each in grads]) for grads in (mixed, exact))
    assert F.cosine_similarity(ours, theirs, dim=0) > 0.9

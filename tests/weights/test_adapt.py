from collections.abc import Callable
from typing import Any

import pytest
import torch

from vitlab.models import ViTConfig, build_model
from vitlab.models.position import interpolate_positions
from vitlab.models.vit import ViT
from vitlab.weights import load_model
from vitlab.weights.adapt import adapt

GOLDEN = (
    "vit_testing",
    "vit_tiny_rep",
    "vit_tiny_gap",
    "vit_epsprobe",
    "bv_mu16_gap_learn",
    "bv_S16_gap_learn",
    "bv_S16_gap_sincos2d_rep",
    pytest.param("ViT-B_16-gap-norep", marks=pytest.mark.slow),
)


@pytest.mark.parametrize("name", GOLDEN)
@torch.no_grad()
def test_another_resolution_answers_as_google_s_code(golden: Callable[[str], Any], name: str) -> None:
    answers = golden(name)
    images = answers.images("hires/images")
    model = load_model(answers.checkpoint, image_size=images.shape[-1])
    assert model.config.image_size == images.shape[-1]
    tokens = model.forward_features(images)
    answers.check("hires/encoded" if "hires/encoded" in answers.arrays else "hires/encoded[:1]", tokens)
    answers.check("hires/pre_logits", model.forward_head(tokens, pre_logits=True))
    answers.check("hires/logits", model.forward_head(tokens))
    if "sincos" not in name:
        assert isinstance(model, ViT)
        assert model.position.table is not None
        answers.check("hires/pos_embedding", model.position.table)


@torch.no_grad()
def test_a_new_head_without_the_hidden_layer_answers_as_google_s_code(golden: Callable[[str], Any]) -> None:
    answers = golden("vit_tiny_rep")
    images = answers.images("hires/images")
    model = load_model(answers.checkpoint, image_size=80, num_classes=6, pre_logits="drop")
    assert model.head is not None
    assert not model.head.weight.any()
    model.head.weight.copy_(torch.from_numpy(answers.arrays["drophead/head/kernel"]).T)
    model.head.bias.copy_(torch.from_numpy(answers.arrays["drophead/head/bias"]))
    tokens = model.forward_features(images)
    answers.check("drophead/pre_logits", model.forward_head(tokens, pre_logits=True))
    answers.check("drophead/logits", model.forward_head(tokens))


def test_nothing_asked_nothing_changed(tiny: Callable[..., ViT]) -> None:
    model = tiny(representation_size=6)
    config, state = adapt(model.config, model.state_dict(), image_size=12, num_classes=5)
    assert config == model.config
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_the_given_state_is_left_alone(tiny: Callable[..., ViT]) -> None:
    model = tiny(representation_size=6)
    state = model.state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    adapt(model.config, state, image_size=20, num_classes=3, pre_logits="drop")
    assert state.keys() == before.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("pool", ["token", "gap"])
def test_only_the_positions_change_with_the_size(tiny: Callable[..., ViT], pool: str) -> None:
    model = tiny(pool=pool)
    config, state = adapt(model.config, model.state_dict(), image_size=(8, 20))
    assert (config.grid, config.num_classes) == ((2, 5), 5)
    assert isinstance(config, ViTConfig)
    prefix = config.num_prefix_tokens
    table = model.state_dict()["position.table"]
    expected = interpolate_positions(table, (3, 3), (2, 5), prefix)
    assert torch.equal(state.pop("position.table"), expected)
    assert torch.equal(expected[:, :prefix], table[:, :prefix])
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in state.items())


def test_no_positions_need_no_interpolation(tiny: Callable[..., ViT]) -> None:
    model = tiny(position="none", pool="gap")
    config, state = adapt(model.config, model.state_dict(), image_size=20)
    assert config.grid == (5, 5)
    assert state.keys() == model.state_dict().keys()


@pytest.mark.parametrize(
    ("asked", "classes", "bias"),
    [
        ({"num_classes": 3}, 3, 0.0),
        ({"num_classes": 3, "head_bias": -10.0}, 3, -10.0),
        ({"reset_head": True}, 5, 0.0),
        ({"num_classes": 5, "reset_head": True, "head_bias": 1.5}, 5, 1.5),
    ],
)
@pytest.mark.parametrize("rep", [None, 6])
def test_a_new_head_is_zero(
    tiny: Callable[..., ViT], asked: dict[str, Any], classes: int, bias: float, rep: int | None
) -> None:
    model = tiny(representation_size=rep)
    config, state = adapt(model.config, model.state_dict(), **asked)
    assert (config.num_classes, config.head_bias) == (classes, bias)
    assert torch.equal(state["head.weight"], torch.zeros(classes, rep or 8))
    assert torch.equal(state["head.bias"], torch.full((classes,), bias))
    build_model(config).load_state_dict(state)


def test_no_head_at_all_and_back(tiny: Callable[..., ViT]) -> None:
    model = tiny(representation_size=6)
    config, state = adapt(model.config, model.state_dict(), num_classes=0)
    assert config.num_classes == 0
    assert {name for name in model.state_dict() if name not in state} == {"head.weight", "head.bias"}
    config, state = adapt(config, state, num_classes=2, pre_logits="drop")
    assert state["head.weight"].shape == (2, 8)
    build_model(config).load_state_dict(state)


def test_the_hidden_layer_goes_only_with_its_head(tiny: Callable[..., ViT]) -> None:
    model = tiny(representation_size=6)
    asked: dict[str, Any]
    for asked in ({}, {"num_classes": 5}, {"image_size": 20}):
        with pytest.raises(ValueError, match=r"head of 5 classes.*reset_head=True.*num_classes=0"):
            adapt(model.config, model.state_dict(), pre_logits="drop", **asked)
    for asked in ({"reset_head": True}, {"num_classes": 3}, {"num_classes": 0}):
        config, state = adapt(model.config, model.state_dict(), pre_logits="drop", **asked)
        assert isinstance(config, ViTConfig)
        assert config.representation_size is None
        build_model(config).load_state_dict(state)


def test_dropping_a_hidden_layer_that_is_not_there_changes_nothing(tiny: Callable[..., ViT]) -> None:
    model = tiny()
    config, state = adapt(model.config, model.state_dict(), pre_logits="drop")
    assert config == model.config
    assert torch.equal(state["head.weight"], model.state_dict()["head.weight"])


def test_a_size_that_the_patch_does_not_divide_is_refused(tiny: Callable[..., ViT]) -> None:
    model = tiny()
    with pytest.raises(ValueError, match="multiple of 4, the nearest: 12, 16"):
        adapt(model.config, model.state_dict(), image_size=15)


def test_a_new_head_has_the_precision_of_the_rest(tiny: Callable[..., ViT]) -> None:
    model = tiny().bfloat16()
    _, state = adapt(model.config, model.state_dict(), num_classes=3, image_size=20)
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}


@pytest.mark.usefixtures("unchecked")
def test_a_misspelt_choice_is_told(tiny: Callable[..., ViT]) -> None:
    model = tiny()
    with pytest.raises(ValueError, match="pre_logits is 'Drop'; allowed: 'keep', 'drop'"):
        adapt(model.config, model.state_dict(), pre_logits="Drop")  # pyright: ignore[reportArgumentType]

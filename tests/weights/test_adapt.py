from collections.abc import Callable
from typing import Any

import pytest
import torch

from vitlab.errors import UserError
from vitlab.models import ResNetConfig, ViTConfig
from vitlab.models.position import interpolate_positions
from vitlab.models.vit import ViT, build_model
from vitlab.weights import load_model
from vitlab.weights.adapt import adapt

GOLDEN = (
    "vit_testing",
    "vit_tiny_rep",
    "vit_tiny_gap",
    "bv_mu16_gap_learn",
    "bv_S16_gap_sincos2d_rep",
    "hybrid_small",
    "hybrid_small res75",
    pytest.param("vit_epsprobe", marks=pytest.mark.slow),
    pytest.param("bv_S16_gap_learn", marks=pytest.mark.slow),
    pytest.param("ViT-B_16-gap-norep", marks=pytest.mark.slow),
)


@pytest.mark.parametrize("case", GOLDEN)
@torch.no_grad()
def test_another_size_gives_the_outputs_of_googles_code(golden: Callable[[str], Any], case: str) -> None:
    name, _, size = case.partition(" ")
    expected, at = golden(name), size or "hires"
    images = expected.images(f"{at}/images")
    model = load_model(expected.checkpoint, image_size=images.shape[-1])
    tokens = model.forward_features(images)
    expected.check(f"{at}/encoded" if f"{at}/encoded" in expected.arrays else f"{at}/encoded[:1]", tokens)
    expected.check(f"{at}/pre_logits", model.forward_head(tokens, pre_logits=True))
    expected.check(f"{at}/logits", model.forward_head(tokens))
    if "sincos" not in name:
        expected.check(f"{at}/pos_embedding", model.state_dict()["position.table"])


@torch.no_grad()
def test_a_new_head_without_the_hidden_layer_gives_the_outputs_of_googles_code(golden: Callable[[str], Any]) -> None:
    expected = golden("vit_tiny_rep")
    model = load_model(expected.checkpoint, image_size=80, num_classes=6, pre_logits="drop")
    assert model.head is not None
    assert not model.head.weight.any()
    model.head.weight.copy_(torch.from_numpy(expected.arrays["drophead/head/kernel"]).T)
    model.head.bias.copy_(torch.from_numpy(expected.arrays["drophead/head/bias"]))
    tokens = model.forward_features(expected.images("hires/images"))
    expected.check("drophead/pre_logits", model.forward_head(tokens, pre_logits=True))
    expected.check("drophead/logits", model.forward_head(tokens))


@pytest.mark.parametrize("settings", [{"pool": "token"}, {"pool": "gap"}, {"pool": "gap", "position": "none"}])
def test_only_the_positions_change_with_the_size(tiny: Callable[..., ViT], settings: dict[str, Any]) -> None:
    model = tiny(**settings)
    before = model.state_dict()
    config, state = adapt(model.config, before, image_size=(8, 20))
    assert isinstance(config, ViTConfig)
    assert (config.grid, config.num_classes) == ((2, 5), 5)
    prefix, table = config.num_prefix_tokens, before.get("position.table")
    if table is not None:
        expected = interpolate_positions(table, (3, 3), (2, 5), prefix)
        assert torch.equal(state.pop("position.table"), expected)
        assert torch.equal(expected[:, :prefix], table[:, :prefix])
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in state.items())


def test_filters_of_one_channel_compute_as_those_of_rgb_on_gray_images(tiny: Callable[..., ViT]) -> None:
    model = tiny()
    config, state = adapt(model.config, model.state_dict(), in_chans=1)
    gray = build_model(config).eval()
    gray.load_state_dict(state)
    images = torch.rand(2, 1, 12, 12)
    torch.testing.assert_close(gray(images), model(images.expand(-1, 3, -1, -1)))
    assert adapt(config, state, in_chans=1)[1]["embedding.weight"] is state["embedding.weight"]
    with pytest.raises(ValueError, match=r"in_chans=3 is for ViTs that cut 3 channels into patches"):
        adapt(config, state, in_chans=3)


@pytest.mark.parametrize(
    ("options", "classes", "bias", "rep"),
    [({"num_classes": 3, "head_bias": -10.0}, 3, -10.0, None), ({"reset_head": True, "head_bias": 1.5}, 5, 1.5, 6)],
)
def test_a_new_head_is_zero(tiny: Callable[..., ViT], options: Any, classes: int, bias: float, rep: int | None) -> None:
    model = tiny(representation_size=rep).bfloat16()
    config, state = adapt(model.config, model.state_dict(), **options)
    assert torch.equal(state["head.weight"], torch.zeros(classes, rep or 8, dtype=torch.bfloat16))
    assert torch.equal(state["head.bias"], torch.full((classes,), bias, dtype=torch.bfloat16))
    build_model(config).load_state_dict(state)


def test_the_hidden_layer_is_removed_only_with_its_head(tiny: Callable[..., ViT]) -> None:
    model = tiny(representation_size=6)
    with pytest.raises(ValueError, match=r"reset_head=True.*num_classes=0"):
        adapt(model.config, model.state_dict(), pre_logits="drop", num_classes=5)
    options: dict[str, Any]
    for options in ({"reset_head": True}, {"num_classes": 3}, {"num_classes": 0}):
        config, state = adapt(model.config, model.state_dict(), pre_logits="drop", **options)
        assert isinstance(config, ViTConfig)
        assert config.representation_size is None
        build_model(config).load_state_dict(state)
    config, state = adapt(model.config, model.state_dict(), num_classes=0)  # the hidden layer stays
    assert {name for name in model.state_dict() if name not in state} == {"head.weight", "head.bias"}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "problem"),
    [({"image_size": 15}, "multiple of 4"), ({"pre_logits": "Drop"}, "'keep', 'drop'"), ({"interpolation": "x"}, "x")],
)
def test_invalid_options_are_refused(tiny: Callable[..., ViT], options: dict[str, Any], problem: str) -> None:
    model = tiny()
    with pytest.raises(ValueError, match=problem):
        adapt(model.config, model.state_dict(), **options)
    with pytest.raises(UserError, match="interpolation='bicubic'"):
        adapt(ResNetConfig(), {}, interpolation="bicubic")

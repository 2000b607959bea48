from collections.abc import Callable
from typing import Any

import pytest
import torch

from vitlab.errors import UserError
from vitlab.models import ResNetConfig, ViTConfig
from vitlab.models.position import interpolate_positions
from vitlab.models.variant import Variant
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


POOLED: dict[str, dict[str, Any]] = {
    "1d": {"pool": "token"},
    "2d": {"pool": "token", "position": "2d"},
    "both": {"pool": "token+gap", "position": "none"},
    "gap": {"pool": "gap"},
    "registers": {"pool": "token", "variant": Variant(registers=2)},
    "every": {"pool": "token", "position_at": "every"},
}


@pytest.mark.parametrize("case", POOLED)
@torch.no_grad()
def test_a_cut_model_computes_as_the_first_blocks(tiny: Callable[..., ViT], case: str) -> None:
    model = tiny(**{"depth": 3, **POOLED[case]})
    images = torch.rand(2, 3, 12, 12) * 2 - 1
    pools: Any = ("token", "gap", "token+gap") if model.config.has_class_token else ("gap",)
    for depth in (1, 2, 3):
        ((patches, prefix),) = model.get_intermediate_layers(images, [depth - 1], return_prefix_tokens=True)
        expected = {"gap": patches.mean(dim=1)}
        if model.config.has_class_token:
            expected |= {"token": prefix[:, 0], "token+gap": torch.cat([prefix[:, 0], expected["gap"]], dim=1)}
        for pool in pools:
            if pool == "gap" and case == "every":
                continue
            config, state = adapt(model.config, model.state_dict(), num_classes=0, depth=depth, pool=pool)
            cut = build_model(config).eval()
            cut.load_state_dict(state)
            torch.testing.assert_close(cut(images), expected[pool])
            assert isinstance(config, ViTConfig)
            assert (config.depth, config.pool) == (depth, pool)


@pytest.mark.parametrize("case", ["1d", "2d", "both", "registers"])
@torch.no_grad()
def test_positions_are_interpolated_before_the_class_token_becomes_a_register(
    tiny: Callable[..., ViT], case: str
) -> None:
    model = tiny(depth=2, **POOLED[case])
    large = build_model(adapt(model.config, model.state_dict(), image_size=20)[0]).eval()
    large.load_state_dict(adapt(model.config, model.state_dict(), image_size=20)[1])
    images = torch.rand(2, 3, 20, 20) * 2 - 1
    (patches,) = large.get_intermediate_layers(images, [0])  # pyright: ignore[reportCallIssue]
    options: Any = {"image_size": 20, "num_classes": 0, "depth": 1, "pool": "gap"}
    config, state = adapt(model.config, model.state_dict(), **options)
    cut = build_model(config).eval()
    cut.load_state_dict(state)
    torch.testing.assert_close(cut(images), patches.mean(dim=1))


@torch.no_grad()
def test_a_class_token_becomes_a_register_and_a_class_token_again(tiny: Callable[..., ViT]) -> None:
    model = tiny(pool="token", num_classes=0)
    images = torch.rand(2, 3, 12, 12) * 2 - 1
    config, state = adapt(model.config, model.state_dict(), pool="gap")
    back, state = adapt(config, state, pool="token")
    again = build_model(back).eval()
    again.load_state_dict(state)
    torch.testing.assert_close(again(images), model(images))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("settings", "options", "problem"),
    [
        ({}, {"depth": 1}, "reset_head=True"),
        ({}, {"depth": 9, "num_classes": 0}, "1 to 2"),
        ({"pool": "map"}, {"depth": 1, "num_classes": 0}, "attention pooling"),
        ({"pool": "map"}, {"pool": "gap", "num_classes": 0}, "attention pooling"),
        ({}, {"pool": "gap"}, "trained head"),
        ({"pool": "gap"}, {"pool": "token", "num_classes": 0}, "class token"),
        ({"position_at": "every"}, {"pool": "gap", "num_classes": 0}, "before the first block"),
        ({}, {"pool": "mean", "num_classes": 0}, "token, gap, token\\+gap"),
    ],
)
def test_depth_and_pool_that_a_model_cannot_have(
    tiny: Callable[..., ViT], settings: dict[str, Any], options: Any, problem: str
) -> None:
    model = tiny(**settings)
    with pytest.raises(UserError, match=problem):
        adapt(model.config, model.state_dict(), **options)
    with pytest.raises(UserError, match="a ResNet has neither blocks nor tokens"):
        adapt(ResNetConfig(), {}, **{name: value for name, value in options.items() if name in ("depth", "pool")})

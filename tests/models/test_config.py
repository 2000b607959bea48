import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from vitlab.models import MODELS, ViTConfig, create_model, forward_macs, get_config, list_models
from vitlab.models.vit import ViT
from vitlab.settings import from_dict, to_dict

# At 224 pixels with 1,000 classes. Where Google's code has the model, its own count.
PARAMETERS = {
    "ViT-Ti/8": 5_719_720,
    "ViT-Ti/14": 5_694_376,
    "ViT-Ti/16": 5_717_416,
    "ViT-Ti/32": 6_131_560,
    "ViT-S/8": 22_055_272,
    "ViT-S/14": 22_004_584,
    "ViT-S/16": 22_050_664,
    "ViT-S/32": 22_878_952,
    "ViT-B/8": 86_576_872,
    "ViT-B/14": 86_475_496,
    "ViT-B/16": 86_567_656,
    "ViT-B/32": 88_224_232,
    "ViT-L/8": 304_338_920,
    "ViT-L/14": 304_203_752,
    "ViT-L/16": 304_326_632,
    "ViT-L/32": 306_535_400,
    "ViT-H/8": 632_214_760,
    "ViT-H/14": 632_045_800,
    "ViT-H/16": 632_199_400,
    "ViT-H/32": 634_960_360,
}

# Counts of Google's code for other settings.
I21K = {"num_classes": 21_843}
GAP = {"pool": "gap"}
OTHER_PARAMETERS = [
    ("ViT-S/16", GAP, 22_049_896),
    ("ViT-S/32", GAP, 22_878_184),
    ("ViT-B/16", GAP, 86_566_120),
    ("ViT-B/32", GAP, 88_222_696),
    ("ViT-Ti/16", GAP, 5_717_032),
    ("ViT-L/16", GAP, 304_324_584),
    ("ViT-H/14", GAP, 632_043_240),
    ("ViT-B/16", {**GAP, "width": 512, "heads": 8, "mlp_dim": 2048}, 38_836_712),
    ("ViT-H/14", {**GAP, "width": 1408, "depth": 40, "mlp_dim": 6144}, 1_012_608_616),
    ("ViT-H/14", {**GAP, "width": 1664, "depth": 48, "mlp_dim": 8192}, 1_844_437_352),
    ("ViT-H/14", {**GAP, "width": 1152, "depth": 27, "mlp_dim": 4304}, 413_595_352),
    ("ViT-B/16", {"width": 10, "depth": 1, "heads": 2, "mlp_dim": 10}, 21_390),
    ("ViT-Ti/16", I21K, 9_740_115),
    ("ViT-B/16", I21K, 102_595_923),
    ("ViT-B/16", {**I21K, "representation_size": 768}, 103_186_515),
    ("ViT-L/16", {**I21K, "representation_size": 1024}, 326_740_307),
    ("ViT-H/14", {**I21K, "representation_size": 1280}, 660_385_363),
    ("ViT-B/16", {"image_size": 384}, 86_859_496),
    ("ViT-B/8", {"image_size": 384}, 87_744_232),
    ("ViT-B/16", {"num_classes": 0}, 86_567_656 - 769_000),
    ("ViT-B/16", {"position": "none"}, 86_567_656 - 197 * 768),
]


def count(name: str, **overrides: Any) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in create_model(name, **overrides).parameters())


def test_every_name_is_counted() -> None:
    assert list(PARAMETERS) == list_models() == list(MODELS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_every_name(name: str) -> None:
    assert count(name) == PARAMETERS[name]


@pytest.mark.parametrize(("name", "overrides", "parameters"), OTHER_PARAMETERS)
def test_parameters_of_other_settings(name: str, overrides: dict[str, Any], parameters: int) -> None:
    assert count(name, **overrides) == parameters


def test_sizes_of_table_1() -> None:
    for name, row in (("B", (12, 768, 3072, 12)), ("L", (24, 1024, 4096, 16)), ("H", (32, 1280, 5120, 16))):
        config = MODELS[f"ViT-{name}/16"]
        assert (config.depth, config.width, config.mlp_dim, config.heads) == row


def test_names_are_found_by_pattern() -> None:
    assert list_models("ViT-B*") == ["ViT-B/8", "ViT-B/14", "ViT-B/16", "ViT-B/32"]
    assert list_models("*/32") == [f"ViT-{size}/32" for size in ("Ti", "S", "B", "L", "H")]
    assert list_models("R50*") == []


@pytest.mark.parametrize(
    ("image_size", "pool", "grid", "patches", "tokens"),
    [(224, "token", (14, 14), 196, 197), (224, "gap", (14, 14), 196, 196), ((32, 64), "token", (2, 4), 8, 9)],
)
def test_how_many_tokens(image_size: Any, pool: Any, grid: tuple[int, int], patches: int, tokens: int) -> None:
    config = ViTConfig(image_size=image_size, pool=pool)
    assert (config.grid, config.num_patches, config.num_tokens) == (grid, patches, tokens)
    assert config.num_prefix_tokens == tokens - patches


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ViT-B/17", "ViT-B/16"),
        ("ViT_B_16", "ViT-B/16"),
        ("resnet", "vitlab list models"),
    ],
)
def test_an_unknown_model_names_the_nearest(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=rf"unknown model '{re.escape(name)}'.*{re.escape(said)}"):
        create_model(name)


def test_an_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown model setting 'img_size'.*image_size"):
        get_config("ViT-B/16", img_size=224)
    with pytest.raises(ValueError, match=r"unknown model setting 'droput'.*dropout"):
        create_model("ViT-B/16", droput=0.1)


@pytest.mark.parametrize(
    ("image_size", "patch", "nearest"),
    [
        (225, 16, "224, 240"),
        (223, 16, "208, 224"),
        (224, 15, "210, 225"),
        ((224, 100), 16, "96, 112, 224, 240"),
        (5, 16, "16"),
        (0, 16, "16"),
    ],
)
def test_a_size_that_the_patch_does_not_divide_names_the_nearest(image_size: Any, patch: int, nearest: str) -> None:
    with pytest.raises(ValueError, match=rf"cannot be cut into patches of {patch}x{patch}.*the nearest: {nearest}\."):
        ViTConfig(image_size=image_size, patch_size=patch)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"heads": 5}, r"heads=5 does not divide width=768; the nearest that do: \[3, 4, 6\]"),
        ({"width": 0}, "width is 0; it must be at least 1"),
        ({"depth": -1}, "depth is -1"),
        ({"heads": 0}, "heads is 0"),
        ({"mlp_dim": 0}, "mlp_dim is 0"),
        ({"patch_size": 0}, "patch_size is 0"),
        ({"num_classes": -1}, "num_classes is -1"),
        ({"representation_size": 0}, "representation_size is 0.*or None"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"dropout": -0.1}, "dropout is -0.1"),
    ],
)
def test_a_wrong_number_says_what_is_allowed(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ViTConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pool": "map"}, "pool is 'map'; allowed: 'token', 'gap'"),
        ({"width": "768"}, "width is '768'; allowed: int"),
        ({"depth": True}, "depth is True; allowed: int"),
        ({"image_size": (224, 224, 3)}, "image_size is .* allowed: int or"),
        ({"dropout": None}, "dropout is None; allowed: float"),
    ],
)
def test_a_wrong_type_says_what_is_allowed(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the tests' own check would come first
    with pytest.raises(ValueError, match=said):
        ViTConfig(**settings)


def test_a_config_goes_through_json_and_is_frozen() -> None:
    config = get_config("ViT-L/16", image_size=(224, 384), representation_size=7, head_bias=-10.0)
    assert from_dict(ViTConfig, {**to_dict(config), "image_size": [224, 384]}) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.width = 3  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pool": "gap", "position": "none"},
        {"representation_size": 24, "image_size": (32, 64)},
        {"num_classes": 0, "representation_size": 24},
        {"num_classes": 0, "mlp_dim": 40, "depth": 3},
    ],
)
@pytest.mark.parametrize("grad", [True, False])
def test_counted_operations_are_those_that_run(settings: dict[str, Any], grad: bool) -> None:
    small = {"image_size": 32, "patch_size": 8, "width": 16, "depth": 2, "heads": 4, "mlp_dim": 64, "num_classes": 5}
    config = ViTConfig(**{**small, **settings})
    counter = FlopCounterMode(display=False)
    with counter, torch.set_grad_enabled(grad):
        ViT(config)(torch.randn(1, 3, *config.image_hw))
    assert 2 * forward_macs(config) == counter.get_total_flops()


def test_operations_of_known_models() -> None:
    assert forward_macs(MODELS["ViT-B/16"]) == pytest.approx(17.56e9, rel=1e-3)
    assert forward_macs(MODELS["ViT-L/16"]) == pytest.approx(61.55e9, rel=1e-3)


def test_the_table_of_models_does_not_import_torch() -> None:
    code = "import sys, vitlab, vitlab.models; vitlab.list_models(); print('torch' in sys.modules)"
    path = [str(Path(__file__).parents[2] / "src"), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": ":".join(path)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"

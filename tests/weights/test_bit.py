import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from states import arrays_of, randomized, same, write_spelled

from vitlab.models import ResNetBody, ResNetConfig, build_model, get_config
from vitlab.weights.google import google_layout, read_google, write_google

BIT = ResNetBody((1, 2), 32, version="v2", weight_eps=1e-10, weight_eps_on="variance", group_norm_eps=1e-5)
BIG_VISION = dataclasses.replace(BIT, pool_padding="-inf")
V1 = ResNetBody((1, 2), 32)


@pytest.mark.parametrize("size", ["", "res75/"])
@pytest.mark.parametrize(
    ("name", "padding", "of"),
    [("bitv1_small", "zero", ""), ("bit_small", "zero", "zeropool/f64/"), ("bit_small", "-inf", "")],
)
@torch.no_grad()
def test_outputs_are_those_of_googles_code(
    golden: Callable[[str], Any], name: str, padding: Any, of: str, size: str
) -> None:
    expected = golden(name)
    tolerance = expected.tolerance | {of + key: limit for key, limit in expected.tolerance.items()}
    expected = dataclasses.replace(expected, tolerance=tolerance)
    config, state = read_google(expected.checkpoint)
    assert isinstance(config, ResNetConfig)
    assert config.body.pool_padding == "zero"
    images = expected.images(f"{size}images")
    body = dataclasses.replace(config.body, pool_padding=padding)
    model = build_model(dataclasses.replace(config, body=body, image_size=images.shape[-1])).eval()
    model.load_state_dict(state)
    tokens = model.forward_features(images)
    if not of:  # with zero padding there are only these
        expected.check(f"{size}encoded", tokens.unflatten(1, model.config.grid))
    expected.check(f"{of}{size}pre_logits", model.forward_head(tokens, pre_logits=True))
    expected.check(f"{of}{size}logits", model.forward_head(tokens))


def test_names_and_shapes_are_those_of_a_published_bit(shared: Path) -> None:
    published = json.loads((shared / "facts" / "keys" / "BiT-M-R50x1.json").read_text())
    layout = google_layout(get_config("R50x1", num_classes=21_843), "stored")
    assert {name: list(slot.shape) for name, slot in layout.items()} == published


@pytest.mark.parametrize(
    ("config", "arrays", "numbers"),
    [
        (get_config("R50x1"), 153, 25_549_352),
        (get_config("R152x4"), 459, 936_533_224),
        (ResNetConfig(), 161, 25_557_032),  # big_vision's ResNet
    ],
)
def test_big_vision_has_as_many_arrays(config: ResNetConfig, arrays: int, numbers: int) -> None:
    layout = google_layout(config, "big_vision")
    assert len(layout) == arrays
    assert sum(np.prod(slot.shape) for slot in layout.values()) == numbers
    if config.body.version == "v2":
        assert layout["norm-pre-head/bias"].shape == (1, 1, 1, config.body.channels)


@pytest.mark.parametrize(
    ("body", "spelling", "root"),
    [
        (V1, "linen", "conv_root/kernel"),
        (V1, "stored", "conv_root/kernel"),
        (BIT, "stored", "resnet/root_block/standardized_conv2d/kernel"),
        (BIG_VISION, "linen", "root_block/conv_root/kernel"),
    ],
)
@pytest.mark.parametrize(("layers", "num_classes"), [((), 0), ((1, 2), 5), ((12,), 5)])
def test_any_resnet_is_read_back(
    tmp_path: Path, body: ResNetBody, spelling: Any, root: str, layers: tuple[int, ...], num_classes: int
) -> None:
    model = randomized(ResNetConfig(body=dataclasses.replace(body, layers=layers), num_classes=num_classes))
    write_spelled(model, tmp_path / "bit.npz", spelling, "params/")
    arrays = arrays_of(tmp_path / "bit.npz")
    assert arrays[f"params/{root}"].shape == (7, 7, 3, 32)
    numbered = {
        name.replace("standardized_conv2d/", f"standardized_conv2d_{i}/"): arrays[name] for i, name in enumerate(arrays)
    }
    np.savez(tmp_path / "numbered.npz", **numbered)
    write_google(model, tmp_path / "native.npz")
    for name in ("bit.npz", "native.npz", "numbered.npz"):
        config, state = read_google(tmp_path / name)
        assert config == model.config
        assert same(state, model)


def test_arrays_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "bit.npz"
    write_google(randomized(ResNetConfig(body=BIT, num_classes=5)), path)
    arrays = arrays_of(path)
    unit, root = "resnet/block2/unit02", "resnet/root_block/standardized_conv2d/kernel"
    wrong = {name: array for name, array in arrays.items() if name != f"{unit}/c/group_norm/gamma"}
    wrong[f"{unit}/a/standardized_conv2d_3/kernel"] = np.zeros(3, np.float32)  # a second one
    wrong["resnet/group_norm/beta"] = np.zeros(7, np.float32)
    for changed, problem in (
        (wrong, r"looks like a ResNet.*1 missing: .*/c/.*1 unknown: .*_3/kernel.*shape \(7,\)"),
        ({**arrays, root: np.zeros((7, 7), np.float32)}, r"has shape \(7, 7\)"),
        ({**arrays, root: np.zeros((7, 7, 3, 40), np.float32)}, "bit.npz: .*32 groups"),
    ):
        np.savez(path, **changed)
        with pytest.raises(ValueError, match=problem):
            read_google(path)


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"mixing": "axial"}, "body.mixing='axial'"),
        ({"weight_eps": 1e-5}, "body.weight_eps=1e-05"),
        ({"weight_eps_on": "std"}, "body.weight_eps_on='std'"),
        ({"group_norm_eps": 1e-4}, "body.group_norm_eps=0.0001"),
    ],
)
def test_unsupported_settings_are_not_written(tmp_path: Path, changes: dict[str, Any], setting: str) -> None:
    model = build_model(ResNetConfig(image_size=32, body=dataclasses.replace(BIT, **changes)))
    with pytest.raises(ValueError, match=rf"{setting}, which .*cannot represent.*save_model"):
        write_google(model, tmp_path / "bit.npz")
    assert not list(tmp_path.iterdir())

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from states import Arrays, arrays_of, randomized, same, write_spelled

from vitlab.models import ResNetBody, ResNetConfig, build_model, get_config
from vitlab.weights import load_model
from vitlab.weights.google import google_layout, read_google, write_google

BIT = ResNetBody((1, 2), 32, version="v2", weight_eps=1e-10, weight_eps_on="variance", group_norm_eps=1e-5)
BIG_VISION = dataclasses.replace(BIT, pool_padding="-inf")
V1 = ResNetBody((1, 2), 32)


def small(body: ResNetBody, num_classes: int = 5, **settings: Any) -> Any:
    return randomized(ResNetConfig(body=body, num_classes=num_classes, **settings))


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, Arrays]:
    """The file of a small BiT, and its arrays."""
    write_google(small(BIT), tmp_path / "bit.npz")
    return tmp_path / "bit.npz", arrays_of(tmp_path / "bit.npz")


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


@pytest.mark.parametrize("name", ["bit_small", "bitv1_small"])
def test_config_is_inferred(golden: Callable[[str], Any], name: str) -> None:
    path, meta = golden(name).checkpoint, json.loads(str(golden(name).arrays["meta"]))
    body = dataclasses.replace(V1 if "v1" in name else BIT, layers=tuple(meta["depth"]), width=64 * meta["width"])
    expected = ResNetConfig(body=body, num_classes=meta["num_classes"])
    assert read_google(path)[0] == expected
    assert read_google(path, image_size=(64, 96))[0] == dataclasses.replace(expected, image_size=(64, 96))
    assert load_model(path).config.num_parameters == meta["n_params"]


def test_names_and_shapes_are_those_of_a_published_bit(shared: Path) -> None:
    published = json.loads((shared / "facts" / "keys" / "BiT-M-R50x1.json").read_text())
    layout = google_layout(get_config("R50x1", num_classes=21_843), "stored")
    assert {name: list(slot.shape) for name, slot in layout.items()} == published


@pytest.mark.parametrize(
    ("config", "arrays", "numbers"),
    [
        (get_config("R50x1"), 153, 25_549_352),
        (get_config("R152x4"), 459, 936_533_224),
        (ResNetConfig(), 161, 25_557_032),  # big_vision's own ResNet
    ],
)
def test_big_vision_has_as_many_arrays(config: ResNetConfig, arrays: int, numbers: int) -> None:
    layout = google_layout(config, "big_vision")
    assert len(layout) == arrays
    assert sum(np.prod(slot.shape) for slot in layout.values()) == numbers
    if config.body.version == "v2":
        channels = config.body.channels
        assert layout["block4/unit01/conv_proj/kernel"].shape == (1, 1, channels // 2, channels)
        assert layout["block4/unit01/gn1/scale"].shape == (1, 1, 1, channels // 2)
        assert layout["norm-pre-head/bias"].shape == (1, 1, 1, channels)


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
    model = small(dataclasses.replace(body, layers=layers), num_classes)
    write_spelled(model, tmp_path / "bit.npz", spelling, "params/")
    assert arrays_of(tmp_path / "bit.npz")[f"params/{root}"].shape == (7, 7, 3, 32)
    write_google(model, tmp_path / "native.npz")
    for path in (tmp_path / "bit.npz", tmp_path / "native.npz"):
        config, state = read_google(path)
        assert config == model.config
        assert same(state, model)


def test_numbered_convolutions_are_read(written: tuple[Path, Arrays], tmp_path: Path) -> None:
    path, arrays = written
    numbered: Arrays = {}
    for i, (name, array) in enumerate(arrays.items()):
        numbered[name.replace("standardized_conv2d/", f"standardized_conv2d_{i}/")] = array
    assert "resnet/root_block/standardized_conv2d_0/kernel" in numbered
    np.savez(tmp_path / "numbered.npz", **numbered)
    (config, state), (expected, expected_state) = read_google(tmp_path / "numbered.npz"), read_google(path)
    assert config == expected
    assert all(torch.equal(state[name], tensor) for name, tensor in expected_state.items())


def test_every_array_that_does_not_fit_is_listed(written: tuple[Path, Arrays]) -> None:
    path, arrays = written
    unit = "resnet/block2/unit02"
    del arrays[f"{unit}/c/group_norm/gamma"]
    arrays[f"{unit}/a/standardized_conv2d_3/kernel"] = np.zeros(3, np.float32)  # a second one
    arrays["resnet/group_norm/beta"] = np.zeros(7, np.float32)
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=r"ResNet \(v2\).*1 missing: .*/c/.*1 unknown: .*_3/kernel.*shape \(7,\)"):
        read_google(path)


@pytest.mark.parametrize(
    ("root", "problem"),
    [
        (None, "kernel is missing"),
        (np.zeros((7, 7), np.float32), r"has shape \(7, 7\)"),
        (np.zeros((7, 7, 3, 40), np.float32), "invalid model: .*32 groups"),
    ],
)
def test_the_root_is_required(written: tuple[Path, Arrays], root: np.ndarray | None, problem: str) -> None:
    path, arrays = written
    name = "resnet/root_block/standardized_conv2d/kernel"
    del arrays[name]
    np.savez(path, **(arrays if root is None else {**arrays, name: root}))
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
    model = small(dataclasses.replace(BIT, **changes), image_size=32)
    with pytest.raises(ValueError, match=rf"{setting}, which .*cannot represent.*save_model"):
        write_google(model, tmp_path / "bit.npz")
    assert not list(tmp_path.iterdir())

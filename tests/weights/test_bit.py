import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vitlab.models import ResNetBody, ResNetConfig, build_model, get_config
from vitlab.models.resnet import ResNet
from vitlab.weights import load_model
from vitlab.weights.google import google_layout, read_google, write_google

BIT = ResNetBody((1, 2), 32, version="v2", weight_eps=1e-10, weight_eps_on="variance", group_norm_eps=1e-5)
BIG_VISION_S_BIT = dataclasses.replace(BIT, pool_padding="-inf")
V1 = ResNetBody((1, 2), 32)

Arrays = dict[str, Any]
"""Name -> np.ndarray."""


def arrays_of(path: Path) -> Arrays:
    with np.load(path) as archive:
        return dict(archive)


def small(body: ResNetBody, num_classes: int = 5, **settings: Any) -> ResNet:
    """A small ResNet whose every parameter is random."""
    model = build_model(ResNetConfig(body=body, num_classes=num_classes, **settings))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    assert isinstance(model, ResNet)
    return model.eval()


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, Arrays]:
    """A small BiT's file, and its arrays to be put right or wrong."""
    write_google(small(BIT), tmp_path / "bit.npz")
    return tmp_path / "bit.npz", arrays_of(tmp_path / "bit.npz")


@pytest.mark.parametrize("size", ["", "res75/"])
@pytest.mark.parametrize(
    ("name", "padding", "of"),
    [("bitv1_small", "zero", ""), ("bit_small", "zero", "zeropool/f64/"), ("bit_small", "-inf", "")],
)
@torch.no_grad()
def test_answers_are_those_of_google_s_code(
    golden: Callable[[str], Any], name: str, padding: Any, of: str, size: str
) -> None:
    answers = golden(name)
    answers = dataclasses.replace(
        answers, tolerance=answers.tolerance | {of + key: limit for key, limit in answers.tolerance.items()}
    )
    config, state = read_google(answers.checkpoint)
    assert isinstance(config, ResNetConfig)
    assert config.body.pool_padding == "zero"
    images = answers.images(f"{size}images")
    body = dataclasses.replace(config.body, pool_padding=padding)
    model = build_model(dataclasses.replace(config, body=body, image_size=images.shape[-1])).eval()
    model.load_state_dict(state)
    tokens = model.forward_features(images)
    if not of:  # of zero padding there are only these
        answers.check(f"{size}encoded", tokens.unflatten(1, model.config.grid))
    answers.check(f"{of}{size}pre_logits", model.forward_head(tokens, pre_logits=True))
    answers.check(f"{of}{size}logits", model.forward_head(tokens))


@pytest.mark.parametrize("name", ["bit_small", "bitv1_small"])
def test_config_is_inferred(golden: Callable[[str], Any], name: str) -> None:
    answers = golden(name)
    said = json.loads(str(answers.arrays["meta"]))
    body = dataclasses.replace(V1 if "v1" in name else BIT, layers=tuple(said["depth"]), width=64 * said["width"])
    assert read_google(answers.checkpoint)[0] == ResNetConfig(body=body, num_classes=said["num_classes"])
    config, _ = read_google(answers.checkpoint, image_size=(64, 96))
    assert config == ResNetConfig(image_size=(64, 96), body=body, num_classes=said["num_classes"])
    assert load_model(answers.checkpoint).config.num_parameters == said["n_params"]


def test_names_and_shapes_are_those_of_a_published_bit(shared: Path) -> None:
    theirs = json.loads((shared / "facts" / "keys" / "BiT-M-R50x1.json").read_text())
    config = get_config("R50x1", num_classes=21_843)
    layout = google_layout(config, "stored")
    assert {name: list(slot.shape) for name, slot in layout.items()} == theirs
    assert sum(np.prod(slot.shape) for slot in layout.values()) == 68_256_659


@pytest.mark.parametrize(
    ("layers", "factor", "arrays", "numbers"),
    [(50, 1, 153, 25_549_352), (101, 1, 306, 44_541_480), (152, 1, 459, 60_185_128), (152, 4, 459, 936_533_224)],
)
def test_big_vision_s_names_of_a_bit_are_as_many(layers: int, factor: int, arrays: int, numbers: int) -> None:
    config = get_config(f"R{layers}x{factor}")
    layout = google_layout(config, "big_vision")
    assert len(layout) == arrays
    assert sum(np.prod(slot.shape) for slot in layout.values()) == numbers
    for name, shape in {
        "root_block/conv_root/kernel": (7, 7, 3, 64 * factor),
        "block3/unit06/conv1/kernel": (1, 1, 1024 * factor, 256 * factor),
        "block4/unit01/conv_proj/kernel": (1, 1, 1024 * factor, 2048 * factor),
        "block4/unit01/gn1/scale": (1, 1, 1, 1024 * factor),
        "norm-pre-head/bias": (1, 1, 1, 2048 * factor),
        "head/kernel": (2048 * factor, 1000),
    }.items():
        assert layout[name].shape == shape


def test_names_of_big_vision_s_own_resnet_are_as_many() -> None:
    layout = google_layout(ResNetConfig(), "big_vision")
    assert len(layout) == 161
    assert sum(np.prod(slot.shape) for slot in layout.values()) == 25_557_032


@pytest.mark.parametrize(
    ("body", "spelling", "root"),
    [
        (V1, None, "conv_root/kernel"),
        (V1, "linen", "conv_root/kernel"),
        (V1, "stored", "conv_root/kernel"),
        (BIT, None, "resnet/root_block/standardized_conv2d/kernel"),
        (BIG_VISION_S_BIT, None, "root_block/conv_root/kernel"),
        (BIG_VISION_S_BIT, "linen", "root_block/conv_root/kernel"),
    ],
)
@pytest.mark.parametrize("layers", [(), (1, 2), (12,)])
@pytest.mark.parametrize("num_classes", [0, 5])
def test_any_resnet_comes_back_to_the_bit(
    tmp_path: Path, body: ResNetBody, spelling: Any, root: str, layers: tuple[int, ...], num_classes: int
) -> None:
    model = small(dataclasses.replace(body, layers=layers), num_classes)
    write_google(model, tmp_path / "bit.npz", spelling=spelling, prefix="params/")
    assert arrays_of(tmp_path / "bit.npz")[f"params/{root}"].shape == (7, 7, 3, 32)
    config, state = read_google(tmp_path / "bit.npz")
    assert config == model.config
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    model.load_state_dict(state)
    write_google(model, tmp_path / "again.npz", spelling=spelling, prefix="params/")
    assert (tmp_path / "again.npz").read_bytes() == (tmp_path / "bit.npz").read_bytes()


@pytest.mark.parametrize("spelling", ["stored", "linen"])
def test_group_norms_are_read_in_both_shapes(tmp_path: Path, spelling: Any) -> None:
    model = small(V1)
    write_google(model, tmp_path / "v1.npz", spelling=spelling)
    arrays = arrays_of(tmp_path / "v1.npz")
    shape = (1, 1, 1, 32) if spelling == "stored" else (32,)
    assert {arrays[name].shape for name in ("gn_root/scale", "block1/unit1/gn1/bias")} == {shape}
    state = read_google(tmp_path / "v1.npz")[1]
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


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


def test_a_convolution_that_is_there_twice_is_told(written: tuple[Path, Arrays]) -> None:
    path, arrays = written
    for number in (3, 4):
        arrays[f"resnet/block1/unit01/a/standardized_conv2d_{number}/kernel"] = np.zeros(3, np.float32)
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=r"2 unknown: .*/a/standardized_conv2d_3/kernel, .*standardized_conv2d_4/"):
        read_google(path)


def test_every_array_that_does_not_fit_is_listed(written: tuple[Path, Arrays]) -> None:
    path, arrays = written
    unit = "resnet/block2/unit02"
    del arrays[f"{unit}/c/group_norm/gamma"], arrays["resnet/head/conv2d/bias"]
    arrays[f"{unit}/d/group_norm/gamma"] = np.zeros(3, np.float32)
    arrays["resnet/group_norm/beta"] = np.zeros(7, np.float32)
    np.savez(path, **arrays)
    with pytest.raises(ValueError) as caught:
        read_google(path)
    said = str(caught.value)
    assert "looks like a ResNet (v2) of width 32 and layers (1, 2)" in said
    assert f"2 missing: {unit}/c/group_norm/gamma, resnet/head/conv2d/bias" in said
    assert f"1 unknown: {unit}/d/group_norm/gamma" in said
    assert "1 of another shape: resnet/group_norm/beta has shape (7,) instead of (256,)" in said


@pytest.mark.parametrize(
    ("root", "said"),
    [
        (None, "is no ResNet of Google's: resnet/root_block/standardized_conv2d/kernel is missing"),
        (np.zeros((7, 7), np.float32), r"standardized_conv2d/kernel is of shape \(7, 7\)"),
        (np.zeros((7, 7, 3, 40), np.float32), "no ResNet that can be built: .*32 groups"),
    ],
)
def test_what_the_sizes_are_read_from(written: tuple[Path, Arrays], root: np.ndarray | None, said: str) -> None:
    path, arrays = written
    name = "resnet/root_block/standardized_conv2d/kernel"
    del arrays[name]
    np.savez(path, **(arrays if root is None else {**arrays, name: root}))
    with pytest.raises(ValueError, match=said):
        read_google(path)


@pytest.mark.parametrize("body", [V1, BIG_VISION_S_BIT])
def test_a_file_without_its_root_is_told(tmp_path: Path, body: ResNetBody) -> None:
    write_google(small(body), tmp_path / "bit.npz")
    arrays = {name: array for name, array in arrays_of(tmp_path / "bit.npz").items() if "root" not in name}
    np.savez(tmp_path / "bit.npz", **arrays)
    with pytest.raises(ValueError, match="conv_root/kernel is missing"):
        read_google(tmp_path / "bit.npz")


@pytest.mark.parametrize(
    ("body", "spelling", "said"),
    [
        ({"mixing": "axial"}, None, "body.mixing='axial'"),
        ({"weight_eps": 1e-5}, None, "body.weight_eps=1e-05"),
        ({"weight_eps_on": "std"}, None, "body.weight_eps_on='std'"),
        ({"group_norm_eps": 1e-4}, None, "body.group_norm_eps=0.0001"),
        ({}, "big_vision", "body.pool_padding='zero'"),
        ({"pool_padding": "-inf"}, "stored", "body.pool_padding='-inf'"),
    ],
)
def test_what_google_s_file_cannot_say_is_not_written(
    tmp_path: Path, body: dict[str, Any], spelling: Any, said: str
) -> None:
    model = small(dataclasses.replace(BIT, **body), image_size=32)
    with pytest.raises(ValueError, match=rf"the model has {re.escape(said)}, which .*cannot say.*save_model"):
        write_google(model, tmp_path / "bit.npz", spelling=spelling)
    assert not list(tmp_path.iterdir())

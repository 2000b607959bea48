import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from states import Arrays, arrays_of, same, write_spelled

from vitlab.models import ResNetBody, ViTConfig, get_config
from vitlab.models.vit import ViT
from vitlab.weights import load_model
from vitlab.weights.google import google_layout, read_google, write_google

VITS = ("vit_testing", "vit_tiny_rep", "vit_tiny_gap", "vit_epsprobe", "hybrid_small")
BIG_VISION = ("bv_mu16_gap_learn", "bv_S16_gap_learn", "bv_S16_gap_sincos2d_rep")
LARGE = pytest.param("ViT-B_16-gap-norep", marks=pytest.mark.slow)
SPELLINGS: tuple[Any, ...] = ("stored", "linen", "big_vision")
TABLE = "Transformer/posembed_input/pos_embedding"


@pytest.fixture
def written(tmp_path: Path, tiny: Callable[..., ViT]) -> tuple[Path, Arrays]:
    """A small model's file, and its arrays."""
    write_google(tiny(representation_size=6), tmp_path / "vit.npz")
    return tmp_path / "vit.npz", arrays_of(tmp_path / "vit.npz")


# --- golden files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*VITS, *BIG_VISION, LARGE])
@torch.no_grad()
def test_outputs_are_those_of_googles_code(golden: Callable[[str], Any], name: str) -> None:
    expected = golden(name)
    model = load_model(expected.checkpoint)
    tokens = model.forward_features(expected.images())
    expected.check("encoded", tokens)
    expected.check("pre_logits", model.forward_head(tokens, pre_logits=True))
    expected.check("logits", model.forward_head(tokens))


@pytest.mark.parametrize("size", ["hires", "res75"])
@torch.no_grad()
def test_a_hybrid_at_another_size_gives_the_outputs_of_googles_code(golden: Callable[[str], Any], size: str) -> None:
    expected = golden("hybrid_small")
    images = expected.images(f"{size}/images")
    model = load_model(expected.checkpoint, image_size=images.shape[-1])
    tokens = model.forward_features(images)
    expected.check(f"{size}/encoded", tokens)
    expected.check(f"{size}/pre_logits", model.forward_head(tokens, pre_logits=True))
    expected.check(f"{size}/logits", model.forward_head(tokens))
    expected.check(f"{size}/pos_embedding", model.state_dict()["position.table"])


@pytest.mark.parametrize("name", [*VITS, *BIG_VISION, "bit_small", "bitv1_small", LARGE])
def test_googles_files_are_written_back_bit_equal(golden: Callable[[str], Any], tmp_path: Path, name: str) -> None:
    path, model = golden(name).checkpoint, load_model(golden(name).checkpoint)
    theirs = {name.removeprefix("params/"): array for name, array in arrays_of(path).items()}
    if name.startswith("bv"):  # a ViT with the mean over patches may be of either code
        write_spelled(model, tmp_path / "ours.npz", "big_vision")
    else:
        write_google(model, tmp_path / "ours.npz")
    ours = arrays_of(tmp_path / "ours.npz")
    assert ours.keys() == theirs.keys()
    for key, array in ours.items():
        assert (array.dtype, array.shape) == (theirs[key].dtype, theirs[key].shape)
        assert array.tobytes() == theirs[key].tobytes()


def test_names_and_shapes_are_those_of_every_published_vit(shared: Path) -> None:
    hybrids = []
    for path in sorted((shared / "facts" / "keys").glob("*__*.json")):
        theirs = json.loads(path.read_text())
        name, size, classes = "/".join(theirs["model"].rsplit("_", 1)), theirs["resolution"], theirs["num_classes"]
        config = get_config(name, image_size=size, num_classes=classes)
        assert isinstance(config, ViTConfig)
        if path.name.startswith("imagenet21k__"):  # only these have the hidden layer of pre-training
            config = dataclasses.replace(config, representation_size=config.width)
        keys: dict[Any, str] = {"stored": "stored_prelinen", "linen": "linen"}
        for spelling, key in keys.items():
            layout = google_layout(config, spelling)
            assert {name: list(slot.shape) for name, slot in layout.items()} == theirs[key], path.name
        hybrids.append(config.stem is not None)
    assert (hybrids.count(False), hybrids.count(True)) == (18, 7)


# --- layout, reading, writing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "spellings"),
    [
        ({"depth": 12, "num_classes": 0, "representation_size": 6}, ("stored", "linen")),
        ({"image_size": 4, "heads": 1, "pool": "gap"}, SPELLINGS),
        ({"stem": ResNetBody((1, 2), 32), "patch_size": 1, "image_size": 24}, ("stored", "linen")),
        ({"stem": ResNetBody((1,), 32), "patch_size": 2, "image_size": 16, "pool": "gap"}, SPELLINGS),
        ({"stem": ResNetBody((), 32), "patch_size": 2, "image_size": 32, "representation_size": 6}, ("linen",)),
        ({"stem": ResNetBody((1, 1), 32), "patch_size": 1, "pool": "map", "image_size": 8}, ("big_vision",)),
        ({"pool": "map", "representation_size": 6}, ("big_vision",)),
        ({"pool": "gap", "position": "sincos2d", "image_size": 224, "num_classes": 0}, ("big_vision",)),
        ({"position": "sincos2d", "image_size": 224, "class_position": False}, ("big_vision",)),
        ({"class_position": False}, ("big_vision",)),
    ],
)
def test_every_kind_is_read_back(
    tmp_path: Path, tiny: Callable[..., ViT], changes: dict[str, Any], spellings: tuple[Any, ...]
) -> None:
    model, path = tiny(**changes), tmp_path / "vit.npz"
    for spelling in (*spellings, None):
        write_spelled(model, path, spelling, "params/") if spelling else write_google(model, path)
        config, state = read_google(path)
        assert config == model.config
        assert same(state, model)


def test_group_norms_are_read_in_both_shapes(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    model = tiny(stem=ResNetBody((1,), 32), patch_size=1)
    shapes: dict[Any, tuple[int, ...]] = {"stored": (1, 1, 1, 32), "linen": (32,)}
    for spelling, shape in shapes.items():
        write_spelled(model, tmp_path / "vit.npz", spelling)
        arrays = arrays_of(tmp_path / "vit.npz")
        assert arrays["block1/unit1/gn1/scale"].shape == shape
        for name, array in arrays.items():
            if "gn" in name:
                arrays[name] = array.reshape(-1) if array.ndim == 4 else array.reshape(1, 1, 1, -1)
        np.savez(tmp_path / "vit.npz", **arrays)
        config, state = read_google(tmp_path / "vit.npz")
        assert config == model.config
        assert same(state, model)


def test_blocks_stacked_for_a_scan(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    model = tiny(depth=11)  # enough that 10 would come before 2 in the order of names
    write_spelled(model, tmp_path / "vit.npz", "linen")
    arrays = arrays_of(tmp_path / "vit.npz")
    stacked = {name: array for name, array in arrays.items() if "encoderblock_" not in name}
    for part in {name.split("/", 2)[2] for name in arrays if "encoderblock_" in name}:
        blocks = [arrays[f"Transformer/encoderblock_{i}/{part}"] for i in range(11)]
        stacked[f"Transformer/encoderblock/{part}"] = np.stack(blocks)
    np.savez(tmp_path / "scan.npz", **stacked)
    config, state = read_google(tmp_path / "scan.npz")
    assert config == model.config
    assert same(state, model)


def test_the_same_model_is_the_same_file(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    model = tiny().bfloat16()
    for name in ("deep/a.npz", "deep/a.npz", "no_suffix"):
        write_google(model, tmp_path / name)
    assert (tmp_path / "deep" / "a.npz").read_bytes() == (tmp_path / "no_suffix").read_bytes()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a.npz"]
    loaded = load_model(tmp_path / "no_suffix")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}


# --- image size and positions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Transformer/pos_embedding", "pos_embedding"])
def test_position_table_of_big_vision(written: tuple[Path, Arrays], tmp_path: Path, name: str) -> None:
    path, arrays = written
    arrays[name] = arrays.pop(TABLE)
    np.savez(tmp_path / "moved.npz", **arrays)
    assert torch.equal(read_google(tmp_path / "moved.npz")[1]["position.table"], read_google(path)[1]["position.table"])


@pytest.mark.parametrize("pool", ["token", "gap"])
def test_a_table_that_is_not_square_requires_an_image_size(tmp_path: Path, tiny: Callable[..., ViT], pool: str) -> None:
    model = tiny(image_size=(8, 20), pool=pool)
    write_google(model, tmp_path / "wide.npz")
    with pytest.raises(ValueError, match=rf"{10 + (pool == 'token')} rows.*image_size=\(height, width\)"):
        read_google(tmp_path / "wide.npz")
    with pytest.raises(ValueError, match=r"image_size=\(8, 16\) needs 8"):
        read_google(tmp_path / "wide.npz", image_size=(8, 16))
    config, state = read_google(tmp_path / "wide.npz", image_size=(8, 20))
    assert config == model.config
    assert same(state, model)


@pytest.mark.parametrize("size", [(8, 16), (56, 64)])
def test_a_square_with_the_class_tokens_row_is_not_of_patches(
    tmp_path: Path, tiny: Callable[..., ViT], size: tuple[int, int]
) -> None:
    """(k - 1)(k + 1) patches and a class token have k k rows."""
    model = tiny(image_size=size)
    write_google(model, tmp_path / "wide.npz")
    with pytest.raises(ValueError, match="no square"):
        read_google(tmp_path / "wide.npz")
    assert read_google(tmp_path / "wide.npz", image_size=size)[0] == model.config


def test_a_hybrids_size_follows_from_its_grid(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    stem = ResNetBody((1, 1), 32)
    write_google(tiny(stem=stem, patch_size=1, image_size=21), tmp_path / "vit.npz")
    assert read_google(tmp_path / "vit.npz")[0].image_size == 24  # a grid of 3 x 3, 8 pixels apart
    model = tiny(stem=stem, patch_size=2, image_size=(16, 77))
    write_google(model, tmp_path / "wide.npz")
    with pytest.raises(ValueError, match=r"2x9 feature map.*multiple of 16"):
        read_google(tmp_path / "wide.npz", image_size=(16, 72))
    assert read_google(tmp_path / "wide.npz", image_size=(16, 77))[0] == model.config


@torch.no_grad()
def test_positions_of_big_vision(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    """Added to the patches alone; fixed ones where there is no table."""
    model = tiny(class_position=False)
    write_google(model, tmp_path / "bv.npz")
    arrays = arrays_of(tmp_path / "bv.npz")
    assert arrays["pos_embedding"].shape == (1, 9, 8)
    images = torch.randn(2, 3, 12, 12)
    assert torch.equal(load_model(tmp_path / "bv.npz")(images), model(images))
    del arrays["pos_embedding"]
    np.savez(tmp_path / "fixed.npz", **arrays)
    for size in (None, (8, 12)):
        config, state = read_google(tmp_path / "fixed.npz", image_size=size)
        assert isinstance(config, ViTConfig)
        assert (config.image_size, config.position, config.class_position) == (size or 224, "sincos2d", False)
        assert "position.table" not in state


# --- errors ------------------------------------------------------------------------------------------------------

FIRST = "Transformer/encoderblock_0"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"embedding/kernel": ...}, "embedding/kernel is missing.*4 dimensions"),
        ({"embedding/kernel": (4, 8)}, r"shape \(4, 8\)"),
        ({TABLE: ...}, "position table.* is missing"),
        ({TABLE: (10, 8)}, r"shape \(10, 8\)"),
        ({f"{FIRST}/MultiHeadDotProductAttention_1/query/kernel": (8, 3, 4)}, "heads=3 does not divide width=8"),
        (
            {f"{FIRST}/LayerNorm_2/scale": ..., "head/bias": ..., "tail/kernel": (2,), "cls": (1, 1, 9)},
            rf"looks like a ViT.*2 missing: {FIRST}/LayerNorm_2/scale, head/bias; 1 unknown: tail/kernel.*\(1, 1, 9\)",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_listed(written: tuple[Path, Arrays], changes: dict[str, Any], problem: str) -> None:
    path, arrays = written
    arrays |= {name: shape if shape is ... else np.zeros(shape, np.float32) for name, shape in changes.items()}
    np.savez(path, **{name: array for name, array in arrays.items() if array is not ...})
    with pytest.raises(ValueError, match=problem):
        read_google(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"gelu": "erf"},
        {"position": "2d"},
        {"position_at": "every"},
        {"layer_norm_eps": 1e-05},
        {"pool": "token+gap"},
        {"encoder": "axial"},
        {"layer_scale": 1e-05},
        {"registers": 2},
        {"distilled": True},
        {"stem": {"version": "v2"}},
        {"stem": {"weight_eps": 1e-08}},
    ],
)
def test_unsupported_settings_are_not_written(
    tmp_path: Path, tiny: Callable[..., ViT], changes: dict[str, Any]
) -> None:
    stem = changes.get("stem")
    name, value = next(iter((stem or changes).items()))
    model = tiny(patch_size=1, stem=ResNetBody((1,), 32, **stem)) if stem else tiny(**changes)
    with pytest.raises(ValueError, match=f"{name}={re.escape(repr(value))}, which Google's .npz cannot represent"):
        write_google(model, tmp_path / "vit.npz")
    with pytest.raises(ValueError, match="4x9 patches would be read as those of 6x6"):
        write_google(tiny(image_size=(16, 36)), tmp_path / "vit.npz")
    assert not list(tmp_path.iterdir())

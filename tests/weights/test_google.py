import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from states import Arrays, arrays_of, randomized, same, write_spelled

from vitlab.io import write_arrays
from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, ViTConfig
from vitlab.models.variant import override
from vitlab.models.vit import ViT, build_model
from vitlab.weights import load_model
from vitlab.weights.google import BFLOAT16, read_google, read_npz, write_google

VITS = ("vit_testing", "vit_tiny_rep", "vit_tiny_gap", "vit_epsprobe", "hybrid_small")
BIG_VISION = ("bv_mu16_gap_learn", "bv_S16_gap_learn", "bv_S16_gap_sincos2d_rep")
LARGE = pytest.param("ViT-B_16-gap-norep", marks=pytest.mark.slow)
SPELLINGS: tuple[Any, ...] = ("stored", "linen", "big_vision")
TABLE = "Transformer/posembed_input/pos_embedding"
BIT = ResNetBody((1, 2), 32, version="v2", weight_eps=1e-10, weight_eps_on="variance", group_norm_eps=1e-5)


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


@pytest.mark.parametrize("size", ["", "res75/"])
@pytest.mark.parametrize(
    ("name", "padding", "of"),
    [("bitv1_small", "zero", ""), ("bit_small", "zero", "zeropool/f64/"), ("bit_small", "-inf", "")],
)
@torch.no_grad()
def test_a_resnet_gives_the_outputs_of_googles_code(
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


@pytest.mark.parametrize("name", [*VITS, "bv_mu16_gap_learn", "bit_small", "bitv1_small", LARGE])
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


# --- layout, reading, writing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "spellings"),
    [
        ({"depth": 12, "num_classes": 0, "representation_size": 6}, ("stored", "linen")),
        ({"image_size": 4, "heads": 1, "pool": "gap"}, SPELLINGS),
        ({"stem": ResNetBody((1, 2), 32), "patch_size": 1, "image_size": 24}, ("stored", "linen")),
        ({"stem": ResNetBody((), 32), "patch_size": 2, "image_size": 32, "representation_size": 6}, ("linen",)),
        ({"stem": ResNetBody((1, 1), 32), "patch_size": 1, "pool": "map", "image_size": 8}, ("big_vision",)),
        ({"pool": "gap", "position": "sincos2d", "image_size": 224, "num_classes": 0}, ("big_vision",)),
        ({"position": "sincos2d", "image_size": 224, "class_position": False}, ("big_vision",)),
        ({"class_position": False, "in_chans": 1}, ("big_vision",)),
    ],
)
def test_every_vit_is_read_back(
    tmp_path: Path, tiny: Callable[..., ViT], changes: dict[str, Any], spellings: tuple[Any, ...]
) -> None:
    model, path = tiny(**changes), tmp_path / "vit.npz"
    for spelling in (*spellings, None):
        write_spelled(model, path, spelling, "params/") if spelling else write_google(model, path)
        config, state = read_google(path)
        assert config == model.config
        assert same(state, model)


@pytest.mark.parametrize(
    ("body", "spelling", "root"),
    [
        (ResNetBody((1, 2), 32), "linen", "conv_root/kernel"),
        (ResNetBody((12,), 32), "stored", "conv_root/kernel"),
        (BIT, "stored", "resnet/root_block/standardized_conv2d/kernel"),
        (dataclasses.replace(BIT, layers=()), "stored", "resnet/root_block/standardized_conv2d/kernel"),
        (dataclasses.replace(BIT, layers=(12,), pool_padding="-inf"), "linen", "root_block/conv_root/kernel"),
    ],
)
def test_every_resnet_is_read_back(tmp_path: Path, body: ResNetBody, spelling: Any, root: str) -> None:
    """Also with numbered convolutions, as in some published files, and with GroupNorms of the other shape."""
    model = randomized(ResNetConfig(body=body, num_classes=5 if body.layers else 0))
    write_spelled(model, tmp_path / "bit.npz", spelling, "params/")
    arrays = arrays_of(tmp_path / "bit.npz")
    assert arrays[f"params/{root}"].shape == (7, 7, 3, 32)
    changed = {}
    for i, (name, array) in enumerate(arrays.items()):
        norm = "gn" in name or "group_norm" in name
        other = array if not norm else array.reshape(-1) if array.ndim == 4 else array.reshape(1, 1, 1, -1)
        changed[name.replace("standardized_conv2d/", f"standardized_conv2d_{i}/")] = other
    np.savez(tmp_path / "changed.npz", **changed)
    write_google(model, tmp_path / "native.npz")
    for name in ("bit.npz", "native.npz", "changed.npz"):
        config, state = read_google(tmp_path / name)
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


def test_sizes_follow_from_a_square_of_patches(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    """Unless a size is given that the table fits."""
    path = tmp_path / "vit.npz"
    write_google(tiny(stem=ResNetBody((1, 1), 32), patch_size=1, image_size=21), path)
    assert read_google(path)[0].image_size == 24  # a grid of 3 x 3, 8 pixels apart
    model = tiny(image_size=(4, 16))
    write_spelled(model, path, "stored")
    assert same(load_model(path, image_size=(4, 16)).state_dict(), model)
    assert [load_model(path, image_size=size).config.image_size for size in (None, 12)] == [8, 12]
    for size in ((8, 20), (8, 16)):  # (k - 1)(k + 1) patches and a class token have k k rows
        write_spelled(tiny(image_size=size), path, "stored")
        with pytest.raises(ValueError, match="--image-size"):
            read_google(path)
        assert load_model(path, image_size=size).config.image_size == size


@pytest.mark.parametrize("prefix", ["params/img/", "img/"])
def test_the_image_tower_of_big_visions_two(
    tmp_path: Path, tiny: Callable[..., ViT], prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """SigLIP and LiT: the text tower, temperature and bias are left out, and named."""
    model, root = tiny(pool="map", num_classes=0), prefix.removesuffix("img/")
    write_spelled(model, tmp_path / "image.npz", "big_vision", prefix)
    other = {f"{root}txt/Embed_0/embedding": np.ones((3, 2)), f"{root}t": np.ones(1), f"{root}b": np.ones(1)}
    write_arrays(tmp_path / "siglip.npz", arrays_of(tmp_path / "image.npz") | other)
    images = torch.randn(2, 3, 12, 12)
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path / "siglip.npz")(images), model(images))
    assert "left out: b, t, txt" in caplog.text


@torch.no_grad()
def test_positions_of_big_vision(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    """Added to the patches alone; fixed ones where there is no table."""
    model = tiny(class_position=False)
    write_google(model, tmp_path / "bv.npz")
    arrays = arrays_of(tmp_path / "bv.npz")
    assert arrays["pos_embedding"].shape == (1, 9, 8)
    images = torch.randn(2, 3, 12, 12)
    assert torch.equal(load_model(tmp_path / "bv.npz")(images), model(images))
    arrays["Transformer/pos_embedding"] = arrays.pop("pos_embedding")  # an earlier name
    np.savez(tmp_path / "earlier.npz", **arrays)
    assert torch.equal(load_model(tmp_path / "earlier.npz")(images), model(images))
    del arrays["Transformer/pos_embedding"]
    np.savez(tmp_path / "fixed.npz", **arrays)
    for size in (None, (8, 12)):
        config = load_model(tmp_path / "fixed.npz", image_size=size).config
        assert isinstance(config, ViTConfig)
        assert (config.image_size, config.position, config.variant.class_position) == (size or 224, "sincos2d", False)
    write_google(tiny(patch_size=12, position="sincos2d", class_position=False), tmp_path / "patches.npz")
    for size in (None, 96):  # 12 pixels do not divide 224
        assert load_model(tmp_path / "patches.npz", image_size=size).config.image_size == (size or 216)


# --- arrays ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_arrays_are_read_as_written(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 4).to(dtype).T  # in Fortran's order
    array = tensor.view(torch.int16).numpy().view(BFLOAT16) if dtype == torch.bfloat16 else tensor.numpy()
    write_arrays(tmp_path / "a.npz", {"a/b": array})
    arrays = read_npz(tmp_path / "a.npz")
    assert arrays["a/b"].dtype == dtype
    assert torch.equal(arrays["a/b"], tensor)


@pytest.mark.parametrize("prefix", ["", "opt/target/", "opt/target/params/", "params/"])
def test_a_prefix_is_removed_and_an_optimizer_state_ignored(written: tuple[Path, Arrays], prefix: str) -> None:
    path, arrays = written
    state: Arrays = {"step": np.array(7), "opt/state/head/bias": np.zeros(5, np.int64)} if prefix else {}
    np.savez_compressed(path, **{prefix + name: array for name, array in arrays.items()}, **state)
    assert {name: array.tolist() for name, array in read_npz(path).items()} == {
        name: array.tolist() for name, array in arrays.items()
    }


def test_corrupt_files_and_other_types_are_refused(written: tuple[Path, Arrays]) -> None:
    path, arrays = written
    data = path.read_bytes()
    for array, problem in (
        (np.zeros(5, np.int32), "head/bias is int32"),
        (np.zeros(5, ">f4"), "head/bias is >f4"),
        (np.array([path], dtype=object), "pickled objects, which are never loaded"),
    ):
        np.savez(path, **{**arrays, "head/bias": array})
        with pytest.raises(ValueError, match=problem):
            read_npz(path)
    changed = bytearray(data)
    changed[data.find(arrays["head/kernel"].tobytes()) + 5] ^= 1
    for content in (b"", data[:-9], data[: len(data) // 2], changed):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"vit\.npz cannot be read .*corrupt"):
            read_npz(path)


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
        ({"head/bias": ..., "tail/kernel": (2,), "cls": (1, 1, 9)}, "1 missing: head/bias; 1 unknown: tail/kernel"),
    ],
)
def test_arrays_that_do_not_fit_are_listed(written: tuple[Path, Arrays], changes: dict[str, Any], problem: str) -> None:
    path, arrays = written
    arrays |= {name: shape if shape is ... else np.zeros(shape, np.float32) for name, shape in changes.items()}
    np.savez(path, **{name: array for name, array in arrays.items() if array is not ...})
    with pytest.raises(ValueError, match=problem):
        read_google(path)


def vit(**settings: Any) -> Any:
    sizes = {"image_size": 12, "patch_size": 4, "width": 8, "depth": 1, "heads": 2, "mlp_dim": 12}
    return override(ViTConfig(), **{**sizes, **settings})


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (vit(gelu="erf"), "gelu='erf'"),
        (vit(position="2d"), "position='2d'"),
        (vit(pool="token+gap"), r"pool='token\+gap'"),
        (vit(image_size=(8, 20)), r"image_size=\(8, 20\)"),
        (vit(patch_size=1, stem=ResNetBody((1,), 32, weight_eps=1e-8)), "weight_eps=1e-08"),
        (ResNetConfig(image_size=32, body=dataclasses.replace(BIT, weight_eps_on="std")), "weight_eps_on='std'"),
    ],
)
def test_unsupported_settings_are_not_written(tmp_path: Path, config: ModelConfig, problem: str) -> None:
    with pytest.raises(ValueError, match=f"{problem}.*save_model"):
        write_google(build_model(config), tmp_path / "out.npz")
    assert not list(tmp_path.iterdir())

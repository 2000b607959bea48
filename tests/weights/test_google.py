import dataclasses
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vitlab.models import MODELS, ResNetBody, ViTConfig, build_model, get_config
from vitlab.models.vit import ViT
from vitlab.weights import load_model
from vitlab.weights.google import google_layout, read_google, write_google

VITS = (
    "vit_testing",
    "vit_tiny_rep",
    "vit_tiny_gap",
    "vit_epsprobe",
    "bv_mu16_gap_learn",
    "bv_S16_gap_learn",
    "bv_S16_gap_sincos2d_rep",
    "hybrid_small",
)
LARGE = "ViT-B_16-gap-norep"
GOLDEN = (*VITS, "bit_small", "bitv1_small")
SPELLINGS = ("stored", "linen", "big_vision")

Arrays = dict[str, Any]
"""Name -> np.ndarray."""


def arrays_of(path: Path) -> Arrays:
    with np.load(path) as archive:
        return dict(archive)


def same_bits(a: Arrays, b: Arrays) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and a[name].shape == b[name].shape and a[name].tobytes() == b[name].tobytes()
        for name in a
    )


@pytest.fixture
def written(tmp_path: Path, tiny: Callable[..., ViT]) -> tuple[Path, Arrays]:
    """A small model's file, and its arrays to be put right or wrong."""
    path = tmp_path / "vit.npz"
    write_google(tiny(representation_size=6), path)
    return path, arrays_of(path)


@pytest.mark.parametrize("name", [*VITS, LARGE])
@torch.no_grad()
def test_answers_are_those_of_google_s_code(golden: Callable[[str], Any], name: str) -> None:
    answers = golden(name)
    model = load_model(answers.checkpoint)
    tokens = model.forward_features(answers.images())
    answers.check("encoded", tokens)
    answers.check("pre_logits", model.forward_head(tokens, pre_logits=True))
    answers.check("logits", model.forward_head(tokens))


@pytest.mark.parametrize("size", ["hires", "res75"])
@torch.no_grad()
def test_a_hybrid_at_another_size_too(golden: Callable[[str], Any], size: str) -> None:
    answers = golden("hybrid_small")
    images = answers.images(f"{size}/images")
    model = load_model(answers.checkpoint, image_size=images.shape[-1])
    tokens = model.forward_features(images)
    answers.check(f"{size}/encoded", tokens)
    answers.check(f"{size}/pre_logits", model.forward_head(tokens, pre_logits=True))
    answers.check(f"{size}/logits", model.forward_head(tokens))
    answers.check(f"{size}/pos_embedding", model.state_dict()["position.table"])


@pytest.mark.parametrize("name", ["vit_testing", "vit_tiny_rep", "vit_tiny_gap", "vit_epsprobe", "hybrid_small"])
def test_config_is_inferred(golden: Callable[[str], Any], name: str) -> None:
    answers = golden(name)
    said = json.loads(str(answers.arrays["meta"]))
    theirs = said["config"]
    stem = theirs.get("resnet")
    config, _ = read_google(answers.checkpoint)
    assert config == ViTConfig(
        image_size=said["native"][0],
        patch_size=theirs["patches"]["size"][0],
        width=theirs["hidden_size"],
        depth=theirs["transformer"]["num_layers"],
        heads=theirs["transformer"]["num_heads"],
        mlp_dim=theirs["transformer"]["mlp_dim"],
        num_classes=said["num_classes"],
        pool=theirs["classifier"],
        representation_size=theirs["representation_size"],
        stem=stem and ResNetBody(tuple(stem["num_layers"]), 64 * stem["width_factor"]),
    )


@pytest.mark.parametrize(
    ("name", "position", "rep"),
    [("bv_mu16_gap_learn", "1d", False), ("bv_S16_gap_sincos2d_rep", "sincos2d", True)],
)
def test_config_of_big_vision_is_inferred(golden: Callable[[str], Any], name: str, position: Any, rep: bool) -> None:
    answers = golden(name)
    said = json.loads(str(answers.arrays["meta"]))
    theirs = said["resolved"]
    config, state = read_google(answers.checkpoint)
    assert config == ViTConfig(
        image_size=said["native"][0],
        patch_size=theirs["patch_size"][0],
        width=theirs["width"],
        depth=theirs["depth"],
        heads=theirs["num_heads"],
        mlp_dim=theirs["mlp_dim"],
        num_classes=said["num_classes"],
        pool="gap",
        position=position,
        representation_size=theirs["width"] if rep else None,
    )
    assert ("position.table" in state) == (position == "1d")


@pytest.mark.parametrize("name", [*GOLDEN, pytest.param(LARGE, marks=pytest.mark.slow)])
def test_google_s_files_come_back_to_the_bit(golden: Callable[[str], Any], tmp_path: Path, name: str) -> None:
    path = golden(name).checkpoint
    theirs = arrays_of(path)
    prefix = "params/" if any(key.startswith("params/") for key in theirs) else ""
    # A ViT with the mean over patches fits either code; all others tell by themselves whose they are.
    spelling = "big_vision" if name.startswith("bv") else None
    write_google(load_model(path), tmp_path / "ours.npz", spelling=spelling, prefix=prefix)
    assert same_bits(arrays_of(tmp_path / "ours.npz"), theirs)


def test_names_and_shapes_are_those_of_every_published_vit(shared: Path) -> None:
    seen = []
    for path in sorted((shared / "facts" / "keys").glob("*__*.json")):
        theirs = json.loads(path.read_text())
        config = get_config(
            "/".join(theirs["model"].rsplit("_", 1)),
            image_size=theirs["resolution"],
            num_classes=theirs["num_classes"],
        )
        assert isinstance(config, ViTConfig)
        if path.name.startswith("imagenet21k__"):  # the only ones that keep the pre-training's hidden layer
            config = dataclasses.replace(config, representation_size=config.width)
        stored, linen = google_layout(config, "stored"), google_layout(config, "linen")
        assert {name: list(slot.shape) for name, slot in stored.items()} == theirs["stored_prelinen"], path.name
        assert {name: list(slot.shape) for name, slot in linen.items()} == theirs["linen"], path.name
        seen.append(config.stem is not None)
    assert (seen.count(False), seen.count(True)) == (18, 7)


LAYOUTS: dict[str, dict[str, Any]] = {
    "token": {},
    "gap": {"pool": "gap", "representation_size": 8},
    "map": {"pool": "map", "representation_size": 8},
    "sincos2d": {"position": "sincos2d", "num_classes": 0},
    "class token without position": {"class_position": False},
    "hybrid": {"stem": ResNetBody((1, 2)), "patch_size": 1},
    "root": {"stem": ResNetBody(()), "patch_size": 8, "pool": "map"},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_layout_covers_every_parameter_once(spelling: Any, kind: str) -> None:
    config = dataclasses.replace(MODELS["ViT-Ti/16"], **LAYOUTS[kind])
    with torch.device("meta"):
        state = build_model(config).state_dict()
    counts = dict.fromkeys(state, 0)
    for slot in google_layout(config, spelling).values():
        counts[slot.ours] += int(np.prod(slot.shape))
    assert counts == {name: tensor.numel() for name, tensor in state.items()}


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    grid=st.integers(1, 4),
    heads=st.sampled_from([1, 2, 4]),
    depth=st.integers(1, 12),
    classes=st.integers(0, 4),
    pool=st.sampled_from(["token", "gap"]),
    rep=st.sampled_from([None, 6]),
    spelling=st.sampled_from(["stored", "linen"]),
    prefix=st.sampled_from(["", "params/", "opt/target/"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_any_model_comes_back_to_the_bit(
    tmp_path: Path, tiny: Callable[..., ViT], grid: int, heads: int, depth: int, classes: int, pool: str,
    rep: int | None, spelling: Any, prefix: Any, dtype: torch.dtype,
) -> None:  # fmt: skip
    shape = {"image_size": 4 * grid, "heads": heads, "depth": depth, "num_classes": classes}
    model = tiny(**shape, pool=pool, representation_size=rep).to(dtype)
    write_google(model, tmp_path / "vit.npz", spelling=spelling, prefix=prefix)
    config, state = read_google(tmp_path / "vit.npz")
    assert config == model.config
    assert state.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert state[name].dtype == dtype
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize(
    ("changes", "spellings"),
    [
        ({"stem": ResNetBody((1, 2), 32), "patch_size": 1, "image_size": 24}, ("stored", "linen")),
        ({"stem": ResNetBody((1,), 32), "patch_size": 2, "image_size": 16, "pool": "gap"}, SPELLINGS),
        (
            {"stem": ResNetBody((), 32), "patch_size": 2, "image_size": 32, "representation_size": 6},
            ("stored", "linen"),
        ),
        ({"stem": ResNetBody((1, 1), 32), "patch_size": 1, "pool": "map", "image_size": 8}, ("big_vision", None)),
        ({"pool": "map", "representation_size": 6}, ("big_vision", None)),
        ({"pool": "map", "position": "sincos2d", "image_size": 224}, ("big_vision", None)),
        ({"pool": "gap", "position": "sincos2d", "image_size": 224, "num_classes": 0}, ("big_vision", None)),
        ({"position": "sincos2d", "image_size": 224, "class_position": False}, ("big_vision", None)),
        ({"class_position": False}, ("big_vision", None)),
    ],
)
@pytest.mark.parametrize("prefix", ["", "params/"])
def test_every_kind_comes_back_to_the_bit(
    tmp_path: Path, tiny: Callable[..., ViT], changes: dict[str, Any], spellings: tuple[Any, ...], prefix: Any
) -> None:
    model = tiny(**changes)
    for spelling in spellings:
        write_google(model, tmp_path / "vit.npz", spelling=spelling, prefix=prefix)
        config, state = read_google(tmp_path / "vit.npz")
        assert config == model.config
        assert state.keys() == model.state_dict().keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
        again = build_model(config)
        again.load_state_dict(state)
        write_google(again, tmp_path / "again.npz", spelling=spelling, prefix=prefix)
        assert same_bits(arrays_of(tmp_path / "again.npz"), arrays_of(tmp_path / "vit.npz"))


@pytest.mark.parametrize(("spelling", "stored_as"), [("stored", (1, 1, 1, 32)), ("linen", (32,))])
def test_group_norms_are_read_in_both_shapes(
    tmp_path: Path, tiny: Callable[..., ViT], spelling: Any, stored_as: tuple[int, ...]
) -> None:
    model = tiny(stem=ResNetBody((1,), 32), patch_size=1)
    write_google(model, tmp_path / "vit.npz", spelling=spelling)
    arrays = arrays_of(tmp_path / "vit.npz")
    assert arrays["block1/unit1/gn1/scale"].shape == stored_as
    for name, array in arrays.items():
        if "gn" in name:
            arrays[name] = array.reshape(-1) if array.ndim == 4 else array.reshape(1, 1, 1, -1)
    np.savez(tmp_path / "vit.npz", **arrays)
    config, state = read_google(tmp_path / "vit.npz")
    assert config == model.config
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_attention_pooling_is_read_where_early_files_have_it(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    model = tiny(pool="map")
    write_google(model, tmp_path / "map.npz")
    arrays = arrays_of(tmp_path / "map.npz")
    assert arrays["MAPHead_0/MultiHeadDotProductAttention_0/query/kernel"].shape == (8, 2, 4)
    np.savez(tmp_path / "early.npz", **{name.removeprefix("MAPHead_0/"): array for name, array in arrays.items()})
    config, state = read_google(tmp_path / "early.npz")
    assert config == model.config
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_bfloat16_is_stored_as_two_bytes_without_a_type(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    model = tiny()
    write_google(model.bfloat16(), tmp_path / "half.npz")
    arrays = arrays_of(tmp_path / "half.npz")
    assert {str(array.dtype) for array in arrays.values()} == {"|V2"}
    bits = model.head.bias.detach().view(torch.int16).numpy() if model.head is not None else None
    assert arrays["head/bias"].view(np.int16).tolist() == (None if bits is None else bits.tolist())
    loaded = load_model(tmp_path / "half.npz")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert all(torch.equal(a, b.float()) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


@torch.no_grad()
def test_class_token_without_a_position(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    """big_vision adds positions to the patches alone: the same function, from other arrays."""
    model = tiny(image_size=16)
    images = torch.randn(2, 3, 16, 16)
    write_google(model, tmp_path / "bv.npz", spelling="big_vision")
    assert arrays_of(tmp_path / "bv.npz")["pos_embedding"].shape == (1, 16, 8)
    loaded = load_model(tmp_path / "bv.npz")
    assert loaded.config == dataclasses.replace(model.config, class_position=False)
    assert torch.equal(loaded(images), model(images))
    write_google(loaded, tmp_path / "again.npz")
    assert same_bits(arrays_of(tmp_path / "again.npz"), arrays_of(tmp_path / "bv.npz"))
    write_google(loaded, tmp_path / "vit.npz", spelling="stored")  # whose code wants a row
    back = load_model(tmp_path / "vit.npz")
    assert back.config == model.config
    assert not back.state_dict()["position.table"][:, 0].any()
    assert torch.equal(back(images), model(images))


def test_blocks_stacked_for_a_scan(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    model = tiny(depth=11)  # enough that 10 would come before 2 in the order of names
    write_google(model, tmp_path / "vit.npz", spelling="linen")
    arrays = arrays_of(tmp_path / "vit.npz")
    parts = sorted({name.split("/", 2)[2] for name in arrays if "encoderblock_" in name})
    stacked = {name: array for name, array in arrays.items() if "encoderblock_" not in name}
    for part in parts:
        blocks = [arrays[f"Transformer/encoderblock_{i}/{part}"] for i in range(11)]
        stacked[f"Transformer/encoderblock/{part}"] = np.stack(blocks)
    assert stacked["Transformer/encoderblock/MultiHeadDotProductAttention_0/query/kernel"].shape == (11, 8, 2, 4)
    np.savez(tmp_path / "scan.npz", **stacked)
    config, state = read_google(tmp_path / "scan.npz")
    assert config == model.config
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["Transformer/pos_embedding", "pos_embedding"])
def test_position_table_at_its_other_places(written: tuple[Path, Arrays], tmp_path: Path, name: str) -> None:
    path, arrays = written
    arrays[name] = arrays.pop("Transformer/posembed_input/pos_embedding")
    np.savez(tmp_path / "moved.npz", **arrays)
    assert torch.equal(read_google(tmp_path / "moved.npz")[1]["position.table"], read_google(path)[1]["position.table"])


@pytest.mark.parametrize("pool", ["token", "gap"])
def test_a_table_that_is_no_square_needs_its_image_size(tmp_path: Path, tiny: Callable[..., ViT], pool: str) -> None:
    model = tiny(image_size=(8, 20), pool=pool)
    write_google(model, tmp_path / "wide.npz")
    with pytest.raises(ValueError, match=rf"{10 + (pool == 'token')} rows.*image_size=\(height, width\)"):
        read_google(tmp_path / "wide.npz")
    with pytest.raises(ValueError, match=r"image_size=\(8, 16\) needs 8"):
        read_google(tmp_path / "wide.npz", image_size=(8, 16))
    with pytest.raises(ValueError, match="multiple of 4"):
        read_google(tmp_path / "wide.npz", image_size=(8, 21))
    config, state = read_google(tmp_path / "wide.npz", image_size=(8, 20))
    assert config == model.config
    assert torch.equal(state["position.table"], model.state_dict()["position.table"])


@pytest.mark.parametrize("size", [(8, 16), (16, 24), (56, 64)])
def test_a_square_with_the_class_token_s_row_is_not_taken_for_patches(
    tmp_path: Path, tiny: Callable[..., ViT], size: tuple[int, int]
) -> None:
    """(k - 1)(k + 1) patches and a class token have k k rows."""
    model = tiny(image_size=size)
    write_google(model, tmp_path / "wide.npz")
    with pytest.raises(ValueError, match=r"form no square; say which image size"):
        read_google(tmp_path / "wide.npz")
    assert read_google(tmp_path / "wide.npz", image_size=size)[0] == model.config


@pytest.mark.parametrize("pool", ["token", "gap"])
def test_a_grid_that_would_be_read_as_a_square_is_not_written(
    tmp_path: Path, tiny: Callable[..., ViT], pool: str
) -> None:
    with pytest.raises(ValueError, match="for 4x9 patches would be read as those of 6x6"):
        write_google(tiny(image_size=(16, 36), pool=pool), tmp_path / "wide.npz")
    assert not (tmp_path / "wide.npz").exists()


@pytest.mark.parametrize("pool", ["token", "gap"])
def test_a_hybrid_s_size_is_that_of_its_grid(tmp_path: Path, tiny: Callable[..., ViT], pool: str) -> None:
    stem = ResNetBody((1, 1), 32)
    write_google(tiny(stem=stem, patch_size=1, image_size=21, pool=pool), tmp_path / "vit.npz")
    assert read_google(tmp_path / "vit.npz")[0].image_size == 24  # 3 x 3 places, 8 pixels apart
    model = tiny(stem=stem, patch_size=2, image_size=(16, 77), pool=pool)
    write_google(model, tmp_path / "wide.npz")
    with pytest.raises(ValueError, match="form no square"):
        read_google(tmp_path / "wide.npz")
    with pytest.raises(ValueError, match=r"of the stem's 2x9 feature map.*multiple of 16"):
        read_google(tmp_path / "wide.npz", image_size=(16, 72))
    assert read_google(tmp_path / "wide.npz", image_size=(16, 77))[0] == model.config


def test_big_vision_s_positions_without_a_table(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    write_google(tiny(), tmp_path / "vit.npz", spelling="big_vision")
    arrays = arrays_of(tmp_path / "vit.npz")
    del arrays["pos_embedding"]
    np.savez(tmp_path / "fixed.npz", **arrays)
    for size in (224, (8, 12)):
        config, state = read_google(tmp_path / "fixed.npz", image_size=None if size == 224 else size)
        assert isinstance(config, ViTConfig)
        assert (config.image_size, config.position, config.class_position) == (size, "sincos2d", False)
        assert "position.table" not in state


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stranger", "kind"),
    [
        ("MixerBlock_0/LayerNorm_0/bias", "an MLP-Mixer"),
        ("img/cls", "images and text"),
        ("txt/cls", "text"),
    ],
)
def test_other_kinds_are_refused_by_name(
    written: tuple[Path, Arrays], tmp_path: Path, stranger: str, kind: str
) -> None:
    np.savez(tmp_path / "other.npz", **{**written[1], stranger: np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match=rf"{kind}, which is not supported; .*hybrids and BiT ResNets"):
        read_google(tmp_path / "other.npz")


def test_every_array_that_does_not_fit_is_listed(written: tuple[Path, Arrays], tmp_path: Path) -> None:
    _, arrays = written
    block = "Transformer/encoderblock_1"
    del arrays[f"{block}/LayerNorm_2/scale"], arrays["head/bias"]
    arrays["tail/kernel"] = arrays[f"{block}/LayerNorm_1/scale"] = np.zeros(2, np.float32)
    arrays[f"{block}/MlpBlock_3/Dense_1/bias"] = np.zeros(7, np.float32)
    arrays["cls"] = np.zeros((1, 1, 9), np.float32)
    np.savez(tmp_path / "wrong.npz", **arrays)
    with pytest.raises(ValueError) as caught:
        read_google(tmp_path / "wrong.npz")
    said = str(caught.value)
    assert "width 8 and depth 2" in said
    assert re.search(rf"2 missing: {block}/LayerNorm_2/scale, head/bias", said)
    assert re.search(rf"2 unknown: tail/kernel, {block}/LayerNorm_1/scale", said)
    assert "2 of another shape: cls has shape (1, 1, 9) instead of (1, 1, 8)" in said
    assert f"{block}/MlpBlock_3/Dense_1/bias has shape (7,) instead of (8,)" in said


def test_missing_pieces_that_the_sizes_are_read_from(written: tuple[Path, Arrays], tmp_path: Path) -> None:
    path, arrays = written
    table = "Transformer/posembed_input/pos_embedding"
    for name, complaint in (
        ("embedding/kernel", "embedding/kernel is missing, where an array of 4 axes"),
        ("Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel", "Dense_0/kernel is missing"),
        (table, "lacks its position table"),
        ("Transformer/encoderblock_0/LayerNorm_0/bias", "1 missing"),
    ):
        np.savez(path, **{each: array for each, array in arrays.items() if each != name})
        with pytest.raises(ValueError, match=complaint):
            read_google(path)
    np.savez(path, **{**arrays, "embedding/kernel": np.zeros((4, 8), np.float32)})
    with pytest.raises(ValueError, match=r"of shape \(4, 8\)"):
        read_google(path)
    np.savez(path, **{**arrays, table: np.zeros((10, 8), np.float32)})
    with pytest.raises(ValueError, match=r"shape \(10, 8\)"):
        read_google(path)
    query = "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel"
    np.savez(path, **{**arrays, query: np.zeros((8, 3, 4), np.float32)})
    with pytest.raises(ValueError, match=r"heads=3 does not divide width=8"):
        read_google(path)
    np.savez(path, something=np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="It holds something"):
        read_google(path)


def test_arrays_of_a_hybrid_that_do_not_fit(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    path = tmp_path / "vit.npz"
    write_google(tiny(stem=ResNetBody((2,), 32), patch_size=1, pool="map"), path)
    arrays = arrays_of(path)

    def wrong(**changes: np.ndarray | None) -> str:
        merged = {name: array for name, array in {**arrays, **changes}.items() if array is not None}
        np.savez(path, **merged)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError) as caught:
            read_google(path)
        return str(caught.value)

    gone: dict[str, Any] = {"block1/unit2/gn3/scale": None, "gn_root/bias": None, "MAPHead_0/probe": None}
    said = wrong(**gone, **{"block1/unit1/gn4/bias": np.zeros(4, np.float32)})
    assert "looks like a hybrid of width 8 and depth 2" in said
    assert "3 missing: gn_root/bias, block1/unit2/gn3/scale, MAPHead_0/probe" in said
    assert "1 unknown: block1/unit1/gn4/bias" in said
    assert "conv_root/kernel is missing" in wrong(**{"conv_root/kernel": None})
    said = wrong(**{"embedding/kernel": np.zeros((1, 1, 3, 8), np.float32)})
    assert "embedding/kernel has shape (1, 1, 3, 8) instead of (1, 1, 128, 8)" in said
    assert "32 groups" in wrong(**{"conv_root/kernel": np.zeros((7, 7, 3, 48), np.float32)})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"gelu": "erf"}, "gelu='erf'"),
        ({"position": "none"}, "position='none'"),
        ({"position": "2d"}, "position='2d'"),
        ({"position": "relative", "position_at": "every"}, "position='relative'"),
        ({"position_at": "shared"}, "position_at='shared'"),
        ({"position_at": "every"}, "position_at='every'"),
        ({"layer_norm_eps": 1e-5}, "layer_norm_eps=1e-05"),
        ({"pool": "token+gap"}, r"pool='token\+gap'"),
        ({"encoder": "axial"}, "encoder='axial'"),
        ({"layer_scale": 1e-5}, "layer_scale=1e-05"),
        ({"registers": 2}, "registers=2"),
        ({"distilled": True}, "distilled=True"),
        ({"stem": ResNetBody((1,), 32, version="v2")}, "stem.version='v2'"),
        ({"stem": ResNetBody((1,), 32, weight_eps=1e-8)}, "stem.weight_eps=1e-08"),
        ({"stem": ResNetBody((1,), 32, pool_padding="-inf")}, "stem.pool_padding='-inf'"),
    ],
)
@pytest.mark.parametrize("spelling", [None, "stored", "big_vision"])
def test_what_google_s_file_cannot_say_is_not_written(
    tmp_path: Path, tiny: Callable[..., ViT], settings: dict[str, Any], said: str, spelling: Any
) -> None:
    small = {"patch_size": 1} if "stem" in settings else {}
    with pytest.raises(ValueError, match=rf"{said}.*cannot say.*save_model"):
        write_google(tiny(**small, **settings), tmp_path / "vit.npz", spelling=spelling)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"pool": "map"}, "pool='map'"), ({"position": "sincos2d"}, "position='sincos2d'")],
)
@pytest.mark.parametrize("spelling", ["stored", "linen"])
def test_what_only_big_vision_s_code_reads_is_written_for_it_alone(
    tmp_path: Path, tiny: Callable[..., ViT], settings: dict[str, Any], said: str, spelling: Any
) -> None:
    with pytest.raises(ValueError, match=rf"{said}.*spelling='{spelling}'\) cannot say"):
        write_google(tiny(**settings), tmp_path / "vit.npz", spelling=spelling)


def test_the_same_model_is_the_same_file(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    model = tiny()
    write_google(model, tmp_path / "deep" / "a.npz")
    write_google(model, tmp_path / "deep" / "a.npz")
    write_google(model, tmp_path / "no_suffix")
    assert (tmp_path / "deep" / "a.npz").read_bytes() == (tmp_path / "no_suffix").read_bytes()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a.npz"]
    assert np.load(io.BytesIO((tmp_path / "no_suffix").read_bytes())).files


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"spelling": "flax"}, "spelling is 'flax'; allowed: 'stored', 'linen', 'big_vision'"),
        ({"prefix": "params"}, "prefix is 'params'; allowed: '', 'params/', 'opt/target/'"),
    ],
)
def test_a_misspelt_choice_is_told(tmp_path: Path, tiny: Callable[..., ViT], asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        write_google(tiny(), tmp_path / "vit.npz", **asked)

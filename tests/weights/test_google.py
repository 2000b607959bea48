import dataclasses
import io
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vitlab.models import MODELS, ViTConfig, get_config
from vitlab.models.vit import ViT
from vitlab.weights import load_model
from vitlab.weights.google import google_layout, read_google, sincos_table, write_google

GOLDEN = (
    "vit_testing",
    "vit_tiny_rep",
    "vit_tiny_gap",
    "vit_epsprobe",
    "bv_mu16_gap_learn",
    "bv_S16_gap_learn",
    "bv_S16_gap_sincos2d_rep",
    "ViT-B_16-gap-norep",
)
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


@pytest.mark.parametrize("name", GOLDEN)
@torch.no_grad()
def test_answers_are_those_of_google_s_code(golden: Callable[[str], Any], name: str) -> None:
    answers = golden(name)
    model = load_model(answers.checkpoint)
    tokens = model.forward_features(answers.images())
    answers.check("encoded", tokens)
    answers.check("pre_logits", model.forward_head(tokens, pre_logits=True))
    answers.check("logits", model.forward_head(tokens))


@pytest.mark.parametrize("name", [name for name in GOLDEN if "16" not in name])
def test_config_is_inferred(golden: Callable[[str], Any], name: str) -> None:
    answers = golden(name)
    said = json.loads(str(answers.arrays["meta"]))
    theirs = said["config"]
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
    )


@pytest.mark.parametrize("name", [name for name in GOLDEN if name not in ("bv_S16_gap_learn", "ViT-B_16-gap-norep")])
def test_google_s_files_come_back_to_the_bit(golden: Callable[[str], Any], tmp_path: Path, name: str) -> None:
    path = golden(name).checkpoint
    theirs = arrays_of(path)
    prefix = "params/" if "params/embedding/kernel" in theirs else ""
    spelling = "big_vision" if name.startswith("bv") else "stored"
    write_google(load_model(path), tmp_path / "ours.npz", spelling=spelling, prefix=prefix)
    ours = arrays_of(tmp_path / "ours.npz")
    if "sincos" in name:  # the table that the file leaves out
        del ours["params/pos_embedding"]
    assert same_bits(ours, theirs)


def test_names_and_shapes_are_those_of_every_published_vit(shared: Path) -> None:
    seen = 0
    for path in sorted((shared / "facts" / "keys").glob("*__ViT-*.json")):
        theirs = json.loads(path.read_text())
        config = get_config(
            theirs["model"].replace("_", "/"),
            image_size=theirs["resolution"],
            num_classes=theirs["num_classes"],
        )
        if path.name.startswith("imagenet21k__"):  # the only ones that keep the pre-training's hidden layer
            config = dataclasses.replace(config, representation_size=config.width)
        stored, linen = google_layout(config, "stored"), google_layout(config, "linen")
        assert {name: list(slot.shape) for name, slot in stored.items()} == theirs["stored_prelinen"], path.name
        assert {name: list(slot.shape) for name, slot in linen.items()} == theirs["linen"], path.name
        seen += 1
    assert seen == 18


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_layout_covers_every_parameter_once(spelling: Any) -> None:
    config = MODELS["ViT-Ti/16"]
    with torch.device("meta"):
        state = ViT(config).state_dict()
    counts = dict.fromkeys(state, 0)
    for slot in google_layout(config, spelling).values():
        counts[slot.ours] += int(np.prod(slot.shape))
    missing_row = config.width if spelling == "big_vision" else 0
    assert counts.pop("position.table") == state.pop("position.table").numel() - missing_row
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
    write_google(model, tmp_path / "bv.npz", spelling="big_vision")
    assert arrays_of(tmp_path / "bv.npz")["pos_embedding"].shape == (1, 16, 8)
    loaded = load_model(tmp_path / "bv.npz")
    assert loaded.config == model.config
    assert loaded.position.table is not None
    assert not loaded.position.table[:, 0].any()
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(loaded(images), model(images))
    write_google(loaded, tmp_path / "again.npz", spelling="big_vision")
    assert same_bits(arrays_of(tmp_path / "again.npz"), arrays_of(tmp_path / "bv.npz"))


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


@pytest.mark.parametrize("prefix", ["opt/target/", "opt/target/params/", "params/"])
def test_optimiser_state_beside_the_weights_is_left_alone(
    written: tuple[Path, Arrays], tmp_path: Path, prefix: str
) -> None:
    path, arrays = written
    state = {f"opt/state/param_states/{name}/grad_ema": array for name, array in arrays.items()}
    np.savez(tmp_path / "run.npz", **{prefix + n: a for n, a in arrays.items()}, **state, step=np.array(7))
    assert read_google(tmp_path / "run.npz")[0] == read_google(path)[0]


@pytest.mark.parametrize("name", ["Transformer/pos_embedding", "pos_embedding"])
def test_position_table_at_its_other_places(written: tuple[Path, Arrays], tmp_path: Path, name: str) -> None:
    path, arrays = written
    arrays[name] = arrays.pop("Transformer/posembed_input/pos_embedding")
    np.savez(tmp_path / "moved.npz", **arrays)
    assert torch.equal(read_google(tmp_path / "moved.npz")[1]["position.table"], read_google(path)[1]["position.table"])


@pytest.mark.parametrize("pool", ["token", "gap"])
def test_a_table_that_is_no_square_needs_its_picture_size(tmp_path: Path, tiny: Callable[..., ViT], pool: str) -> None:
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


def test_positions_without_a_table_are_sin_and_cos(shared: Path, tmp_path: Path, tiny: Any) -> None:
    with np.load(shared / "golden" / "posemb.npz") as archive:
        for key, grid, width in (("sincos2d/00", (7, 7), 16), ("sincos2d/01", (14, 14), 64)):
            np.testing.assert_allclose(sincos_table(grid, width).numpy(), archive[key], rtol=0, atol=1e-6)
    write_google(tiny(), tmp_path / "vit.npz", spelling="big_vision")
    arrays = arrays_of(tmp_path / "vit.npz")
    del arrays["pos_embedding"]
    np.savez(tmp_path / "fixed.npz", **arrays)
    config, state = read_google(tmp_path / "fixed.npz")
    assert config.image_size == 224
    config, state = read_google(tmp_path / "fixed.npz", image_size=(8, 12))
    assert config.image_size == (8, 12)
    assert torch.equal(state["position.table"][:, 1:], sincos_table((2, 3), 8))
    assert not state["position.table"][:, 0].any()


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"), [("hybrid_small", "a hybrid"), ("bit_small", "a BiT ResNet"), ("bitv1_small", "a ResNet")]
)
def test_resnets_and_hybrids_are_refused_by_name(shared: Path, name: str, kind: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}.ckpt.npz holds {kind}.*not supported yet.*plain Vision"):
        read_google(shared / "golden" / "models" / f"{name}.ckpt.npz")


@pytest.mark.parametrize(
    ("stranger", "kind"),
    [
        ("MAPHead_0/probe", "attention-pooling"),
        ("probe", "attention-pooling"),
        ("MixerBlock_0/LayerNorm_0/bias", "an MLP-Mixer"),
        ("img/cls", "pictures and text"),
    ],
)
def test_other_kinds_are_refused_by_name(
    written: tuple[Path, Arrays], tmp_path: Path, stranger: str, kind: str
) -> None:
    np.savez(tmp_path / "other.npz", **{**written[1], stranger: np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match=kind):
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


@pytest.mark.parametrize(
    "array", [np.zeros(5, np.int32), np.zeros(5, ">f4"), np.zeros(5, "V4"), np.zeros(5, np.complex64)]
)
def test_numbers_of_another_type_are_refused(written: tuple[Path, Arrays], array: np.ndarray) -> None:
    path, arrays = written
    np.savez(path, **{**arrays, "head/bias": array})
    with pytest.raises(ValueError, match=rf"head/bias is {re.escape(str(array.dtype))}; weights are arrays of"):
        read_google(path)


def test_a_pickled_object_is_never_loaded(written: tuple[Path, Arrays]) -> None:
    path, arrays = written

    class Bomb:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return (Path.touch, (path.with_name("exploded"),))  # pyright: ignore[reportReturnType]

    np.savez(path, **{**arrays, "head/bias": np.array([Bomb()], dtype=object)})
    with pytest.raises(ValueError, match="pickled objects, which are never loaded"):
        read_google(path)
    assert not path.with_name("exploded").exists()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_file_is_told(written: tuple[Path, Arrays], share: float) -> None:
    path, _ = written
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(ValueError, match=r"vit\.npz cannot be read .*damaged"):
        read_google(path)


def test_a_changed_byte_is_told(written: tuple[Path, Arrays]) -> None:
    path, arrays = written
    data = bytearray(path.read_bytes())
    found = data.find(arrays["head/kernel"].tobytes())
    data[found + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="CRC"):
        read_google(path)


def test_compressed_archives_are_read(written: tuple[Path, Arrays], tmp_path: Path) -> None:
    path, arrays = written
    np.savez_compressed(tmp_path / "small.npz", **arrays)
    assert zipfile.ZipFile(tmp_path / "small.npz").infolist()[0].compress_type == zipfile.ZIP_DEFLATED
    assert read_google(tmp_path / "small.npz")[0] == read_google(path)[0]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"gelu": "erf"}, "gelu='erf'"),
        ({"position": "none"}, "position='none'"),
        ({"layer_norm_eps": 1e-5}, "layer_norm_eps=1e-05"),
    ],
)
def test_what_google_s_file_cannot_say_is_not_written(
    tmp_path: Path, tiny: Callable[..., ViT], settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=rf"{said}.*cannot say.*save_model"):
        write_google(tiny(**settings), tmp_path / "vit.npz")
    assert not list(tmp_path.iterdir())


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

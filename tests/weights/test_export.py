"""Exported files, read by what others read them with: onnxruntime, and torch without our classes."""

import dataclasses
import functools
import importlib
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from peers import photographs
from small_disk import small_disk
from states import randomized
from torch import Tensor

from vitlab.data.transforms import EvalTransform
from vitlab.errors import WriteError
from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, Rotary, ViTConfig
from vitlab.models.variant import override
from vitlab.models.vit import Model, build_model
from vitlab.preprocessing import Preprocessing
from vitlab.weights import ParityError, export, load_checkpoint, load_model, save_model
from vitlab.weights.export import SUFFIX, export_checkpoint

pytestmark = pytest.mark.usefixtures("unchecked")  # the tests' type checks cannot be traced


@pytest.fixture(autouse=True, scope="module")
def _operators_listed_once() -> Iterator[None]:
    """torch.onnx.export lists its operators, for a second, at each call."""
    apis = importlib.import_module("torch.onnx._internal._lazy_import").onnxscript_apis
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apis, "get_torchlib_ops", functools.cache(apis.get_torchlib_ops))
        yield


def vit(**settings: Any) -> ViTConfig:
    sizes = {"image_size": 16, "patch_size": 8, "width": 8, "depth": 1, "heads": 2, "mlp_dim": 12}
    return override(ViTConfig(), **{**sizes, "num_classes": 5, **settings})


TWO_STAGES = ResNetBody(layers=(1, 1), width=32, version="v2")
KINDS: dict[str, ModelConfig] = {
    "vit": vit(),
    "tall": vit(image_size=(16, 24), pool="gap", position="sincos2d"),
    "map": vit(pool="map", representation_size=6),
    "relative": vit(position="relative", position_at="shared"),
    "modern": vit(pool="token+gap", registers=2, layer_scale=0.1, gelu="erf"),
    "deit": vit(distilled=True, stochastic_depth=0.1, dropout=0.1),
    "headless": vit(num_classes=0, position="2d"),
    "rotary": vit(position="sincos2d", rotary=Rotary(1e4, "index", (2, 2))),
    "axial": vit(encoder="axial"),
    "hybrid": vit(patch_size=2, stem=ResNetBody(layers=(1,), width=32)),
    "root": ResNetConfig(image_size=16, num_classes=5, body=dataclasses.replace(TWO_STAGES, layers=())),
    "resnet v1": ResNetConfig(image_size=16, num_classes=5, body=dataclasses.replace(TWO_STAGES, version="v1")),
    "resnet v2": ResNetConfig(image_size=(18, 34), num_classes=5, body=TWO_STAGES),
    "axial resnet": ResNetConfig(image_size=20, num_classes=5, body=dataclasses.replace(TWO_STAGES, mixing="axial")),
}
ROUNDING = {"vit": 5e-5, "resnet": 1e-3}
CLASSES = list("abç\udce9e")


def kinds(*quick: str) -> list[Any]:
    """All kinds, of which the others are left to `pytest -m slow`: exporting one takes seconds."""
    return [pytest.param(kind, marks=() if kind in quick else pytest.mark.slow) for kind in KINDS]


def export_saved(model: Model, path: Path, to: Any, saved: Path, **extra: Any) -> dict[str, Any]:
    """`export_checkpoint` of the model, which is saved to the folder `saved` with `extra`."""
    save_model(model, saved, extra=extra)
    return export_checkpoint(saved, path, to=to)


def check(model: Model, run: Any) -> None:
    """Equal outputs for batches of sizes that the export has not tried."""
    for batch in (5, 2):
        images = torch.rand(batch, 3, *model.config.image_hw) * 2 - 1
        with torch.no_grad():
            ours, theirs = model(images), run(images)
        assert theirs.shape == ours.shape
        assert (theirs - ours).abs().max() / ours.square().mean().sqrt() <= ROUNDING[model.config.kind]


@pytest.mark.parametrize("kind", kinds("relative"))
def test_exported_programs_compute_as_the_model(kind: str, tmp_path: Path) -> None:
    model, path = randomized(KINDS[kind]), tmp_path / "new" / "model.pt2"
    extra = {"classes": CLASSES, "image_size": "of the card"} if model.config.num_classes else {}
    report = export_saved(model, path, "torch-export", tmp_path / "saved", **extra)
    metadata: dict[str, Any] = {"classes": "", "image_size": "", "value_range": ""}
    program = torch.export.load(path, extra_files=metadata)
    assert {tensor.dtype for tensor in program.state_dict.values()} == {torch.float32}
    check(model, program.module())
    assert report == {
        "format": "torch-export",
        "path": str(path),
        "files": ["model.pt2"],
        "bytes": path.stat().st_size,
        "opset": None,
        "outputs": ["logits" if model.config.num_classes else "features"],
        "batches": [1, 3],
        "sizes": [list(model.config.image_hw)],
        "difference": pytest.approx(0, abs=ROUNDING[model.config.kind]),
    }
    assert [file.name for file in path.parent.iterdir()] == ["model.pt2"]
    assert json.loads(metadata["image_size"]) == list(model.config.image_hw)
    assert json.loads(metadata["value_range"]) == [-1, 1]
    assert not extra or json.loads(metadata["classes"]) == CLASSES
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    for name, data in members.items():
        assert not data.startswith(b"PK"), f"{name} is an archive of torch.save"
        assert b'"use_pickle": true' not in data
        assert str(Path(export.__file__).parents[1]).encode() not in data


def run_onnx(path: Path, images: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    ((name, shape),) = [(value.name, value.shape) for value in session.get_inputs()]
    assert (name, shape) == ("images", ["batch", *images.shape[1:]])
    return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


@pytest.mark.parametrize("kind", kinds("root"))
def test_onnx_files_compute_as_the_model(kind: str, tmp_path: Path) -> None:
    model, path = randomized(KINDS[kind]), tmp_path / "model.onnx"
    extra = {"classes": CLASSES} if model.config.num_classes else {}
    report = export_saved(model, path, "onnx", tmp_path / "saved", **extra)
    check(model, lambda images: run_onnx(path, images))
    written = onnx.load(path)
    onnx.checker.check_model(written, full_check=True)
    assert report["opset"] == written.opset_import[0].version >= 18
    assert 0 <= report["difference"] < ROUNDING[model.config.kind]
    assert (report["files"], report["bytes"]) == (["model.onnx"], path.stat().st_size)
    assert [output.name for output in written.graph.output] == ["features" if kind == "headless" else "logits"]
    metadata = {entry.key: json.loads(entry.value) for entry in written.metadata_props}
    expected = {"image_size": list(model.config.image_hw), "value_range": [-1, 1], "mean": [0.5] * 3, "std": [0.5] * 3}
    how = load_checkpoint(tmp_path / "saved").preprocessing.to_metadata()
    assert metadata.pop("outputs") == report["outputs"]
    assert metadata.pop("prefix_tokens") == getattr(model.config, "num_prefix_tokens", 0)
    assert metadata == expected | extra | {"preprocessing": how}
    assert str(Path(export.__file__).parents[1]).encode() not in path.read_bytes()


def test_a_file_with_preprocessing_takes_photographs_of_any_size(shared: Path, tmp_path: Path) -> None:
    """The checkpoint's own resize, crop and normalization, and its class names."""
    config, card = dataclasses.replace(KINDS["vit"], image_size=64, pool="gap"), tmp_path / "model"
    how = Preprocessing(64, 72, interpolation="bicubic", mean=(0.4,) * 3, std=(0.2,) * 3)
    model = build_model(dataclasses.replace(config, head_std=1.0)).eval()
    save_model(model, card, extra={"classes": CLASSES, "preprocessing": how.to_metadata()})
    path = tmp_path / "model.onnx"
    assert export_checkpoint(card, path, to="onnx", with_preprocessing=True)["difference"] < 1e-4
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for image in photographs(shared)[-6:]:
        with torch.no_grad():
            ours = model(EvalTransform(64, how).apply([image, image]))
        (theirs,) = session.run(None, {"images": np.stack([image, image])})
        torch.testing.assert_close(torch.from_numpy(theirs), ours, atol=2e-3, rtol=0)
    metadata = {name: json.loads(text) for name, text in session.get_modelmeta().custom_metadata_map.items()}
    assert metadata["classes"] == CLASSES
    assert metadata["preprocessing"] == how.to_metadata()
    assert (metadata["image_size"], metadata["value_range"]) == ([64, 64], [0, 255])
    (value,) = session.get_inputs()
    assert (value.name, value.type, value.shape) == ("images", "tensor(uint8)", ["batch", "height", "width", 3])


@pytest.mark.parametrize(
    ("kind", "to"),
    [
        ("modern", "onnx"),
        *(pytest.param(kind, "onnx", marks=pytest.mark.slow) for kind in ("vit", "rotary", "headless")),
        *(
            pytest.param(kind, "torch-export", marks=pytest.mark.slow)
            for kind in ("vit", "modern", "rotary", "headless")
        ),
    ],
)
def test_a_file_of_dynamic_size_computes_as_the_model(kind: str, to: Any, tmp_path: Path) -> None:
    """Sizes that the export has not tried, smaller than the positions' and larger; also of a plain checkpoint.

    As in DINOv2, the preprocessing has another size than the positions, which are resampled once all the same.
    """
    path, option = tmp_path / f"model{SUFFIX[to]}", True if kind == "vit" else None
    method = {"modern": "bicubic_antialias", "headless": "bicubic"}.get(kind)
    grown: Any = {"image_size": 128, "dynamic_image_size": option is None, "position_interpolation": method}
    extra = {"preprocessing": Preprocessing(64).to_metadata()}
    save_model(randomized(override(KINDS[kind], **grown)), tmp_path / "model", extra=extra)
    report = export_checkpoint(tmp_path / "model", path, to=to, dynamic_image_size=option)
    assert report["difference"] < ROUNDING["vit"]
    assert report["sizes"] == [[64, 64], [128, 128], [64, 152]]
    if to == "onnx":
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        assert session.get_inputs()[0].shape == ["batch", 3, "8*rows", "8*columns"]
        run = lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])  # noqa: E731
    else:
        run = torch.export.load(path).module()
    for rows, columns in ((16, 16), (5, 9), (20, 34)):
        images = torch.rand(3, 3, 8 * rows, 8 * columns) * 2 - 1
        model = load_model(tmp_path / "model", image_size=(8 * rows, 8 * columns))
        with torch.no_grad():
            ours, theirs = model(images), run(images)
        assert (theirs - ours).abs().max() / ours.square().mean().sqrt() <= ROUNDING["vit"], (rows, columns)


def test_a_file_that_resamples_twice_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outputs are compared with the checkpoint's, not with those of the model that was traced."""
    config = dataclasses.replace(KINDS["vit"], image_size=64, position_std=1.0)
    save_model(randomized(config), tmp_path / "model", extra={"preprocessing": Preprocessing(32).to_metadata()})

    def load_resized(path: Any, **options: Any) -> Any:
        loaded: Any = load_checkpoint(path, image_size=32)
        config = dataclasses.replace(loaded.model.config, dynamic_image_size=True)
        loaded.model.config = loaded.model.position.config = config
        return loaded

    monkeypatch.setattr(export, "load_checkpoint", load_resized)
    with pytest.raises(ParityError, match="differ"):
        export_checkpoint(tmp_path / "model", tmp_path / "m.pt2", to="torch-export", dynamic_image_size=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("to", ["onnx", "torch-export"])
def test_an_earlier_file_stays(to: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk, where torch's writer would abort the process, and where outputs differ: onnxruntime pads BiT's
    pooling with -inf unless it is prevented. What a killed export has left is removed."""
    path, stale = tmp_path / f"model{SUFFIX[to]}", tmp_path / f".model{SUFFIX[to]}.0123456789abcdef.new"
    path.write_text("an earlier one")
    stale.mkdir()
    (stale / path.name).write_text("half")
    save_model(randomized(KINDS["root"]), tmp_path / "saved")
    programs, export_onnx = [], torch.onnx.export

    def export_once(*args: Any, **options: Any) -> Any:  # which takes seconds
        programs[:] = programs or [export_onnx(*args, **options)]
        return programs[0]

    if to == "onnx":
        monkeypatch.setattr(torch.onnx, "export", export_once)
        with monkeypatch.context() as patch:
            patch.setattr(export, "_name_axes_of_padding", lambda written: None)
            with pytest.raises(ParityError, match=r"model\.onnx \(not written\)"):
                export_checkpoint(tmp_path / "saved", path, to=to)
    with pytest.raises(WriteError, match=r"\(File too large\): [\d,]+ bytes are required"), small_disk():
        export_checkpoint(tmp_path / "saved", path, to=to)
    assert sorted(file.name for file in tmp_path.iterdir()) == [path.name, "saved"]
    assert path.read_text() == "an earlier one"


@pytest.mark.slow
def test_weights_too_large_for_one_file_lie_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.onnx._internal.exporter._onnx_program._LARGE_MODEL_THRESHOLD", 1000)
    model, path = randomized(KINDS["vit"]), tmp_path / "first" / "model.onnx"
    report = export_saved(model, path, "onnx", tmp_path / "saved")
    assert report["files"] == sorted(file.name for file in path.parent.iterdir()) == ["model.onnx", "model.onnx.data"]
    path.parent.rename(tmp_path / "second")  # the one names the other by its name alone
    check(model, lambda images: run_onnx(tmp_path / "second" / "model.onnx", images))


@pytest.mark.parametrize(
    ("kind", "options", "problem"),
    [
        ("vit", {"to": "tflite", "path": "m.tflite"}, "allowed: 'onnx', 'torch-export'"),
        ("vit", {"path": "m.pt2"}, r"ends with \.onnx"),
        ("vit", {"to": "torch-export", "path": "folder.pt2"}, "folder.pt2 cannot"),
        ("vit", {"to": "torch-export", "path": "m.pt2", "with_preprocessing": True}, "give to='onnx'"),
        ("vit", {"with_preprocessing": True}, "ONNX does not have"),
        ("vit", {"opset": 16}, "allowed: 17 to 23"),
        ("vit", {"opset": 18, "to": "torch-export", "path": "m.pt2"}, "only with to='onnx'"),
        ("root", {"opset": 17}, "give 18 or more"),
        ("vit", {"opset": 17, "with_preprocessing": True}, "give 18 or more"),
        ("vit", {"image_size": 32, "dynamic_image_size": True}, "leave out one of the two"),
        ("vit", {"with_preprocessing": True, "dynamic_image_size": True}, "leave out"),
        ("relative", {"dynamic_image_size": True}, "relative positions are not exported"),
        ("hybrid", {"dynamic_image_size": True}, "hybrids and .* are not exported"),
    ],
)
def test_invalid_requests_are_refused(kind: str, options: dict[str, Any], problem: str, tmp_path: Path) -> None:
    (tmp_path / "folder.pt2").mkdir()
    how = Preprocessing(interpolation="bilinear" if "opset" in options else "lanczos").to_metadata()
    save_model(randomized(KINDS[kind]), tmp_path / "saved", extra={"preprocessing": how})
    options = {"path": "m.onnx", "to": "onnx", **options}
    with pytest.raises(ValueError, match=problem):
        export_checkpoint(tmp_path / "saved", **options | {"path": tmp_path / options["path"]})
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder.pt2", "saved"]

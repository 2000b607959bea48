"""Exported files, read by what others read them with: onnxruntime, and torch without our classes."""

import copy
import dataclasses
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, ViTConfig, build_model
from vitlab.models.resnet import ResNet
from vitlab.models.vit import ViT
from vitlab.weights import ParityError, export, save_model
from vitlab.weights.export import export_checkpoint, export_model

pytestmark = pytest.mark.usefixtures("unchecked")  # the tests' own checks cannot be traced

SMALL: dict[str, Any] = {"image_size": 16, "patch_size": 8, "width": 8, "depth": 1, "heads": 2, "mlp_dim": 12}
TWO_STAGES = ResNetBody(layers=(1, 1), width=32, version="v2")
KINDS: dict[str, ModelConfig] = {
    "vit": ViTConfig(**SMALL, num_classes=5),
    "tall": ViTConfig(**{**SMALL, "image_size": (16, 24)}, num_classes=5, pool="gap", position="sincos2d"),
    "map": ViTConfig(**SMALL, num_classes=5, pool="map", representation_size=6),
    "relative": ViTConfig(**SMALL, num_classes=5, position="relative", position_at="shared"),
    "modern": ViTConfig(**SMALL, num_classes=5, pool="token+gap", registers=2, layer_scale=0.1, gelu="erf"),
    "deit": ViTConfig(**SMALL, num_classes=5, distilled=True, stochastic_depth=0.1, dropout=0.1),
    "headless": ViTConfig(**SMALL, num_classes=0, position="2d"),
    "axial": ViTConfig(**SMALL, num_classes=5, encoder="axial"),
    "hybrid": ViTConfig(**{**SMALL, "patch_size": 2}, num_classes=5, stem=ResNetBody(layers=(1,), width=32)),
    "root": ResNetConfig(image_size=16, num_classes=5, body=dataclasses.replace(TWO_STAGES, layers=())),
    "resnet v1": ResNetConfig(image_size=16, num_classes=5, body=dataclasses.replace(TWO_STAGES, version="v1")),
    "resnet v2": ResNetConfig(image_size=(18, 34), num_classes=5, body=TWO_STAGES),
    "axial resnet": ResNetConfig(image_size=20, num_classes=5, body=dataclasses.replace(TWO_STAGES, mixing="axial")),
}
ROUNDING = 5e-5


def kinds(*quick: str) -> list[Any]:
    """All kinds, of which the others are left to `pytest -m slow`: each takes seconds."""
    return [pytest.param(kind, marks=() if kind in quick else pytest.mark.slow) for kind in KINDS]


def build(kind: str) -> ViT | ResNet:
    """A model whose every parameter is random."""
    model = build_model(KINDS[kind])
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model.eval()


def run_onnx(path: Path, images: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    ((name, shape),) = [(each.name, each.shape) for each in session.get_inputs()]
    assert (name, shape) == ("images", ["batch", *images.shape[1:]])
    return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def check(model: ViT | ResNet, answer: Any) -> None:
    """Equal answers for batches of sizes that the export has not tried."""
    for batch in (5, 2):
        images = torch.rand(batch, 3, *model.config.image_hw) * 2 - 1
        with torch.no_grad():
            ours, theirs = model(images), answer(images)
        assert theirs.shape == ours.shape
        assert (theirs - ours).abs().max() / ours.square().mean().sqrt() <= ROUNDING


@pytest.mark.parametrize("kind", kinds("relative", "axial"))
def test_exported_programs_answer_as_the_model(kind: str, tmp_path: Path) -> None:
    model, path = build(kind), tmp_path / "new" / "model.pt2"
    report = export_model(model, path, to="torch-export")
    check(model, torch.export.load(path).module())
    assert report == {
        "format": "torch-export",
        "path": str(path),
        "files": ["model.pt2"],
        "bytes": path.stat().st_size,
        "opset": None,
        "batches": [1, 3],
        "difference": pytest.approx(0, abs=ROUNDING),
    }
    assert [each.name for each in path.parent.iterdir()] == ["model.pt2"]


@pytest.mark.parametrize("kind", kinds("vit", "root"))
def test_onnx_files_answer_as_the_model(kind: str, tmp_path: Path) -> None:
    model, path = build(kind), tmp_path / "model.onnx"
    report = export_model(model, path, to="onnx", extra={"classes": list("abç\udce9e")} if kind == "vit" else None)
    check(model, lambda images: run_onnx(path, images))
    written = onnx.load(path)
    onnx.checker.check_model(written, full_check=True)
    assert report["opset"] == written.opset_import[0].version >= 18
    assert 0 <= report["difference"] < ROUNDING
    assert (report["files"], report["bytes"]) == (["model.onnx"], path.stat().st_size)
    assert [each.name for each in written.graph.output] == ["features" if kind == "headless" else "logits"]
    told = {each.key: json.loads(each.value) for each in written.metadata_props}
    expected = {"image_size": list(model.config.image_hw), "value_range": [-1, 1]}
    assert told == expected | ({"classes": list("abç\udce9e")} if kind == "vit" else {})
    assert str(Path(export.__file__).parents[1]).encode() not in path.read_bytes()


def test_an_exported_program_says_what_it_is_and_holds_no_pickle(tmp_path: Path) -> None:
    model, path = build("vit"), tmp_path / "model.pt2"
    extra = {"classes": list("abç\udce9e"), "eval_resize": 18, "image_size": "of the card"}
    export_model(model, path, to="torch-export", extra=extra)
    told: dict[str, Any] = {"classes": "", "eval_resize": "", "image_size": "", "value_range": ""}
    torch.export.load(path, extra_files=told)
    assert {key: json.loads(value) for key, value in told.items()} == {
        "classes": list("abç\udce9e"),
        "eval_resize": 18,
        "image_size": [16, 16],
        "value_range": [-1, 1],
    }
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    assert sum(len(data) for name, data in members.items() if "/weights/weight_" in name) == 4 * sum(
        parameter.numel() for parameter in model.parameters()
    )
    for name, data in members.items():
        assert not data.startswith(b"PK"), f"{name} is an archive of torch.save"
        assert str(Path(export.__file__).parents[1]).encode() not in data
    assert all(b'"use_pickle": true' not in data for data in members.values())


def test_a_file_that_answers_otherwise_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What onnxruntime makes of BiT's padded pooling unless it is kept from it."""
    monkeypatch.setattr(export, "_keep_zeros_around_pooling", lambda written: None)
    path = tmp_path / "model.onnx"
    path.write_text("an earlier one")
    with pytest.raises(ParityError, match=r"differ by .* 1e-04 is allowed.*model.onnx is not written.*torch-export"):
        export_model(build("root"), path, to="onnx")
    assert path.read_text() == "an earlier one"
    assert [each.name for each in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize("wrong", ["nan", "another size"])
def test_answers_that_cannot_be_compared_are_refused(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("vit")
    if wrong == "nan":
        nn.init.constant_(model.norm.weight, torch.nan)  # pyright: ignore[reportArgumentType, reportOptionalMemberAccess]
    else:
        monkeypatch.setattr(export, "_load_torch", lambda path: lambda images: model(images)[:1])
    with pytest.raises(ParityError, match=r"differ by (nan|inf)"):
        export_model(model, tmp_path / "model.pt2", to="torch-export")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("factor", "refused"), [(1, False), (1.001, True)])
def test_rounding_is_allowed_as_far_as_the_models_own(
    factor: float, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = build("resnet v2"), tmp_path / "model.pt2"
    exact = copy.deepcopy(model).double()
    monkeypatch.setattr(export, "TOLERANCE", 0.0)
    monkeypatch.setattr(export, "_load_torch", lambda path: lambda images: (exact(images) * factor).float())
    if refused:
        with pytest.raises(ParityError, match=r"differ by [12]\.\de-03 of .*, and \de-0[567] is allowed"):
            export_model(model, path, to="torch-export")
    else:
        assert 0 < export_model(model, path, to="torch-export")["difference"] < ROUNDING
    assert path.exists() is not refused


def test_an_untrained_model_answers_zero_in_the_file_as_well(tmp_path: Path) -> None:
    model = build_model(KINDS["vit"])
    assert export_model(model, tmp_path / "model.pt2", to="torch-export")["difference"] == 0


@pytest.mark.slow
def test_weights_too_large_for_one_file_lie_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "PROTOBUF_LIMIT", 1000)
    model, path = build("vit"), tmp_path / "first" / "model.onnx"
    report = export_model(model, path, to="onnx")
    assert report["files"] == ["model.onnx", "model.onnx.data"]
    assert sorted(each.name for each in path.parent.iterdir()) == report["files"]
    assert report["bytes"] == sum(each.stat().st_size for each in path.parent.iterdir())
    path.parent.rename(tmp_path / "second")  # the one names the other by its name alone
    check(model, lambda images: run_onnx(tmp_path / "second" / "model.onnx", images))


def test_at_another_size_the_size_of_test_images_keeps_its_proportion(tmp_path: Path) -> None:
    model = build_model(ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=8, num_classes=2))
    save_model(model, tmp_path / "saved", extra={"eval_resize": 12})
    for size, expected in ((None, (8, 12)), (8, (8, 12)), ((8, 16), ([8, 16], 24))):
        export_checkpoint(tmp_path / "saved", tmp_path / "model.pt2", to="torch-export", image_size=size)
        with zipfile.ZipFile(tmp_path / "model.pt2") as archive:
            texts = [archive.read(name).decode() for name in archive.namelist() if name.endswith("preprocessing")]
        assert [(said["image_size"], said["resize"]) for said in map(json.loads, texts)] == [expected]


def test_the_model_stays_as_it_was(tmp_path: Path) -> None:
    model = build("deit").train().bfloat16()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = export_model(model, tmp_path / "model.pt2", to="torch-export")
    assert report["difference"] < ROUNDING
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert {tensor.dtype for tensor in torch.export.load(tmp_path / "model.pt2").state_dict.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("to", "name", "extra", "said"),
    [
        ("tflite", "model.tflite", {}, "to='tflite' is no format.*onnx, torch-export"),
        ("onnx", "model.pt2", {}, r"model.pt2 cannot.*ends with \.onnx"),
        ("torch-export", "model", {}, r"ends with \.pt2"),
        ("torch-export", "folder.pt2", {}, r"folder.pt2 cannot be the name"),
        ("torch-export", "model.pt2", {"classes": ["a"]}, "names 1 classes and the model has 5"),
        ("torch-export", "model.pt2", {"source": object()}, "only hold what JSON can say"),
    ],
)
def test_what_cannot_be_is_refused(to: Any, name: str, extra: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "folder.pt2").mkdir()
    with pytest.raises(ValueError, match=said):
        export_model(build("vit"), tmp_path / name, to=to, extra=extra)
    assert [each.name for each in tmp_path.iterdir()] == ["folder.pt2"]


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"needs the package {package}, .*pip install 'vitlab\[export\]'"):
        export_model(build("vit"), tmp_path / "model.onnx", to="onnx")

"""A checkpoint in float32 and bfloat16 on its device, the batches that go through it, and the classes of its data."""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_files import link_all, put
from PIL import Image
from torch import nn

from vitlab import display
from vitlab.data.dataset import Dataset
from vitlab.data.decode import ImageError
from vitlab.data.registry import load_dataset
from vitlab.data.transforms import EvalTransform
from vitlab.errors import UserError
from vitlab.evaluate.accuracy import evaluate, evaluate_checkpoint
from vitlab.evaluate.load import choose_device, device_of, dtype_of, evaluation_batches, load_for_evaluation
from vitlab.evaluate.options import EvalOptions, LoaderOptions, ModelOptions
from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, ViTConfig, build_model
from vitlab.models.vit import ViT
from vitlab.preprocessing import Preprocessing
from vitlab.train.distributed import init_distributed
from vitlab.weights import load_card, load_model, save_model
from vitlab.weights.google import write_google

BIT = ResNetBody(layers=(1, 2), width=32, version="v2", weight_eps=1e-10, weight_eps_on="variance")
VIT: dict[str, Any] = {"image_size": 32, "width": 64, "depth": 3, "heads": 4, "mlp_dim": 128, "num_classes": 10}
KINDS: dict[str, ModelConfig] = {
    "ViT": ViTConfig(**VIT, patch_size=8),
    "MAP head": ViTConfig(**VIT, patch_size=8, pool="map"),
    "relative positions": ViTConfig(**VIT, patch_size=8, position="relative", position_at="every", registers=2),
    "axial": ViTConfig(**VIT, patch_size=8, encoder="axial", position="sincos2d", class_position=False),
    "hybrid": ViTConfig(**VIT, patch_size=1, stem=ResNetBody(layers=(1, 2), width=32)),
    "BiT": ResNetConfig(image_size=32, num_classes=10, body=BIT),
}
EXACT, ROUNDED = (ModelOptions(precision=precision, device="cpu") for precision in ("float32", "bfloat16"))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_every_kind_of_model(kind: str, tmp_path: Path) -> None:
    """float32 is exact; the rms error of bfloat16 is at most 3 % of that of the logits: some roundings of 0.4 %."""
    model = build_model(KINDS[kind], generator=torch.Generator().manual_seed(0)).eval()
    assert model.head is not None
    torch.nn.init.normal_(model.head.weight, std=0.1)
    save_model(model, tmp_path / "model")
    images = torch.rand(4, 3, 32, 32) * 2 - 1
    exact, rounded = (load_for_evaluation(tmp_path / "model", options).model for options in (EXACT, ROUNDED))
    assert (dtype_of(exact), dtype_of(rounded), device_of(exact)) == ("float32", "bfloat16", torch.device("cpu"))
    assert (exact.training, rounded.training) == (False, False)
    with torch.inference_mode():
        expected, logits = exact(images), rounded(images)
        assert torch.equal(expected, model(images))
    error = ((logits - expected).square().mean() / expected.square().mean()).sqrt()
    assert 1e-4 < error < 0.03


@pytest.mark.usefixtures("pretrained")
def test_slow_bfloat16_has_one_warning(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, in_ranks: Callable[..., list[Any]]
) -> None:
    for amx, options in ((True, ROUNDED), (False, EXACT)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda amx=amx: {"amx_bf16": amx}, raising=False)
        load_for_evaluation(workdir, options)
    assert caplog.messages == []

    def job() -> list[str]:
        with init_distributed() as world, caplog.at_level(logging.WARNING):
            load_for_evaluation(workdir, ROUNDED, world=world)
        return caplog.messages

    first, second = in_ranks(2, job)
    assert (len(first), second) == (1, [])
    assert "not faster in bfloat16" in first[0]


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (0, 2):
        monkeypatch.setattr(torch.cuda, "is_available", lambda count=count: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert choose_device("auto") == torch.device("cuda" if count else "cpu")
        with pytest.raises(UserError, match=f"cuda:2' is missing: torch sees {count} GPUs"):
            choose_device("cuda:2")
    assert choose_device("cuda:1") == torch.device("cuda:1")
    for unknown in ("quantum", "", "mps", "meta"):
        with pytest.raises(UserError, match=f"device '{unknown}' is unknown; give auto, cpu, cuda"):
            choose_device(unknown)


# ------------------------------------------------------------------------------------------------------------ batches

DATA = Dataset("made", "test", ("a",), np.zeros(7, np.int64), pixels=np.zeros((7, 4, 4, 3), np.uint8))
OPTIONS = LoaderOptions(2, on_error="skip")


@pytest.mark.parametrize("training", [False, True])
def test_mode_and_generators_are_left_alone(training: bool) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout()).train(training)
    model[1].train(not training)
    before = torch.get_rng_state()
    with contextlib.suppress(KeyError), evaluation_batches(model, DATA, EvalTransform(4), OPTIONS) as batches:
        assert not any(module.training for module in model.modules())
        assert [len(batch.labels) for batch in batches] == [2, 2, 2, 1]
        raise KeyError
    assert [module.training for module in model.modules()] == [training, training, not training]
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_without_a_readable_image_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(display, "FIRST_LINE", 0.0)
    monkeypatch.setattr(display, "NEXT_LINES", 0.0)
    data = DATA.take(np.arange(7))
    data.failures = {i: ImageError(str(i), "broken") for i in (2, 3, 4)}
    with evaluation_batches(nn.Identity(), data, EvalTransform(4), OPTIONS, label="made test") as batches:
        assert [batch.indices.tolist() for batch in batches] == [[0, 1], [5], [6]]
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("made test: ")]
    assert "2 of 7 images" in lines[0]
    assert "7 of 7 images" in lines[-1]


# ------------------------------------------------------------------------------------------------------------ classes

CPU = EvalOptions(batch_size=256, device="cpu")


@pytest.mark.usefixtures("pretrained")
def test_data_with_some_of_the_models_classes(workdir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Matched by name, not by number; predictions are over all classes."""
    digits = load_dataset("digits", "test", classes=(2, 0))
    for i in range(len(digits)):
        folder = tmp_path / "some" / "test" / digits.classes[digits.labels[i]]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits.image(i)).save(folder / f"{i:03}.png")
    result = evaluate_checkpoint(workdir, f"folder:{tmp_path / 'some'}", options=CPU)
    whole = evaluate_checkpoint(workdir, options=CPU)
    assert result.classes == ("0", "1", "2")
    assert sorted(set(result.labels.tolist())) == [0, 2]
    assert result.accuracy == pytest.approx(whole.right[whole.labels != 1].mean())
    assert sorted(result.losses) == pytest.approx(sorted(whole.losses[whole.labels != 1]), rel=1e-5)
    assert "has 2 of the model's 3 classes" in caplog.text
    assert "of 2 of the 3 classes" in result.as_table()
    # The same classes in another order are no subset: no warning.
    card = load_card(workdir) | {"classes": ["2", "0", "1"], "dataset": "folder:x"}
    save_model(load_model(workdir), tmp_path / "turned", extra=card)
    put(tmp_path / "some" / "test" / "1" / "0.png")
    caplog.clear()
    turned = evaluate_checkpoint(tmp_path / "turned", f"folder:{tmp_path / 'some'}", options=CPU)
    assert turned.classes == ("2", "0", "1")
    assert np.bincount(turned.labels).tolist() == [*np.bincount(digits.labels), 1]
    assert "predictions" not in caplog.text


@pytest.mark.usefixtures("pretrained")
def test_a_class_with_two_outputs(workdir: Path, tmp_path: Path) -> None:
    extra = {"classes": ["crane", "crane", "egret"], "dataset": "folder:x"}
    save_model(load_model(workdir), tmp_path / "model", extra=extra)
    for name in ("crane", "egret"):
        put(tmp_path / "birds" / "test" / name / "0.png")
    with pytest.raises(UserError, match="several outputs called crane"):
        evaluate_checkpoint(tmp_path / "model", f"folder:{tmp_path / 'birds'}", options=CPU)


# ------------------------------------------------------------------------------------------ test sets of ImageNet


@pytest.fixture(scope="module")
def v2(tmp_path_factory: pytest.TempPathFactory) -> str:
    """ImageNet-V2 with one image of 20 x 14 pixels for each class."""
    root = tmp_path_factory.mktemp("v2")
    put(root / "image.png", 77, (20, 14))
    folder = root / "imagenetv2-matched-frequency-format-val"
    link_all(folder, root / "image.png", [f"{c}/0.png" for c in range(1000)])
    return str(root)


def imagenet_model(num_classes: int = 1000) -> ViT:
    model = ViT(ViTConfig(image_size=12, patch_size=4, width=8, depth=1, heads=2, mlp_dim=8, num_classes=num_classes))
    assert model.head is not None
    torch.nn.init.normal_(model.head.weight)
    return model


def test_head_without_names_is_imagenets(v2: str, tmp_path: Path) -> None:
    """Google's checkpoints have no names of classes."""
    model = imagenet_model()
    write_google(model, tmp_path / "vit.npz")
    result = evaluate_checkpoint(tmp_path / "vit.npz", "imagenet_v2", options=CPU, root=v2)
    dataset = load_dataset("imagenet_v2", "test", root=v2)
    assert result.labels.tolist() == list(range(1000))
    expected = evaluate(model, dataset, (12, 12), preprocessing=Preprocessing.google())
    np.testing.assert_array_equal(result.losses, expected.losses)


def test_names_come_from_the_checkpoint(v2: str, tmp_path: Path) -> None:
    wnids = [f"n{2 * number:08}" for number in range(1000)]
    save_model(imagenet_model(), tmp_path / "named", extra={"classes": wnids, "dataset": "folder:mine"})
    assert evaluate_checkpoint(tmp_path / "named", "imagenet_v2", options=CPU, root=v2).classes == tuple(wnids)


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ([f"n{i:08}" for i in range(1000, 0, -1)], "knows the classes n00001000"),  # not in ImageNet's order
        (21_843, "21,843 classes, as in ImageNet-21k"),
    ],
)
def test_other_classes_than_imagenets(classes: Any, message: str, v2: str, tmp_path: Path) -> None:
    if isinstance(classes, int):
        write_google(imagenet_model(classes), tmp_path / "model.npz")
    else:
        save_model(imagenet_model(), tmp_path / "model.npz", extra={"classes": classes, "dataset": "folder:birds"})
    with pytest.raises(UserError, match=message):
        evaluate_checkpoint(tmp_path / "model.npz", "imagenet_v2", options=CPU, root=v2)

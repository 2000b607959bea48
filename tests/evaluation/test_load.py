"""A checkpoint in float32 and bfloat16 on its device, the batches that go through it, and the classes of its data."""

import contextlib
import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from image_files import put, write_images
from torch import nn

from vitlab.config import DataConfig, TrainConfig
from vitlab.data.dataset import Dataset, Labels
from vitlab.data.registry import load_dataset
from vitlab.data.transforms import EvalTransform
from vitlab.errors import UserError
from vitlab.evaluation import load
from vitlab.evaluation.accuracy import evaluate_checkpoint
from vitlab.evaluation.load import (
    check_train_and_test,
    device_of,
    evaluation_batches,
    load_for_evaluation,
    load_train_and_test,
    match_classes,
)
from vitlab.evaluation.options import FEWSHOT_DEFAULTS, EvalOptions, LoaderOptions, ModelOptions, SplitOptions
from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, ViTConfig
from vitlab.models.variant import override
from vitlab.models.vit import Model, build_model
from vitlab.runs.run import evaluate_split
from vitlab.train import precision
from vitlab.train.compile_cache import cpp_compiler
from vitlab.train.precision import choose_device
from vitlab.weights import load_metadata, load_model, save_model

BIT = ResNetBody(layers=(1, 2), width=32, version="v2", weight_eps=1e-10, weight_eps_on="variance")
VIT: dict[str, Any] = {"image_size": 32, "width": 64, "depth": 3, "heads": 4, "mlp_dim": 128, "num_classes": 10}
KINDS: dict[str, ModelConfig] = {
    "ViT": override(ViTConfig(), **VIT, patch_size=8),
    "MAP head": override(ViTConfig(), **VIT, patch_size=8, pool="map"),
    "relative positions": override(
        ViTConfig(), **VIT, patch_size=8, position="relative", position_at="every", registers=2
    ),
    "axial": override(ViTConfig(), **VIT, patch_size=8, encoder="axial", position="sincos2d", class_position=False),
    "hybrid": override(ViTConfig(), **VIT, patch_size=1, stem=ResNetBody(layers=(1, 2), width=32)),
    "BiT": ResNetConfig(image_size=32, num_classes=10, body=BIT),
}
EXACT, ROUNDED = (ModelOptions(precision=precision, device="cpu") for precision in ("float32", "bfloat16"))


def saved_model(kind: str, folder: Path) -> Model:
    """A model, which is saved in `model` of the folder as well."""
    model = build_model(KINDS[kind], generator=torch.Generator().manual_seed(0)).eval()
    assert model.head is not None
    torch.nn.init.normal_(model.head.weight, std=0.1)
    save_model(model, folder / "model")
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_every_kind_of_model(kind: str, tmp_path: Path) -> None:
    """float32 is exact; bfloat16 has an rms error of at most 3% of the logits' rms: some roundings of 0.4%."""
    model = saved_model(kind, tmp_path)
    images = torch.rand(4, 3, 32, 32) * 2 - 1
    exact, rounded = (load_for_evaluation(tmp_path / "model", options).model for options in (EXACT, ROUNDED))
    assert device_of(exact) == torch.device("cpu")
    assert (exact.training, rounded.training) == (False, False)
    with torch.inference_mode():
        expected, logits = exact(images), rounded(images)
        assert torch.equal(expected, model(images))
    error = ((logits - expected).square().mean() / expected.square().mean()).sqrt()
    assert 1e-4 < error < 0.03


def test_auto_is_the_faster_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an evaluation, of predictions and of a run's own tests; few-shot accuracies stay in float32."""
    model = saved_model("ViT", tmp_path)
    config = TrainConfig(model=model.config, data=DataConfig("digits"), steps=1, batch_size=8)
    digits = load_dataset("digits", "test").take(np.arange(20))
    digits = dataclasses.replace(digits, classes=digits.classes[: model.config.num_classes], labels=digits.labels * 0)

    def types() -> set[Any]:
        loaded = load_for_evaluation(tmp_path / "model", ModelOptions(device="cpu")).model
        return {next(loaded.parameters()).dtype, getattr(torch, evaluate_split(config, model, digits).computed_in)}

    assert types() == {torch.float32}
    monkeypatch.setattr(precision, "cpu_is_faster_in_bfloat16", lambda: True)
    assert types() == {torch.bfloat16}
    assert next(model.parameters()).dtype == torch.float32  # a copy was rounded
    assert FEWSHOT_DEFAULTS.precision == "float32"


COMPILED = """
import sys, torch
from vitlab.data.registry import load_dataset
from vitlab.evaluation.accuracy import evaluate_checkpoint
from vitlab.evaluation.frozen import FrozenModel
from vitlab.evaluation.options import FeatureOptions
from vitlab.train.distributed import SINGLE
from pathlib import Path

checkpoint, logged = sys.argv[1], []
eager, compiled = (FeatureOptions(batch_size=200, device="cpu", compile=compile) for compile in (False, True))
first, second = (
    evaluate_checkpoint(checkpoint, "digits", options=options, log=logged.append) for options in (eager, compiled)
)
assert "is compiled" in " ".join(logged)
assert first.indices.tolist() == second.indices.tolist()
torch.testing.assert_close(second.losses, first.losses, rtol=1e-4, atol=1e-5)
assert not (second.losses[:200] == first.losses[:200]).all()  # other kernels
assert (second.losses[200:] == first.losses[200:]).all()  # the smaller last batch
folders = [Path(checkpoint, name) for name in ("eager", "compiled")]  # of two caches
images = load_dataset("digits", "test")
pairs = zip((eager, compiled), folders)
both = [FrozenModel.load(checkpoint, o, f, logged.append, SINGLE).features(images).x for o, f in pairs]
torch.testing.assert_close(both[1], both[0], rtol=1e-4, atol=1e-5)
"""


@pytest.mark.slow  # compiles
@pytest.mark.skipif(cpp_compiler() is None, reason="torch finds no C++ compiler")
@pytest.mark.parametrize("kind", ["ViT", "hybrid"])
def test_a_compiled_model(kind: str, tmp_path: Path) -> None:
    """Evaluates and represents as the model does; in a process that checks no types."""
    saved_model(kind, tmp_path)
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", COMPILED, str(tmp_path / "model")], check=True, env=environment)


def test_only_full_batches_are_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What was compiled is published to later processes once."""
    published, logged = list[str](), list[str]()
    monkeypatch.setattr(torch, "compile", lambda forward, *, dynamic: lambda images: forward(images) + 1 + dynamic)
    monkeypatch.setattr(load, "cpp_compiler", lambda: "g++")
    monkeypatch.setattr(load, "compile_cache", lambda: SimpleNamespace(publish=lambda: published.append("once")))
    model, images = saved_model("ViT", tmp_path), torch.rand(3, 3, 32, 32)
    tokens = model.forward_features(images)
    load.compile_inference(model, batch_size=3, log=logged.append)
    for batch, difference in ((images, 1.0), (images, 1.0), (images[:2], 0.0)):
        torch.testing.assert_close(model.forward_features(batch), tokens[: len(batch)] + difference)
    assert (published, len(logged)) == (["once"], 1)


def test_compiling_requires_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved_model("ViT", tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match="install g"):
        evaluate_checkpoint(tmp_path / "model", "digits", options=EvalOptions(device="cpu", compile=True))


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (0, 2):
        monkeypatch.setattr(torch.cuda, "is_available", lambda count=count: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert choose_device("auto") == torch.device("cuda" if count else "cpu")
    assert choose_device("cuda:1") == torch.device("cuda:1")
    for unknown in ("cuda:2", "quantum", "", "mps", "meta"):
        with pytest.raises(UserError, match=f"device '{unknown}' is unknown or missing.* torch sees 2 GPUs"):
            choose_device(unknown)


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


CPU = EvalOptions(batch_size=256, device="cpu")


@pytest.mark.usefixtures("pretrained")
def test_data_with_some_of_the_models_classes(workdir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Matched by name, not by number; predictions are over all classes."""
    digits = load_dataset("digits", "test", classes=(2, 0))
    write_images(tmp_path / "some" / "test", digits)
    result = evaluate_checkpoint(workdir, f"folder:{tmp_path / 'some'}", options=CPU)
    whole = evaluate_checkpoint(workdir, options=CPU)
    assert result.classes == ("0", "1", "2")
    assert sorted(set(result.labels.tolist())) == [0, 2]
    assert result.accuracy == pytest.approx(whole.correct[whole.labels != 1].mean())
    assert sorted(result.losses) == pytest.approx(sorted(whole.losses[whole.labels != 1]), rel=1e-5)
    assert "has 2 of the model's 3 classes" in caplog.text
    assert "of 2 of the 3 classes" in result.as_table()
    # The same classes in another order are no subset: no warning.
    card = load_metadata(workdir) | {"classes": ["2", "0", "1"], "dataset": "folder:x"}
    save_model(load_model(workdir), tmp_path / "turned", extra=card)
    put(tmp_path / "some" / "test" / "1" / "0.png")
    caplog.clear()
    turned = evaluate_checkpoint(tmp_path / "turned", f"folder:{tmp_path / 'some'}", options=CPU)
    assert turned.classes == ("2", "0", "1")
    assert np.bincount(turned.labels).tolist() == [*np.bincount(digits.labels), 1]
    assert "predictions" not in caplog.text


@pytest.mark.parametrize(
    ("classes", "outputs", "known"),
    [
        ([], 1000, True),  # Google's checkpoints have no names of classes
        ([f"n{2 * i:08}" for i in range(1000)], 1000, True),
        ([f"n{i:08}" for i in range(1000, 0, -1)], 1000, False),  # not in ImageNet's order
        ([], 21_843, False),
    ],
)
def test_classes_of_imagenets_test_sets(classes: list[str], outputs: int, known: bool) -> None:
    names = tuple(f"n{i:08}" for i in range(1000))
    images = Dataset("imagenet_v2", "test", names, np.arange(1000), np.zeros((1000, 1, 1, 3), np.uint8))
    card = {"classes": classes, "dataset": "folder:mine"} if classes else {}
    if known:
        matched = match_classes(images, card, outputs, "imagenet_v2", "m")
        assert (matched.classes, matched.labels.tolist()) == (tuple(classes) or names, list(range(1000)))
    else:
        with pytest.raises(UserError, match=f"predicts {outputs:,} classes .*the 1,000 of ImageNet"):
            match_classes(images, card, outputs, "imagenet_v2", "m")


def test_classes_are_matched_in_any_unicode_form_and_without_names_by_position(
    caplog: pytest.LogCaptureFixture,
) -> None:
    composed, decomposed = "\u00dcbung", "U\u0308bung"
    images = Dataset("folder:m", "test", (decomposed, "a"), np.arange(2), np.zeros((2, 1, 1, 3), np.uint8))
    matched = match_classes(images, {"classes": ["a", composed]}, 2, "folder:m", "m")
    assert (matched.classes, matched.labels.tolist()) == (("a", composed), [1, 0])
    assert not caplog.messages
    assert match_classes(images, {}, 2, "folder:m", "m") is images
    assert "m has no class names: classes are matched by position (0 " in caplog.text
    with pytest.raises(UserError, match="several outputs called a"):
        match_classes(images, {"classes": ["a", "a", composed]}, 3, "folder:m", "m")


def test_splits_that_make_no_classifier(tmp_path: Path) -> None:
    pixels = Dataset("made", "test", ("a", "b", "c"), np.arange(11) % 3, np.zeros((11, 8, 8, 3), np.uint8))
    check_train_and_test(pixels, pixels)
    several = dataclasses.replace(pixels, label_sets=Labels(pixels.labels, np.arange(12)))
    for test, message in (
        (dataclasses.replace(pixels, classes=("a", "b", "d")), "other classes"),
        (several, "several labels"),
        (pixels.take(np.arange(0)), "no images"),
    ):
        with pytest.raises(UserError, match=message):
            check_train_and_test(pixels, test)
    for i in range(40):
        put(tmp_path / "ab"[i % 2] / f"{i}.png", i)
    name = f"folder:{tmp_path}"  # whose val is held out of train, if it is the test
    options: Any
    for dataset, options, expected in (
        ("digit", {}, "unknown data set 'digit'"),
        ("digits", {"train_split": "trainval", "test_split": "val"}, "also in the training split"),
        ("digits", {"train_split": "val"}, ("val", "test", 179)),
        (name, {"test_split": "test"}, ("trainval", "test", 36)),
        (name, {"test_split": "val"}, ("train", "val", 32)),
        *((name, {"test_split": split}, "also in the training split") for split in ("train", "trainval")),
    ):
        if isinstance(expected, str):
            with pytest.raises(UserError, match=expected):
                load_train_and_test(dataset, SplitOptions(**options), "raise")
        else:
            train, test = load_train_and_test(dataset, SplitOptions(**options), "raise")
            assert (train.split, test.split, len(train)) == expected

"""The held-out part of the training split, the best learning rate, and several labels."""

import contextlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image

from vitlab.config import DataConfig, FinetuneConfig, OptimConfig
from vitlab.data.dataset import Dataset
from vitlab.data.splits import stratified_split
from vitlab.evaluation.accuracy import evaluate_checkpoint
from vitlab.evaluation.options import ModelOptions
from vitlab.evaluation.predict import predict
from vitlab.finetuning.head import hold_out
from vitlab.finetuning.protocol import sweep_and_finetune
from vitlab.inspection import write_pages
from vitlab.inspection.finished_run import Run
from vitlab.inspection.run_section import run_section
from vitlab.models.config import ViTConfig
from vitlab.models.vit import build_model
from vitlab.weights import load_metadata, load_model, save_model


def numbered(labels: list[int]) -> Dataset:
    """A data set whose image i has the value i."""
    pixels = np.arange(len(labels), dtype=np.uint8)[:, None, None, None].repeat(3, axis=3)
    return Dataset("made", "trainval", ("a", "b", "c"), np.array(labels), pixels)


def numbers(dataset: Dataset) -> list[int]:
    assert dataset.pixels is not None
    return dataset.pixels[:, 0, 0, 0].tolist()


def test_hold_out() -> None:
    """Stratified, seeded, disjoint, and not the images that are held out as the val split."""
    train = numbered([0] * 100 + [1] * 40 + [2] * 10)
    rest, held = hold_out(train, 0.1, 7)
    assert np.bincount(held.labels).tolist() == [10, 4, 1]
    assert held.split == "held_out"
    assert sorted(numbers(rest) + numbers(held)) == list(range(150))
    assert numbers(hold_out(train, 0.1, 7)[1]) == numbers(held) != numbers(hold_out(train, 0.1, 8)[1])
    assert stratified_split(train.labels, {"val": 0.1}, 7)["val"].tolist() != numbers(held)
    assert np.bincount(hold_out(numbered([0, 0, 1, 1, 1]), 0.9, 0)[0].labels).tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"leaves 3 images of made to train on and 0 to evaluate on"):
        hold_out(numbered([0, 1, 2]), 0.5, 0)


@pytest.fixture
def photos(tmp_path: Path) -> str:
    """48 images of 8 pixels that all have the label `photo`; each color is a label of about half of them."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(48):
        hot = rng.random(3) < 0.5
        pixels = rng.integers(0, 150, (8, 8, 3)) + 100 * hot
        Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / f"{i}.png")
        names = ["photo", *np.array(["red", "green", "blue"])[hot]]
        rows.append(f"{i}.png,{'|'.join(names)}")
    (tmp_path / "photos.csv").write_text("\n".join(["file,label", *rows]))
    return f"csv:{tmp_path / 'photos.csv'}"


@pytest.mark.parametrize("rate", [1e-3, 30.0], ids=["fine-tuned", "head"])
def test_a_label_that_all_images_have(
    rate: float, photos: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The highest label is right for every image, which is no headline anywhere; thresholds are those of held-out
    images, and decide in the test, on the page and in `predict`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(write_pages, "inspect_checkpoint", lambda *arguments, **settings: {})  # figures take long
    model = ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=8)
    save_model(build_model(model, generator=torch.Generator().manual_seed(0)), tmp_path / "tiny")
    data = DataConfig(name=photos, crop="none", flip=False, train_split="trainval", eval_split="test")
    settings: dict[str, Any] = {"precision": "float32", "head": "least_squares", "loss": "sigmoid"}
    settings |= {"learning_rates": (rate,), "sweep_steps": 4, "steps": 4, "batch_size": 16, "held_out": 0.4}
    config = FinetuneConfig(model=model, data=data, optim=OptimConfig(name="adam", lr=rate), **settings)
    log: list[str] = []
    done = sweep_and_finetune(
        tmp_path / "tiny", config, tmp_path / "out", device="cpu", tensorboard=False, log=log.append
    )
    test, metadata = done.result["test"], load_metadata(tmp_path / "out")
    assert done.result["chosen"] == ("run-0" if rate < 1 else "linear")
    assert test["accuracy"] == 1.0 > test["mean_average_precision"]
    precision = f"mean average precision {test['mean_average_precision']:.2%}"
    assert done.result["mean_average_precision_mean"] == test["mean_average_precision"]
    card = (tmp_path / "out" / "model" / "README.md").read_text()
    for text in (done.summary(), *log, card):
        assert "accuracy" not in text.replace("makes the least-squares", "")
    assert precision in done.summary()
    assert f"{test['mean_average_precision']:.2%}" in card
    (code,) = re.findall(r"^```python\n(.*?)^```$", card, re.MULTILINE | re.DOTALL)
    with contextlib.chdir(tmp_path / "out" / "model"):
        exec(code, names := {})
    assert names["model"].config == load_model(tmp_path / "out").config
    data: Any = ModelCard(card).data
    assert data.eval_results[0].metric_type == "mean_average_precision"

    thresholds = [row["threshold"] for row in test["per_class"]]
    assert metadata["label_thresholds"] == thresholds != [0.5] * 4
    assert "reject_below" not in metadata
    evaluation = evaluate_checkpoint(tmp_path / "out")
    assert evaluation.as_table() in done.summary()
    assert {f"test_{name}" for name in ("f1", "exact_match")} < metadata.keys()
    images = [str(tmp_path / name) for name in Run.read(tmp_path / "out" / done.result["chosen"]).names]
    assert evaluation.predicted_sets is not None
    for row, prediction in enumerate(predict(tmp_path / "out", images, ModelOptions(device="cpu"), top=1)):
        chosen = {evaluation.classes[label] for label in evaluation.predicted_sets.of_image(row)}
        assert chosen == set(prediction.labels or ())

    section = run_section(Run.read(tmp_path / "out" / done.result["chosen"]))
    assert next(iter(section.numbers.items())) == ("Mean average precision", f"{test['mean_average_precision']:.1%}")
    assert "Test accuracy" not in section.numbers
    assert section.calibration is section.confusion is None
    assert section.class_table is not None
    assert section.class_table["head"][2:] == ("average precision", "precision", "recall", "f1", "threshold")
    wrong = np.flatnonzero(evaluation.wrong_labels).tolist()
    wrong = sorted(wrong, key=lambda row: (-evaluation.wrong_labels[row], -evaluation.losses[row]))
    assert section.mistakes is not None
    assert len(section.mistakes) == len(wrong) > 0
    for row, image in zip(wrong, section.mistakes, strict=True):
        labels, chosen = (
            {evaluation.classes[c] for c in sets.of_image(row)}
            for sets in (evaluation.all_labels, evaluation.predicted_sets)
        )
        lines = dict(line.split(": ") for line in image.caption.splitlines())
        shown = {title: set(lines.get(title, "").split(", ")) - {""} for title in ("missing", "too many")}
        assert shown == {"missing": labels - chosen, "too many": chosen - labels}

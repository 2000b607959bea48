"""Few-shot accuracy of a run while it trains: recorded at each evaluation, on the right images."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_files import write_images
from torch import nn

from vitlab.config import FewShotConfig, TrainConfig
from vitlab.data.dataset import Dataset
from vitlab.data.registry import load_dataset
from vitlab.errors import UserError
from vitlab.evaluation.features import features, frozen_preprocessing
from vitlab.evaluation.fewshot import Ridge, sample_shots
from vitlab.preprocessing import Preprocessing
from vitlab.runs import run
from vitlab.runs.pretrain import pretrain
from vitlab.weights import load_model

GOOGLE = frozen_preprocessing(Preprocessing.google(), (8, 8))


def with_fewshot(config: TrainConfig, **settings: Any) -> TrainConfig:
    return dataclasses.replace(config, fewshot=FewShotConfig(**settings))


def evaluator(config: TrainConfig) -> Callable[[nn.Module], dict[str, float]]:
    assert config.fewshot is not None
    return run.create_fewshot_evaluator(config.fewshot, config.data)


@pytest.mark.usefixtures("pretrained")
def test_figures_of_a_run(config: TrainConfig, workdir: Path, tmp_path: Path) -> None:
    """They are recorded at each evaluation, and change nothing else: weights and records are the same."""
    chosen = with_fewshot(config, shots=(1, 5), seeds=2, test_images=40)
    pretrain(chosen, tmp_path / "run", device="cpu", tensorboard=False)
    ours, theirs = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (tmp_path / "run", workdir)
    )
    names = {"fewshot_1shot", "fewshot_5shot"}
    assert [line["step"] for line in ours if names <= line.keys()] == [10, 15]
    assert [{k: v for k, v in line.items() if k not in names} for line in ours] == theirs
    model = load_model(tmp_path / "run")
    for name, tensor in load_model(workdir).state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    train, test = (load_dataset("digits", split, classes=(0, 1, 2)) for split in ("train", "val"))
    expected = expected_accuracy(model, train, test.take(np.arange(40) * len(test) // 40))
    assert ours[-1]["fewshot_5shot"] == pytest.approx(expected)


def expected_accuracy(model: Any, train: Dataset, test: Dataset) -> float:
    """Of 5 shots, over two draws."""
    train_x, test_x = (features(model, part, preprocessing=GOOGLE) for part in (train, test))
    drawn = [sample_shots(train.labels, len(train.classes), 5, seed) for seed in (0, 1)]
    ridges = [Ridge(train_x.x[rows], train.labels[rows], len(train.classes)) for rows in drawn]
    return float(np.mean([ridge.correct(test_x.x, test_x.labels, [1024.0]) for ridge in ridges]))


@pytest.mark.usefixtures("pretrained")
def test_other_data_than_the_runs(config: TrainConfig, workdir: Path, tmp_path: Path) -> None:
    """Other classes, or another data set."""
    model = load_model(workdir)
    digits = load_dataset("digits", "train", classes=(3, 4, 5, 6))
    write_images(tmp_path / "other", digits.take(np.arange(60)))
    folder = {"dataset": f"folder:{tmp_path / 'other'}", "classes": None}
    other: list[dict[str, Any]] = [{"classes": (7, 4, 9)}, {"classes": (7, 4, 9), "dataset": "digits"}, folder]
    for settings in other:
        chosen = with_fewshot(config, shots=(5,), seeds=2, test_split="test", **settings)
        name, classes = settings.get("dataset", "digits"), settings["classes"]
        train, test = (load_dataset(name, split, classes=classes) for split in ("train", "test"))
        assert set(train.classes).isdisjoint({"0", "1", "2"})  # which the model has learned
        expected = expected_accuracy(model, train, test)
        assert evaluator(chosen)(model) == {"fewshot_5shot": pytest.approx(expected)}


def test_images_to_learn_from(config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole training split, even of a run on a part of it, without the images that the run excludes."""
    drawn: list[int] = []
    monkeypatch.setattr(run, "sample_examples", lambda train, *_: drawn.append(len(train)))
    whole = load_dataset("digits", "train")
    listed = tmp_path / "exclude.txt"
    listed.write_text(f"{whole.path(0)}\n")
    data = dataclasses.replace(config.data, name="digits", classes=None, subset_fraction=0.01, exclude=str(listed))
    for settings in ({}, {"dataset": "digits"}):
        evaluator(dataclasses.replace(with_fewshot(config, **settings), data=data))
    assert drawn == [len(whole) - 1, len(whole)]


def test_no_test_on_what_the_run_or_the_few_shots_learn_from(config: TrainConfig) -> None:
    learned = dataclasses.replace(config, data=dataclasses.replace(config.data, train_split="trainval"))
    for dataset in (None, config.data.name):
        with pytest.raises(UserError, match="trainval"):
            evaluator(with_fewshot(learned, test_split="val", dataset=dataset))
        with pytest.raises(UserError, match="trainval and val"):
            evaluator(with_fewshot(config, train_split="trainval", test_split="val", dataset=dataset))

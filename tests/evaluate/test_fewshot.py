"""Few-shot accuracy of a checkpoint from end to end, by itself and during a training."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vitlab.config import FewShotConfig, TrainConfig
from vitlab.data.dataset import Dataset, Labels
from vitlab.data.decode import ImageError
from vitlab.data.registry import load_dataset
from vitlab.evaluate import features as features_module
from vitlab.evaluate import fewshot
from vitlab.evaluate.features import features, frozen_preprocessing
from vitlab.evaluate.fewshot import FewShot, Report, draw, during_training, few_examples, fewshot_checkpoint
from vitlab.evaluate.ridge import L2_GRID, Ridge, choose_l2
from vitlab.pipelines.pretrain import Outcome, pretrain
from vitlab.preprocessing import Preprocessing
from vitlab.weights import load_model

# ------------------------------------------------------------------------------------------------- choosing images

GOOGLE = frozen_preprocessing(Preprocessing.google(), (8, 8))
"""Google's few-shot evaluation: 9 is 8 * 256 / 224."""


def test_draws() -> None:
    labels = np.array([2, 0, 2, 2, 0, 3, 2, 0])
    assert draw(labels, 5, 2, None).tolist() == [1, 4, 0, 2, 5]
    assert draw(labels, 5, 9, None).tolist() == [1, 4, 7, 0, 2, 3, 6, 5]
    for seed in range(5):
        few, many = draw(labels, 5, 1, seed), draw(labels, 5, 3, seed)
        assert [labels[i] for i in few] == [0, 2, 3]
        assert [labels[i] for i in many] == [0, 0, 0, 2, 2, 2, 3]
        assert many[[0, 3, 6]].tolist() == few.tolist()
        rng = np.random.default_rng(seed)
        expected = [rng.permutation(np.flatnonzero(labels == c))[:3] for c in range(5)]
        assert many.tolist() == np.concatenate(expected).tolist()
    assert len({tuple(draw(labels, 5, 1, seed)) for seed in range(20)}) > 3


def test_only_the_drawn_images_are_kept() -> None:
    labels = np.arange(1000) % 10
    train = Dataset("made", "train", tuple("abcdefghij"), labels, np.zeros((1000, 1, 1, 3), np.uint8))
    test = dataclasses.replace(train.take(np.arange(101)), split="test")
    split = few_examples(train, test, (1, 5), range(2), test_images=10)
    assert len(split.train) <= 100
    assert split.draws.keys() == {(1, 0), (1, 1), (5, 0), (5, 1)}
    for (k, seed), places in split.draws.items():
        assert split.train.labels[places].tolist() == labels[draw(labels, 10, k, seed)].tolist()
    assert split.test.labels.tolist() == [(i * 101 // 10) % 10 for i in range(10)]
    assert split.short_classes == {1: 0, 5: 0}
    assert few_examples(train.take(np.arange(13)), test, (2,), [None]).short_classes == {2: 7}


def test_data_that_cannot_be_used() -> None:
    labels = np.arange(6) % 3
    train = Dataset("made", "train", ("a", "b", "c"), labels, np.zeros((6, 1, 1, 3), np.uint8))
    test = dataclasses.replace(train, split="test")
    with pytest.raises(ValueError, match="made has other classes in train than in test"):
        few_examples(train, dataclasses.replace(test, classes=("a", "b", "d")), (1,), [0])
    several = dataclasses.replace(test, label_sets=Labels(labels, np.arange(7)))
    with pytest.raises(ValueError, match="made has several labels a image"):
        few_examples(train, several, (1,), [0])
    with pytest.raises(ValueError, match="made has no images in its split 'test'"):
        few_examples(train, test.take(np.arange(0)), (1,), [0])


# ------------------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vitlab" / "features"


@pytest.mark.usefixtures("pretrained")
def test_checkpoint_on_digits(workdir: Path, cache: Path, tmp_path: Path) -> None:
    report = fewshot_checkpoint(workdir, ["digits"], shots=(1, 5), device="cpu", out=tmp_path / "result.json")
    train, test = load_dataset("digits", "train"), load_dataset("digits", "test")
    options: dict[str, Any] = {"preprocessing": GOOGLE}
    known, asked = (features(load_model(workdir), part, **options) for part in (train, test))
    assert [(row.dataset, row.shots, row.l2) for row in report.rows] == [("digits", 1, 1024.0), ("digits", 5, 1024.0)]
    for row in report.rows:
        for seed, accuracy in enumerate(row.accuracies):
            rows = draw(train.labels, 10, row.shots, seed)
            ridge = Ridge(known.x[rows], train.labels[rows], 10)
            assert accuracy == (ridge.scores(asked.x, 1024.0).argmax(axis=1) == test.labels).mean()
        assert (row.train_images, row.test_images, row.short_classes) == (10 * row.shots, len(test), 0)
        assert row.mean == pytest.approx(np.mean(row.accuracies))
        assert row.deviation == pytest.approx(np.std(row.accuracies, ddof=1))
    assert json.loads((tmp_path / "result.json").read_text()) == json.loads(json.dumps(report.record()))
    assert report.settings["preprocessing"]["resize"] == 9  # 8 * 256 / 224
    assert len(list(cache.glob("*.npz"))) == 2
    assert report.rows[1].mean > 0.15


@pytest.mark.usefixtures("pretrained")
def test_interrupted_and_started_again(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The features are there; nothing is computed twice, and the report is the same."""
    first = fewshot_checkpoint(workdir, ["digits"], device="cpu")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(features_module, "eval_batches", refuse)
    assert fewshot_checkpoint(workdir, ["digits"], device="cpu") == first
    with pytest.raises(AssertionError, match="computed again"):
        fewshot_checkpoint(workdir, ["digits"], device="cpu", test_images=100)


@pytest.mark.usefixtures("pretrained")
def test_original_form_on_two_sets(workdir: Path, tmp_path: Path) -> None:
    """The first images of each class, one l2 for all sets and each number of shots, chosen by rank."""
    digits = load_dataset("digits", "train")
    write_folder(tmp_path / "some", digits.take(np.arange(200)))
    names = ["digits", f"folder:{tmp_path / 'some'}"]
    report = fewshot_checkpoint(workdir, names, shots=(1, 5), original=True, device="cpu")
    assert [(row.shots, row.dataset) for row in report.rows] == [(k, name) for k in (1, 5) for name in names]
    model = load_model(workdir)
    tables: dict[tuple[str, int], np.ndarray] = {}
    for name in names:
        train, test = load_dataset(name, "train"), load_dataset(name, "test")
        known, asked = (features(model, part, preprocessing=GOOGLE) for part in (train, test))
        for k in (1, 5):
            rows = draw(train.labels, 10, k, None)
            ridge = Ridge(known.x[rows], train.labels[rows], 10)
            tables[name, k] = ridge.correct(asked.x, asked.labels, L2_GRID).mean(axis=1)
    for row in report.rows:
        best = choose_l2(np.stack([tables[name, row.shots] for name in names]))[0]
        assert row.l2 == L2_GRID[best]
        assert row.accuracies == (tables[row.dataset, row.shots][best],)
        assert row.deviation is None
    left = fewshot_checkpoint(workdir, names, shots=(5,), original=True, leave_self_out=True, device="cpu")
    for own, other in ((0, 1), (1, 0)):
        assert left.rows[own].l2 == L2_GRID[choose_l2(tables[names[other], 5][None])[0]]


def write_folder(path: Path, dataset: Dataset) -> None:
    from PIL import Image

    for i in range(len(dataset)):
        place = path / dataset.classes[dataset.labels[i]] / f"{i:04d}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(dataset.image(i)).save(place)


@pytest.mark.usefixtures("pretrained")
def test_small_and_broken_folder(workdir: Path, tmp_path: Path) -> None:
    """Fewer images than shots: what is there is used, and the table says so; what cannot be read is counted."""
    digits = load_dataset("digits", "train", classes=(0, 1))
    write_folder(tmp_path / "few", digits.take(np.arange(30)))
    name = f"folder:{tmp_path / 'few'}"
    train = load_dataset(name, "train")
    Path(train.entries[0].file).write_bytes(b"")
    with pytest.raises(ImageError, match="zero bytes"):
        fewshot_checkpoint(workdir, [name], shots=(5, 25), device="cpu")
    report = fewshot_checkpoint(workdir, [name], shots=(5, 25), on_error="skip", device="cpu")
    assert [row.short_classes for row in report.rows] == [0, 2]
    assert [row.skipped for row in report.rows] == [1, 1]
    assert "(2 classes have fewer images than shots; 1 images could not be read)" in report.as_table()


def test_table_of_known_numbers() -> None:
    rows = (
        FewShot("digits", 5, 1024.0, (0.5, 0.7), 50, 100, 0, 0),
        FewShot("folder:x", 10, 2.0**-10, (0.25,), 90, 100, 0, 3),
    )
    assert Report("m", {}, rows).as_table().splitlines() == [
        "data set  shots         l2  accuracy",
        "digits        5       1024  60.00% ± 14.14%",
        "folder:x     10  0.000976562  25.00%  (3 classes have fewer images than shots)",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shots": ()}, r"shots \(\), seeds 3"),
        ({"shots": (0, 5)}, r"shots \(0, 5\)"),
        ({"seeds": 0}, r"seeds 0"),
        ({"l2": ()}, r"l2 \(\)"),
        ({"l2": (0.0,)}, r"l2 \(0\.0,\): .*all positive"),
        ({"l2": (float("nan"),)}, r"l2 \(nan,\)"),
        ({"datasets": []}, r"data sets \(\): name at least one"),
        ({"datasets": ["digits", "digits"]}, r"each of them once"),
        ({"leave_self_out": True}, r"1 l2 and 1 data sets were given"),
        ({"leave_self_out": True, "original": True}, r"30 l2 and 1 data sets were given"),
        ({"original": True, "seeds": 2}, r"leave out l2 and seeds"),
        ({"original": True, "l2": (1.0,)}, r"leave out l2 and seeds"),
        ({"datasets": ["digit"]}, r"unknown data set 'digit'"),
        ({"device": "quantum"}, r"device 'quantum'"),
    ],
)
def test_settings_that_make_no_protocol(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fewshot_checkpoint("nowhere", **{"datasets": ["digits"], "device": "cpu"} | options)


# ---------------------------------------------------------------------------------------------------- while training


def with_fewshot(config: TrainConfig, **settings: Any) -> TrainConfig:
    return dataclasses.replace(config, fewshot=FewShotConfig(**settings))


def test_figures_of_a_run(config: TrainConfig, pretrained: Outcome, workdir: Path, tmp_path: Path) -> None:
    """They stand beside the others at each evaluation, and change nothing else: weights and records are the same."""
    told = with_fewshot(config, shots=(1, 5), seeds=2, test_images=40)
    outcome = pretrain(told, tmp_path / "run", device="cpu", tensorboard=False)
    ours, theirs = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (tmp_path / "run", workdir)
    )
    names = {"fewshot_1shot", "fewshot_5shot"}
    assert [line["step"] for line in ours if names <= line.keys()] == [10, 15]
    assert [{k: v for k, v in line.items() if k not in names} for line in ours] == theirs
    for name, tensor in pretrained.model.state_dict().items():
        assert torch.equal(outcome.model.state_dict()[name], tensor)
    train, test = (load_dataset("digits", split, classes=(0, 1, 2)) for split in ("train", "val"))
    few = test.take(np.arange(40) * len(test) // 40)
    known, asked = (features(outcome.model, part, preprocessing=GOOGLE) for part in (train, few))
    expected = []
    for seed in (0, 1):
        rows = draw(train.labels, 3, 5, seed)
        expected.append(Ridge(known.x[rows], train.labels[rows], 3).correct(asked.x, asked.labels, [1024.0]).mean())
    assert ours[-1]["fewshot_5shot"] == pytest.approx(np.mean(expected))


def test_other_data_set_than_the_runs(config: TrainConfig, pretrained: Outcome, tmp_path: Path) -> None:
    digits = load_dataset("digits", "train", classes=(3, 4, 5, 6))
    write_folder(tmp_path / "other", digits.take(np.arange(60)))
    told = with_fewshot(config, dataset=f"folder:{tmp_path / 'other'}", shots=(2,), test_split="test")
    figures = during_training(told, torch.device("cpu"))(pretrained.model)
    assert figures.keys() == {"fewshot_2shot"}
    assert 0 <= figures["fewshot_2shot"] <= 1
    assert during_training(config, torch.device("cpu"))(pretrained.model) == {}


@pytest.mark.parametrize("own", [{}, {"dataset": "digits"}])
def test_other_classes_than_the_runs(config: TrainConfig, pretrained: Outcome, own: dict[str, Any]) -> None:
    told = with_fewshot(config, classes=(7, 4, 9), shots=(5,), seeds=2, test_split="test", **own)
    figures = during_training(told, torch.device("cpu"))(pretrained.model)
    train, test = (load_dataset("digits", split, classes=(7, 4, 9)) for split in ("train", "test"))
    assert set(train.classes).isdisjoint({"0", "1", "2"})  # which the model has learned
    known, asked = (features(pretrained.model, part, preprocessing=GOOGLE) for part in (train, test))
    expected = []
    for seed in (0, 1):
        rows = draw(train.labels, 3, 5, seed)
        expected.append(Ridge(known.x[rows], train.labels[rows], 3).correct(asked.x, asked.labels, [1024.0]).mean())
    assert figures == {"fewshot_5shot": pytest.approx(np.mean(expected))}


def test_classes_that_the_data_set_lacks(config: TrainConfig) -> None:
    with pytest.raises(ValueError, match=r"classes must be different numbers from 0 to 9 of digits, not \(4, 10\)"):
        during_training(with_fewshot(config, classes=(4, 10)), torch.device("cpu"))


def test_few_examples_are_the_same_for_every_part(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of 1 % has one or two images of a class, and there are 25 to draw."""
    drawn: list[int] = []
    monkeypatch.setattr(fewshot, "few_examples", lambda train, *_: drawn.append(len(train)))
    for part in (None, 0.01):
        data = dataclasses.replace(config.data, part=part)
        during_training(dataclasses.replace(with_fewshot(config), data=data), torch.device("cpu"))
    assert drawn[0] == drawn[1] == len(load_dataset("digits", "train", classes=(0, 1, 2)))


def test_listed_images_are_not_learned_from(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the run's own training split, that is; another data set has names of its own."""
    drawn: list[int] = []
    monkeypatch.setattr(fewshot, "few_examples", lambda train, *_: drawn.append(len(train)))
    whole = load_dataset("digits", "train")
    listed = tmp_path / "exclude.txt"
    listed.write_text(f"{whole.path(0)}\n")
    data = dataclasses.replace(config.data, name="digits", classes=None, exclude=str(listed))
    for own in ({}, {"dataset": "digits"}):
        during_training(dataclasses.replace(with_fewshot(config, **own), data=data), torch.device("cpu"))
    assert drawn == [len(whole) - 1, len(whole)]


@pytest.mark.parametrize(("learned", "tested"), [("trainval", "val"), ("train", "train"), ("train", "trainval")])
def test_no_test_on_what_the_run_learns_from(config: TrainConfig, learned: str, tested: str) -> None:
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, train_split=learned))
    with pytest.raises(ValueError, match=f"test would be on {tested}, which is part of .* learns from \\({learned}\\)"):
        during_training(with_fewshot(config, test_split=tested), torch.device("cpu"))


def test_wrong_data_set_is_told_before_the_run(config: TrainConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown data set 'digit'"):
        pretrain(with_fewshot(config, dataset="digit"), tmp_path / "run", device="cpu", tensorboard=False)
    assert not (tmp_path / "run").exists()

"""What is held out: the split of the sweep, the val split of the user, and groups."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from staged_job import tune

from vitlab.config import FinetuneConfig
from vitlab.data.dataset import Dataset
from vitlab.data.registry import load_dataset
from vitlab.data.splits import stratified_split
from vitlab.evaluation.accuracy import evaluate_checkpoint
from vitlab.finetuning import protocol, run_job
from vitlab.finetuning import sweep as sweep_module
from vitlab.finetuning.held_out import hold_out, hold_out_indices
from vitlab.finetuning.job import FinetuneJob
from vitlab.runs import run as run_module
from vitlab.runs.run import RunContext, evaluate_split
from vitlab.runs.splits import load_splits
from vitlab.weights import load_metadata


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


def digits_in_folders(folder: Path, sizes: dict[str, int]) -> str:
    """Digits of two classes as files; "" is no split."""
    source = load_dataset("digits", "train", classes=(3, 4))
    for label in range(2):
        members, start = np.flatnonzero(source.labels == label), 0
        for split, count in sizes.items():
            (folder / split / "ab"[label]).mkdir(parents=True)
            for i in members[start : start + count]:
                Image.fromarray(source.image(int(i))).save(folder / split / "ab"[label] / f"{start // 4}_{i}.png")
                start += 1
    return f"folder:{folder}"


@pytest.fixture
def own(staged: FinetuneConfig, tmp_path: Path) -> FinetuneConfig:
    """One rate, on images of the user's own with train, val and test."""
    name = digits_in_folders(tmp_path / "data", {"train": 20, "val": 8, "test": 8})
    data = dataclasses.replace(staged.data, name=name, classes=None)
    settings: dict[str, Any] = {"steps": 4, "sweep_steps": None}
    return dataclasses.replace(staged, data=data, learning_rates=(3e-3,), **settings)


@pytest.mark.usefixtures("pretrained")
@pytest.mark.parametrize("refit", [True, False])
def test_choices_are_made_on_the_val_of_the_user(
    workdir: Path, own: FinetuneConfig, refit: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep and the head that it is compared with see train alone; the final run takes val too, with `refit`."""
    monkeypatch.setattr(run_job, "_helps", lambda *_: True)
    scored: dict[int, set[str]] = {}
    log: list[str] = []

    def spy(*arguments: Any) -> Any:
        dataset = arguments[2]
        scored.setdefault(len(dataset), set()).update(entry.path for entry in dataset.entries)
        return evaluate_split(*arguments)

    for module in (run_module, sweep_module, run_job):
        monkeypatch.setattr(module, "evaluate_split", spy)
    done = tune(
        workdir, dataclasses.replace(own, refit=refit), tmp_path / "out", log=log.append, open_settings={"held_out"}
    )
    split = {len(dataset.entries): f"/{dataset.split}/" for dataset in (load_dataset(own.data.name, "val"),)}
    (rate,) = done.result["sweep"]
    assert rate["images"] == done.result["linear"]["held_out"]["images"] == 16
    assert all("/val/" in path or "/test/" in path for path in scored[16])
    assert split == {16: "/val/"}
    assert done.result["linear"]["chosen_on"] == "val"
    assert done.config.held_out == pytest.approx(16 / 56)
    settings = {
        name: json.loads((tmp_path / "out" / name / "config.json").read_bytes()) for name in ("linear", "run-0")
    }
    assert settings["run-0"]["examples"] == (56 if refit else 40)
    (swept,) = (tmp_path / "out" / "sweep").glob("*/config.json")
    assert json.loads(swept.read_bytes())["examples"] == 40
    assert any("choices are made on 16 of the 16 images of val" in line for line in log)
    assert any("least-squares head: val accuracy" in line for line in log)


def test_what_is_held_out_of_given_splits(own: FinetuneConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly val, or a part of a large one; the rest of val is not trained on either."""
    train = load_dataset(own.data.name, "trainval")
    rest, held = hold_out_indices(train, 16 / 56, 0)
    assert {Path(train.path(int(i))).parts[-3] for i in rest} == {"train"}
    assert {Path(train.path(int(i))).parts[-3] for i in held} == {"val"}
    assert (len(rest), len(held)) == (40, 16)
    rest, few = hold_out_indices(train, 6 / 56, 0)
    assert (len(rest), len(few)) == (40, 6)
    assert set(few) < set(held)
    random = load_dataset(own.data.name, "train")
    assert len(hold_out_indices(random, 0.25, 0)[1]) == 10
    monkeypatch.setattr(protocol, "MAX_HELD_OUT", 6)
    splits = load_splits(own.data)
    job = FinetuneJob("", "", splits, own, RunContext(torch.device("cpu")), print, frozenset({"held_out"}))
    job = protocol._with_held_out(job)
    assert job.config.held_out == pytest.approx(6 / 56)
    assert job.reasons == (("held_out", job.config.held_out, "the user's val split"),)


@pytest.mark.usefixtures("pretrained")
def test_a_fraction_to_hold_out_beside_a_val_is_an_error(workdir: Path, own: FinetuneConfig, tmp_path: Path) -> None:
    given = dataclasses.replace(own, held_out=0.3)
    with pytest.raises(ValueError, match=r"held_out=0.3 has no effect: .* val split .*--data.train-split train"):
        tune(workdir, given, tmp_path / "out")
    alone = dataclasses.replace(given, data=dataclasses.replace(given.data, train_split="train"))
    job = FinetuneJob("", "", load_splits(alone.data), alone, RunContext(torch.device("cpu")), print)
    assert protocol._with_held_out(job).config.held_out == 0.3


@pytest.mark.usefixtures("pretrained")
def test_groups_are_whole_in_every_part_of_a_job(workdir: Path, own: FinetuneConfig, tmp_path: Path) -> None:
    """In the test, in the held-out part and in the head's own choices; a later evaluation has the same test."""
    name = digits_in_folders(tmp_path / "one", {"": 40})
    data = dataclasses.replace(own.data, name=name, group_by=r"[ab]/\d+")
    done = tune(workdir, dataclasses.replace(own, data=data, held_out=0.25), tmp_path / "out")
    splits = load_splits(data)
    assert splits.train.groups is not None
    assert splits.test.groups is not None
    assert not set(splits.train.groups) & set(splits.test.groups)
    rest, held = hold_out_indices(splits.train, 0.25, 0)
    assert len(held)
    assert not set(splits.train.groups[rest]) & set(splits.train.groups[held])
    assert done.result["linear"]["chosen_on"] == "leave-one-group-out"
    again = evaluate_checkpoint(tmp_path / "out")
    assert (len(again.labels), again.accuracy) == (len(splits.test), done.result["test"]["accuracy"])
    assert load_metadata(tmp_path / "out")["read"] == {"group_by": r"[ab]/\d+"}

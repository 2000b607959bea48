"""A run from its config to its result, and what it leaves behind."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from vitlab.config import TrainConfig
from vitlab.data.dataset import Dataset
from vitlab.data.decode import ImageError
from vitlab.data.registry import load_dataset
from vitlab.errors import UserError
from vitlab.evaluate.accuracy import evaluate
from vitlab.pipelines import pretrain as run
from vitlab.pipelines.pretrain import Outcome, Splits, drop_unreadable, pretrain, unreadable_record
from vitlab.settings import to_dict
from vitlab.train.distributed import World, init_distributed
from vitlab.train.workdir import Workdir
from vitlab.weights import load_model


def again(config: TrainConfig, folder: Path) -> Outcome:
    return pretrain(config, folder, device="cpu", tensorboard=False)


def same_weights(one: nn.Module, two: nn.Module) -> bool:
    a, b = one.state_dict(), two.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_what_it_leaves(config: TrainConfig, pretrained: Outcome, workdir: Path) -> None:
    assert {path.name for path in workdir.iterdir()} >= {
        "config.json", "runtime.json", "metrics.jsonl", "speed.jsonl", "result.json", "checkpoints", "model",
    }  # fmt: skip
    assert not (workdir / "tensorboard").exists()
    settings = json.loads((workdir / "config.json").read_text())
    examples = len(pretrained.splits.train)
    expected = {"command": "pretrain", "start": None, "examples": examples, **to_dict(config)}
    assert settings == json.loads(json.dumps(expected))
    assert json.loads((workdir / "result.json").read_text()) == pretrained.result
    assert pretrained.result == {"test": pretrained.test.record()}
    seconds = json.loads((workdir / "speed.jsonl").read_text().splitlines()[-1])
    assert seconds["run_seconds"] > 0


def test_the_test_is_of_the_whole_test_split(pretrained: Outcome) -> None:
    dataset = load_dataset("digits", "test", classes=(0, 1, 2))
    assert pretrained.test.record() == evaluate(pretrained.model, dataset, (8, 8)).record()
    assert len(pretrained.test.labels) == len(dataset)
    assert pretrained.test.accuracy > 0.5


def test_records_while_training_are_of_the_other_split(pretrained: Outcome, workdir: Path) -> None:
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    evaluations = {line["step"]: line for line in lines if "val_accuracy" in line}
    assert list(evaluations) == [10, 15]
    dataset = load_dataset("digits", "val", classes=(0, 1, 2))
    expected = evaluate(pretrained.model, dataset, (8, 8)).figures()
    assert evaluations[15] == {"step": 15} | {f"val_{name}": value for name, value in expected.items()}


def test_finished_run_is_only_tested_again(
    config: TrainConfig, pretrained: Outcome, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "train", None)
    before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file() and path.name != ".lock"}
    outcome = again(config, workdir)
    assert outcome.result == pretrained.result
    assert same_weights(outcome.model, pretrained.model)
    assert before == {path: path.read_bytes() for path in before}


FILES = (
    "config.json", "runtime.json", "metrics.jsonl", "speed.jsonl", "result.json",
    "predictions.csv",
    "model/config.json", "model/model.safetensors", "checkpoints/step-000000015/state.json",
    "checkpoints/step-000000015/state.safetensors", "SHA256SUMS",
)  # fmt: skip
"""All that a finished run leaves, but for its lock."""


def contents(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_noticed_and_repaired(
    name: str, config: TrainConfig, pretrained: Outcome, workdir: Path, tmp_path: Path, caplog: Any
) -> None:
    """By the same command, without training again. What cannot be made again stays, and is noticed again."""
    folder = tmp_path / "run"
    shutil.copytree(workdir, folder)
    before = contents(folder)
    assert before.keys() == set(FILES)
    corrupt = bytearray(before[name])
    corrupt[len(corrupt) // 2] ^= 1
    (folder / name).write_bytes(corrupt)
    assert again(config, folder).result == pretrained.result
    assert [record for record in caplog.records if name in record.getMessage()]
    repaired = name in ("config.json", "result.json", "predictions.csv") or name.startswith("model/")
    assert contents(folder) == (before if repaired else before | {name: bytes(corrupt)})
    caplog.clear()
    assert again(config, folder).result == pretrained.result
    assert bool(caplog.records) != repaired


@pytest.mark.usefixtures("pretrained")
@pytest.mark.parametrize("name", ["result.json", "predictions.csv", "model/model.safetensors"])
def test_a_cut_file_is_made_again(name: str, config: TrainConfig, workdir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(workdir, folder)
    before = contents(folder)
    (folder / name).write_bytes(before[name][: len(before[name]) // 2])
    again(config, folder)
    assert contents(folder) == before


@pytest.mark.usefixtures("pretrained")
def test_a_damaged_model_without_a_checkpoint(config: TrainConfig, workdir: Path, tmp_path: Path) -> None:
    """Nothing is trained anew unasked."""
    folder = tmp_path / "run"
    shutil.copytree(workdir, folder)
    shutil.rmtree(folder / "checkpoints")  # which alone is no damage
    again(config, folder)
    (folder / "model" / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"model\.safetensors of the finished run .* no checkpoint is left"):
        again(config, folder)


def test_stopped_before_its_result_was_written(
    config: TrainConfig, pretrained: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CrashError(Exception):
        pass

    def crash(*_: object) -> None:
        raise CrashError

    with monkeypatch.context() as patch:
        patch.setattr(Workdir, "write_result", crash)
        with pytest.raises(CrashError):
            again(config, tmp_path)
    assert (tmp_path / "model").is_dir()
    assert not (tmp_path / "result.json").exists()
    assert again(config, tmp_path).result == pretrained.result
    assert (tmp_path / "result.json").is_file()


def test_seed_decides_the_start(
    config: TrainConfig, pretrained: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1234)  # the default generator has no say
    assert same_weights(again(config, tmp_path / "same").model, pretrained.model)
    monkeypatch.setattr(run, "train", lambda config, folder, model, **options: model)  # leaves it as it began
    starts = [
        again(dataclasses.replace(config, seed=seed), tmp_path / f"{i}").model for i, seed in enumerate((0, 0, 1))
    ]
    assert same_weights(starts[0], starts[1])
    assert not same_weights(starts[0], starts[2])


def test_model_is_fitted_to_the_classes(config: TrainConfig, pretrained: Outcome, tmp_path: Path) -> None:
    assert pretrained.config == config
    received: list[TrainConfig] = []
    every = dataclasses.replace(config, data=dataclasses.replace(config.data, classes=None), steps=1)
    outcome = pretrain(every, tmp_path, device="cpu", tensorboard=False, on_settings=received.append)
    expected = dataclasses.replace(every, model=dataclasses.replace(config.model, num_classes=10))
    assert received == [outcome.config] == [expected]
    assert load_model(tmp_path).config == expected.model


def images(folder: Path, size: int, *splits: str) -> Splits:
    """A folder's splits of two classes; in each, one image of ten is broken."""
    for split in splits:
        for name in ("ants", "bees"):
            (folder / split / name).mkdir(parents=True)
            for number in range(5):
                Image.new("RGB", (size, size), (40 * number,) * 3).save(folder / split / name / f"{number}.png")
        (folder / split / "bees" / "2.png").write_bytes(b"")
    datasets = [load_dataset(f"folder:{folder}", split, on_error="skip") for split in splits]
    return Splits(datasets[0], datasets[-2], datasets[-1])


@pytest.mark.parametrize("size", [8, 100])
def test_readable_leaves_out_what_cannot_be_read(size: int, tmp_path: Path) -> None:
    """Also of images so small that they are held in memory, where they were read before."""
    given = images(tmp_path, size, "train", "val", "test")
    assert (given.train.pixels is None) == (size == 100)
    readable = drop_unreadable(given)
    for before, after in ((given.train, readable.train), (given.val, readable.val), (given.test, readable.test)):
        assert len(before) == 10
        assert after.labels.tolist() == [0] * 5 + [1] * 4
        assert all(np.array_equal(after.image(i), before.image(i + (i > 6))) for i in range(9))
    assert unreadable_record(given) == {}
    assert unreadable_record(readable) == {
        "unreadable": [
            {"path": str(tmp_path / split / "bees" / "2.png"), "reason": "the file is empty (zero bytes)"}
            for split in ("test", "train", "val")
        ]
    }


def test_the_first_reads_for_all(
    tmp_path: Path, in_ranks: Callable[[int, Callable[[], Any]], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what fails in one process alone, as a file server may: all have the same images."""
    given = images(tmp_path, 100, "train", "val", "test")
    image = type(given.test).image

    def failing(self: Any, index: int) -> Any:
        assert os.environ["RANK"] == "0"
        if index == 3:
            raise ImageError("3.png", "the server is gone for a moment")
        return image(self, index)

    monkeypatch.setattr(type(given.test), "image", failing)

    def job() -> tuple[list[int], list[str]]:
        with init_distributed() as world:
            readable = drop_unreadable(given, world)
            return [len(each) for each in (readable.train, readable.val, readable.test)], [
                str(e) for e in readable.unreadable or ()
            ]

    first, second = in_ranks(2, job)
    assert first == second
    assert first[0] == [8, 8, 8]
    assert "cannot read the image 3.png: the server is gone for a moment" in first[1]


def test_a_batch_that_the_processes_cannot_share(config: TrainConfig, tmp_path: Path) -> None:
    """Refused before the folder holds its settings, so that a better batch may be given."""
    with pytest.raises(ValueError, match=r"batch_size=.* is the global batch of 7 processes"):
        pretrain(dataclasses.replace(config, batch_size=32), tmp_path / "run", device="cpu", world=World(0, 7))
    assert not (tmp_path / "run").exists()


def test_part_is_of_the_training_split_alone(config: TrainConfig, tmp_path: Path) -> None:
    """The same images at every start, and others for another seed; what it is evaluated on stays whole."""
    plain = run.load_splits(config.data)
    data = dataclasses.replace(config.data, part=0.1)
    images = run.load_splits(data)
    expected = load_dataset("digits", "train", classes=(0, 1, 2), part=0.1)
    assert ids(images.train) == ids(expected)
    assert len(images.train) == sum(round(0.1 * count) for count in np.bincount(plain.train.labels).tolist())
    assert (len(images.val), len(images.test)) == (len(plain.val), len(plain.test))
    same_split = run.load_splits(dataclasses.replace(data, eval_split=data.train_split))
    assert (len(same_split.train), len(same_split.val)) == (len(images.train), len(plain.train))
    assert ids(run.load_splits(dataclasses.replace(data, part_seed=1)).train) != ids(images.train)
    listed = tmp_path / "exclude.txt"
    listed.write_text(f"{images.train.path(3)}\n{next(i for i in ids(plain.train) if i not in ids(expected))}\n")
    both = run.load_splits(dataclasses.replace(data, exclude=str(listed)))
    assert ids(both.train) == [name for name in ids(images.train) if name != images.train.path(3)]


def ids(dataset: Dataset) -> list[str]:
    return [dataset.path(i) for i in range(len(dataset))]


def test_run_on_a_part_continues_and_is_no_other_run(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder tells the part; the epochs are counted in it; stopped in the middle it ends the same."""
    data = dataclasses.replace(config.data, part=0.2)
    chosen = dataclasses.replace(config, data=data, checkpoint_every=5)
    whole = again(chosen, tmp_path / "whole")
    settings = json.loads((tmp_path / "whole" / "config.json").read_text())
    examples = len(load_dataset("digits", "train", classes=(0, 1, 2), part=0.2))
    assert settings["examples"] == examples < len(load_dataset("digits", "train", classes=(0, 1, 2))) / 4
    assert (settings["data"]["part"], settings["data"]["part_seed"]) == (0.2, None)
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert next(line for line in lines if "epoch" in line)["epoch"] == pytest.approx(5 * 16 / examples)

    class CrashError(Exception):
        pass

    def crash(*_: object) -> None:
        raise CrashError

    with monkeypatch.context() as patch:
        patch.setattr(run, "evaluate_split", crash)  # at step 10, before its checkpoint
        with pytest.raises(CrashError):
            again(chosen, tmp_path / "stopped")
    assert same_weights(again(chosen, tmp_path / "stopped").model, whole.model)
    for change in ({"part_seed": 1}, {"part": 0.3}, {"part": None}):
        other = dataclasses.replace(chosen, data=dataclasses.replace(data, **change))
        with pytest.raises(ValueError, match=r"other settings:\n(.*\n)?  data.part"):
            again(other, tmp_path / "whole")


def test_listed_images_are_left_out_of_training_alone(config: TrainConfig, tmp_path: Path) -> None:
    """Their number and the list's content are settings of the run; where the list lies is not enough."""
    plain = run.load_splits(config.data)
    listed = tmp_path / "exclude.txt"
    listed.write_text(f"{plain.train.path(0)}\n{plain.train.path(5)}\n")
    data = dataclasses.replace(config.data, exclude=str(listed))
    images = run.load_splits(data)
    assert len(images.train) == len(plain.train) - 2
    assert images.train.path(0) == plain.train.path(1)
    assert (len(images.val), len(images.test)) == (len(plain.val), len(plain.test))
    same_split = run.load_splits(dataclasses.replace(data, eval_split=data.train_split))
    assert (len(same_split.train), len(same_split.val)) == (len(plain.train) - 2, len(plain.train))
    chosen = dataclasses.replace(config, data=data)
    settings = run.run_settings("pretrain", None, images.train, chosen)
    assert (settings["examples"], settings["excluded"]["listed"]) == (len(plain.train) - 2, 2)
    listed.write_text(f"{plain.train.path(0)}\n{plain.train.path(6)}\n")
    assert run.run_settings("pretrain", None, images.train, chosen) != settings
    assert "excluded" not in run.run_settings("pretrain", None, plain.train, config)

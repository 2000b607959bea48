"""Two small imitations of VTAB's tasks from end to end; the means; what is missing."""

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitlab.checksums import write_sums
from vitlab.config import DataConfig, OptimConfig, TrainConfig
from vitlab.data.vtab.tasks import LISTS, TASKS
from vitlab.errors import UserError
from vitlab.runs import vtab as module
from vitlab.runs.run import RunResult
from vitlab.runs.vtab import NO_CROP, NO_FLIP, label_preserving, vtab
from vitlab.train.distributed import RankError, init_distributed
from vitlab.train.loop import StoppedError
from vitlab.train.workdir import METRICS, Workdir

PAIR = ("patch_camelyon", "kitti_distance")
TEST_IMAGES = {"patch_camelyon": 30, "kitti_distance": 50}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks in lists: the class of an image is its brightness; the second's val images have wrong labels."""
    root = tmp_path_factory.mktemp("vtab")
    for name, count in TEST_IMAGES.items():
        folder, classes = root / TASKS[name].folder, TASKS[name].classes
        (folder / "images").mkdir(parents=True)
        for label in range(classes):
            gray = np.full((8, 8, 3), 250 * label // (classes - 1), np.uint8)
            Image.fromarray(gray).save(folder / "images" / f"{label}.png")
        for split, n in {"train": 800, "val": 200, "trainval": 1000, "test": count}.items():
            wrong = split == "val" and name == "kitti_distance"
            lines = [f"images/{i % classes}.png {(i + wrong) % classes}\n" for i in range(n)]
            (folder / LISTS[split]).write_text("".join(lines))
    return root


@pytest.fixture(scope="module")
def setting(config: TrainConfig) -> TrainConfig:
    return TrainConfig(
        model=config.model,
        data=DataConfig(name="vtab:TASK", crop="none", flip=False),
        optim=OptimConfig(name="sgd", lr=0.1, clip_norm=1.0),
        steps=40,
        batch_size=16,
        log_every=10,
        precision="float32",
    )


def score(checkpoint: Path, setting: TrainConfig, root: Path, out: Path, **options: Any) -> dict[str, Any]:
    return vtab(checkpoint, setting, root, out, device="cpu", tensorboard=False, download=False, **options)


@dataclasses.dataclass
class Finished:
    """The folder and the result of both tasks, and what `log` received."""

    folder: Path
    result: dict[str, Any]
    reported: list[str]


@pytest.fixture(scope="module")
def finished(
    setting: TrainConfig, pretrained: RunResult, workdir: Path, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Finished:
    folder, reported = tmp_path_factory.mktemp("finished") / "out", []
    result = score(workdir, setting, root, folder, tasks=PAIR, log=reported.append)
    return Finished(folder, result, reported)


@pytest.fixture
def out(finished: Finished, tmp_path: Path) -> Path:
    """A copy of the finished folder."""
    return shutil.copytree(finished.folder, tmp_path / "out")


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tasks that are trained, in order."""
    names: list[str] = []
    training_run = module.TrainingRun

    def watched(*args: Any, **options: Any) -> Any:
        names.append(options["description"])
        return training_run(*args, **options)

    monkeypatch.setattr(module, "TrainingRun", watched)
    return names


def test_two_tasks(finished: Finished) -> None:
    tasks = finished.result["tasks"]
    shown = {name: f"{name}: {tasks[name]['accuracy']:.2%} of {TEST_IMAGES[name]:,}" for name in PAIR}
    assert finished.reported == list(shown.values())
    for name, row in tasks.items():
        settings = json.loads((finished.folder / name / "config.json").read_text())
        test = json.loads((finished.folder / name / "result.json").read_text())["test"]
        assert (settings["data"]["name"], settings["examples"]) == (f"vtab:{name}", 1000)
        assert settings["model"]["num_classes"] == TASKS[name].classes
        expected = {"task": TASKS[name].title, "group": TASKS[name].group, "images": TEST_IMAGES[name], "skipped": 0}
        assert row == expected | {"accuracy": test["accuracy"]}
        assert not (finished.folder / name / "checkpoints").exists()
    result = finished.result
    assert result["tasks"]["patch_camelyon"]["accuracy"] == 1
    assert (result["mean"], set(result["groups"].values()), result["scored_on"]) == (None, {None}, "test")
    assert len(result["missing"]) == 17
    assert json.loads((finished.folder / "result.json").read_text()) == result


def test_an_interrupted_call_is_resumed(
    setting: TrainConfig, workdir: Path, root: Path, out: Path, finished: Finished, trained: Any, monkeypatch: Any
) -> None:
    shutil.rmtree(out / PAIR[1])
    (out / "result.json").unlink()
    log = Workdir.log

    def stop(self: Workdir, name: str, step: int, values: Any) -> None:
        log(self, name, step, values)
        if (self.path.name, name, step) == (PAIR[1], METRICS, 30):
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Workdir, "log", stop)
        with pytest.raises(StoppedError):
            score(workdir, setting, root, out, tasks=PAIR)
    assert not (out / "result.json").exists()
    assert score(workdir, setting, root, out, tasks=PAIR) == finished.result
    assert trained == [PAIR[1]] * 2
    metrics = [(folder / PAIR[1] / "metrics.jsonl").read_bytes() for folder in (out, finished.folder)]
    assert metrics[0] == metrics[1]


def test_finished_tasks_stay_in_the_result(
    setting: TrainConfig, workdir: Path, root: Path, tmp_path: Path, out: Path, finished: Finished, trained: list[str]
) -> None:
    """Also where others are requested, or all that are available, and without their data."""
    (out / PAIR[0] / "checkpoints").mkdir()  # as a kill before they were removed leaves it
    for tasks, data in ((PAIR, tmp_path / "without data"), (PAIR[1:], root), ("available", root)):
        result = score(workdir, setting, data, out, tasks=tasks)
        assert result["tasks"] == finished.result["tasks"]
        assert len(result["missing"]) == 17
    assert trained == []
    assert "dmlab" in result["missing"]["dmlab"]
    assert str(root) in result["missing"]["svhn"]
    assert not (out / PAIR[0] / "checkpoints").exists()


def test_data_that_one_rank_lacks(
    setting: TrainConfig, pretrained: RunResult, workdir: Path, root: Path, tmp_path: Path, in_ranks: Any
) -> None:
    """Rank 0 decides what is available: all ranks train the same tasks, or all end."""

    def job() -> None:
        with init_distributed() as world:
            score(workdir, setting, root if world.is_rank_0 else tmp_path / "nothing", tmp_path / "out", world=world)

    first, second = in_ranks(2, job)
    assert (type(first), type(second)) == (RankError, UserError)
    assert f"looked in {tmp_path / 'nothing'}" in str(second)


def test_selection_does_not_use_the_test_split(
    setting: TrainConfig, pretrained: RunResult, workdir: Path, root: Path, tmp_path: Path
) -> None:
    """And crops that would change a label are left out; the size before a crop follows the image size."""
    (task,) = PAIR[1:]
    result = score(workdir, setting, root, tmp_path / "select", tasks=[task], select=True)
    assert (result["scored_on"], result["tasks"][task]["images"]) == ("val200", 200)
    assert result["tasks"][task]["accuracy"] < 0.5  # its val labels are wrong, and were not learned
    with pytest.raises(UserError, match="select: True -> False"):
        score(workdir, setting, root, tmp_path / "select", tasks=[task])
    data = DataConfig(crop="random", crop_resize=10, flip=True)
    short = dataclasses.replace(setting, steps=1, data=data)
    size = 2 * setting.model.image_hw[0]
    score(workdir, short, root, tmp_path / "crop", tasks=PAIR, select=True, image_size=size)
    settings = [json.loads((tmp_path / "crop" / name / "config.json").read_text()) for name in PAIR]
    splits = {(row["examples"], row["data"]["train_split"], row["data"]["eval_split"]) for row in settings}
    assert splits == {(800, "train", "val")}
    crops = [(row["data"]["crop"], row["data"]["crop_resize"], row["data"]["flip"]) for row in settings]
    assert crops == [("random", 20, True), ("none", None, True)]


def test_augmentation_that_would_change_labels(setting: TrainConfig) -> None:
    data = DataConfig(crop="random", crop_resize=10, flip=True)
    changed = {name: label_preserving(name, data) for name in TASKS}
    assert {name for name, task in changed.items() if task.crop == "none"} == set(NO_CROP)
    assert {name for name, task in changed.items() if not task.flip} == set(NO_FLIP)
    assert not any(label_preserving(name, dataclasses.replace(data, flip=False)).flip for name in TASKS)
    for cropped in (DataConfig(min_area=0.3), DataConfig(crop="pad", pad=2)):
        dataclasses.replace(setting, data=label_preserving(NO_CROP[0], cropped))  # no option without effect remains


def test_invalid_settings_and_missing_tasks(
    setting: TrainConfig, pretrained: RunResult, workdir: Path, root: Path, tmp_path: Path, trained: list[str]
) -> None:
    changes: tuple[tuple[dict[str, Any], Any, str], ...] = (
        ({"data": DataConfig(subset_fraction=0.5)}, PAIR, r"subset_fraction is 0\.5"),
        ({"data": DataConfig(range=(0, 9))}, PAIR, "range"),
        ({"model": dataclasses.replace(setting.model, image_size=64)}, PAIR, "64 pixels"),
        ({}, (PAIR[0], "dmlab", "smallnorb_azimuth"), "(?s)dmlab.*smallnorb"),
        ({}, ("camelyon",), "the nearest: patch_camelyon"),
    )
    for settings, tasks, message in changes:
        with pytest.raises(UserError, match=message):
            score(workdir, dataclasses.replace(setting, **settings), root, tmp_path, tasks=tasks)
        assert not settings or not any(tmp_path.iterdir())
    assert trained == []
    result = tmp_path / "result.json"  # a corrupt one counts as none
    result.write_text(json.dumps({"test": {"accuracy": 0.5, "images": 4, "skipped": 0, "loss": 1.0}}))
    write_sums(tmp_path, ["result.json"])
    assert module._record(tmp_path) == {"accuracy": 0.5, "images": 4, "skipped": 0}
    result.write_text(result.read_text()[:20])
    assert module._record(tmp_path) is None

"""Two small imitations of VTAB's tasks from end to end; the means; what is missing."""

import dataclasses
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitlab.config import DataConfig, OptimConfig, TrainConfig
from vitlab.data.vtab.tasks import LISTS, TASKS
from vitlab.errors import UserError
from vitlab.io import write_sums
from vitlab.pipelines import vtab as module
from vitlab.pipelines.pretrain import Outcome
from vitlab.pipelines.vtab import NO_CROP, NO_FLIP, as_table, summary, vtab, without_harm
from vitlab.train.distributed import RankError, init_distributed
from vitlab.train.signals import StoppedError
from vitlab.train.workdir import Workdir

PAIR = ("patch_camelyon", "kitti_distance")
TESTED = {"patch_camelyon": 30, "kitti_distance": 50}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks in lists: the class of an image is how bright it is; the second's val images have wrong labels."""
    root = tmp_path_factory.mktemp("vtab")
    for name, tested in TESTED.items():
        folder, classes = root / TASKS[name].folder, TASKS[name].classes
        (folder / "images").mkdir(parents=True)
        for label in range(classes):
            gray = np.full((8, 8, 3), 250 * label // (classes - 1), np.uint8)
            Image.fromarray(gray).save(folder / "images" / f"{label}.png")
        counts = {"train": 800, "val": 200, "trainval": 1000, "test": tested}
        for split, count in counts.items():
            wrong = split == "val" and name == "kitti_distance"
            lines = [f"images/{i % classes}.png {(i + wrong) % classes}\n" for i in range(count)]
            (folder / LISTS[split]).write_text("".join(lines))
    return root


@pytest.fixture
def setting(config: TrainConfig) -> TrainConfig:
    return TrainConfig(
        model=config.model,
        data=DataConfig(name="vtab:TASK", crop="none", flip=False),
        optim=OptimConfig(name="sgd", lr=0.1, clip_norm=1.0),
        steps=40,
        batch_size=16,
        log_every=10,
        checkpoint_every=20,
        precision="float32",
    )


def score(checkpoint: Path, setting: TrainConfig, root: Path, out: Path, **options: Any) -> dict[str, Any]:
    return vtab(checkpoint, setting, root, out, device="cpu", tensorboard=False, download=False, **options)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tasks whose runs were opened, in order."""
    names: list[str] = []
    run = module.run

    def watched(*args: Any, **options: Any) -> Outcome:
        names.append(options["label"])
        return run(*args, **options)

    monkeypatch.setattr(module, "run", watched)
    return names


def test_two_tasks(
    setting: TrainConfig, pretrained: Outcome, workdir: Path, root: Path, tmp_path: Path, trained: list[str]
) -> None:
    heard = []
    result = score(workdir, setting, root, tmp_path, tasks=PAIR, on_task=lambda name, record: heard.append(name))
    assert trained == heard == list(PAIR)
    for name, row in result["tasks"].items():
        settings = json.loads((tmp_path / name / "config.json").read_text())
        test = json.loads((tmp_path / name / "result.json").read_text())["test"]
        assert (settings["data"]["name"], settings["examples"]) == (f"vtab:{name}", 1000)
        assert settings["model"]["num_classes"] == TASKS[name].classes
        assert row == {
            "task": TASKS[name].csv, "group": TASKS[name].group, "accuracy": test["accuracy"],
            "images": TESTED[name], "skipped": 0,
        }  # fmt: skip
    assert result["tasks"]["patch_camelyon"]["accuracy"] == 1
    assert (result["mean"], set(result["groups"].values()), result["scored_on"]) == (None, {None}, "test")
    assert len(result["missing"]) == 17
    assert json.loads((tmp_path / "result.json").read_text()) == result


def test_interrupted_and_continued(
    setting: TrainConfig, pretrained: Outcome, workdir: Path, root: Path, tmp_path: Path, trained: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    whole = score(workdir, setting, root, tmp_path / "whole", tasks=PAIR)
    log = Workdir.log_metrics

    def stop(self: Workdir, step: int, values: Any) -> None:
        log(self, step, values)
        if self.path.name == PAIR[1] and step == 30:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Workdir, "log_metrics", stop)
        with pytest.raises(StoppedError):
            score(workdir, setting, root, tmp_path / "cut", tasks=PAIR)
    assert not (tmp_path / "cut" / "result.json").exists()
    first = {path: path.stat().st_mtime_ns for path in (tmp_path / "cut" / PAIR[0]).rglob("*")}
    trained.clear()
    assert score(workdir, setting, root, tmp_path / "cut", tasks=PAIR) == whole
    assert trained == [PAIR[1]]
    assert first == {path: path.stat().st_mtime_ns for path in first}
    records = [(tmp_path / run / PAIR[1] / "metrics.jsonl").read_bytes() for run in ("whole", "cut")]
    assert records[0] == records[1]


def test_tasks_one_after_the_other(
    setting: TrainConfig, pretrained: Outcome, workdir: Path, root: Path, tmp_path: Path, trained: list[str]
) -> None:
    score(workdir, setting, root, tmp_path, tasks=PAIR[:1])
    result = score(workdir, setting, root, tmp_path, tasks=PAIR[1:])
    assert list(result["tasks"]) == list(PAIR)
    elsewhere = tmp_path / "without data"
    assert score(workdir, setting, elsewhere, tmp_path, tasks=PAIR) == result  # what has ended needs no data
    assert trained == list(PAIR)


def test_all_that_can_be_had(
    setting: TrainConfig, pretrained: Outcome, workdir: Path, root: Path, tmp_path: Path, trained: list[str]
) -> None:
    result = score(workdir, setting, root, tmp_path)
    assert trained == list(result["tasks"]) == list(PAIR)
    assert len(result["missing"]) == 17
    assert "dmlab" in result["missing"]["dmlab"]
    assert str(root) in result["missing"]["svhn"]


def test_data_that_one_process_lacks(
    setting: TrainConfig, pretrained: Outcome, workdir: Path, root: Path, tmp_path: Path,
    in_ranks: Callable[[int, Callable[[], Any]], list[Any]],
) -> None:  # fmt: skip
    """What can be had is what the first process finds: all do the same tasks, or all end."""

    def job() -> None:
        with init_distributed() as world:
            score(workdir, setting, root if world.is_rank_0 else tmp_path / "nothing", tmp_path / "out", world=world)

    first, second = in_ranks(2, job)
    assert (type(first), type(second)) == (RankError, UserError)
    assert f"looked in {tmp_path / 'nothing'}" in str(second)


def test_a_named_task_must_be_there(
    setting: TrainConfig, pretrained: Outcome, workdir: Path, root: Path, tmp_path: Path, trained: list[str]
) -> None:
    with pytest.raises(ValueError, match=r"(?s)2 of the tasks asked for are missing:.*dmlab.*smallnorb"):
        score(workdir, setting, root, tmp_path, tasks=(PAIR[0], "dmlab", "smallnorb_azimuth"))
    assert trained == []
    with pytest.raises(ValueError, match="unknown VTAB task 'camelyon'; the nearest: patch_camelyon"):
        score(workdir, setting, root, tmp_path, tasks=("camelyon",))


def test_selection_sees_no_test_image(
    setting: TrainConfig, pretrained: Outcome, workdir: Path, root: Path, tmp_path: Path
) -> None:
    for name in PAIR:
        assert (root / TASKS[name].folder / "test.txt").is_file()
    result = score(workdir, setting, root, tmp_path, tasks=PAIR, select=True)
    assert result["scored_on"] == "val200"
    assert [row["images"] for row in result["tasks"].values()] == [200, 200]
    assert result["tasks"]["patch_camelyon"]["accuracy"] == 1
    assert result["tasks"]["kitti_distance"]["accuracy"] < 0.5  # its val labels are wrong, and were not learned
    settings = json.loads((tmp_path / PAIR[0] / "config.json").read_text())
    assert settings["examples"] == 800
    assert (settings["data"]["train_split"], settings["data"]["eval_split"]) == ("train", "val")
    with pytest.raises(ValueError, match=r"holds a run with other settings:\n(.*\n)* *select: True -> False"):
        score(workdir, setting, root, tmp_path, tasks=PAIR)


def test_no_crop_and_no_mirroring_that_would_change_a_label(
    setting: TrainConfig, pretrained: Outcome, workdir: Path, root: Path, tmp_path: Path
) -> None:
    data = DataConfig(crop="random", crop_resize=10, flip=True)
    score(workdir, dataclasses.replace(setting, steps=1, data=data), root, tmp_path, tasks=PAIR)
    settings = [json.loads((tmp_path / name / "config.json").read_text())["data"] for name in PAIR]
    assert [(each["crop"], each["crop_resize"], each["flip"]) for each in settings] == [
        ("random", 10, True), ("none", None, True),
    ]  # fmt: skip
    assert not (tmp_path / PAIR[0] / "checkpoints").exists()  # of no use any more
    (tmp_path / PAIR[0] / "checkpoints").mkdir()  # as a kill before they went leaves it
    score(workdir, dataclasses.replace(setting, steps=1, data=data), root, tmp_path, tasks=PAIR)
    assert not (tmp_path / PAIR[0] / "checkpoints").exists()
    twice = score(workdir, dataclasses.replace(setting, steps=1, data=data), root, tmp_path / "twice", tasks=PAIR[:1],
                  image_size=2 * setting.model.image_hw[0])  # fmt: skip
    assert twice["tasks"].keys() == {PAIR[0]}
    settings = json.loads((tmp_path / "twice" / PAIR[0] / "config.json").read_text())
    assert settings["data"]["crop_resize"] == 20  # in proportion to the size
    kept = {name: without_harm(name, data) for name in TASKS}
    assert {name for name, own in kept.items() if own.crop == "none"} == set(NO_CROP)
    assert {name for name, own in kept.items() if not own.flip} == set(NO_FLIP)
    assert not any(without_harm(name, dataclasses.replace(data, flip=False)).flip for name in TASKS)
    for cropped in (DataConfig(min_area=0.3), DataConfig(crop="pad", pad=2)):
        dataclasses.replace(setting, data=without_harm(NO_CROP[0], cropped))  # nothing idle is left that is refused


def test_settings_that_do_not_fit(
    setting: TrainConfig, pretrained: Outcome, workdir: Path, root: Path, tmp_path: Path
) -> None:
    some = dataclasses.replace(setting, data=dataclasses.replace(setting.data, classes=(0, 1)))
    with pytest.raises(ValueError, match=r"classes is \(0, 1\); a VTAB task"):
        score(workdir, some, root, tmp_path)
    small = dataclasses.replace(setting, data=dataclasses.replace(setting.data, part=0.5))
    with pytest.raises(ValueError, match=r"part is 0\.5; a VTAB task"):
        score(workdir, small, root, tmp_path, tasks=PAIR)
    large = dataclasses.replace(setting, model=dataclasses.replace(setting.model, image_size=64))
    with pytest.raises(ValueError, match="64 pixels are far from the 8"):
        score(workdir, large, root, tmp_path)
    assert not any(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------------- means

# ViT-H/14 (JFT) in Table 9, per cent; its mean is 77.6 there.
TABLE_9 = [95.3, 85.5, 75.2, 99.7, 97.2, 65.0, 88.9, 83.3, 96.7, 91.4, 76.6]
TABLE_9 += [91.7, 63.8, 53.1, 79.4, 63.3, 84.5, 33.2, 51.2]


def records(accuracies: Any) -> dict[str, dict[str, Any]]:
    return {
        name: {"accuracy": value / 100, "images": TASKS[name].test_size, "skipped": 0}
        for name, value in zip(TASKS, accuracies, strict=True)
    }


def test_means_by_hand() -> None:
    result = summary(records(TABLE_9), {})
    assert result["groups"]["natural"] == pytest.approx(sum(TABLE_9[:7]) / 700)
    assert result["groups"]["specialized"] == pytest.approx((83.3 + 96.7 + 91.4 + 76.6) / 400)
    assert result["groups"]["structured"] == pytest.approx(sum(TABLE_9[11:]) / 800)
    assert result["mean"] == pytest.approx(sum(TABLE_9) / 1900)
    assert result["mean"] == pytest.approx(0.776, abs=5e-4)
    assert result["missing"] == {}


def test_no_mean_with_a_task_missing() -> None:
    there = records(range(19))
    del there["dmlab"]
    result = summary(there, {"dmlab": "no such file"})
    assert (result["groups"]["structured"], result["mean"]) == (None, None)
    assert result["groups"]["natural"] == pytest.approx(0.03)
    assert result["missing"] == {"dmlab": "no such file"}


def test_the_table_for_people() -> None:
    there = records(TABLE_9)
    del there["dmlab"]
    text = as_table(summary(there, {}) | {"scored_on": "test"})
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "Caltech101 natural 6,084 95.30%" in lines
    assert "mean of specialized: 87.00%" in lines
    assert "mean of structured: none: 7 of its 8 tasks are there" in lines
    assert "mean of all 19: none: 18 of its 19 tasks are there" in lines
    assert any(line.startswith("dmlab: not asked for; data: by hand, from") for line in lines)


def test_a_cut_result_counts_as_none(tmp_path: Path) -> None:
    """So that the task's run makes it again."""
    result = tmp_path / "result.json"
    result.write_text(json.dumps({"test": {"accuracy": 0.5, "images": 4, "skipped": 0, "loss": 1.0}}))
    write_sums(tmp_path, ["result.json"])
    assert module._record(tmp_path) == {"accuracy": 0.5, "images": 4, "skipped": 0}
    result.write_text(result.read_text()[:20])
    assert module._record(tmp_path) is None

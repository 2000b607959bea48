"""The least-squares head: its fit, its views, and the jobs that end with it."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from staged_job import make_job, make_start, tune

from vitlab.config import FinetuneConfig
from vitlab.data.dataset import Dataset
from vitlab.data.registry import load_dataset
from vitlab.data.transforms import TrainTransform
from vitlab.evaluation.features import Features
from vitlab.finetuning import head as head_module
from vitlab.finetuning import protocol, sweep
from vitlab.finetuning.head import HeadFitter, check_head, fit_head, head_loss
from vitlab.finetuning.held_out import hold_out_indices
from vitlab.finetuning.plan import Plan, Task
from vitlab.finetuning.representations import FrozenCheckpoint
from vitlab.finetuning.sweep import RunStart, Sweep
from vitlab.inspection import write_pages
from vitlab.io import write_bytes
from vitlab.recipes import OPEN
from vitlab.runs.run import RunResult, evaluate_split
from vitlab.train.run_files import PAGE


@pytest.mark.parametrize(("loss", "balance"), [("softmax", False), ("sigmoid", False), ("softmax", True)])
def test_the_held_out_score_of_the_head_is_that_of_its_model(
    workdir: Path, pretrained: RunResult, staged: FinetuneConfig, loss: Any, balance: bool
) -> None:
    """Whatever training minimizes, or it could not be compared with the score of the fine-tuned model."""
    start = make_start(workdir, pretrained, dataclasses.replace(staged, loss=loss, balance=balance))
    assert start.head is not None
    rest, _ = hold_out_indices(start.job.splits.train, staged.held_out, staged.seed)
    held_out = Sweep(start).splits.val
    evaluation = evaluate_split(start.job.config, start.head.create_classifier(rest), held_out)
    score = start.head.score_held_out()
    assert score["accuracy"] == evaluation.accuracy
    assert score["loss"] == pytest.approx(sweep._loss(start.job.config, evaluation), rel=1e-4)
    if balance:
        of_classes = [evaluation.losses[evaluation.labels == label].mean() for label in range(4)]
        assert score["loss"] == pytest.approx(np.mean(of_classes), rel=1e-4)


@pytest.mark.parametrize("balance", [False, True])
def test_a_job_says_what_balance_changes(
    workdir: Path, pretrained: RunResult, staged: FinetuneConfig, balance: bool
) -> None:
    """For classes of 5 to 40 images; nothing for classes that are about equal."""
    job = make_job(workdir, pretrained, dataclasses.replace(staged, balance=balance))
    assert fit_head(job).balance is None
    labels = job.splits.train.labels
    rows = np.concatenate([np.flatnonzero(labels == label)[:most] for label, most in enumerate((5, 40, 40, 40))])
    logged: list[str] = []
    few = dataclasses.replace(job.splits, train=job.splits.train.take(np.sort(rows)))
    head = fit_head(dataclasses.replace(job, splits=few, log=logged.append))
    record = head.balance
    assert record is not None
    assert record["images"] == [5, 40]
    assert record["balanced_accuracy"]["on" if balance else "off"] == head.plain_head.balanced_accuracy
    assert record["balanced_accuracy"]["on"] >= record["balanced_accuracy"]["off"]
    assert any(line.startswith("classes have 5 to 40 images: --balance") for line in logged)


def test_the_head_of_a_new_model_predicts_as_the_least_squares(start: RunStart) -> None:
    assert start.head is not None
    model, head = start.create_model(0).eval(), start.head.head
    frozen = start.head.fitter.plain
    with torch.inference_mode():
        logits = model.head(torch.from_numpy(frozen.x))  # pyright: ignore[reportOptionalCall]
    np.testing.assert_allclose(logits, head.logits(frozen.x), rtol=1e-4, atol=1e-4)


def test_the_loss_of_the_head_for_some_images(workdir: Path, pretrained: RunResult, staged: FinetuneConfig) -> None:
    job = make_job(workdir, pretrained, staged)
    whole, part = (head_loss(job, job.config, count) for count in (len(job.splits.train), 40))
    assert whole == fit_head(job).plain_head.loss < part


@pytest.mark.parametrize(("mirroring_harms", "crops_harm"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("views", [1, 2, 4])
def test_augmentation_that_harms_the_head_is_left_out(
    workdir: Path,
    pretrained: RunResult,
    staged: FinetuneConfig,
    monkeypatch: pytest.MonkeyPatch,
    views: int,
    mirroring_harms: bool,
    crops_harm: bool,
) -> None:
    """Representations are those of the image's class with noise, of mirrored ones with less; harm makes them those of
    the next class."""

    def made_up(self: FrozenCheckpoint, _indices: Any, _description: str, **options: Any) -> Features:
        labels = self.job.splits.train.labels
        rng = np.random.default_rng(options.get("epoch", 0))
        transform: TrainTransform | None = options.get("augmentation")
        computed.append(transform)
        harmed = transform is not None and (crops_harm or (mirroring_harms and transform.flip))
        noise = 1.0 if transform is None else 0.3 if transform.flip else 1.0
        x = 2.0 * np.eye(4)[(labels + harmed) % 4] + noise * rng.normal(size=(len(labels), 4))
        return Features(x.astype(np.float32), labels, np.arange(len(labels)), 0)

    computed: list[TrainTransform | None] = []
    monkeypatch.setattr(FrozenCheckpoint, "_compute", made_up)
    data = dataclasses.replace(staged.data, crop="pad", pad=3, flip=True, randaugment_layers=2, randaugment_magnitude=5)
    job = make_job(workdir, pretrained, dataclasses.replace(staged, data=data, head_views=views))
    fitted = fit_head(job)
    used, kept = fitted.augmentation, fitted.views
    flips = [transform.flip for transform in computed if transform]
    untested = views == 1
    if crops_harm or (mirroring_harms and untested):
        assert (used, kept) == (dataclasses.replace(staged.data, name="digits"), [])
        assert len(flips) == min(views, 2)
    else:
        assert used == dataclasses.replace(job.config.data, flip=not mirroring_harms)
        assert flips == [True] if untested else [False, True] + [not mirroring_harms] * (views - 2)
        assert len(kept) == views - mirroring_harms
    start = RunStart(job, fitted)
    assert start.run_config(0.5).data == used
    assert start.sweep_config(0.5).data == dataclasses.replace(used, eval_split="held_out")
    assert fitted.head.accuracy > 0.7


def test_images_that_are_not_augmented_have_no_views(
    workdir: Path, pretrained: RunResult, staged: FinetuneConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FrozenCheckpoint, "compute_view", lambda *_: pytest.fail("is computed"))
    job = make_job(workdir, pretrained, dataclasses.replace(staged, head_views=4))
    fitted = fit_head(job)
    assert (fitted.augmentation, fitted.views) == (job.config.data, [])


@pytest.mark.usefixtures("pretrained")
def test_the_shortest_budget_yields_a_classifier(
    workdir: Path, staged: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head, without a report; the same command makes the report afterwards."""
    config, options, log = staged, {"budget": 0.1, "open_settings": OPEN["staged"]}, []

    def write_page(_folder: Path, _images: Any, out: Path, **_settings: Any) -> dict[str, Any]:
        write_bytes(out / "index.html", b"the page")
        return {}

    monkeypatch.setattr(write_pages, "inspect_checkpoint", write_page)
    done = tune(workdir, config, tmp_path / "out", **options, log=log.append)
    assert done.result["chosen"] == "linear"
    assert (tmp_path / "out" / "model" / "README.md").exists()
    assert not (tmp_path / "out" / PAGE).exists()
    left_out = [line for line in log if line.startswith("left out: ")]
    assert any("fine-tuning" in line and re.search(r"--budget \d+m includes it", line) for line in left_out)
    assert any("the report" in line and re.search(r"--budget \d+m includes it", line) for line in left_out)
    assert log.count("measuring the speed") == 1
    tune(workdir, config, tmp_path / "out", **options)
    assert (tmp_path / "out" / PAGE).exists()


@pytest.mark.usefixtures("pretrained")
def test_a_plan_is_kept_whatever_it_changes(
    workdir: Path, staged: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates that were given, and a part of the images: the same command resumes."""
    full = len(load_dataset("digits", "trainval", classes=(3, 4, 5, 6)))

    def head_of_half(task: Task, measure: Any, *_: Any) -> Plan:
        planned.append(task.images.train)
        data = dataclasses.replace(task.config.data, subset_fraction=0.5)
        config = dataclasses.replace(task.config, runs=0, learning_rates=(), sweep_steps=None, data=data)
        return task.plan(config, measure(config, False))

    planned, log = [], []
    monkeypatch.setattr(protocol, "fit_budget", head_of_half)
    config, open_settings = staged, ("runs", "data.subset_fraction")
    done = tune(workdir, config, tmp_path / "out", budget=60.0, log=log.append, open_settings=open_settings)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["examples"] == pytest.approx(full / 2, abs=2)
    assert ["runs", 0, "the time budget"] in settings["reasons"]
    assert any(line.startswith(f"left out: 50% of the {full} training images") for line in log)
    (tmp_path / "out" / "result.json").unlink()
    log.clear()
    resumed = tune(workdir, config, tmp_path / "out", budget=90.0, log=log.append, open_settings=open_settings)
    assert resumed.result == done.result
    assert any("resuming the plan in " in line for line in log)
    assert planned == [full]
    one_rate: dict[str, Any] = {"learning_rates": (), "sweep_steps": None}
    other = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=1e-2), **one_rate)
    with pytest.raises(ValueError, match=r"other settings:\n  optim.lr: 0.003 -> 0.01"):
        tune(workdir, other, tmp_path / "out", budget=60.0, open_settings=open_settings)


@pytest.mark.usefixtures("pretrained")
def test_unreadable_images_may_leave_too_few(workdir: Path, staged: FinetuneConfig, tmp_path: Path) -> None:
    """Of two images of each class none can be held out where one is corrupt."""
    for split, number in (("train", 2), ("test", 1)):
        for name, level in (("bright", 200), ("dark", 40)):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for i in range(number):
                Image.new("RGB", (9 + i, 9), (level,) * 3).save(folder / f"{i}.png")
    data = dataclasses.replace(staged.data, name=f"folder:{tmp_path / 'photos'}", classes=None, on_error="skip")
    config = dataclasses.replace(staged, data=data, learning_rates=(3e-3,), sweep_steps=None)
    config = dataclasses.replace(config, batch_size=2, steps=2, held_out=0.5)
    options: dict[str, Any] = {"open_settings": ("runs", "learning_rates")}
    for name in ("bright", "dark"):
        (tmp_path / "photos" / "train" / name / "1.png").write_bytes(b"")
    log: list[str] = []
    result = tune(workdir, config, tmp_path / "out", log=log.append, **options).result
    assert (result["chosen"], result["sweep"]) == ("linear", [])
    assert "2 images are too few to hold 50% of a class out: only the head is fitted" in log
    (tmp_path / "out" / "result.json").unlink()
    assert tune(workdir, config, tmp_path / "out", **options).result == result


def test_too_many_classes_for_the_head(staged: FinetuneConfig) -> None:
    check_head(staged)
    many = dataclasses.replace(staged, model=dataclasses.replace(staged.model, num_classes=20_000))
    with pytest.raises(ValueError, match=r"20,000 .* 10,000; give --recipe custom"):
        check_head(many)
    check_head(dataclasses.replace(many, head=None))


@pytest.mark.parametrize(("several", "views", "rows"), [(True, 1, 80), (False, 0, 40)])
def test_memory_limits_views_then_images(
    workdir: Path,
    pretrained: RunResult,
    staged: FinetuneConfig,
    monkeypatch: pytest.MonkeyPatch,
    several: bool,
    views: int,
    rows: int,
) -> None:
    """Of too many images as many of each class are taken."""
    labels = np.repeat(np.arange(4), (50, 10, 10, 10))
    monkeypatch.setattr(head_module, "MAX_ELEMENTS", 5 * (170 if several else 40))
    job = make_job(workdir, pretrained, staged)
    train = Dataset("made", "train", tuple("abcd"), labels, np.zeros((80, 8, 8, 3), np.uint8))
    job = dataclasses.replace(job, splits=dataclasses.replace(job.splits, train=train))
    x = 2.0 * np.eye(4)[labels] + np.random.default_rng(0).normal(size=(80, 4))
    fitter = HeadFitter(job, Features(x.astype(np.float32), labels, np.arange(80), 0))
    assert fitter.max_views(4) == views
    chosen = labels[fitter.choose_rows()]
    assert len(chosen) == rows
    assert several or np.bincount(chosen).tolist() == [10, 10, 10, 10]


@pytest.mark.parametrize(
    ("changes", "way_out"),
    [
        ({"alpha": 1.0}, "give one rate"),
        ({"alpha": 1.0, "head": None}, "alpha=1 has no effect without head"),
        ({"runs": 0, "head": None}, "runs=0"),
        ({"refit": False, "runs": 3}, "requires runs=1"),
        ({"refit": False, "learning_rates": (), "sweep_steps": None}, "learning_rates that are tried"),
        ({"from_scratch": True}, "--recipe custom"),
        ({"fresh_positions": True}, "--recipe custom"),
        ({"head_std": 0.1}, "--recipe custom"),
    ],
)
def test_settings_that_contradict(staged: FinetuneConfig, changes: dict[str, Any], way_out: str) -> None:
    with pytest.raises(ValueError, match=way_out):
        dataclasses.replace(staged, **changes)

"""What a study takes, counted from the registry of data sets before anything is read; and a study in a given time."""

import dataclasses
import multiprocessing
import signal
from pathlib import Path

import pytest
from small_study import SMALL, variants

from vitlab.config import DataConfig
from vitlab.errors import UserError
from vitlab.models.registry import get_config
from vitlab.recipes import tiny
from vitlab.studies import compute, runner
from vitlab.studies.compute import fit_study, format_compute, model_of, num_training_images, study_compute
from vitlab.studies.report import write_report
from vitlab.studies.runner import StudyError, StudyPlan, plan, run_study, run_unfinished
from vitlab.studies.spec import StudyRun, changed
from vitlab.train.clock import Clock
from vitlab.train.stopping import StoppedError
from vitlab.train.workdir import write_json

pytestmark = pytest.mark.usefixtures("unchecked", "unrendered")


def test_every_point_and_their_sum(tmp_path: Path) -> None:
    whole = plan(SMALL, "small", tmp_path)
    report = study_compute(whole, tflops=0.5)
    assert [row["point"] for row in report["points"]] == [run.name for run in whole.runs]
    first, tuned = report["points"][0], report["points"][2]
    assert (first["steps"], first["images"]) == (12, 192)
    model = changed(variants("small")[0].config.model, num_classes=3)
    assert first["exaflops"] == pytest.approx(6 * model.forward_macs * 192 / 1e18)
    assert first["hours"] == pytest.approx(first["exaflops"] * 1e6 / 0.5 / 3600)
    assert tuned["exaflops"] > 3 * first["exaflops"]  # four times the patches
    assert tuned["parameters"] == first["parameters"] + 12 * 16  # a larger table of positions
    assert report["sum"]["exaflops"] == pytest.approx(sum(row["exaflops"] for row in report["points"]))
    assert report["sum"]["open_hours"] == report["sum"]["hours"]
    assert not list(tmp_path.iterdir())  # nothing is started

    write_json(whole.folders["rate-0.001.seed-0"] / "result.json", {})
    second = study_compute(whole, tflops=0.5)
    assert second["sum"]["open_hours"] == pytest.approx(report["sum"]["hours"] - first["hours"])
    assert [row["finished"] for row in second["points"]] == [True, False, False]
    assert "3 runs: " in format_compute(second)
    assert " of one core at 0.5 TFLOP/s (" in format_compute(second)


def test_a_search_is_counted_in_steps_and_images_too(tmp_path: Path) -> None:
    first, _, tuned = variants("small")
    searched = StudyRun("tuned", changed(tuned.config, learning_rates=(0.01, 0.03)), {}, init_from=first.name)
    study = dataclasses.replace(SMALL, variants=lambda scale: [first, searched])
    row = study_compute(plan(study, "small", tmp_path))["points"][1]
    assert (row["steps"], row["images"]) == (3 * 12, 3 * 192)
    model = model_of(searched, {first.name: first})
    assert row["exaflops"] == pytest.approx(6 * model.forward_macs * row["images"] / 1e18)


def test_images_of_a_training_split() -> None:
    for data, count in (
        (DataConfig(name="digits"), 1259),
        (DataConfig(name="digits", train_split="trainval"), 1438),
        (DataConfig(name="fashion_mnist", train_split="trainval", classes=(0, 1, 2, 3, 4)), 30_000),
        (DataConfig(name="cifar10", train_split="trainval", subset_fraction=0.02), 1000),
        (DataConfig(name="shards:jft300m", subset_fraction=0.1), 30_300_000),
    ):
        assert num_training_images(data) == count
    with pytest.raises(ValueError, match="folder:mine"):
        num_training_images(DataConfig(name="folder:mine"))


def test_the_model_of_a_run() -> None:
    first, _, tuned = variants("small")
    large = dataclasses.replace(first, config=changed(first.config, model=get_config("ViT-B/16")))
    assert model_of(tuned, {tuned.init_from or "": large}) == get_config("ViT-B/16", image_size=16, num_classes=3)
    masked = tiny.masked_digits()  # has no head
    assert model_of(dataclasses.replace(first, config=masked), {}) == masked.model


def test_a_budget_takes_seeds_then_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a study whose seed takes an hour, by one process; the longest that fits."""
    monkeypatch.setattr(compute, "_measured_tflops", lambda p, _: study_compute(p)["sum"]["exaflops"] * 1e6 / 3600)
    study = dataclasses.replace(SMALL, variants=lambda scale: variants(scale, steps=64)[:1], seeds=5)

    def make_plan(seeds: int, divisor: int = 1) -> StudyPlan:
        return plan(study, "small", tmp_path, seeds=seeds, divisor=divisor)

    for hours, expected in {10: (5, 1), 2: (2, 1), 1.4: (2, 2), 0.2: (3, 16)}.items():
        made = fit_study(study, make_plan, Clock(hours * 3600 * 1.1), 1, "cpu")
        assert (len({run.config.seed for run in made.runs}), made.divisor) == expected, hours
    with pytest.raises(UserError, match="--budget"):
        fit_study(study, make_plan, Clock(60.0), 1, "cpu")


def test_when_the_time_is_over_the_complete_seeds_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that are not finished are interrupted, and stay open for a later call."""
    monkeypatch.setattr(runner, "SPAWN", multiprocessing.get_context("fork"))
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.01)
    study = dataclasses.replace(SMALL, variants=lambda scale: variants(scale, steps=2)[:2], seeds=2)
    whole = plan(study, "small", tmp_path)
    run_unfinished(dataclasses.replace(whole, runs=whole.runs[:2]), "cpu")

    def interrupted(plan: StudyPlan, run: StudyRun, device: str) -> None:
        signal.pause()
        raise StoppedError("saved")

    monkeypatch.setattr(runner, "_train", interrupted)
    report = run_study(study, whole, processes=1, device="cpu", clock=Clock(0.0))
    assert [point["seed"] for point in report["points"]] == [0, 0]
    assert whole.unfinished_runs == list(whole.runs[2:])
    second = dataclasses.replace(whole, runs=whole.runs[2:])
    with pytest.raises(StudyError, match="no seed"):
        run_study(study, second, processes=1, device="cpu", clock=Clock(0.0))


def test_shorter_runs_decide_nothing(tmp_path: Path) -> None:
    study = dataclasses.replace(SMALL, variants=lambda scale: variants(scale)[:2])
    short, full = (plan(study, "small", tmp_path, divisor=divisor) for divisor in (6, 1))
    assert [run.config.total_steps(1) for run in (*short.runs, *full.runs)] == [2, 2, 12, 12]
    assert not {*short.folders.values()} & {*full.folders.values()}
    run_unfinished(short, "cpu")
    report = write_report(study, "small", short.results, tmp_path, short.divisor)
    assert {claim["verdict"] for claim in report["claims"]} == {"not tested"}
    assert "1/6 of the steps" in report["lead"]

"""What a study costs: counted from the registry of data sets, before anything is read."""

import dataclasses
from pathlib import Path

import pytest
from small_study import SMALL, variants

from vitlab.config import DataConfig
from vitlab.models.registry import get_config
from vitlab.recipes import tiny
from vitlab.studies.cost import as_text, cost, images, model_of
from vitlab.studies.presets import changed
from vitlab.studies.runner import plan
from vitlab.studies.spec import StudyRun
from vitlab.train.workdir import write_json


def test_every_point_and_their_sum(tmp_path: Path) -> None:
    whole = plan(SMALL, "small", tmp_path)
    report = cost(whole, tflops=0.5)
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
    second = cost(whole, tflops=0.5)
    assert second["sum"]["open_hours"] == pytest.approx(report["sum"]["hours"] - first["hours"])
    assert [row["finished"] for row in second["points"]] == [True, False, False]
    assert "3 runs: " in as_text(second)
    assert "hours of one core at 0.5 TFLOP/s" in as_text(second)


def test_a_search_is_counted_in_steps_and_images_too(tmp_path: Path) -> None:
    first, _, tuned = variants("small")
    searched = StudyRun("tuned", changed(tuned.config, learning_rates=(0.01, 0.03)), {}, init_from=first.name)
    study = dataclasses.replace(SMALL, variants=lambda scale: [first, searched])
    row = cost(plan(study, "small", tmp_path))["points"][1]
    assert (row["steps"], row["images"]) == (3 * 12, 3 * 192)
    model = model_of(searched, {first.name: first})
    assert row["exaflops"] == pytest.approx(6 * model.forward_macs * row["images"] / 1e18)


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (DataConfig(name="digits"), 1259),
        (DataConfig(name="digits", train_split="trainval"), 1438),
        (DataConfig(name="fashion_mnist", train_split="trainval", classes=(0, 1, 2, 3, 4)), 30_000),
        (DataConfig(name="cifar10", train_split="trainval", subset_fraction=0.02), 1000),
        (DataConfig(name="shards:jft300m", subset_fraction=0.1), 30_300_000),
    ],
)
def test_images_of_a_training_split(data: DataConfig, count: int) -> None:
    assert images(data) == count


def test_data_of_unknown_size() -> None:
    with pytest.raises(ValueError, match=r"folder:mine.*digits"):
        images(DataConfig(name="folder:mine"))


def test_the_model_of_a_run() -> None:
    first, _, tuned = variants("small")
    large = dataclasses.replace(first, config=changed(first.config, model=get_config("ViT-B/16")))
    assert model_of(tuned, {tuned.init_from or "": large}) == get_config("ViT-B/16", image_size=16, num_classes=3)
    masked = tiny.masked_digits()  # has no head
    assert model_of(dataclasses.replace(first, config=masked), {}) == masked.model

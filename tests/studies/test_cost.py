"""What a study costs: counted from the registry of data sets, before anything is read."""

import dataclasses
from pathlib import Path

import pytest
from small_study import SMALL, variants

from vitlab.config import DataConfig
from vitlab.models.registry import get_config
from vitlab.recipes.selfsup import tiny_digits
from vitlab.studies.cost import cost, images, model_of, rows, summary
from vitlab.studies.point import Point
from vitlab.studies.presets import changed
from vitlab.studies.runner import plan
from vitlab.train.workdir import write_json


def test_every_point_and_their_sum(tmp_path: Path) -> None:
    report = cost(plan(SMALL, "tiny", tmp_path), tflops=0.5)
    assert [row["point"] for row in report["points"]] == [point.name for point in SMALL.points("tiny")]
    first, tuned = report["points"][0], report["points"][2]
    assert (first["steps"], first["images"]) == (40, 640)
    model = changed(variants("tiny")[0].config.model, num_classes=3)
    assert first["exaflops"] == pytest.approx(6 * model.forward_macs * 640 / 1e18)
    assert first["hours"] == pytest.approx(first["exaflops"] * 1e6 / 0.5 / 3600)
    assert tuned["exaflops"] > 3 * first["exaflops"]  # four times the patches
    assert tuned["parameters"] == first["parameters"] + 12 * 16  # a larger table of positions
    assert report["sum"]["points"] == 6
    assert report["sum"]["exaflops"] == pytest.approx(sum(row["exaflops"] for row in report["points"]))
    assert report["sum"]["open_hours"] == report["sum"]["hours"]
    assert not list(tmp_path.iterdir())  # nothing is started


def test_finished_points_are_not_still_to_do(tmp_path: Path) -> None:
    whole = plan(SMALL, "tiny", tmp_path)
    write_json(whole.folders["rate-0.001.seed-0"] / "result.json", {})
    report = cost(whole)
    first = report["points"][0]
    assert report["sum"]["open_hours"] == pytest.approx(report["sum"]["hours"] - first["hours"])
    assert [row["finished"] for row in rows(report)] == [True, *[False] * 5]
    assert rows(report)[0]["hours"] == pytest.approx(first["hours"], rel=5e-3)
    assert summary(report).startswith("6 points: ")
    assert "hours of one core at 0.03 TFLOP/s" in summary(report)


def test_a_search_is_counted_in_steps_and_images_too(tmp_path: Path) -> None:
    first, _, tuned = variants("tiny")
    searched = Point("tuned", changed(tuned.config, learning_rates=(0.01, 0.03)), {}, start=first.name)
    study = dataclasses.replace(SMALL, variants=lambda scale: [first, searched])
    row = cost(plan(study, "tiny", tmp_path))["points"][1]
    assert (row["steps"], row["images"]) == (3 * 40, 3 * 640)
    model = model_of(searched, {first.name: first})
    assert row["exaflops"] == pytest.approx(6 * model.forward_macs * row["images"] / 1e18)


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (DataConfig(name="digits"), 1259),
        (DataConfig(name="digits", train_split="trainval"), 1438),
        (DataConfig(name="fashion_mnist", train_split="trainval", classes=(0, 1, 2, 3, 4)), 30_000),
        (DataConfig(name="cifar10", train_split="trainval", part=0.02), 1000),
        (DataConfig(name="shards:jft300m", part=0.1), 30_300_000),
    ],
)
def test_images_of_a_training_split(data: DataConfig, count: int) -> None:
    assert images(data) == count


def test_invalid_input(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"folder:mine.*digits"):
        images(DataConfig(name="folder:mine"))
    with pytest.raises(ValueError, match="tflops is 0"):
        cost(plan(SMALL, "tiny", tmp_path), tflops=0.0)


def test_the_model_of_a_point() -> None:
    first, _, tuned = variants("tiny")
    large = dataclasses.replace(first, config=changed(first.config, model=get_config("ViT-B/16")))
    assert model_of(tuned, {tuned.start or "": large}) == get_config("ViT-B/16", image_size=16, num_classes=3)
    masked = tiny_digits()  # has no head
    assert model_of(dataclasses.replace(first, config=masked), {}) == masked.model

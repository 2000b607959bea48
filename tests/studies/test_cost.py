"""What a study costs: counted from the table of data sets, before anything is read."""

import dataclasses
from pathlib import Path

import pytest
from small_study import SMALL, points

from vitlab.config import DataConfig
from vitlab.models.registry import get_config
from vitlab.recipes.selfsup import tiny_digits
from vitlab.studies.cost import cost, images, model_of, rows, summary
from vitlab.studies.engine import plan
from vitlab.studies.study import Point
from vitlab.train.workdir import write_json


def test_every_point_and_their_sum(tmp_path: Path) -> None:
    found = cost(plan(SMALL, "tiny", tmp_path), tflops=0.5)
    assert [row["point"] for row in found["points"]] == [point.name for point in points("tiny")]
    first, tuned = found["points"][0], found["points"][2]
    assert (first["steps"], first["images"]) == (40, 640)
    model = dataclasses.replace(points("tiny")[0].config.model, num_classes=3)
    assert first["exaflops"] == pytest.approx(6 * model.forward_macs * 640 / 1e18)
    assert first["hours"] == pytest.approx(first["exaflops"] * 1e6 / 0.5 / 3600)
    assert tuned["exaflops"] > 3 * first["exaflops"]  # four times the patches
    assert tuned["parameters"] == first["parameters"] + 12 * 16  # a larger table of positions
    assert found["sum"]["points"] == 6
    assert found["sum"]["exaflops"] == pytest.approx(sum(row["exaflops"] for row in found["points"]))
    assert found["sum"]["open_hours"] == found["sum"]["hours"]
    assert not list(tmp_path.iterdir())  # nothing is begun


def test_what_is_finished_is_not_still_to_do(tmp_path: Path) -> None:
    whole = plan(SMALL, "tiny", tmp_path)
    folder = whole.folders["rate-0.001.seed-0"]
    write_json(folder / "result.json", {})
    found = cost(whole)
    first = found["points"][0]
    assert first["finished"]
    assert found["sum"]["open_hours"] == pytest.approx(found["sum"]["hours"] - first["hours"])
    assert [row["finished"] for row in rows(found)] == [True, *[False] * 5]
    assert rows(found)[0]["hours"] == pytest.approx(first["hours"], rel=5e-3)
    assert summary(found).startswith("6 points: ")
    assert "hours of one core at 0.03 TFLOP/s" in summary(found)


def test_a_search_is_counted_in_steps_and_images_too(tmp_path: Path) -> None:
    """What stands in a row fits together."""

    def searched(scale: str) -> list[Point]:
        first, _, tuned, *_ = points("tiny")
        config = dataclasses.replace(tuned.config, learning_rates=(0.01, 0.03))
        return [first, dataclasses.replace(tuned, config=config, start=first.name)]

    study = dataclasses.replace(SMALL, points=searched)
    row = cost(plan(study, "tiny", tmp_path))["points"][1]
    assert (row["steps"], row["images"]) == (3 * 40, 3 * 640)
    model = model_of(searched("tiny")[1], {point.name: point for point in searched("tiny")})
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


def test_a_set_that_nobody_has_counted() -> None:
    with pytest.raises(ValueError, match=r"folder:mine.*digits"):
        images(DataConfig(name="folder:mine"))


def test_no_rate_is_no_answer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tflops is 0"):
        cost(plan(SMALL, "tiny", tmp_path), tflops=0.0)


def test_a_finetuning_runs_the_model_that_it_starts_from() -> None:
    first, _, tuned, *_ = points("tiny")
    named = dataclasses.replace(first.config, model=get_config("ViT-B/16"))
    by_name = {tuned.start or "": dataclasses.replace(first, config=named)}
    assert model_of(tuned, by_name) == get_config("ViT-B/16", image_size=16, num_classes=3)


def test_masked_patch_prediction_has_no_head() -> None:
    first, *_ = points("tiny")
    config = tiny_digits()
    assert model_of(dataclasses.replace(first, config=config), {}) == config.model

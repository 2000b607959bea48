"""Nested parts of the data: every model alike, at its best evaluation, compared by how much it gains."""

import pytest
from finished import noise, report, verdicts

from vitlab.models.config import ViTConfig
from vitlab.recipes import PRETRAIN
from vitlab.studies.data_size import DATA_SIZE, PARTS, early_stopped
from vitlab.studies.presets import changed
from vitlab.studies.spec import Point, Result, Scale

LEAST_AND_MOST = {
    ("ViT", "small"): (0.30, 0.50),
    ("ViT", "large"): (0.28, 0.55),
    ("ResNet", "small"): (0.35, 0.48),
    ("ResNet", "large"): (0.36, 0.50),
}
"""Accuracies; 0.4 elsewhere."""


@pytest.mark.parametrize("scale", ["tiny", "gpu"])
def test_only_model_and_part_differ(scale: Scale) -> None:
    points = [point for point in DATA_SIZE.variants(scale) if point.start is None]
    first = points[0].config
    assert {changed(point.config, model=first.model, data={"part": None}) for point in points} == {
        changed(first, data={"part": None})
    }
    assert all(point.config.data.part == point.labels["part"] for point in points)


def test_parts_of_the_paper() -> None:
    """9, 30, 90 and 300 million images of JFT; for all of them the steps of 7 epochs of the whole."""
    points = [point for point in DATA_SIZE.variants("paper") if point.start is None]
    assert [round(part * 303) for part in PARTS] == [9, 30, 91, 303]
    assert {point.config.total_steps(1) for point in points} == {517_822}
    whole = {str(point.labels["model"]): point.config for point in points if point.labels["part"] == 1.0}
    for name in ("ViT-B/32", "ViT-L/16", "R50x1", "R152x2"):
        row = PRETRAIN["jft"](name)
        assert (whole[name].model, whole[name].optim, whole[name].loss) == (row.model, row.optim, row.loss)
    halved = whole["ViT-b/32"].model
    assert isinstance(halved, ViTConfig)
    assert (halved.width, halved.mlp_dim, halved.depth, halved.representation_size) == (384, 1536, 12, 384)


def test_early_stopping_takes_the_best_evaluation() -> None:
    point = DATA_SIZE.variants("tiny")[0]
    records = [
        {"step": 100, "val_accuracy": 0.8, "fewshot_5shot": 0.3},
        {"step": 200, "loss": 0.1},
        {"step": 200, "val_accuracy": 0.7, "fewshot_5shot": 0.5},
    ]
    assert early_stopped(Result(point, {}, records, 100, point.config.model)) == 0.3


@pytest.mark.parametrize("reverse", [False, True])
def test_report(reverse: bool) -> None:
    ends = LEAST_AND_MOST | ({("ViT", "small"): (0.40, 0.45)} if reverse else {})

    def accuracy(point: Point) -> float:
        least, most = ends.get((str(point.labels["family"]), str(point.labels["size"])), (0.4, 0.4))
        return {PARTS[0]: least, PARTS[-1]: most}.get(float(point.labels["part"]), 0.4) + noise(point, 0.01)

    written = report(DATA_SIZE, accuracy, examples=27_000)
    if reverse:
        assert verdicts(written) == ["contradicted"] * 3 + ["shows"] * 5
        return
    assert verdicts(written) == ["shows"] * 8
    means = [round(claim["measured"]["mean"], 6) for claim in written["claims"]]
    assert means == [0.05, 0.07, 0.02, 0.08, 0.13, 0.05, 0.07, 0.07]
    table = written["table"]
    assert table["columns"][2:] == ["810 images", "2,700 images", "8,100 images", "27,000 images"]
    assert table["rows"][0][2:] == ["30.0 ± 1.0", "40.0 ± 1.0", "40.0 ± 1.0", "50.0 ± 1.0"]
    assert table["rows"][5][2:] == ["30.0 ± 1.0", "", "", "50.0 ± 1.0"], "fine-tuned at the ends only"
    fewshot, fine_tuned = written["panels"]
    assert [list(line["x"]) for line in fewshot["series"]] == [[810, 2700, 8100, 27000]] * 5
    assert [list(line["x"]) for line in fine_tuned["series"]] == [[810, 27000]] * 5

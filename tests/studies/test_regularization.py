"""Sec. 4.3's regularizers: the runs, and what is said of them."""

import dataclasses
import math
import re
from pathlib import Path

import pytest

from vitlab.models.config import ViTConfig
from vitlab.pipelines.pretrain import pretrain
from vitlab.recipes import pretrain as recipes
from vitlab.studies.regularization import ALL, PAPER, PLAIN, REGULARIZATION, SMALL, tuned
from vitlab.studies.study import SEEDS, Done, Scale, exaflops


@pytest.mark.parametrize("scale", ["tiny", "gpu"])
def test_points(scale: Scale) -> None:
    points = REGULARIZATION.points(scale)
    assert len({point.name for point in points}) == len(points) == 2 * len(SMALL) * len(SEEDS)
    assert all(re.fullmatch(r"[\w.-]+", point.name) for point in points)
    for point in points:
        config, how = point.config, SMALL[str(point.labels["setting"])]
        assert isinstance(config.model, ViTConfig)
        assert config.model.dropout == how.dropout
        assert (config.optim.weight_decay, config.label_smoothing) == (how.decay, how.smoothing)
        assert (config.data.crop, config.data.flip, config.steps) == ("none", False, points[0].config.steps)
        assert (config.data.train_split, config.data.eval_split) == ("train", "val")  # the choice is not the test's
    parts = [point.config.data.part for point in points]
    assert len(set(parts)) == 2
    assert {point.config.data.part_seed for point in points} == {None}  # nested, and the same for all


def test_one_regularizer_at_a_time() -> None:
    for table in (SMALL, PAPER):
        counts = {name: sum(value > 0 for value in dataclasses.astuple(how)) for name, how in table.items()}
        assert counts.pop(PLAIN) == 0
        assert counts.pop(ALL) == 3
        assert set(counts.values()) == {1}


def test_the_papers_settings_are_its_recipes() -> None:
    """With all three on ImageNet, and with decay 0.03 and dropout on ImageNet-21k, Table 3's runs come out."""
    points = {(point.labels["data"], point.labels["setting"]): point.config for point in REGULARIZATION.points("paper")}
    assert len(points) == 2 * len(PAPER)
    assert points["ImageNet", ALL] == recipes.imagenet("ViT-B/16")
    decayed = points["ImageNet-21k", "decay 0.03"].optim
    assert decayed == recipes.imagenet21k("ViT-B/16").optim


def test_why_the_small_runs_decay_more() -> None:
    """Rate x decay summed over the steps: 42 on ImageNet, at half of the rate in the mean of a cosine."""
    imagenet = recipes.imagenet("ViT-B/16")
    steps = imagenet.total_steps(1_281_167)
    assert steps * imagenet.optim.lr / 2 * imagenet.optim.weight_decay == pytest.approx(42, abs=0.5)
    small = REGULARIZATION.points("tiny")[0].config
    assert small.steps is not None
    for how in SMALL.values():
        assert small.steps * small.optim.lr / 2 * how.decay < 42


def test_twenty_four_minutes_of_a_core() -> None:
    """At 20 GFLOP/s: a model this small leaves half of a core idle."""
    assert sum(exaflops(point.config, 0) for point in REGULARIZATION.points("tiny")) < 24 * 60 * 20e9 / 1e18


def test_twenty_five_minutes_of_a_gpu() -> None:
    """At 100 TFLOP/s."""
    assert sum(exaflops(point.config, 0) for point in REGULARIZATION.points("gpu")) < 25 * 60 * 100e12 / 1e18


def test_a_point_runs(tmp_path: Path) -> None:
    """On half of the digits in place of clothes, for two steps, with all three."""
    point = next(point for point in reversed(REGULARIZATION.points("tiny")) if point.labels["setting"] == ALL)
    data = dataclasses.replace(point.config.data, name="digits")
    config = dataclasses.replace(point.config, data=data, steps=2, batch_size=8)
    outcome = pretrain(config, tmp_path, device="cpu", tensorboard=False)
    assert len(outcome.splits.train) == pytest.approx(0.5 * 1259, abs=10)
    assert math.isfinite(outcome.test.accuracy)


def finished(gains: dict[str, float]) -> list[Done]:
    """As if smoothing gained so much with each amount of data, and the others lost a little.

    A decay is best by the test where it should not count, and no better than none by the held-out images.
    """
    done = []
    for point in REGULARIZATION.points("tiny"):
        data, setting = str(point.labels["data"]), str(point.labels["setting"])
        told = {PLAIN: 0.0, "smoothing 0.1": gains[data]}.get(setting, -0.01)
        accuracy = 0.8 + 0.002 * point.config.seed + told
        figures = {"accuracy": accuracy + 0.1 * (setting == "decay 3")}
        records = [{"val_accuracy": 0.99}, {"val_accuracy": accuracy}, {"loss": 1.0}]
        done.append(Done(point, figures, records, {"2 %": 1080, "50 %": 27_000}[data]))
    return done


@pytest.mark.parametrize(
    ("gains", "chosen", "measured", "verdicts"),
    [
        ({"2 %": 0.03, "50 %": 0.01}, ("smoothing 0.1", "smoothing 0.1"), (0.03, 0.02), ["shows", "shows"]),
        ({"2 %": 0.03, "50 %": -0.01}, ("smoothing 0.1", PLAIN), (0.03, 0.03), ["shows", "shows"]),
        ({"2 %": 0.03, "50 %": 0.04}, ("smoothing 0.1", "smoothing 0.1"), (0.03, -0.01), ["shows", "contradicted"]),
        ({"2 %": -0.03, "50 %": -0.04}, (PLAIN, PLAIN), (0.0, 0.0), ["not clear", "not clear"]),
    ],
)
def test_claims(
    gains: dict[str, float], chosen: tuple[str, str], measured: tuple[float, float], verdicts: list[str]
) -> None:
    done = finished(gains)
    assert (tuned(done, "2 %"), tuned(done, "50 %")) == chosen
    claims = REGULARIZATION.report(done).claims
    assert [claim.measured.mean for claim in claims] == pytest.approx(measured)
    assert [claim.verdict for claim in claims] == verdicts
    assert f"chosen: {chosen[0]})" in claims[0].text


def test_table_and_figure() -> None:
    report = REGULARIZATION.report(finished({"2 %": 0.03, "50 %": 0.01}))
    gain = "gain over none, points"
    columns = ("setting", "held out, 2 %", "accuracy, 2 %", gain, "held out, 50 %", "accuracy, 50 %", gain)
    assert tuple(report.columns) == columns
    rows = {row[0]: row[1:] for row in report.rows}
    assert rows[PLAIN] == ("80.2 ± 0.2", "80.2 ± 0.2", "", "80.2 ± 0.2", "80.2 ± 0.2", "")
    assert rows["smoothing 0.1"][:3] == ("83.2 ± 0.2", "83.2 ± 0.2", "+3.0 (3.0 to 3.0)")
    assert rows[ALL][3:] == ("79.2 ± 0.2", "79.2 ± 0.2", "-1.0 (-1.0 to -1.0)")
    assert "from 1,080 and from 27,000 images" in report.lead
    (panel,) = report.panels
    assert tuple(panel.ticks) == tuple(SMALL)
    assert [each.name for each in panel.series] == ["2 %", "50 %"]
    assert panel.series[0].y[0] == pytest.approx(0.802)


def test_report_of_the_papers_runs() -> None:
    """One seed: nothing is shown, and nothing fails."""
    done = [Done(point, {"accuracy": 0.7}, [{"val_accuracy": 0.7}], 1000) for point in REGULARIZATION.points("paper")]
    assert [claim.verdict for claim in REGULARIZATION.report(done).claims] == ["not clear", "not clear"]

"""Sec. 4.3's regularizers: the runs, and the setting that counts."""

import pytest
from finished import finished, noise, report, verdicts

from vitlab.models.config import ViTConfig
from vitlab.recipes import pretrain
from vitlab.studies.regularization import ALL, PAPER, PLAIN, REGULARIZATION, SMALL, tuned
from vitlab.studies.spec import Point, Scale


@pytest.mark.parametrize("scale", ["tiny", "gpu"])
def test_points(scale: Scale) -> None:
    points = REGULARIZATION.variants(scale)
    assert len(points) == 2 * len(SMALL)
    for point in points:
        config, model = point.config, point.config.model
        assert isinstance(model, ViTConfig)
        values = (config.optim.weight_decay, model.dropout, config.label_smoothing)
        assert values == SMALL[str(point.labels["setting"])]
        assert (config.data.crop, config.data.flip, config.steps) == ("none", False, points[0].config.steps)
        assert (config.data.train_split, config.data.eval_split) == ("train", "val")  # the test does not choose
    assert len({point.config.data.part for point in points}) == 2


@pytest.mark.parametrize("table", [SMALL, PAPER])
def test_one_regularizer_at_a_time(table: dict[str, tuple[float, ...]]) -> None:
    counts = {name: sum(value > 0 for value in values) for name, values in table.items()}
    assert (counts.pop(PLAIN), counts.pop(ALL), set(counts.values())) == (0, 3, {1})


def test_settings_of_the_paper_are_its_recipes() -> None:
    """All three on ImageNet, and the decay of 0.03 on ImageNet-21k, are Table 3's."""
    points = {(p.labels["data"], p.labels["setting"]): p.config for p in REGULARIZATION.variants("paper")}
    assert len(points) == 2 * len(PAPER)
    assert points["ImageNet", ALL] == pretrain.imagenet("ViT-B/16")
    assert points["ImageNet-21k", "decay 0.03"].optim == pretrain.imagenet21k("ViT-B/16").optim


def test_why_the_small_runs_decay_more() -> None:
    """Rate x decay summed over the steps: 42 on ImageNet, with half of the rate in the mean of a cosine."""
    imagenet = pretrain.imagenet("ViT-B/16")
    steps = imagenet.total_steps(1_281_167)
    assert steps * imagenet.optim.lr / 2 * imagenet.optim.weight_decay == pytest.approx(42, abs=0.5)
    for point in REGULARIZATION.variants("tiny"):
        assert (point.config.steps or 0) * point.config.optim.lr / 2 * point.config.optim.weight_decay < 42


@pytest.mark.parametrize(
    ("gains", "chosen", "measured", "expected"),
    [
        ((0.03, 0.01), ("smoothing 0.1", "smoothing 0.1"), (0.03, 0.02), ["shows", "shows"]),
        ((0.03, -0.01), ("smoothing 0.1", PLAIN), (0.03, 0.03), ["shows", "shows"]),
        ((0.03, 0.04), ("smoothing 0.1", "smoothing 0.1"), (0.03, -0.01), ["shows", "contradicted"]),
        ((-0.03, -0.04), (PLAIN, PLAIN), (0.0, 0.0), ["not clear", "not clear"]),
    ],
)
def test_report(
    gains: tuple[float, float], chosen: tuple[str, str], measured: tuple[float, float], expected: list[str]
) -> None:
    """As if smoothing gained this much, and the others lost a little; decay 3 is best by the test alone."""
    by_amount: dict[str, float] = dict(zip(("2 %", "50 %"), gains, strict=True))

    def held_out(point: Point) -> float:
        setting, smoothing = str(point.labels["setting"]), by_amount[str(point.labels["data"])]
        return 0.8 + noise(point, 0.002) + {PLAIN: 0.0, "smoothing 0.1": smoothing}.get(setting, -0.01)

    def accuracy(point: Point) -> float:
        return held_out(point) + 0.1 * (point.labels["setting"] == "decay 3")

    results = finished(REGULARIZATION, accuracy, held_out)
    assert (tuned(results, "2 %"), tuned(results, "50 %")) == chosen
    written = report(REGULARIZATION, accuracy, held_out)
    assert [claim["measured"]["mean"] for claim in written["claims"]] == pytest.approx(measured)
    assert verdicts(written) == expected
    assert f"chosen: {chosen[0]})" in written["claims"][0]["claim"]
    rows = {row[0]: row[1:] for row in written["table"]["rows"]}
    assert rows[PLAIN] == ["80.0 ± 0.2", "80.0 ± 0.2", "", "80.0 ± 0.2", "80.0 ± 0.2", ""]
    assert rows[ALL][3:] == ["79.0 ± 0.2", "79.0 ± 0.2", "-1.0 (-1.0 to -1.0)"]
    assert written["panels"][0]["ticks"] == list(SMALL)

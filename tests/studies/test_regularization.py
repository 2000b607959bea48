"""Sec. 4.3's regularizers: the runs, and the setting that counts."""

import pytest
from finished import finished, noise, report

from vitlab.models.config import ViTConfig
from vitlab.recipes import pretrain
from vitlab.studies.point import Point, Scale
from vitlab.studies.regularization import ALL, PAPER, PLAIN, REGULARIZATION, SMALL, tuned
from vitlab.studies.statistics import Results


@pytest.mark.parametrize("scale", ["tiny", "gpu"])
def test_points(scale: Scale) -> None:
    points = REGULARIZATION.variants(scale)
    assert len(points) == 2 * len(SMALL)
    for point in points:
        config, setting = point.config, SMALL[str(point.labels["setting"])]
        assert isinstance(config.model, ViTConfig)
        assert config.model.dropout == setting["model"]["dropout"]
        assert config.optim.weight_decay == setting["optim"]["weight_decay"]
        assert config.label_smoothing == setting["label_smoothing"]
        assert (config.data.crop, config.data.flip, config.steps) == ("none", False, points[0].config.steps)
        assert (config.data.train_split, config.data.eval_split) == ("train", "val")  # the test does not choose
    assert len({point.config.data.part for point in points}) == 2


def test_one_regularizer_at_a_time() -> None:
    for table in (SMALL, PAPER):
        values = {
            name: (s["model"]["dropout"], s["optim"]["weight_decay"], s["label_smoothing"]) for name, s in table.items()
        }
        counts = {name: sum(value > 0 for value in each) for name, each in values.items()}
        assert (counts.pop(PLAIN), counts.pop(ALL)) == (0, 3)
        assert set(counts.values()) == {1}


def test_the_papers_settings_are_its_recipes() -> None:
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


def simulated(gains: dict[str, float]) -> Results:
    """As if smoothing gained so much, and the others lost a little; decay 3 is best by the test alone."""

    def held_out(point: Point) -> float:
        gain = {PLAIN: 0.0, "smoothing 0.1": gains[str(point.labels["data"])]}.get(str(point.labels["setting"]), -0.01)
        return 0.8 + noise(point, 0.002) + gain

    return finished(REGULARIZATION, lambda p: held_out(p) + 0.1 * (p.labels["setting"] == "decay 3"), held_out)


@pytest.mark.parametrize(
    ("gains", "chosen", "measured", "verdicts"),
    [
        ((0.03, 0.01), ("smoothing 0.1", "smoothing 0.1"), (0.03, 0.02), ["shows", "shows"]),
        ((0.03, -0.01), ("smoothing 0.1", PLAIN), (0.03, 0.03), ["shows", "shows"]),
        ((0.03, 0.04), ("smoothing 0.1", "smoothing 0.1"), (0.03, -0.01), ["shows", "contradicted"]),
        ((-0.03, -0.04), (PLAIN, PLAIN), (0.0, 0.0), ["not clear", "not clear"]),
    ],
)
def test_claims(
    gains: tuple[float, float], chosen: tuple[str, str], measured: tuple[float, float], verdicts: list[str]
) -> None:
    results = simulated(dict(zip(("2 %", "50 %"), gains, strict=True)))
    assert (tuned(results, "2 %"), tuned(results, "50 %")) == chosen
    claims = report(REGULARIZATION, results)["claims"]
    assert [claim["measured"]["mean"] for claim in claims] == pytest.approx(measured)
    assert [claim["verdict"] for claim in claims] == verdicts
    assert f"chosen: {chosen[0]})" in claims[0]["claim"]


def test_table_and_figure() -> None:
    written = report(REGULARIZATION, simulated({"2 %": 0.03, "50 %": 0.01}))
    rows = {row[0]: row[1:] for row in written["table"]["rows"]}
    assert rows[PLAIN] == ["80.0 ± 0.2", "80.0 ± 0.2", "", "80.0 ± 0.2", "80.0 ± 0.2", ""]
    assert rows["smoothing 0.1"][:3] == ["83.0 ± 0.2", "83.0 ± 0.2", "+3.0 (3.0 to 3.0)"]
    assert rows[ALL][3:] == ["79.0 ± 0.2", "79.0 ± 0.2", "-1.0 (-1.0 to -1.0)"]
    assert "600 to 15,000 images" in written["lead"]
    (panel,) = written["panels"]
    assert panel["ticks"] == list(SMALL)
    assert [line["name"] for line in panel["series"]] == ["2 %", "50 %"]

"""Fig. 5 and Table 6: their numbers, and how two families are compared."""

import math

import pytest
from finished import finished, noise, report

from vitlab.models import get_config
from vitlab.models.config import ModelConfig
from vitlab.studies.point import Point, exaflops
from vitlab.studies.scaling import FAMILIES, MODELS, SCALING, TABLE6, PaperRun, family, gap, growth, paper_panel, saving

JFT = 303_000_000


@pytest.mark.parametrize(
    ("point", "run"),
    list(zip(SCALING.variants("paper"), TABLE6, strict=True)),
    ids=[f"{run.model}-{run.epochs}" for run in TABLE6],
)
def test_compute_of_the_papers_runs(point: Point, run: PaperRun) -> None:
    """The column of exaFLOPs, printed without decimals: within 2 %; what has convolutions, within 1 %."""
    ours, printed = exaflops(point.config, JFT), run.exaflops
    if (run.model, run.epochs) == ("R50+ViT-L/16", 7):
        # 859 is not half of the 1668 that the same model takes for 14 epochs; ours fits that one (docs/paper.md).
        assert not math.isclose(printed, 1668 / 2, rel_tol=0.02)
        printed = 1668 / 2
    tolerance = 0.02 if family(point.config.model) == "ViT" else 0.01
    assert abs(ours - printed) <= tolerance * printed + 0.5


def test_average_of_five_data_sets() -> None:
    """Table 7 prints it for two of the runs."""
    averages = {(run.model, run.epochs): run.average for run in TABLE6}
    assert averages["R50x1", 7] == pytest.approx(89.33, abs=0.005)
    assert averages["R152x2", 7] == pytest.approx(94.01, abs=0.01)
    assert max(averages, key=lambda run: averages[run]) == ("ViT-H/14", 14)


def test_the_papers_runs_are_its_recipes() -> None:
    points = SCALING.variants("paper")
    assert [family(point.config.model) for point in points] == [run.family for run in TABLE6]
    for point, run in zip(points, TABLE6, strict=True):
        assert (point.config.epochs, point.config.batch_size) == (run.epochs, 4096)
        assert (point.config.loss, point.config.model.head_bias) == ("sigmoid", -10.0)
        named = get_config(run.model)
        assert point.config.model.forward_macs == pytest.approx(named.forward_macs, rel=0.01)  # except for the head
    rates = {run.model: point.config.optim.lr for point, run in zip(points, TABLE6, strict=True)}
    assert rates["R200x3"] == rates["R152x2"] == 6e-4


def test_the_papers_claims_are_in_its_table() -> None:
    vit, hybrid, resnet = (
        [(float(run.exaflops), run.average) for run in TABLE6 if run.family == kind] for kind in FAMILIES
    )
    times = saving(vit, resnet)
    assert times is not None
    assert 2 < times < 4  # "2 - 4 times less compute"
    assert gap(vit, resnet) > 0
    assert gap(hybrid, vit, 0.0) > 0.5  # ahead at small budgets,
    assert abs(gap(hybrid, vit, 1.0)) < 0.15  # no longer at large ones
    assert growth(vit) > 0


def test_the_papers_figure() -> None:
    panel = paper_panel()
    assert [(line.name, len(line.x)) for line in panel.series] == [("ViT", 6), ("hybrid", 5), ("ResNet", 7)]
    assert list(panel.series[0].notes) == ["B/32", "B/16", "L/32", "L/16", "L/16", "H/14"]
    assert panel.series[0].y[0] == pytest.approx(0.925)


@pytest.mark.parametrize("models", MODELS.values(), ids=MODELS)
def test_families_share_a_range_of_compute(models: dict[str, ModelConfig]) -> None:
    """Or they could not be compared: each pair overlaps by a factor of 2 at least."""
    assert [list(map(family, models.values())).count(kind) for kind in FAMILIES] == [3, 2, 3]
    macs = {kind: [model.forward_macs for model in models.values() if family(model) == kind] for kind in FAMILIES}
    for kind in ("hybrid", "ResNet"):
        assert min(max(macs["ViT"]), max(macs[kind])) * 3 > 2 * max(min(macs["ViT"]), min(macs[kind]))


def test_gap_at_equal_compute() -> None:
    """By hand: the common range is 10 to 1000, its middle 100; there 0.6 on one line, 0.5 on the other."""
    ours, theirs = [(10.0, 0.5), (1000.0, 0.7)], [(1.0, 0.1), (10_000.0, 0.9)]
    assert gap(ours, theirs) == pytest.approx(0.6 - 0.5)
    assert gap(ours, theirs, 0.0) == pytest.approx(0.5 - 0.3)
    assert gap(ours, theirs, 1.0) == pytest.approx(0.7 - 0.7)
    assert gap(theirs, ours) == -gap(ours, theirs)


def test_what_costs_more_and_gives_less_does_not_count() -> None:
    line = [(10.0, 0.5), (1000.0, 0.7)]
    assert gap([*line, (100.0, 0.2)], line) == 0
    assert gap([(1.0, 0.5), (100.0, 0.3)], [(1.0, 0.4), (100.0, 0.4)]) == pytest.approx(0.1)  # the best stays


def test_families_without_common_compute() -> None:
    with pytest.raises(ValueError, match=r"10 exaFLOPs.*5: no overlap"):
        gap([(1.0, 0.5), (5.0, 0.6)], [(10.0, 0.5), (20.0, 0.6)])


def test_saving_at_equal_accuracy() -> None:
    assert saving([(1.0, 0.4), (100.0, 0.8)], [(4.0, 0.4), (400.0, 0.8)]) == pytest.approx(4)
    assert saving([(1.0, 0.4)], [(1.0, 0.5)]) is None


def test_growth() -> None:
    assert growth([(1.0, 0.5), (2.0, 0.9), (4.0, 0.6)]) == pytest.approx(-0.3)
    assert growth([(1.0, 0.5), (3.0, 0.9), (4.0, 0.6)]) == pytest.approx(0.1)  # 3 is more than half of 4


@pytest.mark.parametrize(
    ("ahead", "verdicts", "measured", "times"),
    [
        ({"ViT": 0.04, "hybrid": 0.05, "ResNet": 0.0}, ["shows"] * 3, (0.04, 0.01), "it is 4.0 times"),
        ({"ViT": 0.0, "hybrid": -0.02, "ResNet": 0.03}, ["contradicted"] * 2 + ["shows"], (-0.03, -0.02), "it is 0.4"),
        ({"ViT": 0.5, "hybrid": 0.0, "ResNet": 0.0}, None, (0.5, -0.5), "there is no accuracy that both reach"),
    ],
)
def test_report(ahead: dict[str, float], verdicts: list[str] | None, measured: tuple[float, float], times: str) -> None:
    """As if accuracy rose by 2 points with each doubling of compute, from where `ahead` says."""

    def accuracy(point: Point) -> float:
        doublings = math.log2(exaflops(point.config, 30_000) / 1e-6)
        return 0.2 + ahead[str(point.labels["family"])] + 0.02 * doublings + noise(point)

    written = report(SCALING, finished(SCALING, accuracy))
    claims = written["claims"]
    assert verdicts is None or [claim["verdict"] for claim in claims] == verdicts
    assert [claim["measured"]["mean"] for claim in claims[:2]] == pytest.approx(measured)
    assert f"ResNets take 3.3 times the compute of ViTs in Table 6; here {times}" in written["lead"]
    assert written["table"]["rows"][0][:3] == ["ViT", "ViT-2x48-7", "300 steps"]
    ours, _ = written["panels"]
    assert [(line["name"], len(line["x"])) for line in ours["series"]] == [("ViT", 6), ("hybrid", 4), ("ResNet", 6)]

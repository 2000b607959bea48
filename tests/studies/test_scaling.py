"""Fig. 5 and Table 6: their numbers, and how two families are compared."""

import math

import pytest
from finished import noise, report, verdicts

from vitlab.models import get_config
from vitlab.models.config import ModelConfig
from vitlab.studies.scaling import FAMILIES, MODELS, SCALING, TABLE6, PaperRun, family, gap, growth, paper_panel, saving
from vitlab.studies.spec import Point, exaflops

JFT = 303_000_000


@pytest.mark.parametrize(
    ("point", "run"),
    list(zip(SCALING.variants("paper"), TABLE6, strict=True)),
    ids=[f"{run.model}-{run.epochs}" for run in TABLE6],
)
def test_runs_of_the_paper(point: Point, run: PaperRun) -> None:
    """Its recipes and its column of exaFLOPs, printed without decimals: within 2 %; with convolutions, within 1 %."""
    config, printed = point.config, run.exaflops
    if (run.model, run.epochs) == ("R50+ViT-L/16", 7):
        # 859 is not half of the 1668 that the same model takes for 14 epochs; ours fits that one (docs/paper.md).
        assert not math.isclose(printed, 1668 / 2, rel_tol=0.02)
        printed = 1668 / 2
    tolerance = 0.02 if run.family == "ViT" else 0.01
    assert abs(exaflops(config, JFT) - printed) <= tolerance * printed + 0.5
    assert (config.epochs, config.batch_size, config.loss) == (run.epochs, 4096, "sigmoid")
    assert config.model.head_bias == -10.0
    assert config.model.forward_macs == pytest.approx(get_config(run.model).forward_macs, rel=0.01)  # but for the head
    assert point.labels["family"] == run.family


def test_average_of_five_data_sets() -> None:
    """Table 7 prints it for two of the runs."""
    averages = {(run.model, run.epochs): run.average for run in TABLE6}
    assert averages["R50x1", 7] == pytest.approx(89.33, abs=0.005)
    assert averages["R152x2", 7] == pytest.approx(94.01, abs=0.01)
    assert max(averages, key=lambda run: averages[run]) == ("ViT-H/14", 14)


def test_claims_of_the_paper_hold_in_its_table() -> None:
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


def test_figure_of_the_paper() -> None:
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
    assert gap([*ours, (100.0, 0.2)], ours) == 0  # what costs more and gives less does not count
    assert gap([(1.0, 0.5), (100.0, 0.3)], [(1.0, 0.4), (100.0, 0.4)]) == pytest.approx(0.1)  # the best stays


def test_saving_and_growth() -> None:
    assert saving([(1.0, 0.4), (100.0, 0.8)], [(4.0, 0.4), (400.0, 0.8)]) == pytest.approx(4)
    assert saving([(1.0, 0.4)], [(1.0, 0.5)]) is None
    assert growth([(1.0, 0.5), (2.0, 0.9), (4.0, 0.6)]) == pytest.approx(-0.3)
    assert growth([(1.0, 0.5), (3.0, 0.9), (4.0, 0.6)]) == pytest.approx(0.1)  # 3 is more than half of 4


@pytest.mark.parametrize(
    ("ahead", "expected", "measured", "times"),
    [
        ({"ViT": 0.04, "hybrid": 0.05, "ResNet": 0.0}, ["shows"] * 3, (0.04, 0.01), "it is 4.0 times"),
        ({"ViT": 0.0, "hybrid": -0.02, "ResNet": 0.03}, ["contradicted"] * 2 + ["shows"], (-0.03, -0.02), "it is 0.4"),
        ({"ViT": 0.5, "hybrid": 0.0, "ResNet": 0.0}, None, (0.5, -0.5), "there is no accuracy that both reach"),
    ],
)
def test_report(ahead: dict[str, float], expected: list[str] | None, measured: tuple[float, float], times: str) -> None:
    """As if accuracy rose by 2 points with each doubling of compute, from where `ahead` says."""

    def accuracy(point: Point) -> float:
        doublings = math.log2(exaflops(point.config, 30_000) / 1e-6)
        return 0.2 + ahead[str(point.labels["family"])] + 0.02 * doublings + noise(point)

    written = report(SCALING, accuracy)
    assert expected is None or verdicts(written) == expected
    assert [claim["measured"]["mean"] for claim in written["claims"][:2]] == pytest.approx(measured)
    assert f"ResNets take 3.3 times the compute of ViTs in Table 6; here {times}" in written["lead"]
    ours, _ = written["panels"]
    assert [(line["name"], len(line["x"])) for line in ours["series"]] == [("ViT", 6), ("hybrid", 4), ("ResNet", 6)]

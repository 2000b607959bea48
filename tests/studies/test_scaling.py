"""Fig. 5 and Table 6: their numbers, and how two families are compared."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

from vitlab.models import get_config
from vitlab.models.config import ModelConfig
from vitlab.pipelines.pretrain import pretrain
from vitlab.studies.scaling import (
    FAMILIES,
    GPU,
    LEARNED,
    NEW,
    SCALING,
    TABLE6,
    TINY,
    PaperRun,
    family,
    gap,
    growth,
    paper_panel,
    saving,
)
from vitlab.studies.study import SEEDS, Done, Point, Scale, exaflops

JFT = 303_000_000
HALF_OF_CIFAR10 = 25_000

# ------------------------------------------------------------------------------------------------------- the paper's


@pytest.mark.parametrize(
    ("point", "run"),
    list(zip(SCALING.points("paper"), TABLE6, strict=True)),
    ids=[f"{run.model}-{run.epochs}" for run in TABLE6] + [],
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
    points = SCALING.points("paper")
    assert [family(point.config.model) for point in points] == 6 * ["ViT"] + 7 * ["ResNet"] + 5 * ["hybrid"]
    for point, run in zip(points, TABLE6, strict=True):
        assert (point.config.epochs, point.config.batch_size, point.config.seed) == (run.epochs, 4096, 0)
        assert (point.config.loss, point.config.model.head_bias) == ("sigmoid", -10.0)
        assert point.config.fewshot is not None
        assert (point.config.fewshot.dataset, point.config.fewshot.test_split) == ("imagenet", "test")
        named = get_config(run.model)
        assert point.config.model.forward_macs == pytest.approx(named.forward_macs, rel=0.01)  # but for the head
    rates = {run.model: point.config.optim.lr for point, run in zip(points, TABLE6, strict=True)}
    assert rates["R200x3"] == rates["R152x2"] == 6e-4


def test_the_papers_claims_are_in_its_table() -> None:
    vit, hybrid, resnet = ([(float(r.exaflops), r.average) for r in TABLE6 if family(get_config(r.model)) == kind]
                           for kind in FAMILIES)  # fmt: skip
    times = saving(vit, resnet)
    assert times is not None
    assert 2 < times < 4  # "2 - 4 times less compute"
    assert gap(vit, resnet) > 0
    assert gap(hybrid, vit, 0.0) > 0.5  # ahead at small budgets,
    assert abs(gap(hybrid, vit, 1.0)) < 0.15  # no longer at large ones
    assert growth(vit) > 0


def test_the_papers_figure() -> None:
    panel = paper_panel()
    assert panel.front
    assert panel.log_x
    assert [(each.name, len(each.x)) for each in panel.series] == [("ViT", 6), ("hybrid", 5), ("ResNet", 7)]
    assert [note for each in panel.series for note in each.notes][:6] == [
        "B/32",
        "B/16",
        "L/32",
        "L/16",
        "L/16",
        "H/14",
    ]
    assert panel.series[0].y[0] == pytest.approx(0.925)


# ----------------------------------------------------------------------------------------------------------- in small


@pytest.mark.parametrize(("scale", "models"), [("tiny", TINY), ("gpu", GPU)])
def test_points(scale: Scale, models: dict[str, ModelConfig]) -> None:
    points = SCALING.points(scale)
    assert len({point.name for point in points}) == len(points) == 2 * len(models) * len(SEEDS)
    assert all(re.fullmatch(r"[\w.-]+", point.name) for point in points)
    assert [list(map(family, models.values())).count(kind) for kind in FAMILIES] == [3, 2, 3]
    assert not set(LEARNED) & set(NEW)
    for point in points:
        few = point.config.fewshot
        assert few is not None
        assert (point.config.data.classes, few.classes, point.config.model.num_classes) == (LEARNED, NEW, len(LEARNED))


@pytest.mark.parametrize("models", [TINY, GPU])
def test_families_share_a_range_of_compute(models: dict[str, ModelConfig]) -> None:
    """Or they could not be compared: each pair overlaps by a factor of 2 at least."""
    macs = {kind: [model.forward_macs for model in models.values() if family(model) == kind] for kind in FAMILIES}
    for kind in ("hybrid", "ResNet"):
        assert min(max(macs["ViT"]), max(macs[kind])) * 3 > 2 * max(min(macs["ViT"]), min(macs[kind]))


def test_fifty_minutes_of_a_core() -> None:
    """At 18 GFLOP/s: models this small leave a core half idle."""
    assert sum(exaflops(point.config, 30_000) for point in SCALING.points("tiny")) < 50 * 60 * 18e9 / 1e18


def test_twenty_five_minutes_of_a_gpu() -> None:
    """At 100 TFLOP/s for what is mostly tokens, and a fifth of it for ResNets."""
    slow = {"ViT": 1, "hybrid": 1, "ResNet": 5}
    spent = sum(
        slow[family(point.config.model)] * exaflops(point.config, HALF_OF_CIFAR10) for point in SCALING.points("gpu")
    )
    assert spent < 25 * 60 * 100e12 / 1e18


@pytest.mark.parametrize("name", ["ViT-2x48-7", "hybrid-2x48", "ResNet-1"])
def test_a_point_runs(name: str, tmp_path: Path) -> None:
    """On digits in place of clothes, for two steps."""
    point = next(point for point in SCALING.points("tiny") if point.labels["model"] == name)
    config = point.config
    assert config.fewshot is not None
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, name="digits"), steps=2, batch_size=8,
        fewshot=dataclasses.replace(config.fewshot, test_images=20),
    )  # fmt: skip
    pretrain(config, tmp_path, device="cpu", tensorboard=False)
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"fewshot_5shot", "fewshot_10shot"} <= last.keys()


# ---------------------------------------------------------------------------------------------------------- comparing


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
    with pytest.raises(ValueError, match="one family's cheapest run takes 10 exaFLOPs, the other's dearest 5"):
        gap([(1.0, 0.5), (5.0, 0.6)], [(10.0, 0.5), (20.0, 0.6)])


def test_saving_at_equal_accuracy() -> None:
    assert saving([(1.0, 0.4), (100.0, 0.8)], [(4.0, 0.4), (400.0, 0.8)]) == pytest.approx(4)
    assert saving([(1.0, 0.4)], [(1.0, 0.5)]) is None


def test_growth() -> None:
    assert growth([(1.0, 0.5), (2.0, 0.9), (4.0, 0.6)]) == pytest.approx(-0.3)
    assert growth([(1.0, 0.5), (3.0, 0.9), (4.0, 0.6)]) == pytest.approx(0.1)  # 3 is more than half of 4


# ---------------------------------------------------------------------------------------------------------- reporting


def finished(ahead: dict[str, float]) -> list[Done]:
    """As if accuracy rose by 2 points with each doubling of compute, from where `ahead` says."""
    done = []
    for point in SCALING.points("tiny"):
        kind = str(point.labels["family"])
        compute = exaflops(point.config, 30_000)
        shots = 0.6 + ahead[kind] + 0.02 * math.log2(compute / 1e-6) + 0.001 * point.config.seed
        figures = {"fewshot_5shot": shots, "fewshot_10shot": shots + 0.05, "accuracy": 0.9}
        done.append(Done(point, figures, [], 30_000))
    return done


def test_report() -> None:
    report = SCALING.report(finished({"ViT": 0.04, "hybrid": 0.05, "ResNet": 0.0}))
    assert [claim.verdict for claim in report.claims] == ["shows"] * 3
    assert [claim.measured.mean for claim in report.claims[:2]] == pytest.approx([0.04, 0.01])
    assert len(report.rows) == 2 * len(TINY)
    assert {len(row) for row in report.rows} == {len(report.columns)}
    assert report.rows[0][:3] == ("ViT", "ViT-2x48-7", f"{SCALING.points('tiny')[0].labels['length']}")
    ours, paper = report.panels
    assert ours.front
    assert paper == paper_panel()
    assert [(each.name, len(each.x)) for each in ours.series] == [("ViT", 6), ("hybrid", 4), ("ResNet", 6)]
    assert all(spread == pytest.approx(0.001) for each in ours.series for spread in each.spread)
    assert "ResNets take 3.3 times the compute of ViTs in Table 6; here it is 4.0 times" in report.lead


def test_report_of_the_contrary() -> None:
    report = SCALING.report(finished({"ViT": 0.0, "hybrid": -0.02, "ResNet": 0.03}))
    assert [claim.verdict for claim in report.claims] == ["contradicted", "contradicted", "shows"]
    assert [claim.measured.mean for claim in report.claims[:2]] == pytest.approx([-0.03, -0.02])


def test_report_where_no_accuracy_is_shared() -> None:
    report = SCALING.report(finished({"ViT": 0.5, "hybrid": 0.0, "ResNet": 0.0}))
    assert "here there is no accuracy that both reach" in report.lead

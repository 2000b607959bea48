"""Fig. 9's study: two kinds of heads over learning rates."""

import dataclasses

import pytest
from finished import check_points, finished, noise

from vitlab.inspect.plots import panels
from vitlab.studies.head import HEAD, RATES, lost
from vitlab.studies.study import Point

TINY = HEAD.points("tiny")
LOW, HIGH = RATES["tiny"]["gap"][0], RATES["tiny"]["gap"][-1]
BEST = {"gap": RATES["tiny"]["gap"][1], "token": RATES["tiny"]["token"][2]}


def accuracy(point: Point) -> float:
    """As the paper has it: alike at the best, and GAP falls further at the highest rate."""
    kind, rate = str(point.labels["kind"]), float(point.labels["rate"])
    best = 0.8 + (1e-3 if kind == "gap" else -1e-3) * (1 if point.config.seed % 2 else -1)
    fall = 0.0 if rate == BEST[kind] else {"gap": 0.3, "token": 0.1}[kind] if rate == HIGH else 0.2
    return best - fall + noise(point)


def test_points() -> None:
    check_points(HEAD)


def test_the_kinds_are_alike_but_for_the_rates() -> None:
    plain = set()
    for point in TINY:
        config, rate = point.config, point.labels["rate"]
        assert (config.model.pool, config.optim.lr) == (point.labels["kind"], rate)  # pyright: ignore[reportAttributeAccessIssue]
        model = dataclasses.replace(config.model, pool="gap")
        plain.add(dataclasses.replace(config, model=model, optim=dataclasses.replace(config.optim, lr=1.0), seed=0))
    assert len(plain) == 1


def test_the_papers_three_runs() -> None:
    found = {(point.labels["kind"], point.config.optim.lr) for point in HEAD.points("paper")}
    assert found == {("token", 8e-4), ("gap", 8e-4), ("gap", 3e-4)}


def test_report() -> None:
    report = HEAD.report(finished(TINY, accuracy))
    assert [claim.verdict for claim in report.claims] == ["shows"] * 3
    assert [claim.expected for claim in report.claims] == ["equal", "more", "more"]
    assert report.claims[1].measured.mean == pytest.approx(0.2, abs=0.005)
    assert f"GAP ({BEST['gap']:g}) and class token ({BEST['token']:g})" in report.claims[0].text
    best = [row[:2] for row in report.rows if row[-1] == "best"]
    assert best == [("class token", f"{BEST['token']:g}"), ("GAP", f"{BEST['gap']:g}")]
    curves = report.panels[0]
    assert len(curves.series) == 8
    assert list(curves.series[0].x) == [10, 20]
    assert panels(report.panels).axes


def test_report_of_another_outcome() -> None:
    """The class token is worse at its best, and falls further."""

    def other(point: Point) -> float:
        token = point.labels["kind"] == "token"
        return 0.8 - 0.1 * token - (0.3 if token else 0.1) * (point.labels["rate"] == HIGH) + noise(point)

    claims = HEAD.report(finished(TINY, other)).claims
    assert [claim.verdict for claim in claims] == ["differ", "contradicted", "contradicted"]


def test_report_of_the_papers_runs() -> None:
    """One seed shows nothing; the class token has one rate alone, and loses nothing there."""
    table = {("token", 8e-4): 0.6, ("gap", 8e-4): 0.5, ("gap", 3e-4): 0.59}
    done = finished(
        HEAD.points("paper"), lambda point: table[str(point.labels["kind"]), float(point.labels["rate"])],
        examples=303_000_000,
    )  # fmt: skip
    report = HEAD.report(done)
    assert [claim.verdict for claim in report.claims] == ["not clear"] * 3
    assert report.claims[1].measured.mean == pytest.approx(0.09)


def test_what_is_lost_is_paired_by_seed() -> None:
    gone = lost(finished(TINY, accuracy), "accuracy", HIGH)
    assert {(each.point.labels["kind"], each.seed) for each in gone} == {
        (kind, seed) for kind in ("gap", "token") for seed in (0, 1, 2)
    }
    assert all(each.point.labels["rate"] == HIGH for each in gone)
    assert [each.figures["lost"] for each in gone if each.point.labels["kind"] == "gap"] == [pytest.approx(0.3)] * 3

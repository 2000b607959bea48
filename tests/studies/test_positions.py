"""Table 8's study: its cells, and a report that says what the runs say."""

import dataclasses

import pytest
from finished import check_points, finished, noise

from vitlab.inspect.plots import panels
from vitlab.models.config import ViTConfig
from vitlab.studies.positions import POSITIONS, TABLE8
from vitlab.studies.study import Point


def accuracy(point: Point) -> float:
    """As the paper has it, but that no seed is like another."""
    sign = 1 if point.config.seed % 2 else -1
    below = 0.1 if point.labels["kind"] == "none" else 0.0
    return 0.7 - below + noise(point) + sign * {"1d": 1e-3, "2d": -1e-3}.get(str(point.labels["kind"]), 0.0)


def test_points() -> None:
    check_points(POSITIONS)
    for scale in ("tiny", "gpu", "paper"):
        points = POSITIONS.points(scale)
        cells = {(p.config.model.position, p.config.model.position_at) for p in points
                 if isinstance(p.config.model, ViTConfig)}  # fmt: skip
        assert cells == set(TABLE8)
        assert all((p.labels["kind"], p.labels["at"]) in TABLE8 for p in points)


def test_only_the_positions_differ() -> None:
    plain = set()
    for point in POSITIONS.points("tiny"):
        model = dataclasses.replace(point.config.model, position="1d", position_at="stem")
        plain.add(dataclasses.replace(point.config, model=model, seed=0))
    assert len(plain) == 1


def test_report_of_the_papers_outcome() -> None:
    report = POSITIONS.report(finished(POSITIONS.points("tiny"), accuracy))
    assert [claim.verdict for claim in report.claims[:2]] == ["shows", "shows"]
    assert report.claims[0].measured.mean == pytest.approx(0.1, abs=0.005)
    assert report.claims[0].paper.startswith("0.61382 against 0.64080")
    equals = [claim for claim in report.claims if claim.expected == "equal"]
    assert len(equals) == 4
    assert {claim.verdict for claim in equals} == {"shows"}
    assert equals[0].paper.startswith("0.64154 and 0.64023")
    assert len(report.rows) == len(TABLE8)
    assert report.rows[0] == ("none", "", "60.0 ± 0.1", "61.4", "60.0 ± 0.1")
    assert panels(report.panels).axes


def test_report_of_another_outcome() -> None:
    """No embedding is best, and in every block is worse than at the stem."""
    worse = {"none": 0.8, "stem": 0.7, "shared": 0.7, "every": 0.6}

    def other(point: Point) -> float:
        return worse[str(point.labels["kind"] if point.labels["kind"] == "none" else point.labels["at"])] + noise(point)

    claims = POSITIONS.report(finished(POSITIONS.points("tiny"), other)).claims
    told = {claim.text: claim.verdict for claim in claims}
    assert [verdict for text, verdict in told.items() if "lower" in text] == ["contradicted"] * 2
    differ = [text for text, verdict in told.items() if verdict == "differ"]
    assert len(differ) == 2
    assert all("relative" in text or "in every block are" in text for text in differ)

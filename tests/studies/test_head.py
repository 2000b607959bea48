"""Fig. 9's study: two kinds of heads over learning rates."""

import pytest
from finished import noise, report, verdicts

from vitlab.models.config import ViTConfig
from vitlab.studies.head import HEAD, RATES
from vitlab.studies.presets import changed
from vitlab.studies.spec import Point

HIGH = RATES["tiny"]["gap"][-1]
BEST = {"gap": RATES["tiny"]["gap"][1], "token": RATES["tiny"]["token"][2]}


def test_the_kinds_are_equal_but_for_the_rates() -> None:
    plain = set()
    for point in HEAD.variants("tiny"):
        config = point.config
        assert isinstance(config.model, ViTConfig)
        assert (config.model.pool, config.optim.lr) == (point.labels["kind"], point.labels["rate"])
        plain.add(changed(config, model={"pool": "gap"}, optim={"lr": 1.0}))
    assert len(plain) == 1
    runs = {(point.labels["kind"], point.config.optim.lr) for point in HEAD.variants("paper")}
    assert runs == {("token", 8e-4), ("gap", 8e-4), ("gap", 3e-4)}


def test_report() -> None:
    def accuracy(point: Point) -> float:
        """As in the paper: equal at their best, and GAP falls further at the highest rate."""
        kind, rate = str(point.labels["kind"]), point.labels["rate"]
        best = 0.8 + (1e-3 if kind == "gap" else -1e-3) * (1 if point.config.seed % 2 else -1)
        fall = 0.0 if rate == BEST[kind] else {"gap": 0.3, "token": 0.1}[kind] if rate == HIGH else 0.2
        return best - fall + noise(point)

    written = report(HEAD, accuracy)
    assert verdicts(written) == ["shows"] * 3
    assert [claim["expected"] for claim in written["claims"]] == ["equal", "more", "more"]
    assert written["claims"][1]["measured"]["mean"] == pytest.approx(0.2, abs=0.005)
    best = [row[:2] for row in written["table"]["rows"] if row[-1] == "best"]
    assert best == [["class token", f"{BEST['token']:g}"], ["GAP", f"{BEST['gap']:g}"]]
    curves = written["panels"][0]["series"]
    assert len(curves) == 8
    assert list(curves[0]["x"]) == [10, 20]
    assert curves[0]["y"][0] == pytest.approx(curves[0]["y"][1] / 2)


def test_report_of_the_runs_of_the_paper() -> None:
    """The class token has only one rate, and loses nothing there."""
    table = {("token", 8e-4): 0.6, ("gap", 8e-4): 0.5, ("gap", 3e-4): 0.59}
    written = report(HEAD, lambda p: table[str(p.labels["kind"]), float(p.labels["rate"])], scale="paper")
    assert written["claims"][1]["measured"]["mean"] == pytest.approx(0.09)

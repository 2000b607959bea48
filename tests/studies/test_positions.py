"""Table 8's study: its cells, and claims of equality."""

import pytest
from finished import noise, report, verdicts

from vitlab.models.config import ViTConfig
from vitlab.studies.positions import POSITIONS, TABLE8
from vitlab.studies.presets import changed
from vitlab.studies.spec import Point, Scale


@pytest.mark.parametrize("scale", ["tiny", "gpu", "paper"])
def test_the_cells_of_the_table_differ_only_by_their_positions(scale: Scale) -> None:
    cells, plain = set(), set()
    for point in POSITIONS.variants(scale):
        model = point.config.model
        assert isinstance(model, ViTConfig)
        assert (model.position, model.position_at) == (point.labels["kind"], point.labels["at"])
        cells.add((model.position, model.position_at))
        plain.add(changed(point.config, model={"position": "1d", "position_at": "stem"}))
    assert cells == set(TABLE8)
    assert len(plain) == 1


def test_report_of_the_outcome_in_the_paper() -> None:
    def accuracy(point: Point) -> float:
        sign = 1 if point.config.seed % 2 else -1
        kind = str(point.labels["kind"])
        return 0.7 - 0.1 * (kind == "none") + noise(point) + sign * {"1d": 1e-3, "2d": -1e-3}.get(kind, 0.0)

    written = report(POSITIONS, accuracy)
    claims = written["claims"]
    assert verdicts(written) == ["shows"] * 6
    assert [claim["expected"] for claim in claims] == ["more"] * 2 + ["equal"] * 4
    assert claims[0]["measured"]["mean"] == pytest.approx(0.1, abs=0.005)
    assert claims[0]["paper"].startswith("0.61382 against 0.64080")
    assert claims[2]["paper"].startswith("0.64154 and 0.64023")
    assert written["table"]["rows"][0] == ["none", "", "60.0 ± 0.1", "61.4", "60.0 ± 0.1"]
    assert list(written["panels"][0]["ticks"]) == ["none", "1-D", "2-D", "relative"]


def test_report_of_another_outcome() -> None:
    """None is best, and in every block is worse than at the stem."""
    accuracies = {"none": 0.8, "stem": 0.7, "shared": 0.7, "every": 0.6}
    written = report(
        POSITIONS, lambda p: accuracies["none" if p.labels["kind"] == "none" else str(p.labels["at"])] + noise(p)
    )
    assert verdicts(written) == ["contradicted"] * 2 + ["shows", "differ", "differ", "shows"]

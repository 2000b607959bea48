"""Fig. 8's study: one dimension at a time, over compute."""

import dataclasses
import math

import pytest
from finished import check_points, finished, noise

from vitlab.inspect.plots import panels
from vitlab.models.config import ViTConfig
from vitlab.studies.shape import SHAPE, compute
from vitlab.studies.study import Point, Scale

CHANGED = {"depth": {"depth"}, "width": {"width", "heads"}, "mlp": {"mlp_dim"}, "patch": {"patch_size"}, "base": set()}


def test_points() -> None:
    check_points(SHAPE)


@pytest.mark.parametrize("scale", ["tiny", "gpu", "paper"])
def test_one_dimension_at_a_time(scale: Scale) -> None:
    points = SHAPE.points(scale)
    base = next(point for point in points if point.labels["dimension"] == "base").config
    for point in points:
        model, ours = point.config.model, base.model
        assert isinstance(model, ViTConfig)
        assert isinstance(ours, ViTConfig)
        different = {f.name for f in dataclasses.fields(model) if getattr(model, f.name) != getattr(ours, f.name)}
        if point.labels["dimension"] == "all":
            assert different >= {"depth", "width", "heads", "mlp_dim", "patch_size"}
        else:
            assert different - {"representation_size"} == CHANGED[str(point.labels["dimension"])]
        assert model.width / model.heads == ours.width / ours.heads
        assert dataclasses.replace(point.config, model=ours, seed=base.seed) == base


@pytest.mark.parametrize("scale", ["tiny", "gpu", "paper"])
def test_depth_and_width_are_compared_at_like_compute(scale: Scale) -> None:
    """The widest has the compute of the deepest, or a little more: what depth is worth is not the compute's."""
    done = finished(SHAPE.points(scale), lambda point: 0.5)
    costs = compute(done)
    most = {
        dimension: max(
            costs[each.point.labels["shape"]] for each in done if each.point.labels["dimension"] == dimension
        )
        for dimension in ("depth", "width")
    }
    assert 1 <= most["width"] / most["depth"] < 1.5
    assert costs[next(p for p in SHAPE.points(scale) if p.labels["dimension"] == "base").labels["shape"]] == 1


BASE = SHAPE.points("tiny")[0].config.model.forward_macs


def gain(point: Point, slopes: dict[str, float]) -> float:
    cost = point.config.model.forward_macs / BASE
    return 0.5 + slopes.get(str(point.labels["dimension"]), 0.01) * math.log(cost) + noise(point)


def test_report() -> None:
    points = SHAPE.points("tiny")
    report = SHAPE.report(finished(points, lambda point: gain(point, {"depth": 0.05})))
    assert [claim.verdict for claim in report.claims] == ["shows"] * 8
    assert "at 6.6 times the base's compute" in report.claims[0].text
    assert "the widest, at 8.2 times" in report.claims[0].text
    assert len(report.rows) == len(points) / 3
    assert report.rows[0] == (
        "the base", "2", "32", "64", "7", "22,565", "1.00", "50.0 ± 0.1", "50.0 ± 0.1"
    )  # fmt: skip
    depth = report.panels[0].series[0]
    assert (depth.name, [round(x, 2) for x in depth.x]) == ("depth", [1.0, 1.8, 3.39, 6.57])
    patch = next(each for each in report.panels[0].series if each.name == "patch side")
    assert [round(x, 2) for x in patch.x] == [0.39, 1.0, 3.2]  # from the cheapest, the base in its place
    assert panels(report.panels).axes


def test_report_of_another_outcome() -> None:
    slopes = {"depth": -0.05, "width": 0.05, "patch": -0.05, "all": -0.05}
    claims = SHAPE.report(finished(SHAPE.points("tiny"), lambda point: gain(point, slopes))).claims
    assert [claim.verdict for claim in claims] == ["contradicted"] * 8

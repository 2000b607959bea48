"""Fig. 8's study: one dimension at a time, over compute."""

import dataclasses
import math

import pytest
from finished import finished, noise, report, verdicts

from vitlab.models.config import ViTConfig
from vitlab.studies.shape import SHAPE, compute
from vitlab.studies.spec import Point, Scale

CHANGED = {"depth": {"depth"}, "width": {"width", "heads"}, "mlp": {"mlp_dim"}, "patch": {"patch_size"}, "base": set()}


@pytest.mark.parametrize("scale", ["tiny", "gpu", "paper"])
def test_one_dimension_at_a_time(scale: Scale) -> None:
    base, *_ = points = SHAPE.variants(scale)
    for point in points:
        model, ours = point.config.model, base.config.model
        assert isinstance(model, ViTConfig)
        assert isinstance(ours, ViTConfig)
        different = {f.name for f in dataclasses.fields(model) if getattr(model, f.name) != getattr(ours, f.name)}
        if point.labels["dimension"] == "all":
            assert different >= {"depth", "width", "heads", "mlp_dim", "patch_size"}
        else:
            assert different - {"representation_size"} == CHANGED[str(point.labels["dimension"])]
        assert model.width / model.heads == ours.width / ours.heads
        assert dataclasses.replace(point.config, model=ours) == base.config
    results = finished(SHAPE, lambda point: 0.5, scale=scale)
    most = {name: max(map(compute, results.where(dimension=name).groups())) for name in ("base", "depth", "width")}
    assert most["base"] == 1
    assert 1 <= most["width"] / most["depth"] < 1.5, "depth and width are compared at similar compute"


@pytest.mark.parametrize(
    ("slopes", "verdict"),
    [({"depth": 0.05}, "shows"), ({"depth": -0.05, "width": 0.05, "patch": -0.05, "all": -0.05}, "contradicted")],
)
def test_report(slopes: dict[str, float], verdict: str) -> None:
    base = SHAPE.variants("tiny")[0].config.model.forward_macs

    def accuracy(point: Point) -> float:
        slope = slopes.get(str(point.labels["dimension"]), 0.01)
        return 0.5 + slope * math.log(point.config.model.forward_macs / base) + noise(point)

    written = report(SHAPE, accuracy)
    assert verdicts(written) == [verdict] * 8
    assert "at 6.6 times the base's compute" in written["claims"][0]["claim"]
    assert written["table"]["rows"][0][:7] == ["the base", "2", "32", "64", "7", "22,565", "1.00"]
    lines = {line["name"]: [round(x, 2) for x in line["x"]] for line in written["panels"][0]["series"]}
    assert lines["depth"] == [1.0, 1.8, 3.39, 6.57]
    assert lines["patch side"] == [0.39, 1.0, 3.2]  # sorted, the base among them

"""Masked patch prediction against fresh weights: a fair comparison."""

import pytest
from finished import noise, report

from vitlab.config import FinetuneConfig
from vitlab.recipes import PRETRAIN
from vitlab.studies.masking import MASKING, VARIANTS
from vitlab.studies.presets import changed
from vitlab.studies.spec import Point, Scale, exaflops

ACCURACIES = {
    "scratch": 0.30,
    "scratch-zero": 0.29,
    "mean-color-50": 0.34,
    "mean-color-50-zero": 0.32,
    "downsized-50": 0.33,
    "regression-50": 0.32,
    "mean-color-15": 0.35,
    "supervised": 0.38,
}


def accuracy(point: Point) -> float:
    return ACCURACIES[str(point.labels["variant"])] + noise(point, 0.01)


@pytest.mark.parametrize("scale", ["tiny", "gpu"])
def test_only_the_start_differs(scale: Scale) -> None:
    """Pre-trained and from scratch: the same labels, settings and shape; the pairs differ only by their heads."""
    points = {point.name: point for point in MASKING.variants(scale)}
    assert len(points) == 2 * len(VARIANTS) + 3
    scratch = points["scratch.finetuned"].config
    assert isinstance(scratch, FinetuneConfig)
    assert (scratch.from_scratch, scratch.data.part, scratch.head_std) == (True, 0.02, 0.1)
    for name, masking in VARIANTS.items():
        before, after = points[name], points[f"{name}.finetuned"]
        assert after.start == before.name
        assert after.config == changed(scratch, from_scratch=False)
        assert before.config == changed(points["mean-color-50"].config, masking=masking)
    for name in ("scratch", "mean-color-50"):
        wide, zero = points[f"{name}.finetuned"], points[f"{name}-zero.finetuned"]
        assert (zero.config, zero.start) == (changed(wide.config, head_std=None), wide.start)


def test_runs_of_the_paper() -> None:
    points = {point.name: point.config for point in MASKING.variants("paper")}
    assert points["mean-color-50"] == PRETRAIN["masked"]()
    assert points["scratch"] == PRETRAIN["imagenet"]("ViT-B/16")
    assert points["supervised"] == PRETRAIN["jft"]("ViT-B/16")
    after = points["mean-color-50.finetuned"]
    assert (after.model.image_hw, after.average_decay, after.steps) == ((384, 384), None, 20_000)
    # 14 epochs of ViT-B/16: a million steps of 4096, 17.6 GMACs an image
    assert exaflops(points["mean-color-50"], 303_000_000) == pytest.approx(432, rel=0.01)


def test_report() -> None:
    written = report(MASKING, accuracy, examples=50_000)
    rows = {row[0]: row[1:] for row in written["table"]["rows"]}
    assert rows["none: from scratch"] == ["", "30.0 ± 1.0", "", "77.9"]
    assert rows["mean color, 50 % corrupted"] == ["2.500 (4.250)", "34.0 ± 1.0", "+4.0 (4.0 to 4.0)", "79.9"]
    (panel,) = written["panels"]
    assert panel["ticks"][:3] == ["scratch", "scratch, head 0", "color 50 %"]
    assert panel["series"][0]["y"][2] == pytest.approx(0.34)
    measured = [round(claim["measured"]["mean"], 6) for claim in written["claims"]]
    assert measured == [0.04, 0.03, 0.03, 0.02, 0.02, -0.01]


def test_supervised_pretraining_at_the_scale_of_the_paper() -> None:
    written = report(MASKING, accuracy, scale="paper")
    assert [row[-1] for row in written["table"]["rows"] if row[0] == "supervised"] == ["84.2"]
    assert written["claims"][-1]["claim"].startswith("Supervised")
    assert written["claims"][-1]["measured"]["mean"] == pytest.approx(0.04)

"""Masked patch prediction against fresh weights: a fair comparison, within its budget, and told as it is."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from vitlab.config import FinetuneConfig
from vitlab.models.config import ViTConfig
from vitlab.pipelines.finetune import sweep_and_finetune
from vitlab.pipelines.pretrain import pretrain
from vitlab.recipes import PRETRAIN
from vitlab.studies.masking import MASKING, VARIANTS
from vitlab.studies.study import SEEDS, Done, Point, Scale, exaflops

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


def as_if_run(point: Point, by_name: Mapping[str, Point], accuracies: Mapping[str, float]) -> Done:
    """With the given accuracies after fine-tuning, 1 point more with each further seed."""
    if point.labels["run"] == "pre-trained":
        return Done(point, {"loss": 2.5, "constant_loss": 4.25, "accuracy": 0.33}, [], 50_000)
    own = point.config.model if point.start is None else by_name[point.start].config.model
    assert isinstance(own, ViTConfig)
    accuracy = accuracies[str(point.labels["variant"])] + 0.01 * point.config.seed
    return Done(point, {"accuracy": accuracy}, [], 1000, dataclasses.replace(own, num_classes=10))


def finished(scale: Scale, accuracies: Mapping[str, float] = ACCURACIES) -> list[Done]:
    points = MASKING.points(scale)
    by_name = {point.name: point for point in points}
    return [as_if_run(point, by_name, accuracies) for point in points]


@pytest.mark.parametrize("scale", ["tiny", "gpu", "paper"])
def test_points_are_named_and_ordered(scale: Scale) -> None:
    seen: set[str] = set()
    for point in MASKING.points(scale):
        assert re.fullmatch(r"[A-Za-z0-9._-]+", point.name)
        assert point.name not in seen
        assert (point.start is not None) == isinstance(point.config, FinetuneConfig)
        assert point.start is None or point.start in seen
        seen.add(point.name)


@pytest.mark.parametrize("scale", ["tiny", "gpu"])
def test_only_the_start_differs(scale: Scale) -> None:
    """Pre-trained and from scratch: the same labels, settings, seed and shape; every seed with its own pre-training."""
    points = {point.name: point for point in MASKING.points(scale)}
    assert len(points) == len(SEEDS) * (2 * len(VARIANTS) + 3)
    for seed in SEEDS:
        scratch = points[f"scratch.finetuned.seed-{seed}"].config
        assert isinstance(scratch, FinetuneConfig)
        assert scratch.from_scratch
        assert scratch.data.part == 0.02
        for name, masking in VARIANTS:
            before, after = points[f"{name}.seed-{seed}"], points[f"{name}.finetuned.seed-{seed}"]
            assert after.start == before.name
            assert after.config == dataclasses.replace(scratch, from_scratch=False)
            assert before.config.masking == masking
            same = points[f"{VARIANTS[0][0]}.seed-{seed}"].config
            assert before.config == dataclasses.replace(same, masking=masking)
            assert (before.config.seed, after.config.seed) == (seed, seed)


@pytest.mark.parametrize("scale", ["tiny", "gpu"])
def test_the_pair_with_heads_of_zeros(scale: Scale) -> None:
    """The same two runs, but for the start of their heads."""
    points = {point.name: point for point in MASKING.points(scale)}
    for seed in SEEDS:
        for name in ("scratch", "mean-color-50"):
            wide, zero = (points[f"{each}.finetuned.seed-{seed}"] for each in (name, f"{name}-zero"))
            assert isinstance(wide.config, FinetuneConfig)
            assert wide.config.head_std == 0.1
            assert zero.config == dataclasses.replace(wide.config, head_std=None)
            assert zero.start == wide.start


@pytest.mark.parametrize(("scale", "minutes", "flops"), [("tiny", 60, 33e9), ("gpu", 25, 100e12)])
def test_cost(scale: Scale, minutes: float, flops: float) -> None:
    """In minutes of one core at 33 GFLOP/s, two of which make half an hour, and of one GPU at 100 TFLOP/s."""
    spent = sum(each.exaflops for each in finished(scale))
    assert 0.3 * minutes * 60 * flops < spent * 1e18 <= minutes * 60 * flops


def test_paper_scale_is_the_papers() -> None:
    points = {point.name: point for point in MASKING.points("paper")}
    assert points["mean-color-50.seed-0"].config == PRETRAIN["masked"]()
    assert points["scratch.seed-0"].config == PRETRAIN["imagenet"]("ViT-B/16")
    assert points["supervised.seed-0"].config == PRETRAIN["jft"]("ViT-B/16")
    after = points["mean-color-50.finetuned.seed-0"].config
    assert (after.model.image_hw, after.average_decay, after.steps) == ((384, 384), None, 20_000)
    # 14 epochs of ViT-B/16: a million steps of 4096, 17.6 GMACs a image
    assert exaflops(points["mean-color-50.seed-0"].config, 303_000_000) == pytest.approx(432, rel=0.01)


def test_report_tells_each_start_beside_the_papers() -> None:
    report = MASKING.report(finished("tiny"))
    assert {len(row) for row in report.rows} == {len(report.columns)}
    assert [row[0] for row in report.rows][:2] == ["none: from scratch", "none, and a head of zeros"]
    assert report.rows[0][1:] == ["", "31.0 ± 1.0", "", "77.9"]
    assert report.rows[1][1:] == ["", "30.0 ± 1.0", "-1.0 (-1.0 to -1.0)", ""]
    assert report.rows[2][1:] == ["2.500 (4.250)", "35.0 ± 1.0", "+4.0 (4.0 to 4.0)", "79.9"]
    (panel,) = report.panels
    assert len(panel.ticks) == len(panel.series[0].x) == len(VARIANTS) + 3
    assert panel.series[0].y[2] == pytest.approx(0.35)
    assert "50,000 images of cifar10" in report.lead
    assert "1,000 labeled" in report.lead
    assert "supervised pre-training, is left out" in report.lead


def test_claims_follow_the_figures() -> None:
    claims = {claim.text: claim for claim in MASKING.report(finished("tiny")).claims}
    beats = claims["Masked patch prediction with mean colors beats training from scratch."]
    assert (beats.verdict, beats.measured.mean, beats.measured.pairs) == ("shows", pytest.approx(0.04), 3)
    assert claims["Mean colors are a better target than all pixels in L2."].verdict == "shows"
    beyond = claims["It does so too where both heads start at zero, as the paper's do."]
    assert beyond.measured.mean == pytest.approx(0.03)
    rate = claims["Corrupting 50 % of the patches is better than 15 %."]
    assert (rate.verdict, rate.measured.mean) == ("contradicted", pytest.approx(-0.01))
    assert not any("Supervised" in text for text in claims)
    worse = {claim.text: claim for claim in MASKING.report(finished("tiny", ACCURACIES | {"scratch": 0.5})).claims}
    assert worse[beats.text].verdict == "contradicted"


def test_supervised_pretraining_at_the_papers_scale() -> None:
    report = MASKING.report(finished("paper"))
    assert [row[-1] for row in report.rows if row[0] == "supervised"] == ["84.2"]
    claim = report.claims[-1]
    assert claim.text.startswith("Supervised")
    assert claim.measured.mean == pytest.approx(0.04)
    assert claim.verdict == "not clear", "one seed shows nothing"
    assert "left out" not in report.lead


def test_points_run(tmp_path: Path) -> None:
    """Pre-trained, fine-tuned and from scratch on digits, two steps each; the report's figures are what runs leave."""
    points = {point.name: point for point in MASKING.points("tiny")}
    for name in ("mean-color-50.seed-0", "mean-color-50.finetuned.seed-0", "scratch.finetuned.seed-0"):
        point, folder = points[name], tmp_path / name
        data = dataclasses.replace(point.config.data, name="digits")
        config = dataclasses.replace(point.config, data=data, steps=2, batch_size=8)
        if point.start is None:
            outcome = pretrain(config, folder, device="cpu", tensorboard=False)
            assert {"loss", "constant_loss"} <= outcome.test.figures().keys()
        else:
            assert isinstance(config, FinetuneConfig)
            start = tmp_path / point.start / "model"
            tuned = sweep_and_finetune(start, config, folder, device="cpu", tensorboard=False)
            own, wanted = tuned.config.model, points["mean-color-50.seed-0"].config.model
            assert isinstance(own, ViTConfig)
            assert dataclasses.replace(own, num_classes=0) == wanted
            assert 0 <= tuned.result["test"]["accuracy"] <= 1

"""Fine-tuning at higher resolution: from one model, at sizes that its patches divide, compared by hand-made figures."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from vitlab.config import FinetuneConfig
from vitlab.models.config import ViTConfig
from vitlab.pipelines.finetune import sweep_and_finetune
from vitlab.pipelines.pretrain import pretrain
from vitlab.recipes import FINETUNE, PRETRAIN
from vitlab.studies.resolution import FACTORS, KINDS, RESOLUTION
from vitlab.studies.study import SEEDS, Done, Scale

ACCURACIES = {
    ("interpolated", 1.0): 0.80,
    ("interpolated", 1.5): 0.83,
    ("interpolated", 2.0): 0.84,
    ("fresh", 1.0): 0.78,
    ("fresh", 1.5): 0.79,
    ("fresh", 2.0): 0.79,
}


def finished(scale: Scale, accuracies: Mapping[tuple[str, float], float] = ACCURACIES) -> list[Done]:
    """With the given accuracies, 1 point more with each further seed."""
    done = []
    for point in RESOLUTION.points(scale):
        if point.start is None:
            done.append(Done(point, {"accuracy": 0.9}, [], 30_000))
            continue
        own, wanted = done[0].point.config.model, point.config.model
        assert isinstance(own, ViTConfig)
        labels = point.labels
        accuracy = accuracies[str(labels["positions"]), float(labels["factor"])] + 0.01 * point.config.seed
        model = dataclasses.replace(own, image_size=wanted.image_size, representation_size=None)
        done.append(Done(point, {"accuracy": accuracy}, [], round(30_000 * (point.config.data.part or 1)), model))
    return done


@pytest.mark.parametrize("scale", ["tiny", "gpu", "paper"])
def test_points(scale: Scale) -> None:
    """Each seed: one pre-training; every kind at every size from it, at a size that the patches divide."""
    points = RESOLUTION.points(scale)
    by_name = {point.name: point for point in points}
    seeds = (0,) if scale == "paper" else SEEDS
    assert len(by_name) == len(points) == len(seeds) * (1 + len(FACTORS) * len(KINDS))
    for point in points:
        assert re.fullmatch(r"[A-Za-z0-9._-]+", point.name)
        if point.start is None:
            continue
        before = by_name[point.start].config
        assert isinstance(before.model, ViTConfig)
        assert isinstance(point.config, FinetuneConfig)
        assert isinstance(point.config.model, ViTConfig)
        assert before.seed == point.config.seed
        assert point.config.model.patch_size == before.model.patch_size
        factor = point.labels["factor"]
        assert isinstance(factor, float)
        assert point.config.model.image_hw[0] == factor * before.model.image_hw[0]
        assert point.config.fresh_positions == (point.labels["positions"] == "fresh")
        if scale != "paper":
            assert not set(before.data.classes or ()) & set(point.config.data.classes or ())


@pytest.mark.parametrize("scale", ["tiny", "gpu"])
def test_only_size_and_positions_differ(scale: Scale) -> None:
    tuned = [point.config for point in RESOLUTION.points(scale) if point.start]
    first = tuned[0]
    assert isinstance(first, FinetuneConfig)
    for config in tuned:
        assert isinstance(config, FinetuneConfig)
        wanted = {"model": first.model, "fresh_positions": first.fresh_positions, "seed": first.seed}
        assert dataclasses.replace(config, **wanted) == first


@pytest.mark.parametrize(("scale", "minutes", "flops"), [("tiny", 24, 36e9), ("gpu", 25, 100e12)])
def test_cost(scale: Scale, minutes: float, flops: float) -> None:
    """In minutes of one core at 36 GFLOP/s, and of one GPU at 100 TFLOP/s."""
    assert sum(each.exaflops for each in finished(scale)) * 1e18 <= minutes * 60 * flops


def test_paper_scale_is_the_papers() -> None:
    points = RESOLUTION.points("paper")
    assert points[0].config == PRETRAIN["jft"]("ViT-B/16")
    assert [point.config.model.image_hw[0] for point in points[1:4]] == [224, 336, 448]
    row = FINETUNE["imagenet"]()
    first = points[1].config
    assert dataclasses.replace(first, model=row.model, average_decay=row.average_decay) == row


def test_report() -> None:
    report = RESOLUTION.report(finished("tiny"))
    assert report.rows == [
        ["1 x", "16", "4 x 4", "81.0 ± 1.0", "79.0 ± 1.0"],
        ["1.5 x", "24", "6 x 6", "84.0 ± 1.0", "80.0 ± 1.0"],
        ["2 x", "32", "8 x 8", "85.0 ± 1.0", "80.0 ± 1.0"],
    ]
    assert len(report.columns) == 5
    (panel,) = report.panels
    assert [series.name for series in panel.series] == ["interpolated positions", "fresh positions"]
    assert panel.series[0].x == [16, 24, 32]
    assert panel.series[1].y == pytest.approx([0.79, 0.80, 0.80])
    assert "30,000 images of fashion_mnist" in report.lead
    assert "at 16 pixels" in report.lead


def test_claims_follow_the_figures() -> None:
    claims = RESOLUTION.report(finished("tiny")).claims
    assert [claim.measured.mean for claim in claims] == pytest.approx([0.03, 0.04, 0.04, 0.05])
    assert {claim.verdict for claim in claims} == {"shows"}
    turned = {**ACCURACIES, ("interpolated", 2.0): 0.70}
    assert [claim.verdict for claim in RESOLUTION.report(finished("tiny", turned)).claims] == [
        "shows", "contradicted", "shows", "contradicted",
    ]  # fmt: skip


def test_points_run(tmp_path: Path) -> None:
    """On digits, two steps each: carried to another grid, with its positions and with new ones."""
    points = {point.name: point for point in RESOLUTION.points("tiny")}
    for name in ("pretrained.seed-0", "interpolated-24.seed-0", "fresh-32.seed-0"):
        point = points[name]
        data = dataclasses.replace(point.config.data, name="digits", part=None)
        config = dataclasses.replace(point.config, data=data, steps=2, batch_size=8)
        if point.start is None:
            pretrain(config, tmp_path / name, device="cpu", tensorboard=False)
        else:
            assert isinstance(config, FinetuneConfig)
            start = tmp_path / point.start / "model"
            tuned = sweep_and_finetune(start, config, tmp_path / name, device="cpu", tensorboard=False)
            assert tuned.config.model.image_hw == point.config.model.image_hw
            assert 0 <= tuned.result["test"]["accuracy"] <= 1

"""Nested parts of the data: every model alike, judged at its best moment, and compared by how much each gains."""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from vitlab.config import FinetuneConfig
from vitlab.models.config import ResNetConfig, ViTConfig
from vitlab.pipelines.finetune import sweep_and_finetune
from vitlab.pipelines.pretrain import pretrain
from vitlab.recipes import PRETRAIN
from vitlab.studies.data_size import BEST, DATA_SIZE, PARTS, early_stopped, growth
from vitlab.studies.study import SEEDS, Done, Point, Scale

IMAGES = {"tiny": 27_000, "gpu": 22_500, "paper": 303_000_000}
LEAST_AND_MOST = {
    ("ViT", "small"): (0.30, 0.50),
    ("ViT", "large"): (0.28, 0.55),
    ("ResNet", "small"): (0.35, 0.48),
    ("ResNet", "large"): (0.36, 0.50),
}
"""Few-shot accuracies."""


def finished(scale: Scale, accuracies: Mapping[tuple[str, str], tuple[float, float]] = LEAST_AND_MOST) -> list[Done]:
    """With these accuracies on the least and the most data, 1 point more with each further seed; 0.4 elsewhere."""
    points = DATA_SIZE.points(scale)
    parts = sorted({float(point.labels["part"]) for point in points})
    by_name, done = {point.name: point for point in points}, []
    for point in points:
        labels, seed = point.labels, point.config.seed
        pair = accuracies.get((str(labels["family"]), str(labels["size"])), (0.4, 0.4))
        part = float(labels["part"])
        accuracy = {parts[0]: pair[0], parts[-1]: pair[1]}.get(part, 0.4) + 0.01 * seed
        model, examples = point.config.model, round(IMAGES[scale] * part)
        if point.start is not None:
            model = dataclasses.replace(by_name[point.start].config.model, image_size=point.config.model.image_size)
            if isinstance(model, ViTConfig):
                model = dataclasses.replace(model, representation_size=None)
            examples = round(IMAGES[scale] * (point.config.data.part or 1))
        records = [
            {"step": 100, "val_accuracy": 0.8, "fewshot_5shot": accuracy},
            {"step": 200, "loss": 0.1},
            {"step": 200, "val_accuracy": 0.7, "fewshot_5shot": accuracy - 0.2},
        ]
        figures = {"accuracy": accuracy + 0.3, "fewshot_5shot": accuracy - 0.2}
        done.append(Done(point, figures, [] if point.start else records, examples, model))
    return done


@pytest.mark.parametrize("scale", ["tiny", "gpu", "paper"])
def test_points(scale: Scale) -> None:
    points = DATA_SIZE.points(scale)
    seen: dict[str, Point] = {}
    for point in points:
        assert re.fullmatch(r"[A-Za-z0-9._-]+", point.name)
        assert point.name not in seen
        if point.start is not None:
            start = seen[point.start]
            assert isinstance(point.config, FinetuneConfig)
            assert point.labels == {**start.labels, "run": "fine-tuning"}
            assert point.config.model.image_hw[0] >= start.config.model.image_hw[0]
        else:
            assert point.config.data.part == point.labels["part"]
            assert point.config.fewshot is not None
            assert point.config.eval_every is not None
        seen[point.name] = point
    families = [family for family, _ in {(point.labels["family"], point.labels["model"]) for point in points}]
    assert families.count("ViT") == (4 if scale == "paper" else 2)
    assert families.count("ResNet") == 2
    assert families.count("hybrid") == (0 if scale == "paper" else 1)
    assert {point.config.seed for point in points} == ({0} if scale == "paper" else set(SEEDS))


@pytest.mark.parametrize("scale", ["tiny", "gpu"])
def test_only_model_part_and_seed_differ(scale: Scale) -> None:
    before = [point.config for point in DATA_SIZE.points(scale) if point.start is None]
    assert len({str(dataclasses.replace(c, model=before[0].model, data=before[0].data, seed=0)) for c in before}) == 1
    assert len({str(dataclasses.replace(config.data, part=None)) for config in before}) == 1
    for config in before:
        assert config.fewshot is not None
        assert not set(config.fewshot.classes or ()) & set(config.data.classes or ())


@pytest.mark.parametrize(("scale", "minutes", "vit", "resnet"), [("tiny", 50, 36e9, 36e9), ("gpu", 25, 100e12, 20e12)])
def test_cost(scale: Scale, minutes: float, vit: float, resnet: float) -> None:
    """In minutes of one core and of one GPU, where convolutions that small are five times slower than products."""
    seconds = sum(
        each.exaflops * 1e18 / (resnet if isinstance(each.model, ResNetConfig) else vit) for each in finished(scale)
    )
    assert seconds <= minutes * 60


def test_parts_of_the_paper() -> None:
    """9, 30, 90 and 300 million images of JFT, the steps of 7 epochs of all for each of them."""
    points = [point for point in DATA_SIZE.points("paper") if point.start is None]
    assert [round(part * 303) for part in PARTS] == [9, 30, 91, 303]
    assert {point.config.total_steps(1) for point in points} == {517_822}
    for name in ("ViT-B/32", "ViT-L/16", "R50x1", "R152x2"):
        (point,) = [each for each in points if each.labels["model"] == name and each.labels["part"] == 1.0]
        row = PRETRAIN["jft"](name)
        assert (point.config.model, point.config.optim, point.config.loss) == (row.model, row.optim, row.loss)
    halved = points[0].config.model
    assert isinstance(halved, ViTConfig)
    assert (halved.width, halved.mlp_dim, halved.depth, halved.representation_size) == (384, 1536, 12, 384)


def test_early_stopping_takes_the_best_moment() -> None:
    done = early_stopped(finished("tiny")[0])
    assert done.figures[BEST] == pytest.approx(0.30)
    assert done.figures["fewshot_5shot"] == pytest.approx(0.10), "the last weights'"
    tuned = next(each for each in finished("tiny") if each.point.start)
    assert early_stopped(tuned) == tuned


def test_growth_is_a_difference_of_differences() -> None:
    done = [early_stopped(each) for each in finished("tiny")]
    vit, resnet = ({"run": "pre-training", "family": family, "size": "small"} for family in ("ViT", "ResNet"))
    found = growth(done, BEST, vit, resnet, (PARTS[0], PARTS[-1]))
    assert found.mean == pytest.approx((0.50 - 0.30) - (0.48 - 0.35))
    assert found.pairs == len(SEEDS)
    lucky = next(
        each for each in done
        if each.seed == 2 and {**vit, "part": 1.0}.items() <= each.point.labels.items()
    )  # fmt: skip
    odd = [each for each in done if each is not lucky]
    odd.append(dataclasses.replace(lucky, figures={BEST: lucky.figures[BEST] + 0.03}))
    found = growth(odd, BEST, vit, resnet, (PARTS[0], PARTS[-1]))
    assert (found.low, found.mean, found.high) == pytest.approx((0.07, 0.08, 0.10))


def test_report() -> None:
    report = DATA_SIZE.report(finished("tiny"))
    assert len(report.rows) == 2 * 5
    assert {len(row) for row in report.rows} == {len(report.columns)}
    assert list(report.columns[2:]) == ["810 images", "2,700 images", "8,100 images", "27,000 images"]
    assert report.rows[0][:2] == ["ViT-64/7", "few-shot accuracy on other classes"]
    assert report.rows[0][2:] == ["31.0 ± 1.0", "41.0 ± 1.0", "41.0 ± 1.0", "51.0 ± 1.0"]
    assert report.rows[5][2:] == ["61.0 ± 1.0", "", "", "81.0 ± 1.0"], "fine-tuned at the ends alone"
    fewshot, tuned = report.panels
    assert fewshot.log_x
    assert [list(series.x) for series in fewshot.series] == [[810, 2700, 8100, 27000]] * 5
    assert [list(series.x) for series in tuned.series] == [[810, 27000]] * 5
    np.testing.assert_allclose(fewshot.series[0].y, [0.31, 0.41, 0.41, 0.51])


def test_claims_follow_the_figures() -> None:
    claims = DATA_SIZE.report(finished("tiny")).claims
    assert [round(claim.measured.mean, 6) for claim in claims] == [0.05, 0.07, 0.02, 0.08, 0.13, 0.05, 0.07, 0.07]
    assert {claim.verdict for claim in claims} == {"shows"}
    turned = LEAST_AND_MOST | {("ViT", "small"): (0.40, 0.45)}
    verdicts = [claim.verdict for claim in DATA_SIZE.report(finished("tiny", turned)).claims]
    assert verdicts == ["contradicted"] * 3 + ["shows"] * 5


def test_report_of_the_papers_scale() -> None:
    report = DATA_SIZE.report(finished("paper"))
    assert len(report.rows) == 2 * 6
    assert all("" not in row for row in report.rows)
    assert {claim.verdict for claim in report.claims} == {"not clear"}, "one seed shows nothing"


@pytest.mark.parametrize("model", ["ViT-64/7", "R8x0.5", "R8x0.5+ViT-64"])
def test_a_model_of_each_family_runs(model: str, tmp_path: Path) -> None:
    """On the least data, digits in place of clothes, two steps each: its few-shot accuracies, and its fine-tuning."""
    before, after = [
        point for point in DATA_SIZE.points("tiny")
        if {"model": model, "part": PARTS[0]}.items() <= point.labels.items() and not point.config.seed
    ]  # fmt: skip
    config = before.config
    assert config.fewshot is not None
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, name="digits"), steps=2, batch_size=4, eval_every=1,
        fewshot=dataclasses.replace(config.fewshot, seeds=1, test_images=10),
    )  # fmt: skip
    pretrain(config, tmp_path / before.name, device="cpu", tensorboard=False)
    records = [json.loads(line) for line in (tmp_path / before.name / "metrics.jsonl").read_text().splitlines()]
    found = early_stopped(Done(dataclasses.replace(before, config=config), {}, records, 18))
    assert found.figures[BEST] in [record["fewshot_5shot"] for record in records if "fewshot_5shot" in record]

    config = after.config
    assert isinstance(config, FinetuneConfig)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, name="digits"), steps=2, batch_size=4)
    assert after.start == before.name
    tuned = sweep_and_finetune(
        tmp_path / before.name / "model", config, tmp_path / after.name, device="cpu", tensorboard=False
    )
    assert 0 <= tuned.result["test"]["accuracy"] <= 1

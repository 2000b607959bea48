"""Every study: its points at each scale, the recorded runs, and points that run."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from finished import finished, noise, recorded, report

from vitlab.config import FinetuneConfig
from vitlab.inspect import plots
from vitlab.models.config import ResNetConfig, ViTConfig
from vitlab.pipelines.finetune import sweep_and_finetune
from vitlab.pipelines.pretrain import pretrain
from vitlab.studies import STUDIES
from vitlab.studies.point import Point, Result, Scale, held_out
from vitlab.studies.presets import changed
from vitlab.studies.report import study_panels
from vitlab.studies.spec import SEEDS

SCALES: tuple[Scale, ...] = ("tiny", "gpu", "paper")


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", STUDIES)
def test_points(name: str, scale: Scale) -> None:
    seen: dict[str, Point] = {}
    seeds: dict[tuple, list[int]] = {}
    for point in STUDIES[name].points(scale):
        assert re.fullmatch(r"[\w.+-]+", point.name), "not a valid folder name"
        assert point.name not in seen
        assert (point.start is not None) == isinstance(point.config, FinetuneConfig)
        if point.start is not None:
            assert seen[point.start].config.seed == point.config.seed
        seen[point.name] = point
        seeds.setdefault(tuple(point.labels.items()), []).append(point.config.seed)
        fewshot, learned = point.config.fewshot, point.config.data.classes
        if fewshot is not None and fewshot.classes is not None:
            assert not set(fewshot.classes) & set(learned or ()), "transfer is measured on classes that are learned"
    assert all(values == list(SEEDS if scale != "paper" else SEEDS[:1]) for values in seeds.values())


@pytest.mark.parametrize("name", STUDIES)
def test_twenty_five_minutes_of_a_gpu(name: str) -> None:
    """At 100 TFLOP/s; small convolutions are five times slower than products."""
    results = finished(STUDIES[name], lambda point: 0.5, scale="gpu", examples=25_000)
    slow = (run.exaflops * (5 if isinstance(run.config.model, ResNetConfig) else 1) for run in results)
    assert sum(slow) * 1e18 < 25 * 60 * 100e12


@pytest.mark.parametrize("name", STUDIES)
def test_the_recorded_runs_are_those_of_the_study(name: str) -> None:
    """Point for point: labels, start and compute; so settings, sizes and lengths are as recorded."""
    study, results = recorded(name)
    assert {row["name"] for row in study["points"]} == {point.name for point in STUDIES[name].points(study["scale"])}
    for row, result in zip(study["points"], results, strict=True):
        assert (row["labels"], row["start"]) == (dict(result.point.labels), result.point.start)
        # products with the padding of convolutions were still counted when these were recorded
        plain = isinstance(result.config.model, ViTConfig) and result.config.model.stem is None
        assert result.exaflops == pytest.approx(row["exaflops"], rel=1e-9 if plain else 0.12)


@pytest.mark.parametrize("name", ["resolution", "masking", "shape", "head", "positions", "axial"])
def test_the_recorded_runs_give_the_recorded_report(name: str) -> None:
    study, results = recorded(name)
    new = report(STUDIES[name], results)
    assert len(new["claims"]) == len(study["claims"])
    for claim, old in zip(new["claims"], study["claims"], strict=True):
        assert (claim["verdict"], claim["points"], claim["expected"]) == (
            old["verdict"],
            old["points"],
            old["expected"],
        )
        assert claim["measured"] == pytest.approx(old["measured"])
    rows, old_rows = (sorted(row[1:] for row in each["table"]["rows"]) for each in (new, study))
    assert rows == old_rows
    for panel, old in zip(new["panels"], study["panels"], strict=True):
        if "training" not in panel["title"]:
            lines, old_lines = ({line["name"]: sorted(line["y"]) for line in each["series"]} for each in (panel, old))
            assert lines.keys() == old_lines.keys()
            assert all(lines[key] == pytest.approx(old_lines[key]) for key in lines)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", STUDIES)
def test_a_report_at_each_scale(name: str, scale: Scale) -> None:
    study = STUDIES[name]
    results = finished(study, lambda point: 0.5 + noise(point), scale=scale)
    new = report(study, results, scale)
    columns = new["table"]["columns"]
    assert len(set(columns)) == len(columns)
    assert all(len(row) == len(columns) for row in new["table"]["rows"])
    assert new["claims"]
    if scale == "paper":
        assert {claim["verdict"] for claim in new["claims"]} == {"not clear"}, "one seed shows nothing"
    if scale == "tiny":
        assert plots.panels(study_panels(study, results)).axes


RUNS = [
    ("scaling", "hybrid-2x48.300-steps"),
    ("optimizer", "small.sgd-0.03"),
    ("dropout-decay-smoothing", "50.all-three"),
    ("data-size", "R8x0.5.3"),
    ("data-size", "R8x0.5.3.finetuned"),
    ("resolution", "pretrained"),
    ("resolution", "fresh-32"),
    ("masking", "mean-color-50"),
    ("masking", "scratch.finetuned"),
]


def test_points_run(tmp_path: Path) -> None:
    """For two steps on the digits: each leaves the metrics that its report needs."""
    for name, variant in RUNS:
        points = {point.name: point for point in STUDIES[name].points("tiny")}
        matches = [key for key in points if key.startswith(variant) and key.endswith("seed-0")]
        point = points[min(matches, key=len)]
        config = changed(point.config, data={"name": "digits"}, steps=2, epochs=None, batch_size=8)
        if config.fewshot is not None:
            config = changed(config, fewshot={"seeds": 1, "test_images": 10})
        if config.eval_every is not None:
            config = changed(config, eval_every=1)
        folder = tmp_path / name / point.name
        if point.start is None:
            outcome = pretrain(config, folder, device="cpu", tensorboard=False)
            records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            result = Result(dataclasses.replace(point, config=config), outcome.test.figures(), records, 100)
            assert {"loss", "constant_loss" if config.masking else "accuracy"} <= result.figures.keys()
            if config.fewshot is not None:
                assert {f"fewshot_{shots}shot" for shots in config.fewshot.shots} <= records[-1].keys()
            if config.data.eval_split == "val":
                assert 0 <= held_out(result) <= 1
        else:
            assert isinstance(config, FinetuneConfig)
            start, size = tmp_path / name / point.start / "model", config.model.image_size
            tuned = sweep_and_finetune(start, config, folder, image_size=size, device="cpu", tensorboard=False)
            assert 0 <= tuned.result["test"]["accuracy"] <= 1

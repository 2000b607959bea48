"""The table and the charts of a bench."""

import io
from typing import Any

import pytest
from PIL import Image

from vitlab.cost.peers import OURS
from vitlab.cost.report import CEILING, GIB, panels, table
from vitlab.inspect import figures, plots

RECORD = {"machine": {"device": "cpu", "threads": 2}, "settings": {"memory": 4.0, "against": []}}


def made_row(mode: str, model: str, size: int, speed: float, largest: int, fails: bool = True) -> dict[str, Any]:
    images_per_s = {"median": speed, "quartiles": [0.9 * speed, 1.3 * speed], "all": [speed]}
    return {"mode": mode, "model": model, "image_size": size, "batch": 1, "tflops": 0.4, "mfu": None, "ratio": {}} | {
        "contenders": {OURS: {"images_per_s": images_per_s, "peak_bytes": GIB}},
        "ceiling": {"images_per_s": {"median": 3 * speed}, "tflops": 1.2345, "share": {"median": 1 / 3}},
        "largest": {"batch": largest, "peak": 1, "fails_at": largest + 1 if fails else None},
    }


def test_a_search_that_ended_without_a_failure_is_marked() -> None:
    rows = [made_row("infer", "ViT-B/16", 64, 100, 2**15, fails=False), made_row("infer", "ViT-B/16", 224, 10, 512)]
    record = RECORD | {"rows": rows}
    assert [cells["largest"] for cells in table(record)] == [">= 32768", 512]
    _, largest = panels(record)
    assert (list(largest.series[0].notes), largest.series[0].y) == ([">= 32768", ""], [2**15, 512])
    assert min(Image.open(io.BytesIO(figures.png(plots.panels(panels(record))))).size) > 200


def test_fig_12() -> None:
    rows = [made_row("infer", "ViT-B/16", size, 4e4 / size, 10_000 // size) for size in (224, 64)]
    rows.append(made_row("train", "ViT-B/16", 64, 100, 7))
    rows.append({"mode": "infer", "model": "x", "image_size": 1, "skipped": "why"})
    speed, largest, *training = panels(RECORD | {"rows": rows})
    assert (speed.title, largest.title) == (
        "Inference of ViT-B/16: speed",
        "Inference of ViT-B/16: largest batch in 4 GiB",
    )
    assert len(training) == 2
    series, ceiling = speed.series
    assert (ceiling.name, ceiling.dashed, ceiling.x, series.x) == (CEILING, True, [64, 224], [64, 224])
    assert series.y == [4e4 / 64 / 2, 4e4 / 224 / 2]  # of one core
    assert ceiling.y == [3 * y for y in series.y]
    assert series.spread == pytest.approx([0.2 * y for y in series.y])
    assert largest.series[0].y == [156, 44]
    several = panels(RECORD | {"rows": [*rows, made_row("infer", "ViT-S/16", 64, 100, 7)]})
    assert several[0].title == "Inference: speed"
    assert [series.name for series in several[0].series] == ["ViT-B/16", "ViT-S/16"]

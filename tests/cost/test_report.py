"""The table and the charts of a bench."""

import io
from typing import Any

import pytest
from PIL import Image

from vitlab.cost.peers import OURS
from vitlab.cost.report import CEILING, panels, table
from vitlab.inspect import figures, plots

RECORD = {"machine": {"device": "cpu", "threads": 2}, "settings": {"memory": 4.0, "against": []}}


def row(mode: str, model: str, size: int, speed: float, largest: int, fails: bool = True) -> dict[str, Any]:
    figures = {"median": speed, "quartiles": [0.9 * speed, 1.3 * speed], "all": [speed]}
    ceiling = {"images_per_s": {"median": 3 * speed}, "tflops": 1.2345, "share": {"median": 1 / 3}}
    return {
        "mode": mode, "model": model, "image_size": size, "batch": 1, "tflops": 0.4, "mfu": None, "ratio": {},
        "contenders": {OURS: {"images_per_s": figures, "peak_bytes": 1}}, "ceiling": ceiling,
        "largest": {"batch": largest, "peak": 1, "fails_at": largest + 1 if fails else None},
    }  # fmt: skip


def test_a_search_that_ended_without_a_failure_is_marked() -> None:
    rows = [row("infer", "ViT-B/16", 64, 100, 2**15, fails=False), row("infer", "ViT-B/16", 224, 10, 512)]
    record = RECORD | {"rows": rows}
    assert [cells["largest"] for cells in table(record)] == [">= 32768", 512]
    _, largest = panels(record)
    assert list(largest.series[0].notes) == [">= 32768", ""]
    assert largest.series[0].y == [2**15, 512]
    assert min(Image.open(io.BytesIO(figures.png(plots.panels(panels(record))))).size) > 200


def test_fig_12() -> None:
    rows = [row("infer", "ViT-B/16", size, 4e4 / size, 10_000 // size) for size in (224, 64)]
    rows += [row("train", "ViT-B/16", 64, 100, 7), {"mode": "infer", "model": "x", "image_size": 1, "skipped": "why"}]
    record = RECORD | {"rows": rows}
    speed, largest, *training = panels(record)
    name = "of ViT-B/16"  # the only one: there is no legend
    assert (speed.title, largest.title) == (f"Inference {name}: speed", f"Inference {name}: largest batch in 4 GiB")
    assert [panel.title for panel in training] == [
        f"Training {name}: speed",
        f"Training {name}: largest batch in 4 GiB",
    ]
    several = panels(record | {"rows": [*rows, row("infer", "ViT-S/16", 64, 100, 7)]})
    assert several[0].title == "Inference: speed"
    assert [series.name for series in several[0].series] == ["ViT-B/16", "ViT-S/16"]
    series, ceiling = speed.series
    assert (ceiling.name, ceiling.dashed, ceiling.x) == (CEILING, True, [64, 224])
    assert ceiling.y == [3 * y for y in series.y]
    assert series.x == [64, 224]
    assert series.y == [4e4 / 64 / 2, 4e4 / 224 / 2]  # of one core
    assert series.spread == pytest.approx([0.2 * y for y in series.y])
    assert largest.series[0].y == [156, 44]
    assert "core" in speed.y_label

"""Writes src/vitlab/paper/recorded/fig12.json and fig13.json: the speeds of `benchmarks/results` as panels.

`python benchmarks/paper_records.py`
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vitlab.panels import Panel, Series

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "src" / "vitlab" / "paper" / "recorded"
AXIAL = ("ViT-B/32", "Axial-ViT-B/32", "ViT-B/16", "Axial-ViT-B/16", "R50x1", "AxialResNet50")


def read_rows(name: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())["rows"]


def speed(row: dict[str, Any]) -> float:
    """Images/s."""
    return row["contenders"]["vitlab"]["images_per_s"]["median"]


def fig12() -> dict[str, Any]:
    """Images/s over image sizes, each at its fastest batch."""
    rows = read_rows("fig12_cpu.json")
    series = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == model and "images_per_s" in row]
        points = sorted((row["image_size"], row["images_per_s"]["median"]) for row in of_model)
        series.append(Series(model, *zip(*points, strict=True)))
    panel = Panel("Inference on two cores", "image size (pixels)", "images/s", series, log_y=True, percent=False)
    return {"source": "benchmarks/results/fig12_cpu.json", "panels": [asdict(panel)]}


def fig13() -> dict[str, Any]:
    """Images/s at 224 pixels with and without axial attention."""
    speeds = {row["model"]: speed(row) for row in read_rows("fig13_cpu.json")}
    series = [Series("images/s", range(len(AXIAL)), [speeds[model] for model in AXIAL])]
    panel = Panel("Inference at 224 pixels", "", "images/s", series, ticks=AXIAL, percent=False)
    return {"source": "benchmarks/results/fig13_cpu.json", "panels": [asdict(panel)]}


RECORDS = {"fig12": fig12, "fig13": fig13}


def as_json(record: dict[str, Any]) -> str:
    return json.dumps(record, indent=1, default=list) + "\n"


if __name__ == "__main__":
    for name, make in RECORDS.items():
        (RECORDED / f"{name}.json").write_text(as_json(make()))

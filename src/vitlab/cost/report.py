"""The rows of `vitlab bench` for people: a table and the charts of Fig. 12."""

from collections.abc import Mapping, Sequence
from typing import Any

from vitlab.cost.peers import OURS
from vitlab.inspect.panels import Panel, Series

CEILING = "ceiling"
TITLES = {"infer": "Inference", "train": "Training"}
GIB = 2**30


def cells(row: Mapping[str, Any], peers: Sequence[str]) -> dict[str, Any]:
    """A measured row as cells of a table; `ceiling` is in TFLOP/s, too, and `x timm` is our speed over timm's."""
    ours, ratios, largest = row["contenders"][OURS], row["ratio"], row["largest"]
    low, high = ours["images_per_s"]["quartiles"]
    return {
        "model": row["model"],
        "size": row["image_size"],
        "mode": row["mode"],
        "batch": row["batch"],
        "images/s": float(f"{ours['images_per_s']['median']:.4g}"),
        "quartiles": f"{low:.4g}-{high:.4g}",
        "TFLOP/s": float(f"{row['tflops']:.3g}"),
        "MFU": f"{row['mfu']:.0%}" if row["mfu"] else "-",
        "ceiling": float(f"{row['ceiling']['tflops']:.3g}"),
        "of ceiling": f"{row['ceiling']['share']['median']:.0%}",
        "GiB": round(ours["peak_bytes"] / GIB, 2),
        "largest": _at_least(largest) or largest["batch"] if largest else "-",
        **{f"x {peer}": f"{ratios[peer]['median']:.2f}" if peer in ratios else "-" for peer in peers},
    }


def headline(row: Mapping[str, Any]) -> str:
    """A row in one line."""
    if "skipped" in row:
        return f"skipped: {row['skipped']}"
    figures = [f"{name} {value}" for name, value in cells(row, tuple(row["ratio"])).items()]
    return ", ".join([*figures[3:], *(f"no {name}: {reason}" for name, reason in row["unable"].items())])


def table(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The measured rows as rows of a table."""
    return [cells(row, record["settings"]["against"]) for row in record["rows"] if "skipped" not in row]


def _at_least(largest: Mapping[str, Any]) -> str:
    """`>= 32768` where the search for the largest batch ended without one that does not fit."""
    return f">= {largest['batch']}" if largest["fails_at"] is None else ""


def panels(record: Mapping[str, Any]) -> list[Panel]:
    """Fig. 12 for each mode: images/s (of a CPU, per core) and the largest batch, over the image size.

    A single model is shown with its ceiling.
    """
    machine = record["machine"]
    cores, unit = (machine["threads"], "core") if machine["device"] == "cpu" else (1, "device")
    rows = sorted((row for row in record["rows"] if "skipped" not in row), key=lambda row: row["image_size"])
    names = list(dict.fromkeys(row["model"] for row in record["rows"] if "skipped" not in row))
    suffix = f" of {names[0]}" if len(names) == 1 else ""
    shown = []
    for mode, title in TITLES.items():
        speeds, largest = [], []
        for name in names:
            of_model = [row for row in rows if (row["mode"], row["model"]) == (mode, name)]
            x = [row["image_size"] for row in of_model]
            figures = [row["contenders"][OURS]["images_per_s"] for row in of_model]
            bars = [(high - low) / 2 / cores for low, high in (figure["quartiles"] for figure in figures)]
            speeds.append(Series(name, x, [figure["median"] / cores for figure in figures], bars))
            if suffix:
                bound = [row["ceiling"]["images_per_s"]["median"] / cores for row in of_model]
                speeds.append(Series(CEILING, x, bound, dashed=True))
            fits = [(row["image_size"], row["largest"]) for row in of_model if row["largest"]]
            y, notes = [batch["batch"] for _, batch in fits], [_at_least(batch) for _, batch in fits]
            largest.append(Series(name, [size for size, _ in fits], y, notes=notes))
        memory = f"{record['settings']['memory']:.3g} GiB"
        for what, y_label, series in (
            ("speed", f"images/s per {unit}", speeds),
            (f"largest batch in {memory}", "images", largest),
        ):
            if drawn := [line for line in series if line.x]:
                name, x_label = f"{title}{suffix}: {what}", "image size (pixels)"
                shown.append(Panel(name, x_label, y_label, drawn, log_x=True, log_y=True, percent=False))
    return shown

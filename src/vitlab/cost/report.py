"""The rows of `vitlab bench` for people: a line, a table, and the charts of Fig. 12."""

from collections.abc import Mapping
from typing import Any

from vitlab.cost.peak_memory import GIB
from vitlab.cost.peers import OURS
from vitlab.inspect.panels import Panel, Series

CEILING = "ceiling"
TITLES = {"infer": "Inference", "train": "Training"}


def headline(row: Mapping[str, Any]) -> str:
    """A row in one line."""
    if "skipped" in row:
        return f"skipped: {row['skipped']}"
    speed = row["contenders"][OURS]["images_per_s"]
    low, high = speed["quartiles"]
    parts = sorted(row.get("parts", {}).items(), key=lambda part: -part[1])
    return "; ".join(
        [
            f"batch {row['batch']}: {speed['median']:.4g} images/s ({low:.4g} to {high:.4g})",
            f"{row['tflops']:.3g} TFLOP/s" + (f", MFU {row['mfu']:.0%}" if row["mfu"] else ""),
            f"{row['ceiling']['share']['median']:.0%} of the ceiling",
            *(f"{ratio['median']:.2f} x {ratio['to']}" for ratio in row["ratio"].values()),
            *(f"no {name}: {reason}" for name, reason in row["unable"].items()),
            *([", ".join(f"{name} {share:.0%}" for name, share in parts if share >= 0.005)] if parts else []),
        ]
    )


def table(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The measured rows as columns of a table; `ceiling` is in TFLOP/s, too."""
    rows = []
    for row in record["rows"]:
        if "skipped" in row:
            continue
        ours, ratios = row["contenders"][OURS], row["ratio"]
        low, high = ours["images_per_s"]["quartiles"]
        cells = {
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
            "largest": _at_least(row) or row["largest"]["batch"] if row["largest"] else "-",
        }
        peers = record["settings"]["against"]
        rows.append(cells | {f"x {peer}": f"{ratios[peer]['median']:.2f}" if peer in ratios else "-" for peer in peers})
    return rows


def _at_least(row: Mapping[str, Any]) -> str:
    """`>= 32768` where the search for the largest batch ended without one that does not fit."""
    return f">= {row['largest']['batch']}" if row["largest"]["fails_at"] is None else ""


def panels(record: Mapping[str, Any]) -> list[Panel]:
    """Fig. 12 for each mode: images/s (of a CPU, per core) and the largest batch, over the image size.

    A single model is shown with its ceiling.
    """
    machine, memory = record["machine"], record["settings"]["memory"]
    cores, unit = (machine["threads"], "core") if machine["device"] == "cpu" else (1, "device")
    measured = [row for row in record["rows"] if "skipped" not in row]
    models = {row["model"] for row in measured}
    suffix = f" of {models.pop()}" if len(models) == 1 else ""
    shown = []
    for mode, title in TITLES.items():
        rows = sorted((row for row in measured if row["mode"] == mode), key=lambda row: row["image_size"])
        speeds, largest = [], []
        for name in dict.fromkeys(row["model"] for row in measured if row["mode"] == mode):
            of_model = [row for row in rows if row["model"] == name]
            x = [row["image_size"] for row in of_model]
            figures = [row["contenders"][OURS]["images_per_s"] for row in of_model]
            bars = [(high - low) / 2 / cores for low, high in (figure["quartiles"] for figure in figures)]
            speeds.append(Series(name, x, [figure["median"] / cores for figure in figures], bars))
            if suffix:
                bound = [row["ceiling"]["images_per_s"]["median"] / cores for row in of_model]
                speeds.append(Series(CEILING, x, bound, dashed=True))
            if fits := [row for row in of_model if row["largest"]]:
                x, y = [row["image_size"] for row in fits], [row["largest"]["batch"] for row in fits]
                largest.append(Series(name, x, y, notes=list(map(_at_least, fits))))
        for what, y_label, series in (
            ("speed", f"images/s per {unit}", speeds),
            (f"largest batch in {f'{memory:g} GiB' if memory else 'memory'}", "images", largest),
        ):
            if series:
                panel = Panel(f"{title}{suffix}: {what}", "image size (pixels)", y_label, series,
                              log_x=True, log_y=True, percent=False)  # fmt: skip
                shown.append(panel)
    return shown

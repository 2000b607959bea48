"""What a model costs to run (App. D.5, Fig. 12): images/s, FLOP/s, memory and the largest batch, over image sizes.

A row is one model at one size in training or inference. It is timed in rounds interleaved with the ceiling: the matrix
products of the model and nothing else. Each row is saved as soon as it is measured; a later call continues with the
missing ones.
"""

import contextlib
import dataclasses
import gc
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vitlab.cost import measure
from vitlab.cost.options import BenchOptions
from vitlab.cost.step import Mode, StepSpec, build
from vitlab.display import ProgressDisplay
from vitlab.errors import UserError
from vitlab.inspection import figures, plots
from vitlab.io import write_bytes
from vitlab.models import ViTConfig, get_config, list_models
from vitlab.models.image_size import nearest_image_size
from vitlab.panels import Panel, Series
from vitlab.train.free_memory import GIB, free_memory
from vitlab.train.memory import inference_bytes, rank_bytes
from vitlab.train.precision import choose_device, device_name, frozen_dtype, keep_freed_memory
from vitlab.train.throughput import peak_flops
from vitlab.train.workdir import write_json

FIGURE_12 = ("R50x1", "R50x2", "ViT-B/32", "ViT-L/32", "ViT-B/16", "ViT-L/16", "ViT-H/14", "R152x4")
CPU_MEMORY = 4.0  # GiB
MAX_BATCH = 2**15
MIN_GAIN = 1.05
"""A batch twice as large must be this much faster to be chosen."""
MAX_STEP_SECONDS = 1.0
"""No larger batch is tried than one whose step takes this long."""
MODEL, CEILING = "model", "ceiling"
TITLES = {"infer": "Inference", "train": "Training"}
Key = tuple[Mode, str, int]
"""Mode, model and image size of a row."""


def row_keys(models: Sequence[str], options: BenchOptions) -> list[Key]:
    """The key of every row of `models`, names or shell patterns. Raises UserError for an unknown model."""
    modes: tuple[Mode, ...] = ("infer", "train") if options.mode == "both" else (options.mode,)
    names = dict.fromkeys(name for pattern in models for name in list_models(pattern) or [pattern])
    sizes = {name: dict.fromkeys(_valid_size(name, size) for size in options.sizes) for name in names}
    return [(mode, name, size) for mode in modes for name in names for size in sizes[name]]


def _valid_size(name: str, size: int) -> int:
    """The size, or the next larger one that patches divide (392 for 384 and ViT-H/14), as in fine-tuning."""
    config = get_config(name)
    return nearest_image_size(size, config.patch_size, config.stem) if isinstance(config, ViTConfig) else size


def bench(models: Sequence[str], options: BenchOptions, out: Path) -> dict[str, Any]:
    """Measures the rows that `out`/bench.json lacks and draws `out`/bench.png; returns the content of the JSON.

    Raises UserError where the JSON was measured with other settings or on another machine.
    """
    device = choose_device(options.device)
    keys = row_keys(models, options)
    options = _resolve(options, device)
    if device.type == "cpu":
        keep_freed_memory()
    else:
        torch.cuda.set_device(device)
    record = _open_record(out / "bench.json", options, device)
    rows = {(row["mode"], row["model"], row["image_size"]): row for row in record["rows"] if "skipped" not in row}
    write_json(out / "bench.json", record | {"rows": list(rows.values())})  # what was skipped is tried again if given
    with ProgressDisplay("bench", len(keys), "rows") as display:
        for number, key in enumerate(keys):
            if key in rows:
                continue
            mode, name, size = key
            title = f"[{number + 1}/{len(keys)}] {name}, {size} pixels, {TITLES[mode].lower()}"
            display.update(number, title, force=True)
            rows[key] = row = {"mode": mode, "model": name, "image_size": size}
            try:
                row |= _measure(options, key)
            except (UserError, torch.OutOfMemoryError) as error:
                row["skipped"] = str(error)
            cells = {} if "skipped" in row else _cells(row)
            measured = ", ".join(f"{column} {cells[column]}" for column in list(cells)[3:])  # the title has the others
            display.say(f"{title}: {measured or 'skipped: ' + row['skipped']}")
            record["rows"] = list(rows.values())
            write_json(out / "bench.json", record)
            torch.compiler.reset()
            gc.collect()
    if drawn := panels(record):
        write_bytes(out / "bench.png", figures.png(plots.panels(drawn)))
    return json.loads((out / "bench.json").read_bytes())


def _resolve(options: BenchOptions, device: torch.device) -> BenchOptions:
    """The options with nothing left automatic."""
    dtype = str(frozen_dtype(options.dtype, device)).removeprefix("torch.")
    gpu_memory = torch.cuda.get_device_properties(device).total_memory / GIB if device.type == "cuda" else None
    return dataclasses.replace(
        options, dtype=dtype, memory=options.memory or gpu_memory or CPU_MEMORY, device=str(device)
    )


def _open_record(path: Path, options: BenchOptions, device: torch.device) -> dict[str, Any]:
    """The record to continue, or a new one."""
    machine = measure.environment("torch") | {"device": device_name(device), "threads": torch.get_num_threads()}
    del machine["commit"]  # each row has its own
    common = dataclasses.asdict(options)
    for name in ("sizes", "mode", "device"):  # of the rows
        del common[name]
    new = {"machine": machine, "settings": common, "rows": []}
    if not path.exists():
        return new
    with contextlib.suppress(ValueError, TypeError, KeyError):
        record = json.loads(path.read_bytes())
        if new | {"rows": record["rows"]} == record:
            return record
    raise UserError(f"{path} was measured with other settings or on another machine; give another --out.")


def _measure(options: BenchOptions, key: Key) -> dict[str, Any]:
    """The row of a key."""
    mode, name, size = key
    assert options.dtype != "auto"
    assert options.memory is not None
    budget = options.memory * GIB
    config = get_config(name, image_size=size)
    device = torch.device(options.device)
    spec = StepSpec(config, mode, options.batch or 1, options.dtype, options.compile, options.device)

    def fits(batch: int) -> bool:
        peak = peak_bytes(dataclasses.replace(spec, batch=batch))
        return peak is not None and peak <= budget

    if not fits(spec.batch):
        raise UserError(f"a batch of {spec.batch} does not fit into {options.memory:.3g} GiB (--memory)")
    largest = largest_batch(fits) if options.largest else None
    if options.batch is None:
        spec = dataclasses.replace(spec, batch=fastest_batch(spec, fits))
    peak = peak_bytes(spec)
    free = free_memory(device) if device.type == "cpu" else None  # beyond it the system ends the process
    if peak is None or (free is not None and peak > free):
        raise UserError(f"a batch of {spec.batch} does not fit into the free memory; give a smaller --batch")
    # Fused attention on a GPU writes no attention matrix: its products would take longer than all of the model.
    products = measure.count_products(config, spec.batch, mode == "train", attention=device.type == "cpu")
    steps = {MODEL: build(spec), CEILING: measure.products_step(products, getattr(torch, spec.dtype), device)}
    rates = measure.time_interleaved(steps, options.seconds, options.rounds)
    speeds = {name: measure.spread([spec.batch * rate for rate in per_round]) for name, per_round in rates.items()}
    flops = 6 * config.training_macs if mode == "train" else 2 * config.forward_macs
    tflops = speeds[MODEL]["median"] * flops / 1e12
    device_peak = peak_flops(device_name(device)) if spec.dtype == "bfloat16" else None
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": measure.commit(),
        "largest": largest,
        "batch": spec.batch,
        "images_per_s": speeds[MODEL],
        "peak_bytes": peak,
        "tflops": tflops,
        "mfu": tflops * 1e12 / device_peak if device_peak else None,
        "ceiling": {
            "images_per_s": speeds[CEILING],
            "tflops": measure.product_flops(products) * speeds[CEILING]["median"] / spec.batch / 1e12,
            "share": measure.ratio(rates[MODEL], rates[CEILING]),
        },
    }


def peak_bytes(spec: StepSpec) -> int | None:
    """Peak memory of a step that is not compiled: on a GPU measured, None where it does not fit; on a CPU counted as by
    `vitlab plan`."""
    if spec.device.startswith("cuda"):
        return _measured_peak(dataclasses.replace(spec, compile=False))
    if spec.mode == "infer":
        return inference_bytes(spec.config, spec.batch, getattr(torch, spec.dtype), "cpu")
    return sum(rank_bytes(spec.train_config, spec.batch, spec.dtype, "cpu").values())


def _measured_peak(spec: StepSpec) -> int | None:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    try:
        step = build(spec)
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            step()
    except torch.OutOfMemoryError:
        return None
    return torch.cuda.max_memory_allocated() - before


def largest_batch(fits: Callable[[int], bool]) -> int:
    """The largest batch that fits, at most MAX_BATCH; 0 if none does.

    Doubling, then bisection until a batch larger by 1/16 does not fit.
    """
    fitting, batch = 0, 1
    while fitting < MAX_BATCH and fits(batch):
        fitting, batch = batch, min(2 * batch, MAX_BATCH)
    failing = batch
    while failing - fitting > max(1, fitting // 16):
        batch = (fitting + failing) // 2
        if fits(batch):
            fitting = batch
        else:
            failing = batch
    return fitting


def fastest_batch(spec: StepSpec, fits: Callable[[int], bool]) -> int:
    """The power of two that fits at which the model is fastest; ends after two doublings without a gain, and with a
    step of MAX_STEP_SECONDS."""
    best = batch = 1
    best_rate = seconds = 0.0
    without_gain = 0
    while without_gain < 2 and seconds < MAX_STEP_SECONDS and batch <= MAX_BATCH and fits(batch):
        step = build(dataclasses.replace(spec, batch=batch, compile=False))
        seconds = min(measure.timer(step).timeit(1).mean for _ in range(2))
        rate = batch / seconds
        without_gain += 1
        if rate > MIN_GAIN * best_rate:
            best, best_rate, without_gain = batch, rate, 0
        batch *= 2
    return best


def table(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The measured rows as rows of a table."""
    return [_cells(row) for row in record["rows"] if "skipped" not in row]


def skipped_rows(record: Mapping[str, Any]) -> list[str]:
    """A line with the reason for each row that was not measured."""
    rows = (row for row in record["rows"] if "skipped" in row)
    return [f"skipped: {row['model']}, {row['image_size']} pixels, {row['mode']}: {row['skipped']}" for row in rows]


def _cells(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as cells; `ceiling` is in TFLOP/s, too."""
    low, high = row["images_per_s"]["quartiles"]
    return {
        "model": row["model"],
        "size": row["image_size"],
        "mode": row["mode"],
        "batch": row["batch"],
        "images/s": float(f"{row['images_per_s']['median']:.4g}"),
        "quartiles": f"{low:.4g}-{high:.4g}",
        "TFLOP/s": float(f"{row['tflops']:.3g}"),
        "MFU": f"{row['mfu']:.0%}" if row["mfu"] else "-",
        "ceiling": float(f"{row['ceiling']['tflops']:.3g}"),
        "of ceiling": f"{row['ceiling']['share']['median']:.0%}",
        "GiB": round(row["peak_bytes"] / GIB, 2),
        "largest": row["largest"] or "-",
    }


def panels(record: Mapping[str, Any]) -> list[Panel]:
    """Fig. 12 for each mode: images/s and the largest batch, over the image size."""
    rows = sorted((row for row in record["rows"] if "skipped" not in row), key=lambda row: row["image_size"])
    contents: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
        ("speed", "images/s", lambda row: row["images_per_s"]["median"]),
        (f"largest batch in {record['settings']['memory']:.3g} GiB", "images", lambda row: row["largest"]),
    )
    models = sorted({row["model"] for row in rows})
    suffix = f" of {models[0]}" if len(models) == 1 else ""  # one series has no legend
    style: dict[str, Any] = {"log_x": True, "log_y": True, "percent": False}
    shown = []
    for (mode, title), (what, y_label, value) in itertools.product(TITLES.items(), contents):
        lines: dict[str, dict[int, Any]] = {}
        for row in rows:
            if row["mode"] == mode and value(row):
                lines.setdefault(row["model"], {})[row["image_size"]] = value(row)
        series = [Series(name, list(line), list(line.values())) for name, line in lines.items()]
        if series:
            shown.append(Panel(f"{title}{suffix}: {what}", "image size (pixels)", y_label, series, **style))
    return shown

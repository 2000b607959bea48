"""The cost of a run before it starts: compute, hours, memory of each process, data rate, checkpoint.

Nothing is read and nothing is trained. Memory is counted from the step itself (`cost/memory.py`).
"""

import dataclasses
import functools
import json
import os
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from vitlab.config import FinetuneConfig, TrainConfig
from vitlab.cost.measure import time_interleaved
from vitlab.cost.memory import Sizes, largest, process_bytes
from vitlab.cost.peers import training_step
from vitlab.display import format_table
from vitlab.errors import UserError
from vitlab.evaluate.load import choose_device
from vitlab.pipelines.automatic import bit_hyperrule
from vitlab.recipes import pretrain
from vitlab.settings import nearest
from vitlab.studies.cost import IMAGES, images, model_of
from vitlab.studies.spec import Point, exaflops, updates
from vitlab.train.optim import state_per_weight
from vitlab.train.precision import device_name, keep_freed_memory, resolve_precision
from vitlab.train.progress import DEVICES, find_device

CPU = "cpu"
DAY = 24 * 3600
TABLE2 = ((pretrain.jft, "ViT-H/14", 2500), (pretrain.jft, "ViT-L/16", 680), (pretrain.imagenet21k, "ViT-L/16", 230))
"""Recipe, model, and the TPUv3-core-days of Table 2 (a chip has two cores)."""
SECONDS, ROUNDS = 1.0, 3
"""Length and number of the rounds of a measurement on this machine."""
MAX_IMAGES, MAX_CPU_FLOPS = 128, 1e12
"""Limits of the batch of such a measurement: images, and FLOPs of a step on a CPU (about a second)."""


def estimate(
    config: TrainConfig,
    *,
    device: str,
    count: int,
    mfu: str,
    model_name: str | None = None,
    examples: int | None = None,
    image_kb: float = 110.0,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """The cost of a run, as plain data. Sizes are in bytes.

    device: one of DEVICES, or `cpu`, a machine like this one. count: processes, each with one device. mfu: a share of
    the device's peak, `measured`, or a bench.json of `vitlab bench`, which must hold `model_name`. examples: images of
    the training split, where the table of data sets does not give them. Raises UserError for invalid arguments.
    """
    if device != CPU and device not in DEVICES:
        raise UserError(f"unknown device {device!r}; {nearest(device, DEVICES)}. All: {', '.join([*DEVICES, CPU])}.")
    if not image_kb > 0 or (examples is not None and examples < 1):
        raise UserError(f"image_kb={image_kb} and examples={examples} must be more than 0.")
    examples = _examples(config, examples)
    if isinstance(config, FinetuneConfig) and config.automatic:
        if examples is None:
            raise UserError("this recipe depends on the number of training images; give it with --examples.")
        config = bit_hyperrule(config, examples)
    _check_count(config.batch_size, count)
    config = dataclasses.replace(config, model=model_of(Point("plan", config, {}), {}))
    total_images = examples or config.batch_size  # with a fixed number of steps any number will do
    exa, steps = exaflops(config, total_images), updates(config, total_images)
    memory = _memory(config, device, count)
    peak = DEVICES[device].tflops * 1e12 if device in DEVICES else None
    flops, source = _flops_per_second(config, device, peak, mfu, model_name, memory["images_at_once"], say)
    seconds = exa * 1e18 / (flops * count)
    images_per_s = steps * config.batch_size / seconds
    return {
        "model": {"name": model_name, "parameters": Sizes.of(config).whole, "forward_macs": config.model.forward_macs},
        "data": config.data.name,
        "examples": examples,
        "epochs": steps * config.batch_size / examples if examples else None,
        "steps": steps,
        "batch_size": config.batch_size,
        "exaflops": exa,
        "device": device,
        "count": count,
        "tflops": flops / 1e12,
        "mfu": flops / peak if peak else None,
        "mfu_is": source,
        "hours": seconds / 3600,
        "device_hours": count * seconds / 3600,
        "tpuv3_core_days": core_days(exa),
        "images_per_s": images_per_s,
        "images_per_s_each": images_per_s / count,
        "image_kb": image_kb,
        "bytes_per_s": images_per_s * image_kb * 1e3,
        **memory,
    }


def _check_count(batch_size: int, count: int) -> None:
    """Raises UserError if the batch does not divide by the number of processes, as the run itself would."""
    if count < 1 or batch_size % count:
        divisors = [number for number in range(1, batch_size + 1) if batch_size % number == 0]
        near = sorted(sorted(divisors, key=lambda number: abs(number - count))[:3])
        raise UserError(
            f"count is {count}; it must divide the batch of {batch_size}. The nearest: {', '.join(map(str, near))}."
        )


def _examples(config: TrainConfig, given: int | None) -> int | None:
    """Images of the training split; None where they are unknown and do not affect the length of the run."""
    try:
        return given or images(config.data)
    except ValueError as error:
        if config.steps is not None:
            return None
        raise UserError(
            f"the number of images of {config.data.name or 'your set'} is unknown; give --examples."
        ) from error


# --------------------------------------------------------------------------------------------------------------- time


def core_days(exa: float) -> dict[str, float]:
    """TPUv3-core-days of so many exaFLOPs, at the mean rate of a core in the paper.

    Table 2 gives core-days of three runs and Table 6's rule their exaFLOPs: three rates, from `lowest_tflops` to
    `highest_tflops`, of which the sum of exaFLOPs over the sum of days is taken.
    """
    work, days = [_papers_exaflops(recipe, model) for recipe, model, _ in TABLE2], [row[2] for row in TABLE2]
    rates = [exa * 1e6 / (core_days * DAY) for exa, core_days in zip(work, days, strict=True)]
    tflops = sum(work) * 1e6 / (sum(days) * DAY)
    return {
        "days": exa * 1e6 / tflops / DAY,
        "tflops": tflops,
        "lowest_tflops": min(rates),
        "highest_tflops": max(rates),
    }


def _papers_exaflops(recipe: Callable[[str], TrainConfig], model: str) -> float:
    config = recipe(model)
    return exaflops(config, IMAGES[config.data.name])


def _flops_per_second(
    config: TrainConfig,
    device: str,
    peak: float | None,
    mfu: str,
    model_name: str | None,
    images_at_once: int,
    say: Callable[[str], None],
) -> tuple[float, str]:
    """FLOP/s of a device, of those that Table 6 counts, and where the number comes from."""
    if mfu == "measured":
        return _measure(config, device, images_at_once, say)
    if mfu.endswith(".json"):
        return _read_bench(Path(mfu), config, device, model_name)
    try:
        share = float(mfu)
    except ValueError as error:
        raise UserError(f"--mfu is {mfu!r}; give a share such as 0.4, measured, or a bench.json.") from error
    if not 0 < share <= 1:
        raise UserError(f"--mfu is {mfu}; it is a share of the device's peak, in (0, 1].")
    if peak is None:
        raise UserError("the peak of a CPU is unknown; give --mfu measured, or a bench.json.")
    return share * peak, "assumed"


def _read_bench(path: Path, config: TrainConfig, device: str, model_name: str | None) -> tuple[float, str]:
    """What `vitlab bench` has measured for training this model at this size on such a device."""
    try:
        record = json.loads(path.read_text())
        measured_on, dtype, rows = record["machine"]["device"], record["settings"]["dtype"], record["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a bench.json of `vitlab bench` ({error!r}).") from error
    _check_device(device, measured_on, f"{path} was measured on")
    training = [row for row in rows if row["mode"] == "train" and "tflops" in row]
    height, width = config.model.image_hw
    for row in training:
        if row["model"] == model_name and row["image_size"] == height == width:
            flops = row["tflops"] * 1e12 * config.model.inner_macs / config.model.forward_macs
            return flops, f"measured on {measured_on} in {dtype} with {row['batch']} images at once, {path}"
    available = ", ".join(f"{row['model']} at {row['image_size']}" for row in training) or "none"
    model = model_name or "MODEL"
    raise UserError(
        f"{path} has no training of {model} at {height}x{width} pixels; it has {available}. "
        f"`vitlab bench {model} --mode train --sizes {height}` measures it."
    )


def _measure(config: TrainConfig, device: str, images_at_once: int, say: Callable[[str], None]) -> tuple[float, str]:
    """What the run's own step achieves on this machine, over a few seconds, on random images."""
    here = choose_device(CPU if device == CPU else "auto")
    name = device_name(here)
    _check_device(device, name, "this machine has")
    single = config.single() if isinstance(config, FinetuneConfig) else config
    flops, size = 6 * single.model.inner_macs, min(images_at_once, MAX_IMAGES)
    if here.type == CPU:
        keep_freed_memory()
        size = min(size, max(1, round(MAX_CPU_FLOPS / flops)))
    run = dataclasses.replace(single, batch_size=size, microbatch=None, fsdp=False)
    rates = time_interleaved({"the step": training_step(run, here)}, SECONDS, ROUNDS, say)["the step"]
    return statistics.median(rates) * size * flops, f"measured here, on {name}, with {size} images at once"


def _check_device(device: str, torch_name: str, subject: str) -> None:
    """Raises UserError unless torch's name for a device belongs to the requested one."""
    if device != (CPU if torch_name == CPU else find_device(torch_name)):
        raise UserError(f"{subject} {torch_name}, and --device is {device}; give that device, or --mfu 0.4.")


# ------------------------------------------------------------------------------------------------------------- memory


def _memory(config: TrainConfig, device: str, count: int) -> dict[str, Any]:
    """Memory of a process with DDP and with FSDP, by parts, and whether it fits."""
    sizes = Sizes.of(config)
    if device == CPU:
        precision = resolve_precision(config.precision, torch.device(CPU))
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        precision = "autocast" if config.precision == "auto" else config.precision
        available = DEVICES[device].memory
    images_each = config.batch_size // count
    at_once = min(config.microbatch or images_each, images_each)
    memory: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp") if count > 1 else ("alone",):
        count_parts = functools.partial(
            process_bytes, config, sizes, precision=precision, device_type=CPU if device == CPU else "cuda",
            count=count, sharded=strategy == "fsdp",
        )  # fmt: skip
        parts = count_parts(at_once)
        total = sum(parts.values())
        memory[strategy] = {"parts": parts, "total": total, "fits": total <= available}
        if total > available:
            memory[strategy]["largest_microbatch"] = largest(
                lambda size, count_parts=count_parts: sum(count_parts(size).values()), available, at_once
            )
    return {
        "checkpoint_bytes": 4 * (1 + state_per_weight(config.optim) + bool(config.average_decay)) * sizes.whole,
        "precision": precision,
        "activation_checkpointing": config.activation_checkpointing,
        "images_each": images_each,
        "images_at_once": at_once,
        "memory_bytes": available,
        "memory": memory,
        "chosen": "alone" if count == 1 else "fsdp" if config.fsdp else "ddp",
    }


# --------------------------------------------------------------------------------------------------------- for people


def format_estimate(cost: Mapping[str, Any]) -> str:
    """The result of `estimate` as text."""
    length = "" if cost["epochs"] is None else f" = {cost['epochs']:.3g} epochs of {cost['examples']:,} images"
    hours, paper = cost["hours"], cost["tpuv3_core_days"]
    mfu = f"MFU {cost['mfu']:.1%}, {cost['mfu_is']}" if cost["mfu"] else cost["mfu_is"]
    days = f" ({hours / 24:.3g} days)" if hours > 48 else ""
    lines = {
        "model": f"{cost['model']['name'] or 'without a name'}: {cost['model']['parameters']:,} parameters, "
        f"{cost['model']['forward_macs'] / 1e9:.4g} billion multiply-accumulates per image",
        "length": f"{cost['steps']:,} steps of {cost['batch_size']:,}{length}",
        "compute": f"{_short(cost['exaflops'])} exaFLOPs of training, as Table 6 counts",
        "time": f"{_short(hours)} hours{days} of {cost['count']} {cost['device']} at {cost['tflops']:.3g} TFLOP/s "
        f"each ({mfu}); {_short(cost['device_hours'])} device-hours",
        "in the paper": f"{_short(paper['days'])} TPUv3-core-days, at the {paper['tflops']:.1f} TFLOP/s of a core in "
        f"Table 2 ({paper['lowest_tflops']:.1f} to {paper['highest_tflops']:.1f})",
        "data": f"{_short(cost['images_per_s'])} images/s, {_short(cost['images_per_s_each'])} per process; "
        f"{_short(cost['bytes_per_s'] / 1e6)} MB/s at {cost['image_kb']:g} kB per image",
        "checkpoint": f"{_short(cost['checkpoint_bytes'] / 1e6)} MB",
    }
    return "\n".join([*(f"{name:12}  {text}" for name, text in lines.items()), "", *_memory_lines(cost)])


def _short(value: float) -> str:
    """Four significant digits."""
    return f"{float(f'{value:.4g}'):,.0f}" if value >= 1000 else f"{value:.4g}"


def _memory_lines(cost: Mapping[str, Any]) -> list[str]:
    """A table of the parts with a column for each strategy."""
    columns = {name if name == "alone" else name.upper(): column for name, column in cost["memory"].items()}
    unit, scale = ("GB", 1e9) if max(column["total"] for column in columns.values()) >= 1e9 else ("MB", 1e6)
    parts = list(next(iter(columns.values()))["parts"])
    rows = {part: [column["parts"][part] for column in columns.values()] for part in parts}
    rows["in all"] = [column["total"] for column in columns.values()]
    cells = {name: [f"{value / scale:.2f}" for value in values] for name, values in rows.items() if any(values)}
    cells[f"fits in {cost['memory_bytes'] / scale:,.0f}"] = ["yes" if c["fits"] else "no" for c in columns.values()]
    table = [
        {"": name, **{f"{title:>10}": f"{cell:>10}" for title, cell in zip(columns, row, strict=True)}}
        for name, row in cells.items()
    ]
    recomputed = ", blocks recomputed" if cost["activation_checkpointing"] else ""
    chosen = f"; this run: {cost['chosen'].upper()}" if len(columns) > 1 else ""
    lines = [
        f"memory of a process in {unit} ({cost['precision']}{recomputed}; {cost['images_at_once']:,} of its "
        f"{cost['images_each']:,} images at once{chosen})",
        format_table(table),
    ]
    for title, column in columns.items():
        if not column["fits"]:
            most = column["largest_microbatch"]
            lines.append(f"{title}: {f'--microbatch {most} would fit' if most else 'one image at once does not fit'}.")
    return lines

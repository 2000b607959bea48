"""The cost of a run before it starts: compute, hours, memory of each process, data rate, checkpoint.

Nothing is read and nothing is trained. Memory follows from a formula (`train/memory.py`).
"""

import dataclasses
import math
import os
import statistics
from collections.abc import Collection, Mapping
from typing import Any

import torch

from vitlab.config import FinetuneConfig, TrainConfig
from vitlab.cost.measure import time_interleaved
from vitlab.cost.step import training_step
from vitlab.display import format_table
from vitlab.errors import UserError
from vitlab.recipes import pretrain
from vitlab.recipes.rules import bit_hyperrule
from vitlab.settings import nearest
from vitlab.studies.cost import IMAGES, images, model_of
from vitlab.studies.spec import StudyRun, exaflops, updates
from vitlab.train.memory import rank_bytes, weight_counts
from vitlab.train.microbatch import free_memory
from vitlab.train.optim import state_per_weight
from vitlab.train.precision import choose_device, device_name, keep_freed_memory, resolve_precision
from vitlab.train.throughput import DEVICES, find_device

CPU = "cpu"
DAY = 24 * 3600
DEFAULT_MFU, ALL_TRAINED = 0.4, ", as if all blocks were trained"
TABLE2 = ((pretrain.jft, "ViT-H/14", 2500), (pretrain.jft, "ViT-L/16", 680), (pretrain.imagenet21k, "ViT-L/16", 230))
"""Recipe, model, and the TPUv3-core-days of Table 2 (a chip has two cores)."""
SECONDS, ROUNDS = 1.0, 3
"""Length and number of the rounds of a measurement on this machine."""
MAX_IMAGES, MAX_CPU_STEP_FLOPS = 128, 1e12
"""Limits of the batch of such a measurement: images, and FLOPs of a step on a CPU (about a second)."""


def estimate(
    config: TrainConfig,
    *,
    device: str,
    count: int,
    open_settings: Collection[str] = (),
    mfu: str | None = None,
    model_name: str | None = None,
    examples: int | None = None,
    image_kb: float = 110.0,
) -> dict[str, Any]:
    """The cost of a run, as plain data. Sizes are in bytes.

    device: one of DEVICES, or `cpu`, a machine like this one. count: processes, each with one device. mfu: a fraction
    of the device's peak in bfloat16, or `measured`; None is DEFAULT_MFU. examples: images of train, if unknown. Raises
    UserError for invalid arguments.
    """
    if device != CPU and device not in DEVICES:
        raise UserError(f"unknown device {device!r}; {nearest(device, DEVICES)}. All: {', '.join([*DEVICES, CPU])}.")
    if not image_kb > 0 or (examples is not None and examples < 1):
        raise UserError(f"image_kb={image_kb} and examples={examples} must be more than 0.")
    examples = _examples(config, examples)
    config = _complete(config, examples, device, open_settings)
    if count < 1 or config.batch_size % count:
        raise UserError(f"count is {count}; it must divide the batch of {config.batch_size}.")
    exa, steps = (amount(config, examples or config.batch_size) for amount in (exaflops, updates))
    memory = _memory(config, device, count)
    peak = DEVICES[device].tflops * 1e12 if device in DEVICES else None
    if mfu == "measured":
        flops, source = _measured_flops(config, device, memory["images_at_once"])
    else:
        frozen = config.trained_blocks is not None
        flops, source = _parse_mfu(mfu, config.precision) * (peak or 0.0), "assumed" + frozen * ALL_TRAINED
    if not flops:
        raise UserError("the peak of a CPU is unknown; give --mfu measured.")
    images_per_s = steps * config.batch_size / (seconds := exa * 1e18 / (flops * count))
    parameters = weight_counts(config.model, config.masking)[0]
    state = 1 + state_per_weight(config.optim) + bool(config.average_decay)
    return {
        "model": {"name": model_name, "parameters": parameters, "forward_macs": config.model.forward_macs},
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
        "mfu_source": source,
        "hours": seconds / 3600,
        "device_hours": count * seconds / 3600,
        "tpuv3_core_days": core_days(exa, model_name),
        "images_per_s": images_per_s,
        "image_kb": image_kb,
        "bytes_per_s": images_per_s * image_kb * 1e3,
        "checkpoint_bytes": 4 * state * parameters,
        **memory,
    }


def _complete(config: TrainConfig, examples: int | None, device: str, open_settings: Collection[str]) -> TrainConfig:
    """`config` with everything that depends on the data and the device. Raises UserError where nothing is trained."""
    if isinstance(config, FinetuneConfig) and not config.runs:
        raise UserError("runs is 0, and the least-squares head alone has no training to plan; give --runs 1.")
    if isinstance(config, FinetuneConfig) and open_settings:
        if examples is None:
            raise UserError("this recipe depends on the number of training images; give it with --examples.")
        config = bit_hyperrule(config, examples, CPU if device == CPU else "cuda", open_settings)
    return dataclasses.replace(config, model=model_of(StudyRun("plan", config, {}), {}))


def _examples(config: TrainConfig, count: int | None) -> int | None:
    """Images of the training split; None where they are unknown and do not affect the length of the run."""
    try:
        return count or images(config.data)
    except ValueError as error:
        if config.steps is not None:
            return None
        name = config.data.name or "your set"
        raise UserError(f"the number of images of {name} is unknown; give --examples.") from error


def core_days(exa: float, model_name: str | None = None) -> dict[str, float | None]:
    """TPUv3-core-days of this many exaFLOPs, at the mean rate of a core in the three runs of Table 2.

    That table gives their core-days, and the rule of Table 6 their exaFLOPs: 19.7 to 26.7 TFLOP/s of a core. `printed`
    is what Table 2 prints for this run; None for any other.
    """
    configs = [recipe(model) for recipe, model, _ in TABLE2]
    work = [exaflops(config, IMAGES[config.data.name]) for config in configs]
    tflops = sum(work) * 1e6 / (sum(days for _, _, days in TABLE2) * DAY)
    rows = zip(TABLE2, work, strict=True)
    printed = (days for (_, model, days), run in rows if model == model_name and math.isclose(exa, run, rel_tol=1e-3))
    return {"days": exa * 1e6 / tflops / DAY, "tflops": tflops, "printed": next(printed, None)}


def _parse_mfu(mfu: str | None, precision: str) -> float:
    if mfu is None and precision == "float32":
        raise UserError(
            "precision is float32, and the known peak is for bfloat16; give --mfu measured, or as a fraction of "
            "that peak."
        )
    try:
        fraction = float(DEFAULT_MFU if mfu is None else mfu)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise UserError(f"--mfu is {mfu}; give a fraction of the device's peak in bfloat16, in (0, 1], or measured.")
    return fraction


def _measured_flops(config: TrainConfig, device: str, images_at_once: int) -> tuple[float, str]:
    """FLOP/s, as Table 6 counts them, of the run's own step on this machine, and a description of the measurement."""
    here = choose_device(CPU if device == CPU else "auto")
    name = device_name(here)
    if device != (find_device(name) or name):
        raise UserError(f"this machine has {name}, and --device is {device}; give that device, or --mfu 0.4.")
    single = config.single() if isinstance(config, FinetuneConfig) else config
    flops, size = 6 * single.model.macs_without_padding, min(images_at_once, MAX_IMAGES)
    if here.type == CPU:
        keep_freed_memory()
        size = min(size, max(1, round(MAX_CPU_STEP_FLOPS / flops)))
    run = dataclasses.replace(single, batch_size=size, microbatch=None, fsdp=False)
    rates = time_interleaved({"step": training_step(run, here)}, SECONDS, ROUNDS)["step"]
    return statistics.median(rates) * size * flops, f"measured here, on {name}, with {size} images at once"


def _memory(config: TrainConfig, device: str, count: int) -> dict[str, Any]:
    """Memory of a process with DDP and with FSDP, by parts, and whether it fits."""
    if device == CPU:
        precision = resolve_precision(config.precision, torch.device(CPU))
        available = free_memory(torch.device(CPU)) or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        precision = "autocast" if config.precision == "auto" else config.precision
        available = DEVICES[device].memory
    images_per_process = config.batch_size // count
    at_once = min(config.microbatch or images_per_process, images_per_process)
    memory: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp") if count > 1 else ("alone",):
        options = (precision, CPU if device == CPU else "cuda", count, strategy == "fsdp")
        parts = rank_bytes(config, at_once, *options)
        total, microbatch = sum(parts.values()), at_once
        while microbatch and sum(rank_bytes(config, microbatch, *options).values()) > available:
            microbatch //= 2
        fits = total <= available
        memory[strategy] = {"parts": parts, "total": total, "fits": fits, "microbatch_that_fits": microbatch}
    return {
        "precision": precision,
        "activation_checkpointing": config.activation_checkpointing,
        "images_per_process": images_per_process,
        "images_at_once": at_once,
        "memory_bytes": available,
        "memory": memory,
        "chosen": "alone" if count == 1 else "fsdp" if config.fsdp else "ddp",
    }


def format_estimate(cost: Mapping[str, Any]) -> str:
    """The result of `estimate` as text."""
    hours, paper, memory = cost["hours"], cost["tpuv3_core_days"], cost["memory"]
    length = "" if cost["epochs"] is None else f" = {cost['epochs']:.3g} epochs of {cost['examples']:,} images"
    of_peak = f"MFU {cost['mfu']:.1%} of the bfloat16 peak, " if cost["mfu"] else ""
    mfu = f"{of_peak}{cost['mfu_source']}"
    lines = {
        "model": f"{cost['model']['name'] or 'without a name'}: {cost['model']['parameters']:,} parameters, "
        f"{cost['model']['forward_macs'] / 1e9:.4g} billion multiply-accumulates per image",
        "length": f"{cost['steps']:,} steps of {cost['batch_size']:,}{length}",
        "compute": f"{_short(cost['exaflops'])} exaFLOPs of training, as Table 6 counts",
        "time": f"{_short(hours)} hours ({hours / 24:.3g} days) of {cost['count']} {cost['device']} at "
        f"{cost['tflops']:.3g} TFLOP/s each ({mfu}); {_short(cost['device_hours'])} device-hours",
        "TPUv3": f"{_short(paper['days'])} core-days, estimated at {paper['tflops']:.1f} TFLOP/s, the mean of Table 2"
        + (f"; Table 2 prints {_short(float(paper['printed']))}" if paper["printed"] else ""),
        "data": f"{_short(cost['images_per_s'])} images/s; {_short(cost['bytes_per_s'] / 1e6)} MB/s at "
        f"{cost['image_kb']:g} kB per image",
        "checkpoint": f"{_short(cost['checkpoint_bytes'] / 1e6)} MB",
    }
    rows = []
    for name, column in memory.items():
        row = {"MB": name, **column["parts"], "total": column["total"], "available": cost["memory_bytes"]}
        rows.append({key: f"{cell / 1e6:,.1f}" if isinstance(cell, int) else cell for key, cell in row.items()})
    recomputed = ", blocks recomputed" if cost["activation_checkpointing"] else ""
    header = (
        f"memory of a process ({cost['precision']}{recomputed}; {cost['images_at_once']:,} of its "
        f"{cost['images_per_process']:,} images at once; this run: {cost['chosen']})"
    )
    notes = []
    for name, column in memory.items():
        if not column["fits"]:
            most = column["microbatch_that_fits"]
            notes.append(f"{name}: {f'--microbatch {most} would fit' if most else 'one image at once does not fit'}.")
    return "\n".join([*(f"{name:12}  {text}" for name, text in lines.items()), "", header, format_table(rows), *notes])


def _short(value: float) -> str:
    """Four significant digits."""
    return f"{float(f'{value:.4g}'):,.0f}" if value >= 1000 else f"{value:.4g}"

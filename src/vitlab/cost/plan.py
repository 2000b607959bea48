"""The cost of a run before it starts: compute, hours, memory of each process, data rate, checkpoint.

`vitlab plan` calls `estimate`, `paper/tables.py` calls `core_days`. Nothing is read, and nothing is trained unless
the speed is to be measured. Memory follows from a formula (`train/memory.py`).
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
from vitlab.display import format_duration, format_table
from vitlab.errors import UserError
from vitlab.recipes import pretrain
from vitlab.recipes.rules import bit_hyperrule
from vitlab.settings import nearest
from vitlab.studies.compute import PAPER_IMAGES, model_of, num_training_images
from vitlab.studies.spec import StudyRun, exaflops, updates
from vitlab.train.free_memory import free_memory
from vitlab.train.memory import rank_bytes, weight_counts
from vitlab.train.optim import state_per_weight
from vitlab.train.precision import choose_device, device_name, keep_freed_memory, resolve_precision
from vitlab.train.throughput import DEVICES, find_device

CPU = "cpu"
DAY = 24 * 3600
"""Seconds."""
DEFAULT_MFU = 0.4
"""Model FLOPs utilization, a fraction of the peak in bfloat16, if none is given."""
TABLE2 = ((pretrain.jft, "ViT-H/14", 2500), (pretrain.jft, "ViT-L/16", 680), (pretrain.imagenet21k, "ViT-L/16", 230))
"""Recipe, model and TPUv3-core-days of the runs in Table 2 (a chip has two cores)."""
SECONDS, ROUNDS = 1.0, 3
"""Duration of one round, and number of rounds, when the speed is measured on this machine."""
MAX_IMAGES, MAX_CPU_STEP_FLOPS = 128, 1e12
"""Largest batch of that measurement, and on a CPU the most FLOPs of its step: about a second."""
READ_PER_CORE = 873.0
"""Photos of about 260 pixels that a core reads and crops to 224 pixels in a second (docs/records/speed.md, Loader)."""
BACKWARD_FRACTION = 2 / 3
"""Fraction of a step that is its backward pass, during which DDP exchanges gradients."""


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
    price: float | None = None,
) -> dict[str, Any]:
    """The cost of a run, as data for JSON: sizes in bytes, times in hours, rates per second.

    device: one of DEVICES, or `cpu`, a machine like this one.
    count: number of processes, each with one device.
    open_settings: settings that the recipe chooses by the number of images.
    mfu: a fraction of the device's peak in bfloat16, or `measured` (default: DEFAULT_MFU).
    model_name: the model in the output, and in Table 2.
    examples: training images, if the registry does not know them.
    image_kb: mean size of an image file in kB.
    price: of one device for an hour.

    `tflops` is of one device. `examples` and `epochs` are None if the number of images is unknown, `mfu` on a CPU, and
    `price` without one. `tpuv3_core_days` comes from `core_days`, `needs` from `_needs`, the memory of a process from
    `_rank_memory`. Raises UserError for invalid arguments.
    """
    _check_arguments(device, examples, image_kb, price)
    examples = _train_examples(config, examples)
    config = _for_images(config, examples, device, open_settings)
    rank = _rank_memory(config, device, count)
    length = _length(config, examples)
    peak = DEVICES[device].tflops * 1e12 if device in DEVICES else None
    flops_per_s, mfu_source = _device_speed(config, device, mfu, peak, rank["images_at_once"])
    seconds = length["exaflops"] * 1e18 / (flops_per_s * count)
    images_per_s = length["steps"] * config.batch_size / seconds
    parameters = weight_counts(config.model, config.masking).total
    checkpoint_bytes = _checkpoint_bytes(config, parameters)
    needs = _needs(count, length["steps"] / seconds, images_per_s, parameters)
    needs["checkpoint_bytes_per_s"] = checkpoint_bytes * (length["steps"] / config.checkpoint_every) / seconds
    return {
        "model": {"name": model_name, "parameters": parameters, "forward_macs": config.model.forward_macs},
        "data": config.data.name,
        **length,
        "device": device,
        "count": count,
        "tflops": flops_per_s / 1e12,
        "mfu": flops_per_s / peak if peak else None,
        "mfu_source": mfu_source,
        "hours": seconds / 3600,
        "device_hours": count * seconds / 3600,
        "tpuv3_core_days": core_days(length["exaflops"], model_name),
        "images_per_s": images_per_s,
        "image_kb": image_kb,
        "bytes_per_s": images_per_s * image_kb * 1e3,
        "checkpoint_bytes": checkpoint_bytes,
        "needs": needs,
        "price": None if price is None else price * count * seconds / 3600,
        **rank,
    }


def _check_arguments(device: str, examples: int | None, image_kb: float, price: float | None) -> None:
    """Raises UserError for an argument of `estimate` that is invalid with any settings."""
    if device != CPU and device not in DEVICES:
        raise UserError(f"unknown device {device!r}; {nearest(device, DEVICES)}. All: {', '.join([*DEVICES, CPU])}.")
    if not image_kb > 0 or (examples is not None and examples < 1):
        raise UserError(f"image_kb={image_kb} and examples={examples} must be more than 0.")
    if price is not None and not 0 < price < math.inf:
        raise UserError(f"price is {price}; give the price of an hour of one device, more than 0.")


def _length(config: TrainConfig, examples: int | None) -> dict[str, Any]:
    """Images, epochs, steps, batch size and exaFLOPs of a run. Without `examples` its epochs are None."""
    # `examples` are unknown only if `steps` are fixed, so that any number has the same result.
    total_exaflops = exaflops(config, examples or config.batch_size)
    steps = updates(config, examples or config.batch_size)
    return {
        "examples": examples,
        "epochs": steps * config.batch_size / examples if examples else None,
        "steps": steps,
        "batch_size": config.batch_size,
        "exaflops": total_exaflops,
    }


def _checkpoint_bytes(config: TrainConfig, parameters: int) -> int:
    """Size of a checkpoint of this many parameters."""
    arrays_per_weight = 1 + state_per_weight(config.optim) + bool(config.average_decay)  # weight, optimizer, average
    return 4 * arrays_per_weight * parameters  # float32


def _needs(count: int, steps_per_s: float, images_per_s: float, parameters: int) -> dict[str, float]:
    """What each of `count` processes needs so that its device does not wait.

    exchange_bytes_per_s: network throughput in each direction. A ring all-reduce sends every gradient, in float32,
    twice, less the part that each process holds itself; DDP does so during the backward pass.
    cores: CPU cores that read its images.
    """
    ring_bytes = 2 * (count - 1) / count * 4 * parameters
    return {
        "exchange_bytes_per_s": ring_bytes * steps_per_s / BACKWARD_FRACTION,
        "cores": images_per_s / count / READ_PER_CORE,
    }


def _for_images(config: TrainConfig, examples: int | None, device: str, open_settings: Collection[str]) -> TrainConfig:
    """`config` with its open settings by BiT's rule, and a head for the classes of its data.

    Raises UserError if `runs` is 0, and if open settings require the number of images.
    """
    if isinstance(config, FinetuneConfig) and not config.runs:
        raise UserError("runs is 0, and the least-squares head alone has no training to plan; give --runs 1.")
    if isinstance(config, FinetuneConfig) and open_settings:
        if examples is None:
            raise UserError("this recipe depends on the number of training images; give it with --examples.")
        config = bit_hyperrule(config, examples, CPU if device == CPU else "cuda", open_settings)
    return dataclasses.replace(config, model=model_of(StudyRun("plan", config, {}), {}))  # a run without a study


def _train_examples(config: TrainConfig, count: int | None) -> int | None:
    """Images of the training split; None if unknown and `steps` are fixed. Raises UserError if they are required."""
    try:
        return count or num_training_images(config.data)
    except ValueError as error:
        if config.steps is not None:
            return None
        name = config.data.name or "your set"
        raise UserError(f"the number of images of {name} is unknown; give --examples.") from error


def core_days(run_exaflops: float, model_name: str | None = None) -> dict[str, Any]:
    """TPUv3-core-days of a run: `days`, estimated, and `printed`, in Table 2 (None for a run that is not in it).

    The estimate divides by `tflops`, the mean rate of a core in the runs of Table 2: their exaFLOPs, as Table 6 counts,
    over the printed core-days (19.7 to 26.7 TFLOP/s).
    """
    total_exaflops, printed = 0.0, None
    for recipe, model, days in TABLE2:
        config = recipe(model)
        table_exaflops = exaflops(config, PAPER_IMAGES[config.data.name])
        total_exaflops += table_exaflops
        if model == model_name and math.isclose(run_exaflops, table_exaflops, rel_tol=1e-3):
            printed = days
    # 1 exaFLOP = 1e6 TFLOPs
    tflops = total_exaflops * 1e6 / (sum(days for _, _, days in TABLE2) * DAY)
    return {"days": run_exaflops * 1e6 / tflops / DAY, "tflops": tflops, "printed": printed}


def _device_speed(
    config: TrainConfig, device: str, mfu: str | None, peak: float | None, images_at_once: int
) -> tuple[float, str]:
    """FLOP/s of one device, and where the number comes from. `peak`: its FLOP/s in bfloat16, if known."""
    if mfu == "measured":
        return _measured_flops(config, device, images_at_once)
    if mfu is None and config.precision == "float32":
        raise UserError(
            "precision is float32, and the known peak is for bfloat16; give --mfu measured, or a fraction of that peak."
        )
    try:
        fraction = float(DEFAULT_MFU if mfu is None else mfu)
    except ValueError:
        fraction = 0.0  # not a number: raises below
    if not 0 < fraction <= 1:
        raise UserError(f"--mfu is {mfu}; give a fraction of the device's peak in bfloat16, in (0, 1], or measured.")
    if peak is None:
        raise UserError("the peak of a CPU is unknown; give --mfu measured.")
    return fraction * peak, "assumed" if config.trained_blocks is None else "assumed, as if all blocks were trained"


def _measured_flops(config: TrainConfig, device: str, images_at_once: int) -> tuple[float, str]:
    """FLOP/s, as Table 6 counts them, of the run's own step on this machine, and a description of the measurement."""
    here = choose_device(CPU if device == CPU else "auto")
    name = device_name(here)
    if device != (find_device(name) or name):
        raise UserError(f"this machine has {name}, and --device is {device}; give that device, or --mfu 0.4.")
    single = config.single() if isinstance(config, FinetuneConfig) else config
    flops_per_image = 6 * single.model.macs_without_padding
    size = min(images_at_once, MAX_IMAGES)
    if here.type == CPU:
        keep_freed_memory()
        size = min(size, max(1, round(MAX_CPU_STEP_FLOPS / flops_per_image)))
    run = dataclasses.replace(single, batch_size=size, microbatch=None, fsdp=False)
    rates = time_interleaved({"step": training_step(run, here)}, SECONDS, ROUNDS)["step"]
    return statistics.median(rates) * size * flops_per_image, f"measured here, on {name}, with {size} images at once"


def _rank_memory(config: TrainConfig, device: str, count: int) -> dict[str, Any]:
    """The memory of one of `count` processes on such devices, in bytes: the device's, and what every strategy takes.

    Raises UserError if `count` does not divide the batch.
    """
    if count < 1 or config.batch_size % count:
        raise UserError(f"count is {count}; it must divide the batch of {config.batch_size}.")
    if device == CPU:
        precision = resolve_precision(config.precision, torch.device(CPU))
        available = free_memory(torch.device(CPU)) or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        precision = "autocast" if config.precision == "auto" else config.precision
        available = DEVICES[device].memory
    device_type = CPU if device == CPU else "cuda"
    images_per_process = config.batch_size // count
    images_at_once = min(config.microbatch or images_per_process, images_per_process)

    def bytes_of(strategy: str, microbatch: int) -> dict[str, int]:
        """Bytes of each part of the memory, such as activations."""
        return rank_bytes(config, microbatch, precision, device_type, count, strategy == "fsdp")

    memory = {}
    for strategy in ("ddp", "fsdp") if count > 1 else ("alone",):
        fitting = images_at_once
        while fitting and sum(bytes_of(strategy, fitting).values()) > available:
            fitting //= 2  # to 0 where one image at once does not fit
        parts = bytes_of(strategy, images_at_once)
        memory[strategy] = {
            "parts": parts,
            "total": sum(parts.values()),
            "fits": fitting == images_at_once,
            "microbatch_that_fits": fitting,
        }
    return {
        "precision": precision,
        "activation_checkpointing": config.activation_checkpointing,
        "images_per_process": images_per_process,
        "images_at_once": images_at_once,
        "memory_bytes": available,
        "memory": memory,
        "chosen": "alone" if count == 1 else "fsdp" if config.fsdp else "ddp",
    }


def format_estimate(cost: Mapping[str, Any]) -> str:
    """The estimate as text: what it costs, the memory of a process, and what would fit."""
    model, days, needs = cost["model"], cost["tpuv3_core_days"], cost["needs"]
    length = "" if cost["epochs"] is None else f" = {cost['epochs']:.3g} epochs of {cost['examples']:,} images"
    of_peak = f"MFU {cost['mfu']:.1%} of the bfloat16 peak, " if cost["mfu"] else ""
    printed = "" if days["printed"] is None else f"; Table 2 prints {days['printed']:,}"
    macs = f"{model['forward_macs'] / 1e9:.4g} billion multiply-accumulates per image"
    size = f"{model['parameters']:,} parameters, {macs}"
    duration = f"{format_duration(3600 * cost['hours'])} ({cost['hours'] / 24:.3g} days)"
    device_hours = _four_digits(cost["device_hours"])
    speed = f"{cost['tflops']:.3g} TFLOP/s each ({of_peak}{cost['mfu_source']})"
    core_speed = f"{days['tflops']:.1f} TFLOP/s, the mean of Table 2"
    images_per_s, mb_per_s = _four_digits(cost["images_per_s"]), _four_digits(cost["bytes_per_s"] / 1e6)
    exchange = f"{needs['exchange_bytes_per_s'] / 1e9:.3g} GB/s in and out of each process"
    written = f"{_four_digits(needs['checkpoint_bytes_per_s'] / 1e6)} MB/s"
    lines = {
        "model": f"{model['name'] or 'without a name'}: {size}",
        "length": f"{cost['steps']:,} steps of {cost['batch_size']:,}{length}",
        "compute": f"{_four_digits(cost['exaflops'])} exaFLOPs of training, as Table 6 counts",
        "time": f"{duration} of {cost['count']} {cost['device']} at {speed}; {device_hours} device-hours",
        "TPUv3": f"{_four_digits(days['days'])} core-days, estimated at {core_speed}{printed}",
        "data": f"{images_per_s} images/s; {mb_per_s} MB/s at {cost['image_kb']:g} kB per image",
        "readers": f"{needs['cores']:.1f} cores for each process, at {READ_PER_CORE:g} photos/s per core",
        "network": f"{exchange}, to exchange gradients during the backward pass",
        "checkpoint": f"{_four_digits(cost['checkpoint_bytes'] / 2**20)} MiB; {written}",
    }
    if cost["count"] == 1:
        del lines["network"]
    if cost["price"] is not None:
        lines["price"] = _four_digits(cost["price"])
    recomputed = ", blocks recomputed" if cost["activation_checkpointing"] else ""
    header = (
        f"memory of a process ({cost['precision']}{recomputed}; {cost['images_at_once']:,} of its "
        f"{cost['images_per_process']:,} images at once; this run: {cost['chosen']})"
    )
    rows, notes = [], []
    for strategy, memory in cost["memory"].items():
        sizes = {**memory["parts"], "total": memory["total"], "available": cost["memory_bytes"]}
        rows.append({"MiB": strategy} | {name: f"{size / 2**20:,.1f}" for name, size in sizes.items()})
        if not memory["fits"]:
            most = memory["microbatch_that_fits"]
            note = f"--microbatch {most} would fit" if most else "one image at once does not fit"
            notes.append(f"{strategy}: {note}.")
    return "\n".join([*(f"{name:12}  {text}" for name, text in lines.items()), "", header, format_table(rows), *notes])


def _four_digits(value: float) -> str:
    """The number with four significant digits."""
    return f"{float(f'{value:.4g}'):,.0f}" if value >= 1000 else f"{value:.4g}"

"""What a model costs to run (App. D.5, Fig. 12): images/s, FLOP/s, memory and the largest batch, over image sizes.

A row is one model at one size in training or inference. All contenders of a row are timed in interleaved rounds in one
process, together with the ceiling: the matrix products of the model and nothing else. Each row is saved as soon as it
is measured; a later call continues with the missing ones.
"""

import dataclasses
import gc
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from vitlab.config import PositiveFloat, PositiveInt
from vitlab.cost.measure import (
    commit,
    copy_bandwidth,
    count_products,
    environment,
    fastest_batch,
    products_step,
    profile_step,
    ratio,
    seconds_per_step,
    spread,
    time_interleaved,
)  # fmt: skip
from vitlab.cost.peak_memory import GIB, PeakMemory, describe_method, free_memory, largest_batch
from vitlab.cost.peers import OURS, PACKAGES, Contender, Mode, Work, build, check_installed, variants
from vitlab.cost.report import CEILING, TITLES, headline, panels
from vitlab.display import ProgressDisplay
from vitlab.errors import UserError
from vitlab.evaluate.load import choose_device
from vitlab.inspect import figures, plots
from vitlab.io import replacing_file
from vitlab.models import ViTConfig, get_config, list_models
from vitlab.settings import check_fields
from vitlab.train.precision import cpu_is_faster_in_bfloat16, device_name, keep_freed_memory
from vitlab.train.progress import peak_flops
from vitlab.train.workdir import write_json
from vitlab.weights import ParityError

FIGURE_12 = ("R50x1", "R50x2", "ViT-B/32", "ViT-L/32", "ViT-B/16", "ViT-L/16", "ViT-H/14", "R152x4")
SIZES = (64, 128, 224, 384, 512)
CPU_MEMORY = 4.0
"""Default of `memory` on a CPU, in GiB."""
Key = tuple[Mode, str, int]
"""Mode, model and image size of a row."""
Say = Callable[[str], None]


class _SkippedError(Exception):
    """The row cannot be measured; the message is the reason."""


@dataclass(frozen=True)
class Settings:
    """What to measure, and how."""

    models: tuple[str, ...] = FIGURE_12
    """Names or shell patterns."""
    sizes: tuple[PositiveInt, ...] = SIZES
    """Image sides in pixels."""
    mode: Literal["train", "infer", "both"] = "infer"
    batch: PositiveInt | None = None
    """None is the power of two at which ours is fastest."""
    against: tuple[str, ...] = ()
    """Peers."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    compile: bool = False
    seconds: PositiveFloat = 1.0
    """Length of a round of one contender."""
    rounds: PositiveInt = 7
    memory: PositiveFloat | None = None
    """GiB that a step may take besides torch itself. None: 4 on a CPU, all of a GPU."""
    largest: bool = True
    """Search the largest batch that fits into that memory."""
    profile: bool = False
    device: str = "auto"

    def __post_init__(self) -> None:
        check_fields(self)
        for peer in self.against:
            check_installed(peer)
        if self.batch is None and not self.largest:
            raise UserError("--batch auto requires the largest batch; drop --no-largest, or give a number.")
        if self.profile and self.mode == "infer":
            raise UserError("--profile reports the parts of a training step; give --mode train or both.")

    @property
    def rows(self) -> list[Key]:
        """The key of every row. Raises UserError for an unknown model."""
        modes: tuple[Mode, ...] = ("infer", "train") if self.mode == "both" else (self.mode,)
        names = dict.fromkeys(name for pattern in self.models for name in list_models(pattern) or [pattern])
        sizes = {name: dict.fromkeys(_valid_size(name, size) for size in self.sizes) for name in names}
        return [(mode, name, size) for mode in modes for name in names for size in sizes[name]]

    @property
    def budget(self) -> int | None:
        """`memory` in bytes."""
        return None if self.memory is None else round(self.memory * GIB)

    def resolve(self, device: torch.device) -> "Settings":
        """The settings with nothing left automatic."""
        on_gpu = device.type == "cuda"
        fast = torch.cuda.is_bf16_supported(including_emulation=False) if on_gpu else cpu_is_faster_in_bfloat16()
        memory = self.memory or (None if on_gpu else CPU_MEMORY)
        if not on_gpu and memory is not None and memory * GIB > free_memory():
            raise UserError(f"a step may take {memory:g} GiB and {free_memory() / GIB:.1f} are free; give --memory.")
        dtype = ("bfloat16" if fast else "float32") if self.dtype == "auto" else self.dtype
        return dataclasses.replace(self, dtype=dtype, memory=memory, device=str(device))


def _valid_size(name: str, size: int) -> int:
    """The size, or the nearest one that the model's patches divide (378 for 384 and ViT-H/14)."""
    stride = config.stride if isinstance(config := get_config(name), ViTConfig) else 1
    try:
        get_config(name, image_size=size)
    except ValueError:
        return max(round(size / stride), 1) * stride
    return size


def bench(settings: Settings, out: Path) -> dict[str, Any]:
    """Measures the rows that `out`/bench.json lacks and draws `out`/bench.png; returns the content of the JSON.

    A peer that does not support a model, or whose logits differ, is not timed and listed under `unable`. Raises
    UserError where the JSON was measured with other settings or on another machine.
    """
    device, keys = choose_device(settings.device), settings.rows
    settings = settings.resolve(device)
    if device.type == "cpu":
        keep_freed_memory()  # for all contenders alike
    else:
        torch.cuda.set_device(device)
    record = _open_record(out / "bench.json", settings, device)
    rows = {(row["mode"], row["model"], row["image_size"]): row for row in record["rows"]}
    with ProgressDisplay("bench", len(keys), "rows") as display:
        if "copy_gb_per_s" not in record:
            display.update(0, "measuring the speed of copying", force=True)
            record["copy_gb_per_s"] = copy_bandwidth(device) / 1e9
        for number, key in enumerate(keys):
            if key in rows and "skipped" not in rows[key]:
                continue
            mode, name, size = key
            title = f"[{number + 1}/{len(keys)}] {name}, {size} pixels, {TITLES[mode].lower()}"
            display.update(number, title, force=True)
            try:
                row = _measure(settings, key, lambda text, n=number, title=title: display.update(n, f"{title}: {text}"))
            except _SkippedError as error:
                row = {"skipped": str(error)}
            display.say(f"{title}: {headline(row)}")
            rows.pop(key, None)
            rows[key] = {"mode": mode, "model": name, "image_size": size, **row}
            write_json(out / "bench.json", record | {"rows": list(rows.values())})
    record["rows"] = list(rows.values())
    if shown := panels(record):
        with replacing_file(out / "bench.png") as file:
            file.write(figures.png(plots.panels(shown)))
    return json.loads((out / "bench.json").read_bytes())


def _open_record(path: Path, settings: Settings, device: torch.device) -> dict[str, Any]:
    """The record to continue, or a new one."""
    machine = environment("torch", *(PACKAGES[peer][0] for peer in settings.against))
    del machine["commit"]  # each row has its own
    machine["device"] = device_name(device)
    machine["threads"] = torch.get_num_threads()
    common = ("batch", "against", "dtype", "compile", "seconds", "rounds", "memory", "largest", "profile")
    values = {name: getattr(settings, name) for name in common} | {"against": list(settings.against)}
    new = {"machine": machine, "settings": values, "memory_is": describe_method(device), "rows": []}
    if not path.exists():
        return new
    try:
        record = json.loads(path.read_bytes())
        differences = [
            f"{name} {record[part].get(name)!r} -> {value!r}"
            for part in ("machine", "settings")
            for name, value in new[part].items()
            if record[part].get(name) != value
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is not a record of `vitlab bench`; give another --out.") from error
    if differences:
        raise UserError(f"{path} was measured differently ({'; '.join(differences)}); give another --out.")
    return record


# ------------------------------------------------------------------------------------------------------------ one row


def _measure(settings: Settings, key: Key, say: Say) -> dict[str, Any]:
    """The row of a key."""
    mode, name, size = key
    assert settings.dtype != "auto"
    config, device = get_config(name, image_size=size), torch.device(settings.device)
    work = Work(config, mode, settings.batch or 1, settings.dtype, settings.compile, settings.device)
    row: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "commit": commit(), "largest": None}
    if settings.largest:
        with PeakMemory(OURS, work, settings.budget) as peak:
            row["largest"] = largest_batch(lambda batch: say(f"does a batch of {batch} fit?") or peak(batch))
        if not row["largest"]["batch"]:
            raise _SkippedError(_too_large(1, settings))
        if settings.batch is None:
            work = dataclasses.replace(work, batch=_fastest_batch(work, row["largest"]["batch"], say))
    row |= {"batch": work.batch, "batch_is": "given" if settings.batch else "where ours is fastest"}
    peaks, row["unable"] = _peaks(settings, work, say)
    products, dtype = count_products(config, work.batch, mode == "train"), getattr(torch, settings.dtype)
    total = sum(peaks.values()) + sum(product.numel for product in products) * dtype.itemsize
    if device.type == "cpu" and total > free_memory():
        raise _SkippedError(
            f"side by side the contenders and the ceiling take {total / GIB:.1f} GiB, and "
            f"{free_memory() / GIB:.1f} are free"
        )
    say("building")
    try:
        contenders = {name: build(name, work) for name in peaks}
        steps = {name: contender.step for name, contender in contenders.items()}
        steps[CEILING] = products_step(products, dtype, device)
        rates = time_interleaved(steps, settings.seconds, settings.rounds, say)
    except torch.OutOfMemoryError as error:  # on a GPU, into which each fits alone
        raise _SkippedError("the contenders and the ceiling do not fit side by side; give a smaller --batch") from error
    row |= _figures(work, contenders, rates, peaks, device)
    if settings.profile and mode == "train":
        say("profiling")
        row["parts"] = profile_step(build(OURS, dataclasses.replace(work, compile=False)).step, device)
    del contenders, steps
    torch.compiler.reset()
    gc.collect()
    return row


def _fastest_batch(work: Work, most: int, say: Say) -> int:
    """The batch at which our step processes most images/s."""

    def rate(batch: int) -> float:
        say(f"how fast is a batch of {batch}?")
        step = build(OURS, dataclasses.replace(work, batch=batch, compile=False)).step
        return batch / min(seconds_per_step(step) for _ in range(2))

    return fastest_batch(rate, most)


def _peaks(settings: Settings, work: Work, say: Say) -> tuple[dict[str, int], dict[str, str]]:
    """The peak memory of every contender that can take part, and the reason for every other one."""
    peaks, unable = {}, {}
    for name in [OURS, *(name for peer in settings.against for name in variants(peer, work.config))]:
        say(f"how much memory does {name} take?")
        try:
            with PeakMemory(name, work, settings.budget) as peak_memory:
                peak = peak_memory(work.batch)
        except (ValueError, ParityError) as error:
            unable[name] = str(error)
            continue
        if peak is None:
            unable[name] = _too_large(work.batch, settings)
        else:
            peaks[name] = peak
    if OURS in unable:
        raise _SkippedError(unable[OURS])
    return peaks, unable


def _too_large(batch: int, settings: Settings) -> str:
    limit = "the device's memory" if settings.memory is None else f"{settings.memory:g} GiB (--memory)"
    return f"a batch of {batch} does not fit into {limit}"


def _figures(
    work: Work,
    contenders: Mapping[str, Contender],
    rates: Mapping[str, list[float]],
    peaks: Mapping[str, int],
    device: torch.device,
) -> dict[str, Any]:
    """The figures of a row. Ours is compared with the fastest variant of each peer."""
    flops = (6 if work.mode == "train" else 2) * work.config.forward_macs
    speeds = {name: spread([work.batch * rate for rate in per_round]) for name, per_round in rates.items()}
    tflops = {name: speed["median"] * flops / 1e12 for name, speed in speeds.items()}
    peak, ratios = peak_flops(device_name(device)) if work.dtype == "bfloat16" else None, {}
    for peer in PACKAGES:
        if names := [name for name in variants(peer, work.config) if name in contenders]:
            best = max(names, key=lambda name: speeds[name]["median"])
            ratios[peer] = {"to": best, **ratio(rates[OURS], rates[best])}
    return {
        "contenders": {
            name: {"given": contender.settings, "images_per_s": speeds[name], "peak_bytes": peaks[name]}
            for name, contender in contenders.items()
        },
        "ratio": ratios,
        "tflops": tflops[OURS],
        "mfu": tflops[OURS] * 1e12 / peak if peak else None,
        "ceiling": {
            "images_per_s": speeds[CEILING],
            "tflops": tflops[CEILING],
            "share": ratio(rates[OURS], rates[CEILING]),
        },
    }

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
from vitlab.cost import measure
from vitlab.cost.memory import Process, inference_bytes
from vitlab.cost.peers import OURS, PACKAGES, Contender, Mode, Work, build, check_installed, variants
from vitlab.cost.report import CEILING, GIB, TITLES, headline, panels
from vitlab.display import ProgressDisplay
from vitlab.errors import UserError
from vitlab.evaluate.load import choose_device
from vitlab.inspect import figures, plots
from vitlab.io import replacing_file
from vitlab.models import ViTConfig, get_config, list_models
from vitlab.settings import check_fields
from vitlab.train.microbatch import free_memory
from vitlab.train.precision import cpu_is_faster_in_bfloat16, device_name, keep_freed_memory
from vitlab.train.progress import peak_flops
from vitlab.train.workdir import write_json
from vitlab.weights import ParityError

FIGURE_12 = ("R50x1", "R50x2", "ViT-B/32", "ViT-L/32", "ViT-B/16", "ViT-L/16", "ViT-H/14", "R152x4")
SIZES = (64, 128, 224, 384, 512)
CPU_MEMORY = 4.0
"""Default of `memory` on a CPU, in GiB."""
MAX_BATCH = 2**15
"""The search for the largest batch ends here."""
MIN_GAIN = 1.05
"""A batch twice as large must be this much faster to be chosen."""
Key = tuple[Mode, str, int]
"""Mode, model and image size of a row."""
Say = Callable[[str], None]


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
    """GiB that a step may take. None: 4 on a CPU, all of a GPU."""
    largest: bool = True
    """Search the largest batch that fits into that memory."""
    device: str = "auto"

    def __post_init__(self) -> None:
        check_fields(self)
        for peer in self.against:
            check_installed(peer)

    @property
    def rows(self) -> list[Key]:
        """The key of every row. Raises UserError for an unknown model."""
        modes: tuple[Mode, ...] = ("infer", "train") if self.mode == "both" else (self.mode,)
        names = dict.fromkeys(name for pattern in self.models for name in list_models(pattern) or [pattern])
        sizes = {name: dict.fromkeys(_valid_size(name, size) for size in self.sizes) for name in names}
        return [(mode, name, size) for mode in modes for name in names for size in sizes[name]]

    def resolve(self, device: torch.device) -> "Settings":
        """The settings with nothing left automatic."""
        on_gpu = device.type == "cuda"
        fast = torch.cuda.is_bf16_supported(including_emulation=False) if on_gpu else cpu_is_faster_in_bfloat16()
        dtype = ("bfloat16" if fast else "float32") if self.dtype == "auto" else self.dtype
        gpu_memory = torch.cuda.get_device_properties(device).total_memory / GIB if on_gpu else CPU_MEMORY
        return dataclasses.replace(self, dtype=dtype, memory=self.memory or gpu_memory, device=str(device))


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
        for number, key in enumerate(keys):
            if "skipped" not in rows.get(key, {"skipped": True}):
                continue
            mode, name, size = key
            title = f"[{number + 1}/{len(keys)}] {name}, {size} pixels, {TITLES[mode].lower()}"
            display.update(number, title, force=True)
            rows.pop(key, None)
            rows[key] = row = {"mode": mode, "model": name, "image_size": size}
            try:
                row |= _measure(
                    settings, key, lambda text, n=number, title=title: display.update(n, f"{title}: {text}")
                )
            except UserError as error:
                row["skipped"] = str(error)
            except torch.OutOfMemoryError:  # each contender fits alone
                row["skipped"] = "the contenders and the ceiling do not fit side by side; give a smaller --batch"
            display.say(f"{title}: {headline(row)}")
            write_json(out / "bench.json", record | {"rows": list(rows.values())})
    record["rows"] = list(rows.values())
    if shown := panels(record):
        with replacing_file(out / "bench.png") as file:
            file.write(figures.png(plots.panels(shown)))
    return json.loads((out / "bench.json").read_bytes())


def _open_record(path: Path, settings: Settings, device: torch.device) -> dict[str, Any]:
    """The record to continue, or a new one."""
    machine = measure.environment("torch", *(PACKAGES[peer][0] for peer in settings.against))
    del machine["commit"]  # each row has its own
    machine |= {"device": device_name(device), "threads": torch.get_num_threads()}
    common = dataclasses.asdict(settings)
    for name in ("models", "sizes", "mode", "device"):  # of the rows
        del common[name]
    new = {"machine": machine, "settings": common | {"against": list(settings.against)}, "rows": []}
    if not path.exists():
        return new
    try:
        record = json.loads(path.read_bytes())
        same = (record["machine"], record["settings"]) == (new["machine"], new["settings"])
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is not a record of `vitlab bench`; give another --out.") from error
    if not same:
        raise UserError(f"{path} was measured with other settings or on another machine; give another --out.")
    return record


# ------------------------------------------------------------------------------------------------------------ one row


def _measure(settings: Settings, key: Key, say: Say) -> dict[str, Any]:
    """The row of a key."""
    mode, name, size = key
    assert settings.dtype != "auto"
    assert settings.memory is not None
    budget = settings.memory * GIB
    config, device = get_config(name, image_size=size), torch.device(settings.device)
    work = Work(config, mode, settings.batch or 1, settings.dtype, settings.compile, settings.device)

    def peak_that_fits(batch: int) -> int | None:
        say(f"the memory of a batch of {batch}")
        peak = peak_bytes(OURS, dataclasses.replace(work, batch=batch))
        return peak if peak is not None and peak <= budget else None

    row: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "commit": measure.commit(), "largest": None}
    if peak_that_fits(work.batch) is None:
        raise UserError(f"a batch of {work.batch} does not fit into {settings.memory:.3g} GiB (--memory)")
    if settings.largest:
        row["largest"] = largest_batch(peak_that_fits)
    if settings.batch is None:
        work = dataclasses.replace(work, batch=fastest_batch(work, peak_that_fits, say))
    row |= {"batch": work.batch, "batch_is": "given" if settings.batch else "where ours is fastest"}
    contenders, peaks, row["unable"] = _build_all(settings, work, say)
    steps = {name: contender.step for name, contender in contenders.items()}
    products = measure.count_products(config, work.batch, mode == "train")
    steps[CEILING] = measure.products_step(products, getattr(torch, work.dtype), device)
    rates = measure.time_interleaved(steps, settings.seconds, settings.rounds, say)
    row |= _figures(work, contenders, rates, peaks, device)
    del contenders, steps
    torch.compiler.reset()
    gc.collect()
    return row


def _build_all(
    settings: Settings, work: Work, say: Say
) -> tuple[dict[str, Contender], dict[str, int | None], dict[str, str]]:
    """The contenders that can take part, their peak memory, and the reason for every other one."""
    contenders, peaks, unable = {}, {}, {}
    names = [OURS, *(name for peer in settings.against for name in variants(peer, work.config))]
    room = free_memory(torch.device("cpu"))
    if work.device == "cpu" and room is not None and (peak_bytes(OURS, work) or 0) * len(names) > room:
        raise torch.OutOfMemoryError  # which a CPU does not raise: the system ends the process
    for name in names:
        say(f"building {name}")
        try:
            peaks[name] = peak_bytes(name, work)
            contenders[name] = build(name, work)
        except (ValueError, ParityError) as error:
            unable[name] = str(error)
    return contenders, peaks, unable


def peak_bytes(name: str, work: Work) -> int | None:
    """Peak memory of a step that is not compiled.

    On a GPU measured; None where it does not fit. On a CPU counted as by `vitlab plan`, and None for peers.
    """
    if work.device.startswith("cuda"):
        return _measured_peak(name, dataclasses.replace(work, compile=False))
    if name != OURS:
        return None
    if work.mode == "infer":
        return inference_bytes(work.config, work.batch, getattr(torch, work.dtype), "cpu")
    return sum(Process(work.run, work.dtype, "cpu").memory(work.batch).values())


def _measured_peak(name: str, work: Work) -> int | None:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    try:
        step = build(name, work).step
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            step()
    except torch.OutOfMemoryError:
        return None
    return torch.cuda.max_memory_allocated() - before


def largest_batch(peak: Callable[[int], int | None], most: int = MAX_BATCH) -> dict[str, int | None]:
    """The largest `batch` that fits (0: none), its `peak`, and the smallest known not to fit, `fails_at`.

    Doubling, then bisection until a batch larger by 1/16 does not fit. `peak(batch)` is None for a batch that does not
    fit. `fails_at` is None where the search ended at `most`.
    """
    fits, fails, peak_of_largest = 0, None, None
    while fits < most if fails is None else fails - fits > max(1, fits // 16):
        batch = min(2 * fits or 1, most) if fails is None else (fits + fails) // 2
        if (bytes_needed := peak(batch)) is None:
            fails = batch
        else:
            fits, peak_of_largest = batch, bytes_needed
    return {"batch": fits, "peak": peak_of_largest, "fails_at": fails}


def fastest_batch(work: Work, peak: Callable[[int], int | None], say: Say) -> int:
    """The power of two that fits at which ours processes most images/s; ends after two doublings without a gain."""
    best, best_rate, batch, without_gain = 1, 0.0, 1, 0
    while without_gain < 2 and batch <= MAX_BATCH and peak(batch) is not None:
        say(f"the speed of a batch of {batch}")
        step = build(OURS, dataclasses.replace(work, batch=batch, compile=False)).step
        rate = batch / min(measure.seconds_per_step(step) for _ in range(2))
        without_gain += 1
        if rate > MIN_GAIN * best_rate:
            best, best_rate, without_gain = batch, rate, 0
        batch *= 2
    return best


def _figures(
    work: Work,
    contenders: Mapping[str, Contender],
    rates: Mapping[str, list[float]],
    peaks: Mapping[str, int | None],
    device: torch.device,
) -> dict[str, Any]:
    """The figures of a row. Ours is compared with the fastest variant of each peer."""
    flops = (6 if work.mode == "train" else 2) * work.config.forward_macs
    speeds = {name: measure.spread([work.batch * rate for rate in per_round]) for name, per_round in rates.items()}
    tflops = {name: speed["median"] * flops / 1e12 for name, speed in speeds.items()}
    peak, ratios = peak_flops(device_name(device)) if work.dtype == "bfloat16" else None, {}
    for peer in PACKAGES:
        if names := [name for name in variants(peer, work.config) if name in contenders]:
            best = max(names, key=lambda name: speeds[name]["median"])
            ratios[peer] = {"to": best, **measure.ratio(rates[OURS], rates[best])}
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
            "share": measure.ratio(rates[OURS], rates[CEILING]),
        },
    }

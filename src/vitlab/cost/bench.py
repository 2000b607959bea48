"""What a model really costs (App. D.5, Fig. 12): images a second, the largest batch, memory and FLOP/s of every model
over the size of the image, beside its peers and beside what the machine could do at most.

A row is one model at one size in training or inference. All contenders of a row are timed in turn, round after round,
in one process. A row is kept as soon as it is measured, and none is measured twice.
"""

import dataclasses
import gc
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from vitlab.cost.ceiling import copy_bandwidth, product_step, products
from vitlab.cost.circumstances import circumstances, commit
from vitlab.cost.parts import as_text, profile_step
from vitlab.cost.peers import MODULES, OURS, PEERS, Contender, Mode, Work, build, check_installed, variants
from vitlab.cost.timing import fastest_batch, in_turn, ratio, spread, warm_up
from vitlab.cost.trial import GIB, Trial, free_memory, how_measured, largest
from vitlab.errors import UserError
from vitlab.evaluate.load import choose_device
from vitlab.inspect import figures, plots
from vitlab.inspect.panels import Panel, Series
from vitlab.io import replacing_file
from vitlab.models import ViTConfig, get_config, list_models
from vitlab.settings import check_fields, nearest
from vitlab.studies.stages import Stages
from vitlab.train.precision import cpu_is_faster_in_bfloat16, device_name, keep_freed_memory
from vitlab.train.progress import peak_flops
from vitlab.train.workdir import write_json
from vitlab.weights import ParityError

FIGURE_12 = ("R50x1", "R50x2", "ViT-B/32", "ViT-L/32", "ViT-B/16", "ViT-L/16", "ViT-H/14", "R152x4")
SIZES = (64, 128, 224, 384, 512)
CEILING = "ceiling"
CPU_MEMORY = 4.0
"""GiB that a step may take on a CPU unless told otherwise."""
Say = Callable[[str], None]


class _SkippedError(Exception):
    """This row cannot be measured, and why."""


@dataclass(frozen=True)
class Settings:
    """What to measure, and how."""

    models: tuple[str, ...] = FIGURE_12
    """Names or shell patterns."""
    sizes: tuple[int, ...] = SIZES
    mode: Literal["train", "infer", "both"] = "infer"
    batch: int | None = None
    """None takes the one at which ours is fastest, of powers of two."""
    against: tuple[str, ...] = ()
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    compile: bool = False
    seconds: float = 1.0
    """Length of a round of one contender."""
    rounds: int = 7
    memory: float | None = None
    """GiB that a step may take beside what torch takes anyhow; None: 4 on a CPU, all of a GPU."""
    largest: bool = True
    """Seek the largest batch that fits into that memory."""
    profile: bool = False
    device: str = "auto"

    def __post_init__(self) -> None:
        check_fields(self)
        for peer in self.against:
            if peer not in PEERS:
                raise UserError(f"unknown peer {peer!r}; {nearest(peer, PEERS)}.")
            check_installed(peer)
        if "openvino" in self.against and self.mode == "train":
            raise UserError("OpenVINO does not train; leave it out, or give --mode infer or both.")
        if self.batch is None and not self.largest:
            raise UserError("--batch auto has to know what fits; leave --no-largest out, or give a number.")
        for name in ("batch", "seconds", "rounds", "memory"):
            given = getattr(self, name)
            if given is not None and not 0 < given < math.inf:
                raise UserError(f"{name} is {given}; it must be positive and finite.")
        if not self.sizes or min(self.sizes) < 1:
            raise UserError(f"sizes are {self.sizes}; give sides in pixels, each at least 1.")
        if self.profile and self.mode == "infer":
            raise UserError("--profile tells the parts of a training step; give --mode train or both.")

    @property
    def plan(self) -> list[tuple[Mode, str, int]]:
        """Every row: mode, model, size. Raises ValueError for a name that no model has."""
        modes: tuple[Mode, ...] = ("infer", "train") if self.mode == "both" else (self.mode,)
        names = dict.fromkeys(name for given in self.models for name in list_models(given) or [given])
        sizes = {name: dict.fromkeys(_fitting(name, size) for size in self.sizes) for name in names}
        return [(mode, name, size) for mode in modes for name in names for size in sizes[name]]

    def on(self, device: torch.device) -> "Settings":
        """The same with nothing left automatic."""
        on_gpu = device.type == "cuda"
        fast = torch.cuda.is_bf16_supported(including_emulation=False) if on_gpu else cpu_is_faster_in_bfloat16()
        memory = self.memory or (None if on_gpu else CPU_MEMORY)
        if not on_gpu and memory is not None and memory * GIB > free_memory():
            raise UserError(f"a step may take {memory:g} GiB and {free_memory() / GIB:.1f} are free; give --memory.")
        dtype = ("bfloat16" if fast else "float32") if self.dtype == "auto" else self.dtype
        return dataclasses.replace(self, dtype=dtype, memory=memory, device=str(device))


def _fitting(name: str, size: int) -> int:
    """The size, or where it cannot be cut into the model's patches the nearest that can (378 for 384 and H/14)."""
    stride = config.stride if isinstance(config := get_config(name), ViTConfig) else 1
    try:
        get_config(name, image_size=size)
    except ValueError:
        return max(round(size / stride), 1) * stride
    return size


def bench(settings: Settings, out: Path) -> dict[str, Any]:
    """Measures what `out`/bench.json has not yet, and draws `out`/bench.png; returns what the JSON holds.

    A peer that cannot be the model, or answers otherwise, is not timed, and named with the reason. Raises ValueError
    where `out` holds measurements of another kind.
    """
    device, plan = choose_device(settings.device), settings.plan
    settings = settings.on(device)
    if device.type == "cpu":
        keep_freed_memory()  # for all contenders alike
    record = _opened(out, settings, device)
    rows: list[dict[str, Any]] = record["rows"]
    kept = {(row["mode"], row["model"], row["image_size"]): row for row in rows}
    with Stages() as stages:
        stages.begin("measuring the speed of copying")
        record["copy_gb_per_s"] = record.get("copy_gb_per_s") or copy_bandwidth(device) / 1e9
        for number, key in enumerate(plan, 1):
            if key in kept and "skipped" not in kept[key]:
                continue
            mode, name, size = key
            label = f"[{number}/{len(plan)}] {name}, {size} pixels, {'training' if mode == 'train' else 'inference'}"
            stages.begin(label)
            try:
                row = _measured(settings, key, lambda text, label=label: stages.show(f"{label}: {text}"))
            except _SkippedError as why:
                row = {"skipped": str(why)}
            stages.done(f"{label}: {_headline(row)}")
            if key in kept:
                rows.remove(kept[key])
            rows.append({"mode": mode, "model": name, "image_size": size, **row})
            write_json(out / "bench.json", record)
    if shown := panels(record):
        with replacing_file(out / "bench.png") as file:
            file.write(figures.png(plots.panels(shown)))
    return json.loads((out / "bench.json").read_bytes())


def _opened(out: Path, settings: Settings, device: torch.device) -> dict[str, Any]:
    """The record in `out` to go on with, or a fresh one; ValueError where it was made under other terms."""
    machine = circumstances("torch", *(MODULES[peer] for peer in settings.against))
    del machine["commit"]  # each row has its own
    machine |= {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"}
    machine |= {"threads": torch.get_num_threads()}
    common = ("batch", "against", "dtype", "compile", "seconds", "rounds", "memory", "largest", "profile")
    terms = {name: getattr(settings, name) for name in common} | {"against": list(settings.against)}
    fresh = {"machine": machine, "settings": terms, "memory_is": how_measured(device), "rows": []}
    if not (out / "bench.json").exists():
        return fresh
    try:
        found = json.loads((out / "bench.json").read_bytes())
    except ValueError:
        found = None
    if not isinstance(found, dict) or "rows" not in found:
        raise UserError(f"{out / 'bench.json'} is not of `vitlab bench`; give another --out.")
    wrong = [
        f"{name} {found.get(part, {}).get(name)!r} -> {value!r}"
        for part in ("machine", "settings")
        for name, value in fresh[part].items()
        if found.get(part, {}).get(name) != value
    ]
    if wrong:
        raise UserError(f"{out / 'bench.json'} was measured otherwise ({'; '.join(wrong)}); give another --out.")
    return found


# ---------------------------------------------------------------------------------------------------- one row


def _measured(settings: Settings, key: tuple[Mode, str, int], say: Say) -> dict[str, Any]:
    """One row."""
    mode, name, size = key
    device, budget = torch.device(settings.device), None if settings.memory is None else round(settings.memory * GIB)
    assert settings.dtype != "auto"
    config = get_config(name, image_size=size)
    work = Work(config, mode, settings.batch or 1, settings.dtype, settings.compile, settings.device)
    row: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "commit": commit(), "largest": None}
    if settings.largest:
        with Trial(OURS, work, budget) as trial:
            found = largest(lambda batch: say(f"does a batch of {batch} fit?") or trial(batch))
        row["largest"] = dataclasses.asdict(found)
        if not found.batch:
            raise _SkippedError(_too_large(1, settings.memory))
        if settings.batch is None:
            work = dataclasses.replace(work, batch=_batch(work, found.batch, say))
    row |= {"batch": work.batch, "batch_is": "given" if settings.batch else "where ours is fastest"}
    peaks, unable = _peaks(settings, work, budget, say)
    if OURS not in peaks:
        raise _SkippedError(unable[OURS])
    bare, dtype = products(config, work.batch, mode == "train"), getattr(torch, settings.dtype)
    taken = sum(peaks.values()) + sum(each.numbers for each in bare) * dtype.itemsize
    if device.type == "cpu" and taken > free_memory():
        raise _SkippedError(f"side by side the contenders and the ceiling take {taken / GIB:.1f} GiB, and "
                            f"{free_memory() / GIB:.1f} are free")  # fmt: skip
    say("building")
    try:
        contenders = {each: build(each, work) for each in peaks}
        ceiling = product_step(bare, dtype, device)
        steps = {each: contender.step for each, contender in contenders.items()} | {CEILING: ceiling}
        rates = in_turn(steps, device, settings.seconds, settings.rounds, say)
    except torch.OutOfMemoryError as why:  # of a GPU, into which each fits alone
        raise _SkippedError("the contenders and the ceiling do not fit side by side; give a smaller --batch") from why
    row |= _figures(work, contenders, rates, peaks, device) | {"unable": unable}
    if settings.profile and mode == "train":
        say("profiling")
        plain = build(OURS, dataclasses.replace(work, compile=False))
        row["parts"] = profile_step(plain.step, device)
    del contenders, steps, ceiling
    torch.compiler.reset()
    gc.collect()
    return row


def _batch(work: Work, most: int, say: Say) -> int:
    """Where our step is fastest."""
    device = torch.device(work.device)

    def rate(batch: int) -> float:
        say(f"how fast is a batch of {batch}?")
        step = build(OURS, dataclasses.replace(work, batch=batch, compile=False)).step
        return batch / min(warm_up(step, device) for _ in range(2))

    return fastest_batch(rate, most)


def _peaks(settings: Settings, work: Work, budget: int | None, say: Say) -> tuple[dict[str, int], dict[str, str]]:
    """Peak memory of every contender that can take part, and why the others cannot."""
    peaks, unable = {}, {}
    for name in [OURS, *(name for peer in settings.against for name in variants(peer, work))]:
        say(f"how much memory does {name} take?")
        try:
            with Trial(name, work, budget) as trial:
                peak = trial(work.batch)
        except (ValueError, ParityError) as why:
            unable[name] = str(why)
            continue
        if peak is None:
            unable[name] = _too_large(work.batch, settings.memory)
        else:
            peaks[name] = peak
    if "openvino" in settings.against and work.mode == "train":
        unable["openvino"] = "OpenVINO does not train"
    return peaks, unable


def _too_large(batch: int, memory: float | None) -> str:
    room = "the device's memory" if memory is None else f"{memory:g} GiB (--memory)"
    return f"a batch of {batch} does not fit into {room}"


def _figures(
    work: Work, contenders: Mapping[str, Contender], rates: Mapping[str, list[float]], peaks: Mapping[str, int],
    device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """What the rates come to. A peer is held against by its fastest variant."""
    flops = (6 if work.mode == "train" else 2) * work.config.forward_macs
    speeds = {name: spread([work.batch * rate for rate in found]) for name, found in rates.items()}
    tflops = speeds[OURS]["median"] * flops / 1e12
    ceiling, peak = speeds[CEILING], peak_flops(device_name(device)) if work.dtype == "bfloat16" else None
    ratios = {}
    for peer, names in PEERS.items():
        if there := [name for name in names if name in contenders]:
            best = max(there, key=lambda name: speeds[name]["median"])
            ratios[peer] = {"to": best, **ratio(rates[OURS], rates[best])}
    return {
        "contenders": {
            name: {"given": each.given, "images_per_s": speeds[name], "peak_bytes": peaks[name]}
            for name, each in contenders.items()
        },
        "ratio": ratios,
        "tflops": tflops,
        "mfu": tflops * 1e12 / peak if peak else None,
        "ceiling": {
            "images_per_s": ceiling,
            "tflops": ceiling["median"] * flops / 1e12,
            "share": ratio(rates[OURS], rates[CEILING]),
        },
    }


# --------------------------------------------------------------------------------------------- for people to read


def _headline(row: Mapping[str, Any]) -> str:
    """A row in one line."""
    if "skipped" in row:
        return f"left out: {row['skipped']}"
    speed = row["contenders"][OURS]["images_per_s"]
    low, high = speed["quartiles"]
    parts = [
        f"batch {row['batch']}: {speed['median']:.4g} images/s ({low:.4g} to {high:.4g})",
        f"{row['tflops']:.3g} TFLOP/s" + (f", MFU {row['mfu']:.0%}" if row["mfu"] else ""),
        f"{row['ceiling']['share']['median']:.0%} of the ceiling",
        *(f"{each['median']:.2f} x {each['to']}" for each in row["ratio"].values()),
        *(f"no {name}: {why}" for name, why in row["unable"].items()),
        *([as_text(row["parts"])] if "parts" in row else []),
    ]
    return "; ".join(parts)


def table(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows that were measured, as columns to print; `ceiling` is in TFLOP/s, too."""
    rows = []
    for row in record["rows"]:
        if "skipped" in row:
            continue
        ours = row["contenders"][OURS]
        low, high = ours["images_per_s"]["quartiles"]
        cells = {
            "model": row["model"], "size": row["image_size"], "mode": row["mode"], "batch": row["batch"],
            "images/s": float(f"{ours['images_per_s']['median']:.4g}"), "quartiles": f"{low:.4g}-{high:.4g}",
            "TFLOP/s": float(f"{row['tflops']:.3g}"), "MFU": f"{row['mfu']:.0%}" if row["mfu"] else "-",
            "ceiling": float(f"{row['ceiling']['tflops']:.3g}"),
            "of ceiling": f"{row['ceiling']['share']['median']:.0%}", "GiB": round(ours["peak_bytes"] / GIB, 2),
            "largest": (_at_least(row["largest"]) or row["largest"]["batch"]) if row["largest"] else "-",
        }  # fmt: skip
        rows.append(cells | {f"x {peer}": _cell(row, peer) for peer in record["settings"]["against"]})
    return rows


def _at_least(found: Mapping[str, Any]) -> str:
    """What to say of a `Largest` where no batch was found that does not fit."""
    return f">= {found['batch']}" if found["fails_at"] is None else ""


def _cell(row: Mapping[str, Any], peer: str) -> str:
    return f"{row['ratio'][peer]['median']:.2f}" if peer in row["ratio"] else "-"


def panels(record: Mapping[str, Any]) -> list[Panel]:
    """Fig. 12 for each mode: images a second and core (of a GPU: a second), and the largest batch that fits.

    One model alone is shown below its ceiling.
    """
    machine, memory = record["machine"], record["settings"]["memory"]
    on_cpu = machine["device"] == "cpu"
    cores, unit = (machine["threads"], "core") if on_cpu else (1, "device")
    room = f"{memory:g} GiB" if memory else "memory"
    models = {row["model"] for row in record["rows"] if "skipped" not in row}
    of_one = f" of {models.pop()}" if len(models) == 1 else ""
    shown = []
    for mode, title in (("infer", f"Inference{of_one}"), ("train", f"Training{of_one}")):
        rows = [row for row in record["rows"] if row["mode"] == mode and "skipped" not in row]
        names = dict.fromkeys(row["model"] for row in rows)
        speeds, batches = [], []
        for name in names:
            of = sorted((row for row in rows if row["model"] == name), key=lambda row: row["image_size"])
            found = [row["contenders"][OURS]["images_per_s"] for row in of]
            bars = [(each["quartiles"][1] - each["quartiles"][0]) / 2 / cores for each in found]
            x = [row["image_size"] for row in of]
            speeds.append(Series(name, x, [each["median"] / cores for each in found], bars))
            if of_one:
                bound = [row["ceiling"]["images_per_s"]["median"] / cores for row in of]
                speeds.append(Series(CEILING, x, bound, dashed=True))
            fits = [row for row in of if row["largest"]]
            if fits:
                x, most = [row["image_size"] for row in fits], [row["largest"] for row in fits]
                batches.append(Series(name, x, [each["batch"] for each in most], notes=list(map(_at_least, most))))
        for what, y_label, series in (
            ("speed", f"images a second and {unit}", speeds),
            (f"largest batch in {room}", "images", batches),
        ):
            if series:
                shown.append(
                    Panel(f"{title}: {what}", "side of the image (pixels)", y_label, series, log_x=True, log_y=True,
                          percent=False)
                )  # fmt: skip
    return shown

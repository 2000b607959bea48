"""What a run would cost, told before it is begun: compute, hours, memory of a process, data rate, checkpoint.

Nothing is read and nothing is trained; memory is counted from the step itself (`cost/memory.py`).
"""

import dataclasses
import functools
import json
import os
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitlab.config import FinetuneConfig, TrainConfig
from vitlab.cost.memory import Sizes, largest, process_bytes
from vitlab.cost.timing import in_turn
from vitlab.data.loader import Batch
from vitlab.errors import UserError
from vitlab.evaluate.load import choose_device
from vitlab.pipelines.init_from_checkpoint import by_size
from vitlab.recipes import pretrain
from vitlab.settings import nearest
from vitlab.studies.cost import IMAGES, images, model_of
from vitlab.studies.point import Point, exaflops, updates
from vitlab.train.distributed import SINGLE
from vitlab.train.loop import train_step
from vitlab.train.objectives import create_objective, create_training_model
from vitlab.train.optim import state_per_weight
from vitlab.train.precision import Precision, keep_freed_memory, resolve_precision
from vitlab.train.progress import DEVICES, find_device
from vitlab.train.state import create_state

CPU = "cpu"
DAY = 24 * 3600
TABLE2 = (("jft", "ViT-H/14", 2500), ("jft", "ViT-L/16", 680), ("imagenet21k", "ViT-L/16", 230))
"""Recipe, model, and the TPUv3-core-days that Table 2 gives (a chip has two cores)."""
SECONDS, ROUNDS = 1.0, 3
"""Length of a round of steps where the speed is measured here, and how many; their median counts."""
MEASURED, MEASURED_ON_CPU = 128, 1e12
"""Most images at once then; and on a CPU most FLOPs of a step, about a second."""


@dataclass(frozen=True)
class Rate:
    """What a device does in a second, of the work that Table 6 counts."""

    flops: float
    mfu: float | None
    """Share of the device's peak; None where the peak is not known."""
    source: str


def tell(
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
    """The whole answer, as plain data. Sizes are in bytes.

    device: one of DEVICES, or `cpu`, a machine like this one. count: processes, each with one device. mfu: a share of
    the device's peak, `measured`, or the bench.json of `vitlab bench`, in which `model_name` is looked up. examples:
    images of the training split, where the table of data sets does not say.
    Raises ValueError for what is unknown or cannot be.
    """
    _check(device, image_kb, examples)
    examples = _examples(config, examples)
    if isinstance(config, FinetuneConfig) and config.automatic:
        if examples is None:
            raise UserError("this recipe goes by the number of training images; give it with --examples.")
        config = by_size(config, examples)
    _check_count(config.batch_size, count)
    config = dataclasses.replace(config, model=model_of(Point("plan", config, {}), {}))
    seen = examples or config.batch_size  # where the steps are given the number does not matter
    work, steps = exaflops(config, seen), updates(config, seen)
    memory = _memory(config, device, count)
    rate = _rate(config, device, mfu, model_name, memory["images_at_once"], say)
    seconds = work * 1e18 / (rate.flops * count)
    per_second = steps * config.batch_size / seconds
    return {
        "model": {
            "name": model_name,
            "parameters": memory.pop("parameters"),
            "forward_macs": config.model.forward_macs,
        },
        "data": config.data.name,
        "examples": examples,
        "epochs": steps * config.batch_size / examples if examples else None,
        "steps": steps,
        "batch_size": config.batch_size,
        "exaflops": work,
        "device": device,
        "count": count,
        "tflops": rate.flops / 1e12,
        "mfu": rate.mfu,
        "mfu_is": rate.source,
        "hours": seconds / 3600,
        "device_hours": count * seconds / 3600,
        "tpuv3_core_days": core_days(work),
        "images_per_s": per_second,
        "images_per_s_each": per_second / count,
        "image_kb": image_kb,
        "bytes_per_s": per_second * image_kb * 1e3,
        "checkpoint_bytes": memory.pop("checkpoint"),
        **memory,
    }


def _check(device: str, image_kb: float, examples: int | None) -> None:
    if device != CPU and device not in DEVICES:
        raise UserError(f"unknown device {device!r}; {nearest(device, DEVICES)}. All: {', '.join([*DEVICES, CPU])}.")
    if not image_kb > 0 or (examples is not None and examples < 1):
        raise UserError(f"image_kb={image_kb} and examples={examples} must be more than 0.")


def _check_count(batch_size: int, count: int) -> None:
    """As the processes of a run are refused (`World.check_batch_size`), which take as many images each."""
    if count < 1 or batch_size % count:
        able = [each for each in range(1, batch_size + 1) if batch_size % each == 0]
        near = sorted(sorted(able, key=lambda each: abs(each - count))[:3])
        raise UserError(
            f"count is {count}; a batch of {batch_size} can be shared by 1 to {batch_size} processes with as many "
            f"images each. The nearest counts that divide it: {', '.join(map(str, near))}."
        )


def _examples(config: TrainConfig, given: int | None) -> int | None:
    """Images of the training split; None where nobody knows and the length of the run does not depend on it."""
    if given is not None:
        return given
    try:
        return images(config.data)
    except ValueError as error:
        if config.steps is not None:
            return None
        raise UserError(
            f"how many images {config.data.name or 'your set'} has is not known before it is read; give --examples."
        ) from error


# -------------------------------------------------------------------------------------------------------- in time


def core_days(work: float) -> dict[str, float]:
    """So many exaFLOPs in TPUv3-core-days, at what a core did in the paper.

    Table 2 gives core-days of three runs and Table 6's rule their exaFLOPs: three rates (`lowest_tflops` to
    `highest_tflops`), of which the sum of the work over the sum of the days is taken.
    """
    done = [_papers_exaflops(recipe, model) for recipe, model, _ in TABLE2]
    each = [exa * 1e6 / (days * DAY) for exa, (_, _, days) in zip(done, TABLE2, strict=True)]
    rate = sum(done) * 1e6 / (sum(days for _, _, days in TABLE2) * DAY)
    return {
        "days": work * 1e6 / rate / DAY,
        "tflops": rate,
        "lowest_tflops": min(each),
        "highest_tflops": max(each),
    }


def _papers_exaflops(recipe: str, model: str) -> float:
    config = {"jft": pretrain.jft, "imagenet21k": pretrain.imagenet21k}[recipe](model)
    return exaflops(config, IMAGES[config.data.name])


def _rate(
    config: TrainConfig, device: str, mfu: str, model_name: str | None, at_once: int, say: Callable[[str], None]
) -> Rate:
    peak = DEVICES[device].tflops * 1e12 if device in DEVICES else None
    if mfu == "measured":
        flops, source = _measured(config, device, at_once, say)
    elif mfu.endswith(".json"):
        flops, source = _from_bench(Path(mfu), config, device, model_name)
    else:
        try:
            share = float(mfu)
        except ValueError as error:
            raise UserError(f"--mfu is {mfu!r}; give a share such as 0.4, measured, or a bench.json.") from error
        if not 0 < share <= 1:
            raise UserError(f"--mfu is {mfu}; it is a share of the device's peak, in (0, 1].")
        if peak is None:
            raise UserError("no data sheet gives the peak of a CPU; give --mfu measured, or a bench.json.")
        return Rate(share * peak, share, "assumed")
    return Rate(flops, flops / peak if peak else None, source)


def _from_bench(path: Path, config: TrainConfig, device: str, model_name: str | None) -> tuple[float, str]:
    """FLOP/s of training this model at this size, as `vitlab bench` has measured it on such a device."""
    try:
        record = json.loads(path.read_text())
        there, dtype, rows = record["machine"]["device"], record["settings"]["dtype"], record["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no bench.json of `vitlab bench` ({error!r}).") from error
    _check_same(device, there, f"{path} was measured on")
    trained = [row for row in rows if row["mode"] == "train" and "tflops" in row]
    side, across = config.model.image_hw
    found = [row for row in trained if row["model"] == model_name and row["image_size"] == side == across]
    if not found:
        has = ", ".join(f"{row['model']} at {row['image_size']}" for row in trained)
        raise UserError(
            f"{path} has no training of {model_name or 'a model without a name'} at {side}x{across} pixels; it has "
            f"{has or 'none at all'}. `vitlab bench {model_name or 'MODEL'} --mode train --sizes {side}` measures it."
        )
    row = found[0]
    flops = row["tflops"] * 1e12 * config.model.inner_macs / config.model.forward_macs  # of those that Table 6 counts
    return flops, f"measured on {there} in {dtype} with {row['batch']} images at once, {path}"


def _measured(config: TrainConfig, device: str, at_once: int, say: Callable[[str], None]) -> tuple[float, str]:
    """FLOP/s of the run's own step here, over a few seconds, on random images that lie ready."""
    place = choose_device("cpu" if device == CPU else "auto")
    there = torch.cuda.get_device_name(place) if place.type == "cuda" else CPU
    _check_same(device, there, "this machine has")
    if place.type == "cpu":
        keep_freed_memory()
    single = config.single() if isinstance(config, FinetuneConfig) else config
    flops = 6 * single.model.inner_macs
    size = min(at_once, MEASURED, max(1, round(MEASURED_ON_CPU / flops)) if place.type == "cpu" else MEASURED)
    run = dataclasses.replace(
        single, batch_size=size, microbatch=None, fsdp=False
    )  # fmt: skip
    objective, generator = create_objective(run), torch.Generator().manual_seed(0)
    state = create_state(run, create_training_model(run, generator).to(place), place, SINGLE)
    images = torch.rand(size, 3, *run.model.image_hw, generator=generator) * 2 - 1
    labels = torch.randint(max(run.model.num_classes, 1), (size,), generator=generator)
    draws = torch.rand(size, objective.draws, dtype=torch.float64, generator=generator) if objective.draws else None
    batch = Batch(
        images.to(place), labels.to(place), torch.arange(size, device=place),
        draws=None if draws is None else draws.to(place),
    )  # fmt: skip
    steps = in_turn(
        {"the step": lambda: train_step(run, state, objective, batch, 0.0, size)}, place, SECONDS, ROUNDS, say
    )
    rate = statistics.median(steps["the step"]) * size
    return rate * flops, f"measured here, on {there}, with {size} images at once"


def _check_same(asked: str, there: str, says: str) -> None:
    """Raises ValueError unless the device that torch calls `there` is the one asked for."""
    found = CPU if there == CPU else find_device(there)
    if found != asked:
        raise UserError(f"{says} {there}, and --device is {asked}; give the device that is meant, or --mfu 0.4.")


# ------------------------------------------------------------------------------------------------------- in memory


def _memory(config: TrainConfig, device: str, count: int) -> dict[str, Any]:
    """Both ways to share a model, part by part, and whether they fit."""
    sizes, precision = Sizes.of(config), _precision(config, device)
    share = config.batch_size // count
    at_once = min(config.microbatch or share, share)
    room = DEVICES[device].memory if device in DEVICES else _ram()
    ways: dict[str, Any] = {}
    for way in ("ddp", "fsdp") if count > 1 else ("alone",):
        parts = functools.partial(
            process_bytes, config, sizes, precision=precision, device_type=CPU if device == CPU else "cuda",
            count=count, sharded=way == "fsdp",
        )  # fmt: skip
        found = parts(at_once)
        total = sum(found.values())
        ways[way] = {"parts": found, "total": total, "fits": total <= room}
        if total > room:
            ways[way]["largest_microbatch"] = largest(lambda n, parts=parts: sum(parts(n).values()), room, at_once)
    return {
        "parameters": sizes.whole,
        "checkpoint": 4 * (1 + state_per_weight(config.optim) + bool(config.average_decay)) * sizes.whole,
        "precision": precision,
        "activation_checkpointing": config.activation_checkpointing,
        "images_each": share,
        "images_at_once": at_once,
        "memory_bytes": room,
        "memory": ways,
        "chosen": "alone" if count == 1 else "fsdp" if config.fsdp else "ddp",
    }


def _precision(config: TrainConfig, device: str) -> Precision:
    if device == CPU:
        return resolve_precision(config.precision, torch.device("cpu"))
    return "autocast" if config.precision == "auto" else config.precision


def _ram() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# --------------------------------------------------------------------------------------------- for people to read


def as_text(found: Mapping[str, Any]) -> str:
    """The answer, to be read by a person."""
    length = "" if found["epochs"] is None else f" = {found['epochs']:.3g} epochs of {found['examples']:,} images"
    hours, paper = found["hours"], found["tpuv3_core_days"]
    mfu = f"MFU {found['mfu']:.1%}, {found['mfu_is']}" if found["mfu"] else found["mfu_is"]
    name = found["model"]["name"] or "without a name"
    days = f" ({hours / 24:.3g} days)" if hours > 48 else ""
    lines = {
        "model": f"{name}: {found['model']['parameters']:,} parameters, "
        f"{found['model']['forward_macs'] / 1e9:.4g} billion multiply-accumulates a image",
        "length": f"{found['steps']:,} steps of {found['batch_size']:,}{length}",
        "compute": f"{_short(found['exaflops'])} exaFLOPs of training, as Table 6 counts",
        "time": f"{_short(hours)} hours{days} of {found['count']} {found['device']} at {found['tflops']:.3g} TFLOP/s "
        f"each ({mfu}); {_short(found['device_hours'])} device-hours",
        "in the paper": f"{_short(paper['days'])} TPUv3-core-days, at the {paper['tflops']:.1f} TFLOP/s of a core in "
        f"Table 2 ({paper['lowest_tflops']:.1f} to {paper['highest_tflops']:.1f})",
        "data": f"{_short(found['images_per_s'])} images/s, {_short(found['images_per_s_each'])} a process; "
        f"{_short(found['bytes_per_s'] / 1e6)} MB/s at {found['image_kb']:g} kB a image",
        "checkpoint": f"{_short(found['checkpoint_bytes'] / 1e6)} MB",
    }
    wide = max(map(len, lines))
    return "\n".join([*(f"{name:{wide}}  {text}" for name, text in lines.items()), "", *_memory_lines(found)])


def _short(value: float) -> str:
    """Four digits that count."""
    return f"{float(f'{value:.4g}'):,.0f}" if value >= 1000 else f"{value:.4g}"


def _memory_lines(found: Mapping[str, Any]) -> list[str]:
    """A table of the parts, the ways side by side."""
    ways, room = found["memory"], found["memory_bytes"]
    unit, size = ("GB", 1e9) if max(way["total"] for way in ways.values()) >= 1e9 else ("MB", 1e6)
    titles = {name: name.upper() if name != "alone" else name for name in ways}
    again = ", blocks computed again" if found["activation_checkpointing"] else ""
    asked = f"; this run: {titles[found['chosen']]}" if len(ways) > 1 else ""
    lines = [
        f"memory of a process in {unit} ({found['precision']}{again}; {found['images_at_once']:,} of its "
        f"{found['images_each']:,} images at once{asked})",
        _row("", titles.values()),
    ]
    for part in next(iter(ways.values()))["parts"]:
        if any(way["parts"][part] for way in ways.values()):
            lines.append(_row(part, (f"{way['parts'][part] / size:.2f}" for way in ways.values())))
    lines.append(_row("in all", (f"{way['total'] / size:.2f}" for way in ways.values())))
    lines.append(_row(f"fits in {room / size:,.0f}", ("yes" if way["fits"] else "no" for way in ways.values())))
    for name, way in ways.items():
        if not way["fits"]:
            most = way["largest_microbatch"]
            advice = f"--microbatch {most} would fit" if most else "not even one image at once fits"
            lines.append(f"{titles[name]}: {advice}.")
    return lines


def _row(name: str, cells: Iterable[str]) -> str:
    return f"{name:16}" + "".join(f"{cell:>10}" for cell in cells)

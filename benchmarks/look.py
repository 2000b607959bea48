"""Seconds of a look into a model against plain inference of the same images; and the memory of a stream.

    python benchmarks/look.py --out benchmarks/results/look.json
    python benchmarks/look.py --threads 1 --memory 16 48 96 --out benchmarks/results/look_memory.json

- `plain`: logits of all images, in the same batches, by the same model in the same precision.
- `look, keep=16`: `vitlab.inspection.capture.capture`, as `vitlab inspect` runs it: mean distances of every head over
  all images; of the first 16 also every head's answer map, both rollouts, colors of the patch tokens, probabilities.
- `look, keep=64`: the same with all that of every image.

All take turns in one process; a ratio is that of neighbors in time. The weights are drawn: time knows no difference.
With `--memory` images are streamed through ViT-L/16, once for each count, and the process's peak is read after each:
what grows with the count would be a leak.
"""

import dataclasses
import json
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from run_record import describe_run
from torch import Tensor

import vitlab
from vitlab.inspection.capture import capture
from vitlab.models.vit import ViT


@dataclasses.dataclass(frozen=True)
class Arguments:
    model: str = "ViT-B/16"
    images: int = 64
    keep: tuple[int, ...] = (16, 64)
    batch_size: int = 16
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the weights, for all contenders."""
    rounds: int = 7
    """Timed turns of each contender."""
    threads: int = 2
    memory: tuple[int, ...] = ()
    """Instead of time: counts of images to stream through ViT-L/16."""
    out: Path | None = None
    """JSON file for the figures."""


def build(name: str, precision: str) -> ViT:
    model = vitlab.create_model(name, image_size=224, num_classes=1000, head_std=0.02)
    assert isinstance(model, ViT)
    return model.to(getattr(torch, precision)).eval()


def stream(count: int, batch_size: int) -> Iterator[Tensor]:
    """Drawn images, each batch when it is needed."""
    generator = torch.Generator().manual_seed(0)
    for start in range(0, count, batch_size):
        yield torch.rand(min(batch_size, count - start), 3, 224, 224, generator=generator) * 2 - 1


def timed(work: Callable[[], np.ndarray]) -> tuple[np.ndarray, float, float]:
    """What `work` returns, its seconds of the clock and of the processors."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = work()
    return result, time.perf_counter() - wall, time.process_time() - cpu


def measure_time(arguments: Arguments) -> dict[str, Any]:
    model = build(arguments.model, arguments.precision)
    batches = list(stream(arguments.images, arguments.batch_size))

    def plain() -> np.ndarray:
        with torch.no_grad():
            return torch.cat([model(images).float().softmax(dim=-1) for images in batches]).numpy()

    def looking(keep: int) -> np.ndarray:
        return torch.from_numpy(capture(model, batches, keep=keep).logits).softmax(dim=-1).numpy()

    contenders: dict[str, Callable[[], np.ndarray]] = {"plain": plain}
    contenders |= {f"look, keep={keep}": lambda keep=keep: looking(keep) for keep in arguments.keep}
    wall: dict[str, list[float]] = {name: [] for name in contenders}
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    expected = plain()
    for turn in range(arguments.rounds + 1):
        for name, work in contenders.items():
            answers, seconds, of_cpu = timed(work)
            if np.abs(answers - expected[: len(answers)]).max() > 1e-6:
                raise SystemExit(f"{name} answers otherwise than plain inference")
            if turn:  # the first turn warms up
                wall[name].append(seconds)
                cpu[name].append(of_cpu)
    return {
        name: {"wall_s": spread(wall[name]), "cpu_s": spread(cpu[name])}
        | ({} if name == "plain" else {"ratio_wall": ratio(wall, name), "ratio_cpu": ratio(cpu, name)})
        for name in contenders
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def ratio(seconds: dict[str, list[float]], name: str) -> dict[str, float]:
    return spread([ours / plain for ours, plain in zip(seconds[name], seconds["plain"], strict=True)])


def measure_memory(arguments: Arguments) -> dict[str, Any]:
    """MiB of the process at its peak: before, after plain inference of one batch, after each stream."""
    model = build("ViT-L/16", arguments.precision)
    size, peaks = arguments.batch_size, {"model": peak()}
    with torch.no_grad():
        model(next(stream(size, size)))
    peaks["plain inference of one batch"] = peak()
    for count in arguments.memory:
        result = capture(model, stream(count, size), keep=min(arguments.keep))
        assert result.count == count
        peaks[f"look at {count} images"] = peak()
    return {"peak_MiB": peaks}


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    torch.set_num_threads(arguments.threads)
    results = measure_memory(arguments) if arguments.memory else measure_time(arguments)
    for name, value in results.items():
        print(name, json.dumps(value))
    if arguments.out is not None:
        record = {"environment": describe_run(arguments, torch), "results": results}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

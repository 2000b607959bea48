"""What only a GPU can show: correct results there, and the speed of training and inference.

    python benchmarks/gpu.py --out benchmarks/results/gpu.json

1. Logits of ViT-B/16 on the GPU beside those on the CPU: float32, bfloat16 under autocast, both compiled.
2. `vitlab pretrain tiny-digits`, killed after a checkpoint and resumed, beside an uninterrupted run: the same bytes?
3. Images/s and MFU at 224 pixels, compiled and eager, beside timm and the dense products alone in the same rounds.

A process for each model prepares a case (builds, compares with timm, compiles) while the others prepare theirs; then
they measure one after the other. The file is written after each row. `--device cpu --models ViT-Ti/16 --batch 2` tries
the script without a GPU.
"""

import dataclasses
import gc
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, get_args

import timm
import torch
import tyro
from peer_models import OURS, build
from run_record import describe_run
from torch import Tensor

from vitlab.cost import measure
from vitlab.cost.step import Mode, StepSpec, example_images, example_model
from vitlab.models import get_config
from vitlab.train.throughput import peak_flops

BATCHES = {"ViT-B/16": 256, "ViT-L/16": 128, "ViT-H/14": 64}
Case = Literal["train", "infer", "train eager", "infer eager"]
CEILING = "products"
STARTED = time.monotonic()
DIGITS = ("pretrain", "tiny-digits", "--steps", "200", "--checkpoint-every", "20")


@dataclasses.dataclass(frozen=True)
class Arguments:
    models: tuple[str, ...] = tuple(BATCHES)
    without_timm: tuple[str, ...] = ()
    """Models of these that are measured alone."""
    cases: tuple[Case, ...] = get_args(Case)
    """Compiled unless they say otherwise."""
    batch: int | None = None
    """Default: 256 for B/16, 128 for L/16, 64 for H/14."""
    seconds: float = 1.0
    """Length of a round of one contender."""
    rounds: int = 5
    correct: bool = True
    """Compare logits and the resumed run, too."""
    device: str = "cuda"
    out: Path = Path("gpu.json")


def compare_logits(model_name: str, device: str) -> dict[str, float]:
    """Largest error over rms of the logits of four images, by precision."""
    model = example_model(get_config(model_name))
    images = example_images(model.config, 4)
    with torch.inference_mode():
        expected = model(images)
    errors: dict[str, float] = {}
    model, images = model.to(device), images.to(device)
    for compiled, forward in ((False, model), (True, torch.compile(model))):
        for lower in (False, True):
            with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=lower):
                logits: Tensor = forward(images)
            difference = (logits.float().cpu() - expected).abs().max() / expected.square().mean().sqrt()
            name = "bfloat16" if lower else "float32"
            errors[f"{name}, compiled" if compiled else name] = float(difference)
    return errors


def compare_resumed(device: str) -> dict[str, Any]:
    """Whether a run that was killed after its first checkpoint ends with the weights of one that was not."""
    with tempfile.TemporaryDirectory() as folder:
        digests = []
        for name, killed in (("whole", False), ("killed", True)):
            workdir = Path(folder, name)
            command = [sys.executable, "-m", "vitlab", *DIGITS, "--device", device, "--workdir", str(workdir)]
            if killed:
                with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
                    while process.poll() is None and not list(workdir.glob(f"checkpoints/step-{'[0-9]' * 9}")):
                        time.sleep(0.01)
                    process.kill()
                if process.returncode >= 0:
                    raise SystemExit(
                        f"the run ended by itself, with exit code {process.returncode}, before it was killed"
                    )
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            digests.append(hashlib.sha256((workdir / "model" / "model.safetensors").read_bytes()).hexdigest())
    return {"equal": digests[0] == digests[1], "sha256": digests}


def measure_model(given: Arguments, model: str, pipe: Connection) -> None:
    """Prepares each case when told to, and measures it when told to; sends the row."""
    torch.set_num_threads(4)  # the processes share the cores
    device, on_gpu = torch.device(given.device), given.device != "cpu"
    config = get_config(model, image_size=224)
    names = (OURS,) if model in given.without_timm else (OURS, "timm")
    for case in given.cases:
        mode: Mode = "train" if case.startswith("train") else "infer"
        compiled = not case.endswith("eager")
        pipe.recv()
        batch = given.batch or BATCHES[model]
        spec = StepSpec(config, mode, batch, "bfloat16", compiled, given.device)
        products = measure.count_products(config, batch, mode == "train", attention=not on_gpu)
        first, peaks = {}, {}
        steps: dict[str, measure.Step] = {CEILING: measure.products_step(products, torch.bfloat16, device)}
        for name in names:
            before = torch.cuda.memory_allocated()  # 0 without a GPU
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            steps[name] = build(name, spec)
            start = time.perf_counter()
            for _ in range(2):
                steps[name]()
            if on_gpu:
                torch.cuda.synchronize()
            first[name] = time.perf_counter() - start
            peaks[name] = torch.cuda.max_memory_allocated() - before
        pipe.send("prepared")
        pipe.recv()
        rates = measure.time_interleaved(steps, given.seconds, given.rounds)
        speeds = {name: measure.spread([batch * rate for rate in rounds]) for name, rounds in rates.items()}
        flops = 6 * config.training_macs if mode == "train" else 2 * config.forward_macs
        rate, peak = flops * speeds[OURS]["median"], peak_flops(torch.cuda.get_device_name()) if on_gpu else None
        pipe.send(
            {
                "batch": batch,
                "images_per_s": speeds,
                "ratio": {name: measure.ratio(rates[OURS], rates[name]) for name in rates if name != OURS},
                "tflops": rate / 1e12,
                "mfu": rate / peak if peak else None,
                "products_tflops": measure.product_flops(products) * statistics.median(rates[CEILING]) / 1e12,
                "seconds_of_first_two_steps": first,
                "peak_bytes": peaks,
            }
        )
        steps.clear()
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


def describe(row: dict[str, Any]) -> str:
    """A row in one line."""
    speed, mfu = row["images_per_s"][OURS], f"{row['mfu']:.1%}" if row["mfu"] else "-"
    ratios = ", ".join(f"x {name} {ratio['median']:.2f}" for name, ratio in row["ratio"].items())
    low, high = speed["quartiles"]
    first = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in row["seconds_of_first_two_steps"].items())
    return (
        f"{speed['median']:.0f} images/s ({low:.0f}-{high:.0f}), MFU {mfu}, {ratios}; products "
        f"{row['products_tflops']:.0f} TFLOP/s; first steps {first}"
    )


def main() -> None:
    given = tyro.cli(Arguments, description=__doc__)
    gpu = {"gpu": torch.cuda.get_device_name(given.device)} if given.device != "cpu" else {}
    record: dict[str, Any] = {"environment": describe_run(given, torch, timm, **gpu)}

    def add(name: str, result: Any, shown: Any = None) -> None:
        record[name] = result
        given.out.write_text(json.dumps(record, indent=1) + "\n")
        print(f"{time.monotonic() - STARTED:4.0f} s  {name}: {shown or result}", flush=True)

    if given.correct:
        add("logits", compare_logits(given.models[0], given.device))
        add("resumed", compare_resumed(given.device))
    spawn, pipes = get_context("spawn"), {}
    for model in given.models:
        pipes[model], theirs = spawn.Pipe()
        spawn.Process(target=measure_model, args=(given, model, theirs), daemon=True).start()
        theirs.close()
    for case in given.cases:
        for pipe in pipes.values():
            pipe.send("prepare")
        for pipe in pipes.values():
            pipe.recv()  # all wait for the slowest
        for model, pipe in pipes.items():
            pipe.send("measure")
            row = pipe.recv()
            add(f"{model}, {case}", row, describe(row))


if __name__ == "__main__":
    main()

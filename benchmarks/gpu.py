"""All that only a GPU can show, in one call of less than eight minutes.

    python benchmarks/gpu.py --out benchmarks/results/gpu.json

1. Logits of ViT-B/16 on the GPU beside those on the CPU: float32, bfloat16 under autocast, both compiled.
2. `vitlab pretrain tiny-digits`, killed after a checkpoint and resumed, beside an uninterrupted run: the same bytes?
3. Images/s and MFU of training and inference at 224 pixels, eager and compiled, beside timm in the same rounds
   (`vitlab bench`). What there is no time for is listed as `not_measured`.

The file is written after each part. `--device cpu --models ViT-Ti/16 --batch 2` tries the script without a GPU.
"""

import dataclasses
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import timm
import torch
import tyro
from run_record import describe_run
from torch import Tensor

from vitlab.cost.bench import bench, table
from vitlab.cost.options import BenchOptions
from vitlab.cost.peers import Mode, example_images, example_model
from vitlab.models import get_config

BATCHES = {"ViT-B/16": 256, "ViT-L/16": 128, "ViT-H/14": 64}
CASES: tuple[tuple[Mode, bool], ...] = (("train", True), ("train", False), ("infer", True), ("infer", False))
"""Mode, and whether it is compiled: the most important first."""
STARTED = time.monotonic()
DIGITS = ("pretrain", "tiny-digits", "--steps", "200", "--checkpoint-every", "20")


@dataclasses.dataclass(frozen=True)
class Arguments:
    models: tuple[str, ...] = tuple(BATCHES)
    batch: int | None = None
    """Default: 256 for B/16, 128 for L/16, 64 for H/14."""
    minutes: float = 7.5
    """No measurement is begun after this time."""
    seconds: float = 1.0
    """Length of a round of one contender."""
    rounds: int = 5
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


def measure_speed(given: Arguments, model: str, mode: Mode, compiled: bool) -> dict[str, Any]:
    """The row of `vitlab bench` for one model, and its cells of the printed table."""
    options = BenchOptions(
        mode=mode, sizes=(224,), batch=given.batch or BATCHES[model], against=("timm",), dtype="bfloat16",
        compile=compiled, seconds=given.seconds, rounds=given.rounds, largest=False, device=given.device,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        record = bench([model], options, Path(folder))
    (row,) = record["rows"]
    return row | {"compiled": compiled, "table": next(iter(table(record)), None)}


def main() -> None:
    given = tyro.cli(Arguments, description=__doc__)
    gpu = {"gpu": torch.cuda.get_device_name(given.device)} if given.device != "cpu" else {}
    record: dict[str, Any] = {"environment": describe_run(given, torch, timm, **gpu)}

    def add(name: str, result: Any, shown: Any = None) -> None:
        record[name] = result
        given.out.write_text(json.dumps(record, indent=1) + "\n")
        print(f"{time.monotonic() - STARTED:4.0f} s  {name}: {shown or result}", flush=True)

    add("logits", compare_logits(given.models[0], given.device))
    add("resumed", compare_resumed(given.device))
    late = []
    for mode, compiled in CASES:
        for model in given.models:
            name = f"{model}, {mode}, {'compiled' if compiled else 'eager'}"
            if time.monotonic() - STARTED > 60 * given.minutes:
                late.append(name)
                continue
            row = measure_speed(given, model, mode, compiled)
            add(name, row, row.get("skipped") or row["table"])
    add("not_measured", late)


if __name__ == "__main__":
    main()

"""What bfloat16 changes in an evaluation: predictions, accuracy, loss and calibration, for runs of vitlab.

    python benchmarks/precision.py runs/flowers runs/digits/linear --out benchmarks/results/precision.json

Each model is tested on its own test images in float32 and in bfloat16. On a processor without fast bfloat16 products
they are computed in float32 from the rounded operands, and their results rounded, as such a processor does.
"""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from run_record import describe_run
from torch import Tensor
from torch.overrides import TorchFunctionMode
from tyro.conf import Positional

from vitlab.evaluation.accuracy import evaluate_checkpoint
from vitlab.evaluation.calibration import calibrate
from vitlab.evaluation.options import EvalOptions
from vitlab.train.cpu_speed import cpu_is_faster_in_bfloat16

DTYPES = ("float32", "bfloat16")
PRODUCTS = {F.linear, F.conv2d, F.scaled_dot_product_attention, torch.matmul, Tensor.matmul, Tensor.__matmul__}


class ProductsInFloat32(TorchFunctionMode):
    """Computes products of bfloat16 numbers in float32 and rounds the result."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        low = any(isinstance(value, Tensor) and value.dtype == torch.bfloat16 for value in args)
        if func not in PRODUCTS or not low:
            return func(*args, **kwargs)
        args = [value.float() if isinstance(value, Tensor) else value for value in args]
        return func(*args, **kwargs).to(torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class Arguments:
    runs: Positional[tuple[str, ...]]
    """Runs, or other checkpoints that know their data set."""
    batch_size: int = 32
    out: Path | None = None
    """JSON file for the figures."""


def compare(run: str, batch_size: int) -> dict[str, Any]:
    """Both evaluations of a run, and the predictions that differ."""
    exact = evaluate_checkpoint(run, options=EvalOptions(precision="float32", device="cpu", batch_size=batch_size))
    mode = contextlib.nullcontext() if cpu_is_faster_in_bfloat16() else ProductsInFloat32()
    with mode:
        options = EvalOptions(precision="bfloat16", device="cpu", batch_size=batch_size)
        rounded = evaluate_checkpoint(run, options=options)
    both = {"float32": exact, "bfloat16": rounded}
    return {
        "run": run,
        "images": len(exact.labels),
        "flipped": int((exact.predictions != rounded.predictions).sum()),
        "gained": int((rounded.correct & ~exact.correct).sum()),
        "lost": int((exact.correct & ~rounded.correct).sum()),
        **{
            name: {
                "accuracy": result.accuracy,
                "loss": float(result.losses.mean()),
                "calibration_error": calibrate(result.confidences, result.correct).error,
            }
            for name, result in both.items()
        },
    }


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    record: dict[str, Any] = {"environment": describe_run(arguments, torch), "results": []}
    print("run images flipped gained lost; accuracy, loss, calibration error in float32 and in bfloat16")
    for run in arguments.runs:
        row = compare(run, arguments.batch_size)
        record["results"].append(row)
        cells = [f"{row[name][key]:.4f}" for key in ("accuracy", "loss", "calibration_error") for name in DTYPES]
        print(Path(run).name, row["images"], row["flipped"], row["gained"], row["lost"], *cells, flush=True)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

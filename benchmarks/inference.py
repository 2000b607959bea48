"""Images/s of inference beside onnxruntime and OpenVINO, interleaved in one process, each in its own best precision.

    python benchmarks/inference.py ViT-S/16 ViT-B/16 --batch 8 32 --out benchmarks/results/inference.json

The runtimes compute the file that `vitlab export` writes, with as many threads as torch. A runtime that is not
installed is left out (`pip install onnxruntime openvino`), and bfloat16 where this processor is slower in it.
`ceiling` are the model's matrix products alone, by torch, in our faster precision.
"""

import importlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from peer_models import MAX_DIFFERENCE
from run_record import describe_run
from torch import Tensor
from tyro.conf import Positional

from vitlab.cost import measure, step
from vitlab.cost.step import StepSpec, example_images, example_model
from vitlab.models import get_config
from vitlab.train.cpu_speed import cpu_is_faster_in_bfloat16
from vitlab.train.precision import keep_freed_memory
from vitlab.weights import ParityError, save_model
from vitlab.weights.export import export_checkpoint

CEILING = "ceiling"
BFLOAT16_DIFFERENCE = 0.1
"""Of logits in bfloat16 from those in float32, relative to their norm: rounding, not an error."""


@dataclass(frozen=True)
class Arguments:
    models: Positional[tuple[str, ...]]
    size: int = 224
    batch: tuple[int, ...] = (8,)
    compile: bool = False
    """Add vitlab compiled with torch.compile."""
    seconds: float = 1.5
    """Length of a round of one contender."""
    rounds: int = 7
    out: Path | None = None
    """JSON file for the figures."""


def contenders(spec: StepSpec, compiled: bool) -> dict[str, Callable[[], Tensor]]:
    """Name -> a function that computes the logits of one batch. Raises ParityError where they differ."""
    model = example_model(spec.config)
    images = example_images(spec.config, spec.batch)
    dtypes = ("float32", "bfloat16") if cpu_is_faster_in_bfloat16() else ("float32",)
    specs = {f"vitlab {dtype}": StepSpec(spec.config, "infer", spec.batch, dtype) for dtype in dtypes}
    if compiled:
        specs |= {f"{name} compiled": StepSpec(s.config, "infer", s.batch, s.dtype, True) for name, s in specs.items()}
    steps: dict[str, Any] = {name: step.build(one) for name, one in specs.items()}
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, Path(folder) / "model")
        file = Path(folder) / "model.onnx"
        export_checkpoint(Path(folder) / "model", file, to="onnx")
        for make in (onnxruntime_steps, openvino_steps):
            try:
                steps |= make(file, images, dtypes)
            except ImportError as error:
                print(f"left out: {error}")
    expected = steps["vitlab float32"]()
    for name, run in steps.items():
        difference = float((run().float() - expected).norm() / expected.norm())
        if not difference <= (BFLOAT16_DIFFERENCE if "bfloat16" in name else MAX_DIFFERENCE):
            raise ParityError(f"{name} differs by {difference:.1e} of the logits' norm.")
    return steps


def onnxruntime_steps(file: Path, images: Tensor, dtypes: tuple[str, ...]) -> dict[str, Callable[[], Tensor]]:
    """onnxruntime has no bfloat16 for a file of float32."""
    onnxruntime = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    inputs = {"images": images.numpy()}
    return {"onnxruntime float32": lambda: torch.from_numpy(session.run(None, inputs)[0])}


def openvino_steps(file: Path, images: Tensor, dtypes: tuple[str, ...]) -> dict[str, Callable[[], Tensor]]:
    """OpenVINO takes the number of threads from the cores that it may use."""
    openvino = importlib.import_module("openvino")
    core = openvino.Core()
    steps = {}
    for dtype in dtypes:
        hints = {"INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[dtype]}
        hints |= {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERFORMANCE_HINT": "LATENCY"}
        compiled = core.compile_model(str(file), "CPU", hints)
        steps[f"openvino {dtype}"] = lambda run=compiled: torch.from_numpy(run(images.numpy())[0])
    return steps


def compare(given: Arguments, name: str, batch: int) -> dict[str, Any]:
    """All contenders on one model, in turn: images/s, and our fastest over each of the others."""
    config = get_config(name, image_size=given.size)
    steps: dict[str, measure.Step] = dict(contenders(StepSpec(config, "infer", batch, "float32"), given.compile))
    products = measure.count_products(config, batch, training=False)
    dtype = torch.bfloat16 if cpu_is_faster_in_bfloat16() else torch.float32
    steps[CEILING] = measure.products_step(products, dtype, torch.device("cpu"))
    rates = measure.time_interleaved(steps, given.seconds, given.rounds)
    speeds = {step: measure.spread([batch * rate for rate in per_round]) for step, per_round in rates.items()}
    ours = max((step for step in speeds if step.startswith("vitlab")), key=lambda step: speeds[step]["median"])
    ratios = {step: measure.ratio(rates[ours], rates[step]) for step in rates if step != ours}
    return {"model": name, "batch": batch, "fastest": ours, "images_per_s": speeds, "ratio": ratios}


def main() -> None:
    given = tyro.cli(Arguments, description=__doc__)
    keep_freed_memory()
    record: dict[str, Any] = {"environment": describe_run(given, torch), "results": []}
    for name in given.models:
        for batch in given.batch:
            result = compare(given, name, batch)
            record["results"].append(result)
            print(f"{name}, {given.size} pixels, batch {batch}")
            for contender, speed in result["images_per_s"].items():
                ratio = result["ratio"].get(contender)
                text = "" if ratio is None else f", vitlab's fastest / it: {ratio['median']:.2f}"
                if ratio is not None:
                    text += f" ({ratio['quartiles'][0]:.2f} to {ratio['quartiles'][1]:.2f})"
                print(f"  {contender}: {speed['median']:.4g} images/s{text}")
            if given.out is not None:
                given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

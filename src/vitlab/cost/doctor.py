"""Report of this machine for `vitlab doctor`: versions, devices, speeds, disk, and problems with their remedies."""

import importlib
import io
import os
import platform
import shutil
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from PIL import Image

import vitlab
from vitlab.cost.measure import available_cores, synchronized_time
from vitlab.errors import UserError
from vitlab.models.attention import attention_path, cpu_capabilities

CPU_FEATURES = {"avx512": "avx512_f", "bf16": "avx512_bf16", "amx": "amx_bf16", "sve": "sve", "sme": "sme"}
"""Units for matrix products: our name -> torch's."""
MATRIX_SIDES = {"cpu": 1024, "cuda": 8192}
SHARED_MEMORY = Path("/dev/shm")
GIB, MIB = 2**30, 2**20


def diagnose(path: str | Path = ".") -> dict[str, Any]:
    """Measures this machine in a few seconds; `path` is a folder on the disk to measure.

    Returns data for JSON; keys name the units, `problems` says what is wrong and what to do. Raises UserError if
    `path` is not a folder.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give an existing one on the disk to measure.")
    units = cpu_capabilities()
    cpu = {
        "name": units.get("cpu_name", platform.machine()),
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
        "features": {feature: bool(units.get(unit)) for feature, unit in CPU_FEATURES.items()},
    }
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    types = ["cpu", "cuda"] if gpus else ["cpu"]
    report: dict[str, Any] = {
        "versions": _versions(),
        "cpu": cpu,
        "gpus": [
            {"device": f"cuda:{i}", "name": g.name, "memory_gib": g.total_memory / GIB} for i, g in enumerate(gpus)
        ],
        "attention": {
            kind: {"training": attention_path(kind, True), "inference": attention_path(kind, False)} for kind in types
        },
        "matmul_tflops": {
            kind: {"float32": _matmul(kind, torch.float32), "bfloat16": _matmul(kind, torch.bfloat16)} for kind in types
        },
        "jpegs_per_second_per_core": _decoding(),
        "disk": _disk(folder),
        "shared_memory_gib": _free_gib(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None,
        "compiler": shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")),
    }
    return {**report, "problems": find_problems(report)}


def find_problems(report: dict[str, Any]) -> list[str]:
    """What prevents or slows training, and what to do about it."""
    versions, cpu, disk, shared = report["versions"], report["cpu"], report["disk"], report["shared_memory_gib"]
    cores, written, problems = cpu["cores"], disk["write_mib_per_second"], []
    if not versions["torchvision"][:1].isdigit():
        problems.append(
            f"torchvision cannot be imported ({versions['torchvision']}): its build must match torch "
            f"{versions['torch']}. Install both from the same source, in one command."
        )
    if cpu["threads"] > cores:
        problems.append(f"{cpu['threads']} threads on {cores} cores are slow: set OMP_NUM_THREADS={cores}.")
    if not report["gpus"] and shutil.which("nvidia-smi"):
        problems.append(
            f"nvidia-smi is installed, but torch {versions['torch']} sees no GPU, as with a driver that is too old: "
            "update the driver, or install a torch built for an older CUDA."
        )
    if disk["free_gib"] < 5:
        problems.append(
            f"only {disk['free_gib']:.1f} GiB are free at {disk['path']}: free some, or choose another folder (a "
            "checkpoint of ViT-L takes 3.5 GiB)."
        )
    if written is None:
        problems.append(f"{disk['path']} is not writable: choose another folder.")
    elif written < 50:
        problems.append(f"the disk of {disk['path']} writes {written:.0f} MiB/s: save checkpoints less often.")
    if shared is not None and shared < 1:
        problems.append(
            f"{SHARED_MEMORY} has {shared:.2f} GiB free, and loader workers pass images through it: give the container "
            "more (--shm-size=8g), or use 0 workers."
        )
    if report["compiler"] is None:
        problems.append("a C++ compiler is missing, which --compile requires: install g++, or name another one in CXX.")
    return problems


def format_diagnosis(report: dict[str, Any]) -> str:
    """The result of `diagnose` as text, a line for each entry."""
    rows = [(name, item) for name, value in report.items() for item in (value if isinstance(value, list) else [value])]
    lines = [f"{name:<28}{_format(value)}" for name, value in rows if name != "problems"]
    problems = [f"Problem: {problem}" for problem in report["problems"]] or ["No problem found."]
    return "\n".join([*lines, "", *problems])


def _format(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_format(item)}" for name, item in value.items())
    if value is None or isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _versions() -> dict[str, str]:
    """Version by package; for torchvision its error if it cannot be imported."""
    names = ("torch", "torchvision", "numpy", "pillow", "simplejpeg")
    versions = {"vitlab": vitlab.__version__, "python": platform.python_version()}
    versions |= {name: metadata.version(name) for name in names}
    try:
        importlib.import_module("torchvision")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # as a build for another torch raises
        versions["torchvision"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return versions


def _rate(function: Callable[[], object]) -> float:
    """Calls per second, over at least 0.2 seconds."""
    function()
    calls, seconds = timeit.Timer(function, timer=synchronized_time).autorange()
    return calls / seconds


def _matmul(device: str, dtype: torch.dtype) -> float:
    """TFLOP/s of a square matrix product."""
    side = MATRIX_SIDES[device]
    a = torch.randn(side, side, device=device).to(dtype)
    return 2 * side**3 * _rate(lambda: a @ a) / 1e12


def _decoding() -> dict[str, float]:
    """JPEGs per second of one thread: a smooth image with grain, 500x375 and about 110 kB."""
    rng = np.random.default_rng(0)
    smooth = Image.fromarray(rng.integers(0, 256, (25, 33, 3), np.uint8)).resize((500, 375), Image.Resampling.BICUBIC)
    grainy = np.clip(np.asarray(smooth) + rng.normal(0, 8.5, (375, 500, 3)), 0, 255).astype(np.uint8)
    data = simplejpeg.encode_jpeg(grainy, quality=95)
    return {
        "simplejpeg": _rate(lambda: simplejpeg.decode_jpeg(data)),  # for ordinary JPEGs
        "Pillow": _rate(lambda: Image.open(io.BytesIO(data)).convert("RGB").load()),  # for all others
    }


def _disk(folder: Path) -> dict[str, Any]:
    """Free space, and the speed of writing 64 MiB, incompressible and synced, to an unnamed file."""
    block, written = os.urandom(8 * MIB), None
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            start = time.perf_counter()
            for _ in range(8):
                file.write(block)
            os.fsync(file.fileno())
            written = 64 / (time.perf_counter() - start)
    except OSError:
        pass  # not writable: None
    return {"path": str(folder.resolve()), "free_gib": _free_gib(folder), "write_mib_per_second": written}


def _free_gib(folder: Path) -> float:
    return shutil.disk_usage(folder).free / GIB

"""Report of this machine for `vitlab doctor`: versions, devices, speeds, free space, and problems with remedies."""

import importlib
import os
import platform
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import vitlab
from vitlab.cost.measure import timer
from vitlab.data.workers import SHARED_MEMORY, available_cores
from vitlab.errors import UserError
from vitlab.models.attention import attention_backend
from vitlab.train.compile_cache import cpp_compiler
from vitlab.train.free_memory import GIB

CPU_FEATURES = {"avx512": "avx512_f", "bf16": "avx512_bf16", "amx": "amx_bf16", "sve": "sve", "sme": "sme"}
"""Units for matrix products: our name -> torch's."""
MATRIX_SIDES = {"cpu": 1024, "cuda": 8192}


def diagnose(path: str | Path = ".") -> dict[str, Any]:
    """Measures this machine in a few seconds; `path` is a folder on the disk to report on.

    Returns data for JSON; keys name the units, `problems` says what is wrong and what to do. Raises UserError if
    `path` is not a folder.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give an existing one on the disk to report on.")
    units = torch.cpu.get_capabilities()
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    types = ["cpu", "cuda"] if gpus else ["cpu"]
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    report: dict[str, Any] = {
        "versions": _versions(),
        "cpu": {
            "name": units.get("cpu_name", platform.machine()),
            "cores": available_cores(),
            "threads": torch.get_num_threads(),
            "features": {feature: bool(units.get(unit)) for feature, unit in CPU_FEATURES.items()},
        },
        "gpus": [{"name": gpu.name, "memory_gib": gpu.total_memory / GIB} for gpu in gpus],
        "attention": {
            t: {"training": attention_backend(t, True), "inference": attention_backend(t, False)} for t in types
        },
        "matmul_tflops": {t: {name: _matmul(t, dtype) for name, dtype in dtypes.items()} for t in types},
        "disk": {"path": str(folder.resolve()), "free_gib": _free_gib(folder), "writable": os.access(folder, os.W_OK)},
        "shared_memory_gib": _free_gib(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None,
        "compiler": cpp_compiler(),
    }
    return {**report, "problems": find_problems(report)}


def find_problems(report: dict[str, Any]) -> list[str]:
    """What prevents or slows training, and what to do about it."""
    versions, cpu, disk, shared = (report[name] for name in ("versions", "cpu", "disk", "shared_memory_gib"))
    cores, problems = cpu["cores"], []
    if not versions["torchvision"][:1].isdigit():
        problems.append(
            f"torchvision cannot be imported ({versions['torchvision']}): install it and torch {versions['torch']} "
            "from the same source, in one command."
        )
    if cpu["threads"] > cores:
        problems.append(f"{cpu['threads']} threads on {cores} cores are slow: set OMP_NUM_THREADS={cores}.")
    if not report["gpus"] and shutil.which("nvidia-smi"):
        problems.append("torch sees no GPU: update the driver, or install a torch built for an older CUDA.")
    if disk["free_gib"] < 5:
        problems.append(f"only {disk['free_gib']:.1f} GiB are free; a checkpoint of ViT-L takes 3.5 GiB: free some.")
    if not disk["writable"]:
        problems.append(f"{disk['path']} is not writable: choose another folder.")
    if shared is not None and shared < 1:
        problems.append(
            f"{SHARED_MEMORY} has {shared:.2f} GiB free, and loader workers pass images through it: give the container "
            "more (--shm-size=8g), or use 0 workers."
        )
    if report["compiler"] is None:
        problems.append(
            "a C++ compiler is missing, which torch.compile requires: install g++, or name another one in CXX."
        )
    return problems


def format_diagnosis(report: dict[str, Any]) -> str:
    """The result of `diagnose` as text, a line for each entry."""
    lines = [f"{name:<28}{_format(value)}" for name, value in report.items() if name != "problems"]
    problems = [f"Problem: {problem}" for problem in report["problems"]] or ["No problem found."]
    return "\n".join([*lines, "", *problems])


def _format(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_format(item)}" for name, item in value.items())
    if isinstance(value, list):
        return "; ".join(map(_format, value)) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _versions() -> dict[str, str]:
    """Version by package; for torchvision its error if it cannot be imported."""
    versions = {"vitlab": vitlab.__version__, "python": platform.python_version()}
    for name in ("torch", "torchvision", "numpy", "pillow", "simplejpeg"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    try:
        importlib.import_module("torchvision")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # as a build for another torch raises
        versions["torchvision"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return versions


def _matmul(device: str, dtype: torch.dtype) -> float:
    """TFLOP/s of a square matrix product."""
    side = MATRIX_SIDES[device]
    a = torch.randn(side, side, device=device).to(dtype)
    return 2 * side**3 / timer(lambda: a @ a).blocked_autorange().mean / 1e12


def _free_gib(folder: Path) -> float:
    return shutil.disk_usage(folder).free / GIB

"""What this machine can do for a ViT: `diagnose` measures it, `format_diagnosis` writes it down.

Takes a few seconds and little memory; nothing it writes to disk stays.
"""

import importlib
import io
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import simplejpeg
import torch
from PIL import Image

import vitlab
from vitlab.errors import UserError
from vitlab.models.attention import attention_path, cpu_units

CPU_FEATURES = {"avx512": "avx512_f", "bf16": "avx512_bf16", "amx": "amx_bf16", "sve": "sve", "sme": "sme"}
"""Our names of the CPU's units that decide the speed of matrix products, and torch's."""

SHARED_MEMORY = Path("/dev/shm")
GIB = 2**30
MIB = 2**20


def diagnose(path: str | Path = ".") -> dict[str, Any]:
    """Measure this machine; `path` is the folder whose disk is meant, where work folders are to stand.

    Returns plain dictionaries, lists, strings and numbers, fit for JSON; keys name the units, and under
    `problems` stands what is wrong and what to do. Raises ValueError where `path` is no folder.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give an existing one, whose disk is to be measured.")
    cpu = _cpu()
    devices = [
        {"type": "cpu", "device": "cpu", "name": cpu["name"], "memory_gib": _memory_gib()},
        *_accelerators(),
    ]
    kinds = list(dict.fromkeys(device["type"] for device in devices))
    report: dict[str, Any] = {
        "versions": _versions(),
        "cpu": cpu,
        "devices": devices,
        "not_used": _unused(),
        "attention": {
            kind: {
                "training": attention_path(kind, True),
                "inference": attention_path(kind, False),
                "bfloat16 inference": attention_path(kind, False, torch.bfloat16),
            }
            for kind in kinds
        },
        "matmul_tflops": {
            kind: {"float32": _matmul(kind, torch.float32), "bfloat16": _matmul(kind, torch.bfloat16)} for kind in kinds
        },
        "jpegs_per_second_per_core": _decoding(),
        "disk": _disk(folder),
        "shared_memory_gib": _free_gib(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None,
        "compiler": _compiler(),
    }
    return {**report, "problems": find_problems(report)}


def find_problems(report: dict[str, Any]) -> list[str]:
    """What in a report of `diagnose` stands in the way of training, each with what to do about it."""
    problems = []
    versions, cpu, disk = report["versions"], report["cpu"], report["disk"]
    if not versions["torchvision"][:1].isdigit():
        problems.append(
            f"torchvision cannot be imported ({versions['torchvision']}): its build must match torch "
            f"{versions['torch']}. Install both from the same place, in one command."
        )
    if cpu["threads"] > cpu["cores"]:
        problems.append(
            f"torch uses {cpu['threads']} threads on {cpu['cores']} cores, which slows it down: "
            f"set OMP_NUM_THREADS={cpu['cores']}."
        )
    speed = report["matmul_tflops"]["cpu"]
    if len(report["devices"]) == 1 and speed["bfloat16"] < 1.2 * speed["float32"]:
        problems.append(
            f"bfloat16 products ({speed['bfloat16']:.2f} TFLOP/s) are no faster here than float32 "
            f"({speed['float32']:.2f}), as on many CPUs without AMX: train in precision float32."
        )
    if len(report["devices"]) == 1 and shutil.which("nvidia-smi"):
        problems.append(
            f"nvidia-smi is there, but torch {versions['torch']} sees no GPU: its CUDA must not be newer "
            f"than the driver's. Update the driver, or install a torch built for an older CUDA."
        )
    if disk["free_gib"] < 5:
        problems.append(
            f"only {disk['free_gib']:.1f} GiB are free at {disk['path']}: free some, or give a work folder "
            f"elsewhere (a checkpoint of ViT-B takes about 1 GiB, of ViT-L 3.5)."
        )
    if disk["write_mib_per_second"] is None:
        problems.append(f"{disk['path']} cannot be written to: give a folder that can.")
    elif disk["write_mib_per_second"] < 50:
        problems.append(
            f"the disk of {disk['path']} takes {disk['write_mib_per_second']:.0f} MiB/s: save checkpoints "
            f"seldom, or on a faster one."
        )
    shared = report["shared_memory_gib"]
    if shared is not None and shared < 1:
        problems.append(
            f"{SHARED_MEMORY} has {shared:.2f} GiB free, and workers hand over images through it: give the "
            f"container more (--shm-size=8g), or read in the training process (0 workers)."
        )
    if report["compiler"] is None:
        problems.append("there is no C++ compiler, and --compile needs one: install g++, or name another one in CXX.")
    return problems


def format_diagnosis(report: dict[str, Any]) -> str:
    """The report of `diagnose` as lines to read."""
    cpu, disk, speeds = report["cpu"], report["disk"], report["jpegs_per_second_per_core"]
    features = ", ".join(name for name, present in cpu["features"].items() if present) or "none"
    rows = list(report["versions"].items())
    for device in report["devices"]:
        memory = "" if device["memory_gib"] is None else f", {device['memory_gib']:.1f} GiB"
        rows.append((device["device"], f"{device['name']}{memory}"))
    rows += [("not used", f"{name}: vitlab computes on CPUs and on GPUs with CUDA") for name in report["not_used"]]
    rows.append(("threads", f"{cpu['threads']} on {cpu['cores']} cores; units for products: {features}"))
    for kind, paths in report["attention"].items():
        told = ", ".join(f"{path} in {use}" for use, path in paths.items())
        rows.append((f"attention, {kind}", told))
    for kind, tflops in report["matmul_tflops"].items():
        products = ", ".join(f"{dtype} {value:.2f}" for dtype, value in tflops.items())
        rows.append((f"products, {kind}", f"{products} TFLOP/s"))
    decoders = ", ".join(f"{name} {speed:.0f}" for name, speed in speeds.items())
    rows.append(("decoding", f"{decoders} JPEGs of 500x375 a second and core"))
    written = disk["write_mib_per_second"]
    writing = "cannot be written" if written is None else f"{written:.0f} MiB/s written and synced"
    rows.append(("disk", f"{disk['path']}: {disk['free_gib']:.1f} GiB free, {writing}"))
    if report["shared_memory_gib"] is not None:
        rows.append(("shared memory", f"{report['shared_memory_gib']:.1f} GiB free"))
    rows.append(("compiler", report["compiler"] or "none: --compile does not work"))
    width = max(len(name) for name, _ in rows) + 2
    lines = [f"{name:<{width}}{value}" for name, value in rows]
    lines += ["", *(f"Problem: {problem}" for problem in report["problems"])]
    return "\n".join(lines if report["problems"] else [*lines, "No problem found."])


def _versions() -> dict[str, str]:
    """Versions by name; in torchvision's place its error where it cannot be imported."""
    try:
        torchvision = str(importlib.import_module("torchvision").__version__)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        torchvision = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return {
        "vitlab": vitlab.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torchvision": torchvision,
        "numpy": np.__version__,
        "pillow": PIL.__version__,
        "simplejpeg": simplejpeg.__version__,
    }


def _cpu() -> dict[str, Any]:
    units = cpu_units()
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    return {
        "name": units.get("cpu_name", platform.machine()),
        "cores": len(affinity(0)) if affinity else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "features": {ours: bool(units.get(theirs)) for ours, theirs in CPU_FEATURES.items()},
    }


def _memory_gib() -> float | None:
    """Of the whole machine; None where the system has no POSIX way to tell."""
    if not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB


def _accelerators() -> list[dict[str, Any]]:
    """Every accelerator that `--device` takes, with its own memory."""
    devices: list[dict[str, Any]] = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gib = properties.total_memory / GIB
        devices.append({"type": "cuda", "device": f"cuda:{index}", "name": properties.name, "memory_gib": gib})
    return devices


def _unused() -> list[str]:
    """Accelerators that torch sees and `--device` refuses."""
    return ["Apple GPU (mps)"] if torch.backends.mps.is_available() else []


def _matmul(device: str, dtype: torch.dtype) -> float:
    """TFLOP/s of a square matrix product."""
    side = 1024 if device == "cpu" else 8192
    a = torch.randn(side, side, device=device).to(dtype)

    def product() -> None:
        (a @ a)[0, 0].item()  # waits for the device

    return 2 * side**3 * _rate(product, seconds=0.25) / 1e12


def _decoding() -> dict[str, float]:
    """JPEGs decoded per second by one thread: a soft image with grain, 500x375 and about 110 kB."""
    rng = np.random.default_rng(0)
    soft = Image.fromarray(rng.integers(0, 256, (25, 33, 3), np.uint8)).resize((500, 375), Image.Resampling.BICUBIC)
    grainy = np.clip(np.asarray(soft) + rng.normal(0, 8.5, (375, 500, 3)), 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(grainy).save(buffer, "JPEG", quality=95)
    data = buffer.getvalue()
    return {
        "simplejpeg": _rate(lambda: simplejpeg.decode_jpeg(data), seconds=0.2),  # what reads plain JPEGs
        "Pillow": _rate(lambda: Image.open(io.BytesIO(data)).convert("RGB").load(), seconds=0.2),  # and all others
    }


def _disk(folder: Path) -> dict[str, Any]:
    """Free space, and the speed of writing 64 MiB, incompressible and synced, into a nameless file."""
    block = os.urandom(8 * MIB)
    written = None
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            start = time.perf_counter()
            for _ in range(8):
                file.write(block)
            os.fsync(file.fileno())
            written = 64 / (time.perf_counter() - start)
    except OSError:
        pass  # told by None
    return {"path": str(folder.resolve()), "free_gib": _free_gib(folder), "write_mib_per_second": written}


def _free_gib(folder: Path) -> float:
    return shutil.disk_usage(folder).free / GIB


def _compiler() -> str | None:
    """The C++ compiler that torch.compile would take; None where it is not there."""
    return shutil.which(os.environ.get("CXX", "").strip() or ("clang++" if sys.platform == "darwin" else "g++"))


def _rate(work: Callable[[], object], seconds: float) -> float:
    """Calls of `work` per second, after one that does not count."""
    work()
    calls, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds or calls == 0:
        work()
        calls += 1
    return calls / elapsed

"""The one door for pickles: `vitlab convert FILE.pth OUT` copies the weights out of a file of torch.save.

`torch.load(weights_only=True)` runs no code of a file: it builds tensors, containers and numbers, and refuses the rest.
Settings that training scripts store beside the weights (`PLACEHOLDERS`) become empty objects; nothing is imported for
them. All that happens in a process of its own (`python -m vitlab.weights.pickled`), whose time and (on Linux) memory
are limited by the size of the file, and which can write no file. A line of JSON and safetensors come back by a pipe.
"""

import json
import logging
import math
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from vitlab.errors import UserError, first_ten
from vitlab.io import JSON_BYTES, parse_json, read_regular
from vitlab.weights.detect import DOWNLOADED, format_of_config
from vitlab.weights.folder import CONFIG, WEIGHTS

logger = logging.getLogger(__name__)

PREFERRED = ("state_dict_ema", "model_ema", "teacher", "state_dict", "model", "module", "student")
"""Keys of the weights in order of preference: averaged ones first, which timm and DINO evaluate."""
STATE_OF_TRAINING = re.compile(r"optim|sched|scaler|amp|rng|(^|\.)state$")
"""Keys of dictionaries with tensors that are not weights."""
PLACEHOLDERS = (
    *("argparse.Namespace", "types.SimpleNamespace", "collections.defaultdict", "_codecs.encode"),
    *(f"builtins.{name}" for name in ("bool", "dict", "float", "int", "list", "str")),  # of defaultdict(list)
    *(f"pathlib.{name}" for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")),
    *(f"pathlib._local.{name}" for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")),
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("scalar", "_reconstruct")),
    *("numpy.dtype", "numpy.ndarray", "yacs.config.CfgNode", "easydict.EasyDict", "ml_collections.ConfigDict"),
    *("omegaconf.dictconfig.DictConfig", "omegaconf.listconfig.ListConfig", "omegaconf.base.ContainerMetadata"),
    *("omegaconf.base.Metadata", "omegaconf.nodes.AnyNode", "typing.Any", "datetime.timedelta", "datetime.datetime"),
)
"""Plain data in published checkpoints, read as empty objects."""
MEMORY, SECONDS, BYTES_PER_SECOND = 2**29, 60, 2**23
"""What reading a file may take besides four times its size, and besides its size over this rate."""
MAX_REPORTED = 100


class Placeholder:
    """Takes the place of any of `PLACEHOLDERS`: accepts every argument and keeps none."""

    def __new__(cls, *_: Any) -> "Placeholder":
        return super().__new__(cls)

    def __setstate__(self, _: Any) -> None:
        pass


def unpickle(path: Path, folder: Path, key: str | None = None, log: Callable[[str], None] = logger.info) -> Path:
    """Copies the weights in the file `path` of torch.save to safetensors in a new `folder`, and returns what to load:
    the folder, with the JSON files beside `path` where they are timm's or Hugging Face's, else the bare file.

    `log` receives what is in the file: the keys with tensors, how many, and their parameters. `key` chooses among them,
    with dots between levels; by default the only one, or the first of `PREFERRED`. Raises UserError for a file with
    anything but tensors and plain data, and for one that requires more than the limits.
    """
    folder.mkdir()
    out = folder / WEIGHTS
    command = [sys.executable, "-P", "-B", "-m", __name__, str(path), *([] if key is None else [key])]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    none, pipe = subprocess.DEVNULL, subprocess.PIPE
    reading = subprocess.Popen(command, env=environment, stdin=none, stdout=pipe, stderr=none)
    with reading as reader, out.open("xb") as file:
        assert reader.stdout
        line = reader.stdout.readline()
        shutil.copyfileobj(reader.stdout, file)
    report = parse_json(line, f"the report on {path}") if line else {}
    for text in report.get("contents", ()):
        log(f"{path} holds {text}")
    if reader.returncode or "chosen" not in report:
        reason = report.get("error") or f"its reader ended with exit code {reader.returncode}, out of memory or time."
        raise UserError(f"{path} cannot be converted: {reason}")
    log(f"taking {report['chosen']}")
    if format_of_config(path.parent / CONFIG) == "vitlab":
        return out
    for name in DOWNLOADED:
        if name.endswith("config.json") and (path.parent / name).is_file():
            (folder / name).write_bytes(read_regular(path.parent / name, JSON_BYTES))
    return folder


# ------------------------------------------------------------------------------------- in the process of its own


def main(path: str, key: str | None = None) -> None:
    """Writes the report, on one line, and the weights to the standard output."""
    report: dict[str, Any] = {}

    def tell(_: Any, error: BaseException, __: Any) -> None:
        sys.stdout.write(json.dumps(report | {"error": _reason(error)}) + "\n")

    sys.excepthook = tell
    torch.set_num_threads(1)
    with Path(path).open("rb") as file:
        _limit(os.fstat(file.fileno()).st_size)
        groups, others = weights_in(load(file))
    report["contents"] = describe(groups, others)
    chosen = choose(list(groups), key)
    weights = safetensors.torch.save(compact(groups[chosen]), metadata={"format": "pt"})
    report["chosen"] = f"{chosen} (--key chooses another)" if len(groups) > 1 else chosen or "all of them"
    sys.stdout.buffer.write(json.dumps(report).encode() + b"\n" + weights)


def _limit(size: int) -> None:
    """Limits what this process may take to read a file of so many bytes; it can write none."""
    limits = {
        resource.RLIMIT_CPU: SECONDS + size // BYTES_PER_SECOND,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
    }
    statm = Path("/proc/self/statm")  # begins with the pages that it has
    if statm.exists():
        limits[resource.RLIMIT_AS] = int(statm.read_text().split()[0]) * resource.getpagesize() + 4 * size + MEMORY
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))


def load(file: Any) -> Any:
    """The content of an open file of torch.save."""
    placeholders: list[Any] = [(type(name, (Placeholder,), {}), name) for name in PLACEHOLDERS]
    with torch.serialization.safe_globals(placeholders):
        return torch.load(file, map_location="cpu", weights_only=True)


def weights_in(content: Any) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """Key -> tensors of each dictionary with tensors, on the first three levels; and the keys of everything else."""
    groups: dict[str, dict[str, Tensor]] = {}

    def visit(key: str, value: Any, level: int) -> list[str]:
        if not isinstance(value, Mapping) or level == 3:
            return [key]
        tensors = {str(name): item for name, item in value.items() if isinstance(item, Tensor)}
        if tensors and not STATE_OF_TRAINING.search(key):
            groups[key] = tensors
        others: list[str] = []
        for name, item in value.items():
            if not isinstance(item, Tensor):
                others += visit(f"{key}.{name}" if key else str(name), item, level + 1)
        return others if any(group.startswith(key) for group in groups) else [key]

    others = visit("", content, 0)
    return groups, others


def describe(groups: Mapping[str, Mapping[str, Tensor]], others: list[str]) -> list[str]:
    """A line for each group of tensors, and one for everything else."""
    lines = [
        f"{key[:MAX_REPORTED] or 'tensors'}: {len(tensors):,} tensors, "
        f"{sum(tensor.numel() for tensor in tensors.values()):,} parameters"
        for key, tensors in list(groups.items())[:MAX_REPORTED]
    ]
    rest = [key[:MAX_REPORTED] for key in others if key]
    return lines + ([f"besides, left out: {first_ten(rest)}"] if rest else [])


def choose(keys: list[str], key: str | None) -> str:
    """The key of the weights: `key`, or the default. Raises UserError where there is none."""
    listed = first_ten([name[:MAX_REPORTED] for name in keys])
    if not keys:
        raise UserError("it holds no dictionary of tensors; save one by torch.save(model.state_dict(), FILE).")
    if key is not None:
        if key not in keys:
            raise UserError(f"it holds no tensors under the key {key!r}; give --key with one of {listed}.")
        return key
    known = [name for name in PREFERRED if name in keys]
    if len(keys) > 1 and not known:
        raise UserError(f"it holds tensors under several keys; choose one by --key: {listed}.")
    return known[0] if known else keys[0]


def compact(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, each with memory of its own. Raises UserError for a tensor that is not plain numbers."""
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise UserError(f"its {name} is not a plain dense tensor; save the model without quantization or sparsity.")
    stored = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors.values()}
    expanded = sum(math.prod(tensor.shape) * tensor.element_size() for tensor in tensors.values())
    if expanded > 2 * sum(stored.values()) + MEMORY:
        raise UserError(f"its tensors take {expanded:,} bytes and it stores {sum(stored.values()):,} of them.")
    return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}


def _reason(error: BaseException) -> str:
    """Why a file cannot be read, and what to do; torch.load's causes differ only by their messages."""
    text = str(error)
    if isinstance(error, UserError):
        return text
    if named := re.search(r"GLOBAL (\S+)", text):
        return (
            f"it calls {named[1]}, and only tensors and plain data are read from a pickle, never code. Where it was "
            f"saved, write the weights alone: torch.save(model.state_dict(), FILE)."
        )
    if "TorchScript" in text:
        return "it is a TorchScript program, not weights; write its state_dict() with torch.save where you trust it."
    if isinstance(error, MemoryError) or "memory" in text:
        return "it requires more memory than its size allows; it is corrupt or malicious."
    first = next(iter(text.splitlines()), "")
    return f"it is not a readable file of torch.save ({type(error).__name__}: {first[:300]})."


if __name__ == "__main__":
    main(*sys.argv[1:])

"""SHA-256 sums of what commands write, blind to what may be renamed: for `checksums.py`."""

import csv
import hashlib
import json
import re
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

UNSTABLE = re.compile(r"second|minute|hour|speed|memory|time|version")  # keys whose numbers no seed decides


def digest(parts: Iterable[bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()


def tensors(arrays: Mapping[str, Any]) -> str:
    """The hash of named tensors or arrays, in any order: names, dtypes, shapes (of meta tensors no more), bytes."""
    parts = []
    for name in sorted(arrays):
        if isinstance(arrays[name], np.ndarray) and arrays[name].dtype.kind == "U":
            continue  # the words of a figure
        tensor = torch.as_tensor(arrays[name])
        data = b"" if tensor.is_meta else tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        parts += [f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), data]
    return digest(parts)


def file_tensors(file: Path) -> str:
    """The hash of the tensors of a `.npz` or `.safetensors` file."""
    if file.suffix == ".npz":
        with np.load(file, allow_pickle=False) as arrays:
            return tensors(dict(arrays))
    return tensors(load_file(file))


def numbers(values: Any) -> str:
    """The hash of all numbers in lists and dictionaries, in sorted order: renamed or moved keys do not change it."""
    return digest(line.encode() for line in sorted(_numbers(values)))


def _numbers(values: Any) -> Iterable[str]:
    if isinstance(values, dict):
        values = [value for key, value in values.items() if not UNSTABLE.search(key)]
    if isinstance(values, list):
        yield from (line for value in values for line in _numbers(value))
    elif isinstance(values, int | float) and not isinstance(values, bool):
        yield repr(float(values))


def tar_members(file: Path) -> Iterable[bytes]:
    """Names and contents of the files in a tar, in its order."""
    with tarfile.open(file) as tar:
        for member in tar:
            content = tar.extractfile(member)
            yield from (member.name.encode(), content.read() if content else b"")


def json_lines(file: Path) -> str:
    return digest(numbers(json.loads(line)).encode() for line in file.read_text().splitlines())


def table(file: Path) -> str:
    """The hash of a CSV file's rows, without its header and without the temporary folder in its paths."""
    here = f"{Path.cwd()}/"
    with file.open(newline="") as lines:
        return digest("\t".join(row).replace(here, "").encode() for row in list(csv.reader(lines))[1:])


def run_files(folder: Path) -> dict[str, str]:
    """The hashes of what the runs in a folder and below it have written."""
    hashes = {}
    for file in sorted(folder.rglob("*")):
        name = str(file.relative_to(folder))
        if file.suffix == ".safetensors":
            hashes[name] = file_tensors(file)
        elif file.name == "metrics.jsonl":
            hashes[name] = json_lines(file)
        elif file.name == "predictions.csv":
            hashes[name] = table(file)
        elif file.name == "result.json":
            hashes[name] = numbers(json.loads(file.read_text()))
        elif file.name == "config.json" and file.parent.name == "model":
            settings = json.loads(file.read_text())
            stored = [settings["model"], settings["extra"].get("preprocessing")]
            hashes[name] = digest([json.dumps(stored, sort_keys=True).encode()])
    return hashes

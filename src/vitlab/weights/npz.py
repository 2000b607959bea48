"""An `.npz` of Google's as arrays by name, and the layout of each array against ours.

Kernels are (in, out), of convolutions (height, width, in, out), with the heads apart where there are any: (D, k, Dh)
for q, k and v, (k, Dh, D) for the output. A GroupNorm's arrays are (1, 1, 1, C) in some files and (C) in others.
numpy stores bfloat16 as two bytes without a type, `V2`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from vitlab.errors import UserError
from vitlab.io import ARCHIVE_DAMAGE, outline_npz, reading_npz, replacing_file
from vitlab.weights.shapes import some

Spelling = Literal["stored", "linen", "big_vision"]
"""How the arrays are named: `vitlab.weights.google` has the table."""

PREFIXES = ("opt/target/", "params/")
"""What may stand in front of every name; beside them stands an optimizer's state."""


@dataclass(frozen=True)
class Slot:
    """One of Google's arrays, and the parameter of ours that holds it."""

    shape: tuple[int, ...]
    ours: str
    third: int | None = None
    """0, 1 or 2 for q, k and v, which are one parameter of ours."""


def dense(theirs: str, ours: str, shape: tuple[int, ...]) -> dict[str, Slot]:
    """The arrays of a layer with a bias."""
    return {
        f"{theirs}/kernel": Slot(shape, f"{ours}.weight"),
        f"{theirs}/bias": Slot(shape[-1:], f"{ours}.bias"),
    }


def to_ours(name: str, array: Tensor) -> Tensor:
    """The array that Google calls `name`, in the layout of the parameter of ours that holds it."""
    if name.endswith("head/conv2d/kernel"):
        return array.flatten(0, 2).T  # BiT's head, (1, 1, in, out) -> (out, in)
    if name.endswith("/kernel") and array.ndim == 4:
        return array.permute(3, 2, 0, 1)  # (h, w, in, out) -> (out, in, h, w)
    if name.endswith("/out/kernel"):
        return array.flatten(0, 1).T  # (k, Dh, D) -> (D, k Dh)
    if name.endswith("/kernel"):
        return array.flatten(1).T  # (D, k, Dh) -> (k Dh, D); (in, out) -> (out, in)
    if name.endswith(("/bias", "/scale", "/beta", "/gamma")):
        return array.flatten()  # (k, Dh) -> (k Dh); (1, 1, 1, C) -> (C)
    return array


def to_google(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `to_ours`."""
    if name.endswith("/kernel") and tensor.ndim == 4:
        return tensor.permute(2, 3, 1, 0)
    return (tensor.T if name.endswith("/kernel") else tensor).reshape(shape)


def without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a GroupNorm's array however it is stored; any other is returned as it is."""
    return shape[3:] if len(shape) == 4 and shape[:3] == (1, 1, 1) else shape


def need(path: Path, arrays: Mapping[str, Tensor], wanted: Mapping[str, int], what: str) -> None:
    """Raises ValueError unless the arrays that sizes are read from are there, with so many axes and not empty."""
    for name, ndim in wanted.items():
        if name not in arrays or arrays[name].ndim != ndim or not arrays[name].numel():
            found = f"of shape {tuple(arrays[name].shape)}" if name in arrays else "missing"
            raise UserError(
                f"{path} is no {what} of Google's: {name} is {found}, where an array of {ndim} axes is needed. It "
                f"holds {some(sorted(arrays)) or 'nothing'}."
            )


def last_axis(arrays: Mapping[str, Tensor], name: str) -> int | None:
    """The length of an array's last axis; None where there is no such array or axis."""
    return arrays[name].shape[-1] if name in arrays and arrays[name].ndim else None


def outline_arrays(path: Path) -> dict[str, Tensor]:
    """As `read_npz`, but the arrays are zeros that take no memory: to see what the file holds before it is read."""
    try:
        arrays = _of_model(outline_npz(path))
    except ARCHIVE_DAMAGE as error:
        raise _damaged(path, error) from error
    return {name: _to_torch(path, name, array) for name, array in arrays.items()}


def read_npz(path: Path) -> dict[str, Tensor]:
    """The model's arrays by name, without the prefix that they stand under."""
    try:
        with reading_npz(path) as archive:
            arrays = _of_model(archive)
    except ARCHIVE_DAMAGE as error:
        raise _damaged(path, error) from error
    return {name: _to_torch(path, name, array) for name, array in arrays.items()}


def _of_model(archive: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    names, prefix = list(archive), ""
    for each in PREFIXES:
        inside = [name for name in names if name.startswith(prefix + each)]
        names, prefix = (inside, prefix + each) if inside else (names, prefix)
    return {name.removeprefix(prefix): archive[name] for name in names}


def _damaged(path: Path, error: BaseException) -> UserError:
    return UserError(
        f"{path} cannot be read as an .npz of plain arrays ({error}). It is damaged, or holds pickled objects, which "
        f"are never loaded; get the file again."
    )


def write_npz(path: Path, arrays: Mapping[str, Tensor]) -> None:
    """All of the file or nothing."""
    plain: dict[str, Any] = {name: _to_numpy(array) for name, array in arrays.items()}
    with replacing_file(path) as file:
        np.savez(file, **plain)


def _to_torch(path: Path, name: str, array: np.ndarray | bytes) -> Tensor:
    if isinstance(array, np.ndarray):
        if array.dtype == np.dtype("V2"):
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        if array.dtype in (np.float16, np.float32, np.float64):
            return torch.from_numpy(array)
    given = array.dtype if isinstance(array, np.ndarray) else "no array"
    raise UserError(f"{path}: {name} is {given}; weights are arrays of float16, bfloat16, float32 or float64.")


def _to_numpy(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view("V2")
    return tensor.contiguous().numpy()

"""Google's `.npz` as arrays by name, and the layout of each array against ours.

Kernels are (in, out), of convolutions (height, width, in, out), with separate heads where there are any: (D, k, Dh) for
q, k and v, (k, Dh, D) for the output. The arrays of a GroupNorm are (1, 1, 1, C) in some files and (C) in others. NumPy
stores bfloat16 as two bytes without a type, `V2`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from vitlab.errors import UserError
from vitlab.io import NPZ_ERRORS, reading_npz, write_arrays
from vitlab.weights.layout import Layout, Slot

Spelling = Literal["stored", "linen", "big_vision"]
"""How the arrays are named: see the table in `vitlab.weights.google`."""

PREFIXES = ("opt/target/", "params/")
"""Possible prefixes of all names; beside them is an optimizer state."""


def dense(theirs: str, ours: str, shape: tuple[int, ...]) -> Layout:
    """The arrays of a layer with a bias."""
    return {f"{theirs}/kernel": Slot(shape, f"{ours}.weight"), f"{theirs}/bias": Slot(shape[-1:], f"{ours}.bias")}


def to_ours(name: str, array: Tensor) -> Tensor:
    """A copy of the array that Google calls `name`, in the layout of our parameter."""
    if name.endswith("head/conv2d/kernel"):
        array = array.flatten(0, 2).T  # BiT's head, (1, 1, in, out) -> (out, in)
    elif name.endswith("/kernel") and array.ndim == 4:
        array = array.permute(3, 2, 0, 1)  # (h, w, in, out) -> (out, in, h, w)
    elif name.endswith("/out/kernel"):
        array = array.flatten(0, 1).T  # (k, Dh, D) -> (D, k Dh)
    elif name.endswith("/kernel"):
        array = array.flatten(1).T  # (D, k, Dh) -> (k Dh, D); (in, out) -> (out, in)
    elif name.endswith(("/bias", "/scale", "/beta", "/gamma")):
        array = array.flatten()  # (k, Dh) -> (k Dh); (1, 1, 1, C) -> (C)
    return array.clone(memory_format=torch.contiguous_format)


def to_google(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `to_ours`."""
    if name.endswith("/kernel") and tensor.ndim == 4:
        return tensor.permute(2, 3, 1, 0)
    return (tensor.T if name.endswith("/kernel") else tensor).reshape(shape)


def read_npz(path: Path) -> dict[str, Tensor]:
    """The model's arrays by name, without a prefix. Raises UserError for a corrupt file and for other types."""
    try:
        with reading_npz(path) as archive:
            names, prefix = list(archive), ""
            for part in PREFIXES:
                inside = [name for name in names if name.startswith(prefix + part)]
                names, prefix = (inside, prefix + part) if inside else (names, prefix)
            arrays = {name.removeprefix(prefix): archive[name] for name in names}
    except NPZ_ERRORS as error:
        raise UserError(
            f"{path} cannot be read as an .npz of plain arrays ({error}). It is corrupt, or holds pickled objects, "
            f"which are never loaded; get the file again."
        ) from error
    return {name: _to_torch(path, name, array) for name, array in arrays.items()}


def write_npz(path: Path, arrays: Mapping[str, Tensor]) -> None:
    """Writes the file, all or nothing."""
    write_arrays(path, {name: _to_numpy(array) for name, array in arrays.items()})


def _to_torch(path: Path, name: str, array: np.ndarray | bytes) -> Tensor:
    dtype = array.dtype if isinstance(array, np.ndarray) else "not an array"
    if isinstance(array, np.ndarray) and dtype == np.dtype("V2"):
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if not isinstance(array, np.ndarray) or dtype not in (np.float16, np.float32, np.float64):
        raise UserError(f"{path}: {name} is {dtype}; weights are arrays of float16, bfloat16, float32 or float64.")
    return torch.from_numpy(array)


def _to_numpy(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view("V2")
    return tensor.contiguous().numpy()

"""Images held out of training: for the sweep (App. B.1.1), and for the choices of the least-squares head.

`protocol.py` checks that there are enough, `sweep.py` evaluates on them, and `head.py` fits a head without them.
"""

import dataclasses

import numpy as np
from jaxtyping import Int

from vitlab.data.dataset import Dataset
from vitlab.data.splits import stratified_split
from vitlab.errors import UserError
from vitlab.rng import Stream

HELD_OUT = "held_out"
"""Name of the held-out split."""


def hold_out(dataset: Dataset, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """The training split without `fraction` of each class, and that held-out split, chosen by `seed` (App. B.1.1).

    Groups are kept whole. If "trainval" contains the user's own val, this is held out, up to `fraction` of all images.
    Raises UserError if one of the two is empty.
    """
    rest, held_out = map(dataset.take, hold_out_indices(dataset, fraction, seed))
    if not len(rest) or not len(held_out):
        raise UserError(
            f"held_out={fraction:g} leaves {len(rest)} images of {dataset.name} to train on and {len(held_out)} to "
            f"evaluate on (a class needs at least two, of two groups if there are groups); give another fraction, or "
            f"one rate that is not compared (`--optim.lr 1e-4`)."
        )
    return rest, dataclasses.replace(held_out, split=HELD_OUT)


def hold_out_indices(dataset: Dataset, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The indices of the two parts of `hold_out`."""
    if dataset.from_val is None or not dataset.from_val.any():
        parts = stratified_split(dataset.labels, {HELD_OUT: fraction}, seed, Stream.HELD_OUT, dataset.groups)
        return parts["train"], parts[HELD_OUT]
    val, most = np.flatnonzero(dataset.from_val), round(fraction * len(dataset))
    if most < len(val):
        val = val[stratified_split(dataset.labels[val], {"val": most / len(val)}, seed, Stream.HELD_OUT)["val"]]
    return np.flatnonzero(~dataset.from_val), val


def has_val(dataset: Dataset) -> bool:
    """Whether some of these images are of the user's own val split."""
    return dataset.from_val is not None and bool(dataset.from_val.any())


def left_out_groups(dataset: Dataset, indices: np.ndarray) -> Int[np.ndarray, " n"] | None:
    """For each of these images, the number of the group that is left out together with it (`Ridge.leave_one_out`).

    - If some are of the user's own val: 0 for these, and -1 (never left out) for all others.
    - Otherwise, if the data set has groups: the image's group.
    - Otherwise None: each image is left out by itself.
    """
    if dataset.from_val is not None and (val := dataset.from_val[indices]).any():
        return np.where(val, 0, -1)
    return None if dataset.groups is None else np.unique(dataset.groups[indices], return_inverse=True)[1]


def left_out_name(dataset: Dataset) -> str:
    """What the choices of the least-squares head are made on, as `left_out_groups` leaves it out."""
    return "val" if has_val(dataset) else "leave-one-out" if dataset.groups is None else "leave-one-group-out"

"""Public checkpoints to start from (recommended.csv), which `load_model` takes by these names. Imports no torch."""

import csv
from pathlib import Path
from typing import NamedTuple

DEFAULT = "timm:vit_small_patch16_224.augreg_in21k"
"""For fine-tuning on two CPU cores or a small GPU: 196 patches, a permissive license."""


class Recommended(NamedTuple):
    """A checkpoint; data and license as its publisher names them."""

    spec: str
    parameters: int
    """Without the head, which fine-tuning replaces."""
    image_size: int
    """Side in pixels of the images that its preprocessing makes."""
    use: str
    pretraining: str
    license: str


def _read_rows() -> tuple[Recommended, ...]:
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file)
    return tuple(Recommended(spec, int(parameters), int(side), *rest) for spec, parameters, side, *rest in rows)


RECOMMENDED = _read_rows()

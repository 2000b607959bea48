"""What tests of training runs share: images, the records of a run, and the distance of two models."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.data.dataset import Dataset
from vitlab.data.registry import load_dataset


@functools.cache
def digits() -> Dataset:
    return load_dataset("digits", "train")


def records(folder: Path, key: str = "loss") -> dict[int, float]:
    """Step -> value, in the order of metrics.jsonl."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


def largest_difference(one: dict[str, Any], two: dict[str, Any]) -> float:
    assert one.keys() == two.keys()
    return max(float(np.abs(np.asarray(one[name]) - np.asarray(two[name])).max()) for name in one)

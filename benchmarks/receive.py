"""What an image costs the training process when a worker has decoded it: microseconds of its own time per image.

    python benchmarks/receive.py shards:data/flowers102 --out benchmarks/results/receive.json

The process takes chunks of training crops from one worker and joins them into batches, as it does beside a GPU before
it copies them there. Its time on a core counts, without what it waits. `float32` sends crops as they are looked up,
`uint8` rounded to whole gray levels, as vitlab does; they take turns.
"""

import dataclasses
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from run_record import describe_run
from torch import Tensor

from vitlab.data.dataset import Dataset
from vitlab.data.loader import CHUNK, _ChunkDataset, _from_workers, _split_batches
from vitlab.data.registry import load_dataset
from vitlab.data.transforms import TrainTransform
from vitlab.train.precision import keep_freed_memory

BATCH = 256


@dataclasses.dataclass(frozen=True)
class Arguments:
    data: tyro.conf.Positional[str]
    """Photographs: `folder:PATH` or `shards:PATH`."""
    image_size: int = 224
    batches: int = 8
    rounds: int = 5
    out: Path = Path("receive.json")


class _Float32(_ChunkDataset):
    def _transform(self, images: Any, epochs: np.ndarray, indices: np.ndarray) -> Tensor:
        return self.transform.augment(images, self.seed, epochs, indices)  # pyright: ignore[reportAttributeAccessIssue]


def microseconds(given: Arguments, dataset: Dataset, reader: type[_ChunkDataset]) -> float:
    """Per image; the first two batches are not counted."""
    indices = np.arange(len(dataset))
    batches = itertools.repeat((np.zeros(BATCH, np.int64), np.resize(indices, BATCH)), given.batches + 2)
    source = reader(dataset, TrainTransform(given.image_size), 0, None)
    chunks = _from_workers(source, _split_batches(batches, CHUNK), BATCH, workers=1)
    dtype = torch.float32 if reader is _Float32 else torch.uint8
    joined, started = torch.empty(BATCH, 3, given.image_size, given.image_size, dtype=dtype), 0.0
    for number in range(given.batches + 2):
        if number == 2:
            started = time.thread_time()
        torch.cat([chunk.images for chunk in itertools.islice(chunks, BATCH // CHUNK)], out=joined)
    chunks.close()
    return (time.thread_time() - started) / (given.batches * BATCH) * 1e6


def main() -> None:
    given = tyro.cli(Arguments, description=__doc__)
    keep_freed_memory()
    torch.set_num_threads(1)
    dataset = load_dataset(given.data, "train")
    readers: dict[str, type[_ChunkDataset]] = {"float32": _Float32, "uint8": _ChunkDataset}
    measured: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(given.rounds):
        for name, reader in readers.items():
            measured[name].append(microseconds(given, dataset, reader))
    results = {name: {"median": statistics.median(values), "all": values} for name, values in measured.items()}
    record = {"environment": describe_run(given, torch), "us_per_image": results}
    given.out.write_text(json.dumps(record, indent=1) + "\n")
    print({name: f"{result['median']:.0f} us" for name, result in results.items()})


if __name__ == "__main__":
    main()

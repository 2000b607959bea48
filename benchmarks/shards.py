"""What a million tiny records in shards cost: seconds to start and to resume, memory.

    python benchmarks/shards.py --out benchmarks/results/shards.json

`--records` images of 72 x 72 pixels, one gray each, about 100 bytes as PNG (and 2 KB in a tar, for its headers), in
shards of 10,000, written into a temporary folder. Each figure is of a new process:

- `scanned`: the set is opened as anybody's tars, which are scanned; for all others it has an `index.json`.
- `listed`: it is opened with an `index.json`, as `vitlab shard` writes it.
- `images`: `--images` random images are decoded, one after the other.
- `resume`: a training's first batch of 256 when it goes on at 70% of the first epoch, the permutation included;
  without and with two processes that read images, forked; of these, the memory that they do not share is given.

Memory is what is resident of the process, in MiB: `imports` when all is imported, then when the set is open, and at the
end.
"""

import dataclasses
import io
import itertools
import json
import multiprocessing
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
import tyro
from PIL import Image
from run_record import describe_run

from vitlab.data import shards
from vitlab.data.dataset import Dataset
from vitlab.data.loader import train_batches
from vitlab.data.transforms import TrainTransform
from vitlab.data.write_shards import write_index

IN_A_SHARD = 10_000
CLASSES = 200
SIDE = 72


@dataclasses.dataclass(frozen=True)
class Arguments:
    records: int = 1_000_000
    images: int = 100_000
    rounds: int = 3
    """How often each figure but `scanned` is taken; the medians count."""
    folder: Path | None = None
    """Folder for the shards; one of the system's for such things unless given."""
    out: Path | None = None
    """JSON file for the figures."""


def write(folder: Path, records: int) -> None:
    """Shards as anybody's: no list of them, and no class names."""
    images = []
    for label in range(CLASSES):
        buffer = io.BytesIO()
        Image.new("L", (SIDE, SIDE), label).save(buffer, "PNG")
        images.append(buffer.getvalue())
    print(f"{np.mean([*map(len, images)]):.0f} bytes an image")
    for shard, start in enumerate(range(0, records, IN_A_SHARD)):
        with (folder / f"train-{shard:06d}.tar").open("wb") as file:
            for number in range(start, min(start + IN_A_SHARD, records)):
                label = number * 7919 % CLASSES
                for kind, data in (("png", images[label]), ("cls", str(label).encode())):
                    info = tarfile.TarInfo(f"{number:09d}.{kind}")
                    info.size = len(data)
                    file.write(info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % 512))
            file.write(bytes(1024))


def own_memory(process: int | str = "self") -> float:
    """MiB of this process that are in memory, or that another one has written to and shares with none."""
    fields = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    name = "Rss:" if process == "self" else "Private_Dirty:"
    return sum(int(line.split()[1]) for line in fields if line.startswith(name)) / 1024


def opened(folder: Path) -> tuple[Dataset, dict[str, float]]:
    before, start = own_memory(), time.perf_counter()
    data = shards.shard_splits(folder, "shards:many")[1]("train")
    return data, {"seconds": time.perf_counter() - start, "imports": before, "open": own_memory()}


def opening(folder: Path) -> dict[str, float]:
    return opened(folder)[1]


def images(folder: Path, count: int) -> dict[str, float]:
    data, figures = opened(folder)
    start = time.perf_counter()
    for i in np.random.default_rng(0).integers(0, len(data), count).tolist():
        assert data.image(i)[0, 0, 0] == data.labels[i]
    return figures | {"seconds": time.perf_counter() - start, "end": own_memory()}


def resume(folder: Path, workers: int) -> dict[str, float]:
    torch.set_num_threads(1)
    data, figures = opened(folder)
    start = time.perf_counter()
    batches = train_batches(
        data, TrainTransform(32), batch_size=256, seed=0, first_example=len(data) * 7 // 10, workers=workers
    )
    next(batches)
    figures |= {"seconds": time.perf_counter() - start, "end": own_memory()}
    for _ in itertools.islice(batches, 20):
        pass
    for number, child in enumerate(multiprocessing.active_children()):
        figures[f"worker_{number}"] = own_memory(child.pid or 0)
    return figures


def alone(work: Callable[..., dict[str, float]], *arguments: Any) -> dict[str, float]:
    """The figures of a new process."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=answer, args=(theirs, work, arguments))
    process.start()
    theirs.close()
    result = ours.recv()
    process.join()
    return result


def answer(pipe: Any, work: Callable[..., dict[str, float]], arguments: tuple[Any, ...]) -> None:
    multiprocessing.set_start_method("fork", force=True)  # for the processes that read images
    pipe.send(work(*arguments))


def medians(rounds: int, work: Callable[..., dict[str, float]], *arguments: Any) -> dict[str, float]:
    results = [alone(work, *arguments) for _ in range(rounds)]
    figures = {name: float(np.median([each[name] for each in results])) for name in results[0]}
    return figures | {"most_seconds": max(each["seconds"] for each in results)}


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    folder = Path(tempfile.mkdtemp(prefix="vitlab-shards-", dir=arguments.folder))
    try:
        write(folder, arguments.records)
        results: dict[str, Any] = {}

        def tell(name: str, figures: dict[str, float]) -> None:
            results[name] = {each: round(value, 4) for each, value in figures.items()}
            print(name, results[name], flush=True)

        tell("scanned", alone(opening, folder))
        tars, classes = sorted(folder.glob("*.tar")), [str(label) for label in range(CLASSES)]
        write_index(folder, {"train": tars}, classes, {"train": arguments.records}, {})
        tell("listed", medians(arguments.rounds, opening, folder))
        tell("images", medians(arguments.rounds, images, folder, arguments.images))
        for workers in (0, 2):
            tell(f"resume_{workers}_workers", medians(arguments.rounds, resume, folder, workers))
        results["megabytes"] = round(sum(tar.stat().st_size for tar in folder.glob("*.tar")) / 1e6)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if arguments.out is not None:
        record = {"environment": describe_run(arguments, np, PIL, torch), "results": results}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""How well and how fast near-duplicates are detected (`vitlab.data.dedup`); the threshold stands on these tables.

    python benchmarks/dedup.py --out benchmarks/results/dedup.json --listed benchmarks/results/cifar10_duplicates.csv

- `planted`: copies of real images, each changed in one way, are compared with their originals: the share detected, by
  kind of change. The same search compares them with all other images; what it finds there, by distance, is wrong, or
  a duplicate that the set has by nature: of these, pairs of different classes count as wrong, those of one class are
  given beside.
- `speed`: `train` thumbnails (blends of two real images each, so that all differ and still look like photographs) are
  searched for `test` ones, shard by shard; seconds of the processor and the most memory in use. Reading is not in it.
- `natural`: the duplicates between the training and test images of a set as it is, which is read and searched.

The sets are WebDataset shards: `--flowers` and `--cifar` say where.
"""

import dataclasses
import gc
import hashlib
import io
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from PIL import Image, ImageEnhance
from run_record import describe_run

from vitlab.data import dedup
from vitlab.data.dataset import Dataset
from vitlab.data.registry import load_dataset

EDGES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5)
Pixels = np.ndarray
Change = Callable[[Pixels, np.random.Generator], Pixels]


@dataclasses.dataclass(frozen=True)
class Arguments:
    parts: tuple[Literal["planted", "natural", "speed"], ...] = ("planted", "natural", "speed")
    flowers: str = "shards:data/flowers102"
    cifar: str = "shards:data/cifar10"
    align: bool = True
    """Whether a pair is aligned; without, the whole thumbnails are compared."""
    images: int = 400
    """Images of each set that are changed in every way."""
    train: int = 1_000_000
    test: int = 10_000
    seed: int = 0
    out: Path | None = None
    """JSON file for the figures; parts that are not measured now stay as they are there."""
    listed: Path | None = None
    """CSV file for the pairs of `natural`."""


def resized(scale: float) -> Change:
    def change(image: Pixels, _: np.random.Generator) -> Pixels:
        height, width = (max(round(side * scale), 1) for side in image.shape[:2])
        return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))

    return change


def compressed(quality: int) -> Change:
    def change(image: Pixels, _: np.random.Generator) -> Pixels:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=quality)
        return np.asarray(Image.open(file))

    return change


def cropped(share: float) -> Change:
    """`share` of each side goes, in whole pixels, at a random place."""

    def change(image: Pixels, random: np.random.Generator) -> Pixels:
        height, width = (round(side * (1 - share)) for side in image.shape[:2])
        top = random.integers(image.shape[0] - height + 1)
        left = random.integers(image.shape[1] - width + 1)
        return image[top : top + height, left : left + width]

    return change


def brighter(factor: float) -> Change:
    return lambda image, _: np.asarray(ImageEnhance.Brightness(Image.fromarray(image)).enhance(factor))


def contrasted(factor: float) -> Change:
    return lambda image, _: np.asarray(ImageEnhance.Contrast(Image.fromarray(image)).enhance(factor))


def gray(image: Pixels, _: np.random.Generator) -> Pixels:
    return np.asarray(Image.fromarray(image).convert("L").convert("RGB"))


def flipped(image: Pixels, _: np.random.Generator) -> Pixels:
    return np.ascontiguousarray(image[:, ::-1])


def after(*changes: Change) -> Change:
    def change(image: Pixels, random: np.random.Generator) -> Pixels:
        for each in changes:
            image = each(image, random)
        return image

    return change


CHANGES: dict[str, Change] = {
    "unchanged": lambda image, _: image,
    "resized to 50 %": resized(0.5),
    "resized to 75 %": resized(0.75),
    "resized to 150 %": resized(1.5),
    "JPEG quality 90": compressed(90),
    "JPEG quality 60": compressed(60),
    "JPEG quality 30": compressed(30),
    "cropped by 2 %": cropped(0.02),
    "cropped by 4 %": cropped(0.04),
    "cropped by 6 %": cropped(0.06),
    "cropped by 8 %": cropped(0.08),
    "brightness 70 %": brighter(0.7),
    "brightness 130 %": brighter(1.3),
    "contrast 70 %": contrasted(0.7),
    "gray": gray,
    "75 %, cropped by 4 %, JPEG 60": after(cropped(0.04), resized(0.75), compressed(60)),
    "flipped": flipped,
    "flipped, cropped by 4 %, JPEG 60": after(flipped, cropped(0.04), compressed(60)),
}


def planted(name: str, arguments: Arguments) -> dict[str, Any]:
    """Recall by kind of change, and recall and wrong pairs by threshold."""
    random = np.random.default_rng(arguments.seed)
    test, train = load_dataset(name, "test"), load_dataset(name, "train")
    chosen = np.sort(random.permutation(len(test))[: arguments.images])
    originals = [test.image(int(i)) for i in chosen]
    looks = dedup.mirrored_views(thumbnails(originals))
    recall: dict[str, dict[str, Any]] = {}
    least: dict[str, np.ndarray] = {}
    between = np.zeros((2, len(EDGES)), int)  # pairs of other originals: of one class, of two
    compared = 0
    for kind, change in CHANGES.items():
        copies = thumbnails([change(image, random) for image in originals])
        distance = np.full(len(chosen), np.inf)
        turned = np.zeros(len(chosen), bool)
        for pair in dedup.compare(copies, looks, dedup.MAX_THRESHOLD):
            if pair.train == pair.test:
                if pair.distance < distance[pair.test]:
                    distance[pair.test], turned[pair.test] = pair.distance, pair.flipped
            else:
                other = test.labels[chosen[pair.train]] != test.labels[chosen[pair.test]]
                between[int(other)] += pair.distance <= np.array(EDGES)
        compared += len(chosen) * (len(chosen) - 1)
        least[kind] = distance
        detected = distance <= dedup.THRESHOLD
        recall[kind] = {
            "found": float(detected.mean()),
            "proposed": float((distance <= dedup.MAX_THRESHOLD).mean()),
            "flip_right": float((turned == kind.startswith("flipped"))[detected].mean()) if detected.any() else None,
            "median_distance": float(np.median(distance)),
        }
    # Images that nobody planted, from the training split: of another class they are wrong.
    usable = np.arange(len(train)) if len(train) <= 20_000 else np.sort(random.permutation(len(train))[:20_000])
    others = thumbnails([train.image(int(i)) for i in usable])
    for pair in dedup.compare(others, looks, dedup.MAX_THRESHOLD):
        other = train.labels[usable[pair.train]] != test.labels[chosen[pair.test]]
        between[int(other)] += pair.distance <= np.array(EDGES)
    compared += len(usable) * len(chosen)
    every = np.concatenate(list(least.values()))
    curve = []
    for edge, same, different in zip(EDGES, *between.tolist(), strict=True):
        right = int((every <= edge).sum())
        curve.append(
            {
                "threshold": edge,
                "recall": right / len(every),
                "planted_found": right,
                "others_of_another_class": different,
                "others_of_the_same_class": same,
                "precision_if_those_of_another_class_are_wrong": right / max(right + different, 1),
                "precision_if_all_others_are_wrong": right / max(right + different + same, 1),
            }
        )
    return {"images": len(chosen), "pairs_of_others": compared, "by_change": recall, "by_threshold": curve}


def thumbnails(images: list[Pixels]) -> np.ndarray:
    return np.stack([dedup.thumbnail(image) for image in images])


def natural(name: str, listed: Path | None) -> dict[str, Any]:
    """Counts at several thresholds, of the whole training set against the test set; the pairs go to `listed`."""
    since, spent = time.perf_counter(), time.process_time()
    train, test = load_dataset(name, "trainval"), load_dataset(name, "test")
    duplicates = dedup.find_duplicates(train, test, limit=0.4)
    seconds, processor = time.perf_counter() - since, time.process_time() - spent
    rows = []
    for edge in (edge for edge in EDGES if edge <= 0.4):
        pairs = [pair for pair in duplicates.pairs if pair.distance <= edge]
        rows.append(
            {
                "threshold": edge,
                "pairs": len(pairs),
                "test_images": len({pair.test for pair in pairs}),
                "train_images": len({pair.train for pair in pairs}),
                "mirrored_pairs": sum(pair.flipped for pair in pairs),
                "pairs_of_different_classes": sum(conflict(pair, train, test) for pair in pairs),
            }
        )
    if listed is not None:
        write_list(listed, duplicates.pairs, train, test)
    sizes = {"train": len(train), "test": len(test)}
    return {**sizes, "seconds": seconds, "processor_seconds": processor, "by_threshold": rows}


def write_list(path: Path, pairs: Sequence[dedup.Pair], train: Dataset, test: Dataset) -> None:
    """The pairs within the threshold, nearest first. An image is known, in whatever order one has the set, by SHA-256
    of its RGB bytes (their first 16 digits)."""

    def known(dataset: Dataset, index: int) -> str:
        return hashlib.sha256(np.ascontiguousarray(dataset.image(index)).tobytes()).hexdigest()[:16]

    lines = ["distance,mirrored,test_label,train_label,test_sha256,train_sha256"]
    for pair in sorted(pairs, key=lambda pair: (pair.distance, pair.test, pair.train)):
        if pair.distance <= dedup.THRESHOLD:
            labels = f"{test.classes[test.labels[pair.test]]},{train.classes[train.labels[pair.train]]}"
            names = f"{known(test, pair.test)},{known(train, pair.train)}"
            lines.append(f"{pair.distance:.3f},{int(pair.flipped)},{labels},{names}")
    path.write_text("\n".join(lines) + "\n")


def conflict(pair: dedup.Pair, train: Dataset, test: Dataset) -> bool:
    return bool(train.labels[pair.train] != test.labels[pair.test])


def speed(name: str, arguments: Arguments) -> dict[str, Any]:
    """Processor seconds and memory of the search alone."""
    random = np.random.default_rng(arguments.seed)
    source = load_dataset(name, "train")
    stock = thumbnails([source.image(i) for i in range(len(source))])
    test = load_dataset(name, "test")
    tested = thumbnails([test.image(i % len(test)) for i in range(arguments.test)])
    del source, test
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the most memory is counted from here on
    before = memory("VmRSS")
    looks = dedup.mirrored_views(tested)
    wall = processor = 0.0
    pairs = 0
    for start in range(0, arguments.train, dedup.MAX_THUMBNAILS):
        count = min(dedup.MAX_THUMBNAILS, arguments.train - start)
        one, other = random.integers(len(stock), size=(2, count))
        share = random.uniform(0.5, 0.8, (count, 1, 1)).astype(np.float32)
        shard = (share * stock[one] + (1 - share) * stock[other]).astype(np.uint8)
        since, spent = time.perf_counter(), time.process_time()
        pairs += sum(1 for _ in dedup.compare(shard, looks))
        wall, processor = wall + time.perf_counter() - since, processor + time.process_time() - spent
        print(f"  {start + count:,} of {arguments.train:,}: {processor:.0f} s", file=sys.stderr, flush=True)
    return {
        "train": arguments.train,
        "test": arguments.test,
        "shard": dedup.MAX_THUMBNAILS,
        "processor_seconds": processor,
        "wall_seconds": wall,
        "pairs_found": pairs,
        "mib_before": before,
        "mib_most": memory("VmHWM"),
    }


def memory(kind: str) -> float:
    """What this process has in memory (VmRSS), or had at most (VmHWM), in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) / 1024


def settings() -> dict[str, Any]:
    """The numbers on which `dedup` stands."""
    return {
        name: getattr(dedup, name)
        for name in ("SIDE", "RADIUS", "CENTER", "NUM_FREQUENCIES", "MIN_CORRELATION", "THRESHOLD")
    }


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    torch.set_num_threads(1)
    if not arguments.align:
        dedup.PYRAMID = (dedup.Level(dedup.SIDE, 0, np.inf),)
    record: dict[str, Any] = {}
    if arguments.out is not None and arguments.out.exists():
        record = json.loads(arguments.out.read_text())
    for part in arguments.parts:
        if part == "planted":
            results = {name: planted(name, arguments) for name in (arguments.flowers, arguments.cifar)}
        elif part == "natural":
            results = {arguments.cifar: natural(arguments.cifar, arguments.listed)}
        else:
            results = {arguments.cifar: speed(arguments.cifar, arguments)}
        by_hand = {name: value for name, value in record.get(part, {}).items() if name == "looked_at"}
        record[part] = {
            "environment": describe_run(arguments, np, torch, threads=torch.get_num_threads(), settings=settings()),
            **results,
            **by_hand,
        }
        print(json.dumps(record[part], indent=1))
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Images/s per core from JPEG to training crop: ours against timm's default and torchvision's; the ratio counts.

    python benchmarks/loader.py shards:data/flowers102 --out benchmarks/results/loader.json

Each contender turns the same JPEGs, held in memory, into normalized float32 crops, in one thread, in turn:

- `vitlab`: as vitlab trains by default; the crop's rows are decoded, and looked up as in Google's code.
- `vitlab-fast`: with `--data.fast-decode`; resized with antialiasing, from JPEGs decoded no larger than needed.
- `timm`: `timm.data.create_transform(size, is_training=True)` on the whole image, decoded by Pillow.
- `timm-plain`: the same without its color jitter, which vitlab has none of.
- `torchvision`: `decode_jpeg`, then `v2.RandomResizedCrop` with antialiasing, mirror, normalization.

Crops are of at least 8% of the area everywhere, timm's bound. The allocator's thresholds that vitlab sets for a run
hold for all. What is lost is given in decibels (PSNR, of values from 0 to 255), at the same boxes: of both to the same
resize of the image that Pillow decodes whole; and of `vitlab-fast` to the exact look-up, from which it differs by
averaging where a crop shrinks and by rounding elsewhere.
"""

import dataclasses
import io
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import simplejpeg
import timm
import torch
import torchvision
import tyro
from PIL import Image
from run_record import describe_run
from timm.data.transforms_factory import create_transform
from torch import Tensor
from torchvision.transforms import v2

from vitlab.data.decode import Jpeg, plain_jpeg
from vitlab.data.loader import CHUNK
from vitlab.data.registry import load_dataset
from vitlab.data.transforms import TrainTransform, to_range
from vitlab.train.precision import keep_freed_memory

MIN_AREA = 0.08
Contender = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Arguments:
    data: tyro.conf.Positional[str]
    """Photographs: `folder:PATH` or `shards:PATH`."""
    split: str = "train"
    images: int = 512
    """How many of them, the first ones, are taken; those that are no plain JPEGs are left out."""
    sizes: tuple[int, ...] = (224, 32)
    """Crops in pixels. Small ones show what decoding at a smaller size gains, as larger photographs would."""
    rounds: int = 9
    """Timed rounds of each contender, in turn."""
    out: Path | None = None
    """JSON file for the figures."""


def contenders(jpegs: list[Jpeg], size: int) -> dict[str, Contender]:
    def ours(fast: bool) -> Contender:
        transform = TrainTransform(size, min_area=MIN_AREA, fast_decode=fast)

        def work() -> None:
            for i in range(0, len(jpegs), CHUNK):
                images = [plain_jpeg(jpeg.data) for jpeg in jpegs[i : i + CHUNK]]
                to_range(transform.augment([p for p in images if p], 0, 0, np.arange(i, i + len(images))))

        return work

    def timms(**options: Any) -> Contender:
        transform: Any = create_transform(size, is_training=True, **options)
        return lambda: [transform(Image.open(io.BytesIO(jpeg.data)).convert("RGB")) for jpeg in jpegs]

    crop = v2.Compose(
        [
            v2.RandomResizedCrop(size, scale=(MIN_AREA, 1.0), antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5] * 3, [0.5] * 3),
        ]
    )

    def torchvisions() -> None:
        for jpeg in jpegs:
            data = torch.frombuffer(bytearray(jpeg.data), dtype=torch.uint8)
            crop(torchvision.io.decode_jpeg(data, torchvision.io.ImageReadMode.RGB))

    return {
        "vitlab": ours(fast=False),
        "vitlab-fast": ours(fast=True),
        "timm": timms(),
        "timm-plain": timms(color_jitter=None),
        "torchvision": torchvisions,
    }


def measure(jpegs: list[Jpeg], size: int, rounds: int) -> dict[str, Any]:
    works = contenders(jpegs, size)
    rates: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name, work in works.items():
            since = time.perf_counter()
            work()
            if turn:  # the first round warms up
                rates[name].append(len(jpegs) / (time.perf_counter() - since))
    ratios = {}
    for name in rates:
        paired = [ours / theirs for ours, theirs in zip(rates[name], rates["timm"], strict=True)]
        ratios[name] = {"median": statistics.median(paired), "least": min(paired), "most": max(paired)}
    medians = {name: {"median": statistics.median(values), "all": values} for name, values in rates.items()}
    return {"images_per_s": medians, "ratio_to_timm": ratios}


def decibels(ours: Tensor, theirs: Tensor) -> list[float]:
    """Of each crop that is not the same to the bit."""
    errors = ((ours.double() - theirs.double()) ** 2).mean((1, 2, 3)).tolist()
    return [10 * math.log10(255**2 / error) for error in errors if error]


def losses(jpegs: list[Jpeg], size: int) -> dict[str, Any]:
    """What the fast ways lose, over the crops that are not the same to the bit; `different` counts them."""
    losses: dict[str, list[float]] = {"vitlab": [], "vitlab-fast": [], "vitlab-fast to the look-up": []}
    for i in range(0, len(jpegs), CHUNK):
        some = jpegs[i : i + CHUNK]
        whole = [np.array(Image.open(io.BytesIO(jpeg.data)).convert("RGB")) for jpeg in some]
        rows = np.arange(i, i + len(some))
        exact, fast = (TrainTransform(size, min_area=MIN_AREA, fast_decode=fast) for fast in (False, True))
        sought = exact.augment(whole, 0, 0, rows)
        losses["vitlab"] += decibels(exact.augment(some, 0, 0, rows), sought)
        quick = fast.augment(some, 0, 0, rows)
        losses["vitlab-fast"] += decibels(quick, fast.augment(whole, 0, 0, rows))
        losses["vitlab-fast to the look-up"] += decibels(quick, sought)
    return {
        name: {"different": len(v), "mean": statistics.mean(v) if v else None, "least": min(v, default=None)}
        for name, v in losses.items()
    }


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    torch.set_num_threads(1)
    keep_freed_memory()
    entries = list(itertools.islice(load_dataset(arguments.data, arguments.split).entries, arguments.images))
    jpegs = [jpeg for jpeg in (plain_jpeg(entry.data(), path=entry.path) for entry in entries) if jpeg]
    if not jpegs:
        raise SystemExit(f"{arguments.data} has no JPEGs in its split {arguments.split!r}.")
    images = {
        "count": len(jpegs),
        "left_out": len(entries) - len(jpegs),
        "mean_kilobytes": statistics.mean(len(jpeg.data) for jpeg in jpegs) / 1000,
        "mean_height": statistics.mean(jpeg.height for jpeg in jpegs),
        "mean_width": statistics.mean(jpeg.width for jpeg in jpegs),
    }
    print(", ".join(f"{name} {value:.0f}" for name, value in images.items()))
    results = []
    for size in arguments.sizes:
        result = {"size": size, **measure(jpegs, size, arguments.rounds), "psnr": losses(jpegs, size)}
        results.append(result)
        print(f"crops of {size} pixels: images/s and core, and times timm's default")
        for name, ratio in result["ratio_to_timm"].items():
            rate = result["images_per_s"][name]["median"]
            print(f"  {name:<12} {rate:6.0f}  {ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['most']:.2f})")
        for name, loss in result["psnr"].items():
            text = f"{loss['mean']:.1f} dB on average, {loss['least']:.1f} at least" if loss["different"] else ""
            print(f"  {name}: {loss['different']} crops of {len(jpegs)} differ at all{': ' + text if text else ''}")
    if arguments.out is not None:
        versions = {"simplejpeg": simplejpeg.__version__}
        record = {
            "environment": describe_run(arguments, torch, torchvision, timm, PIL, **versions),
            "images": images,
            "results": results,
        }
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Images/s of `predict` and `features` on a folder of photos, relative to the model alone.

    python benchmarks/photos.py S14 shards:data/flowers102 --out benchmarks/results/photos.json

`model` computes images that are read and prepared; `reading` reads and prepares them, with one thread; `in turn`
reads a batch by one thread, then computes it. All are timed one after the other, round after round.
"""

import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import tyro
from PIL import Image
from run_record import describe_run
from tyro.conf import Positional

from vitlab.cost import measure
from vitlab.data.registry import load_dataset
from vitlab.data.transforms import EvalTransform
from vitlab.evaluation.features import features
from vitlab.evaluation.load import load_for_evaluation
from vitlab.evaluation.options import LoaderOptions, ModelOptions
from vitlab.evaluation.predict import BATCH_SIZE, predict


@dataclasses.dataclass(frozen=True)
class Arguments:
    checkpoint: Positional[str]
    """With a head, for `predict`; a checkpoint without one is measured by `features` alone."""
    data: Positional[str]
    """Photos to resize: `folder:PATH` or `shards:PATH`."""
    photo: int = 500
    """Longer side of the photos in pixels."""
    image_size: int | None = None
    """Image side of the model, by default the checkpoint's."""
    images: int = 192
    rounds: int = 5
    """Timed rounds, after one that is not counted."""
    out: Path | None = None
    """JSON file for the figures."""


def write_photos(arguments: Arguments, folder: Path) -> None:
    """JPEGs of the given size, quality 90."""
    dataset = load_dataset(arguments.data, "train")
    for number in range(min(arguments.images, len(dataset))):
        photo = Image.fromarray(dataset.image(number))
        scale = arguments.photo / max(photo.size)
        size = (round(photo.width * scale), round(photo.height * scale))
        photo.resize(size, Image.Resampling.BICUBIC).save(folder / f"{number:04}.jpg", quality=90)


def contenders(arguments: Arguments, folder: Path) -> dict[str, Callable[[], Any]]:
    options = ModelOptions(image_size=arguments.image_size)
    loaded = load_for_evaluation(arguments.checkpoint, options)
    model, preprocessing = loaded.model.eval(), loaded.preprocessing
    transform = EvalTransform(model.config.image_hw, preprocessing)
    dataset = load_dataset(f"folder:{folder.parent}", "all", levels=preprocessing.range)
    groups = [range(i, min(i + BATCH_SIZE, len(dataset))) for i in range(0, len(dataset), BATCH_SIZE)]

    def read() -> Iterator[torch.Tensor]:
        return (transform.apply([dataset.image(i) for i in group]) for group in groups)

    batches = list(read())

    @torch.inference_mode()
    def compute(batches: Iterable[torch.Tensor]) -> None:
        for batch in batches:
            model.forward_head(model.forward_features(batch), pre_logits=True)

    loader = LoaderOptions(batch_size=BATCH_SIZE)
    steps: dict[str, Callable[[], Any]] = {"model": lambda: compute(batches), "reading": lambda: list(read())}
    steps["in turn"] = lambda: compute(read())
    steps["features"] = lambda: features(model, dataset, loader, preprocessing=preprocessing)
    if model.head is not None:
        steps["predict"] = lambda: list(predict(arguments.checkpoint, [str(folder)], options))
    return steps


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "photos" / "one class"
        folder.mkdir(parents=True)
        write_photos(arguments, folder)
        count = len(list(folder.iterdir()))
        steps = contenders(arguments, folder)
        rates: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(arguments.rounds + 1):
            for name, step in steps.items():
                since = time.perf_counter()
                step()
                if turn:
                    rates[name].append(count / (time.perf_counter() - since))
    speeds = {name: measure.spread(values) for name, values in rates.items()}
    ratios = {name: measure.ratio(rates[name], rates["model"]) for name in rates if name not in ("model", "reading")}
    for name, speed in speeds.items():
        share = f", {ratios[name]['median']:.2f} of the model's" if name in ratios else ""
        print(f"{name}: {speed['median']:.4g} images/s{share}")
    if arguments.out is not None:
        record = {"environment": describe_run(arguments, torch), "images_per_s": speeds, "ratio": ratios}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

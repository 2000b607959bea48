"""The data sets of `finetune_peers.py` as folders, and the few training images that a seed draws from them."""

import gzip
import json
import os
import random
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
"""Where the Debian package dataset-fashion-mnist puts it."""
TEST_IMAGES = 1000

Writer = Callable[[Path], object]
"""Writes one image to a path without its suffix."""


def shards(folder: Path, split: str) -> Iterator[tuple[int, Writer]]:
    """(label, writer) of each image of WebDataset tars, whose members are NUMBER.cls and NUMBER.jpg or NUMBER.png."""
    tars = sorted(folder.glob(f"{split}-*.tar"))
    if not tars:
        raise SystemExit(f"{folder} has no {split}-*.tar")
    for tar in tars:
        with tarfile.open(tar) as opened:
            contents = {member.name: opened.extractfile(member) for member in opened if member.isfile()}
            stored = {name: file.read() for name, file in contents.items() if file is not None}
        for name, content in stored.items():
            stem, _, suffix = name.rpartition(".")
            if suffix != "cls":
                yield (
                    int(stored[f"{stem}.cls"]),
                    lambda path, c=content, s=suffix: path.with_suffix(f".{s}").write_bytes(c),
                )


def arrays(images: np.ndarray, labels: np.ndarray) -> Iterator[tuple[int, Writer]]:
    """The same of gray images in memory."""
    for image, label in zip(images, labels, strict=True):
        yield int(label), lambda path, i=image: Image.fromarray(i).save(path.with_suffix(".png"))


def fashion_mnist(split: str) -> Iterator[tuple[int, Writer]]:
    stem = FASHION_MNIST / {"train": "train", "test": "t10k"}[split]
    if not FASHION_MNIST.exists():
        raise SystemExit(f"{FASHION_MNIST} is missing: apt-get install dataset-fashion-mnist")
    with gzip.open(f"{stem}-images-idx3-ubyte.gz") as images, gzip.open(f"{stem}-labels-idx1-ubyte.gz") as labels:
        pixels = np.frombuffer(images.read()[16:], np.uint8).reshape(-1, 28, 28)
        return arrays(pixels, np.frombuffer(labels.read()[8:], np.uint8))


def digits(split: str) -> Iterator[tuple[int, Writer]]:
    """All as training images: `draw` tests on those that are not drawn."""
    from sklearn.datasets import load_digits

    stored: Any = load_digits()
    images = (stored["images"] * (255 / 16)).round().astype(np.uint8)
    return arrays(images, stored["target"]) if split == "train" else iter(())


def prepare(images: Path, folder: Path) -> None:
    """Writes NAME/train/CLASS/ and NAME/test/CLASS/ below `folder`; `images` has the tars of cifar10 and flowers102."""
    readers: dict[str, Callable[[str], Iterator[tuple[int, Writer]]]] = {
        "flowers102": lambda split: shards(images / "flowers102", split),
        "cifar10": lambda split: shards(images / "cifar10", split),
        "fashion_mnist": fashion_mnist,
        "digits": digits,
    }
    for name, read in readers.items():
        if (folder / name).exists():
            continue
        aside = folder / f"{name}.unfinished"
        shutil.rmtree(aside, ignore_errors=True)
        for split in ("train", "test"):
            for number, (label, write) in enumerate(read(split)):
                target = aside / split / f"{label:03}"
                target.mkdir(parents=True, exist_ok=True)
                write(target / f"{number:06}")
        aside.rename(folder / name)
        count = {split: len(list((folder / name / split).glob("*/*"))) for split in ("train", "test")}
        print(f"{folder / name}: {json.dumps(count)} images", flush=True)


def draw(folder: Path, name: str, shots: int, seed: int, test_images: int) -> Path:
    """The folder with `shots` images a class, drawn by the seed, and `test_images`, the same of each class, for all
    seeds; where there is no test split, the rest is tested on. Files are linked, not copied.
    """
    target = folder / "draws" / f"{name}-{shots}-seed{seed}-test{test_images}"
    if target.exists():
        return target
    rng = random.Random(f"{name} {shots} {seed}")
    aside = target.with_suffix(".unfinished")
    shutil.rmtree(aside, ignore_errors=True)
    rest: dict[str, list[Path]] = {}
    for label in sorted((folder / name / "train").iterdir()):
        files = sorted(label.iterdir())
        rng.shuffle(files)
        if len(files) < shots:
            raise SystemExit(f"{name} has {len(files)} training images of class {label.name}, not {shots}")
        link(files[:shots], aside / "train" / label.name)
        rest[label.name] = files[shots:]
    if (folder / name / "test").exists():
        rest = {label.name: sorted(label.iterdir()) for label in (folder / name / "test").iterdir()}
        rng = random.Random(name)
        for files in rest.values():
            rng.shuffle(files)
    turns = sorted((turn, rng.random(), label) for label, files in rest.items() for turn in range(len(files)))
    for turn, _, label in turns[:test_images]:
        link([rest[label][turn]], aside / "test" / label)
    aside.rename(target)
    return target


def link(files: list[Path], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        os.link(file, folder / file.name)

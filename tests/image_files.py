"""Small image files and tables of them; pixels, labels, paths and order of a data set."""

import io
import os
from pathlib import Path

import numpy as np
from PIL import Image

from vitlab.data.dataset import Dataset
from vitlab.data.loader import epoch_order


def put(path: Path, value: int = 0, size: tuple[int, int] = (8, 8)) -> None:
    """Writes an image of one gray value; size is (width, height)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, value, value)).save(path)


def encode(image: Image.Image | np.ndarray, kind: str, **options: object) -> bytes:
    """The bytes of an image file."""
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)  # pyright: ignore[reportArgumentType]
    return buffer.getvalue()


def link_all(folder: Path, image: Path, names: list[str]) -> None:
    """Makes `image` appear in `folder` under many names."""
    for parent in {os.path.dirname(name) for name in names}:  # noqa: PTH120
        (folder / parent).mkdir(parents=True, exist_ok=True)
    for name in names:
        os.link(image, folder / name)


def pixels_of(dataset: Dataset) -> np.ndarray:
    assert dataset.pixels is not None
    return dataset.pixels


def paths_of(dataset: Dataset) -> list[str]:
    return [dataset.path(i) for i in range(len(dataset))]


def example_at(dataset: Dataset, seed: int, g: int) -> tuple[int, int]:
    """(epoch, dataset index) of the g-th training example."""
    epoch, position = divmod(g, len(dataset))
    return epoch, int(epoch_order(dataset, seed, epoch)[position])


def write_images(path: Path, dataset: Dataset) -> None:
    """Writes the images of a data set into class folders."""
    for i in range(len(dataset)):
        file = path / dataset.classes[dataset.labels[i]] / f"{i:04d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(dataset.image(i)).save(file)


def table(folder: Path, text: str, *, images: bool = True) -> str:
    """Writes a table, and the images that its rows name first, gray as many as the row."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "labels.csv").write_text(text, encoding="utf-8", newline="")
    for number, line in enumerate(text.splitlines()[1:], 1) if images else ():
        put(folder / line.split(",")[0], number)
    return f"csv:{folder / 'labels.csv'}"


def label_lists(dataset: Dataset) -> list[list[str]]:
    labels = dataset.all_labels
    return [[dataset.classes[label] for label in labels.of_image(i)] for i in range(len(dataset))]


def grays(dataset: Dataset) -> list[int]:
    return [int(dataset.image(i).max()) for i in range(len(dataset))]

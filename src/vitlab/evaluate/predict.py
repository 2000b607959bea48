"""Answers for images that have no label: files, folders, or the standard input."""

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitlab.data.decode import IMAGE_SUFFIXES, ImageError, decode_image
from vitlab.data.folder import images_below
from vitlab.data.transforms import EvalTransform
from vitlab.errors import UserError, quoted
from vitlab.evaluate.accuracy import answers, choose_device
from vitlab.evaluate.precision import load_for_judging
from vitlab.models.config import Interpolation
from vitlab.weights import class_names


@dataclass(frozen=True)
class Answer:
    """What the model says of one image, most probable first; or why it could not be read."""

    path: str
    top: tuple[tuple[str, float], ...] = ()
    """(class name, softmax probability)."""
    error: str | None = None

    def as_line(self) -> str:
        said = ", ".join(f"{quoted(name)} {share:.1%}" for name, share in self.top)
        return f"{quoted(self.path)}: {said if self.error is None else 'cannot be read: ' + self.error}"


def predict(
    checkpoint: str | Path,
    sources: Iterable[str],
    *,
    top: int = 5,
    image_size: int | None = None,
    interpolation: Interpolation | None = None,
    batch_size: int = 32,
    mirror: bool = False,
    precision: str = "float32",
    device: str = "auto",
    say: Callable[[str], None] | None = None,
) -> Iterator[Answer]:
    """The `top` most probable classes of every image in `sources`: files, folders (searched through) or `-`.

    `-` reads the standard input: one image, or paths, one a line. `image_size` and `interpolation` are as in
    `load_checkpoint`, `mirror` as in `answers`, `precision` as in `load_for_judging`; `say` hears how images are
    prepared. A image that cannot be read gives an answer with its error; a path that is not there, or
    nothing to answer for, is a ValueError.
    """
    if top < 1:
        raise UserError(f"top is {top}; ask for at least 1 answer.")
    place = choose_device(device)
    found = load_for_judging(checkpoint, place, precision, image_size=image_size, interpolation=interpolation)
    model = found.model
    if model.head is None:
        raise UserError(f"{checkpoint} has no head, so it has no answers; fine-tune it first (`vitlab finetune`).")
    names = class_names(found.card, model.config.num_classes)
    transform = EvalTransform(model.config.image_hw, found.preprocessing)
    if say:
        say(f"images: {found.preprocessing.describe()}")
    ask = functools.partial(answers, model, mirror=mirror)
    pending: list[tuple[str, Any]] = []
    for path, data in list(find_images(sources)):  # a missing one is told before any work
        try:
            pending.append((path, decode_image(data, path=path)))
        except ImageError as error:
            yield Answer(path, error=error.reason)
            continue
        if len(pending) == batch_size:
            yield from _answers(ask, transform, pending, names, top, place)
            pending = []
    if pending:
        yield from _answers(ask, transform, pending, names, top, place)


@torch.inference_mode()
def _answers(
    ask: Callable[[Tensor], Tensor],
    transform: EvalTransform,
    inputs: list[tuple[str, Any]],
    names: tuple[str, ...],
    top: int,
    device: torch.device,
) -> Iterator[Answer]:
    images = torch.cat([transform.apply([pixels]) for _, pixels in inputs]).to(device)
    probabilities = ask(images).softmax(dim=1)
    values, indices = probabilities.topk(min(top, len(names)), dim=1)
    for (path, _), row, numbers in zip(inputs, values.tolist(), indices.tolist(), strict=True):
        yield Answer(path, tuple((names[number], value) for number, value in zip(numbers, row, strict=True)))


def find_images(sources: Iterable[str]) -> Iterator[tuple[str, Path | bytes]]:
    """Name and place, or bytes, of every image in `sources`, as `predict` takes them; nothing is decoded yet."""
    sources = list(sources)
    if not sources:  # nor on the standard input
        raise UserError("no image was named; give images, folders of them, or - to name them on stdin.")
    for source in sources:
        if source == "-":
            yield from _standard_input()
            continue
        path = Path(source)
        if path.is_dir():
            found = sorted(map(Path, images_below(path, Counter())))
            if not found:
                raise UserError(f"the folder {quoted(source)} holds no image ({', '.join(sorted(IMAGE_SUFFIXES))}).")
            yield from ((str(each), each) for each in found)
        elif path.exists():  # what is not a regular file is told by its reader
            yield str(path), path
        else:
            raise UserError(
                f"there is no file or folder {quoted(source)}; give images, folders of them, or - for stdin."
            )


def _standard_input() -> Iterator[tuple[str, Path | bytes]]:
    data = sys.stdin.buffer.read()
    try:
        lines = data.decode().splitlines()
    except UnicodeDecodeError:
        yield "<stdin>", data
        return
    yield from find_images(line.strip() for line in lines if line.strip())

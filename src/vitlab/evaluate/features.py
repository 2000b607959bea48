"""What a frozen model says of images before its head: computed once, kept on disk, and found again."""

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from vitlab.data import downloads as fetch
from vitlab.data.cache import digest_images, read_arrays
from vitlab.data.dataset import Dataset
from vitlab.data.loader import eval_batches
from vitlab.data.transforms import EvalTransform
from vitlab.errors import UserError
from vitlab.io import write_arrays
from vitlab.models.vit import Model, evaluation_mode
from vitlab.preprocessing import Preprocessing
from vitlab.settings import to_dict
from vitlab.train.distributed import SINGLE, World
from vitlab.train.progress import Progress, duration

CHUNK = 4096  # images to a file: what an interruption loses at most
PLAIN_SECONDS = 30.0  # between two lines of progress where there is no terminal


@dataclass(frozen=True)
class Features:
    """The representations of a data set's readable images, in its order."""

    x: Float[np.ndarray, "n D"]
    labels: Int[np.ndarray, " n"]
    indices: Int[np.ndarray, " n"]
    """Places in the data set."""
    skipped: int
    """Images that could not be read."""


def features(
    model: Model,
    dataset: Dataset,
    *,
    preprocessing: Preprocessing | None = None,
    batch_size: int = 64,
    workers: int = 0,
    on_error: str = "raise",
    device: str | torch.device = "cpu",
    cache: Path | None = None,
    label: str | None = None,
    world: World = SINGLE,
) -> Features:
    """The pre-logits representation of every image: what the head would have seen (Sec. 4.1), in float32.

    Images are squashed to the model's size, or prepared as `preprocessing` says. With a folder `cache`, what was
    computed for the same weights, images and transform is read from there and the rest added, so that an interrupted
    call goes on where it stopped; labels are no part of it. A image that could not be read is tried again. `label`
    shows the progress under that name. With several processes each computes its share, and every one returns the whole.
    Raises ValueError for representations that are not finite, and where no image can be read.
    """
    if not len(dataset):
        raise UserError(f"{dataset.name} has no images in its split {dataset.split!r}.")
    check_options(batch_size)
    transform = EvalTransform(model.config.image_hw, preprocessing or Preprocessing())
    x = np.zeros((len(dataset), model.config.num_features), np.float32)
    known = np.zeros(len(dataset), bool)
    size = -(-CHUNK // batch_size) * batch_size  # whole batches: what a image is computed with is always the same
    chunks = [slice(i, min(i + size, len(dataset))) for i in range(0, len(dataset), size)]
    paths: list[Path | None] = [None] * len(chunks)
    if cache is not None:
        start = _digest_model(model, transform)
        stats: dict[str, bytes] = {}
        for number, chunk in enumerate(chunks):
            digest = digest_images(start, dataset, range(chunk.start, chunk.stop), stats)
            paths[number] = path = cache / f"{digest}.npz"
            if found := _read(path, chunk.stop - chunk.start, x.shape[1]):
                known[chunk], x[chunk] = found
    world.broadcast_object(lambda: None)  # nobody writes before all have read
    before = known.copy()
    theirs = np.zeros(len(dataset), bool)  # left to the other processes
    for number, chunk in enumerate(chunks):
        theirs[chunk] = number % world.world_size != world.rank
    known |= theirs
    done = 0
    label = label if world.is_rank_0 else None
    for reached in _compute(model, dataset, transform, x, known, size, batch_size, workers, on_error, device, label):
        world.check_peers()
        while done < len(chunks) and chunks[done].stop <= reached:
            chunk, path = chunks[done], paths[done]
            if path is not None and not theirs[chunk].any() and known[chunk].sum() > before[chunk].sum():
                write_arrays(path, {"known": known[chunk], "x": x[chunk][known[chunk]]})
            done += 1
    known &= before | ~theirs
    if world.world_size > 1:
        own = np.flatnonzero(known & ~before)
        new = world.all_gather({"rows": own, "x": x[own]})
        known[new["rows"]], x[new["rows"]] = True, new["x"]
    if not known.any():
        raise UserError(f"none of the {len(dataset)} images of {dataset.name} ({dataset.split}) could be read.")
    indices = np.flatnonzero(known)
    whole = len(indices) == len(dataset)
    return Features(x if whole else x[indices], dataset.labels[indices], indices, len(dataset) - len(indices))


def _compute(
    model: Model,
    dataset: Dataset,
    transform: EvalTransform,
    x: np.ndarray,
    known: np.ndarray,
    size: int,
    batch_size: int,
    workers: int,
    on_error: str,
    device: str | torch.device,
    label: str | None,
) -> Iterator[int]:
    """Fills the rows of `x` that are not `known`; says after each batch up to where they are filled.

    They stay on the device until the `size` rows of a chunk are complete: no batch waits for the one before.
    """
    missing = np.flatnonzero(~known)
    if not len(missing):
        return
    batches = eval_batches(
        dataset if len(missing) == len(dataset) else dataset.take(missing), transform, batch_size=batch_size,
        workers=workers, on_error=on_error, device=device,
    )  # fmt: skip
    seen = reached = 0
    held: list[tuple[Tensor, Tensor]] = []  # places among the missing, and what was found
    counter = ImageCounter(label, len(missing)) if label else None
    with evaluation_mode(model), counter or contextlib.nullcontext():
        for batch in batches:
            seen += len(batch.labels) + batch.skipped
            if len(batch.labels):
                with torch.inference_mode():
                    found = model.forward_head(model.forward_features(batch.images), pre_logits=True)
                held.append((batch.indices, found.float().clone()))  # of a class token's row, not all the tokens
            tried = int(missing[seen - 1]) + 1 if seen < len(missing) else len(dataset)
            if held and (tried == len(dataset) or tried // size > reached // size):
                places, found = map(torch.cat, zip(*held, strict=True))
                rows = missing[places.cpu().numpy()]
                x[rows] = found.cpu().numpy()
                held.clear()
                if not (good := np.isfinite(x[rows]).all(axis=1)).all():
                    raise UserError(
                        f"the model's representation of {dataset.path(int(rows[~good][0]))} is not finite; its weights "
                        f"are broken, or its training ran away. Take another checkpoint."
                    )
                known[rows] = True
            if not held:
                reached = tried
            if counter:
                counter.count(seen)
            yield reached


def check_options(batch_size: int, out: Path | None = None) -> None:
    """Raises UserError for what is wrong whatever the data is; asked before it is read. `out` is a file to write."""
    if batch_size < 1:
        raise UserError(f"batch_size={batch_size}: give a positive number of images.")
    if out is not None and out.is_dir():
        raise UserError(f"{out} is a folder; give the name of a file for the result.")


def check_features(x: Float[np.ndarray, "n D"], labels: Int[np.ndarray, " m"], num_classes: int) -> None:
    """Raises ValueError for representations and labels that nothing can be fitted to, or tested on."""
    if not len(x) or len(x) != len(labels):
        raise UserError(
            f"{len(x)} representations and {len(labels)} labels: give one label for each, and at least one."
        )
    if labels.min() < 0 or labels.max() >= num_classes:
        raise UserError(f"the labels are {labels.min()} to {labels.max()}; {num_classes} classes go from 0 on.")
    if not (finite := np.isfinite(x).all(axis=1)).all():
        raise UserError(
            f"{(~finite).sum()} of {len(x)} representations are not finite; the model's weights are broken."
        )


def frozen_preprocessing(preprocessing: Preprocessing, image_hw: tuple[int, int]) -> Preprocessing:
    """How images are prepared for a frozen model: as the checkpoint says; Google's as in its few-shot evaluation.

    That is big_vision's `resize(256)|central_crop(224)`, both sides bilinear without antialiasing, in proportion.
    """
    if not preprocessing.is_google:
        return preprocessing.at(image_hw)
    resize = round(max(image_hw) * 256 / 224)
    return Preprocessing(image_hw, resize, keep_aspect=False, antialias=False, crop_offset="floor")


def cache_folder() -> Path:
    """Where commands keep features: `vitlab/features` in the user's cache folder. It can be removed at any time."""
    return fetch.cache_folder() / "features"


# -------------------------------------------------------------------------------------------------------- identity


def _digest_model(model: Model, transform: EvalTransform) -> str:
    """Of all that makes a representation out of a image: configuration, weights, transform."""
    settings = {"model": to_dict(model.config), "transform": to_dict(transform), "version": 1}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------------------ files


def _read(path: Path, count: int, width: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Which of a chunk's images are in the file, and their features in their places; None where it is damaged."""
    found = read_arrays(path, "known", "x")
    if found is None:
        return None
    known, rows = found
    if known.shape != (count,) or known.dtype != bool or rows.dtype != np.float32:
        return None
    if rows.shape != (known.sum(), width):
        return None
    x = np.zeros((count, width), np.float32)
    x[known] = rows
    return known, x


# --------------------------------------------------------------------------------------------------------- progress


class ImageCounter(Progress):
    """A line that counts images; work that is done in a moment shows none."""

    def __init__(self, label: str, total_steps: int) -> None:
        super().__init__(label, total_steps)
        self._since = self._shown = time.perf_counter()

    def count(self, done: int) -> None:
        now = time.perf_counter()
        if now - self._shown < (1.0 if self._on_terminal else PLAIN_SECONDS):
            return
        self._shown = now
        rate = done / (now - self._since)
        self.show({"step": done}, {"images_per_s": rate, "eta_s": (self.total_steps - done) / rate})

    def line(self, metrics: Mapping[str, float | int], speed: Mapping[str, float]) -> str:
        count = f"{self.label}: {int(metrics['step'])}/{self.total_steps} images"
        return f"{count} · {speed['images_per_s']:.0f} img/s · ETA {duration(speed['eta_s'])}"

"""How good a model is on a data set: every image counted exactly once."""

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from vitlab.data import imagenet
from vitlab.data.dataset import Dataset, Labels
from vitlab.data.loader import Batch, eval_batches
from vitlab.data.registry import check_source, load_dataset
from vitlab.data.transforms import EvalTransform
from vitlab.errors import UserError, quoted
from vitlab.evaluate.features import check_options
from vitlab.evaluate.precision import computes_in, load_for_judging, noted, recorded
from vitlab.models.config import Interpolation
from vitlab.models.vit import evaluation_mode
from vitlab.preprocessing import Preprocessing
from vitlab.train.distributed import SINGLE, World
from vitlab.train.objectives import class_targets
from vitlab.train.progress import counted

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """Answers for a whole data set, in its order; a image that could not be read is not among them."""

    classes: tuple[str, ...]
    indices: Int[np.ndarray, " n"]
    labels: Int[np.ndarray, " n"]
    """Of several labels, the first."""
    predictions: Int[np.ndarray, " n"]
    confidences: Float[np.ndarray, " n"]
    """Softmax probability of the prediction."""
    losses: Float[np.ndarray, " n"]
    """Softmax cross-entropy; of k labels each counts 1/k."""
    right: Bool[np.ndarray, " n"]
    """Whether the prediction is the label, or any of the labels."""
    in_top5: Bool[np.ndarray, " n"]
    """Whether the label, or any of them, is among the five highest logits."""
    skipped: int
    label_sets: Labels | None = None
    """All labels of each image, where there are several."""
    left_out: int = 0
    """Images of the source that have no label among the classes."""
    full_size: int | None = None
    """Images of the whole split, where some of them were not there."""
    computed_in: str = "float32"
    """Type of the model's weights."""
    mirror: bool = False
    """Each image was judged together with its mirror image."""

    @property
    def accuracy(self) -> float:
        """Top-1: share of images whose highest logit is the label's, or any label's."""
        return float(self.right.mean())

    @property
    def confusion(self) -> Int[np.ndarray, "K K"]:
        """Images of class i (row) that were called j (column). ValueError where images have several labels."""
        if self.label_sets is not None:
            raise UserError("images with several labels have no confusion matrix: which label was confused is unknown")
        counts = np.zeros((len(self.classes), len(self.classes)), dtype=np.int64)
        np.add.at(counts, (self.labels, self.predictions), 1)
        return counts

    def figures(self) -> dict[str, float]:
        """The headline numbers; `top5` only where there are more than five classes."""
        numbers = {"accuracy": self.accuracy, "loss": float(self.losses.mean())}
        return numbers | ({"top5": float(self.in_top5.mean())} if len(self.classes) > 5 else {})

    def record(self) -> dict[str, Any]:
        """All figures as plain data."""
        counts = {"images": len(self.labels), "skipped": self.skipped}
        counts |= {"left_out": self.left_out} if self.left_out else {}
        counts |= {"full_size": self.full_size} if self.full_size else {}
        counts |= {"mirror": True} if self.mirror else {}
        return self.figures() | counts | recorded(self.computed_in) | {"per_class": self.per_class()}

    def as_table(self) -> str:
        """The figures and each class, to be read by a person."""
        return table(self.record())

    def per_class(self) -> list[dict[str, Any]]:
        """For each class: images, recall (share of its images found) and precision (share of answers right).

        Where images have several labels, recall gives way to `accuracy`: the share of the class's images whose
        answer is any of their labels, for the answer need not be this one.
        """
        several = self.label_sets or Labels(self.labels, np.arange(len(self.labels) + 1))
        found = several.values[np.repeat(self.right, several.counts)]
        hits = self.predictions[self.right]
        counts = [np.bincount(x, minlength=len(self.classes)) for x in (several.values, found, self.predictions, hits)]
        share = "recall" if self.label_sets is None else "accuracy"
        rows = []
        for name, own, good, said, hit in zip(self.classes, *counts, strict=True):
            precision = float(hit / said) if said else None
            rows.append({
                "class": name, "images": int(own), share: float(good / own) if own else None, "precision": precision,
            })  # fmt: skip
        return rows


def table(record: dict[str, Any]) -> str:
    """An `Evaluation.record()` to be read by a person: each class that was there or was said, then the figures."""
    rows = [row for row in record["per_class"] if row["images"] or row["precision"] is not None]
    share = "recall" if "recall" in rows[0] else "accuracy"
    names = [quoted(row["class"]) for row in rows]
    width = max(len("class"), *map(len, names))
    lines = [f"{'class':{width}}  images  {share}  precision"]
    for name, row in zip(names, rows, strict=True):
        good, precision = ("-" if row[column] is None else f"{row[column]:.1%}" for column in (share, "precision"))
        lines.append(f"{name:{width}}  {row['images']:8}  {good:>{len(share)}}  {precision:>9}")
    figures = " · ".join(
        f"{name} {value:.4f}" if name == "loss" else f"{name} {value:.2%}"
        for name, value in record.items()
        if name in ("accuracy", "loss", "top5") and value is not None  # JSON has no NaN
    )
    of = f" of {record['full_size']:,}" if "full_size" in record else ""
    tested = sum(row["images"] > 0 for row in rows)
    missing = f" of {tested} of the {len(record['per_class'])} classes" if tested < len(record["per_class"]) else ""
    skipped = f" · {record['skipped']} could not be read" if record["skipped"] else ""
    left_out = f" · {record['left_out']} have no label here" if "left_out" in record else ""
    note = " · with mirror images" if "mirror" in record else ""
    note += noted(record.get("computed_in", "float32"))
    return "\n".join([*lines, f"{record['images']}{of} images{missing} · {figures}{skipped}{left_out}{note}"])


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    dataset: Dataset,
    image_size: tuple[int, int],
    *,
    preprocessing: Preprocessing | None = None,
    batch_size: int = 256,
    pad: bool = False,
    workers: int = 0,
    on_error: str = "raise",
    mirror: bool = False,
    device: str | torch.device = "cpu",
    world: World = SINGLE,
) -> Evaluation:
    """Runs `model` over `dataset`; images are squashed to `image_size`, or prepared as `preprocessing` says.

    Of several ranks each takes its share, `batch_size` images at a time, and every one returns the whole. `pad` fills
    up batches that are not full, so that the model sees one shape only; what it says of the filling is dropped.
    `mirror` is as in `answers`.
    Raises ValueError if the model's outputs are not one for each class of the data set.
    """
    judged: list[dict[str, Tensor]] = []  # on the device until the end: no batch waits for the one before
    skipped = 0
    batches = eval_batches(
        dataset, EvalTransform(image_size, preprocessing or Preprocessing()),
        batch_size=batch_size * world.world_size, rank=world.rank, world_size=world.world_size, workers=workers,
        on_error=on_error, device=device,
    )  # fmt: skip
    with evaluation_mode(model):
        share = -(-len(dataset) // world.world_size)
        for batch in counted(batches, share, "evaluation", quiet=not world.is_rank_0):
            world.check_peers()
            skipped += batch.skipped
            count = len(batch.labels)
            if not count:
                continue
            images = batch.images
            if pad and count < batch_size:
                images = torch.cat([images, images.new_zeros(batch_size - count, *images.shape[1:])])
            logits = answers(model, images, mirror)[:count]
            if logits.shape[1] != len(dataset.classes):
                raise UserError(
                    f"the model answers with {logits.shape[1]} classes and {dataset.name} has {len(dataset.classes)}; "
                    f"fine-tune it on this data set first (`vitlab finetune`)."
                )
            judged.append(_judge(logits, batch))
    own = {
        name: torch.cat([part[name] for part in judged]).cpu().numpy() if judged else np.empty(0, kind)
        for name, kind in _COLUMNS.items()
    }
    whole = world.all_gather(own)
    skipped = int(world.all_gather({"skipped": np.array([skipped])})["skipped"].sum())
    if not len(whole["indices"]):
        raise UserError(f"none of the {len(dataset)} images of {dataset.name} ({dataset.split}) could be read.")
    order = np.argsort(whole["indices"])
    whole = {name: values[order] for name, values in whole.items()}
    sets = None if dataset.label_sets is None else dataset.label_sets.take(whole["indices"])
    return Evaluation(
        classes=dataset.classes, skipped=skipped, label_sets=sets, left_out=dataset.left_out,
        full_size=dataset.full_size, computed_in=computes_in(model), mirror=mirror, **whole
    )  # fmt: skip


def answers(model: nn.Module, images: Float[Tensor, "B 3 H W"], mirror: bool = False) -> Float[Tensor, "B K"]:
    """Logits of the classes, in float32. With `mirror` the logarithms of probabilities: of the mean of those for each
    image and for its mirror image, which errs a little less and takes twice the time. Not in the paper."""
    logits = model(images).float()
    if not mirror:
        return logits
    both = torch.stack([logits, model(images.flip(-1)).float()]).log_softmax(dim=-1)
    return both.logsumexp(dim=0) - math.log(2)


_COLUMNS = {
    "indices": np.int64,
    "labels": np.int64,
    "predictions": np.int64,
    "confidences": np.float32,
    "losses": np.float32,
    "right": np.bool_,
    "in_top5": np.bool_,
}
"""What is kept of each answer."""


def _judge(logits: Float[Tensor, "B K"], batch: Batch) -> dict[str, Tensor]:
    """`_COLUMNS` of one batch."""
    targets = batch.labels if batch.targets is None else class_targets(batch.targets, logits.shape[1], "softmax")
    confidence, prediction = logits.softmax(dim=1).max(dim=1)
    best = torch.cat([prediction[:, None], logits.topk(min(5, logits.shape[1]), dim=1).indices], dim=1)
    correct = best == batch.labels[:, None] if batch.targets is None else batch.targets.gather(1, best)
    return {
        "indices": batch.indices,
        "labels": batch.labels,
        "predictions": prediction,
        "confidences": confidence,
        "losses": F.cross_entropy(logits, targets, reduction="none"),
        "right": correct[:, 0],
        "in_top5": correct[:, 1:].any(dim=1),
    }


def evaluate_checkpoint(
    checkpoint: str | Path,
    dataset: str | None = None,
    split: str = "test",
    *,
    root: str | None = None,
    image_size: int | None = None,
    interpolation: Interpolation | None = None,
    resize: int | None = None,
    batch_size: int = 256,
    workers: int = 0,
    on_error: str = "raise",
    mirror: bool = False,
    partial: bool = False,
    precision: str = "float32",
    device: str = "auto",
    say: Callable[[str], None] | None = None,
    world: World = SINGLE,
) -> Evaluation:
    """Tests a checkpoint on a data set, by default the one that its card names, with its own preprocessing.

    At another `image_size` its resize keeps its proportion. `resize` overrides that of the data set (ObjectNet has
    one) and of the card. `mirror` is as in `answers`, `precision` as in `load_for_judging`, `world` as in `evaluate`,
    `partial` as in `load_dataset`; `say` hears how images are prepared. The data may have some of the checkpoint's
    classes only: the prediction is over all of the checkpoint's, and one that the data does not have is wrong.
    Raises ValueError if the checkpoint has no head, or the data set has classes that it does not know.
    """
    # What can be refused without the data is refused before it is read.
    place = choose_device(world.device(device))
    check_options(batch_size)
    if dataset is not None:
        check_source(dataset, root)
    found = load_for_judging(
        checkpoint, place, precision, image_size=image_size, interpolation=interpolation, world=world
    )
    model, card, preprocessing = found.model, found.card, found.preprocessing
    if resize is not None:
        preprocessing = preprocessing.with_resize(resize)
    name = dataset or card.get("dataset")
    if name is None:
        raise UserError(f"{checkpoint} does not say what it was trained on; name a data set with --dataset.")
    if model.head is None:
        raise UserError(f"{checkpoint} has no head, so it has no answers; fine-tune it first (`vitlab finetune`).")
    own = card if name == card.get("dataset") else {}  # what the card says of its own data set
    with world.rank_0_first():
        images = load_dataset(
            name, split, root=root or own.get("root"), classes=own.get("class_indices"), on_error=on_error,
            partial=partial,
        )  # fmt: skip
    images = _matched(str(checkpoint), card, model.config.num_classes, name, images)
    if resize is None and name in imagenet.TEST_RESIZE:
        side, center = imagenet.TEST_RESIZE[name]
        preprocessing = preprocessing.with_resize(round(max(model.config.image_hw) * side / center))
    if say:
        say(f"images: {preprocessing.describe()}")
    return evaluate(
        model, images, model.config.image_hw, preprocessing=preprocessing, batch_size=batch_size, workers=workers,
        on_error=on_error, mirror=mirror, device=place, world=world,
    )  # fmt: skip


def _matched(checkpoint: str, card: dict[str, Any], outputs: int, name: str, images: Dataset) -> Dataset:
    """`images` with the checkpoint's names of their classes. Raises ValueError if these are not its classes."""
    named = card.get("classes")
    if named == list(images.classes) or (not named and name not in imagenet.ORIGINS):
        return images
    if named and name not in imagenet.ORIGINS and set(images.classes) <= set(named):
        return _with_classes(images, tuple(named), checkpoint)
    if name in imagenet.ORIGINS and imagenet.answers_imagenet(named, card.get("dataset")):
        if outputs != imagenet.CLASSES:
            whose = ", as ImageNet-21k has them" if outputs > 10_000 else ""
            raise UserError(
                f"{checkpoint} answers with {outputs:,} classes{whose}, and {name} needs the 1,000 of ImageNet: take a "
                f"checkpoint that was fine-tuned on ImageNet, or fine-tune this one (`vitlab finetune`)."
            )
        return dataclasses.replace(images, classes=tuple(named)) if named else images
    unknown = [each for each in images.classes if each not in set(named or [])]
    raise UserError(
        f"{checkpoint} knows the classes {_some(named or [])} and not {_some(unknown)}, which {quoted(name)} has; test "
        f"it on data with its own classes or some of them, or fine-tune it on this data (`vitlab finetune`)."
    )


def _with_classes(images: Dataset, classes: tuple[str, ...], checkpoint: str) -> Dataset:
    """`images` with the checkpoint's `classes`, matched by name. Raises ValueError where a name has two outputs."""
    if twice := sorted({each for each in images.classes if classes.count(each) > 1}):
        raise UserError(
            f"{checkpoint} has several outputs called {_some(twice)}, so it is unknown which of them an image of this "
            f"class belongs to; give its classes different names in the config."
        )
    if len(images.classes) < len(classes):
        logger.warning(
            "%s has %d of the model's %d classes; predictions are over all %d, and one of the other classes is wrong",
            quoted(images.name), len(images.classes), len(classes), len(classes),
        )  # fmt: skip
    new = np.array([classes.index(each) for each in images.classes])
    sets = None if images.label_sets is None else images.label_sets.renumber(new)
    return dataclasses.replace(images, classes=classes, labels=new[images.labels], label_sets=sets)


def choose_device(asked: str) -> torch.device:
    """`auto` is the first GPU, or the CPU. Raises ValueError for a device that is not there."""
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise UserError(f"device {asked!r} is unknown; give auto, cpu, cuda or cuda:1.") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device {asked!r} is not supported; give auto, cpu, cuda or cuda:1.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        there = torch.cuda.device_count()
        raise UserError(f"device {asked!r} was asked for and torch sees {there} GPUs; `vitlab doctor` says more.")
    return device


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(quoted, names[:4])) + (f", ... ({len(names)})" if len(names) > 4 else "")

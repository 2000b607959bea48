"""How good a model is on a data set: every picture counted exactly once."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import nn

from vitlab.data.datasets import load_dataset
from vitlab.data.loader import eval_batches
from vitlab.data.sources import Dataset
from vitlab.data.transforms import EvalTransform
from vitlab.weights import load_card, load_model


@dataclass(frozen=True)
class Evaluation:
    """Answers for a whole data set, in its order; a picture that could not be read is not among them."""

    classes: tuple[str, ...]
    indices: Int[np.ndarray, " n"]
    labels: Int[np.ndarray, " n"]
    predictions: Int[np.ndarray, " n"]
    confidences: Float[np.ndarray, " n"]
    """Softmax probability of the prediction."""
    losses: Float[np.ndarray, " n"]
    """Softmax cross-entropy."""
    in_top5: Any
    """Whether the label is among the five highest logits, bool [n]."""
    skipped: int

    @property
    def accuracy(self) -> float:
        """Top-1: share of pictures whose highest logit is the label's."""
        return float((self.predictions == self.labels).mean())

    @property
    def confusion(self) -> Int[np.ndarray, "K K"]:
        """Pictures of class i (row) that were called j (column)."""
        counts = np.zeros((len(self.classes), len(self.classes)), dtype=np.int64)
        np.add.at(counts, (self.labels, self.predictions), 1)
        return counts

    def figures(self) -> dict[str, float]:
        """The headline numbers; `top5` only where there are more than five classes."""
        numbers = {"accuracy": self.accuracy, "loss": float(self.losses.mean())}
        return numbers | ({"top5": float(self.in_top5.mean())} if len(self.classes) > 5 else {})

    def record(self) -> dict[str, Any]:
        """All figures as plain data."""
        counts = {"pictures": len(self.labels), "skipped": self.skipped}
        return self.figures() | counts | {"per_class": self.per_class()}

    def as_table(self) -> str:
        """The figures and each class, to be read by a person."""
        width = max(len("class"), *map(len, self.classes))
        lines = [f"{'class':{width}}  pictures  recall  precision"]
        for row in self.per_class():
            recall, precision = ("-" if row[name] is None else f"{row[name]:.1%}" for name in ("recall", "precision"))
            lines.append(f"{row['class']:{width}}  {row['pictures']:8}  {recall:>6}  {precision:>9}")
        figures = " · ".join(
            f"{name} {value:.4f}" if name == "loss" else f"{name} {value:.2%}" for name, value in self.figures().items()
        )
        skipped = f" · {self.skipped} could not be read" if self.skipped else ""
        return "\n".join([*lines, f"{len(self.labels)} pictures · {figures}{skipped}"])

    def per_class(self) -> list[dict[str, Any]]:
        """For each class: pictures, recall (share of its pictures found) and precision (share of answers right)."""
        counts = self.confusion
        rows = []
        for number, name in enumerate(self.classes):
            right, own, said = counts[number, number], counts[number].sum(), counts[:, number].sum()
            recall = float(right / own) if own else None
            precision = float(right / said) if said else None
            rows.append({"class": name, "pictures": int(own), "recall": recall, "precision": precision})
        return rows


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    dataset: Dataset,
    image_size: tuple[int, int],
    *,
    resize: int | None = None,
    batch_size: int = 256,
    workers: int = 0,
    on_error: str = "raise",
    device: str | torch.device = "cpu",
) -> Evaluation:
    """Runs `model` over `dataset`; pictures are squashed to `image_size`, or resized and cropped with `resize`.

    Raises ValueError if the model's outputs are not one for each class of the data set.
    """
    was_training = model.training
    model.eval()
    columns: dict[str, list[np.ndarray]] = {
        name: [] for name in ("indices", "labels", "predictions", "confidences", "losses", "in_top5")
    }
    skipped = 0
    batches = eval_batches(
        dataset, EvalTransform(image_size, resize=resize), batch_size=batch_size, workers=workers,
        on_error=on_error, device=device,
    )  # fmt: skip
    for batch in batches:
        skipped += batch.skipped
        if not len(batch.labels):
            continue
        logits = model(batch.images).float()
        if logits.shape[1] != len(dataset.classes):
            raise ValueError(
                f"the model answers with {logits.shape[1]} classes and {dataset.name} has {len(dataset.classes)}; "
                f"fine-tune it on this data set first (`vitlab finetune`)."
            )
        confidence, prediction = logits.softmax(dim=1).max(dim=1)
        top5 = logits.topk(min(5, logits.shape[1]), dim=1).indices
        found = {
            "indices": batch.indices,
            "labels": batch.labels,
            "predictions": prediction,
            "confidences": confidence,
            "losses": F.cross_entropy(logits, batch.labels, reduction="none"),
            "in_top5": (top5 == batch.labels[:, None]).any(dim=1),
        }
        for name, values in found.items():
            columns[name].append(values.cpu().numpy())
    model.train(was_training)
    if not columns["labels"]:
        raise ValueError(f"none of the {len(dataset)} pictures of {dataset.name} ({dataset.split}) could be read.")
    whole = {name: np.concatenate(parts) for name, parts in columns.items()}
    return Evaluation(classes=dataset.classes, skipped=skipped, **whole)


def evaluate_checkpoint(
    checkpoint: str | Path,
    dataset: str | None = None,
    split: str = "test",
    *,
    root: str | None = None,
    image_size: int | None = None,
    batch_size: int = 256,
    workers: int = 0,
    on_error: str = "raise",
    device: str = "auto",
) -> Evaluation:
    """Tests a checkpoint on a data set, by default the one that its card names, with its own test resize.

    Raises ValueError if the checkpoint has no head, or names other classes than the data set.
    """
    place = choose_device(device)
    model, card = load_model(checkpoint, image_size=image_size).to(place), load_card(checkpoint)
    name = dataset or card.get("dataset")
    if name is None:
        raise ValueError(f"{checkpoint} does not say what it was trained on; name a data set with --dataset.")
    if model.head is None:
        raise ValueError(f"{checkpoint} has no head, so it has no answers; fine-tune it first (`vitlab finetune`).")
    own = card if name == card.get("dataset") else {}  # what the card says of its own data set
    pictures = load_dataset(
        name, split, root=root or own.get("root"), classes=own.get("class_indices"), on_error=on_error
    )
    named = card.get("classes")
    if named and list(pictures.classes) != named:
        raise ValueError(
            f"{checkpoint} knows the classes {_some(named)} and {name} has {_some(pictures.classes)}; test it on data "
            f"with its own classes, or fine-tune it on this data (`vitlab finetune`)."
        )
    return evaluate(
        model, pictures, model.config.image_hw, resize=card.get("eval_resize") if image_size is None else None,
        batch_size=batch_size, workers=workers, on_error=on_error, device=place,
    )  # fmt: skip


def choose_device(asked: str) -> torch.device:
    """`auto` is the first GPU, or the CPU. Raises ValueError for a device that is not there."""
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise ValueError(f"device {asked!r} is unknown; give auto, cpu, cuda or cuda:1.") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {asked!r} is not supported; give auto, cpu, cuda or cuda:1.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        there = torch.cuda.device_count()
        raise ValueError(f"device {asked!r} was asked for and torch sees {there} GPUs; `vitlab doctor` says more.")
    return device


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f", ... ({len(names)})" if len(names) > 4 else "")

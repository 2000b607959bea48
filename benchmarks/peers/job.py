"""What a contender of `finetune_peers.py` is given and what it returns, and how long an image takes it."""

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PROBE = 8
"""Images of the batch by which a step is timed."""

Examples = Sequence[tuple[Path, int]]


@dataclasses.dataclass(frozen=True)
class Job:
    """What a contender is to do: train until `deadline`, less the time to predict `reserve` images, or on `images`."""

    checkpoints: Path
    """Holds the same model as timm/ and huggingface/."""
    classes: list[str]
    examples: Examples
    image_size: int
    seed: int
    bfloat16: bool
    deadline: float
    """By time.time()."""
    reserve: int
    images: int | None
    """Train on about so many images, whatever the time."""
    factor: float = 1.0
    """Of the default learning rate."""
    epochs: float = math.inf
    """At most so many."""

    def steps(self, batch: int, seconds: float, prediction_seconds: float) -> int:
        """How many to train, at `seconds` an image and `prediction_seconds` a prediction; 5% more, to end in time."""
        wanted = self.epochs * math.ceil(len(self.examples) / batch)
        if self.images is None:
            left = self.stop(prediction_seconds) - time.time()
            wanted = min(wanted, left / (1.05 * seconds * batch))
        else:
            wanted = min(wanted, math.ceil(self.images / batch))
        return max(1, int(wanted))

    def stop(self, prediction_seconds: float) -> float:
        """When training has to end."""
        return self.deadline - 1.05 * self.reserve * prediction_seconds - 0.5


@dataclasses.dataclass(frozen=True)
class Fitted:
    predict: Callable[[Sequence[Path]], list[int]]
    """Files -> indices of classes."""
    steps: int
    images: int


class ImageFiles:
    """A map-style data set of (image, label), or of dictionaries as Hugging Face's models take them."""

    def __init__(self, examples: Examples, transform: Any = None, as_dict: bool = False) -> None:
        self.examples, self.transform, self._as_dict = examples, transform, as_dict

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        path, label = self.examples[index]
        with Image.open(path) as image:
            pixels = self.transform(image.convert("RGB"))
        return {"pixel_values": pixels, "labels": label} if self._as_dict else (pixels, label)


def time_images(model: Any, load: Callable[[], Any], batch: int, bfloat16: bool = False) -> tuple[float, float]:
    """Seconds of training and of predicting per image, by a copy of `model`; `load` reads and transforms PROBE images.

    The gradients of what is trainable, and the share that an image has in an update of all by SGD.
    """
    import torch

    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-9)
    training, updates, predicting = [], [], []
    for train in (True, False):
        model.train(train)
        for _ in range(3):  # the first is slower
            start = time.perf_counter()
            with torch.set_grad_enabled(train), torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
                images = load()
                output = model(images)
                output = getattr(output, "logits", output).float()
            if not train:
                predicting.append((time.perf_counter() - start) / len(images))
                continue
            output.logsumexp(1).mean().backward()
            computed = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            training.append((computed - start) / len(images))
            updates.append((time.perf_counter() - computed) / batch)
    return min(training) + min(updates), min(predicting)

"""The paper's main job in small: pre-train, carry to another task at a higher resolution, test, look inside."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitlab.config import TrainConfig
from vitlab.data.transforms import to_range
from vitlab.inspect.capture import capture
from vitlab.inspect.embeddings import filters_of, positions_of
from vitlab.inspect.page import write_page
from vitlab.inspect.report import Phase, Rollout, training_page
from vitlab.models.vit import ViT
from vitlab.pipelines.finetune import finetune
from vitlab.pipelines.finished_run import Run
from vitlab.pipelines.pretrain import Outcome, pretrain
from vitlab.recipes import tiny
from vitlab.train.workdir import write_json

FIRST, SECOND = (0, 1, 2, 3, 4), (5, 6, 7, 8, 9)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes with one thread: on shared cores a second costs so small a step more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def demo(out: str | Path, *, seed: int = 0, shrink: int = 1) -> dict[str, Any]:
    """Pre-trains on the digits 0-4 at 16 pixels, fine-tunes on 5-9 at 32, and writes `out`/index.html.

    Returns both test accuracies and the page's path (also in `out`/result.json). Interrupted, the same call continues.
    `shrink` divides the length of both runs, for a quick look.
    """
    out = Path(out)
    first = _shrunken(_on(tiny.digits(), FIRST, seed), 3 * shrink)  # a third of the recipe, for five easy classes
    before = pretrain(first, out / "pretrain")
    second = _shrunken(_on(tiny.finetune_digits(), SECOND, seed), shrink)
    after = finetune(out / "pretrain", second, out / "finetune")
    phases = [
        phase(
            "Pre-training on the digits 0 to 4",
            "A small Vision Transformer learns from nothing: each image of 16 x 16 pixels is cut into 16 patches "
            "of 4 x 4, which the encoder sees as a sequence (Eq. 1-4).",
            before, out / "pretrain",
        ),
        phase(
            "Fine-tuning on the digits 5 to 9 at twice the resolution",
            "The trained encoder is carried to classes it has never seen: a new head that starts at zero, and position "
            "embeddings interpolated from a grid of 4 x 4 to one of 8 x 8 patches (Sec. 3.2, Table 4).",
            after, out / "finetune",
        ),
    ]  # fmt: skip
    page = out / "index.html"
    lead = (
        "A Vision Transformer is pre-trained on one task, carried to another at a higher resolution, tested, and "
        "looked into: the main job of 'An Image is Worth 16x16 Words' (ICLR 2021), on scikit-learn's scanned digits."
    )
    write_page(page, training_page("The paper in small", lead, phases))
    result = {
        "pretrain_accuracy": before.test.accuracy,
        "finetune_accuracy": after.test.accuracy,
        "page": str(page.resolve()),
    }
    write_json(out / "result.json", result)
    return result


def phase(name: str, explanation: str, outcome: Outcome, workdir: Path) -> Phase:
    """One finished run as its page shows it: curves, confusions, wrong answers, and the model from inside."""
    model, run = outcome.model.cpu(), Run.read(workdir)
    assert isinstance(model, ViT), "the demo trains one"
    test = run.test
    shown = run.images(run.one_of_each(10))
    pixels = np.stack(list(shown.values()))
    images = to_range(torch.from_numpy(pixels).permute(0, 3, 1, 2).float())
    seen, positions = capture(model, [images], keep=len(images)), positions_of(model)
    captions = [f"{test.classes[test.labels[row]]}, called {test.classes[test.predictions[row]]}" for row in shown]
    told = run.phase(name, explanation)
    return dataclasses.replace(
        told,
        numbers={**told.numbers, "Parameters": f"{model.config.num_parameters:,}"},
        filters=filters_of(model),
        positions=None if positions is None else positions[0],
        distances=seen.distances,
        rollout=Rollout(pixels, captions, seen.rollout),
    )


def _on(config: TrainConfig, classes: tuple[int, ...], seed: int) -> TrainConfig:
    data = dataclasses.replace(config.data, classes=classes)
    model = dataclasses.replace(config.model, num_classes=len(classes))
    return dataclasses.replace(config, data=data, model=model, seed=seed)


def _shrunken(config: TrainConfig, by: int) -> TrainConfig:
    if config.steps is not None:
        return dataclasses.replace(config, steps=max(1, config.steps // by))
    assert config.epochs is not None
    return dataclasses.replace(config, epochs=config.epochs / by)

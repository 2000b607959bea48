"""The paper's main job in small: pre-train, carry to another task at a higher resolution, test, look inside."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitlab.data.transforms import EvalTransform
from vitlab.inspect.attention import attention_maps, attention_rollout, class_attention_grid, mean_attention_distance
from vitlab.inspect.embeddings import filter_components, position_similarity
from vitlab.inspect.report import Mistakes, Phase, Rollout, training_page, write_page
from vitlab.models.vit import ViT
from vitlab.recipes import tiny
from vitlab.train.config import TrainConfig
from vitlab.train.workdir import write_json
from vitlab.transfer.finetune import finetune
from vitlab.transfer.run import Outcome, pretrain

FIRST, SECOND = (0, 1, 2, 3, 4), (5, 6, 7, 8, 9)


def demo(out: str | Path, *, seed: int = 0, shrink: int = 1) -> dict[str, Any]:
    """Pre-trains on the digits 0-4 at 16 pixels, fine-tunes on 5-9 at 32, and writes `out`/index.html.

    Returns both test accuracies and the page's path (also in `out`/result.json). Interrupted, the same call continues.
    `shrink` divides the length of both runs, for a quick look.
    """
    out = Path(out)
    first = _shrunken(_on(tiny.digits(), FIRST, seed), 2 * shrink)  # half the recipe, for five easy classes
    before = pretrain(first, out / "pretrain")
    second = _shrunken(_on(tiny.finetune_digits(), SECOND, seed), shrink)
    after = finetune(out / "pretrain", second, out / "finetune")
    phases = [
        phase(
            "Pre-training on the digits 0 to 4",
            "A small Vision Transformer learns from nothing: each picture of 16 x 16 pixels is cut into 16 patches "
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
    test, model = outcome.test, outcome.model.cpu()
    assert isinstance(model, ViT), "the demo trains one"
    vit = model.config
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    wrong = np.flatnonzero(test.predictions != test.labels)
    wrong = wrong[np.argsort(-test.confidences[wrong])][:24]
    looked = _one_of_each(test.labels)
    images = _images(outcome, test.indices[looked])
    maps = attention_maps(model, images)
    prefix = vit.num_prefix_tokens
    table = model.position.table
    captions = [f"{test.classes[test.labels[i]]}, called {test.classes[test.predictions[i]]}" for i in looked]
    return Phase(
        name=name,
        explanation=explanation,
        numbers={
            "Test accuracy": f"{test.accuracy:.1%}",
            "Test pictures": f"{len(test.labels):,}",
            "Training steps": f"{max(record['step'] for record in records):,}",
            "Parameters": f"{vit.num_parameters:,}",
        },
        records=records,
        classes=test.classes,
        confusion=test.confusion,
        mistakes=Mistakes(
            _pixels(_images(outcome, test.indices[wrong])), test.predictions[wrong], test.labels[wrong],
            test.confidences[wrong],
        ) if len(wrong) else None,
        filters=filter_components(model.embedding.weight.detach(), min(28, 3 * vit.patch_size**2)).numpy(),
        positions=None if table is None else position_similarity(table.detach(), vit.grid, prefix).numpy(),
        distances=mean_attention_distance(maps, vit.grid, vit.stride, prefix).numpy(),
        rollout=Rollout(
            _pixels(images), captions, class_attention_grid(attention_rollout(maps), vit.grid, prefix).numpy()
        ),
    )  # fmt: skip


def _on(config: TrainConfig, classes: tuple[int, ...], seed: int) -> TrainConfig:
    data = dataclasses.replace(config.data, classes=classes)
    model = dataclasses.replace(config.model, num_classes=len(classes))
    return dataclasses.replace(config, data=data, model=model, seed=seed)


def _shrunken(config: TrainConfig, by: int) -> TrainConfig:
    if config.steps is not None:
        return dataclasses.replace(config, steps=max(1, config.steps // by))
    assert config.epochs is not None
    return dataclasses.replace(config, epochs=config.epochs / by)


def _one_of_each(labels: np.ndarray, most: int = 10) -> np.ndarray:
    """The first picture of each class, of the first `most` classes."""
    return np.unique(labels, return_index=True)[1][:most]


def _images(outcome: Outcome, indices: np.ndarray) -> torch.Tensor:
    """Test pictures as the model sees them: [n, 3, H, W] in [-1, 1]."""
    transform = EvalTransform(outcome.model.config.image_hw, resize=outcome.config.data.eval_resize)
    return transform.apply([outcome.pictures.test.picture(int(index)) for index in indices])


def _pixels(images: torch.Tensor) -> np.ndarray:
    """What the model saw, as pictures: uint8 [n, H, W, 3]."""
    return ((images.permute(0, 2, 3, 1) + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).numpy()

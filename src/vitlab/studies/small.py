"""What several studies have in common: a small pre-training, what five examples a class make of it elsewhere, words.

The small scales are of half of the classes of a data set; transfer is judged on the other half.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from vitlab.config import DataConfig, FewShotConfig, OptimConfig, TrainConfig
from vitlab.errors import UserError
from vitlab.inspect.panels import Series
from vitlab.models.config import ModelConfig, ViTConfig
from vitlab.recipes import pretrain
from vitlab.studies.statistics import Estimate, estimate
from vitlab.studies.study import Done

FEWSHOT = "fewshot_5shot"
"""The figure of App. D: accuracy on the transfer task, with five examples of each of its classes."""

SMALL_L2 = 1.0
"""Penalty of few-shot accuracy at the small scales.

Deviation: Google's is 2^10. Features of 48 numbers, not 768, have a norm of about 5; with Google's penalty little more
than the classes' means is left of least squares.
"""

LEARNED, CARRIED_TO = (0, 2, 4, 7, 9), (1, 3, 5, 6, 8)
"""Classes of pre-training and of transfer at the small scales, of one kind of things. Of Fashion-MNIST: T-shirt,
pullover, coat, sneaker and boot; then trouser, dress, sandal, shirt and bag. Of CIFAR-10: airplane, bird, deer, horse
and truck; then car, cat, dog, frog and ship."""


def tiny_vit(**changes: Any) -> ViTConfig:
    """Fashion-MNIST's 28 pixels; starts as in `recipes/tiny.py`, and for its reasons."""
    base = ViTConfig(
        image_size=28, patch_size=7, width=48, depth=3, heads=4, mlp_dim=96, num_classes=len(LEARNED), pool="gap",
        gelu="erf", position_std=1.0, head_std=0.1,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def gpu_vit(**changes: Any) -> ViTConfig:
    """CIFAR-10's 32 pixels, in 64 patches."""
    return tiny_vit(
        **{"image_size": 32, "patch_size": 4, "width": 192, "depth": 6, "heads": 6, "mlp_dim": 384} | changes
    )


def tiny(model: ModelConfig, seed: int, *, steps: int, lr: float = 2e-3) -> TrainConfig:
    """So many steps of 64 of the 30,000 images."""
    return _pretraining("fashion_mnist", model, seed, steps=steps, lr=lr, batch_size=64, pad=2)


def gpu(model: ModelConfig, seed: int, *, steps: int, lr: float = 1e-3) -> TrainConfig:
    """So many steps of 512 of the 25,000 images: 49 steps an epoch."""
    return _pretraining("cifar10", model, seed, steps=steps, lr=lr, batch_size=512, pad=4)


def _pretraining(
    name: str, model: ModelConfig, seed: int, *, steps: int, lr: float, batch_size: int, pad: int
) -> TrainConfig:
    """On half of the classes; 5-shot accuracy is that on the others, the mean of ten draws that all points share."""
    return TrainConfig(
        model=model,
        data=DataConfig(name=name, train_split="trainval", eval_split="test", classes=LEARNED, crop="pad", pad=pad),
        optim=OptimConfig(lr=lr, weight_decay=0.05, warmup_steps=steps // 10, clip_norm=1.0),
        fewshot=FewShotConfig(
            classes=CARRIED_TO, shots=(5,), l2=SMALL_L2, seeds=10, test_split="test", test_images=2000
        ),
        steps=steps,
        batch_size=batch_size,
        seed=seed,
        log_every=100,
        checkpoint_every=500,
    )


def jft(recipe: str = "ViT-B/16", **changes: Any) -> TrainConfig:
    """Table 3's row of this name, 7 epochs of JFT-300M, with changes to its model; 5-shot accuracy on ImageNet."""
    config = pretrain.jft(recipe)
    assert config.epochs == 7
    model = dataclasses.replace(config.model, **changes)
    if isinstance(model, ViTConfig):
        model = dataclasses.replace(model, representation_size=model.width)
    return dataclasses.replace(
        config, model=model, fewshot=FewShotConfig(dataset="imagenet", shots=(5,), test_split="test")
    )


# ------------------------------------------------------------------------------------------------- for their reports


def told(done: Sequence[Done]) -> str:
    """What a study's runs have in common, in a few sentences of Markdown."""
    first = done[0]
    config, seeds = first.point.config, len({each.seed for each in done})
    fewshot = config.fewshot
    assert fewshot is not None
    steps = sorted({each.point.config.total_steps(each.examples) for each in done})
    length = f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,}"
    if fewshot.dataset is not None:
        task = f"{fewshot.dataset}"
    else:
        task = f"the classes {_numbers(fewshot.classes)} of the same data set, which pre-training does not see"
    classes = "" if config.data.classes is None else f" of the classes {_numbers(config.data.classes)}"
    return (
        f"Pre-trained on {first.examples:,} images{classes} of {config.data.name}, {length} steps of "
        f"{config.batch_size}, {seeds} seed{'s' if seeds > 1 else ''}. Accuracy is on the test images of that task; "
        f"5-shot accuracy is that of least squares on the frozen representation (mean of {fewshot.seeds} draws) on "
        f"{task}."
    )


def _numbers(classes: Sequence[int] | None) -> str:
    return "all" if classes is None else ", ".join(map(str, classes))


def series(name: str, places: Sequence[float | int], figures: Sequence[Estimate], notes: Sequence[str] = ()) -> Series:
    """Means, with the standard deviations over seeds as bars."""
    return Series(name, list(places), [each.mean for each in figures], [each.sd for each in figures], notes)


def held_out(done: Sequence[Done], **labels: str | float) -> Estimate:
    """Accuracy on the held-out images of the learned classes, after the last step of each run with these labels."""
    return Estimate(
        tuple(
            float([record["val_accuracy"] for record in each.records if "val_accuracy" in record][-1])
            for each in done
            if labels.items() <= each.point.labels.items()
        )
    )


def groups(done: Sequence[Done], *names: str) -> list[tuple[str | float, ...]]:
    """The values of these labels that occur together, in the points' order, once each."""
    return list(dict.fromkeys(tuple(each.point.labels[name] for name in names) for each in done))


def over_training(
    done: Sequence[Done], figure: str = FEWSHOT, **labels: str | float
) -> tuple[list[int], list[Estimate]]:
    """Steps at which a figure was taken by all points with these labels, and its values over seeds at each of them."""
    curves: list[dict[int, float]] = []
    for each in sorted(done, key=lambda each: each.seed):
        if all(each.point.labels.get(name) == value for name, value in labels.items()):
            curves.append({int(line["step"]): float(line[figure]) for line in each.records if figure in line})
    if not curves:
        raise UserError(f"no point has the labels {labels}.")
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    return steps, [Estimate(tuple(curve[step] for curve in curves)) for step in steps]


def best(done: Sequence[Done], label: str, figure: str = FEWSHOT, **labels: str | float) -> str | float:
    """The value of `label`, among the points with these other labels, whose mean over seeds is the highest."""
    own = [each for each in done if all(each.point.labels.get(name) == value for name, value in labels.items())]
    values = [value for (value,) in groups(own, label)]
    if not values:
        raise UserError(f"no point has the labels {labels}.")
    return max(values, key=lambda value: estimate(own, figure, **{label: value}).mean)

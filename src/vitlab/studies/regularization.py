"""Sec. 4.3: what weight decay, dropout and label smoothing give a ViT on little data, and on more of it."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitlab.config import DataConfig, OptimConfig, TrainConfig
from vitlab.inspect.panels import Panel
from vitlab.models.config import ViTConfig
from vitlab.recipes import pretrain
from vitlab.studies.small import held_out, series
from vitlab.studies.statistics import difference, estimate, over_seeds, percent
from vitlab.studies.statistics import points as in_points
from vitlab.studies.study import SEEDS, Claim, Difference, Done, Point, Report, Scale, Study


@dataclass(frozen=True)
class Regularizers:
    """What Sec. 4.3 tunes on the smaller data sets."""

    decay: float = 0.0
    dropout: float = 0.0
    smoothing: float = 0.0


PLAIN, ALL = "none", "all three"
PAPER = {
    PLAIN: Regularizers(),
    "decay 0.03": Regularizers(decay=0.03),
    "decay 0.1": Regularizers(decay=0.1),
    "decay 0.3": Regularizers(decay=0.3),
    "dropout 0.1": Regularizers(dropout=0.1),
    "smoothing 1e-4": Regularizers(smoothing=1e-4),
    ALL: Regularizers(decay=0.3, dropout=0.1, smoothing=1e-4),
}
"""Table 3's decays and dropout, and the smoothing of the authors' later recipes, for none is printed."""

SMALL = {
    PLAIN: Regularizers(),
    "decay 0.3": Regularizers(decay=0.3),
    "decay 1": Regularizers(decay=1.0),
    "decay 3": Regularizers(decay=3.0),
    "dropout 0.1": Regularizers(dropout=0.1),
    "smoothing 0.1": Regularizers(smoothing=0.1),
    ALL: Regularizers(decay=1.0, dropout=0.1, smoothing=0.1),
}
"""Deviation: larger decays than Table 3's. A step takes rate x decay off a parameter, so that over the paper's 94,000
steps on ImageNet 0.3 divides by exp(42) what no gradient renews, and over some hundred steps by next to nothing."""

TINY_PARTS, GPU_PARTS = {"2 %": 0.02, "50 %": 0.5}, {"5 %": 0.05, "100 %": 1.0}


def points(scale: Scale) -> list[Point]:
    """A ViT with every setting on two amounts of data, nested, with as many steps on both; three seeds each.

    In the paper, ViT-B/16 on ImageNet and on ImageNet-21k by Table 3's recipe, once each.
    """
    if scale == "paper":
        runs = {"ImageNet": pretrain.imagenet("ViT-B/16"), "ImageNet-21k": pretrain.imagenet21k("ViT-B/16")}
        return [_point(data, name, _with(run, how)) for data, run in runs.items() for name, how in PAPER.items()]
    return [
        _point(data, name, _with(_small(scale, part, seed), how))
        for data, part in (TINY_PARTS if scale == "tiny" else GPU_PARTS).items()
        for name, how in SMALL.items()
        for seed in SEEDS
    ]


def _point(data: str, setting: str, config: TrainConfig) -> Point:
    name = f"{data.removesuffix(' %')}.{setting.replace(' ', '-')}.seed-{config.seed}"
    return Point(name, config, {"data": data, "setting": setting})


def _with(config: TrainConfig, how: Regularizers) -> TrainConfig:
    assert isinstance(config.model, ViTConfig), "dropout is a ViT's"
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, dropout=how.dropout),
        optim=dataclasses.replace(config.optim, weight_decay=how.decay),
        label_smoothing=how.smoothing,
    )


def _small(scale: Scale, part: float, seed: int) -> TrainConfig:
    """The images as they are, neither shifted nor mirrored: that would be a fourth regularizer."""
    tiny = scale == "tiny"
    model = ViTConfig(
        image_size=28, patch_size=7, width=64, depth=4, heads=4, mlp_dim=128, num_classes=10, pool="gap", gelu="erf",
        position_std=1.0, head_std=0.1,
    )  # fmt: skip
    if not tiny:
        model = dataclasses.replace(model, image_size=32, patch_size=4, width=192, depth=8, heads=6, mlp_dim=768)
    return TrainConfig(
        model=model,
        data=DataConfig(
            name="fashion_mnist" if tiny else "cifar10", train_split="train", eval_split="val", part=part,
            crop="none", flip=False,
        ),
        optim=OptimConfig(lr=1e-3, schedule="cosine", warmup_steps=60 if tiny else 300, clip_norm=1.0),
        steps=600 if tiny else 3000,
        batch_size=64 if tiny else 512,
        seed=seed,
        log_every=100,
    )  # fmt: skip


def tuned(done: Sequence[Done], data: str) -> str:
    """The setting with the best accuracy on held-out images, in the mean over seeds; of equals the first."""
    settings = _settings(done)
    return settings[int(np.argmax([held_out(done, data=data, setting=each).mean for each in settings]))]


def _settings(done: Sequence[Done]) -> list[str]:
    return list(dict.fromkeys(str(each.point.labels["setting"]) for each in done))


def report(done: Sequence[Done]) -> Report:
    """A row for each setting; for each amount of data its accuracies, and what it gains over none."""
    amounts = list(dict.fromkeys(str(each.point.labels["data"]) for each in done))
    settings, rows, drawn = _settings(done), [], []
    for setting in settings:
        row = [setting]
        for data in amounts:
            group = {"data": data, "setting": setting}
            row += [percent(held_out(done, **group)), percent(estimate(done, "accuracy", **group))]
            row.append("" if setting == PLAIN else in_points(_gain(done, data, setting)))
        rows.append(tuple(row))
    for data in amounts:
        found = [estimate(done, "accuracy", data=data, setting=setting) for setting in settings]
        drawn.append(series(data, range(len(settings)), found))
    told = ("held out, {}", "accuracy, {}", "gain over none, points")
    return Report(
        _lead(done), ("setting", *(name.format(data) for data in amounts for name in told)), rows,
        _claims(done, *amounts), [Panel("Regularizers alone and together", "", "accuracy, %", drawn, ticks=settings)],
    )  # fmt: skip


def _lead(done: Sequence[Done]) -> str:
    config, seeds = done[0].point.config, sorted({each.seed for each in done})
    counts = dict.fromkeys(f"{each.examples:,}" for each in done)
    length = f"{config.steps} steps of {config.batch_size}" if config.steps else f"batch {config.batch_size}"
    return (
        f"A ViT learns {config.data.name} from {' and from '.join(counts)} images ({length}, seeds "
        f"{', '.join(map(str, seeds))}), without and with each of the regularizers that Sec. 4.3 tunes on the smaller "
        f"data sets, and with three of them at once. Tuned means the setting with the best accuracy on held-out "
        f"images; gains are of test accuracy over none, paired by seed, with their bootstrap interval."
    )


def _gain(done: Sequence[Done], data: str, setting: str) -> Difference:
    return difference(done, "accuracy", {"data": data, "setting": setting}, {"data": data, "setting": PLAIN})


def _claims(done: Sequence[Done], little: str, much: str) -> list[Claim]:
    best = {data: tuned(done, data) for data in (little, much)}
    return [
        Claim(
            f"With little data ({little}) tuned regularizers raise the accuracy (chosen: {best[little]}).",
            "weight decay, dropout and smoothing tuned to boost the smaller data sets (Sec. 4.3); no figure is printed",
            _gain(done, little, best[little]),
        ),
        Claim(
            f"They gain more with little data than with much ({much}; chosen there: {best[much]}).",
            "Table 3: decay 0.3 and dropout on ImageNet, 0.03 and dropout on ImageNet-21k, 0.1 and none on JFT-300M",
            over_seeds(done, lambda part: _gain(part, little, best[little]).mean - _gain(part, much, best[much]).mean),
        ),
    ]


REGULARIZATION = Study(
    name="dropout-decay-smoothing",
    source="Sec. 4.3",
    about="Do weight decay, dropout and label smoothing help a ViT on little data, and on more?",
    points=points,
    report=report,
)

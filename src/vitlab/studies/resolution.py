"""Sec. 3.2: what a higher resolution brings in fine-tuning, and what the interpolated position embeddings do for it."""

import dataclasses
from collections.abc import Sequence

from vitlab.config import DataConfig, FinetuneConfig, OptimConfig, TrainConfig
from vitlab.inspect.panels import Panel
from vitlab.models.config import ViTConfig
from vitlab.recipes import finetune, pretrain
from vitlab.studies.small import CARRIED_TO, LEARNED, series
from vitlab.studies.statistics import difference, estimate, percent
from vitlab.studies.study import SEEDS, Claim, Done, Point, Report, Scale, Study

FACTORS = (1.0, 1.5, 2.0)
"""Sides of the images in fine-tuning, in those of pre-training."""
KINDS = ("interpolated", "fresh")
"""Of position embeddings: the checkpoint's, or new ones."""


def points(scale: Scale) -> list[Point]:
    """Pre-training at one resolution, once a seed; from there a fine-tuning for each resolution and kind of positions.

    Deviation: the small scales pre-train at half of what their images have, or more pixels would show nothing new.
    """
    match scale:
        case "tiny":
            return _all(_tiny(), _small_finetuning("fashion_mnist", part=0.02, steps=150, batch_size=64), SEEDS)
        case "gpu":
            return _all(_gpu(), _small_finetuning("cifar10", part=0.1, steps=300, batch_size=128), SEEDS)
        case "paper":
            return _all(pretrain.jft(), dataclasses.replace(finetune.imagenet(), average_decay=None), (0,))


def _tiny() -> TrainConfig:
    """Fashion-MNIST at 16 of its 28 pixels."""
    return TrainConfig(
        model=ViTConfig(
            image_size=16, patch_size=4, width=64, depth=4, heads=4, mlp_dim=128, num_classes=len(LEARNED), pool="gap",
            gelu="erf", position_std=1.0, head_std=0.1,
        ),
        data=_data("fashion_mnist", LEARNED),
        optim=OptimConfig(lr=1e-3, weight_decay=0.05, warmup_steps=100, clip_norm=1.0),
        steps=1000,
        batch_size=64,
        log_every=100,
    )  # fmt: skip


def _gpu() -> TrainConfig:
    """CIFAR-10 at 16 of its 32 pixels, 100 epochs of half of it: 0.7 PFLOP a seed."""
    return TrainConfig(
        model=ViTConfig(
            image_size=16, patch_size=4, width=192, depth=9, heads=6, mlp_dim=384, num_classes=len(LEARNED), pool="gap",
            gelu="erf", position_std=1.0, head_std=0.1,
        ),
        data=_data("cifar10", LEARNED),
        optim=OptimConfig(lr=1e-3, weight_decay=0.05, warmup_steps=500, clip_norm=1.0),
        epochs=100.0,
        batch_size=512,
    )  # fmt: skip


def _small_finetuning(name: str, part: float, steps: int, batch_size: int) -> FinetuneConfig:
    """On few images and for few steps, so that a start in the wrong place is not made good."""
    return FinetuneConfig(
        model=ViTConfig(image_size=16, patch_size=4),
        data=dataclasses.replace(_data(name, CARRIED_TO), part=part),
        optim=OptimConfig(name="sgd", lr=0.03, warmup_steps=steps // 10, clip_norm=1.0),
        steps=steps,
        batch_size=batch_size,
    )


def _data(name: str, classes: tuple[int, ...]) -> DataConfig:
    return DataConfig(
        name=name, train_split="trainval", eval_split="test", classes=classes, crop="inception", min_area=0.5
    )


def _all(before: TrainConfig, after: FinetuneConfig, seeds: Sequence[int]) -> list[Point]:
    assert isinstance(before.model, ViTConfig)
    side, patch = before.model.image_hw[0], before.model.patch_size
    found = []
    for seed in seeds:
        start = f"pretrained.seed-{seed}"
        found.append(Point(start, dataclasses.replace(before, seed=seed), {"run": "pre-training"}))
        for kind in KINDS:
            for factor in FACTORS:
                wanted = ViTConfig(image_size=round(factor * side), patch_size=patch)
                config = dataclasses.replace(after, model=wanted, fresh_positions=kind == "fresh", seed=seed)
                name = f"{kind}-{wanted.image_size}.seed-{seed}"
                found.append(Point(name, config, _labels(kind, factor), start=start))
    return found


def _labels(kind: str, factor: float) -> dict[str, str | float]:
    return {"run": "fine-tuning", "positions": kind, "factor": factor}


def report(done: Sequence[Done]) -> Report:
    """Accuracy by resolution, one column for each kind of position embedding."""
    found = {
        (kind, factor): estimate(done, "accuracy", **_labels(kind, factor)) for kind in KINDS for factor in FACTORS
    }
    sizes = {each.point.labels["factor"]: each.point.config.model for each in done if each.point.start}
    rows = []
    for factor in FACTORS:
        model = sizes[factor]
        assert isinstance(model, ViTConfig)
        rows.append([
            f"{factor:g} x", str(model.image_hw[0]), f"{model.grid[0]} x {model.grid[1]}",
            *(percent(found[kind, factor]) for kind in KINDS),
        ])  # fmt: skip
    pixels = [sizes[factor].image_hw[0] for factor in FACTORS]
    return Report(
        lead=_lead(done),
        columns=("resolution", "pixels", "patches", *(f"{kind} positions, %" for kind in KINDS)),
        rows=rows,
        claims=_claims(done),
        panels=[Panel(
            "Fine-tuned at higher resolution", "side of the image in fine-tuning, pixels", "test accuracy",
            [
                series(f"{kind} positions", pixels, [found[kind, factor] for factor in FACTORS])
                for kind in KINDS
            ],
        )],
    )  # fmt: skip


def _claims(done: Sequence[Done]) -> list[Claim]:
    def claim(more: tuple[str, float], less: tuple[str, float], text: str, paper: str) -> Claim:
        return Claim(text, paper, difference(done, "accuracy", _labels(*more), _labels(*less)))

    often = "it is often beneficial; no figures (Sec. 3.2)"
    lost = "they may no longer be meaningful as they are, so they are interpolated; no figures (Sec. 3.2)"
    return [
        claim(("interpolated", 1.5), ("interpolated", 1.0), "Fine-tuning at 1.5 times the resolution helps.", often),
        claim(("interpolated", 2.0), ("interpolated", 1.0), "Fine-tuning at twice the resolution helps.", often),
        claim(("interpolated", 1.5), ("fresh", 1.5), "At 1.5 times, interpolated position embeddings beat new ones.",
              lost),
        claim(("interpolated", 2.0), ("fresh", 2.0), "At twice, interpolated position embeddings beat new ones.", lost),
    ]  # fmt: skip


def _lead(done: Sequence[Done]) -> str:
    before, after = done[0], next(each for each in done if each.point.start)
    first, second, model = before.point.config, after.point.config, before.point.config.model
    assert isinstance(model, ViTConfig)
    seeds = len({each.seed for each in done})
    return (
        f"A ViT of {model.num_parameters / 1e6:.2g} million parameters (D = {model.width}, {model.depth} blocks, "
        f"patches of {model.patch_size} pixels) learns {before.examples:,} images of {_part(first.data)} at "
        f"{model.image_hw[0]} pixels for {first.total_steps(before.examples):,} steps of {first.batch_size}, and is "
        f"fine-tuned on {after.examples:,} images of {_part(second.data)} for {second.total_steps(after.examples):,} "
        f"steps of {second.batch_size}, at 1, 1.5 and 2 times that resolution, with the position embeddings that it "
        f"learned, interpolated, or with new ones. At 1 time nothing is interpolated. {seeds} "
        f"seed{'s, each with a pre-training of its own' if seeds > 1 else ''}."
    )


def _part(data: DataConfig) -> str:
    return data.name if data.classes is None else f"{data.name}'s classes {', '.join(map(str, data.classes))}"


RESOLUTION = Study(
    name="resolution",
    source="Sec. 3.2",
    about="Does fine-tuning at a higher resolution help, and do the position embeddings need to be interpolated?",
    points=points,
    report=report,
)

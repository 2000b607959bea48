"""Sec. 4.6, App. B.1.2: what masked patch prediction is worth, which target serves best, and how much to corrupt."""

import dataclasses
from collections.abc import Sequence

from vitlab.config import DataConfig, FinetuneConfig, MaskingConfig, OptimConfig, TrainConfig
from vitlab.inspect.panels import Panel
from vitlab.models.config import ViTConfig
from vitlab.recipes import finetune, pretrain, selfsup
from vitlab.studies.small import series
from vitlab.studies.statistics import difference, estimate, percent
from vitlab.studies.statistics import points as in_points
from vitlab.studies.study import SEEDS, Claim, Done, Point, Report, Scale, Study

VARIANTS: tuple[tuple[str, MaskingConfig], ...] = (
    ("mean-color-50", MaskingConfig(target="mean-color", share=0.5)),
    ("downsized-50", MaskingConfig(target="downsized", share=0.5)),
    ("regression-50", MaskingConfig(target="regression", share=0.5)),
    ("mean-color-15", MaskingConfig(target="mean-color", share=0.15)),
)
"""The three targets, and the paper's other rate."""

NAMES = {
    "scratch": "none: from scratch",
    "scratch-zero": "none, and a head of zeros",
    "mean-color-50": "mean color, 50 % corrupted",
    "mean-color-50-zero": "the same, and a head of zeros",
    "downsized-50": "4x4 colors, 50 % corrupted",
    "regression-50": "all pixels in L2, 50 % corrupted",
    "mean-color-15": "mean color, 15 % corrupted",
    "supervised": "supervised",
}
TICKS = {
    "scratch": "scratch",
    "scratch-zero": "scratch, head 0",
    "mean-color-50": "color 50 %",
    "mean-color-50-zero": "color 50 %, head 0",
    "downsized-50": "4x4 50 %",
    "regression-50": "pixels 50 %",
    "mean-color-15": "color 15 %",
    "supervised": "supervised",
}
"""The same for a figure."""
PAPER = {
    "scratch": "77.9",
    "scratch-zero": "",
    "mean-color-50": "79.9",
    "mean-color-50-zero": "",
    "downsized-50": "works well",
    "regression-50": "slightly worse",
    "mean-color-15": "slightly worse",
    "supervised": "84.2",
}
"""ViT-B/16 on ImageNet: Sec. 4.6 and Table 5; App. B.1.2 gives no figures for the variants."""

LABELS = 0.02
"""Share of CIFAR-10's labels that fine-tuning sees at the small scales: 100 of each class."""
HEAD_STD = 0.1
"""How wide the head of a small fine-tuning starts."""


def points(scale: Scale) -> list[Point]:
    """Every seed has its own pre-trainings; the run from scratch has the shape and the labels of the fine-tuned ones.

    Nothing but the weights below the head differs between them. At the small scales the head starts wide in all:
    a head of zeros, as the paper's, costs a short training its first steps, in which nothing below it learns, and fresh
    weights more of them than trained ones. A pair with heads of zeros is run beside.

    Supervised pre-training is part of the paper's scale alone: in small, it would have to see the labels of the very
    images that fine-tuning is denied.
    """
    match scale:
        case "tiny":
            return _on_cifar10(_tiny(), _small_finetuning(steps=250, batch_size=64))
        case "gpu":
            return _on_cifar10(_gpu(), _small_finetuning(steps=500, batch_size=128))
        case "paper":
            return _paper()


def _tiny() -> TrainConfig:
    """5.8 TFLOP each: three minutes of one core at 33 GFLOP/s."""
    base = selfsup.tiny_cifar10()
    assert isinstance(base.model, ViTConfig)
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, width=96, depth=3, mlp_dim=192),
        optim=dataclasses.replace(base.optim, warmup_steps=90),
        epochs=None,
        steps=900,
    )


def _gpu() -> TrainConfig:
    """100 epochs of 1.1 GFLOP a image: twelve of these are 68 PFLOP, eleven minutes at 100 TFLOP/s."""
    base = selfsup.tiny_cifar10()
    assert isinstance(base.model, ViTConfig)
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, width=192, depth=9, heads=6, mlp_dim=384),
        epochs=100.0,
        batch_size=512,
    )


def _small_finetuning(steps: int, batch_size: int) -> FinetuneConfig:
    """Deviation: Adam where Table 4 has SGD, so that fresh weights are trained as Table 3 trains them."""
    return FinetuneConfig(
        model=ViTConfig(image_size=32, patch_size=4),
        data=DataConfig(
            name="cifar10", train_split="trainval", eval_split="test", crop="inception", min_area=0.3, part=LABELS
        ),
        optim=OptimConfig(lr=1e-3, weight_decay=0.05, warmup_steps=steps // 10, clip_norm=1.0),
        steps=steps,
        batch_size=batch_size,
        log_every=50,
        head_std=HEAD_STD,
    )


def _on_cifar10(before: TrainConfig, after: FinetuneConfig) -> list[Point]:
    found = []
    for seed in SEEDS:
        found += [_pretrained(name, dataclasses.replace(before, masking=masking), seed) for name, masking in VARIANTS]
        found += [_finetuned(name, after, seed) for name, _ in VARIANTS]
        scratch, (first, _) = dataclasses.replace(after, from_scratch=True), VARIANTS[0]
        found.append(_finetuned("scratch", scratch, seed, start=first))
        for name, config in (("scratch-zero", scratch), (f"{first}-zero", after)):
            found.append(_finetuned(name, dataclasses.replace(config, head_std=None), seed, start=first))
    return found


def _paper() -> list[Point]:
    """Table 5's fine-tuning: ImageNet at 384 pixels, no Polyak average. From scratch is Table 3's ImageNet row."""
    after = finetune.imagenet()
    after = dataclasses.replace(after, model=ViTConfig(image_size=384), average_decay=None)
    before = [(name, dataclasses.replace(selfsup.masked(), masking=masking)) for name, masking in VARIANTS]
    before += [("scratch", pretrain.imagenet()), ("supervised", pretrain.jft())]
    found = [_pretrained(name, config, seed=0) for name, config in before]
    return found + [_finetuned(name, after, seed=0) for name, _ in before]


def _pretrained(name: str, config: TrainConfig, seed: int) -> Point:
    labels = {"run": "pre-trained", "variant": name}
    return Point(f"{name}.seed-{seed}", dataclasses.replace(config, seed=seed), labels)


def _finetuned(name: str, config: FinetuneConfig, seed: int, start: str | None = None) -> Point:
    labels = {"run": "fine-tuned", "variant": name}
    config = dataclasses.replace(config, seed=seed)
    return Point(f"{name}.finetuned.seed-{seed}", config, labels, start=f"{start or name}.seed-{seed}")


def report(done: Sequence[Done]) -> Report:
    """Accuracy after fine-tuning, one row for each way to begin."""
    present = [name for name in NAMES if any(each.point.labels == _after(name) for each in done)]
    found = {name: estimate(done, "accuracy", **_after(name)) for name in present}
    rows = []
    for name in present:
        gain = "" if name == "scratch" else in_points(difference(done, "accuracy", _after(name), _after("scratch")))
        rows.append([NAMES[name], _told(done, name), percent(found[name]), gain, PAPER[name]])
    accuracies = series("after fine-tuning", range(len(present)), list(found.values()))
    return Report(
        lead=_lead(done),
        columns=(
            "pre-training", "loss (best constant)", "accuracy, %", "more than from scratch, points",
            "paper: ImageNet, %",
        ),
        rows=rows,
        claims=_claims(done, present),
        panels=[Panel(
            "Fine-tuned on few labels", "pre-training", "test accuracy", [accuracies],
            ticks=[TICKS[name] for name in present],
        )],
    )  # fmt: skip


def _claims(done: Sequence[Done], present: Sequence[str]) -> list[Claim]:
    def claim(more: str, less: str, text: str, paper: str) -> Claim:
        return Claim(text, paper, difference(done, "accuracy", _after(more), _after(less)))

    well = "all settings work quite well (App. B.1.2)"
    wanted = [
        ("mean-color-50", "scratch", "Masked patch prediction with mean colors beats training from scratch.",
         "79.9 % against 77.9 % (Sec. 4.6, Table 5)"),
        ("mean-color-50-zero", "scratch-zero", "It does so too where both heads start at zero, as the paper's do.",
         "as above"),
        ("downsized-50", "scratch", "Prediction of 4x4 colors beats training from scratch.", well),
        ("regression-50", "scratch", "Regression of all pixels beats training from scratch.", well),
        ("mean-color-50", "regression-50", "Mean colors are a better target than all pixels in L2.",
         "regression is slightly worse (App. B.1.2)"),
        ("mean-color-50", "mean-color-15", "Corrupting 50 % of the patches is better than 15 %.",
         "15 % is slightly worse, few-shot (App. B.1.2)"),
        ("supervised", "mean-color-50", "Supervised pre-training on the same images stays ahead.",
         "4 points (Sec. 4.6)"),
    ]  # fmt: skip
    return [claim(*each) for each in wanted if {each[0], each[1]} <= set(present)]


def _lead(done: Sequence[Done]) -> str:
    before = next(each for each in done if each.point.labels == _before("mean-color-50"))
    after = next(each for each in done if each.point.labels == _after("mean-color-50"))
    model, first, second = before.point.config.model, before.point.config, after.point.config
    assert isinstance(model, ViTConfig)
    seeds = len({each.seed for each in done})
    if any(each.point.labels["variant"] == "supervised" for each in done):
        scratch, left_out = "Table 3's training on ImageNet, fine-tuned alike", ""
    else:
        scratch = "the same shape with fresh weights, on the same labels for as many steps (the paper's is trained out)"
        left_out = (
            f" Heads start at sd {HEAD_STD} unless a row says otherwise. The paper's third start, supervised "
            "pre-training, is left out: on these images it would have seen the labels that fine-tuning is denied."
        )
    return (
        f"A ViT of {model.num_parameters / 1e6:.2g} million parameters (D = {model.width}, {model.depth} blocks, "
        f"patches of {model.patch_size} pixels at {model.image_hw[0]}) learns from the {before.examples:,} images of "
        f"{first.data.name} without labels for {first.total_steps(before.examples):,} steps of {first.batch_size}, and "
        f"is fine-tuned on {after.examples:,} labeled images of {second.data.name} for "
        f"{second.total_steps(after.examples):,} steps of {second.batch_size}; {seeds} "
        f"seed{'s, each with pre-trainings of its own' if seeds > 1 else ''}. From scratch is {scratch}." + left_out
    )


def _told(done: Sequence[Done], name: str) -> str:
    """How well hidden patches are told, beside the best answer that looks at no image."""
    if name not in dict(VARIANTS):
        return ""
    loss, constant = (estimate(done, figure, **_before(name)).mean for figure in ("loss", "constant_loss"))
    return f"{loss:.3f} ({constant:.3f})"


def _before(name: str) -> dict[str, str | float]:
    return {"run": "pre-trained", "variant": name}


def _after(name: str) -> dict[str, str | float]:
    return {"run": "fine-tuned", "variant": name}


MASKING = Study(
    name="masking",
    source="Sec. 4.6, App. B.1.2",
    about="Is masked patch prediction worth it, with which target, and how much should be corrupted?",
    points=points,
    report=report,
)

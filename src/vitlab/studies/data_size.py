"""Sec. 4.3, Fig. 3 and 4: how much data a Vision Transformer needs before it is as good as a ResNet."""

import dataclasses
from collections.abc import Mapping, Sequence

from vitlab.config import DataConfig, FewShotConfig, FinetuneConfig, OptimConfig, TrainConfig
from vitlab.inspect.panels import Panel
from vitlab.models.config import ModelConfig, ResNetConfig, ViTConfig
from vitlab.models.resnet_config import ResNetBody
from vitlab.recipes import finetune, pretrain
from vitlab.studies.small import CARRIED_TO, LEARNED, SMALL_L2, series
from vitlab.studies.statistics import difference, estimate, over_seeds, percent
from vitlab.studies.study import SEEDS, Claim, Difference, Done, Point, Report, Scale, Study

PARTS = (0.03, 0.1, 0.3, 1.0)
"""Shares of the pre-training data, each in the next: of JFT's 303 million images the 9, 30, 90 and all of Fig. 4."""
GPU_PARTS = (0.01, *PARTS)

BEST = "best_fewshot"
"""The figure that `early_stopped` adds."""

MEASURES = (
    ("pre-training", BEST, "few-shot accuracy on other classes"),
    ("fine-tuning", "accuracy", "fine-tuned accuracy on other classes"),
)
"""What is measured of which run: Fig. 4 and Fig. 3."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A model of the study and how it is pre-trained, but for the part and the seed."""

    family: str
    size: str
    """What it is compared by: `small` with `small`, `large` with `large`."""
    config: TrainConfig


def points(scale: Scale) -> list[Point]:
    """Every model on every part with the same settings, as the paper has it, and the same steps; then fine-tuned.

    At `tiny` only what has learned from the least and from the most data is fine-tuned.
    """
    match scale:
        case "tiny":
            after = _small_finetuning("fashion_mnist", part=0.01, steps=100, batch_size=32)
            return _all(_tiny_models(), PARTS, after, tuned=(PARTS[0], PARTS[-1]), seeds=SEEDS)
        case "gpu":
            after = _small_finetuning("cifar10", part=0.1, steps=300, batch_size=128)
            return _all(_gpu_models(), GPU_PARTS, after, tuned=GPU_PARTS, seeds=SEEDS)
        case "paper":
            after = finetune.imagenet()
            after = dataclasses.replace(after, model=ViTConfig(image_size=384), average_decay=None)
            return _all(_paper_models(), PARTS, after, tuned=PARTS, seeds=(0,))


def _tiny_models() -> dict[str, Candidate]:
    """Fashion-MNIST at its 28 pixels: 2 to 8 million multiply-accumulates a image."""
    base = _small_pretraining("fashion_mnist", steps=600, batch_size=64)
    hybrid = _vit(28, 1, width=64, depth=2, stem=ResNetBody((1, 1), width=32))
    return {
        "ViT-64/7": Candidate("ViT", "small", _with(base, _vit(28, 7, width=64, depth=4))),
        "ViT-96/7": Candidate("ViT", "large", _with(base, _vit(28, 7, width=96, depth=6))),
        "R8x0.5": Candidate("ResNet", "small", _with(base, _resnet(28, (1, 1), width=32))),
        "R14x0.5": Candidate("ResNet", "large", _with(base, _resnet(28, (2, 2), width=32))),
        "R8x0.5+ViT-64": Candidate("hybrid", "small", _with(base, hybrid)),
    }


def _gpu_models() -> dict[str, Candidate]:
    """CIFAR-10 at its 32 pixels: 24 to 185 million multiply-accumulates a image."""
    base = _small_pretraining("cifar10", steps=2500, batch_size=512)
    hybrid = _vit(32, 1, width=192, depth=6, stem=ResNetBody((2, 2), width=64))
    return {
        "ViT-128/4": Candidate("ViT", "small", _with(base, _vit(32, 4, width=128, depth=6))),
        "ViT-192/4": Candidate("ViT", "large", _with(base, _vit(32, 4, width=192, depth=9))),
        "R14x1": Candidate("ResNet", "small", _with(base, _resnet(32, (2, 2), width=64))),
        "R26x1.5": Candidate("ResNet", "large", _with(base, _resnet(32, (2, 2, 2, 2), width=96))),
        "R14x1+ViT-192": Candidate("hybrid", "small", _with(base, hybrid)),
    }


def _paper_models() -> dict[str, Candidate]:
    """Fig. 4's models as Table 3 trains them; every part gets the steps of 7 epochs of the whole.

    Deviation: the paper fine-tunes (Fig. 3) what has learned from ImageNet, ImageNet-21k and JFT, not from parts of
    JFT; those runs are the three functions of `recipes.pretrain`.
    """
    steps = round(7 * 303e6 / pretrain.BATCH_SIZE)
    shots = FewShotConfig(dataset="imagenet", test_split="test", shots=(5,))

    def row(name: str) -> TrainConfig:
        return dataclasses.replace(pretrain.jft(name), epochs=None, steps=steps, eval_every=steps // 20, fewshot=shots)

    base = row("ViT-B/32")
    assert isinstance(base.model, ViTConfig)
    halved = dataclasses.replace(
        base.model, width=base.model.width // 2, heads=base.model.heads // 2, mlp_dim=base.model.mlp_dim // 2,
        representation_size=base.model.width // 2,
    )  # fmt: skip
    return {
        "ViT-b/32": Candidate("ViT", "half", _with(base, halved)),
        "ViT-B/32": Candidate("ViT", "small", base),
        "ViT-L/32": Candidate("ViT", "medium", row("ViT-L/32")),
        "ViT-L/16": Candidate("ViT", "large", row("ViT-L/16")),
        "R50x1": Candidate("ResNet", "small", row("R50x1")),
        "R152x2": Candidate("ResNet", "large", row("R152x2")),
    }


def _with(config: TrainConfig, model: ModelConfig) -> TrainConfig:
    return dataclasses.replace(config, model=model)


def _vit(side: int, patch_size: int, *, width: int, depth: int, stem: ResNetBody | None = None) -> ViTConfig:
    return ViTConfig(
        image_size=side, patch_size=patch_size, width=width, depth=depth, heads=4, mlp_dim=2 * width,
        num_classes=len(LEARNED), pool="gap", gelu="erf", position_std=1.0, head_std=0.1, stem=stem,
    )  # fmt: skip


def _resnet(side: int, layers: tuple[int, ...], width: int) -> ResNetConfig:
    """The name counts three layers a unit, the root and the head, and the width in 64 channels."""
    return ResNetConfig(image_size=side, num_classes=len(LEARNED), body=ResNetBody(layers, width=width, version="v2"))


def _small_pretraining(name: str, steps: int, batch_size: int) -> TrainConfig:
    """Five classes, judged by few-shot accuracy on five others; the held-out images choose the moment."""
    return TrainConfig(
        data=DataConfig(name=name, classes=LEARNED, crop="pad", pad=3),
        optim=OptimConfig(lr=1e-3, weight_decay=0.05, warmup_steps=steps // 10, clip_norm=1.0),
        fewshot=FewShotConfig(
            classes=CARRIED_TO, test_split="test", shots=(5,), l2=SMALL_L2, seeds=10, test_images=1000
        ),
        steps=steps,
        batch_size=batch_size,
        log_every=100,
        eval_every=steps // 5,
    )


def _small_finetuning(name: str, part: float, steps: int, batch_size: int) -> FinetuneConfig:
    return FinetuneConfig(
        model=ViTConfig(image_size=28 if name == "fashion_mnist" else 32, patch_size=4),
        data=DataConfig(
            name=name, train_split="trainval", eval_split="test", classes=CARRIED_TO, crop="pad", pad=3, part=part
        ),
        optim=OptimConfig(name="sgd", lr=0.03, warmup_steps=steps // 10, clip_norm=1.0),
        steps=steps,
        batch_size=batch_size,
    )


def _all(
    models: Mapping[str, Candidate],
    parts: Sequence[float],
    after: FinetuneConfig,
    *,
    tuned: Sequence[float],
    seeds: Sequence[int],
) -> list[Point]:
    found = []
    for seed in seeds:
        for name, each in models.items():
            for part in parts:
                data = dataclasses.replace(each.config.data, part=part)
                labels = {"model": name, "family": each.family, "size": each.size, "part": part}
                start = f"{name.replace('/', '-').replace('+', '-')}.{100 * part:g}.seed-{seed}"
                config = dataclasses.replace(each.config, data=data, seed=seed)
                found.append(Point(start, config, labels | {"run": "pre-training"}))
                if part in tuned:
                    config = dataclasses.replace(after, seed=seed)
                    labels = labels | {"run": "fine-tuning"}
                    found.append(Point(start.replace(".seed", ".finetuned.seed"), config, labels, start=start))
    return found


# -------------------------------------------------------------------------------------------------------------- report


def early_stopped(done: Done) -> Done:
    """The same with `BEST`: few-shot accuracy at the evaluation with the best accuracy on held-out images.

    The paper's one regularizer in Fig. 4: without it a model that has learned its few images by heart would be judged.
    """
    config = done.point.config
    if config.fewshot is None:
        return done
    measured = f"fewshot_{config.fewshot.shots[0]}shot"
    judged = [record for record in done.records if measured in record]
    best = max(judged, key=lambda record: record[f"{config.data.eval_split}_accuracy"])
    return dataclasses.replace(done, figures={**done.figures, BEST: best[measured]})


def growth(
    done: Sequence[Done], figure: str, one: Mapping[str, str], other: Mapping[str, str], parts: tuple[float, float]
) -> Difference:
    """How much more the figure of `one` rises from the first of these parts to the second than that of `other`.

    By seed: a difference of differences, with its interval over seeds.
    """

    least, most = parts

    def rise(seed: Sequence[Done], labels: Mapping[str, str]) -> float:
        return estimate(seed, figure, part=most, **labels).mean - estimate(seed, figure, part=least, **labels).mean

    return over_seeds(done, lambda seed: rise(seed, one) - rise(seed, other))


def report(done: Sequence[Done]) -> Report:
    """Fig. 4 (few-shot) and Fig. 3 (fine-tuned): a row and a curve for each model, accuracy over images learned."""
    done = [early_stopped(each) for each in done]
    models = list(dict.fromkeys(str(each.point.labels["model"]) for each in done))
    images = {float(each.point.labels["part"]): each.examples for each in done if not each.point.start}
    rows, panels = [], []
    for run, figure, title in MEASURES:
        drawn = []
        for model in models:
            own = [each for each in done if (each.point.labels["model"], each.point.labels["run"]) == (model, run)]
            parts = sorted({float(each.point.labels["part"]) for each in own})
            found = {part: estimate(own, figure, part=part) for part in parts}
            rows.append([model, title, *(percent(found[part]) if part in found else "" for part in images)])
            drawn.append(series(model, [images[part] for part in parts], list(found.values())))
        panels.append(Panel(title[:1].upper() + title[1:], "images learned from", "accuracy", drawn, log_x=True))
    columns = ["model", "measured, %", *(f"{count:,} images" for count in images.values())]
    return Report(_lead(done), columns, rows, _claims(done, (min(images), max(images))), panels)


def _claims(done: Sequence[Done], parts: tuple[float, float]) -> list[Claim]:
    least, most = parts
    found = []
    for size, names in (("small", "ViT-B/32 and R50x1"), ("large", "ViT-L/16 and R152x2")):
        vit, resnet = ({"run": "pre-training", "family": family, "size": size} for family in ("ViT", "ResNet"))
        of, read = f"of the {size} models", f"of {names}, on 9 and 300 million images (Fig. 4, no figures)"
        found += [
            Claim(
                f"With the least data the ResNet is ahead, {of}.", f"the ResNet, {read}",
                difference(done, BEST, resnet | {"part": least}, vit | {"part": least}),
            ),
            Claim(
                f"More data brings the ViT more than the ResNet, {of}.", f"the ViT, {read}",
                growth(done, BEST, vit, resnet, parts),
            ),
            Claim(
                f"With all data the ViT is ahead, {of}.", f"the ViT, {read}",
                difference(done, BEST, vit | {"part": most}, resnet | {"part": most}),
            ),
        ]  # fmt: skip
    for run, figure, title in MEASURES:
        large, small = ({"run": run, "family": "ViT", "size": size} for size in ("large", "small"))
        found.append(Claim(
            f"More data brings the larger ViT more than the smaller one: {title}.",
            "ViT-L/16 is behind ViT-B/16 after ImageNet and ahead after JFT (Fig. 3, Table 5)",
            growth(done, figure, large, small, parts),
        ))  # fmt: skip
    return found


def _lead(done: Sequence[Done]) -> str:
    before, after = done[0].point.config, next(each for each in done if each.point.start)
    tuned = after.point.config
    assert before.fewshot is not None
    seeds = len({each.seed for each in done})
    return (
        f"Every model learns {before.data.name}{_classes(before.data.classes)} from nested parts of it, always for "
        f"{before.total_steps(done[0].examples):,} steps of {before.batch_size} and with the same settings. Its "
        f"{before.fewshot.shots[0]}-shot accuracy is on {before.fewshot.dataset or before.data.name}"
        f"{_classes(before.fewshot.classes)}, at the evaluation with the best accuracy on held-out images; its "
        f"fine-tuned accuracy is that of the last weights, tuned on {after.examples:,} images of {tuned.data.name}"
        f"{_classes(tuned.data.classes)} for {tuned.total_steps(after.examples):,} steps of {tuned.batch_size}. "
        f"{seeds} seed{'s' if seeds > 1 else ''}."
    )


def _classes(classes: tuple[int, ...] | None) -> str:
    return "" if classes is None else f"'s classes {', '.join(map(str, classes))}"


DATA_SIZE = Study(
    name="data-size",
    source="Fig. 3, Fig. 4, Sec. 4.3",
    about="How much data does a ViT need before it is as good as a ResNet?",
    points=points,
    report=report,
)

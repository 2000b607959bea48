"""Sec. 4.4: what a family of models makes of its compute."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitlab.config import DataConfig, FewShotConfig, OptimConfig, TrainConfig
from vitlab.errors import UserError
from vitlab.inspect.panels import Panel, Series, front
from vitlab.models.config import ModelConfig, ResNetConfig, ViTConfig
from vitlab.models.registry import get_config
from vitlab.models.resnet_config import ResNetBody
from vitlab.recipes import pretrain
from vitlab.studies.small import SMALL_L2
from vitlab.studies.statistics import estimate, over_seeds, percent
from vitlab.studies.study import SEEDS, Claim, Done, Point, Report, Scale, Study

FAMILIES = ("ViT", "hybrid", "ResNet")


@dataclass(frozen=True)
class PaperRun:
    """A row of Table 6: accuracies in percent after fine-tuning, and what the pre-training on JFT-300M took."""

    model: str
    epochs: int
    imagenet: float
    real: float
    cifar10: float
    cifar100: float
    pets: float
    flowers: float
    exaflops: int

    @property
    def average(self) -> float:
        """Fig. 5's Average-5: all but ReaL, whose images are ImageNet's."""
        return (self.imagenet + self.cifar10 + self.cifar100 + self.pets + self.flowers) / 5


TABLE6 = (
    PaperRun("ViT-B/32", 7, 80.73, 86.27, 98.61, 90.49, 93.40, 99.27, 55),
    PaperRun("ViT-B/16", 7, 84.15, 88.85, 99.00, 91.87, 95.80, 99.56, 224),
    PaperRun("ViT-L/32", 7, 84.37, 88.28, 99.19, 92.52, 95.83, 99.45, 196),
    PaperRun("ViT-L/16", 7, 86.30, 89.43, 99.38, 93.46, 96.81, 99.66, 783),
    PaperRun("ViT-L/16", 14, 87.12, 89.99, 99.38, 94.04, 97.11, 99.56, 1567),
    PaperRun("ViT-H/14", 14, 88.08, 90.36, 99.50, 94.71, 97.11, 99.71, 4262),
    PaperRun("R50x1", 7, 77.54, 84.56, 97.67, 86.07, 91.11, 94.26, 50),
    PaperRun("R50x2", 7, 82.12, 87.94, 98.29, 89.20, 93.43, 97.02, 199),
    PaperRun("R101x1", 7, 80.67, 87.07, 98.48, 89.17, 94.08, 95.95, 96),
    PaperRun("R152x1", 7, 81.88, 87.96, 98.82, 90.22, 94.17, 96.94, 141),
    PaperRun("R152x2", 7, 84.97, 89.69, 99.06, 92.05, 95.37, 98.62, 563),
    PaperRun("R152x2", 14, 85.56, 89.89, 99.24, 91.92, 95.75, 98.75, 1126),
    PaperRun("R200x3", 14, 87.22, 90.15, 99.34, 93.53, 96.32, 99.04, 3306),
    PaperRun("R50+ViT-B/32", 7, 84.90, 89.15, 99.01, 92.24, 95.75, 99.46, 106),
    PaperRun("R50+ViT-B/16", 7, 85.58, 89.65, 99.14, 92.63, 96.65, 99.40, 274),
    PaperRun("R50+ViT-L/32", 7, 85.68, 89.04, 99.24, 92.93, 96.97, 99.43, 246),
    PaperRun("R50+ViT-L/16", 7, 86.60, 89.72, 99.18, 93.64, 97.03, 99.40, 859),
    PaperRun("R50+ViT-L/16", 14, 87.12, 89.76, 99.31, 93.89, 97.36, 99.11, 1668),
)

# The families in small. Of 28 pixels patches of 7 and 4 leave 16 and 49 tokens; of 224, /32 and /16 leave 49 and 196.
# ResNets and stems have a stage or two, for the images are an eighth as wide.
_VIT = ViTConfig(
    image_size=28, patch_size=4, width=64, depth=3, heads=4, mlp_dim=128, num_classes=5, pool="gap", gelu="erf",
    position_std=1.0, head_std=0.1,
)  # fmt: skip
_SMALL_RESNET = ResNetConfig(image_size=28, num_classes=5, body=ResNetBody((1,), width=32, version="v2"))
TINY: dict[str, ModelConfig] = {
    "ViT-2x48-7": dataclasses.replace(_VIT, patch_size=7, width=48, depth=2, mlp_dim=96),
    "ViT-3x64-7": dataclasses.replace(_VIT, patch_size=7),
    "ViT-3x64-4": _VIT,
    "hybrid-2x48": dataclasses.replace(_VIT, patch_size=1, width=48, depth=2, mlp_dim=96, stem=ResNetBody((), 32)),
    "hybrid-3x64": dataclasses.replace(_VIT, patch_size=1, stem=ResNetBody((1,), 32)),
    "ResNet-1": _SMALL_RESNET,
    "ResNet-1-1": dataclasses.replace(_SMALL_RESNET, body=ResNetBody((1, 1), 32, "v2")),
    "ResNet-2-2": dataclasses.replace(_SMALL_RESNET, body=ResNetBody((2, 2), 32, "v2")),
}

_BIG_VIT = dataclasses.replace(_VIT, image_size=32, width=384, depth=8, heads=6, mlp_dim=1536)
_BIG_RESNET = ResNetConfig(image_size=32, num_classes=5, body=ResNetBody((3, 4), 64, "v2"))
GPU: dict[str, ModelConfig] = {
    "ViT-6x192-8": dataclasses.replace(_BIG_VIT, patch_size=8, width=192, depth=6, heads=3, mlp_dim=768),
    "ViT-6x192-4": dataclasses.replace(_BIG_VIT, width=192, depth=6, heads=3, mlp_dim=768),
    "ViT-8x384-4": _BIG_VIT,
    "hybrid-6x192": dataclasses.replace(
        _BIG_VIT, patch_size=1, width=192, depth=6, heads=3, mlp_dim=768, stem=ResNetBody((2,), 64)
    ),
    "hybrid-8x384": dataclasses.replace(_BIG_VIT, patch_size=1, stem=ResNetBody((3,), 64)),
    "ResNet-3-4": _BIG_RESNET,
    "ResNet-3-4-6": dataclasses.replace(_BIG_RESNET, body=ResNetBody((3, 4, 6), 64, "v2")),
    "ResNet-3-4-6x2": dataclasses.replace(_BIG_RESNET, body=ResNetBody((3, 4, 6), 128, "v2")),
}

LEARNED, NEW = (3, 4, 6, 7, 9), (0, 1, 2, 5, 8)
"""Half of the classes are learned, transfer is judged on the others: another half than `small.LEARNED`, for which
few-shot accuracy rises with the length of the training (seen in trials of one seed).

Fashion-MNIST: dress, coat, shirt, sneaker, boot; T-shirt, trouser, pullover, sandal, bag.
CIFAR-10: cat, deer, frog, horse, truck; plane, car, bird, dog, ship."""
TINY_STEPS, GPU_STEPS = (300, 900), (900, 2700)


def family(model: ModelConfig) -> str:
    """The member of FAMILIES that a model belongs to."""
    if isinstance(model, ResNetConfig):
        return "ResNet"
    return "ViT" if model.stem is None else "hybrid"


def points(scale: Scale) -> list[Point]:
    """Every model at every length, with three seeds; at the paper's scale the 18 runs of Table 6, once each."""
    if scale == "paper":
        return [_point(run.model.replace("/", "-"), f"{run.epochs}-epochs", _paper(run)) for run in TABLE6]
    models, lengths = (TINY, TINY_STEPS) if scale == "tiny" else (GPU, GPU_STEPS)
    # One rate and one decay for all, by Adam: in the paper the largest rate is 5 times the smallest.
    warmup = TINY_STEPS[0] // 10 if scale == "tiny" else 300
    optim = OptimConfig(lr=1e-3, weight_decay=0.05, schedule="cosine", warmup_steps=warmup, clip_norm=1.0)
    return [
        _point(name, f"{steps}-steps", pretraining(scale, model, optim, steps, seed))
        for name, model in models.items()
        for steps in lengths
        for seed in SEEDS
    ]


def _point(model: str, length: str, config: TrainConfig) -> Point:
    labels = {"family": family(config.model), "model": model, "length": length.replace("-", " ")}
    return Point(f"{model}.{length}.seed-{config.seed}", config, labels)


def pretraining(
    scale: Scale, model: ModelConfig, optim: OptimConfig, steps: int, seed: int, *, held_out: bool = False
) -> TrainConfig:
    """Half of the classes are learned; transfer is few-shot accuracy on the other half.

    held_out: judges while training on images of val, to choose a setting by, and not on the test images.
    """
    tiny = scale == "tiny"
    learned, judged = ("train", "val") if held_out else ("trainval", "test")
    return TrainConfig(
        model=model,
        data=DataConfig(
            name="fashion_mnist" if tiny else "cifar10", train_split=learned, eval_split=judged, classes=LEARNED,
            crop="pad", pad=2 if tiny else 4, flip=True,
        ),
        optim=optim,
        steps=steps,
        batch_size=64 if tiny else 512,
        fewshot=FewShotConfig(classes=NEW, test_split="test", shots=(5, 10), l2=SMALL_L2, seeds=20),
        seed=seed,
        log_every=100,
    )  # fmt: skip


def _paper(run: PaperRun) -> TrainConfig:
    """A run of Table 6 by Table 3's recipe. R200x3, which has no row there, is trained as R152x2.

    Deviation: judged by few-shot accuracy on ImageNet; the accuracies of Table 6 take a `vitlab finetune` of every
    model on each of the data sets.
    """
    if run.model in pretrain.JFT:
        config = pretrain.jft(run.model)
    else:
        config = pretrain.jft("R152x2")
        head = {"num_classes": config.model.num_classes, "head_bias": config.model.head_bias}
        config = dataclasses.replace(config, model=get_config(run.model, **head))
    fewshot = FewShotConfig(dataset="imagenet", test_split="test", shots=(5, 10))
    return dataclasses.replace(config, epochs=float(run.epochs), fewshot=fewshot)


# ------------------------------------------------------------------------------------------- comparing two families

Runs = Sequence[tuple[float, float]]
"""(exaFLOPs, accuracy) of several runs."""


def gap(ours: Runs, theirs: Runs, place: float = 0.5) -> float:
    """By how much the best accuracy that `ours` reach with some compute exceeds that of `theirs` with as much.

    place: where in the range of compute that both cover, on a logarithmic scale: 0 is the least, 1 the most. Between
    two runs the accuracy is on the straight line over the logarithm of compute, and a run that another beats with less
    compute does not count.
    Raises ValueError where the two have no compute in common.
    """
    low = max(min(cost for cost, _ in runs) for runs in (ours, theirs))
    high = min(max(cost for cost, _ in runs) for runs in (ours, theirs))
    if low > high:
        raise UserError(f"one family's cheapest run takes {low:g} exaFLOPs, the other's dearest {high:g}: no overlap.")
    at = (1 - place) * math.log(low) + place * math.log(high)
    reached = [np.interp(at, *_curve(runs)) for runs in (ours, theirs)]
    return float(reached[0] - reached[1])


def saving(ours: Runs, theirs: Runs) -> float | None:
    """How many times the compute of `ours` `theirs` take to be as accurate, in the middle of the accuracies of both.

    None where there is no accuracy that both reach.
    """
    curves = [_curve(runs) for runs in (ours, theirs)]
    low, high = max(gains[0] for _, gains in curves), min(gains[-1] for _, gains in curves)
    if low > high:
        return None
    cost, dearer = (np.interp((low + high) / 2, gains, costs) for costs, gains in curves)
    return math.exp(dearer - cost)


def _curve(runs: Runs) -> tuple[list[float], list[float]]:
    """Logarithm of compute and accuracy of the runs on the front: both rise."""
    best = front(runs)
    return [math.log(cost) for cost, _ in best], [float(gain) for _, gain in best]


def growth(runs: Runs) -> float:
    """By how much the run with most compute is ahead of the best of those with at most half as much."""
    most = max(cost for cost, _ in runs)
    return max(gain for cost, gain in runs if cost == most) - max(gain for cost, gain in runs if cost <= most / 2)


# --------------------------------------------------------------------------------------------------------- the report


def report(done: Sequence[Done]) -> Report:
    """A row for every model and length; the paper's figure in our numbers, and in its own beside it."""
    rows = []
    drawn = {kind: ([], [], []) for kind in FAMILIES}
    for model, length in dict.fromkeys((each.point.labels["model"], each.point.labels["length"]) for each in done):
        group = {"model": model, "length": length}
        one = next(each for each in done if group.items() <= each.point.labels.items())
        kind, shots = str(one.point.labels["family"]), estimate(done, "fewshot_5shot", **group)
        rows.append((
            kind, str(model), str(length), f"{one.point.config.model.num_parameters:,}", f"{one.exaflops:.2g}",
            percent(shots), percent(estimate(done, "fewshot_10shot", **group)),
            percent(estimate(done, "accuracy", **group)),
        ))  # fmt: skip
        for values, value in zip(drawn[kind], (one.exaflops, shots.mean, shots.sd), strict=True):
            values.append(value)
    ours = Panel(
        "Measured here", "pre-training exaFLOPs", "5-shot accuracy, %",
        [Series(kind, *values) for kind, values in drawn.items() if values[0]], log_x=True, front=True,
    )  # fmt: skip
    return Report(
        lead=_lead(done),
        columns=("family", "model", "length", "parameters", "exaFLOPs", "5-shot", "10-shot", "accuracy"),
        rows=rows,
        claims=_claims(done),
        panels=(ours, paper_panel()),
    )


def paper_panel() -> Panel:
    """Fig. 5, left: Average-5 of Table 6."""
    series = []
    for kind in FAMILIES:
        runs = [run for run in TABLE6 if family(get_config(run.model)) == kind]
        names = [run.model.removeprefix("R50+").removeprefix("ViT-") for run in runs]
        series.append(Series(kind, [run.exaflops for run in runs], [run.average / 100 for run in runs], notes=names))
    return Panel(
        "The paper (Table 6)", "pre-training exaFLOPs", "average of five data sets, %", series, log_x=True, front=True
    )


def _lead(done: Sequence[Done]) -> str:
    config, seeds = done[0].point.config, sorted({each.seed for each in done})
    ours = saving(_runs(done, "ViT"), _runs(done, "ResNet"))
    theirs = saving(_printed("ViT"), _printed("ResNet"))
    here = "there is no accuracy that both reach" if ours is None else f"it is {ours:.1f} times"
    return (
        f"Models of three families learn classes of {config.data.name} (batch {config.batch_size}, seeds "
        f"{', '.join(map(str, seeds))}) and are judged by few-shot accuracy on classes that they have not seen. "
        f"Compute is 6 x multiply-accumulates of a forward pass x images, as in Table 6. For the accuracy in the "
        f"middle of the range that both families reach, ResNets take {theirs:.1f} times the compute of ViTs in "
        f"Table 6; here {here}."
    )


def _claims(done: Sequence[Done]) -> list[Claim]:
    vit, hybrid, resnet = _printed("ViT"), _printed("hybrid"), _printed("ResNet")
    return [
        Claim(
            "With as much compute, in the middle of the range that both cover, ViTs transfer better than ResNets.",
            f"2 to 4 times less compute for the same (Sec. 4.4); {gap(vit, resnet):.2f} points there in Table 6",
            over_seeds(done, lambda part: gap(_runs(part, "ViT"), _runs(part, "ResNet"))),
        ),
        Claim(
            "With the least compute that both cover, hybrids transfer better than ViTs.",
            f"slightly, at small budgets (Sec. 4.4); {gap(hybrid, vit, 0.0):.2f} points there in Table 6",
            over_seeds(done, lambda part: gap(_runs(part, "hybrid"), _runs(part, "ViT"), 0.0)),
        ),
        Claim(
            "ViTs do not saturate: the run with most compute transfers better than all with at most half of it.",
            f"no saturation within the range tried (Sec. 4.4); {growth(vit):.2f} points in Table 6",
            over_seeds(done, lambda part: growth(_runs(part, "ViT"))),
        ),
    ]  # fmt: skip


def _printed(kind: str) -> list[tuple[float, float]]:
    """(exaFLOPs, Average-5 in percent) of a family's rows in Table 6."""
    return [(float(run.exaflops), run.average) for run in TABLE6 if family(get_config(run.model)) == kind]


def _runs(done: Sequence[Done], kind: str) -> list[tuple[float, float]]:
    """(exaFLOPs, 5-shot accuracy) of a family, the mean over the seeds."""
    found: dict[float, list[float]] = {}
    for each in done:
        if each.point.labels["family"] == kind:
            found.setdefault(each.exaflops, []).append(each.figures["fewshot_5shot"])
    return [(compute, float(np.mean(values))) for compute, values in found.items()]


SCALING = Study(
    name="scaling",
    source="Fig. 5, Table 6",
    about="Which family makes the most of its compute: ViT, hybrid or ResNet?",
    points=points,
    report=report,
)

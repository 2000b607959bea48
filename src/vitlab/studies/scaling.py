"""Sec. 4.4, Fig. 5, Table 6: which family of models makes the most of its pre-training compute."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from vitlab.config import TrainConfig
from vitlab.models.config import ModelConfig, ResNetConfig
from vitlab.models.registry import get_config
from vitlab.panels import Panel, Series, front
from vitlab.recipes import pretrain
from vitlab.studies.presets import FEW_IMAGES, MEASURED, body, jft, pretraining, resnet, transfer, vit
from vitlab.studies.spec import Chart, Claim, Results, Scale, Study, StudyRun

FAMILIES: tuple[str, ...] = ("ViT", "hybrid", "ResNet")
COMPUTE = "pre-training exaFLOPs"
"""The label of the x axis."""
CURVE_POINTS = 50
"""Number of points of a drawn power law."""
TESTS = ("ImageNet", "ReaL", "CIFAR-10", "CIFAR-100", "Pets", "Flowers")


def family(model: ModelConfig) -> str:
    """One of FAMILIES."""
    if isinstance(model, ResNetConfig):
        return "ResNet"
    return "ViT" if model.stem is None else "hybrid"


class PaperRun(NamedTuple):
    """A row of Table 6."""

    model: str
    epochs: int
    accuracies: tuple[float, ...]
    """In percent after fine-tuning on each of TESTS."""
    exaflops: int
    """Of the pre-training on JFT-300M."""

    @property
    def family(self) -> str:
        return family(get_config(self.model))

    @property
    def average(self) -> float:
        """Fig. 5's Average-5: all but ReaL, whose images are ImageNet's."""
        return sum(value for test, value in zip(TESTS, self.accuracies, strict=True) if test != "ReaL") / 5


TABLE6 = (
    PaperRun("ViT-B/32", 7, (80.73, 86.27, 98.61, 90.49, 93.40, 99.27), 55),
    PaperRun("ViT-B/16", 7, (84.15, 88.85, 99.00, 91.87, 95.80, 99.56), 224),
    PaperRun("ViT-L/32", 7, (84.37, 88.28, 99.19, 92.52, 95.83, 99.45), 196),
    PaperRun("ViT-L/16", 7, (86.30, 89.43, 99.38, 93.46, 96.81, 99.66), 783),
    PaperRun("ViT-L/16", 14, (87.12, 89.99, 99.38, 94.04, 97.11, 99.56), 1567),
    PaperRun("ViT-H/14", 14, (88.08, 90.36, 99.50, 94.71, 97.11, 99.71), 4262),
    PaperRun("R50x1", 7, (77.54, 84.56, 97.67, 86.07, 91.11, 94.26), 50),
    PaperRun("R50x2", 7, (82.12, 87.94, 98.29, 89.20, 93.43, 97.02), 199),
    PaperRun("R101x1", 7, (80.67, 87.07, 98.48, 89.17, 94.08, 95.95), 96),
    PaperRun("R152x1", 7, (81.88, 87.96, 98.82, 90.22, 94.17, 96.94), 141),
    PaperRun("R152x2", 7, (84.97, 89.69, 99.06, 92.05, 95.37, 98.62), 563),
    PaperRun("R152x2", 14, (85.56, 89.89, 99.24, 91.92, 95.75, 98.75), 1126),
    PaperRun("R200x3", 14, (87.22, 90.15, 99.34, 93.53, 96.32, 99.04), 3306),
    PaperRun("R50+ViT-B/32", 7, (84.90, 89.15, 99.01, 92.24, 95.75, 99.46), 106),
    PaperRun("R50+ViT-B/16", 7, (85.58, 89.65, 99.14, 92.63, 96.65, 99.40), 274),
    PaperRun("R50+ViT-L/32", 7, (85.68, 89.04, 99.24, 92.93, 96.97, 99.43), 246),
    PaperRun("R50+ViT-L/16", 7, (86.60, 89.72, 99.18, 93.64, 97.03, 99.40), 859),
    PaperRun("R50+ViT-L/16", 14, (87.12, 89.76, 99.31, 93.89, 97.36, 99.11), 1668),
)

# ViTs and hybrids have 16 or 49 tokens, where /32 and /16 of 224 pixels have 49 and 196.
# Stems have at most one stage, ResNets one or two, because the images are an eighth as wide.
MODELS: dict[str, ModelConfig] = {
    "ViT-2x48-7": vit(28, 7, 48, 2),
    "ViT-3x64-7": vit(28, 7, 64, 3),
    "ViT-6x96-7": vit(28, 7, 96, 6),
    "hybrid-2x48": vit(32, 2, 48, 2, stem=body()),
    "hybrid-3x64": vit(28, 1, 64, 3, stem=body(1)),
    "ResNet-1": resnet(1),
    "ResNet-1-1": resnet(1, 1),
    "ResNet-2-2": resnet(2, 2),
}
STEPS = (250, 750, 2250)


def variants(scale: Scale) -> list[StudyRun]:
    """Every model at every length; at the paper's scale the 18 runs of Table 6.

    One learning rate and weight decay for all, with Adam; in the paper the largest rate is 5 times the smallest.
    """
    if scale == "paper":
        return [_run(run.model.replace("/", "-"), f"{run.epochs} epochs", _paper(run)) for run in TABLE6]
    optim = {"lr": 2e-3, "warmup_steps": 30}
    return [
        _run(name, f"{steps} steps", pretraining(model, steps, optim=optim))
        for name, model in MODELS.items()
        for steps in STEPS
    ]


def _run(model: str, length: str, config: TrainConfig) -> StudyRun:
    labels = {"family": family(config.model), "model": model, "length": length}
    return StudyRun(f"{model}.{length.replace(' ', '-')}", config, labels)


def _paper(run: PaperRun) -> TrainConfig:
    """A run of Table 6 by Table 3's recipe. R200x3, which has no row there, is trained like R152x2.

    Deviation: evaluated few-shot on ImageNet; Table 6's accuracies take a `vitlab finetune` of each model on each set.
    """
    config = jft(run.model if run.model in pretrain.JFT else "R152x2", shots=(5, 10))
    if run.model not in pretrain.JFT:
        head = {"num_classes": config.model.num_classes, "head_bias": config.model.head_bias}
        config = replace(config, model=get_config(run.model, **head))
    return replace(config, epochs=float(run.epochs))


Points = Sequence[tuple[float, float]]
"""(exaFLOPs, accuracy) of runs of a family. `means` has the mean over all seeds of each of `runs`."""


def select_front(runs: Points, means: Points) -> Points:
    """The runs whose means are on the Pareto front. A choice for each seed would partly reward luck."""
    best = front(means)
    return [run for run, mean in zip(runs, means, strict=True) if mean in best]


def accuracy_lead(ours: Points, theirs: Points, position: float = 0.5) -> float:
    """The best accuracy of `ours` minus the best of `theirs` at the same compute.

    position: within the range of compute that both cover, on a logarithmic scale: 0 is the least, 1 the most. Accuracy
    is interpolated linearly over the logarithm of compute, through all of these runs: give the runs of a front.
    """
    low = max(min(compute for compute, _ in runs) for runs in (ours, theirs))
    high = min(max(compute for compute, _ in runs) for runs in (ours, theirs))
    at = (1 - position) * math.log(low) + position * math.log(high)
    return float(np.interp(at, *_log_curve(ours)) - np.interp(at, *_log_curve(theirs)))


def compute_ratio(ours: Points, theirs: Points) -> float | None:
    """The ratio of `theirs` to `ours` in compute for the accuracy in the middle of the range that both reach.

    None where the ranges do not overlap.
    """
    curves = [_log_curve(front(runs)) for runs in (ours, theirs)]
    low = max(accuracies[0] for _, accuracies in curves)
    high = min(accuracies[-1] for _, accuracies in curves)
    if low > high:
        return None
    ours_at, theirs_at = (np.interp((low + high) / 2, accuracies, computes) for computes, accuracies in curves)
    return math.exp(theirs_at - ours_at)


def _log_curve(runs: Points) -> tuple[list[float], list[float]]:
    """The logarithms of compute, ascending, and the accuracies."""
    computes, accuracies = zip(*sorted(runs), strict=True)
    return list(map(math.log, computes)), list(accuracies)


def lead_of_largest(runs: Points, means: Points) -> float:
    """Accuracy of the run with most compute minus accuracy of the best run, by its mean, with at most half of it."""
    most = max(compute for compute, _ in runs)
    pairs = zip(runs, means, strict=True)
    smaller = [(mean, accuracy) for (compute, accuracy), (_, mean) in pairs if compute <= most / 2]
    return max(accuracy for compute, accuracy in runs if compute == most) - max(smaller)[1]


def _measured(results: Results, kind: str) -> Points:
    """Transfer accuracy of every model and length of a family, the mean over the seeds of `results`."""
    groups = results.where(family=kind).groups("model", "length")
    return [(group.runs[0].exaflops, float(group.measure(transfer).mean())) for group in groups]


def _measured_front(results: Results, kind: str) -> Points:
    """Those of `_measured` whose means over all seeds of the study are on its front."""
    return select_front(_measured(results, kind), _measured(results.study, kind))


PRINTED: dict[str, Points] = {
    kind: [(float(run.exaflops), run.average / 100) for run in TABLE6 if run.family == kind] for kind in FAMILIES
}
"""(exaFLOPs, Average-5) of each family's rows in Table 6."""
VIT, HYBRID, RESNET = map(front, PRINTED.values())
"""The Pareto fronts of Table 6."""


def paper_panel(test: str | None = None) -> Panel:
    """Fig. 5: accuracy on one of TESTS over compute in Table 6.

    By default (left) Average-5, with the names of the models with least and most compute.
    """
    series = []
    for kind, points in PRINTED.items():
        runs = [run for run in TABLE6 if run.family == kind]
        values = [run.average if test is None else run.accuracies[TESTS.index(test)] for run in runs]
        ends = [] if test else (min(points), max(points))
        names = [run.model.removeprefix("R50+").removeprefix("ViT-") for run in runs]
        notes = [name if point in ends else "" for name, point in zip(names, points, strict=True)]
        computes = [compute for compute, _ in points]
        series.append(Series(kind, computes, [value / 100 for value in values], notes=notes))
    y_label = f"{test} accuracy" if test else "average of five data sets"
    return Panel("The paper (Table 6)", COMPUTE, y_label, series, log_x=True, front=True)


def fit_power_law(runs: Points) -> tuple[float, float]:
    """Exponent and logarithm of the factor of the power law error = factor * exaFLOPs ** exponent, through the runs on
    the front by least squares of the logarithms; a constant where the front is one run."""
    computes, accuracies = _log_curve(front(runs))
    if len(computes) == 1:
        return 0.0, math.log1p(-accuracies[0])
    exponent, factor = np.polyfit(computes, np.log1p(-np.array(accuracies)), 1)
    return float(exponent), float(factor)


def power_law_panel(title: str, y_label: str, families: Mapping[str, Points]) -> Panel:
    """The power law of each family, within the compute of its runs."""
    series = []
    for kind, runs in families.items():
        exponent, factor = fit_power_law(runs)
        x = np.geomspace(min(compute for compute, _ in runs), max(compute for compute, _ in runs), CURVE_POINTS)
        series.append(Series(kind, x.tolist(), (1 - np.exp(factor) * x**exponent).tolist()))
    return Panel(title, COMPUTE, y_label, series, log_x=True)


def _charts(results: Results) -> list[Chart | Panel]:
    """Fig. 5 here and in the paper, each with the power laws of the families."""
    measured = {kind: _measured(results, kind) for kind in FAMILIES}
    return [
        Chart(
            "Measured here",
            "transfer accuracy",
            transfer,
            x=lambda group: group.runs[0].exaflops,
            lines="family",
            x_label=COMPUTE,
            log_x=True,
            front=True,
        ),
        power_law_panel("Power laws fitted here", "transfer accuracy", measured),
        paper_panel(),
        power_law_panel("Power laws of Table 6", "average of five data sets", PRINTED),
    ]


def _summary(results: Results) -> str:
    measured = {kind: _measured(results, kind) for kind in FAMILIES}
    ratio = compute_ratio(measured["ViT"], measured["ResNet"])
    here = "there is no accuracy that both reach" if ratio is None else f"it is {ratio:.1f} times"
    exponents, paper_exponents = (
        ", ".join(f"{kind} {fit_power_law(runs)[0]:.3f}" for kind, runs in families.items())
        for families in (measured, PRINTED)
    )
    return (
        "Models of three families, pre-trained with different amounts of compute. For the accuracy in the middle of "
        f"the range that both reach, ResNets take {compute_ratio(VIT, RESNET):.1f} times the compute of ViTs in Table "
        f"6; here {here}. Exponents of the power law of the error over compute, on each family's front: here "
        f"{exponents}; in Table 6 {paper_exponents}."
    )


SCALING = Study(
    name="scaling",
    source="Fig. 5, Table 6",
    question="Which family makes the most of its compute: ViT, hybrid or ResNet?",
    variants=variants,
    seeds=10,
    summary=_summary,
    rows=("model", "length"),
    columns={
        "family": "family",
        "model": "model",
        "length": "length",
        "exaFLOPs": lambda row: f"{row.runs[0].exaflops:.2g}",
        **MEASURED,
    },
    claims=(
        Claim(
            "With as much compute, in the middle of the range that both cover, ViTs transfer better than ResNets.",
            "2 to 4 times less compute for the same (Sec. 4.4); "
            f"{100 * accuracy_lead(VIT, RESNET):.2f} points there in Table 6",
            lambda seed: accuracy_lead(_measured_front(seed, "ViT"), _measured_front(seed, "ResNet")),
            out_of_reach=FEW_IMAGES,
        ),
        Claim(
            "With the least compute that both cover, hybrids transfer better than ViTs.",
            "slightly, at small budgets (Sec. 4.4); "
            f"{100 * accuracy_lead(HYBRID, VIT, 0.0):.2f} points there in Table 6",
            lambda seed: accuracy_lead(_measured_front(seed, "hybrid"), _measured_front(seed, "ViT"), 0.0),
        ),
        Claim(
            "ViTs do not saturate: the run with most compute transfers better than all with at most half of it.",
            f"no saturation within the range tried (Sec. 4.4); {100 * lead_of_largest(VIT, VIT):.2f} points in Table 6",
            lambda seed: lead_of_largest(_measured(seed, "ViT"), _measured(seed.study, "ViT")),
            relevant=min(Claim.relevant, lead_of_largest(VIT, VIT)),
        ),
    ),
    charts=_charts,
)

"""Sec. 4.3, Fig. 3 and 4: how much data a Vision Transformer needs before it is as good as a ResNet."""

from collections.abc import Callable
from typing import Any

import numpy as np

from vitlab.config import TrainConfig
from vitlab.models.config import ModelConfig, ViTConfig
from vitlab.recipes import finetune, pretrain
from vitlab.studies.presets import FEW_IMAGES, jft, pretraining, resnet, vit
from vitlab.studies.spec import (
    HELD_OUT,
    Cell,
    Chart,
    Claim,
    Labels,
    Result,
    Results,
    Scale,
    Study,
    StudyRun,
    changed,
    difference,
    named,
    percent,
)

PRETRAINING, FINETUNING = "pre-training", "fine-tuning"
TITLES = {PRETRAINING: "pre-trained", FINETUNING: "fine-tuned"}
"""Fig. 4 and Fig. 3."""

SMALL_MODELS: dict[str, tuple[str, ModelConfig]] = {
    "ViT-3x96/7": ("ViT", vit(28, 7, 96, 3, num_classes=10)),
    "R8x0.5": ("ResNet", resnet(1, 1, num_classes=10)),
}
"""At `small`, 4 million multiply-accumulates an image: name -> family, model."""
SMALL_DATA = ("fashion_mnist", "cifar10")
SMALL_RATES = {"ViT": 2e-3, "ResNet": 3e-3}
"""Learning rates at `small`, near the best ones of both in short runs."""
SMALL_STEPS = {0.01: 600, 0.03: 2400, 0.1: 8000}
"""Part (fraction of the images) -> steps at `small`, 70 to 105 epochs. The whole would take about 17 core-hours."""
SMALL_DECAYS = {0.01: (0.05, 0.5, 2.0), 0.03: (0.05, 0.5)}
"""Part -> weight decays at `small`, for held-out images to choose: many epochs may need a larger one (Sec. 4.3)."""
LONGEST_DECAY = {"ViT": 0.05, "ResNet": 0.5}
"""Weight decay of the longest runs at `small`, on the largest part: the best on the held-out images of one seed."""

PAPER_MODELS = {
    "ViT-b/32": ("ViT", "half", "ViT-B/32", {"width": 384, "heads": 6, "mlp_dim": 1536}),
    "ViT-B/32": ("ViT", "small", "ViT-B/32", {}),
    "ViT-L/32": ("ViT", "medium", "ViT-L/32", {}),
    "ViT-L/16": ("ViT", "large", "ViT-L/16", {}),
    "R50x1": ("ResNet", "small", "R50x1", {}),
    "R152x2": ("ResNet", "large", "R152x2", {}),
}
"""Fig. 4's models: name -> family, size, row of Table 3, changes to its model."""
PAPER_PARTS = (0.03, 0.1, 0.3, 1.0)
"""Fractions of the pre-training data, nested: of JFT's 303 million images the 9, 30, 90 and all of Fig. 4."""


def early_stopped(result: Result) -> float:
    """Metric: few-shot accuracy at the evaluation with the best accuracy on held-out images.

    Early stopping is the only regularizer in Fig. 4: the last weights of a model may have memorized its few images. Of
    runs without few-shot accuracy, which are fine-tunings and all runs at `small`, it is the final test accuracy.
    """
    config = result.run.config
    if config.fewshot is None:
        return result.metrics["accuracy"]
    metric = f"fewshot_{config.fewshot.shots[0]}shot"
    evaluations = [record for record in result.records if metric in record]
    return max(evaluations, key=lambda record: record[f"{config.data.eval_split}_accuracy"])[metric]


def variants(scale: Scale) -> list[StudyRun]:
    """Every model on every part; at the paper's scale with the same steps for all, and then fine-tuned."""
    if scale == "small":
        return [
            _run(name, family, "small", part, _small(family, model, data, part, decay), data)
            for data in SMALL_DATA
            for name, (family, model) in SMALL_MODELS.items()
            for part in SMALL_STEPS
            for decay in SMALL_DECAYS.get(part, (LONGEST_DECAY[family],))
        ]
    pretrained = [
        _run(name, family, size, part, _paper(row, changes, part))
        for name, (family, size, row, changes) in PAPER_MODELS.items()
        for part in PAPER_PARTS
    ]
    config = changed(finetune.imagenet(), model=ViTConfig(image_size=384), average_decay=None)
    finetuned = [
        StudyRun(f"{run.name}.finetuned", config, {**run.labels, "run": FINETUNING}, init_from=run.name)
        for run in pretrained
    ]
    return pretrained + finetuned


def _run(model: str, family: str, size: str, part: float, config: TrainConfig, data: str = "") -> StudyRun:
    """Pre-training on a part of the data; `data` is "" at the paper's scale, which has one data set and one decay."""
    labels = {"model": model, "family": family, "size": size, "part": part, "data": data, "run": PRETRAINING}
    labels["decay"] = config.optim.weight_decay
    name = f"{model.replace('/', '-')}.{100 * part:g}"
    return StudyRun(f"{data}.{name}.decay-{config.optim.weight_decay:g}" if data else name, config, labels)


def _small(family: str, model: ModelConfig, data: str, part: float, decay: float) -> TrainConfig:
    """Learns all classes, measured by its own test: few-shot accuracy has several times its spread."""
    images = {"name": data, "classes": None, "train_split": "train", "eval_split": "val", "subset_fraction": part}
    optim = {"lr": SMALL_RATES[family], "weight_decay": decay}
    return pretraining(model, SMALL_STEPS[part], data=images, fewshot=None, optim=optim)


def _paper(row: str, changes: dict[str, Any], part: float) -> TrainConfig:
    """A model of Fig. 4 as Table 3 trains it; every part gets the steps of 7 epochs of the whole.

    Deviation: the paper fine-tunes (Fig. 3) models of ImageNet, ImageNet-21k and JFT, not of parts of JFT; those runs
    are the three functions of `recipes.pretrain`.
    """
    steps = round(7 * 303e6 / pretrain.BATCH_SIZE)
    config = changed(jft(row, **changes), data={"subset_fraction": part})
    return changed(config, epochs=None, steps=steps, eval_every=steps // 20)


def _images(results: Results, data: str) -> dict[float, int]:
    """Part of this data set -> number of images in it."""
    pretrained = results.study.where(run=PRETRAINING, data=data)
    return {result.run.labels["part"]: result.examples for result in pretrained}


def at_best_decay(results: Results) -> Results:
    """The runs at the weight decay with the best held-out accuracy in pre-training, for each model and part."""

    def is_best(result: Result) -> bool:
        labels = {name: result.run.labels[name] for name in ("data", "model", "part")}
        best = results.study.best("decay", HELD_OUT, run=PRETRAINING, **labels)
        return result.run.labels["decay"] == best

    return results.select(is_best)


def _columns(results: Results) -> dict[str, Cell]:
    parts = {f"{100 * part:g}%": percent(early_stopped, part=part) for part in results.values("part")}
    return {"data": "data", "model": "model", "measured, %": named("run", TITLES), **parts}


def gain(ahead: Labels, behind: Labels) -> Callable[[Results], float]:
    """How much more accuracy `ahead` gains than `behind` with tenfold images, as a function of the runs of a seed: the
    slope of the lead of `ahead` over the logarithm of the images."""

    def slope(runs: Results) -> float:
        images = _images(runs, ahead["data"])
        leads = [difference(early_stopped, {**ahead, "part": part}, {**behind, "part": part})(runs) for part in images]
        return float(np.polyfit(np.log10(list(images.values())), leads, 1)[0])

    return slope


def _claims(results: Results) -> list[Claim]:
    """The claims about the models and data sets that this scale has."""
    parts = results.values("part")
    least, most = {"part": parts[0]}, {"part": parts[-1]}
    claims = []
    for group in results.where(run=PRETRAINING, family="ResNet").groups("data", "size"):
        data, size = group.labels["data"], group.labels["size"]
        resnets = {"run": PRETRAINING, "data": data, "size": size, "family": "ResNet"}
        vits = resnets | {"family": "ViT"}
        where = f"of the {size} models" + (f" on {data}" if data else "")
        names = "ViT-L/16 and R152x2" if size == "large" else "ViT-B/32 and R50x1"
        paper = f"as {names}, on 9 and 300 million images (Fig. 4, no numbers)"
        resnet_lead = difference(early_stopped, resnets | least, vits | least)
        vit_lead = difference(early_stopped, vits | most, resnets | most)
        claims += [
            Claim(f"With the least data the ResNet is ahead, {where}.", paper, resnet_lead),
            Claim(
                f"The ViT gains more from ten times the data than the ResNet does, {where}.", paper, gain(vits, resnets)
            ),
            Claim(f"With the most data the ViT is ahead, {where}.", paper, vit_lead, out_of_reach=FEW_IMAGES),
        ]
    if "large" not in results.values("size"):
        return claims
    for run, title in TITLES.items():
        small = {"run": run, "data": "", "family": "ViT", "size": "small"}
        text = f"The larger ViT gains more from ten times the data than the smaller one does ({title})."
        paper = "ViT-L/16 is behind ViT-B/16 after ImageNet and ahead after JFT (Fig. 3, Table 5)"
        claims.append(Claim(text, paper, gain(small | {"size": "large"}, small)))
    return claims


def _charts(results: Results) -> list[Chart]:
    """Accuracy over images, of every data set, pre-trained and where this scale has it fine-tuned."""
    return [_chart(runs.labels["run"], runs.labels["data"]) for runs in results.groups("run", "data")]


def _chart(run: str, data: str) -> Chart:
    return Chart(
        f"{data}, {TITLES[run]}" if data else TITLES[run].capitalize(),
        "accuracy",
        early_stopped,
        x=lambda group: _images(group, data)[group.labels["part"]],
        lines="model",
        where=lambda group: (group.labels["run"], group.labels["data"]) == (run, data),
        x_label="images learned from",
        log_x=True,
    )


DATA_SIZE = Study(
    name="data-size",
    source="Fig. 3, Fig. 4, Sec. 4.3",
    question="How much data does a ViT need before it is as good as a ResNet?",
    variants=variants,
    summary="Every model learns from nested parts of the data. At the scale `small` it takes 70 to 105 epochs and is "
    "tested on its own task; the best of several weight decays is chosen on held-out images, for the largest part by "
    "one seed. At the paper's scale it always takes as many steps; its few-shot accuracy is taken at the "
    "evaluation with the best accuracy on held-out images, its fine-tuned accuracy at the last step.",
    compared=at_best_decay,
    rows=("run", "data", "model"),
    columns=_columns,
    claims=_claims,
    charts=_charts,
)

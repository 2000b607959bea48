"""Sec. 4.3, Fig. 3 and 4: how much data a Vision Transformer needs before it is as good as a ResNet."""

from typing import Any

from vitlab.config import FinetuneConfig, TrainConfig
from vitlab.models.config import ModelConfig, ViTConfig
from vitlab.models.resnet_config import ResNetBody
from vitlab.recipes import finetune, pretrain
from vitlab.studies.presets import changed, finetuning, jft, pretraining, resnet, vit
from vitlab.studies.spec import Chart, Claim, Point, Result, Results, Scale, Study, difference, percent

PARTS = (0.03, 0.1, 0.3, 1.0)
"""Fractions of the pre-training data, nested: of JFT's 303 million images the 9, 30, 90 and all of Fig. 4."""
GPU_PARTS = (0.01, *PARTS)
PRETRAINING, FINETUNING = "pre-training", "fine-tuning"

# 2 to 8 million multiply-accumulates an image at `small`, 24 to 185 million at `gpu`.
MODELS: dict[Scale, dict[str, tuple[str, str, ModelConfig]]] = {
    "small": {
        "ViT-64/7": ("ViT", "small", vit(28, 7, 64, 4)),
        "ViT-96/7": ("ViT", "large", vit(28, 7, 96, 6)),
        "R8x0.5": ("ResNet", "small", resnet(28, (1, 1))),
        "R14x0.5": ("ResNet", "large", resnet(28, (2, 2))),
        "R8x0.5+ViT-64": ("hybrid", "small", vit(28, 1, 64, 2, stem=ResNetBody((1, 1), width=32))),
    },
    "gpu": {
        "ViT-128/4": ("ViT", "small", vit(32, 4, 128, 6)),
        "ViT-192/4": ("ViT", "large", vit(32, 4, 192, 9)),
        "R14x1": ("ResNet", "small", resnet(32, (2, 2), width=64)),
        "R26x1.5": ("ResNet", "large", resnet(32, (2, 2, 2, 2), width=96)),
        "R14x1+ViT-192": ("hybrid", "small", vit(32, 1, 192, 6, stem=ResNetBody((2, 2), width=64))),
    },
}
"""Name -> family, size (`small` is compared with `small`), model."""
PAPER = {
    "ViT-b/32": ("ViT", "half", "ViT-B/32", {"width": 384, "heads": 6, "mlp_dim": 1536}),
    "ViT-B/32": ("ViT", "small", "ViT-B/32", {}),
    "ViT-L/32": ("ViT", "medium", "ViT-L/32", {}),
    "ViT-L/16": ("ViT", "large", "ViT-L/16", {}),
    "R50x1": ("ResNet", "small", "R50x1", {}),
    "R152x2": ("ResNet", "large", "R152x2", {}),
}
"""Fig. 4's models: name -> family, size, row of Table 3, changes to its model."""


def early_stopped(result: Result) -> float:
    """Metric: few-shot accuracy at the evaluation with the best accuracy on held-out images.

    It is the only regularizer in Fig. 4: the last weights of a model may have memorized its few images.
    """
    config = result.point.config
    assert config.fewshot is not None
    metric = f"fewshot_{config.fewshot.shots[0]}shot"
    evaluations = [record for record in result.records if metric in record]
    return max(evaluations, key=lambda record: record[f"{config.data.eval_split}_accuracy"])[metric]


MEASURES = (
    (PRETRAINING, early_stopped, "few-shot accuracy on other classes"),
    (FINETUNING, "accuracy", "fine-tuned accuracy on other classes"),
)
"""Fig. 4 and Fig. 3."""


def variants(scale: Scale) -> list[Point]:
    """Every model on every part with the same settings and steps, as in the paper; then fine-tuned.

    At `small` only the models of the least and the most data are fine-tuned.
    """
    candidates = _paper() if scale == "paper" else _small(scale)
    parts = GPU_PARTS if scale == "gpu" else PARTS
    after = _finetuning(scale)
    before, tuned = [], []
    for name, (family, size, config) in candidates.items():
        for part in parts:
            labels = {"model": name, "family": family, "size": size, "part": part}
            pretrained = f"{name.replace('/', '-').replace('+', '-')}.{100 * part:g}"
            before.append(Point(pretrained, changed(config, data={"part": part}), labels | {"run": PRETRAINING}))
            if scale != "small" or part in (parts[0], parts[-1]):
                tuned.append(
                    Point(f"{pretrained}.finetuned", after, labels | {"run": FINETUNING}, init_from=pretrained)
                )
    return before + tuned


def _small(scale: Scale) -> dict[str, tuple[str, str, TrainConfig]]:
    """The held-out images choose the evaluation that counts."""
    steps = 600 if scale == "small" else 2500
    more: dict[str, Any] = {"eval_every": steps // 5, "fewshot": {"test_images": 1000}}
    more["data"] = {"train_split": "train", "eval_split": "val", "pad": 3}
    models = MODELS[scale].items()
    return {name: (kind, size, pretraining(scale, model, steps, **more)) for name, (kind, size, model) in models}


def _paper() -> dict[str, tuple[str, str, TrainConfig]]:
    """Fig. 4's models as Table 3 trains them; every part gets the steps of 7 epochs of the whole.

    Deviation: the paper fine-tunes (Fig. 3) models of ImageNet, ImageNet-21k and JFT, not of parts of JFT; those runs
    are the three functions of `recipes.pretrain`.
    """
    steps = round(7 * 303e6 / pretrain.BATCH_SIZE)
    return {
        name: (family, size, changed(jft(row, **model), epochs=None, steps=steps, eval_every=steps // 20))
        for name, (family, size, row, model) in PAPER.items()
    }


def _finetuning(scale: Scale) -> FinetuneConfig:
    if scale == "paper":
        return changed(finetune.imagenet(), model=ViTConfig(image_size=384), average_decay=None)
    if scale == "small":
        return finetuning(scale, part=0.01, steps=100, batch_size=32)
    return finetuning(scale, part=0.1, steps=300, batch_size=128)


def _images(results: Results) -> dict[float, int]:
    """Part -> images that the pre-training learns from."""
    before = results.study.where(run=PRETRAINING)
    return {float(run.point.labels["part"]): run.examples for run in before}


def _columns(results: Results) -> dict[str, Any]:
    metrics = {run: (metric, title) for run, metric, title in MEASURES}
    columns: dict[str, Any] = {"model": "model", "measured, %": lambda row: metrics[row.labels["run"]][1]}
    for part, count in _images(results).items():
        columns[f"{count:,} images"] = lambda row, part=part: percent(metrics[row.labels["run"]][0], part=part)(row)
    return columns


def _claims(results: Results) -> list[Claim]:
    least, most = ({"part": part} for part in (min(_images(results)), max(_images(results))))
    claims = []
    for size, names in (("small", "ViT-B/32 and R50x1"), ("large", "ViT-L/16 and R152x2")):
        vit, resnet = ({"run": PRETRAINING, "family": family, "size": size} for family in ("ViT", "ResNet"))
        paper = f"as {names}, on 9 and 300 million images (Fig. 4, no numbers)"
        compared = {
            "With the least data the ResNet is ahead": (resnet | least, vit | least),
            "More data brings the ViT more than the ResNet": (
                (vit | most, resnet | least),
                (vit | least, resnet | most),
            ),
            "With all data the ViT is ahead": (vit | most, resnet | most),
        }
        claims += [
            Claim(f"{text}, of the {size} models.", paper, difference(early_stopped, *sides))
            for text, sides in compared.items()
        ]
    for run, metric, title in MEASURES:
        large, small = ({"run": run, "family": "ViT", "size": size} for size in ("large", "small"))
        text = f"More data brings the larger ViT more than the smaller one: {title}."
        paper = "ViT-L/16 is behind ViT-B/16 after ImageNet and ahead after JFT (Fig. 3, Table 5)"
        sides = (large | most, small | least), (large | least, small | most)
        claims.append(Claim(text, paper, difference(metric, *sides)))
    return claims


DATA_SIZE = Study(
    name="data-size",
    source="Fig. 3, Fig. 4, Sec. 4.3",
    question="How much data does a ViT need before it is as good as a ResNet?",
    variants=variants,
    summary="Every model learns from nested parts of the data, always for as many steps and with the same settings. "
    "Its few-shot accuracy is that of the evaluation with the best accuracy on held-out images, its fine-tuned "
    "accuracy that of the last weights.",
    rows=("run", "model"),
    columns=_columns,
    claims=_claims,
    charts=tuple(
        Chart(
            title.capitalize(),
            "accuracy",
            metric,
            x=lambda group: _images(group)[float(group.labels["part"])],
            lines="model",
            where=lambda group, run=run: group.labels["run"] == run,
            x_label="images learned from",
            log_x=True,
        )
        for run, metric, title in MEASURES
    ),
)

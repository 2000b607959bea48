"""Sec. 4.3: what weight decay, dropout and label smoothing bring a ViT on little data, and on more."""

from typing import Any

from vitlab.config import TrainConfig
from vitlab.recipes import pretrain
from vitlab.studies.point import Point, Scale, held_out
from vitlab.studies.presets import changed, pretraining, vit
from vitlab.studies.spec import Chart, Claim, Study, share
from vitlab.studies.statistics import Difference, Results

PLAIN, ALL = "none", "all three"


def _regularizers(decay: float = 0.0, dropout: float = 0.0, smoothing: float = 0.0) -> dict[str, Any]:
    return {"optim": {"weight_decay": decay}, "model": {"dropout": dropout}, "label_smoothing": smoothing}


PAPER = {
    PLAIN: _regularizers(),
    "decay 0.03": _regularizers(decay=0.03),
    "decay 0.1": _regularizers(decay=0.1),
    "decay 0.3": _regularizers(decay=0.3),
    "dropout 0.1": _regularizers(dropout=0.1),
    "smoothing 1e-4": _regularizers(smoothing=1e-4),
    ALL: _regularizers(decay=0.3, dropout=0.1, smoothing=1e-4),
}
"""Table 3's decays and dropout; the smoothing is that of the authors' later recipes, for the paper prints none."""
SMALL = {
    PLAIN: _regularizers(),
    "decay 0.3": _regularizers(decay=0.3),
    "decay 1": _regularizers(decay=1.0),
    "decay 3": _regularizers(decay=3.0),
    "dropout 0.1": _regularizers(dropout=0.1),
    "smoothing 0.1": _regularizers(smoothing=0.1),
    ALL: _regularizers(decay=1.0, dropout=0.1, smoothing=0.1),
}
"""Deviation: larger decays than Table 3's. A step takes rate x decay off a parameter: over the paper's 94,000 steps on
ImageNet 0.3 divides by exp(42) what no gradient renews, over some hundred steps by next to nothing."""
PARTS: dict[Scale, dict[str, float]] = {"tiny": {"2 %": 0.02, "50 %": 0.5}, "gpu": {"5 %": 0.05, "100 %": 1.0}}


def variants(scale: Scale) -> list[Point]:
    """A ViT with every setting on two amounts of data, nested, with as many steps on both.

    In the paper, ViT-B/16 on ImageNet and on ImageNet-21k by Table 3's recipes.
    """
    if scale == "paper":
        runs = {"ImageNet": pretrain.imagenet("ViT-B/16"), "ImageNet-21k": pretrain.imagenet21k("ViT-B/16")}
    else:
        runs = {name: _small(scale, part) for name, part in PARTS[scale].items()}
    return [
        Point(
            f"{name.removesuffix(' %')}.{setting.replace(' ', '-')}",
            changed(run, **changes),
            {"data": name, "setting": setting},
        )
        for name, run in runs.items()
        for setting, changes in (PAPER if scale == "paper" else SMALL).items()
    ]


def _small(scale: Scale, part: float) -> TrainConfig:
    """All classes; the images are neither shifted nor mirrored, which would be a fourth regularizer."""
    model = vit(28, 7, 64, 4) if scale == "tiny" else vit(32, 4, 192, 8, heads=6, mlp_ratio=4)
    images = {"train_split": "train", "eval_split": "val", "part": part, "classes": None, "crop": "none", "pad": 4}
    steps = 600 if scale == "tiny" else 3000
    return pretraining(scale, changed(model, num_classes=10), steps, data=images | {"flip": False}, fewshot=None)


def tuned(results: Results, amount: str | float) -> str | float:
    """The setting with the best accuracy on held-out images, in the mean over seeds."""
    return results.best("setting", held_out, data=amount)


def _gain(amount: str | float) -> Any:
    """Cell: what the row's setting gains over none."""

    def cell(row: Results) -> str:
        setting = {"data": amount, "setting": row.labels["setting"]}
        gain: Difference = row.study.difference("accuracy", setting, {"data": amount, "setting": PLAIN})
        return "" if row.labels["setting"] == PLAIN else str(gain)

    return cell


def _columns(results: Results) -> dict[str, Any]:
    columns: dict[str, Any] = {"setting": "setting"}
    for amount in results.values("data"):
        columns |= {
            f"held out, {amount}": share(held_out, data=amount),
            f"accuracy, {amount}": share("accuracy", data=amount),
            f"gain over none, {amount}, points": _gain(amount),
        }
    return columns


def _claims(results: Results) -> list[Claim]:
    little, much = results.values("data")
    best = {amount: tuned(results, amount) for amount in (little, much)}
    chosen = {amount: {"data": amount, "setting": best[amount]} for amount in best}
    plain = {amount: {"data": amount, "setting": PLAIN} for amount in best}
    return [
        Claim(
            f"With little data ({little}) tuned regularizers raise the accuracy (chosen: {best[little]}).",
            "weight decay, dropout and smoothing tuned to boost the smaller data sets (Sec. 4.3); no number is printed",
            "accuracy",
            chosen[little],
            plain[little],
        ),
        Claim(
            f"They gain more with little data than with much ({much}; chosen there: {best[much]}).",
            "Table 3: decay 0.3 and dropout on ImageNet, 0.03 and dropout on ImageNet-21k, 0.1 and none on JFT-300M",
            "accuracy",
            (chosen[little], plain[much]),
            (plain[little], chosen[much]),
        ),
    ]


REGULARIZATION = Study(
    name="dropout-decay-smoothing",
    source="Sec. 4.3",
    question="Do weight decay, dropout and label smoothing help a ViT on little data, and on more?",
    variants=variants,
    summary="A ViT learns from little data and from more, without and with each of the regularizers that Sec. 4.3 "
    "tunes on the smaller data sets, and with all three. Tuned means the setting with the best accuracy on held-out "
    "images; gains are of test accuracy over none, paired by seed, with their bootstrap interval.",
    rows=("setting",),
    columns=_columns,
    claims=_claims,
    charts=(
        Chart("Regularizers alone and together", "accuracy, %", "accuracy", x="setting", lines="data", categories=True),
    ),
)

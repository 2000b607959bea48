"""The short runs of the studies: models, pre-trainings and fine-tunings of the scale `small`.

They learn from Fashion-MNIST at 28 pixels; most pre-train on half of the classes and transfer to the other half.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vitlab.config import DataConfig, FewShotConfig, FinetuneConfig, OptimConfig, TrainConfig
from vitlab.models.config import ModelConfig, ResNetConfig, ViTConfig
from vitlab.models.resnet_config import ResNetBody
from vitlab.recipes import pretrain, tiny
from vitlab.studies.spec import Chart, Result, Scale, changed, percent

LEARNED, TRANSFER = (3, 4, 6, 7, 9), (0, 1, 2, 5, 8)
"""Classes of pre-training and of transfer. In the halves tried (one seed), few-shot accuracy rises with the length of
training for these: dress, coat, shirt, sneaker, boot; then T-shirt, trouser, pullover, sandal, bag."""

FEWSHOT = "fewshot_5shot"
"""The metric of App. D: accuracy on the transfer task with five examples of each class."""
SHOTS = (5, 500)
"""Examples of each class at `small`. With 500 the accuracy depends little on which are drawn, as with a
linear probe: the claims compare the most shots that a run has (`transfer`)."""

FEW_IMAGES = "in the paper ViTs overtake between 9 and 300 million images (Fig. 4)"
"""Why only the paper's scale shows a ViT ahead of a ResNet."""

L2 = 1.0
"""Penalty of few-shot accuracy.

Deviation: Google's is 2^10. Features of 48 numbers, not 768, have a norm of about 5; Google's penalty would leave
little more than the class means of least squares.
"""
Models = Mapping[Scale, tuple[ModelConfig, int] | str]
"""Scale -> a small model and its steps; at the paper's scale the name of Table 3's row."""


def transfer(result: Result) -> float:
    """Metric: accuracy on the transfer task, by least squares on the frozen representation of the most shots."""
    fewshot = result.run.config.fewshot
    assert fewshot is not None
    return result.metrics[f"fewshot_{max(fewshot.shots)}shot"]


MEASURED = {"5-shot, %": percent(FEWSHOT), "transfer, %": percent(transfer), "accuracy, %": percent("accuracy")}
"""The columns of a table about transfer."""


def vit(side: int, patch_size: int, width: int, depth: int, **more: Any) -> ViTConfig:
    """A small ViT as in `recipes/tiny.py`, for as many classes as are learned."""
    return tiny.vit(side, patch_size, width, depth, **({"head_std": 0.1, "num_classes": len(LEARNED)} | more))


def resnet(*layers: int, num_classes: int = len(LEARNED)) -> ResNetConfig:
    """A small ResNet for 28 pixels with this many units in each stage."""
    return ResNetConfig(image_size=28, num_classes=num_classes, body=body(*layers))


def body(*layers: int) -> ResNetBody:
    """Convolutions of a small ResNet or hybrid. With a width of 32, BiT's 32 groups would have one channel each."""
    return ResNetBody(layers, width=32, version="v2", min_group_size=16)


def _data(classes: tuple[int, ...], pad: int) -> DataConfig:
    images = DataConfig(name="fashion_mnist", train_split="trainval", eval_split="test", classes=classes)
    return replace(images, crop="pad", pad=pad)


def pretraining(model: ModelConfig, steps: int, **changes: Any) -> TrainConfig:
    """Pre-training on half of the classes, 64 of 30,000 images a step; few-shot accuracy on the others (ten draws)."""
    config = TrainConfig(
        model=model,
        data=_data(LEARNED, pad=2),
        optim=OptimConfig(lr=1e-3, weight_decay=0.05, warmup_steps=steps // 10, clip_norm=1.0),
        fewshot=FewShotConfig(classes=TRANSFER, shots=SHOTS, l2=L2, seeds=10, test_split="test"),
        steps=steps,
        batch_size=64,
        log_every=100,
    )
    return changed(config, **changes)


def comparison(scale: Scale, models: Models, **model: Any) -> TrainConfig:
    """The pre-training of the studies of App. D with these changes to its model."""
    base = models[scale]
    if isinstance(base, str):
        return jft(base, **model)
    return changed(pretraining(*base, optim={"lr": 2e-3}, checkpoint_every=500), model=model)


def finetuning(subset_fraction: float, steps: int, batch_size: int, **changes: Any) -> FinetuneConfig:
    """A short fine-tuning on a part of the other classes."""
    config = FinetuneConfig(
        model=ViTConfig(image_size=28, patch_size=4),
        data=replace(_data(TRANSFER, pad=3), subset_fraction=subset_fraction),
        optim=OptimConfig(name="sgd", lr=0.03, warmup_steps=steps // 10, clip_norm=1.0),
        steps=steps,
        batch_size=batch_size,
    )
    return changed(config, **changes)


def jft(row: str = "ViT-B/16", shots: tuple[int, ...] = (5,), **model: Any) -> TrainConfig:
    """Table 3's row on JFT-300M with changes to its model, and few-shot accuracy on ImageNet."""
    config = pretrain.jft(row)
    if "width" in model:
        model["representation_size"] = model["width"]
    return changed(config, model=model, fewshot=FewShotConfig(dataset="imagenet", shots=shots, test_split="test"))


def transfer_and_accuracy(prefix: str, **settings: Any) -> tuple[Chart, Chart]:
    """Charts of accuracy on the transfer task, and on the pre-training task."""
    return (
        Chart(f"{prefix}: transfer accuracy", "transfer accuracy", transfer, **settings),
        Chart(f"{prefix}: test accuracy", "test accuracy", "accuracy", **settings),
    )

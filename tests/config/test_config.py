"""A run's settings: complete, checked, and free of torch."""

import dataclasses
import json
from typing import Any

import pytest

from vitlab.config import DataConfig, FewShotConfig, FinetuneConfig, MaskingConfig, OptimConfig, TrainConfig
from vitlab.errors import UserError
from vitlab.models import ResNetBody, ViTConfig, get_config
from vitlab.models.variant import override
from vitlab.settings import from_dict, to_dict

HEADLESS = ViTConfig(num_classes=0)
HYBRID = ViTConfig(patch_size=1, stem=ResNetBody((1,), width=32), num_classes=0)
MASKED: dict[str, Any] = {"model": HEADLESS, "steps": 1, "masking": MaskingConfig()}
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(
            model=get_config("ViT-Ti/16", image_size=(32, 48), num_classes=3),
            data=DataConfig(classes=(0, 3), crop="random", crop_resize=40, randaugment_layers=2, subset_fraction=0.1),
            optim=OptimConfig(name="sgd", lr=0.03, clip_norm=1.0, warmup_steps=5),
            fewshot=FewShotConfig(dataset="cifar10", root="there", shots=(10,), test_images=100, classes=(5, 7)),
            loss="sigmoid",
            epochs=1.5,
            average_decay=0.999,
            microbatch=8,
        ),
        TrainConfig(model=HEADLESS, steps=1, masking=MaskingConfig("downsized", share=0.15)),
    ],
)
def test_json_and_back(config: TrainConfig) -> None:
    assert from_dict(TrainConfig, json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("kind", "name", "values"),
    [
        (DataConfig, "randaugment_magnitude", (-1, 31)),
        (DataConfig, "subset_fraction", (0.0, 1.5, NAN)),
        (OptimConfig, "lr", (-1e-3, NAN, INF)),
        (TrainConfig, "epochs", (-1.0, INF, NAN)),
        (TrainConfig, "seed", (-1, 2**63)),
        (TrainConfig, "average_decay", (0.0, 1.0)),
        (FinetuneConfig, "learning_rates", ((0.1, 0.0), (0.1, INF))),
        (FinetuneConfig, "held_out", (0.0, 1.0)),
        (FewShotConfig, "shots", ((5, 0), 5)),
        (MaskingConfig, "target", ("color",)),
    ],
)
def test_ranges(kind: type[Any], name: str, values: tuple[Any, ...]) -> None:
    complete = {"steps": 1} if issubclass(kind, TrainConfig) and name not in ("steps", "epochs") else {}
    for value in values:
        with pytest.raises(UserError, match=f"{name} is .*allowed"):
            kind(**{**complete, name: value})


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("kind", "values", "named"),
    [
        (DataConfig, {"crop": "random"}, "crop_resize"),
        (DataConfig, {"label_separator": ""}, "label_separator"),
        (DataConfig, {"group_by": "("}, "group_by"),
        (DataConfig, {"subset_seed": 3}, "subset_fraction"),
        (DataConfig, {"train_split": "test"}, "train_split='test'"),
        (DataConfig, {"eval_split": "all"}, "eval_split='all'"),
        (TrainConfig, {}, "epochs"),
        (TrainConfig, {"steps": 1, "epochs": 1.0}, "epochs"),
        (FinetuneConfig, {"steps": 1, "learning_rates": (0.1, 0.1)}, "learning rate"),
        (FinetuneConfig, {"steps": 1, "sweep_steps": 5}, "sweep_steps=5"),
        (FinetuneConfig, {"steps": 1, "fresh_positions": True, "from_scratch": True}, "from_scratch"),
        (FinetuneConfig, {"steps": 1, "pre_logits": "keep", "from_scratch": True}, "pre_logits='keep'"),
        (FinetuneConfig, {"steps": 1, "model": HEADLESS, "masking": MaskingConfig()}, "masking"),
        (FewShotConfig, {"shots": ()}, "shots"),
        (FewShotConfig, {"root": "there"}, "dataset"),
        (FewShotConfig, {"classes": (4, 4)}, "classes"),
        (MaskingConfig, {"masked": 0.8, "replaced": 0.3}, "masked=0.8 and replaced=0.3"),
        (TrainConfig, MASKED | {"model": get_config("R50x1")}, "patches"),
        (TrainConfig, MASKED | {"model": ViTConfig(patch_size=224, num_classes=0)}, "patches"),
        (TrainConfig, MASKED | {"model": ViTConfig()}, "num_classes=1000"),
        (TrainConfig, MASKED | {"model": ViTConfig(num_classes=0, pool="map")}, "pool='map'"),
        (TrainConfig, MASKED | {"model": ViTConfig(num_classes=0, representation_size=8)}, "representation_size=8"),
        (TrainConfig, MASKED | {"loss": "sigmoid"}, "loss='sigmoid'"),
        (TrainConfig, MASKED | {"label_smoothing": 0.1}, "label_smoothing=0.1"),
        (TrainConfig, MASKED | {"mixup": 0.2}, "mixup=0.2"),
        (TrainConfig, MASKED | {"model": dataclasses.replace(HEADLESS, patch_dropout=0.5)}, "patch_dropout=0.5"),
        (
            TrainConfig,
            MASKED | {"model": override(ViTConfig(), num_classes=0, pool="gap", final_norm="mean")},
            "final_norm='tokens'",
        ),
        (TrainConfig, MASKED | {"model": HYBRID}, "patches"),
        (TrainConfig, {"steps": 1, "optim": OptimConfig("sgd", beta1=0.8)}, r"optim\.beta1=0\.8 .*optim\.name"),
        (TrainConfig, {"steps": 1, "optim": OptimConfig(decay_on="kernels")}, r"'kernels' .*optim\.weight_decay"),
        (TrainConfig, {"steps": 1, "data": DataConfig(crop="pad", min_area=0.3)}, r"min_area=0\.3 .*data\.crop='pad'"),
        (FinetuneConfig, {"steps": 1, "data": DataConfig(randaugment_magnitude=9)}, "magnitude=9"),
    ],
)
def test_settings_that_exclude_each_other(kind: type[Any], values: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        kind(**values)


def test_settings_with_their_switch() -> None:
    data = DataConfig(min_area=0.3, randaugment_layers=2, randaugment_magnitude=9)
    optim = OptimConfig("sgd", momentum=0.8, schedule="linear", end_lr=1e-5, weight_decay=0.1, decay_on="kernels")
    TrainConfig(steps=1, data=data, optim=optim)


def test_single_run_of_a_finetuning() -> None:
    optim = OptimConfig("sgd", lr=0.5, momentum=0.8)
    whole = FinetuneConfig(steps=3, mixup=0.2, optim=optim, seed=4, learning_rates=(0.1, 1.0))
    single = TrainConfig(steps=3, mixup=0.2, optim=optim, seed=4)
    assert type(whole.single()) is TrainConfig
    assert whole.single() == single
    other = dataclasses.replace(single, optim=dataclasses.replace(optim, lr=0.1), seed=7)
    assert whole.single(0.1, 7) == other


def test_steps_from_epochs() -> None:
    assert TrainConfig(steps=7).total_steps(10_000) == 7
    assert TrainConfig(epochs=300.0).total_steps(1_268_355) == 92_897  # facts of the published ImageNet recipe
    assert TrainConfig(epochs=0.001, batch_size=64).total_steps(100) == 1

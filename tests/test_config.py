"""A run's settings: whole, checked, and free of torch."""

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest

from vitlab.config import DataConfig, FewShotConfig, FinetuneConfig, MaskingConfig, OptimConfig, TrainConfig
from vitlab.models import ResNetBody, ViTConfig, get_config
from vitlab.settings import from_dict, to_dict


def build(kind: type[Any], values: dict[str, Any]) -> Any:
    """`kind(**values)` as users meet it, past the suite's own type checks, which would speak first."""
    config = object.__new__(kind)
    for item in dataclasses.fields(kind):
        default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        object.__setattr__(config, item.name, values.get(item.name, default))
    config.__post_init__()
    return config


GRAPHS = {"steps": 1, "compile": True, "cuda_graphs": True}


def test_json_and_back() -> None:
    config = TrainConfig(
        model=get_config("ViT-Ti/16", image_size=(32, 48), num_classes=3),
        data=DataConfig(classes=(0, 3, 4), crop="random", crop_resize=40, randaugment_layers=2, part=0.1, part_seed=2),
        optim=OptimConfig(name="sgd", lr=0.03, clip_norm=1.0, warmup_steps=5),
        fewshot=FewShotConfig(dataset="cifar10", root="there", shots=(10,), test_images=100, classes=(5, 7)),
        loss="sigmoid",
        epochs=1.5,
        average_decay=0.999,
        microbatch=8,
    )
    assert from_dict(TrainConfig, json.loads(json.dumps(to_dict(config)))) == config


def test_every_setting_is_explained() -> None:
    """The help of the command line is made from the lines below each field."""
    import inspect

    for kind in (TrainConfig, DataConfig, OptimConfig, FewShotConfig, MaskingConfig):
        source = inspect.getsource(kind)
        for item in dataclasses.fields(kind):
            assert f"    {item.name}: " in source
        assert kind.__doc__


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"crop": "center"}, r"crop is 'center'; allowed: 'inception', 'random', 'pad', 'none'"),
        ({"min_area": 0.0}, r"min_area is 0\.0; .*\(0, 1\]"),
        ({"min_area": 1.5}, r"min_area is 1\.5; .*\(0, 1\]"),
        ({"crop": "random"}, r"crop='random' with crop_resize=None: `random` needs"),
        ({"crop_resize": 40}, r"crop='inception' with crop_resize=40: .*no other crop uses one"),
        ({"randaugment_layers": -1}, r"RandAugment of -1 layers"),
        ({"randaugment_magnitude": 31}, r"at magnitude 31: .*0-30"),
        ({"workers": -1}, r"workers=-1 .*must not be negative"),
        ({"pad": -1}, r"pad=-1 must not be negative"),
        ({"on_error": "ignore"}, r"on_error is 'ignore'; allowed: 'raise', 'skip'"),
        ({"part": 0.0}, r"part is 0\.0; it is a share of each class .* in \(0, 1\]"),
        ({"part": 1.5}, r"part is 1\.5; .*or None for all"),
        ({"part": float("nan")}, r"part is nan; "),
        ({"part": 0.5, "part_seed": -1}, r"part_seed is -1; it must be 0 or more"),
        ({"part_seed": 3}, r"part_seed is 3 and there is no part"),
        ({"train_split": "all"}, r"train_split is 'all', which .*Give train, val, trainval or test"),
        ({"eval_split": "all"}, r"eval_split is 'all', which "),
    ],
)
def test_wrong_data_settings(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(DataConfig, values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "adamw"}, r"name is 'adamw'; allowed: 'adam', 'sgd'"),
        ({"lr": -1e-3}, r"lr is -0\.001; it must be 0 or more"),
        ({"lr": float("nan")}, r"lr is nan; it must be 0 or more, and finite"),
        ({"lr": float("inf")}, r"lr is inf; it must be 0 or more, and finite"),
        ({"warmup_steps": -1}, r"warmup_steps is -1"),
        ({"warmup_steps": 1.5}, r"warmup_steps is 1\.5; allowed: int"),
        ({"cooldown_steps": -1}, r"cooldown_steps is -1"),
        ({"beta2": 1.0}, r"beta2 is 1\.0; it must lie in \[0, 1\)"),
        ({"momentum": -0.1}, r"momentum is -0\.1"),
        ({"clip_norm": 0.0}, r"clip_norm is 0\.0; give a positive norm, or None"),
    ],
)
def test_wrong_optimizer_settings(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(OptimConfig, values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, r"steps=None and epochs=None: give exactly one"),
        ({"steps": 1, "epochs": 1.0}, r"steps=1 and epochs=1\.0: give exactly one"),
        ({"steps": 0}, r"steps is 0; it must be positive"),
        ({"epochs": -1.0}, r"epochs is -1\.0; it must be positive"),
        ({"steps": 1, "batch_size": 0}, r"batch_size is 0"),
        ({"steps": 1, "microbatch": 0}, r"microbatch is 0"),
        ({"steps": 1, "eval_every": 0}, r"eval_every is 0"),
        ({"steps": 1, "keep_checkpoints": 0}, r"keep_checkpoints is 0"),
        ({"steps": 1, "label_smoothing": 1.0}, r"label_smoothing is 1\.0"),
        ({"steps": 1, "mixup": -0.2}, r"mixup is -0\.2"),
        ({"steps": 1, "average_decay": 1.0}, r"average_decay is 1\.0"),
        ({"steps": 1, "precision": "fp16"}, r"precision is 'fp16'; allowed: 'auto', 'float32'"),
        ({"steps": 1, "loss": "hinge"}, r"loss is 'hinge'; allowed: 'softmax', 'sigmoid'"),
        ({"steps": 1, "float8": True, "model": ViTConfig(width=24, heads=2)}, r"float8 .* this is a width of 24"),
        ({"steps": 1, "float8": True, "model": get_config("R50x1")}, r"float8 .* this is a ResNet; take such a ViT"),
        ({"steps": 1, "cuda_graphs": True}, r"cuda_graphs are recorded by torch.compile; give --compile too, or leave"),
        (GRAPHS | {"microbatch": 2048}, r"cuda_graphs take .* Leave out microbatch=2048 .*give --microbatch 4096"),
        (GRAPHS | {"fsdp": True}, r"cuda_graphs need weights that stay .*fsdp .*give one of them, or leave"),
        (GRAPHS | {"data": DataConfig(on_error="skip")}, r"cuda_graphs take batches of one shape, .*give 'raise', or"),
    ],
)
def test_wrong_run_settings(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(TrainConfig, values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning_rates": (0.1, 0.0)}, r"learning_rates are \(0\.1, 0\.0\); each must be positive and finite"),
        ({"learning_rates": (0.1, float("inf"))}, r"each must be positive and finite"),
        ({"learning_rates": (0.1, 0.1)}, r"name each of them once"),
        ({"held_out": 1.0}, r"held_out is 1\.0; it is a share of the training split, in \(0, 1\)"),
        ({"runs": 0}, r"runs is 0; it must be at least 1"),
        ({"sweep_steps": 5}, r"sweep_steps is 5 for the learning rates \(\); .*two rates or more"),
        ({"sweep_steps": 0, "learning_rates": (0.1, 0.2)}, r"sweep_steps is 0"),
        ({"automatic": ("size",)}, r"automatic is \('size',\)"),
        ({"batch_size": 0}, r"batch_size is 0"),
        ({"head_std": 0.0}, r"head_std is 0.0; it must be positive"),
        ({"fresh_positions": True, "from_scratch": True}, r"fresh_positions has no effect from scratch"),
    ],
)
def test_wrong_finetuning_settings(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(FinetuneConfig, {"steps": 1} | values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optim": OptimConfig(momentum=0.8)}, r"optim\.momentum=0\.8 has no effect with optim\.name='adam'; give opt"),
        ({"optim": OptimConfig("sgd", beta1=0.8)}, r"optim\.beta1=0\.8 has no effect .*or leave optim\.beta1 at 0\.9"),
        ({"optim": OptimConfig(end_lr=1e-5)}, r"end_lr=1e-05 has no effect .*give optim\.schedule='linear' too"),
        ({"optim": OptimConfig(decay_on="kernels")}, r"decay_on='kernels' .*give optim\.weight_decay above 0 too"),
        ({"data": DataConfig(crop="pad", min_area=0.3)}, r"data\.min_area=0\.3 has no effect with data\.crop='pad'"),
        ({"data": DataConfig(pad=2)}, r"data\.pad=2 has no effect with data\.crop='inception'"),
        ({"data": DataConfig(randaugment_magnitude=9)}, r"magnitude=9 .*give data\.randaugment_layers above 0 too"),
    ],
)
@pytest.mark.parametrize("kind", [TrainConfig, FinetuneConfig])
def test_settings_without_effect(kind: type, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(kind, {"steps": 1} | values)


def test_settings_that_their_switch_lets_count() -> None:
    data = DataConfig(min_area=0.3, randaugment_layers=2, randaugment_magnitude=9)
    optim = OptimConfig("sgd", momentum=0.8, schedule="linear", end_lr=1e-5, weight_decay=0.1, decay_on="kernels")
    TrainConfig(steps=1, data=data, optim=optim)


def test_what_float8_and_cuda_graphs_go_with() -> None:
    """And a config file from before they were there."""
    given = {"compile": True, "cuda_graphs": True, "float8": True, "steps": 1, "batch_size": 8}
    config = TrainConfig(**given, microbatch=8, activation_checkpointing=True)
    older = {name: value for name, value in to_dict(config).items() if name not in ("cuda_graphs", "float8")}
    assert from_dict(TrainConfig, older) == dataclasses.replace(config, cuda_graphs=False, float8=False)
    assert FinetuneConfig(**given).single() == TrainConfig(**given)


def test_single_run_of_a_finetuning() -> None:
    whole = FinetuneConfig(
        steps=3, mixup=0.2, optim=OptimConfig("sgd", lr=0.5, momentum=0.8), seed=4, learning_rates=(0.1, 1.0)
    )
    assert type(whole.single()) is TrainConfig
    assert whole.single() == TrainConfig(steps=3, mixup=0.2, optim=OptimConfig("sgd", lr=0.5, momentum=0.8), seed=4)
    assert whole.single(0.1, 7) == TrainConfig(
        steps=3, mixup=0.2, optim=OptimConfig("sgd", lr=0.1, momentum=0.8), seed=7
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shots": ()}, r"shots is \(\); give numbers of examples"),
        ({"shots": (5, 0)}, r"shots is \(5, 0\); .*at least 1"),
        ({"l2": 0.0}, r"l2 is 0\.0; it must be positive"),
        ({"l2": float("nan")}, r"l2 is nan"),
        ({"seeds": 0}, r"seeds is 0; at least one draw"),
        ({"test_images": 0}, r"test_images is 0"),
        ({"root": "there"}, r"root is 'there' and there is no dataset"),
        ({"shots": 5}, r"shots is 5; allowed"),
        ({"classes": (4,)}, r"classes is \(4,\); give two numbers of classes or more, all different"),
        ({"classes": (4, 4)}, r"classes is \(4, 4\); "),
        ({"classes": (-1, 4)}, r"classes is \(-1, 4\); "),
    ],
)
def test_wrong_few_shot_settings(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(FewShotConfig, values)


def test_steps_from_epochs() -> None:
    assert TrainConfig(steps=7).total_steps(10_000) == 7
    assert TrainConfig(epochs=300.0).total_steps(1_268_355) == 92_897  # facts of the published ImageNet recipe
    assert TrainConfig(epochs=0.001, batch_size=64).total_steps(100) == 1


def test_settings_do_not_import_torch() -> None:
    code = "import sys, vitlab.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["epochs", "mixup"])
def test_endless_settings_are_refused(name: str) -> None:
    for value in (float("inf"), float("nan")):
        given: dict[str, Any] = {"epochs": 1.0} | {name: value}
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            TrainConfig(**given)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seed_that_no_generator_takes(seed: int) -> None:
    with pytest.raises(ValueError, match=rf"seed is {seed}; it must be 0 or more"):
        TrainConfig(steps=1, seed=seed)


def test_clip_norm_that_is_no_number() -> None:
    with pytest.raises(ValueError, match="clip_norm is nan"):
        OptimConfig(clip_norm=float("nan"))


HEADLESS = ViTConfig(num_classes=0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"share": 0.0}, r"share is 0\.0; it is a share of the patches, in \(0, 1\]"),
        ({"share": 1.01}, r"share is 1\.01"),
        ({"masked": 0.8, "replaced": 0.3}, r"masked=0\.8 and replaced=0\.3 .* nor both together more than 1"),
        ({"masked": -0.1}, r"masked=-0\.1 .*may be negative"),
        ({"target": "color"}, r"target is 'color'; allowed: 'mean-color', 'downsized', 'regression'"),
    ],
)
def test_bad_masking(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(MaskingConfig, values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": get_config("R50x1")}, "needs patches, and a ResNet has none"),
        ({"model": ViTConfig(patch_size=1, stem=ResNetBody((1,), width=32), num_classes=0)}, "a hybrid's convolutions"),
        ({"model": ViTConfig(patch_size=224, num_classes=0)}, "1 patch leaves nothing to tell it from"),
        ({"model": ViTConfig()}, r"trains no head: pool='token', .* num_classes=1000 .*Set pool"),
        ({"model": ViTConfig(num_classes=0, pool="map")}, "trains no head: pool='map'"),
        ({"model": ViTConfig(num_classes=0, representation_size=8)}, "trains no head: .*representation_size=8"),
        ({"loss": "sigmoid"}, "loss='sigmoid' has no effect in masked patch prediction, .*leave it at 'softmax'"),
        ({"label_smoothing": 0.1}, "label_smoothing=0.1 has no effect"),
        ({"mixup": 0.2}, "mixup=0.2 has no effect"),
    ],
)
def test_what_masked_patch_prediction_cannot_use(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(TrainConfig, {"model": HEADLESS, "steps": 1, "masking": MaskingConfig()} | values)


def test_fine_tuning_learns_classes() -> None:
    with pytest.raises(ValueError, match="masking is for pre-training, and fine-tuning learns classes"):
        FinetuneConfig(model=HEADLESS, steps=1, masking=MaskingConfig())


def test_masking_through_json() -> None:
    config = TrainConfig(model=HEADLESS, steps=1, masking=MaskingConfig("downsized", share=0.15))
    assert from_dict(TrainConfig, json.loads(json.dumps(to_dict(config)))) == config


def test_how_many_patches_are_corrupted() -> None:
    """Half of 196 is 98, 15 % is 29.4; a image has at least one."""
    assert [MaskingConfig(share=share).corrupted(196) for share in (0.5, 0.15, 1.0, 0.001)] == [98, 29, 196, 1]
    assert MaskingConfig().draws(196) == 196 + 2 * 98

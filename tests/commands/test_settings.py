"""The settings of a run on the command line: recipes, flags that change them, and what the data decides."""

from typing import Any

import pytest

from vitlab.cli import parse
from vitlab.config import FewShotConfig
from vitlab.recipes import FINETUNE, OPEN, PRETRAIN, resolve
from vitlab.recipes.finetune import staged


def config_of(words: str) -> Any:
    command: Any = parse(words.split())
    return command.config


def test_a_recipe_gives_the_defaults() -> None:
    for recipe in PRETRAIN:
        assert config_of(f"pretrain {recipe}") == PRETRAIN[recipe]()
    for recipe in FINETUNE:
        command: Any = parse(["finetune", "model.npz", "--recipe", recipe])
        assert (command.checkpoint, command.recipe) == ("model.npz", recipe)
        assert command.open_settings == {*OPEN.get(recipe, ())}
        assert command.config == resolve(FINETUNE[recipe]()).config


def test_settings_override_the_recipe() -> None:
    config = config_of("finetune m --recipe=cifar10 --image-size 224 --optim.lr 0.003 --data.no-flip")
    assert (config.optim.lr, config.optim.momentum, config.steps, config.data.flip) == (0.003, 0.9, 10_000, False)
    words = "--optim.name sgd --optim.momentum 0.8 --optim.schedule linear --optim.end-lr 1e-5 --data.crop inception"
    config = config_of(f"pretrain tiny-digits {words} --data.randaugment-layers 2 --data.randaugment-magnitude 15")
    assert (config.optim.momentum, config.optim.end_lr, config.data.randaugment_magnitude) == (0.8, 1e-5, 15)
    config = config_of("pretrain jft --model ViT-L/16 --model.dropout 0.2")
    assert (config.model.depth, config.model.dropout, config.optim.lr) == (24, 0.2, 4e-4)
    config = config_of("pretrain tiny-digits --fewshot.dataset cifar10 --fewshot.shots 10 25")
    assert config.fewshot == FewShotConfig(dataset="cifar10", shots=(10, 25))
    config = config_of("finetune m --dataset digits --recipe custom --learning-rates 0.003 0.01 --held-out 0.2")
    assert (config.learning_rates, config.held_out) == ((0.003, 0.01), 0.2)
    with pytest.raises(ValueError, match="epochs, sweep_steps"):
        config_of("finetune m --dataset digits --budget 5m --epochs 3 --sweep-steps 2")


@pytest.mark.parametrize(
    ("words", "name", "root", "on_error"),
    [
        ("--dataset folder:x", "folder:x", None, "skip"),
        ("--dataset cifar10 --root y --recipe cifar100", "cifar10", "y", "raise"),
        ("--recipe flowers", "flowers102", None, "raise"),
    ],
)
def test_data_set_of_finetuning(words: str, name: str, root: str | None, on_error: str) -> None:
    """Unreadable images of a folder are skipped unless the user wants an error."""
    data = config_of(f"finetune m {words}").data
    assert (data.name, data.root, data.on_error) == (name, root, on_error)


def test_flags_are_given_settings() -> None:
    command: Any = parse(["finetune", "m", "--dataset", "digits", "--steps", "7", "--mixup=0.2", "--data.no-flip"])
    assert {"steps", "mixup"}.isdisjoint(command.open_settings)
    assert command.open_settings == resolve(staged(), {"steps": 7, "mixup": 0.2}, OPEN["staged"]).open_settings
    assert (command.config.data.flip, command.config.data.name) == (False, "digits")


@pytest.mark.parametrize(
    ("words", "crop", "area", "pad", "resize"),
    [
        ("pretrain tiny-digits --data.crop none", "none", 0.05, 4, None),
        ("pretrain tiny-digits --data.crop=pad", "pad", 0.05, 2, None),
        ("pretrain tiny-digits --data.crop inception --data.min_area 0.5", "inception", 0.5, 4, None),
        ("vtab m --data.crop random", "random", 0.05, 4, 448),
        ("finetune m --dataset digits --data.crop random --data.crop-resize 40", "random", 0.05, 4, 40),
    ],
)
def test_a_switch_resets_settings_without_effect(
    words: str, crop: str, area: float, pad: int, resize: int | None
) -> None:
    """The recipe's `pad` for another crop is not the user's mistake."""
    data = config_of(words).data
    assert (data.crop, data.min_area, data.pad, data.crop_resize) == (crop, area, pad, resize)


@pytest.mark.parametrize(
    ("words", "same"),
    [
        (
            "pretrain tiny-digits --dataset fashion_mnist --root data --lr 0.01 --out x",
            "pretrain tiny-digits --data.name fashion_mnist --data.root data --optim.lr 0.01 --workdir x",
        ),
        ("finetune a --dataset digits --lr=0.01 --out x", "finetune a --dataset digits --optim.lr 0.01 --workdir x"),
        ("inspect a --workdir x", "inspect a --out x"),
    ],
)
def test_flags_by_their_names_in_other_commands(words: str, same: str) -> None:
    assert vars(parse(words.split())) == vars(parse(same.split()))

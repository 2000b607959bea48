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


@pytest.mark.parametrize("recipe", PRETRAIN)
def test_recipe_gives_the_defaults(recipe: str) -> None:
    assert config_of(f"pretrain {recipe}") == PRETRAIN[recipe]()


@pytest.mark.parametrize("recipe", FINETUNE)
def test_recipe_gives_the_defaults_of_finetuning(recipe: str) -> None:
    command: Any = parse(["finetune", "model.npz", "--recipe", recipe])
    assert (command.checkpoint, command.recipe, command.open_settings) == (
        "model.npz",
        recipe,
        {*OPEN.get(recipe, ())},
    )
    assert command.config == resolve(FINETUNE[recipe]()).config


def test_settings_override_the_recipe() -> None:
    config = config_of("finetune m --recipe=cifar10 --image-size 224 --optim.lr 0.003 --data.no-flip")
    assert (config.optim.lr, config.optim.momentum, config.steps, config.data.flip) == (0.003, 0.9, 10_000, False)


@pytest.mark.parametrize(
    ("words", "name", "root", "on_error"),
    [
        ("--dataset folder:x", "folder:x", None, "skip"),
        ("--dataset folder:x --data.on_error raise", "folder:x", None, "raise"),
        ("--dataset cifar10 --root y --recipe cifar100", "cifar10", "y", "raise"),
        ("--dataset csv:photos.csv", "csv:photos.csv", None, "skip"),
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


def test_a_budget_chooses_the_steps() -> None:
    with pytest.raises(ValueError, match="budget chooses the number of steps; leave out epochs, sweep_steps"):
        config_of("finetune m --dataset digits --budget 5m --epochs 3 --sweep-steps 2")


@pytest.mark.parametrize(
    ("words", "rates", "rate"),
    [
        ("--recipe cifar10", (0.001, 0.003, 0.01, 0.03), 0.01),
        ("--recipe cifar10 --optim.lr 0.003", (), 0.003),
        ("--recipe cifar10 --learning-rates 0.1", (0.1,), 0.1),
        ("--dataset digits --recipe custom --learning-rates 0.003 0.01 --held-out 0.2", (0.003, 0.01), 0.01),
    ],
)
def test_learning_rates(words: str, rates: tuple[float, ...], rate: float) -> None:
    config = config_of(f"finetune m {words}")
    assert (config.learning_rates, config.optim.lr) == (rates, rate)


def test_settings_together_with_their_switches() -> None:
    words = "--optim.name sgd --optim.momentum 0.8 --optim.schedule linear --optim.end-lr 1e-5 --data.crop inception"
    config = config_of(f"pretrain tiny-digits {words} --data.randaugment-layers 2 --data.randaugment-magnitude 15")
    assert (config.optim.momentum, config.optim.end_lr, config.data.randaugment_magnitude) == (0.8, 1e-5, 15)


@pytest.mark.parametrize(
    ("words", "area", "pad"),
    [
        ("", 0.05, 2),
        ("--data.crop none", 0.05, 4),
        ("--data.crop=pad", 0.05, 2),
        ("--data.crop inception --data.min_area 0.5", 0.5, 4),
    ],
)
def test_a_switch_resets_settings_without_effect(words: str, area: float, pad: int) -> None:
    """The recipe's `pad` for another crop is not the user's mistake."""
    data = config_of(f"pretrain tiny-digits {words}").data
    assert (data.min_area, data.pad) == (area, pad)


@pytest.mark.parametrize(("crop", "resize"), [("none", None), ("pad", None), ("random", 448)])
def test_another_crop_in_place_of_a_random_one(crop: str, resize: int | None) -> None:
    data = config_of(f"vtab m --data.crop {crop}").data
    assert (data.crop, data.crop_resize) == (crop, resize)


def test_a_random_crop_in_place_of_another() -> None:
    data = config_of("finetune m --dataset digits --data.crop random --data.crop-resize 40").data
    assert (data.crop, data.crop_resize, data.min_area) == ("random", 40, 0.05)


def test_model_by_name() -> None:
    config = config_of("pretrain jft --model ViT-L/16 --model.dropout 0.2")
    assert (config.model.depth, config.model.dropout, config.optim.lr) == (24, 0.2, 4e-4)


def test_fewshot_while_training() -> None:
    config = config_of("pretrain tiny-digits --fewshot.dataset cifar10 --fewshot.shots 10 25")
    assert config.fewshot == FewShotConfig(dataset="cifar10", shots=(10, 25))
    assert config_of("pretrain tiny-digits").fewshot is None

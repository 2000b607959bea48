"""The settings of a run on the command line: recipes, flags that change them, and what the data decides."""

import pytest

from vitlab.cli import parse
from vitlab.commands.evaluate import Fewshot
from vitlab.commands.train import Finetune, Pretrain
from vitlab.models import ViTConfig
from vitlab.recipes import FINETUNE, PRETRAIN


@pytest.mark.parametrize("recipe", PRETRAIN)
def test_recipe_gives_the_defaults(recipe: str) -> None:
    command = parse(["pretrain", recipe])
    assert isinstance(command, Pretrain)
    assert command.config == PRETRAIN[recipe]()


@pytest.mark.parametrize("recipe", [name for name in FINETUNE if name != "vtab"])
def test_recipe_gives_the_defaults_of_finetuning(recipe: str) -> None:
    command = parse(["finetune", "model.npz", "--recipe", recipe])
    assert isinstance(command, Finetune)
    assert (command.checkpoint, command.recipe, command.config) == ("model.npz", recipe, FINETUNE[recipe]())


def test_settings_override_the_recipe() -> None:
    argv = "finetune m --recipe=cifar10 --image-size 224 --optim.lr 0.003 --data.name folder:x --data.no-flip"
    command = parse(argv.split())
    assert isinstance(command, Finetune)
    assert (command.recipe, command.image_size) == ("cifar10", 224)
    assert (command.config.optim.lr, command.config.optim.momentum, command.config.steps) == (0.003, 0.9, 10_000)
    assert (command.config.data.name, command.config.data.flip) == ("folder:x", False)


def test_data_set_in_short() -> None:
    """Of a folder, what cannot be read is left out, unless the user wants to stop at it."""
    for words, name, root, on_error in (
        ("--dataset folder:x", "folder:x", None, "skip"),
        ("--dataset folder:x --data.on_error raise", "folder:x", None, "raise"),
        ("--dataset cifar10 --root y --recipe cifar100", "cifar10", "y", "raise"),
        ("--recipe flowers", "flowers102", None, "raise"),
    ):
        command = parse(["finetune", "m", *words.split()])
        assert isinstance(command, Finetune)
        data = command.config.data
        assert (data.name, data.root, data.on_error) == (name, root, on_error)


def test_what_is_said_is_not_automatic() -> None:
    for words, left in (
        ("", ("steps", "warmup_steps", "mixup", "batch_size", "sweep_steps", "image_size", "preprocessing")),
        ("--steps 7 --mixup=0.2", ("warmup_steps", "batch_size", "sweep_steps", "image_size", "preprocessing")),
        (
            "--epochs 1 --optim.warmup_steps 3 --batch-size 8 --model.image-size 32 --sweep-steps 2 "
            "--data.eval-resize 9",
            ("mixup",),
        ),
        ("--automatic steps mixup --steps 3", ("mixup",)),
    ):
        command = parse(["finetune", "m", "--dataset", "digits", *words.split()])
        assert isinstance(command, Finetune)
        assert command.config.automatic == left


def test_learning_rates() -> None:
    for words, rates, rate in (
        ("--recipe cifar10", (0.001, 0.003, 0.01, 0.03), 0.01),
        ("--recipe cifar10 --optim.lr 0.003", (), 0.003),
        ("--recipe cifar10 --learning-rates 0.1", (0.1,), 0.1),
        ("--dataset digits --learning-rates 0.003 0.01 --held-out 0.2", (0.003, 0.01), 0.01),
    ):
        command = parse(["finetune", "m", *words.split()])
        assert isinstance(command, Finetune)
        assert (command.config.learning_rates, command.config.optim.lr) == (rates, rate)


def test_length_is_said_in_steps_or_epochs() -> None:
    steps, epochs = parse(["pretrain", "jft", "--steps=7"]), parse(["pretrain", "jft", "--epochs", "0.5"])
    assert isinstance(steps, Pretrain)
    assert isinstance(epochs, Pretrain)
    assert (steps.config.steps, steps.config.epochs) == (7, None)
    assert (epochs.config.steps, epochs.config.epochs) == (None, 0.5)


def test_settings_that_count_together() -> None:
    words = "--optim.name sgd --optim.momentum 0.8 --optim.schedule linear --optim.end-lr 1e-5 --data.crop inception"
    words += " --data.min-area 0.2 --data.randaugment-layers 2 --data.randaugment-magnitude 15"
    command = parse(["pretrain", "tiny-digits", *words.split()])
    assert isinstance(command, Pretrain)
    assert (command.config.optim.momentum, command.config.optim.end_lr) == (0.8, 1e-5)


def test_a_switch_takes_what_it_leaves_idle_back_to_its_default() -> None:
    """A recipe's value for another crop is no mistake of the user's; with the crop it counts with, it stays."""
    for words, area, pad in (
        ("", 0.05, 2), ("--data.crop none", 0.05, 4), ("--data.crop=pad", 0.05, 2), ("--data.crop inception", 0.05, 4),
        ("--data.crop inception --data.min_area 0.5", 0.5, 4),
    ):  # fmt: skip
        command = parse(["pretrain", "tiny-digits", *words.split()])
        assert isinstance(command, Pretrain)
        assert (command.config.data.min_area, command.config.data.pad) == (area, pad)
    own = parse(["finetune", "m", "--dataset", "digits", "--data.crop", "random", "--data.crop_resize", "256"])
    assert isinstance(own, Finetune)
    assert own.config.data.min_area == 0.05


def test_flags_of_earlier_versions() -> None:
    command = parse(["fewshot", "m", "--dataset", "digits", "--test-pictures", "7"])
    assert isinstance(command, Fewshot)
    assert command.protocol.test_images == 7


def test_model_by_name() -> None:
    command = parse(["pretrain", "jft", "--model", "ViT-L/16", "--model.dropout", "0.2"])
    assert isinstance(command, Pretrain)
    assert isinstance(command.config.model, ViTConfig)
    assert (command.config.model.depth, command.config.optim.lr) == (24, 4e-4)
    assert command.config.model.dropout == 0.2

"""Tables 3 and 4, App. B.1.2, and their small versions: each function returns one complete `TrainConfig`.

`PRETRAIN` and `FINETUNE` are the names that the command line knows.
"""

from collections.abc import Callable

from vitlab.config import FinetuneConfig, TrainConfig
from vitlab.recipes import finetune, pretrain, tiny
from vitlab.recipes.finetune import OPEN as OPEN
from vitlab.recipes.resolve import resolve as resolve

PRETRAIN: dict[str, Callable[..., TrainConfig]] = {
    "jft": pretrain.jft,
    "imagenet21k": pretrain.imagenet21k,
    "imagenet": pretrain.imagenet,
    "masked": pretrain.masked,
    "tiny-digits": tiny.digits,
    "tiny-fashion": tiny.fashion_mnist,
    "tiny-cifar10": tiny.cifar10,
    "tiny-masked": tiny.masked_cifar10,
    "tiny-masked-digits": tiny.masked_digits,
}
"""Each takes the name of a model (the tiny ones have their own) and returns the run."""

FINETUNE: dict[str, Callable[[], FinetuneConfig]] = {
    "imagenet": finetune.imagenet,
    "cifar100": finetune.cifar100,
    "cifar10": finetune.cifar10,
    "pets": finetune.pets,
    "flowers": finetune.flowers,
    "vtab": finetune.vtab,
    "staged": finetune.staged,
    "custom": finetune.custom,
    "bit": finetune.bit,
    "bit-small": finetune.bit_small,
    "tiny-digits": tiny.finetune_digits,
}
"""Each returns the sweep and the run but for the model, which the checkpoint brings."""

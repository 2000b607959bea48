"""Table 4, row by row, in its own numbers."""

import pytest

from vitlab.models import ViTConfig
from vitlab.recipes import FINETUNE, finetune

ROWS = [
    ("imagenet", 20_000, 500, (0.003, 0.01, 0.03, 0.06)),
    ("cifar100", 10_000, 500, (0.001, 0.003, 0.01, 0.03)),
    ("cifar10", 10_000, 500, (0.001, 0.003, 0.01, 0.03)),
    ("pets", 500, 100, (0.001, 0.003, 0.01, 0.03)),
    ("flowers", 500, 100, (0.001, 0.003, 0.01, 0.03)),
    ("vtab", 2_500, 500, (0.01,)),
]


@pytest.mark.parametrize(("name", "steps", "warmup", "rates"), ROWS)
def test_row(name: str, steps: int, warmup: int, rates: tuple[float, ...]) -> None:
    """SGD with momentum 0.9, cosine, batch 512, no decay, norm 1, 384 pixels; ImageNet at 512 (Sec. 4.1)."""
    config = FINETUNE[name]()
    assert (config.steps, config.epochs, config.batch_size) == (steps, None, 512)
    assert finetune.LEARNING_RATES[name] == rates
    assert config.optim.lr in rates
    assert (config.optim.name, config.optim.momentum, config.optim.schedule) == ("sgd", 0.9, "cosine")
    assert (config.optim.weight_decay, config.optim.clip_norm) == (0.0, 1.0)
    assert config.optim.warmup_steps == warmup
    assert config.model.image_hw == ((512, 512) if name == "imagenet" else (384, 384))
    assert isinstance(config.model, ViTConfig)
    assert (config.loss, config.label_smoothing, config.mixup, config.model.dropout) == ("softmax", 0.0, 0.0, 0.0)


def test_every_row_of_the_table_is_a_recipe() -> None:
    assert finetune.LEARNING_RATES.keys() == {name for name, *_ in ROWS} == FINETUNE.keys() - {"tiny", "tiny-digits"}


@pytest.mark.parametrize("name", [name for name, *_ in ROWS])
def test_final_run_is_on_all_of_train(name: str) -> None:
    config = FINETUNE[name]()
    assert (config.data.train_split, config.data.eval_split) == ("trainval", "test")
    assert config.data.eval_resize is None  # test pictures are squashed, as in Google's code


def test_average_is_for_imagenet_only() -> None:
    averaged = {name: FINETUNE[name]().average_decay for name, *_ in ROWS}
    assert averaged.pop("imagenet") == 0.9999
    assert set(averaged.values()) == {None}

"""Table 4, row by row, in its numbers."""

import pytest

from vitlab.config import OptimConfig
from vitlab.models import ViTConfig
from vitlab.recipes import FINETUNE, OPEN
from vitlab.recipes.rules import bit_hyperrule
from vitlab.train.optim import learning_rate

ROWS = [
    ("imagenet", "imagenet", 20_000, 500, (0.003, 0.01, 0.03, 0.06), 0.01),
    ("cifar100", "cifar100", 10_000, 500, (0.001, 0.003, 0.01, 0.03), 0.02),
    ("cifar10", "cifar10", 10_000, 500, (0.001, 0.003, 0.01, 0.03), 0.02),
    ("pets", "pets", 500, 100, (0.001, 0.003, 0.01, 0.03), 0.1),
    ("flowers", "flowers102", 500, 100, (0.001, 0.003, 0.01, 0.03), 0.1),
    ("vtab", "vtab:TASK", 2_500, 500, (0.01,), 0.2),
]


@pytest.mark.parametrize(("name", "dataset", "steps", "warmup", "rates", "held_out"), ROWS)
def test_row(name: str, dataset: str, steps: int, warmup: int, rates: tuple[float, ...], held_out: float) -> None:
    config = FINETUNE[name]()
    assert (config.steps, config.epochs, config.batch_size) == (steps, None, 512)
    assert (config.learning_rates, config.held_out, config.runs) == (rates, held_out, 1)
    assert (config.sweep_steps, name in OPEN) == (None, False)  # the search takes as many steps as the run
    assert config.optim.lr in rates
    assert config.optim == OptimConfig("sgd", config.optim.lr, momentum=0.9, warmup_steps=warmup, clip_norm=1.0)
    assert isinstance(config.model, ViTConfig)
    assert config.model.image_hw == ((512, 512) if name == "imagenet" else (384, 384))
    assert (config.loss, config.label_smoothing, config.mixup, config.model.dropout) == ("softmax", 0.0, 0.0, 0.0)
    assert config.average_decay == (0.9999 if name == "imagenet" else None)
    data, train_split = config.data, "train" if name == "flowers" else "trainval"
    assert (data.name, data.train_split, data.eval_split) == (dataset, train_split, "test")
    assert data.eval_resize is None  # test images are squashed, as in Google's code


def test_every_row_of_the_table_is_a_recipe() -> None:
    """VTAB's images are resized to 448 pixels and cropped to 384."""
    data = FINETUNE["vtab"]().data
    assert (data.crop, data.crop_resize, data.flip) == ("random", 448, True)
    assert {name for name, *_ in ROWS} == FINETUNE.keys() - {"staged", "custom", "bit", "bit-small", "tiny-digits"}


@pytest.mark.parametrize(("name", "resize", "crop"), [("bit", 512, 480), ("bit-small", 160, 128)])
def test_the_setup_of_bit(name: str, resize: int, crop: int) -> None:
    """One rate without clipping, a tenth after 30, 60 and 90% of the steps; mixup and steps by the images."""
    config = FINETUNE[name]()
    assert (config.data.crop, config.data.crop_resize, config.model.image_size) == ("random", resize, crop)
    assert (config.learning_rates, config.optim.clip_norm, config.optim.weight_decay) == ((), None, 0.0)
    for images, steps, warmup, mixup in ((5_000, 500, 100, 0.0), (50_000, 10_000, 500, 0.1), (10**6, 20_000, 500, 0.1)):
        complete = bit_hyperrule(config, images, "cuda", OPEN[name])
        assert (complete.steps, complete.optim.warmup_steps, complete.mixup) == (steps, warmup, mixup)
        assert complete.batch_size == 512
    stairs = [learning_rate(complete.optim, step, 20_000) for step in (250, 500, 6_000, 6_001, 12_001, 18_001, 19_999)]
    assert stairs == pytest.approx([0.0015, 0.003, 0.003, 3e-4, 3e-5, 3e-6, 3e-6])


def test_custom_images_start_as_the_table_but_for_size_and_crop() -> None:
    config, flowers = FINETUNE["custom"](), FINETUNE["flowers"]()
    assert (config.data.name, config.optim, config.steps) == ("", flowers.optim, flowers.steps)
    assert config.learning_rates == (0.003, 0.01, 0.03)

"""What a fine-tuning will take, before it begins."""

import dataclasses

import pytest

from vitlab.models.config import ViTConfig
from vitlab.pipelines.estimate import Estimate
from vitlab.recipes.finetune import own
from vitlab.train.microbatch import GIB, StepCost

COST = StepCost(microbatch=16, train_seconds=0.1, eval_seconds=0.05, memory=2 * GIB, free=20 * GIB)
CONFIG = dataclasses.replace(
    own(),
    model=ViTConfig(image_size=224, patch_size=14, width=384, depth=12, heads=6, mlp_dim=1536, num_classes=3),
    steps=100, batch_size=32, sweep_steps=20, automatic=(),
)  # fmt: skip
ESTIMATE = Estimate(CONFIG, COST, train_images=160, test_images=40, classes=3, held_out_images=16, device="cpu")


def test_seconds_are_images_times_what_one_takes() -> None:
    assert ESTIMATE.search_seconds == pytest.approx(3 * (20 * 32 * 0.1 + 16 * 0.05))
    assert ESTIMATE.run_seconds == pytest.approx(100 * 32 * 0.1 + 40 * 0.05)
    assert ESTIMATE.seconds == pytest.approx(ESTIMATE.search_seconds + ESTIMATE.run_seconds)
    several = dataclasses.replace(ESTIMATE, config=dataclasses.replace(CONFIG, runs=3))
    assert several.run_seconds == pytest.approx(3 * ESTIMATE.run_seconds)


def test_search_of_the_whole_length_where_it_is_not_shortened() -> None:
    whole = dataclasses.replace(ESTIMATE, config=dataclasses.replace(CONFIG, sweep_steps=None))
    assert whole.search_seconds == pytest.approx(3 * (100 * 32 * 0.1 + 16 * 0.05))


def test_described() -> None:
    assert ESTIMATE.describe().splitlines() == [
        "  model     21.6M parameters, 224 px, on cpu",
        "  data      160 training and 40 test images, 3 classes",
        "  measured  micro-batches of 16, 10 images/s, 2.0 of 20.0 GiB free memory",
        "  search    3 learning rates x 20 steps of 32 images, scored on 16 held-out images: 3:14",
        "  training  100 steps of 32 images (20.0 epochs), then the test: 5:22",
        "  total     about 8:36",
        "  shorter   --optim.lr 0.01, without a search: 5:22 | --steps 50: 4:20 | --image-size 168: about 4:39",
    ]


def test_nothing_to_shorten_where_it_is_short() -> None:
    quick = dataclasses.replace(ESTIMATE, cost=dataclasses.replace(COST, train_seconds=1e-3, eval_seconds=1e-3))
    assert "shorter" not in quick.describe()


def test_no_search_no_line_of_it() -> None:
    single = dataclasses.replace(CONFIG, learning_rates=(), sweep_steps=None, runs=2)
    text = dataclasses.replace(ESTIMATE, config=single, held_out_images=0).describe()
    assert "search" not in text
    assert "2 runs of 100 steps" in text

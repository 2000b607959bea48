"""What the parts of a job take, by the costs of a made-up machine."""

import dataclasses

import pytest

from vitlab.finetuning.estimate import Images, JobCost
from vitlab.models import ViTConfig
from vitlab.recipes.finetune import staged
from vitlab.train.microbatch import StepCost

IMAGES = Images(1000, 500)


def test_processes_share_the_images_and_a_gpu_waits_for_readers() -> None:
    model = ViTConfig(image_size=224, patch_size=14, width=384, depth=12, heads=6, mlp_dim=1536, num_classes=10)
    config = dataclasses.replace(staged(), model=model, steps=100, batch_size=32)
    cost = JobCost(StepCost(32, 0.3, 0.1, 0.1, 0, None), decode=0.002)
    alone, shared = (sum(dataclasses.replace(cost, processes=n).seconds(config, IMAGES)[:4]) for n in (1, 8))
    assert shared == pytest.approx(alone / 8, rel=0.01)
    slow = dataclasses.replace(cost, decode=10 * cost.step.train_seconds, workers=5)
    ratio = slow.seconds(config, IMAGES).sweep / cost.seconds(config, IMAGES).sweep
    assert 1.5 < ratio < 2.5  # five readers take twice as long as a step


def test_averages_with_the_head_are_scored() -> None:
    """Seconds: 10 x 32 x 0.4 of training; 200 held-out images, once in float32, three times in training's precision."""
    model = ViTConfig(image_size=224, patch_size=14, width=384, depth=12, heads=6, mlp_dim=1536, num_classes=10)
    config = dataclasses.replace(staged(), model=model, steps=10, batch_size=32)
    cost = JobCost(StepCost(32, 0.4, 0.1, 0.05, 0, None))
    assert cost.seconds(config, IMAGES).sweep == pytest.approx(128 + 200 * (0.1 + 3 * 0.05))

"""A fine-tuning job on a made-up machine, whose costs are known."""

import dataclasses
from collections.abc import Callable
from typing import Any

from vitlab.config import FinetuneConfig
from vitlab.finetuning.budget import fit_budget
from vitlab.finetuning.plan import Plan, Task
from vitlab.finetuning.stages import Images
from vitlab.models import ViTConfig
from vitlab.recipes.finetune import staged
from vitlab.runs.cost import ImageCost
from vitlab.train.microbatch import StepCost

CONFIG = dataclasses.replace(
    staged(),
    model=ViTConfig(image_size=224, patch_size=14, width=384, depth=12, heads=6, mlp_dim=1536, num_classes=10),
    batch_size=32,
)
IMAGES = Images(1000, 500)
FLOPS = 1e11
OPEN = ("model.image_size", "head_views", "refit", "runs", "data.subset_fraction")
BUDGETS = (60, 90, 150, 300, 900, 1500, 3600, 10**6)


def measure(config: FinetuneConfig, _train: bool = True, slower: float = 1.0) -> ImageCost:
    forward = 2 * config.model.forward_macs / FLOPS * slower
    return ImageCost(StepCost(32, 3 * forward, forward, forward, 0, None), config.model.forward_macs, decode=0.002)


def task(seconds: float, images: Images = IMAGES, config: FinetuneConfig = CONFIG, **settings: Any) -> Task:
    return Task(config, images, settings.pop("open_settings", OPEN), seconds, **settings)


def plan(seconds: float, *arguments: Any, measure: Callable[..., ImageCost] = measure, **settings: Any) -> Plan:
    """The plan on a machine whose clock stands still."""
    return fit_budget(task(seconds, *arguments, **settings), measure, lambda: float(seconds))


class Timer:
    """The seconds left of a budget."""

    def __init__(self, seconds: float, passed: float = 0.0) -> None:
        self.seconds, self.passed = seconds, passed

    def left(self) -> float:
        return self.seconds - self.passed

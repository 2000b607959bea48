"""What a fine-tuning will take, told before it begins: measured on this machine, and what would make it shorter."""

import dataclasses
from dataclasses import dataclass

from vitlab.config import FinetuneConfig
from vitlab.display import format_duration
from vitlab.models.config import ViTConfig
from vitlab.train.microbatch import StepCost

SHORT = 120.0
"""Seconds below which nobody needs to be told how to shorten it."""


@dataclass(frozen=True)
class Estimate:
    """The images that a fine-tuning processes, and the seconds that this takes."""

    config: FinetuneConfig
    """The complete settings."""
    cost: StepCost
    train_images: int
    test_images: int
    classes: int
    held_out_images: int
    """Images of the training split that score the learning rates; 0 without a search."""
    device: str

    @property
    def steps(self) -> int:
        """Steps of one run."""
        return self.config.total_steps(self.train_images)

    @property
    def search_seconds(self) -> float:
        """Of training with every learning rate, and of scoring each."""
        if not self.held_out_images:
            return 0.0
        images = (self.config.sweep_steps or self.steps) * self.config.batch_size
        each = images * self.cost.train_seconds + self.held_out_images * self.cost.eval_seconds
        return len(self.config.learning_rates) * each

    @property
    def run_seconds(self) -> float:
        """Of the final runs and their tests."""
        images = self.steps * self.config.batch_size
        return self.config.runs * (images * self.cost.train_seconds + self.test_images * self.cost.eval_seconds)

    @property
    def seconds(self) -> float:
        """Of everything."""
        return self.search_seconds + self.run_seconds

    def describe(self) -> str:
        """A line for each thing that takes time or memory, the total, and how to shorten it."""
        config, model = self.config, self.config.model
        height, width = model.image_hw
        size = f"{height} px" if height == width else f"{height}x{width} px"
        passes = self.steps * config.batch_size / self.train_images
        runs = f"{config.runs} runs of " if config.runs > 1 else ""
        rows = {
            "model": f"{model.num_parameters / 1e6:.1f}M parameters, {size}, on {self.device}",
            "data": f"{self.train_images:,} training and {self.test_images:,} test images, {self.classes:,} classes",
            "measured": self.cost.describe(),
        }
        if self.held_out_images:
            rows["search"] = (
                f"{len(config.learning_rates)} learning rates x {config.sweep_steps or self.steps:,} steps of "
                f"{config.batch_size} images, scored on {self.held_out_images:,} held-out images: "
                f"{format_duration(self.search_seconds)}"
            )
        rows["training"] = (
            f"{runs}{self.steps:,} steps of {config.batch_size} images ({passes:.1f} epochs), then the test: "
            f"{format_duration(self.run_seconds)}"
        )
        rows["total"] = f"about {format_duration(self.seconds)}"
        if self.seconds > SHORT:
            rows["shorter"] = " | ".join(self._shorter())
        return "\n".join(f"  {name:9} {text}" for name, text in rows.items())

    def _shorter(self) -> list[str]:
        """Flags, each with the total that it would leave."""
        ways = []
        if self.held_out_images:
            ways.append(f"--optim.lr {self.config.optim.lr:g}, without a search: {format_duration(self.run_seconds)}")
        if self.steps > 1:
            fewer = self._with(steps=self.steps // 2, epochs=None)
            ways.append(f"--steps {self.steps // 2}: {format_duration(fewer.seconds)}")
        model = self.config.model
        if isinstance(model, ViTConfig) and (side := min(model.image_hw) * 3 // 4 // model.stride * model.stride) >= 64:
            smaller = dataclasses.replace(model, image_size=side)
            share = smaller.forward_macs / model.forward_macs
            ways.append(f"--image-size {side}: about {format_duration(share * self.seconds)}")
        return ways

    def _with(self, **settings: int | None) -> "Estimate":
        """The same with other settings; a shortened search is shortened alike."""
        config = dataclasses.replace(self.config, **settings)
        if config.sweep_steps is not None:
            steps = config.total_steps(self.train_images)
            config = dataclasses.replace(config, sweep_steps=max(config.sweep_steps * steps // self.steps, 1))
        return dataclasses.replace(self, config=config)

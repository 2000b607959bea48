"""What a fine-tuning will take, measured on this machine before it begins, and what would make it shorter."""

import dataclasses
from dataclasses import dataclass

from vitlab.config import FinetuneConfig
from vitlab.display import format_duration
from vitlab.models.config import ViTConfig
from vitlab.train.microbatch import StepCost

SHORT = 120.0
"""Seconds below which nothing needs to be shorter."""


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
        """Seconds to train with every learning rate and to score it."""
        if not self.held_out_images:
            return 0.0
        images = (self.config.sweep_steps or self.steps) * self.config.batch_size
        one_rate = images * self.cost.train_seconds + self.held_out_images * self.cost.eval_seconds
        return len(self.config.learning_rates) * one_rate

    @property
    def run_seconds(self) -> float:
        """Seconds of the final runs and their tests."""
        images = self.steps * self.config.batch_size
        return self.config.runs * (images * self.cost.train_seconds + self.test_images * self.cost.eval_seconds)

    @property
    def seconds(self) -> float:
        return self.search_seconds + self.run_seconds

    def describe(self) -> str:
        """A line for everything that takes time or memory, the total, and how to shorten it."""
        config, model = self.config, self.config.model
        height, width = model.image_hw
        size = f"{height} px" if height == width else f"{height}x{width} px"
        passes = self.steps * config.batch_size / self.train_images
        runs = f"{config.runs} runs of " if config.runs > 1 else ""
        search = (
            f"{len(config.learning_rates)} learning rates x {config.sweep_steps or self.steps:,} steps of "
            f"{config.batch_size} images, scored on {self.held_out_images:,} held-out images: "
            f"{format_duration(self.search_seconds)}"
        )
        training = (
            f"{runs}{self.steps:,} steps of {config.batch_size} images ({passes:.1f} epochs), then the test: "
            f"{format_duration(self.run_seconds)}"
        )
        rows = {
            "model": f"{model.num_parameters / 1e6:.1f}M parameters, {size}, on {self.device}",
            "data": f"{self.train_images:,} training and {self.test_images:,} test images, {self.classes:,} classes",
            "measured": self.cost.describe(),
            "search": search if self.held_out_images else "",
            "training": training,
            "total": f"about {format_duration(self.seconds)}",
            "shorter": " | ".join(self._shorter()) if self.seconds > SHORT else "",
        }
        return "\n".join(f"  {name:9} {text}" for name, text in rows.items() if text)

    def _shorter(self) -> list[str]:
        """Flags with the total that would remain."""
        config, model, flags = self.config, self.config.model, []
        if self.held_out_images:
            flags.append(f"--optim.lr {config.optim.lr:g}, without a search: {format_duration(self.run_seconds)}")
        if (half := self.steps // 2) > 0:
            sweep_steps = config.sweep_steps and max(config.sweep_steps * half // self.steps, 1)
            fewer = dataclasses.replace(config, steps=half, epochs=None, sweep_steps=sweep_steps)
            seconds = dataclasses.replace(self, config=fewer).seconds
            flags.append(f"--steps {half}: {format_duration(seconds)}")
        if isinstance(model, ViTConfig) and (side := min(model.image_hw) * 3 // 4 // model.stride * model.stride) >= 64:
            share = dataclasses.replace(model, image_size=side).forward_macs / model.forward_macs
            flags.append(f"--image-size {side}: about {format_duration(share * self.seconds)}")
        return flags

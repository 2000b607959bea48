"""Every setting of a training run: frozen dataclasses that say themselves what is wrong with them.

Nothing here needs torch: recipes and the command line build on these in an instant.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from vitlab.models.config import ModelConfig, ViTConfig
from vitlab.settings import check_fields


@dataclass(frozen=True)
class DataConfig:
    """Which pictures, and what is done to them (Sec. 4.1, App. B.1)."""

    name: str = "digits"
    """A data set's name, `folder:PATH` or `shards:PATH` (`vitlab list datasets`)."""
    root: str | None = None
    """Folder that holds, or receives, a named data set; None means the cache folder."""
    train_split: str = "train"
    """Split to learn from; `trainval` adds the held-out part."""
    eval_split: str = "val"
    """Split to evaluate on while training."""
    classes: tuple[int, ...] | None = None
    """Keep only these classes, renumbered from 0; None keeps all."""
    crop: Literal["inception", "random", "pad", "none"] = "inception"
    """Training crop: `inception` (part of the area, squashed to size), `random` (resize, then crop), `pad` (shift)
    or `none` (the whole picture)."""
    min_area: float = 0.05
    """Least share of the area that an inception crop keeps."""
    crop_resize: int | None = None
    """Side in pixels to which `random` resizes before it crops."""
    pad: int = 4
    """Most pixels, at the model's size, by which `pad` shifts."""
    flip: bool = True
    """Mirror left and right with probability 1/2."""
    randaugment_layers: int = 0
    """Operations per picture of RandAugment; 0 turns it off."""
    randaugment_magnitude: int = 10
    """Strength of RandAugment, 0-30."""
    eval_resize: int | None = None
    """Test pictures: None squashes them to size; a number resizes the shorter side to it and crops the centre."""
    workers: int = 0
    """Processes that read pictures; 0 reads in the training process."""
    on_error: Literal["raise", "skip"] = "raise"
    """What an unreadable picture does: stop the run, or be left out, named and counted."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.min_area <= 1:
            raise ValueError(f"min_area is {self.min_area}; it is a share of the picture's area, in (0, 1].")
        if (self.crop == "random") != (self.crop_resize is not None):
            raise ValueError(
                f"crop={self.crop!r} with crop_resize={self.crop_resize}: `random` needs a size to resize to before "
                f"it crops, and no other crop uses one."
            )
        if self.randaugment_layers < 0 or not 0 <= self.randaugment_magnitude <= 30:
            raise ValueError(
                f"RandAugment of {self.randaugment_layers} layers at magnitude {self.randaugment_magnitude}: layers "
                f"must be at least 0 and the magnitude within 0-30."
            )
        if self.workers < 0 or self.pad < 0:
            raise ValueError(f"workers={self.workers} and pad={self.pad} must not be negative.")


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser and its schedule (Tables 3 and 4)."""

    name: Literal["adam", "sgd"] = "adam"
    lr: float = 1e-3
    """Base learning rate, reached at the end of the warm-up; for the global batch."""
    beta1: float = 0.9
    beta2: float = 0.999
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 0.0
    """Decoupled: each step takes lr * weight_decay * p off a parameter p."""
    decay_on: Literal["all", "kernels"] = "all"
    """What decays: every parameter, as in the paper's time, or matrices and patch filters only (big_vision)."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = 0
    """Steps over which the rate rises linearly from 0."""
    cooldown_steps: int = 0
    """Last steps over which the rate falls linearly to 0, on top of the schedule."""
    end_lr: float = 0.0
    """Rate at the last step of a linear schedule (1e-5 in Google's code)."""
    clip_norm: float | None = None
    """Largest global norm of the gradient; None does not clip."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("lr", "weight_decay", "end_lr", "warmup_steps", "cooldown_steps"):
            if not getattr(self, name) >= 0 or math.isinf(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more, and finite.")
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must lie in [0, 1).")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm is {self.clip_norm}; give a positive norm, or None not to clip.")


@dataclass(frozen=True)
class TrainConfig:
    """One run, whole: the same config and the same data give the same weights."""

    model: ModelConfig = field(default_factory=ViTConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    loss: Literal["softmax", "sigmoid"] = "softmax"
    label_smoothing: float = 0.0
    """Softmax: the share spread over all classes. Sigmoid: targets become 1 - s and s."""
    mixup: float = 0.0
    """Parameter of mixup's Beta distribution; 0 turns it off."""
    steps: int | None = None
    """Updates to make; give either this or `epochs`."""
    epochs: float | None = None
    """Passes over the training split; steps = round(epochs * examples / batch_size)."""
    batch_size: int = 4096
    """Pictures per update, over all devices and micro-batches."""
    microbatch: int | None = None
    """Most pictures that go through the model at once; gradients are summed up to `batch_size`."""
    average_decay: float | None = None
    """Polyak averaging: the averaged weights keep this share of themselves at each step (0.9999, Sec. 4.1)."""
    precision: Literal["auto", "float32", "autocast", "bfloat16"] = "auto"
    """`bfloat16` keeps float32 weights and one bfloat16 copy of them a step; `autocast` casts at each use; `auto`
    takes bfloat16 on a CPU with matrix units for it, autocast on a GPU, else float32."""
    compile: bool = False
    """Compile the model with torch.compile."""
    seed: int = 0
    log_every: int = 50
    """Steps between records in metrics.jsonl."""
    eval_every: int | None = None
    """Steps between evaluations; None evaluates only at the end."""
    checkpoint_every: int = 1000
    """Steps between checkpoints."""
    keep_checkpoints: int = 2
    """How many of the last checkpoints stay on disk."""

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"steps={self.steps} and epochs={self.epochs}: give exactly one of them.")
        for name in ("steps", "epochs", "batch_size", "microbatch", "log_every", "eval_every", "checkpoint_every",
                     "keep_checkpoints"):  # fmt: skip
            given = getattr(self, name)
            if given is not None and not 0 < given < math.inf:
                raise ValueError(f"{name} is {given}; it must be positive and finite.")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must be 0 or more, and below 2**63.")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing is {self.label_smoothing}; it must lie in [0, 1).")
        if not 0 <= self.mixup < math.inf:
            raise ValueError(f"mixup is {self.mixup}; it must be 0 (off) or a positive Beta parameter.")
        if self.average_decay is not None and not 0 < self.average_decay < 1:
            raise ValueError(f"average_decay is {self.average_decay}; it must lie in (0, 1), or be None.")

    def total_steps(self, examples: int) -> int:
        """Updates for a training split of so many examples."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(1, round(self.epochs * examples / self.batch_size))
